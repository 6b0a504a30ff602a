"""The wheel, installed in a fresh environment: what is in it, and that verl's users can start with it.

The environment has the wheel alone; everything else comes from the tests' environment after it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import grail_advantage
from grail_advantage.verl_ext.checks import VERL_VERSION, check_config
from grail_advantage.verl_ext.rules import choose_skipping
from grail_advantage.verl_ext.settings import Settings

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because setuptools leaves its build folder next to the source."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("grail_advantage", "recipe", "bench"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "-w", folder, source]
    subprocess.run(command, check=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "-qq", "--no-deps", "--no-index", wheel]
    subprocess.run(command, check=True)
    (site_packages,) = folder.glob("lib/python3*/site-packages")
    # Its .pth files, with the editable installation in them, are not read.
    (site_packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python


def run(folder: Path, *command: str | Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VERL_PLATFORM")}
    environment |= {"OMP_NUM_THREADS": "1", "HYDRA_FULL_ERROR": "1", **variables}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_content(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = Parser().parsestr(archive.read(next(n for n in names if n.endswith("/METADATA"))).decode())
    folders = {name.split("/")[0] for name in names}
    assert folders == {"grail_advantage", f"grail_advantage-{grail_advantage.__version__}.dist-info"}
    assert {"grail_advantage/py.typed", "grail_advantage/reward/_verify_worker.py"} <= set(names)
    assert metadata["Version"] == grail_advantage.__version__


def test_the_folder_in_verls_form(python: Path, tmp_path: Path) -> None:
    """Copied to where verl's users have such folders, with the installed wheel."""
    theirs = tmp_path / "verl/recipe/grail"
    shutil.copytree(ROOT / "examples/verl_recipe/grail", theirs)
    assert f"verl=={VERL_VERSION}" in (theirs / "REQUIRED_VERL.txt").read_text()
    words = ("trainer.n_gpus_per_node=2", "--cfg", "job", "--resolve")
    said = run(tmp_path, "bash", theirs / "run_qwen3_4b_fsdp.sh", *words, PYTHON=str(python))
    config = OmegaConf.create(said)
    assert config.trainer.n_gpus_per_node == 2
    settings = Settings.parse(config)
    assert settings.signal.name == "grail" and choose_skipping(settings)[0].skip_update and settings.dump.every == 10
    check_config(config)
