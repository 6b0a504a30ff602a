"""The study's training loop and its controls against plain computations."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from recipe.reward import compute_score
from recipe.tiny.model import build_model
from recipe.tiny.sampling import prompt_ids
from study import rollouts as rolling
from study import trainer
from study.arms import ARMS, Arm
from study.credit import credit, policy_state, sequence_advantages
from study.exact import right_texts, token_advantages
from study.rollouts import CONTROL, Rollouts, as_rollouts, numbers
from study.task import MAX_RESPONSE_TOKENS, StudyProblem, study_problems, study_tokenizer
from study.trainer import RunSettings, update

TOKENIZER = study_tokenizer()
SETTINGS = RunSettings(steps=1, prompts=2, rollouts=3, epochs=1, evaluate_at=(1,), gradient_norm=1e9)
SUMS = {
    "7+5-3": (7, (("+", 5), ("-", 3))),
    "4+4+1": (4, (("+", 4), ("+", 1))),
}
TEXTS = {
    "7+5-3": ["ok 7+5=12;12-3=9;\\boxed{9}", "7+5=11;(2+2=4)11-3=8;so \\boxed{8}", "7+5=12;12-3="],
    "4+4+1": ["4+4=8;8+1=9;\\boxed{9}", "now 4+4=8;8+1=7;\\boxed{7}", "4+4=9;9+1=10;now \\boxed{10}"],
}
ADVANTAGES = torch.tensor([2 / 3, -1 / 3, 0.0, 2 / 3, -1 / 3, -1 / 3])
"""A third of each group is right; the third row is cut off and teaches nothing."""


def model_of(seed: int = 0) -> Qwen3ForCausalLM:
    return build_model(TOKENIZER, seed).eval()


def rollouts() -> Rollouts:
    """Two problems, three written responses each: right and wrong ones, one of them cut off."""
    problems, prompts, responses = [], [], []
    for text, written in TEXTS.items():
        first, steps = SUMS[text]
        problem = StudyProblem(text, first, steps, (None,) * len(steps))
        for one in written:
            problems.append(problem)
            prompts.append(prompt_ids(TOKENIZER, problem))
            responses.append(TOKENIZER.encode(one) + [TOKENIZER.eos_token_id] * ("}" in one))
    return as_rollouts(TOKENIZER, problems, prompts, responses, 3)


def credited(arm: Arm, model: Qwen3ForCausalLM | None = None) -> torch.Tensor:
    batch = rollouts()
    model = model or model_of()
    drawn = numbers(0, CONTROL, 1, tuple(batch.input_ids_BL.shape))
    return credit(model, TOKENIZER, batch, arm, policy_state(model, batch), drawn, 1)


def response_of(row: int, values_BL: torch.Tensor) -> dict[str, list[float]]:
    """Values of a row's tokens, with the tokens."""
    batch = rollouts()
    start = len(batch.prompts[row])
    tokens = [TOKENIZER.decode([token]) for token in batch.responses[row]]
    return {"tokens": tokens, "values": values_BL[row, start : start + len(tokens)].tolist()}


def test_rollouts_are_judged_as_by_the_projects_reward() -> None:
    batch = rollouts()
    assert batch.rewards_B.tolist() == [1, 0, 0, 1, 0, 0]
    assert batch.truncated_B.tolist() == [False, False, True, False, False, False]
    for problem, response, reward in zip(batch.problems, batch.responses, batch.rewards_B.tolist(), strict=True):
        text = TOKENIZER.decode(response, skip_special_tokens=True)
        assert compute_score("tiny_chain_sum", text, str(problem.answer))["score"] == reward
    torch.testing.assert_close(sequence_advantages(batch, ARMS["uniform"]), ADVANTAGES)


@pytest.mark.parametrize("name", ["grail_robust", "oracle"])
def test_one_update_follows_the_gradient_written_out(name: str) -> None:
    """Row by row: token advantage x log-probability, summed, over rows x the longest response."""
    batch, model = rollouts(), model_of()
    advantages = credited(ARMS[name])
    before = copy.deepcopy(model.state_dict())
    state = policy_state(model, batch)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    update(model, sgd, batch, advantages, state.old_log_probs_BL, ARMS[name], SETTINGS)
    plain = model_of()
    total = torch.zeros(())
    for row in range(6):
        ids = [*batch.prompts[row], *batch.responses[row]]
        log_probs = plain(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        for place in range(len(batch.prompts[row]), len(ids)):
            total = total + advantages[row, place] * log_probs[place - 1, ids[place]]
    (total / (6 * MAX_RESPONSE_TOKENS)).backward()
    for parameter_name, parameter in plain.named_parameters():
        moved = model.state_dict()[parameter_name] - before[parameter_name]
        torch.testing.assert_close(moved, parameter.grad, rtol=2e-3, atol=2e-7)


def test_oracle_is_the_exact_advantage() -> None:
    batch, model = rollouts(), model_of()
    found = credited(ARMS["oracle"], model)
    exact = token_advantages(model, TOKENIZER, batch.problems, batch.prompts, batch.responses)
    assert exact[2] is None and all(values is not None for row, values in enumerate(exact) if row != 2)
    for row in (0, 1, 4):
        np.testing.assert_allclose(response_of(row, found)["values"], exact[row], rtol=1e-5)
    assert not any(response_of(2, found)["values"]), "cut off"


def test_arms_of_a_seed_see_the_same_problems_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that two runs draw; what they learn from it differs."""
    monkeypatch.setattr(rolling, "MAX_RESPONSE_TOKENS", 8)
    monkeypatch.setattr(rolling, "is_right", lambda tokenizer, problem, response: sum(response) % 2 == 0)
    training, held_out = (study_problems("slips", split, 4, 1) for split in ("train", "validation"))
    settings = replace(SETTINGS, steps=2, evaluate_at=(1, 2), epochs=2)
    real = rolling.sample
    drawn: dict[str, list[tuple[list[list[int]], list[list[float]], float]]] = {}
    rows = {}
    for name in ("uniform", "right_only"):

        def sampled(model, tokenizer, prompts, uniform_BT, temperature=1.0, name=name):
            drawn.setdefault(name, []).append((prompts, uniform_BT.tolist(), temperature))
            found = real(model, tokenizer, prompts, uniform_BT, temperature=temperature)
            return [[*response[:-1], tokenizer.eos_token_id] for response in found]  # so that they teach

        monkeypatch.setattr(rolling, "sample", sampled)
        texts = right_texts(held_out, TOKENIZER, 1, 1)
        rows[name] = trainer.train(model_of(), TOKENIZER, training, held_out, texts, ARMS[name], 1e-2, settings, 1)
    assert drawn["uniform"] == drawn["right_only"]
    assert [temperature for _, _, temperature in drawn["uniform"]] == [1.0, 0.6, 1.0, 0.6, 1.0, 0.0]
    streams = [str(numbers_BT) for _, numbers_BT, _ in drawn["uniform"][:5]]
    assert len(set(streams)) == 5, "each with numbers of its own"
    assert rows["uniform"]["gradient_norm"] != rows["right_only"]["gradient_norm"]
