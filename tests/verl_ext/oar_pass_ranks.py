"""One rank of the tests of OAR's passes: builds verl's FSDP engines and runs passes on its share of the rows.

Started twice by ``test_oar_pass.py``, which compares what comes back with one process and a plain model.
"""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from grail_advantage import OarConfig
from tests.verl_ext.rank_group import run_rank
from tests.verl_ext.saliency_pass_ranks import (
    RankGroup,
    Setup,
    build_engine,
    counted_forwards,
    hooks,
    leftovers,
    scores_through_trainer,
    shards,
    train_step,
)

WORLD_SIZE = 2
PAD_TOKEN = 95


@dataclass(frozen=True)
class Pass:
    """One pass; ``rows`` a micro-batch, or micro-batches of at most ``budget`` tokens."""

    config: OarConfig
    rows: int | None = None
    budget: int | None = None


PASSES = {
    "gradient, one row each": Pass(OarConfig(), rows=1),
    "gradient, three rows, joint": Pass(OarConfig(probe="answer_joint", noise_seed=3), rows=3),
    "gradient, port, last": Pass(OarConfig(variant="grail_port", probe="last"), budget=260),
    "gradient, port, mean": Pass(OarConfig(variant="grail_port"), rows=3),
    "perturbation, five at a time": Pass(OarConfig("perturbation"), rows=5),
    "perturbation, budget, last": Pass(OarConfig("perturbation", probe="last", variant="grail_port"), budget=400),
    "perturbation, few, joint": Pass(OarConfig("perturbation", probe="answer_joint", max_perturbations=7), budget=260),
}

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
    "fsdp2, groups of two": Setup("qwen3", "fsdp2", options={"fsdp_size": 2}),
}
TRAINED = {"fsdp": Setup("qwen3-dropout", "fsdp"), "fsdp2": Setup("qwen3-dropout", "fsdp2")}
HALF = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}}
HALVED = {"fsdp": Setup("qwen3", "fsdp", options=HALF), "fsdp2": Setup("qwen3", "fsdp2", options=HALF)}
UNBALANCED = {"fsdp": Setup("qwen3", "fsdp"), "fsdp2, packed": Setup("qwen3", "fsdp2", packed=True)}


def run_pass(engine: Any, rows: list, how: Pass, step: int = 0) -> dict[str, list[torch.Tensor]]:
    """Run a pass on this rank's rows; one list entry a row."""
    from grail_advantage.verl_ext.wire import build_request
    from grail_advantage.verl_ext.worker import token_scores

    config = engine.engine_config
    config.use_dynamic_bsz = how.budget is not None
    config.max_token_len_per_gpu = how.budget
    config.micro_batch_size_per_gpu = how.rows
    prepared = [how.config.prepare_row(row, None) for row in rows]
    output = token_scores(engine, build_request(prepared, how.config, temperature=1.0, step=step, pad_token=PAD_TOKEN))
    return {name: [row.clone() for row in rows.unbind()] for name, rows in output.items()}


class Experiments:
    """One method a kind of experiment; each returns plain data."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.rank = rank
        self.folder = folder
        self.plan = torch.load(folder / "plan.pt", weights_only=False)

    def rows(self, split: str) -> list:
        """This rank's rows."""
        return self.plan[split][self.rank]

    def passes(self, setup: Setup) -> dict[str, Any]:
        """Every pass of PASSES one after the other on one engine."""
        engine = build_engine(setup, self.folder)
        before = hooks(engine.module)
        results = {}
        for name, how in PASSES.items():
            results[name] = {"rows": run_pass(engine, self.rows("even"), how), "leftovers": leftovers(engine, before)}
        return results

    def steps(self, setup: Setup) -> dict[str, Any]:
        """The same pass in two training steps, the first one twice."""
        engine = build_engine(setup, self.folder)
        return {
            name: run_pass(engine, self.rows("even"), PASSES["gradient, one row each"], step)
            for name, step in (("first", 1), ("again", 1), ("second", 2))
        }

    def training(self, setup: Setup) -> dict[str, Any]:
        """Two optimiser steps: alone, and with two passes before each."""
        names = ("gradient, port, last", "perturbation, five at a time")
        results = {}
        for kind, passes in (("alone", ()), ("after passes", names)):
            engine = build_engine(setup, self.folder)
            norms = []
            for _ in range(2):
                for name in passes:
                    run_pass(engine, self.rows("even"), PASSES[name])
                norms.append(train_step(engine, self.plan["training"][self.rank]))
            results[kind] = {"final": shards(engine), "norms": norms}
        return results

    def unbalanced(self, setup: Setup) -> dict[str, Any]:
        """Many counterfactuals on one rank, few on the other."""
        engine = build_engine(setup, self.folder)
        with counted_forwards(engine.module) as counts:
            output = run_pass(engine, self.rows("unbalanced"), Pass(OarConfig("perturbation"), budget=800))
        return {"forwards": counts[0], **output}

    def progress(self, setup: Setup) -> dict[str, Any]:
        """What a pass writes to stderr while it runs, told to write at once, and told to wait for longer than it takes."""
        from grail_advantage.verl_ext import engine_model

        engine = build_engine(setup, self.folder)
        written = {}
        for name, seconds in (("at once", 0), ("later", 1000 * engine_model.PROGRESS_SECONDS)):
            engine_model.PROGRESS_SECONDS = seconds
            with contextlib.redirect_stderr(io.StringIO()) as stream:
                run_pass(engine, self.rows("even"), PASSES["perturbation, five at a time"])
            written[name] = stream.getvalue()
        return written

    def half_precision(self, setup: Setup) -> dict[str, Any]:
        """Passes under the autocast that verl trains with by default."""
        engine = build_engine(setup, self.folder)
        names = ("gradient, one row each", "perturbation, five at a time")
        return {name: run_pass(engine, self.rows("even"), PASSES[name]) for name in names}

    def trainer(self, config: OarConfig) -> dict[str, Any]:
        """The trainer's own way from a batch to scores, with ranks that both play the trainer and its workers."""
        engine = build_engine(Setup("qwen3", "fsdp2"), self.folder)
        return scores_through_trainer(
            engine,
            RankGroup(self.rank, engine),
            self.plan["trainer"],
            config,
            global_steps=5,
            tokenizer=SimpleNamespace(pad_token_id=PAD_TOKEN),
        )


EXPERIMENTS = {
    "passes": SETUPS,
    "steps": {"fsdp2": Setup("qwen3", "fsdp2")},
    "training": TRAINED,
    "unbalanced": UNBALANCED,
    "progress": {"fsdp2": Setup("qwen3", "fsdp2")},
    "half_precision": HALVED,
    "trainer": {"gradient": OarConfig(variant="grail_port"), "perturbation": OarConfig("perturbation")},
}


if __name__ == "__main__":
    run_rank(Experiments, EXPERIMENTS, sys.argv[1:])
