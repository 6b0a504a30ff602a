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

from collections.abc import Sequence

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
from grail_advantage.analyze.lines import json_lines, read_responses
from grail_advantage.analyze.tokens import tokenize
from grail_advantage.answers.expressions import compile_expression
from grail_advantage.answers.format import BOXED, answer_format
from grail_advantage.answers.span import find_generated_spans
from grail_advantage.answers.text import TokenTexts
from grail_advantage.methods.fitted import starts_of_steps

TOGETHER = 32  # responses between two writes


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
    settings = settings_of(options, separator=options.separator, answer=options.answer)
    rows = read_responses(options.file)
    records = [line for _, line in json_lines(options.file)]
    for row in rows:
        if isinstance(row.response, str):
            raise ValueError(
                f"{row.id}: its response is a text, whose ids may not be those that were drawn; give ids, as bench sample does"
            )
        if row.ground_truth is None:
            raise ValueError(
                f"{row.id} has no ground_truth, by which continuations are judged; give it one"
            )
        if len(row.response) > options.length:
            raise ValueError(
                f"{row.id} has {len(row.response)} tokens; give --length as it was sampled with"
            )
    lines = lines_in(options.out, settings, "values")
    if [line.get("id") for line in lines] != [row.id for row in rows[: len(lines)]]:
        raise ValueError(
            f"{options.out} does not hold the first lines of {options.file}; name another file"
        )

    tokenizer, _ = model_for(options)
    texts = TokenTexts(tokenizer)
    separator = compile_expression(options.separator, "--separator")
    judge = judge_of(options.reward)
    prompts = [tuple(tokenize(row, tokenizer)[1]) for row in rows]
    responses = [torch.tensor(row.response) for row in rows]
    spans = list(find_generated_spans(responses, tokenizer, "first", answer_format(options.answer)))
    draw = drawer(options, "continuations", prompts)
    # By beginning, its prompt's length and the ground truth
    digits: dict[tuple[tuple[int, ...], int, str], str] = {}
    for first in range(len(lines), len(rows), TOGETHER):
        batch = range(first, min(first + TOGETHER, len(rows)))
        starts = {}
        beginnings = {}
        for index in batch:
            ids = responses[index].tolist()
            span = spans[index]
            starts[index] = starts_of_steps(
                texts, responses[index].numpy(), separator, span.start if span else None
            )
            about = (len(prompts[index]), str(rows[index].ground_truth))
            beginnings[index] = [
                ((*prompts[index], *ids[:start]), *about) for start in starts[index]
            ]
        new = list({key: None for keys in beginnings.values() for key in keys if key not in digits})
        # Of 100 tokens, a beginning with 30 of the response leaves 70.
        limits = [options.length - len(prefix) + prompt_length for prefix, prompt_length, _ in new]
        drawn = draw([prefix for prefix, _, _ in new], limits)
        for key, continuations in zip(new, drawn, strict=True):
            prefix, prompt_length, truth = key
            # A response is judged as a whole: its answer may be in front of the continuation.
            wholes = [[*prefix[prompt_length:], *continuation] for continuation in continuations]
            verdicts = [
                judge(text, truth)
                for text in tokenizer.batch_decode(wholes, skip_special_tokens=True)
            ]
            digits[key] = "".join(str(int(is_right)) for is_right in verdicts)
        for index in batch:
            row = rows[index]
            is_right = judge(
                tokenizer.decode(responses[index], skip_special_tokens=True), str(row.ground_truth)
            )
            if row.reward is not None and (row.reward > 0) != is_right:
                raise ValueError(
                    f"{row.id} has the reward {row.reward:g}, not that of --reward; name the run's own"
                )
            values = {
                "starts": starts[index],
                "right": [digits[key] for key in beginnings[index]],
                "reward": float(is_right),
                "answered": spans[index] is not None,
                "settings": settings,
            }
            lines.append(
                {**records[index], "id": row.id, "reward": float(is_right), "values": values}
            )
        write_lines(options.out, lines)
        print(f"{batch.stop} of {len(rows)} responses, {len(digits)} beginnings", flush=True)
