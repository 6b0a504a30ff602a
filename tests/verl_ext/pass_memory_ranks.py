"""One rank of the tests of what the saliency pass holds in memory: whole blocks, saved tensors, logits of long targets.

Started twice by ``test_pass_memory.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from tests.verl_ext.rank_group import run_rank
from tests.verl_ext.saliency_pass_ranks import Pass, Setup, hooks, leftovers, run_pass, sharding, shards, train_step
from tests.verl_ext.shared_forward_ranks import HOWS, build_engine, log_probs, training_worker
from tests.verl_ext.shared_forward_ranks import Experiments as SharedForward

CHUNK = 8
"""Far fewer positions than a micro-batch has targets."""
WHOLE = {
    "fsdp": Setup("qwen3", "fsdp"),
    "fsdp, no checkpointing": Setup("qwen3", "fsdp", checkpointing=False),
    "fsdp, original parameters": Setup("llama", "fsdp", options={"use_orig_params": True}),
    "fsdp, lora": Setup("qwen3-tied", "fsdp", adapter="adapter"),
    "fsdp2": Setup("qwen3", "fsdp2"),
}
STRATEGIES = ("fsdp", "fsdp2")
SAVED = {
    f"{strategy}, {'activations offloaded' if offload else 'plain'}, {'checkpointing' if checkpointing else 'none'}": Setup(
        "qwen3", strategy, checkpointing=checkpointing, activation_offload=offload
    )
    for strategy in STRATEGIES
    for offload in (False, True)
    for checkpointing in (False, True)
}
CHUNKED = {
    "fsdp": Setup("qwen3", "fsdp"),
    "fsdp, tied, no checkpointing": Setup("llama-tied", "fsdp", checkpointing=False),
    "fsdp, original parameters": Setup("llama", "fsdp", options={"use_orig_params": True}),
    "fsdp, packed": Setup("llama-tied", "fsdp", packed=True),
    "fsdp, lora on the head": Setup("qwen3", "fsdp", adapter="adapter-head"),
    "fsdp2": Setup("qwen3", "fsdp2"),
    "fsdp2, packed": Setup("qwen3", "fsdp2", packed=True),
    "fsdp2, replicas": Setup("qwen3", "fsdp2", options={"fsdp_size": 1}),
    "fsdp2, lora on the tied head": Setup("qwen3-tied", "fsdp2", adapter="adapter-tied-head"),
    "fsdp2, parameters offloaded by FSDP2": Setup("qwen3", "fsdp2", options={"offload_policy": True}),
}
TRAINED = {
    "fsdp": Setup("qwen3-dropout", "fsdp"),
    "fsdp2": Setup("qwen3-dropout", "fsdp2"),
    "fsdp, activations offloaded": Setup("qwen3-dropout", "fsdp", activation_offload=True),
    "fsdp2, parameters offloaded by FSDP2": Setup("qwen3-dropout", "fsdp2", options={"offload_policy": True}),
}
NAN = {"fsdp": Setup("qwen3-nan", "fsdp"), "fsdp2": Setup("qwen3-nan", "fsdp2")}


@contextmanager
def chunks_of(positions: int) -> Iterator[list[int]]:
    """Let logits be taken of so many positions at a time; filled with the chunks' sizes."""
    from grail_advantage import activations
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


@contextmanager
def saved_bytes(engine: Any) -> Iterator[list[int]]:
    """Bytes that the forwards save for a backward, each storage once, without parameters."""
    found = [0]
    seen: set[int] = set()
    own = (p.to_local() if hasattr(p, "to_local") else p for p in engine.module.parameters())
    parameters = {shard.untyped_storage().data_ptr() for shard in own}
    kept: list[torch.Tensor] = []  # so that no storage is seen twice under one address

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not tensor.is_leaf and storage.data_ptr() not in seen | parameters:
            seen.add(storage.data_ptr())
            kept.append(tensor.detach())
            found[0] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def pageable_activations() -> None:
    """Without an accelerator there is no pinned memory, which verl offloads activations to."""
    from verl.utils.activation_offload import SynchronizedGroupOffloadHandler as Handler

    if not torch.accelerator.is_available():
        pinning = Handler.offload
        Handler.offload = staticmethod(lambda tensor, pin_memory=True: pinning(tensor, pin_memory=False))


class Experiments(SharedForward):
    """One method a kind of experiment; each returns plain data."""

    def _pass_rows(self, share: str = "long") -> list[tuple]:
        return [(tokens[:end], response_start, start) for tokens, response_start, (start, end) in self.rows(share)]

    def whole(self, setup: Setup) -> dict[str, Any]:
        """Whole blocks during the backward of a training step, of passes, and of a shared forward."""
        engine = build_engine(setup, self.folder)
        worker = training_worker(engine)
        rows = self._pass_rows()
        engine.engine_config.use_dynamic_bsz = False
        runs: dict[str, Callable[[], Any]] = {
            "training": lambda: train_step(engine, rows[:2] * 2),
            "embeddings": lambda: run_pass(engine, rows, Pass("embeddings", "official", rows=len(rows))),
            "middle": lambda: run_pass(engine, rows, Pass("middle", "official", rows=len(rows))),
            "shared": lambda: log_probs(worker, self.rows("long"), HOWS["one row each"], fused=True),
        }
        results = {}
        for name, run in runs.items():
            with counted_whole_blocks(engine) as counts:
                run()
            results[name] = {"during": counts, "behind": sharding(engine)["held"]}
        return results

    def saved(self, setup: Setup) -> int:
        """Bytes that a pass saves."""
        engine = build_engine(setup, self.folder)
        rows = self._pass_rows()
        with saved_bytes(engine) as found:
            run_pass(engine, rows, Pass("embeddings", "official", rows=len(rows)))
        return found[0]

    def chunked(self, setup: Setup) -> dict[str, Any]:
        """A pass and a shared forward with the logits of long targets at once, and in chunks."""
        engine = build_engine(setup, self.folder)
        worker = training_worker(engine)
        before = hooks(engine.module)
        results = {}
        for name, positions in (("at once", 10**6), ("chunked", CHUNK)):
            with chunks_of(positions) as sizes:
                how = Pass("embeddings", "official", temperature=0.7, rows=2)
                results[name] = {
                    "pass": run_pass(engine, self._pass_rows(), how),
                    "shared": log_probs(worker, self.rows("long"), HOWS["rows"], fused=True),
                    "chunks": sizes,
                }
        results["leftovers"] = leftovers(engine, before)
        return results

    def trained(self, setup: Setup) -> dict[str, Any]:
        """Two optimiser steps: without passes, and with chunked ones before each."""
        results = {}
        pageable_activations()
        for name in ("alone", "after passes"):
            engine = build_engine(setup, self.folder)
            worker = training_worker(engine)
            norms = []
            for _ in range(2):
                if name == "after passes":
                    with chunks_of(CHUNK):
                        run_pass(engine, self._pass_rows(), Pass("embeddings", "official", rows=2))
                        log_probs(worker, self.rows("long"), HOWS["rows"], fused=True)
                engine.engine_config.use_dynamic_bsz = False
                norms.append(train_step(engine, [(tokens, start, start) for tokens, start, _ in self.rows("long")]))
            results[name] = {"final": shards(engine), "norms": norms}
        return results

    def nan(self, setup: Setup) -> dict[str, Any]:
        """A shared forward and a pass over rows of which some have a token whose embedding is NaN."""
        engine = build_engine(setup, self.folder)
        worker = training_worker(engine)
        found = log_probs(worker, self.rows("nan"), HOWS["rows"], fused=True)
        clean = log_probs(worker, self.rows("clean"), HOWS["rows"], fused=True)
        return {"nan": found, "clean": clean}


EXPERIMENTS = {"whole": WHOLE, "saved": SAVED, "chunked": CHUNKED, "trained": TRAINED, "nan": NAN}


if __name__ == "__main__":
    run_rank(Experiments, EXPERIMENTS, sys.argv[1:])
