"""What a model's code allows a signal to do, found out on a copy without weights.

The copy lives on the meta device, so that it takes neither memory nor a checkpoint, and no decoder block runs: what is asked is
which modules there are, and what the model does between its decoder and its logits.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from grail_advantage.activations import inner_model

logger = logging.getLogger(__name__)

LOGITS = torch.linspace(-64, 64, 128)
"""Logits that the probe puts in place of the output embeddings' own: any scale, cap or shift changes some of them."""


@dataclass(frozen=True)
class Architecture:
    """A causal language model's code."""

    copy: PreTrainedModel
    """On the meta device; only to ask for modules."""
    plain_logits: bool
    """Whether the model's logits are what its output embeddings put out, neither scaled nor capped."""


def architecture_of(config: PretrainedConfig, *, trust_remote_code: bool = False) -> Architecture:
    """The architecture that Transformers builds from a configuration.

    Raises:
        Exception: whatever the model's own code raises where it cannot be built on the meta device.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_portable(config), trust_remote_code=trust_remote_code)
    return Architecture(model, _has_plain_logits(model))


def has_plain_logits(model: nn.Module) -> bool:
    """Whether the logits of a model, bare or wrapped, are what its output embeddings put out.

    The model itself is not run, so ranks need not agree on when they ask. ``False`` where its code cannot be probed.
    """
    inner = inner_model(model)
    config = getattr(inner, "config", None)
    if not isinstance(inner, PreTrainedModel) or not isinstance(config, PretrainedConfig):
        return False
    return _probe(_Code(type(inner), config))


class _Code:
    """A model's class and configuration, as a key."""

    def __init__(self, model_class: type[PreTrainedModel], config: PretrainedConfig) -> None:
        self.model_class = model_class
        self.config = config
        self.key = (model_class, config.to_json_string())

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Code) and self.key == other.key


@cache
def _probe(code: _Code) -> bool:
    try:
        with torch.device("meta"):
            model = code.model_class(_portable(code.config))
        return _has_plain_logits(model)
    except Exception as error:
        name = code.model_class.__name__
        logger.warning("the logits of %s cannot be probed: %s: %s", name, type(error).__name__, error)
        return False


class _DecoderOutput(BaseModelOutputWithPast):
    """Has whatever field a model copies from its decoder's output."""

    def __getattr__(self, name: str) -> None:
        return None


def _portable(config: PretrainedConfig) -> PretrainedConfig:
    """For any device, whatever attention the run takes."""
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    return config


def _has_plain_logits(model: PreTrainedModel) -> bool:
    """Hand the model's own forward a decoder output and logits, and see whether it puts these out."""
    head = model.get_output_embeddings()
    if head is None:
        return False
    hidden_12D = torch.zeros(1, 2, model.config.get_text_config().hidden_size)
    model.base_model.forward = lambda *args, **kwargs: _DecoderOutput(last_hidden_state=hidden_12D)
    head.forward = lambda hidden_BSD: LOGITS.expand(1, hidden_BSD.shape[1], -1).clone()
    with torch.no_grad():
        logits = model(input_ids=torch.zeros((1, 2), dtype=torch.int64), use_cache=False).logits
    del model.base_model.forward, head.forward
    return torch.equal(logits.float(), LOGITS.expand(1, 2, -1))
