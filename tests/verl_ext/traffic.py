"""What FSDP2 sends in verl's engine, counted: one process that stands for a rank of many, whose collectives go nowhere.

python -m tests.verl_ext.traffic RANKS FOLDER SETUP...      # writes FOLDER/traffic.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.verl_ext.saliency_pass_ranks import Setup, build_engine, train_step
from tests.verl_ext.shared_forward_ranks import HOWS, log_probs, training_worker

SETUPS = {
    "untied": Setup("qwen3", "fsdp2"),
    "untied, no checkpointing": Setup("qwen3", "fsdp2", checkpointing=False),
    "tied": Setup("llama-tied", "fsdp2"),
}
ROWS = 6


class Traffic(TorchDispatchMode):
    """Collectives: how many of each kind, and the elements of the tensors that are gathered or scattered, as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._schema.name
        if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            gathers = "allgather" in name
            kind = "gather" if gathers else "scatter"
            self.calls[kind] += 1
            self.elements[kind] += (args[0] if gathers else args[1]).numel()
        return func(*args, **(kwargs or {}))


def count(run: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, dict[str, int]]:
    """The traffic of a call."""
    with Traffic() as traffic:
        run(*args, **kwargs)
    return {"calls": dict(traffic.calls), "elements": dict(traffic.elements)}


def main(arguments: list[str]) -> None:
    import verl  # noqa: F401  loads the plugin that makes the CPU verl's device
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks, folder = int(arguments[0]), Path(arguments[1])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    rows = torch.load(folder / "rows.pt")
    found = {}
    for name, setup in SETUPS.items():
        engine = build_engine(setup, folder)
        worker, how, module = training_worker(engine), HOWS["one row each"], engine.module
        found[name] = {
            "blocks": len(module.model.layers),
            "block": sum(parameter.numel() for parameter in module.model.layers[0].parameters()),
            "whole": sum(parameter.numel() for parameter in module.parameters()),
            "forward": count(log_probs, worker, rows, how, fused=False),
            "graph": count(log_probs, worker, rows, how, fused=True),
        }
        engine.engine_config.use_dynamic_bsz = False
        # in two micro-batches
        found[name]["update"] = count(train_step, engine, [(tokens, start, start) for tokens, start, _ in rows])
    (folder / "traffic.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
