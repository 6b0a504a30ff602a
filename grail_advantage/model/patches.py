"""Every place where the core replaces a part of torch or transformers, or reaches into a private one.

Each function names the line that it answers, as of torch 2.13.0 and transformers 5.10.4, and the test that says when it can go.
Those of TRL are in :mod:`grail_advantage.trl_ext.trainer`.

Shape suffixes: B rows, S positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast


@contextmanager
def checkpointing_in_evaluation(blocks: Sequence[GradientCheckpointingLayer]) -> Iterator[None]:
    """While open, each block runs in evaluation mode inside a checkpoint of its own; afterwards all are in evaluation mode.

    Transformers checkpoints a block only in training mode, which also switches its dropout on
    (``GradientCheckpointingLayer.__call__``, modeling_layers.py:60), so the blocks only seem to train to the code around
    them. The checkpoint is never reentrant, whatever is configured (``_gradient_checkpointing_func``, line 92): a reentrant one
    cannot be differentiated with respect to activations.

    Can go when ``test_blocks_are_checkpointed_in_evaluation_mode_inside`` passes without it.
    """
    own = [{name: vars(block)[name] for name in _CHECKPOINTING if name in vars(block)} for block in blocks]
    try:
        for block in blocks:
            block.training = block.gradient_checkpointing = True
            block._gradient_checkpointing_func = partial(_checkpointed, block)
        yield
    finally:
        for block, attributes in zip(blocks, own, strict=True):
            block.training = False
            for name in _CHECKPOINTING:
                vars(block).pop(name, None)
            vars(block).update(attributes)


_CHECKPOINTING = ("gradient_checkpointing", "_gradient_checkpointing_func")
"""Attributes of a ``GradientCheckpointingLayer``."""


def _checkpointed(block: nn.Module, function: Callable, *args: Any) -> Any:
    def evaluated(*inputs: Any) -> Any:
        block.training = False
        try:
            return function(*inputs)
        finally:
            block.training = True

    return checkpoint(evaluated, *args, use_reentrant=False)


@contextmanager
def resharding(units: Sequence[nn.Module]) -> Iterator[None]:
    """While open, forwards of these FSDP1 units reshard the unit in a backward as soon as the gradients of its inputs are
    there. For backwards to activations alone: in one that also reaches parameters, FSDP1 reshards by itself.

    FSDP1 reshards a unit from a hook on its flat parameter's gradient, which a backward to an activation never computes, so
    each unit that this backward reaches would stay unsharded until its end: with the first activation, the whole
    model. The hook on the inputs' gradients is FSDP1's own for frozen units, and there is no public way to ask for it
    (``_register_post_backward_reshard_only_hook``, fsdp/_runtime_utils.py:1501, returns where the flat parameter trains).
    FSDP2 reshards by a function on the activations' path and needs nothing.

    Can go with FSDP1, or when ``test_whole_blocks_are_as_few_as_in_training`` of ``verl_ext/test_pass_details.py`` passes
    without it.
    """
    trained = [unit for unit in units if unit._handle is not None and unit._handle.flat_param.requires_grad]
    handles = [unit.register_forward_pre_hook(_reshard_after_inputs, with_kwargs=True) for unit in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _reshard_after_inputs(unit: nn.Module, args: tuple, kwargs: dict) -> None:
    from torch.distributed.fsdp._runtime_utils import _post_backward_reshard_only_hook

    if not torch.is_grad_enabled():
        return
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if inputs:
        register_multi_grad_hook(inputs, partial(_post_backward_reshard_only_hook, unit, unit._handle))


def with_eager_attention(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of a configuration whose model can be built on any device, the meta device included.

    A model class takes its attention from this attribute and looks for flash-attn there and then (``PreTrainedModel.__init__``,
    modeling_utils.py:1351). The public argument ``attn_implementation`` belongs to the Auto classes, which do not build every
    class.

    Can go when ``test_a_model_is_looked_at_without_being_run`` passes without it.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    return config


def logits_without_decoder(model: PreTrainedModel, logits_V: torch.Tensor) -> torch.Tensor:
    """Logits (1, 2, V) that the model's own forward makes of ``logits_V`` from its output embeddings, without its decoder.

    Models scale or cap logits in their forward, each in its own code and by options of its own names (``logit_scale``,
    ``final_logit_softcapping``, modeling_gemma2.py:537). Replaces the forwards of the decoder and of the output embeddings
    meanwhile, so ``model`` must be a copy that nobody else runs.

    Can go when transformers says in one place whether a model changes its logits: when
    ``test_scaled_and_capped_logits_are_found_without_weights`` passes with that.
    """
    decoder, head = model.base_model, model.get_output_embeddings()
    hidden_12D = torch.zeros(1, 2, model.config.get_text_config().hidden_size)
    decoder.forward = lambda *args, **kwargs: _DecoderOutput(last_hidden_state=hidden_12D)
    head.forward = lambda hidden_BSD: logits_V.expand(1, hidden_BSD.shape[1], -1).clone()
    try:
        with torch.no_grad():
            return model(input_ids=torch.zeros((1, 2), dtype=torch.int64), use_cache=False).logits
    finally:
        del decoder.forward, head.forward


class _DecoderOutput(BaseModelOutputWithPast):
    """Has whatever field a model copies from its decoder's output."""

    def __getattr__(self, name: str) -> None:
        return None
