"""FSDP1 reshards a unit from a hook on its flat parameter's gradient, which a backward to an activation never computes.

Each unit that this backward reaches would stay unsharded until its end: with the first activation as the leaf, the whole model.
FSDP1 has the answer for frozen units, whose parameters get no gradient either: it reshards when the gradients of the unit's
inputs are there (``torch.distributed.fsdp._runtime_utils._register_post_backward_reshard_only_hook``). It does so by the flat
parameter's ``requires_grad``, and offers no public way to ask for it. FSDP2 reshards by a function on the activations' path and
needs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves


def units_of(model: nn.Module) -> list[nn.Module]:
    """FSDP1's units inside a model."""
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FullyShardedDataParallel

    return [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside an FSDP1 unit, whose forward runs with the unit's parameters whole; any other module itself."""
    return module.module if module in units_of(module) else module


@contextmanager
def resharding(model: nn.Module) -> Iterator[None]:
    """While open, forwards of FSDP1 units reshard the unit in a backward as soon as the gradients of its inputs are there.

    For backwards to activations alone: in one that also reaches parameters, FSDP1 reshards by itself. The hooks are gone
    afterwards, whatever happened inside; without FSDP1 units there are none.
    """
    # FSDP1 does it by itself where nothing in the unit trains.
    units = [unit for unit in units_of(model) if unit._handle is not None and unit._handle.flat_param.requires_grad]
    handles = [unit.register_forward_pre_hook(_reshard_behind_inputs, with_kwargs=True) for unit in units]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _reshard_behind_inputs(unit: nn.Module, args: tuple, kwargs: dict) -> None:
    from torch.distributed.fsdp._runtime_utils import _post_backward_reshard_only_hook

    if not torch.is_grad_enabled():
        return
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if inputs:
        register_multi_grad_hook(inputs, partial(_post_backward_reshard_only_hook, unit, unit._handle))
