"""The wheel, installed into an empty folder: what is in it, and that verl's users can start with it."""

import os
import shutil
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

import grail_advantage
from grail_advantage.verl_ext.settings import Settings
from tests.clone import ROOT

pytestmark = pytest.mark.nightly


def test_an_installed_package(tmp_path):
    """Its commands of docs/works_with.md#extras, a page with its parts in it, no other package; and verl's own command
    finds the file of all options with a configuration of one's own."""
    # setuptools leaves its build folder next to the source, hence the copy.
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("grail_advantage", "recipe", "bench"):
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    installed = tmp_path / "installed"
    # The folder comes before everything that the tests' environment has, with its editable installation.
    variables = {**os.environ, "PYTHONPATH": str(installed)}

    def run(*words):
        command = [sys.executable, "-P", "-m", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True
        )
        assert done.returncode == 0, (words, done.stderr[-3000:])
        return done.stdout

    options = "-qq --no-deps --no-build-isolation"
    run("pip", "install", *options.split(), "-t", installed, source)
    names = {"grail_advantage", f"grail_advantage-{grail_advantage.__version__}.dist-info"}
    assert {path.name for path in installed.iterdir()} == names
    for name in ("py.typed", "reward/_verify_worker.py"):
        assert (installed / "grail_advantage" / name).exists()
    metrics = tmp_path / "run/metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text('{"step": 1, "data": {"critic/score/mean": 0.5}}\n')
    for module, word in (("analyze", "--help"), ("receipt", "--help"), ("report", "run")):
        run(f"grail_advantage.{module}", word)
    assert "DecompressionStream" in (tmp_path / "run/report.html").read_text(
        encoding="utf-8"
    )
    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: [pkg://verl/trainer/config, pkg://grail_advantage/verl_ext/config]}\n"
        "defaults: [ppo_trainer, token_weights, _self_]\nalgorithm: {adv_estimator: grail}\n"
    )
    options = "--config-name=mine algorithm.grail.leaf=last --cfg job"
    printed = run("verl.trainer.main_ppo", f"--config-path={tmp_path}", *options.split())
    assert Settings.parse(OmegaConf.create(printed)).method.leaf == "last"
