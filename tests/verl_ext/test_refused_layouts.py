"""Refused cells of docs/compatibility.md that no other test raises."""

from __future__ import annotations

import re

import pytest
import verl  # noqa: F401  its plugin registers the estimators

import recipe.main_grail  # noqa: F401  stores the methods' sections
from grail_advantage.verl_ext import checks
from tests.composed import compose

ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))
MODE, CORRECTION = "trainer.v1.trainer_mode", "algorithm.rollout_correction"
DOES_NOT = "does not work with algorithm.adv_estimator="
FUSED = (f"{MODEL}.use_fused_kernels=True", f"{ACTOR}.strategy=fsdp")
SEPARATE = (
    f"{MODE}=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    f"{ACTOR}.ppo_mini_batch_size=16",
)
SEPARATE += (f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=1", f"{ROLLOUT}.checkpoint_engine.backend=nccl")
SEPARATE += ("trainer.v1.sampler.custom_sampler.path=null", "trainer.v1.sampler.custom_sampler.name=null")
METHOD = "algorithm.adv_estimator="

ANYWHERE = {
    "fused kernels and logits": ((*FUSED, f"{METHOD}oar_g"), f"{MODEL}.use_fused_kernels=True {DOES_NOT}oar_g"),
    "bypass and entropy": (
        (f"{CORRECTION}.bypass_mode=True", f"{METHOD}entropy"),
        f"{CORRECTION}.bypass_mode=True {DOES_NOT}entropy",
    ),
    "entropy in bf16 without chunks": (
        (f"{ACTOR}.entropy_from_logits_with_chunking=False", f"{METHOD}high_entropy"),
        f"{ACTOR}.entropy_from_logits_with_chunking=False {DOES_NOT}high_entropy",
    ),
}
ON_THE_CPU = {
    "adapter in the rollout": ((f"{MODEL}.lora_rank=8",), "a LoRA rank of 8 needs an adapter in the rollout"),
    "triton": (
        (f"{MODEL}.use_fused_kernels=True", f"{MODEL}.fused_kernel_options.impl_backend=triton"),
        f"{MODEL}.fused_kernel_options.impl_backend=triton has no kernel for the CPU",
    ),
    "checkpoint engine": (SEPARATE, f"{ROLLOUT}.checkpoint_engine.backend=nccl needs an accelerator; set it to host"),
    "asynchronous": ((f"{MODE}=colocate_async",), f"{MODE}=colocate_async does not work with PollingReplayBuffer"),
    "group filtering": (
        ("algorithm.filter_groups.enable=True",),
        "algorithm.filter_groups.enable=True has no effect with PollingReplayBuffer",
    ),
}


@pytest.mark.parametrize("cell", [*ANYWHERE, *ON_THE_CPU])
def test_refused_with_its_message(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides, message = (ANYWHERE | ON_THE_CPU)[cell]
    monkeypatch.setenv("VERL_PLATFORM", "cpu") if cell in ON_THE_CPU else monkeypatch.delenv("VERL_PLATFORM", False)
    config = compose("cpu_trainer" if cell in ON_THE_CPU else "grail_trainer", [f"{ROLLOUT}.n=4", *overrides])
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        checks.check_config(config)
