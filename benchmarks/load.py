"""Load: the token dump, the report and the receipt on steps of the size of a real run, beside plain pyarrow on the same files.

    python -m benchmarks.load [--rows 512] [--tokens 4096] [--steps 10] [--repeats 3]

Processor time of this process, as multiples of what is named beside each.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.made_up import GROUP_ROWS
from benchmarks.timer import in_turn, ratios, seconds
from grail_advantage.dump import (
    COLUMNS,
    RECEIVED_SCHEMA,
    SCHEMA,
    DumpHeader,
    write_received,
    write_step,
)
from grail_advantage.receipt import Batch, Loss, Piece, check
from grail_advantage.view.page import write_report

WORDS = 30_000
LOSS = Loss("vanilla", "clip", "token-mean", options={"low": 0.2, "high": 0.2})


def made_up(step: int, rows: int, tokens: int) -> dict[str, pa.Table]:
    """What :func:`write_step` and :func:`write_received` take, with random values in every column."""
    rng = np.random.default_rng(step)
    ids = rng.zipf(1.3, rows * tokens) % WORDS

    def lists(values: Any, length: int = tokens) -> pa.ListArray:
        return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * length), pa.array(values))

    def floats() -> pa.ListArray:
        return lists(rng.standard_normal(rows * tokens).astype(np.float32))

    words = np.array([f" w{word}" for word in range(WORDS)], dtype=object)[ids]
    one, groups = np.arange(rows), np.arange(rows) // GROUP_ROWS
    columns = {name: [None] * rows for name in SCHEMA.names} | {name: floats() for name in COLUMNS}
    columns |= {
        "row": one,
        "group": groups,
        "key": [f"{row}_0_0" for row in one],
        "prompt": [f"What is {step} + {group}?" for group in groups],
        "response": ["".join(of_row) for of_row in words.reshape(rows, tokens)],
        "outcome": np.where(one % 2, "right", "wrong"),
        "reward": (one % 2).astype(float),
        "truncated": [False] * rows,
        "span": lists(np.tile([tokens - 9, tokens - 7, tokens - 5, tokens - 4], rows), 4),
        "prompt_ids": lists(np.tile(ids[:64], rows), 64),
        "token_ids": lists(ids),
        "tokens": lists(words),
        "mask": lists(np.ones(rows * tokens, dtype=bool)),
        "methods": [[]] * rows,
    }
    received = {"key": columns["key"], "updates": [[0]] * rows, "received": floats()}
    received |= {"clipped": lists(np.zeros(rows * tokens, dtype=np.float32)), "by_update": lists(floats(), 1)}
    received |= {"clipped_by_update": lists(floats(), 1), "effect": floats()}
    tables = {"step": (columns, pa.schema(list(SCHEMA)[2:])), "received": (received, RECEIVED_SCHEMA)}
    return {
        name: pa.table([pa.array(own[field.name]).cast(field.type) for field in schema], schema=schema)
        for name, (own, schema) in tables.items()
    }


def written(folder: Path, step: int, tables: Mapping[str, pa.Table]) -> None:
    write_step(folder, DumpHeader(step=step, method="grail"), tables["step"])
    header = {"step": step, "update": 0, "loss": "", "findings": [], "updates": 1, "tokens": 0}
    write_received(folder, header, tables["received"])


def plainly(folder: Path, tables: Mapping[str, pa.Table]) -> None:
    for name, table in tables.items():
        pq.write_table(table, folder / f"plain_{name}.parquet", compression="zstd")


def update(rows: int, tokens: int, fault: str) -> Callable[[], Any]:
    """An update of PPO on ``rows`` responses; with a fault, some responses train with the advantages of the one before, or
    with twice theirs."""
    torch.manual_seed(0)
    old = -3 * torch.rand(rows, tokens)
    policy = (old + 0.1 * torch.randn(rows, tokens)).clamp(max=-0.01)
    advantages = torch.randn(rows, 1) * (0.5 + torch.rand(rows, tokens))
    given = advantages.clone()
    if fault == "swapped":
        given[: rows // 4] = advantages[: rows // 4].roll(1, 0)
    elif fault == "scaled":
        given[: rows // 4] *= 2
    ratio = (policy - old).exp()
    free = torch.where(given > 0, ratio < 1.2, ratio > 0.8)
    gradient = -given * ratio * free / (rows * tokens)
    pieces = [Piece(at, policy[at], gradient[at], 0, 0) for at in torch.arange(rows).split(GROUP_ROWS)]
    batch = Batch(advantages, torch.ones(rows, tokens, dtype=torch.bool), old, on_policy=False)
    return lambda: check(batch, LOSS, pieces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rows": 512, "tokens": 4096, "steps": 10, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    shape = f"{given.rows} responses x {given.tokens} tokens"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for step in range(given.steps, 0, -1):
            tables = made_up(step, given.rows, given.tokens)
            written(folder / "tokens", step, tables)
        files = list((folder / "tokens").iterdir())
        runs = {
            "write": lambda: written(folder / "tokens", 1, tables),
            "plain write": lambda: plainly(folder, tables),
            "report": lambda: write_report(folder),
            "plain read": lambda: [pq.read_table(path) for path in files],
        }
        timed = {name: lambda run=run: [seconds("cpu", run)] for name, run in runs.items()}
        repeats = list(in_turn(timed, given.repeats, warm=False))
    for ours, plain, what in (
        ("write", "plain write", shape),
        ("report", "plain read", f"{given.steps} steps of {shape}"),
    ):
        own = median(sum(repeat[ours]) for repeat in repeats)
        print(f"{ours}: {median(ratios(repeats, ours, plain)):.2f} x {plain} with pyarrow, {own:.1f} s ({what})")
    for fault in ("none", "swapped", "scaled"):
        sizes = {rows: update(rows, 512, fault) for rows in (64, 128, 256, 512)}
        timed = {str(rows): lambda run=run: [seconds("cpu", run)] for rows, run in sizes.items()}
        repeats = list(in_turn(timed, given.repeats))
        times = [f"{median(ratios(repeats, str(rows), '64')):.1f}" for rows in sizes]
        own = median(sum(repeat["512"]) for repeat in repeats)
        print(f"receipt, fault {fault}: {', '.join(times)} x for 1, 2, 4, 8 x 64 responses of 512 tokens, {own:.1f} s")


if __name__ == "__main__":
    main()
