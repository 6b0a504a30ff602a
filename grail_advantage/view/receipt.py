"""``python -m grail_advantage.receipt RUN``: the receipts of a run, read from its token dump (docs/receipt.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from grail_advantage.dump import METRICS_FILE, TOKENS, TokenDump, read_dump
from grail_advantage.receipt import report

LOSS_NAME = (
    "In brackets: the name of the loss in the trainer's settings (verl's policy_loss.loss_mode, where vanilla is PPO's clipped "
    "loss; TRL's loss_type)."
)


def rollout_names(dump: TokenDump) -> Callable[[int, int, str], str | None]:
    """Gives the name that the page has for a response, from its step, update and key; the dump is read for the first one."""

    @cache
    def names() -> dict[tuple[int, int, str], str]:
        rows = dump.table(["step", "update", "key", "row"]).to_pylist()
        ends = {row["update"]: f"u{row['update']}" if row["update"] else "" for row in rows}
        keys = [(row["step"], row["update"], row["key"]) for row in rows]
        return {key: f"{row['step']}{ends[row['update']]}.{row['row']}" for key, row in zip(keys, rows, strict=True)}

    return lambda step, update, key: names().get((step, update, key))


def run_receipts(dump: TokenDump) -> dict[str, Any] | None:
    """What arrived in a run, in words and with links to the tokens of examples; ``None`` where it kept no receipt."""
    records = dump.receipts()
    if not records:
        return None
    whole = report.run_receipt(records, rollout_names(dump))
    unseen = f"{LOSS_NAME} {report.unseen(whole)}" if whole["losses"] else report.unseen(whole)
    return {"summary": report.summary(whole), "unseen": unseen, "findings": whole["findings"]}


def main(argv: list[str] | None = None) -> int:
    """Print one page; :func:`grail_advantage.receipt.report.main`."""
    dumps: list[TokenDump] = []

    def read(path: Path, problems: list[str]) -> Sequence[report.Record]:
        if path.is_file() and path.name != METRICS_FILE:
            return report.read(path, problems)
        folder = path.parent if path.is_file() else path
        for dump in map(read_dump, (folder / TOKENS, folder)):
            records = dump.receipts()
            if records or dump.files:
                dumps.append(dump)
                problems += dump.problems if dump.files else []
                return records
        return []

    names = cache(lambda: rollout_names(dumps[0]))
    remedy = "train with a token dump, and without received=false among its options (docs/token_dump.md)"
    return report.main(
        argv,
        read=read,
        called="a run's folder (with tokens/), a token dump's, or a file of JSON lines",
        remedy=lambda path: remedy,
        rollout=lambda step, update, key: names()(step, update, key) if dumps else None,
    )
