"""Rollouts as small blocks of text that a page unpacks one at a time.

A block is ``b85(deflate(columns))``: token numbers into the page's table of tokens, and one column of each kind of value. A
column is kept exactly (float32) or rounded to levels that lie evenly over the row's own range; assets/unpack.js reads it back.
Bytes of one significance are next to each other, in a stretch with a Huffman table of its own: that compresses best.

Shape suffixes: T response tokens.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grail_advantage.view.dump.files import DumpRow

EXACT = 32
PRECISIONS = (EXACT, 8, 7, 6, 5, 4)
"""Bits a value, the finest first; 32 is float32 as it is."""
_SCALES = {"score": "log", "surprisal": "root", "entropy": "root"}
"""Scales on which the levels of positive values are even; linear for other columns."""


def encode(*parts: bytes) -> str:
    """Deflated, each part by itself, and as text that a ``<script>`` may hold: base 85 without ``<``, 5/4 of the bytes."""
    packer = zlib.compressobj(9)
    data = b"".join(packer.compress(part) + packer.flush(zlib.Z_BLOCK) for part in parts) + packer.flush()
    return base64.b85encode(data).decode("ascii").replace("<", "/")


def encode_json(value: Any) -> str:
    """A JSON value; lone surrogates stay as escapes."""
    return encode(json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii"))


@dataclass
class Vocabulary:
    """The distinct tokens of a page by number, in the order in which they appear. The same id with another text (part of a
    character) is another token."""

    numbers: dict[tuple[int, str], int] = field(default_factory=dict)
    special: dict[int, str] = field(default_factory=dict)
    """Names of special tokens by id."""

    def __call__(self, token_ids: Sequence[int], texts: Sequence[str]) -> np.ndarray:
        """Numbers of these tokens, uint32 of their length."""
        numbers = self.numbers
        of_tokens = (numbers.setdefault(token, len(numbers)) for token in zip(token_ids, texts, strict=True))
        return np.fromiter(of_tokens, dtype=np.uint32, count=len(texts))

    def table(self, order: np.ndarray) -> dict[str, Any]:
        """The page's table of tokens, in an order of numbers: ids, texts, and which are special."""
        tokens = list(self.numbers)
        ordered = [tokens[number] for number in order.tolist()]
        special = [place for place, (token, text) in enumerate(ordered) if not text and token in self.special]
        return {
            "ids": [token for token, _ in ordered],
            "texts": [text or self.special.get(token, "") for token, text in ordered],
            "special": special,
        }


@dataclass(frozen=True, eq=False)
class Columns:
    """One rollout's numbers, ready to be packed."""

    numbers_T: np.ndarray
    mask_T: np.ndarray
    values: Mapping[str, np.ndarray]
    """Float32 columns by name; further methods' as ``score:NAME`` and so on, the score first."""


def columns_of(row: DumpRow, vocabulary: Vocabulary) -> Columns:
    """The columns of a row of a dump, with NaN for what is not finite; those without a value are left out."""
    values = {
        "score": row.score_T,
        "weight": row.weight_T,
        "base_advantage": row.base_advantage_T,
        "advantage": row.advantage_T,
        "surprisal": None if row.old_log_prob_T is None else -row.old_log_prob_T,
        "entropy": row.entropy_T,
    }
    for name, method in row.methods.items():
        values[f"score:{name}"] = method.score_T
        values[f"weight:{name}"] = method.weight_T
        values[f"advantage:{name}"] = method.advantage_T
    return Columns(
        vocabulary(row.token_ids_T.tolist(), row.tokens),
        row.mask_T,
        {
            name: np.where(np.isfinite(value_T), value_T, np.float32(np.nan))
            for name, value_T in values.items()
            if value_T is not None and np.isfinite(value_T).any()
        },
    )


def pack(columns: Columns, rank: np.ndarray, bits: int, apart: dict[str, float] | None = None) -> str:
    """A rollout's block.

    Args:
        columns: of the rollout.
        rank: place in the page's table of tokens, of each number of the vocabulary; frequent tokens first pack best.
        bits: of ``PRECISIONS``.
        apart: collects by kind of column how far rounded values are from the true ones at most.
    """
    parts = [*_planes(rank[columns.numbers_T].astype("<u4")), columns.mask_T.astype(np.uint8).tobytes()]
    described: dict[str, Any] = {}
    for name, value_T in columns.values.items():
        kind = name.split(":")[0]
        if name == "advantage" and _is_product(value_T, columns.values, bits):
            described[name] = "product"
        elif name != kind and np.array_equal(columns.values.get(kind, ()), value_T, equal_nan=True):
            described[name] = ["same", kind]
        elif bits == EXACT:
            described[name] = "exact"
            parts += _planes(value_T.astype("<f4"))
        else:
            codes_T, described[name], kept_T = _quantise(kind, value_T, bits)
            parts.append(codes_T.tobytes())
            if apart is not None:
                apart[kind] = max(apart.get(kind, 0.0), float(np.nanmax(np.abs(kept_T - value_T))))
    head = json.dumps({"n": len(columns.numbers_T), "columns": described}, separators=(",", ":")).encode()
    return encode(len(head).to_bytes(4, "little") + head, *parts)


def _is_product(value_T: np.ndarray, values: Mapping[str, np.ndarray], bits: int) -> bool:
    """Whether ``advantage`` is the weight times the base advantage, to the bit where columns are kept exactly."""
    if "weight" not in values or "base_advantage" not in values:
        return False
    product_T = values["weight"] * values["base_advantage"]
    if bits == EXACT:
        return np.array_equal(product_T, value_T, equal_nan=True)
    return np.allclose(product_T, value_T, rtol=1e-5, atol=1e-7, equal_nan=True)


def levels_of(kind: str, bits: int) -> int:
    """How many values a rounded column can have beside its exact one; surprisal and entropy are read less closely."""
    return (1 << (bits - 1 if _SCALES.get(kind) == "root" else bits)) - 2


def _quantise(kind: str, value_T: np.ndarray, bits: int) -> tuple[np.ndarray, list[Any], np.ndarray]:
    """Codes of a column, how to read them, and what they read as.

    Code 0 is NaN and code 1 the value that must stay exact (a weight of 1, else 0). The others lie evenly over the row's range:
    of the logarithm for positive scores, of the root for surprisal and entropy.
    """
    special = 1.0 if kind == "weight" else 0.0
    finite_T = np.isfinite(value_T)
    ordinary_T = finite_T & (value_T != special)
    ordinary = value_T[ordinary_T].astype(np.float64)
    scale = _SCALES.get(kind, "linear") if ordinary.size and ordinary.min() > 0 else "linear"
    forward, backward = {
        "linear": (np.asarray, np.asarray),
        "root": (np.sqrt, np.square),
        "log": (np.log, np.exp),
    }[scale]
    place = forward(ordinary)
    low = float(place.min()) if place.size else 0.0
    width = (float(place.max()) - low) / (levels_of(kind, bits) - 1) if place.size else 0.0
    code = np.rint((place - low) / (width or 1.0))
    codes_T = finite_T.astype(np.uint8)
    codes_T[ordinary_T] = code + 2
    kept_T = np.where(finite_T, special, np.nan)
    kept_T[ordinary_T] = backward(low + code * width)
    return codes_T, [scale, special, low, width], kept_T


def _planes(values_T: np.ndarray) -> list[bytes]:
    """Bytes by significance, the lowest first."""
    return [plane.tobytes() for plane in values_T.view(np.uint8).reshape(len(values_T), values_T.itemsize).T]


def by_frequency(rollouts: Iterable[Columns], size: int) -> tuple[np.ndarray, np.ndarray]:
    """The vocabulary's numbers from frequent to rare, and the rank of each number."""
    count: np.ndarray = np.zeros(size, dtype=np.int64)
    for columns in rollouts:
        count += np.bincount(columns.numbers_T, minlength=size)
    order = np.argsort(-count, kind="stable")
    rank: np.ndarray = np.empty(size, dtype=np.uint32)
    rank[order] = np.arange(size, dtype=np.uint32)
    return order, rank


def pack_all(rollouts: Sequence[Columns], rank: np.ndarray, limit: int) -> tuple[list[str], int, dict[str, float]]:
    """All blocks at the finest precision at which they stay within ``limit`` characters together, else at the coarsest.

    Returns:
        Blocks, bits a value, and how far values are off at most, by kind of column.
    """
    sample = rollouts[:: max(1, len(rollouts) // 32)]
    share = sum(len(one.numbers_T) for one in sample) / max(1, sum(len(one.numbers_T) for one in rollouts))
    for bits in PRECISIONS:
        last = bits == PRECISIONS[-1]
        if not last and sum(len(pack(columns, rank, bits)) for columns in sample) > limit * share * 1.02:
            continue
        apart: dict[str, float] = {}
        blocks = [pack(columns, rank, bits, apart) for columns in rollouts]
        if last or sum(map(len, blocks)) <= limit:
            break
    return blocks, bits, apart
