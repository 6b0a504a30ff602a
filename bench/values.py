"""The truth by rollouts: how often the model itself is right when it goes on from each step of a response.

``python -m bench values FILE OUT --model NAME --length N`` reads lines of ``analyze`` whose responses are token ids, as
``bench sample`` writes them, and writes them with ``values``: ``starts``, the first token of each step; ``right``, for each
start a text of K digits, 1 where a continuation from there was judged right; ``reward``, the response's own; ``answered``,
whether the last step is the answer with all after it. A value V is the mean of a start's digits, the last one the reward,
and the credit of a step is V(after) - V(before).

Continuations begin after token ids, never after a text, get what is left of ``--length`` tokens, and are judged with what is
before them. Equal beginnings are drawn from once. The same command resumes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from bench.rollouts import (
    drawer,
    judge_of,
    lines_in,
    model_for,
    parser_of,
    settings_of,
    write_lines,
)
from grail_advantage.analyze.lines import Response, json_lines, read_responses
from grail_advantage.analyze.tokens import tokenize
from grail_advantage.answers.expressions import compile_expression
from grail_advantage.answers.format import BOXED, answer_format
from grail_advantage.answers.span import find_generated_spans
from grail_advantage.answers.text import TokenTexts
from grail_advantage.methods.text import cut, starts_of_steps


class Beginning(NamedTuple):
    """Continuations of equal ones are drawn once."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    truth: str


def check_rows(rows: Sequence[Response], length: int) -> None:
    """Raise ValueError for a response that has no values."""
    for row in rows:
        if isinstance(row.response, str):
            raise ValueError(
                f"{row.id}: its response is a text, whose ids may not be those that were drawn; give ids, as bench sample does"
            )
        if row.ground_truth is None:
            raise ValueError(
                f"{row.id} has no ground_truth, by which continuations are judged; give it one"
            )
        if len(row.response) > length:
            raise ValueError(
                f"{row.id} has {len(row.response)} tokens; give --length as it was sampled with"
            )


def main(arguments: Sequence[str]) -> None:
    """``python -m bench values FILE OUT --model NAME --length N``; ValueError for lines or options that are not usable."""
    parser = parser_of("values", __doc__)
    ends = "regular expression that ends a step (default: %(default)s)"
    parser.add_argument("--separator", default=r"\n+", help=ends)
    parser.add_argument("--answer", default=BOXED.name, help="as of grail_advantage.analyze")
    options = parser.parse_args(arguments)
    if options.samples < 2:
        raise ValueError(
            "--samples must be at least 2: the noise is told by two halves of the continuations"
        )
    settings = settings_of(options)
    rows = read_responses(options.file)
    check_rows(rows, options.length)
    lines = lines_in(options.out, settings, "values")
    if [line.get("id") for line in lines] != [row.id for row in rows[: len(lines)]]:
        raise ValueError(
            f"{options.out} does not hold the first lines of {options.file}; name another file"
        )

    tokenizer, _ = model_for(options)
    texts = TokenTexts(tokenizer)
    separator = compile_expression(options.separator, "--separator")
    judge = judge_of(options.reward)
    responses = [torch.tensor(row.response) for row in rows]
    spans = find_generated_spans(responses, tokenizer, "first", answer_format(options.answer))
    items = []
    lines_of_file = json_lines(options.file)
    for row, (_, record), response, span in zip(rows, lines_of_file, responses, spans, strict=True):
        ids_T = response.numpy()
        step_T, _ = cut(texts(ids_T), texts.have_bytes(ids_T), separator)
        starts = starts_of_steps(step_T, span)
        prompt = tuple(tokenize(row, tokenizer)[1])
        truth = str(row.ground_truth)
        keys = [Beginning(prompt, tuple(row.response[:start]), truth) for start in starts]
        values = {"starts": starts, "answered": span is not None, "settings": settings}
        items.append((row, {**record, "id": row.id}, values, keys))
    draw = drawer(options, "continuations", [keys[0].prompt for *_, keys in items])
    digits: dict[Beginning, str] = {}

    def lines_of(batch: Sequence[Any]) -> Iterator[dict[str, Any]]:
        new = {key: None for *_, keys in batch for key in keys if key not in digits}
        # Sorted, as the sampler takes neighbours together.
        beginnings = sorted(new, key=lambda key: len(key.prompt + key.response))
        # Of 100 tokens, a beginning with 30 of the response leaves 70.
        limits = [options.length - len(key.response) for key in beginnings]
        drawn = draw([key.prompt + key.response for key in beginnings], limits)
        for key, continuations in zip(beginnings, drawn, strict=True):
            # A response is judged as a whole: its answer may be in front of the continuation.
            wholes = [[*key.response, *continuation] for continuation in continuations]
            whole_texts = tokenizer.batch_decode(wholes, skip_special_tokens=True)
            digits[key] = "".join(str(int(judge(text, key.truth))) for text in whole_texts)
        for row, record, values, keys in batch:
            text = tokenizer.decode(row.response, skip_special_tokens=True)
            is_right = judge(text, keys[0].truth)
            if row.reward is not None and (row.reward > 0) != is_right:
                raise ValueError(
                    f"{row.id} has the reward {row.reward:g}, not that of --reward; name the run's own"
                )
            reward = float(is_right)
            right = [digits[key] for key in keys]
            yield {
                **record,
                "reward": reward,
                "values": {**values, "right": right, "reward": reward},
            }

    write_lines(options.out, lines, items[len(lines) :], lines_of)
