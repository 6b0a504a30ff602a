"""A reward function that writes down its surroundings, starts a detached child, and loses an actor of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import ray

from tests.verl_ext import parity_reward

FOLDER = "OBSERVED_FOLDER"
"""Environment variable with the folder to write to."""
CHILD_SECONDS = 20
_observed = False


class _Mortal:
    def die(self) -> None:
        os._exit(1)


def compute_score(*args, **kwargs):
    """The reward of ``parity_reward``."""
    global _observed
    if not _observed:
        _observed = True
        _observe(Path(os.environ[FOLDER]))
    return parity_reward.compute_score(*args, **kwargs)


def _observe(folder: Path) -> None:
    driver = psutil.Process().parent().parent()  # of the server of forks
    titles = {_title(process) for process in driver.children(recursive=True)}
    (folder / "observed.json").write_text(json.dumps({"environment": sorted(os.environ), "processes": sorted(titles)}))
    child = f"import time, pathlib; time.sleep({CHILD_SECONDS}); pathlib.Path({str(folder / 'uploaded')!r}).touch()"
    # Ray kills the children of a worker that ends; one of another parent and session is out of its reach.
    subprocess.run(["setsid", "--fork", sys.executable, "-c", child], check=True)
    try:
        ray.get(ray.remote(_Mortal).options(num_cpus=0).remote().die.remote())
    except ray.exceptions.RayActorError:
        (folder / "died").touch()


def _title(process: psutil.Process) -> str:
    """The name of a process without numbers; that of a Ray worker without what it does at the moment."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    name = words[0].split("(")[0] if words and words[0].startswith("ray::") else Path(process.name()).name
    return re.sub(r"[0-9]+|\.\w+$", "", name)
