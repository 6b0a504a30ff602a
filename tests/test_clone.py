"""Tests run in an empty folder, and one that leaves something in the clone is noticed."""

import os
from pathlib import Path

from tests.clone import ROOT, changed, files
from tests.composed import compose


def test_nothing_of_the_clone_or_at_home_is_in_reach():
    """Relative paths, home, caches and the folders of runs lead into a folder that no earlier run has seen."""
    away = Path.cwd()
    assert not away.is_relative_to(ROOT)
    assert not (away / "outputs").exists()
    assert all(
        Path(os.environ[name]).is_relative_to(away)
        for name in ("HOME", "PWD", "HF_HOME", "XDG_CACHE_HOME")
    )
    for name in ("grail_trainer", "cpu_trainer"):
        assert Path(compose(name).run.folder).is_relative_to(away)


def test_what_a_test_leaves_is_named(tmp_path):
    """A source that an editor saves meanwhile, and a tool's cache, are not."""
    for name in ("outputs/run/metrics.jsonl", "data/a.parquet", "recipe/rules.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    (tmp_path / "data/broken").symlink_to("/nowhere")
    earlier = files(tmp_path)
    assert changed(earlier, files(tmp_path)) == []
    (tmp_path / "data/a.parquet").unlink()
    for name in ("outputs/run/metrics.jsonl", "recipe/rules.py"):
        os.utime(tmp_path / name, ns=(0, 1))
    for name in ("seen/page.html", "recipe/__pycache__/rules.pyc"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    changes = changed(earlier, files(tmp_path))
    assert changes == [
        "data/a.parquet (gone)",
        "outputs/run/metrics.jsonl (changed)",
        "seen/page.html (new)",
    ]
