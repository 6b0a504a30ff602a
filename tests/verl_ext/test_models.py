"""Architectures that people train: scores and weights against plain autograd, in the plain function and in verl's engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import verl  # noqa: F401  its plugin registers the estimators
from transformers import PreTrainedModel

from grail_advantage import Grail, compute_token_weights
from grail_advantage.verl_ext.engine_model import EngineModel
from grail_advantage.verl_ext.exchange import FORWARD, PADDED_FORWARD, UPDATE
from tests.core import reference
from tests.core.tiny_models import FAMILIES as TABLE
from tests.core.tiny_models import PAD_ID, ROLLOUTS, Family, char_tokenizer, encode, id_to_character, make_batch
from tests.verl_ext.engines import Setup, Sizes, build_engine, own_pass
from tests.verl_ext.pass_plan import row_of
from tests.verl_ext.ranks import of_all_ranks, start_ranks

FAMILIES = (
    *("qwen2", "qwen3", "qwen3_moe", "qwen3_5_text", "llama", "mistral", "gemma2", "gemma3_text", "phi3"),
    *("gpt_oss", "olmo2", "olmo3"),
)
CASES = {f"{name}, {'packed' if packed else 'padded'}": (name, packed) for name in FAMILIES for packed in (True, False)}
MIXED = ("qwen3_5_text, packed", "gpt_oss, packed")
"""Cases in which a response's scores depend on the responses packed before it."""
BATCH = [ROLLOUTS[name] for name in ("text after the box", "box at the end", "several boxes", "right")]
PRESETS: dict[str, dict[str, Any]] = {
    "grail": {"preset": "official", "gate": "all"},
    "grail, middle": {"preset": "robust", "gate": "all", "leaf": "middle"},
}
SIGNALS = {name: Grail(**options) for name, options in PRESETS.items()}
Values = list[list[float]]


@cache
def model_of(name: str) -> PreTrainedModel:
    return TABLE.get(name, Family(name)).build().eval()


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


class Engine:
    """verl's engine with each model, on its one rank."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.folder = folder

    def passes(self, case: tuple[str, bool]) -> dict[str, Any]:
        """Scores of the passes, or that they are refused, and what the probe finds."""
        name, packed = case
        attention = model_of(name).config._attn_implementation
        engine = build_engine(Setup(name, ranks=1, packed=packed, attention=attention), self.folder)
        results: dict[str, Any] = {}
        for known, signal in SIGNALS.items():
            rows = [row_of(rollout, place, signal.span, place) for place, rollout in enumerate(BATCH)]
            rows = [signal.prepare(row, char_tokenizer()) for row in rows]
            try:
                results[known] = own_pass(engine, rows, signal, Sizes(rows=len(BATCH)), pad_token=PAD_ID)["scores"]
            except ValueError:
                results[known] = None
        with engine.eval_mode():
            model = EngineModel(engine, temperature=1.0)
            layouts = (UPDATE, FORWARD, PADDED_FORWARD)
            results["findings"] = {layout: model.probe(layout, 40) for layout in layouts}
        return results


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("models")
    for name in FAMILIES:
        model_of(name).save_pretrained(folder / name)
        char_tokenizer().save_pretrained(folder / name)
    results = start_ranks("models", folder, 1)
    return {case: of_all_ranks(results, "passes", case)[0] for case in CASES}


def _close(found: Sequence[torch.Tensor], expected: Values) -> None:
    """By the largest expected value of each response; after the last of ``found`` there is 0, or NaN as there are none."""
    for of_row, values in zip(found, expected, strict=True):
        expected_T, rest_T = torch.tensor(values).split([len(of_row), len(values) - len(of_row)])
        assert not rest_T.nan_to_num().any()
        most = float(expected_T.nan_to_num().abs().max())
        torch.testing.assert_close(of_row, expected_T, rtol=0, atol=1e-4 * most, equal_nan=True)


@pytest.mark.parametrize(("signal", "padding"), zip(SIGNALS, ("left", "both"), strict=True))
@pytest.mark.parametrize("name", FAMILIES)
def test_scores_and_weights_are_those_of_plain_autograd(name: str, signal: str, padding: str) -> None:
    batch = make_batch(BATCH, padding)
    found = compute_token_weights(model_of(name), char_tokenizer(), *batch.tensors(), SIGNALS[signal])
    scores, weights = plainly(name, signal)
    for values_BL, expected in ((found.scores, scores), (found.weights, weights)):
        _close([of[mask] for of, mask in zip(values_BL, batch.response_mask.bool(), strict=True)], expected)
    assert any(len(set(of_row)) > 3 for of_row in weights), "no weights to compare"


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_the_engine_gives_the_plain_scores_or_refuses(measured: dict[str, dict[str, Any]], case: str) -> None:
    """Where packed responses see each other, which the probe finds."""
    findings = measured[case]["findings"]
    assert findings[UPDATE].holds == findings[FORWARD].holds == (case not in MIXED), findings
    assert findings[PADDED_FORWARD].holds
    for signal in SIGNALS:
        assert (measured[case][signal] is None) == (case in MIXED)
        if case not in MIXED:
            _close(measured[case][signal], plainly(CASES[case][0], signal)[0])
