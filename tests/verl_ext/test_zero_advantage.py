"""The trainer's part in leaving out zero-advantage responses: where it does, which get what, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainerSync, trainer_base
from verl.utils.tensordict_utils import get_tensordict

from grail_advantage.dump import DumpOptions, StepDump
from grail_advantage.methods.policy import HighEntropy, Surprisal
from grail_advantage.rules import Obstacle
from grail_advantage.verl_ext.rules import Skipping, choose_skipping
from grail_advantage.verl_ext.settings import SKIP, Settings
from grail_advantage.verl_ext.trainers import TokenWeightTrainer, TokenWeightTrainerSync
from grail_advantage.verl_ext.zero_advantage import CUT_TAILS
from tests.verl_ext import test_one_step
from tests.verl_ext.test_one_step import ROWS, Step

EVERYTHING = Skipping(skip_update=True, cut_tails=True, skip_old_log_probs=True)
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
AGGREGATION = "actor_rollout_ref.actor.loss_agg_mode"


def _settings(choice: Any = "auto", **options: Any) -> Settings:
    config = OmegaConf.create(
        {
            "algorithm": {"adv_estimator": "grail", "token_dump": {"folder": "/somewhere", "every": 10}},
            "actor_rollout_ref": {
                "actor": {"strategy": "fsdp2", "loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 64},
                "model": {},
            },
        }
    )
    for name, value in {SKIP: choice, **options}.items():
        OmegaConf.update(config, name, value, force_add=True)
    return Settings.parse(config)


def test_what_the_model_and_the_trainer_have_against_it() -> None:
    """Settings are in ``tests/test_rules.py``."""
    against = [Obstacle("attention_dropout=0.1 of the model", "it draws")]
    assert choose_skipping(_settings(), lambda: against) == (
        Skipping(),
        ["no response is left out with attention_dropout=0.1 of the model: it draws"],
    )
    with pytest.raises(ValueError, match=r"=True does not work with attention_dropout=0.1 of the model: it draws"):
        choose_skipping(_settings(True), lambda: against)
    of_own = choose_skipping(_settings(), own_advantages=True)[0]
    assert of_own == replace(EVERYTHING, skip_old_log_probs=False)
    unset = Settings.parse(OmegaConf.create({"algorithm": {"adv_estimator": "grail"}}))
    assert choose_skipping(unset) == (Skipping(), [])
    for value in ("yes", None):
        with pytest.raises(ValueError, match=rf"^{SKIP}={value!r} is unknown; choose "):
            _settings(value)


def _zero_advantage_step(monkeypatch: pytest.MonkeyPatch, *overrides: str, cls: type = TokenWeightTrainerSync) -> Step:
    """Of which the second prompt's answers are all incorrect."""
    rows = [(key, prompt, response, 0.0 if key[0] == "b" else reward) for key, prompt, response, reward in ROWS]
    monkeypatch.setattr(test_one_step, "ROWS", rows)
    step = Step(monkeypatch, ["actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True", *overrides], cls)
    step.trainer._skipping = choose_skipping(step.trainer.settings)[0]
    step.forwards = []
    compute = step.workers.compute_log_prob

    def compute_log_prob(batch: KVBatchMeta) -> KVBatchMeta:
        step.forwards.append(list(batch.keys))
        return compute(batch)

    step.workers.compute_log_prob = compute_log_prob
    return step


AUTO = f"{SKIP}=auto"
ALONE = "algorithm.token_weights.share_forward=false"
A = ["a_0_0", "a_1_0", "a_2_0"]


class TestOldLogProbs:
    """Of responses whose reward says that they have no advantage."""

    @pytest.mark.parametrize("how", [[], [ALONE]], ids=["shared", "alone"])
    def test_only_rows_with_an_advantage_get_them(self, how: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            whole = _zero_advantage_step(patch, f"{SKIP}=false", *how)
            expected = whole.run()
        step = _zero_advantage_step(monkeypatch, AUTO, *how)
        found = step.run()
        assert [sorted(keys) for keys in step.forwards] == [A]
        assert [sorted(keys) for keys in whole.forwards] == [sorted(expected)]
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        assert step.workers.shared == whole.workers.shared
        for key, row in step.store.rows.items():
            assert row["old_log_probs"].shape == row["entropy"].shape == row["responses"].shape
            assert len(row["log_probs"]) == len(row["prompts"]) + len(row["responses"])
            assert bool(row["old_log_probs"].isnan().all()) == (key not in A)

    def test_others_fill_up_ranks_and_micro_batches_of_fixed_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fixed = ("use_dynamic_bsz=False", "micro_batch_size_per_gpu=2")
        for ranks, overrides in ((2, ()), (1, [f"actor_rollout_ref.rollout.log_prob_{option}" for option in fixed])):
            with monkeypatch.context() as patch:
                step = _zero_advantage_step(patch, AUTO, *overrides)
                step.workers._dispatch_info = {"actor": list(range(ranks))}
                step.run()
                assert [sorted(keys) for keys in step.forwards] == [[*A, "b_0_0"]]  # the shortest

    @pytest.mark.parametrize(("every", "count"), [(1, 6), (2, 3)])
    def test_all_rows_get_them_in_a_step_that_the_dump_writes(
        self, every: int, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        step = _zero_advantage_step(monkeypatch, AUTO)
        step.trainer.global_steps = 1
        dump = StepDump(
            DumpOptions(folder=tmp_path, every=every), step.trainer.tokenizer, updates=1, model="", temperature=1.0
        )
        step.trainer._dump = SimpleNamespace(steps=dump, write=lambda *_, **__: None)
        step.run()
        assert [len(keys) for keys in step.forwards] == [count]

    def test_the_rows_that_a_method_selects_get_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for signal, count in ((Surprisal(), 3), (HighEntropy(), 6)):
            with monkeypatch.context() as patch:
                step = _zero_advantage_step(patch, AUTO)
                step.set_signal(signal)
                step.run()
                assert [len(keys) for keys in step.forwards] == [count]

    def test_a_row_that_trains_after_all_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Shifted(PPOTrainerSync):
            def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
                batch = super()._compute_advantage(batch, metrics)
                data = trainer_base.tq.kv_batch_get(batch.keys, batch.partition_id, ["advantages"])
                fields = TensorDict({"advantages": data["advantages"] + 1}, batch_size=len(batch))
                return trainer_base.tq.kv_batch_put(batch.keys, batch.partition_id, fields)

        class WithTokenWeights(TokenWeightTrainer, Shifted):
            pass

        step = _zero_advantage_step(monkeypatch, AUTO, cls=WithTokenWeights)
        with pytest.raises(
            RuntimeError, match=r"^response b_0_0 had no advantage by its reward, .*own_advantages=True"
        ):
            step.run()


def _update(step: Step, **tags: Any) -> tuple[KVBatchMeta, dict[str, float]]:
    """The batch that the workers get, and the metrics of the update."""
    asked = []

    def update_actor(batch: KVBatchMeta) -> TensorDict:
        asked.append(batch)
        return get_tensordict({}, non_tensor_dict={"metrics": {"actor/mfu": [0.0], "loss": [0.5]}})

    step.workers.update_actor = update_actor
    step.trainer.distillation_config = None
    keys = list(step.store.rows)
    batch = KVBatchMeta(partition_id="train", keys=keys, tags=[{"is_padding": key in tags} for key in keys])
    metrics: dict[str, float] = {}
    assert step.trainer._update_actor(batch, metrics).keys == keys
    return asked[0], metrics


class TestUpdate:
    """The order of its responses, and its figures."""

    MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"

    @pytest.fixture
    def step(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Step]:
        def run(*overrides: str) -> Step:
            step = _zero_advantage_step(monkeypatch, *overrides)
            step.run()
            step.workers._dispatch_info = {"actor": [0, 1]}
            return step

        return run

    def test_every_rank_gets_its_share_of_the_rows_that_train(self, step: Callable[..., Step]) -> None:
        prepared = step(AUTO, f"{self.MINI_BATCH}=2")
        asked, metrics = _update(prepared)
        assert sorted(sum(key in A for key in asked.keys[start : start + 3]) for start in (0, 3)) == [1, 2]
        assert asked.extra_info[CUT_TAILS] is True
        assert asked.extra_info["mini_batch_size"] == asked.extra_info["global_batch_size"] == 6
        left = [
            len(prompt) + len(response.removesuffix("<end>")) + 1 for key, prompt, response, _ in ROWS if key not in A
        ]
        assert metrics["token_weights/skipped_responses"] == 3
        assert metrics["token_weights/skipped_tokens"] == sum(left)
        assert _update(prepared, b_1_0=True)[1]["token_weights/skipped_responses"] == 2, "padding is not counted"

    def test_ends_that_train_nothing_go(self, step: Callable[..., Step]) -> None:
        for mode, cut in (("token-mean", 5), ("seq-mean-token-mean", 0)):
            prepared = step(AUTO, f"{self.MINI_BATCH}=2", f"{AGGREGATION}={mode}")
            _, whole = _update(prepared)
            of_batch = prepared.trainer._step
            trained = [
                length - 5 * (key == "a_1_0") for key, length in zip(of_batch.keys, of_batch.trained, strict=True)
            ]
            prepared.trainer._step = replace(of_batch, trained=trained)
            asked, metrics = _update(prepared)
            assert metrics["token_weights/skipped_tokens"] - whole["token_weights/skipped_tokens"] == cut
            assert asked.extra_info[CUT_TAILS] is (cut > 0)

    def test_the_order_stays_where_verl_shuffles_and_without_the_option(self, step: Callable[..., Step]) -> None:
        for override in (f"{SKIP}=false", AUTO):
            shuffled = "actor_rollout_ref.actor.shuffle=True"
            asked, metrics = _update(step(override, f"{self.MINI_BATCH}=2", *([shuffled] if override == AUTO else [])))
            assert asked.keys == [key for key, *_ in ROWS]
            assert (CUT_TAILS in asked.extra_info) == any("skipped" in name for name in metrics) == (override == AUTO)
