"""The sentences of a page: its title, notes and last lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from grail_advantage import __version__
from grail_advantage.answers.missing import is_low
from grail_advantage.view.dump.files import DumpHeader
from grail_advantage.view.page import data, pack
from grail_advantage.view.page.collection import Collection


def names(folders: Sequence[Path]) -> list[str]:
    """Ends of the paths, as long as the runs need to differ in them."""
    parts = []
    for folder in folders:
        whole = folder.resolve().parts
        parts.append(whole[:-1] if whole[-1] == data.TOKENS and len(whole) > 2 else whole)
    for length in range(1, max(map(len, parts)) + 1):
        ends = ["/".join(part[-length:]) for part in parts]
        if len(set(ends)) == len(ends):
            # A run's folder is often named by its method alone.
            return ["/".join(part[-max(length, 3) :]).lstrip("/") for part in parts] if len(ends) == 1 else ends
    return [f"{name} ({number})" for number, name in enumerate(ends, start=1)]


def subtitle(runs: Sequence[data.Run], headers: Sequence[DumpHeader | None], collection: Collection) -> str:
    parts = []
    for header in headers[:1]:
        if header is not None:
            parts += [header.method, Path(header.model).name]
    steps = sorted({step for run in runs for step in run.metrics} | {group["step"] for group in collection.groups})
    if len(steps) > 1:
        parts.append(f"steps {steps[0]} to {steps[-1]}")
    if collection.kept:
        tokens = sum(kept.facts["length"] for kept in collection.kept)
        parts.append(f"{len(collection.kept):,} rollouts, {tokens:,} tokens")
    return " · ".join(part for part in parts if part)


def foot(headers: Sequence[DumpHeader | None], bits: int, apart: Mapping[str, float], blocks: bool) -> list[str]:
    lines = []
    for header in headers[:1]:
        if header is None or not header.method:
            continue
        options = ", ".join(f"{name} {value}" for name, value in header.options.items() if value is not None)
        temperature = "" if header.temperature is None else f" Temperature {header.temperature:g}."
        lines.append(f"Method {header.method}{': ' + options if options else ''}.{temperature}")
    if blocks and bits == pack.EXACT:
        lines.append("Every value is the run's own, in float32.")
    elif blocks:
        shown_names = {"weight": "weights", "score": "scores", "surprisal": "surprisals", "entropy": "entropies"}
        most = ", ".join(
            f"{shown} by at most {apart[kind]:.2g}" for kind, shown in shown_names.items() if kind in apart
        )
        lines.append(
            f"To keep the file small, values are rounded to {pack.levels_of('weight', bits):,} levels over each response's own "
            f"range, surprisal and entropy to {pack.levels_of('entropy', bits):,}: {most}. The token dump has them exactly."
        )
    lines.append(
        f"Written by grail_advantage {__version__}. This file needs no network. Plots: uPlot 1.6.32, MIT licence."
    )
    return lines


def nothing(runs: Sequence[data.Run]) -> str:
    if runs[0].dump is None:
        return (
            "This run wrote no token dump, so there are no rollouts to read. Train with +algorithm.token_dump.folder=FOLDER "
            f"({data.TOKENS} in the run's folder) to see every token's weight here."
        )
    return "The token dump holds no rollout that can be read; the notes at the top say what is wrong with it."


def notes(runs: Sequence[data.Run], collection: Collection, asked: int) -> list[str]:
    """Everything that is left out or could not be read, after rows that lack what the method weighs."""
    lines = []
    for number, run in enumerate(runs):
        header = run.dump.files[0].header if run.dump is not None and run.dump.files else None
        answered, rows = collection.answered.get(number, (0, 0))
        if header is not None and header.answer is not None and is_low(answered, rows):
            lines.append(
                f"{answered:,} of the {rows:,} rollouts have an answer in the format {header.answer}. {header.method} weighs "
                "every token of the others 1, so that they train as with uniform. Is algorithm.token_weights.answer right?"
            )
    count = len(collection.kept)
    if collection.seen > count:
        why = "--rollouts" if asked == count else "--megabytes"
        lines.append(
            f"The page holds {count:,} of the {collection.seen:,} rollouts in the dump, whole problems evenly over the steps "
            f"({why} for more). Means by place and step are over all of them."
        )
    return lines + [str(problem) for run in runs for problem in dict.fromkeys(run.problems)]
