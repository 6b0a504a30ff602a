"""Responses that the model itself draws: they go on from token ids, never from a text, and are judged as a run does it.

Random numbers belong to the ids that a response goes on from, so that neither the batch nor a resumption matters. On a
GPU vLLM draws them, by a seed from the same ids; where it computes in bfloat16, the batch may matter in the last bits.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import hashlib
import itertools
import json
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grail_advantage.analyze.lines import json_lines
from grail_advantage.analyze.models import check_options, files_digest, model_of
from grail_advantage.dump import write_whole
from verl_cpu.tiny.sampling import sample

# Questions or responses between two writes
TOGETHER = 32
DECIDING = ("model", "samples", "length", "temperature", "reward", "device", "separator", "answer")
"""Options that change what is drawn."""
Prefix = tuple[int, ...]
Draw = Callable[[Sequence[Prefix], Sequence[int]], list[list[list[int]]]]
"""Takes token ids, and how many tokens may follow each; gives the token ids of as many responses as ``--samples``."""


def parser_of(command: str, description: str | None) -> argparse.ArgumentParser:
    """The options of every command that samples."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog=f"python -m bench {command}", description=description, formatter_class=layout
    )
    add = parser.add_argument
    default = "(default: %(default)s)"
    add("file", type=Path)
    add("out", type=Path)
    add("--model", required=True, help="as of grail_advantage.analyze")
    add("--samples", type=int, default=8, help=f"responses drawn from each beginning {default}")
    add("--length", type=int, required=True, help="most tokens of a response")
    add("--temperature", type=float, default=1.0)
    reward = "grail_advantage.reward:compute_score"
    add("--reward", default=reward, help="MODULE:FUNCTION, as verl's compute_score")
    engine = "vllm" if torch.cuda.is_available() else "cpu"
    add("--device", default=engine, help=f"vllm, or torch's name of a device {default}")
    return parser


def settings_of(options: argparse.Namespace, **further: Any) -> dict[str, Any]:
    """The options that change what is drawn, by name."""
    settings = {name: value for name, value in vars(options).items() if name in DECIDING}
    return {**settings, "files": files_digest(options.model), **further}


def lines_in(out: Path, settings: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The lines that an earlier start wrote. ValueError: they were drawn with other settings."""
    lines = [line for _, line in json_lines(out)] if out.exists() else []
    for line in lines:
        earlier = line.get(key, {}).get("settings", {})
        differing = [name for name, value in settings.items() if earlier.get(name) != value]
        if differing:
            raise ValueError(
                f"{out} was drawn with another {', '.join(differing)}; name another file"
            )
    return lines


def write_lines(
    out: Path,
    lines: list[dict[str, Any]],
    items: Sequence[Any],
    lines_of: Callable[[Sequence[Any]], Iterable[dict[str, Any]]],
) -> None:
    """Add the lines of further items. All are written after each batch, so that a kill leaves those of the last time."""
    for first in range(0, len(items), TOGETHER):
        lines += lines_of(items[first : first + TOGETHER])
        write_whole(out, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))
        print(f"{out}: {len(lines)} responses, {len(items) - first} were left", flush=True)


def judge_of(name: str) -> Callable[[str, Any], bool]:
    """A reward function as a judge of a response's text by the ground truth: whether the reward is above 0."""
    try:
        compute_score = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--reward {name}: {error}; name it as MODULE:FUNCTION") from error

    # Continuations repeat each other's texts, and math-verify takes its time.
    @cache
    def judge(text: str, ground_truth: Any) -> bool:
        score = compute_score("", text, ground_truth)
        return (score["score"] if isinstance(score, dict) else score) > 0

    return judge


def seed_of(purpose: str, prefix: Prefix) -> int:
    """A number that belongs to the ids and to what is drawn from them."""
    digest = hashlib.sha256(
        purpose.encode() + np.asarray(prefix, dtype=np.int64).tobytes()
    ).digest()
    return int.from_bytes(digest[:7])


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
    return partial(_with_torch, load(), tokenizer, options, purpose)


def _with_torch(
    model: Any,
    tokenizer: Any,
    options: argparse.Namespace,
    purpose: str,
    prefixes: Sequence[Prefix],
    limits: Sequence[int],
) -> list[list[list[int]]]:
    if not prefixes:
        return []
    # sample() ends a response in front of NaN.
    numbers_NKT = np.full((len(prefixes), options.samples, options.length), np.nan)
    for numbers_KT, prefix, limit in zip(numbers_NKT, prefixes, limits, strict=True):
        generator = np.random.default_rng(seed_of(purpose, prefix))
        numbers_KT[:, :limit] = generator.random(numbers_KT.shape)[:, :limit]
    numbers_RT = numbers_NKT.reshape(-1, options.length)
    copies = options.samples
    responses = sample(
        model, tokenizer, list(map(list, prefixes)), numbers_RT, options.temperature, copies=copies
    )
    return [responses[first : first + copies] for first in range(0, len(responses), copies)]


def _with_vllm(options: argparse.Namespace, purpose: str, longest: int) -> Draw:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    from recipe.evaluate.sampling import resolve_model, start_engine

    runner = asyncio.Runner()
    # After the engine's shutdown, whose tasks it holds
    atexit.register(runner.close)
    folder = resolve_model(options.model)[0]
    names = map(str, itertools.count())

    @cache
    def engine() -> Any:
        # With the first request: a command that finds everything drawn starts none.
        started = start_engine(folder, longest, 1, prefix_cache=True)
        atexit.register(started.shutdown)
        return started

    async def of_prefix(prefix: Prefix, limit: int) -> list[list[int]]:
        parameters = SamplingParams(
            n=options.samples,
            temperature=options.temperature,
            max_tokens=limit,
            seed=seed_of(purpose, prefix),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": list(prefix)}
        async for output in engine().generate(prompt, parameters, next(names)):
            responses = [list(response.token_ids) for response in output.outputs]
        return responses

    async def of_all(prefixes: Sequence[Prefix], limits: Sequence[int]) -> list[list[list[int]]]:
        return await asyncio.gather(*map(of_prefix, prefixes, limits))

    return lambda prefixes, limits: runner.run(of_all(prefixes, limits))
