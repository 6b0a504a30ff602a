"""The receipt of a run, read from its token dump: put together, in sentences, and in the terminal
(``python -m grail_advantage.receipt RUN``).

A receipt says what each token received in an update, beside what was intended for it (docs/receipt.md). The trainer checks each
update that the token dump writes; this prints the findings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from grail_advantage.answers.visible import visible
from grail_advantage.dump.options import TOKENS
from grail_advantage.dump.schema import FindingRecord, ReceivedHeader
from grail_advantage.dump.store import read_headers

NOTHING = 2
"""Exit status where there is nothing to read."""
_STEPS = 12
"""Lines of the table at most."""


# ------------------------------------------------------------------------------------------------------------------ a run


@dataclass(frozen=True)
class RunFinding:
    """A finding, over a run."""

    first: FindingRecord
    """As in the first update that has it."""
    step: int
    update: int
    """Of that update."""
    count: int
    """Updates that have one of its name."""


@dataclass(frozen=True)
class RunReceipt:
    """The receipts of a run, put together."""

    updates: int
    """Updates that were checked."""
    tokens: int
    """Tokens that trained in them."""
    clipped: float | None
    """Mean share of clipping."""
    losses: Sequence[str]
    findings: Sequence[RunFinding]
    """Mismatches first, then notes."""

    @property
    def mismatches(self) -> int:
        return sum(finding.first["mismatch"] for finding in self.findings)


def run_receipt(headers: Sequence[ReceivedHeader]) -> RunReceipt:
    """The receipts of a run from the headers of its files."""
    known: dict[tuple[bool, str], RunFinding] = {}
    for header in headers:
        for name, finding in {(not each["mismatch"], each["name"]): each for each in reversed(header.findings)}.items():
            first = known.setdefault(name, RunFinding(finding, header.step, header.update, 0))
            known[name] = replace(first, count=first.count + 1)
    clipped = [(header.clipped, header.tokens) for header in headers if header.clipped is not None]
    weight = sum(tokens for _, tokens in clipped)
    return RunReceipt(
        updates=len(headers),
        tokens=sum(header.tokens for header in headers),
        clipped=sum(share * tokens for share, tokens in clipped) / weight if weight else None,
        losses=sorted({header.loss for header in headers if header.loss}),
        findings=[known[name] for name in sorted(known)],
    )


# --------------------------------------------------------------------------------------------------------------- in sentences


def summary(receipt: RunReceipt) -> str:
    """What arrived, in two sentences."""
    of = f"{receipt.tokens:,} tokens of {_count(receipt.updates, 'update')}"
    loss = f" ({', '.join(receipt.losses)})" if receipt.losses else ""
    clipped = "" if receipt.clipped is None else f" {100 * receipt.clipped:.3g} % of them were clipped."
    count = receipt.mismatches
    if count:
        verb = "does" if count == 1 else "do"
        return f"{_count(count, 'thing')} in what arrived {verb} not fit the loss{loss}, over {of}.{clipped}"
    return f"Every token received what the loss says{loss}, over {of}.{clipped}"


def finding_texts(finding: RunFinding) -> dict[str, Any]:
    """A finding's sentences."""
    first = finding.first
    at = f"step {finding.step}" + (f", update {finding.update}" if finding.update else "")
    more = "" if finding.count == 1 else f", and {_count(finding.count - 1, 'more update')}"
    return {
        "mismatch": first["mismatch"],
        "name": first["name"],
        "what": first["what"],
        "where": f"{at}, {first['where']}{more}",
        "examples": [_example(*example) for example in first["examples"][:3]],
        "causes": first["causes"],
    }


def _example(response: Any, token: Any, intended: Any, received: Any) -> str:
    return f"response {response}, token {token}: intended {_number(intended)}, received {_number(received)}"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "nothing"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


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
