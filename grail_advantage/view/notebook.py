"""One row of tokens in a notebook, on colours by weight or by another value.

from grail_advantage.view.notebook import token_html
token_html(tokens, weights)
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import numpy as np

from grail_advantage.view.dump.files import DumpRow
from grail_advantage.view.page import colours
from grail_advantage.view.page.visible import visible


class TokenHtml(str):
    """HTML that a notebook displays. No scripts, and everything that a model wrote is escaped."""

    def _repr_html_(self) -> str:
        return str(self)


def token_html(
    tokens: Sequence[str],
    values: Sequence[float] | np.ndarray,
    *,
    scale: Literal["weight", "signed", "from zero"] = "weight",
    name: str | None = None,
    dark: bool = False,
) -> TokenHtml:
    """Tokens on colours by their values, which a pointer or a screen reader gets by token.

    Args:
        tokens: texts; joined they are the response, as in a dump's row.
        values: float, as many; NaN for a token without a value.
        scale: ``weight`` by the ratio to 1, from 1/4 to 4; ``signed`` from minus to plus the largest value; ``from zero`` to
            the largest value, for scores, entropies or negative log-probabilities.
        name: of the values; the scale's by default.
        dark: for a dark page.

    Returns:
        A text that displays itself as the last value of a notebook's cell.

    Raises:
        ValueError: an unknown scale, or tokens and values of different numbers.
    """
    values_T = np.asarray(values, dtype=np.float64)
    if values_T.shape != (len(tokens),):
        raise ValueError(f"values has shape {values_T.shape} for {len(tokens)} tokens; give one value a token")
    theme = colours.DARK if dark else colours.LIGHT
    finite = values_T[np.isfinite(values_T)]
    limit = float(np.abs(finite).max()) if len(finite) else 0.0
    to_place: Callable[..., np.ndarray]
    ticks: tuple[float, ...]
    if scale == "weight":
        to_place, ticks = colours.weight_place, colours.WEIGHT_TICKS
    elif scale == "signed":
        to_place, ticks = partial(colours.signed_place, limit=limit), (-limit, 0.0, limit)
    elif scale == "from zero":
        to_place, ticks = partial(colours.share_place, lowest=0.0, highest=limit), (0.0, limit)
    else:
        raise ValueError(f"scale={scale!r} is unknown; choose weight, signed or from zero")
    signed = scale != "from zero"
    table = colours.diverging(theme=theme) if signed else colours.sequential(theme=theme)
    name = html.escape(visible(name or {"weight": "weight"}.get(scale, "value"), breaks=False))

    parts = []
    for token, value, place in zip(tokens, values_T.tolist(), to_place(values_T).tolist(), strict=True):
        ground = colours.pick(table, place, signed=signed)
        style = f' style="background:{ground}"' if ground else ""
        title = f"{name} {value:.4g}" if math.isfinite(value) else f"no {name}"
        parts.append(f'<span title="{title}"{style}>{html.escape(visible(token))}</span>')
    edges = {ticks[0]: "at most ", ticks[-1]: "at least "} if scale == "weight" else {}
    legend = ""
    for tick in dict.fromkeys(ticks):
        ground = colours.pick(table, float(to_place(tick)), signed=signed)
        legend += f'<span style="background:{ground};padding:0 .5em">{edges.get(tick, "")}{tick:.3g}</span>'
    ground = colours.diverging(theme=theme)[len(colours.diverging(theme=theme)) // 2]
    return TokenHtml(
        f'<div style="background:{ground};color:{theme.text};padding:.5em;font:14px/1.6 monospace">'
        f'<div style="white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate">{"".join(parts)}</div>'
        f'<div style="margin-top:.5em;font-size:12px">{name} {legend}</div></div>'
    )


def row_html(row: DumpRow, column: str = "weight", *, dark: bool = False) -> TokenHtml:
    """A dump's row by one of its columns.

    Args:
        row: from :func:`grail_advantage.view.dump.files.read_dump`.
        column: ``weight``, ``score``, ``advantage``, ``base_advantage``, ``entropy`` or ``surprisal`` (minus the old
            log-probability). Tokens that do not train get no colour.
        dark: for a dark page.

    Raises:
        ValueError: a column that the row does not have.
    """
    if column == "surprisal":
        values_T = None if row.old_log_prob_T is None else -row.old_log_prob_T
    else:
        values_T = getattr(row, f"{column}_T") if column in ROW_SCALES else None
    if values_T is None:
        known = [name for name in ROW_SCALES if name == "surprisal" or getattr(row, f"{name}_T") is not None]
        raise ValueError(f"column={column!r} is not in this row; it has {', '.join(known)}")
    shown = np.where(row.mask_T, values_T, np.nan)
    return token_html(row.tokens, shown, scale=ROW_SCALES[column], name=column.replace("_", " "), dark=dark)


ROW_SCALES: dict[str, Literal["weight", "signed", "from zero"]] = {
    "weight": "weight",
    "score": "from zero",
    "advantage": "signed",
    "base_advantage": "signed",
    "entropy": "from zero",
    "surprisal": "from zero",
}
"""The columns that :func:`row_html` shows, and how."""
