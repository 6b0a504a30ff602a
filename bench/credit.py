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

from bench.places import Label, Record, TokenAdvantages, record, step_means, token_advantages
from bench.statistics import Estimate, holm, jackknife, mean_of
from bench.table import CONTROLS, FEW, FEWEST, NOTHING, NUMBER, SIGNIFICANT, cell, figures_of, kind_of
from grail_advantage.dump import DumpRow, read_dump
from grail_advantage.text_io import table

LEAST = 3  # steps before the answer of a response that is used
FOLLOWS = "follows credit"
EARLIER = "earlier first"
BEYOND = "beyond place"
COSINE = "cosine less uniform's"
RULE = (
    f"'{FOLLOWS}': in incorrect responses beyond place, and in the cosine less uniform's, above 0, with p < {SIGNIFICANT} "
    f"after Holm's correction over all methods; '{NOTHING}' is no proof of nothing. Within: the correlation of step means "
    "with the credit within responses, before the answer. Beyond place: of what is left of them less their mean in other "
    "problems' responses of as many steps. Cosine: over all tokens of all responses. The noise of K is taken out by two "
    "halves of the continuations, so that right credit has 1 at any K; a cell is empty where the credit is not above its "
    "noise. Loss: AUROC of the step with the largest significant loss of value, and its least difference from the controls "
    f"of docs/bench.md. 'planted' is credit by half of the continuations, judged by the other half. Steps have means, "
    "as their tokens share one coefficient in the true gradient: sums would score lengths. Sizes count, not ranks: after "
    "an error all values are about 0, and their order is noise at any K. ± is half of a 95 % interval by problem."
)


@dataclass(frozen=True)
class Case:
    """A response with its values."""

    row: DumpRow
    advantage: float
    label: Label  # its steps before the answer; the one to blame: that of the largest significant loss
    step_T: np.ndarray  # int; of all tokens
    credit_J: np.ndarray
    halves_2J: np.ndarray  # the credit by either half of the continuations

    @property
    def steps(self) -> int:
        """M."""
        return int(self.label.step_T.max()) + 1

    @property
    def uniform(self) -> TokenAdvantages:
        return TokenAdvantages(np.full(len(self.row), self.advantage), np.ones(len(self.row), dtype=bool))


@lru_cache(maxsize=100_000)
def _p_of(first: int, second: int, samples: int) -> float:
    return float(stats.fisher_exact([[first, samples - first], [second, samples - second]]).pvalue)


def largest_loss(credit_M: np.ndarray, right: Sequence[str]) -> int | None:
    """The step of the largest loss, if it is significant among the M steps (Fisher's test, Bonferroni's correction)."""
    step = int(credit_M.argmin())
    p = 0.0  # after the last step comes the reward, which has no noise
    if step + 1 < len(right):
        p = _p_of(right[step].count("1"), right[step + 1].count("1"), len(right[0]))
    return step if credit_M[step] < 0 and p * len(credit_M) < SIGNIFICANT else None


def case_of(row: DumpRow, part: slice) -> Case:
    """A response by this part of its continuations."""
    values = row.labels["values"]
    right = [digits[part] for digits in values["right"]]
    bits_JK = np.array([[digit == "1" for digit in digits] for digits in right], dtype=float)
    half = bits_JK.shape[1] // 2
    parts = (bits_JK[:, :half], bits_JK[:, half:], bits_JK)
    credit_3J = np.array([np.diff([*part_JK.mean(axis=1), values["reward"]]) for part_JK in parts])
    step_T = np.searchsorted(values["starts"][1:], np.arange(len(row)), side="right")
    steps = len(right) - values["answered"]
    advantage = float(row.base_advantage_T[0])
    loss = largest_loss(credit_3J[2, :steps], right) if advantage < 0 and steps else None
    kind_T = np.array([kind_of(piece) for piece in row.tokens])
    label = Label(np.where(step_T < steps, step_T, -1), kind_T, loss)
    return Case(row, advantage, label, step_T, credit_3J[2], credit_3J[:2])


def read(folder: Path) -> tuple[list[Case], Counter[str]]:
    """The responses that are used, and how many there are of each sort. ValueError: the folder cannot be used."""
    dump = read_dump(folder)
    cases: list[Case] = []
    counts = Counter[str]()
    for row in dump:
        if "values" not in row.labels:
            counts["without values"] += 1
            continue
        try:
            case = case_of(row, slice(None))
        except (TypeError, ValueError, LookupError) as error:
            raise ValueError(f"{folder}: the values of {row.key} are not those of bench values ({error!r})") from error
        if not case.advantage:
            counts["with advantage 0"] += 1
        elif case.steps < LEAST:
            counts[f"with fewer than {LEAST} steps"] += 1
        else:
            counts["incorrect" if case.advantage < 0 else "correct"] += 1
            cases.append(case)
    if dump.problems or not cases:
        raise ValueError(
            f"{folder}: {'; '.join(dump.problems) or f'no response with values can be used; {dict(counts)}'}"
        )
    return cases, counts


def correlation(cases: Sequence[Case], triples: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> np.ndarray:
    """Over all problems, then without each of them, (1 + P,), for :func:`bench.statistics.jackknife`: 0 where nothing differs,
    NaN where the square of the credit is not above its noise.

    Args:
        cases: responses, for their problems.
        triples: of each the values that are compared, the credit, and the credit by the halves, (2, ...).
    """
    parts = [(values @ credit, values @ values, halves[0] @ halves[1]) for values, credit, halves in triples]
    sums_P3 = pd.DataFrame(parts).groupby([str(case.row.group) for case in cases]).sum().to_numpy()
    square = mean_of(sums_P3[:, 2])
    if not (square.value > 0 and square.p < SIGNIFICANT):
        return np.full(1 + len(sums_P3), np.nan)
    total_3 = sums_P3.sum(axis=0)
    cross, norm, square_credit = np.vstack([total_3, total_3 - sums_P3]).T
    return np.where(norm > 1e-12, cross / np.sqrt(np.maximum(norm * square_credit, 1e-30)), 0.0)


def centred(values: np.ndarray) -> np.ndarray:
    return values - values.mean(axis=-1, keepdims=True)


def within(cases: Sequence[Case], own: Sequence[TokenAdvantages]) -> list[Estimate]:
    """The correlation of step means with the credit within responses, and of what place does not explain."""
    means = [centred(step_means(one.advantage_T, case.label.step_T)) for case, one in zip(cases, own, strict=True)]
    beyond = []
    for case, mean_M in zip(cases, means, strict=True):
        others = [
            other_M
            for other, other_M in zip(cases, means, strict=True)
            if other.steps == case.steps and other.row.group != case.row.group
        ]
        beyond.append(mean_M - np.mean(others, axis=0) if others else np.zeros(case.steps))
    credits = [case.credit_J[: case.steps] for case in cases]
    halves = [centred(case.halves_2J[:, : case.steps]) for case in cases]
    by_values = [correlation(cases, list(zip(values, credits, halves, strict=True))) for values in (means, beyond)]
    return [jackknife(of_values) for of_values in by_values]


def cosine(cases: Sequence[Case], own: Sequence[TokenAdvantages]) -> np.ndarray:
    """:func:`correlation` of token advantages with the credit."""
    pairs = zip(cases, own, strict=True)
    triples = [(one.advantage_T, case.credit_J[case.step_T], case.halves_2J[:, case.step_T]) for case, one in pairs]
    return correlation(cases, triples)


def references(cases: Sequence[Case]) -> dict[str, list[TokenAdvantages]]:
    """Methods that know the place, the kind or nothing."""
    generator = np.random.default_rng(7)
    rows: dict[str, list[TokenAdvantages]] = {EARLIER: [], "kind alone": [], "noise": []}
    for case in cases:
        sign = math.copysign(1, case.advantage)
        length = len(case.row)
        values = (sign * np.arange(length, 0, -1), sign * (case.label.kind_T == NUMBER), generator.normal(size=length))
        for name, advantage_T in zip(rows, values, strict=True):
            rows[name].append(replace(case.uniform, advantage_T=advantage_T))
    return rows


def records_of(cases: Sequence[Case], own: Sequence[TokenAdvantages]) -> list[Record]:
    """Of incorrect responses: those with a significant loss as errors, and all of them as controls at equal place."""
    records = []
    for number, (case, one) in enumerate(zip(cases, own, strict=True)):
        labels = [replace(case.label, step=None)] if case.advantage < 0 else []
        if case.label.step is not None:
            labels.append(case.label)
        records += [record(number, case.row.group, one, label, number) for label in labels]
    return records


def figures(cases: Sequence[Case], own: Sequence[TokenAdvantages]) -> dict[str, Estimate]:
    """A method's figures, by the names of the table's columns."""
    shown = {}
    for outcome, sign in (("incorrect", -1), ("correct", 1)):
        chosen = [place for place, case in enumerate(cases) if case.advantage * sign > 0]
        if chosen:
            both = within([cases[place] for place in chosen], [own[place] for place in chosen])
            shown[f"within, {outcome}"], shown[f"{BEYOND}, {outcome}"] = both
    records = records_of(cases, own)
    if any(one.step is not None for one in records):
        of_place = {one.id: one for one in records_of(cases, references(cases)[EARLIER])}
        of_loss = figures_of(records, of_place, other_problems=True)
        shown["AUROC, largest loss"] = of_loss["AUROC"]
        gains = [of_loss[control] for control in CONTROLS if control in of_loss]
        shown["least above a control"] = min(gains, key=lambda gain: gain.value)
    shown[COSINE] = jackknife(cosine(cases, own) - cosine(cases, [case.uniform for case in cases]))
    return shown


def verdicts(rows: Mapping[str, Mapping[str, Estimate]]) -> dict[str, str]:
    """By :data:`RULE`."""
    p_values = []
    for of_method in rows.values():
        pair = [of_method.get(column, Estimate(math.nan)) for column in (f"{BEYOND}, incorrect", COSINE)]
        p_values.append(max(one.p for one in pair) if all(one.value > 0 for one in pair) else 1.0)
    corrected = zip(rows, holm(p_values), strict=True)
    return {name: FOLLOWS if p < SIGNIFICANT else NOTHING for name, p in corrected}


def report(folder: Path) -> str:
    """The table as Markdown."""
    cases, counts = read(folder)
    settings = cases[0].row.labels["values"]["settings"]
    rows = {name: figures(cases, own) for name, own in references(cases).items()}
    half = settings["samples"] // 2
    if half >= 2:
        rest = [case_of(case.row, slice(half, None)) for case in cases]
        planted = [replace(case.uniform, advantage_T=case.credit_J[case.step_T]) for case in rest]
        rows["planted"] = figures([case_of(case.row, slice(half)) for case in cases], planted)
    of_methods = [token_advantages(case.row) for case in cases]
    names = [name for name in of_methods[0] if all(name in methods for methods in of_methods)]
    of_names = {name: figures(cases, [methods[name] for methods in of_methods]) for name in names}
    problems = len({str(case.row.group) for case in cases})
    words = verdicts(of_names) if problems >= FEWEST else dict.fromkeys(of_names, FEW)
    rows.update(of_names)
    # A column without any figure, such as of credit that is not above its noise, is left out.
    columns = [column for column in rows["noise"] if not all(math.isnan(row[column].value) for row in rows.values())]
    cells = []
    for name, row in rows.items():
        of_columns = [cell(row.get(column), signed="AUROC" not in column) for column in columns]
        cells.append([name, words.get(name, ""), *of_columns])
    of_uniform = cell(jackknife(cosine(cases, [case.uniform for case in cases])))
    losses = sum(case.label.step is not None for case in cases)
    about = f"By values of {settings['model']}, K = {settings['samples']}, {problems} problems. "
    about += "; ".join(f"{count} {sort}" for sort, count in counts.items())
    about += (
        f". {losses} responses with a significant loss. Uniform's cosine: {of_uniform or 'no credit above its noise'}."
    )
    return "\n".join([about, "", *table(["method", "verdict", *columns], cells, right=2), "", RULE])
