"""Architectures that people train: scores and weights of the plain function against plain autograd. In verl's engine they are
in ``test_passes.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import verl  # noqa: F401  its plugin registers the estimators

from grail_advantage import Grail, compute_token_weights
from tests.core import reference
from tests.core.tiny_models import ROLLOUTS, char_tokenizer, encode, id_to_character, make_batch
from tests.verl_ext.ranks import ARCHITECTURES

BATCH = [
    ROLLOUTS[name] for name in ("text after the box", "box at the end", "several boxes", "right")
]
OPTIONS: dict[str, dict[str, Any]] = {
    "left": {"preset": "official", "gate": "all"},
    "both": {"preset": "robust", "gate": "all", "leaf": "middle"},
}
"""By the side of the padding."""


@pytest.mark.parametrize("padding", OPTIONS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_and_weights_are_those_of_plain_autograd(name: str, padding: str) -> None:
    """In float64, one response at a time and without padding; by the largest value of each response."""
    options = OPTIONS[padding]
    model = ARCHITECTURES[name].build().eval()
    batch = make_batch(BATCH, padding)
    result = compute_token_weights(model, char_tokenizer(), *batch.tensors(), Grail(**options))
    plain = reference.PlainModel(model)
    masks = batch.response_mask.bool()
    moved = 0
    for at, rollout in enumerate(BATCH):
        ids = encode(rollout.prompt) + encode(rollout.response)
        start = len(encode(rollout.prompt))
        mask = [int(place >= start) for place in range(len(ids))]
        row = ([ids], [[1] * len(ids)], [mask], [rollout.advantage], reference.resolve(**options))
        expected_result = reference.reference_weights(plain, id_to_character(), *row)
        for values_BL, expected in (
            (result.scores, expected_result.scores),
            (result.weights, expected_result.weights),
        ):
            expected_T = torch.tensor(expected[0][start:])
            close = {
                "rtol": 0,
                "atol": 1e-4 * float(expected_T.nan_to_num().abs().max()),
                "equal_nan": True,
            }
            torch.testing.assert_close(values_BL[at, masks[at]], expected_T, **close)
        moved += len(set(expected_result.weights[0][start:])) > 3
    assert moved, "no weights to compare"
