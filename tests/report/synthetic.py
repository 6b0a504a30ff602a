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

_NAMES = ("Ada", "Emmy", "Sofia", "Carl")
_FILLER = (
    "Let me think about this carefully.",
    "We should check what is asked.",
    "So far so good.",
    "That looks right.",
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


def write_dump(
    folder: Path,
    steps: Sequence[int] = (1, 5, 10),
    *,
    problems: int = 3,
    responses: int = 8,
    filler: int = 2,
    methods: Sequence[str] = (),
    labels: bool = False,
    seed: int = 0,
) -> None:
    """A token dump of word problems: more right responses over training, weights high at the ends and on the wrong step."""
    for number, step in enumerate(steps):
        rng = np.random.default_rng([seed, step])
        rows = []
        for group in range(problems):
            story = np.random.default_rng([group, number % 2])
            who, (a, b, c, d) = story.choice(_NAMES), story.integers(3, 60, size=4).tolist()
            prompt = f"{who} has {a} marbles, buys {b} boxes with {c} each and gives {d} away. How many has she? \\boxed{{}}."
            right = rng.random(responses) < 0.3 + 0.55 * number / max(1, len(steps) - 1)
            for place, is_right in enumerate(right.tolist()):
                values = _response(
                    rng, (a, b, c, d), is_right, int(rng.integers(0, filler + 1)), is_right - right.mean()
                )
                if not labels:
                    values["labels"] = {}
                values |= {"prompt": prompt, "gold": str(a + b * c - d), "step": step, "group": group}
                values |= {"row": place + group * responses, "key": f"{group}_{place}_0"}
                rows.append(text_row(**values, methods=_methods(rng, values, methods)))
        header = DumpHeader(
            step=step,
            method=methods[0] if methods else "grail",
            options={"preset": "official", "content_weight": 2.0},
            model="models/SmolLM2-135M-Instruct",
            temperature=1.0,
            rows_in_step=len(rows),
            special_tokens={2: "<|im_end|>"},
            written_by="tests",
        )
        write_step(folder, header, rows)


def _response(
    rng: np.random.Generator, numbers: tuple[int, ...], right: bool, filler: int, advantage: float
) -> dict[str, Any]:
    """The values of one response; a wrong one errs in its first or second step."""
    a, b, c, d = numbers
    wrong_at = None if right else int(rng.integers(0, 2))
    product = b * c + (10 if wrong_at == 0 else 0)
    total = a + product + (2 if wrong_at == 1 else 0)
    fill = [" ".join(rng.choice(_FILLER, size=filler)) + "\n" if filler else "" for _ in range(3)]
    parts = [
        split(fill[0] + f"The boxes hold {b} * {c} = {product}.\n"),
        split(fill[1] + f"Together that is {a} + {product} = {total}.\n"),
        split(fill[2] + f"After giving away {d}, {total} - {d} = {total - d} are left.\n"),
        split(f"\nThe answer is \\boxed{{{total - d}}}."),
    ]
    tokens = [token for part in parts for token in part]
    truncated = rng.random() < 0.06
    tokens = tokens[: int(len(tokens) * 0.6)] if truncated else [*tokens, ""]
    count, starts = len(tokens), np.cumsum([0, *map(len, parts)]).tolist()
    digit = np.array([token.isdigit() for token in tokens])
    z = (
        rng.standard_normal(count) * 0.6
        + 1.1 * digit
        + (1.2 if right else 0.7) * (np.linspace(-1, 1, count) ** 2 - 0.4)
    )
    wrong_step = None
    if wrong_at is not None and starts[wrong_at + 1] <= count:
        wrong_step = starts[wrong_at : wrong_at + 2]
        z[slice(*wrong_step)] += 0.9 * digit[slice(*wrong_step)]
    weight_T = np.clip(1 + 0.5 * z, 0.5, 5).astype(np.float32)
    span = None
    if not truncated:
        start = max(i for i, token in enumerate(tokens) if token == "\\")
        span = AnswerSpan(start, start + 3, count - 3, count - 2)
        weight_T[start:], weight_T[span.content_start : span.content_end] = 1, 2
    neutral = "truncated" if truncated else "advantage 0" if advantage == 0 else None
    if neutral:
        weight_T[:] = 1
    surprisal_T = rng.exponential(0.25, count) * (1 + 2 * digit)
    return {
        "tokens": tokens,
        "token_ids_T": np.array(
            [sum(ord(c) * 31**i for i, c in enumerate(token)) % 49_000 + 3 if token else 2 for token in tokens]
        ),
        "reward": float(right and not truncated),
        "outcome": "right" if right and not truncated else "wrong",
        "answer": None if truncated else str(total - d),
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


def _methods(rng: np.random.Generator, values: dict[str, Any], names: Sequence[str]) -> dict[str, MethodColumns]:
    """Columns of several methods: the first has the row's own, the others are made up."""
    columns = {}
    for name in names:
        score_T, weight_T, count = values["score_T"], values["weight_T"], len(values["tokens"])
        if columns:
            score_T = rng.lognormal(-3, 1, count).astype("f4")
            weight_T = np.clip(1 + 0.6 * rng.standard_normal(count), 0.4, 3).astype("f4")
        columns[name] = MethodColumns(score_T=score_T, weight_T=weight_T, neutral=values["neutral"])
    return columns
