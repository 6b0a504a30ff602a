"""Carry on from a checkpoint of another number of ranks, for example on the nodes that are left.

verl stores what each rank holds in a file of the rank's number, and each rank loads the file of its own number
(``verl.utils.checkpoint.fsdp_checkpoint_manager.FSDPCheckpointManager.load_checkpoint``, verl 0.9.1), so that a run
resumes with as many ranks as it stopped with. FSDP2's files hold slices of parameters and of Adam's moments along their
first dimension, from which any number of ranks can take its own. FSDP1 keeps the moments of a whole unit in one flat
vector; :func:`recipe.run_life.identity.check_ranks` refuses that. Can go when verl's checkpoints do not
depend on the number of ranks.

The random state of rank r is that of the stored rank r modulo their number; it decides about dropout alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from recipe.run_life.identity import FSDP_CONFIG

_NUMPYS_STATE = (np.ndarray, np.dtype, type(np.dtype(np.uint32)), np.zeros(0).__reduce__()[0])
"""What the state of numpy's generator is stored with."""


@contextmanager
def any_number_of_ranks(manager: FSDPCheckpointManager, folder: str | None) -> Iterator[None]:
    """Inside, ``manager.load_checkpoint`` takes a checkpoint of any number of ranks from ``folder``."""
    record = Path(folder or "") / FSDP_CONFIG
    saved = json.loads(record.read_text(encoding="utf-8"))["world_size"] if folder and record.is_file() else None
    if saved is None or saved == manager.world_size:
        yield
        return
    manager.load_checkpoint = partial(load_shared_out, manager, saved)
    try:
        yield
    finally:
        del manager.load_checkpoint


def load_shared_out(
    manager: FSDPCheckpointManager, saved: int, local_path: str, hdfs_path: str | None = None, **_: Any
) -> None:
    """What ``manager.load_checkpoint`` does, from the files of ``saved`` ranks. A collective.

    Raises:
        ValueError: a checkpoint that is not FSDP2's.
    """
    folder = Path(local_path)
    with torch.no_grad():
        if manager.should_load_model:
            own = manager.model.state_dict()
            parts = _read(folder, "model", saved)
            found = {name: _placed([part[name] for part in parts], own[name]) for name in parts[0]}
            manager.model.load_state_dict(found, strict=not manager.is_lora_only_state_dict(found))
        if manager.should_load_optimizer:
            parameters = [value for group in manager.optimizer.param_groups for value in group["params"]]
            parts = _read(folder, "optim", saved)
            state = {
                index: {
                    name: _placed([part["state"][index][name] for part in parts], parameters[index]) for name in entries
                }
                for index, entries in parts[0]["state"].items()
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


def own_slice(parts: Sequence[torch.Tensor], rank: int, ranks: int) -> torch.Tensor:
    """A copy of the slice that ``rank`` of ``ranks`` holds of a tensor under FSDP2: rows of its first dimension, as
    ``torch.chunk`` shares them out.

    Args:
        parts: the tensor's slices along the first dimension, in order; some may be empty.
        rank: which.
        ranks: of how many.
    """
    rows = sum(map(len, parts))
    size = -(-rows // ranks)
    start, end = min(rank * size, rows), min((rank + 1) * size, rows)
    taken, at = [], 0
    for part in parts:
        first, last = max(start - at, 0), min(end - at, len(part))
        if first < last:
            taken.append(part[first:last])
        at += len(part)
    return torch.cat(taken) if taken else parts[0][:0].clone()


def _read(folder: Path, what: str, saved: int) -> list[dict[str, Any]]:
    """The files of the ranks that together hold everything once, in order. Only what is used of them is read."""

    def read(rank: int) -> dict[str, Any]:
        path = folder / f"{what}_world_size_{saved}_rank_{rank}.pt"
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)

    first = read(0)
    values = first.values() if what == "model" else [v for of_one in first["state"].values() for v in of_one.values()]
    slices = [value for value in values if isinstance(value, DTensor)]
    if not slices or any(
        value.placements[-1] != Shard(0) or any(place != Replicate() for place in value.placements[:-1])
        for value in slices
    ):
        raise ValueError(
            f"{folder} holds no slices along the first dimension, which FSDP2 makes, so that it cannot be shared out to "
            f"another number of ranks than the {saved} that wrote it; resume with {saved} ranks"
        )
    # With replicas (fsdp_size), those of the first one hold everything.
    mesh = slices[0].device_mesh.mesh
    return [first, *(read(rank) for rank in mesh.reshape(-1, mesh.shape[-1])[0].tolist()[1:])]


def _placed(parts: Sequence[Any], like: torch.Tensor) -> Any:
    """A stored entry as this rank holds it, for a parameter that the engine shards like ``like``; others as they are."""
    if not isinstance(parts[0], DTensor):
        return parts[0]
    mesh = like.device_mesh
    own = own_slice([part.to_local() for part in parts], mesh.get_local_rank(mesh.ndim - 1), mesh.shape[-1])
    own = own.to(like.to_local().device)
    return DTensor.from_local(
        own, mesh, like.placements, run_check=False, shape=parts[0].shape, stride=parts[0].stride()
    )
