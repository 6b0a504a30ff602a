"""The table by values: does a method's credit follow the credit by rollouts? It reads a folder of ``analyze`` over lines
that ``python -m bench values`` wrote; advantages are those of training.

The credit of a step is V(after) - V(before) by K continuations (:mod:`bench.values`), a method's the mean advantage of the
step's tokens.

Shape suffixes: T response tokens, J steps of a response, M those before its answer, K
continuations, P problems, N terms of a sum; 3 stands for all continuations and either half.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from bench.places import Label, TokenAdvantages, record_of, rows_of, token_advantages
from bench.statistics import Estimate, holm, jackknife, mean_of
from bench.table import (
    CONTROLS,
    FEW,
    FEWEST,
    KIND,
    NOTHING,
    SIGNIFICANT,
    Figures,
    cell,
    cells,
    figures_of,
    kind_of,
)
from grail_advantage.dump import DumpRow
from grail_advantage.text_io import table

# Steps before the answer of a response that is used, at least
MIN_STEPS = 3
FOLLOWS = "follows credit"
BASE = "the response's advantage"
EARLIER = "earlier first"
NOISE = "random noise"
PLANTED = "half of the continuations"
BEYOND = "beyond place"
COSINE = "cosine less uniform's"
# Columns of a table of tokens or steps. No method's name has a space, so that none is a reference's or a column's.
TRUTH = ["credit by rollouts", "credit by one half", "credit by the other half"]
CHANGE = "change of the log-probability"
RULE = (
    f"'{FOLLOWS}': in incorrect responses beyond place, and in the cosine less uniform's, above 0, with p < {SIGNIFICANT} "
    f"after Holm's correction over all methods; '{NOTHING}' is no proof of nothing. Within: the correlation of step means "
    "with the credit within responses, before the answer. Beyond place: likewise, each less the mean of the same step in "
    "other problems' responses of as many steps. Cosine: over all tokens of all responses. The noise of K is taken out by two "
    "halves of the continuations, so that right credit has 1 at any K; a cell is empty where the credit is not above its "
    "noise. Loss: AUROC of the step with the largest significant loss of value, and its least difference from the controls "
    f"of docs/bench.md. '{PLANTED}': the credit by them, judged by the other half. Steps have means, "
    "as their tokens share one coefficient in the true gradient: sums would score lengths. Sizes count, not ranks: after "
    "an error all values are about 0, and their order is noise at any K. Effect, where analyze --after measured it: of the "
    "tokens with an advantage, the share of the change of log-probabilities, by size, that went with it. ± is half of "
    "a 95 % interval by problem."
)


class Case(NamedTuple):
    """A response with its values."""

    row: DumpRow
    advantage: float
    # Its steps before the answer; to blame is that of the largest significant loss
    label: Label
    # By all continuations, and by either half of them; the answer's step, -1 in the label, is the last
    credit_3J: np.ndarray
    # M
    steps: int
    # Those of the folder, and the references
    methods: dict[str, TokenAdvantages]


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


def case_of(row: DumpRow, samples: int | None = None) -> Case:
    """A response by its first continuations, with the references that know the advantage, the place or the kind."""
    values = row.labels["values"]
    bits_JK = np.array([list(digits[:samples]) for digits in values["right"]]) == "1"
    # Neither half is empty: bench values draws two or more, and report takes two or more of them.
    half = bits_JK.shape[1] // 2
    # Values 0.5 and 0.75 and the reward 0 give the credit 0.25 and -0.75.
    credits = [
        np.diff([*part_JK.mean(axis=1), values["reward"]])
        for part_JK in (bits_JK, bits_JK[:, :half], bits_JK[:, half:])
    ]
    step_T = np.searchsorted(values["starts"][1:], np.arange(len(row)), side="right")
    # An answered response has its answer as the last step, which methods treat by their own rules.
    steps = len(bits_JK) - values["answered"]
    step_T[step_T == steps] = -1
    kind_T = np.array([kind_of(piece) for piece in row.tokens])
    advantage_T = row.base_advantage_T.astype(float)
    blamed_step = None
    if advantage_T[0] < 0 and steps:
        blamed_step = largest_loss(credits[0][:steps], bits_JK)
    methods = token_advantages(row)
    methods[BASE] = TokenAdvantages(advantage_T)
    methods[EARLIER] = TokenAdvantages(advantage_T * np.arange(len(row), 0, -1))
    methods[KIND] = TokenAdvantages(advantage_T * (kind_T == "number"))
    label = Label(step_T, kind_T, blamed_step)
    return Case(row, advantage_T[0], label, np.array(credits), steps, methods)


def read(folder: Path) -> tuple[list[Case], Counter[str]]:
    """The responses that are used, and how many there are of each sort. ValueError: the folder cannot be used."""
    generator = np.random.default_rng(7)
    cases = []
    counts = Counter()
    for row in rows_of(folder):
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
            sort = "with advantage 0"
        elif case.steps < MIN_STEPS:
            sort = f"with fewer than {MIN_STEPS} steps"
        else:
            sort = "incorrect" if case.advantage < 0 else "correct"
            case.methods[NOISE] = TokenAdvantages(generator.normal(size=len(row)))
            cases.append(case)
        counts[sort] += 1
    if not cases:
        raise ValueError(f"{folder}: no response with values can be used; {dict(counts)}")
    return cases, counts


def tokens_of(cases: Sequence[Case]) -> pd.DataFrame:
    """A row a token, by its response and step: the credit of the step, the token's change, and each method's advantage."""
    frames = {}
    for case in cases:
        columns = {name: advantages.advantage_T for name, advantages in case.methods.items()}
        frame = pd.DataFrame(columns, index=case.label.step_T)
        # -1, the answer's step, is the last one of the credit.
        frame[TRUTH] = case.credit_3J[:, case.label.step_T].T
        frame[CHANGE] = case.row.effect_T
        frames[str(case.row.group), case.row.key, case.steps] = frame
    return pd.concat(frames, names=["problem", "response", "steps", "step"])


def jackknife_sums(*terms: pd.Series) -> np.ndarray:
    """The sums of N terms over all problems, then without each of them, (N, 1 + P), for
    :func:`bench.statistics.jackknife`."""
    sums_NP = np.array([term.groupby(level="problem").sum() for term in terms])
    total_N1 = sums_NP.sum(axis=1, keepdims=True)
    return np.hstack([total_N1, total_N1 - sums_NP])


def correlation(frame: pd.DataFrame, values: pd.Series) -> np.ndarray:
    """Of the values with the credit in the same rows, over all problems, then without each of them, (1 + P,): 0 where nothing
    differs, NaN where the square of the credit is not above its noise. Of tokens it is a cosine."""
    credit, first, second = (frame[name] for name in TRUTH)
    # The product of the halves has no noise on average; the square of the credit would.
    cross, norm, square_credit = jackknife_sums(values * credit, values**2, first * second)
    # One value a problem: of 10 over all problems and 7 without the first, the first has 3.
    square = mean_of(pd.Series(square_credit[0] - square_credit[1:]))
    if not (square.value > 0 and square.p < SIGNIFICANT):
        return np.full(len(cross), np.nan)
    # The square is above 0 without any one problem, too: if the others' sum were 0 or less,
    # Student's t would be at most 1, and p above 0.3.
    # The norm is 0 but for rounding where a method gives the same to all steps.
    return np.where(norm > 1e-12, cross / np.sqrt(np.maximum(norm * square_credit, 1e-30)), 0.0)


def within(tokens: pd.DataFrame, name: str) -> list[Estimate]:
    """Two correlations with the credit within responses: of the step means, and of the step means less those of peers,
    which are the same step of other problems' responses of as many steps."""
    # The step of the answer is -1.
    columns = tokens[[name, *TRUTH]].drop(-1, level="step", errors="ignore")
    means = columns.groupby(level=tokens.index.names).mean()
    means -= means.groupby(level="response").transform("mean")
    values = means[name]
    at_place = values.groupby(level=["steps", "step"])
    of_problem = values.groupby(level=["steps", "step", "problem"])
    counts = at_place.transform("count") - of_problem.transform("count")
    sums = at_place.transform("sum") - of_problem.transform("sum")
    # Without a peer a response is compared with itself, and adds nothing.
    beyond = (values - sums / counts).where(counts > 0, 0.0)
    return [jackknife(correlation(means, part)) for part in (values, beyond)]


def moved(tokens: pd.DataFrame, name: str) -> Estimate:
    """The share of the update's change of log-probabilities, by size, that went where a method's advantages point, of the
    tokens that have one."""
    change = tokens[CHANGE].fillna(0) * np.sign(tokens[name])
    # Changes +3, -1 and +2 under the advantages 1, 1 and 0: 3 of 4.
    along, size = jackknife_sums(change.clip(lower=0), change.abs())
    return jackknife(along / np.maximum(size, 1e-30))


def figures(cases: Sequence[Case], names: Sequence[str]) -> dict[str, Figures]:
    """The figures of these methods, by the names of the table's columns."""
    tokens = tokens_of(cases)
    uniform = correlation(tokens, tokens[BASE])
    rows = {}
    for name in names:
        row = {}
        for outcome, sign in (("incorrect", -1), ("correct", 1)):
            chosen = tokens[tokens[BASE] * sign > 0]
            row[f"within, {outcome}"], row[f"{BEYOND}, {outcome}"] = within(chosen, name)
        records = [
            record_of(case.row, case.methods[name], case.label, number)
            for number, case in enumerate(cases)
            if case.advantage < 0
        ]
        if records:
            loss_figures = figures_of(records, others_are_controls=True)
            row["AUROC, largest loss"] = loss_figures["AUROC"]
            # Estimates compare by their values; that at equal place may be NaN, which min() passes over as the last.
            row["least above a control"] = min(loss_figures[control] for control in CONTROLS)
        row[COSINE] = jackknife(correlation(tokens, tokens[name]) - uniform)
        if not any(case.row.effect_T is None for case in cases):
            row["effect"] = moved(tokens, name)
        rows[name] = row
    return rows


def verdicts(rows: Mapping[str, Figures]) -> dict[str, str]:
    """By :data:`RULE`."""
    p_values = {}
    for name, row in rows.items():
        pair = [row[f"{BEYOND}, incorrect"], row[COSINE]]
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
            judged = case_of(case.row, half)
            judged.methods[PLANTED] = TokenAdvantages(case.credit_3J[2, case.label.step_T])
            planted.append(judged)
        rows.update(figures(planted, [PLANTED]))
    tokens = tokens_of(cases)
    # The methods that every response has; case.methods would add the references.
    names = [name for name in cases[0].row.methods if tokens[name].notna().all()]
    method_rows = figures(cases, names)
    problems = len({case.row.group for case in cases})
    words = dict.fromkeys(names, FEW)
    if problems >= FEWEST:
        words = verdicts(method_rows)
    rows.update(method_rows)
    # A column without any figure, such as of credit that is not above its noise, is left out.
    columns = [column for column in rows[NOISE] if any(cell(row[column]) for row in rows.values())]
    lines = [[name, words.get(name, ""), *cells(row, columns)] for name, row in rows.items()]
    uniform = jackknife(correlation(tokens, tokens[BASE]))
    uniform_cosine = cell(uniform) or "no credit above its noise"
    losses = sum(case.label.step is not None for case in cases)
    sorts = "; ".join(f"{count} {sort}" for sort, count in counts.items())
    about = f"By values of {settings['model']}, K = {settings['samples']}, {problems} problems. {sorts}. "
    about += f"{losses} responses with a significant loss. Uniform's cosine: {uniform_cosine}."
    return "\n".join([about, "", *table(["method", "verdict", *columns], lines, right=2), "", RULE])
