"""Whether a model's code changes its logits, against models whose code is known."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import (
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from grail_advantage.model.architecture import architecture_of, has_plain_logits
from tests.core.tiny_models import tiny_model

KNOWN = [
    (Qwen2Config(num_hidden_layers=1), True),
    (Qwen3Config(num_hidden_layers=1), True),
    (Qwen3MoeConfig(num_hidden_layers=1, num_experts=2), True),
    (LlamaConfig(num_hidden_layers=1), True),
    (GPT2Config(n_layer=1), True),
    (GraniteConfig(num_hidden_layers=1), True),
    (GraniteConfig(num_hidden_layers=1, logits_scaling=8.0), False),
    (CohereConfig(num_hidden_layers=1), False),  # times logit_scale
    (Gemma2Config(num_hidden_layers=1), False),  # capped by a tanh
    (Gemma2Config(num_hidden_layers=1, final_logit_softcapping=None), True),
]


def test_scaled_and_capped_logits_are_found_without_weights() -> None:
    for config, plain in KNOWN:
        architecture = architecture_of(config)
        assert architecture.plain_logits is plain, config
        assert {parameter.device.type for parameter in architecture.copy.parameters()} == {"meta"}


def test_a_model_is_looked_at_without_being_run() -> None:
    model = tiny_model(layers=1)
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    # Chosen for a GPU, and not installed on every machine that asks.
    model.config._attn_implementation = "flash_attention_2"
    assert has_plain_logits(nn.Sequential(model))
    assert model.config._attn_implementation == "flash_attention_2"
    model.config.final_logit_softcapping = 30.0  # another configuration is another question
    assert has_plain_logits(model)
