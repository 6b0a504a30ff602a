"""``compare``: intervals against SciPy's, pairs by seed, the faults that it names."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from grail_advantage import compare

STEPS = (4, 8, 12)
METRIC = "val-core/tiny/acc/mean@4"
# Two sides with four seeds each.
VALUES = np.random.default_rng(0).normal(size=(2, 4, len(STEPS)))


def write_run(path: Path, values: np.ndarray, *, form: str = "metrics.jsonl") -> str:
    """Write a run whose metric has these values at :data:`STEPS`, in a form of this project's, verl's or TRL's."""
    figures = {
        step: {METRIC: value} for step, value in zip(STEPS, values.tolist(), strict=True)
    }
    # verl writes beside the run's folder.
    file = Path(f"{path}.jsonl") if form == ".jsonl" else path / form
    lines = [{"step": step, "data": data} for step, data in figures.items()]
    text = "\n".join(map(json.dumps, lines))
    if form == "trainer_state.json":
        file = path / "checkpoint-12" / form
        text = json.dumps(
            {"log_history": [{"step": step, **figures[step]} for step in STEPS]}
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return str(path)


@pytest.mark.parametrize("form", ["metrics.jsonl", ".jsonl", "trainer_state.json"])
def test_the_table_is_scipys(tmp_path, form, capsys):
    sides = []
    for name, runs in zip(("grail", "uniform"), VALUES, strict=True):
        paths = [tmp_path / f"seed{seed}" / name for seed in range(4)]
        sides.append([write_run(*run, form=form) for run in zip(paths, runs, strict=True)])
    # Pairs are told by their seeds, in whatever order.
    page = tmp_path / "page.html"
    assert compare.main([*sides[0], "--against", *sides[1][::-1], "--page", str(page)]) == 0
    shown = capsys.readouterr().out
    for step, grail, uniform in zip(STEPS, *VALUES.swapaxes(1, 2), strict=True):
        low, high = stats.ttest_rel(grail, uniform).confidence_interval()
        row = [f"{(grail - uniform).mean():+.4g}", f"[{low:.4g}, {high:.4g}]"]
        row += [f"{grail.mean():.4g}", f"{uniform.mean():.4g}"]
        assert f"{step} {' '.join(row)}" in " ".join(shown.split())
        assert all(f"<td>{cell}</td>" in page.read_text() for cell in row)


def test_seeds_that_a_difference_takes_are_those_of_the_noncentral_t():
    for seeds in compare.COUNTS:
        distance = compare.smallest_shown(0.3, seeds) / 0.3 * math.sqrt(seeds)
        power = stats.nct.sf(stats.t.ppf(0.975, seeds - 1), seeds - 1, distance)
        assert power == pytest.approx(0.8, abs=0.04)


def test_what_is_no_comparison_is_named(tmp_path, capsys):
    grail = [
        write_run(tmp_path / f"grail-seed{seed}", VALUES[0, seed]) for seed in range(3)
    ]
    uniform = [
        write_run(tmp_path / f"uniform-seed{seed}", VALUES[1, seed]) for seed in range(2)
    ]
    # A run under another name, and one whose name has no seed.
    copy = write_run(tmp_path / "uniform-seed2", VALUES[1, 0])
    other = write_run(tmp_path / "other", VALUES[1, 2])
    for runs, against, words in [
        ([*grail, grail[0]], uniform, "seed 0 twice"),
        (grail, [*uniform, copy], "the same figures at every step"),
        (grail[2:], uniform, "no seed is on both sides"),
        (grail, [other], f"Give SEED={other}"),
        (grail, [*uniform, "--step", "5"], "all have [4, 8, 12]"),
        (grail, [*uniform, "--metric", "no"], "no figures of no"),
        (grail, [str(tmp_path / "seed7")], "holds no metrics"),
    ]:
        assert compare.main([*runs, "--against", *against]) == 1, words
        assert words in capsys.readouterr().err
    assert compare.main([grail[0], "--against", uniform[0], "--window", "2"]) == 0
    shown = capsys.readouterr().out
    assert "One seed each says nothing" in shown
    assert f"{VALUES[0, 0, 1:].mean():.4g}" in shown
    against = ["--against", *uniform]
    assert compare.main([*grail, *against, f"2={other}", *against]) == 0
    assert "seeds 2." in capsys.readouterr().out
