"""Rows of a dump for tests."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from grail_advantage import AnswerSpan
from grail_advantage.dump import _SUFFIXES, ALL, RECEIVED_SCHEMA, SCHEMA, DumpRow, as_utf8


def received_header(step: int, **values) -> dict[str, Any]:
    """A header as :func:`grail_advantage.receipt.report.record_of` gives it, without what may be missing."""
    plain = {"update": 0, "loss": "", "findings": [], "updates": 0, "tokens": 0}
    return {"step": step, **plain, **values}


def received(keys: Sequence[str], values: Sequence[Any], **columns) -> pa.Table:
    """These values of the responses' tokens in one optimiser step, of which none was clipped."""
    zeros = [np.zeros(len(values_T)) for values_T in values]
    plain = {
        "key": keys,
        "updates": [[0]] * len(keys),
        "received": values,
        "clipped": zeros,
        "by_update": [[values_T] for values_T in values],
        "clipped_by_update": [[zeros_T] for zeros_T in zeros],
        "effect": [None] * len(keys),
    }
    return pa.table({**plain, **columns}, schema=RECEIVED_SCHEMA)


def method_columns(**values) -> DumpRow:
    """An entry of a row's ``methods``."""
    return DumpRow(
        **dict.fromkeys(("score_T", "weight_T", "advantage_T", "no_scores")) | values
    )


def table_of(rows: Sequence[DumpRow]) -> pa.Table:
    """The rows as :func:`write_step` takes them."""
    records = []
    for row in rows:
        record = _record(row)
        record["methods"] = [
            {"name": as_utf8(name), **_record(columns)}
            for name, columns in row.methods.items()
        ]
        record["span"] = list(vars(row.span).values()) if row.span else None
        record["labels"] = json.dumps(row.labels) if row.labels else None
        records.append(record)
    # Without step and update, which the header gives.
    return pa.Table.from_pylist(records, schema=pa.schema(list(SCHEMA)[2:]))


def _record(row: DumpRow) -> dict[str, Any]:
    """Its values by the columns' names; texts as a file can hold them."""
    record = {}
    for name, value in vars(row).items():
        if isinstance(value, str):
            value = as_utf8(value)
        elif name == "tokens":
            value = list(map(as_utf8, value))
        record[name.removesuffix("_T")] = value
    return record


def dump_row(weights: Sequence[float], **values) -> DumpRow:
    """A row with these weights; what is not given is plain, and ``span`` has four numbers."""
    count = len(weights)
    weight_T = np.array(weights, dtype=np.float32)
    plain = {
        "step": 1,
        "update": 0,
        "row": 0,
        "key": "a_0_0",
        "group": 0,
        "labels": {},
        "truncated": False,
        "prompt": "What is it?",
        "outcome": "right",
        "reward": 1.0,
        "methods": {},
        "tokens": [f"t{i} " for i in range(count)],
        "prompt_ids": np.arange(3),
        "token_ids_T": np.arange(count),
        "mask_T": np.ones(count, dtype=bool),
        "weight_T": weight_T,
        "score_T": np.arange(count, dtype=np.float32),
        "base_advantage_T": np.full(count, 0.5, dtype=np.float32),
        "advantage_T": 0.5 * weight_T,
    }
    row = DumpRow(**dict.fromkeys(f"{name}{_SUFFIXES.get(name, '')}" for name in ALL))
    for name, value in {**plain, **values}.items():
        is_array = name.endswith("_T") and value is not None
        setattr(row, name, np.array(value) if is_array else value)
    row.response = "".join(row.tokens)
    row.span = row.span and AnswerSpan(*row.span)
    return row
