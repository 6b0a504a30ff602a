"""Rows of a dump for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from grail_advantage import AnswerSpan
from grail_advantage.dump import _SUFFIXES, ALL, SCHEMA, DumpRow, as_utf8


def received_header(step: int, **values: Any) -> dict[str, Any]:
    """A header as :func:`grail_advantage.receipt.report.record_of` gives it."""
    plain = {"update": 0, "loss": "", "findings": [], "updates": 0, "tokens": 0, "clipped": None}
    return {"step": step, **plain, "seen_from": None, "responses": None, **values}


def method_columns(**values: Any) -> DumpRow:
    """An entry of a row's ``methods``."""
    return DumpRow(**dict.fromkeys(("score_T", "weight_T", "advantage_T", "no_scores")) | values)


def table_of(rows: Sequence[DumpRow]) -> pa.Table:
    """The rows as :func:`write_step` takes them."""
    schema = pa.schema(list(SCHEMA)[2:])
    records = [_record(row) for row in rows]
    for record, row in zip(records, rows, strict=True):
        record["methods"] = [
            {"name": as_utf8(name), **_record(columns)} for name, columns in row.methods.items()
        ]
        record["span"] = list(vars(row.span).values()) if row.span else None
        record["labels"] = json.dumps(row.labels) if row.labels else None
    return pa.table(
        {name: [record[name] for record in records] for name in schema.names}, schema=schema
    )


def _record(row: DumpRow) -> dict[str, Any]:
    """Its values by the columns' names; texts as a file can hold them."""
    values = {name.removesuffix("_T"): value for name, value in vars(row).items()}
    values |= {name: as_utf8(text) for name, text in values.items() if isinstance(text, str)}
    return values | {
        name: list(map(as_utf8, texts)) for name, texts in values.items() if isinstance(texts, list)
    }


def dump_row(weights: Sequence[float], **values: Any) -> DumpRow:
    """A row with these weights; what is not given is plain."""
    count = len(weights)
    weight_T = np.array(weights, dtype=np.float32)
    tokens = values.pop("tokens", [f"t{i} " for i in range(count)])
    span = values.pop("span", None)
    values |= {
        name: np.array(value)
        for name, value in values.items()
        if name.endswith("_T") and value is not None
    }
    nothing = dict.fromkeys(f"{name}{_SUFFIXES.get(name, '')}" for name in ALL)
    usual: dict[str, Any] = {
        **{
            "step": 1,
            "update": 0,
            "row": 0,
            "key": "a_0_0",
            "group": 0,
            "labels": {},
            "truncated": False,
        },
        **{
            "prompt": "What is it?",
            "response": "".join(tokens),
            "outcome": "right",
            "reward": 1.0,
            "methods": {},
        },
        **{
            "prompt_ids": np.arange(3),
            "token_ids_T": np.arange(count),
            "mask_T": np.ones(count, dtype=bool),
        },
        **{"score_T": np.arange(count, dtype=np.float32), "advantage_T": 0.5 * weight_T},
        "base_advantage_T": np.full(count, 0.5, dtype=np.float32),
    }
    columns = {
        "tokens": tokens,
        "weight_T": weight_T,
        "span": AnswerSpan(*span) if isinstance(span, tuple) else span,
    }
    return DumpRow(**{**nothing, **usual, **values, **columns})
