"""Conversion of a source's rows into rows of verl's RLHF schema."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from recipe.data.prompts import user_messages, without_suffix
from recipe.data.sources import BadRow, Row, Source
from recipe.data.specs import Columns, DatasetSpec, GoldReader
from recipe.reward import gold_text, last_boxed

SUBSET_SEED = 42

SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        (
            "extra_info",
            pa.struct([("split", pa.string()), ("index", pa.int64()), ("problem", pa.string()), ("id", pa.string())]),
        ),
    ]
)
"""Columns that ``verl.utils.dataset.RLHFDataset`` and its reward functions read.

``prompt`` is one user turn; ``ground_truth`` is always text; ``extra_info``: ``index`` counts the rows of the written file
from 0, ``problem`` is the problem without the prompt's suffix, ``id`` names the row in its source (empty if it has none).
"""


class FieldError(ValueError):
    """A field of one row cannot be used."""

    def __init__(self, field: str, reason: str, detail: str = "") -> None:
        super().__init__(f"field {field!r}: {reason}{f' ({detail})' if detail else ''}")
        self.field = field
        self.reason = reason
        self.detail = detail


def choose_columns(spec: DatasetSpec, source: Source) -> Columns:
    """Return the first of the dataset's column layouts that the source has.

    Raises:
        ValueError: the source has none of them.
    """
    available = source.columns()
    for columns in spec.layouts:
        if columns.problem in available and columns.gold in available:
            return columns
    known = "; ".join(str(columns) for columns in spec.layouts)
    raise ValueError(
        f"{spec.name}: {source} lacks the problem or the answer column: looked for {known}; it has "
        f"{', '.join(map(repr, available)) or 'no readable row'}; "
        f"name the right ones with --columns {spec.name}=PROBLEM,ANSWER"
    )


def read_problem(row: dict[str, Any], field: str) -> str:
    """Return the problem's text: the field itself, or the content of the one user message that it holds."""
    value = _present(row, field)
    if isinstance(value, list):
        if len(value) != 1 or not isinstance(value[0], dict) or value[0].get("role") != "user":
            roles = [message.get("role") if isinstance(message, dict) else message for message in value]
            raise FieldError(field, "not a single user message", f"roles {roles}")
        value = value[0].get("content")
    if value is not None and not isinstance(value, str):
        raise FieldError(field, "neither text nor chat messages", type(value).__name__)
    problem = without_suffix(value or "")
    if not problem:
        raise FieldError(field, "empty problem")
    return problem


def read_gold(row: dict[str, Any], field: str, reader: GoldReader) -> str:
    """Return the gold answer as text, read as :mod:`recipe.reward` reads it: of a list all entries, joined with commas.

    A whole float loses its fraction (``27.0`` becomes ``27``); otherwise one answer keeps the notation of its source.
    """
    value = _present(row, field)
    if reader != "plain":
        if not isinstance(value, str):
            raise FieldError(field, "answer is not text", type(value).__name__)
        if reader == "boxed":
            answer, wanted = last_boxed(value), r"complete \boxed{...}"
        else:
            _, marker, after = value.rpartition("####")
            answer, wanted = (after if marker else None), "#### in front of an answer"
        if answer is None:
            raise FieldError(field, f"no {wanted}")
        value = answer
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        raise FieldError(field, "empty answer")
    try:
        return gold_text(value).strip()
    except ValueError as error:
        raise FieldError(field, "unusable answer", str(error)) from None


def convert_rows(
    spec: DatasetSpec, columns: Columns, rows: Iterable[Row], source: Source
) -> tuple[list[dict[str, Any]], list[BadRow], int]:
    """Turn source rows into rows of :data:`SCHEMA`, in the source's order or, for a subset, in the order of its ranking.

    Returns:
        The rows; the rows that cannot be used; the number of rows that belong to another task.
    """
    problems: list[tuple[str, str, str]] = []
    bad: list[BadRow] = []
    other_task = 0
    for number, row in rows:
        if any(row.get(field) not in (None, value) for field, value in spec.required_values.items()):
            other_task += 1
            continue
        try:
            problem = read_problem(row, columns.problem)
            context = row.get(spec.context_column) if spec.context_column else None
            if context:
                problem = f"{str(context).strip()}\n{problem}"
            gold = read_gold(row, columns.gold, columns.reader)
            _check_unicode(problem, columns.problem)
            _check_unicode(gold, columns.gold)
        except FieldError as error:
            bad.append(BadRow(str(source), f"{source.unit} {number}", error.field, error.reason, error.detail))
            continue
        identity = "/".join(str(row[name]) for name in spec.id_columns if row.get(name) is not None)
        problems.append((problem, gold, identity.encode("utf-8", errors="replace").decode()))

    if spec.subset is not None:
        problems = select_subset(problems, spec.subset)
    return [_verl_row(spec, index, *problem) for index, problem in enumerate(problems)], bad, other_task


def select_subset(problems: Sequence[tuple[str, ...]], size: int) -> list[tuple[str, ...]]:
    """Return the ``size`` entries whose first field (the problem) has the smallest SHA-256 with the seed, in that order.

    The same entries in any order give the same list. A ``size`` beyond the number of entries gives all of them.
    """

    def rank(entry: tuple[str, ...]) -> tuple[str, ...]:
        return hashlib.sha256(f"{SUBSET_SEED}\n{entry[0]}".encode()).hexdigest(), *entry

    return sorted(problems, key=rank)[:size]


def _verl_row(spec: DatasetSpec, index: int, problem: str, gold: str, identity: str) -> dict[str, Any]:
    return {
        "data_source": spec.name,
        "prompt": user_messages(problem),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": gold},
        "extra_info": {"split": spec.split, "index": index, "problem": problem, "id": identity},
    }


def _present(row: dict[str, Any], field: str) -> Any:
    if field not in row:
        raise FieldError(field, "missing", f"the row has {', '.join(map(repr, row)) or 'no field'}")
    return row[field]


def _check_unicode(text: str, field: str) -> None:
    """Refuse the lone surrogates that JSON's escapes allow: parquet has no room for them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FieldError(field, "not valid Unicode", str(error)) from None
