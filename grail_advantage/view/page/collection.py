"""The rollouts that a page holds: chosen while the dumps are read, and thinned out where they do not fit.

Shape suffixes: T response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grail_advantage.view.dump.files import DumpFile, DumpRow
from grail_advantage.view.page import by_position, data, pack

_GROUP = 8
"""Responses a prompt in common set-ups, for the choice of steps."""


@dataclass(eq=False)
class Kept:
    """A rollout of the page."""

    facts: dict[str, Any]
    """Its entries in the page's index."""
    columns: pack.Columns


@dataclass
class Collection:
    """Rollouts of all runs, while they are read."""

    vocabulary: pack.Vocabulary = field(default_factory=pack.Vocabulary)
    kept: list[Kept] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[Any, int] = field(default_factory=dict)
    """Numbers of the problems by their keys."""
    seen: int = 0
    answered: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By run, rows with an answer and rows."""

    def add(self, run: int, rows: Sequence[DumpRow], quota: int) -> None:
        """The rows of one file: whole groups until there are ``quota`` rows, at least one group."""
        self.seen += len(rows)
        groups: dict[int, list[DumpRow]] = {}
        for row in rows:
            groups.setdefault(row.group, []).append(row)
        taken = 0
        for place, members in enumerate(groups.values()):
            if taken and taken + len(members) > quota:
                break
            taken += len(members)
            first = members[0]
            problem = first.id or first.prompt or first.prompt_ids.tobytes()
            if problem not in self.numbers:
                self.numbers[problem] = len(self.problems)
                self.problems.append({"prompt": first.prompt, "gold": first.gold, "id": first.id})
            number = self.numbers[problem]
            group = {"run": run, "step": first.step, "problem": number, "place": place, "total": len(members)}
            for row in members:
                facts = {"run": run, "group": len(self.groups), **_facts(row)}
                self.kept.append(Kept(facts, pack.columns_of(row, self.vocabulary)))
            self.groups.append(group)

    def thin(self, share: float) -> bool:
        """Keep a share of the groups of every step; whether any went."""
        by_step: dict[tuple[int, int], list[int]] = {}
        for number, group in enumerate(self.groups):
            by_step.setdefault((group["run"], group["step"]), []).append(number)
        keep = {number for groups in by_step.values() for number in groups[: max(1, math.floor(len(groups) * share))]}
        if len(keep) == len(self.groups):
            # One group a step already: fewer steps.
            keep = set(sorted(keep)[:: max(2, math.ceil(1 / share))])
        if len(keep) == len(self.groups):
            return False
        places = {number: place for place, number in enumerate(sorted(keep))}
        self.kept = [kept for kept in self.kept if kept.facts["group"] in keep]
        for kept in self.kept:
            kept.facts["group"] = places[kept.facts["group"]]
        self.groups = [self.groups[number] for number in sorted(keep)]
        return True


def gives_advantages(row: DumpRow) -> bool:
    """Whether the row's token advantages differ while its weights do not: a method gave the advantages themselves."""
    if row.methods:
        return next(iter(row.methods.values())).advantage_T is not None
    if row.advantage_T is None or not row.mask_T.any():
        return False
    advantages, weights = row.advantage_T[row.mask_T], row.weight_T[row.mask_T]
    return bool((weights == 1).all() and (advantages != advantages[0]).any())


def _facts(row: DumpRow) -> dict[str, Any]:
    """The index's entries of a rollout; its values a token are packed apart."""
    # Of several methods, the first is what the page shows first.
    weight_T = next((method.weight_T for method in row.methods.values()), row.weight_T)
    given = gives_advantages(row)
    advantage_T = next((method.advantage_T for method in row.methods.values()), row.advantage_T)
    trained = (advantage_T if given and advantage_T is not None else weight_T)[row.mask_T]
    trained = trained[np.isfinite(trained)].astype(np.float64)
    base, span, wrong, tool = row.base_advantage_T, row.span, row.labels.get("wrong_step"), row.labels.get("tool")
    return {
        "step": row.step,
        "update": row.update,
        "row": row.row,
        "outcome": row.outcome if row.outcome in by_position.OUTCOMES else None,
        "reward": row.reward,
        "answer": row.answer,
        "truncated": row.truncated,
        "neutral": row.neutral,
        "neutrals": {name: method.neutral for name, method in row.methods.items()} or None,
        "span": [span.start, span.content_start, span.content_end, span.end] if span else None,
        "wrong_step": wrong if _is_range(wrong) else None,
        "tool": tool if tool and isinstance(tool, list) and all(map(_is_range, tool)) else None,
        "length": len(row),
        "given": given,
        "spread": float(trained.std()) if len(trained) else math.nan,
        "advantage": float(base[0]) if base is not None and len(base) else None,
    }


def _is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(edge) is int for edge in value)


def read_runs(
    runs: Sequence[data.Run], files: Sequence[tuple[int, DumpFile]], collection: Collection, rollouts: int
) -> list[by_position.RowTable | None]:
    """Read every file once: a table of all rows of each run, and into ``collection`` the rollouts that the page keeps.

    Args:
        runs: one or two.
        files: of their dumps, each with its run's number.
        collection: is filled.
        rollouts: how many it gets at most, evenly over the files.
    """
    count = max(1, min(len(files), rollouts // _GROUP))
    chosen = {round(place) for place in np.linspace(0, max(0, len(files) - 1), count)} if files else set()
    quota = max(1, rollouts // max(1, len(chosen)))

    def rows(run: int) -> Iterator[DumpRow]:
        for number, (of_run, file) in enumerate(files):
            if of_run != run:
                continue
            of_file = list(file.rows())
            answered, count = collection.answered.get(run, (0, 0))
            answered += sum(row.span is not None for row in of_file)
            collection.answered[run] = answered, count + len(of_file)
            if number in chosen:
                collection.add(run, of_file, quota)
            else:
                collection.seen += len(of_file)
            yield from of_file

    return [by_position.row_table(rows(number)) if run.dump is not None else None for number, run in enumerate(runs)]
