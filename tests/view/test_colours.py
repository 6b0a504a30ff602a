"""Where values stand on the colour scales."""

from __future__ import annotations

import numpy as np
import pytest

from grail_advantage.view.page import colours


def test_places() -> None:
    assert colours.to_srgb(1.0, 0.0, 0.0) == pytest.approx((1, 1, 1), abs=1e-4)
    weights = np.array([0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 5.0, np.nan])
    assert colours.weight_place(weights) == pytest.approx([-1, -1, -0.5, 0, 0.5, 1, 1, np.nan], nan_ok=True)
    table = ["low", "middle", "high"]
    assert [colours.pick(table, place) for place in (-1.0, 0.0, 0.9, float("nan"))] == ["low", "middle", "high", None]
