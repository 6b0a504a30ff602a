"""The first study's report, ``docs/study/REPORT.md`` and its plots, from the CSV files beside it.

Its runs were made in an earlier form of this package and are kept as figures only: ``runs.csv`` (one row a run), ``curves.csv``
and ``truth.csv`` (AUROC and other figures over all reasoning tokens). ``result_tokens.csv`` was measured afterwards, by
:func:`measure_again`: the same warm-up with the same seed, made anew, and the same sampled responses.
"""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from recipe.files import write_text
from recipe.tiny.model import build_model
from recipe.tiny.sampling import prompt_ids
from recipe.tiny.sampling import sample as sample_plainly
from recipe.tiny.warm_up import WarmUpSettings, warm_up
from study import truth
from study.statistics import Paired, holm, mean_interval, paired
from study.tables import interval, markdown_table, pyplot, signed
from study.task import MAX_RESPONSE_TOKENS, regime, solve, study_problems, study_tokenizer

BASELINE = "grpo"
MAIN = ("grail_official", "grail_robust", "oar_g", "shuffled", "oracle")
LABELS = {"oar_g": "OAR-G, variant official", "grpo": "Dr. GRPO"}
"""In place of a label of ``runs.csv`` that says too little."""
METHODS = ("grail", "grail_robust", "oar_g", "oar_g_port", "oar_p", "surprisal")
NOISY = ("oar_g", "oar_g_port")
"""Methods whose scores depend on drawn noise."""
THEN = {"grail": "grail_official", "oar_g": "oar_g_official", "oar_g_port": "oar_g_grail_port"}
"""Names in ``truth.csv`` that are others than now."""
WARM_UP = WarmUpSettings(error_rate=0.2, steps=1000, evaluate_every=250, greedy_target=1.1)
MODEL = "warmed-up model"
"""Stands for the method in the rows of its accuracies."""
TRUTH_FILE = "result_tokens.csv"
_COLUMNS = ("method", "figure", "split", "value", "low", "high", "responses")
_SAMPLES, _JUDGED = 4, 200


def measure_again(folder: Path) -> Path:
    """Make the warmed-up model of then again, judge its responses, and write :data:`TRUTH_FILE`."""
    torch.set_num_threads(1)
    write_text(folder / TRUTH_FILE, judged(*first_model()))
    return folder / TRUTH_FILE


def first_model() -> tuple[PreTrainedModel, dict[str, float]]:
    """The warmed-up model, and its accuracies on the held-out problems."""
    slips = regime("slips", 0)
    tokenizer = study_tokenizer()
    model = build_model(tokenizer, WARM_UP.seed)
    made = warm_up(
        model,
        tokenizer,
        study_problems("slips", "train", 4096, 0),
        study_problems("slips", "validation", 256, 0),
        WARM_UP,
        report=lambda line: print(line, flush=True),
        solve=lambda problem, _, rng: solve(problem, slips, rng),
        max_new_tokens=MAX_RESPONSE_TOKENS,
    )
    return model, made


def judged(model: PreTrainedModel, made: dict[str, float]) -> str:
    """The figures of its responses as CSV."""
    tokenizer = study_tokenizer()
    held_out = study_problems("slips", "validation", 256, 0)
    asked = [problem for problem in held_out for _ in range(_SAMPLES)]
    prompts = [prompt_ids(tokenizer, problem) for problem in asked]
    model.eval()
    responses = sample_plainly(
        model,
        tokenizer,
        prompts,
        max_new_tokens=MAX_RESPONSE_TOKENS,
        generator=torch.Generator().manual_seed(0),
    )
    rows = truth.rows_of(tokenizer, asked, prompts, responses, _JUDGED)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for name in ("greedy_accuracy", "sampled_accuracy"):
        writer.writerow([MODEL, name, "all", made[name], "nan", "nan", len(held_out)])
    for key, values in truth.measure(model, tokenizer, rows, METHODS).items():
        if values:
            writer.writerow([*key, *mean_interval(values), len(values)])
    return text.getvalue()


@dataclass(frozen=True)
class FirstStudy:
    """What is left of the first study."""

    runs: list[dict[str, str]]
    curves: list[dict[str, str]]
    truth: list[dict[str, str]]
    result_tokens: list[dict[str, str]]

    @classmethod
    def read(cls, folder: Path) -> FirstStudy:
        """From the folder's CSV files."""
        names = ("runs.csv", "curves.csv", "truth.csv", TRUTH_FILE)
        found = []
        for name in names:
            with (folder / name).open(encoding="utf-8", newline="") as file:
                found.append(list(csv.DictReader(file)))
        return cls(*found)

    @property
    def arms(self) -> dict[str, str]:
        """Label of every arm, the main ones first."""
        labels = {row["arm"]: row["label"] for row in self.runs} | LABELS
        order = [BASELINE, *MAIN, *(row["arm"] for row in self.runs)]
        return {arm: labels[arm] for arm in dict.fromkeys(order)}

    def figure(self, arm: str, name: str) -> dict[str, float]:
        """A figure by seed."""
        return {row["seed"]: float(row[name]) for row in self.runs if row["arm"] == arm and row[name]}

    def difference(self, arm: str, name: str) -> Paired:
        """An arm minus the baseline over the seeds of both, in points."""
        own, base = self.figure(arm, name), self.figure(BASELINE, name)
        return paired([100 * (own[seed] - base[seed]) for seed in sorted(own.keys() & base.keys())])

    def corrected(self, name: str) -> dict[str, float]:
        """Holm's p-value of every main arm in one figure."""
        return dict(zip(MAIN, holm([self.difference(arm, name).p for arm in MAIN]), strict=True))

    def token_figure(self, method: str, figure: str, split: str) -> dict[str, str] | None:
        """A row of ``result_tokens.csv``."""
        wanted = (method, figure, split)
        return next((row for row in self.result_tokens if (row["method"], row["figure"], row["split"]) == wanted), None)

    def disagreement(self, methods: Sequence[str]) -> float:
        """How far these methods' AUROC over all tokens, measured again, is from that of then at most."""
        then = {
            row["method"]: float(row["value"])
            for row in self.truth
            if row["model"] == "warmed-up" and row["metric"] == "auroc" and not row["minus"]
        }
        again = {method: self.token_figure(method, "auroc_all", "all") for method in methods}
        return max(abs(float(row["value"]) - then[THEN.get(method, method)]) for method, row in again.items())


def write_first_report(folder: Path) -> list[Path]:
    """Write the report and its plots beside the CSV files, and return their paths."""
    study = FirstStudy.read(folder)
    write_text(folder / "REPORT.md", markdown(study))
    _plot_curves(study, folder / "learning_curves.png")
    _plot_differences(study, folder / "differences.png")
    return [folder / name for name in ("REPORT.md", "learning_curves.png", "differences.png")]


def markdown(study: FirstStudy) -> str:
    """The report as a Markdown page."""
    lines = [
        "# The first study: token weights against Dr. GRPO",
        "",
        "Does it train a model better to weight the tokens of a response than to weight them all alike? 0.65 M "
        "parameters, worked "
        "arithmetic in which every step slips with probability 0.2, 12 rollout batches, five seeds. The raw runs are "
        "gone; this page "
        "is made from the CSV files beside it by `python -m study first`.",
        "",
        "## What was found",
        "",
        *[f"- {line}" for line in conclusions(study)],
        "",
        "## Main comparison",
        "",
        *_comparison(study),
        "",
        "![Paired differences](differences.png)",
        "",
        "![Learning curves](learning_curves.png)",
        "",
        "## Two seeds each: nothing is concluded",
        "",
        *_exploratory(study),
        "",
        "## Do the scores find the wrong step?",
        "",
        *_truth(study),
        "",
        "## How it was run",
        "",
        *[f"- {line}" for line in _SET_UP],
        "",
        "## What it does not show",
        "",
        *[f"- {line}" for line in _LIMITS],
    ]
    return "\n".join(lines) + "\n"


_SET_UP = (
    "Published base for every arm: advantages not divided by the group's deviation, token sum over a constant length, "
    "no KL, clip "
    "0.2 and 0.28, truncated responses without advantage. 16 problems x 8 rollouts at temperature 1 a batch, 4 epochs "
    "of one "
    "optimiser step each, AdamW at 5e-5, gradient norm 1.0.",
    "Warm-up: 1000 steps of 32 written solutions at 3e-3. Final accuracy: temperature 1, 3 samples of each of 256 "
    "held-out problems, "
    "mean of the evaluations after steps 8 and 12. Both ask the same problems with the same random numbers, so that "
    "their mean is "
    "less noisy than either, but by less than half the variance.",
    "`oar_g` is `OarConfig(method='gradient')`, that is its variant `official`. The variant `grail_port`, whose scores "
    "look better "
    "below, was never trained. `shuffled`: GRAIL's weights on other tokens of the same response. `oracle`: 20 times "
    "the weight on "
    "the tokens of the first error.",
    "torch 2.13.0, transformers 5.10.4, verl 0.9.1, numpy 2.3.5; AMD EPYC, one thread a run, 46 runs, 2026-11-21.",
)
_LIMITS = (
    "One task and one model; nothing follows for larger models or other tasks.",
    "All seeds start from one warmed-up model and are judged on the same 256 problems, so that the intervals cover "
    "neither another "
    "model nor other problems.",
    "The learning rate was not tuned, for no arm: 5e-5 was taken for all.",
    "The warmed-up model was shown slips at random and knows the sums. Whether a method helps where a model is wrong "
    "was not asked.",
    "Accuracy at temperature 1 rewards whatever makes the model surer; the published evaluation samples at 0.6.",
    "With five seeds a t-test leans on normal noise: an exact sign-flip test could not go below p = 0.06.",
    "The weights of GRAIL official make the mean absolute token advantage 1.15 times as large. That is no larger step: "
    "Adam divides "
    "by the gradient's own size, so that only the direction counts, as long as the gradient norm stays below its "
    "limit.",
    "Filler and asides hold most of the entropy and decide nothing: the task favours methods that look at "
    "probabilities of results.",
    "Wall-clock times of the arms were taken while other work ran beside them, and are left out. What methods cost "
    "stands in the "
    "[benchmarks](../../benchmarks/README.md).",
)


def conclusions(study: FirstStudy) -> list[str]:
    """What follows from the figures, by rule: a difference is one where Holm's p-value is below 0.05."""
    corrected = study.corrected("final_accuracy")
    sides: dict[str, list[str]] = defaultdict(list)
    for arm in MAIN:
        found = study.difference(arm, "final_accuracy")
        side = "no difference shown" if corrected[arm] >= 0.05 else "above" if found.mean > 0 else "below"
        sides[side].append(f"{study.arms[arm]} ({interval(found)}, p {corrected[arm]:.2f})")
    methods = [arm for arm in MAIN if arm not in ("shuffled", "oracle")]
    helped = [arm for arm in methods if study.arms[arm] in " ".join(sides["above"])]
    lines = [
        ("**No method trained better than Dr. GRPO.** " if not helped else "")
        + "Final accuracy against it, points, 95 % intervals over five seeds, p by paired t-tests with Holm's "
        + "correction for these "
        + "five: "
        + "; ".join(
            f"{side}: {', '.join(sides[side])}" for side in ("above", "below", "no difference shown") if sides[side]
        )
        + "."
    ]
    best = max(METHODS[:5], key=lambda method: _value(study, method, "auroc_all", "all"))
    lines.append(
        '**The scores\' AUROC over all tokens measures token type.** "It is a result" alone has '
        f"{_value(study, 'result_token', 'auroc_all', 'all'):.2f} (warmed-up model); the best of GRAIL and OAR, "
        f"{truth.LABELS[best]}, has {_value(study, best, 'auroc_all', 'all'):.2f}."
    )
    among = ", ".join(
        f"{truth.LABELS[method]} {_value(study, method, 'auroc_results', 'all'):.2f}" for method in METHODS
    )
    lines.append(
        f'**Among result tokens GRAIL and OAR see little of the error, surprisal most of it**: {among}. "It is a '
        f'result" has 0.50 '
        "there."
    )
    robust = [f"{_value(study, 'grail_robust', 'auroc_results', split):.2f}" for split in ("last", "not_last")]
    surprisal = [f"{_value(study, 'surprisal', 'auroc_results', split):.2f}" for split in ("last", "not_last")]
    lines.append(
        f"**It matters where the wrong step stands.** Last step, and not the last: GRAIL robust {robust[0]} and "
        f"{robust[1]}, surprisal "
        f"{surprisal[0]} and {surprisal[1]}."
    )
    lines.append(
        "The learning rate was not tuned, all seeds share one warmed-up model, and that model is already right on "
        f"{100 * _value(study, MODEL, 'greedy_accuracy', 'all'):.0f} % of the held-out problems when it decodes "
        f"greedily (sampled at "
        f"temperature 1 on {100 * _value(study, MODEL, 'sampled_accuracy', 'all'):.0f} %): training here makes a model "
        f"surer."
    )
    return lines


def _value(study: FirstStudy, method: str, figure: str, split: str) -> float:
    row = study.token_figure(method, figure, split)
    return float(row["value"]) if row else math.nan


def _comparison(study: FirstStudy) -> list[str]:
    head = ["arm", "seeds", "start, %", "final accuracy, %", "against Dr. GRPO, points", "p", "p, Holm"]
    head += ["area under the curve, points", "p, Holm", "final pass@3, points", "p, Holm"]
    corrected = {name: study.corrected(name) for name in ("final_accuracy", "area", "final_pass")}
    rows = []
    for arm in (BASELINE, *MAIN):
        row = [study.arms[arm], str(len(study.figure(arm, "final_accuracy")))]
        row += [_spread(study, arm, name) for name in ("start_accuracy", "final_accuracy")]
        if arm == BASELINE:
            rows.append([*row, *["-"] * 7])
            continue
        final = study.difference(arm, "final_accuracy")
        row += [interval(final), f"{final.p:.3f}", f"{corrected['final_accuracy'][arm]:.3f}"]
        for name in ("area", "final_pass"):
            row += [interval(study.difference(arm, name)), f"{corrected[name][arm]:.3f}"]
        rows.append(row)
    note = (
        "Mean ± standard deviation over seeds; differences within a seed, 95 % intervals by Student's distribution, "
        "paired t-tests, "
        "Holm's correction over the five arms of a column. Only final accuracy was the question; the other two columns "
        "are exploratory."
    )
    return [*markdown_table(head, rows, right=1), "", note]


def _exploratory(study: FirstStudy) -> list[str]:
    rows = [
        [
            label,
            str(study.difference(arm, "final_accuracy").count),
            signed(study.difference(arm, "final_accuracy").mean),
        ]
        for arm, label in study.arms.items()
        if arm not in (BASELINE, *MAIN)
    ]
    return markdown_table(["arm", "seeds", "final accuracy against Dr. GRPO, points"], rows, right=1)


def _truth(study: FirstStudy) -> list[str]:
    head = ["score", "all reasoning tokens", "among result tokens", "wrong step is the last", "is not the last"]
    head += ["weight of the error / of its type", "steps above filler, wrong rows", "right rows"]
    columns = [("auroc_all", "all"), ("auroc_results", "all"), ("auroc_results", "last"), ("auroc_results", "not_last")]
    columns += [("weight_ratio", "all"), ("relevance", "wrong"), ("relevance", "right")]
    labels = {method: truth.LABELS[method] for method in METHODS}
    labels |= {name: f"baseline: {label}" for name, label in truth.BASELINES.items()}
    rows = []
    for method, label in labels.items():
        cells = []
        for figure, split in columns:
            row = study.token_figure(method, figure, split)
            cells.append(
                "-" if row is None else f"{float(row['value']):.2f} [{float(row['low']):.2f}, {float(row['high']):.2f}]"
            )
        rows.append([label, *cells])
    counts = {split: study.token_figure("result_token", "auroc_all", split) for split in ("all", "last", "not_last")}
    said = {split: row["responses"] if row else "0" for split, row in counts.items()}
    gaps = [study.disagreement([method for method in METHODS if (method in NOISY) == noisy]) for noisy in (False, True)]
    same = (
        "gives the AUROC over all tokens of then to the last digit: it is the same checkpoint. OAR-G alone differs, by "
        "up to "
        f"{gaps[1]:.3f}, since its noise is drawn otherwise now"
        if gaps[0] < 1e-9
        else f"gives an AUROC over all tokens that differs by up to {gaps[0]:.3f} from that of then: it is another checkpoint"
    )
    return [
        f"{said['all']} wrong responses of the warmed-up model with exactly one wrong result; in {said['last']} it is "
        f"the last step's. AUROC, "
        "the weight ratio, and AUROC of what the answer depends on against filler and asides; means over responses, 95 "
        "% intervals.",
        "",
        *markdown_table(head, rows, right=1),
        "",
        f"Measured after the study with a warm-up made anew, which {same}. The figures over all tokens for the trained "
        f"and the untrained "
        "models stand in [truth.csv](truth.csv); these models are gone, and what they say is mostly token type.",
    ]


def _spread(study: FirstStudy, arm: str, name: str) -> str:
    values = [100 * value for value in study.figure(arm, name).values()]
    return f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}"


def _plot_curves(study: FirstStudy, path: Path) -> None:
    plots = pyplot()
    figure, axes = plots.subplots(figsize=(8, 5), dpi=120, layout="constrained")
    for arm in (BASELINE, *MAIN):
        curves: dict[int, list[float]] = defaultdict(list)
        for row in study.curves:
            if row["arm"] == arm:
                curves[int(row["step"])].append(100 * float(row["accuracy"]))
        steps = sorted(curves)
        mean = np.array([np.mean(curves[step]) for step in steps])
        spread = np.array([np.std(curves[step], ddof=1) for step in steps])
        (line,) = axes.plot(steps, mean, marker="o", markersize=3, label=study.arms[arm])
        axes.fill_between(steps, mean - spread, mean + spread, color=line.get_color(), alpha=0.08, linewidth=0)
    axes.set(xlabel="step", ylabel="held-out accuracy, %", title="Mean ± standard deviation over five seeds")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)
    plots.close(figure)


def _plot_differences(study: FirstStudy, path: Path) -> None:
    plots = pyplot()
    figure, axes = plots.subplots(figsize=(8, 2.8), dpi=120, layout="constrained")
    for height, arm in enumerate(reversed(MAIN)):
        found = study.difference(arm, "final_accuracy")
        axes.plot(found.mean, height, "o", color="#0b6e4f", markersize=5)
        axes.plot([found.low, found.high], [height, height], color="#0b6e4f", linewidth=1.5)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(MAIN)), [study.arms[arm] for arm in reversed(MAIN)])
    axes.set(xlabel="final accuracy against Dr. GRPO, points: mean and 95 % interval over five seeds")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path)
    plots.close(figure)
