"""Rollouts as blocks of text that a page unpacks one at a time: gzip, in base 64.

A block has the length of its head (uint32), the head (JSON), and arrays, all little-endian: for each token its place in the
head's table of tokens (uint32), whether it trains (uint8), and its value in each column (float16). assets/unpack.js reads it.

Float16 keeps 11 binary digits. Each column is scaled by a power of two that brings its largest value to between 2^14 and 2^15,
so that a value is off by at most 1/2048 of itself; only values below 2^-29 of the column's largest lose more, and those below
2^-40 become 0. Integers up to 2,048, and thus weights of 1, stay exact. Infinities become NaN, which the page shows as a dash.

Shape suffixes: T response tokens.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from grail_advantage.dump import DumpRow

_LARGEST = 15
"""Binary exponent of a column's largest value after its scaling; float16 ends at 65504, just below 2^16."""


def encode(data: bytes) -> str:
    """Bytes as a text that a ``<script>`` may hold."""
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode("ascii")


def encode_json(value: Any) -> str:
    """A JSON value; half surrogate pairs stay as escapes."""
    return encode(_json(value))


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def columns_of(row: DumpRow) -> dict[str, np.ndarray]:
    """The float32 columns that the page shows of a response, those of several methods as ``score:NAME`` and so on.

    A column without a finite value is left out, and so is a token advantage that is the weight times the base advantage: the
    page multiplies. ``received`` and ``clipped`` are means over the optimiser steps that a response was in; of several,
    ``received@1``, ``clipped@1`` and so on are its values in each.
    """
    sources: dict[str, DumpRow] = {f":{name}": method for name, method in row.methods.items()}
    columns = {
        "base_advantage": row.base_advantage_T,
        "surprisal": None if row.old_log_prob_T is None else -row.old_log_prob_T,
        "entropy": row.entropy_T,
    }
    if row.received_T is not None:
        columns |= {"received": row.received_T, "clipped": row.clipped_T}
        if len(row.updates) > 1:
            by_update = enumerate(row.by_update_KT, start=1)
            columns |= {f"received@{number}": values_T for number, values_T in by_update}
            clipped = enumerate(row.clipped_by_update_KT, start=1)
            columns |= {f"clipped@{number}": values_T for number, values_T in clipped if (values_T > 0).any()}
    for suffix, source in (sources or {"": row}).items():
        columns |= {f"score{suffix}": source.score_T, f"weight{suffix}": source.weight_T}
        if not _is_product(source.advantage_T, source.weight_T, row.base_advantage_T):
            columns[f"advantage{suffix}"] = source.advantage_T
    return {name: value_T for name, value_T in columns.items() if value_T is not None and np.isfinite(value_T).any()}


def _is_product(advantage_T: np.ndarray | None, weight_T: np.ndarray, base_T: np.ndarray | None) -> bool:
    if advantage_T is None or base_T is None:
        return False
    return np.allclose(weight_T * base_T, advantage_T, rtol=1e-5, atol=1e-7, equal_nan=True)


def pack(row: DumpRow, columns: Mapping[str, np.ndarray], special_tokens: Mapping[int, str]) -> str:
    """A rollout's block.

    Args:
        row: of a dump.
        columns: from :func:`columns_of`.
        special_tokens: names by id, of tokens that put nothing into the text.
    """
    # The same id with another text (part of a character) is another token.
    table: dict[tuple[int, str], int] = {}
    places = [table.setdefault(token, len(table)) for token in zip(row.token_ids_T.tolist(), row.tokens, strict=True)]
    special = [place for (token, text), place in table.items() if not text and token in special_tokens]
    head: dict[str, Any] = {
        "n": len(row),
        "ids": [token for token, _ in table],
        "texts": [text or special_tokens.get(token, "") for token, text in table],
        "special": special,
        "columns": {},
    }
    arrays = [np.array(places, dtype="<u4"), row.mask_T.astype(np.uint8)]
    for name, value_T in columns.items():
        head["columns"][name], half_T = to_half(value_T)
        arrays.append(half_T)
    text = _json(head)
    return encode(len(text).to_bytes(4, "little") + text + b"".join(array.tobytes() for array in arrays))


def to_half(value_T: np.ndarray) -> tuple[int, np.ndarray]:
    """A column as float16: ``value_T`` is about ``half_T * 2**exponent``.

    Returns:
        ``(exponent, half_T)``; what is not finite is NaN.
    """
    finite_T = np.where(np.isfinite(value_T), value_T, np.nan).astype(np.float64)
    largest: float = np.nanmax(np.abs(finite_T), initial=0.0)
    exponent = int(np.frexp(largest)[1]) - _LARGEST if largest > 0 else 0
    return exponent, np.ldexp(finite_T, -exponent).astype("<f2")
