"""One rank of the tests of the fused pass: log-probabilities and saliency of a batch from verl's training worker.

Started by ``test_shared_forward.py``, which compares what comes back with verl's own inference and with the separate pass.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.verl_ext.rank_group import run_rank
from tests.verl_ext.saliency_pass_ranks import (
    HALF,
    Pass,
    Setup,
    build_engine,
    hooks,
    leftovers,
    run_pass,
    shards,
    train_step,
)

NO_TARGET = (-1, -1)
Row = tuple[torch.Tensor, int, tuple[int, int]]
"""Tokens of prompt + response, index of the first response token, and the target's range or ``NO_TARGET``."""


@dataclass(frozen=True)
class Fused:
    """How a pass runs; ``rows`` a micro-batch for training and inference, or a token budget for each."""

    leaf: str = "embeddings"
    temperature: float = 1.0
    rows: tuple[int, int] | None = None
    budget: tuple[int, int] | None = None


HOWS = {
    "one row each": Fused(rows=(1, 1)),
    "rows": Fused(temperature=0.7, rows=(2, 3)),
    "budget, middle": Fused("middle", temperature=1.3, budget=(260, 400)),
}
SHARES = ("uneven", "none on one rank", "all on one rank", "all", "none")
"""How the rows with a target are spread over the ranks; the plan holds each."""

SETUPS = {
    "fsdp": Setup("qwen3", "fsdp"),
    "fsdp, tied, no checkpointing": Setup("llama-tied", "fsdp", checkpointing=False),
    "fsdp, original parameters": Setup("llama", "fsdp", options={"use_orig_params": True}),
    "fsdp, packed": Setup("llama-tied", "fsdp", packed=True),
    "fsdp, lora": Setup("qwen3-tied", "fsdp", adapter="adapter"),
    "fsdp, unsharded between forward and backward": Setup("qwen3", "fsdp", options={"reshard_after_forward": False}),
    "fsdp, parameters offloaded": Setup("qwen3", "fsdp", options={"param_offload": True, "optimizer_offload": True}),
    "fsdp, packed, fused kernels": Setup("llama-tied", "fsdp", packed=True, kernels="torch"),
    "fsdp2": Setup("qwen3", "fsdp2"),
    "fsdp2, tied, no checkpointing": Setup("llama-tied", "fsdp2", checkpointing=False),
    "fsdp2, packed": Setup("qwen3", "fsdp2", packed=True),
    "fsdp2, packed to a multiple of 64": Setup(
        "qwen3", "fsdp2", packed=True, options={"pad_to_length": True, "pad_to_length_bucket": 64}
    ),
    "fsdp2, lora": Setup("qwen3-tied", "fsdp2", adapter="adapter"),
    "fsdp2, replicas": Setup("qwen3", "fsdp2", options={"fsdp_size": 1}),
    "fsdp2, activations offloaded": Setup("qwen3", "fsdp2", activation_offload=True),
    "fsdp2, parameters offloaded": Setup("qwen3", "fsdp2", options={"param_offload": True, "optimizer_offload": True}),
}
HALVED = {
    "fsdp": Setup("qwen3", "fsdp", options=HALF),
    "fsdp2": Setup("qwen3", "fsdp2", options=HALF),
}
SPREAD = {"fsdp": SETUPS["fsdp"], "fsdp2, packed": SETUPS["fsdp2, packed"]}
SPREAD_HOWS = ("rows", "budget, middle")
TRAINED = {
    "fsdp": Setup("qwen3-dropout", "fsdp"),
    "fsdp2": Setup("qwen3-dropout", "fsdp2"),
    "fsdp2, lora": Setup("qwen3-dropout", "fsdp2", adapter="adapter"),
}
COUNTED = {
    "fsdp2": Setup("qwen3", "fsdp2", checkpointing=False),
    "fsdp2, checkpointing": Setup("qwen3", "fsdp2"),
}
RAISING = {"fsdp": SETUPS["fsdp"], "fsdp2": SETUPS["fsdp2"]}
EXPERIMENTS = {
    "layouts": SETUPS,
    "halved": HALVED,
    "spread": SPREAD,
    "training": TRAINED,
    "counting": COUNTED,
    "raising": RAISING,
}


def training_worker(engine: Any) -> Any:
    """verl's training worker around an engine, without the process set-up of its constructor."""
    from verl.utils.device import get_device_name

    from grail_advantage.verl_ext.patches import replace_infer_batch
    from grail_advantage.verl_ext.shared_forward import infer_batch_with_saliency
    from grail_advantage.verl_ext.worker import TokenWeightTrainingWorker

    worker = TokenWeightTrainingWorker.__new__(TokenWeightTrainingWorker)
    worker.engine = engine
    worker.engine_config = engine.engine_config
    worker.model_config = engine.model_config
    worker.device_name = get_device_name()
    worker.flops_counter = None
    worker.loss_fn = None
    replace_infer_batch(engine, infer_batch_with_saliency)
    return worker


def log_probs(worker: Any, rows: list[Row], how: Fused, *, fused: bool) -> dict[str, list[torch.Tensor]]:
    """What ``compute_log_prob`` gives for this rank's rows; one list entry a row, nothing where verl collects nothing."""
    from verl.utils import tensordict_utils as tu

    from grail_advantage.verl_ext.shared_forward import LEAF, TARGET

    config = worker.engine_config
    config.use_dynamic_bsz = how.budget is not None
    config.max_token_len_per_gpu, config.infer_max_token_len_per_gpu = how.budget or (None, None)
    config.micro_batch_size_per_gpu, config.infer_micro_batch_size_per_gpu = how.rows or (None, None)

    def nested(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    data = tu.get_tensordict(
        {
            "input_ids": nested([tokens for tokens, _, _ in rows]),
            "position_ids": nested([torch.arange(len(tokens)) for tokens, _, _ in rows]),
            "loss_mask": nested([torch.arange(len(tokens)) >= start for tokens, start, _ in rows]),
            TARGET: torch.tensor([target for _, _, target in rows]),
        },
        non_tensor_dict={"temperature": how.temperature, "calculate_entropy": True, "compute_loss": False},
    )
    if fused:
        tu.assign_non_tensor(data, **{LEAF: how.leaf})
    output = worker.infer_batch(data)
    if output is None:
        return {}
    names = [
        name for name in ("log_probs", "entropy", "saliency", "gradient_norm", "saliency_seconds") if name in output
    ]
    return {name: [row.clone() for row in output[name].unbind()] for name in names}


def separate(engine: Any, rows: list[Row], how: Fused) -> dict[str, list[torch.Tensor]]:
    """The separate pass on all rows that a target was planned for."""
    cut = [(tokens[:end], response_start, start) for tokens, response_start, (start, end) in rows]
    training_rows, _ = how.rows or (None, None)
    budget, _ = how.budget or (None, None)
    return run_pass(engine, cut, Pass(how.leaf, "official", how.temperature, rows=training_rows, budget=budget))


@contextmanager
def counted(module: torch.nn.Module) -> Iterator[Counter]:
    """Count how many times the first block's attention runs, and how many backwards pass through its MLP's output."""
    counts: Counter = Counter()
    inside = {name.rsplit(".")[-1]: inner for name, inner in module.named_modules() if "layers.0." in name}

    def after(_module: torch.nn.Module, _args: tuple, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: counts.update(["backwards"]))

    handles = [
        inside["self_attn"].register_forward_pre_hook(lambda *_: counts.update(["forwards"])),
        inside["mlp"].register_forward_hook(after),
    ]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


class Experiments:
    """One method a kind of experiment; each returns plain data."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.rank = rank
        self.folder = folder
        self.plan = torch.load(folder / "plan.pt", weights_only=False)

    def rows(self, share: str = "uneven") -> list[Row]:
        """This rank's rows."""
        return self.plan[share][self.rank]

    def _compare(self, worker: Any, rows: list[Row], how: Fused) -> dict[str, Any]:
        before = hooks(worker.engine.module)
        own = log_probs(worker, rows, how, fused=False)
        found = log_probs(worker, rows, how, fused=True)
        left = leftovers(worker.engine, before)
        return {
            "verl": own,
            "fused": found,
            "leftovers": left,
            "separate": separate(worker.engine, self._all(rows), how),
        }

    def _all(self, rows: list[Row]) -> list[Row]:
        """The rows with the target that each would have if it were chosen, so that all ranks have as many."""
        return [(tokens, start, self.plan["targets"][tuple(tokens.tolist())]) for tokens, start, _ in rows]

    def layouts(self, setup: Setup) -> dict[str, Any]:
        """Every kind of micro-batch, one after the other on one engine."""
        worker = training_worker(build_engine(setup, self.folder))
        return {name: self._compare(worker, self.rows(), how) for name, how in HOWS.items()}

    def halved(self, setup: Setup) -> dict[str, Any]:
        """Under the autocast that verl trains with by default."""
        worker = training_worker(build_engine(setup, self.folder))
        return self._compare(worker, self.rows(), HOWS["one row each"])

    def spread(self, setup: Setup) -> dict[str, Any]:
        """Targets on some ranks only, in every kind of micro-batch."""
        worker = training_worker(build_engine(setup, self.folder))
        return {
            (share, name): self._compare(worker, self.rows(share), HOWS[name])
            for share in SHARES
            for name in SPREAD_HOWS
        }

    def training(self, setup: Setup) -> dict[str, Any]:
        """Two optimiser steps: with verl's inference before each, and with the fused pass before each."""
        results = {}
        for name, fused in (("verl", False), ("fused", True)):
            engine = build_engine(setup, self.folder)
            worker = training_worker(engine)
            norms = []
            for _ in range(2):
                for how in (HOWS["rows"], HOWS["budget, middle"]):
                    log_probs(worker, self.rows(), how, fused=fused)
                engine.engine_config.use_dynamic_bsz = False
                norms.append(train_step(engine, [(tokens, start, start) for tokens, start, _ in self.rows()]))
            results[name] = {"final": shards(engine), "norms": norms}
        return results

    def counting(self, setup: Setup) -> dict[str, Any]:
        """Forwards and backwards of a batch with one row a micro-batch."""
        worker = training_worker(build_engine(setup, self.folder))
        results = {}
        for share in SHARES:
            for name, fused in (("verl", False), ("fused", True)):
                with counted(worker.engine.module) as counts:
                    log_probs(worker, self.rows(share), HOWS["one row each"], fused=fused)
                results[share, name] = dict(counts)
        return results

    def raising(self, setup: Setup) -> dict[str, Any]:
        """What a pass leaves behind when a block fails, or when the model changes its logits behind its head."""
        errors = []
        for where in ("block", "logits"):
            engine = build_engine(setup, self.folder)
            worker = training_worker(engine)
            before = hooks(engine.module)

            def explode(*_: Any) -> None:
                raise ZeroDivisionError

            def double(_module: Any, _args: Any, output: Any) -> Any:
                output.logits = output.logits * 2
                return output

            if where == "block":
                module = next(m for n, m in engine.module.named_modules() if "layers.2" in n and n.endswith(".mlp"))
                handle = module.register_forward_pre_hook(explode)
            else:
                inner = next(m for m in engine.module.modules() if type(m).__name__.endswith("Qwen3ForCausalLM"))
                handle = inner.register_forward_hook(double, prepend=True)
            try:
                log_probs(worker, self.rows("all"), HOWS["one row each"], fused=True)
            except Exception as error:
                handle.remove()
                errors.append((type(error).__name__, str(error), leftovers(engine, before)))
        return {"errors": errors}


if __name__ == "__main__":
    run_rank(Experiments, EXPERIMENTS, sys.argv[1:])
