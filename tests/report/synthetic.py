"""Runs that never ran: metrics and token dumps with a seed, as long and as many as a test needs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grail_advantage.answer_span import AnswerSpan
from grail_advantage.token_dump import DumpHeader, DumpRow, MethodColumns, write_step

_NAMES = ("Ada", "Emmy", "Sofia", "Carl", "Henri", "Leonhard")
_THINGS = ("apples", "pencils", "tickets", "marbles", "stamps")
_FILLER = (
    "Let me think about this carefully.",
    "We should check what is asked.",
    "So far so good.",
    "Writing it down helps:",
    "That looks right.",
    "Wait, let me check that again.",
)


def write_metrics(folder: Path, steps: int, *, seed: int = 0, name: str = "metrics.jsonl", first: int = 0) -> None:
    """A file of verl's ``file`` logger; validation at step 0 and every fifth."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as file:
        for step in range(first, steps + 1):
            progress = 1 - np.exp(-step / (0.4 * steps + 1))
            values: dict[str, float] = {}
            if step % 5 == 0 or step == steps:
                values["val-core/tiny_chain_sum/acc/mean@1"] = 0.35 + 0.55 * progress + rng.normal(0, 0.015)
            if step:
                values |= {
                    "training/global_step": step,
                    "critic/score/mean": 0.3 + 0.6 * progress + rng.normal(0, 0.03),
                    "grail/average_weight": 1.16 + rng.normal(0, 0.01),
                    "grail/weight_deviation": 0.77 - 0.1 * progress + rng.normal(0, 0.01),
                    "grail/selected_rate": 0.62 - 0.4 * progress + rng.normal(0, 0.03),
                    "grail/answer_found_rate": min(1.0, 0.9 + 0.1 * progress),
                    "grail/truncated_rate": 0.02 * (1 - progress),
                    "response_length/mean": 36 + 4 * rng.normal(),
                    "actor/entropy": 0.4 * (1 - progress) + 0.05,
                    "actor/grad_norm": 0.05 + 0.01 * rng.normal(),
                    "timing_s/step": 11 + rng.normal(),
                }
            file.write(json.dumps({"step": step, "data": values}) + "\n")


def split(text: str) -> list[str]:
    """Word-like tokens, spaces in front, numbers by digit."""
    return re.findall(r" ?[A-Za-z]+|\d|\s|[^\sA-Za-z\d]", text)


def text_row(tokens: Sequence[str], **values: Any) -> DumpRow:
    """A row around these texts; columns that are not given are made up from them."""
    count = len(tokens)
    rng = np.random.default_rng(abs(hash("".join(tokens).encode("utf-8", "surrogatepass"))) % 2**32)
    given: dict[str, Any] = {
        "step": 1,
        "row": 0,
        "key": "p_0_0",
        "group": 0,
        "prompt": "1 + 1 =",
        "response": "".join(tokens),
        "gold": "2",
        "reward": 1.0,
        "outcome": "right",
        "answer": "2",
        "prompt_ids": np.array([5, 6], dtype=np.int64),
        "token_ids_T": np.array([sum(map(ord, token)) % 50_000 for token in tokens], dtype=np.int64),
        "tokens": list(tokens),
        "mask_T": np.ones(count, dtype=bool),
        "score_T": rng.lognormal(-3, 1, count).astype(np.float32),
        "weight_T": np.clip(1 + 0.5 * rng.standard_normal(count), 0.5, 5).astype(np.float32),
        "base_advantage_T": np.full(count, 0.75, dtype=np.float32),
        "old_log_prob_T": -rng.exponential(0.4, count).astype(np.float32),
        "entropy_T": rng.exponential(0.4, count).astype(np.float32),
    }
    given |= values
    if "advantage_T" not in given:
        given["advantage_T"] = given["weight_T"] * given["base_advantage_T"]
    return DumpRow(**given)


def _story(rng: np.random.Generator) -> tuple[str, list[int]]:
    who, what = rng.choice(_NAMES), rng.choice(_THINGS)
    numbers = rng.integers(3, 60, size=4).tolist()
    a, b, c, d = numbers
    prompt = (
        f"{who} has {a} {what}. She buys {b} boxes with {c} {what} each and gives {d} away. How many {what} does she have now? "
        "Put the answer in \\boxed{}."
    )
    return prompt, numbers


def _solution(
    rng: np.random.Generator, numbers: list[int], right: bool, filler: int
) -> tuple[list[list[str]], int | None, str]:
    a, b, c, d = numbers
    product = b * c
    wrong_at = None
    if not right:
        wrong_at = int(rng.integers(0, 2))
        product += int(rng.choice([-10, 10, 1, 100])) if wrong_at == 0 else 0
    total = a + product + (int(rng.choice([-10, 10, 2])) if wrong_at == 1 else 0)
    result = total - d
    fill = [" ".join(rng.choice(_FILLER, size=filler)) + "\n" if filler else "" for _ in range(3)]
    steps = [
        fill[0] + f"The boxes hold {b} * {c} = {product}.\n",
        fill[1] + f"Together that is {a} + {product} = {total}.\n",
        fill[2] + f"After giving away {d}, {total} - {d} = {result} are left.\n",
        f"\nThe answer is \\boxed{{{result}}}.",
    ]
    return [split(step) for step in steps], wrong_at, str(result)


def write_dump(
    folder: Path,
    steps: Sequence[int] = (1, 5, 10),
    *,
    problems: int = 3,
    responses: int = 8,
    filler: int = 2,
    methods: Sequence[str] = (),
    labels: bool = False,
    method: str = "grail",
    seed: int = 0,
) -> None:
    """A token dump of word problems: more right responses over training, weights high at the ends and on the wrong step."""
    for number, step in enumerate(steps):
        rng = np.random.default_rng([seed, step])
        rows = []
        for group in range(problems):
            prompt, numbers = _story(np.random.default_rng([group, number % 2]))
            a, b, c, d = numbers
            chance = 0.3 + 0.55 * number / max(1, len(steps) - 1)
            outcomes = rng.random(responses) < chance
            mean = outcomes.mean()
            for place, right in enumerate(outcomes.tolist()):
                parts, wrong_at, answer = _solution(rng, numbers, right, int(rng.integers(0, filler + 1)))
                tokens = [token for part in parts for token in part]
                truncated = rng.random() < 0.06
                if truncated:
                    tokens = tokens[: int(len(tokens) * 0.6)]
                rows.append(
                    _row(
                        rng,
                        tokens,
                        parts,
                        wrong_at,
                        truncated,
                        right,
                        float(right - mean),
                        step,
                        place + group * responses,
                        group,
                    )
                    | {"prompt": prompt, "gold": str(a + b * c - d), "answer": None if truncated else answer}
                )
        header = DumpHeader(
            step=step,
            method=methods[0] if methods else method,
            options={"preset": "official", "content_weight": 2.0},
            model="models/SmolLM2-135M-Instruct",
            temperature=1.0,
            rows_in_step=len(rows),
            special_tokens={2: "<|im_end|>"},
            written_by="tests",
        )
        write_step(folder, header, [_finish(rng, row, methods, labels) for row in rows])


def _row(
    rng: np.random.Generator,
    tokens: list[str],
    parts: list[list[str]],
    wrong_at: int | None,
    truncated: bool,
    right: bool,
    advantage: float,
    step: int,
    place: int,
    group: int,
) -> dict[str, Any]:
    if not truncated:
        tokens = [*tokens, ""]
    count = len(tokens)
    starts = np.cumsum([0, *map(len, parts)])
    z = rng.standard_normal(count) * 0.6
    digit = np.array([token.isdigit() for token in tokens])
    place_T = np.linspace(-1, 1, count)
    z = z + 1.1 * digit + (1.2 if right else 0.7) * (place_T**2 - 0.4)
    wrong_step = None
    if wrong_at is not None and starts[wrong_at + 1] <= count:
        wrong_step = [int(starts[wrong_at]), int(starts[wrong_at + 1])]
        z[wrong_step[0] : wrong_step[1]] += 0.9 * digit[wrong_step[0] : wrong_step[1]]
    weight_T = np.clip(1 + 0.5 * z, 0.5, 5).astype(np.float32)
    span = None
    if not truncated:
        text_end = count - 1
        start = max(i for i, token in enumerate(tokens) if token == "\\")
        span = AnswerSpan(start, start + 3, text_end - 2, text_end - 1)
        weight_T[span.content_start : span.content_end] = 2
        weight_T[span.content_end :] = 1
        weight_T[span.start : span.content_start] = 1
    neutral = "truncated" if truncated else "advantage 0" if advantage == 0 else None
    if neutral:
        weight_T[:] = 1
    surprisal_T = rng.exponential(0.25, count) * (1 + 2 * digit)
    return {
        "step": step,
        "row": place,
        "key": f"{group}_{place}_0",
        "group": group,
        "tokens": tokens,
        "token_ids_T": np.array(
            [sum(ord(c) * 31**i for i, c in enumerate(token)) % 49_000 + 3 if token else 2 for token in tokens]
        ),
        "reward": float(right and not truncated),
        "outcome": "right" if right and not truncated else "wrong",
        "truncated": truncated,
        "neutral": neutral,
        "span": span,
        "weight_T": weight_T,
        "score_T": np.full(count, np.nan, dtype=np.float32) if neutral else np.exp(z - 3).astype(np.float32),
        "base_advantage_T": np.full(count, advantage, dtype=np.float32),
        "old_log_prob_T": -surprisal_T.astype(np.float32),
        "entropy_T": (surprisal_T * rng.uniform(0.5, 1.5, count)).astype(np.float32),
        "labels": {"wrong_step": wrong_step} if wrong_step else {},
    }


def _finish(rng: np.random.Generator, values: dict[str, Any], methods: Sequence[str], labels: bool) -> DumpRow:
    tokens = values.pop("tokens")
    if not labels:
        values["labels"] = {}
    found = {}
    for number, name in enumerate(methods):
        weight_T = (
            values["weight_T"]
            if number == 0
            else np.clip(1 + 0.6 * rng.standard_normal(len(tokens)), 0.4, 3).astype("f4")
        )
        score_T = values["score_T"] if number == 0 else rng.lognormal(-3, 1, len(tokens)).astype("f4")
        found[name] = MethodColumns(score_T=score_T, weight_T=weight_T, neutral=values["neutral"])
    return text_row(tokens, **values, methods=found)
