"""Numbers of rollouts as the page gets them, in float16; the blocks that hold them are read back in test_browser.py."""

from __future__ import annotations

import numpy as np
import pytest

from grail_advantage.view.page import pack
from tests.dumps import dump_row


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


def test_an_advantage_that_is_not_the_product_is_a_column_of_its_own() -> None:
    for weights, off in (([1.0, 2.0], 1.002), ([1.0, 2.0], 0.0), ([1.0, 2e-3], 1.002e-3), ([300.0, 200.0], 100.01)):
        product_T = [0.5 * weight for weight in weights]
        assert "advantage" not in pack.columns_of(dump_row(weights, advantage_T=product_T))
        assert "advantage" in pack.columns_of(dump_row(weights, advantage_T=[product_T[0], off]))
