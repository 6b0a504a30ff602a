"""A device that plays a graphics card on any machine: it mixes with no tensor of the CPU, and like Apple's MPS has no float64.

A tensor of it has one of the CPU within, which does the arithmetic. A process that imports this has the device for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)


class _Module(_DummyBackendModule):
    def get_rng_state(self, device=None) -> Tensor:
        return torch.zeros(0)

    def set_rng_state(self, state: Tensor, device=None):
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend("card", _Module())
DEVICE = torch.device("card:0")
INDEXING = ("aten.index.", "aten.index_put", "aten._index_put", "aten._unsafe_index")
"""That take indices of the CPU."""
COPIES = ("aten._to_copy", "aten.copy_")
"""From device to device."""


def _run(_owner, func, types, args=(), kwargs=None):
    """An operation on tensors of the card or of the CPU."""
    kwargs = dict(kwargs or {})
    name = str(func)
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    cards = [isinstance(value, OnCard) for value in tensors]
    is_on_card = any(cards)
    # A tensor that is made: on the device that is named.
    if kwargs.get("device") is not None:
        is_on_card = torch.device(kwargs["device"]).type == DEVICE.type
        kwargs["device"] = torch.device("cpu")
    if name.startswith("aten.copy_"):
        is_on_card = cards[0]
    elif any(cards) and not name.startswith(COPIES):
        # A number of the CPU mixes with every device.
        is_alien = any(not isinstance(value, OnCard) and value.ndim for value in tensors)
        if is_alien and not (name.startswith(INDEXING) and cards[0]):
            raise RuntimeError(f"{name}: tensors on {DEVICE} and on the CPU")
    plain_args, plain_kwargs = tree_map_only(
        OnCard, lambda value: value.of_cpu, (args, kwargs)
    )
    # The arithmetic is the CPU's.
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*plain_args, **plain_kwargs)
    if not is_on_card:
        return result
    # An operation in place gives its argument.
    same = {id(value.of_cpu): value for value in tensors if isinstance(value, OnCard)}

    def to_card(value):
        if value.dtype == torch.float64:
            raise TypeError(f"{name}: {DEVICE} has no float64")
        return same[id(value)] if id(value) in same else OnCard(value)

    return tree_map_only(Tensor, to_card, result)


class OnCard(Tensor):
    """A tensor of the card."""

    of_cpu: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnCard:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        tensor = Tensor._make_wrapper_subclass(
            cls, inner.shape, **layout, dtype=inner.dtype, device=DEVICE
        )
        tensor.of_cpu = inner
        return tensor

    def __repr__(self, **_) -> str:
        return f"OnCard({self.of_cpu})"

    def tolist(self):
        return self.of_cpu.tolist()

    __torch_dispatch__ = classmethod(_run)


class _Card(TorchDispatchMode):
    __torch_dispatch__ = _run


@contextmanager
def card() -> Iterator[torch.device]:
    """Within, tensors can be made on the device and moved there."""

    def tensor(data, *, device=None, make=torch.tensor, **options):
        result = make(data, **options)
        return result if device is None else result.to(device)

    def generator(device="cpu", make=torch.Generator):
        return make("cpu")

    with (
        _Card(),
        patch.object(torch, "tensor", tensor),
        patch.object(torch, "Generator", generator),
    ):
        yield DEVICE


def moved(model: nn.Module) -> nn.Module:
    """The model with its parameters and buffers on the card; tied ones stay so."""
    seen: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, values in module._parameters.items():
            if values is not None:
                new = nn.Parameter(OnCard(values.detach()), values.requires_grad)
                module._parameters[name] = seen.setdefault(id(values), new)
        module._buffers.update(
            {
                name: OnCard(values)
                for name, values in module._buffers.items()
                if values is not None
            }
        )
    return model
