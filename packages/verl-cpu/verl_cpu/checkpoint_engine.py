"""Weights from trainer to rollout through a file in host memory, for ``trainer.v1.trainer_mode=separate_async``.

verl's separate trainer hands its weights over with a checkpoint engine, and each of verl's own engines needs an
accelerator or a network card of its own. This one is selected by

    actor_rollout_ref.rollout.checkpoint_engine.backend=host
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_cpu.checkpoint_engine

The first trainer rank writes every tensor into one file below ``/dev/shm`` and renames it when it is complete; each
rollout worker waits for that name and reads it. One machine only.
"""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

FOLDER = Path("/dev/shm")
# seconds between two looks for the file, and that a rollout worker waits for it
INTERVAL = 0.05
TIMEOUT = 600.0


@CheckpointEngineRegistry.register("host")
class HostCheckpointEngine(CheckpointEngine):
    """One file a synchronisation, written by the trainer's first rank (``is_master``) and removed by it afterwards."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.is_master = is_master
        self.path = Path()

    def prepare(self) -> str | None:
        """Returns the path of the next file, from the master; None elsewhere."""
        if not self.is_master:
            return None
        return f"{tempfile.mkdtemp(prefix='verl-cpu-weights-', dir=FOLDER)}/weights.pt"

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[str | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Everybody gets the path of the trainer's first rank."""
        return {"path": metadata[:1] * actor_wg_world_size}, {
            "path": metadata[:1] * rollout_world_size
        }

    def init_process_group(self, path: str) -> None:
        """Remember the path; no connection is needed."""
        self.path = Path(path)

    async def send_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        global_steps: int | None = None,
    ) -> dict:
        """Write the weights; ranks other than the first only take part in gathering them. Returns no metrics."""
        # Every rank goes through all of them, as the generator gathers shards.
        gathered = {
            name: tensor.detach().clone() if self.is_master else None for name, tensor in weights
        }
        if self.is_master:
            unfinished = self.path.with_suffix(".unfinished")
            torch.save(gathered, unfinished)
            # Readers wait for the name, and must not find half a file under it.
            unfinished.replace(self.path)
        return {}

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Wait for the file and yield name and tensor of every weight; TimeoutError if it does not come."""
        async with asyncio.timeout(TIMEOUT):
            while not self.path.exists():
                await asyncio.sleep(INTERVAL)
        for name, tensor in torch.load(self.path, weights_only=True).items():
            yield name, tensor

    def finalize(self) -> None:
        """Remove the file."""
        if self.is_master and self.path.name:
            self.path.unlink(missing_ok=True)
            self.path.parent.rmdir()
        self.path = Path()
