"""torch's process-wide defaults, dtype and device, change no number: whatever a training script sets, every method weighs
as without it, and so do the door for padded tensors, answers, the control and the figures."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from grail_advantage import Rollouts, TokenWeights, compute_token_weights
from grail_advantage.check import part
from grail_advantage.data import Weighed, joined
from grail_advantage.maps import MAPS
from grail_advantage.method import build, methods
from grail_advantage.receipt import Watch, check
from tests.core.common import METHODS, weighed
from tests.core.receipt_loop import TOKEN_MEAN, ppo, rollout, train
from tests.core.test_contract import PASS, case, method_of
from tests.core.test_doors import valid_weights
from tests.core.test_options import batch as turns

DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULTS = [*DTYPES, "meta"]
WITH_A_PASS = [
    name for name in METHODS if methods()[name].uses or name in ("surprisal", "stare")
]
"""The last two have columns that are computed."""


@contextmanager
def default(name: str) -> Iterator[None]:
    torch.set_default_dtype(DTYPES.get(name, torch.float32))
    torch.set_default_device("meta" if name == "meta" else None)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def numbers(w: Weighed | TokenWeights) -> dict[str, Any]:
    """Everything that a method made of responses."""
    values = dict(w.metrics if isinstance(w, Weighed) else w.stats)
    for name, value in vars(w).items():
        if isinstance(value, torch.Tensor):
            values[name] = (value.dtype, value.device, value.nan_to_num(-7.0).tolist())
    if isinstance(w, Weighed):
        (advantages,) = w.advantages_under([w.rollouts.mask])
        values["in a trainer's layout"] = (advantages.dtype, advantages.tolist())
    return values


@cache
def batches() -> list[Rollouts]:
    """Ordinary ones, one with tools and turns, and one in which nothing trains; with the numbers of a pass."""
    plain = case(12, gap=True)
    draw = torch.Generator().manual_seed(1)
    changes = (
        plain.advantages,
        plain.advantages.half(),
        torch.zeros(12),
        torch.tensor([-2, 1, 0, 3] * 3),
    )
    of_pass = {PASS: torch.rand(turns().mask.shape, generator=draw)}
    return [
        *(replace(plain, advantages=advantages) for advantages in changes),
        replace(turns(), columns=turns().columns | of_pass),
        # No response at all.
        case(0, 0),
    ]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_weighs_the_same(name):
    options = [{"control": "shuffled"}, {"normalize_mass": True}]
    options += [{"reshaper": reshaper} for reshaper in MAPS]
    fields = methods()[name].model_fields
    options = [{}, *(option for option in options if option.keys() <= fields.keys())]
    for number, r in enumerate(batches()):
        for changes in options:
            method = method_of(name, **changes)
            expected = numbers(weighed(method, r, r.columns[PASS]))
            for name_of_default in DEFAULTS:
                with default(name_of_default):
                    again = joined([part(r, range(len(r)))])
                    actual = numbers(weighed(method, again, again.columns[PASS]))
                assert actual == expected, (name_of_default, number, changes)


@pytest.mark.parametrize("name", WITH_A_PASS)
def test_a_pass_scores_the_same(name):
    """Through the door for padded tensors; the model was made before. A model's own forward need not know such a device."""
    columns = {"old_log_probs": None, "entropy": None}
    arguments = valid_weights() | columns | {"config": build(name)}
    expected = numbers(compute_token_weights(**arguments))
    for name_of_default in DEFAULTS:
        # The model was made before: only what the package makes counts.
        with default(name_of_default):
            actual = numbers(compute_token_weights(**arguments))
        assert actual == expected, name_of_default


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_receipt_is_the_same(name):
    """Of a clean loop, and of one with a fault that a search has to explain; rows may be a list."""
    batch = rollout(5, epochs=2, ranks=2, weights=True)
    # Weights of 1, and four times the loss.
    faulty = train(batch, lambda micro: ppo(micro, weights=1.0, times=4.0))
    for pieces in (train(batch), faulty):
        expected = check(batch.batch, TOKEN_MEAN, pieces)
        with default(name):
            receipt = check(batch.batch, TOKEN_MEAN, pieces)
        assert receipt.findings == expected.findings
        assert receipt.ok == (pieces is not faulty)
        torch.testing.assert_close(
            receipt.expected_UBT, expected.expected_UBT, rtol=0, atol=0, equal_nan=True
        )
    watched = Watch()
    log_probs = torch.zeros(2, 3)
    with default(name):
        watched.read(log_probs, [1, 0])
    assert watched.pieces[0].rows_b.tolist() == [1, 0]
