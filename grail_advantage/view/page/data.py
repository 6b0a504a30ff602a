"""A run on the disk: its metrics and its token dump.

A run is a folder with ``metrics.jsonl`` (of verl's ``file`` logger, or TRL's figures) and ``tokens/``, the token dump; or a
token dump alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grail_advantage.batch import outcome_of
from grail_advantage.dump.options import METRICS_FILE, TOKENS
from grail_advantage.dump.schema import DumpHeader
from grail_advantage.dump.store import DumpFile, DumpRow, TokenDump, read_dump
from grail_advantage.view.page.turns import has_turns

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
            f"({TOKENS}/step_NUMBER.parquet, algorithm.token_dump.folder)"
        )
    return Run(folder, metrics, dump, problems)


def read_metrics(folder: Path) -> tuple[dict[int, dict[str, float]], list[str]]:
    """A run's metrics file.

    Returns:
        Numbers by step and name, and what could not be read.
    """
    path = folder / METRICS_FILE
    steps: dict[int, dict[str, float]] = {}
    if not path.is_file():
        return steps, []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        return steps, [f"{path}: cannot be read: {error.strerror or error}"]
    unread = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            step, data = record["step"], record["data"]
            if type(step) is not int or not 0 <= step <= _MOST_STEP:
                raise TypeError
            values = {
                name: math.nan if value is None else float(value)
                for name, value in data.items()
                if type(value) in (int, float, type(None))
            }
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError, OverflowError):
            unread.append(number)
            continue
        steps[step] = {**steps.get(step, {}), **values}
    problems = []
    if unread:
        problems.append(f"{path}:{unread[0]}: is no line of verl's file logger; {len(unread)} such lines are left out")
    return dict(sorted(steps.items())), problems


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
