"""Labelled solutions, and how well rankings of tokens find the wrong step. Figures were worked out by hand."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from grail_advantage.answers.span import AnswerSpan
from grail_advantage.view.dump.files import DumpRow, MethodColumns
from study.localisation.measure import (
    METRICS,
    localise,
    precision_at,
    rank_of,
)


def test_ties_are_broken_evenly():
    """The figures are the means over all orders of equal values."""
    values, positive = np.array([2.0, 1.0, 1.0, 1.0, 0.0]), np.array([False, True, True, False, True])
    orders = [np.array(order) for order in permutations(range(5))]
    for k in range(1, 6):
        found = [positive[sorted(order, key=lambda i: -values[i])[:k]].mean() for order in orders]
        assert precision_at(values, positive, k) == pytest.approx(np.mean(found))
    for index in range(5):
        ranks = [sorted(order, key=lambda i: -values[i]).index(index) + 1 for order in orders]
        assert rank_of(values, index) == pytest.approx(np.mean(ranks))


STEPS = ["a 1 ", "b 2 ", "c 3 "]
SPAN = AnswerSpan(6, 7, 8, 9)


def row(scores: list[float], *, place: int = 0, twin: bool = False, weights: list[float] | None = None) -> DumpRow:
    """Three steps of two tokens each, the second one wrong; a letter and the result, then the answer."""
    tokens = ["a", " 1", "b", " 2", "c", " 3", "\\boxed{", "3", "}"]
    length = len(tokens)
    score_T = np.array([*scores, np.nan, np.nan, np.nan], dtype=np.float32)
    weight_T = np.array([*(weights or scores), 1, 1, 1], dtype=np.float32)
    suffix = "_before_edit" if twin else ""
    labels = {
        "steps": [[0, 2], [2, 4], [4, 6]],
        "results": [[1, 2], [3, 4], [5, 6]],
        ("step" if twin else "wrong_step") + suffix: [2, 4],
        ("result" if twin else "wrong_result") + suffix: [3, 4],
    }
    return DumpRow(
        step=0,
        row=place,
        key=str(place // 2),
        group=place // 2,
        id=str(place // 2),
        response="".join(tokens),
        span=SPAN,
        prompt_ids=np.array([1]),
        token_ids_T=np.arange(length),
        tokens=tokens,
        mask_T=np.ones(length, dtype=bool),
        weight_T=weight_T,
        old_log_prob_T=np.zeros(length, dtype=np.float32),
        entropy_T=np.zeros(length, dtype=np.float32),
        methods={"m": MethodColumns(score_T=score_T, weight_T=weight_T)},
        labels=labels,
    )


def test_figures_of_one_solution_by_hand():
    found = localise([row([1.0, 4.0, 3.0, 5.0, 2.0, 6.0])], resamples=10)
    expected = {
        "token_auroc": (2 + 3) / 8,  # 3 is above 1 and 2; 5 above 1, 4 and 2
        "number_auroc": 1 / 2,  # 5 against 4 and 6
        "result_auroc": 1 / 2,
        "precision_at_1": 0.0,
        "precision_at_5": 2 / 5,  # 6 5 4 3 2
        "step_auroc_mean": 1 / 4 + 1 / 2,  # 4 against 2.5 and 4
        "step_auroc_max": 1 / 2,  # 5 against 4 and 6
        "step_first_mean": 1 / 2,
        "step_first_max": 0.0,
        "step_rank_mean": 1.5,
        "step_rank_max": 2.0,
        "weight_auroc": 5 / 8,
        "weight_lift": 4 / 3.5,
    }
    assert expected.keys() == METRICS.keys()
    for metric, value in expected.items():
        figure = found.get("m", metric)
        assert (figure.value, figure.low, figure.high, figure.problems) == pytest.approx((value, value, value, 1)), (
            metric
        )
    assert found.get("earlier token", "token_auroc").value == 0.5
    assert found.get("number token", "token_auroc").value == 0.5
    assert found.get("surprisal", "token_auroc").value == 0.5  # all equal
    assert (found.problems, found.last, found.steps, found.tokens) == (1, 0, 3, 6)


def test_twins_show_what_is_due_to_the_error():
    rows = [
        row([1, 1, 2, 2, 1, 1], place=0),
        row([1, 1, 1, 1, 1, 1], place=1, twin=True),
        row([3, 3, 1, 1, 1, 1], place=2),
        row([3, 3, 1, 1, 1, 1], place=3, twin=True),
    ]
    found = localise(rows, resamples=400)
    values = {kind: found.get("m", "token_auroc", kind=kind) for kind in ("wrong", "twin", "difference")}
    assert [values[kind].value for kind in values] == pytest.approx([(1 + 0.25) / 2, (0.5 + 0.25) / 2, 0.25])
    # Resamples hold the first problem, both, or the second.
    assert (values["difference"].low, values["difference"].high) == (0.0, 0.5)
