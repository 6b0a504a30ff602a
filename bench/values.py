"""The truth by rollouts: how often the model itself is right when it goes on from each step of a response.

``python -m bench values FILE OUT --model NAME --length N`` reads lines of ``analyze`` whose responses are token ids, as
``bench sample`` writes them, and writes them with ``values``: ``starts``, the first token of each step; ``right``, for each
start a text of K digits, 1 where a continuation from there was judged right; ``reward``, the response's own; ``answered``,
whether the last step is the answer with all after it. A value V is the mean of a start's digits, the last one the reward,
and the credit of a step is V(after) - V(before).

Continuations begin after token ids, never after a text, get what is left of ``--length`` tokens, and are judged with what is
before them. Equal beginnings are drawn from once. The same command resumes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bench.rollouts import Line, begun, drawer, judge_of, model_for, parser_of, write_lines
from grail_advantage.analyze.lines import Response, json_lines, read_responses
from grail_advantage.analyze.tokens import tokenize
from grail_advantage.answers.expressions import compile_expression
from grail_advantage.answers.format import BOXED, answer_format
from grail_advantage.answers.span import find_generated_spans
from grail_advantage.answers.text import TokenTexts
from grail_advantage.methods.text import cut, starts_of_steps


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
    parser.add_argument(
        "--separator",
        default=r"\n+",
        help="regular expression that ends a step (default: %(default)s)",
    )
    parser.add_argument("--answer", default=BOXED.name, help="as of grail_advantage.analyze")
    options = parser.parse_args(arguments)
    if options.samples < 2:
        raise ValueError(
            "--samples must be at least 2: the noise is told by two halves of the continuations"
        )
    rows = read_responses(options.file)
    check_rows(rows, options.length)
    settings, lines = begun(options, "values")
    tokenizer, _ = model_for(options)
    texts = TokenTexts(tokenizer)
    separator = compile_expression(options.separator, "--separator")
    judge = judge_of(options.reward, tokenizer)
    responses = [torch.tensor(row.response) for row in rows]
    spans = find_generated_spans(responses, tokenizer, "first", answer_format(options.answer))
    items = []
    for row, (_, record), response, span in zip(
        rows, json_lines(options.file), responses, spans, strict=True
    ):
        ids_T = response.numpy()
        step_T, _ = cut(texts(ids_T), texts.have_bytes(ids_T), separator)
        starts = starts_of_steps(step_T, span)
        prompt = tuple(tokenize(row, tokenizer)[1])
        ids = tuple(row.response)
        truth = str(row.ground_truth)
        keys = [(prompt, ids[:start], truth) for start in starts]
        reward = float(judge(ids, truth))
        if row.reward is not None and (row.reward > 0) != reward:
            raise ValueError(
                f"{row.id} has the reward {row.reward:g}, not that of --reward; name the run's own"
            )
        values = {
            "starts": starts,
            "answered": span is not None,
            "settings": settings,
            "reward": reward,
        }
        items.append(({**record, "id": row.id, "reward": reward, "values": values}, keys))
    # An earlier start wrote the first lines, which have all of their records.
    for line, (record, _) in zip(lines, items, strict=False):
        if {**line, "values": None} != {**record, "values": None}:
            raise ValueError(
                f"{options.out} does not hold the first lines of {options.file}; name another file"
            )
    draw = drawer(options, "continuations", [keys[0][0] for _, keys in items])
    # By prompt, beginning of the response and ground truth; continuations of equal ones are drawn once.
    digits = {}

    def lines_of(batch: Sequence[Any]) -> Iterator[Line]:
        new = {key: None for _, keys in batch for key in keys if key not in digits}
        # Sorted, as the sampler takes neighbours together.
        new_keys = sorted(new, key=lambda key: len(key[0] + key[1]))
        # Of 100 tokens, a beginning with 30 of the response leaves 70.
        drawn = draw(
            [
                (prompt + response, options.length - len(response))
                for prompt, response, _ in new_keys
            ]
        )
        for key, continuations in zip(new_keys, drawn, strict=True):
            # A response is judged as a whole: its answer may be in front of the continuation.
            _, response, truth = key
            are_right = (judge(response + tuple(ids), truth) for ids in continuations)
            digits[key] = "".join(str(int(is_right)) for is_right in are_right)
        for line, keys in batch:
            line["values"]["right"] = [digits[key] for key in keys]
            yield line

    write_lines(options.out, lines, items[len(lines) :], lines_of)
