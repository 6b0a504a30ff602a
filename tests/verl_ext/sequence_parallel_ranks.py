"""One rank of the tests of the saliency pass under Ulysses sequence parallelism, and with more than two ranks.

verl's Ulysses exchange sits around ``transformers``' flash attention. Where there is no flash attention, a reference with the
same meaning stands in its place, behind verl's own wrapper and its all-to-all; on GPUs nothing is replaced.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tests.verl_ext import shared_forward_ranks as fused
from tests.verl_ext.rank_group import on_gpus, run_rank
from tests.verl_ext.saliency_pass_ranks import Setup, build_engine, hooks, leftovers, shards, train_step

REFERENCE = "packed_attention_reference"


@dataclass(frozen=True)
class Layout:
    """Ranks, how many of them share a sequence, and the engine."""

    ranks: int
    sequence_parallel: int
    strategy: str
    model: str = "qwen3"
    adapter: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def setup(self, attention: str) -> Setup:
        options = {"ulysses_sequence_parallel_size": self.sequence_parallel, **self.options}
        return Setup(self.model, self.strategy, packed=True, adapter=self.adapter, attention=attention, options=options)


LAYOUTS = {
    "fsdp, 2 ranks, 2 a sequence": Layout(2, 2, "fsdp"),
    "fsdp2, 2 ranks, 2 a sequence": Layout(2, 2, "fsdp2", "llama-tied"),
    "fsdp2, 4 ranks, 2 a sequence": Layout(4, 2, "fsdp2"),
    "fsdp, 4 ranks, 4 a sequence": Layout(4, 4, "fsdp"),
    "fsdp2, 4 ranks, 4 a sequence, padded to a multiple of 64": Layout(
        4, 4, "fsdp2", options={"pad_to_length": True, "pad_to_length_bucket": 64}
    ),
    "fsdp, 4 ranks": Layout(4, 1, "fsdp", "llama-tied"),
    "fsdp2, 4 ranks": Layout(4, 1, "fsdp2"),
    "fsdp2, 4 ranks, groups of two": Layout(4, 1, "fsdp2", options={"fsdp_size": 2}),
}
HOWS = {
    "one row each": fused.Fused(temperature=0.7, rows=(1, 1)),
    "budget, middle": fused.Fused("middle", temperature=1.3, budget=(260, 400)),
}


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    query_length: int,
    *,
    position_ids: torch.Tensor,
    softmax_scale: float,
    **_: Any,
) -> torch.Tensor:
    """Variable-length causal attention over packed rows, which begin where the position is 0; tensors (1, S, heads, dim)."""
    segment_S = (position_ids[0] == 0).cumsum(0)
    visible_SS = (segment_S.unsqueeze(1) == segment_S).tril()
    found = F.scaled_dot_product_attention(
        *(tensor.transpose(1, 2) for tensor in (query, key, value)),
        attn_mask=visible_SS,
        scale=softmax_scale,
        enable_gqa=True,
    )
    return found.transpose(1, 2)


def install_reference() -> None:
    """Put the reference where verl's Ulysses wrapper calls flash attention."""
    from transformers import AttentionInterface
    from transformers.integrations import flash_attention
    from verl.models.transformers import monkey_patch

    AttentionInterface.register(REFERENCE, flash_attention.flash_attention_forward)
    monkey_patch._flash_attention_forward = attend


class Experiments:
    """The passes on one engine, and what the next optimiser steps make of them."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.rank = rank
        self.folder = folder
        self.plan = torch.load(folder / "plan.pt", weights_only=False)
        self.attention = "flash_attention_2" if on_gpus() else REFERENCE
        if self.attention == REFERENCE:
            install_reference()

    def rows(self, layout: Layout) -> list[tuple[torch.Tensor, int, tuple[int, int], bool]]:
        """The rows of this rank's sequence-parallel group, each with its target and whether it is chosen."""
        return self.plan[layout.ranks // layout.sequence_parallel][self.rank // layout.sequence_parallel]

    def passes(self, engine: Any, layout: Layout) -> dict[str, Any]:
        """The separate pass on all rows, and verl's inference and the fused pass with the chosen ones."""
        rows = self.rows(layout)
        everything = [(tokens, start, target) for tokens, start, target, _ in rows]
        chosen = [(tokens, start, target if chosen else fused.NO_TARGET) for tokens, start, target, chosen in rows]
        worker = fused.training_worker(engine)
        before = hooks(engine.module)
        return {
            name: {
                "separate": fused.separate(engine, everything, how),
                "verl": fused.log_probs(worker, chosen, how, fused=False),
                "fused": fused.log_probs(worker, chosen, how, fused=True),
                "leftovers": leftovers(engine, before),
            }
            for name, how in HOWS.items()
        }

    def layouts(self, layout: Layout) -> dict[str, Any]:
        """The passes on one engine and its next optimiser step, and the same step of a fresh engine."""
        engine = build_engine(layout.setup(self.attention), self.folder)
        found = self.passes(engine, layout)
        fresh = build_engine(layout.setup(self.attention), self.folder)
        return {"passes": found, "after": self._step(engine, layout), "alone": self._step(fresh, layout)}

    def _step(self, engine: Any, layout: Layout) -> dict[str, Any]:
        engine.engine_config.use_dynamic_bsz = False
        norm = train_step(engine, [(tokens, start, start) for tokens, start, _, _ in self.rows(layout)])
        return {"norm": norm, "final": shards(engine)}


if __name__ == "__main__":
    world_size = int(sys.argv[2])
    run_rank(
        Experiments,
        {"layouts": {name: layout for name, layout in LAYOUTS.items() if layout.ranks == world_size}},
        sys.argv[1:],
    )
