"""Metrics of the scores' ground truth: by hand, and ties against the mean over every order of the tied tokens."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from grail_advantage import GrailConfig, OarConfig, compute_token_weights
from recipe.tiny.model import build_model, build_tokenizer
from study.saliency_truth import (
    BASELINES,
    METHODS,
    METRICS,
    Example,
    auroc,
    average_ranks,
    example_metrics,
    lift,
    measure,
    precision_at,
    reciprocal_rank,
    spearman,
    step_found,
    wrong_step,
)

GRAIL_METHODS = {"official": ("GRAIL, official", GrailConfig("official")), "robust": ("GRAIL", GrailConfig("robust"))}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return build_model(tokenizer, seed=3).eval()


def an_example(tokenizer: PreTrainedTokenizerFast, prompt: str, response: str, wrong: str) -> Example:
    """Characters are tokens here: ``wrong`` marks wrong tokens with ``x`` below a response without words."""
    response_ids = tokenizer.encode(response, add_special_tokens=False)
    steps, start = [], 0
    for step in response.split("\\")[0].split(";")[:-1]:
        steps.append((start, start + len(step) + 1))
        start += len(step) + 1
    return Example(
        prompt_ids=tokenizer.encode(prompt, add_special_tokens=False),
        response_ids=[*response_ids, tokenizer.eos_token_id],
        error_tokens=frozenset(index for index, mark in enumerate(wrong) if mark == "x"),
        steps=tuple(steps),
    )


@pytest.fixture(scope="module")
def examples(tokenizer: PreTrainedTokenizerFast) -> list[Example]:
    return [
        an_example(tokenizer, "7+5-3", "7+5=11;11-3=8;\\boxed{8}", "    xx"),
        an_example(tokenizer, "1+1+1+1", "1+1=2;2+1=4;4+1=5;\\boxed{5}", "          x"),
        an_example(tokenizer, "9-2-4", "9-2=7;7-4=1;\\boxed{1}", "          x"),
    ]


# Metrics

SCORES = np.array([0.9, 0.1, 0.5, 0.7, 0.3, 0.2])
TRUE = np.array([False, False, True, True, False, False])


def _orders(scores: np.ndarray) -> list[np.ndarray]:
    """Every ranking, best first, that sorts the scores, by trying all permutations."""
    return [np.array(order) for order in itertools.permutations(range(len(scores))) if _sorted(scores[list(order)])]


def _sorted(values: np.ndarray) -> bool:
    return bool((np.diff(values) <= 0).all())


def test_ranking_metrics_by_hand() -> None:
    # Order of the tokens: 0, then 3 (true), then 2 (true), then 4, 5, 1.
    assert [precision_at(SCORES, TRUE, k) for k in (1, 2, 3, 5, 6)] == pytest.approx([0, 1 / 2, 2 / 3, 2 / 5, 2 / 6])
    assert precision_at(SCORES, TRUE, 50) == pytest.approx(2 / 6)
    assert reciprocal_rank(SCORES, TRUE) == pytest.approx(1 / 2)
    # Both true tokens are above three of the four innocent ones.
    assert auroc(SCORES, TRUE) == pytest.approx(6 / 8)


@pytest.mark.parametrize(
    "scores",
    [[0.0] * 6, [1.0, 1, 0, 0, 1, 0], [2.0, 1, 1, 1, 1, 0], [0.0, 0, 1, 1, 1, 2], [3.0, 2, 3, 1, 2, 2]],
)
def test_ties_count_with_the_mean_over_every_order(scores: list[float]) -> None:
    values = np.array(scores)
    orders = _orders(values)
    for k in range(1, 7):
        assert precision_at(values, TRUE, k) == pytest.approx(np.mean([TRUE[order[:k]].mean() for order in orders]))
    assert reciprocal_rank(values, TRUE) == pytest.approx(
        np.mean([1 / (1 + np.flatnonzero(TRUE[order])[0]) for order in orders])
    )
    above = [
        np.mean([np.flatnonzero(order == t) < np.flatnonzero(order == f) for t in (2, 3) for f in (0, 1, 4, 5)])
        for order in orders
    ]
    assert auroc(values, TRUE) == pytest.approx(np.mean(above))


def test_step_found_by_mean_score_with_ties_shared() -> None:
    scores = np.array([1.0, 3.0, 4.0, 1.0, 9.0, 2.5, 2.5])  # means 2, 2.5 and 2.5; token 4 is in no step
    steps = [(0, 2), (2, 4), (5, 7)]
    assert [step_found(scores, steps, step) for step in steps] == [0.0, 0.5, 0.5]
    scores[5] = 2.4
    assert [step_found(scores, steps, step) for step in steps] == [0.0, 1.0, 0.0]


def test_lift_by_hand() -> None:
    weights = np.array([0.5, 0.5, 2.0, 1.0, 1.0])
    assert lift(weights, 2, 4) == pytest.approx((3 / 5) / (2 / 5))
    assert lift(np.ones(7), 1, 4) == pytest.approx(1)
    assert lift(np.zeros(7), 1, 4) is None


def test_spearman_by_hand() -> None:
    assert average_ranks(np.array([5.0, 1, 5, 0, 5])).tolist() == [4, 2, 4, 1, 4]
    # Without ties, 1 - 6 sum(d^2) / (n (n^2 - 1)): ranks 1 2 3 4 5 and 2 1 4 3 5 differ by 1 four times.
    assert spearman(np.arange(5.0), np.array([10.0, -1, 33, 32, 1e6])) == pytest.approx(1 - 6 * 4 / (5 * 24))
    assert spearman(np.array([1.0, 2, 3]), np.array([9.0, 4, -2])) == pytest.approx(-1)
    # With ties, Pearson's correlation of ranks (1.5 1.5 3) and (1 2 3).
    assert spearman(np.array([0.0, 0, 1]), np.arange(3.0)) == pytest.approx(np.corrcoef([1.5, 1.5, 3], [1, 2, 3])[0, 1])
    assert spearman(np.ones(4), np.arange(4.0)) is None


def test_wrong_step_holds_the_first_wrong_token() -> None:
    steps = ((0, 4), (6, 9), (9, 12))
    assert wrong_step(Example([1], [1] * 12, frozenset({8, 10}), steps)) == (6, 9)
    assert wrong_step(Example([1], [1] * 12, frozenset({5}), steps)) is None


def test_metrics_that_an_example_does_not_have_are_none() -> None:
    found = example_metrics(SCORES, np.ones(6), Example([1], [1] * 9, frozenset({2, 3})))
    assert {name for name, value in found.items() if value is None} == {"step_found", "lift", "spearman"}
    assert list(found) == list(METRICS)


# Models


def test_scores_are_those_of_compute_token_weights(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, examples: list[Example]
) -> None:
    """One unpadded row at a time, reasoning found by the text, figures by the functions tested above."""
    result = measure(model, tokenizer, examples, methods=GRAIL_METHODS)
    for name, (_, config) in GRAIL_METHODS.items():
        expected = []
        for example in examples:
            ids = torch.tensor([[*example.prompt_ids, *example.response_ids]])
            response = torch.arange(ids.shape[1])[None] >= len(example.prompt_ids)
            found = compute_token_weights(
                model, tokenizer, ids, torch.ones_like(ids), response, torch.tensor([-1.0]), config
            )
            reasoning = tokenizer.decode(example.response_ids).index("\\boxed")
            rows = (
                values[0, len(example.prompt_ids) :][:reasoning].double().numpy()
                for values in (found.scores, found.weights)
            )
            expected.append(example_metrics(*rows, example))
        for metric, figure in result["methods"][name]["metrics"].items():
            if metric == "spearman":
                assert figure is None  # OAR-P is not among the methods
            else:
                assert figure["value"] == pytest.approx(np.mean([row[metric] for row in expected]), rel=1e-5), metric
                assert figure["low"] <= figure["value"] <= figure["high"]
                assert figure["responses"] == 3


def test_baselines_by_hand(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, examples: list[Example]) -> None:
    result = measure(model, tokenizer, examples, methods={})
    random, position, surprisal = (result["methods"][name]["metrics"] for name in BASELINES)
    reasoning, true = [14, 18, 12], [2, 1, 1]
    assert random["auroc"]["value"] == 0.5
    assert random["lift"]["value"] == pytest.approx(1)
    assert random["precision_at_true"]["value"] == pytest.approx(np.mean(np.divide(true, reasoning)))
    assert random["step_found"]["value"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 3)
    assert random["spearman"] is None
    # Tokens behind the last true one: 8, 7 and 1.
    assert position["reciprocal_rank"]["value"] == pytest.approx((1 / 9 + 1 / 8 + 1 / 2) / 3)
    assert position["precision_at_3"]["value"] == pytest.approx(1 / 9)
    assert position["step_found"]["value"] == pytest.approx(1 / 3)
    minus = result["methods"]["position"]["minus"]["random"]["auroc"]
    assert minus["value"] == pytest.approx(position["auroc"]["value"] - 0.5)

    rows = []
    for example in examples:
        ids = torch.tensor([[*example.prompt_ids, *example.response_ids]])
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        scores = losses[len(example.prompt_ids) - 1 :][
            : tokenizer.decode(example.response_ids).index("\\boxed")
        ].numpy()
        rows.append(example_metrics(scores, np.ones(len(scores)), example)["auroc"])
    assert surprisal["auroc"]["value"] == pytest.approx(np.mean(rows))
    assert result["reasoning_tokens"] == pytest.approx(np.mean(reasoning))
    assert result["true_tokens"] == pytest.approx(np.mean(true))


def test_surprisal_finds_the_slip_of_a_model_that_knows_better(
    tokenizer: PreTrainedTokenizerFast, examples: list[Example]
) -> None:
    """A model trained on the right text of the same length finds the changed digits unlikely."""
    model = build_model(tokenizer, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    right = torch.tensor([tokenizer.encode("9-2-4" + "9-2=7;7-4=3;\\boxed{3}", add_special_tokens=False)])
    for _ in range(40):
        loss = model(input_ids=right, labels=right).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    result = measure(model, tokenizer, examples[2:], methods={})
    figure = result["methods"]["surprisal"]["metrics"]["precision_at_1"]
    assert figure == {"value": 1.0, "low": None, "high": None, "responses": 1}
    assert model.training  # left as it was


def test_examples_that_cannot_be_judged_are_left_out_and_counted(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, examples: list[Example]
) -> None:
    unusable = [
        an_example(tokenizer, "1+1", "1+1=3;", "    x"),
        an_example(tokenizer, "1+1", "1+1=2;\\boxed{3}", " " * 9 + "x"),
        an_example(tokenizer, "1+1", "1+1=2;\\boxed{3}", ""),
        an_example(tokenizer, "1+1", "3\\boxed{3}", "x"),
    ]
    alone = measure(model, tokenizer, examples, methods=GRAIL_METHODS)
    mixed = measure(model, tokenizer, [unusable[0], examples[0], *unusable[1:], *examples[1:]], methods=GRAIL_METHODS)
    assert mixed["left_out"] == {"no answer": 1, "no true token before the answer": 2, "only true tokens": 1}
    assert (mixed["examples"], mixed["used"]) == (7, 3)
    for name in alone["methods"]:
        for metric, figure in alone["methods"][name]["metrics"].items():
            assert mixed["methods"][name]["metrics"][metric] == (
                None if figure is None else pytest.approx(figure, rel=1e-5)
            )
    with pytest.raises(ValueError, match="none of 4 examples"):
        measure(model, tokenizer, unusable, methods=GRAIL_METHODS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"error_tokens": frozenset({9})}, r"examples\[0\].error_tokens has 9"),
        ({"steps": ((3, 3),)}, r"steps has \(3, 3\)"),
    ],
)
def test_indices_outside_the_response_are_refused(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, changes: dict[str, Any], message: str
) -> None:
    values = {"prompt_ids": [1], "response_ids": [1] * 9, "error_tokens": frozenset({1})} | changes
    with pytest.raises(ValueError, match=message):
        measure(model, tokenizer, [Example(**values)], methods={})


def test_a_response_with_scores_that_are_not_finite_is_counted_out(
    tokenizer: PreTrainedTokenizerFast, examples: list[Example]
) -> None:
    broken = build_model(tokenizer, seed=3).eval()
    letter = tokenizer.encode("9", add_special_tokens=False)[0]
    with torch.no_grad():
        broken.model.embed_tokens.weight[letter] = math.inf
    result = measure(broken, tokenizer, examples, methods={"robust": GRAIL_METHODS["robust"]})
    assert result["methods"]["robust"]["responses"] == 2
    assert result["methods"]["surprisal"]["responses"] == 2
    assert result["methods"]["random"]["responses"] == 3
    assert result["methods"]["robust"]["minus"]["random"]["auroc"]["responses"] == 2


def test_every_method_scores_and_oar_p_agrees_with_itself(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, examples: list[Example]
) -> None:
    result = json.loads(json.dumps(measure(model, tokenizer, examples), allow_nan=False))
    assert list(result["methods"]) == [*METHODS, *BASELINES]
    for name, method in result["methods"].items():
        assert method["responses"] == 3, name
        assert set(method["metrics"]) == set(METRICS)
        assert method["baseline"] == (name in BASELINES)
    assert result["methods"]["oar_p"]["metrics"]["spearman"]["value"] == pytest.approx(1)
    assert abs(result["methods"]["grail_robust"]["metrics"]["spearman"]["value"]) < 1
    assert any(isinstance(config, OarConfig) for _, config in METHODS.values())
