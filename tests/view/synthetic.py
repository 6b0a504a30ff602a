"""Runs that never ran: metrics and token dumps with a seed, as long and as many as a test needs."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grail_advantage.dump import (
    DumpHeader,
    DumpRow,
    MetricsFile,
    received_table,
    write_received,
    write_step,
)
from grail_advantage.receipt import Finding, Receipt
from tests.dumps import dump_row, method_columns, received_header, table_of

RESPONSES = 8


def write_metrics(folder: Path, steps: int, *, seed: int = 0):
    """A run's figures; validation at step 0 and every fifth."""
    rng = np.random.default_rng(seed)
    file = MetricsFile(folder / "metrics.jsonl", -1)
    for step in range(steps + 1):
        values = {}
        if step % 5 == 0:
            values["val-core/tiny_chain_sum/acc/mean@1"] = 0.35 + 0.02 * step
        if step:
            values["critic/score/mean"] = 0.3 + 0.02 * step + rng.normal(0, 0.03)
            values["grail/average_weight"] = 1.16 + rng.normal(0, 0.01)
        file.add(step, values)


def write_rows(folder: Path, rows: Sequence[DumpRow], **header) -> Path:
    """A run with a dump of these rows, a file a step."""
    for step in {row.step for row in rows}:
        table = table_of([row for row in rows if row.step == step])
        facts = {"method": "grail", **header, "step": step}
        write_step(folder / "tokens", DumpHeader(**facts), table)
    return folder


def split(text: str) -> list[str]:
    """Word-like tokens, spaces in front, numbers by digit."""
    return re.findall(r" ?[A-Za-z]+|\d|\s|[^\sA-Za-z\d]", text)


def write_dump(
    folder: Path,
    steps: Sequence[int] = (1, 5, 10),
    *,
    problems: int = 3,
    methods: Sequence[str] = (),
    seed: int = 0,
):
    """A run with a dump of sums: a labelled incorrect step in each incorrect response. Responses to the second problem are
    all correct, and so have no scores."""
    rows = []
    for number, step in enumerate(steps):
        rng = np.random.default_rng([seed, step])
        for group in range(problems):
            # The same problems in every second file, and with every seed.
            numbers = np.random.default_rng([group, number % 2]).integers(3, 60, size=3)
            correct = rng.random(RESPONSES) < (1 if group == 1 else 0.5)
            for place, is_correct in enumerate(correct.tolist()):
                row = _response(rng, numbers.tolist(), is_correct)
                advantage = is_correct - correct.mean()
                if advantage == 0:
                    row.no_scores = "advantage 0"
                    row.weight_T[:] = 1
                    row.score_T[:] = np.nan
                row.base_advantage_T[:] = advantage
                row.advantage_T = row.weight_T * row.base_advantage_T
                row.step = step
                row.group = group
                row.row = RESPONSES * group + place
                row.key = f"{group}_{place}_0"
                for name in methods:
                    # The first one's are the response's own.
                    shift = 0.1 * len(row.methods)
                    row.methods[name] = method_columns(
                        score_T=row.score_T + shift,
                        weight_T=row.weight_T + shift,
                        no_scores=row.no_scores,
                    )
                rows.append(row)
    write_rows(folder, rows, special_tokens={2: "<|im_end|>"})


def _response(rng: np.random.Generator, numbers: Sequence[int], correct: bool) -> DumpRow:
    """One response; an incorrect one errs in its second step."""
    a, b, c = numbers
    total = a + b + c + (0 if correct else 10)
    thoughts = "Let me think about this carefully.\n" * int(rng.integers(7))
    first = split(f"{thoughts}First, {a} and {b} make {a + b}.\n")
    second = split(f"Together that is {a + b} + {c} = {total}.\n")
    tokens = [*first, *second, *split(f"The answer is \\boxed{{{total}}}."), ""]
    end = len(first) + len(second)
    count = len(tokens)
    return dump_row(
        np.clip(1 + 0.5 * rng.standard_normal(count), 0.5, 5),
        tokens=tokens,
        prompt=f"How much is {a} + {b} + {c}? \\boxed{{}}.",
        ground_truth=str(a + b + c),
        token_ids_T=[3 if token else 2 for token in tokens],
        score_T=rng.lognormal(-3, 1, count),
        old_log_prob_T=-rng.exponential(0.4, count),
        entropy_T=rng.exponential(0.4, count),
        reward=float(correct),
        outcome="right" if correct else "wrong",
        answer=str(total),
        # The box begins after "The answer is ", and its content after "\boxed{"; "}." and the end token follow.
        span=(end + 4, end + 7, count - 3, count - 2),
        labels={} if correct else {"wrong_step": [len(first), end]},
    )


SCALED = Finding(
    "scaled",
    "update 0: 3 tokens of 1 of 3 responses",
    0.5,
    "every token received 0.5 times what it should",
    (("a_1_0", 2, 0.5, 0.25),),
    "the denominator",
    tokens=3,
)


def receipt(*findings: Finding) -> Receipt:
    """Of three responses in four optimiser steps, of which the last response was in none; the first one's in two."""
    received_UBT = torch.full((4, 3, 4), torch.nan)
    received_UBT[0, 0, :3] = torch.tensor([0.5, -1.0, 2.0])
    received_UBT[2, 0, :3] = torch.tensor([0.25, 0.0, 2.0])
    # The second response was in the second step alone.
    received_UBT[1, 1] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    clipped_UBT = torch.where(received_UBT.isfinite(), 0.0, torch.nan)
    # One token of the first response was clipped, in its second step.
    clipped_UBT[2, 0, 1] = 1.0
    means = received_UBT.nanmean(dim=0), clipped_UBT.nanmean(dim=0)
    return Receipt(*means, received_UBT, received_UBT, clipped_UBT, findings)


def header(step: int, *findings: Finding, **values) -> dict[str, Any]:
    plain = {"loss": "vanilla", "updates": 4, "tokens": 7, "clipped": 0.125}
    records = [finding.to_dict() for finding in findings]
    return received_header(step, findings=records, **{**plain, **values})


def write_arrived(folder: Path, *findings: Finding, update: int = 0) -> Path:
    """A dump of responses of 3, 4 and 2 tokens, and beside it the file, which it returns, of what they received; one of the
    first one's tokens moved with its advantage."""
    lengths = [3, 4, 2]
    rows = [
        dump_row(
            [1.0] * length,
            row=place,
            key=f"a_{place}_0",
            old_log_prob_T=[-1.0] * length,
            rollout_log_probs_T=[-1.001, -1.0, -0.5, -1.0][:length],
        )
        for place, length in enumerate(lengths)
    ]
    write_step(folder, DumpHeader(step=3, update=update, method="grail"), table_of(rows))
    effect_BT = torch.full((3, 4), torch.nan)
    effect_BT[0, :3] = torch.tensor([0.01, -0.25, 0.0])
    table = received_table(receipt(), [row.key for row in rows], lengths, effect_BT)
    return write_received(folder, header(3, *findings, update=update), table)


def write_conversations(folder: Path):
    """A run of three responses of three turns, with a tool between them; advantages differ within the last turn."""
    rows = [
        dump_row(
            [1.0] * 8,
            mask_T=[True, True, False, False, True, False, True, True],
            advantage_T=[1.5, 1.5, 0.0, 0.0, -0.25, 0.0, 3.0, 2.0],
            labels={"tool": [[2, 4], [5, 6]], "turn_rewards": [1.0, -1.0, 0.5]},
            reward=reward,
            row=place,
            key=f"{place}",
        )
        for place, reward in enumerate((0.5, -1.0, 2.0))
    ]
    write_rows(folder, rows, method="turn_rloo", gave_advantages=True)
