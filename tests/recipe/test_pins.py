"""The exact pins of requirements.txt, installed by ``scripts/setup_gpu.sh`` and imported together on a machine without a GPU.

That downloads 5 GB and takes 10 GB of disk, so it runs where it is asked for: ``GPU_PINS=1`` makes an environment,
``GPU_PINS=PYTHON`` takes that of an interpreter. flash-attn is left out: it has no wheel on the package index.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import yaml

from tests.recipe.test_requirements import ROOT, pins

ASKED = os.environ.get("GPU_PINS")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(ASKED is None, reason="by hand: GPU_PINS=1")]
MODULES = (
    *("torch", "transformers", "ray", "vllm", "verl", "tensordict", "transfer_queue", "flashinfer", "peft"),
    *("grail_advantage.verl_ext", "recipe.main_grail", "verl.trainer.main_ppo", "vllm.v1.engine.async_llm"),
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
)
IMPORTS = """
import importlib, sys
from importlib.metadata import version
for name in sys.argv[1].split(","):
    importlib.import_module(name)
import torch
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
assert "grail" in ADV_ESTIMATOR_REGISTRY and not torch.cuda.is_available()
print("found:", *(f"{name}=={version(name)}" for name in sys.argv[2].split(",")))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of an environment with the pins and this project."""
    assert ASKED is not None
    if ASKED != "1":
        return ASKED
    folder = tmp_path_factory.mktemp("pins")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    environment = {**os.environ, "PYTHON": str(folder / "bin/python"), "ANY_MACHINE": "1", "FLASH_ATTN": "none"}
    subprocess.run(["bash", "scripts/setup_gpu.sh"], cwd=ROOT, env=environment, check=True)
    return str(folder / "bin/python")


def outside(**more: str) -> dict[str, str]:
    """This process's environment without what makes another Python see this one's packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more


def test_imports_together(python: str) -> None:
    locked = pins(ROOT / "requirements.txt")
    names = ("torch", "transformers", "ray", "vllm", "verl", "transferqueue", "flashinfer-python")
    command = [python, "-c", IMPORTS, ",".join(MODULES), ",".join(names)]
    done = subprocess.run(command, cwd=ROOT, env=outside(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = [line for line in done.stdout.splitlines() if line.startswith("found: ")]
    assert found == "found: " + " ".join(f"{name}=={locked[name]}" for name in names)


def test_a_launch_script_resolves_its_configuration(python: str) -> None:
    command = ["bash", "examples/run_qwen3_grail.sh"]
    done = subprocess.run(command, cwd=ROOT, env=outside(PYTHON=python, DRY_RUN="1"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    config = yaml.safe_load(done.stdout)
    assert config["algorithm"]["adv_estimator"] == "grail" and config["trainer"]["n_gpus_per_node"] == 8
