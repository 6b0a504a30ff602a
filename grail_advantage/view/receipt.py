"""``python -m grail_advantage.receipt RUN``: the receipt of a run in the terminal, read from its token dump.

A receipt says what each token received in an update, beside what was intended for it (docs/receipt.md). The trainer checks each
update that the token dump writes; this prints the findings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from grail_advantage.dump.received import ReceivedHeader, RunReceipt, read_headers, run_receipt
from grail_advantage.view.page.arrived import finding_texts, summary
from grail_advantage.view.page.data import TOKENS
from grail_advantage.view.page.visible import visible

NOTHING = 2
"""Exit status where there is nothing to read."""
_STEPS = 12
"""Lines of the table at most."""


# ---------------------------------------------------------------------------------------------------------------- the command


def main(argv: list[str] | None = None) -> int:
    """Print one page; 1 where a finding is a mismatch, 2 where there is nothing to read."""
    parser = argparse.ArgumentParser(
        prog="python -m grail_advantage.receipt",
        description="What each token of a run received, beside what was intended. Ends with 1 where something does not fit the "
        "loss, with 2 where there is nothing to read.",
    )
    parser.add_argument("run", type=Path, help="a run's folder (with tokens/), or a token dump's")
    folder = parser.parse_args(argv).run
    folder = folder / TOKENS if (folder / TOKENS).is_dir() else folder
    problems: list[str] = []
    headers = read_headers(folder, problems)
    for problem in problems:
        print(f"receipt: {visible(problem, breaks=False)}", file=sys.stderr)
    if not headers:
        print(
            f"receipt: {folder} holds no receipt (received_NUMBER.parquet): train with algorithm.token_dump.folder set and "
            "algorithm.token_dump.received=true",
            file=sys.stderr,
        )
        return NOTHING
    receipt = run_receipt(headers)
    print("\n".join(_page(folder, headers, receipt)))
    return 1 if receipt.mismatches else NOTHING if problems else 0


def _page(folder: Path, headers: Sequence[ReceivedHeader], receipt: RunReceipt) -> Iterator[str]:
    yield f"Receipt of {folder}"
    yield summary(receipt)
    for texts in map(finding_texts, receipt.findings):
        yield from ("", *_lines(texts))
    yield ""
    yield f"{'step':>8} {'updates':>8} {'tokens':>12} {'clipped':>9}  findings"
    parts = min(_STEPS, len(headers))
    edges = [round(part * len(headers) / parts) for part in range(parts + 1)]
    for start, end in pairwise(edges):
        part = run_receipt(headers[start:end])
        clipped = "" if part.clipped is None else f"{part.clipped:.2%}"
        names = ", ".join(visible(finding.first["name"], breaks=False) for finding in part.findings) or "none"
        yield f"{headers[start].step:>8} {part.updates:>8} {part.tokens:>12,} {clipped:>9}  {names}"


def _lines(texts: Mapping[str, Any]) -> Iterator[str]:
    plain = {name: visible(texts[name], breaks=False) for name in ("name", "what", "where", "causes")}
    yield f"{'MISMATCH' if texts['mismatch'] else 'note'}: {plain['name']}. {plain['what']}"
    yield f"  where: {plain['where']}"
    for example in texts["examples"]:
        yield f"  such as {visible(example, breaks=False)}"
    if plain["causes"]:
        yield f"  usual causes: {plain['causes']}"
