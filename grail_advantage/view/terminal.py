"""One rollout in the terminal: its tokens on colours by weight, what it was asked, and the tokens of highest and lowest weight;
by advantage where the method gives these.

python -m grail_advantage.report RUN --terminal [--step N] [--row K]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from grail_advantage.dump import DumpHeader, DumpRow, TokenDump
from grail_advantage.receipt.foreign import visible
from grail_advantage.view.page import colours, data, index, turns

SHOWN = 8
"""Tokens in the table of extremes, at each end."""
_PLAIN = Style(dim=True)
_SPAN = Style(bold=True, underline=True)
_TABLE = colours.diverging(theme=colours.DARK)


def find_row(dump: TokenDump, step: int | None = None, row: int | None = None) -> tuple[DumpHeader | None, DumpRow]:
    """A response of a dump and the header of its file.

    Args:
        dump: the dump.
        step: by default the last with a response.
        row: its place in the step's batch; by default the first response with scores, else the first.

    Raises:
        ValueError: there is none; the message says which there are.
    """
    files = [file for file in dump.files if step is None or file.step == step]
    if not files:
        steps = ", ".join(map(str, dump.steps)) or "none"
        raise ValueError(f"--step {step} is not in {dump.folder}; its steps are {steps}")
    for file in reversed(files) if step is None else files:
        rows = [other for other in file.rows() if row is None or other.row == row]
        if rows:
            return file.header, min(rows, key=lambda other: other.no_scores is not None)
    if row is None:
        raise ValueError(f"{dump.folder} holds no responses that can be read")
    places = ", ".join(map(str, sorted(other.row for file in files[-1:] for other in file.rows())))
    raise ValueError(f"--row {row} is not in step {files[-1].step} of {dump.folder}; its responses are {places}")


def rollout_view(header: DumpHeader | None, row: DumpRow) -> RenderableType:
    """Everything about a rollout, to print with rich."""
    special = header.special_tokens if header else {}
    names = [
        visible(text or special.get(token, ""))
        for token, text in zip(row.token_ids_T.tolist(), row.tokens, strict=True)
    ]
    answer = range(row.span.content_start, row.span.content_end) if row.span else range(0)
    response = Text(no_wrap=False, overflow="fold", end="")
    name, value_T = index.shown_values(row)
    limit = float(np.abs(value_T[row.mask_T & np.isfinite(value_T)]).max(initial=0.0)) or 1.0
    place_T = colours.weight_place(value_T) if name == "weight" else value_T / limit
    for i, place in enumerate(np.where(row.mask_T, place_T, np.nan).tolist()):
        style = _ground(place)
        response.append(names[i], style + _SPAN if i in answer else style)
    parts: list[RenderableType] = [_facts(header, row), Text()]
    if row.prompt:
        parts += [Text("Prompt", style="bold"), Text(visible(row.prompt), style=_PLAIN), Text()]
    parts += [Text("Response", style="bold"), response, Text(), _legend(name, limit), Text(), _extremes(row, names)]
    return Group(*parts)


def _ground(place: float) -> Style:
    """The style of a token at a place of the scale; without a colour where it is NaN."""
    ground = colours.pick(_TABLE, place)
    return Style(color=colours.DARK.text, bgcolor=ground) if ground else _PLAIN


def _facts(header: DumpHeader | None, row: DumpRow) -> Text:
    name, value_T = index.shown_values(row)
    trained, talk, field = value_T[row.mask_T], turns.conversation(row, header), data.Verdicts().add(row).field
    failed = sum(turn.failed for turn in talk.turns)
    facts = [
        f"step {row.step}, response {row.row}, prompt {row.group}" + (f", update {row.update}" if row.update else ""),
        f"method {header.method}" if header and header.method else "",
        data.outcome_words(field).get(row.outcome or "unknown", ""),
        "" if row.reward is None else f"reward {row.reward:g}",
        f"ground truth {row.ground_truth}" if row.ground_truth is not None else "",
        f"answer {row.answer}" if row.answer is not None else "no answer",
        "truncated" if row.truncated else "",
        f"{len(row)} tokens",
        f"mean weight {trained.mean():.3f}" if len(trained) and name == "weight" else "",
        f"rewards by turn {_numbers([turn.reward for turn in talk.turns])}" if turns.has_turns(row) else "",
        f"advantages by turn {_numbers([turn.advantage for turn in talk.turns])}" if turns.has_turns(row) else "",
        f"failed calls: {failed}, verl's reward of 0 is no judgement" if failed else "",
        f"no scores: {row.no_scores}" if row.no_scores else "",
    ]
    return Text(" | ".join(visible(fact, breaks=False) for fact in facts if fact), style="bold")


def _numbers(values: Sequence[float | None]) -> str:
    return ", ".join("-" if value is None else f"{value:.3g}" for value in values)


def _legend(name: str, limit: float) -> Text:
    shown = Text(f"{name} ")
    if name == "weight":
        for weight in colours.WEIGHT_TICKS:
            edge = {colours.WEIGHT_TICKS[0]: "at most ", colours.WEIGHT_TICKS[-1]: "at least "}.get(weight, "")
            shown.append(f" {edge}{weight:g} ", _ground(float(colours.weight_place(weight))))
    else:
        for place in (-1.0, 0.0, 1.0):
            shown.append(f" {place * limit:.3g} ", _ground(place))
    shown.append("  answer", _SPAN)
    shown.append("  without a colour: does not train", _PLAIN)
    return shown


def _extremes(row: DumpRow, names: list[str]) -> RenderableType:
    """The tokens of highest and lowest weight or advantage, which also a terminal without colours shows."""
    name, value_T = index.shown_values(row)
    known = np.flatnonzero(row.mask_T & np.isfinite(value_T))
    order = known[np.argsort(-value_T[known], kind="stable")].tolist()
    if not order or value_T[order[0]] == value_T[order[-1]]:
        return Text(f"every token has the same {name}")
    count = min(SHOWN, len(order) // 2)
    title = f"tokens of highest and lowest {name}"
    shown = Table("", "token", "index", name, "score", title=title, title_justify="left")
    for label, chosen in (("highest", order[:count]), ("lowest", order[::-1][:count])):
        for i in chosen:
            score = row.score_T[i] if row.score_T is not None else math.nan
            text = Text(f'"{names[i].replace(chr(10), "")}"')
            shown.add_row(label, text, str(i), f"{value_T[i]:.3f}", f"{score:.4g}" if math.isfinite(score) else "")
            label = ""
    return shown


def print_rollout(
    dump: TokenDump, step: int | None = None, row: int | None = None, console: Console | None = None
) -> None:
    """Print one rollout of a dump; arguments and errors as for :func:`find_row`."""
    (console or Console(highlight=False)).print(rollout_view(*find_row(dump, step, row)))
