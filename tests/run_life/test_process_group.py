"""How long the actor's ranks wait for each other."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf
from verl.workers.engine_workers import ActorRolloutRefWorker

from grail_advantage.verl_ext import worker as worker_module
from grail_advantage.verl_ext.worker import TokenWeightActorWorker


def test_the_process_group_keeps_nccl_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's own call behind it finds the group there and leaves it."""
    order = []
    monkeypatch.setattr(
        worker_module, "initialize_global_process_group_ray", lambda timeout_second: order.append(timeout_second)
    )
    monkeypatch.setattr(ActorRolloutRefWorker, "init_model", lambda self: order.append("verl's"))
    worker = TokenWeightActorWorker.__new__(TokenWeightActorWorker)
    worker.config = OmegaConf.create({"nccl_timeout": 77})
    worker.init_model()
    assert order == [77, "verl's"]
