"""Real runs of verl's asynchronous trainers with token weights: Ray, TransferQueue, FSDP over gloo, vLLM's CPU build.

Each run switches on as much as goes together, so that few runs cover many layouts; what each option does to the advantages is
tested exactly in ``test_layouts.py``. Here the question is whether the whole runs, and whether the weights are those of the
policy that gave the old log-probabilities.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grail_advantage import GrailConfig, compute_token_weights
from tests import forked
from tests.verl_ext import whole_run
from tests.verl_ext.whole_run import LIMIT, WholeRun

pytestmark = pytest.mark.slow

STEPS = 2
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
COLOCATED = [
    "trainer.v1.trainer_mode=colocate_async",
    "trainer.n_gpus_per_node=2",
    "data.train_batch_size=8",
    f"{ACTOR}.ppo_mini_batch_size=8",
    # So few that some groups have no difference.
    f"{ROLLOUT}.n=4",
    # The reference policy gives the penalty in the reward.
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.kl_coef=0.1",
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.rollout_rs=token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold='0.95_1.05'",
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=acc",
]
SEPARATED = [
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "trainer.n_gpus_per_node=1",
    "data.train_batch_size=4",
    f"{ACTOR}.ppo_mini_batch_size=2",
    f"{ROLLOUT}.n=16",
    # The reference policy takes part in the loss.
    f"{ACTOR}.use_kl_loss=True",
    f"{ROLLOUT}.nnodes=1",
    f"{ROLLOUT}.n_gpus_per_node=1",
    f"{ROLLOUT}.checkpoint_engine.backend=host",
    f"{ROLLOUT}.checkpoint_engine.custom_backend_module=grail_advantage.verl_cpu.checkpoint_engine",
    "ray_kwargs.ray_init.num_gpus=2",
]


def _run(folder: Path, overrides: list[str]) -> WholeRun:
    common = [
        "algorithm.adv_estimator=grail",
        "algorithm.grail.preset=robust",
        "algorithm.grail.gate=all",
        f"{ACTOR}.ppo_max_token_len_per_gpu=256",
        f"{ACTOR}.optim.lr=1e-2",
        f"{ROLLOUT}.calculate_log_probs=True",
        f"trainer.total_training_steps={STEPS}",
        "trainer.total_epochs=10",
        # verl's own replay buffer of the mode, which filters groups and knows stale rollouts.
        "trainer.v1.sampler.custom_sampler.path=null",
        "trainer.v1.sampler.custom_sampler.name=null",
    ]
    return whole_run.run(folder, [*common, *overrides], rows=8, python=forked.python())


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    return _run(tmp_path_factory.mktemp("colocated"), COLOCATED)


@pytest.fixture(scope="module")
def separated(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    return _run(tmp_path_factory.mktemp("separated"), SEPARATED)


def _assert_weights_of_the_initial_policy(run: WholeRun, records: list[dict]) -> None:
    model = run.model
    tokenizer = whole_run.tokenizer()
    moved = 0
    for record in records:
        prompt, response = record["prompt_ids"], record["response_ids"]
        advantage = torch.tensor([max(record["base_advantages"], key=abs)])
        if len(response) >= LIMIT and response[-1] != tokenizer.eos_token_id:
            advantage.zero_()
        input_ids = torch.tensor([prompt + response])
        expected = compute_token_weights(
            model,
            tokenizer,
            input_ids,
            torch.ones_like(input_ids),
            torch.tensor([[0] * len(prompt) + record["mask"]]),
            advantage,
            GrailConfig(preset="robust", gate="all"),
        ).weights[0, len(prompt) :]
        weights = torch.tensor(record["weights"])
        torch.testing.assert_close(weights, expected, rtol=2e-4, atol=2e-5)
        moved += int((weights[weights > 0] != 1).any())
    assert moved >= 2, "too few rows had an answer for this test to mean anything"


def _groups(records: list[dict]) -> dict[str, list[dict]]:
    groups: dict[str, list[dict]] = {}
    for record in records:
        groups.setdefault(record["key"].split("_")[0], []).append(record)
    return groups


class TestColocateAsync:
    """With a reference policy, KL in the reward, rollout correction by weights and rejection, and group filtering."""

    def test_weights_are_those_of_the_policy_of_the_step(self, colocated: WholeRun) -> None:
        _assert_weights_of_the_initial_policy(colocated, colocated.records(1))

    def test_groups_without_a_difference_are_filtered(self, colocated: WholeRun) -> None:
        tokenizer = whole_run.tokenizer()
        for step in range(1, STEPS + 1):
            groups = _groups(colocated.records(step))
            assert len(groups) == 8
            for group in groups.values():
                texts = [tokenizer.decode(record["response_ids"], skip_special_tokens=True) for record in group]
                assert len(group) == 4 and len({len(text) % 2 for text in texts}) == 2

    def test_everything_took_part(self, colocated: WholeRun) -> None:
        first, second = colocated.metrics(1), colocated.metrics(2)
        # The policy starts as the reference policy.
        assert abs(first["actor/reward_kl_penalty"]) < 1e-6
        assert abs(second["actor/reward_kl_penalty"]) > 1e-4
        assert first["rollout_corr/rollout_rs_masked_fraction"] == 0
        # The second step trains on rollouts that the first policy began or wrote.
        assert second["training/off_policy/trajectory_staleness_worst/max"] == 1
        for metrics in (first, second):
            assert metrics["grail/selected_rate"] > 0
            assert metrics["grail/non_finite_rate"] == 0
            assert any(name.startswith("rollout_corr/rollout_is") for name in metrics)
            assert any(name.startswith("rollout_corr/rollout_rs") for name in metrics)


class TestSeparateAsync:
    """Two updates a step, a rollout on a device of its own, and a reference policy in the loss."""

    def test_weights_of_every_update_are_those_of_the_steps_first_policy(self, separated: WholeRun) -> None:
        records = separated.records(1)
        assert len(records) == 64
        _assert_weights_of_the_initial_policy(separated, records[len(records) // 2 :])
        _assert_weights_of_the_initial_policy(separated, records[: len(records) // 2])

    def test_the_update_in_between_moved_the_policy(self, separated: WholeRun) -> None:
        """What the test before stands on; and that the policy was put back where it was after the pass."""
        assert separated.metrics(1)["actor/grad_norm"] > 0
        assert separated.metrics(2)["training/rollout_probs_diff_max"] > 1e-4

    def test_metrics_of_the_pass_are_logged(self, separated: WholeRun) -> None:
        for step in range(1, STEPS + 1):
            assert separated.metrics(step)["grail/selected_rate"] > 0
            assert separated.metrics(step)["timing_s/token_weights"] > 0
            assert "actor/kl_loss" in separated.metrics(step)
