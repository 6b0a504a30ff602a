"""The bench's policies and what they write: SFT-initialised models, sampled batches, their known first errors and exact credit.

Shape suffixes: B responses, L prompt + response, T response tokens, V vocabulary.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from bench import task as task_module
from bench.code import code_digest
from bench.exact import corrected, first_wrong, token_advantages
from bench.places import Label, labelled
from bench.task import (
    BOX,
    MAX_RESPONSE_TOKENS,
    BenchProblem,
    read_tokens,
    solve,
    task_errors,
    task_problems,
    task_tokenizer,
)
from grail_advantage.answers.format import BOXED
from grail_advantage.batch import EXAMPLES, GROUPS, REWARDS, Example
from grail_advantage.model.activations import FORWARD_TOKENS
from grail_advantage.token_weights import response_statistics
from recipe.hashing import digest
from verl_cpu.tiny.model import build_model
from verl_cpu.tiny.sampling import prompt_ids, sample
from verl_cpu.tiny.task import boxed_answer
from verl_cpu.tiny.warm_up import WarmUpSettings, warm_up

TRAIN_SIZE, HELD_OUT_SIZE = 2048, 256
ROLLOUTS = 8
"""Responses a problem."""
ANSWER = "answer"
TRAINING, EVALUATION, CONTROL = 1, 2, 3
"""Independent streams of random numbers of a seed."""


@dataclass(frozen=True)
class SampledBatch:
    """Responses with all that methods read, padded on the right."""

    input_ids_BL: torch.Tensor
    attention_mask_BL: torch.Tensor
    response_mask_BL: torch.Tensor
    rewards_B: torch.Tensor
    advantages_B: torch.Tensor
    """Reward minus the group's mean, not divided by a deviation; 0 for a truncated response."""
    truncated_B: torch.Tensor
    groups_B: torch.Tensor | None
    """``None``: no response has others to its prompt."""
    examples: Sequence[Example] | None
    """``None``: the ground truth is not known."""
    old_log_probs_BL: torch.Tensor
    entropy_BL: torch.Tensor
    labels: list[Label | None]
    """``None``: a response that no figure of places is of."""
    exact: list[np.ndarray | None]
    """Exact token advantages, float64 (T,)."""
    fields: dict[str, list[Any]]
    """What methods may read beside; the reference methods of :mod:`bench.methods` read their answers here."""
    answer: str = BOXED.name
    """The format of answers; empty where there is none."""
    forward: float = math.nan
    """Seconds that a forward over the batch took."""

    @property
    def lacks(self) -> dict[str, str]:
        """What the batch does not have, and what is said of a method that reads it."""
        compares, truth = "compares the responses to one prompt", "needs a ground truth"
        lacks = {} if self.groups_B is not None else {GROUPS: compares, REWARDS: compares}
        return (
            lacks
            | ({} if self.examples is not None else {EXAMPLES: truth})
            | ({} if self.answer else {ANSWER: "needs an answer"})
        )

    def response(self, row: int, values_BL: torch.Tensor) -> np.ndarray:
        """The values of one response's tokens, float64 (T,)."""
        return values_BL[row, self.response_mask_BL[row].bool()].double().numpy()


def numbers(seed: int, stream: int, step: int, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers in [0, 1) of one stream of a seed."""
    return np.random.default_rng([seed, stream, step]).random(shape)


def initial_model(task: str, seed: int, steps: int, folder: Path) -> PreTrainedModel:
    """A seed's SFT-initialised model, from its folder where it was made before, or by another process in the meantime."""
    disable_progress_bar()
    makers = [Path(file).read_text(encoding="utf-8") for file in (__file__, task_module.__file__)]
    place = folder / f"{task}-seed{seed}-{steps}-{digest([*makers, code_digest(frozenset({'verl_cpu'}))])}"
    if not place.is_dir():
        tokenizer, errors = task_tokenizer(), task_errors(task, seed)
        model = build_model(tokenizer, seed)
        warm_up(
            model,
            tokenizer,
            task_problems(task, "train", TRAIN_SIZE, seed),
            task_problems(task, "validation", 1, seed),  # its own accuracy is not read here
            WarmUpSettings(steps=steps, evaluate_every=steps, sampled_target=0.0, seed=seed),
            report=lambda line: None,
            solve=lambda problem, _, rng: solve(problem, errors, rng),
            max_new_tokens=MAX_RESPONSE_TOKENS,
            micro_batches=4,
        )
        beside = place.with_name(f"{place.name}.{os.getpid()}.tmp")
        model.save_pretrained(beside)
        try:
            beside.rename(place)
        except OSError:
            if not place.is_dir():
                raise
            shutil.rmtree(beside)  # another process has finished the same model
    return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()


def is_correct(tokenizer: PreTrainedTokenizerFast, problem: BenchProblem, response: Sequence[int]) -> bool:
    """Whether the last complete box holds the exact integer."""
    return boxed_answer(tokenizer.decode(response, skip_special_tokens=True)) == str(problem.answer)


def roll_out(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    asked: Sequence[BenchProblem],
    seed: int,
    step: int,
    rollouts: int = ROLLOUTS,
    *,
    exact: bool = True,
) -> SampledBatch:
    """Sample responses to each problem at temperature 1, score them and label their errors; without ``exact`` there is no exact
    credit, which takes another forward."""
    problems = [problem for problem in asked for _ in range(rollouts)]
    prompts = [prompt_ids(tokenizer, problem) for problem in problems]
    drawn_BT = numbers(seed, TRAINING, step, (len(problems), MAX_RESPONSE_TOKENS))
    responses = sample(model, tokenizer, prompts, drawn_BT)
    rewards = [float(is_correct(tokenizer, *one)) for one in zip(problems, responses, strict=True)]
    reads = [read_tokens(*one, tokenizer) for one in zip(problems, responses, strict=True)]
    rights = [corrected(*one, tokenizer) for one in zip(problems, responses, reads, strict=True)]
    wrongs = [None if r else first_wrong(*pair) for r, *pair in zip(rewards, responses, rights, strict=True)]
    labels: list[Label | None] = [None] * len(responses)
    for row, (wrong, read) in enumerate(zip(wrongs, reads, strict=True)):
        if wrong is not None:
            first_T = np.arange(len(read.kind_T)) == wrong
            own = str(row), problems[row].text, read.step_T, read.kind_T, read.kind_T != BOX
            labels[row] = labelled(*own, int(read.step_T[wrong]), first_T)
    credit: list[np.ndarray | None] = [None] * len(responses)
    if exact:
        credit = token_advantages(model, tokenizer, prompts, responses, rights, problems)
    examples = [
        Example([{"role": "user", "content": one.text}], {"reward_model": {"ground_truth": str(one.answer)}}, {})
        for one in problems
    ]
    fields = {
        "bench_exact": credit,
        "bench_first_wrong": [None if wrong is None else [wrong] for wrong in wrongs],
        "bench_kinds": [read.kind_T for read in reads],
    }
    return assemble(model, tokenizer, prompts, responses, rewards, rollouts, examples, labels, credit, fields)


def assemble(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[list[int]],
    responses: list[list[int]],
    rewards: list[float],
    rollouts: int,
    examples: Sequence[Example] | None,
    labels: list[Label | None],
    exact: list[np.ndarray | None],
    fields: dict[str, list[Any]],
    answer: str = BOXED.name,
    tokens: int = FORWARD_TOKENS,
) -> SampledBatch:
    """Pad the responses, and give each its advantage, log-probabilities and entropies; ``rollouts`` in a row are a group, and
    with 0 of them each response stands alone and counts as incorrect."""
    ids = [torch.tensor([*prompt, *response]) for prompt, response in zip(prompts, responses, strict=True)]
    ids_BL = pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    starts_B1, ends_B1 = (torch.tensor([[len(part)] for part in parts]) for parts in (prompts, ids))
    places_L = torch.arange(ids_BL.shape[1])
    attention_BL = places_L < ends_B1
    response_BL = attention_BL & (places_L >= starts_B1)
    rewards_B = torch.tensor(rewards)
    truncated_B = torch.tensor([response[-1] != tokenizer.eos_token_id for response in responses])
    advantages_B = torch.full_like(rewards_B, -1.0)
    if rollouts:
        advantages_B = rewards_B - rewards_B.view(-1, rollouts).mean(dim=1).repeat_interleave(rollouts)
    given = (part.to(model.device) for part in (ids_BL, attention_BL, response_BL))
    started = time.monotonic()
    statistics = response_statistics(model, tokenizer, *given, tokens=tokens)
    old_log_probs_BL, entropy_BL = (part.cpu() for part in statistics)
    return SampledBatch(
        input_ids_BL=ids_BL,
        attention_mask_BL=attention_BL.long(),
        response_mask_BL=response_BL.long(),
        rewards_B=rewards_B,
        advantages_B=torch.where(truncated_B, 0.0, advantages_B),
        truncated_B=truncated_B,
        groups_B=torch.arange(len(prompts)) // rollouts if rollouts else None,
        examples=examples,
        old_log_probs_BL=old_log_probs_BL,
        entropy_BL=entropy_BL,
        labels=labels,
        exact=exact,
        fields=fields,
        answer=answer,
        forward=time.monotonic() - started,
    )
