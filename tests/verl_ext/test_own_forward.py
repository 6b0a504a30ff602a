"""A step whose update gives the old log-probabilities itself, through the stages of verl's trainers, is the step with verl's
forward before the update; and where it would be another one, it is not taken. The update's gradients are compared in
``test_updates.py``."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.debug import metrics as debug_metrics

from grail_advantage.method import build
from grail_advantage.model.probe import Finding
from grail_advantage.verl_ext import trainer as trainers
from grail_advantage.verl_ext.exchange import nested
from grail_advantage.verl_ext.own_forward import REUSE, OwnForward
from grail_advantage.verl_ext.rules import why_not_reuse
from grail_advantage.verl_ext.settings import ACTOR, ROLLOUT
from grail_advantage.verl_ext.settings import REUSE as OPTION
from tests.composed import compose, parsed, verls_on_cpu
from tests.verl_ext.one_step import Fields, Step, Workers, same

SAME = Finding(1e-6, 2e-4, "beside other responses and alone")
DRAWS = Finding(0.4, 2e-4, "alone and alone again")


def log_probs_of(prompt_P: torch.Tensor, response_T: torch.Tensor) -> torch.Tensor:
    """Made-up log-probabilities of prompt and response, each at the position before its token."""
    return -0.05 - (torch.cat([prompt_P, response_T]) * 13 % 29) / 10


class OneForward(Workers):
    """A policy whose forwards, before the update and in it, find the same. The whole batch is one micro-batch, as the loss's
    mean is then that of the step."""

    micro_batch = 8

    def log_probs(self, place: int, row: Fields) -> torch.Tensor:
        return log_probs_of(row["prompts"], row["responses"])

    def update_actor(self, batch: KVBatchMeta):
        self.own_forward = OwnForward()
        self.had_old_log_probs = "old_log_probs" in self.store.rows[batch.keys[0]]
        return super().update_actor(batch)

    def optimise(self, worker, data: TensorDict, places: list[int]):
        of_update = self.own_forward.of_update(worker, data)
        with of_update if REUSE in data else nullcontext():
            super().optimise(worker, data, places)

    def forward(self, data: TensorDict) -> dict[str, torch.Tensor]:
        ids = [data[name].unbind() for name in ("prompts", "responses")]
        log_probs = nested(list(map(log_probs_of, *ids)))
        return {"entropy": -log_probs, "log_probs": log_probs.requires_grad_()}

    def take_own_forward(self) -> list[Any]:
        return [self.own_forward.columns, None]


def steps_of(folder: Path, *overrides: str, **how) -> list[Step]:
    """The same step with verl's forward, and without it."""
    steps = []
    for reuses in (False, True):
        options = (f"{ROLLOUT}.calculate_log_probs=true", *overrides)
        step = Step(*options, workers=OneForward, folder=folder / str(reuses), **how)
        step.trainer._reuses = reuses
        # Another sampler than the policy.
        for row in step.rows.values():
            row["rollout_log_probs"] = -0.2 - (row["responses"] * 7 % 11) / 10
        steps.append(step)
    return steps


@pytest.mark.parametrize("skips", [False, True])
def test_the_step_is_the_one_with_verls_forward(skips, tmp_path):
    verl, reused = steps_of(tmp_path)
    dumps = []
    for step in (verl, reused):
        step.trainer._skips = skips
        dumps.append(step.train())
    assert (verl.workers.forwards, reused.workers.forwards) == (1, 0)
    # The trainer sends none where the update finds them itself.
    assert verl.workers.had_old_log_probs and not reused.workers.had_old_log_probs
    assert (
        reused.metrics["receipt/findings"] == reused.metrics["token_dump/failed_files"] == 0
    )
    for expected, row in zip(*dumps, strict=True):
        assert row.key == expected.key
        if skips and not expected.advantage_T.any():
            # The update left the response out, so that no forward has seen it.
            expected.old_log_prob_T = expected.entropy_T = np.full(len(row), np.nan)
        for name in ("advantage", "weight", "received", "old_log_prob", "entropy"):
            values = [getattr(a_row, f"{name}_T") for a_row in (row, expected)]
            np.testing.assert_allclose(*values, rtol=1e-5, err_msg=name)
    losses = (reused.workers.loss, verl.workers.loss)
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    entropy = verl.metrics.get("actor/entropy", reused.metrics["actor/entropy"])
    assert skips or reused.metrics["actor/entropy"] == pytest.approx(entropy, rel=1e-5)


def test_agreement_with_the_sampler_is_over_the_responses_of_the_update(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        trainers, "calculate_debug_metrics", debug_metrics.calculate_debug_metrics
    )
    _, reused = steps_of(tmp_path)
    reused.train()
    differences = []
    # By hand: the difference of both probabilities of each token.
    for row in reused.rows.values():
        log_probs_P = log_probs_of(row["prompts"], row["responses"])
        policy_T = log_probs_P[len(row["prompts"]) - 1 : -1]
        differences.append((policy_T.exp() - row["rollout_log_probs"].exp()).abs())
    expected = float(torch.cat(differences).mean())
    assert reused.metrics["training/rollout_probs_diff_mean"] == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.parametrize("by_std", [False, True])
def test_uniform_with_truncation_as_stocks_is_stock_grpo(by_std):
    """Its advantages are verl's own, bit for bit, so that the update is, whose gradients ``test_updates.py`` compares: both
    shortcuts serve somebody who wants no method."""
    stds = f"algorithm.norm_adv_by_std_in_grpo={by_std}"
    stock = Step("algorithm.adv_estimator=grpo", stds).run()
    ours = Step(stds, method=build("uniform", {"mask_truncated": False})).run()
    assert same(ours, stock) and any(advantages_T.any() for advantages_T in stock.values())


def test_more_responses_than_a_mini_batch_get_verls_forward(tmp_path):
    """As when a session has several outputs: the second mini-batch would not be of the old policy."""
    _, step = steps_of(tmp_path, f"{ACTOR}.ppo_mini_batch_size=1")
    step.train()
    assert step.workers.forwards == 1 and REUSE not in step.workers.updates[0].extra_info


def test_later_updates_of_the_separate_trainer_get_verls_forward(tmp_path):
    """Their policy has moved on; the step's first update leaves its policy for them."""
    saved = []
    _, step = steps_of(tmp_path, mode="separate_async")
    step.trainer.parameter_sync_step = 2
    for name in ("save_model_to_cpu", "restore_model_from_cpu", "clear_cpu_model"):
        setattr(step.workers, name, lambda number, name=name: saved.append((name, number)))
    step.run()
    assert step.workers.forwards == 0 and saved == [("save_model_to_cpu", 0)]
    # The second update of the step: the policy has moved on, so verl's forward runs.
    step.trainer.local_trigger_step = 1
    step.run()
    assert step.workers.forwards == 1


@pytest.mark.parametrize("method", ["grail", "uniform", "oar_g", "shear", "polarity"])
def test_the_recipe_takes_it(method):
    config = compose("grail_trainer", [f"algorithm.adv_estimator={method}"])
    settings = parsed(config)
    # The probe has found responses alone, so that the update may run without verl's forward.
    assert settings[OPTION] == "auto" and why_not_reuse(settings, probe=lambda: SAME) == ""
    assert why_not_reuse(settings, probe=lambda: DRAWS), "dropout, or a router that draws"


def test_one_word_adds_weights_and_nothing_else():
    """In verl's own command."""
    assert parsed(verls_on_cpu("algorithm.adv_estimator=grail"))[OPTION] is False
