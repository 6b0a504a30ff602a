"""Responses that the model itself draws: they go on from token ids, never from a text, and are judged as a run does it.

Random numbers belong to the ids that a response goes on from, so that neither the batch nor a resumption matters. On a
GPU vLLM draws them, by a seed from the same ids; where it computes in bfloat16, the batch may matter in the last bits.
"""

import argparse
import asyncio
import atexit
import hashlib
import itertools
import json
import pkgutil
import uuid
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grail_advantage.analyze.lines import json_lines
from grail_advantage.analyze.models import check_options, files_digest, model_of
from grail_advantage.dump import write_whole
from verl_cpu.tiny.sampling import sample, uniform

# Questions or responses between two writes
TOGETHER = 32
PLACES = ("file", "out", "problems")
"""Options that change nothing of what is drawn from a beginning."""
Line = dict[str, Any]
Prefix = tuple[int, ...]
Beginnings = Sequence[tuple[Prefix, int]]
"""Token ids, and how many tokens may follow each."""
Draw = Callable[[Beginnings], list[list[list[int]]]]
"""Gives the token ids of as many responses to each beginning as ``--samples``."""


def parser_of(command: str, description: str | None) -> argparse.ArgumentParser:
    """The options of every command that samples."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("file", type=Path)
    add("out", type=Path)
    add("--model", required=True, help="as of grail_advantage.analyze")
    beginnings = "responses drawn from each beginning (default: %(default)s)"
    add("--samples", type=int, default=8, help=beginnings)
    add("--length", type=int, required=True, help="most tokens of a response")
    add("--temperature", type=float, default=1.0)
    add(
        "--reward",
        default="grail_advantage.reward:compute_score",
        help="MODULE:FUNCTION, as verl's compute_score",
    )
    engine = "vllm" if torch.cuda.is_available() else "cpu"
    add("--device", default=engine, help="vllm, or torch's name of a device (default: %(default)s)")
    return parser


def begun(options: argparse.Namespace, key: str, **further: Any) -> tuple[Line, list[Line]]:
    """The options that change what is drawn, by name, and the lines that an earlier start wrote, which have them in ``key``.
    ValueError: they were drawn with others."""
    settings = {name: value for name, value in vars(options).items() if name not in PLACES}
    settings.update(files=files_digest(options.model), **further)
    lines = [line for _, line in json_lines(options.out)] if options.out.exists() else []
    for line in lines:
        earlier = line.get(key, {}).get("settings", {})
        differing = [name for name, value in settings.items() if earlier.get(name) != value]
        if differing:
            raise ValueError(
                f"{options.out} was drawn with another {', '.join(differing)}; name another file"
            )
    return settings, lines


def write_lines(out: Path, lines: list[Line], items: Sequence[Any], lines_of: Callable) -> None:
    """Add the lines of further items, which ``lines_of`` makes of a batch of them. All are written after each batch, so that
    a kill leaves those of the last time."""
    for first in range(0, len(items), TOGETHER):
        lines += lines_of(items[first : first + TOGETHER])
        write_whole(out, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))
        print(f"{out}: {len(lines)} responses, {len(items) - first} were left", flush=True)


def judge_of(name: str, tokenizer: Any) -> Callable[[Prefix, Any], bool]:
    """A reward function as a judge of a response by the ground truth: whether the reward is above 0."""
    try:
        compute_score = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--reward {name}: {error}; name it as MODULE:FUNCTION") from error

    # Continuations repeat each other, and math-verify takes its time.
    @cache
    def judge(ids: Prefix, ground_truth: Any):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        score = compute_score("", text, ground_truth)
        return (score["score"] if isinstance(score, dict) else score) > 0

    return judge


def seed_of(purpose: str, prefix: Prefix) -> int:
    """A number that belongs to the ids and to what is drawn from them."""
    content = purpose.encode() + np.array(prefix, dtype=np.int64).tobytes()
    return int.from_bytes(hashlib.sha256(content).digest()[:7])


def model_for(options: argparse.Namespace) -> tuple[Any, Callable[[], Any]]:
    """The tokenizer of ``--model``, and what loads the model where no engine does. ValueError: an option is not usable."""
    if options.samples < 1 or options.length < 1:
        raise ValueError("--samples and --length must be at least 1")
    # Beside vLLM's engine only the tokenizer is used here.
    device = "cpu" if options.device == "vllm" else options.device
    check_options(options.temperature, 1, device)
    return model_of(options.model, device)


def drawer(options: argparse.Namespace, purpose: str, prompts: Sequence[Prefix]) -> Draw:
    """Draws from the model. ``purpose``: responses and continuations of the same ids must not share random numbers."""
    if options.device == "vllm":
        return _with_vllm(options, purpose, options.length + max(map(len, prompts)))
    tokenizer, load = model_for(options)
    model = load()
    copies = options.samples

    def draw(beginnings: Beginnings):
        if not beginnings:
            return []
        numbers = []
        for prefix, limit in beginnings:
            numbers_KT = uniform(seed_of(purpose, prefix), copies, options.length)
            # sample() ends a response in front of NaN.
            numbers_KT[:, limit:] = np.nan
            numbers.append(numbers_KT)
        ids = [list(prefix) for prefix, _ in beginnings]
        responses = sample(
            model, tokenizer, ids, np.vstack(numbers), options.temperature, copies=copies
        )
        return [responses[first : first + copies] for first in range(0, len(responses), copies)]

    return draw


def _with_vllm(options: argparse.Namespace, purpose: str, longest: int) -> Draw:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    from recipe.evaluate.sampling import resolve_model, start_engine

    runner = asyncio.Runner()
    # After the engine's shutdown, whose tasks it holds
    atexit.register(runner.close)
    folder = resolve_model(options.model)[0]

    @cache
    def engine():
        # With the first request: a command that finds everything drawn starts none.
        started = start_engine(folder, longest, 1, prefix_cache=True)
        atexit.register(started.shutdown)
        return started

    async def of_prefix(prefix: Prefix, limit: int):
        parameters = SamplingParams(
            n=options.samples,
            temperature=options.temperature,
            max_tokens=limit,
            seed=seed_of(purpose, prefix),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": list(prefix)}
        async for output in engine().generate(prompt, parameters, uuid.uuid4().hex):
            responses = [list(response.token_ids) for response in output.outputs]
        return responses

    async def of_all(beginnings: Beginnings):
        return await asyncio.gather(*itertools.starmap(of_prefix, beginnings))

    return lambda beginnings: runner.run(of_all(beginnings))
