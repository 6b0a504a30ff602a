"""A model's own responses, as lines of ``analyze`` with the token ids that it drew.

``python -m bench sample QUESTIONS OUT --model NAME --length N``: QUESTIONS has ``question`` and ``answer`` a line, as GSM8K,
or is the word ``sums``, the task of the tiny models. OUT is for ``python -m bench values``. The same command resumes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

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
TOGETHER = 16  # questions between two writes


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
    parser.add_argument(
        "--problems",
        type=int,
        default=200,
        help="questions, drawn at random (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    settings = settings_of(options, questions=files_digest(str(options.file)))
    questions = questions_in(options.file, options.problems)
    lines = lines_in(options.out, settings, "sampled")
    tokenizer, _ = model_for(options)
    # A base model has no chat template, and goes on from the text.
    prompts = [
        asked(question) if tokenizer.chat_template else question for _, question, _ in questions
    ]
    prefixes = [
        tuple(tokenize(Response(id="", prompt=prompt, response=""), tokenizer)[1])
        for prompt in prompts
    ]
    judge = judge_of(options.reward)
    draw = drawer(options, "responses", prefixes)
    # What was written holds whole questions, so that their number says where to go on.
    for first in range(len(lines) // options.samples, len(questions), TOGETHER):
        batch = range(first, min(first + TOGETHER, len(questions)))
        drawn = draw([prefixes[index] for index in batch], [options.length] * len(batch))
        for index, responses in zip(batch, drawn, strict=True):
            group, _, ground_truth = questions[index]
            for number, response in enumerate(responses):
                text = tokenizer.decode(response, skip_special_tokens=True)
                line = {
                    "id": f"{group}/{number}",
                    "group": group,
                    "prompt": prompts[index],
                    "response": response,
                    "ground_truth": ground_truth,
                    "reward": float(judge(text, ground_truth)),
                    "sampled": {"settings": settings},
                }
                lines.append(line)
        write_lines(options.out, lines)
        print(f"{batch.stop} of {len(questions)} questions", flush=True)
