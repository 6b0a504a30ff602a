"""A real training run by verl's own command: Ray, TransferQueue, FSDP over gloo on two ranks, and vLLM's CPU build."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from grail_advantage import GrailConfig, compute_token_weights
from tests import forked
from tests.verl_ext import whole_run
from tests.verl_ext.whole_run import LIMIT, WholeRun

PROMPTS, ROLLOUTS, STEPS = 4, 8, 2
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    """Two steps with preset ``robust``, through ``python -m verl.trainer.main_ppo``."""
    overrides = [
        "algorithm.adv_estimator=grail",
        "+algorithm.grail.preset=robust",
        "+algorithm.grail.gate=all",
        f"data.train_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        f"actor_rollout_ref.rollout.temperature={TEMPERATURE}",
        "trainer.n_gpus_per_node=2",
        f"trainer.total_training_steps={STEPS}",
        "trainer.total_epochs=1",
    ]
    folder = tmp_path_factory.mktemp("run")
    overrides.append(f"trainer.rollout_data_dir={folder / 'rollouts'}")
    return whole_run.run(folder, overrides, rows=PROMPTS * STEPS, stock=True, python=forked.python())


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_advantages_are_weight_times_grpo_advantage(run: WholeRun, step: int) -> None:
    """The weights multiply GRPO's advantage, recomputed here from the rewards; and that is what verl's actor was given."""
    records = run.records(step)
    assert len(records) == PROMPTS * ROLLOUTS
    groups: dict[str, list[dict]] = {}
    for record in records:
        groups.setdefault(record["key"].split("_")[0], []).append(record)
    assert sorted(len(group) for group in groups.values()) == [ROLLOUTS] * PROMPTS
    tokenizer = whole_run.tokenizer()
    for group in groups.values():
        texts = [tokenizer.decode(record["response_ids"], skip_special_tokens=True) for record in group]
        rewards = torch.tensor([float(len(text) % 2 == 0) for text in texts])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for record, advantage in zip(group, expected, strict=True):
            base = torch.tensor(record["base_advantages"])
            assert torch.allclose(base, advantage.expand_as(base), atol=1e-5)
            weights = torch.tensor(record["weights"])
            truncated = len(weights) >= LIMIT and record["response_ids"][-1] != tokenizer.eos_token_id
            effective = torch.zeros_like(base) if truncated else base
            torch.testing.assert_close(torch.tensor(record["advantages"]), weights * effective, rtol=1e-6, atol=0)

    token_advantages = torch.cat([torch.tensor(record["advantages"]) for record in records])
    metrics = run.metrics(step)
    assert metrics["critic/advantages/mean"] == pytest.approx(float(token_advantages.mean()), abs=1e-5)
    assert metrics["critic/advantages/max"] == pytest.approx(float(token_advantages.max()), rel=1e-5)
    assert metrics["critic/advantages/min"] == pytest.approx(float(token_advantages.min()), rel=1e-5)


@pytest.mark.slow
def test_weights_equal_those_of_one_process(run: WholeRun) -> None:
    """Two FSDP ranks with dynamic micro-batches against the plain computation with the initial model."""
    records = run.records(1)
    model = run.model
    config = GrailConfig(preset="robust", gate="all")
    moved = 0
    for record in records:
        prompt, response = record["prompt_ids"], record["response_ids"]
        input_ids = torch.tensor([prompt + response])
        response_mask = torch.tensor([[0] * len(prompt) + record["mask"]])
        advantage = torch.tensor([max(record["base_advantages"], key=abs)])
        if len(response) >= LIMIT and response[-1] != whole_run.tokenizer().eos_token_id:
            advantage.zero_()
        expected = compute_token_weights(
            model,
            whole_run.tokenizer(),
            input_ids,
            torch.ones_like(input_ids),
            response_mask,
            advantage,
            config,
            temperature=TEMPERATURE,
        ).weights[0, len(prompt) :]
        weights = torch.tensor(record["weights"])
        torch.testing.assert_close(weights, expected, rtol=2e-4, atol=2e-5)
        moved += int((weights != 1).any())
    assert moved >= 3, "too few rows had an answer for this test to mean anything"


@pytest.mark.slow
def test_metrics_of_the_pass_are_logged(run: WholeRun) -> None:
    metrics = run.metrics(1)
    assert 0 < metrics["grail/selected_rate"] <= metrics["grail/answer_found_rate"] <= 1
    assert metrics["grail/non_finite_rate"] == 0
    assert metrics["timing_s/token_weights"] > 0
    # By default every score comes with the old log-probabilities.
    assert metrics["grail/shared_forward_rate"] == 1
    assert metrics["training/rollout_probs_diff_max"] < 1e-3
    # Normalised weights move advantage between tokens and leave its amount alone, up to the clip of other rows.
    assert metrics["grail/advantage_scale"] == pytest.approx(1, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_dump_joins_verls_own_rollout_dump(run: WholeRun, step: int) -> None:
    """verl's ``uid`` is the dump's ``key``, and what both know of a row is the same."""
    lines = (run.folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()
    verls = {line["uid"]: line for line in map(json.loads, lines)}
    rows = {row.key: row for row in run.dump(step)}
    assert rows.keys() == verls.keys() and len(lines) == len(rows) == PROMPTS * ROLLOUTS
    tokenizer = whole_run.tokenizer()
    for key, row in rows.items():
        assert tokenizer.decode(row.token_ids_T, skip_special_tokens=True) == verls[key]["output"]
        assert tokenizer.decode(row.prompt_ids, skip_special_tokens=True) == verls[key]["input"]
        assert (row.gold, row.reward, row.step) == (verls[key]["gts"], verls[key]["score"], step)
        assert row.outcome == ("right" if row.reward else "wrong")
        assert row.prompt == tokenizer.decode(row.prompt_ids) and row.id.startswith("parity/")
        assert "".join(row.tokens) == row.response and len(row.tokens) == len(row.token_ids_T)


@pytest.mark.slow
def test_dump_has_the_policys_own_figures(run: WholeRun) -> None:
    """Log-probability and entropy stand at their token, at the rollouts' temperature, as the initial model gives them."""
    model = run.model
    for row in run.dump(1):
        ids = torch.tensor([[*row.prompt_ids.tolist(), *row.token_ids_T.tolist()]])
        with torch.no_grad():
            log_probs = (model(ids).logits[0, len(row.prompt_ids) - 1 : -1] / TEMPERATURE).log_softmax(dim=-1)
        of_tokens = log_probs.gather(1, torch.tensor(row.token_ids_T).unsqueeze(1)).squeeze(1)
        np.testing.assert_allclose(row.old_log_prob_T, of_tokens.numpy(), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(
            row.entropy_T, -(log_probs.exp() * log_probs).sum(dim=-1).numpy(), rtol=1e-3, atol=1e-3
        )


@pytest.mark.slow
def test_dump_says_its_size_and_takes_no_time(run: WholeRun) -> None:
    assert f"token dump: {PROMPTS * ROLLOUTS} rows a step with up to {LIMIT} tokens, at most about" in run.output
    assert run.metrics(1)["token_dump/failed_files"] == 0
    assert run.metrics(1)["timing_s/token_dump"] > 0
