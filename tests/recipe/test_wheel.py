"""The wheel, installed in a fresh environment: what is in it, and that verl's users can start with it.

The environment has the wheel alone; everything else comes from the tests' environment after it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import grail_advantage
from grail_advantage.verl_ext.settings import Settings

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.nightly


def test_an_installed_package(tmp_path: Path) -> None:
    """Its commands of docs/works_with.md#extras, a page with its parts in it, no other package; and verl's own command
    finds the file of all options with a configuration of one's own. setuptools leaves its build folder next to the
    source, hence the copy."""
    for name in ("grail_advantage", "recipe", "bench"):
        shutil.copytree(
            ROOT / name, tmp_path / "source" / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "source")
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VERL_PLATFORM")
    }

    def run(python: Path | str, module: str, *words: str | Path) -> str:
        command = [python, "-m", module, *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, (words, done.stderr[-3000:])
        return done.stdout

    run(sys.executable, "venv", "--without-pip", "its")
    run(
        sys.executable,
        "pip",
        "wheel",
        "-qq",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        "wheels",
        tmp_path / "source",
    )
    (wheel,) = tmp_path.glob("wheels/*.whl")
    run(
        sys.executable,
        "pip",
        "--python",
        "its/bin/python",
        "install",
        "-qq",
        "--no-deps",
        "--no-index",
        wheel,
    )
    (packages,) = tmp_path.glob("its/lib/python3*/site-packages")
    names = {"grail_advantage", f"grail_advantage-{grail_advantage.__version__}.dist-info"}
    assert {path.name for path in packages.iterdir()} == names
    assert all(
        (packages / "grail_advantage" / name).exists()
        for name in ("py.typed", "reward/_verify_worker.py")
    )
    # Its .pth files, with the editable installation in them, are not read.
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "data": {"critic/score/mean": 0.5}}\n')
    for module, word in (("analyze", "--help"), ("receipt", "--help"), ("report", "run")):
        run(tmp_path / "its/bin/python", f"grail_advantage.{module}", word)
    assert "DecompressionStream" in (tmp_path / "run/report.html").read_text(encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: [pkg://verl/trainer/config, pkg://grail_advantage/verl_ext/config]}\n"
        "defaults: [ppo_trainer, token_weights, _self_]\nalgorithm: {adv_estimator: grail}\n"
    )
    options = (
        f"--config-path={tmp_path}",
        "--config-name=mine",
        "algorithm.grail.leaf=last",
        "--cfg",
        "job",
    )
    printed = run(tmp_path / "its/bin/python", "verl.trainer.main_ppo", *options)
    assert Settings.parse(OmegaConf.create(printed)).method.leaf == "last"
