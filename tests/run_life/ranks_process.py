"""Checkpoints of four ranks that are loaded by other numbers of ranks, one after the other in one process.

    python -m tests.run_life.ranks_process FOLDER

A rank here is one of many: its collectives go nowhere, which building, saving and loading shards does not notice. What a rank
holds of each tensor is compared with the whole tensor.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from tests.verl_ext.engines import Setup, build_engine
from tests.verl_ext.pass_plan import write_models

SAVED = 4
SETUPS = (
    (Setup("qwen3", "fsdp2"), (1, 6)),
    (Setup("qwen3-tied", "fsdp2", adapter="adapter"), (3,)),
    (Setup("qwen3", "fsdp2", options={"fsdp_size": 2}), (3,)),  # two ranks share one copy of the model
)
"""Who saves, and the numbers of ranks that load."""


def moment(index: int, name: str, shape: torch.Size) -> torch.Tensor:
    """A moment of Adam's, as a whole."""
    torch.manual_seed(1000 * index + len(name))
    return torch.rand(shape)


def held(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """The part of a tensor that this rank holds where it holds ``like``."""
    if not isinstance(like, DTensor):
        return whole
    ranks = like.device_mesh.shape[-1]
    parts, rank = whole.chunk(ranks), torch.distributed.get_rank() % ranks
    return parts[rank].clone() if rank < len(parts) else whole[:0].clone()


def sharded(whole: torch.Tensor, like: DTensor) -> DTensor:
    kwargs = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(held(whole, like), like.device_mesh, like.placements, **kwargs)


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
                value.to_local().copy_(held(wholes[name], value))
    return engine


def moments(engine: Any) -> dict[int, dict[str, tuple[torch.Tensor, DTensor]]]:
    """Adam's by the parameter's number, as a whole, and the parameter."""
    parameters = [value for group in engine.optimizer.param_groups for value in group["params"]]
    names = ("exp_avg", "exp_avg_sq")
    return {i: {name: (moment(i, name, p.shape), p) for name in names} for i, p in enumerate(parameters)}


def save(engine: Any, checkpoint: Path) -> None:
    state = {
        index: {"step": torch.tensor(3.0), **{name: sharded(*each) for name, each in of_one.items()}}
        for index, of_one in moments(engine).items()
    }
    engine.optimizer.load_state_dict({**engine.optimizer.state_dict(), "state": state})
    engine.optimizer.param_groups[0]["lr"], engine.lr_scheduler.last_epoch = 0.125, 5
    engine.save_checkpoint(str(checkpoint), global_step=3)


def load(engine: Any, checkpoint: Path, wholes: dict[str, torch.Tensor]) -> None:
    from recipe.run_life.ranks import any_number_of_ranks

    with any_number_of_ranks(engine.checkpoint_manager, str(checkpoint)):
        engine.load_checkpoint(str(checkpoint), del_local_after_load=False)
    own, state = engine.module.state_dict(), engine.optimizer.state_dict()["state"]
    assert own.keys() == wholes.keys() and len(state) == len(moments(engine)) > 0
    for name, value in own.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        assert torch.equal(local, held(wholes[name], value)), name
    for index, of_one in moments(engine).items():
        assert state[index]["step"] == 3
        assert all(torch.equal(state[index][name].to_local(), held(*each)) for name, each in of_one.items()), index
    assert (engine.optimizer.param_groups[0]["lr"], engine.lr_scheduler.last_epoch) == (0.125, 5)


def main(folder: Path) -> None:
    import verl  # noqa: F401  loads the plugin that makes the CPU verl's device

    torch.set_num_threads(1)
    models = write_models(folder)
    for number, (setup, loading) in enumerate(SETUPS):
        wholes = models[setup.adapter or setup.model].state_dict()
        checkpoint = folder / f"checkpoint {number}"
        for rank in range(SAVED):
            save(as_rank(rank, SAVED, setup, folder, wholes), checkpoint)
        plain, empty = Setup(setup.model, "fsdp2", adapter=setup.adapter), {k: v * 0 for k, v in wholes.items()}
        for ranks in loading:
            for rank in range(ranks):
                load(as_rank(rank, ranks, plain, folder, empty), checkpoint, wholes)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
