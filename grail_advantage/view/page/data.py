"""A run on the disk, read: its metrics and its token dump; :mod:`grail_advantage.view.places` finds both."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grail_advantage.data import outcome_of
from grail_advantage.dump import METRICS_FILE, TOKENS, DumpFile, DumpHeader, DumpRow, TokenDump, read_dump
from grail_advantage.receipt.foreign import LARGEST_JSON, numbered_lines, read_bytes, read_json, why
from grail_advantage.view.page.turns import has_turns
from grail_advantage.view.places import STATE, Places, find
from grail_advantage.view.texts import read_texts

_MOST_STEP = 10**15
"""As in the names of a token dump's files."""


@dataclass(frozen=True)
class Run:
    """A run's folder, read."""

    folder: Path
    metrics: Mapping[int, Mapping[str, float]]
    """By step, then by verl's name."""
    dump: TokenDump | None
    """``None`` where no rollouts were written."""
    metric_problems: Sequence[str]
    lacks: Sequence[str] = ()
    """What is not there, with the remedy."""

    @property
    def files(self) -> Sequence[DumpFile]:
        """Of its token dump."""
        return self.dump.files if self.dump else []

    @property
    def header(self) -> DumpHeader | None:
        """Of the first of them, where it can be read."""
        return self.files[0].header if self.files else None

    @property
    def problems(self) -> list[str]:
        """Everything that could not be read so far."""
        return [*self.metric_problems, *(self.dump.problems if self.dump else [])]


def open_run(folder: Path | str) -> Run:
    """Look into a run.

    Args:
        folder: of the run, of a token dump, or one of the files, as :func:`grail_advantage.view.places.find` takes it.

    Raises:
        ValueError: there is neither a metrics file nor a token dump; the message says what was looked for.
    """
    places = find(Path(folder))
    metrics, problems = _read_curves(places)
    dump = read_dump(places.tokens) if places.tokens else read_texts(places.texts) if places.texts else None
    if not metrics and (dump is None or not dump.files):
        unread = "; ".join([*problems, *(dump.problems if dump else [])])
        raise ValueError(
            f"{folder} holds neither {METRICS_FILE}, a log PROJECT/EXPERIMENT.jsonl (verl: trainer.logger=[console,file]) or "
            f"{STATE} (TRL), nor a token dump "
            f"({TOKENS}/step_NUMBER.parquet, algorithm.token_dump.folder){': ' if unread else ''}{unread}"
        )
    has = f"{places.texts} has texts alone: words stand for tokens, and no weight is known"
    lacks = (
        [] if places.tokens else [f"{has if places.texts else f'{places.folder} has no token dump'}; {places.remedy}"]
    )
    return Run(places.folder, metrics, dump, [*places.taken, *problems], lacks)


def read_metrics(folder: Path) -> tuple[dict[int, dict[str, float]], list[str]]:
    """A run's curves, as far as they are written; none while the run has no folder yet.

    Returns:
        Numbers by step and name, and what could not be read.
    """
    return _read_curves(find(folder)) if os.path.lexists(folder) else ({}, [])


def _read_curves(places: Places) -> tuple[dict[int, dict[str, float]], list[str]]:
    path = places.curves
    steps: dict[int, dict[str, float]] = {}
    if path is None:
        return steps, []
    unread: list[str] = []
    try:
        for place, entry in _entries(path):
            try:
                record = read_json(entry) if isinstance(entry, bytes) else {"step": entry["step"], "data": entry}
                step, data = record["step"], record["data"]
                if type(step) is not int or not 0 <= step <= _MOST_STEP:
                    raise TypeError
                values = {
                    name: math.nan if value is None else float(value)
                    for name, value in data.items()
                    if type(value) in (int, float, type(None)) and name != "step"
                }
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
                unread.append(place)
                continue
            steps[step] = {**steps.get(step, {}), **values}
    except (OSError, ValueError) as error:
        return steps, [f"{path}: cannot be read: {why(error)}"]
    problems = []
    if unread:
        problems.append(f"{path}{unread[0]}: is no line of a log; {len(unread)} such are left out")
    return dict(sorted(steps.items())), problems


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """The lines of verl's log, or the entries of TRL's state, each with its place."""
    if path.name == STATE:
        state = read_json(read_bytes(path, LARGEST_JSON))
        history = state.get("log_history") if isinstance(state, dict) else None
        if not isinstance(history, list):
            raise ValueError("has no list log_history")
        yield from ((f": log_history[{place}]", entry) for place, entry in enumerate(history))
    else:
        yield from ((f":{number}", line) for number, line in numbered_lines(path))


@dataclass
class Verdicts:
    """What the outcomes of responses say: whether the answer is correct, or whether another value is above 0."""

    conversations: bool = False
    """A response has turns."""
    of_acc: bool = False
    """An outcome is not that of the reward, and hence that of the reward function's ``acc``."""
    judged: int = 0
    """Responses with an outcome."""
    no_truth: int = 0
    """Those of them without a ground truth."""
    true: int = 0
    """Those of them whose answer is the ground truth, word for word."""
    true_but_wrong: int = 0
    """Those of these that count as wrong."""

    def add(self, row: DumpRow) -> Verdicts:
        """Take a response in."""
        self.conversations |= has_turns(row)
        if row.outcome is not None:
            true = row.answer is not None and row.answer == row.ground_truth
            self.of_acc |= row.outcome != outcome_of(row.reward)
            self.judged += 1
            self.no_truth += row.ground_truth is None
            self.true += true
            self.true_but_wrong += true and row.outcome == "wrong"
        return self

    @property
    def field(self) -> str:
        """The value that is meant, ``acc`` or ``reward``; empty where it tells whether the answer is correct, as it does unless
        responses have turns or no ground truth, or more than 5 % of the answers that are the ground truth count as wrong."""
        own = self.conversations or self.no_truth == self.judged or self.true_but_wrong > 0.05 * self.true
        return ("acc" if self.of_acc else "reward") if own and self.judged else ""


def outcome_words(field: str) -> dict[str, str]:
    """How people read a dump's outcomes, by :attr:`Verdicts.field`."""
    known = (
        {"right": f"{field} above 0", "wrong": f"{field} not above 0"}
        if field
        else {"right": "correct", "wrong": "incorrect"}
    )
    return {**known, "": "outcome unknown"}


def curves(field: str) -> tuple[tuple[str, str, dict[str, str]], ...]:
    """:data:`CURVES`, by :attr:`Verdicts.field`."""
    (title, unit, patterns), *others = CURVES
    return ("Held-out acc", "mean", patterns) if field else (title, unit, patterns), *others


CURVES: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Held-out accuracy", "share correct", {r"val-core/.+/acc/mean@\d+": ""}),
    ("Held-out answers without a verdict", "share of responses", {r"val-aux/.+/verify_failed/mean@\d+": ""}),
    ("Training reward", "mean of a response", {"critic/score/mean|reward": "reward", "eval_reward": "held out"}),
    ("Token weights", "weight", {"[^/]+/average_weight": "mean", "[^/]+/weight_deviation": "standard deviation"}),
    (
        "Responses",
        "share of responses",
        {
            "[^/]+/selected_rate": "with scores",
            "[^/]+/answer_found_rate": "with an answer",
            "[^/]+/truncated_rate": "truncated",
            "verify_failed": "without a verdict",
        },
    ),
    ("Response length", "tokens", {"response_length/mean|completions/mean_length": "mean"}),
    ("Policy entropy", "nats", {"actor/entropy|entropy": "mean"}),
)
"""Title and unit of each plot over the steps of a run, and for each of its lines a pattern of the metric's name and a label."""
