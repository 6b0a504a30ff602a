"""The colour scales, measured: even, in gamut, legible, and told apart by every common kind of colour vision."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from grail_advantage.report import colours
from grail_advantage.report.colours import DARK, LIGHT, Theme

# Viénot, Brettel and Mollon (1999) for protanopia and deuteranopia, on linear RGB.


def _linear(colour: str) -> np.ndarray:
    srgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def _oklab(linear: np.ndarray) -> np.ndarray:
    lms = np.cbrt(
        np.array([[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
                  [0.0883024619, 0.2817188376, 0.6299787005]]) @ linear
    )  # fmt: skip
    return np.array([[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
                     [0.0259040371, 0.7827717662, -0.8086757660]]) @ lms  # fmt: skip


def _luminance(colour: str) -> float:
    return float(np.array([0.2126, 0.7152, 0.0722]) @ _linear(colour))


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_scales(theme: Theme) -> None:
    for table in (colours.diverging(9, theme), colours.sequential(5, theme)):
        labs = [_oklab(_linear(colour)) for colour in table]
        distances = [np.linalg.norm(b - a) for a, b in itertools.pairwise(labs)]
        assert max(distances) / min(distances) < 1.12, "even to the eye, with eight bits a channel"
    table = colours.diverging(65, theme)
    assert len(table) == 65 == len(colours.sequential(65, theme)) and table[32] == colours.sequential(65, theme)[0]
    lightness = [_oklab(_linear(colour))[0] for colour in table]
    assert np.allclose(lightness, lightness[::-1], atol=0.004), "both sides are equally light"
    assert (np.diff(lightness[32::2]) * (-1 if theme is LIGHT else 1) > 0).all()
    for hue, place in itertools.product((colours._BLUE, colours._ORANGE, colours._VIOLET), np.linspace(0, 1, 33)):
        chroma, angle = theme.chroma * place, np.radians(hue)
        at = theme.ground + (theme.end - theme.ground) * place
        rgb = colours.to_srgb(at, chroma * np.cos(angle), chroma * np.sin(angle))
        assert min(rgb) > -0.002 and max(rgb) < 1.002, (hue, place, rgb)
    for colour in {*table, *colours.sequential(65, theme)}:
        low, high = sorted((_luminance(colour), _luminance(theme.text)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, "text is legible on every colour"


def test_places() -> None:
    assert colours.to_srgb(1.0, 0.0, 0.0) == pytest.approx((1, 1, 1), abs=1e-4)
    assert colours.to_srgb(*_oklab(np.array([1.0, 0.0, 0.0]))) == pytest.approx((1, 0, 0), abs=1e-4)
    weights = np.array([0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 5.0, np.nan])
    assert colours.weight_place(weights) == pytest.approx([-1, -1, -0.5, 0, 0.5, 1, 1, np.nan], nan_ok=True)
    assert colours.signed_place(np.array([-3.0, 0.0, 1.0]), 2.0).tolist() == [-1.0, 0.0, 0.5]
    assert colours.signed_place(np.array([0.0]), 0.0).tolist() == [0.0]
    assert colours.share_place(np.array([1.0, 2.0, 9.0]), 1.0, 3.0).tolist() == [0.0, 0.5, 1.0]
    assert colours.share_place(np.array([2.0]), 2.0, 2.0).tolist() == [0.0]
    table = ["low", "middle", "high"]
    assert [colours.pick(table, place) for place in (-1.0, 0.0, 0.9, float("nan"))] == ["low", "middle", "high", None]
    assert colours.pick(table, 0.0, signed=False) == "low"
