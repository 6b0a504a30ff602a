"""Every place where the core replaces a part of torch or transformers, or reaches into a private one.

Each function names the line that it answers, as of torch 2.13.0 and transformers 5.10.4, and the test that says when it can go.
The parts of TRL are in :mod:`grail_advantage.trl_ext.patches`.

Shape suffixes: B rows, S positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel, masking_utils
from transformers.integrations import flash_attention
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


def mask_is_told_of_rows(model: PreTrainedModel) -> bool:
    """Whether a model hands its positions to its attention mask, which then keeps packed rows apart.

    Transformers finds packed rows by the positions (``find_packed_sequence_indices``, masking_utils.py:757), and some models
    do not give them to the mask (``GptOssModel.forward``, modeling_gpt_oss.py:479). Runs the model's own forward up to its
    first block, on a copy that nobody else runs.

    Can go when every model does: when ``test_models_whose_mask_mixes_packed_rows_are_found`` fails.
    """
    asked = []

    def find(position_ids: torch.Tensor) -> None:
        asked.append(position_ids)

    def stop(*_: Any) -> None:
        raise _FirstBlockError

    block = next((module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)), None)
    if block is None:
        return False
    handle = block.register_forward_pre_hook(stop)
    finds, masking_utils.find_packed_sequence_indices = masking_utils.find_packed_sequence_indices, find
    tokens_14 = torch.zeros((1, 4), dtype=torch.int64, device=model.device)
    try:
        with NumbersOnMeta():
            model(input_ids=tokens_14, position_ids=torch.zeros_like(tokens_14), use_cache=False)
    except _FirstBlockError:
        pass
    finally:
        masking_utils.find_packed_sequence_indices = finds
        handle.remove()
    return bool(asked)


def attention_is_told_of_rows(model: PreTrainedModel) -> bool:
    """Whether a model hands its positions on to flash attention, which then keeps packed rows apart.

    Flash attention finds packed rows by the positions (``_flash_attention_forward``, modeling_flash_attention_utils.py:750),
    and some models keep them to themselves (``Ministral3Attention.forward``, modeling_ministral3.py:128) or take none. Runs the
    forward of a copy on the meta device, with a function that looks at the positions in place of flash attention, which need
    not be installed (``_check_and_adjust_attn_implementation``, modeling_utils.py:1878). ``False`` where nothing calls it.

    Can go when every model does: when ``test_models_whose_attention_is_told_of_packed_rows`` fails.
    """
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return False
    told: list[bool] = []

    def look(query_BSHD: torch.Tensor, _: Any, value_BSHD: torch.Tensor, *__: Any, **named: Any) -> torch.Tensor:
        told.append(named.get("position_ids") is not None)
        return query_BSHD.new_empty(*query_BSHD.shape[:-1], value_BSHD.shape[-1])

    def build() -> PreTrainedModel:
        config = copy.deepcopy(model.config)
        config._attn_implementation = FLASH
        # In single precision attention asks for autocast's, which the meta device does not have.
        return type(model)(config).bfloat16().eval()

    own_code, tokens_14 = sys.modules[type(model).__module__], torch.zeros((1, 4), dtype=torch.int64, device="meta")
    replaced = [
        (flash_attention, "_flash_attention_forward", look),
        (own_code, "_flash_attention_forward", look),  # which it has where flash-attn is installed
        (PreTrainedModel, "_check_and_adjust_attn_implementation", lambda *_, **__: FLASH),
    ]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(_in_place(owner, name, value))
        # What fails behind the first attention does not matter here.
        with suppress(Exception), torch.device("meta"), torch.no_grad(), NumbersOnMeta():
            build()(input_ids=tokens_14, position_ids=torch.zeros_like(tokens_14), use_cache=False)
    return bool(told) and all(told)


FLASH = "flash_attention_2"


@contextmanager
def _in_place(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if own is None else setattr(owner, name, own)


class NumbersOnMeta(TorchDispatchMode):
    """Tells code that asks a tensor of the meta device for a number, which it does not have, 1 or true.

    A rotary embedding asks whether the longest row is longer than the original length (``dynamic_rope_update``,
    modeling_rope_utils.py:34), linear attention whether any token is padding. Can go when torch has a meta device whose tensors
    have numbers.
    """

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if operator is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype == torch.bool or 1
        return operator(*args, **(kwargs or {}))


class _FirstBlockError(Exception):
    """A forward has come to its first block."""


class _DecoderOutput(BaseModelOutputWithPast):
    """Has whatever field a model copies from its decoder's output."""

    def __getattr__(self, name: str) -> None:
        return None
