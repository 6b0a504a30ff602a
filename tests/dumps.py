"""Rows of a dump for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from grail_advantage import AnswerSpan
from grail_advantage.dump import _SUFFIXES, ALL, SCHEMA, DumpRow, as_utf8

HOSTILE = (
    "</script><script>alert(1)</script>",
    '<img src=x onerror="alert(1)">',
    "\u202eevil\u202c \u2066isolated\u2069",
    "\ud800 half a pair",
    "nul \x00 bell \x07 escape \x1b[31mred\x1b[0m",
    "zero\u200bwidth \ufeff joiner\u200d",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 family",
    r"\frac{1}{2} $x^2$ \boxed{\text{a}}",
    "{{ template }} ${expr} `tick` %s %(x)s [red]markup[/red]",
    "\r\n\u2028\u2029\x85lines",
    "long " * 20_000,
)
"""Texts that a model may write."""


def received_header(step: int, **values: Any) -> dict[str, Any]:
    """A header as :func:`grail_advantage.receipt.report.record_of` gives it."""
    plain = {"update": 0, "loss": "", "findings": [], "updates": 0, "tokens": 0, "clipped": None}
    return {"step": step, **plain, "seen_from": None, "responses": None, **values}


def method_columns(**values: Any) -> DumpRow:
    """An entry of a row's ``methods``."""
    return DumpRow(**{**dict.fromkeys(("score_T", "weight_T", "advantage_T", "no_scores")), **values})


def changed(row: DumpRow, **values: Any) -> DumpRow:
    """The row with other values."""
    return DumpRow(**{**vars(row), **values})


def table_of(rows: Sequence[DumpRow]) -> pa.Table:
    """The rows as :func:`write_step` takes them."""
    schema = pa.schema(list(SCHEMA)[2:])
    records = [{name.removesuffix("_T"): _plain(value) for name, value in vars(row).items()} for row in rows]
    for record, row in zip(records, rows, strict=True):
        methods = {name: vars(columns).items() for name, columns in row.methods.items()}
        record["methods"] = [
            {"name": as_utf8(name), **{field.removesuffix("_T"): _plain(value) for field, value in columns}}
            for name, columns in methods.items()
        ]
        record["span"] = list(vars(row.span).values()) if row.span else None
        record["labels"] = json.dumps(row.labels) if row.labels else None
    return pa.table({name: [record[name] for record in records] for name in schema.names}, schema=schema)


def _plain(value: Any) -> Any:
    """Texts as a file can hold them."""
    if isinstance(value, str):
        return as_utf8(value)
    return [as_utf8(text) for text in value] if isinstance(value, list) else value


def dump_row(weights: Sequence[float], **values: Any) -> DumpRow:
    """A row with these weights; what is not given is plain."""
    count = len(weights)
    tokens = values.pop("tokens", [f"t{i} " for i in range(count)])
    defaults: dict[str, Any] = {
        "step": 1,
        "row": 0,
        "key": "a_0_0",
        "group": 0,
        "prompt": "What is it?",
        "response": "".join(tokens),
        "outcome": "right",
        "reward": 1.0,
        "prompt_ids": np.arange(3),
        "token_ids_T": np.arange(count),
        "mask_T": np.ones(count, dtype=bool),
        "score_T": np.arange(count, dtype=np.float32),
        "base_advantage_T": np.full(count, 0.5, dtype=np.float32),
        "advantage_T": 0.5 * np.array(weights, dtype=np.float32),
    }
    span = values.pop("span", None)
    values = {
        name: np.array(value) if name.endswith("_T") and value is not None else value for name, value in values.items()
    }
    nothing = dict.fromkeys(f"{name}{_SUFFIXES.get(name, '')}" for name in ALL)
    own = {"tokens": tokens, "weight_T": np.array(weights, dtype=np.float32)}
    own["span"] = AnswerSpan(*span) if isinstance(span, tuple) else span
    return DumpRow(
        **{**nothing, "update": 0, "truncated": False, "methods": {}, "labels": {}, **defaults, **values, **own}
    )
