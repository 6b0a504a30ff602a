"""Blocks of rollouts, read back by a plain reader of their format."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np
import pytest

from grail_advantage.view.page import pack
from tests.view.synthetic import text_row

TOKENS = ["One", " and", " two", ".", "\n", "x", "", "é"]
RANK = np.arange(8, dtype=np.uint32)[::-1].copy()


def _bytes(block: str) -> bytes:
    return zlib.decompress(base64.b85decode(block.replace("/", "<")))


def read_block(block: str) -> tuple[dict[str, Any], np.ndarray, dict[str, np.ndarray]]:
    """Head, token numbers and columns, by the description in the head alone."""
    data = _bytes(block)
    size = int.from_bytes(data[:4], "little")
    head = json.loads(data[4 : 4 + size])
    rest, n = data[4 + size :], head["n"]

    def take(width: int) -> np.ndarray:
        nonlocal rest
        planes = np.frombuffer(rest[: n * width], dtype=np.uint8).reshape(width, n).astype(np.uint32)
        rest = rest[n * width :]
        return sum((plane << (8 * i) for i, plane in enumerate(planes)), np.zeros(n, dtype=np.uint32)).astype("<u4")

    numbers = take(4)
    columns: dict[str, np.ndarray] = {"mask": take(1)}
    for name, how in head["columns"].items():
        if how == "product":
            columns[name] = columns["weight"] * columns["base_advantage"]
        elif how == "exact":
            columns[name] = take(4).view(np.float32)
        elif how[0] == "same":
            columns[name] = columns[how[1]]
        else:
            scale, special, low, step = how
            codes = take(1)
            place = low + (codes.astype(np.float64) - 2) * step
            value = {"linear": place, "root": place**2, "log": np.exp(place)}[scale]
            columns[name] = np.where(codes == 0, np.nan, np.where(codes == 1, special, value)).astype(np.float32)
    assert rest == b""
    return head, numbers, columns


def _columns(count: int = 300, **values: Any) -> pack.Columns:
    return pack.columns_of(text_row((TOKENS * count)[:count], **values), pack.Vocabulary())


def test_a_block_stands_in_a_script_and_every_length_comes_back() -> None:
    text = pack.encode(np.random.default_rng(0).bytes(200_000))
    assert "<" not in text and text.isascii()
    for size in range(9):
        assert _bytes(pack.encode(bytes(range(size)))) == bytes(range(size))
    assert json.loads(_bytes(pack.encode_json({"a": "\ud800"}))) == {"a": "\ud800"}


@pytest.mark.parametrize("count", [0, 1, 300])
def test_exact_values_come_back_to_the_bit(count: int) -> None:
    columns = _columns(count)
    columns.values.get("score", np.zeros(0))[2::7] = np.nan
    columns = pack.Columns(columns.numbers_T, np.arange(count) % 3 > 0, columns.values)
    head, numbers, found = read_block(pack.pack(columns, RANK, pack.EXACT))
    assert np.array_equal(numbers, RANK[columns.numbers_T]) and np.array_equal(found.pop("mask"), columns.mask_T)
    assert found.keys() == columns.values.keys()
    for name, value_T in columns.values.items():
        assert np.array_equal(found[name].view(np.uint32), value_T.view(np.uint32)), name
    if count:
        assert head["columns"]["advantage"] == "product"
        columns.values["advantage"][0] += 1e-3
        head, _, found = read_block(pack.pack(columns, RANK, pack.EXACT))
        assert head["columns"]["advantage"] == "exact" and found["advantage"][0] == columns.values["advantage"][0]


@pytest.mark.parametrize("bits", pack.PRECISIONS[1:])
def test_rounded_values_are_within_half_a_level_of_their_scale(bits: int) -> None:
    columns = _columns(2000)
    columns.values["weight"][::5] = 1
    columns.values["weight:other"] = columns.values["weight"][::-1].copy()
    columns.values["score"][::7], columns.values["score"][1::7], columns.values["score"][2] = np.nan, 0, 1e3
    apart: dict[str, float] = {}
    head, _, found = read_block(pack.pack(columns, RANK, bits, apart))
    scales = {"weight": "linear", "weight:other": "linear", "score": "log", "surprisal": "root", "entropy": "root"}
    for name, scale in scales.items():
        true_T, (kind, special, *_) = columns.values[name].astype(np.float64), head["columns"][name]
        levels = 2 ** (bits - 1 if scale == "root" else bits) - 2
        forward = {"linear": np.asarray, "root": np.sqrt, "log": np.log}[scale]
        known = np.isfinite(true_T) & (true_T != special)
        place = forward(true_T[known])
        half = (place.max() - place.min()) / (levels - 1) / 2
        assert (kind, special) == (scale, 1 if name.startswith("weight") else 0)
        assert len(np.unique(found[name][known])) <= levels
        assert np.abs(forward(found[name][known].astype(np.float64)) - place).max() <= half * (1 + 1e-3) + 1e-6
        assert np.array_equal(np.isnan(found[name]), np.isnan(true_T))
        assert (found[name][true_T == special] == special).all(), "a weight of 1 and a score of 0 stay"
        off = np.nanmax(np.abs(found[name].astype(np.float64) - true_T))
        assert apart[name.split(":")[0]] == pytest.approx(off, rel=1e-3, abs=1e-6)


def test_the_finest_precision_that_fits_is_taken() -> None:
    rollouts = [_columns(400) for _ in range(6)]
    sizes = {bits: sum(len(pack.pack(one, RANK, bits)) for one in rollouts) for bits in pack.PRECISIONS}
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    for bits, size in sizes.items():
        blocks, chosen, apart = pack.pack_all(rollouts, RANK, int(size * 1.03))
        assert chosen == bits and sum(map(len, blocks)) == size and bool(apart) == (bits != pack.EXACT)
    blocks, chosen, _ = pack.pack_all(rollouts, RANK, 10)
    assert chosen == pack.PRECISIONS[-1] and len(blocks) == 6


def test_vocabulary() -> None:
    """The same id with another text is another token; frequent ones come first."""
    vocabulary = pack.Vocabulary(special={2: "<|end|>"})
    assert vocabulary([7, 7, 2, 7], ["a", "", "", "a"]).tolist() == [0, 1, 2, 0]
    table = vocabulary.table(np.array([2, 0, 1]))
    assert table == {"ids": [2, 7, 7], "texts": ["<|end|>", "a", ""], "special": [0]}
    columns = [pack.Columns(np.array([2, 2, 0, 2, 1, 1], dtype=np.uint32), np.ones(6, dtype=bool), {})]
    order, rank = pack.by_frequency(columns, 3)
    assert order.tolist() == [2, 1, 0] and rank.tolist() == [2, 1, 0]
