"""A model of sums of one step that is fine-tuned in seconds, and a batch of its responses."""

from __future__ import annotations

import random
from functools import cache
from typing import NamedTuple

import pytest
import torch
from transformers import Qwen3ForCausalLM

from bench.agreement import Yardstick
from bench.policy import SampledBatch, roll_out
from bench.task import BenchProblem
from tests.bench.never_wrong import TOKENIZER
from verl_cpu.tiny.model import build_model
from verl_cpu.tiny.task import Problem
from verl_cpu.tiny.warm_up import WarmUpSettings, warm_up

PROBLEMS = [BenchProblem(f"{a}+{b}", a, (("+", b),)) for a in range(1, 8) for b in (1, 2)]
OF_UPDATE, OTHERS = PROBLEMS[::2], PROBLEMS[1::2]
ROLLOUTS = 64


class Small(NamedTuple):
    """What a job prepares."""

    model: Qwen3ForCausalLM
    batch: SampledBatch
    yardstick: Yardstick


def written(problem: Problem, _: float, rng: random.Random) -> str:
    """A solution whose result is wrong by 1 every third time."""
    result = problem.answer + (rng.random() < 1 / 3)
    return f"{problem.text}={result};\\boxed{{{result}}}"


@cache
def small() -> Small:
    torch.set_num_threads(1)
    model = build_model(TOKENIZER, 0)
    settings = WarmUpSettings(steps=80, batch_size=14, evaluate_every=80, sampled_target=0.0)
    warm_up(model, TOKENIZER, PROBLEMS, PROBLEMS[:1], settings, lambda line: None, solve=written, max_new_tokens=16)
    return Small(model, roll_out(model, TOKENIZER, OF_UPDATE, 0, 1, ROLLOUTS), yardstick_of(model, OTHERS))


def yardstick_of(model: Qwen3ForCausalLM, problems: list[BenchProblem]) -> Yardstick:
    """The yardstick on solutions without filler and asides, as this model writes them, in parts of two problems."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.task.MAX_FILLER", 0)
        patch.setattr("bench.task.ASIDE_RATE", 0)
        patch.setattr("bench.agreement.PART", 2)
        return Yardstick.of(model, TOKENIZER, OF_UPDATE, problems, 0)
