"""The table by values: does a method's credit follow the credit by rollouts? For a folder of ``analyze`` over lines that
``python -m bench values`` wrote, with the advantages of training.

The credit of a step is V(after) - V(before) by K continuations (:mod:`bench.values`), a method's the mean advantage of the
step's tokens. Shape suffixes: T response tokens, J steps of a response, M those before its answer, P problems.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from bench.places import Label, record, step_means
from bench.statistics import Estimate, holm, jackknife, mean_of
from bench.table import CONTROLS, FEW, FEWEST, NOTHING, NUMBER, SIGNIFICANT, cell, figures_of, kind_of, token_advantages
from grail_advantage.dump import DumpRow, read_dump
from grail_advantage.text_io import table

LEAST = 3  # steps before the answer of a response that is used
FOLLOWS = "follows credit"
EARLIER, PLANTED = "earlier first", "planted"
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
    starts: list[int]
    label: (
        Label  # its steps before the answer; ``step``: that of the largest significant loss, of an incorrect response
    )
    step_T: np.ndarray  # int; of all tokens
    credit_J: np.ndarray
    halves_2J: np.ndarray  # the credit by either half of the continuations
    is_answered: bool

    @property
    def steps(self) -> int:
        """M."""
        return len(self.credit_J) - self.is_answered


@lru_cache(maxsize=100_000)
def _p_of(first: int, second: int, samples: int) -> float:
    return float(stats.fisher_exact([[first, samples - first], [second, samples - second]]).pvalue)


def _largest_loss(credit_M: np.ndarray, counts: Sequence[int], samples: int, reward: float) -> int | None:
    """The step of the largest loss, if it is significant among the M steps (Fisher's test, Bonferroni's correction)."""
    step = int(credit_M.argmin())
    if credit_M[step] >= 0:
        return None
    p = 0.0  # the reward is known without noise
    if step + 1 < len(counts):
        p = _p_of(counts[step], counts[step + 1], samples)
    return step if p * len(credit_M) < SIGNIFICANT else None


def case_of(row: DumpRow, right: Sequence[str]) -> Case:
    """A response by these digits of its continuations."""
    values = row.labels["values"]
    starts = values["starts"]
    bits_JK = np.array([[digit == "1" for digit in digits] for digits in right], dtype=float)
    samples = bits_JK.shape[1]
    parts = (bits_JK[:, : samples // 2], bits_JK[:, samples // 2 :], bits_JK)
    credit_3J = np.array([np.diff([*part_JK.mean(axis=1), values["reward"]]) for part_JK in parts])
    step_T = np.searchsorted(starts[1:], np.arange(len(row)), side="right")
    steps = len(starts) - values["answered"]
    advantage = float(row.base_advantage_T[0])
    loss = None
    if advantage < 0 and steps > 0:
        counts = [digits.count("1") for digits in right]
        loss = _largest_loss(credit_3J[2, :steps], counts, samples, values["reward"])
    kind_T = np.array([kind_of(piece) for piece in row.tokens])
    label = Label(np.where(step_T < steps, step_T, -1), kind_T, loss)
    return Case(row, advantage, starts, label, step_T, credit_3J[2], credit_3J[:2], values["answered"])


def read(folder: Path) -> tuple[list[Case], list[Case], Counter[str]]:
    """The responses that are used, the same by the first half of their continuations, and how many there are of each sort.
    ValueError: the folder cannot be used."""
    dump = read_dump(folder)
    cases: list[Case] = []
    halved: list[Case] = []
    counts = Counter[str]()
    for row in dump:
        if "values" not in row.labels:
            counts["without values"] += 1
            continue
        try:
            right = row.labels["values"]["right"]
            case = case_of(row, right)
            half = len(right[0]) // 2
        except (TypeError, ValueError, LookupError) as error:
            raise ValueError(f"{folder}: the values of {row.key} are not those of bench values ({error!r})") from error
        if not case.advantage:
            counts["with advantage 0"] += 1
        elif case.steps < LEAST:
            counts[f"with fewer than {LEAST} steps"] += 1
        else:
            counts["incorrect" if case.advantage < 0 else "correct"] += 1
            cases.append(case)
            if half >= 2:
                halved.append(case_of(row, [digits[:half] for digits in right]))
    if dump.problems or not cases:
        raise ValueError(
            f"{folder}: {'; '.join(dump.problems) or f'no response with values can be used; {dict(counts)}'}"
        )
    return cases, halved, counts


class Sums:
    """Sums over the responses of each problem, for a correlation and its jackknife."""

    def __init__(self, cases: Sequence[Case]) -> None:
        names = [case.row.group for case in cases]
        self.problems = sorted(set(names), key=str)
        self.index = np.array([self.problems.index(name) for name in names])

    def by_problem(self, parts: Sequence[float]) -> np.ndarray:
        return np.bincount(self.index, parts, minlength=len(self.problems))

    def correlation(self, cross: Sequence[float], norm: Sequence[float], square: Sequence[float]) -> np.ndarray:
        """Over all problems, then without each of them, (1 + P,); 0 where nothing differs, NaN where the square of the
        credit is not above 0 by its noise."""
        square_P = self.by_problem(square)
        credit = mean_of(square_P)
        if not (credit.value > 0 and credit.p < SIGNIFICANT):
            return np.full(1 + len(square_P), np.nan)
        sums = []
        for parts_P in (self.by_problem(cross), self.by_problem(norm), square_P):
            sums.append(np.concatenate([[parts_P.sum()], parts_P.sum() - parts_P]))
        scale = np.sqrt(np.maximum(sums[1] * sums[2], 1e-30))
        return np.where(sums[1] > 1e-12, sums[0] / scale, 0.0)


def within(cases: Sequence[Case], means: Sequence[np.ndarray]) -> tuple[Estimate, Estimate]:
    """The correlation of these step means (M,) with the credit within responses, and of what place does not explain."""
    sums = Sums(cases)
    centred = [mean_M - mean_M.mean() for mean_M in means]
    beyond = [np.zeros(case.steps) for case in cases]
    for steps in {case.steps for case in cases}:
        places = np.array([place for place, case in enumerate(cases) if case.steps == steps])
        own_CM = np.array([centred[place] for place in places])
        for problem in np.unique(sums.index[places]):
            same_C = sums.index[places] == problem
            if not same_C.all():
                usual_M = own_CM[~same_C].mean(axis=0)
                for place in places[same_C]:
                    beyond[place] = centred[place] - usual_M
    credits = [case.credit_J[: case.steps] for case in cases]
    squares = []
    for case in cases:
        halves_2M = case.halves_2J[:, : case.steps]
        halves_2M = halves_2M - halves_2M.mean(axis=1, keepdims=True)
        squares.append(float(halves_2M[0] @ halves_2M[1]))
    results = []
    for values in (centred, beyond):
        cross = [float(own_M @ credit_M) for own_M, credit_M in zip(values, credits, strict=True)]
        results.append(jackknife(sums.correlation(cross, [float(own_M @ own_M) for own_M in values], squares)))
    return results[0], results[1]


def cosine(cases: Sequence[Case], advantages: Sequence[np.ndarray]) -> np.ndarray:
    """Of token advantages (T,) with the credit, over all problems, then without each of them, (1 + P,)."""
    cross = [float(own_T @ case.credit_J[case.step_T]) for own_T, case in zip(advantages, cases, strict=True)]
    square = [float(case.halves_2J[0][case.step_T] @ case.halves_2J[1][case.step_T]) for case in cases]
    return Sums(cases).correlation(cross, [float(own_T @ own_T) for own_T in advantages], square)


def uniform_of(cases: Sequence[Case]) -> list[np.ndarray]:
    return [np.full(len(case.row), case.advantage) for case in cases]


def references(cases: Sequence[Case]) -> dict[str, list[np.ndarray]]:
    """Token advantages that know the place, the kind or nothing."""
    generator = np.random.default_rng(7)
    signs = [math.copysign(1, case.advantage) for case in cases]
    pairs = list(zip(signs, cases, strict=True))
    return {
        EARLIER: [sign * np.arange(len(case.row), 0, -1.0) for sign, case in pairs],
        "kind alone": [sign * (case.label.kind_T == NUMBER) for sign, case in pairs],
        "noise": [generator.normal(size=len(case.row)) for case in cases],
    }


def losses(
    cases: Sequence[Case], advantages: Sequence[np.ndarray], scored: Sequence[np.ndarray]
) -> list[dict[str, Any]]:
    """The records of incorrect responses for :func:`bench.table.figures_of`: those with a significant loss as errors, all
    of them as controls at equal place."""
    records = []
    for place, (case, own_T, scored_T) in enumerate(zip(cases, advantages, scored, strict=True)):
        if case.advantage > 0:
            continue
        about = {"id": place, "problem": case.row.group, "no_scores": None}
        moved_T = scored_T & (case.label.step_T >= 0)
        for step in {case.label.step, None}:
            label = Label(case.label.step_T, case.label.kind_T, step)
            records.append(about | record(-own_T, moved_T, label, np.random.default_rng([place, 5])))
    return records


def figures(
    cases: Sequence[Case], advantages: Sequence[np.ndarray], scored: Sequence[np.ndarray]
) -> dict[str, Estimate]:
    """A method's figures, by the names of the table's columns."""
    shown = {}
    for outcome, sign in (("incorrect", -1), ("correct", 1)):
        chosen = [place for place, case in enumerate(cases) if case.advantage * sign > 0]
        if chosen:
            means = []
            for place in chosen:
                before_T = cases[place].label.step_T >= 0
                means.append(step_means(advantages[place][before_T], cases[place].step_T[before_T]))
            both = within([cases[place] for place in chosen], means)
            shown[f"within, {outcome}"], shown[f"beyond place, {outcome}"] = both
    records = losses(cases, advantages, scored)
    if any(one["first"] is not None for one in records):
        earlier = losses(cases, references(cases)[EARLIER], scored)
        of_place = {one["id"]: one for one in earlier if one["first"] is not None}
        of_loss = figures_of(records, of_place, other_problems=True)
        shown["AUROC, largest loss"] = of_loss["step"]
        gains = [of_loss[f"step_{name}"] for name in CONTROLS if f"step_{name}" in of_loss]
        shown["least above a control"] = min(gains, key=lambda gain: gain.value)
    of_uniform = cosine(cases, uniform_of(cases))
    shown["cosine less uniform's"] = jackknife(cosine(cases, advantages) - of_uniform)
    return shown


def report(folder: Path) -> str:
    """The table as Markdown."""
    cases, halved, counts = read(folder)
    everything = [np.ones(len(case.row), dtype=bool) for case in cases]
    rows = {name: figures(cases, advantages, everything) for name, advantages in references(cases).items()}
    if halved:
        planted = []
        for case in halved:
            right = case.row.labels["values"]["right"]
            rest = case_of(case.row, [digits[len(right[0]) // 2 :] for digits in right])
            planted.append(rest.credit_J[rest.step_T])
        rows[PLANTED] = figures(halved, planted, everything)
    known = set(rows)
    of_methods = [token_advantages(case.row) for case in cases]
    for name in of_methods[0]:
        given = [methods.get(name) for methods in of_methods]
        if None not in given:
            rows[name] = figures(cases, [one.advantage_T for one in given], [one.scored_T for one in given])
    words = dict.fromkeys(rows, "")
    p_values = {}
    for name in rows.keys() - known:
        pair = [
            rows[name].get(column, Estimate(math.nan))
            for column in ("beyond place, incorrect", "cosine less uniform's")
        ]
        above = all(one.value > 0 for one in pair)
        p_values[name] = max(one.p for one in pair) if above else 1.0
    for name, p in zip(p_values, holm(list(p_values.values())), strict=True):
        words[name] = FOLLOWS if p < SIGNIFICANT else NOTHING
    problems = len(Sums(cases).problems)
    if problems < FEWEST:
        words = dict.fromkeys(rows, FEW)
    columns = [
        name
        for name in max(rows.values(), key=len)
        if any(not math.isnan(of[name].value) for of in rows.values() if name in of)
    ]
    cells = [
        [name, words[name], *(cell(of.get(column), signed="AUROC" not in column) for column in columns)]
        for name, of in rows.items()
    ]
    settings = cases[0].row.labels["values"]["settings"]
    of_uniform = jackknife(cosine(cases, uniform_of(cases)))
    about = [
        f"By values of {settings['model']}, K = {settings['samples']}, {problems} problems.",
        "; ".join(f"{count} {sort}" for sort, count in counts.items()) + ".",
        f"{sum(case.label.step is not None for case in cases)} responses with a significant loss.",
        f"Uniform's cosine: {cell(of_uniform)}." if not math.isnan(of_uniform.value) else "No credit above its noise.",
    ]
    return "\n".join([" ".join(about), "", *table(["method", "verdict", *columns], cells, right=2), "", RULE])
