"""Runs that never ran: metrics and token dumps with a seed, as long and as many as a test needs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from grail_advantage.answers.span import AnswerSpan
from grail_advantage.dump import (
    RECEIVED_SCHEMA,
    DumpHeader,
    DumpRow,
    read_dump,
    write_received,
    write_step,
)
from grail_advantage.receipt import Finding
from tests.dumps import dump_row, method_columns, received_header, table_of

RESPONSES = 8
_FILLER = "Let me think about this carefully.\n"


def write_metrics(folder: Path, steps: int, *, seed: int = 0) -> None:
    """A file of verl's ``file`` logger; validation at step 0 and every fifth."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(steps + 1):
            progress = 1 - np.exp(-step / (0.4 * steps + 1))
            values: dict[str, float] = {}
            if step % 5 == 0 or step == steps:
                values["val-core/tiny_chain_sum/acc/mean@1"] = (
                    0.35 + 0.55 * progress + rng.normal(0, 0.015)
                )
            if step:
                values["critic/score/mean"] = 0.3 + 0.6 * progress + rng.normal(0, 0.03)
                values["grail/average_weight"] = 1.16 + rng.normal(0, 0.01)
                values["grail/weight_deviation"] = 0.77 - 0.1 * progress + rng.normal(0, 0.01)
                values["grail/selected_rate"] = 0.62 - 0.4 * progress + rng.normal(0, 0.03)
                values["grail/answer_found_rate"] = min(1.0, 0.9 + 0.1 * progress)
                values["actor/entropy"] = 0.4 * (1 - progress) + 0.05
            file.write(json.dumps({"step": step, "data": values}) + "\n")


def split(text: str) -> list[str]:
    """Word-like tokens, spaces in front, numbers by digit."""
    return re.findall(r" ?[A-Za-z]+|\d|\s|[^\sA-Za-z\d]", text)


def text_row(tokens: Sequence[str], **values: Any) -> DumpRow:
    """A response around these texts; columns that are not given are made up from them."""
    count = len(tokens)
    rng = np.random.default_rng(abs(hash("".join(tokens).encode("utf-8", "surrogatepass"))) % 2**32)
    given: dict[str, Any] = {
        "ground_truth": "2",
        "answer": "2",
        "token_ids_T": np.array(
            [sum(map(ord, token)) % 50_000 for token in tokens], dtype=np.int64
        ),
        "score_T": rng.lognormal(-3, 1, count).astype(np.float32),
        "weight_T": np.clip(1 + 0.5 * rng.standard_normal(count), 0.5, 5).astype(np.float32),
        "base_advantage_T": np.full(count, 0.75, dtype=np.float32),
        "old_log_prob_T": -rng.exponential(0.4, count).astype(np.float32),
        "entropy_T": rng.exponential(0.4, count).astype(np.float32),
    }
    given |= values
    weight_T = given.pop("weight_T")
    if "advantage_T" not in given:
        given["advantage_T"] = weight_T * given["base_advantage_T"]
    return dump_row(weight_T, **{"tokens": list(tokens), **given})


def write_dump(
    folder: Path,
    steps: Sequence[int] = (1, 5, 10),
    *,
    problems: int = 3,
    filler: int = 2,
    methods: Sequence[str] = (),
    seed: int = 0,
) -> None:
    """A token dump of sums: more correct responses over training, and a labelled incorrect step in each incorrect one."""
    for number, step in enumerate(steps):
        rng = np.random.default_rng([seed, step])
        rows = []
        for group in range(problems):
            numbers = np.random.default_rng([group, number % 2]).integers(3, 60, size=3).tolist()
            correct = rng.random(RESPONSES) < 0.3 + 0.55 * number / max(1, len(steps) - 1)
            for place, is_correct in enumerate(correct.tolist()):
                values = _response(rng, numbers, is_correct, int(rng.integers(0, 3 * filler + 1)))
                advantage = is_correct - correct.mean()
                if advantage == 0 and values["no_scores"] is None:
                    values["no_scores"] = "advantage 0"
                if values["no_scores"]:
                    values["weight_T"][:] = 1
                    values["score_T"][:] = np.nan
                values["base_advantage_T"] = np.full(
                    len(values["tokens"]), advantage, dtype=np.float32
                )
                values["step"] = step
                values["group"] = group
                values["row"] = place + group * RESPONSES
                values["key"] = f"{group}_{place}_0"
                rows.append(text_row(**values, methods=_methods(rng, values, methods)))
        facts = {
            "model": "models/SmolLM2-135M-Instruct",
            "special_tokens": {2: "<|im_end|>"},
            "rows_in_step": len(rows),
        }
        options = {"preset": "official", "content_weight": 2.0}
        header = DumpHeader(
            step=step, method=methods[0] if methods else "grail", options=options, **facts
        )
        write_step(folder, header, table_of(rows))


def _response(
    rng: np.random.Generator, numbers: Sequence[int], correct: bool, filler: int
) -> dict[str, Any]:
    """The values of one response, which may be truncated; an incorrect one errs in its second step."""
    a, b, c = numbers
    total = a + b + c + (0 if correct else 10)
    parts = [
        split(f"{filler * _FILLER}First, {a} and {b} make {a + b}.\n"),
        split(f"Together that is {a + b} + {c} = {total}.\n"),
        split(f"The answer is \\boxed{{{total}}}."),
    ]
    tokens = [*parts[0], *parts[1], *parts[2], ""]
    start = len(parts[0]) + len(parts[1]) + 4
    truncated = rng.random() < 0.06
    tokens = tokens[: start - 6] if truncated else tokens
    count = len(tokens)
    surprisal_T = rng.exponential(0.4, count)
    return {
        "tokens": tokens,
        "prompt": f"How much is {a} + {b} + {c}? \\boxed{{}}.",
        "ground_truth": str(a + b + c),
        "token_ids_T": np.array(
            [sum(map(ord, token)) % 49_000 + 3 if token else 2 for token in tokens]
        ),
        "reward": float(correct and not truncated),
        "outcome": "right" if correct and not truncated else "wrong",
        "answer": None if truncated else str(total),
        "truncated": truncated,
        "no_scores": "truncated" if truncated else None,
        "span": None if truncated else AnswerSpan(start, start + 3, count - 3, count - 2),
        "weight_T": np.clip(1 + 0.5 * rng.standard_normal(count), 0.5, 5).astype(np.float32),
        "score_T": rng.lognormal(-3, 1, count).astype(np.float32),
        "old_log_prob_T": -surprisal_T.astype(np.float32),
        "entropy_T": (surprisal_T * rng.uniform(0.5, 1.5, count)).astype(np.float32),
        "labels": {}
        if correct or truncated
        else {"wrong_step": [len(parts[0]), len(parts[0]) + len(parts[1])]},
    }


def _methods(
    rng: np.random.Generator, values: dict[str, Any], names: Sequence[str]
) -> dict[str, DumpRow]:
    """Columns of several methods: the first has the response's own, the others are made up."""
    columns = {}
    for name in names:
        score_T = values["score_T"]
        weight_T = values["weight_T"]
        count = len(values["tokens"])
        if columns:
            score_T = rng.lognormal(-3, 1, count).astype("f4")
            weight_T = np.clip(1 + 0.6 * rng.standard_normal(count), 0.4, 3).astype("f4")
        columns[name] = method_columns(
            score_T=score_T, weight_T=weight_T, no_scores=values["no_scores"]
        )
    return columns


def write_arrived(folder: Path) -> list[DumpRow]:
    """A dump of two responses of three tokens: the first in two optimiser steps, with a finding, the other left out; its
    rows."""
    epochs = np.float32([[0.5, 1.0, 2.5], [0.6, 0.0, 2.0]])
    left_out = np.full(3, np.nan, dtype=np.float32)
    received = {
        "key": ["a_1_0", "a_0_0"],
        "updates": [[], [0, 1]],
        "received": [left_out, epochs.mean(axis=0)],
        "clipped": [left_out, np.float32([0, 0.5, 0.5])],
        "by_update": [[], list(epochs)],
        "clipped_by_update": [[], [[0.0, 0.0, 0.0], [0.0, 1.0, 1.0]]],
        "effect": [left_out, np.float32([0.01, -0.25, 0.0])],
    }
    rows = [dump_row([1.0, 2.0, 5.0], key=f"a_{row}_0", row=row) for row in range(2)]
    for row in rows:
        row.old_log_prob_T = np.float32([-1, -2, -3])
        row.rollout_log_probs_T = np.float32([-1.001, -2, -2.5])
    write_step(folder, DumpHeader(step=1, method="grail"), table_of(rows))
    finding = Finding(
        "scaled", "everywhere", 0.5, "half arrived", (("a_0_0", 1, 1.0, 0.5),), "", tokens=1
    ).to_dict()
    header = received_header(1, loss="vanilla", updates=2, tokens=3, findings=[finding])
    write_received(folder, header, pa.table(received, schema=RECEIVED_SCHEMA))
    return list(read_dump(folder))


CALL = '<tool_call>{"name": "check"}</tool_call>'
FAILED = "Error executing tool 'check': down"


def conversation_row(rng: np.random.Generator, turns: int, **values: Any) -> DumpRow:
    """A response of so many turns: all but the last call a tool, a fifth of these in vain. Every turn has a reward, and all
    tokens of a turn the same advantage; ``acc`` asks for more than the answer, which is right."""
    tokens = []
    tool = []
    rewards = []
    advantages = []
    for turn in range(turns):
        said = split(CALL if turn < turns - 1 else r"\boxed{2}")
        reply = split(FAILED if rng.random() < 0.2 else "2") if turn < turns - 1 else []
        before = split("user\n<tool_response>")
        after = split("</tool_response>\nassistant\n")
        between = [*before, *reply, *after] if reply else []
        rewards.append(0.0 if len(reply) > 1 else float(rng.choice([-1, 1])))
        advantages += [round(rng.normal(), 2)] * len(said) + [0.0] * len(between)
        tokens += said
        if between:
            tool.append([len(tokens), len(tokens) + len(between)])
        tokens += between
    mask_T = np.array(
        [all(not start <= t < end for start, end in tool) for t in range(len(tokens))]
    )
    given = {
        "reward": sum(rewards),
        "outcome": "right" if all(reward > 0 for reward in rewards) else "wrong",
    }
    given["mask_T"] = mask_T
    given["advantage_T"] = np.float32(advantages)
    given["weight_T"] = np.ones(len(tokens), dtype=np.float32)
    labels = {"turn_rewards": rewards, **({"tool": tool} if tool else {})}
    return text_row(tokens, **{**given, "labels": labels, **values})


def write_conversations(
    folder: Path, steps: Sequence[int] = (1, 2), *, problems: int = 3, seed: int = 0
) -> list[DumpRow]:
    """A token dump of conversations of 1 to 6 turns under a method that gives every turn its advantage; its rows."""
    rng = np.random.default_rng(seed)
    rows = []
    for step in steps:
        for place in range(problems * RESPONSES):
            known = {"step": step, "row": place, "group": place // RESPONSES, "key": f"{place}_0_0"}
            rows.append(conversation_row(rng, int(rng.integers(1, 7)), **known))
        header = DumpHeader(
            step=step, method="turn_rloo", gave_advantages=True, options={"align": "turns"}
        )
        write_step(folder, header, table_of([row for row in rows if row.step == step]))
    return rows
