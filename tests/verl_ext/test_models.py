"""Architectures that people train: scores and weights against plain autograd, in the plain function and in verl's engine.

What is drawn, and what the engine measures, is in ``architectures.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import verl  # noqa: F401  its plugin registers the estimators

from grail_advantage.verl_ext.exchange import FORWARD, PADDED_FORWARD, UPDATE
from tests.verl_ext import architectures
from tests.verl_ext.architectures import CASES, FAMILIES, SIGNALS, by_function, error, plainly

MIXED = ("Qwen3.5, text, packed", "GPT-OSS, packed")
"""Cases in which a response's scores depend on the responses packed before it."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return architectures.measure(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("signal", "padding"), zip(SIGNALS, ("left", "both"), strict=True))
@pytest.mark.parametrize("name", FAMILIES)
def test_scores_and_weights_are_those_of_plain_autograd(name: str, signal: str, padding: str) -> None:
    expected = plainly(name, signal)
    scores, weights = zip(*by_function(name, signal, padding), strict=True)
    assert error(scores, [of_row for of_row, _ in expected]) < 1e-4
    assert error(weights, [of_row for _, of_row in expected]) < 1e-4
    assert any(len(set(of_row)) > 3 for _, of_row in expected), "no weights to compare"


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_the_engine_gives_the_plain_scores_or_refuses(measured: dict[str, dict[str, Any]], case: str) -> None:
    """Where packed responses see each other, which the probe finds."""
    findings = measured[case]["findings"]
    assert findings[UPDATE].holds == findings[FORWARD].holds == (case not in MIXED), findings
    assert findings[PADDED_FORWARD].holds
    if case in MIXED:
        assert "use_remove_padding=True does not work with this model" in measured[case]["refused"]
        return
    for signal in SIGNALS:
        expected = [scores for scores, _ in plainly(CASES[case][0], signal)]
        assert error(measured[case][signal], expected) < 1e-4, signal
