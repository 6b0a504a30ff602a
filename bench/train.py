"""Training: a method against ``uniform`` and against its shuffled control, on the same seeds, each at a tuned learning rate.

Runs of a seed start from the same SFT-initialised model, see the same problems and draw from the same random numbers. The loss
is the clipped surrogate, summed over tokens and divided by a constant (Dr. GRPO), without a second clip or a KL term. All tune
their learning rate on the same grid and seeds; the grid is extended where one of its ends wins.

A run is named as its method, and ``NAME shuffled`` is its control; ``NAME@rollouts=12`` and ``NAME@epochs=1`` change a setting.

Shape suffixes: B responses, L prompt + response, P problems.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from bench import page, policy
from bench.methods import BASELINE, NeedsMoreError, check_needs, credit, shuffled, signal_of, source_digest
from bench.page import read_rows, write_rows
from bench.policy import SampledBatch, numbers
from bench.statistics import holm, mean_of, pass_at
from bench.task import MAX_RESPONSE_TOKENS, TASKS, BenchProblem, task_problems, task_tokenizer
from bench.work import PACKAGES
from grail_advantage.dump.whole_file import write_whole
from recipe.hashing import digest
from verl_cpu.tiny.sampling import prompt_ids, sample

SHUFFLED = " shuffled"
Row = dict[str, Any]
TUNING_SEED = 2001
EXTENSIONS = 2
"""Most learning rates that are added to a grid."""
FIELDS = ("bench_first_wrong", "bench_kinds")  # what methods may read beside; training computes no exact credit
MICRO_BATCH = 32
COLUMNS = (
    "task", "seed", "run", "rate", "use", "pass@1", "pass@8", "last pass@1", "entropy", "processor seconds", "tokens generated",
    "correct", "settings", "source", "versions", "date",
)  # fmt: skip
"""``pass@1``, ``pass@8``: the outcome; ``correct``: correct samples of each problem, a digit each, evaluation by
evaluation."""


@dataclass(frozen=True)
class TrainSettings:
    """Settings that all runs share, unless their names change them."""

    sft_steps: int = 1000
    batches: int = 12
    prompts: int = 16
    """Problems of a batch."""
    rollouts: int = 8
    """Responses a problem."""
    epochs: int = 4
    """Optimiser steps on each batch, all of it at once."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    gradient_norm: float = 1.0
    evaluate_at: tuple[int, ...] = (8, 12)
    """Batches after which held-out accuracy is measured; the outcome is the mean over the last two."""
    temperature: float = 0.6
    """Of the evaluation."""
    samples: int = 8
    """Of each held-out problem."""


@dataclass(frozen=True)
class Run:
    """One training run."""

    name: str
    task: str
    seed: int
    rate: float
    settings: TrainSettings
    folder: Path

    @cached_property
    def spec(self) -> str:
        """Its method."""
        return self.name.removesuffix(SHUFFLED).partition("@")[0]

    @cached_property
    def own_settings(self) -> TrainSettings:
        """The settings with the changes that its name says; ValueError for another one than of rollouts or epochs."""
        _, _, changes = self.name.removesuffix(SHUFFLED).partition("@")
        pairs = [change.partition("=") for change in changes.split(",") if change]
        if any(key not in ("rollouts", "epochs") or not value.isdigit() for key, _, value in pairs):
            raise ValueError(f"{self.name}: write NAME@rollouts=12 or NAME@epochs=1, or both with a comma")
        return replace(self.settings, **{key: int(value) for key, _, value in pairs})

    @cached_property
    def file(self) -> Path:
        """Where its row is."""
        own = digest([self.name, self.rate, asdict(self.own_settings), source_digest(self.spec)])
        return self.folder / "training" / f"{self.task}-{self.seed}-{own}.csv"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line's options for training."""
    group = parser.add_argument_group("training")
    group.add_argument("--train", action="store_true", help="train instead; --seeds is the number of main seeds")
    group.add_argument("--batches", type=int, default=12, help="rollout batches of a run")
    group.add_argument("--evaluate-at", type=int, nargs="+", help="batches; the outcome is the mean over the last two")
    group.add_argument("--first-seed", type=int, default=1, help="of the main seeds")
    group.add_argument("--rates", type=float, nargs="+", default=[5e-5, 1e-4, 2e-4], help="learning rates to try")
    group.add_argument("--tuning-seeds", type=int, default=2)
    group.add_argument("--tuning-batches", type=int, help="rollout batches of a tuning run; default: --batches")
    group.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    contrast = "a planned comparison, corrected with the others; default: with uniform and the own control"
    group.add_argument("--contrast", nargs=2, action="append", metavar=("RUN", "REFERENCE"), help=contrast)


def run(options: argparse.Namespace) -> list[Path]:
    """Tune and train all runs that the contrasts name; the paths of the page and of the rows. ValueError for what the command
    line has wrong."""
    if not options.methods and not options.contrast:
        raise ValueError("--train needs a method: python -m bench my_method --train")
    batches = options.batches
    evaluate_at = tuple(options.evaluate_at or sorted({max(1, 2 * batches // 3), batches}))
    if max(evaluate_at) != batches or min(evaluate_at) < 1:
        raise ValueError(f"--evaluate-at {evaluate_at} must lie in 1 to --batches {batches} and end with it")
    shorter = options.tuning_batches or batches
    if min(options.tuning_seeds, options.seeds, shorter) < 1:
        raise ValueError("--tuning-seeds, --tuning-batches and --seeds must be at least 1")
    settings = TrainSettings(batches=batches, evaluate_at=evaluate_at)
    of_tuning = settings if shorter == batches else replace(settings, batches=shorter, evaluate_at=(shorter,))
    contrasts = [tuple(pair) for pair in options.contrast or default_contrasts(options.methods)]
    names = list(dict.fromkeys(name for pair in contrasts for name in pair))
    tuning = range(TUNING_SEED, TUNING_SEED + options.tuning_seeds)
    grids = {(task, name): sorted(options.rates) for task in options.tasks for name in names}
    for task, name in grids:  # refuse what cannot run before anything is computed
        first = Run(name, task, 0, 0.0, settings, options.out)
        try:
            _ = first.own_settings, check_needs(signal_of(first.spec), FIELDS)
        except NeedsMoreError as reason:
            raise ValueError(f"{name} {reason}, which training on these tasks does not have; leave it out") from reason
    for _ in range(EXTENSIONS + 1):
        tries = [(*key, seed, rate) for key, rates in grids.items() for rate in rates for seed in tuning]
        runs = [Run(name, task, seed, rate, of_tuning, options.out) for task, name, seed, rate in tries]
        rows = complete(runs, options.processes, "tune")
        best = {key: best_rate(rows, *key) for key in grids}
        before, grids = grids, {key: extended(rates, best[key]) for key, rates in grids.items()}
        if grids == before:
            break
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    runs = [Run(name, task, seed, best[task, name], settings, options.out) for seed in seeds for task, name in grids]
    rows += complete(runs, options.processes, "main")
    paths = [options.out / "training.html", options.out / "training.csv"]
    write_whole(paths[0], page.html_page("Does the method train better?", comparisons(rows, contrasts)))
    write_rows(paths[1], rows, COLUMNS)
    return paths


def default_contrasts(methods: Iterable[str]) -> list[tuple[str, str]]:
    """Each method against ``uniform`` and against its shuffled control."""
    return [(name, reference) for name in methods for reference in (BASELINE, name + SHUFFLED)]


def extended(rates: Sequence[float], best: float) -> list[float]:
    """The grid with another learning rate where one of its ends is the best one."""
    return sorted({*rates, best / 2, best * 2}) if best in (rates[0], rates[-1]) else list(rates)


def best_rate(rows: Iterable[Row], task: str, name: str) -> float:
    """The learning rate with the highest mean pass@1 over the tuning seeds."""
    outcomes: dict[float, list[float]] = defaultdict(list)
    for row in rows:
        if (row["task"], row["run"], row["use"]) == (task, name, "tune"):
            outcomes[float(row["rate"])].append(float(row["pass@1"]))
    return max(outcomes, key=lambda rate: fmean(outcomes[rate]))


def complete(runs: Sequence[Run], processes: int, use: str) -> list[Row]:
    """Train what is missing, and the rows of all."""
    missing = [one for one in runs if not one.file.exists()]
    with ProcessPoolExecutor(max(1, processes), get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        list(pool.map(make_model, {(one.task, one.seed): one for one in missing}.values()))
        started = time.monotonic()
        futures = {pool.submit(do, one): one for one in missing}
        for number, future in enumerate(as_completed(futures), 1):
            row, one = future.result(), futures[future]
            left = (time.monotonic() - started) / number * (len(missing) - number) / 60
            print(
                f"{use}: {one.name}, {one.task}, seed {one.seed}, learning rate {one.rate:g}: "
                f"{100 * float(row['pass@1']):.1f} %; {number} of {len(missing)}, about {left:.0f} min left",
                flush=True,
            )
    return [row | {"use": use} for one in runs for row in read_rows(one.file)]


def make_model(one: Run) -> None:
    """A run's first model, in its folder before runs that share it begin."""
    policy.initial_model(one.task, one.seed, one.settings.sft_steps, one.folder / "models")


def do(one: Run) -> Row:
    """One run in this process; its row, which is kept."""
    settings = one.own_settings
    model = policy.initial_model(one.task, one.seed, settings.sft_steps, one.folder / "models")
    training = task_problems(one.task, "train", policy.TRAIN_SIZE, one.seed)
    held_out = task_problems(one.task, "validation", policy.HELD_OUT_SIZE, one.seed)
    figures = train(model, task_tokenizer(), training, held_out, one)
    row = {
        **{"task": one.task, "seed": one.seed, "run": one.name, "rate": one.rate, "use": ""},
        **figures,
        "settings": digest(asdict(settings)),
        "source": source_digest(one.spec),
        "versions": " ".join(f"{name} {version(name)}" for name in PACKAGES),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
    write_rows(one.file, [row], COLUMNS)
    return row


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    training: Sequence[BenchProblem],
    held_out: Sequence[BenchProblem],
    one: Run,
) -> dict[str, Any]:
    """Train the model in place; the figures of its row."""
    settings, order = one.own_settings, random.Random(f"order {one.seed}")
    signal, control = signal_of(one.spec), one.name.endswith(SHUFFLED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=one.rate, weight_decay=0.0)
    evaluated: list[list[int]] = []
    seconds, tokens, entropy = 0.0, 0, 0.0
    for step in range(1, settings.batches + 1):
        started = time.process_time()
        problems = order.sample(training, settings.prompts)
        batch = policy.roll_out(model, tokenizer, problems, one.seed, step, settings.rollouts, exact=False)
        given = credit(model, tokenizer, batch, signal, step)
        drawn_BL = numbers(one.seed, policy.CONTROL, step, tuple(batch.input_ids_BL.shape))
        advantages_BL = shuffled(given, drawn_BL) if control else given.advantages_BL
        for _ in range(settings.epochs):
            add_gradient(model, batch, advantages_BL, settings)
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seconds += time.process_time() - started
        tokens += int(batch.response_mask_BL.sum())
        entropy = float(batch.entropy_BL.sum() / batch.response_mask_BL.sum())
        if step in settings.evaluate_at:
            evaluated.append(correct_samples(model, tokenizer, held_out, settings, one.seed, step))
    single = [sum(correct) / (settings.samples * len(correct)) for correct in evaluated[-2:]]
    return {
        "pass@1": fmean(single),
        "pass@8": fmean(pass_at(correct, settings.samples, settings.samples) for correct in evaluated[-2:]),
        "last pass@1": single[-1],
        "entropy": entropy,
        "processor seconds": round(seconds, 1),
        "tokens generated": tokens,
        "correct": "".join(str(count) for correct in evaluated for count in correct),
    }


def add_gradient(
    model: PreTrainedModel, batch: SampledBatch, advantages_BL: torch.Tensor, settings: TrainSettings
) -> None:
    """Add the gradient of the loss over the whole batch to the parameters' gradients. Responses, and their ends, that have no
    advantage are left out: they add exactly nothing."""
    taught_BL = advantages_BL != 0
    ends_B = torch.where(taught_BL, torch.arange(1, taught_BL.shape[1] + 1), 0).amax(dim=1)
    order_B = ends_B.argsort(stable=True)
    order_B = order_B[ends_B[order_B] > 0] if bool(taught_BL.any()) else order_B[:1]  # every parameter has a gradient
    for rows in order_B.split(MICRO_BATCH):
        ids_BL = batch.input_ids_BL[rows, : max(2, int(ends_B[rows].max()))]
        log_probs_BLV = model(input_ids=ids_BL).logits[:, :-1].log_softmax(dim=-1)
        log_probs_BL = log_probs_BLV.gather(-1, ids_BL[:, 1:, None])[:, :, 0]
        here = rows, slice(1, ids_BL.shape[1])
        ratio_BL = (log_probs_BL - batch.old_log_probs_BL[here]).exp()
        surrogate_BL = torch.minimum(
            ratio_BL * advantages_BL[here],
            ratio_BL.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages_BL[here],
        )
        masked_BL = torch.where(batch.response_mask_BL[here].bool(), surrogate_BL, 0.0)
        (-masked_BL.sum() / (len(batch.input_ids_BL) * MAX_RESPONSE_TOKENS)).backward()


def correct_samples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[BenchProblem],
    settings: TrainSettings,
    seed: int,
    step: int,
) -> list[int]:
    """Correct samples of each held-out problem."""
    asked = [problem for problem in problems for _ in range(settings.samples)]
    prompts = [prompt_ids(tokenizer, problem) for problem in asked]
    drawn_BT = numbers(seed, policy.EVALUATION, step, (len(asked), MAX_RESPONSE_TOKENS))
    responses = sample(model, tokenizer, prompts, drawn_BT, settings.temperature)
    correct_B = np.array([policy.is_correct(tokenizer, *pair) for pair in zip(asked, responses, strict=True)])
    return correct_B.reshape(-1, settings.samples).sum(axis=1).tolist()


def comparisons(rows: Sequence[Row], contrasts: Sequence[tuple[str, ...]]) -> list[page.Table]:
    """Of each task the outcomes of all runs, and the contrasts with Holm's correction."""
    tables = []
    for task in dict.fromkeys(row["task"] for row in rows):
        main: dict[str, dict[int, Row]] = defaultdict(dict)
        for row in rows:
            if row["task"] == task and row["use"] == "main":
                main[row["run"]][int(row["seed"])] = row
        outcomes = []
        for name, seeds in main.items():
            means = [fmean(float(row[column]) for row in seeds.values()) for column in COLUMNS[5:11]]
            cells = [f"{100 * mean:.1f}" for mean in means[:3]]
            rate = float(next(iter(seeds.values()))["rate"])
            outcomes.append([name, str(len(seeds)), f"{rate:g}", *cells, *(f"{mean:.3g}" for mean in means[3:])])
        head = ["run", "seeds", "learning rate", "pass@1, %", "pass@8, %", "last pass@1, %", *COLUMNS[8:11]]
        tables.append(page.Table(f"Outcomes: {task}", "Means over seeds, on held-out problems.", head, outcomes))
        tables.append(_contrasts(task, main, contrasts))
    return tables


def _contrasts(task: str, main: dict[str, dict[int, Row]], contrasts: Sequence[tuple[str, ...]]) -> page.Table:
    estimates = []
    for name, reference in contrasts:
        seeds = sorted(main[name].keys() & main[reference].keys())
        differences = {
            column: mean_of([float(main[name][seed][column]) - float(main[reference][seed][column]) for seed in seeds])
            for column in ("pass@1", "pass@8")
        }
        estimates.append((f"{name} - {reference}", differences))
    corrected = holm([1.0 if math.isnan(one["pass@1"].p) else one["pass@1"].p for _, one in estimates])
    lines = []
    for (title, one), p in zip(estimates, corrected, strict=True):
        cells = [f"{100 * figure.value:+.1f} ± {100 * figure.half:.1f}" for figure in one.values()]
        lines.append([title, str(one["pass@1"].count), *cells, f"{one['pass@1'].p:.3f}", f"{p:.3f}"])
    head = ["points", "seeds", "pass@1", "pass@8", "p", "p, Holm"]
    note = "Differences within seeds ± half of the 95 % interval by Student's distribution; p: paired t-test, pass@1."
    return page.Table(f"Comparisons: {task}", note, head, lines)
