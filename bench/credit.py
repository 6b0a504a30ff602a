"""The table by values: does a method's credit follow the credit by rollouts? For a folder of ``analyze`` over lines that
``python -m bench values`` wrote, with the advantages of training.

The credit of a step is V(after) - V(before) by K continuations (:mod:`bench.values`), a method's the mean advantage of the
step's tokens. Shape suffixes: T response tokens, J steps of a response, M those before its answer, P problems.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from bench.places import Label, Record, TokenAdvantages, record_of, step_means, token_advantages
from bench.statistics import Estimate, holm, jackknife, mean_of
from bench.table import (
    CONTROLS,
    FEW,
    FEWEST,
    NOTHING,
    NUMBER,
    SIGNIFICANT,
    cell,
    figures_of,
    kind_of,
)
from grail_advantage.dump import DumpRow, read_dump
from grail_advantage.text_io import table

LEAST = 3  # steps before the answer of a response that is used
FOLLOWS = "follows credit"
BASE = "the response's advantage"
EARLIER = "earlier first"
KIND = "kind alone"
NOISE = "noise"
PLANTED = "planted"
BEYOND = "beyond place"
COSINE = "cosine less uniform's"
RULE = (
    f"'{FOLLOWS}': in incorrect responses beyond place, and in the cosine less uniform's, above 0, with p < {SIGNIFICANT} "
    f"after Holm's correction over all methods; '{NOTHING}' is no proof of nothing. Within: the correlation of step means "
    "with the credit within responses, before the answer. Beyond place: of what is left of them less their mean in other "
    "problems' responses of as many steps. Cosine: over all tokens of all responses. The noise of K is taken out by two "
    "halves of the continuations, so that right credit has 1 at any K; a cell is empty where the credit is not above its "
    "noise. Loss: AUROC of the step with the largest significant loss of value, and its least difference from the controls "
    f"of docs/bench.md. '{PLANTED}' is credit by half of the continuations, judged by the other half. Steps have means, "
    "as their tokens share one coefficient in the true gradient: sums would score lengths. Sizes count, not ranks: after "
    "an error all values are about 0, and their order is noise at any K. ± is half of a 95 % interval by problem."
)


@dataclass(frozen=True)
class Case:
    """A response with its values."""

    row: DumpRow
    advantage: float
    # Its steps before the answer; the one to blame: that of the largest significant loss
    label: Label
    step_T: np.ndarray  # int; of all tokens
    credit_J: np.ndarray
    halves_2J: np.ndarray  # the credit by either half of the continuations
    steps: int  # M
    methods: dict[str, TokenAdvantages]

    @property
    def problem(self) -> str:
        return str(self.row.group)

    def by(self, name: str, advantage_T: np.ndarray) -> Case:
        """With a further method."""
        advantages = TokenAdvantages(advantage_T, np.ones(len(advantage_T), dtype=bool))
        return replace(self, methods={**self.methods, name: advantages})


@lru_cache(maxsize=100_000)
def _p_of(first: int, second: int, samples: int) -> float:
    return float(stats.fisher_exact([[first, samples - first], [second, samples - second]]).pvalue)


def largest_loss(credit_M: np.ndarray, right: Sequence[str]) -> int | None:
    """The step of the largest loss, if it is significant among the M steps (Fisher's test, Bonferroni's correction)."""
    step = int(credit_M.argmin())
    p = 0.0  # after the last step comes the reward, which has no noise
    if step + 1 < len(right):
        p = _p_of(right[step].count("1"), right[step + 1].count("1"), len(right[0]))
    if credit_M[step] >= 0 or p * len(credit_M) >= SIGNIFICANT:
        return None
    return step


def case_of(row: DumpRow, part: slice = slice(None)) -> Case:
    """A response by this part of its continuations, with the references that know the advantage, the place or the kind."""
    values = row.labels["values"]
    right = [digits[part] for digits in values["right"]]
    bits_JK = np.array([[digit == "1" for digit in digits] for digits in right], dtype=float)
    half = bits_JK.shape[1] // 2
    parts = (bits_JK[:, :half], bits_JK[:, half:], bits_JK)
    # Values 0.5 and 0.75 and the reward 0 give the credit 0.25 and -0.75.
    credit_3J = np.array([np.diff([*part_JK.mean(axis=1), values["reward"]]) for part_JK in parts])
    step_T = np.searchsorted(values["starts"][1:], np.arange(len(row)), side="right")
    # The last step is the answer then, which methods treat by rules of their own.
    steps = len(right) - values["answered"]
    advantage = float(row.base_advantage_T[0])
    loss = None
    if advantage < 0 and steps:
        loss = largest_loss(credit_3J[2, :steps], right)
    kind_T = np.array([kind_of(piece) for piece in row.tokens])
    label = Label(np.where(step_T < steps, step_T, -1), kind_T, loss)
    case = Case(
        row, advantage, label, step_T, credit_3J[2], credit_3J[:2], steps, token_advantages(row)
    )
    case = case.by(BASE, np.full(len(row), advantage))
    case = case.by(EARLIER, advantage * np.arange(len(row), 0, -1))
    return case.by(KIND, advantage * (kind_T == NUMBER))


def read(folder: Path) -> tuple[list[Case], Counter[str]]:
    """The responses that are used, and how many there are of each sort. ValueError: the folder cannot be used."""
    dump = read_dump(folder)
    generator = np.random.default_rng(7)
    cases: list[Case] = []
    counts = Counter[str]()
    for row in dump:
        if "values" not in row.labels:
            counts["without values"] += 1
            continue
        try:
            case = case_of(row)
        except (TypeError, ValueError, LookupError) as error:
            raise ValueError(
                f"{folder}: the values of {row.key} are not those of bench values ({error!r})"
            ) from error
        if not case.advantage:
            counts["with advantage 0"] += 1
        elif case.steps < LEAST:
            counts[f"with fewer than {LEAST} steps"] += 1
        else:
            counts["incorrect" if case.advantage < 0 else "correct"] += 1
            cases.append(case.by(NOISE, generator.normal(size=len(row))))
    if dump.problems or not cases:
        raise ValueError(
            f"{folder}: {'; '.join(dump.problems) or f'no response with values can be used; {dict(counts)}'}"
        )
    return cases, counts


def correlation(
    cases: Sequence[Case], triples: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]
) -> np.ndarray:
    """Over all problems, then without each of them, (1 + P,), for :func:`bench.statistics.jackknife`: 0 where nothing differs,
    NaN where the square of the credit is not above its noise.

    Args:
        cases: responses, for their problems.
        triples: of each the values that are compared, the credit, and the credit by the halves, (2, ...).
    """
    # The product of the halves has no noise on average; the square of the credit would.
    parts = [
        (values @ credit, values @ values, halves[0] @ halves[1])
        for values, credit, halves in triples
    ]
    sums_P3 = pd.DataFrame(parts).groupby([case.problem for case in cases]).sum().to_numpy()
    square = mean_of(sums_P3[:, 2])
    if not (square.value > 0 and square.p < SIGNIFICANT):
        return np.full(1 + len(sums_P3), np.nan)
    total_3 = sums_P3.sum(axis=0)
    cross, norm, square_credit = np.vstack([total_3, total_3 - sums_P3]).T
    # A method that gives all steps the same has the norm 0 but for rounding.
    return np.where(norm > 1e-12, cross / np.sqrt(np.maximum(norm * square_credit, 1e-30)), 0.0)


def centred(values: np.ndarray) -> np.ndarray:
    return values - values.mean(axis=-1, keepdims=True)


def within(cases: Sequence[Case], name: str) -> list[Estimate]:
    """The correlation of step means with the credit within responses, and of what place does not explain."""
    means = [
        centred(step_means(case.methods[name].advantage_T, case.label.step_T)) for case in cases
    ]
    pairs = list(zip([case.problem for case in cases], means, strict=True))
    beyond = []
    for problem, mean_M in pairs:
        peers = [
            peer_M
            for its_problem, peer_M in pairs
            if len(peer_M) == len(mean_M) and its_problem != problem
        ]
        # Without a peer it is compared with itself, and adds nothing.
        beyond.append(mean_M - np.mean(peers or [mean_M], axis=0))
    credits = [case.credit_J[: case.steps] for case in cases]
    halves = [centred(case.halves_2J[:, : case.steps]) for case in cases]
    return [
        jackknife(correlation(cases, list(zip(values, credits, halves, strict=True))))
        for values in (means, beyond)
    ]


def cosine(cases: Sequence[Case], name: str) -> np.ndarray:
    """:func:`correlation` of token advantages with the credit."""
    triples = []
    for case in cases:
        triples.append(
            (
                case.methods[name].advantage_T,
                case.credit_J[case.step_T],
                case.halves_2J[:, case.step_T],
            )
        )
    return correlation(cases, triples)


def records_of(cases: Sequence[Case], name: str) -> list[Record]:
    """Of incorrect responses: those with a significant loss as errors, and all of them as controls at equal place."""
    records = []
    for number, case in enumerate(cases):
        labels = [replace(case.label, step=None)] if case.advantage < 0 else []
        if case.label.step is not None:
            labels.append(case.label)
        records += [
            record_of(number, case.problem, case.methods[name], label, number) for label in labels
        ]
    return records


def figures(cases: Sequence[Case], name: str) -> dict[str, Estimate]:
    """A method's figures, by the names of the table's columns."""
    row = {}
    for outcome, sign in (("incorrect", -1), ("correct", 1)):
        chosen = [case for case in cases if case.advantage * sign > 0]
        if chosen:
            row[f"within, {outcome}"], row[f"{BEYOND}, {outcome}"] = within(chosen, name)
    records = records_of(cases, name)
    if any(record.step is not None for record in records):
        of_place = {record.id: record for record in records_of(cases, EARLIER)}
        of_loss = figures_of(records, of_place, other_problems=True)
        row["AUROC, largest loss"] = of_loss["AUROC"]
        gains = [of_loss[control] for control in CONTROLS if control in of_loss]
        row["least above a control"] = min(gains, key=lambda gain: gain.value)
    row[COSINE] = jackknife(cosine(cases, name) - cosine(cases, BASE))
    return row


def verdicts(rows: Mapping[str, Mapping[str, Estimate]]) -> dict[str, str]:
    """By :data:`RULE`."""
    p_values = []
    for row in rows.values():
        pair = [row.get(f"{BEYOND}, incorrect", Estimate(math.nan)), row[COSINE]]
        p = 1.0
        if all(estimate.value > 0 for estimate in pair):  # both must hold, so the weaker one counts
            p = max(estimate.p for estimate in pair)
        p_values.append(p)
    corrected = zip(rows, holm(p_values), strict=True)
    return {name: FOLLOWS if p < SIGNIFICANT else NOTHING for name, p in corrected}


def report(folder: Path) -> str:
    """The table as Markdown."""
    cases, counts = read(folder)
    settings = cases[0].row.labels["values"]["settings"]
    rows = {name: figures(cases, name) for name in (EARLIER, KIND, NOISE)}
    half = settings["samples"] // 2
    # A half of the continuations has halves of its own, by which its noise is taken out.
    if half >= 2:
        planted = []
        for case in cases:
            rest = case_of(case.row, slice(half, None))
            planted.append(case_of(case.row, slice(half)).by(PLANTED, rest.credit_J[rest.step_T]))
        rows[PLANTED] = figures(planted, PLANTED)
    names = [name for name in cases[0].row.methods if all(name in case.methods for case in cases)]
    of_methods = {name: figures(cases, name) for name in names}
    problems = len({case.problem for case in cases})
    words = dict.fromkeys(names, FEW)
    if problems >= FEWEST:
        words = verdicts(of_methods)
    rows.update(of_methods)
    # A column without any figure, such as of credit that is not above its noise, is left out.
    columns = [
        column
        for column in rows[NOISE]
        if not all(math.isnan(row[column].value) for row in rows.values())
    ]
    cells = []
    for name, row in rows.items():
        of_columns = [cell(row.get(column), signed="AUROC" not in column) for column in columns]
        cells.append([name, words.get(name, ""), *of_columns])
    of_uniform = cell(jackknife(cosine(cases, BASE))) or "no credit above its noise"
    losses = sum(case.label.step is not None for case in cases)
    sorts = "; ".join(f"{count} {sort}" for sort, count in counts.items())
    about = f"By values of {settings['model']}, K = {settings['samples']}, {problems} problems. {sorts}. "
    about += f"{losses} responses with a significant loss. Uniform's cosine: {of_uniform}."
    return "\n".join([about, "", *table(["method", "verdict", *columns], cells, right=2), "", RULE])
