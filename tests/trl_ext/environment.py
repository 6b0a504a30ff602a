"""Processes that have TRL on their path. verl 0.9.1 does not start where it can import TRL, so everything with TRL runs in
them. By hand: ``PYTHONPATH=.venv/trl .venv/bin/python -m pytest tests/trl_ext/core_checks.py``."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEWEST = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["trl"]
"""The newest TRL, the newest transformers, and what this one needs newer than verl's."""
OLDEST = ["trl==1.15.0"]
"""The oldest TRL, with verl's transformers."""
QUIET = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GLOO_SOCKET_IFNAME": "lo",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "disabled",
}
"""Nothing is sent anywhere, and nothing fetched."""
TIMEOUT = 3600


def trl_folder(packages: list[str]) -> Path:
    """A folder with these packages alone, kept beside the environment's packages."""
    name = "trl" if packages == NEWEST else f"trl-{packages[0].split('==')[1]}"
    folder = Path(sys.prefix) / name
    names = [
        f"{package.replace('-', '_').replace('==', '-')}.dist-info" for package in packages
    ]
    if not all((folder / name).exists() for name in names):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--target", folder, *packages], check=True, timeout=TIMEOUT)
    return folder


def check(packages: list[str], *names: str):
    """Run the checks of these files in one process, with these packages on its path, and see that none was skipped."""
    files = [f"tests/trl_ext/{name}_checks.py" for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        # This process stays without TRL.
        env={**os.environ, **QUIET, "PYTHONPATH": str(trl_folder(packages))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
    )
    output = done.stdout
    assert done.returncode == 0 and "skipped" not in output, output[-20_000:]
    assert all(re.search(rf"^{file} \.", output, re.MULTILINE) for file in files), output
