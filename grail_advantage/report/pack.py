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

from grail_advantage.token_dump import DumpRow

EXACT = 32
PRECISIONS = (EXACT, 12, 8, 7, 6, 5, 4)
"""Bits a value, the finest first; 32 is float32 as it is."""
_FROM_PRODUCT = "product"
_COARSE = ("surprisal", "entropy")


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
    """Float32 columns by name; further methods' as ``score:NAME`` and ``weight:NAME``, the score first."""


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
    return Columns(
        vocabulary(row.token_ids_T.tolist(), row.tokens),
        row.mask_T,
        {
            name: np.where(np.isfinite(value_T), value_T, np.float32(np.nan))
            for name, value_T in values.items()
            if value_T is not None and np.isfinite(value_T).any()
        },
    )


@dataclass
class Rounding:
    """How far rounded values are from the true ones, by kind of column; filled in by :func:`pack`."""

    largest: dict[str, float] = field(default_factory=dict)

    def see(self, name: str, true_T: np.ndarray, kept_T: np.ndarray) -> None:
        """Note a column's largest absolute difference."""
        name = name.split(":")[0]
        difference = np.abs(kept_T.astype(np.float64) - true_T)
        if np.isfinite(difference).any():
            self.largest[name] = max(self.largest.get(name, 0.0), float(np.nanmax(difference)))


def pack(columns: Columns, rank: np.ndarray, bits: int, rounding: Rounding | None = None) -> str:
    """A rollout's block.

    Args:
        columns: of the rollout.
        rank: place in the page's table of tokens, of each number of the vocabulary; frequent tokens first pack best.
        bits: of ``PRECISIONS``.
        rounding: collects the cost of the rounding.
    """
    head: dict[str, Any] = {"n": len(columns.numbers_T)}
    head["ids"], parts = _pack_numbers(rank[columns.numbers_T], len(rank))
    if columns.mask_T.all():
        head["mask"] = 0
    else:
        head["mask"] = 1
        parts.append(columns.mask_T.astype(np.uint8).tobytes())
    head["columns"] = described = {}
    for name, value_T in columns.values.items():
        described[name], data = _pack_column(name, value_T, columns, bits, rounding)
        parts += data
    start = json.dumps(head, separators=(",", ":")).encode()
    return encode(len(start).to_bytes(4, "little") + start, *parts)


def _pack_numbers(ranks_T: np.ndarray, size: int) -> tuple[list[Any], list[bytes]]:
    """Token numbers as a byte each, frequent ones directly, others as their page of 256 with a second byte among the others'.

    For tables of more than 65 thousand tokens four plain bytes.
    """
    pages = max(0, -(-(size - 256) // 255))
    if pages > 255:
        return ["plain"], _planes(ranks_T.astype("<u4"))
    direct = 256 - pages
    far_T = ranks_T >= direct
    first_T = np.where(far_T, direct + (ranks_T - direct) // 256, ranks_T).astype(np.uint8)
    second = ((ranks_T[far_T] - direct) % 256).astype(np.uint8)
    return ["pages", direct], [first_T.tobytes(), second.tobytes()]


def _pack_column(
    name: str,
    value_T: np.ndarray,
    columns: Columns,
    bits: int,
    rounding: Rounding | None,
) -> tuple[list[Any], list[bytes]]:
    """How to read a column, and its bytes."""
    if name == "advantage" and _is_product(value_T, columns.values, bits):
        return [_FROM_PRODUCT], []
    same = _same_as(name, value_T, columns.values)
    if same is not None:
        return ["same", same], []
    if (value_T == value_T[0]).all():
        return ["constant", float(value_T[0])], []
    if bits == EXACT:
        return ["exact"], _planes(value_T.astype("<f4"))
    codes_T, description, kept_T = _quantise(name, value_T, bits)
    if rounding is not None:
        rounding.see(name, value_T, kept_T)
    return description, _planes(codes_T)


def _is_product(value_T: np.ndarray, values: Mapping[str, np.ndarray], bits: int) -> bool:
    """Whether ``advantage`` is the weight times the base advantage, to the bit where columns are kept exactly."""
    if "weight" not in values or "base_advantage" not in values:
        return False
    product_T = values["weight"] * values["base_advantage"]
    if bits == EXACT:
        return np.array_equal(product_T, value_T, equal_nan=True)
    return np.allclose(product_T, value_T, rtol=1e-5, atol=1e-7, equal_nan=True)


def _same_as(name: str, value_T: np.ndarray, values: Mapping[str, np.ndarray]) -> str | None:
    """The name of the column before this one that has the same values."""
    if ":" not in name:
        return None
    plain = name.split(":")[0]
    return plain if plain in values and np.array_equal(values[plain], value_T, equal_nan=True) else None


def levels_of(name: str, bits: int) -> int:
    """How many values a rounded column can have beside its exact one; surprisal and entropy are read less closely."""
    return (1 << (bits - 1 if name in _COARSE else bits)) - 2


def _quantise(name: str, value_T: np.ndarray, bits: int) -> tuple[np.ndarray, list[Any], np.ndarray]:
    """Codes of a column, how to read them, and what they read as.

    Code 0 is NaN and code 1 the value that must stay exact (a weight of 1, else 0). The others lie evenly over the row's range:
    of the logarithm where positive values span more than a factor of 100, of the root for surprisal and entropy.
    """
    levels = levels_of(name, bits)
    special = 1.0 if name.split(":")[0] == "weight" else 0.0
    finite_T = np.isfinite(value_T)
    ordinary_T = finite_T & (value_T != special)
    ordinary = value_T[ordinary_T].astype(np.float64)
    scale, low, width = "linear", 0.0, 1.0
    if ordinary.size and ordinary.min() >= 0:
        if name in _COARSE:
            scale = "root"
        elif ordinary.min() > 0 and ordinary.max() / ordinary.min() > 100:
            scale = "log"
    forward, backward = {
        "linear": (np.asarray, np.asarray),
        "root": (np.sqrt, np.square),
        "log": (np.log, np.exp),
    }[scale]
    place = forward(ordinary)
    if ordinary.size:
        low = float(place.min())
        width = (float(place.max()) - low) / (levels - 1) or 1.0
    code = np.rint((place - low) / width)
    codes_T: np.ndarray = np.zeros(len(value_T), dtype="<u1" if bits <= 8 else "<u2")
    codes_T[finite_T] = 1
    codes_T[ordinary_T] = code + 2
    kept_T = np.full(len(value_T), np.nan)
    kept_T[finite_T] = special
    kept_T[ordinary_T] = backward(low + code * width)
    return codes_T, ["levels", codes_T.itemsize, scale, special, low, width], kept_T


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


def pack_all(rollouts: Sequence[Columns], rank: np.ndarray, limit: int) -> tuple[list[str], int, Rounding]:
    """All blocks at the finest precision at which they stay within ``limit`` characters together, else at the coarsest.

    Returns:
        Blocks, bits a value, and what the rounding costs.
    """
    sample = rollouts[:: max(1, len(rollouts) // 32)]
    share = sum(len(columns.numbers_T) for columns in sample) / max(
        1, sum(len(columns.numbers_T) for columns in rollouts)
    )
    for bits in PRECISIONS:
        last = bits == PRECISIONS[-1]
        if not last and sum(len(pack(columns, rank, bits)) for columns in sample) > limit * share * 1.02:
            continue
        rounding = Rounding()
        blocks = [pack(columns, rank, bits, rounding) for columns in rollouts]
        if last or sum(map(len, blocks)) <= limit:
            break
    return blocks, bits, rounding
