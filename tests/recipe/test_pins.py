"""requirements.txt, installed by ``scripts/setup_gpu.sh`` and imported together on a machine without a GPU.

That downloads 5 GB and takes 10 GB of disk, so it runs where it is asked for: ``GPU_PINS=1`` makes an environment,
``GPU_PINS=PYTHON`` takes that of an interpreter. flash-attn is left out: it has no wheel on PyPI.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.recipe.test_requirements import ROOT

ASKED = os.environ.get("GPU_PINS", "")
MODULES = (
    "torch transformers ray vllm tensordict transfer_queue flashinfer peft grail_advantage.verl_ext recipe.run_life.trainer "
    "verl.trainer.main_ppo vllm.v1.engine.async_llm verl.workers.rollout.vllm_rollout.vllm_async_server"
)


@pytest.mark.slow
@pytest.mark.skipif(not ASKED, reason="by hand: GPU_PINS=1")
def test_the_gpu_environment_imports_and_resolves_a_configuration(tmp_path: Path) -> None:
    python = ASKED
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if ASKED == "1":
        python = str(tmp_path / "bin/python")
        subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
        knobs = {"PYTHON": python, "ANY_MACHINE": "1", "FLASH_ATTN": "none"}
        subprocess.run(["bash", "scripts/setup_gpu.sh"], cwd=ROOT, env={**environment, **knobs}, check=True)
    imports = f"import importlib\nfor name in '{MODULES}'.split(): importlib.import_module(name)"
    subprocess.run([python, "-c", imports], cwd=ROOT, env=environment, check=True)
    command, dry = ["bash", "examples/run_qwen3_grail.sh"], {**environment, "PYTHON": python, "DRY_RUN": "1"}
    done = subprocess.run(command, cwd=ROOT, env=dry, stdout=subprocess.PIPE, text=True, check=True)
    config = yaml.safe_load(done.stdout)
    assert config["algorithm"]["adv_estimator"] == "grail" and config["trainer"]["n_gpus_per_node"] == 8
