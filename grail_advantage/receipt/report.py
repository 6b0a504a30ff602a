"""The receipts of a run put together, as a table and as a command, over records: a receipt as one JSON object.

A record has ``step`` and ``update`` (of the training step), ``loss``, ``findings`` (:meth:`.Finding.to_dict`),
``updates`` (optimiser steps), ``tokens``, and where known ``trained`` (tokens with a gradient), ``clipped``,
``seen_from``, ``responses`` (seen, of all).
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from .check import Finding, Receipt

if __package__.count("."):
    from ..text_io import complain, numbered_lines, read_json, say, why
else:  # The wheel token-receipt has that folder within this one.
    from .text_io import complain, numbered_lines, read_json, say, why  # type: ignore[no-redef]

NOTHING = 2
"""Exit status where there is nothing to read."""
Record = Mapping[str, Any]
_RECORD: dict[str, Any] = {
    "step": int,
    "update": int,
    "loss": str,
    "findings": list,
    "updates": int,
    "tokens": int,
    "trained": int | None,
    "clipped": float | None,
    "seen_from": float | None,
}
_FINDING = get_type_hints(Finding) | {"examples": tuple}
_EXAMPLE = {"response": str, "token": int, "intended": float | None, "received": float | None}
"""Types of the values, by name, of a record and its parts."""
Rollout = Callable[[int, int, str], str | None]
"""Name of a response on the report's page, by step, update and key."""


def run_receipt(
    records: Sequence[Record], rollout: Rollout = lambda step, update, key: None
) -> dict[str, Any]:
    """The receipts of a run, put together, for JSON; tokens and optimiser steps are counted from 1, as on the page."""
    by_name = defaultdict[tuple[str, bool], list[tuple[Record, Finding]]](list)
    for record in records:
        for finding in map(Finding.from_dict, record["findings"]):
            by_name[finding.name, finding.mismatch].append((record, finding))
    lines = [_line(group, rollout) for group in by_name.values()]
    # Mismatches first, then what covers most tokens.
    lines.sort(key=lambda line: (not line["mismatch"], -line["tokens"], line["name"]))
    # Records of older versions do not say all of it.
    shares = [
        (record["clipped"], record["tokens"])
        for record in records
        if record.get("clipped") is not None
    ]
    tokens = sum(count for _, count in shares)
    trained = [record.get("trained") for record in records]
    responses = [record["responses"] for record in records if record.get("responses")]
    return {
        "receipts": len(records),
        "steps": sum(record["updates"] for record in records),
        "tokens": sum(record["tokens"] for record in records),
        "trained": None if None in trained else sum(trained),
        "responses": [sum(counts) for counts in zip(*responses, strict=True)],
        "clipped": sum(share * count for share, count in shares) / tokens if tokens else None,
        "losses": sorted({record["loss"] for record in records if record["loss"]}),
        "seen_from": max((record.get("seen_from") or 0 for record in records), default=0) or None,
        "findings": lines,
    }


def _line(group: Sequence[tuple[Record, Finding]], rollout: Rollout) -> dict[str, Any]:
    """The findings of one name: the first says where it is, with its examples."""
    first, finding = group[0]
    step = first["step"]
    update = first["update"]
    where = f"step {step}, update {update}" if update else f"step {step}"
    where += f": {finding.where}"
    receipts = len({(record["step"], record["update"]) for record, _ in group})
    if receipts > 1:
        where += f", and {receipts - 1} more receipts"
    return finding.to_dict() | {
        "step": step,
        "update": update,
        "where": where,
        "tokens": sum(finding.tokens for _, finding in group),
        "receipts": receipts,
        "examples": [_example(partial(rollout, step, update), *e) for e in finding.examples],
    }


def _example(
    rollout: Callable[[str], str | None], response: str, token: int, *values: float | None
) -> dict[str, Any]:
    intended, received = (None if value is None else value + 0.0 for value in values)  # no -0.0
    example = {"response": response, "token": token + 1, "intended": intended, "received": received}
    texts = f"intended {_value(intended)}, received {_value(received)}"
    example["text"] = f"response {response}, token {token + 1}: {texts}"
    name = rollout(response)
    if name is not None:
        example["link"] = f"#overlay=received&rollout={name}&token={token}"
    return example


def _value(value: float | None) -> str:
    if value is None:
        return "nothing"
    return f"{value:+.4g}" if value else "0"


def summary(run: Record) -> str:
    """Say what arrived, in a few sentences, of which the first says whether anything trained."""
    mismatches = sum(finding["mismatch"] for finding in run["findings"])
    loss = ""
    if run["losses"]:
        loss = f" ({', '.join(run['losses'])})"
    names = {finding["name"] for finding in run["findings"]}
    seen = ""
    if run["responses"]:
        seen = " of {:,} of {:,} responses".format(*run["responses"])
    steps = f"{run['steps']:,} optimiser step" + "s" * (run["steps"] != 1)
    trained = f"{run['tokens']:,} tokens{seen} were compared in {steps}"
    if run["trained"] is not None:
        trained = f"{run['trained']:,} of {run['tokens']:,} tokens{seen} trained in {steps}"
    fits = f"Every token received what the loss says{loss}"
    if mismatches:
        fits = f"{mismatches} thing{'s do' if mismatches > 1 else ' does'} not fit the loss{loss}"
    elif "unknown loss" in names:
        fits = f"The loss{loss} has no formula here and no value was compared; which tokens and responses train fits"
    clipped = ""
    if run["clipped"] is not None:
        clipped = f" {100 * run['clipped']:.3g} % of them were clipped."
    return f"{'NOTHING TRAINED: ' * (run['trained'] == 0)}{trained}. {fits}.{clipped}"


def unseen(run: Record) -> str:
    """What such a receipt cannot see."""
    factor = f"between 1 and {run['seen_from']:.5g}" if run["seen_from"] else "near 1"
    return (
        "Measured: the gradient of the loss with respect to each sampled token's log-probability. Not seen: other "
        "responses (a token dump has 64 a step by default), an entropy bonus and auxiliary losses that bypass it, "
        f"gradients of an earlier step (a forgotten zero_grad), a factor {factor}."
    )


def page(title: object, run: Record) -> Iterator[str]:
    """The lines of a terminal."""
    yield from (f"Receipt of {title}", summary(run))
    if run["findings"]:
        yield ""
        yield f"{'received / intended':>20} {'tokens':>10} {'of what differs':>16}"
    also = ""
    for line in run["findings"]:
        low = line["low"]
        high = line["high"]
        times = ""
        if low is not None and high is not None:
            times = f"{low:.4g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.4g} to {high:.4g}"
        share = ""
        if line["explains"] is not None:
            share = f"{line['explains']:.0%}"
        kind = "MISMATCH" if line["mismatch"] else "note"
        yield f"{times:>20} {line['tokens']:>10,} {share:>16}  {kind}: {line['name']}. {line['what']}"
        yield f"      {line['where']}"
        for example in line["examples"]:
            text = f"      such as {example['text']}"
            if "link" in example:
                text += f" (report.html{example['link']})"
            yield text
        # Lines of one explanation share it.
        if line["also"] not in ("", also):
            yield f"      also tried, and what each explains alone: {line['also']}"
        also = line["also"]
        if line["causes"]:
            yield f"      usual causes: {line['causes']}"
    yield from ["", unseen(run)]


def checked(record: Any) -> Record:
    """A record that others wrote. ValueError: it is none."""
    _check_types(record, _RECORD)
    for values in record["findings"]:
        try:
            finding = Finding.from_dict(values)
        except TypeError as error:
            raise ValueError(f"a finding is incomplete: {error}") from None
        _check_types(vars(finding), _FINDING)
        for example in finding.examples:
            _check_types(dict(zip(_EXAMPLE, example, strict=True)), _EXAMPLE)
    match record.get("responses"):
        case None | [int(), int()]:
            return record
        case counts:
            raise ValueError(f"responses={counts!r:.40} is no pair of numbers")


def _check_types(values: Any, types: Mapping[str, Any]) -> None:
    if not isinstance(values, dict):
        raise ValueError("is no object")
    for name, kind in types.items():
        value: Any = values.get(name)
        # In JSON a float may be a whole number; one may be larger than int64, in which counts are kept.
        fits = isinstance(value, kind) or (isinstance(value, int) and isinstance(0.0, kind))
        if not fits or (kind is int and not 0 <= value < 2**63):
            raise ValueError(f"{name}={value!r:.40} is not of the type that a receipt has")


def record_of(receipt: Receipt, loss: str, step: int, update: int = 0) -> dict[str, Any]:
    """A receipt as a record, with the loss's name."""
    return {
        "step": step,
        "update": update,
        "loss": loss,
        "findings": [finding.to_dict() for finding in receipt.findings],
        "updates": len(receipt.received_UBT),
        "tokens": receipt.tokens,
        "trained": receipt.trained,
        "clipped": receipt.clipped,
        "seen_from": receipt.seen_from,
        "responses": receipt.responses,
    }


def write(path: Path | str, receipt: Receipt, loss: str, step: int, update: int = 0) -> None:
    """Add a receipt to a file of JSON lines, which the command reads."""
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record_of(receipt, loss, step, update)) + "\n")


def read(path: Path, problems: list[str]) -> list[Record]:
    """The records of such a file; what cannot be read is added to ``problems``."""
    records = []
    unread = []
    try:
        for place, line in numbered_lines(path):
            try:
                records.append(checked(read_json(line)))
            except ValueError:
                unread.append(place)
    except (OSError, ValueError) as error:
        problems.append(f"{path}: cannot be read: {why(error)}")
    if unread:
        problems.append(f"{path}:{unread[0]}: is no receipt; {len(unread)} such lines are left out")
    return records


def main(
    argv: list[str] | None = None,
    *,
    read: Callable[[Path, list[str]], Sequence[Record]] = read,
    called: str = "a file of JSON lines from write()",
    remedy: str = "write() adds one",
    rollout: Rollout = lambda step, update, key: None,
) -> int:
    """Print the page of a path, which is ``called`` so in the help and has a ``remedy`` where it holds no receipt.

    Returns:
        1 where a finding is as severe as ``--fail-on`` says, 2 where there is nothing to read, 0 otherwise.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}",
        description="What each token of a run received, beside what was intended. Ends with 1 where nothing trained or "
        "something does not fit the loss, with 2 where there is nothing to read.",
    )
    parser.add_argument("run", type=Path, help=called)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the page"
    )
    severities = ("mismatch", "note", "nothing")
    what = "end with 1 on a mismatch (default), on a note too, or never"
    parser.add_argument("--fail-on", choices=severities, default="mismatch", help=what)
    options = parser.parse_args(argv)
    problems: list[str] = []
    records = read(options.run, problems)
    complain("receipt", *problems)
    if not records:
        if not problems:
            complain("receipt", f"{options.run} holds no receipt: {remedy}")
        return NOTHING
    run = run_receipt(records, rollout)
    if options.json:
        text = json.dumps({"summary": summary(run), "unseen": unseen(run), **run})
        strict = json.loads(text, parse_constant=lambda constant: None)  # JSON has no NaN
        print(json.dumps(strict, indent=1))
    else:
        say(*page(options.run, run))
    severe = [
        finding for finding in run["findings"] if finding["mismatch"] or options.fail_on == "note"
    ]
    if options.fail_on != "nothing" and (severe or run["trained"] == 0):
        return 1
    return NOTHING if problems else 0
