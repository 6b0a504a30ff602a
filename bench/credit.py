"""The table by values: does a method's credit follow the credit by rollouts? For a folder of ``analyze`` over lines that
``python -m bench values`` wrote, with the advantages of training.

The credit of a step is V(after) - V(before) by K continuations (:mod:`bench.values`), a method's the mean advantage of the
step's tokens.

Shape suffixes: T response tokens, J steps of a response, M those before its answer, K
continuations, P problems, N terms of a sum; 3 stands for all continuations and either half.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
    Figures,
    cell,
    cells,
    figures_of,
    kind_of,
)
from grail_advantage.dump import DumpRow, read_dump
from grail_advantage.text_io import table

# Steps before the answer of a response that is used
LEAST = 3
FOLLOWS = "follows credit"
BASE = "the response's advantage"
EARLIER = "earlier first"
KIND = "kind alone"
NOISE = "noise"
PLANTED = "planted"
BEYOND = "beyond place"
COSINE = "cosine less uniform's"
EFFECT = "effect"
RULE = (
    f"'{FOLLOWS}': in incorrect responses beyond place, and in the cosine less uniform's, above 0, with p < {SIGNIFICANT} "
    f"after Holm's correction over all methods; '{NOTHING}' is no proof of nothing. Within: the correlation of step means "
    "with the credit within responses, before the answer. Beyond place: of what is left of them less their mean in other "
    "problems' responses of as many steps. Cosine: over all tokens of all responses. The noise of K is taken out by two "
    "halves of the continuations, so that right credit has 1 at any K; a cell is empty where the credit is not above its "
    "noise. Loss: AUROC of the step with the largest significant loss of value, and its least difference from the controls "
    f"of docs/bench.md. '{PLANTED}' is credit by half of the continuations, judged by the other half. Steps have means, "
    "as their tokens share one coefficient in the true gradient: sums would score lengths. Sizes count, not ranks: after "
    "an error all values are about 0, and their order is noise at any K. Effect, where analyze --after measured it: the share "
    "of the update's change of log-probabilities, by size, that went where the method's token advantages point. ± is half of "
    "a 95 % interval by problem."
)


@dataclass(frozen=True)
class Case:
    """A response with its values."""

    row: DumpRow
    advantage: float
    # Its steps before the answer; to blame is that of the largest significant loss
    label: Label
    # Int; the step in J of every token, also in the answer, where label.step_T is -1
    credit_step_T: np.ndarray
    # By all continuations, and by either half of them
    credit_3J: np.ndarray
    # M
    steps: int
    # Those of the folder, and the references
    methods: dict[str, TokenAdvantages]

    @property
    def problem(self) -> str:
        return str(self.row.group)

    @property
    def credit_J(self) -> np.ndarray:
        return self.credit_3J[0]

    def by(self, name: str, advantage_T: np.ndarray) -> Case:
        """With a further method."""
        return replace(self, methods={**self.methods, name: TokenAdvantages(advantage_T)})


def largest_loss(credit_M: np.ndarray, bits_JK: np.ndarray) -> int | None:
    """The step of the largest loss, if it is significant among the M steps (Fisher's test, Bonferroni's correction)."""
    step = int(credit_M.argmin())
    # Row j counts continuations from before step j: rows 2 and 3 are those before and after step 2.
    right_J = bits_JK.sum(axis=1)
    # After the last step comes the reward, which is exact: its loss is no chance.
    p = 0.0
    if step + 1 < len(right_J):
        before_after_2 = right_J[step : step + 2]
        p = stats.fisher_exact([before_after_2, bits_JK.shape[1] - before_after_2]).pvalue
    if credit_M[step] >= 0 or p * len(credit_M) >= SIGNIFICANT:
        return None
    return step


def case_of(row: DumpRow, part: slice = slice(None)) -> Case:
    """A response by this part of its continuations, with the references that know the advantage, the place or the kind."""
    values = row.labels["values"]
    bits_JK = np.array([list(digits[part]) for digits in values["right"]]) == "1"
    # Neither half is empty: bench values draws two or more, and report takes parts of two or more.
    half = bits_JK.shape[1] // 2
    # Values 0.5 and 0.75 and the reward 0 give the credit 0.25 and -0.75.
    credits = [
        np.diff([*part_JK.mean(axis=1), values["reward"]])
        for part_JK in (bits_JK, bits_JK[:, :half], bits_JK[:, half:])
    ]
    step_T = np.searchsorted(values["starts"][1:], np.arange(len(row)), side="right")
    # An answered response has its answer as the last step, which methods treat by their own rules.
    steps = len(bits_JK) - int(values["answered"])
    advantage = float(row.base_advantage_T[0])
    blamed_step = None
    if advantage < 0 and steps:
        blamed_step = largest_loss(credits[0][:steps], bits_JK)
    kind_T = np.array([kind_of(piece) for piece in row.tokens])
    methods = token_advantages(row)
    methods[BASE] = TokenAdvantages(np.full(len(row), advantage))
    methods[EARLIER] = TokenAdvantages(advantage * np.arange(len(row), 0, -1))
    methods[KIND] = TokenAdvantages(advantage * (kind_T == NUMBER))
    label = Label(np.where(step_T < steps, step_T, -1), kind_T, blamed_step)
    return Case(row, advantage, label, step_T, np.array(credits), steps, methods)


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


def jackknife_sums(cases: Sequence[Case], terms: Sequence[Sequence[float]]) -> np.ndarray:
    """The sums of responses' N terms over all problems, then without each of them, (N, 1 + P), for
    :func:`bench.statistics.jackknife`."""
    sums_PN = pd.DataFrame(terms).groupby([case.problem for case in cases]).sum().to_numpy()
    total_N = sums_PN.sum(axis=0)
    return np.vstack([total_N, total_N - sums_PN]).T


def correlation(
    cases: Sequence[Case], values: Sequence[np.ndarray], credits: Sequence[np.ndarray]
) -> np.ndarray:
    """Of the values of responses with their credit and that by its halves, (3, ...), over all problems, then without each of
    them, (1 + P,): 0 where nothing differs, NaN where the square of the credit is not above its noise."""
    terms = []
    for value, (credit, first, second) in zip(values, credits, strict=True):
        # The product of the halves has no noise on average; the square of the credit would.
        terms.append((value @ credit, value @ value, first @ second))
    cross, norm, square_credit = jackknife_sums(cases, terms)
    # Each problem's: of 10 over all problems and 7 without the first, the first has 3.
    square = mean_of(square_credit[0] - square_credit[1:])
    if not (square.value > 0 and square.p < SIGNIFICANT):
        return np.full(len(cross), np.nan)
    # The square is above 0 without any one problem, too: if the others' sum were 0 or less,
    # Student's t would be at most 1, and p above 0.3. The norm is 0 but for rounding where a method
    # gives the same to all steps.
    return np.where(norm > 1e-12, cross / np.sqrt(np.maximum(norm * square_credit, 1e-30)), 0.0)


def cosine(cases: Sequence[Case], name: str) -> np.ndarray:
    """:func:`correlation` of token advantages with the credit."""
    values = [case.methods[name].advantage_T for case in cases]
    return correlation(cases, values, [case.credit_3J[:, case.credit_step_T] for case in cases])


def centred(values: np.ndarray) -> np.ndarray:
    return values - values.mean(axis=-1, keepdims=True)


def beyond_peers(cases: Sequence[Case], means: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Step means less those of peers: their mean in other problems' responses of as many steps."""
    sums_by_steps = defaultdict[int, Any](float)
    sums_by_problem = defaultdict[tuple[int, str], Any](float)
    for case, mean_M in zip(cases, means, strict=True):
        # Means 0.5 and -0.5 give 0.5, -0.5 and 1: the last number of a sum counts its responses.
        terms = np.append(mean_M, 1)
        sums_by_steps[case.steps] += terms
        sums_by_problem[case.steps, case.problem] += terms
    beyond = []
    for case, mean_M in zip(cases, means, strict=True):
        peers = sums_by_steps[case.steps] - sums_by_problem[case.steps, case.problem]
        # Without a peer a response is compared with itself, and adds nothing.
        peer_M = peers[:-1] / peers[-1] if peers[-1] else mean_M
        beyond.append(mean_M - peer_M)
    return beyond


def within(cases: Sequence[Case], name: str) -> list[Estimate]:
    """The correlation of step means with the credit within responses, and of what place does not explain."""
    # The label has -1 in the answer, which step_means leaves out: these are M means, not J.
    means = [
        centred(step_means(case.methods[name].advantage_T, case.label.step_T)) for case in cases
    ]
    beyond = beyond_peers(cases, means)
    credits = [centred(case.credit_3J[:, : case.steps]) for case in cases]
    return [jackknife(correlation(cases, values, credits)) for values in (means, beyond)]


def moved(cases: Sequence[Case], name: str) -> Estimate:
    """The share of the update's change of log-probabilities, by size, that went where a method's advantages point."""
    terms = []
    for case in cases:
        change_T = np.nan_to_num(case.row.effect_T) * np.sign(case.methods[name].advantage_T)
        # Changes +3, -1 and +2 under the advantages 1, 1 and 0: 3 of 4.
        terms.append((change_T.clip(min=0).sum(), abs(change_T).sum()))
    along, size = jackknife_sums(cases, terms)
    return jackknife(along / np.maximum(size, 1e-30))


def records_of(cases: Sequence[Case], name: str) -> list[Record]:
    """Of incorrect responses: those with a significant loss as errors, and all of them as controls at equal place."""
    records = []
    for number, case in enumerate(cases):
        if case.advantage < 0:
            # Without a step to blame, a record is a control.
            labels = [replace(case.label, step=None)]
            if case.label.step is not None:
                labels.append(case.label)
            for label in labels:
                records.append(record_of(case.row, case.methods[name], label, number))
    return records


def figures(cases: Sequence[Case], names: Sequence[str]) -> dict[str, Figures]:
    """The figures of these methods, by the names of the table's columns."""
    uniform = cosine(cases, BASE)
    rows = {}
    for name in names:
        row = {}
        for outcome, sign in (("incorrect", -1), ("correct", 1)):
            chosen = [case for case in cases if case.advantage * sign > 0]
            if chosen:
                row[f"within, {outcome}"], row[f"{BEYOND}, {outcome}"] = within(chosen, name)
        records = records_of(cases, name)
        if not all(math.isnan(record.place) for record in records):
            loss_figures = figures_of(records, other_problems=True)
            row["AUROC, largest loss"] = loss_figures["AUROC"]
            # All controls but that at equal place have a figure wherever there is a loss.
            gains = [loss_figures[control] for control in CONTROLS if control in loss_figures]
            row["least above a control"] = min(gains, key=lambda gain: gain.value)
        row[COSINE] = jackknife(cosine(cases, name) - uniform)
        if not any(case.row.effect_T is None for case in cases):
            row[EFFECT] = moved(cases, name)
        rows[name] = row
    return rows


def verdicts(rows: Mapping[str, Figures]) -> dict[str, str]:
    """By :data:`RULE`."""
    p_values = {}
    for name, row in rows.items():
        pair = [row.get(f"{BEYOND}, incorrect", Estimate(math.nan)), row[COSINE]]
        # Both must hold, so the weaker one counts.
        p_values[name] = max(estimate.p if estimate.value > 0 else 1.0 for estimate in pair)
    return {name: FOLLOWS if p < SIGNIFICANT else NOTHING for name, p in holm(p_values).items()}


def report(folder: Path) -> str:
    """The table as Markdown."""
    cases, counts = read(folder)
    settings = cases[0].row.labels["values"]["settings"]
    rows = figures(cases, (EARLIER, KIND, NOISE))
    half = settings["samples"] // 2
    # A half of the continuations has halves of its own, by which its noise is taken out.
    if half >= 2:
        planted = []
        for case in cases:
            rest = case_of(case.row, slice(half, None))
            planted_T = rest.credit_J[rest.credit_step_T]
            planted.append(case_of(case.row, slice(half)).by(PLANTED, planted_T))
        rows.update(figures(planted, [PLANTED]))
    # The methods that every response has; case.methods would add the references.
    names = [
        name for name in cases[0].row.methods if all(name in case.row.methods for case in cases)
    ]
    method_rows = figures(cases, names)
    problems = len({case.problem for case in cases})
    words = dict.fromkeys(names, FEW)
    if problems >= FEWEST:
        words = verdicts(method_rows)
    rows.update(method_rows)
    # A column without any figure, such as of credit that is not above its noise, is left out. A row
    # may lack a column: by 4 of 8 continuations, planted seldom has a significant loss.
    columns = [
        column for column in rows[NOISE] if any(cell(row.get(column)) for row in rows.values())
    ]
    lines = [[name, words.get(name, ""), *cells(row, columns)] for name, row in rows.items()]
    uniform_cosine = cell(jackknife(cosine(cases, BASE))) or "no credit above its noise"
    losses = sum(case.label.step is not None for case in cases)
    sorts = "; ".join(f"{count} {sort}" for sort, count in counts.items())
    about = f"By values of {settings['model']}, K = {settings['samples']}, {problems} problems. {sorts}. "
    about += f"{losses} responses with a significant loss. Uniform's cosine: {uniform_cosine}."
    return "\n".join([about, "", *table(["method", "verdict", *columns], lines, right=2), "", RULE])
