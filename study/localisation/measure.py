"""Does a method's weight find the wrong step? Rankings of a response's tokens, measured against labelled steps.

Everything is measured inside a response, as an advantage is shared out inside a response, and then averaged over problems.
Each method ranks the tokens by its score, read in the direction in which its weight grows: a map that clips its weights would
only add ties. Beside the methods there are rankings that look at no model or at nothing but the policy's own column, so that a
method's figure can be compared with that of the place in the text or of the kind of token.

Intervals are percentile bootstraps over problems.

Shape suffixes: T response tokens, S steps, P problems, R resamples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from grail_advantage.view.dump.files import DumpRow
from study.statistics import auroc

RESAMPLES = 2000
LEVEL = 0.95
METRICS: dict[str, str] = {
    "token_auroc": "AUROC of the wrong step's tokens against those of the other steps",
    "number_auroc": "the same among tokens with a digit",
    "result_auroc": "the same among tokens of results: those of the wrong result against those of the others",
    "precision_at_1": "share of responses whose highest token is in the wrong step",
    "precision_at_5": "share of the five highest tokens that is in the wrong step",
    "step_auroc_mean": "AUROC of the wrong step against the others, a step counting as the mean of its tokens",
    "step_auroc_max": "the same, a step counting as its highest token",
    "step_first_mean": "share of responses whose highest step by mean is the wrong one",
    "step_first_max": "the same by highest token",
    "step_rank_mean": "rank of the wrong step by mean, 1 the highest",
    "step_rank_max": "the same by highest token",
    "weight_auroc": "token_auroc of the weights instead of the scores",
    "weight_lift": "mean weight in the wrong step over the mean weight of all steps",
}
"""The metrics in words. Of several equal values, each is as often above as below."""
SPLITS = ("all", "wrong step last", "wrong step not last")


def precision_at(values: np.ndarray, positive: np.ndarray, k: int) -> float:
    """Expected share of positives among the ``k`` highest values where ties are broken evenly; NaN without values.

    Args:
        values: (N,) finite.
        positive: (N,) bool.
        k: of fewer than ``k`` values, all are taken.
    """
    k = min(k, len(values))
    if k == 0:
        return float("nan")
    cut = np.sort(values)[-k]
    above, at = values > cut, values == cut
    return float((positive[above].sum() + positive[at].mean() * (k - above.sum())) / k)


def rank_of(values: np.ndarray, index: int) -> float:
    """Rank of one value, 1 the highest; of equal values, the mean rank."""
    others = np.delete(values, index)
    return float(1 + (others > values[index]).sum() + (others == values[index]).sum() / 2)


@dataclass(frozen=True)
class LabelledRow:
    """The measured parts of a response; masks are bool (T,)."""

    problem: str
    twin: bool
    last: bool
    """Whether the wrong step is the last one."""
    steps: Sequence[np.ndarray]
    """For each step the indices of its tokens in front of the answer."""
    wrong: int
    """Index of the wrong step, in a twin of the same one."""
    number_T: np.ndarray
    result_T: np.ndarray
    wrong_result_T: np.ndarray
    rankings: Mapping[str, np.ndarray]
    """(T,) by name; NaN where there is no value."""
    weights: Mapping[str, np.ndarray]


def labelled_row(row: DumpRow, seed: int = 0) -> LabelledRow | None:
    """A row of a dump with its labels; ``None`` where it has no wrong step in front of its answer, or no other step."""
    twin = "step_before_edit" in row.labels
    label = row.labels.get("step_before_edit" if twin else "wrong_step")
    ranges = row.labels.get("steps")
    if label is None or not ranges:
        return None
    length = len(row)
    end = row.span.start if row.span is not None else length
    steps: list[np.ndarray] = []
    wrong = None
    for first, past in ranges:
        tokens = np.arange(first, min(past, end))
        if len(tokens) and [first, past] == list(label):
            wrong = len(steps)
        if len(tokens):
            steps.append(tokens)
    if wrong is None or len(steps) < 2:
        return None

    def inside(places: Sequence[Sequence[int]]) -> np.ndarray:
        mask_T: np.ndarray = np.zeros(length, dtype=bool)
        for first, past in places:
            mask_T[first : min(past, end)] = True
        return mask_T

    result_T = inside(row.labels.get("results", ()))
    changed = row.labels.get("result_before_edit" if twin else "wrong_result", label)
    number_T = np.array([any(character.isdigit() for character in token) for token in row.tokens], dtype=bool)
    index_T: np.ndarray = np.arange(length, dtype=float)
    rankings = {
        "random": np.random.default_rng([seed, row.row]).random(length),
        "earlier token": -index_T,
        "later token": index_T,
        "number token": number_T.astype(float),
    }
    # Columns that cost nothing are rankings even where no method uses them.
    if row.old_log_prob_T is not None and "surprisal" not in row.methods:
        rankings["surprisal"] = -row.old_log_prob_T.astype(float)
    if row.entropy_T is not None and "entropy" not in row.methods:
        rankings["entropy"] = row.entropy_T.astype(float)
    return LabelledRow(
        problem=row.id or row.key,
        twin=twin,
        last=wrong == len(steps) - 1,
        steps=steps,
        wrong=wrong,
        number_T=number_T,
        result_T=result_T,
        wrong_result_T=inside([changed]) & result_T,
        rankings={
            **rankings,
            **{
                name: method.score_T.astype(float) for name, method in row.methods.items() if method.score_T is not None
            },
        },
        weights={name: method.weight_T.astype(float) for name, method in row.methods.items()},
    )


def directions(rows: Sequence[LabelledRow]) -> dict[str, int]:
    """1 for a method whose weights grow with its scores, -1 for one where they fall; over all rows."""
    covariances: dict[str, float] = {}
    for row in rows:
        for name, weight_T in row.weights.items():
            if name not in row.rankings:
                continue
            tokens = np.concatenate(row.steps)
            score, weight = row.rankings[name][tokens], weight_T[tokens]
            if np.isfinite(score).all():
                rank = np.argsort(np.argsort(score)).astype(float)
                covariances[name] = covariances.get(name, 0.0) + float(
                    ((rank - rank.mean()) * (weight - weight.mean())).sum()
                )
    return {name: -1 if sign < 0 else 1 for name, sign in covariances.items()}


def row_metrics(row: LabelledRow, values_T: np.ndarray, weight_T: np.ndarray | None = None) -> dict[str, float]:
    """The figures of one ranking of one response; NaN for those that it has no tokens for.

    Args:
        row: the response.
        values_T: the ranking, finite in the steps.
        weight_T: the method's weights.
    """
    tokens = np.concatenate(row.steps)
    in_wrong = np.isin(tokens, row.steps[row.wrong])
    values = values_T[tokens]

    numbers, results = row.number_T[tokens], row.result_T[tokens]
    metrics = {
        "token_auroc": auroc(values, in_wrong),
        "number_auroc": auroc(values[numbers], in_wrong[numbers]),
        "result_auroc": auroc(values[results], row.wrong_result_T[tokens][results]),
        "precision_at_1": precision_at(values, in_wrong, 1),
        "precision_at_5": precision_at(values, in_wrong, 5),
    }
    is_wrong_S = np.arange(len(row.steps)) == row.wrong
    for pooling, pool in (("mean", np.mean), ("max", np.max)):
        pooled_S = np.array([pool(values_T[step]) for step in row.steps])
        metrics[f"step_auroc_{pooling}"] = auroc(pooled_S, is_wrong_S)
        metrics[f"step_first_{pooling}"] = precision_at(pooled_S, is_wrong_S, 1)
        metrics[f"step_rank_{pooling}"] = rank_of(pooled_S, row.wrong)
    if weight_T is not None:
        weight = weight_T[tokens]
        metrics["weight_auroc"] = auroc(weight, in_wrong)
        metrics["weight_lift"] = float(weight[in_wrong].mean() / weight.mean()) if weight.mean() > 0 else float("nan")
    return {name: metrics.get(name, float("nan")) for name in METRICS}


@dataclass(frozen=True)
class Figure:
    """A mean over problems."""

    value: float
    low: float
    high: float
    problems: int
    """Those that have a value."""


@dataclass(frozen=True)
class Localisation:
    """The result."""

    figures: Mapping[tuple[str, str, str, str], Figure]
    """By ranking, split, metric and kind: ``wrong`` the solutions with the wrong step, ``twin`` the right ones that they were
    made of, ``difference`` the first less the second, problem by problem."""
    rankings: Sequence[str]
    problems: int
    steps: float
    """Mean number of steps."""
    tokens: float
    """Mean number of tokens in the steps."""
    last: int
    """Problems whose wrong step is the last one."""
    directions: Mapping[str, int]
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Rows that are not measured, by reason."""
    per_problem: Sequence[tuple[str, bool, bool, str, Mapping[str, float]]] = ()
    """Problem, whether of the twin, whether the wrong step is last, ranking, figures."""

    def get(self, ranking: str, metric: str, split: str = "all", kind: str = "wrong") -> Figure | None:
        """One figure, where there is one."""
        return self.figures.get((ranking, split, metric, kind))


def _measurable(dump: Sequence[DumpRow], seed: int) -> tuple[list[LabelledRow], Counter[str]]:
    """The rows that all rankings rank, twins with their solutions; and the number of others by reason."""
    left_out: Counter[str] = Counter()
    rows: list[LabelledRow] = []
    names = {name for row in dump for name in row.methods}
    for entry in dump:
        row = labelled_row(entry, seed)
        if row is None:
            left_out["no wrong step in front of the answer, or no other step"] += 1
            continue
        values, tokens = row.rankings, np.concatenate(row.steps)
        silent = sorted(name for name in names if name not in values or not np.isfinite(values[name][tokens]).all())
        if silent:
            left_out[f"no scores by {', '.join(silent)}"] += 1
        else:
            rows.append(row)
    whole = {row.problem for row in rows if not row.twin}
    if alone := sum(row.problem not in whole for row in rows):
        left_out["twin of a solution that is left out"] += alone
    rows = [row for row in rows if row.problem in whole]
    if not rows:
        raise ValueError(f"no solution can be measured: {'; '.join(f'{n} {reason}' for reason, n in left_out.items())}")
    return rows, left_out


def localise(dump: Sequence[DumpRow], seed: int = 0, resamples: int = RESAMPLES) -> Localisation:
    """Measure every ranking on the rows that all of them rank.

    Args:
        dump: rows with labels.
        seed: of the random ranking and of the resampling.
        resamples: of the bootstrap.

    Raises:
        ValueError: no row can be measured.
    """
    rows, left_out = _measurable(dump, seed)
    signs = directions(rows)
    rankings = list(rows[0].rankings)
    per_problem = [
        (row.problem, row.twin, row.last, name, row_metrics(row, values_T * signs.get(name, 1), row.weights.get(name)))
        for row in rows
        for name, values_T in row.rankings.items()
    ]
    edited = [row for row in rows if not row.twin]
    problems = [row.problem for row in edited]
    last_P = np.array([row.last for row in edited])
    # The same resamples for everything, so that differences are of the same problems.
    chosen = {"all": np.ones(len(edited), dtype=bool), "wrong step last": last_P, "wrong step not last": ~last_P}
    figures: dict[tuple[str, str, str, str], Figure] = {}
    place = {problem: index for index, problem in enumerate(problems)}
    for name in rankings:
        values = {kind: np.full((len(problems), len(METRICS)), np.nan) for kind in ("wrong", "twin")}
        for problem, twin, _, ranking, measured in per_problem:
            if ranking == name:
                values["twin" if twin else "wrong"][place[problem]] = [measured[metric] for metric in METRICS]
        values["difference"] = values["wrong"] - values["twin"]
        for split, chosen_P in chosen.items():
            for kind, values_PM in values.items():
                for metric, figure in zip(METRICS, _figures(values_PM[chosen_P], seed, resamples), strict=True):
                    if figure.problems:
                        figures[name, split, metric, kind] = figure
    return Localisation(
        figures=figures,
        rankings=rankings,
        problems=len(problems),
        steps=float(np.mean([len(row.steps) for row in edited])),
        tokens=float(np.mean([sum(map(len, row.steps)) for row in edited])),
        last=int(last_P.sum()),
        directions=signs,
        left_out=left_out,
        per_problem=per_problem,
    )


def _figures(values_PM: np.ndarray, seed: int, resamples: int) -> list[Figure]:
    """Of every metric the mean over the problems that have it, and its interval over resamples of the problems."""
    problems, known_PM = len(values_PM), np.isfinite(values_PM)
    if not problems:
        return [Figure(float("nan"), float("nan"), float("nan"), 0)] * values_PM.shape[1]
    counts_RP = np.random.default_rng(seed).multinomial(problems, np.full(problems, 1 / problems), size=resamples)
    with np.errstate(invalid="ignore"):
        means_RM = (counts_RP @ np.where(known_PM, values_PM, 0.0)) / (counts_RP @ known_PM.astype(float))
    tail, figures = (1 - LEVEL) / 2, []
    for values_P, known_P, means_R in zip(values_PM.T, known_PM.T, means_RM.T, strict=True):
        finite = means_R[np.isfinite(means_R)]
        low, high = (float(np.quantile(finite, at)) if len(finite) else np.nan for at in (tail, 1 - tail))
        mean = float(values_P[known_P].mean()) if known_P.any() else np.nan
        figures.append(Figure(mean, low, high, int(known_P.sum())))
    return figures
