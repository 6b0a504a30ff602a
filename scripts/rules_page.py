"""Write the tables of ``docs/works_with.md`` that the rules say: what is refused, and what no shortcut leaves out; and the
reward's normal form in ``docs/verdict.md``.

    PYTHONPATH=.venv/trl python scripts/rules_page.py

TRL's table stays as it is where TRL cannot be imported.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from grail_advantage.reward._normal import RULES, normal  # noqa: E402
from grail_advantage.rules import Rule  # noqa: E402
from grail_advantage.verl_ext import rules as verl  # noqa: E402
from recipe import rules as recipe  # noqa: E402
from recipe.marked_text import table, write_marked  # noqa: E402

PAGE = ROOT / "docs" / "works_with.md"
VERDICT_PAGE = ROOT / "docs" / "verdict.md"


def verl_table() -> str:
    """What a run with verl is refused with; in italics by the recipe alone."""
    rows = [
        *_rows((*verl.EVERY_RUN, *verl.REFUSALS), _override),
        *([f"*{setting}*", why] for setting, why in _rows(recipe.REFUSALS, _override)),
        *([f"*CPU: {setting}*", why] for setting, why in _rows(recipe.ON_CPU, _override)),
    ]
    return "\n".join(table(["refused, such as", "why"], rows))


def shortcuts_table() -> str:
    """What zero-advantage responses keep, and with which settings."""
    rows = [
        *(["every response", *row] for row in _rows(verl.AGAINST_SKIPPING, _override)),
        *(["tails of responses", *row] for row in _rows(verl.AGAINST_TAILS, _override)),
        *(["the forward of the old log-probabilities", *row] for row in _rows(verl.AGAINST_FORWARD, _override)),
    ]
    for row, before in reversed([*zip(rows[1:], rows[:-1], strict=True)]):
        row[0] = "" if row[0] == before[0] else row[0]
    return "\n".join(table(["what stays", "with", "why"], rows))


def trl_table() -> str:
    """What TRL's trainer refuses."""
    from grail_advantage.trl_ext.rules import AGAINST_SKIPPING, REFUSALS

    rows = [
        *_rows(REFUSALS, _argument),
        *([f"`skip_zero_advantage=True`, {setting}", why] for setting, why in _rows(AGAINST_SKIPPING, _argument)),
    ]
    return "\n".join(table(["refused, such as", "why"], rows))


def normal_table() -> str:
    """How the reward function unifies spellings."""
    return "\n".join(table(["example", "becomes"], [[f"`{example}`", f"`{normal(example)}`"] for example, *_ in RULES]))


def _rows(rules: Iterable[Rule], setting: Callable[[Rule], str]) -> list[list[str]]:
    """A setting and the reason; the settings of one reason together."""
    by_reason: dict[str, list[str]] = {}
    for rule in rules:
        by_reason.setdefault(rule.because, []).append(setting(rule))
    return [[", ".join(settings), why] for why, settings in by_reason.items()]


def _override(rule: Rule) -> str:
    """The first two of Hydra's overrides, without sections that many share, and of a method its name alone."""
    short = [re.sub(r"^\+*(actor_rollout_ref\.|algorithm\.(adv_estimator=)?)?", "", each) for each in rule.example]
    return " with ".join(f"`{each}`" for each in short[:2] if each != verl.UNIFORM)


def _argument(rule: Rule) -> str:
    """The first two arguments, with values that are short, and of a method its name alone."""
    shown = []
    for name, value in list(rule.example.items())[:2]:
        if name == "token_weights":
            shown.append(value)
        elif isinstance(value, str | int | float):
            shown.append(f"{name}={value!r}")
        elif isinstance(value, SimpleNamespace):
            shown += [f"{name}.{inner}={number}" for inner, number in vars(value).items()]
        else:
            shown.append(name)
    return " with ".join(f"`{each}`" for each in shown)


TABLES = {"refused": verl_table, "shortcuts": shortcuts_table, "trl": trl_table}
"""By the names of their markers."""


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    write_marked(VERDICT_PAGE, "normal", normal_table())
    for marker, passage in TABLES.items():
        if marker != "trl" or find_spec("trl") is not None:
            write_marked(PAGE, marker, passage())


if __name__ == "__main__":
    main()
