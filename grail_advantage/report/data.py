"""What the pages and figures of a run are made of: its metrics, and figures of the rollouts in its token dump.

A run is a folder with ``metrics.jsonl`` (verl's ``file`` logger; after resumes also ``metrics-2.jsonl``, ...) and ``tokens/``,
the token dump; or a token dump alone. Nothing here draws.

Shape suffixes: N rows of the dump, K bins of positions, S steps, T response tokens.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from grail_advantage.token_dump import MOST_PROBLEMS, DumpRow, Problem, TokenDump, read_dump

TOKENS = "tokens"
"""Where a run has its dump, by convention."""
BINS = 20
OUTCOMES = ("right", "wrong")
_METRICS_NAME = re.compile(r"metrics(?:-(\d+))?\.jsonl")
_MOST_STEP = 10**15
"""As in the names of a token dump's files."""
_NORMAL_95 = 1.959963984540054
_TRAINED = "training/global_step"
"""verl logs it with every training step, and not with a validation before the first."""


# --------------------------------------------------------------------------------------------------------------------- a run


@dataclass(frozen=True)
class Run:
    """What a folder holds."""

    folder: Path
    metrics: Mapping[int, Mapping[str, float]]
    """By step, then by verl's name."""
    dump: TokenDump | None
    """``None`` where no rollouts were written."""
    metric_problems: Sequence[Problem]

    @property
    def problems(self) -> list[Problem]:
        """What could not be read so far."""
        return [*self.metric_problems, *(self.dump.problems if self.dump else [])]

    @property
    def name(self) -> str:
        """For titles."""
        return self.folder.resolve().name


def open_run(folder: Path | str) -> Run:
    """Look into a run's folder, or into a token dump's.

    Raises:
        ValueError: there is neither a metrics file nor a token dump; the message says what was looked for.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give that of a run, or of a token dump")
    metrics, problems = read_metrics(folder)
    below = folder / TOKENS
    dump = read_dump(below) if below.is_dir() else None
    if dump is None and not metrics:
        dump = read_dump(folder)
    if dump is not None and not dump.files and not metrics:
        raise ValueError(
            f"{folder} holds neither metrics.jsonl (trainer.logger with file) nor a token dump "
            f"({TOKENS}/step_NUMBER.jsonl.gz, algorithm.token_dump.folder)"
        )
    return Run(folder, metrics, dump, problems)


def read_metrics(folder: Path) -> tuple[dict[int, dict[str, float]], list[Problem]]:
    """All metrics files of a run, put together.

    A run that resumes writes a file of its own, whose training steps stand in for those of the files before it.

    Returns:
        Numbers by step and name, and what could not be read.
    """
    found: dict[int, dict[str, float]] = {}
    problems: list[Problem] = []
    named = [(path, _METRICS_NAME.fullmatch(path.name)) for path in folder.iterdir() if path.is_file()]
    for path, _ in sorted(((path, int(match[1] or 0)) for path, match in named if match), key=lambda entry: entry[1]):
        steps = _read_metrics_file(path, problems)
        first = min((step for step, values in steps.items() if _TRAINED in values), default=None)
        if first is not None:
            found = {step: values for step, values in found.items() if step < first}
        for step, values in steps.items():
            found[step] = {**found.get(step, {}), **values}
    return dict(sorted(found.items())), problems


def _read_metrics_file(path: Path, problems: list[Problem]) -> dict[int, dict[str, float]]:
    steps: dict[int, dict[str, float]] = {}
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        problems.append(Problem(path, None, f"cannot be read: {error.strerror or error}"))
        return steps
    unread = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            step, data = record["step"], record["data"]
            if type(step) is not int or not 0 <= step <= _MOST_STEP or not isinstance(data, dict):
                raise TypeError
            values = {
                str(name): float(value) if value is not None else math.nan
                for name, value in data.items()
                if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
            }
        except (ValueError, RecursionError, KeyError, TypeError, OverflowError):
            unread += 1
            if unread <= MOST_PROBLEMS:
                problems.append(Problem(path, number, "is no line of verl's file logger; left out"))
            continue
        steps[step] = {**steps.get(step, {}), **values}
    if unread > MOST_PROBLEMS:
        problems.append(Problem(path, None, f"has {unread} such lines; the first {MOST_PROBLEMS} are named"))
    return steps


# ------------------------------------------------------------------------------------------------------------------- curves


@dataclass(frozen=True)
class Line:
    """One line of a plot."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]


@dataclass(frozen=True)
class Curve:
    """One plot over the steps of a run."""

    name: str
    """A word, for file names and ids."""
    title: str
    unit: str
    lines: Sequence[Line]


_CURVES: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = (
    ("accuracy", "Held-out accuracy", "share right", ((r"val-core/.+/acc/mean@\d+", ""),)),
    ("reward", "Training reward", "mean of a response", (("critic/score/mean", "reward"),)),
    (
        "weights",
        "Token weights",
        "weight",
        ((r"[^/]+/average_weight", "mean"), (r"[^/]+/weight_deviation", "standard deviation")),
    ),
    (
        "rows",
        "Rows",
        "share of rows",
        (
            (r"[^/]+/selected_rate", "with scores"),
            (r"[^/]+/answer_found_rate", "with an answer"),
            (r"[^/]+/truncated_rate", "truncated"),
        ),
    ),
    ("length", "Response length", "tokens", (("response_length/mean", "mean"),)),
    ("entropy", "Policy entropy", "nats", (("actor/entropy", "mean"),)),
)


def curves(metrics: Mapping[int, Mapping[str, float]]) -> list[Curve]:
    """The plots that a run's metrics have values for, each with its lines; steps without a value are left out."""
    names = sorted({name for values in metrics.values() for name in values})
    found = []
    for curve, title, unit, patterns in _CURVES:
        lines = []
        for pattern, label in patterns:
            for name in (name for name in names if re.fullmatch(pattern, name)):
                points = [(step, values[name]) for step, values in metrics.items() if name in values]
                said = label or name.removeprefix("val-core/").replace("/acc/", ", ")
                lines.append(Line(said, [step for step, _ in points], [value for _, value in points]))
        if lines:
            found.append(Curve(curve, title, unit, lines))
    return found


# --------------------------------------------------------------------------------------------------------------- rollouts


def reasoning(row: DumpRow) -> np.ndarray:
    """The tokens that train and stand before the answer, bool (T,); all that train where there is no answer."""
    if row.span is None:
        return row.mask_T
    return row.mask_T & (np.arange(len(row)) < row.span.start)


def positions(count: int, bins: int) -> np.ndarray:
    """The bin of each of ``count`` tokens, int (count,): token ``i`` stands at ``(i + 1/2) / count`` of the way."""
    return (np.arange(count) * 2 + 1) * bins // (2 * max(1, count))


def binned(values: np.ndarray, bins: int = BINS) -> np.ndarray:
    """Means of consecutive values in bins of equal width of their positions, float64 (bins,).

    NaN values count nowhere; a bin without a value is NaN.
    """
    known = np.isfinite(values)
    place = positions(len(values), bins)[known]
    sums = np.bincount(place, weights=values[known].astype(np.float64), minlength=bins)
    counts = np.bincount(place, minlength=bins)
    return np.divide(sums, counts, out=np.full(bins, np.nan), where=counts > 0)


@dataclass(frozen=True)
class RowTable:
    """What figures need of the rows of a dump, one entry a row."""

    steps: np.ndarray
    """int (N,)."""
    updates: np.ndarray
    rows: np.ndarray
    groups: np.ndarray
    """int (N,): rows with the same number answer the same prompt in the same update, unlike a dump's own numbers."""
    outcomes: np.ndarray
    """(N,): ``right``, ``wrong`` or an empty text."""
    scored: np.ndarray
    """bool (N,): the row has scores, so that its weights are the method's."""
    answered: np.ndarray
    truncated: np.ndarray
    """bool (N,)."""
    lengths: np.ndarray
    """int (N,): response tokens."""
    rewards: np.ndarray
    """float64 (N,), NaN where unknown."""
    mean_weights: np.ndarray
    spreads: np.ndarray
    """float64 (N,): mean and standard deviation, of the population, of the weights of the tokens that train."""
    profiles: np.ndarray
    """float64 (N, K): mean weight of the reasoning by position, NaN in bins without a token."""

    def __len__(self) -> int:
        return len(self.steps)

    def where(self, chosen: np.ndarray) -> RowTable:
        """The rows that a bool (N,) or indices choose."""
        return replace(self, **{name: values[chosen] for name, values in vars(self).items()})


def row_table(rows: Iterable[DumpRow], bins: int = BINS, method: str | None = None) -> RowTable:
    """Take rows in, one at a time.

    Args:
        rows: of a dump.
        bins: K.
        method: of rows that several methods weighed, which one's weights; by default the row's own.
    """
    records: list[tuple[Any, ...]] = []
    profiles: list[np.ndarray] = []
    groups: dict[tuple[int, int, int], int] = {}
    for row in rows:
        found = row.methods.get(method) if method is not None else None
        if method is not None and row.methods and found is None:
            continue
        weights_T = found.weight_T if found else row.weight_T
        neutral = found.neutral if found else row.neutral
        trained = weights_T[row.mask_T].astype(np.float64)
        trained = trained[np.isfinite(trained)]
        group = groups.setdefault((row.step, row.update, row.group), len(groups))
        mean, spread = (float(trained.mean()), float(trained.std())) if len(trained) else (math.nan, math.nan)
        records.append(
            (
                row.step,
                row.update,
                row.row,
                group,
                row.outcome or "",
                neutral is None,
                row.span is not None,
                row.truncated,
                len(row),
                math.nan if row.reward is None else row.reward,
                mean,
                spread,
            )
        )
        profiles.append(binned(weights_T[reasoning(row)], bins))
    kinds = (int, int, int, int, str, bool, bool, bool, int, float, float, float)
    columns = [np.array([record[i] for record in records], dtype=kind) for i, kind in enumerate(kinds)]
    columns.append(np.array(profiles, dtype=np.float64).reshape(len(records), bins))
    return RowTable(**{entry.name: column for entry, column in zip(fields(RowTable), columns, strict=True)})


@dataclass(frozen=True)
class Means:
    """Means over rows with 95 % intervals, each float64 (K,); NaN where there is nothing."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    rows: int
    groups: int
    """Prompts that the rows answer."""


def clustered_means(values: np.ndarray, groups: np.ndarray) -> Means:
    """Means over rows, whose rows of one prompt are not independent of each other.

    The interval is the normal one with the cluster-robust variance of a mean,
    ``G / (G - 1) * sum_g (sum_(i in g) (x_i - mean))^2 / n^2`` (Cameron and Miller 2015, "A practitioner's guide to
    cluster-robust inference", section II), over the n rows and G prompts that have a value.

    Args:
        values: float (N, K), NaN where there is none.
        groups: int (N,).
    """
    known = np.isfinite(values)
    count = known.sum(axis=0)
    sums = np.where(known, values, 0.0).sum(axis=0)
    mean = np.divide(sums, count, out=np.full(values.shape[1], np.nan), where=count > 0)
    _, place = np.unique(groups, return_inverse=True)
    n_groups = int(place.max()) + 1 if len(place) else 0
    residuals, present = np.zeros((n_groups, values.shape[1])), np.zeros((n_groups, values.shape[1]), dtype=bool)
    np.add.at(residuals, place, np.where(known, values - mean, 0.0))
    np.logical_or.at(present, place, known)
    clusters = present.sum(axis=0)
    scale = np.divide(clusters, clusters - 1.0, out=np.full(len(mean), np.nan), where=clusters > 1)
    width = _NORMAL_95 * np.sqrt(scale * np.square(residuals).sum(axis=0)) / np.maximum(count, 1)
    return Means(mean, mean - width, mean + width, len(values), n_groups)


@dataclass(frozen=True)
class Profile:
    """The positional profile of weights of some rows."""

    outcome: str
    """``right``, ``wrong`` or, of rows whose outcome is not known, an empty text."""
    first_step: int
    last_step: int
    means: Means


def thirds(steps: Iterable[int], parts: int = 3) -> list[list[int]]:
    """Steps in consecutive parts of as equal number as possible; fewer parts where there are fewer steps."""
    known = sorted(set(steps))
    parts = min(parts, len(known))
    return [known[len(known) * i // parts : len(known) * (i + 1) // parts] for i in range(parts)]


def profiles(table: RowTable, parts: int = 3) -> list[Profile]:
    """Profiles of the rows with scores, by part of the training and outcome; those without rows are left out."""
    found = []
    scored = table.where(table.scored)
    for part in thirds(table.steps.tolist(), parts):
        for outcome in (*OUTCOMES, ""):
            chosen = scored.where(np.isin(scored.steps, part) & (scored.outcomes == outcome))
            if len(chosen):
                means = clustered_means(chosen.profiles, chosen.groups)
                found.append(Profile(outcome, part[0], part[-1], means))
    return found


@dataclass(frozen=True)
class HeatMap:
    """Mean weight of the reasoning by step and position, over the rows with scores."""

    steps: Sequence[int]
    weights: np.ndarray
    """float64 (S, K), NaN where there is no row."""
    rows: Sequence[int]
    """Rows with scores, of each step."""


def heat_map(table: RowTable, outcome: str | None = None) -> HeatMap:
    """The map of all rows with scores, or of those with one outcome; a row a step of the dump."""
    steps = sorted(set(table.steps.tolist()))
    chosen = table.where(table.scored & (table.outcomes == outcome) if outcome is not None else table.scored)
    of_step = [chosen.profiles[chosen.steps == step] for step in steps]
    weights = [clustered_means(found, np.arange(len(found))).mean for found in of_step]
    bins = table.profiles.shape[1]
    return HeatMap(steps, np.array(weights, dtype=np.float64).reshape(len(steps), bins), [len(f) for f in of_step])


@dataclass(frozen=True)
class StepSummary:
    """The rows of one step, as far as they were written."""

    step: int
    rows: int
    prompts: int
    right: int
    wrong: int
    scored: int
    answered: int
    truncated: int
    mean_length: float
    mean_weight: float
    """Mean of the rows' mean weights."""
    mean_spread: float
    """Mean of the scored rows' standard deviations; NaN without one."""


def by_step(table: RowTable) -> list[StepSummary]:
    """One summary a step of the dump."""

    def mean(values: np.ndarray) -> float:
        known = values[np.isfinite(values)]
        return float(known.mean()) if len(known) else math.nan

    def count(chosen: np.ndarray) -> int:
        return int(np.count_nonzero(chosen))

    found = []
    for step in sorted(set(table.steps.tolist())):
        part = table.where(table.steps == step)
        found.append(
            StepSummary(
                step=step,
                rows=len(part),
                prompts=len(np.unique(part.groups)),
                right=count(part.outcomes == "right"),
                wrong=count(part.outcomes == "wrong"),
                scored=count(part.scored),
                answered=count(part.answered),
                truncated=count(part.truncated),
                mean_length=mean(part.lengths.astype(np.float64)),
                mean_weight=mean(part.mean_weights),
                mean_spread=mean(part.spreads[part.scored]),
            )
        )
    return found
