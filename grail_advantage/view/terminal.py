"""One rollout in the terminal: its tokens on colours by weight, what it was asked, and the tokens of highest and lowest weight.

python -m grail_advantage.report RUN --terminal [--step N] [--row K]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from grail_advantage.view.dump.files import DumpFile, DumpHeader, DumpRow, TokenDump
from grail_advantage.view.page import colours, data
from grail_advantage.view.page.visible import visible

SHOWN = 8
"""Tokens in the table of extremes, at each end."""
_PLAIN = Style(dim=True)
_SPAN = Style(bold=True, underline=True)


def find_row(dump: TokenDump, step: int | None = None, row: int | None = None) -> tuple[DumpHeader | None, DumpRow]:
    """A row of a dump and the header of its file.

    Args:
        dump: the dump.
        step: by default the last with a row.
        row: its place in the step's batch; by default the first row with scores, else the first.

    Raises:
        ValueError: there is none; the message says which there are.
    """
    files = [file for file in dump.files if step is None or file.step == step]
    if not files:
        steps = ", ".join(map(str, dump.steps)) or "none"
        raise ValueError(f"--step {step} is not in {dump.folder}; its steps are {steps}")
    for file in reversed(files) if step is None else files:
        chosen = _row_of(file, row)
        if chosen is not None:
            return file.header, chosen
    if row is None:
        raise ValueError(f"{dump.folder} holds no rows that can be read")
    places = ", ".join(str(other.row) for file in files[-1:] for other in file.rows())
    raise ValueError(f"--row {row} is not in step {files[-1].step} of {dump.folder}; its rows are {places}")


def _row_of(file: DumpFile, place: int | None) -> DumpRow | None:
    first = None
    for row in file.rows():
        if place == row.row or (place is None and row.neutral is None):
            return row
        first = row if first is None else first
    return first if place is None else None


def coloured_tokens(
    tokens: Sequence[str],
    places: np.ndarray,
    table: Sequence[str],
    text: str,
    *,
    special: Mapping[int, str] | None = None,
    bold: range = range(0),
) -> Text:
    """Tokens on their colours.

    Args:
        tokens: texts, joined the response.
        places: float (T,) from -1 to 1 on the scale; NaN for a token without a colour.
        table: colours of a diverging scale.
        text: colour of the text.
        special: names of tokens without text, by their index here.
        bold: indices of the answer's tokens.
    """
    shown = Text(no_wrap=False, overflow="fold", end="")
    for i, (token, place) in enumerate(zip(tokens, places.tolist(), strict=True)):
        ground = colours.pick(list(table), place)
        style = Style(color=text, bgcolor=ground) if ground else _PLAIN
        written = visible(token) or (special or {}).get(i, "")
        shown.append(written, style + _SPAN if i in bold else style)
    return shown


def rollout_view(header: DumpHeader | None, row: DumpRow, *, dark: bool = True) -> RenderableType:
    """Everything about a rollout, to print with rich."""
    theme = colours.DARK if dark else colours.LIGHT
    table = colours.diverging(theme=theme)
    names = header.special_tokens if header else {}
    special = {i: visible(names.get(token, ""), breaks=False) for i, token in enumerate(row.token_ids_T.tolist())}
    places = np.where(row.mask_T, colours.weight_place(row.weight_T), np.nan)
    answer = range(row.span.content_start, row.span.content_end) if row.span else range(0)
    parts: list[RenderableType] = [_facts(header, row), Text()]
    if row.prompt:
        parts += [Text("Prompt", style="bold"), Text(visible(row.prompt), style=_PLAIN), Text()]
    parts += [
        Text("Response", style="bold"),
        coloured_tokens(row.tokens, places, table, theme.text, special=special, bold=answer),
        Text(),
        legend(table, theme.text),
        Text(),
        extremes(row, special),
    ]
    return Group(*parts)


def _facts(header: DumpHeader | None, row: DumpRow) -> Text:
    trained = row.weight_T[row.mask_T]
    facts = [
        f"step {row.step}, row {row.row}, prompt {row.group}" + (f", update {row.update}" if row.update else ""),
        f"method {header.method}" if header and header.method else "",
        data.OUTCOME_WORDS.get(row.outcome or "unknown", ""),
        "" if row.reward is None else f"reward {row.reward:g}",
        f"ground truth {row.gold}" if row.gold is not None else "",
        f"answer {row.answer}" if row.answer is not None else "no answer",
        "truncated" if row.truncated else "",
        f"{len(row)} tokens",
        f"mean weight {trained.mean():.3f}" if len(trained) else "",
        f"no scores: {row.neutral}" if row.neutral else "",
    ]
    return Text(" | ".join(visible(fact, breaks=False) for fact in facts if fact), style="bold")


def legend(table: Sequence[str], text: str) -> Text:
    """The scale: weights on their colours."""
    shown = Text("weight ")
    for weight in colours.WEIGHT_TICKS:
        ground = colours.pick(list(table), float(colours.weight_place(weight)))
        edge = {colours.WEIGHT_TICKS[0]: "at most ", colours.WEIGHT_TICKS[-1]: "at least "}.get(weight, "")
        shown.append(f" {edge}{weight:g} ", Style(color=text, bgcolor=ground))
    shown.append("  answer", _SPAN)
    shown.append("  without a colour: does not train", _PLAIN)
    return shown


def extremes(row: DumpRow, special: Mapping[int, str]) -> RenderableType:
    """The tokens of highest and lowest weight, which also a terminal without colours shows."""
    weights = np.where(row.mask_T & np.isfinite(row.weight_T), row.weight_T, np.nan)
    known = np.flatnonzero(np.isfinite(weights))
    order = known[np.argsort(-weights[known], kind="stable")]
    if not len(order) or weights[order[0]] == weights[order[-1]]:
        return Text("every token has the same weight")
    count = min(SHOWN, len(order) // 2)
    shown = Table(
        "", "token", "index", "weight", "score", title="tokens of highest and lowest weight", title_justify="left"
    )
    for label, chosen in (("highest", order[:count]), ("lowest", order[::-1][:count])):
        for i in chosen.tolist():
            score = row.score_T[i] if row.score_T is not None else math.nan
            shown.add_row(
                label,
                Text(f'"{visible(row.tokens[i], breaks=False)}"' if row.tokens[i] else special.get(i, "")),
                str(i),
                f"{weights[i]:.3f}",
                f"{score:.4g}" if math.isfinite(score) else "",
            )
            label = ""
    return shown


def print_rollout(
    dump: TokenDump, step: int | None = None, row: int | None = None, console: Console | None = None
) -> None:
    """Print one rollout of a dump; arguments and errors as for :func:`find_row`."""
    (console or Console(highlight=False)).print(rollout_view(*find_row(dump, step, row)))
