"""Responses and continuations of the tiny model: what they depend on, and resumptions."""

import numpy as np
import pytest

from bench.rollouts import drawer, parser_of, seed_of
from grail_advantage.analyze.models import model_of
from tests.bench.common import MODEL, sampled
from verl_cpu.tiny.sampling import TOGETHER, prompt_ids, sample
from verl_cpu.tiny.task import compute_score, random_problems


@pytest.fixture(scope="module")
def tiny():
    tokenizer, load = model_of("tiny")
    return tokenizer, load()


def test_copies_are_the_responses_of_repeated_prompts(tiny):
    """Also beyond one batch, and where a row's random numbers end."""
    tokenizer, model = tiny
    prompts = [
        prompt_ids(tokenizer, problem) for problem in random_problems(TOGETHER // 4 + 9)
    ]
    numbers = np.random.default_rng(0).random((4 * len(prompts), 24))
    # Every other response ends after seven tokens.
    numbers[1::2, 7:] = np.nan
    repeated = [prompt for prompt in prompts for _ in range(4)]
    uncut = sample(model, tokenizer, repeated, np.nan_to_num(numbers, nan=0.5))
    copies = sample(model, tokenizer, prompts, numbers, copies=4)
    assert copies[::2] == uncut[::2]
    assert copies[1::2] == [response[:7] for response in uncut[1::2]]
    assert len({tuple(response) for response in copies[:4:2]}) == 2


def test_a_draw_depends_on_its_own_ids_alone(tiny):
    """Each by a plain call of the sampler, in any order and with any other length beside it."""
    tokenizer, model = tiny
    options = parser_of("x", None).parse_args(["a", "b", *MODEL, "--samples", "3"])
    prefixes = [tuple(prompt_ids(tokenizer, problem)) for problem in random_problems(5)]
    # One goes on from some tokens of a response, and two have fewer left than the others.
    prefixes[1] += (20, 10, 22)
    limits = [64, 61, 64, 5, 64]
    beginnings = list(zip(prefixes, limits, strict=True))
    draw = drawer(options, "x", prefixes)
    drawn = draw(beginnings)
    assert drawn == draw(beginnings[::-1])[::-1]
    assert drawn != drawer(options, "y", prefixes)(beginnings)
    for prefix, longest, responses in zip(prefixes, limits, drawn, strict=True):
        numbers = np.random.default_rng(seed_of("x", prefix)).random((3, 64))[:, :longest]
        assert responses == sample(model, tokenizer, [list(prefix)] * 3, numbers)


def test_sampling_resumes_to_the_same_bytes(tmp_path):
    resumed = tmp_path / "resumed.jsonl"
    sampled(resumed, 3)
    lines = sampled(resumed, 20)
    once = tmp_path / "once.jsonl"
    assert len(sampled(once, 20)) == 80
    assert resumed.read_bytes() == once.read_bytes()
    tokenizer, _ = model_of("tiny")
    for line in lines:
        text = tokenizer.decode(line["response"], skip_special_tokens=True)
        assert line["reward"] == compute_score("", text, line["ground_truth"])
    assert 0.1 < np.mean([line["reward"] for line in lines]) < 0.9
    for option in ("length=32", "samples=3", "device=vllm"):
        with pytest.raises(SystemExit, match=f"another {option.split('=')[0]}"):
            sampled(resumed, 20, f"--{option}")
    # Refused before anything is drawn.
    for option in (
        "--reward=no.module",
        "--samples=0",
        "--device=moon",
        "--model=/nowhere",
    ):
        with pytest.raises(SystemExit, match=option.split("=")[0]):
            sampled(tmp_path / "new.jsonl", 20, option)
