"""A model's own responses, as lines of ``analyze`` with the token ids that it drew.

``python -m bench sample QUESTIONS OUT --model NAME --length N``: QUESTIONS has ``question`` and ``answer`` a line, as GSM8K,
or is the word ``sums``, the task of the tiny models. OUT is for ``python -m bench values``. The same command resumes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.convert import BOX, asked
from bench.rollouts import (
    drawer,
    judge_of,
    lines_in,
    model_for,
    parser_of,
    settings_of,
    write_lines,
)
from grail_advantage.analyze.lines import Response, json_lines
from grail_advantage.analyze.models import files_digest
from grail_advantage.analyze.tokens import tokenize
from verl_cpu.tiny.task import random_problems

SUMS = "sums"


def questions_in(name: Path, count: int) -> list[tuple[str, str, str]]:
    """Group, question and ground truth of ``count`` questions in an order drawn once: fewer are the first of more."""
    if str(name) == SUMS:
        return [
            (problem.text, problem.text, str(problem.answer))
            for problem in random_problems(count, seed=1000)
        ]
    questions = []
    for number, line in json_lines(name):
        ground_truth = line["answer"].rpartition("####")[2].strip()
        questions.append((str(number), line["question"] + BOX, ground_truth))
    random.Random(0).shuffle(questions)
    return questions[:count]


def main(arguments: Sequence[str]) -> None:
    """``python -m bench sample QUESTIONS OUT --model NAME --length N``; ValueError for an option that is not usable."""
    parser = parser_of("sample", __doc__)
    count = "questions, drawn at random (default: %(default)s)"
    parser.add_argument("--problems", type=int, default=200, help=count)
    options = parser.parse_args(arguments)
    settings = settings_of(options, questions=files_digest(str(options.file)))
    questions = questions_in(options.file, options.problems)
    lines = lines_in(options.out, settings, "sampled")
    tokenizer, _ = model_for(options)
    items = []
    for group, question, ground_truth in questions:
        # A base model has no chat template, and goes on from the text.
        prompt = asked(question) if tokenizer.chat_template else question
        row = Response(id=group, prompt=prompt, response="", group=group, ground_truth=ground_truth)
        items.append((row, tuple(tokenize(row, tokenizer)[1])))
    judge = judge_of(options.reward)
    draw = drawer(options, "responses", [ids for _, ids in items])

    def lines_of(batch: Sequence[Any]) -> Iterator[dict[str, Any]]:
        drawn = draw([ids for _, ids in batch], [options.length] * len(batch))
        for (row, _), responses in zip(batch, drawn, strict=True):
            for number, response in enumerate(responses):
                text = tokenizer.decode(response, skip_special_tokens=True)
                yield {
                    "id": f"{row.group}/{number}",
                    "group": row.group,
                    "prompt": row.prompt,
                    "response": response,
                    "ground_truth": row.ground_truth,
                    "reward": float(judge(text, row.ground_truth)),
                    "sampled": {"settings": settings},
                }

    # The lines of an earlier start are whole questions'.
    write_lines(options.out, lines, items[len(lines) // options.samples :], lines_of)
