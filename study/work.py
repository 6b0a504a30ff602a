"""Does the plan's jobs, a few processes at a time, until all are done or the sitting's time is up.

A finished job is in the raw files at once. The warmed-up models lie in an output folder that may be deleted at any time: they
are made again, bit for bit on the same machine, and compared with the row of the first time.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from functools import lru_cache
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from recipe.hashing import digest
from recipe.tiny.model import build_model
from recipe.tiny.sampling import prompt_ids
from recipe.tiny.warm_up import WarmUpSettings, warm_up
from study import alignment, truth
from study.arms import ARMS
from study.exact import Texts, right_texts
from study.plan import NO_ARM, RUNS, Job, StudyPlan
from study.raw import COMMON, JOB_COLUMNS, RawFile
from study.rollouts import EVALUATION, numbers, sample_accuracy
from study.sampling import sample
from study.task import (
    MAX_RESPONSE_TOKENS,
    StudyProblem,
    regime,
    solve,
    study_problems,
    study_tokenizer,
)
from study.trainer import figures_of, train

PACKAGES = ("torch", "transformers", "verl", "numpy")
SECONDARY = ("accuracy_hot", "accuracy_greedy", "exact", "exact_hot", "length", "filler", "asides")
START_COLUMNS = ("accuracy", *SECONDARY)
RUN_COLUMNS = (
    "accuracy", "right_1", "right_2", *SECONDARY,
    "reward", "clipped_errors", "gradient_norm", "processor_seconds", "weight_seconds",
)  # fmt: skip
"""``right_1`` and ``right_2``: right samples of each held-out problem, a digit each, at the two steps of the
outcome."""
SELECTION_COLUMNS = ("regime", "seed", "arm", "figure", "value", "date", "versions")
FIRST_GUESS = {"start": 240.0, "run": 150.0, "alignment": 600.0, "truth": 300.0}
"""Seconds of a job while none of its sort has been done."""
WARM_UP_PARTS = 4
"""Of a batch of solutions, by length."""
_TRUTH_SAMPLES = 4
OUT_OF_HOURS = (
    "No further job fits into the plan's {:g} core-hours, though work is left: to continue, raise hours in study/plan.py and "
    "say so in its PLAN.md; to repeat the study, name an empty folder with --data-dir"
)


class Files:
    """The raw data of one study."""

    def __init__(self, folder: Path) -> None:
        def raw(name: str, *columns: str) -> RawFile:
            return RawFile(folder / f"{name}.csv", (*JOB_COLUMNS, *columns, *COMMON))

        self.start = raw("start", *START_COLUMNS)
        """Warmed-up models before any training."""
        self.runs = raw("runs", *RUN_COLUMNS)
        """Training runs."""
        self.alignment = raw("alignment", "measured", *alignment.FIGURES, "weight_seconds")
        """One row an arm and seed."""
        self.truth = raw("truth", "method", "figure", "split", "value", "responses")
        """One row a method, figure and split."""
        self.all = [self.start, self.runs, self.alignment, self.truth]
        self.selections = RawFile(folder / "selections.csv", SELECTION_COLUMNS)
        """One row a hard selection and figure; measured afterwards, outside the plan."""

    def of(self, kind: str) -> RawFile:
        """The file of a kind of job."""
        return self.runs if kind in RUNS else getattr(self, kind)


def settings_digest(plan: StudyPlan, kind: str) -> str:
    """Of all that a job's figures depend on beside the job itself."""
    common = {"run": asdict(plan.run)}
    names = ["warm_up_steps", "warm_up_batch", "warm_up_rate", "train_size", "held_out_size", "wordings"]
    if kind == "alignment":
        names += ["batches", "yardstick_problems"]
    if kind == "truth":
        names += ["judged"]
    return digest(common | {name: getattr(plan, name) for name in names})


def finished(files: Files, plan: StudyPlan) -> dict[tuple[str, ...], list[dict[str, str]]]:
    """The rows of every finished job by its key.

    Raises:
        ValueError: a row of other settings.
    """
    by_job: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for file in files.all:
        for row in file.read():
            if row["settings"] != settings_digest(plan, row["kind"]):
                raise ValueError(
                    f"{file.path}: {row['kind']} {row['regime']} {row['arm']} seed {row['seed']} is of other settings "
                    "than these; restore study/plan.py, or name another folder with --data-dir"
                )
            by_job[tuple(row[name] for name in JOB_COLUMNS)].append(row)
    return dict(by_job)


class Sitting:
    """One sitting's work on a plan."""

    def __init__(
        self, plan: StudyPlan, files: Files, models: Path, *, regimes: Iterable[str], kinds: Iterable[str]
    ) -> None:
        self.plan, self.files, self.models = plan, files, models
        self.regimes, self.kinds = set(regimes), set(kinds)

    def missing(self) -> list[Job]:
        """Jobs of the plan that are not finished, in their order; a start also where its model is gone and still
        needed."""
        done = finished(self.files, self.plan)
        runs = [row for rows in done.values() for row in rows]
        jobs: list[Job] = []
        begun: set[tuple[str, int]] = set()
        for job in self.plan.jobs(self.plan.tuned_rates(runs)):
            if job.regime not in self.regimes or job.kind not in self.kinds or job.key in done:
                continue
            if (job.regime, job.seed) not in begun:
                begun.add((job.regime, job.seed))
                start = Job("start", job.regime, NO_ARM, job.seed)
                jobs += [] if self.folder(start).is_dir() else [start]
            jobs.append(job)
        return jobs

    def folder(self, job: Job) -> Path:
        """Where a seed's warmed-up model lies."""
        return self.models / f"{job.regime}-seed{job.seed}-{settings_digest(self.plan, 'start')}"

    def next_jobs(self, busy: Iterable[Job], count: int) -> list[Job]:
        """The first jobs that can begin: their model is there, and their learning rate is known."""
        taken = set(busy)
        ready = [
            job
            for job in self.missing()
            if job not in taken
            and (job.kind == "start" or self.folder(job).is_dir())
            and not (job.kind in ("main", "side") and job.rate == 0)
        ]
        return ready[:count]

    def expected_seconds(self) -> Callable[[Job], float]:
        """Processor time of a job: the mean of those done of its sort in its regime, else of its sort, else a guess."""
        done: dict[tuple[str, str], list[float]] = defaultdict(list)
        for rows in finished(self.files, self.plan).values():
            sort = "run" if rows[0]["kind"] in RUNS else rows[0]["kind"]
            for regime_name in (rows[0]["regime"], ""):
                done[sort, regime_name].append(float(rows[0]["job_seconds"]))

        def expected(job: Job) -> float:
            sort = "run" if job.kind in RUNS else job.kind
            return fmean(done.get((sort, job.regime)) or done.get((sort, "")) or [FIRST_GUESS[sort]])

        return expected

    def run(self, *, seconds: float, processes: int) -> None:
        """Work until nothing is left that can be done, or no job would end within the time.

        Args:
            seconds: of wall-clock time, that the sitting may take.
            processes: jobs at a time, each on one thread.
        """
        ends = time.monotonic() + seconds
        pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
        running: dict[Future, tuple[Job, float]] = {}
        longest: dict[str, float] = {}
        try:
            while True:
                expected, out_of_hours = self.expected_seconds(), False
                spent = sum(total_hours(self.files).values()) * 3600
                spent += sum(expected(job) for job, _ in running.values())
                for job in self.next_jobs([job for job, _ in running.values()], processes - len(running)):
                    if spent + expected(job) > 3600 * self.plan.hours:
                        out_of_hours = True
                        continue
                    # A job's wall-clock time, as it was in this sitting; before that its processor time.
                    if time.monotonic() + longest.get(job.kind, expected(job)) > ends:
                        continue
                    spent += expected(job)
                    future = pool.submit(do, self.plan, job, self.folder(job))
                    running[future] = (job, time.monotonic())
                if not running:
                    if out_of_hours:
                        print(OUT_OF_HOURS.format(self.plan.hours), flush=True)
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    job, began = running.pop(future)
                    rows = future.result()
                    self.keep(job, rows)
                    longest[job.kind] = max(longest.get(job.kind, 0.0), time.monotonic() - began)
                    self.report_progress(job, rows, ends)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def keep(self, job: Job, rows: list[dict[str, Any]]) -> None:
        """Put a job's rows into its file; those of a model that was made again must be the ones that are there.

        Raises:
            ValueError: they are not.
        """
        before = finished(self.files, self.plan).get(job.key)
        if before is None:
            self.files.of(job.kind).append(rows)
            return
        for old, new in zip(before, rows, strict=True):
            differing = [name for name in START_COLUMNS if old[name] != str(new[name])]
            if differing:
                raise ValueError(
                    f"the warmed-up model of {job.regime}, seed {job.seed} differs from the recorded one "
                    f"({', '.join(differing)}): another machine or other versions ({old['versions']}). Its runs could not be "
                    "paired with those that are there; name another folder with --data-dir"
                )

    def report_progress(self, job: Job, rows: list[dict[str, Any]], ends: float) -> None:
        """Print the finished job and the amount of work that is left."""
        left, minutes = self.missing(), max(0.0, ends - time.monotonic()) / 60
        hours = sum(map(self.expected_seconds(), left)) / 3600
        print(
            f"{' '.join(job.key)}: accuracy {rows[0].get('accuracy', '-')}, {rows[0]['job_seconds']} s of processor time; "
            f"{len(left)} jobs and about {hours:.1f} core-hours left, {minutes:.0f} min of this sitting",
            flush=True,
        )


def do(plan: StudyPlan, job: Job, folder: Path) -> list[dict[str, Any]]:
    """One job in this process, on one thread; its rows."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    disable_progress_bar()
    started = time.process_time()
    if job.kind == "start":
        rows = [_start(plan, job, folder)]
    elif job.kind in RUNS:
        rows = [_run(plan, job, folder)]
    else:
        rows = {"alignment": _alignment, "truth": _truth}[job.kind](plan, job, folder)
    common = {
        **dict(zip(JOB_COLUMNS, job.key, strict=True)),
        "job_seconds": round(time.process_time() - started, 1),
        "settings": settings_digest(plan, job.kind),
        "versions": " ".join(f"{name} {version(name)}" for name in PACKAGES),
    }
    return [{**common, **row} for row in rows]


@lru_cache(maxsize=4)
def problems_of(
    name: str, train_size: int, held_out_size: int, seed: int
) -> tuple[list[StudyProblem], list[StudyProblem]]:
    """Training and held-out problems of a seed."""
    return study_problems(name, "train", train_size, seed), study_problems(name, "validation", held_out_size, seed)


def _of(plan: StudyPlan, job: Job) -> tuple[list[StudyProblem], list[StudyProblem], Texts]:
    training, held_out = problems_of(job.regime, plan.train_size, plan.held_out_size, job.seed)
    return training, held_out, right_texts(held_out, study_tokenizer(), plan.wordings, job.seed)


def warmed_up(plan: StudyPlan, name: str, seed: int) -> PreTrainedModel:
    """A seed's model of a regime after its warm-up."""
    tokenizer = study_tokenizer()
    training, held_out = problems_of(name, plan.train_size, plan.held_out_size, seed)
    model = build_model(tokenizer, seed)
    errors = regime(name, seed)
    warm_up(
        model,
        tokenizer,
        training,
        held_out[:1],  # its own accuracy is not read here
        WarmUpSettings(
            batch_size=plan.warm_up_batch,
            learning_rate=plan.warm_up_rate,
            steps=plan.warm_up_steps,
            evaluate_every=plan.warm_up_steps,
            sampled_target=0.0,
            seed=seed,
        ),
        report=lambda line: None,
        solve=lambda problem, _, rng: solve(problem, errors, rng),
        max_new_tokens=MAX_RESPONSE_TOKENS,
        micro_batches=WARM_UP_PARTS,
    )
    return model


def _start(plan: StudyPlan, job: Job, folder: Path) -> dict[str, Any]:
    model = warmed_up(plan, job.regime, job.seed)
    _, held_out, texts = _of(plan, job)
    tokenizer = study_tokenizer()
    sampled = sample_accuracy(model, tokenizer, held_out, plan.run.samples, plan.run.temperature, job.seed, 0)
    beside = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    model.save_pretrained(beside)
    beside.rename(folder)
    return {
        "accuracy": sampled.accuracy,
        **figures_of(model, tokenizer, held_out, texts, plan.run, job.seed),
        "length": sampled.length,
        "filler": sampled.filler,
        "asides": sampled.asides,
    }


def load_model(folder: Path) -> PreTrainedModel:
    """A warmed-up model."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _run(plan: StudyPlan, job: Job, folder: Path) -> dict[str, Any]:
    training, held_out, texts = _of(plan, job)
    return train(
        load_model(folder),
        study_tokenizer(),
        training,
        held_out,
        texts,
        ARMS[job.arm],
        job.rate,
        plan.run,
        job.seed,
    )


def _alignment(plan: StudyPlan, job: Job, folder: Path) -> list[dict[str, Any]]:
    training, _, _ = _of(plan, job)
    by_arm = alignment.measure(
        load_model(folder),
        study_tokenizer(),
        training,
        [*plan.arms(plan.regime(job.regime)), *(plan.side_arms if plan.regime(job.regime).side_seeds else ())],
        plan.run,
        batches=plan.batches,
        yardstick_problems=plan.yardstick_problems,
        seed=job.seed,
    )
    return [
        {"measured": arm, **{name: row[name] for name in alignment.FIGURES}, "weight_seconds": row["seconds"]}
        for arm, row in by_arm.items()
    ]


def _truth(plan: StudyPlan, job: Job, folder: Path) -> list[dict[str, Any]]:
    _, held_out, _ = _of(plan, job)
    model, tokenizer = load_model(folder), study_tokenizer()
    model.eval()
    asked = [problem for problem in held_out for _ in range(_TRUTH_SAMPLES)]
    prompts = [prompt_ids(tokenizer, problem) for problem in asked]
    # A stream that no evaluation of a run reads.
    uniform_BT = torch.from_numpy(numbers(job.seed, EVALUATION, plan.run.steps + 2, (len(asked), MAX_RESPONSE_TOKENS)))
    rows = truth.rows_of(tokenizer, asked, prompts, sample(model, tokenizer, prompts, uniform_BT), plan.judged)
    # Also where no response can be judged, so that the job has a row.
    counts = {side: sum(row.right == (side == "right") for row in rows) for side in ("wrong", "right")}
    return [
        {"method": NO_ARM, "figure": "judged", "split": side, "value": count, "responses": count}
        for side, count in counts.items()
    ] + [
        {"method": method, "figure": figure, "split": split, "value": value, "responses": count}
        for (method, figure, split), (value, count) in truth.summary(truth.measure(model, tokenizer, rows)).items()
    ]


def total_hours(files: Files) -> dict[str, float]:
    """Processor hours of all finished jobs by kind."""
    hours: dict[str, float] = defaultdict(float)
    for file in files.all:
        seen = set()
        for row in file.read():
            key = tuple(row[name] for name in JOB_COLUMNS)
            if key not in seen:
                seen.add(key)
                hours[row["kind"]] += float(row["job_seconds"]) / 3600
    return dict(hours)
