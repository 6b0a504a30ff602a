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
    records = []
    for row in rows:
        record = _record(row)
        record["methods"] = [
            {"name": as_utf8(name), **_record(columns)} for name, columns in row.methods.items()
        ]
        record["span"] = list(vars(row.span).values()) if row.span else None
        record["labels"] = json.dumps(row.labels) if row.labels else None
        records.append(record)
    # Without the step and the update, which the file's header has.
    return pa.Table.from_pylist(records, schema=pa.schema(list(SCHEMA)[2:]))


def _record(row: DumpRow) -> dict[str, Any]:
    """Its values by the columns' names; texts as a file can hold them."""
    record = {}
    for name, value in vars(row).items():
        if isinstance(value, str):
            value = as_utf8(value)
        elif isinstance(value, list):
            value = list(map(as_utf8, value))
        record[name.removesuffix("_T")] = value
    return record


def dump_row(weights: Sequence[float], **values: Any) -> DumpRow:
    """A row with these weights; what is not given is plain."""
    count = len(weights)
    weight_T = np.array(weights, dtype=np.float32)
    tokens = values.get("tokens", [f"t{place} " for place in range(count)])
    columns: dict[str, Any] = dict.fromkeys(f"{name}{_SUFFIXES.get(name, '')}" for name in ALL)
    columns.update(
        step=1,
        update=0,
        row=0,
        key="a_0_0",
        group=0,
        labels={},
        truncated=False,
        prompt="What is it?",
        response="".join(tokens),
        outcome="right",
        reward=1.0,
        methods={},
        prompt_ids=np.arange(3),
        tokens=tokens,
        token_ids_T=np.arange(count),
        mask_T=np.ones(count, dtype=bool),
        score_T=np.arange(count, dtype=np.float32),
        weight_T=weight_T,
        # An advantage of a half, which the weights multiply.
        base_advantage_T=np.full(count, 0.5, dtype=np.float32),
        advantage_T=0.5 * weight_T,
    )
    for name, value in values.items():
        if name.endswith("_T") and value is not None:
            value = np.array(value)
        if name == "span" and isinstance(value, tuple):
            value = AnswerSpan(*value)
        columns[name] = value
    return DumpRow(**columns)
