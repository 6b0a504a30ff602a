"""One rank of the tests of leaving out zero-advantage responses: the same update with and without them, from the same weights.

Started by ``test_zero_advantage_update.py``, which compares the two.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.verl_ext.engines import REFERENCE, Setup, Sizes, build_engine, install_reference, training_worker
from tests.verl_ext.rank_group import run_rank

TOKEN_MEAN = "token-mean"
AGGREGATIONS = (TOKEN_MEAN, "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "gpg", "cispo", "gspo", "sapo")
SETUPS = {
    "fsdp2, packed, a token budget": (Setup("qwen3", "fsdp2", packed=True), Sizes(budget=60)),
}
FEW_SETUPS = {
    "fsdp, padded, fixed micro-batches": (Setup("qwen3", "fsdp"), Sizes(rows=2)),
    "fsdp2, lora": (Setup("qwen3", "fsdp2", adapter="adapter"), Sizes(rows=4)),
    "fsdp2, parameters offloaded": (
        Setup("qwen3", "fsdp2", options={"param_offload": True, "optimizer_offload": True}),
        Sizes(budget=60),
    ),
    "fsdp2, two ranks a sequence": (
        Setup("qwen3", "fsdp2", packed=True, attention=REFERENCE, sequence_parallel=2),
        Sizes(budget=60),
    ),
}
EXPERIMENTS = {"updates": SETUPS, "few_updates": FEW_SETUPS}


def combinations() -> list[tuple[str, str]]:
    """Loss and aggregation."""
    return [(loss, TOKEN_MEAN) for loss in LOSSES] + [("vanilla", mode) for mode in AGGREGATIONS[1:]]


class Experiments:
    """One method a kind of experiment; each returns plain data."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.rank, self.world_size, self.folder = rank, world_size, folder
        self.plan = torch.load(folder / "plan.pt", weights_only=False)
        self.mini_batch_rows = len(self.plan[0])
        install_reference()

    def updates(self, setup: tuple[Setup, Sizes]) -> dict[Any, Any]:
        """Of every loss and every aggregation."""
        return self._updates(setup, combinations())

    def few_updates(self, setup: tuple[Setup, Sizes]) -> dict[Any, Any]:
        """Of the usual loss alone."""
        return self._updates(setup, combinations()[:1])

    def _updates(self, setup: tuple[Setup, Sizes], chosen: list[tuple[str, str]]) -> dict[Any, Any]:
        from verl.utils.profiler import DistProfiler

        together = setup[0].sequence_parallel
        share, place = self.mini_batch_rows * together // self.world_size, self.rank // together
        self.rows = [row for mini_batch in self.plan for row in mini_batch[place * share : (place + 1) * share]]
        engine = build_engine(setup[0], self.folder)
        setup[1].set(engine)
        for parameters in engine.optimizer.param_groups:
            parameters["eps"] = 1e-3  # Adam makes a step of any rounding else
            parameters["weight_decay"] = 0.1
        worker = training_worker(engine)
        worker.profiler = DistProfiler(rank=0)
        self.old_log_probs = self._old_log_probs(worker)
        first = [parameter.detach().clone() for parameter in self._parameters(engine)]
        results = {}
        for loss, aggregation in chosen:
            for name in ("verl", "skipped"):
                with torch.no_grad():
                    for parameter, value in zip(self._parameters(engine), first, strict=True):
                        parameter.copy_(value)
                engine.optimizer.state.clear()
                results[loss, aggregation, name] = self._update(worker, loss, aggregation, name == "skipped", first)
        return results

    def _parameters(self, engine: Any) -> list[torch.Tensor]:
        parameters = (p for p in engine.module.parameters() if p.requires_grad)
        return [p.to_local() if hasattr(p, "to_local") else p.data for p in parameters]

    def _data(self) -> Any:
        from verl.utils import tensordict_utils as tu

        from grail_advantage.verl_ext.exchange import nested

        tokens = [torch.cat([row["prompt"], row["response"]]) for row in self.rows]
        return tu.get_tensordict(
            {
                "input_ids": nested(tokens),
                "position_ids": nested([torch.arange(len(row)) for row in tokens]),
                "prompts": nested([row["prompt"] for row in self.rows]),
                "responses": nested([row["response"] for row in self.rows]),
                "response_mask": nested([row["mask"] for row in self.rows]),
                "loss_mask": nested([row["mask"] for row in self.rows]),
                "advantages": nested([row["advantages"] for row in self.rows]),
                "rollout_is_weights": nested([row["weights"] for row in self.rows]),
            },
            non_tensor_dict={"temperature": 0.8, "calculate_entropy": False, "compute_loss": False},
        )

    def _old_log_probs(self, worker: Any) -> Any:
        """The policy's own, with noise that takes some ratios out of their bounds."""
        from verl.workers.utils.padding import response_from_nested

        from grail_advantage.verl_ext.exchange import nested

        data = self._data()
        output = [worker.infer_batch(data)]
        if worker.engine.ulysses_sequence_parallel_size == self.world_size > 1:
            torch.distributed.broadcast_object_list(output)  # verl collects that of one rank
        own = response_from_nested(output[0]["log_probs"], data["response_mask"]).unbind()
        return nested([values + row["noise"] for values, row in zip(own, self.rows, strict=True)])

    def _update(
        self, worker: Any, loss: str, aggregation: str, skips: bool, first: list[torch.Tensor]
    ) -> dict[str, Any]:
        from verl.utils import tensordict_utils as tu
        from verl.workers.config import FSDPActorConfig, PolicyLossConfig
        from verl.workers.utils.losses import ppo_loss

        from grail_advantage.verl_ext.zero_advantage import LEAVE_OUT

        actor = FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=2,
            use_dynamic_bsz=True,
            loss_agg_mode=aggregation,
            loss_scale_factor=24,
            policy_loss=PolicyLossConfig(loss_mode=loss),
        )
        worker.loss_fn = partial(ppo_loss, actor)
        data = self._data()
        data["old_log_probs"] = self.old_log_probs
        tu.assign_non_tensor(
            data,
            global_batch_size=self.mini_batch_rows,
            mini_batch_size=self.mini_batch_rows,
            epochs=1,
            seed=0,
            dataloader_kwargs={"shuffle": False},
        )
        if skips:
            tu.assign_non_tensor(data, **{LEAVE_OUT: True})
        positions = []
        embeddings = worker.engine.module.get_input_embeddings()
        handle = embeddings.register_forward_hook(lambda _module, args, _output: positions.append(args[0].numel()))
        gradients: list[list[torch.Tensor]] = []

        def step() -> Any:
            of_step = [p.grad for p in worker.engine.module.parameters() if p.requires_grad]
            # None: of a parameter that is on another rank as a whole
            known = [torch.zeros(0) if g is None else g.to_local() if hasattr(g, "to_local") else g for g in of_step]
            gradients.append([g.clone() for g in known])
            return type(worker.engine).optimizer_step(worker.engine)

        with patch.object(worker.engine, "optimizer_step", step):
            output = worker.train_mini_batch(data)
        metrics = {} if output is None else tu.get(output, "metrics")
        handle.remove()
        moved = [now - then for now, then in zip(self._parameters(worker.engine), first, strict=True)]
        return {
            "moved": moved,
            "gradients": gradients,
            "positions": sum(positions),
            "metrics": {name: list(map(float, values)) for name, values in metrics.items()},
        }


if __name__ == "__main__":
    run_rank(Experiments, EXPERIMENTS, sys.argv[1:])
