"""The bench's policies and what they write: SFT-initialised models, sampled batches, their known first errors and exact credit.

Shape suffixes: B responses, L prompt + response, T response tokens, V vocabulary.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from bench import task as task_module
from bench.code import code_digest
from bench.exact import corrected, first_wrong, token_advantages
from bench.places import Label, labelled
from bench.task import BOX, MAX_RESPONSE_TOKENS, BenchProblem, read_tokens, solve
from grail_advantage.answers.format import BOXED
from grail_advantage.api import PlainHost, rollouts_of
from grail_advantage.data import ENTROPY, OLD_LOG_PROBS, Example
from grail_advantage.model.activations import FORWARD_TOKENS
from recipe.hashing import digest
from verl_cpu.tiny.loss import Padded, group_advantages, padded
from verl_cpu.tiny.model import build_model
from verl_cpu.tiny.sampling import prompt_ids, sample
from verl_cpu.tiny.task import boxed_answer
from verl_cpu.tiny.warm_up import WarmUpSettings, warm_up

TRAIN_SIZE, HELD_OUT_SIZE = 2048, 256
ROLLOUTS = 8
"""Responses a problem."""
ANSWER = "answer"
EXACT = "bench_exact"
"""The field of exact token advantages, float64 (T,); ``None`` for a response in which they are not known."""
TRAINING, EVALUATION, CONTROL = 1, 2, 3
"""Independent streams of random numbers of a seed."""


@dataclass(frozen=True)
class SampledBatch:
    """Responses with all that methods read, padded on the right."""

    padded: Padded
    rewards_B: torch.Tensor
    advantages_B: torch.Tensor
    """Reward minus the group's mean, not divided by a deviation; 0 for a truncated response."""
    truncated_B: torch.Tensor
    groups_B: torch.Tensor | None
    """``None``: no response has others to its prompt."""
    old_log_probs_BL: torch.Tensor
    entropy_BL: torch.Tensor
    forward: float
    """Seconds that a forward over the batch took."""
    examples: Sequence[Example] | None
    """``None``: the ground truth is not known."""
    labels: list[Label | None]
    """``None``: a response that no figure of places is of."""
    fields: dict[str, list[Any]]
    """What methods may read beside; the reference methods of :mod:`bench.methods` read their answers here."""
    answer: str = BOXED.name
    """The format of answers; empty where there is none."""

    @property
    def lacks(self) -> dict[str, str]:
        """What the batch does not have, and what is said of a method that reads it."""
        compares = "compares the responses to one prompt"
        lacks = {"groups": compares, "rewards": compares} if self.groups_B is None else {}
        lacks |= {"examples": "needs a ground truth"} if self.examples is None else {}
        return lacks | ({} if self.answer else {ANSWER: "needs an answer"})

    def response(self, row: int, values_BL: torch.Tensor) -> np.ndarray:
        """The values of one response's tokens, float64 (T,)."""
        return values_BL[row, self.padded.response_BL[row]].double().numpy()


def numbers(seed: int, stream: int, step: int, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers in [0, 1) of one stream of a seed."""
    return np.random.default_rng([seed, stream, step]).random(shape)


def initial_model(task: str, seed: int, steps: int, folder: Path) -> PreTrainedModel:
    """A seed's SFT-initialised model, from its folder where it was made before, or by another process in the meantime."""
    disable_progress_bar()
    makers = [Path(file).read_text(encoding="utf-8") for file in (__file__, task_module.__file__)]
    place = folder / f"{task}-seed{seed}-{steps}-{digest([*makers, code_digest(frozenset({'verl_cpu'}))])}"
    if not place.is_dir():
        tokenizer, errors = task_module.task_tokenizer(), task_module.task_errors(task, seed)
        model = build_model(tokenizer, seed)
        warm_up(
            model,
            tokenizer,
            task_module.task_problems(task, "train", TRAIN_SIZE, seed),
            task_module.task_problems(task, "validation", 1, seed),  # its own accuracy is not read here
            WarmUpSettings(steps=steps, evaluate_every=steps, sampled_target=0.0, seed=seed),
            # Every 100 steps; the last line has the accuracy on the one problem.
            report=lambda line: (
                "00/" in line and "greedy" not in line and print(f"{task}, part {seed}: {line}", flush=True)
            ),
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
    pairs = list(zip(problems, responses, strict=True))
    rewards = [float(is_correct(tokenizer, *pair)) for pair in pairs]
    reads = [read_tokens(*pair, tokenizer) for pair in pairs]
    rights = [corrected(*pair, read, tokenizer) for pair, read in zip(pairs, reads, strict=True)]
    wrongs = [None if r else first_wrong(*pair) for r, *pair in zip(rewards, responses, rights, strict=True)]
    labels: list[Label | None] = [None] * len(responses)
    for row, (wrong, read) in enumerate(zip(wrongs, reads, strict=True)):
        if wrong is not None:
            first_T = np.arange(len(read.kind_T)) == wrong
            step = int(read.step_T[wrong])
            label = Label(str(row), problems[row].text, read.step_T, read.kind_T, step, first_T)
            labels[row] = labelled(label, read.kind_T != BOX)
    fields: dict[str, list[Any]] = {
        "bench_first_wrong": [None if wrong is None else [wrong] for wrong in wrongs],
        "bench_kinds": [read.kind_T for read in reads],
    }
    if exact:
        fields[EXACT] = token_advantages(model, tokenizer, prompts, responses, rights, problems)
    examples = [
        Example([{"role": "user", "content": one.text}], {"reward_model": {"ground_truth": str(one.answer)}}, {})
        for one in problems
    ]
    given = model, tokenizer, prompts, responses, rewards, rollouts
    return assemble(*given, examples=examples, labels=labels, fields=fields)


def assemble(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[list[int]],
    responses: list[list[int]],
    rewards: list[float],
    rollouts: int,
    *,
    tokens: int = FORWARD_TOKENS,
    **parts: Any,
) -> SampledBatch:
    """Pad the responses, and give each its advantage, log-probabilities and entropies; ``rollouts`` in a row are a group, and
    with 0 of them each response stands alone and counts as incorrect. ``parts``: of the batch, as they are."""
    padded_BL = padded(prompts, responses, tokenizer.pad_token_id)
    rewards_B = torch.tensor(rewards)
    truncated_B = torch.tensor([response[-1] != tokenizer.eos_token_id for response in responses])
    started = time.monotonic()
    r = rollouts_of(model, tokenizer, *padded_BL, {}, advantages=rewards_B)
    columns = PlainHost(model, r, tokens=tokens, device=model.device).columns((OLD_LOG_PROBS, ENTROPY))
    old_log_probs_BL, entropy_BL = (
        torch.zeros(padded_BL.ids_BL.shape).masked_scatter(padded_BL.response_BL, columns[name][r.mask])
        for name in (OLD_LOG_PROBS, ENTROPY)
    )
    return SampledBatch(
        padded=padded_BL,
        rewards_B=rewards_B,
        advantages_B=group_advantages(rewards_B, truncated_B, rollouts) if rollouts else truncated_B.float() - 1,
        truncated_B=truncated_B,
        groups_B=torch.arange(len(prompts)) // rollouts if rollouts else None,
        old_log_probs_BL=old_log_probs_BL,
        entropy_BL=entropy_BL,
        forward=time.monotonic() - started,
        **parts,
    )
