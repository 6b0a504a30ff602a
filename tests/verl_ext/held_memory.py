"""What a pass holds in memory: whole blocks, logits of long targets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from tests.verl_ext.engines import sharding


@contextmanager
def chunks_of(positions: int) -> Iterator[list[int]]:
    """Let logits be taken of so many positions at a time; filled with the chunks' sizes."""
    from grail_advantage.model import activations
    from grail_advantage.verl_ext import engine_model

    sizes: list[int] = []
    whole = activations.negative_log_likelihood

    def counted(logits_KV: torch.Tensor, *others: Any) -> torch.Tensor:
        sizes.append(len(logits_KV))
        return whole(logits_KV, *others)

    with (
        patch.object(activations, "CHUNK_POSITIONS", positions),
        patch.object(engine_model, "CHUNK_POSITIONS", positions),
        patch.object(activations, "negative_log_likelihood", counted),
    ):
        yield sizes


@contextmanager
def counted_whole_blocks(engine: Any) -> Iterator[list[int]]:
    """How many decoder blocks are held as a whole each time that a backward comes to a block, in that order."""
    counts: list[int] = []

    def count(_gradient: torch.Tensor) -> None:
        held = {part for name in sharding(engine)["held"] for part in name.split(".") if part.isdigit()}
        counts.append(len(held))

    def after(_module: torch.nn.Module, _args: tuple, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(count)

    mlps = [module for name, module in engine.module.named_modules() if name.endswith(".mlp")]
    handles = [mlp.register_forward_hook(after) for mlp in mlps]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()
