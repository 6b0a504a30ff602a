"""Responses that the model itself draws: they go on from token ids, never from a text, and are judged as a run does it.

Random numbers belong to the ids that a response goes on from, so that neither the batch nor a resumption matters. On a
GPU vLLM draws them, by a seed from the same ids; where it computes in bfloat16, the batch may matter in the last bits.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import hashlib
import importlib
import itertools
import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grail_advantage.analyze.lines import json_lines
from grail_advantage.analyze.models import check_options, files_digest, model_of
from grail_advantage.dump import write_whole
from verl_cpu.tiny.sampling import sample

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
    add("file", type=Path)
    add("out", type=Path)
    add("--model", required=True, help="as of grail_advantage.analyze")
    add(
        "--samples",
        type=int,
        default=8,
        help="responses drawn from each beginning (default: %(default)s)",
    )
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


def settings_of(options: argparse.Namespace, **further: Any) -> dict[str, Any]:
    """The options that change what is drawn, by name."""
    names = ("model", "samples", "length", "temperature", "reward")
    return {
        **{name: getattr(options, name) for name in names},
        "files": files_digest(options.model),
        **further,
    }


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


def write_lines(out: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write all lines at once: a kill leaves those of the last time."""
    write_whole(out, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))


def judge_of(name: str) -> Callable[[str, Any], bool]:
    """A reward function as a judge of a response's text by the ground truth: whether the reward is above 0."""
    module, _, function = name.partition(":")
    try:
        compute_score = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--reward {name}: {error}; name it as MODULE:FUNCTION") from error

    # Continuations repeat each other's texts, and math-verify takes its time.
    @lru_cache(maxsize=1_000_000)
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
    # A batch has about one length
    order = sorted(range(len(prefixes)), key=lambda index: len(prefixes[index]))
    if not prefixes:
        return []
    numbers = []
    for index in order:
        generator = np.random.default_rng(seed_of(purpose, prefixes[index]))
        numbers_KT = generator.random((options.samples, options.length))
        # sample() ends a response in front of NaN.
        numbers_KT[:, limits[index] :] = np.nan
        numbers.append(numbers_KT)
    ids = [list(prefixes[index]) for index in order]
    copies = options.samples
    responses = iter(
        sample(model, tokenizer, ids, np.concatenate(numbers), options.temperature, copies=copies)
    )
    drawn = {index: list(itertools.islice(responses, copies)) for index in order}
    return [drawn[index] for index in range(len(prefixes))]


def _with_vllm(options: argparse.Namespace, purpose: str, longest: int) -> Draw:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    from recipe.evaluate.sampling import resolve_model, start_engine

    runner = asyncio.Runner()
    atexit.register(runner.close)  # after the engine's shutdown, whose tasks it holds
    folder = resolve_model(options.model)[0]
    engines: list[Any] = []
    names = map(str, itertools.count())

    async def of_prefix(prefix: Prefix, limits: int) -> list[list[int]]:
        parameters = SamplingParams(
            n=options.samples,
            temperature=options.temperature,
            max_tokens=limits,
            seed=seed_of(purpose, prefix),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async for output in engines[0].generate(
            {"prompt_token_ids": list(prefix)}, parameters, next(names)
        ):
            final = output
        responses = sorted(final.outputs, key=lambda response: response.index)
        return [list(response.token_ids) for response in responses]

    async def of_all(prefixes: Sequence[Prefix], limits: Sequence[int]) -> list[list[list[int]]]:
        if not engines:
            # With the first request: a command that finds everything drawn starts no engine.
            engines.append(start_engine(folder, longest, 1, prefix_cache=True))
            atexit.register(engines[0].shutdown)
        return await asyncio.gather(*map(of_prefix, prefixes, limits))

    return lambda prefixes, limits: runner.run(of_all(prefixes, limits))
