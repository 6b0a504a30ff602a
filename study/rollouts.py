"""Rollout batches of the study, and accuracy by sampling.

Shape suffixes: B rows, L prompt + response, T response tokens, P problems, S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from grail_advantage.batch import Example
from recipe.tiny.sampling import prompt_ids
from recipe.tiny.task import boxed_answer
from study.sampling import sample
from study.task import ASIDE, ASIDE_RESULT, FILL, MAX_RESPONSE_TOKENS, StudyProblem, TokenReading, read_tokens

MICRO_BATCHES = 4
ORDER, TRAINING, EVALUATION, CONTROL = range(4)
"""Independent streams of random numbers of a seed."""


@dataclass(frozen=True)
class Rollouts:
    """One batch: prompt and response side by side, padded on the right."""

    input_ids_BL: torch.Tensor
    attention_mask_BL: torch.Tensor
    response_mask_BL: torch.Tensor
    rewards_B: torch.Tensor
    truncated_B: torch.Tensor
    groups_B: np.ndarray
    problems: Sequence[StudyProblem]
    """The problem of each row."""
    prompts: list[list[int]]
    responses: list[list[int]]
    reads: list[TokenReading]


@dataclass(frozen=True)
class Sampled:
    """Result of sampling held-out problems."""

    right: list[int]
    """Right samples of each problem."""
    accuracy: float
    length: float
    """Response tokens; this and the next two are means over samples."""
    filler: float
    """Tokens of filler."""
    asides: float
    """Tokens of asides."""


def numbers(seed: int, stream: int, step: int, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers in [0, 1) of one stream of a seed."""
    return np.random.default_rng([seed, stream, step]).random(shape)


def roll_out(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[StudyProblem],
    rollouts: int,
    seed: int,
    step: int,
) -> Rollouts:
    """Sample ``rollouts`` responses to each problem at temperature 1 and judge them."""
    asked = [problem for problem in problems for _ in range(rollouts)]
    prompts = [prompt_ids(tokenizer, problem) for problem in asked]
    uniform_BT = torch.from_numpy(numbers(seed, TRAINING, step, (len(asked), MAX_RESPONSE_TOKENS)))
    return as_rollouts(tokenizer, asked, prompts, sample(model, tokenizer, prompts, uniform_BT), rollouts)


def as_rollouts(
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[StudyProblem],
    prompts: list[list[int]],
    responses: list[list[int]],
    rollouts: int,
) -> Rollouts:
    """Judge responses and pad them; ``rollouts`` consecutive rows are a group."""
    longest = max(len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True))
    ids_BL = torch.full((len(prompts), longest), tokenizer.pad_token_id)
    starts_B1 = torch.tensor([len(prompt) for prompt in prompts]).unsqueeze(1)
    ends_B1 = starts_B1 + torch.tensor([len(response) for response in responses]).unsqueeze(1)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids_BL[row, : len(prompt) + len(response)] = torch.tensor(prompt + response)
    position_L = torch.arange(longest)
    return Rollouts(
        input_ids_BL=ids_BL,
        attention_mask_BL=(position_L < ends_B1).long(),
        response_mask_BL=((position_L >= starts_B1) & (position_L < ends_B1)).long(),
        rewards_B=torch.tensor(
            [float(is_right(tokenizer, *row)) for row in zip(problems, responses, strict=True)], dtype=torch.float32
        ),
        truncated_B=torch.tensor([response[-1] != tokenizer.eos_token_id for response in responses]),
        groups_B=np.arange(len(prompts)) // rollouts,
        problems=problems,
        prompts=prompts,
        responses=responses,
        reads=[
            read_tokens(problem, response, tokenizer) for problem, response in zip(problems, responses, strict=True)
        ],
    )


def is_right(tokenizer: PreTrainedTokenizerFast, problem: StudyProblem, response: Sequence[int]) -> bool:
    """Whether the last complete box holds the exact integer."""
    return boxed_answer(tokenizer.decode(response, skip_special_tokens=True)) == str(problem.answer)


def sample_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[StudyProblem],
    samples: int,
    temperature: float,
    seed: int,
    step: int,
) -> Sampled:
    """Accuracy on held-out problems; arms of a seed draw from the same random numbers, steps from others."""
    asked = [problem for problem in problems for _ in range(samples)]
    prompts = [prompt_ids(tokenizer, problem) for problem in problems for _ in range(samples)]
    uniform_BT = torch.from_numpy(numbers(seed, EVALUATION, step, (len(asked), MAX_RESPONSE_TOKENS)))
    responses = sample(model, tokenizer, prompts, uniform_BT, temperature=temperature)
    right_PS = np.array(
        [is_right(tokenizer, problem, response) for problem, response in zip(asked, responses, strict=True)]
    ).reshape(-1, samples)
    # Wording hardly differs between a problem's samples: the first one of each is read.
    roles = [
        read_tokens(problem, response, tokenizer).role_T
        for problem, response in zip(problems, responses[::samples], strict=True)
    ]
    return Sampled(
        right=right_PS.sum(axis=1).tolist(),
        accuracy=float(right_PS.mean()),
        length=float(np.mean([len(response) for response in responses])),
        filler=float(np.mean([(role_T == FILL).sum() for role_T in roles])),
        asides=float(np.mean([np.isin(role_T, (ASIDE, ASIDE_RESULT)).sum() for role_T in roles])),
    )


def alike(rows_B: torch.Tensor, lengths_B: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows of like length together, so that little padding is computed."""
    return rows_B[lengths_B[rows_B].argsort(stable=True)].chunk(MICRO_BATCHES)


def examples(problems: Sequence[StudyProblem]) -> list[Example]:
    """The question of each row."""
    return [
        Example(
            messages=[{"role": "user", "content": problem.text}],
            columns={"reward_model": {"ground_truth": str(problem.answer)}},
            template_options={},
        )
        for problem in problems
    ]
