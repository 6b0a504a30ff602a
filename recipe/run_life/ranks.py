"""Resume from a checkpoint of another number of ranks, as verl's users ask (verl#1377, verl#2265), on the nodes that are left.

verl stores the content of each rank in a file of the rank's number, and each rank loads the file of its own number
(``verl.utils.checkpoint.fsdp_checkpoint_manager.FSDPCheckpointManager.load_checkpoint``, verl 0.9.1). FSDP2's files hold slices
of parameters and of Adam's moments along their first dimension, so any number of ranks can put them together and take its own.
FSDP1 keeps the moments of a whole unit in one flat vector; :func:`recipe.run_life.identity.check_ranks` refuses that. Can go
when verl's checkpoints do not depend on the number of ranks.

The random state of rank r is that of the stored rank r modulo their number; it decides about dropout alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from recipe.run_life.checkpoints import world_size

_NUMPYS_STATE = (np.ndarray, np.dtype, type(np.dtype(np.uint32)), np.zeros(0).__reduce__()[0])
"""Types in the stored state of numpy's generator."""


@contextmanager
def any_number_of_ranks(manager: FSDPCheckpointManager, folder: str | None) -> Iterator[None]:
    """Inside, ``manager.load_checkpoint`` takes a checkpoint of any number of ranks from ``folder``."""
    saved = world_size(Path(folder).parent, Path(folder).name) if folder else None
    if saved in (None, manager.world_size):
        yield
        return
    with patch.object(manager, "load_checkpoint", partial(load_resharded, manager, saved)):
        yield


def load_resharded(manager: FSDPCheckpointManager, saved: int, local_path: str, *_: Any, **__: Any) -> None:
    """Does the work of ``manager.load_checkpoint`` from FSDP2's files of ``saved`` ranks. A collective."""
    folder = Path(local_path)
    with torch.no_grad():
        if manager.should_load_model:
            own, parts = manager.model.state_dict(), _read(folder, "model", saved)
            state = {name: _placed([part[name] for part in parts], own[name]) for name in parts[0]}
            manager.model.load_state_dict(state, strict=not manager.is_lora_only_state_dict(state))
        if manager.should_load_optimizer:
            parameters = [value for group in manager.optimizer.param_groups for value in group["params"]]
            parts = _read(folder, "optim", saved)
            state = {
                index: {n: _placed([part["state"][index][n] for part in parts], parameters[index]) for n in names}
                for index, names in parts[0]["state"].items()
            }
            manager.optimizer.load_state_dict({"state": state, "param_groups": parts[0]["param_groups"]})
        if manager.should_load_extra:
            path = folder / f"extra_state_world_size_{saved}_rank_{manager.rank % saved}.pt"
            with torch.serialization.safe_globals(_NUMPYS_STATE):
                extra = torch.load(path, weights_only=True)
            if "rng" in extra:
                manager.load_rng_state(extra["rng"])
            if extra["lr_scheduler"] is not None and manager.lr_scheduler is not None:
                manager.lr_scheduler.load_state_dict(extra["lr_scheduler"])
    torch.distributed.barrier()


def _read(folder: Path, kind: str, saved: int) -> list[dict[str, Any]]:
    """The files of the ranks that together hold everything once, in order. Only what is used of them is read.

    Raises:
        ValueError: a checkpoint that is not FSDP2's.
    """

    def read(rank: int) -> dict[str, Any]:
        path = folder / f"{kind}_world_size_{saved}_rank_{rank}.pt"
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)

    first = read(0)
    values = first.values() if kind == "model" else [v for state in first["state"].values() for v in state.values()]
    slices = [value for value in values if isinstance(value, DTensor)]
    if not slices or any({*one.placements[:-1]} - {Replicate()} or one.placements[-1] != Shard(0) for one in slices):
        raise ValueError(
            f"{folder} holds no slices along the first dimension, as FSDP2 makes; resume with {saved} ranks"
        )
    # With replicas (fsdp_size), those of the first one hold everything.
    mesh = slices[0].device_mesh.mesh
    return [first, *(read(rank) for rank in mesh.reshape(-1, mesh.shape[-1])[0].tolist()[1:])]


def _placed(parts: Sequence[Any], like: torch.Tensor) -> Any:
    """A stored entry as this rank holds it, for a parameter that the engine shards like ``like``; others as they are."""
    if not isinstance(parts[0], DTensor):
        return parts[0]
    mesh, whole = like.device_mesh, torch.cat([part.to_local() for part in parts])
    slices, rank = whole.chunk(mesh.shape[-1]), mesh.get_local_rank(mesh.ndim - 1)
    own = (slices[rank] if rank < len(slices) else whole[:0]).clone().to(like.to_local().device)
    shape, stride = parts[0].shape, parts[0].stride()
    return DTensor.from_local(own, mesh, like.placements, run_check=False, shape=shape, stride=stride)
