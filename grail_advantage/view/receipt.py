"""``python -m grail_advantage.receipt RUN``: the receipts of a run, read from its token dump (docs/receipt.md)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grail_advantage.dump import METRICS_FILE, TokenDump
from grail_advantage.receipt import report
from grail_advantage.view.run import dump_of


def rollout_names(dump: TokenDump) -> dict[tuple[int, int, str], str]:
    """The name that the page has for each response, by step, update and key."""
    names = {}
    for row in dump.table(["step", "update", "key", "row"]).to_pylist():
        step = f"{row['step']}u{row['update']}" if row["update"] else row["step"]
        names[row["step"], row["update"], row["key"]] = f"{step}.{row['row']}"
    return names


def run_receipts(dump: TokenDump) -> dict[str, Any] | None:
    """What arrived in a run, in words and with links to the tokens of examples; ``None`` where it kept no receipt."""
    records = dump.receipts()
    if not records:
        return None
    names = rollout_names(dump)
    run = report.run_receipt(records, lambda *key: names.get(key))
    return {
        "summary": report.summary(run),
        "unseen": report.unseen(run),
        "findings": run["findings"],
    }


def main(argv: list[str] | None = None) -> int:
    """Print one page; :func:`grail_advantage.receipt.report.main`."""
    names: dict[tuple[int, int, str], str] = {}

    def read(path: Path, problems: list[str]) -> Sequence[report.Record]:
        if path.is_file():
            if path.name != METRICS_FILE:
                return report.read(path, problems)
            path = path.parent
        dump = dump_of(path)
        records = dump.receipts()
        names.update(rollout_names(dump))
        if dump.files:
            problems += dump.problems
        return records

    called = "a run's folder (with tokens/), a token dump's, or a file of JSON lines"
    remedy = (
        "train with a token dump, and without received=false among its options (docs/token_dump.md)"
    )
    return report.main(
        argv,
        read=read,
        called=called,
        remedy=remedy,
        rollout=lambda *key: names.get(key),
    )
