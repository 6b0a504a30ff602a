"""Every place where the core replaces a part of torch or transformers, or reaches into a private one. Each function
names the line that it answers, as of torch 2.13.0 and transformers 5.10.4, and the test that says when it can go."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import Module
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


@contextmanager
def checkpointing_in_evaluation(blocks: Sequence[GradientCheckpointingLayer]) -> Iterator[None]:
    """While open, each block runs in evaluation mode inside a checkpoint of its own; afterwards all are in that mode.
    Transformers checkpoints a block only in training mode, which also switches its dropout on
    (``GradientCheckpointingLayer.__call__``, modeling_layers.py:60), so the blocks only seem to train to the code around
    them. A reentrant checkpoint (``_gradient_checkpointing_func``, line 92) has no gradient of activations: none is.
    Can go when ``test_blocks_are_checkpointed_in_evaluation_mode_inside`` passes without it."""
    saved = [
        {name: vars(block)[name] for name in _CHECKPOINTING if name in vars(block)}
        for block in blocks
    ]
    try:
        for block in blocks:
            block.training = block.gradient_checkpointing = True
            block._gradient_checkpointing_func = partial(_checkpointed, block)
        yield
    finally:
        for block, attributes in zip(blocks, saved, strict=True):
            block.training = False
            # What the block did not have as its own goes, so that its class's shows again.
            for name in _CHECKPOINTING:
                vars(block).pop(name, None)
            vars(block).update(attributes)


# Of a GradientCheckpointingLayer
_CHECKPOINTING = "gradient_checkpointing", "_gradient_checkpointing_func"


def _checkpointed(block: Module, function: Callable, *args: Any) -> Any:
    def evaluated(*inputs: Any) -> Any:
        block.training = False
        try:
            return function(*inputs)
        finally:
            block.training = True

    return checkpoint(evaluated, *args, use_reentrant=False)


@contextmanager
def resharding(model: Module) -> Iterator[None]:
    """While open, forwards of the model's FSDP1 units reshard the unit in a backward as soon as the gradients of its
    inputs are there. For backwards to activations alone: in one that also reaches parameters, FSDP1 does so by itself.

    FSDP1 reshards a unit from a hook on its flat parameter's gradient, which such a backward never computes, so each unit
    that it reaches would stay unsharded until its end: with the first activation, the whole model. The hook on the
    inputs' gradients is FSDP1's own for frozen units, and there is no public way to ask for it
    (``_register_post_backward_reshard_only_hook``, fsdp/_runtime_utils.py:1501, returns where the flat parameter trains).
    Can go with FSDP1, or when ``test_whole_blocks_are_as_few_as_in_training`` of ``verl_ext/test_passes.py``
    passes without it."""
    units: list[Any] = []
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FullyShardedDataParallel

        units = FullyShardedDataParallel.fsdp_modules(model)
    with ExitStack() as hooks:
        for unit in units:
            if unit._handle is not None and unit._handle.flat_param.requires_grad:
                hooks.enter_context(
                    unit.register_forward_pre_hook(_reshard_after_inputs, with_kwargs=True)
                )
        yield


def _reshard_after_inputs(unit: Any, args: tuple, kwargs: dict) -> None:
    from torch.distributed.fsdp._runtime_utils import _post_backward_reshard_only_hook

    if not torch.is_grad_enabled():
        return
    inputs = [
        leaf
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if inputs:
        register_multi_grad_hook(
            inputs, partial(_post_backward_reshard_only_hook, unit, unit._handle)
        )


def reset_sharding(model: Module) -> None:
    """Put FSDP's units back after a forward or a backward that raised: parameters that were gathered for it would stay so,
    and the next forward would take them for its own.

    FSDP2 has a function for its root since torch 2.13 (``FSDPModule.reset_iter_state``), and before one for each module
    that leaves the states of the iteration; FSDP1 has none (``HandleTrainingState``, fsdp/_runtime_utils.py:330). Can go
    with FSDP1 and torch before 2.13, but for that call."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
    from torch.distributed.fsdp._runtime_utils import _reshard

    for module in model.modules():
        if isinstance(module, FSDPModule) and hasattr(module, "reset_iter_state"):
            with suppress(RuntimeError):  # of a module that is no root
                module.reset_iter_state()
        elif isinstance(module, FSDPModule):
            module.reshard()
        elif isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            handle = module._handle
            module.training_state = TrainingState.IDLE
            handle._training_state = HandleTrainingState.IDLE
            if handle.uses_sharded_strategy and not handle.is_sharded(handle.flat_param):
                _reshard(module, handle, True)


# Of a block: handles that PEFT takes off in the block's backward.
_WAITING = "_peft_gradient_checkpointing_forward_hooks"


def refuse_waiting_hooks(model: Module) -> None:
    """ValueError for a model with a forward whose backward is to come, which a pass would take the hooks from."""
    if any(vars(module).get(_WAITING) for module in model.modules()):
        raise ValueError(
            "the model's last forward still waits for its backward (PEFT's activated LoRA with gradient checkpointing); "
            "run that first, or switch gradient checkpointing off"
        )


def release_waiting_hooks(model: Module) -> None:
    """Take off the hooks that a forward of PEFT's activated LoRA has left on the model.

    It puts hooks on each checkpointed block, which only the backward of the block takes off, and refuses a forward while
    there are any (``LoraModel._enable_peft_forward_hooks``, tuners/lora/model.py:607 of PEFT 0.21). A forward without
    gradients has no backward, and that of a pass ends at an activation. Those of a forward that raises stay on the layers.
    Can go when ``test_an_activated_adapter_is_as_before`` passes without it."""
    for module in model.modules():
        waiting = vars(module).get(_WAITING, [])
        while waiting:
            waiting.pop().remove()
        for key, hook in list(module._forward_pre_hooks.items()):
            if getattr(getattr(hook, "func", None), "__module__", "").startswith("peft."):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
