"""Solutions in steps, of which one is the first wrong one: the reference for a method's scores.

Two formats of JSON lines, distinguished by their keys: ProcessBench (``problem``, ``steps``, ``label``: the index of the first
wrong step, -1 where all are right), and GSM8K (``question``, ``answer``), of which labelled solutions are made, see
:mod:`.gsm8k_edits`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grail_advantage.view.analysis.responses import Response, json_lines
from study.localisation.gsm8k_edits import CannotEditError, EditedSolution, Step, edit_solution

SUFFIX = " Please reason step by step, and put your final answer within \\boxed{}."
"""The end of a problem, as of GRAIL's prompts."""
_FINAL = "The final answer is \\boxed{{{}}}."
_RESULT = re.compile(r"=\s*[$€£]?\s*(\d[\d,]*(?:\.\d+)?)")
"""A result in a text without annotations: a number after an equals sign."""
PROCESS_BENCH = ("problem", "steps", "label")
GSM8K = ("question", "answer")


@dataclass(frozen=True)
class Solution:
    """A solution in steps; ranges are half-open, in characters of the response."""

    id: str
    problem: str
    response: str
    steps: Sequence[tuple[int, int]]
    """They follow each other without a gap."""
    results: Sequence[tuple[int, int]]
    """Results of calculations."""
    label: int
    """Index of the first wrong step, or of the same step in a twin; -1: there is none."""
    twin: bool = False
    """Whether this is the right solution that a wrong one was made of."""
    gold: str | None = None
    wrong_result: int | None = None
    """Index into ``results`` of the one that was changed, or of the same one in a twin."""

    def as_response(self, *, chat: bool = True) -> Response:
        """For the analysis; the labels are ranges of characters.

        Args:
            chat: whether the prompt is a message for the chat template, or a text with a line break after it.
        """
        labels: dict[str, Any] = {"steps": list(self.steps), "results": list(self.results)}
        if self.label >= 0:
            labels["step_before_edit" if self.twin else "wrong_step"] = self.steps[self.label]
        if self.wrong_result is not None:
            labels["result_before_edit" if self.twin else "wrong_result"] = self.results[self.wrong_result]
        return Response(
            id=self.id,
            prompt=[{"role": "user", "content": self.problem + SUFFIX}] if chat else f"{self.problem}{SUFFIX}\n",
            response=self.response,
            gold=self.gold,
            reward=None if self.gold is None else float(self.twin),
            group=self.id,
            labels=labels,
        )


@dataclass(frozen=True)
class Solutions:
    """Labelled solutions of a file."""

    solutions: Sequence[Solution]
    left_out: Mapping[str, int] = field(default_factory=dict)
    """How many lines gave none, by reason."""


def read_solutions(path: Path, *, seed: int = 0, twins: bool = False) -> Solutions:
    """The labelled solutions of a file.

    Args:
        path: JSON lines of either format.
        seed: of the edits of GSM8K's solutions.
        twins: whether each edited solution comes with the right one that it was made of.

    Raises:
        ValueError: naming file and line.
    """
    solutions: list[Solution] = []
    left_out: Counter[str] = Counter()
    names: dict[str, int] = {}
    for number, record in json_lines(path):
        name = str(record.get("id", record.get("idx", number)))
        if names.setdefault(name, number) != number:
            raise ValueError(
                f"{path}:{number}: has the id {name} of line {names[name]}; give each problem one of its own"
            )
        if all(key in record for key in PROCESS_BENCH):
            solutions.append(_process_bench(record, name, f"{path}:{number}"))
        elif all(key in record for key in GSM8K):
            try:
                solutions += edited(record, name, seed, twins)
            except CannotEditError as reason:
                left_out[str(reason)] += 1
        else:
            raise ValueError(
                f"{path}:{number}: has the keys {', '.join(record) or 'none'}; labelled solutions have "
                f"{', '.join(PROCESS_BENCH)} (ProcessBench) or {', '.join(GSM8K)} (GSM8K)"
            )
    return Solutions(solutions, dict(left_out.most_common()))


def _process_bench(record: Mapping[str, Any], name: str, where: str) -> Solution:
    steps, label = record["steps"], record["label"]
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) for step in steps):
        raise ValueError(f"{where}: steps must be a list of texts")
    if type(label) is not int or not -1 <= label < len(steps):
        raise ValueError(f"{where}: label={label!r} must be the index of one of the {len(steps)} steps, or -1")
    if not isinstance(record["problem"], str):
        raise ValueError(f"{where}: problem must be a text")
    response, ranges = _joined(steps, "\n\n")
    results = [match.span(1) for match in _RESULT.finditer(response)]
    return Solution(name, record["problem"], response, ranges, results, label)


def edited(record: Mapping[str, Any], name: str, seed: int, twins: bool) -> list[Solution]:
    edit = edit_solution(record["question"], record["answer"], f"{seed}/{name}")
    made = []
    for twin, steps, answer in (
        (False, edit.steps, edit.answer),
        (True, edit.original_steps, edit.original_answer),
    )[: 2 if twins else 1]:
        made.append(_with_answer(record["question"], name, steps, answer, edit, twin))
    return made


def _with_answer(
    problem: str, name: str, steps: Sequence[Step], answer: str, edit: EditedSolution, twin: bool
) -> Solution:
    response, ranges = _joined([*(step.text for step in steps), _FINAL.format(answer)], "\n")
    results = [
        (start + first, start + past)
        for (start, _), step in zip(ranges, steps, strict=False)
        for first, past in step.results
    ]
    before = sum(len(step.results) for step in steps[: edit.wrong_step])
    return Solution(
        id=name,
        problem=problem,
        response=response,
        steps=ranges[:-1],  # the sentence with the answer is no step
        results=results,
        label=edit.wrong_step,
        twin=twin,
        gold=edit.original_answer,
        wrong_result=before + edit.wrong_result,
    )


def _joined(steps: Sequence[str], separator: str) -> tuple[str, list[tuple[int, int]]]:
    """The steps as one text, and where each is; the separator of two steps belongs to the first."""
    response, ranges = "", []
    for index, step in enumerate(steps):
        start = len(response)
        response += step + (separator if index + 1 < len(steps) else "")
        ranges.append((start, len(response)))
    return response, ranges
