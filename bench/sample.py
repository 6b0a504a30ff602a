"""A model's own responses, as lines of ``analyze`` with the token ids that it drew.

``python -m bench sample QUESTIONS OUT --model NAME --length N``: QUESTIONS has ``question`` and ``answer`` a line, as GSM8K,
or is the word ``sums``, the task of the tiny models. OUT is for ``python -m bench values``. The same command resumes.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.convert import BOX
from bench.rollouts import Line, begun, drawer, judge_of, model_for, parser_of, write_lines
from grail_advantage.analyze.lines import Response, json_lines
from grail_advantage.analyze.models import files_digest
from grail_advantage.analyze.tokens import tokenize
from verl_cpu.tiny.task import random_problems


def questions_in(name: Path, count: int) -> list[tuple[str, str, str]]:
    """Group, question and ground truth of ``count`` questions in an order drawn once: fewer are the first of more."""
    if str(name) == "sums":
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
    questions = questions_in(options.file, options.problems)
    settings, lines = begun(options, "sampled", questions=files_digest(str(options.file)))
    tokenizer, _ = model_for(options)
    items = []
    for group, question, ground_truth in questions:
        # A base model has no chat template, and goes on from the text.
        prompt = [{"role": "user", "content": question}] if tokenizer.chat_template else question
        line = {"group": group, "prompt": prompt, "ground_truth": ground_truth}
        row = Response(id=group, response="", **line)
        items.append((line, tuple(tokenize(row, tokenizer)[1])))
    judge = judge_of(options.reward, tokenizer)
    draw = drawer(options, "responses", [ids for _, ids in items])

    def lines_of(batch: Sequence[Any]) -> Iterator[Line]:
        drawn = draw([(ids, options.length) for _, ids in batch])
        for (line, _), responses in zip(batch, drawn, strict=True):
            for number, response in enumerate(responses):
                yield {
                    **line,
                    "id": f"{line['group']}/{number}",
                    "response": response,
                    "reward": float(judge(tuple(response), line["ground_truth"])),
                    "sampled": {"settings": settings},
                }

    # The lines of an earlier start are whole questions'.
    write_lines(options.out, lines, items[len(lines) // options.samples :], lines_of)
