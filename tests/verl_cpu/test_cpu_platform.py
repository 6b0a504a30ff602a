"""The CPU platform: what ``import verl`` registers with and without VERL_PLATFORM=cpu, and a weight reload into vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grail_advantage.verl_cpu.checks import check_config
from tests import forked
from tests.composed import compose

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
def test_import_verl_registers_everything_on_cpu_and_nothing_elsewhere() -> None:
    assert run_python("-c", PROBE, VERL_PLATFORM="cpu") == {
        "platforms": ["amd", "cpu", "huawei", "nvidia"],
        "rollout": "grail_advantage.verl_cpu.rollout",
        "process_group": "verl.utils.distributed:patches.py",
        "vllm_imported": False,
    }
    assert run_python("-c", PROBE) == {
        "platforms": ["amd", "huawei", "nvidia"],
        "rollout": "verl.workers.rollout.replica",
        "process_group": "verl.utils.distributed:distributed.py",
        "vllm_imported": False,
    }


BEHAVIOUR = """
import json, os
import torch
import verl
from grail_advantage import verl_cpu as cpu
from verl.utils import device, distributed

before = distributed.initialize_global_process_group_ray
cpu.install()
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
os.environ["DIST_INIT_METHOD"] = "file://" + os.environ["RENDEZVOUS"]
distributed.initialize_global_process_group_ray()
total = torch.tensor([3.0], device=device.get_device_id())
torch.distributed.all_reduce(total, op=torch.distributed.ReduceOp.AVG)

from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from verl.workers.engine import EngineRegistry

layer = torch.nn.Linear(2, 2)
weight = layer.weight.detach().clone()
wrapped = FullyShardedDataParallel(layer, device_id=device.get_device_id(), sync_module_states=True)
with FullyShardedDataParallel.summon_full_params(wrapped):
    same = bool(torch.equal(wrapped.weight.view(2, 2), weight))

free, whole = device.get_torch_device().mem_get_info()
print("PROBE" + json.dumps({
    "platform": type(device.get_platform()).__name__,
    "installed_once": distributed.initialize_global_process_group_ray is before,
    "backend": torch.distributed.get_backend(),
    "all_reduce": total.item(),
    "moved_to": str(torch.zeros(1).to(device.get_device_id()).device),
    "device_string": str(torch.device(f"{device.get_device_name()}:{device.get_device_id()}")),
    "engines": [EngineRegistry.get_engine_cls("language_model", name).__name__ for name in ("fsdp", "fsdp2")],
    "fsdp1_keeps_weights": same,
    "memory_in_order": 0 < free <= whole,
    "kept": os.environ["VLLM_CPU_KVCACHE_SPACE"],
    "defaulted": os.environ["VLLM_CPU_OMP_THREADS_BIND"],
}))
"""


@pytest.mark.slow
def test_platform_behaves_as_verl_needs(tmp_path: Path) -> None:
    seen = run_python(
        "-c", BEHAVIOUR, VERL_PLATFORM="cpu", RENDEZVOUS=str(tmp_path / "rendezvous"), VLLM_CPU_KVCACHE_SPACE="7"
    )
    assert seen == {
        "platform": "CpuPlatform",
        "installed_once": True,
        "backend": "cpu:gloo",
        "all_reduce": 3.0,
        "moved_to": "cpu",
        "device_string": "cpu:0",
        "engines": ["FSDPEngineWithLMHead", "FSDPEngineWithLMHead"],
        "fsdp1_keeps_weights": True,
        "memory_in_order": True,
        "kept": "7",
        "defaulted": "nobind",
    }


def _check(*overrides: str) -> None:
    config = compose("cpu_trainer", overrides)
    check_config(config, config.trainer.v1.trainer_mode)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("trainer.v1.trainer_mode=colocate_async", "trainer.v1.trainer_mode=colocate_async .*custom_sampler"),
        ("actor_rollout_ref.model.lora_rank=8", "lora.merge"),
        ("actor_rollout_ref.model.lora.rank=4", "lora.merge"),
        ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.enable"),
        ("trainer.v1.sampler.sync_refill_failed_groups=True", "sync_refill_failed_groups"),
    ],
)
def test_what_the_platform_cannot_do_is_refused(override: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        _check(override)


def test_everything_else_is_accepted() -> None:
    _check()
    _check("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.merge=True")
    _check("actor_rollout_ref.actor.use_kl_loss=True", "algorithm.use_kl_in_reward=True")
    sampler = "trainer.v1.sampler.custom_sampler"
    _check("algorithm.filter_groups.enable=True", f"{sampler}.path=null", f"{sampler}.name=null")


@pytest.mark.slow
@pytest.mark.parametrize("embeddings", ["tied", "untied"])
def test_weights_reach_vllm(tmp_path: Path, embeddings: str) -> None:
    """vLLM's log-probabilities follow the trainer's model through two transfers of several buckets each."""
    seen = run_python("-m", "tests.verl_cpu.cpu_reload_run", embeddings, str(tmp_path), **forked.ENVIRONMENT)
    assert seen["bytes"] > 2 * 2**20
    loaded, *updates = seen["rounds"]
    assert loaded["error"] < 1e-4
    assert len(updates) == 2
    for update in updates:
        assert update["moved"] > 0.1
        assert update["error"] < 1e-4
