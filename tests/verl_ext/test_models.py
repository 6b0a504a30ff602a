"""Architectures that people train: scores and weights of the plain function against plain autograd. In verl's engine they are
in ``test_passes.py``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import verl  # noqa: F401  its plugin registers the estimators
from transformers import PreTrainedModel

from grail_advantage import Grail, compute_token_weights
from tests.core import reference
from tests.core.tiny_models import ROLLOUTS, char_tokenizer, encode, id_to_character, make_batch
from tests.verl_ext.ranks import ARCHITECTURES

BATCH = [ROLLOUTS[name] for name in ("text after the box", "box at the end", "several boxes", "right")]
PRESETS: dict[str, dict[str, Any]] = {
    "grail": {"preset": "official", "gate": "all"},
    "grail, middle": {"preset": "robust", "gate": "all", "leaf": "middle"},
}
SIGNALS = {name: Grail(**options) for name, options in PRESETS.items()}
Values = list[list[float]]


@cache
def model_of(name: str) -> PreTrainedModel:
    return ARCHITECTURES[name].build().eval()


@cache
def plainly(name: str, signal: str) -> tuple[Values, Values]:
    """Scores and weights of each response by autograd alone in float64, one at a time and without padding."""
    scores, weights = [], []
    for rollout in BATCH:
        ids, start = encode(rollout.prompt) + encode(rollout.response), len(encode(rollout.prompt))
        mask = [int(place >= start) for place in range(len(ids))]
        row = ([ids], [[1] * len(ids)], [mask], [rollout.advantage], reference.resolve(**PRESETS[signal]))
        found = reference.reference_weights(reference.PlainModel(model_of(name)), id_to_character(), *row)
        scores.append(found.scores[0][start:])
        weights.append(found.weights[0][start:])
    return scores, weights


def _close(found: Sequence[torch.Tensor], expected: Values) -> None:
    """By the largest expected value of each response; after the last of ``found`` there is 0, or NaN as there are none."""
    for of_row, values in zip(found, expected, strict=True):
        expected_T, rest_T = torch.tensor(values).split([len(of_row), len(values) - len(of_row)])
        assert not rest_T.nan_to_num().any()
        most = float(expected_T.nan_to_num().abs().max())
        torch.testing.assert_close(of_row, expected_T, rtol=0, atol=1e-4 * most, equal_nan=True)


@pytest.mark.parametrize(("signal", "padding"), zip(SIGNALS, ("left", "both"), strict=True))
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_and_weights_are_those_of_plain_autograd(name: str, signal: str, padding: str) -> None:
    batch = make_batch(BATCH, padding)
    found = compute_token_weights(model_of(name), char_tokenizer(), *batch.tensors(), SIGNALS[signal])
    scores, weights = plainly(name, signal)
    for values_BL, expected in ((found.scores, scores), (found.weights, weights)):
        _close([of[mask] for of, mask in zip(values_BL, batch.response_mask.bool(), strict=True)], expected)
    assert any(len(set(of_row)) > 3 for of_row in weights), "no weights to compare"
