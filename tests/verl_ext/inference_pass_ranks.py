"""One rank of the tests of passes without gradients: log-probabilities and hidden states of this rank's rows.

Started twice by ``test_inference_passes.py``, which compares what comes back with one process and a plain model.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from grail_advantage import Signal
from grail_advantage.methods import methods
from tests.verl_ext.rank_group import run_rank
from tests.verl_ext.saliency_pass_ranks import HALF, Setup, build_engine, hooks, leftovers, shards, train_step

WORLD_SIZE = 2
TEMPERATURE = 0.7
SIGNALS: dict[str, Signal] = {
    "rlsd": methods()["rlsd"].build({}),
    "shear": methods()["shear"].build({"window": 12, "stride": 5}),
}
HOWS = {"one row each": {"rows": 1}, "three rows": {"rows": 3}, "budget": {"budget": 100}}
"""Rows of a micro-batch, or its most tokens, fewer than the longest row has."""
SETUPS = {
    "fsdp": Setup("qwen3", "fsdp"),
    "fsdp, packed": Setup("llama-tied", "fsdp", packed=True),
    "fsdp2": Setup("qwen3", "fsdp2"),
    "fsdp2, packed": Setup("qwen3", "fsdp2", packed=True),
    "fsdp2, packed to a multiple of 64": Setup(
        "qwen3", "fsdp2", packed=True, options={"pad_to_length": True, "pad_to_length_bucket": 64}
    ),
    "fsdp2, tied, parameters offloaded": Setup(
        "llama-tied", "fsdp2", checkpointing=False, options={"param_offload": True, "optimizer_offload": True}
    ),
    "fsdp2, lora": Setup("qwen3-tied", "fsdp2", adapter="adapter"),
    "fsdp2, replicas": Setup("qwen3", "fsdp2", options={"fsdp_size": 1}),
}
FUSED = {"fsdp, packed, fused kernels": Setup("llama-tied", "fsdp", packed=True, kernels="torch")}
TRAINED = {"fsdp": Setup("qwen3-dropout", "fsdp"), "fsdp2": Setup("qwen3-dropout", "fsdp2")}
HALVED = {"fsdp2": Setup("qwen3", "fsdp2", options=HALF)}


def run_pass(engine: Any, rows: list, signal: Signal, how: dict[str, int]) -> list[torch.Tensor]:
    """Scores of this rank's rows."""
    from grail_advantage.verl_ext.wire import build_request
    from grail_advantage.verl_ext.worker import token_scores

    config = engine.engine_config
    config.use_dynamic_bsz = "budget" in how
    config.max_token_len_per_gpu = config.infer_max_token_len_per_gpu = how.get("budget")
    config.micro_batch_size_per_gpu = config.infer_micro_batch_size_per_gpu = how.get("rows")
    output = token_scores(engine, build_request(rows, signal, temperature=TEMPERATURE))
    return [row.clone() for row in output["scores"].unbind()]


class Experiments:
    """One method a kind of experiment; each returns plain data."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.folder = folder
        self.rows = torch.load(folder / "plan.pt", weights_only=False)[rank]

    def passes(self, setup: Setup) -> dict[str, Any]:
        """Every signal in every kind of micro-batch, one after the other on one engine."""
        engine = build_engine(setup, self.folder)
        before = hooks(engine.module)
        results = {}
        for name, signal in SIGNALS.items():
            for how, sizes in HOWS.items():
                results[name, how] = run_pass(engine, self.rows, signal, sizes)
        return {"scores": results, "leftovers": leftovers(engine, before)}

    def fused(self, setup: Setup) -> list[torch.Tensor]:
        """Log-probabilities from verl's fused kernels."""
        return run_pass(build_engine(setup, self.folder), self.rows, SIGNALS["rlsd"], HOWS["three rows"])

    def halved(self, setup: Setup) -> dict[str, list[torch.Tensor]]:
        """Under the autocast that verl trains with by default."""
        engine = build_engine(setup, self.folder)
        return {name: run_pass(engine, self.rows, signal, HOWS["three rows"]) for name, signal in SIGNALS.items()}

    def training(self, setup: Setup) -> dict[str, Any]:
        """Two optimiser steps: alone, and with passes before each."""
        results = {}
        for kind, passes in (("alone", ()), ("after passes", SIGNALS.values())):
            engine = build_engine(setup, self.folder)
            norms = []
            for _ in range(2):
                for signal in passes:
                    run_pass(engine, self.rows, signal, HOWS["three rows"])
                norms.append(train_step(engine, [(row.tokens_S, row.response_start) for row in self.rows]))
            results[kind] = {"final": shards(engine), "norms": norms}
        return results


EXPERIMENTS = {"passes": SETUPS, "fused": FUSED, "halved": HALVED, "training": TRAINED}


if __name__ == "__main__":
    run_rank(Experiments, EXPERIMENTS, sys.argv[1:])
