"""Blocks of rollouts, read back by a plain reader of their format."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np
import pytest

from grail_advantage.report import pack
from grail_advantage.token_dump import MethodColumns
from tests.report.synthetic import text_row

TOKENS = ["One", " and", " two", ".", "\n", "x", "", "é"]


def _bytes(block: str) -> bytes:
    return zlib.decompress(base64.b85decode(block.replace("/", "<")))


def read_block(block: str) -> tuple[dict[str, Any], np.ndarray, dict[str, np.ndarray]]:
    """Head, token numbers and columns, by the description in the head alone."""
    data = _bytes(block)
    size = int.from_bytes(data[:4], "little")
    head = json.loads(data[4 : 4 + size])
    rest, n = data[4 + size :], head["n"]

    def whole(width: int, count: int = n) -> np.ndarray:
        nonlocal rest
        planes = np.frombuffer(rest[: count * width], dtype=np.uint8).reshape(width, count).astype(np.uint32)
        rest = rest[count * width :]
        return sum((planes[i] << (8 * i) for i in range(width)), np.zeros(count, dtype=np.uint32))

    if head["ids"][0] == "plain":
        numbers = whole(4)
    else:
        first, direct = whole(1), head["ids"][1]
        far = first >= direct
        second, rest = np.frombuffer(rest[: far.sum()], dtype=np.uint8), rest[far.sum() :]
        numbers = first.copy()
        numbers[far] = direct + (first[far] - direct) * 256 + second
    mask = whole(1) if head["mask"] else np.ones(n, dtype=np.uint32)
    columns: dict[str, np.ndarray] = {"mask": mask}
    for name, how in head["columns"].items():
        if how[0] == "constant":
            columns[name] = np.full(n, how[1], dtype=np.float32)
        elif how[0] == "same":
            columns[name] = columns[how[1]]
        elif how[0] == "product":
            columns[name] = columns["weight"] * columns["base_advantage"]
        elif how[0] == "exact":
            columns[name] = whole(4).view(np.float32)
        else:
            _, width, scale, special, low, step = how
            codes = whole(width)
            place = low + (codes.astype(np.float64) - 2) * step
            value = {"linear": place, "root": place**2, "log": np.exp(np.minimum(place, 80))}[scale]
            columns[name] = np.where(codes == 0, np.nan, np.where(codes == 1, special, value)).astype(np.float32)
    assert rest == b""
    return head, numbers, columns


def _columns(count: int = 300, **values: Any) -> pack.Columns:
    tokens = (TOKENS * count)[:count]
    return pack.columns_of(text_row(tokens, **values), pack.Vocabulary())


class TestText:
    def test_stands_in_a_script(self) -> None:
        text = pack.encode(np.random.default_rng(0).bytes(200_000))
        assert "<" not in text and text.isascii()

    @pytest.mark.parametrize("size", range(9))
    def test_every_length_comes_back(self, size: int) -> None:
        data = bytes(range(size))
        assert _bytes(pack.encode(data)) == data

    def test_half_a_surrogate_pair_is_an_escape(self) -> None:
        assert json.loads(_bytes(pack.encode_json({"a": "\ud800"}))) == {"a": "\ud800"}


class TestExact:
    def test_every_value_comes_back_to_the_bit(self) -> None:
        columns = _columns()
        columns.values["score"][::7] = np.nan
        columns.values["entropy"][:] = 0.1
        columns.values["advantage"][3] += 1e-3
        mask = np.arange(300) % 3 > 0
        columns = pack.Columns(columns.numbers_T, mask, columns.values)
        rank = np.arange(len(TOKENS), dtype=np.uint32)[::-1].copy()
        head, numbers, found = read_block(pack.pack(columns, rank, pack.EXACT))
        assert np.array_equal(numbers, rank[columns.numbers_T])
        assert np.array_equal(found.pop("mask"), mask)
        assert found.keys() == columns.values.keys()
        for name, value_T in columns.values.items():
            assert np.array_equal(found[name].view(np.uint32), value_T.view(np.uint32)), name
        assert head["columns"]["entropy"][0] == head["columns"]["base_advantage"][0] == "constant"
        assert head["columns"]["advantage"][0] == "exact"

    def test_an_advantage_that_is_the_product_takes_no_room(self) -> None:
        columns = _columns()
        head, _, found = read_block(pack.pack(columns, np.arange(8, dtype=np.uint32), pack.EXACT))
        assert head["columns"]["advantage"] == ["product"]
        assert np.array_equal(found["advantage"], columns.values["advantage"])

    def test_methods(self) -> None:
        base = text_row(TOKENS)
        same = MethodColumns(score_T=base.score_T, weight_T=base.weight_T)
        other = MethodColumns(score_T=None, weight_T=base.weight_T[::-1].copy())
        row = text_row(TOKENS, methods={"grail": same, "shear": other})
        columns = pack.columns_of(row, pack.Vocabulary())
        head, _, found = read_block(pack.pack(columns, np.arange(8, dtype=np.uint32), pack.EXACT))
        assert head["columns"]["weight:grail"] == ["same", "weight"]
        assert np.array_equal(found["weight:shear"], other.weight_T)
        assert "score:shear" not in found

    @pytest.mark.parametrize("count", [0, 1])
    def test_short_responses(self, count: int) -> None:
        columns = _columns(count)
        _, numbers, _ = read_block(pack.pack(columns, np.arange(8, dtype=np.uint32), 4))
        assert len(numbers) == count

    @pytest.mark.parametrize(
        ("size", "how"),
        [
            (1, ["pages", 256]),
            (256, ["pages", 256]),
            (257, ["pages", 255]),
            (511, ["pages", 255]),
            (512, ["pages", 254]),
            (65_281, ["pages", 1]),
            (65_282, ["plain"]),
        ],
    )
    def test_every_token_comes_back(self, size: int, how: list[Any]) -> None:
        numbers_T = np.random.default_rng(0).permutation(size).astype(np.uint32)
        columns = pack.Columns(numbers_T, np.ones(size, dtype=bool), {})
        head, numbers, _ = read_block(pack.pack(columns, np.arange(size, dtype=np.uint32), pack.EXACT))
        assert head["ids"] == how and np.array_equal(numbers, numbers_T)


class TestRounded:
    @pytest.mark.parametrize("bits", pack.PRECISIONS[1:])
    def test_within_half_a_level_of_its_scale(self, bits: int) -> None:
        columns = _columns(2000)
        columns.values["weight"][::5] = 1
        columns.values["score"][::7] = np.nan
        columns.values["score"][1] = 1e3
        rounding = pack.Rounding()
        head, _, found = read_block(pack.pack(columns, np.arange(8, dtype=np.uint32), bits, rounding))
        scales = {"weight": "linear", "score": "log", "surprisal": "root", "entropy": "root"}
        for name, scale in scales.items():
            true_T = columns.values[name].astype(np.float64)
            levels = 2 ** (bits if name in ("weight", "score") else bits - 1) - 2
            assert head["columns"][name][2] == scale
            forward = {"linear": np.asarray, "root": np.sqrt, "log": np.log}[scale]
            known = np.isfinite(true_T) & (true_T != head["columns"][name][3])
            place = forward(true_T[known])
            half = (place.max() - place.min()) / (levels - 1) / 2
            assert np.abs(forward(found[name][known].astype(np.float64)) - place).max() <= half * (1 + 1e-3) + 1e-6
            assert np.array_equal(np.isnan(found[name]), np.isnan(true_T))
            assert len(np.unique(found[name][known])) <= levels
            apart = np.nanmax(np.abs(found[name].astype(np.float64) - true_T))
            assert rounding.largest[name] == pytest.approx(apart, rel=1e-3, abs=1e-6)

    def test_a_weight_of_one_and_a_score_of_nothing_stay(self) -> None:
        columns = _columns(500)
        columns.values["weight"][::2] = 1
        columns.values["score"][::2] = 0
        _, _, found = read_block(pack.pack(columns, np.arange(8, dtype=np.uint32), 4))
        assert (found["weight"][::2] == 1).all() and (found["score"][::2] == 0).all()

    def test_values_that_are_all_exact_or_missing(self) -> None:
        columns = _columns(4)
        columns.values["weight"][:] = [1, np.nan, 1, np.nan]
        _, _, found = read_block(pack.pack(columns, np.arange(8, dtype=np.uint32), 5))
        assert np.array_equal(found["weight"], columns.values["weight"], equal_nan=True)


class TestAll:
    @staticmethod
    def _rollouts() -> list[pack.Columns]:
        return [_columns(400) for _ in range(6)]

    def test_the_finest_precision_that_fits(self) -> None:
        rollouts, rank = self._rollouts(), np.arange(8, dtype=np.uint32)
        sizes = {bits: sum(len(pack.pack(one, rank, bits)) for one in rollouts) for bits in pack.PRECISIONS}
        assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
        for bits, size in sizes.items():
            blocks, found, rounding = pack.pack_all(rollouts, rank, int(size * 1.03))
            assert found == bits and sum(map(len, blocks)) == size
            assert bool(rounding.largest) == (bits != pack.EXACT)

    def test_the_coarsest_where_none_fits(self) -> None:
        blocks, bits, _ = pack.pack_all(self._rollouts(), np.arange(8, dtype=np.uint32), 10)
        assert bits == pack.PRECISIONS[-1] and len(blocks) == 6


class TestVocabulary:
    def test_the_same_id_with_another_text_is_another_token(self) -> None:
        vocabulary = pack.Vocabulary(special={2: "<|end|>"})
        assert vocabulary([7, 7, 2, 7], ["a", "", "", "a"]).tolist() == [0, 1, 2, 0]
        table = vocabulary.table(np.array([2, 0, 1]))
        assert table == {"ids": [2, 7, 7], "texts": ["<|end|>", "a", ""], "special": [0]}

    def test_frequent_tokens_come_first(self) -> None:
        columns = [pack.Columns(np.array([2, 2, 0, 2, 1, 1], dtype=np.uint32), np.ones(6, dtype=bool), {})]
        order, rank = pack.by_frequency(columns, 3)
        assert order.tolist() == [2, 1, 0] and rank.tolist() == [2, 1, 0]
