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


@pytest.fixture(scope="module")
def site_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with the wheel, built from a copy because setuptools leaves its build folder next to the source."""
    folder = tmp_path_factory.mktemp("environment")
    for name in ("grail_advantage", "recipe", "bench"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "-qq", "--no-deps", "--no-index"]
    wheel = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "-w", folder]
    subprocess.run([*wheel, folder / "source"], check=True)
    subprocess.run([*pip, *folder.glob("*.whl")], check=True)
    (found,) = folder.glob("lib/python3*/site-packages")
    # Its .pth files, with the editable installation in them, are not read.
    (found / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return found


def run(site_packages: Path, folder: Path, *words: str | Path) -> str:
    """A module's output, started outside the clone."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VERL_PLATFORM")}
    command = [site_packages.parents[2] / "bin/python", "-m", *words]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (words, done.stderr[-3000:])
    return done.stdout


def test_the_commands_of_an_installed_package(site_packages: Path, tmp_path: Path) -> None:
    """Those of docs/works_with.md#extras; the page has its parts in it, and the wheel has no other package."""
    packages = {"grail_advantage", f"grail_advantage-{grail_advantage.__version__}.dist-info", "others.pth"}
    assert {path.name for path in site_packages.iterdir()} == packages
    assert all((site_packages / "grail_advantage" / name).exists() for name in ("py.typed", "reward/_verify_worker.py"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "data": {"critic/score/mean": 0.5}}\n')
    for words in (("analyze", "--help"), ("receipt", "--help"), ("report", "run")):
        run(site_packages, tmp_path, f"grail_advantage.{words[0]}", words[1])
    assert "DecompressionStream" in (tmp_path / "run/report.html").read_text(encoding="utf-8")


def test_the_file_of_all_options_is_installed(site_packages: Path, tmp_path: Path) -> None:
    """And found by verl's own command with a configuration of one's own."""
    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: [pkg://verl/trainer/config, pkg://grail_advantage/verl_ext/config]}\n"
        "defaults: [ppo_trainer, token_weights, _self_]\nalgorithm: {adv_estimator: grail}\n"
    )
    options = (f"--config-path={tmp_path}", "--config-name=mine", "algorithm.grail.leaf=last", "--cfg", "job")
    printed = run(site_packages, tmp_path, "verl.trainer.main_ppo", *options)
    assert Settings.parse(OmegaConf.create(printed)).method.leaf == "last"
