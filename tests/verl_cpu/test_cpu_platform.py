"""The CPU platform: ``import verl`` registers nothing of it without VERL_PLATFORM=cpu, and a weight reload into vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROBE = """
import json, sys
import verl
vllm_imported = "vllm" in sys.modules

from verl.plugin.platform import PlatformRegistry
from verl.utils import distributed
from verl.workers.rollout.replica import RolloutReplicaRegistry

registered = {
    "platforms": sorted(PlatformRegistry.registered_names()),
    "rollout": RolloutReplicaRegistry._registry["vllm"].__module__,
    "process_group": distributed.initialize_global_process_group_ray.__module__ + ":"
        + distributed.initialize_global_process_group_ray.__code__.co_filename.rsplit("/", 1)[-1],
    "vllm_imported": vllm_imported,
}
import recipe.run_life.trainer

registered["of this package"] = sorted(name for name in sys.modules if name.split(".")[0] == "verl_cpu")
print("PROBE" + json.dumps(registered))
"""


def run_python(*arguments: str, **environment: str) -> dict[str, Any]:
    """Run a new interpreter with ``arguments`` and return what it printed behind the word PROBE."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("VERL_", "VLLM_"))}
    variables = {**inherited, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("PROBE"))[5:])


@pytest.mark.slow
def test_nothing_of_it_is_used_on_other_platforms() -> None:
    """By verl, and by the recipe. What it registers on the CPU, every whole run of the tests needs."""
    assert run_python("-c", PROBE) == {
        "platforms": ["amd", "huawei", "nvidia"],
        "rollout": "verl.workers.rollout.replica",
        "process_group": "verl.utils.distributed:distributed.py",
        "vllm_imported": False,
        "of this package": ["verl_cpu", "verl_cpu.plugin"],
    }
