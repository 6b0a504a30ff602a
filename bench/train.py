"""Training: a method against ``uniform`` and against its shuffled control, on the same seeds, each at a tuned learning rate.

Runs of a seed start from the same SFT-initialised model, see the same problems and draw from the same random numbers. The loss
is the clipped surrogate, summed over tokens and divided by a constant (Dr. GRPO), without a second clip or a KL term. All tune
their learning rate on the same grid and seeds; the grid is extended where one of its ends wins.

A run is named as its method, and ``NAME shuffled`` is its control; ``NAME@rollouts=12`` and ``NAME@epochs=1`` change a setting.

Shape suffixes: B responses, L prompt + response, P problems.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from bench import page, policy
from bench.methods import BASELINE, NeedsMoreError, check_needs, credit, method_of, shuffled, source_digest
from bench.policy import numbers
from bench.statistics import holm, mean_of
from bench.task import MAX_RESPONSE_TOKENS, TASKS, BenchProblem, task_problems, task_tokenizer
from bench.work import PACKAGES, now
from grail_advantage.dump import write_whole
from recipe.hashing import digest
from verl_cpu.tiny.loss import add_gradient
from verl_cpu.tiny.sampling import prompt_ids, sample

SHUFFLED = " shuffled"
Row = dict[str, Any]
TUNING_SEED = 2001
EXTENSIONS = 2
"""Most learning rates that are added to a grid."""
FIELDS = ("bench_first_wrong", "bench_kinds")  # what methods may read beside; training computes no exact credit
FIGURES = ["pass@1", "pass@8", "last pass@1", "entropy", "processor seconds", "tokens generated"]
"""Of a run; the first two are the outcome."""


@dataclass(frozen=True)
class TrainSettings:
    """Settings that all runs share, unless their names change them. A batch has so many problems (``prompts``), responses to
    each, and optimiser steps, all of it at once (``epochs``). The outcome is the mean held-out accuracy after the last two
    batches of ``evaluate_at``, over ``samples`` of each problem at ``temperature``."""

    sft_steps: int = 1000
    batches: int = 12
    prompts: int = 16
    rollouts: int = 8
    epochs: int = 4
    gradient_norm: float = 1.0
    evaluate_at: tuple[int, ...] = (8, 12)
    temperature: float = 0.6
    samples: int = 8


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
        return self.folder / "training" / f"{self.task}-{self.seed}-{own}.json"


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
    default = [(name, reference) for name in options.methods for reference in (BASELINE, name + SHUFFLED)]
    contrasts = [tuple(pair) for pair in options.contrast or default]
    names = list(dict.fromkeys(name for pair in contrasts for name in pair))
    tuning = range(TUNING_SEED, TUNING_SEED + options.tuning_seeds)
    grids = {(task, name): sorted(options.rates) for task in options.tasks for name in names}
    for task, name in grids:  # refuse what cannot run before anything is computed
        first = Run(name, task, 0, 0.0, settings, options.out)
        try:
            _ = first.own_settings, check_needs(method_of(first.spec), FIELDS)
        except NeedsMoreError as reason:
            raise ValueError(f"{name} {reason}, which training on these tasks does not have; leave it out") from reason
    for _ in range(EXTENSIONS + 1):
        tries = [(*key, seed, rate) for key, rates in grids.items() for rate in rates for seed in tuning]
        runs = [Run(name, task, seed, rate, of_tuning, options.out) for task, name, seed, rate in tries]
        rows = complete(runs, options.processes, "tune")
        means = pd.DataFrame(rows).groupby(["task", "run", "rate"])["pass@1"].mean()
        best = {key: float(means[key].idxmax()) for key in grids}
        at_end = [key for key, rates in grids.items() if best[key] in (rates[0], rates[-1])]
        if not at_end:
            break
        grids |= {key: sorted({*grids[key], best[key] / 2, best[key] * 2}) for key in at_end}
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    runs = [Run(name, task, seed, best[task, name], settings, options.out) for seed in seeds for task, name in grids]
    rows += complete(runs, options.processes, "main")
    paths = [options.out / "training.html", options.out / "training.csv"]
    write_whole(paths[0], page.html_page("Does the method train better?", comparisons(rows, contrasts)))
    write_whole(paths[1], pd.DataFrame(rows).to_csv(index=False))
    return paths


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
                f"{100 * row['pass@1']:.1f} %; {number} of {len(missing)}, about {left:.0f} min left",
                flush=True,
            )
    return [json.loads(one.file.read_text(encoding="utf-8")) | {"use": use} for one in runs]


def make_model(one: Run) -> None:
    """A run's first model, in its folder before runs that share it begin."""
    policy.initial_model(one.task, one.seed, one.settings.sft_steps, one.folder / "models")


def do(one: Run) -> Row:
    """One run in this process; its row, which is kept."""
    settings = one.own_settings
    model = policy.initial_model(one.task, one.seed, settings.sft_steps, one.folder / "models")
    training = task_problems(one.task, "train", policy.TRAIN_SIZE, one.seed)
    held_out = task_problems(one.task, "validation", policy.HELD_OUT_SIZE, one.seed)
    row = {"task": one.task, "seed": one.seed, "run": one.name, "rate": one.rate, "use": ""}
    row |= train(model, task_tokenizer(), training, held_out, one)
    row |= {"settings": digest(asdict(settings)), "source": source_digest(one.spec)}
    row |= {"versions": " ".join(f"{name} {version(name)}" for name in PACKAGES), "date": now()}
    write_whole(one.file, json.dumps(row))
    return row


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    training: Sequence[BenchProblem],
    held_out: Sequence[BenchProblem],
    one: Run,
) -> Row:
    """Train the model in place; :data:`FIGURES`, and ``correct``: correct samples of each problem, a digit each, evaluation by
    evaluation."""
    settings, order = one.own_settings, random.Random(f"order {one.seed}")
    method, control = method_of(one.spec), one.name.endswith(SHUFFLED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=one.rate, weight_decay=0.0)
    evaluated: list[list[int]] = []
    seconds, tokens, entropy = 0.0, 0, 0.0
    for step in range(1, settings.batches + 1):
        started = time.process_time()
        problems = order.sample(training, settings.prompts)
        batch = policy.roll_out(model, tokenizer, problems, one.seed, step, settings.rollouts, exact=False)
        given = credit(model, tokenizer, batch, method, step)
        drawn_BL = numbers(one.seed, policy.CONTROL, step, tuple(batch.padded.ids_BL.shape))
        advantages_BL = shuffled(given, drawn_BL) if control else given.advantages_BL
        for _ in range(settings.epochs):
            add_gradient(model, batch.padded, batch.old_log_probs_BL, advantages_BL, MAX_RESPONSE_TOKENS)
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seconds += time.process_time() - started
        tokens += int(batch.padded.response_BL.sum())
        entropy = float(batch.entropy_BL.sum() / batch.padded.response_BL.sum())
        if step in settings.evaluate_at:
            evaluated.append(correct_samples(model, tokenizer, held_out, one, step))
    single = [sum(correct) / (settings.samples * len(correct)) for correct in evaluated[-2:]]
    return {
        "pass@1": fmean(single),
        "pass@8": fmean(np.mean(np.array(correct) > 0) for correct in evaluated[-2:]),
        "last pass@1": single[-1],
        "entropy": entropy,
        "processor seconds": round(seconds, 1),
        "tokens generated": tokens,
        "correct": "".join(str(count) for correct in evaluated for count in correct),
    }


def correct_samples(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: Sequence[BenchProblem], one: Run, step: int
) -> list[int]:
    """Correct samples of each held-out problem."""
    settings = one.own_settings
    asked = [problem for problem in problems for _ in range(settings.samples)]
    prompts = [prompt_ids(tokenizer, problem) for problem in asked]
    drawn_BT = numbers(one.seed, policy.EVALUATION, step, (len(asked), MAX_RESPONSE_TOKENS))
    responses = sample(model, tokenizer, prompts, drawn_BT, settings.temperature)
    correct_B = np.array([policy.is_correct(tokenizer, *pair) for pair in zip(asked, responses, strict=True)])
    return correct_B.reshape(-1, settings.samples).sum(axis=1).tolist()


def comparisons(rows: Sequence[Row], contrasts: Sequence[tuple[str, ...]]) -> list[page.Table]:
    """Of each task the outcomes of all runs, and the contrasts with Holm's correction."""
    frame, tables = pd.DataFrame(rows).astype(dict.fromkeys(("rate", *FIGURES), float)), []
    for task, main in frame[frame["use"] == "main"].groupby("task", sort=False):
        outcomes = []
        for name, own in main.groupby("run", sort=False):
            means = own[["rate", *FIGURES]].mean()
            cells = [f"{100 * mean:.1f}" for mean in means[FIGURES[:3]]] + [
                f"{mean:.3g}" for mean in means[FIGURES[3:]]
            ]
            outcomes.append([name, str(len(own)), f"{means['rate']:g}", *cells])
        head = ["run", "seeds", "learning rate", "pass@1, %", "pass@8, %", "last pass@1, %", *FIGURES[3:]]
        tables.append(page.Table(f"Outcomes: {task}", "Means over seeds, on held-out problems.", head, outcomes))
        by_seed, estimates = main.pivot(index="seed", columns="run"), []
        for pair in contrasts:
            one, other = (by_seed.xs(name, axis=1, level="run")[FIGURES[:2]] for name in pair)
            estimates.append([mean_of((one - other)[column]) for column in FIGURES[:2]])
        corrected = holm([single.p for single, _ in estimates])
        lines = []
        for pair, of, p in zip(contrasts, estimates, corrected, strict=True):
            cells = [f"{100 * figure.value:+.1f} ± {100 * figure.half:.1f}" for figure in of]
            lines.append([" - ".join(pair), str(of[0].count), *cells, f"{of[0].p:.3f}", f"{p:.3f}"])
        head = ["points", "seeds", "pass@1", "pass@8", "p", "p, Holm"]
        note = (
            "Differences within seeds ± half of the 95 % interval by Student's distribution; p: paired t-test, pass@1."
        )
        tables.append(page.Table(f"Comparisons: {task}", note, head, lines))
    return tables
