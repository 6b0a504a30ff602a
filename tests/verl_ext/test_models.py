"""Architectures that people train: scores and weights of the plain function against plain autograd. In verl's engine they are
in ``test_passes.py``."""

import pytest
import torch
import verl  # noqa: F401  its plugin registers the estimators

from grail_advantage import Grail
from tests.core import reference
from tests.core.tiny_models import ROLLOUTS, compute, make_batch
from tests.verl_ext.ranks import ARCHITECTURES

BATCH = [
    ROLLOUTS[name]
    for name in ("text after the box", "box at the end", "several boxes", "right")
]
OPTIONS = {"preset": "robust", "gate": "all", "leaf": "middle"}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_and_weights_are_those_of_plain_autograd(name):
    """In float64, one response at a time and without padding; by the largest value of each response."""
    model = ARCHITECTURES[name].build().eval()
    batch = make_batch(BATCH, "both")
    result = compute(model, batch, Grail(**OPTIONS))
    # It has the same weights in float64.
    plain = reference.PlainModel(model)
    moved = 0
    for at, rollout in enumerate(BATCH):
        alone = make_batch([rollout])
        row = [tensor.tolist() for tensor in alone.tensors()]
        options = reference.resolve(**OPTIONS)
        expected = reference.reference_weights(plain, *row, options)
        for column in ("scores", "weights"):
            actual_T = getattr(result, column)[at, batch.response_mask[at].bool()]
            expected_T = torch.tensor(getattr(expected, column))[alone.response_mask.bool()]
            # A score that is small beside the largest has few exact digits.
            atol = 1e-4 * float(expected_T.nan_to_num().abs().max())
            torch.testing.assert_close(
                actual_T, expected_T, rtol=0, atol=atol, equal_nan=True
            )
        moved += len(expected_T.unique()) > 3
    assert moved, "no weights to compare"
