"""Formatting that the reports share."""

from __future__ import annotations

import math
from typing import Any

from study.statistics import Paired

ABSENT = "-"


def signed(value: float, digits: int = 1) -> str:
    """With its sign; zero is never negative."""
    text = f"{value:+.{digits}f}"
    return text.replace("-", "+") if float(text) == 0 else text


def interval(difference: Paired, scale: float = 1.0, digits: int = 1) -> str:
    """Mean and 95 % interval."""
    text = signed(scale * difference.mean, digits)
    if math.isnan(difference.low):
        return f"{text}, no interval"
    return f"{text} [{signed(scale * difference.low, digits)}, {signed(scale * difference.high, digits)}]"


def p_value(value: float) -> str:
    """To three digits, and never 0."""
    return "< 0.001" if value < 0.001 else number(value, 3)


def number(value: float, digits: int = 2) -> str:
    """A number, or the sign for none."""
    return ABSENT if math.isnan(value) else f"{value:.{digits}f}"


def pyplot() -> Any:
    """matplotlib's, drawing into files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
