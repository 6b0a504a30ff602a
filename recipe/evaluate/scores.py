"""Figures of each problem from its responses: right, answered, tokens.

:func:`recipe.reward.compute_score` is the judge, as in training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from recipe.evaluate.files import json_line, write_text
from recipe.evaluate.problems import Benchmark, Problem
from recipe.evaluate.store import Generation
from recipe.reward import compute_score

# The judge's own processes do the work; threads only wait for them.
_THREADS = 8

METRICS = ("acc", "pass", "tokens", "unanswered", "truncated")
"""Columns of :func:`metric_table`; ``acc`` is reported as acc@k and ``pass`` as pass@k, k the number of samples."""


@dataclass(frozen=True)
class ProblemScores:
    """One problem's samples, judged; the lists run over its samples."""

    index: int
    id: str
    gold: str
    right: list[bool]
    answered: list[bool]
    """Whether there is a complete box."""
    no_verdict: list[bool]
    """A box that the judge could not judge within its limits; it counts as wrong."""
    truncated: list[bool]
    """Whether the response reached the limit on its length."""
    tokens: list[int]
    answers: list[str]
    """The judged box of each sample, shortened, for people."""


def judge(
    benchmark: Benchmark, generations: Mapping[int, Generation], progress: Callable[[int], object]
) -> list[ProblemScores]:
    """Judge every sample of a benchmark whose problems all have generations; ``progress`` is called with 1 a problem."""

    def judge_one(problem: Problem) -> ProblemScores:
        samples = generations[problem.index].samples
        verdicts = [compute_score(benchmark.name, sample.text, problem.gold) for sample in samples]
        progress(1)
        return ProblemScores(
            index=problem.index,
            id=problem.id,
            gold=problem.gold,
            right=[verdict["score"] == 1.0 for verdict in verdicts],
            answered=[verdict["answer_found"] == 1.0 for verdict in verdicts],
            no_verdict=[verdict["verify_failed"] == 1.0 for verdict in verdicts],
            truncated=[sample.finish_reason == "length" for sample in samples],
            tokens=[sample.tokens for sample in samples],
            answers=[verdict["pred"] for verdict in verdicts],
        )

    with ThreadPoolExecutor(_THREADS) as executor:
        return list(executor.map(judge_one, benchmark.problems))


def metric_table(scores: Sequence[ProblemScores]) -> np.ndarray:
    """Return the (problems, 5) float64 array of the :data:`METRICS`.

    ``acc``: share of right samples; ``pass``: 1 if any sample is right; ``tokens``: mean over samples; ``unanswered`` and
    ``truncated``: share of samples.
    """
    return np.array(
        [
            [
                np.mean(problem.right),
                float(any(problem.right)),
                np.mean(problem.tokens),
                1 - np.mean(problem.answered),
                np.mean(problem.truncated),
            ]
            for problem in scores
        ]
    )


def scores_path(output_dir: Path, benchmark: str) -> Path:
    return output_dir / "scores" / f"{benchmark}.jsonl"


def write_scores(path: Path, scores: Iterable[ProblemScores]) -> None:
    """Write a line a problem."""
    write_text(path, "".join(json_line(asdict(problem)) for problem in scores))


def read_scores(path: Path) -> list[ProblemScores]:
    """Read a file of :func:`write_scores`.

    Raises:
        ValueError: the file is missing or damaged.
    """
    try:
        return [ProblemScores(**json.loads(line)) for line in path.read_bytes().splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); run the evaluation again, it keeps its generations"
        ) from None
