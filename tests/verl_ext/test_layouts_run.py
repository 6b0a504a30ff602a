"""A real run of verl's separate asynchronous trainer with token weights and a tool: Ray, TransferQueue, FSDP over gloo, vLLM's
CPU build, verl's ``tool_agent``.

What each option does to the advantages is tested exactly in ``test_layouts.py``. Here the question is whether the whole runs,
and whether the weights are those of the policy that gave the old log-probabilities. A tool's answers are in many rows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from grail_advantage import GrailConfig
from tests.core import reference
from tests.verl_ext import tool, whole_run
from tests.verl_ext.whole_run import WholeRun

pytestmark = pytest.mark.slow

STEPS = 2
WORDS = (tool.CALL, "tool")
"""Further tokens: a call of the tool, which a random model writes now and then, and the role of its answer."""
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
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
        f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
        f"{ROLLOUT}.multi_turn.enable=True",
        f"{ROLLOUT}.multi_turn.function_tool_path={tool.__file__}",
    ]
    return whole_run.run(folder, [*common, *overrides], rows=8, words=WORDS)


@pytest.fixture(scope="module")
def separated(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    return _run(tmp_path_factory.mktemp("separated"), SEPARATED)


class TestSeparateAsync:
    """Two updates a step, a rollout on a device of its own, and a reference policy in the loss."""

    def test_weights_of_every_update_are_those_of_the_steps_first_policy(self, separated: WholeRun) -> None:
        records = separated.records(1)
        assert len(records) == 64
        moved = 0
        for update in (records[len(records) // 2 :], records[: len(records) // 2]):
            own = [record for record in update if all(record["mask"])]
            expected = whole_run.plain_weights(separated, own, GrailConfig(preset="robust", gate="all"), words=WORDS)
            for record, weights in zip(own, expected, strict=True):
                torch.testing.assert_close(torch.tensor(record["weights"]), weights, rtol=2e-4, atol=2e-5)
                moved += any(weight not in (0, 1) for weight in record["weights"])
        assert moved > 0, "no row had an answer"

    def test_the_update_in_between_moved_the_policy(self, separated: WholeRun) -> None:
        """What the test before stands on; and that the policy was put back where it was after the pass."""
        assert separated.metrics(1)["actor/grad_norm"] > 0
        assert separated.metrics(2)["training/rollout_probs_diff_max"] > 1e-4

    def test_metrics_of_the_pass_are_logged(self, separated: WholeRun) -> None:
        for step in range(1, STEPS + 1):
            assert separated.metrics(step)["grail/selected_rate"] > 0
            assert separated.metrics(step)["timing_s/token_weights"] > 0
            assert "actor/kl_loss" in separated.metrics(step)


class TestTool:
    """The tool of ``tool.py``, which answers as the model is to answer."""

    def test_its_tokens_have_no_weight_and_hold_no_answer(self, separated: WholeRun) -> None:
        rows = [row for step in (1, 2) for row in separated.dump(step) if not row.mask_T.all()]
        assert len(rows) > 10
        for row in rows:
            assert row.mask_T[0] and row.labels["tool"], "the first turn is the model's"
            inside_T = np.zeros(len(row), dtype=bool)
            for start, end in row.labels["tool"]:
                inside_T[start:end] = True
                assert "\\boxed{7}" in "".join(row.tokens[start:end])
            assert (inside_T == ~row.mask_T).all()
            assert row.score_T is not None and np.isnan(row.score_T[inside_T]).all()
            assert not row.weight_T[inside_T].any() and not row.advantage_T[inside_T].any()
            assert row.span is None or not inside_T[row.span.start : row.span.end].any()
            own = "".join(token for token, mine in zip(row.tokens, row.mask_T, strict=True) if mine)
            assert row.span is None or row.answer in own

    def test_weights_are_the_plain_ones_of_the_models_own_tokens(self, separated: WholeRun) -> None:
        model = reference.PlainModel(separated.model)
        options = reference.resolve("robust", gate="all")
        records = [record for record in separated.records(1) if record["span"] and not all(record["mask"])]
        compared = 0
        for record in records:
            start, (first, content, content_end, past) = len(record["prompt_ids"]), record["span"]
            ids, own_T = record["prompt_ids"] + record["response_ids"], np.array(record["mask"], dtype=bool)
            first_target, past_target = (content, content_end) if content < content_end else (first, past)
            targets = list(range(start + first_target, start + past_target))
            scores = model.scores(ids, [1] * len(ids), targets, "embeddings", 1.0)[start:]
            span = tuple(int(own_T[:edge].sum()) for edge in record["span"])
            advantage = 0.0 if record["truncated"] else record["base_advantages"][0]
            expected = reference.row_weights(list(np.array(scores)[own_T]), span, advantage, options)
            np.testing.assert_allclose(np.array(record["weights"])[own_T], expected, rtol=2e-4, atol=2e-5)
            compared += len(set(expected)) > 2
        assert compared >= 1, "no row with a tool's tokens had an answer"
