"""The study's training loop against plain computations, and the study itself in miniature."""

from __future__ import annotations

import copy
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from recipe.tiny.model import build_model
from recipe.tiny.sampling import prompt_ids
from recipe.tiny.task import Problem, problems
from recipe.tiny.warm_up import WarmUpSettings
from study import runs, trainer
from study.arms import ARMS, Arm
from study.task import MAX_RESPONSE_TOKENS, error_tokens, solve, study_tokenizer

TOKENIZER = study_tokenizer()
TRAIN = problems("train", 64)
HELD_OUT = problems("validation", 8)
ARM = {arm.name: arm for arm in ARMS}
SETTINGS = trainer.RunSettings(steps=1, prompts=2, rollouts=4, epochs=1, evaluate_every=1)


def _model(seed: int = 0) -> Qwen3ForCausalLM:
    return build_model(TOKENIZER, seed)


def _rollouts() -> trainer.Rollouts:
    """Two problems, three written responses each: right and wrong ones, one of them cut off."""
    texts = {
        "7+5-3": ["ok 7+5=12;12-3=9;\\boxed{9}", "7+5=11;(2+2=4)11-3=8;so \\boxed{8}", "7+5=12;12-3="],
        "4+4+1": ["4+4=8;8+1=9;\\boxed{9}", "now 4+4=8;8+1=7;\\boxed{7}", "4+4=9;9+1=10;now \\boxed{10}"],
    }
    rows = [(Problem.parse(problem), text) for problem, written in texts.items() for text in written]
    prompts = [prompt_ids(TOKENIZER, problem) for problem, _ in rows]
    responses = [TOKENIZER.encode(text) + [TOKENIZER.eos_token_id] * ("}" in text) for _, text in rows]
    width = max(len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True))
    ids = torch.full((len(rows), width), TOKENIZER.pad_token_id)
    attention = torch.zeros_like(ids)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids[row, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        attention[row, : len(prompt) + len(response)] = 1
        mask[row, len(prompt) : len(prompt) + len(response)] = 1
    return trainer.Rollouts(
        input_ids_BL=ids,
        attention_mask_BL=attention,
        response_mask_BL=mask,
        rewards_B=torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0]),
        truncated_B=torch.tensor([False, False, True, False, False, False]),
        problems=[problem for problem, _ in rows],
        groups_B=torch.tensor([0, 0, 0, 1, 1, 1]).numpy(),
    )


def _step(model: Qwen3ForCausalLM, arm: Arm) -> dict[str, torch.Tensor]:
    """Minus the gradient of a whole update, which plain SGD with step 1 leaves in the parameters."""
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = replace(SETTINGS, gradient_norm=1e9)
    generator = torch.Generator().manual_seed(0)
    trainer._update(model, TOKENIZER, optimizer, _rollouts(), arm, settings, generator)
    return {name: value - before[name] for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", ["grpo", "grail_robust", "oracle"])
def test_one_update_follows_the_gradient_written_out(name: str) -> None:
    """Row by row: token weight x (reward - group mean) x log-probability, summed, over rows x the longest response."""
    rollouts = _rollouts()
    model = _model()
    moved = _step(_model(), ARM[name])
    if name == "grpo":
        weights = torch.ones(rollouts.input_ids_BL.shape)
    elif name == "oracle":
        weights = trainer.oracle_weights(rollouts, _advantage_rows(rollouts), TOKENIZER)
    else:
        weights = trainer.compute_token_weights(
            model,
            TOKENIZER,
            rollouts.input_ids_BL,
            rollouts.attention_mask_BL,
            rollouts.response_mask_BL,
            _advantage_rows(rollouts)[:, 0],
            ARM[name].weights,
        ).weights
        assert (weights[1] != 1).any()
    total = torch.zeros(())
    for row in range(6):
        length = int(rollouts.attention_mask_BL[row].sum())
        ids = rollouts.input_ids_BL[row, :length]
        log_probs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        for position in range(1, length):
            if rollouts.response_mask_BL[row, position]:
                advantage = weights[row, position] * _advantage_rows(rollouts)[row, 0]
                total = total + advantage * log_probs[position - 1, ids[position]]
    (total / (6 * MAX_RESPONSE_TOKENS)).backward()
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(moved[parameter_name], parameter.grad, rtol=2e-3, atol=2e-7)


def _advantage_rows(rollouts: trainer.Rollouts) -> torch.Tensor:
    """(6, 1): a third of each group is right; the third row is cut off and teaches nothing."""
    return torch.tensor([[2 / 3], [-1 / 3], [0.0], [2 / 3], [-1 / 3], [-1 / 3]])


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_every_arm_takes_a_step(arm: Arm) -> None:
    moved = _step(_model(), arm)
    assert all(torch.isfinite(value).all() for value in moved.values())
    assert any((value != 0).any() for value in moved.values())


def test_oracle_weights_by_hand() -> None:
    rollouts = _rollouts()
    weights = trainer.oracle_weights(rollouts, _advantage_rows(rollouts), TOKENIZER)
    start = int(rollouts.response_mask_BL[4].argmax())
    response = rollouts.input_ids_BL[4, rollouts.response_mask_BL[4].bool()].tolist()
    (wrong,) = error_tokens(rollouts.problems[4], response, TOKENIZER)
    scale = len(response) / (len(response) - 1 + trainer.ORACLE_WEIGHT)
    expected = torch.full((len(response),), scale)
    expected[wrong] = scale * trainer.ORACLE_WEIGHT
    torch.testing.assert_close(weights[4, start : start + len(response)], expected)
    assert (weights[0] == rollouts.response_mask_BL[0]).all(), "a right response keeps weight 1"
    torch.testing.assert_close(weights.sum(dim=1), rollouts.response_mask_BL.sum(dim=1).float())


def test_shuffled_weights_are_the_same_weights_elsewhere() -> None:
    mask = _rollouts().response_mask_BL
    weights = torch.rand(mask.shape) * mask
    shuffled = trainer.shuffled(weights, mask, torch.Generator().manual_seed(0))
    assert ((shuffled != 0) == mask.bool()).all()
    for row in range(len(mask)):
        assert sorted(shuffled[row].tolist()) == sorted(weights[row].tolist())
    assert not torch.equal(shuffled, weights)


def test_pass_at_3_is_the_mean_over_all_choices_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0]]).float()
    mask = torch.ones(20, 4)
    monkeypatch.setattr(
        trainer, "roll_out", lambda *_, **__: replace(_rollouts(), rewards_B=rewards.flatten(), response_mask_BL=mask)
    )
    settings = replace(SETTINGS, evaluation_samples=5)
    figures = trainer.evaluate(_model(), TOKENIZER, HELD_OUT[:4], settings, seed=0, step=0)
    choices = [any(chosen) for row in rewards.tolist() for chosen in itertools.combinations(row, 3)]
    assert figures["pass_at_3"] == pytest.approx(sum(choices) / len(choices))
    assert figures["accuracy"] == pytest.approx(7 / 20)
    assert figures["correct"] == [1, 2, 0, 4]


def test_rollouts_mark_response_truncation_and_reward() -> None:
    rollouts = trainer.roll_out(_model(), TOKENIZER, TRAIN[:2], 3, generator=torch.Generator().manual_seed(0))
    for row in range(6):
        prompt = prompt_ids(TOKENIZER, rollouts.problems[row])
        length = int(rollouts.attention_mask_BL[row].sum())
        assert rollouts.input_ids_BL[row, : len(prompt)].tolist() == prompt
        assert rollouts.response_mask_BL[row].nonzero().flatten().tolist() == list(range(len(prompt), length))
        assert rollouts.truncated_B[row] == (rollouts.input_ids_BL[row, length - 1] != TOKENIZER.eos_token_id)
    assert [problem.text for problem in rollouts.problems] == [TRAIN[0].text] * 3 + [TRAIN[1].text] * 3


@pytest.mark.parametrize(("option", "value"), [("steps", 0), ("rollouts", 1), ("evaluation_samples", 2)])
def test_settings_that_cannot_work_are_named(option: str, value: int) -> None:
    with pytest.raises(ValueError, match=option):
        trainer.RunSettings(**{option: value})


@pytest.mark.slow
def test_the_study_in_miniature_repeats_itself_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = runs.StudySettings(
        run=replace(SETTINGS, steps=2),
        warm_up=WarmUpSettings(error_rate=0.2, steps=3, batch_size=4, evaluate_every=3),
        train_size=64,
        held_out_size=8,
    )
    arms = [ARM["grpo"], ARM["grail_official"]]
    for folder in ("one", "two"):
        runs.prepare_model(tmp_path / folder / runs.WARM_UP, settings)
        runs.run_all(tmp_path / folder, arms, [0], settings, processes=2)
    records = {}
    for folder, arm in itertools.product(("one", "two"), arms):
        records[folder, arm.name] = json.loads((tmp_path / folder / runs.RAW / f"{arm.name}-seed0.json").read_text())
    for arm in arms:
        one, two = records["one", arm.name], records["two", arm.name]
        assert one["evaluations"] == two["evaluations"]
        assert [entry["step"] for entry in one["evaluations"]] == [0, 1, 2]
        for first, second in zip(one["steps"], two["steps"], strict=True):
            assert {k: v for k, v in first.items() if "seconds" not in k} == {
                k: v for k, v in second.items() if "seconds" not in k
            }
    capsys.readouterr()
    runs.run_all(tmp_path / "one", arms, [0], settings, processes=1)
    assert "2 runs, 2 of them finished" in capsys.readouterr().out
    changed = replace(settings, run=replace(settings.run, learning_rate=1e-3))
    assert not runs.is_done(tmp_path / "one", arms[0], 0, changed)


def test_a_solved_task_is_rewarded() -> None:
    import random

    problem = TRAIN[0]
    text = solve(problem, 0.0, random.Random(0))
    assert trainer.compute_score(trainer.DATA_SOURCE, text, str(problem.answer))["score"] == 1.0
