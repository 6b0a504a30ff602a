"""Blocks of rollouts, read back by a plain reader of their format; the page's own reader is tested in test_browser.py."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import numpy as np
import pytest

from grail_advantage.view.page import pack
from tests.dumps import dump_row


def read_block(block: str) -> tuple[dict[str, Any], np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Head, places in its table, mask and columns, by the description in the module alone."""
    data = gzip.decompress(base64.b64decode(block, validate=True))
    size = int.from_bytes(data[:4], "little")
    head, rest = json.loads(data[4 : 4 + size]), data[4 + size :]
    n, names = head["n"], list(head["columns"])
    assert len(rest) == n * (4 + 1 + 2 * len(names))
    halves = np.frombuffer(rest[5 * n :], dtype="<f2").astype(np.float64).reshape(len(names), n)
    columns = {name: values * 2.0 ** head["columns"][name] for name, values in zip(names, halves, strict=True)}
    return head, np.frombuffer(rest[: 4 * n], dtype="<u4"), np.frombuffer(rest[4 * n : 5 * n], dtype=np.uint8), columns


@pytest.mark.parametrize("largest", [1e-30, 3e-8, 1.0, 4.0, 15.7, 65504.0, 70000.0, 3e38])
@pytest.mark.parametrize("sign", [1, -1])
def test_float16_is_off_by_at_most_a_2048th(largest: float, sign: int) -> None:
    """Whatever the column's range, tiny scores and values beyond float16's 65504 included."""
    shares = np.random.default_rng(0).lognormal(-5, 3, 2000)
    true_T = (sign * largest * shares[shares <= 1]).astype(np.float32)
    exponent, half_T = pack.to_half(np.append(true_T, np.float32(sign * largest)))
    read_T = half_T[:-1].astype(np.float64) * 2.0**exponent
    assert np.isfinite(half_T).all() and np.abs(shares[shares <= 1]).min() > 2**-29
    np.testing.assert_allclose(read_T, true_T, rtol=2**-11, atol=0)


def test_small_whole_numbers_and_powers_of_two_are_exact_and_infinities_are_no_values() -> None:
    values = np.float32([0, 1, -1, 2, 0.25, -0.75, 3, 100, 2047, 2048, 1000])
    exponent, half_T = pack.to_half(values)
    assert (half_T.astype(np.float64) * 2.0**exponent).tolist() == values.tolist()
    exponent, half_T = pack.to_half(np.float32([np.inf, -np.inf, np.nan, 2.0, 0.0]))
    assert np.isnan(half_T[:3]).all() and (half_T[3:].astype(np.float64) * 2.0**exponent).tolist() == [2.0, 0.0]
    assert pack.to_half(np.zeros(2, dtype=np.float32))[1].tolist() == [0.0, 0.0]


def test_a_block_comes_back() -> None:
    ids = np.array([7, 149_999, 7, 7, 2, 5])
    tokens = ["a", "\ud800", "", "a", "", "</script>"]
    row = dump_row([1.0, 2.0, 0.5, 1.0, 1.0, 1.0], tokens=tokens, token_ids_T=ids, mask_T=[True] * 4 + [False] * 2)
    columns = pack.columns_of(row)
    assert list(columns) == ["base_advantage", "score", "weight"], "the page multiplies the token advantage itself"
    block = pack.pack(row, columns, {2: "<|end|>"})
    head, places, mask, read = read_block(block)
    assert [head["ids"][place] for place in places] == ids.tolist(), "ids stay whole numbers"
    assert [head["texts"][place] for place in places] == ["a", "\ud800", "", "a", "<|end|>", "</script>"]
    assert [head["texts"][place] for place in head["special"]] == ["<|end|>"]
    assert mask.tolist() == [1, 1, 1, 1, 0, 0] and {name: list(values) for name, values in read.items()} == {
        name: values.tolist() for name, values in columns.items()
    }
    assert block == pack.pack(row, columns, {2: "<|end|>"}) and "<" not in block
    assert read_block(pack.pack(dump_row([]), pack.columns_of(dump_row([])), {}))[0]["n"] == 0
