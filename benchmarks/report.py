"""Write tables of the benchmarks' results into ``benchmarks/README.md``.

    python benchmarks/report.py

Reads ``results/*.json`` and replaces the text between the markers of that page, and the summary
between those of the project's front page. Every figure comes from the recorded seconds and bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

from measuring import RESULTS, median, show

from recipe.marked_text import write_marked

MARKER, FRONT_PAGE_MARKER = "results", "cost"
README = Path(__file__).parent / "README.md"
FRONT_PAGE = Path(__file__).parents[1] / "README.md"
STOCK = "grpo"
"""verl's own trainer, in whole steps."""


def methods(result: dict[str, Any]) -> list[str]:
    setup, baseline = result["setup"], result["baseline"]
    repeats = len(result["methods"][baseline]["repeats"])
    lines = [
        f"### What each method adds to a step, {result['device']}",
        "",
        *_origin(result),
        f"Model and batch: {_shape(setup)}; {setup['wrong_rows']} of {setup['rows']} rows wrong, {setup['prompts']} prompts; "
        f"gradient checkpointing {result['checkpointing']}. 1 epoch, {repeats} repeats.",
        "",
        f"| method | rows scored | adds, F | x {baseline}, by stages | x {baseline}, whole steps (lowest to highest) | |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for name, of_method in result["methods"].items():
        rows, timed, ratios = of_method["rows"], of_method["timed_rows"], of_method["ratios"]
        sampled = f"pass timed on {timed} rows, x {rows / timed:g}" if 0 < timed < rows else ""
        lines.append(
            f"| `{name}` | {rows} | {of_method['forwards']:.2f} | {of_method['ratio']:.3f} "
            f"| {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) | {sampled} |"
        )
    return [*lines, ""]


PARTS = {"generation": ("VLLM", "vLLM", "AgentLoop"), "training": ("WorkerDict",), "driver": ("TaskRunner",)}
"""Titles of the processes of a verl run hold one of these; whatever else runs is Ray, TransferQueue and the reward."""


def neutral_rows(result: dict[str, Any]) -> list[str]:
    setup = result["setup"]
    lines = [
        f"### Rows that train nothing, {result['device']}",
        "",
        *_origin(result),
        f"Model and batch: {_shape(setup)}. Multiples of verl's GRPO, which runs every row; medians of "
        f"{len(result['runs'][0]['repeats'])} repeats, lowest to highest.",
        "",
        "| checkpointing | rows without an advantage | rows scored | epochs | GRPO or uniform, leaving them out | GRAIL | "
        "GRAIL, leaving them out | the same, x without weights |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for run in result["runs"]:
        for epochs in result["epochs"]:
            unweighted = skipping_without_weights(run)
            own, grail, skipping = (
                of_steps(run, name, "GRPO", epochs) for name in (unweighted, "GRAIL", "GRAIL, skipping")
            )
            share = of_steps(run, "GRAIL, skipping", unweighted, epochs)
            lines.append(
                f"| {run['checkpointing']} | {run['neutral_rows'] / setup['rows']:.0%} | "
                f"{run['selected_rows'] / setup['rows']:.0%} | {epochs} | {_spread(own)} | {_spread(grail)} | "
                f"{_spread(skipping)} | {median(share):.2f} |"
            )
    return [*lines, ""]


def skipping_without_weights(run: dict[str, Any]) -> str:
    """The variant that leaves rows out and has no weights: ``uniform``, or in earlier results GRPO's own advantages."""
    return next(name for name in ("uniform, skipping", "GRPO, skipping") if name in run["repeats"][0])


def of_steps(run: dict[str, Any], variant: str, baseline: str, epochs: int) -> list[float]:
    """Steps of so many epochs as multiples of the baseline's of the same repeat."""
    return [sum(of[variant][: epochs + 1]) / sum(of[baseline][: epochs + 1]) for of in run["repeats"]]


def _spread(ratios: list[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def whole_step(result: dict[str, Any]) -> list[str]:
    lines = [
        f"### A whole step of a verl run, cpu{', model trained before' if 'trained' in result['name'] else ''}",
        "",
        *_origin(result),
        "Means of the steps of each method, in turn in one run; 95 % intervals by drawing the rounds again. `uniform` and "
        "GRAIL leave out the rows that train nothing, verl's GRPO runs them.",
        "",
        "| model | steps of each | rows left out | rows scored | GRPO, s | uniform, x GRPO | GRAIL, x GRPO (95 %) "
        "| GRAIL, x uniform (95 %) | training alone: GRAIL, x GRPO "
        "| of GRPO's seconds: generation, training, driver, rest |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for run in result["runs"]:
        of_method, seconds = _steps_of_methods(run), _seconds(run)
        parts = {name: [_by_part(step["seconds"]) for step in steps] for name, steps in of_method.items()}
        training = {name: sum(step["training"] for step in steps) for name, steps in parts.items()}
        total, count = sum(seconds[STOCK]), len(seconds[STOCK])
        shares = [sum(step[part] for step in parts[STOCK]) / total for part in (*PARTS, "rest")]
        lines.append(
            f"| {run['name']}: {run['layers']} layers, feed-forward {run['intermediate']}, "
            f"{run['prompts']} x {run['rollouts']} responses, checkpointing {'on' if run['checkpointing'] else 'off'} "
            f"| {count} | {_left_out(run):.0%} | {_mean(of_method['grail'], 'selected_rate'):.0%} | {total / count:.1f} "
            f"| {ratio_of_sums(seconds['uniform'], seconds[STOCK])[0]:.3f} | {_interval(seconds['grail'], seconds[STOCK], 3)} "
            f"| {_interval(seconds['grail'], seconds['uniform'], 3)} | {training['grail'] / training[STOCK]:.3f} "
            f"| {', '.join(f'{share:.0%}' for share in shares)} |"
        )
    return [*lines, ""]


def _steps_of_methods(run: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {name: [step for step in run["steps"] if step["method"] == name] for name in (STOCK, "uniform", "grail")}


def _seconds(run: dict[str, Any]) -> dict[str, list[float]]:
    return {name: [sum(step["seconds"].values()) for step in steps] for name, steps in _steps_of_methods(run).items()}


def _mean(steps: list[dict[str, Any]], name: str) -> float:
    return statistics.fmean(step[name] for step in steps)


def _left_out(run: dict[str, Any]) -> float:
    return _mean(_steps_of_methods(run)["grail"], "skipped_rows") / (run["prompts"] * run["rollouts"])


def _interval(ours: list[float], theirs: list[float], digits: int) -> str:
    ratio, low, high = (f"{value:.{digits}f}" for value in ratio_of_sums(ours, theirs))
    return f"{ratio} ({low} to {high})"


def _by_part(seconds: dict[str, float]) -> dict[str, float]:
    totals = dict.fromkeys((*PARTS, "rest"), 0.0)
    for title, value in seconds.items():
        part = next((part for part, words in PARTS.items() if any(word in title for word in words)), "rest")
        totals[part] += value
    return totals


def ratio_of_sums(ours: list[float], theirs: list[float], draws: int = 10_000) -> tuple[float, float, float]:
    """The ratio, and its 95 % interval by drawing rounds with replacement."""
    generator = random.Random(0)
    pairs = list(zip(ours, theirs, strict=True))

    def of(chosen: list[tuple[float, float]]) -> float:
        return sum(own for own, _ in chosen) / sum(their for _, their in chosen)

    drawn = sorted(of(generator.choices(pairs, k=len(pairs))) for _ in range(draws))
    return of(pairs), drawn[int(0.025 * draws)], drawn[int(0.975 * draws) - 1]


def _origin(result: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return [
        f"`{result['command']}`, {result['date']}, load average {result['load_at_start']} at the start. "
        f"{result['hardware']}. {versions}. Seconds are {result['clock']}.",
        "",
    ]


def _shape(setup: dict[str, Any]) -> str:
    return (
        f"{setup['layers']} layers, width {setup['hidden']}, vocabulary {setup['vocabulary']}, computing in "
        f"{setup['compute_dtype']} on {setup['parameter_dtype']} parameters; {setup['rows']} rows x {setup['tokens']} tokens, "
        f"micro-batches of {setup['micro_batch_rows']} rows, {setup['layout']}, {setup['attention']}"
    )


def render(folder: Path) -> str:
    """All tables in Markdown."""
    lines: list[str] = []
    passages = {
        "neutral_rows": neutral_rows,
        "whole_step": whole_step,
        "methods": methods,
    }
    for name, passage in passages.items():
        for path in sorted(folder.glob(f"{name}-*.json")):
            lines += passage(json.loads(path.read_text(encoding="utf-8")))
    return "\n".join(lines).strip()


def summary(folder: Path) -> str:
    """For the front page: what GRAIL as published costs, against verl's GRPO, and what leaving rows out saves."""
    tables, sentences = [], []
    for path in sorted(folder.glob("neutral_rows-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        tables += _front_page_table(result)
        if checkpointed := _by_share(result, "on"):
            ratios = [of_steps(run, "GRAIL, skipping", "GRPO", 1) for run in checkpointed]
            apart = max(max(of_cell) - min(of_cell) for of_cell in ratios)
            sentences.append(
                f"With gradient checkpointing, GRAIL without these rows took {', '.join(f'{median(r):.2f}' for r in ratios)}, "
                f"where repeats lie up to {apart:.2f} apart."
            )
    runs = [
        run
        for path in sorted(folder.glob("whole_step-*.json"))
        for run in json.loads(path.read_text(encoding="utf-8"))["runs"]
    ]
    if runs:
        measured = "; ".join(
            f"{_interval(_seconds(run)['grail'], _seconds(run)[STOCK], 2)} with {run['layers']} layers"
            f"{' and checkpointing' if run['checkpointing'] else ''}, {_left_out(run):.0%} of the rows left out "
            f"({_interval(_seconds(run)['grail'], _seconds(run)['uniform'], 2)} of `uniform`'s, which leaves them out too)"
            for run in runs
        )
        sentences.append(
            f"Whole verl steps with GRAIL, generation included, took, as a multiple of GRPO's, {measured}."
        )
    return "\n".join([*tables, " ".join(sentences)]).rstrip()


def _by_share(result: dict[str, Any], checkpointing: str) -> list[dict[str, Any]]:
    runs = [run for run in result["runs"] if run["checkpointing"] == checkpointing]
    return sorted(runs, key=lambda run: run["neutral_rows"])


def _front_page_table(result: dict[str, Any]) -> list[str]:
    runs = _by_share(result, "off")
    shares = [f"{run['neutral_rows'] / result['setup']['rows']:.0%}" for run in runs]
    lines = [
        f"Training side of a step of one epoch, without gradient checkpointing, as a multiple of verl's GRPO, which runs every "
        f"row ({result['device'].upper()}, {len(result['runs'][0]['repeats'])} repeats: median, lowest to highest):",
        "",
        f"| rows without an advantage | {' | '.join(shares)} |",
        "|---|" + "--:|" * len(runs),
    ]
    variants = {
        "GRAIL": ["GRAIL"] * len(runs),
        "GRAIL, without them": ["GRAIL, skipping"] * len(runs),
        "`uniform`, without them": [skipping_without_weights(run) for run in runs],
    }
    for label, of_runs in variants.items():
        cells = [_spread(of_steps(run, variant, "GRPO", 1)) for run, variant in zip(runs, of_runs, strict=True)]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with the benchmarks' JSON files")
    parser.add_argument("--readme", type=Path, default=README, help="file with the markers to write between")
    parser.add_argument("--front-page", type=Path, default=FRONT_PAGE, help="file with the markers of the summary")
    args = parser.parse_args()
    write_marked(args.readme, MARKER, render(args.results))
    write_marked(args.front_page, FRONT_PAGE_MARKER, summary(args.results))
    show(f"wrote {args.readme}")


if __name__ == "__main__":
    main()
