"""The index of a page: which rollouts it holds, and everything about them and their runs but the values a token.

Shape suffixes: T response tokens.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from grail_advantage.dump import SCHEMA, DumpFile, DumpHeader, DumpRow
from grail_advantage.receipt.report import run_receipt, summary, unseen
from grail_advantage.view.page import by_position, colours, data, pack, turns
from grail_advantage.view.receipt import rollout_names

_GROUP = 8
"""Responses a prompt in common set-ups, for the choice of steps."""
_WEIGHT_LIMITS = (1.25, 2.0, colours.WEIGHT_LIMIT)
_SAMPLE = 8
"""Groups that tell how large the others are."""
_DRAWN = {"prompt", "response", "prompt_ids", "token_ids", "tokens", "score", "old_log_prob", "entropy"}
"""Columns that only the rollouts of the page need."""
_COUNTED = [name for name in SCHEMA.names if name not in _DRAWN]
_LOSS_NAME = (
    "In brackets: the name of the loss in the trainer's settings (verl's policy_loss.loss_mode, where vanilla is PPO's clipped "
    "loss; TRL's loss_type)."
)
_LINE = 160
"""Characters of a prompt in the list."""
_OVERLAYS = ("weight", "score", "advantage", "received", "surprisal", "entropy")


@dataclass(eq=False)
class Rollout:
    """A rollout of the page."""

    facts: dict[str, Any]
    """Its entries in the page's index."""
    columns: Mapping[str, np.ndarray]
    block: str
    key: Any
    """Of its problem: name, prompt or prompt's ids."""
    problem: dict[str, Any]
    """The problem's entries in the index."""


@dataclass(eq=False)
class Group:
    """Rollouts of one prompt in one update."""

    facts: dict[str, int]
    """Its entries in the page's index: number of the run, step, place in the file and, once read, number of the problem."""
    file: DumpFile
    places: list[int]
    """Of its responses in the file."""
    tokens: int
    rollouts: list[Rollout] = field(default_factory=list)


@dataclass
class Selection:
    """The rollouts of a page: chosen while the dumps of all runs are counted, thinned out to what fits, and read."""

    groups: list[Group] = field(default_factory=list)
    problems: dict[Any, dict[str, Any]] = field(default_factory=dict)
    """By name, prompt or prompt's ids, in the order of their numbers."""
    responses: Counter[int] = field(default_factory=Counter)
    """By run, as all below."""
    answered: Counter[int] = field(default_factory=Counter)
    failed_calls: Counter[int] = field(default_factory=Counter)
    given: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The methods that give token advantages; of one method alone, an empty name."""
    weighed: Counter[int] = field(default_factory=Counter)
    """Responses that have another weight than 1."""
    no_scores: dict[tuple[str, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """By method, or an empty name, and outcome: why responses of the first run have no scores."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Of the responses of the first run."""
    by_turn: dict[int, array[float]] = field(default_factory=lambda: defaultdict(lambda: array("d")))
    """Entries of :mod:`.turns`."""
    verdicts: data.Verdicts = field(default_factory=data.Verdicts)
    """Of the responses of all runs."""

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]

    def read(self, runs: Sequence[data.Run], most: int) -> list[dict[str, by_position.RowTable]]:
        """Count the responses of every file, and choose some evenly over the files.

        Args:
            runs: one or two.
            most: rollouts to choose.

        Returns:
            For each run the tables of all its responses, by method; of a run without a dump they are empty.
        """
        files = [file for run in runs for file in run.files]
        count = max(1, min(len(files), most // _GROUP))
        chosen = [files[round(place)] for place in np.linspace(0, len(files) - 1, count)] if files else []
        quota = max(1, most // max(1, len(chosen)))

        def rows(run: int) -> Iterator[DumpRow]:
            for file in runs[run].files:
                of_file, header = _counted_rows(file), file.header
                self.responses[run] += len(of_file)
                self.answered[run] += sum(row.span is not None for row in of_file)
                for row in of_file:
                    self._count(run, row, header)
                if file in chosen:
                    self._choose(run, file, of_file, quota)
                yield from of_file

        return [by_position.row_tables(rows(number)) for number in range(len(runs))]

    def _count(self, run: int, row: DumpRow, header: DumpHeader | None) -> None:
        """A response in what is over all of them."""
        of_row = turns.conversation(row, header).turns
        self.by_turn[run].extend(turns.entries(row.step, of_row))
        self.failed_calls[run] += sum(turn.failed for turn in of_row)
        self.verdicts.add(row)
        if not run:
            self.outcomes[row.outcome or ""] += 1
            sources: dict[str, DumpRow] = {"": row, **row.methods}
            for name, source in sources.items():
                if source.no_scores:
                    self.no_scores[name, row.outcome or ""][source.no_scores] += 1
        weights = [row.weight_T, *(method.weight_T for method in row.methods.values())]
        self.weighed[run] += any((weight_T[row.mask_T] != 1).any() for weight_T in weights)
        if row.methods:
            self.given[run].update(name for name, method in row.methods.items() if method.advantage_T is not None)
        elif gives_advantages(row):
            self.given[run].add("")

    def _choose(self, run: int, file: DumpFile, rows: Sequence[DumpRow], quota: int) -> None:
        """The responses of one file: whole groups until there are ``quota`` responses, at least one group."""
        groups: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            groups.setdefault(row.group, []).append(place)
        taken = 0
        for number, places in enumerate(groups.values()):
            if taken and taken + len(places) > quota:
                break
            taken += len(places)
            facts = {"run": run, "step": file.step, "place": number}
            self.groups.append(Group(facts, file, places, sum(len(rows[place]) for place in places)))

    def draw(self, most: float) -> None:
        """Read the chosen responses, or as many of them as about ``most`` bytes hold."""
        some = self.groups[:: max(1, len(self.groups) // _SAMPLE)]
        self._draw(some)
        packed = sum(len(rollout.block) for group in some for rollout in group.rollouts)
        whole = packed / max(1, sum(group.tokens for group in some)) * sum(group.tokens for group in self.groups)
        if whole > 1.1 * most:
            self.thin(1.1 * most / whole)
        self._draw(self.groups)
        self.groups = [group for group in self.groups if group.rollouts]
        for group in self.groups:
            first = group.rollouts[0]
            known = self.problems.setdefault(first.key, {"number": len(self.problems), **first.problem})
            group.facts["problem"] = known["number"]

    def _draw(self, groups: Sequence[Group]) -> None:
        """Read the responses of groups that are not read yet, each file once and no further than the last of them."""
        of_file: dict[Path, list[Group]] = {}
        for group in groups:
            if not group.rollouts:
                of_file.setdefault(group.file.path, []).append(group)
        for of_path in of_file.values():
            group_of = {place: group for group in of_path for place in group.places}
            header = of_path[0].file.header
            for place, row in enumerate(islice(of_path[0].file.rows(), max(group_of) + 1)):
                if place in group_of:
                    group_of[place].rollouts.append(_rollout(row, header))

    def thin(self, share: float) -> bool:
        """Keep a share of the groups of every step; whether any went."""
        by_step: dict[tuple[int, int], list[Group]] = {}
        for group in self.groups:
            by_step.setdefault((group.facts["run"], group.facts["step"]), []).append(group)
        keep = [group for part in by_step.values() for group in part[: max(1, math.floor(len(part) * share))]]
        if len(keep) == len(self.groups):
            # One group a step already: fewer steps.
            keep = keep[:: max(2, math.ceil(1 / share))]
        before, self.groups = self.groups, keep
        return len(keep) < len(before)

    def index(self) -> dict[str, Any]:
        """The rollouts' entries, a list a name; their groups, problems and scales."""
        entries = [
            {**rollout.facts, "run": group.facts["run"], "group": number}
            for number, group in enumerate(self.groups)
            for rollout in group.rollouts
        ]
        names = list(entries[0]) if entries else ["step", "length", "spread", "wrong_step", "run", "group"]
        if not self.verdicts.conversations:
            names = [name for name in names if name not in ("turns", "unplaced")]
        lines = one_line([problem["prompt"] for problem in self.problems.values()])
        return {
            "rows": {name: [entry[name] for entry in entries] for name in names},
            "groups": [group.facts for group in self.groups],
            "problems": [
                {**problem, "line": line} for problem, line in zip(self.problems.values(), lines, strict=True)
            ],
            "limits": _limits(self.rollouts),
        }

    def methods(self, header: DumpHeader | None) -> list[str]:
        """Names of the methods, in the dump's order."""
        compared = list(dict.fromkeys(name for one in self.rollouts for name in one.facts["no_scores_of"] or ()))
        return compared or [header.method if header is not None and header.method else "weights"]

    def given_by(self, run: int, methods: Sequence[str]) -> list[str]:
        """Those of the methods that have no weights in a run: they give the advantages themselves, or are compared with one
        that does and all their weights are 1."""
        if not self.weighed[run] and any(self.given.values()):
            return list(methods)
        return [name for name in methods if {name, ""} & self.given[run]]

    def explained(self, positions: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
        """Sentences on lines that are missing or flat in the plots of :func:`positions`, by method."""
        words = data.outcome_words(self.verdicts.field)
        said: dict[str, list[str]] = {}
        for method, position in positions.items():
            lines = [line for line in position["all"] if not line["run"]]
            of = said[method] = []
            drawn = {line["outcome"] for line in lines}
            for outcome in by_position.OUTCOMES if drawn != {""} else ():
                if outcome in drawn:
                    continue
                reasons = (self.no_scores[method, outcome] or self.no_scores["", outcome]).most_common(1)
                why = f" ({reasons[0][0]}); each token of their reasoning has weight 1" if reasons else ""
                count = self.outcomes[outcome]
                there = f"none of the {count:,} responses has scores{why}" if count else "there is no such response"
                of.append(f"No line for {words[outcome]}: {there}.")
            if all(np.allclose(line["mean"][np.isfinite(line["mean"])], 1, atol=1e-6) for line in lines):
                of.append(
                    "Flat at 1: every token has weight 1 and trains with the advantage of its response, as in GRPO."
                )
        return said

    def overlays(self, runs: int, methods: Sequence[str]) -> list[str]:
        """Values that tokens can be coloured by; the first is what the page shows first."""
        known = {name.split(":")[0] for rollout in self.rollouts for name in rollout.columns}
        if {"weight", "base_advantage"} <= known:
            known.add("advantage")
        given = [len(self.given_by(run, methods)) for run in range(runs)]
        if any(given):
            first = ["advantage", *([] if min(given) == len(methods) else ["weight"])]
            return [*first, *(name for name in _OVERLAYS if name in known - {"advantage", "weight"})]
        return [name for name in _OVERLAYS if name in known] or ["weight"]


def one_line(prompts: Sequence[str]) -> list[str]:
    """The beginning of each prompt in one line, without the lines and tags that all begin or end with, as a chat template's."""
    start, end, several = 0, 0, list(set(prompts))
    if len(several) > 1:
        before, after = _begin(several), _begin([prompt[::-1] for prompt in several])[::-1]
        start = max(before.rfind("\n"), before.rfind(">")) + 1
        end = len(after) - min((place for mark in "\n<" if (place := after.find(mark)) >= 0), default=len(after))
    cut = (prompt[start : len(prompt) - end] for prompt in prompts)
    return [" ".join((own.strip() or prompt).split())[:_LINE] for own, prompt in zip(cut, prompts, strict=True)]


def _begin(texts: Sequence[str]) -> str:
    """All that several texts begin with."""
    first, last = min(texts), max(texts)
    return first[: next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]


def gives_advantages(row: DumpRow) -> bool:
    """Whether the method gave the response's token advantages themselves: they are not its weights times its base advantage."""
    if row.methods:
        return next(iter(row.methods.values())).advantage_T is not None
    if row.advantage_T is None or not row.mask_T.any():
        return False
    advantages, weights = row.advantage_T[row.mask_T], row.weight_T[row.mask_T]
    base = advantages[:1] if row.base_advantage_T is None else row.base_advantage_T[row.mask_T]
    # Where all are 0, it is a response that is masked.
    return bool((weights == 1).all() and advantages.any() and not np.allclose(advantages, base, rtol=1e-5, atol=1e-7))


def shown_values(row: DumpRow) -> tuple[str, np.ndarray]:
    """What the method gave the response's tokens: ``weight`` or ``advantage``, and the values, float32 (T,)."""
    # Of several methods, the first is what the page shows first.
    source = next(iter(row.methods.values()), row)
    if source.advantage_T is not None and gives_advantages(row):
        return "advantage", source.advantage_T
    return "weight", source.weight_T


def _rollout(row: DumpRow, header: DumpHeader | None) -> Rollout:
    columns = pack.columns_of(row)
    block = pack.pack(row, columns, header.special_tokens if header else {})
    problem = {"prompt": row.prompt, "ground_truth": row.ground_truth, "id": row.id}
    return Rollout(_facts(row, header), columns, block, row.id or row.prompt or row.prompt_ids.tobytes(), problem)


def _counted_rows(file: DumpFile) -> list[DumpRow]:
    """The responses of a file, as all are counted: with tokens where others wrote some, which tell failed calls."""
    rows = list(file.rows(_COUNTED))
    spoken = any("tool" in row.labels for row in rows)
    return list(file.rows([*_COUNTED, "token_ids", "tokens"])) if spoken else rows


def _facts(row: DumpRow, header: DumpHeader | None) -> dict[str, Any]:
    """The index's entries of a rollout."""
    trained = shown_values(row)[1][row.mask_T]
    trained = trained[np.isfinite(trained)].astype(np.float64)
    base, span, wrong, talk = (
        row.base_advantage_T,
        row.span,
        row.labels.get("wrong_step"),
        turns.conversation(row, header),
    )
    return {
        "step": row.step,
        "update": row.update,
        "row": row.row,
        "outcome": row.outcome if row.outcome in by_position.OUTCOMES else None,
        "reward": row.reward,
        "answer": row.answer,
        "truncated": row.truncated,
        "no_scores": row.no_scores,
        "no_scores_of": {name: method.no_scores for name, method in row.methods.items()} or None,
        "span": [span.start, span.content_start, span.content_end, span.end] if span else None,
        "wrong_step": wrong if turns.is_range(wrong) else None,
        "turns": [[turn.start, turn.end, turn.reward, turn.advantage, turn.failed] for turn in talk.turns],
        "unplaced": talk.unplaced,
        "length": len(row),
        "spread": float(trained.std()) if len(trained) else math.nan,
        "advantage": float(base[0]) if base is not None and len(base) else None,
        "updates": None if row.updates is None else len(row.updates),
    }


def _limits(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Where the scales of the overlays end."""
    known: dict[str, list[np.ndarray]] = defaultdict(list)
    # Enough of them to know a percentile.
    for rollout in rollouts[:: max(1, len(rollouts) // 256)]:
        columns = rollout.columns
        for name, value_T in columns.items():
            kind = name.split(":")[0]
            known[kind].append(value_T)
            if (
                kind == "weight"
                and name.replace("weight", "advantage", 1) not in columns
                and "base_advantage" in columns
            ):
                known["advantage"].append(columns["base_advantage"] * value_T)

    def values(kind: str) -> np.ndarray:
        joined = np.concatenate([np.zeros(0, dtype=np.float32), *known[kind]])
        return joined[np.isfinite(joined)]

    def high(of_values: np.ndarray, share: float, least: float) -> float:
        return _round_up(float(np.quantile(of_values, share)) if of_values.size else 0.0, least)

    weights, advantages = values("weight"), np.abs(values("advantage"))
    return {
        "weight": _weight_limit(weights) if (weights != 1).any() else colours.WEIGHT_LIMIT,
        "advantage": high(advantages[advantages > 0], 0.98, 1e-6),
        "surprisal": high(values("surprisal"), 0.99, 1.0),
        "entropy": high(values("entropy"), 0.99, 0.5),
    }


def _weight_limit(weights: np.ndarray) -> float:
    """The least limit of a scale on which 98 % of the weights differ in colour."""
    shares = {limit: ((weights >= 1 / limit) & (weights <= limit)).mean() for limit in _WEIGHT_LIMITS}
    return next((limit for limit, share in shares.items() if share >= 0.98), colours.WEIGHT_LIMIT)


def _round_up(value: float, least: float) -> float:
    """The next of 1, 1.5, 2, 3, 5, 7 times a power of ten."""
    value = max(value, least)
    power = 10.0 ** math.floor(math.log10(value))
    return next(float(f"{step * power:.6g}") for step in (1, 1.5, 2, 3, 5, 7, 10) if step * power >= value * (1 - 1e-9))


def curves(runs: Sequence[data.Run], verdict: str = "") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The plots that the runs have values for, each with its lines, and one for each metric.

    Args:
        runs: one or two.
        verdict: from :attr:`.data.Verdicts.field`.
    """
    known: dict[str, dict[str, Any]] = {}
    more: dict[str, dict[str, Any]] = {}

    def add(plots: dict[str, dict[str, Any]], title: str, unit: str, run: int, name: str, label: str) -> None:
        points = {step: values[name] for step, values in runs[run].metrics.items() if name in values}
        line = {"label": label, "steps": list(points), "values": list(points.values()), "run": run}
        plots.setdefault(title, {"title": title, "unit": unit, "lines": []})["lines"].append(line)

    for number, run in enumerate(runs):
        names = sorted({name for values in run.metrics.values() for name in values})
        for title, unit, patterns in data.curves(verdict):
            for pattern, label in patterns.items():
                for name in filter(re.compile(pattern).fullmatch, names):
                    own = re.sub("^val-(?:core|aux)/", "", name).replace("/acc/", ", ").replace("/verify_failed/", ", ")
                    add(known, title, unit, number, name, label or own)
        for name in names:
            add(more, name, "", number, name, name)
    return list(known.values()), list(more.values())


def receipt(runs: Sequence[data.Run]) -> list[dict[str, Any]]:
    """The sentences on what arrived, for each run that kept it."""
    entries = []
    for number, run in enumerate(runs):
        headers = run.dump.receipts() if run.dump is not None else []
        if headers:
            whole = run_receipt(headers, rollout_names(run.dump))
            note = f"{_LOSS_NAME} {unseen(whole)}" if whole["losses"] else unseen(whole)
            findings = whole["findings"]
            entries.append({"run": number, "summary": summary(whole), "unseen": note, "findings": findings})
    return entries


def positions(
    tables: Sequence[Mapping[str, by_position.RowTable]], methods: Sequence[str], given: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Mean weights by place, for each method; ``tables`` has those of each run, ``given`` its methods without weights."""
    # Of one method, the responses' own weights are its weights.
    by_method = {
        method: _position(
            [
                None if method in given[run] else table.get(method if len(methods) > 1 else "")
                for run, table in enumerate(tables)
            ]
        )
        for method in methods
    }
    return {method: position for method, position in by_method.items() if position is not None}


def _position(tables: Sequence[by_position.RowTable | None]) -> dict[str, Any] | None:
    lines = []
    for run, table in enumerate(tables):
        for outcome, means in (by_position.profiles(table) if table is not None else {}).items():
            # Without a second problem there is no interval.
            low, high = (np.where(np.isfinite(edge), edge, means.mean) for edge in (means.low, means.high))
            line = {"outcome": outcome, "run": run, "rows": means.rows, "mean": means.mean, "low": low, "high": high}
            lines.append(line)
    if not lines:
        return None
    first = next(table for table in tables if table is not None and len(table))
    steps = {outcome: by_position.by_step(first, outcome) for outcome in by_position.OUTCOMES}
    return {
        "steps": steps["right"][0],
        "of_step": {outcome: entry[1] for outcome, entry in steps.items()},
        "all": lines,
    }


def plain(value: Any) -> Any:
    """JSON values: arrays as lists, what is not finite as null."""
    if isinstance(value, Mapping):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value
