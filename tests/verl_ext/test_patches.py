"""The reasons of all patches still hold: verl's code has what each of them answers. Where one fails, its patch can go."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import verl.trainer.main_ppo
import verl.trainer.ppo.v1.trainer_base
import verl.trainer.ppo.v1.utils
import verl.utils.fsdp_utils
import verl.workers.engine_workers
from verl.single_controller.base.worker_group import WorkerGroup
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from grail_advantage.verl_ext import patches

REASONS: dict[Callable, tuple[Any, str]] = {
    patches.wrap_entry: (verl.trainer.main_ppo, "configure_verl_logging()"),
    patches.set_trainer_mode: (
        verl.trainer.ppo.v1.trainer_base,
        'if self.trainer_mode == "sync" else ReplayBufferAsync',
    ),
    patches.estimator_named: (verl.trainer.ppo.v1.utils, "if adv_estimator != core_algos.AdvantageEstimator.GRPO:"),
    patches.without_rollout_correction: (
        verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_advantage,
        'rollout_corr_config is not None and "rollout_log_probs" in data.batch and not bypass_recomputing_logprobs',
    ),
    patches.replace_infer_batch: (verl.workers.engine_workers.TrainingWorker, "self.engine.infer_batch("),
    patches.autocast: (FSDPEngine, "self._autocast_dtype = param_dtype"),
    patches.gather_packed: (
        FSDPEngine,
        "def _gather_and_unpad_packed(self, tensor: torch.Tensor, pad_size: int)",
    ),
    patches.data_parallel_size: (WorkerGroup, "self._dispatch_info = {}"),
    patches.copy_saved_shards: (verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu, ".cpu()"),
}


@pytest.mark.parametrize("patch", REASONS, ids=lambda patch: patch.__name__)
def test_verl_still_has_the_line_that_a_patch_answers(patch: Callable) -> None:
    place, line = REASONS[patch]
    assert line in inspect.getsource(place)
    assert "Can go when" in " ".join(patch.__doc__.split())


def test_every_patch_has_its_reason() -> None:
    functions = {function for _, function in inspect.getmembers(patches, inspect.isfunction)}
    own = {function for function in functions if function.__module__ == patches.__name__}
    assert own - {patches.entry_is_wrapped} == set(REASONS)


def test_saved_shards_no_longer_share_memory_with_the_policy() -> None:
    weight = torch.zeros(2)
    saved = {0: ({"weight": (weight.cpu(), "spec")}, "global")}
    weight += 1
    assert saved[0][0]["weight"][0].tolist() == [1, 1], "a copy by .cpu() is none in host memory"
    patches.copy_saved_shards(saved, 0)
    weight += 1
    assert saved == {0: ({"weight": (saved[0][0]["weight"][0], "spec")}, "global")}
    assert saved[0][0]["weight"][0].tolist() == [1, 1]
