"""Write tables of the benchmarks' results into ``benchmarks/README.md``, and a summary into ``docs/zero_advantage.md``.

    python -m benchmarks.report

Reads ``results/*.json`` and replaces the text between the markers of the two pages. Every figure comes from recorded seconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.bench_training_step import GRPO, ratios
from benchmarks.timer import RESULTS
from grail_advantage.method import methods as registered
from recipe.marked_text import table, write_marked

README = Path(__file__).parent / "README.md"
SUMMARY = Path(__file__).parents[1] / "docs/zero_advantage.md"
UNWEIGHTED, GRAIL = ("uniform, skipping", "GRPO, skipping"), "GRAIL, skipping"
"""Variants that leave responses out: without weights (``uniform``, or in earlier results GRPO's own advantages), and GRAIL."""
Found = dict[str, Any]


def of_methods(result: Found) -> list[str]:
    """What each method adds."""
    setup, baseline, methods = result["setup"], result["baseline"], result["methods"]
    rows = []
    for name, of in methods.items():
        if name not in registered():  # it was when this was recorded
            continue
        sampled = 0 < of["timed_rows"] < of["rows"]
        note = f"pass timed on {of['timed_rows']} responses, x {of['rows'] / of['timed_rows']:g}" if sampled else ""
        cells = f"{of['forwards']:.2f}", f"{of['ratio']:.3f}", spread(of["ratios"], 3)
        rows.append([f"`{name}`", of["rows"], *cells, note])
    head = ["method", "responses scored", "adds, forward passes", f"x {baseline}, by stages"]
    return [
        f"Model and batch: {_shape(setup)}; {setup['wrong_rows']} of {setup['rows']} responses incorrect, "
        f"{setup['prompts']} prompts; gradient checkpointing {result['checkpointing']}. 1 epoch, "
        f"{len(methods[baseline]['repeats'])} repeats.",
        "",
        *table([*head, f"x {baseline}, whole steps (lowest to highest)", ""], rows, right=1),
    ]


def of_zero_advantage(result: Found) -> list[str]:
    """The training side with responses left out."""
    rows = []
    for run in result["runs"]:
        shares = [f"{run[of] / result['setup']['rows']:.0%}" for of in ("zero_advantage_rows", "selected_rows")]
        for epochs in result["epochs"]:
            variants = (_unweighted(run), "GRAIL", GRAIL)
            cells = [spread(ratios(run["repeats"], variant, GRPO, epochs)) for variant in variants]
            rows.append([run["checkpointing"], *shares, epochs, *cells])
    head = ["checkpointing", "zero-advantage responses", "scored", "epochs"]
    head += ["GRPO or uniform, leaving them out", "GRAIL", "GRAIL, leaving them out"]
    return [
        f"Model and batch: {_shape(result['setup'])}. Multiples of verl's GRPO, which runs every response; medians of "
        f"{len(result['runs'][0]['repeats'])} repeats, lowest to highest.",
        "",
        *table(head, rows, right=1),
    ]


def render(folder: Path) -> str:
    """All tables in Markdown."""
    passages = {"zero_advantage": ("Zero-advantage responses", of_zero_advantage)}
    passages |= {"methods": ("What each method adds to a step", of_methods)}
    lines: list[str] = []
    for name, (heading, passage) in passages.items():
        for result in _results(folder, name):
            versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
            origin = (
                f"`{result['command']}`, {result['date']}, load average {result['load_at_start']} at the start. "
                f"{result['hardware']}. {versions}. Seconds are {result['clock']}."
            )
            lines += [f"### {heading}, {result['device']}", "", origin, "", *passage(result), ""]
    return "\n".join(lines).strip()


def summary(folder: Path) -> str:
    """For the front page: the training side without zero-advantage responses, and what of it is GRAIL's own."""
    lines: list[str] = []
    for result in _results(folder, "zero_advantage"):
        runs = [run for run in result["runs"] if run["checkpointing"] == "off"]
        uniform, total = _unweighted(runs[0]), result["setup"]["rows"]
        compared = {
            "`uniform`, which leaves them out, to GRPO": (uniform, GRPO),
            "GRAIL, which leaves them out, to GRPO": (GRAIL, GRPO),
            "GRAIL to `uniform`": (GRAIL, uniform),
        }
        rows = [["scored by GRAIL", *(f"{run['selected_rows'] / total:.0%}" for run in runs)]]
        rows += [[label, *(spread(ratios(run["repeats"], *of, 1)) for run in runs)] for label, of in compared.items()]
        shares = [f"{run['zero_advantage_rows'] / total:.0%}" for run in runs]
        lines += [
            f"Training side of a step of one epoch, without gradient checkpointing ({result['device'].upper()}; median of "
            f"{len(runs[0]['repeats'])} repeats, lowest to highest). GRPO is verl's, which runs every response:",
            "",
            *table(["zero-advantage responses", *shares], rows, right=1),
            "",
        ]
    return "\n".join(lines).rstrip()


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, lowest and highest."""
    middle, low, high = (f"{value:.{digits}f}" for value in (median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def _unweighted(run: Found) -> str:
    return next(name for name in UNWEIGHTED if name in run["repeats"][0])


def _results(folder: Path, name: str) -> list[Found]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{name}-*.json"))]


def _shape(setup: Found) -> str:
    return (
        f"{setup['layers']} layers, width {setup['hidden']}, vocabulary {setup['vocabulary']}, computing in "
        f"{setup['compute_dtype']} on {setup['parameter_dtype']} parameters; {setup['rows']} responses x {setup['tokens']} "
        f"tokens, micro-batches of {setup['micro_batch_rows']} responses, {setup['layout']}, {setup['attention']}"
    )


if __name__ == "__main__":
    write_marked(README, "results", render(RESULTS))
    write_marked(SUMMARY, "cost", summary(RESULTS))
