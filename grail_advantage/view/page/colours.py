"""Colours of token values: even steps to the eye, and apart for every common kind of colour vision.

Computed in OKLab (Björn Ottosson, "A perceptual color space for image processing", 2020), where equal distances look equal.
A diverging scale goes from blue over the page's own ground to orange, with the same lightness and the same distance on both
sides; blue and orange differ for protan, deutan and tritan eyes alike. A sequential one goes from the ground to violet.

The place of a weight on it is its ratio to 1: a weight of 2 is as far from the middle as one of 1/2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

WEIGHT_LIMIT = 4.0
"""Weights from 1/4 to 4 differ in colour; those beyond have the colour of the end."""
WEIGHT_TICKS = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Theme:
    """Grounds and texts of a page."""

    ground: float
    """OKLab lightness of no effect."""
    end: float
    """OKLab lightness of the strongest."""
    chroma: float
    """OKLab chroma of the strongest."""
    text: str


# Text keeps a contrast of at least 4.5 to every colour of its theme (WCAG 2.2, 1.4.3).
LIGHT = Theme(ground=0.985, end=0.69, chroma=0.105, text="#111111")
DARK = Theme(ground=0.22, end=0.53, chroma=0.12, text="#f5f5f5")
_BLUE, _ORANGE, _VIOLET = 250.0, 55.0, 305.0
"""OKLab hues in degrees."""


def to_srgb(lightness: float, a: float, b: float) -> tuple[float, float, float]:
    """sRGB, from 0 to 1 where the colour can be shown."""
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short,
    )
    red, green, blue = (12.92 * v if v <= 0.0031308 else 1.055 * v ** (1 / 2.4) - 0.055 for v in linear)
    return red, green, blue


def _colour(theme: Theme, place: float, hue: float) -> str:
    """The colour at a distance from 0 (the ground) to 1 (the end)."""
    lightness = theme.ground + (theme.end - theme.ground) * place
    a, b = (theme.chroma * place * turn(math.radians(hue)) for turn in (math.cos, math.sin))
    return "#" + "".join(f"{round(255 * min(1.0, max(0.0, value))):02x}" for value in to_srgb(lightness, a, b))


def diverging(steps: int = 65, theme: Theme = LIGHT) -> list[str]:
    """``#rrggbb`` from -1 (blue) over 0 (the ground) to 1 (orange), in even steps; an odd number of them."""
    middle = steps // 2
    return [_colour(theme, abs(i - middle) / middle, _BLUE if i < middle else _ORANGE) for i in range(2 * middle + 1)]


def sequential(steps: int = 65, theme: Theme = LIGHT) -> list[str]:
    """``#rrggbb`` from 0 (the ground) to 1 (violet), in even steps."""
    return [_colour(theme, i / (steps - 1), _VIOLET) for i in range(steps)]


def weight_place(weights: np.ndarray | float) -> np.ndarray:
    """Places of weights on a diverging scale, from -1 to 1; NaN stays NaN."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.clip(np.log(np.asarray(weights, dtype=np.float64)) / math.log(WEIGHT_LIMIT), -1.0, 1.0)


def pick(table: list[str], place: float) -> str | None:
    """The colour at a place from -1 to 1, ``None`` where there is no value."""
    return table[round((place + 1) / 2 * (len(table) - 1))] if math.isfinite(place) else None
