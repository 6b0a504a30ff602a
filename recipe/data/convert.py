"""Conversion of one row of a source into a row of verl's RLHF schema, its prompt, and the choice of a subset."""

from __future__ import annotations

import hashlib
from typing import Any

from datasets import Features, List, Value

from grail_advantage.reward import gold_text, last_boxed
from recipe.data.specs import PUBLISHED_SUBSETS, Columns, DatasetSpec

PROMPT_SUFFIX = r" Please reason step by step, and put your final answer within \boxed{}."
"""The instruction after every problem, in training and evaluation alike (arXiv 2606.04889, training set-up)."""
PUBLISHED_SUFFIX = PROMPT_SUFFIX.replace(r"\b", "\b")
"""As the published run's model read it: its code has the text as a plain string, in which ``\\b`` is the character U+0008."""
SUBSET_SEED = 42
_TEXT = Value("string")

FEATURES = Features(
    {
        "data_source": _TEXT,
        "prompt": List({"role": _TEXT, "content": _TEXT}),
        "ability": _TEXT,
        "reward_model": {"style": _TEXT, "ground_truth": _TEXT},
        "extra_info": {"split": _TEXT, "index": Value("int64"), "problem": _TEXT, "id": _TEXT},
    }
)
"""Columns that ``verl.utils.dataset.RLHFDataset`` and its reward functions read.

``prompt`` is one user turn; ``ground_truth`` is always text; ``extra_info``: ``index`` counts the rows of the written file
from 0, ``problem`` is the problem without the prompt's suffix, ``id`` names the row in its source (empty if it has none).
"""


class BadRow(ValueError):
    """A row that cannot be used. ``reason`` is the same for all rows of a kind, so that they can be counted."""

    def __init__(self, reason: str, detail: str = "", field: str | None = None) -> None:
        super().__init__(f"{f'field {field!r}: ' if field else ''}{reason}{f' ({detail})' if detail else ''}")
        self.reason = reason


def user_messages(problem: str, suffix: str = PROMPT_SUFFIX) -> list[dict[str, str]]:
    """Return the chat that asks for ``problem``: one user turn that ends in exactly one suffix."""
    return [{"role": "user", "content": _without_suffix(problem) + suffix}]


def _without_suffix(text: str) -> str:
    return text.strip().removesuffix(PROMPT_SUFFIX.strip()).strip()


def convert(
    spec: DatasetSpec, columns: Columns, row: dict[str, Any] | BadRow, suffix: str = PROMPT_SUFFIX
) -> dict[str, Any] | None:
    """Turn a row into one of :data:`FEATURES` whose index is 0 still; None if it belongs to another task.

    Raises:
        BadRow: the row is one already, or a field is missing or cannot be used.
    """
    if isinstance(row, BadRow):
        raise row
    if any(row.get(field) not in (None, value) for field, value in spec.required_values.items()):
        return None
    for field in (columns.problem, columns.gold):
        if field not in row:
            raise BadRow("missing", f"the row has {', '.join(map(repr, row)) or 'no field'}", field)
    problem, gold = _read_problem(row[columns.problem], columns.problem), read_gold(row, columns.gold, columns.reader)
    if context := spec.context_column and row.get(spec.context_column):
        problem = f"{str(context).strip()}\n{problem}"
    for text, field in ((problem, columns.problem), (gold, columns.gold)):
        try:
            text.encode()  # JSON's escapes allow lone surrogates, which parquet has no room for
        except UnicodeEncodeError as error:
            raise BadRow("not valid Unicode", str(error), field) from None
    identity = "/".join(str(row[name]) for name in spec.id_columns if row.get(name) is not None)
    identity = identity.encode("utf-8", errors="replace").decode()
    return {
        "data_source": spec.name,
        "prompt": user_messages(problem, suffix),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": gold},
        "extra_info": {"split": spec.split, "index": 0, "problem": problem, "id": identity},
    }


def _read_problem(value: Any, field: str) -> str:
    """The problem's text: the field itself, or the content of the one user message that it holds."""
    if isinstance(value, list):
        if len(value) != 1 or not isinstance(value[0], dict) or value[0].get("role") != "user":
            raise BadRow("not a single user message", f"{len(value)} messages", field)
        value = value[0].get("content")
    if not isinstance(value, str | None):
        raise BadRow("neither text nor chat messages", type(value).__name__, field)
    if not (problem := _without_suffix(value or "")):
        raise BadRow("empty problem", field=field)
    return problem


def read_gold(row: dict[str, Any], field: str, reader: str) -> str:
    """Return the ground truth as text, as :mod:`grail_advantage.reward` reads it: of a list all entries, joined with commas.

    A whole float loses its fraction (``27.0`` becomes ``27``); otherwise one answer keeps the notation of its source.
    """
    value = row[field]
    if reader != "plain":
        if not isinstance(value, str):
            raise BadRow("answer is not text", type(value).__name__, field)
        if reader == "boxed":
            value, wanted = last_boxed(value), r"complete \boxed{...}"
        else:
            _, marker, after = value.rpartition("####")
            value, wanted = (after if marker else None), "#### in front of an answer"
        if value is None:
            raise BadRow(f"no {wanted}", field=field)
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        raise BadRow("empty answer", field=field)
    try:
        return gold_text(value).strip()
    except ValueError as error:
        raise BadRow("unusable answer", str(error), field) from None


def published_id(spec: DatasetSpec, columns: Columns, row: dict[str, Any], identity: str) -> str | None:
    """The published id of a row of the source, by its id or by its problem's text; ``None`` for one that is not published.

    Args:
        identity: ``id`` of the converted row.
    """
    known = PUBLISHED_SUBSETS[spec.name]
    if identity in known:
        return identity
    beginning = hashlib.sha256(str(row[columns.problem]).encode()).hexdigest()[:16]
    return next((id for id, hash in known.items() if hash == beginning), None)


def subset_rank(row: dict[str, Any]) -> tuple[str, ...]:
    """The place of a row of :data:`FEATURES` in its dataset's order: by hash of seed and problem, so that the choice depends
    neither on the source's order nor on a library's random generator."""
    problem, gold = row["extra_info"]["problem"], row["reward_model"]["ground_truth"]
    return hashlib.sha256(f"{SUBSET_SEED}\n{problem}".encode()).hexdigest(), problem, gold, row["extra_info"]["id"]
