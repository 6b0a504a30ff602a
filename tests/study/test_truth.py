"""Ground truth on responses written by hand, with scores made up: what is taken, how it is split, and every figure."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from grail_advantage import GrailConfig, compute_token_weights
from recipe.tiny.model import build_model
from recipe.tiny.sampling import prompt_ids
from study.arms import ARMS
from study.rollouts import as_rollouts
from study.task import RESULT, StudyProblem, study_tokenizer
from study.truth import Row, row_figures, rows_of, scores_and_weights

TOKENIZER = study_tokenizer()
PROBLEM = StudyProblem("7+5-3+1", 7, (("+", 5), ("-", 3), ("+", 1)), (None, None, None))
PROMPT = prompt_ids(TOKENIZER, PROBLEM)
RIGHT = "7+5=12;12-3=9;(1+1=3)9+1=10;ok \\boxed{10}"
FIRST = "7+5=13;13-3=10;10+1=11;\\boxed{11}"
MIDDLE = "7+5=12;so 12-3=8;(2+2=4)8+1=9;\\boxed{9}"
LAST = "7+5=12;12-3=9;9+1=11;\\boxed{11}"


def rows(*texts: str) -> list[Row]:
    responses = [TOKENIZER.encode(text) for text in texts]
    return rows_of(TOKENIZER, [PROBLEM] * len(texts), [PROMPT] * len(texts), responses, 10)


def test_only_responses_with_one_wrong_result_or_none_are_taken() -> None:
    taken = rows(
        RIGHT,
        FIRST,
        "7+5=13;13-3=11;11+1=12;\\boxed{12}",  # two
        "7+5=12;12-3=9;9+1=10;\\boxed{9}",  # the answer itself
        "7+5=12;13-3=10;10+1=11;\\boxed{11}",  # a left side
        "7+5=13;13-3=10;",  # no answer
        "\\boxed{10}",  # no step
    )
    assert [TOKENIZER.decode(row.response) for row in taken] == [FIRST, RIGHT], "wrong ones first"
    assert [row.right for row in taken] == [False, True]
    assert [TOKENIZER.decode(row.response[: row.reasoning]) for row in taken] == [
        "7+5=13;13-3=10;10+1=11;",
        "7+5=12;12-3=9;(1+1=3)9+1=10;ok ",
    ]
    assert len(rows_of(TOKENIZER, [PROBLEM] * 3, [PROMPT] * 3, [TOKENIZER.encode(FIRST)] * 3, 2)) == 2


def test_figures_of_a_wrong_response_by_hand() -> None:
    (row,) = rows(MIDDLE)
    tokens = [TOKENIZER.decode([token]) for token in row.response[: row.reasoning]]
    wrong = tokens.index("8")
    assert row.read.error_T[: row.reasoning].nonzero()[0].tolist() == [wrong]
    results = np.flatnonzero(row.read.role_T[: row.reasoning] == RESULT)
    assert [tokens[place] for place in results] == ["1", "2", "8", "9"]
    scores = np.zeros(len(row.response))
    scores[results] = [4.0, 1.0, 3.0, 3.0]
    weights = np.where(np.arange(len(scores)) == wrong, 2.0, 1.0)
    advantage = np.zeros(len(scores))
    advantage[wrong] = -0.5
    found = row_figures(row, scores, weights, advantage)
    # Of the 3 other results one is higher, one level, one lower; of the other tokens all are lower but for these two.
    assert found["auroc_results", "middle"] == found["auroc_results", "all"] == 1.5 / 3
    assert found["auroc_all", "not_last"] == (row.reasoning - 1 - 1.5) / (row.reasoning - 1)
    assert ("auroc_all", "last") not in found
    assert found["weight_ratio", "all"] == 2 / (5 / 4)
    picked = (np.arange(len(scores)) == wrong).astype(float)
    assert math.isnan(row_figures(row, scores, picked, advantage)["weight_ratio", "all"]), "a hard selection"
    # The wrong token has the only advantage; by average ranks it is 1 among equals.
    ranks = np.argsort(np.argsort(scores[: row.reasoning], kind="stable"))
    assert found["rank_correlation", "wrong"] > 0 and ranks[wrong] > 10
    # Steps against filler and the aside: of 18 decisive tokens 4 are above 0, the aside's 7 and filler's 2 have 0.
    decisive = row.read.decisive_T[: row.reasoning]
    assert found["relevance", "wrong"] == pytest.approx((4 + (decisive.sum() - 4) / 2) / decisive.sum())


def test_a_right_response_has_relevance_and_rank_correlation_alone() -> None:
    (row,) = rows(RIGHT)
    scores = np.arange(len(row.response), dtype=float)
    found = row_figures(row, scores, np.ones(len(scores)), scores)
    assert set(found) == {("relevance", "right"), ("rank_correlation", "right")}
    assert found["rank_correlation", "right"] == pytest.approx(1)
    # In wrong rows the sign is turned: what lowers the chance is what should be scored high.
    (wrong,) = rows(FIRST)
    scores = np.arange(len(wrong.response), dtype=float)
    assert row_figures(wrong, scores, None, scores)["rank_correlation", "wrong"] == pytest.approx(-1)
    assert row_figures(wrong, np.full(len(scores), math.nan), None, scores) == {}


def test_scores_are_those_of_the_method_and_right_rows_have_them_too() -> None:
    model = build_model(TOKENIZER, 0).eval()
    taken = rows(FIRST, LAST, RIGHT)
    found = scores_and_weights(model, TOKENIZER, taken, ARMS["grail"].signal)
    batch = as_rollouts(TOKENIZER, [PROBLEM] * 3, [PROMPT] * 3, [row.response for row in taken], 3)
    sides = torch.tensor([-1.0, -1.0, 1.0])
    plain = compute_token_weights(
        model, TOKENIZER, batch.input_ids_BL, batch.attention_mask_BL, batch.response_mask_BL, sides, GrailConfig()
    )
    for index in range(3):
        inside = batch.response_mask_BL[index].bool()
        if index < 2:
            np.testing.assert_allclose(found[index][0], plain.scores[index, inside].double().numpy(), rtol=1e-4)
            np.testing.assert_allclose(found[index][1], plain.weights[index, inside].double().numpy(), rtol=1e-4)
        else:
            assert plain.scores[index].isnan().all() and np.isfinite(found[index][0]).all()
