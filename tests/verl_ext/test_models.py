"""Architectures that people train: scores and weights against plain autograd, in the plain function and in verl's engine.

What is drawn, and what the engine measures, is in ``architectures.py``, which also makes the table of ``docs/works_with.md``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import verl  # noqa: F401  its plugin registers the estimators
from transformers import FalconConfig, GPTJConfig, Ministral3Config, NemotronConfig, OPTConfig

from grail_advantage.model.architecture import architecture_of
from grail_advantage.model.patches import attention_is_told_of_rows
from grail_advantage.verl_ext.checks import check_config
from tests.composed import with_model
from tests.core.tiny_models import char_tokenizer
from tests.verl_ext import architectures
from tests.verl_ext.architectures import BATCH, CASES, CLOSE, FAMILIES, SIGNALS, Family, by_function, error, plainly

MIXED = ("Qwen3.5, text, packed", "GPT-OSS, packed")
"""Cases in which a response's scores depend on the responses packed before it."""
PACKED = "actor_rollout_ref.model.use_remove_padding"
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"


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


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_engine_gives_the_plain_scores(measured: dict[str, dict[str, Any]], case: str) -> None:
    """Where responses are mixed they differ by far more than rounding: those cases are refused, see the next tests."""
    name, _ = CASES[case]
    for signal in SIGNALS:
        found = error(measured[case][signal], [scores for scores, _ in plainly(name, signal)])
        assert found > 5e-3 if case in MIXED else found < CLOSE[signal], signal


@pytest.mark.slow
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


def _save(name: str, folder: Path) -> Path:
    FAMILIES[name].build().save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_rows_that_would_mix_are_refused(name: str, tmp_path: Path) -> None:
    place = _save(name, tmp_path)
    attention = f"+{ATTENTION}={FAMILIES[name].attention}"
    mixed = f"{name}, packed" in MIXED
    for estimator in ("grail", "oar_g", "uniform") if mixed else ("grail",):
        method = f"algorithm.adv_estimator={estimator}"
        if estimator == "uniform" or not mixed:
            check_config(with_model(place, method, f"{PACKED}=True", attention))
            continue
        with pytest.raises(ValueError, match=rf"{PACKED}=True does not work with .*; set {PACKED}=false, or use a"):
            check_config(with_model(place, method, f"{PACKED}=True", attention))
        check_config(with_model(place, method, f"{PACKED}=False", attention))
        if name == "GPT-OSS":
            check_config(
                with_model(place, method, f"{PACKED}=True", f"+{ATTENTION}=kernels-community/vllm-flash-attn3")
            )


def test_layers_with_a_state_are_named() -> None:
    config = Family("Lfm2Config", {"layer_types": ["conv", "full_attention"]}).build()
    assert architecture_of(config).states == ("conv",)


def test_models_whose_attention_is_told_of_packed_rows() -> None:
    """Also those that call flash attention themselves, and where it is not installed."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "rotary_dim": 8}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
    told = {Ministral3Config: False, FalconConfig: True, NemotronConfig: True, OPTConfig: True, GPTJConfig: False}
    for config, expected in told.items():
        copy = architecture_of(config(**sizes)).copy
        assert attention_is_told_of_rows(copy) is expected, config
