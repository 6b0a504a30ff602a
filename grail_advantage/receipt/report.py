"""The receipts of a run put together, in sentences and as a command; they are read from JSON, a line a receipt, which
:func:`write` writes.

A record of such a line has ``step`` and ``update`` (of the training step), ``loss``, ``findings`` (:meth:`.Finding.to_dict`),
``updates`` (optimiser steps), ``tokens``, ``clipped`` and ``seen_from``; the last two may be null.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from .check import Finding, Receipt, number
from .foreign import complain, numbered_lines, read_json, say, why

NOTHING = 2
"""Exit status where there is nothing to read."""
_STEPS = 12
"""Lines of the table at most."""
Record = Mapping[str, Any]
Read = Callable[[Path, list[str]], Sequence[Record]]
"""Records of a path; what cannot be read is added to the list."""


# ------------------------------------------------------------------------------------------------------------------ a run


@dataclass(frozen=True)
class RunFinding:
    """A finding, over a run."""

    first: Finding
    """The finding of the first receipt that has it."""
    step: int
    update: int
    """Of the first receipt."""
    count: int
    """Receipts that have one of its name."""
    tokens: int
    """Tokens with this fault in all these receipts."""


@dataclass(frozen=True)
class RunReceipt:
    """The receipts of a run, put together."""

    receipts: int
    steps: int
    """Optimiser steps in them."""
    tokens: int
    """Tokens that trained in them."""
    clipped: float | None
    """Mean share of clipping."""
    losses: Sequence[str]
    findings: Sequence[RunFinding]
    """Mismatches first, then notes; those that cover most tokens first."""
    seen_from: float | None
    """As in the least precise receipt."""

    @property
    def mismatches(self) -> int:
        return sum(finding.first.mismatch for finding in self.findings)


def run_receipt(records: Sequence[Record]) -> RunReceipt:
    """The receipts of a run from their records."""
    known: dict[tuple[bool, str], RunFinding] = {}
    for record in records:
        own: dict[tuple[bool, str], list[Finding]] = {}
        for finding in map(Finding.from_dict, record["findings"]):
            own.setdefault((finding.mismatch, finding.name), []).append(finding)
        for name, findings in own.items():
            first = known.setdefault(name, RunFinding(findings[0], record["step"], record["update"], 0, 0))
            tokens = first.tokens + sum(finding.tokens for finding in findings)
            known[name] = replace(first, count=first.count + 1, tokens=tokens)
    clipped = [(record["clipped"], record["tokens"]) for record in records if record.get("clipped") is not None]
    weight = sum(tokens for _, tokens in clipped)
    return RunReceipt(
        receipts=len(records),
        steps=sum(record["updates"] for record in records),
        tokens=sum(record["tokens"] for record in records),
        clipped=sum(share * tokens for share, tokens in clipped) / weight if weight else None,
        losses=sorted({record["loss"] for record in records if record["loss"]}),
        findings=sorted(known.values(), key=lambda one: (not one.first.mismatch, -one.tokens, one.first.name)),
        seen_from=max((record["seen_from"] for record in records if record.get("seen_from")), default=None),
    )


# --------------------------------------------------------------------------------------------------------------- in sentences


def summary(receipt: RunReceipt) -> str:
    """What arrived, in two sentences."""
    of = f"{receipt.tokens:,} tokens in {_count(receipt.steps, 'optimiser step')}"
    loss = f" ({', '.join(receipt.losses)})" if receipt.losses else ""
    clipped = "" if receipt.clipped is None else f" {100 * receipt.clipped:.3g} % of them were clipped."
    count = receipt.mismatches
    if count:
        verb = "does" if count == 1 else "do"
        return f"{_count(count, 'thing')} in what arrived {verb} not fit the loss{loss}, over {of}.{clipped}"
    return f"Every token received what the loss says{loss}, over {of}.{clipped}"


def unseen(receipt: RunReceipt) -> str:
    """What such a receipt cannot see."""
    factor = "a factor near 1" if receipt.seen_from is None else f"a factor between 1 and {receipt.seen_from:.5g}"
    return (
        "Measured: the gradient of the loss with respect to each sampled token's log-probability. Not seen: responses that "
        "were not recorded (a token dump has 64 a step by default), an entropy bonus and auxiliary losses that bypass it, "
        f"gradients of an earlier step (a forgotten zero_grad), {factor}."
    )


def finding_texts(finding: RunFinding) -> dict[str, Any]:
    """A finding's sentences. Tokens, optimiser steps and epochs are counted from 1, as on the page."""
    first = finding.first
    at = f"step {finding.step}" + (f", update {finding.update}" if finding.update else "")
    more = "" if finding.count == 1 else f", and {_count(finding.count - 1, 'more receipt')}"
    return {
        "mismatch": first.mismatch,
        "name": first.name,
        "what": first.what,
        "where": f"{at}: {first.where}{more}",
        "tokens": finding.tokens,
        "receipts": finding.count,
        "step": finding.step,
        "update": finding.update,
        "examples": [_example(*example) for example in first.examples[:3]],
        "causes": first.causes,
    }


def _example(response: Any, token: int, intended: float | None, received: float | None) -> dict[str, Any]:
    values = [value + 0.0 if isinstance(value, int | float) else None for value in (intended, received)]  # no -0.0
    text = f"response {response}, token {token + 1}: intended {_number(values[0])}, received {_number(values[1])}"
    return {"text": text, "response": response, "token": token + 1, "intended": values[0], "received": values[1]}


def _number(value: float | None) -> str:
    return "nothing" if value is None else number(value)


def _count(many: int, what: str) -> str:
    return f"{many:,} {what}{'' if many == 1 else 's'}"


# ---------------------------------------------------------------------------------------------------------------- the command


def write(path: Path | str, receipt: Receipt, loss: str, step: int, update: int = 0) -> None:
    """Add a receipt to a file of JSON lines, which the command reads."""
    trained_BT = receipt.received_BT.isfinite() & (receipt.expected_UBT.nansum(dim=0) != 0)
    clipped = receipt.clipped_BT[trained_BT]
    record = {
        "step": step,
        "update": update,
        "loss": loss,
        "findings": [finding.to_dict() for finding in receipt.findings],
        "updates": len(receipt.received_UBT),
        "tokens": int(trained_BT.sum()),
        "clipped": float(clipped.mean()) if len(clipped) and clipped.isfinite().all() else None,
        "seen_from": receipt.seen_from,
    }
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read(path: Path, problems: list[str]) -> list[Record]:
    """The records of such a file."""
    records: list[Record] = []
    unread = []
    try:
        for place, line in numbered_lines(path):
            try:
                record = read_json(line)
                _check_record(record)
            except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
                unread.append(place)
            else:
                records.append(record)
    except (OSError, ValueError) as error:
        problems.append(f"{path}: cannot be read: {why(error)}")
    if unread:
        problems.append(f"{path}:{unread[0]}: is no receipt; {len(unread)} such lines are left out")
    return records


def _check_record(record: Record) -> None:
    """Raises an error of values that are none of a receipt."""
    counts = [record[name] for name in ("step", "update", "updates", "tokens")]
    sizes = [record.get(name) for name in ("clipped", "seen_from")]
    if not (
        all(type(count) is int and abs(count) < 2**63 for count in counts)
        and all(size is None or (type(size) in (int, float) and math.isfinite(size)) for size in sizes)
        and isinstance(record["loss"], str)
    ):
        raise TypeError
    for finding in map(Finding.from_dict, record["findings"]):
        texts = (finding.name, finding.where, finding.what, finding.causes)
        keys = all(isinstance(example[0], str | int) for example in finding.examples)
        if not (keys and all(isinstance(text, str) for text in texts) and type(finding.tokens) is int):
            raise TypeError
    for of_run in run_receipt([record]).findings:
        finding_texts(of_run)


def main(
    argv: list[str] | None = None,
    *,
    read: Read = read,
    called: str = "a file of JSON lines from write()",
    remedy: Callable[[Path], str] = lambda path: "write() adds one",
    rollout: Callable[[int, int, str], str | None] = lambda step, update, key: None,
) -> int:
    """Print one page.

    Args:
        argv: the command's arguments.
        read: gives the records of the path.
        called: the path, in the help.
        remedy: where it holds no receipt.
        rollout: name of a response on a report page, by step, update and key.

    Returns:
        1 where a finding is as severe as ``--fail-on`` says, 2 where there is nothing to read, 0 otherwise.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}",
        description="What each token of a run received, beside what was intended. Ends with 1 where something does not fit the "
        "loss, with 2 where there is nothing to read.",
    )
    parser.add_argument("run", type=Path, help=called)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the page")
    parser.add_argument(
        "--fail-on",
        choices=("mismatch", "note", "nothing"),
        default="mismatch",
        help="end with 1 on a mismatch (default), on a note too, or never",
    )
    options = parser.parse_args(argv)
    problems: list[str] = []
    records = read(options.run, problems)
    complain("receipt", *problems)
    if not records:
        if not problems:
            complain("receipt", f"{options.run} holds no receipt: {remedy(options.run)}")
        return NOTHING
    receipt = run_receipt(records)
    findings = [linked(texts, rollout) for texts in map(finding_texts, receipt.findings)]
    if options.json:
        whole = {"summary": summary(receipt), "unseen": unseen(receipt), "findings": findings}
        counts = {
            name: getattr(receipt, name) for name in ("receipts", "steps", "tokens", "clipped", "losses", "seen_from")
        }
        print(json.dumps({**whole, **counts}, indent=1))
    else:
        say(*_page(options.run, records, receipt, findings))
    severe = {"mismatch": receipt.mismatches, "note": len(receipt.findings), "nothing": 0}[options.fail_on]
    return 1 if severe else NOTHING if problems else 0


def linked(texts: dict[str, Any], rollout: Callable[[int, int, str], str | None]) -> dict[str, Any]:
    """A finding's sentences with the address of each example's token on a report page, where it is there."""
    for example in texts["examples"]:
        name = rollout(texts["step"], texts["update"], example["response"])
        if name is not None:
            example["link"] = f"#overlay=received&rollout={name}&token={example['token'] - 1}"
    return texts


def _page(path: Path, records: Sequence[Record], receipt: RunReceipt, findings: Sequence[Record]) -> Iterator[str]:
    yield f"Receipt of {path}"
    yield summary(receipt)
    for texts in findings:
        yield ""
        yield f"{'MISMATCH' if texts['mismatch'] else 'note'}: {texts['name']}. {texts['what']}"
        yield f"  where: {texts['where']}"
        for example in texts["examples"]:
            yield f"  such as {example['text']}" + (f" (report.html{example['link']})" if "link" in example else "")
        if texts["causes"]:
            yield f"  usual causes: {texts['causes']}"
    yield ""
    yield f"{'step':>8} {'steps':>8} {'tokens':>12} {'clipped':>9}  findings"
    parts = min(_STEPS, len(records))
    edges = [round(part * len(records) / parts) for part in range(parts + 1)]
    for start, end in pairwise(edges):
        part = run_receipt(records[start:end])
        clipped = "" if part.clipped is None else f"{part.clipped:.2%}"
        names = ", ".join(finding.first.name for finding in part.findings) or "none"
        yield f"{records[start]['step']:>8} {part.steps:>8} {part.tokens:>12,} {clipped:>9}  {names}"
    yield ""
    yield unseen(receipt)
