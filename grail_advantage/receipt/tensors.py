"""What the public doors refuse in a tensor, by the argument's name. It is here as the receipt is a wheel of its own too."""

from __future__ import annotations

import torch

DTYPES = {
    *(
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    ),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
"""Types that can be computed with: not float8, float4, quantised ones, or bits."""


def check_tensor(name: str, values: object) -> None:
    """Refuse anything but a plain tensor: strided, of real numbers, with values.

    Raises:
        ValueError: naming the argument and the fix.
    """
    if not isinstance(values, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(values).__name__}; use torch.tensor(...)")
    if values.layout != torch.strided or values.is_nested or values.is_complex() or values.is_meta:
        kind = "nested" if values.is_nested else f"{values.dtype}, {values.layout}, on {values.device}"
        raise ValueError(f"{name} must be a dense tensor of real numbers with values, got one that is {kind}")
    if values.dtype not in DTYPES:
        how = "dequantize()" if values.is_quantized else "to(torch.float32)"
        raise ValueError(f"{name} holds {values.dtype}, whose numbers cannot be compared; give {name}.{how}")


def check_numbers(name: str, values: torch.Tensor, kinds: str) -> None:
    """Refuse a plain tensor of other values than ``kinds``: ``floats``, ``whole numbers``, ``numbers`` (either), ``0 or 1``.

    Raises:
        ValueError: naming the argument and the fix.
    """
    whole = not values.is_floating_point() and values.dtype != torch.bool
    known = {"floats": values.is_floating_point(), "whole numbers": whole, "numbers": values.dtype != torch.bool}
    if not known.get(kinds, True):
        like = "torch.int64" if kinds == "whole numbers" else "torch.float32"
        raise ValueError(f"{name} must hold {kinds}, got {values.dtype}; use {like}")
    if kinds == "0 or 1" and values.dtype != torch.bool:
        others = values[(values != 0) & (values != 1)]
        if others.numel():
            raise ValueError(
                f"{name} must be bool or hold 0 and 1, got {others[0].item()}; a mask says which tokens are meant"
            )
