"""A model's code, looked at on a copy without weights: which modules it has, and whether it changes its logits.

The copy lives on the meta device, so that it takes neither memory nor a checkpoint. No decoder block runs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from grail_advantage.model.activations import inner_model
from grail_advantage.model.patches import logits_without_decoder, with_eager_attention

logger = logging.getLogger(__name__)

LOGITS = torch.linspace(-64, 64, 128)
"""Logits that the probe puts in place of the output embeddings' own: any scale, cap or shift changes some of them."""


@dataclass(frozen=True)
class Architecture:
    """A causal language model's code."""

    copy: PreTrainedModel
    """On the meta device; only to ask for modules."""
    plain_logits: bool
    """The model's logits are those of its output embeddings, neither scaled nor capped."""


def architecture_of(config: PretrainedConfig, *, trust_remote_code: bool = False) -> Architecture:
    """The architecture that Transformers builds from a configuration.

    Raises:
        Exception: whatever the model's own code raises where it cannot be built on the meta device.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(with_eager_attention(config), trust_remote_code=trust_remote_code)
    return Architecture(model, _has_plain_logits(model))


def has_plain_logits(model: nn.Module) -> bool:
    """Whether the logits of a model, bare or wrapped, are those of its output embeddings.

    The model itself is not run, so ranks need not agree on when they ask. ``False`` where its code cannot be probed.
    """
    inner = inner_model(model)
    config = getattr(inner, "config", None)
    if not isinstance(inner, PreTrainedModel) or not isinstance(config, PretrainedConfig):
        return False
    key = type(inner), config.to_json_string()
    if key not in _plain_logits:
        _plain_logits[key] = _probe(type(inner), config)
    return _plain_logits[key]


_plain_logits: dict[tuple[type[PreTrainedModel], str], bool] = {}


def _probe(model_class: type[PreTrainedModel], config: PretrainedConfig) -> bool:
    try:
        with torch.device("meta"):
            return _has_plain_logits(model_class(with_eager_attention(config)))
    except Exception as error:
        logger.warning("the logits of %s cannot be probed: %s: %s", model_class.__name__, type(error).__name__, error)
        return False


def _has_plain_logits(model: PreTrainedModel) -> bool:
    """Whether the model's own forward puts out given logits as they are."""
    if model.get_output_embeddings() is None:
        return False
    return torch.equal(logits_without_decoder(model, LOGITS).float(), LOGITS.expand(1, 2, -1))
