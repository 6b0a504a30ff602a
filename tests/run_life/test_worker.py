"""How long the actor's ranks wait for each other."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf
from verl.workers.engine_workers import ActorRolloutRefWorker

from recipe.run_life import worker as worker_module
from recipe.run_life.worker import KeptActorWorker, KeptDetachActorWorker


@pytest.mark.parametrize("worker_class", [KeptActorWorker, KeptDetachActorWorker])
def test_the_process_group_keeps_nccl_timeout(monkeypatch: pytest.MonkeyPatch, worker_class: type) -> None:
    """verl's own call after it finds the group there and leaves it."""
    order = []
    monkeypatch.setattr(
        worker_module, "initialize_global_process_group_ray", lambda timeout_second: order.append(timeout_second)
    )
    monkeypatch.setattr(ActorRolloutRefWorker, "init_model", lambda self: order.append("verl's"))
    worker = worker_class.__new__(worker_class)
    worker.config = OmegaConf.create({"nccl_timeout": 77})
    worker.init_model()
    assert order == [77, "verl's"]
