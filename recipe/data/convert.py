"""Conversion of one row of a source into a row of verl's RLHF schema, and its prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from grail_advantage.reward import gold_text, last_boxed
from recipe.data.specs import PUBLISHED_SUBSETS, DatasetSpec

PROMPT_SUFFIX = r" Please reason step by step, and put your final answer within \boxed{}."
"""The instruction after every problem, in training and evaluation alike (arXiv 2606.04889, training set-up)."""
PUBLISHED_SUFFIX = PROMPT_SUFFIX.replace(r"\b", "\b")
"""As the published run's model read it: its code has a plain string, in which ``\\b`` is the character U+0008."""
PROMPTS = {"corrected": PROMPT_SUFFIX, "published": PUBLISHED_SUFFIX}


def user_messages(problem: str, suffix: str = PROMPT_SUFFIX) -> list[dict[str, str]]:
    """Return the chat that asks for ``problem``: one user turn that ends in exactly one suffix."""
    return [{"role": "user", "content": _without_suffix(problem) + suffix}]


def _without_suffix(text: str) -> str:
    return text.strip().removesuffix(PROMPT_SUFFIX.strip()).strip()


def convert(spec: DatasetSpec, row: Mapping[str, Any], suffix: str = PROMPT_SUFFIX) -> dict[str, Any]:
    """Turn a row of the source into one of the written file: the columns that verl's ``RLHFDataset`` and reward
    functions read, all of text but for ``index``, which is 0 still; ``id`` names the row in its source (empty if it has
    none).

    Raises:
        KeyError: a field is missing.
        ValueError, TypeError, AttributeError: it cannot be used.
    """
    problem, gold = row[spec.problem], read_gold(row[spec.gold], spec.reader)
    if isinstance(problem, list):
        problem = problem[0]["content"] if [message["role"] for message in problem] == ["user"] else ""
    if not (problem := _without_suffix(problem)):
        raise ValueError("no problem, or no single user message")
    if context := row.get("context"):  # a few of OlympiadBench
        problem = f"{str(context).strip()}\n{problem}"
    f"{problem}{gold}".encode()  # JSON's escapes allow lone surrogates, which parquet has no room for
    name = "/".join(str(row[column]) for column in spec.ids if row.get(column) is not None)
    return {
        "data_source": spec.name,
        "prompt": user_messages(problem, suffix),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": gold},
        "extra_info": {"split": spec.split, "index": 0, "problem": problem, "id": name},
    }


def read_gold(value: Any, reader: str) -> str:
    """Return the ground truth as text, read as the reward function reads it: of a list all entries, joined with commas.
    A whole float loses its fraction (``27.0`` becomes ``27``); else one answer keeps its source's notation."""
    if reader == "boxed":
        value = last_boxed(value)
    elif reader == "hashes":
        value = value.rpartition("####")[2] if "####" in value else None
    if value in (None, []) or not (gold := gold_text(value).strip()):
        raise ValueError(f"no answer ({reader})")
    return gold


def published_id(spec: DatasetSpec, row: Mapping[str, Any], name: str) -> str | None:
    """The published id of a row, by its ``name`` or by its problem's text; ``None`` for one that is not published."""
    known = PUBLISHED_SUBSETS.get(spec.name, {})
    beginning = hashlib.sha256(str(row[spec.problem]).encode()).hexdigest()[:16]
    return name if name in known else next((id for id, hash in known.items() if hash == beginning), None)
