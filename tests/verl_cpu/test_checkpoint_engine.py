"""Weights through the host's memory, from two trainer ranks to two rollout workers, as verl's separate trainer asks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from verl_cpu import checkpoint_engine
from verl_cpu.checkpoint_engine import HostCheckpointEngine

TRAINER, ROLLOUT = 2, 2


def test_weights_arrive_twice_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second synchronisation brings the second weights; a rollout worker may ask before the trainer has written."""
    monkeypatch.setattr(checkpoint_engine, "FOLDER", tmp_path)
    trainers = [HostCheckpointEngine(bucket_size=1, is_master=rank == 0) for rank in range(TRAINER)]
    rollouts = [HostCheckpointEngine(bucket_size=1) for _ in range(ROLLOUT)]

    async def received(engine: HostCheckpointEngine) -> dict[str, torch.Tensor]:
        return {name: tensor async for name, tensor in engine.receive_weights()}

    async def synchronise(weights: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        metadata = [engine.prepare() for engine in (*trainers, *rollouts)]
        of_trainers, of_rollouts = HostCheckpointEngine.build_topology(TRAINER, ROLLOUT, metadata)
        for engines, topology in ((trainers, of_trainers), (rollouts, of_rollouts)):
            for rank, engine in enumerate(engines):
                engine.init_process_group(**{name: values[rank] for name, values in topology.items()})
        waiting = [asyncio.create_task(received(engine)) for engine in rollouts]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in waiting)
        for engine in reversed(trainers):
            await engine.send_weights(iter(weights.items()))
        results = await asyncio.gather(*waiting)
        for engine in (*trainers, *rollouts):
            engine.finalize()
        return results

    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        weights = {name: torch.randn(3, 5, generator=generator) for name in ("embed", "head")}
        for result in asyncio.run(synchronise(weights)):
            assert result.keys() == weights.keys()
            assert all(torch.equal(result[name], weights[name]) for name in weights)
        assert list(tmp_path.iterdir()) == []
