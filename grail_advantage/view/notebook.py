"""The tokens of a response in a notebook, on colours by weight or by another value.

from grail_advantage.view.notebook import token_html
token_html(tokens, weights)
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from grail_advantage.dump import DumpRow
from grail_advantage.receipt.foreign import visible
from grail_advantage.view.page import colours
from grail_advantage.view.page.index import shown_values


class TokenHtml(str):
    """HTML that a notebook displays. No scripts, and everything that a model wrote is escaped."""

    def _repr_html_(self) -> str:
        return str(self)


def token_html(
    tokens: Sequence[str],
    values: Sequence[float] | np.ndarray,
    *,
    scale: Literal["weight", "signed"] = "weight",
    name: str | None = None,
) -> TokenHtml:
    """Tokens on colours by their values, which a pointer or a screen reader gets by token.

    Args:
        tokens: texts; joined they are the response, as in a dump's row.
        values: float, as many; NaN for a token without a value.
        scale: ``weight`` by the ratio to 1, from 1/4 to 4; ``signed`` from minus to plus the largest value.
        name: of the values.

    Returns:
        A text that displays itself as the last value of a notebook's cell.

    Raises:
        ValueError: an unknown scale, or tokens and values of different numbers.
    """
    values_T = np.asarray(values, dtype=np.float64)
    if values_T.shape != (len(tokens),):
        raise ValueError(f"values has shape {values_T.shape} for {len(tokens)} tokens; give one value a token")
    if scale not in ("weight", "signed"):
        raise ValueError(f"scale={scale!r} is unknown; choose weight or signed")
    limit = float(np.abs(values_T[np.isfinite(values_T)]).max(initial=0.0))
    ticks = colours.WEIGHT_TICKS if scale == "weight" else (-limit, 0.0, limit)
    table = colours.diverging()
    name = html.escape(visible(name or ("weight" if scale == "weight" else "value"), breaks=False))

    def style(value: float) -> str:
        place = float(colours.weight_place(value)) if scale == "weight" else max(-1.0, min(1.0, value / (limit or 1.0)))
        ground = colours.pick(table, place)
        return f' style="background:{ground}"' if ground else ""

    parts = []
    for token, value in zip(tokens, values_T.tolist(), strict=True):
        title = f"{name} {value:.4g}" if math.isfinite(value) else f"no {name}"
        parts.append(f'<span title="{title}"{style(value)}>{html.escape(visible(token))}</span>')
    legend = " ".join(f"<span{style(tick)}>&nbsp;{tick:.3g}&nbsp;</span>" for tick in dict.fromkeys(ticks))
    return TokenHtml(
        f'<div style="background:{table[len(table) // 2]};color:{colours.LIGHT.text};padding:.5em;font:14px/1.6 monospace">'
        f'<div style="white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate">{"".join(parts)}</div>'
        f'<div style="margin-top:.5em;font-size:12px">{name} {legend}</div></div>'
    )


def row_html(row: DumpRow) -> TokenHtml:
    """A dump's response by its weights, or by its advantages where the method gives these. What does not train has no colour.

    Args:
        row: from :func:`grail_advantage.dump.read_dump`.
    """
    name, value_T = shown_values(row)
    scale: Literal["weight", "signed"] = "weight" if name == "weight" else "signed"
    return token_html(row.tokens, np.where(row.mask_T, value_T, np.nan), scale=scale, name=name)
