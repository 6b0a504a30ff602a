"""torch's process-wide defaults, dtype and device, change no number: whatever a training script sets, every method weighs
as without it, and so do the door for padded tensors, answers, the control and the figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from grail_advantage import Rollouts, compute_token_weights, find_answer_span
from grail_advantage.data import Weighed, joined, within_range
from grail_advantage.maps import MAPS
from grail_advantage.method import build, methods
from grail_advantage.receipt import Watch, check
from tests.core.common import METHODS, weighed
from tests.core.receipt_loop import TOKEN_MEAN, ppo, rollout, train
from tests.core.test_contract import case, method_of, part
from tests.core.test_options import batch as turns
from tests.core.test_rlsd import example, tiny_tokenizer
from tests.core.tiny_models import ROLLOUTS, encode, make_batch, tiny_model

DEFAULTS: dict[str, Callable[[Any], None]] = {
    "float64": torch.set_default_dtype,
    "bfloat16": torch.set_default_dtype,
    "float16": torch.set_default_dtype,
    "meta": torch.set_default_device,
}
WITH_A_PASS = [name for name in METHODS if methods()[name].uses or name in ("surprisal", "stare")]
"""The last two have columns that are computed."""


@contextmanager
def default(name: str) -> Iterator[None]:
    switch = DEFAULTS[name]
    switch(torch.device("meta") if name == "meta" else getattr(torch, name))
    try:
        yield
    finally:
        switch(None if name == "meta" else torch.float32)


def numbers(w: Any) -> dict[str, Any]:
    """Everything that a method made of responses."""
    figures = w.metrics if isinstance(w, Weighed) else w.stats
    names = ["weights", "advantages", "scores", "selected", "failed"]
    names += ["by_score", "low", "high"] if isinstance(w, Weighed) else []
    tensors = {name: getattr(w, name) for name in names}
    return {
        name: (value.dtype, value.device, value.nan_to_num(-7.0).tolist())
        for name, value in tensors.items()
    } | figures


@cache
def batches() -> list[tuple[Rollouts, torch.Tensor]]:
    """Ordinary ones, one with tools and turns, and one in which nothing trains; with the numbers of a pass."""
    plain = case(12, gap=True)
    of_turns = torch.rand(turns().mask.shape, generator=torch.Generator().manual_seed(1))
    in_half = replace(plain[0], advantages=plain[0].advantages.half())
    nothing = replace(plain[0], advantages=torch.zeros(12))
    whole_numbers = replace(plain[0], advantages=torch.tensor([-2, 1, 0, 3] * 3))
    return [
        plain,
        (turns(), of_turns),
        (in_half, plain[1]),
        (nothing, plain[1]),
        (whole_numbers, plain[1]),
        # No response at all.
        case(0, 0),
    ]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_weighs_the_same(name: str) -> None:
    options: list[dict[str, Any]] = [{}]
    for option, value in (("control", "shuffled"), ("normalize_mass", True)):
        if option in methods()[name].model_fields:
            options.append({option: value})
    if "reshaper" in methods()[name].model_fields:
        options += [{"reshaper": reshaper} for reshaper in MAPS]
    for number, (r, of_pass) in enumerate(batches()):
        for changes in options:
            method = method_of(name, **changes)
            expected = numbers(weighed(method, r, of_pass))
            for name_of_default in DEFAULTS:
                with default(name_of_default):
                    actual = numbers(weighed(method, r, of_pass))
                    again = joined([part((r, of_pass), list(range(len(r))))[0]])
                    assert again.mask.shape == r.mask.shape
                assert actual == expected, (name_of_default, number, changes)


@pytest.mark.parametrize("name", WITH_A_PASS)
def test_a_pass_scores_the_same(name: str) -> None:
    """Through the door for padded tensors; the model was made before. A model's own forward need not know such a device."""
    batch = make_batch(
        [ROLLOUTS[kind] for kind in ("box at the end", "right", "several boxes", "no box")]
    )
    model = tiny_model(layers=2)
    tokenizer = tiny_tokenizer()
    method = build(name)
    parts = {
        "groups": torch.tensor([0, 0, 1, 1]),
        "examples": [example("?", "4")] * 4,
        "rewards": torch.ones(4),
    }

    def run() -> dict[str, Any]:
        return numbers(compute_token_weights(model, tokenizer, *batch.tensors(), method, **parts))

    expected = run()
    for name_of_default in DEFAULTS:
        # The model was made before: only what the package makes counts.
        with default(name_of_default):
            actual = run()
        assert actual == expected, name_of_default


@pytest.mark.parametrize("name", DEFAULTS)
def test_answers_and_limits_are_the_same(name: str) -> None:
    values = torch.tensor([1.0, -5e17, 2e18, float("nan"), float("inf")])
    expected = find_answer_span(encode(r"a \boxed{5}"), tiny_tokenizer())
    with default(name):
        assert find_answer_span(encode(r"a \boxed{5}"), tiny_tokenizer()) == expected
        assert within_range(values).tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_receipt_is_the_same(name: str) -> None:
    """Of a clean loop, and of one with a fault that a search has to explain; rows may be a list."""
    batch = rollout(5, epochs=2, ranks=2, weights=True)
    # Weights of 1, and four times the loss.
    faulty = train(batch, lambda micro: ppo(micro, weights=1.0, times=4.0))
    for pieces in (train(batch), faulty):
        expected = check(batch.batch, TOKEN_MEAN, pieces)
        with default(name):
            receipt = check(batch.batch, TOKEN_MEAN, pieces)
        assert receipt.findings == expected.findings and receipt.ok == (pieces is not faulty)
        torch.testing.assert_close(
            receipt.expected_UBT, expected.expected_UBT, rtol=0, atol=0, equal_nan=True
        )
    watched = Watch()
    log_probs = torch.zeros(2, 3)
    with default(name):
        watched.read(log_probs, [1, 0])
    assert watched.pieces[0].rows_b.tolist() == [1, 0]
