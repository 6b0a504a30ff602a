"""Measures methods part by part, a few processes at a time. A finished method is a file at once, and the next run resumes.

Shape suffixes: B responses, L prompt + response.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench import agreement
from bench.labelled import Model, Solutions, batch_of, load
from bench.methods import NeedsMoreError, credit, method_of, method_specs, source_digest
from bench.places import record
from bench.policy import SampledBatch, initial_model, roll_out
from bench.results import FORMAT, PLACE, VERSION, Result, write_json
from bench.statistics import Estimate
from bench.task import TASKS, task_problems, task_tokenizer
from grail_advantage.dump import write_whole
from recipe.hashing import digest

PACKAGES = ("torch", "transformers", "numpy", "scipy")
SETTING = "all"
"""In place of a method: figures of the task's own, as its yardstick's halves."""
FAILED = "failed: "


@dataclass(frozen=True)
class Settings:
    """Sizes of a run: of the tasks steps of supervised fine-tuning, problems of the update with eight responses each, other
    problems of the yardstick, and shuffled controls whose updates are computed (other figures have 20); most solutions of a
    file."""

    sft_steps: int = 1000
    problems: int = 128
    yardstick: int = 2048
    update_shuffles: int = 5
    solutions: int | None = None

    @property
    def quick(self) -> bool:
        """Whether there are fewer problems."""
        return self.problems < Settings.problems


QUICK = Settings(problems=48, yardstick=1024, update_shuffles=1, solutions=128)


class Labelled(NamedTuple):
    """A file of solutions, and the model that reads them."""

    name: str
    solutions: Solutions
    model: Model


class Prepared(NamedTuple):
    """What methods are measured on."""

    load: Callable[[], PreTrainedModel]
    """Gives the model anew, should a method have changed it."""
    tokenizer: PreTrainedTokenizerBase
    batch: SampledBatch
    yardstick: agreement.Yardstick | None
    figures: dict[str, Estimate]


@dataclass(frozen=True)
class Job:
    """The methods on one part: a task's model of a seed, or a batch of solutions."""

    task: str
    part: int
    specs: tuple[str, ...]
    settings: Settings
    folder: Path
    labelled: Labelled | None = None
    after: int = 0
    """Parts that come after it in its process."""
    seconds: float = math.inf
    """Most processor time of its process."""

    def file(self, spec: str) -> Path:
        """Where what is measured of a method is."""
        sizes: dict[str, Any] = asdict(self.settings)
        if self.labelled is not None:
            solutions, model = self.labelled.solutions, self.labelled.model
            sizes = {"data": solutions.digest, "count": len(solutions.part(self.part)), "weights": model.weights}
            sizes |= asdict(model)
        own = [spec, sizes, source_digest("uniform" if spec == SETTING else spec)]
        return self.folder / "rows" / f"{self.task}-{self.part}-{digest(own)}.json"

    def rows(self, spec: str) -> dict[str, Any] | None:
        """What was measured; ``None`` where nothing was."""
        path = self.file(spec)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    @property
    def missing(self) -> list[str]:
        """Methods that are to be measured, also those that failed before, in an order drawn at random after the place alone,
        with which all are compared."""
        specs = [s for s in self.specs if (rows := self.rows(s)) is None or rows["note"].startswith(FAILED)]
        random.Random(f"{self.task} {self.part}").shuffle(specs)
        specs.sort(key=lambda spec: spec != PLACE)
        return ([] if self.rows(SETTING) else [SETTING]) + specs


def run(
    names: Sequence[str],
    folder: Path,
    settings: Settings,
    *,
    seeds: int,
    processes: int,
    files: Sequence[Labelled] = (),
    hours: float = math.inf,
) -> Result:
    """Measure what is missing, for as long as the processor hours last, and return the results of all these methods (all
    registered ones if empty): on files of solutions, or else on the tasks with ``seeds`` models each. ValueError for an
    unknown method or option."""
    specs = tuple(method_specs(names, task=not files))
    jobs = [Job(of.name, part, specs, settings, folder, of) for of in files for part in range(of.solutions.parts)]
    jobs.sort(key=lambda job: job.part)  # a batch of each file in turn: a run that ends early has something of all
    if not files:
        jobs = [Job(task, seed, specs, settings, folder) for seed in range(1, seeds + 1) for task in TASKS]
    waiting = [job for job in jobs if job.missing]
    waiting = [
        replace(job, after=(len(waiting) - 1 - number) // processes, seconds=3600 * hours / processes)
        for number, job in enumerate(waiting)
    ]
    if processes == 1:
        list(map(do, waiting))
    elif waiting:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            list(pool.map(do, waiting))
    return result_of(jobs)


def result_of(jobs: Sequence[Job]) -> Result:
    """The results so far, of each task that is begun, of each method the parts that it has; see :mod:`bench.results`."""
    first, tasks = jobs[0], []
    for name in dict.fromkeys(job.task for job in jobs):
        own = [job for job in jobs if job.task == name and job.rows(SETTING)]
        if not own:
            continue
        labelled, methods = own[0].labelled, {}
        for spec in first.specs:
            rows = [{"part": job.part, **rows} for job in own if (rows := job.rows(spec))]
            note = next((one["note"] for one in rows if one["note"]), "" if rows else "not measured yet")
            methods[spec] = {"note": note, "parts": [] if note else rows}
        task = {"name": name, "labelled": labelled is not None, "settings": asdict(first.settings), "methods": methods}
        task |= {"data": labelled.solutions.digest if labelled else "", "date": own[0].rows(SETTING)["date"]}
        task["counts"] = labelled.solutions.counts if labelled else {}
        task["model"] = asdict(labelled.model) if labelled else {"name": "a model of 0.65 M parameters"}
        tasks.append(task | {"own": [job.rows(SETTING)["figures"] for job in own]})
    if not tasks:
        raise ValueError("nothing is measured yet; give more --hours")
    result = {"format": FORMAT, "version": VERSION, "date": now(), "quick": first.settings.quick, "tasks": tasks}
    return result | {"versions": {name: version(name) for name in PACKAGES}}


def now() -> str:
    """The date and time."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def do(job: Job) -> None:
    """All of a job that is missing, in this process."""
    if time.process_time() > job.seconds:
        return
    torch.set_num_threads(1)
    heading = f"{job.task}, part {job.part}:"
    first = (
        "a model is fine-tuned for some minutes, and kept" if job.labelled is None else "the model reads the solutions"
    )
    print(f"{heading} {len(job.missing)} figures or methods to measure; first {first}", flush=True)
    made = prepare(job) if job.labelled is None else prepare_labelled(job, job.labelled)
    model = made.load()
    _keep(job, SETTING, made.figures)
    missing, begun = job.missing, time.monotonic()
    for number, spec in enumerate(missing, 1):
        if time.process_time() > job.seconds:
            print(f"{heading} the hours are spent; the same command resumes", flush=True)
            return
        started, before, note = time.monotonic(), _state(model), ""
        try:
            figures, responses = measure(model, made, spec, job)
            if _state(model) != before:
                raise RuntimeError("it changed the model")
            _keep(job, spec, figures, responses)
        except NeedsMoreError as reason:
            note = str(reason)
        except (Exception, SystemExit) as error:  # one method's fault costs its own row alone
            note = f"{FAILED}{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            model = made.load()
        if note:
            _keep(job, spec, {}, note=note)
        ended = time.monotonic()
        left = (ended - begun) / number * (len(missing) - number + job.after * len(job.specs)) / 60
        said = f"{spec}{f' ({note})' * bool(note)}, {ended - started:.0f} s"
        print(f"{heading} {said}; {number} of {len(missing)}, about {left:.0f} min left", flush=True)


def prepare(job: Job) -> Prepared:
    """A task's model, its tokenizer and responses, the yardstick, and figures of these."""
    tokenizer, settings = task_tokenizer(), job.settings
    load = partial(initial_model, job.task, job.part, settings.sft_steps, job.folder / "models")
    model = load()
    print(f"{job.task}, part {job.part}: samples responses, and updates the model for the yardstick", flush=True)
    problems = task_problems(job.task, "train", settings.problems + settings.yardstick, job.part)
    of_update, others = problems[: settings.problems], problems[settings.problems :]
    batch = roll_out(model, tokenizer, of_update, job.part, 1)
    yardstick = agreement.Yardstick.of(model, tokenizer, of_update, others, job.part)
    figures = {
        "own gradient": yardstick.own,
        "halves": Estimate(yardstick.halves, count=len(others)),
        "accuracy": Estimate(float(batch.rewards_B.mean()), count=len(of_update)),
        "mixed groups": Estimate(len(agreement.mixed_groups(batch)), count=len(of_update)),
        "known first errors": Estimate(sum(label is not None for label in batch.labels), count=len(of_update)),
    }
    return Prepared(load, tokenizer, batch, yardstick, figures)


def prepare_labelled(job: Job, of: Labelled) -> Prepared:
    """A batch of solutions, and the model that reads them."""
    model, tokenizer = load(of.model)
    batch = batch_of(model, tokenizer, of.solutions.part(job.part), of.solutions.answer, of.model.tokens)
    used = [label for label in batch.labels if label is not None]
    errors = sum(label.step is not None for label in used)
    figures = {"errors used": Estimate(errors), "controls used": Estimate(len(used) - errors)}
    figures["fewer than two steps to compare"] = Estimate(len(batch.labels) - len(used))
    state = _state(model)

    def again() -> PreTrainedModel:
        if _state(model) == state:
            return model
        load.cache_clear()
        return load(of.model)[0]

    return Prepared(again, tokenizer, batch, None, figures)


def measure(model: PreTrainedModel, made: Prepared, spec: str, job: Job) -> tuple[dict[str, Estimate], list[Result]]:
    """All figures of a method and what is kept of each response; NeedsMoreError where it needs what the batch does not have."""
    positions, batch = 0, made.batch

    def count(module: nn.Module, inputs: tuple[torch.Tensor, ...], keywords: dict[str, Any]) -> None:
        nonlocal positions
        hidden_BLD = inputs[0] if inputs else keywords["hidden_states"]
        positions += hidden_BLD.shape[0] * hidden_BLD.shape[1]

    layers = max((module for module in model.modules() if isinstance(module, nn.ModuleList)), key=len)
    hook = layers[0].register_forward_pre_hook(count, with_kwargs=True)
    tokens = job.labelled.model.tokens if job.labelled else 4096
    try:
        random.seed(job.part), np.random.seed(job.part), torch.manual_seed(job.part)
        wall, started = time.monotonic(), time.process_time()
        made_of = credit(model, made.tokenizer, batch, method_of(spec, job.labelled is None), tokens=tokens)
        taken, waited = time.process_time() - started, time.monotonic() - wall
    finally:
        hook.remove()
    figures = {
        "passes": Estimate(positions / int(batch.padded.attention_BL.sum())),
        "forwards": Estimate(waited / batch.forward),
    }
    figures |= {"processor seconds": Estimate(taken), "seconds": Estimate(waited)}
    generator, responses = np.random.default_rng([job.part, 5]), []
    for row, label in enumerate(batch.labels):
        if label is None or not batch.advantages_B[row]:
            continue
        blame_T = -batch.response(row, made_of.advantages_BL)
        one = record(blame_T, batch.response(row, made_of.moved_BL).astype(bool), label, generator)
        responses.append(one | {"scored": made_of.scored[row]})
    if made.yardstick is not None:
        figures |= agreement.measure(model, batch, made_of, made.yardstick, job.part, job.settings.update_shuffles)
    return figures, responses


def _state(model: PreTrainedModel) -> list[Any]:
    """What changes when a method changes the model."""
    sums = [float(parameter.detach().double().sum()) for parameter in model.parameters()]
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    return [*sums, hooks, model.training, any(parameter.grad is not None for parameter in model.parameters())]


def _keep(job: Job, spec: str, figures: dict[str, Estimate], responses: Sequence[Result] = (), note: str = "") -> None:
    kept = {"note": note, "date": now(), "figures": figures, "responses": responses}
    write_whole(job.file(spec), write_json(kept))
