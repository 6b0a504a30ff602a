"""Checkpoints of four ranks that are loaded by other numbers of ranks, one after the other in one process.

    python -m tests.run_life.ranks_process FOLDER      # writes FOLDER/found.pt

A rank here is one of many: its collectives go nowhere, which building, saving and loading shards does not notice. What
a rank holds of each tensor is compared by the test with the whole tensors.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from tests.verl_ext.engines import Setup, build_engine

SAVED = 4
REPLICAS = 2
"""Ranks that share one copy of the model in the checkpoint with replicas."""
SETUPS = {
    "plain": Setup("qwen3", "fsdp2"),
    "adapter": Setup("qwen3-tied", "fsdp2", adapter="adapter"),
    "replicas": Setup("qwen3", "fsdp2", options={"fsdp_size": REPLICAS}),
}
LOADED = [("plain", 1), ("plain", 6), ("adapter", 3), ("replicas", 3)]
"""Numbers of ranks that load them."""


def moment(index: int, name: str, shape: torch.Size) -> torch.Tensor:
    """What stands in for a moment of Adam's, as a whole."""
    torch.manual_seed(1000 * index + len(name))
    return torch.rand(shape)


def slice_of(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What a rank holds of a tensor."""
    parts = whole.chunk(ranks)
    return parts[rank].clone() if rank < len(parts) else whole[:0].clone()


def held(whole: torch.Tensor, like: DTensor) -> DTensor:
    """The part of a tensor that this rank holds where it holds ``like``."""
    mesh = like.device_mesh
    local = slice_of(whole, torch.distributed.get_rank() % mesh.shape[-1], mesh.shape[-1])
    return DTensor.from_local(local, mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride())


def as_rank(rank: int, ranks: int, setup: Setup, folder: Path, wholes: dict[str, torch.Tensor]) -> Any:
    """An engine as that rank holds it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from verl.workers.engine.fsdp import transformer_impl

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    # The first rank would send the others their weights.
    with patch.object(transformer_impl, "fsdp2_load_full_state_dict", lambda module, *_: module.to_empty(device="cpu")):
        engine = build_engine(setup, folder)
    with torch.no_grad():
        for name, value in engine.module.state_dict().items():
            if isinstance(value, DTensor):
                value.to_local().copy_(held(wholes[name], value).to_local())
    return engine


def parameters(engine: Any) -> list[torch.Tensor]:
    return [value for group in engine.optimizer.param_groups for value in group["params"]]


def main(folder: Path) -> None:
    import verl  # noqa: F401  loads the plugin that makes the CPU verl's device

    from recipe.run_life.ranks import any_number_of_ranks

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, setup in SETUPS.items():
        wholes = torch.load(folder / f"{setup.adapter or setup.model}.pt")
        checkpoint = folder / f"checkpoint of {name}"
        for rank in range(SAVED):
            engine = as_rank(rank, SAVED, setup, folder, wholes)
            state = {
                index: {
                    "step": torch.tensor(3.0),
                    **{key: held(moment(index, key, value.shape), value) for key in ("exp_avg", "exp_avg_sq")},
                }
                for index, value in enumerate(parameters(engine))
            }
            engine.optimizer.load_state_dict({**engine.optimizer.state_dict(), "state": state})
            engine.optimizer.param_groups[0]["lr"] = 0.125
            engine.lr_scheduler.last_epoch = 5
            engine.save_checkpoint(str(checkpoint), global_step=3)
        for ranks in (number for saved, number in LOADED if saved == name):
            for rank in range(ranks):
                plain = Setup(setup.model, "fsdp2", adapter=setup.adapter)
                engine = as_rank(rank, ranks, plain, folder, {key: value * 0 for key, value in wholes.items()})
                manager = engine.checkpoint_manager
                with any_number_of_ranks(manager, str(checkpoint)):
                    engine.load_checkpoint(str(checkpoint), del_local_after_load=False)
                state = engine.optimizer.state_dict()["state"]
                found[name, ranks, rank] = {
                    "model": {
                        key: value.to_local().clone() if isinstance(value, DTensor) else value
                        for key, value in engine.module.state_dict().items()
                    },
                    "shapes": [value.shape for value in parameters(engine)],
                    "moments": [
                        {
                            key: value.to_local() if isinstance(value, DTensor) else value
                            for key, value in state[index].items()
                        }
                        for index in range(len(state))
                    ],
                    "lr": engine.optimizer.param_groups[0]["lr"],
                    "last_epoch": engine.lr_scheduler.last_epoch,
                    "patched": "load_checkpoint" in vars(manager),
                }
    torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
