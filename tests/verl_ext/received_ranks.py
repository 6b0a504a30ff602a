"""One rank of the tests of what an update's tokens receive: the same update with and without the watch, and what it read.

Started by ``test_received.py``, which checks.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.verl_ext.engines import REFERENCE, Setup, Sizes, build_engine, install_reference, training_worker
from tests.verl_ext.rank_group import run_rank

LOSSES = ("vanilla", "gspo", "cispo", "gpg", "sapo", "dppo_tv", "dppo_kl")
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
EPOCHS = 2
SCALE = 24
SETUPS = {
    "packed, a token budget": (Setup("qwen3", "fsdp2", packed=True), Sizes(budget=60)),
    "padded, fixed micro-batches": (Setup("qwen3", "fsdp"), Sizes(rows=2)),
}
SLICED = {
    "packed, two ranks a sequence": (
        Setup("qwen3", "fsdp2", packed=True, attention=REFERENCE, sequence_parallel=2),
        Sizes(budget=60),
    ),
}


def combinations(packed: bool) -> list[tuple[str, str, bool]]:
    """Loss, aggregation, and whether zero-advantage responses are left out."""
    losses = LOSSES if packed else LOSSES[:1]
    kinds = [(loss, AGGREGATIONS[0]) for loss in losses] + [("vanilla", mode) for mode in AGGREGATIONS[1:]]
    return [*((*kind, False) for kind in kinds), ("vanilla", AGGREGATIONS[0], True)]


class Experiments:
    """One method a kind of experiment; each returns plain data."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.rank, self.world_size, self.folder = rank, world_size, folder
        self.plan = torch.load(folder / "plan.pt", weights_only=False)
        install_reference()

    def updates(self, setup: tuple[Setup, Sizes]) -> dict[Any, Any]:
        """Of every loss and every aggregation."""
        return self._updates(setup, combinations(setup[0].packed))

    def sliced(self, setup: tuple[Setup, Sizes]) -> dict[Any, Any]:
        """Of the usual loss alone."""
        return self._updates(setup, [combinations(True)[place] for place in (0, -1)])

    def rejected(self, setup: tuple[Setup, Sizes]) -> dict[Any, Any]:
        """Of the usual loss, where a rollout correction took a token of each response out of ``response_mask``."""
        for mini_batch in self.plan:
            for row in mini_batch:
                row["generated"], row["mask"] = row["mask"], row["mask"].clone()
                row["mask"][0] = 0
        return self._updates(setup, combinations(True)[:1])

    def _updates(self, setup: tuple[Setup, Sizes], chosen: list[tuple[str, str, bool]]) -> dict[Any, Any]:
        from verl.utils.profiler import DistProfiler

        together = setup[0].sequence_parallel
        ranks, place = self.world_size // together, self.rank // together
        self.places = []
        for number, mini_batch in enumerate(self.plan):
            share = len(mini_batch) // ranks
            self.places += [number * len(mini_batch) + place * share + row for row in range(share)]
        rows = [row for mini_batch in self.plan for row in mini_batch]
        self.rows = [rows[place] for place in self.places]
        engine = build_engine(setup[0], self.folder)
        setup[1].set(engine)
        worker = training_worker(engine)
        worker.profiler = DistProfiler(rank=0)
        first = [parameter.detach().clone() for parameter in self._parameters(engine)]
        results = {}
        for loss, aggregation, skips in chosen:
            for watched in (False, True):
                with torch.no_grad():
                    for parameter, value in zip(self._parameters(engine), first, strict=True):
                        parameter.copy_(value)
                engine.optimizer.state.clear()
                results[loss, aggregation, skips, watched] = self._update(worker, loss, aggregation, skips, watched)
        return results

    def _parameters(self, engine: Any) -> list[torch.Tensor]:
        parameters = (p for p in engine.module.parameters() if p.requires_grad)
        return [p.to_local() if hasattr(p, "to_local") else p.data for p in parameters]

    def _update(self, worker: Any, loss: str, aggregation: str, skips: bool, watched: bool) -> dict[str, Any]:
        from verl.utils import tensordict_utils as tu
        from verl.workers.config import FSDPActorConfig, PolicyLossConfig
        from verl.workers.utils.losses import ppo_loss

        from grail_advantage.verl_ext.exchange import PLACES, WATCHED, nested
        from grail_advantage.verl_ext.zero_advantage import LEAVE_OUT

        actor = FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=2,
            use_dynamic_bsz=True,
            loss_agg_mode=aggregation,
            loss_scale_factor=SCALE,
            policy_loss=PolicyLossConfig(loss_mode=loss),
        )
        worker.loss_fn = loss_fn = partial(ppo_loss, actor)
        tokens = [torch.cat([row["prompt"], row["response"]]) for row in self.rows]
        data = tu.get_tensordict(
            {
                "input_ids": nested(tokens),
                "position_ids": nested([torch.arange(len(row)) for row in tokens]),
                "prompts": nested([row["prompt"] for row in self.rows]),
                "responses": nested([row["response"] for row in self.rows]),
                "response_mask": nested([row["mask"] for row in self.rows]),
                "loss_mask": nested([row.get("generated", row["mask"]) for row in self.rows]),
                "advantages": nested([row["advantages"] for row in self.rows]),
                "rollout_is_weights": nested([row["weights"] for row in self.rows]),
                "old_log_probs": nested([row["old_log_probs"] for row in self.rows]),
                PLACES: torch.tensor([[place, self.rows[i]["written"]] for i, place in enumerate(self.places)]),
            },
            non_tensor_dict={"temperature": 0.8, "calculate_entropy": False, "compute_loss": False},
        )
        tu.assign_non_tensor(
            data,
            global_batch_size=len(self.plan[0]),
            mini_batch_size=len(self.plan[0]),
            epochs=EPOCHS,
            seed=0,
            dataloader_kwargs={"shuffle": False},
        )
        if skips:
            tu.assign_non_tensor(data, **{LEAVE_OUT: True})
        if watched:
            tu.assign_non_tensor(data, **{WATCHED: "1.0"})
        output = worker.train_mini_batch(data)
        assert worker.loss_fn is loss_fn
        steps = worker.update_reader.take("1.0") if watched else None
        return {
            "parameters": [parameter.detach().clone() for parameter in self._parameters(worker.engine)],
            "steps": steps if worker.engine.is_mp_src_rank_with_outputs() else None,
            "metrics": {}
            if output is None
            else {n: [float(v) for v in vs] for n, vs in tu.get(output, "metrics").items()},
        }


EXPERIMENTS = {"updates": SETUPS, "sliced": SLICED, "rejected": dict(list(SETUPS.items())[:1])}

if __name__ == "__main__":
    run_rank(Experiments, EXPERIMENTS, sys.argv[1:])
