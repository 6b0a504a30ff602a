"""What a run's tokens received, in sentences: for the page and the terminal."""

from __future__ import annotations

from typing import Any

from grail_advantage.dump.received import RunFinding, RunReceipt


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
