"""Architectures that people train: scores and weights against plain autograd, in the plain function and in verl's engine.

What is drawn, and what the engine measures, is in ``architectures.py``, which also makes the table of ``docs/works_with.md``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import verl  # noqa: F401  its plugin registers the estimators

from grail_advantage.verl_ext.exchange import FORWARD, PADDED_FORWARD, UPDATE
from tests.verl_ext import architectures
from tests.verl_ext.architectures import BATCH, CASES, CLOSE, FAMILIES, SIGNALS, by_function, error, plainly

MIXED = ("Qwen3.5, text, packed", "GPT-OSS, packed")
"""Cases in which a response's scores depend on the responses packed before it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def measured(folder: Path) -> dict[str, dict[str, Any]]:
    return architectures.measure(folder)


@pytest.mark.parametrize(("signal", "padding"), zip(SIGNALS, ("left", "right", "both"), strict=True))
@pytest.mark.parametrize("name", FAMILIES)
def test_scores_and_weights_are_those_of_plain_autograd(name: str, signal: str, padding: str) -> None:
    expected = plainly(name, signal)
    scores, weights = zip(*by_function(name, signal, padding), strict=True)
    assert error(scores, [of_row for of_row, _ in expected]) < CLOSE[signal]
    assert error(weights, [of_row for _, of_row in expected]) < CLOSE[signal]
    assert any(len(set(of_row)) > 3 for _, of_row in expected), "no weights to compare"


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_the_engine_gives_the_plain_scores(measured: dict[str, dict[str, Any]], case: str) -> None:
    """Where responses are mixed they differ by far more than rounding: those cases are refused."""
    name, _ = CASES[case]
    for signal in SIGNALS:
        found = error(measured[case][signal], [scores for scores, _ in plainly(name, signal)])
        assert found > 5e-3 if case in MIXED else found < CLOSE[signal], signal


@pytest.mark.nightly
@pytest.mark.parametrize("case", [case for case in CASES if case not in MIXED])
def test_a_shared_forward_gives_the_plain_scores_and_log_probs(measured: dict[str, dict[str, Any]], case: str) -> None:
    name, _ = CASES[case]
    shared = measured[case]["shared"]
    if name == "Gemma 2":
        assert "share_forward does not work with this model, which changes its logits" in shared
        return
    expected = [scores for scores, _ in plainly(name, "grail")]
    assert error(architectures.shared_saliency(measured[case]), expected) < CLOSE["grail"]
    for rollout, log_probs_S in zip(BATCH, shared["log_probs"], strict=True):
        tokens_S, _, _ = architectures.shared_row(rollout)
        with torch.no_grad():
            logits_SV = architectures.model_of(name)(input_ids=tokens_S[None]).logits[0]
        expected_S = logits_SV.log_softmax(-1)[:-1].gather(1, tokens_S[1:, None])[:, 0]
        torch.testing.assert_close(log_probs_S[:-1], expected_S, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_the_engine_finds_packed_responses_that_see_each_other(measured: dict[str, dict[str, Any]], case: str) -> None:
    findings = measured[case]["findings"]
    assert findings[UPDATE].holds == findings[FORWARD].holds == (case not in MIXED), findings
    assert findings[PADDED_FORWARD].holds
