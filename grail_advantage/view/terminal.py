"""One rollout in the terminal: its tokens on colours by weight, or by advantage where the method gives these.

python -m grail_advantage.report RUN --terminal [--step N] [--row K]
"""

from __future__ import annotations

import math

import numpy as np
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from grail_advantage.dump import DumpHeader, DumpRow
from grail_advantage.receipt.foreign import visible
from grail_advantage.view.run import shown_values

SHOWN = 8
"""Tokens in the table of extremes, at each end."""
_GROUND, _COOL, _WARM = (27, 28, 31), (44, 104, 171), (168, 82, 28)
_PLAIN, _ANSWER = Style(dim=True), Style(bold=True, underline=True)


def ground(place: float) -> Style:
    """The style of a token at a place from -1 (blue) to 1 (orange); without a colour where that is NaN."""
    if not math.isfinite(place):
        return _PLAIN
    end, share = (_COOL if place < 0 else _WARM), min(1.0, abs(place))
    red, green, blue = (round(low + (high - low) * share) for low, high in zip(_GROUND, end, strict=True))
    return Style(color="#f5f5f5", bgcolor=f"#{red:02x}{green:02x}{blue:02x}")


def print_rollout(header: DumpHeader, row: DumpRow, console: Console | None = None) -> None:
    """Print everything about a response of a dump; ``header`` is of its file."""
    console = console or Console(highlight=False)
    name, value_T = shown_values(row)
    trained = np.isfinite(value_T)
    limit = 4.0 if name == "weight" else float(np.abs(value_T[trained]).max(initial=0)) or 1.0
    with np.errstate(divide="ignore"):
        place_T = np.log(value_T) / math.log(limit) if name == "weight" else value_T / limit
    named = zip(row.token_ids_T.tolist(), row.tokens, strict=True)
    texts = [visible(text or header.special_tokens.get(token, "")) for token, text in named]
    facts = {
        f"step {row.step}, response {row.row}, prompt {row.group}": True,
        f"method {header.method}": header.method,
        {"right": "correct", "wrong": "incorrect"}.get(row.outcome, "outcome unknown"): True,
        f"reward {row.reward}": row.reward is not None,
        f"ground truth {row.ground_truth}": row.ground_truth is not None,
        f"answer {row.answer}": row.answer is not None,
        "truncated": row.truncated,
        f"{len(row)} tokens": True,
        f"mean {name} {value_T[trained].mean() if trained.any() else math.nan:.3f}": True,
        f"no scores: {row.no_scores}": row.no_scores,
    }
    shown = " | ".join(visible(fact, breaks=False) for fact, there in facts.items() if there)
    console.print(Text(shown, style="bold"), Text(visible(row.prompt), style=_PLAIN), sep="\n\n", end="\n\n")
    response = Text(overflow="fold", end="\n\n")
    inside = range(row.span.content_start, row.span.content_end) if row.span else range(0)
    for t, text in enumerate(texts):
        response.append(text, ground(place_T[t]) + _ANSWER if t in inside else ground(place_T[t]))
    console.print(response, end="")
    legend = Text(f"{name} ")
    for place in (-1, -0.5, 0, 0.5, 1):
        legend.append(f" {limit**place if name == 'weight' else limit * place:.3g} ", ground(place))
    legend.append("  answer", _ANSWER).append("  without a colour: does not train", _PLAIN)
    console.print(legend)
    order = np.flatnonzero(trained)[np.argsort(-value_T[trained], kind="stable")].tolist()
    ends = Table("token", "index", name, "score", title=f"tokens of highest and lowest {name}", title_justify="left")
    count = min(SHOWN, len(order) // 2)
    for t in order[:count] + order[len(order) - count :]:
        score = math.nan if row.score_T is None else row.score_T[t]
        ends.add_row(Text(f'"{texts[t]}"'.replace("\n", "")), str(t), f"{value_T[t]:.3f}", f"{score:.4g}")
    console.print(ends)
