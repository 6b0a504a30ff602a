"""Each response has a seed of its own, which follows from what it is and from nothing else."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.run_life.seeds import SeededAgentLoopWorker

VERLS = SeededAgentLoopWorker.__mro__[1]


def _seeds(monkeypatch: pytest.MonkeyPatch, *, run: int = 0, step: int = 1, validate: bool = False, **of: Any) -> list:
    """The seeds of a response's three turns, for each of which verl's loops send the same parameters."""
    given, asked = {"temperature": 0.7}, []

    async def generate(*, sampling_params: dict) -> None:
        asked.append(sampling_params)

    async def conversation(self: Any, sampling_params: dict, trajectory: dict, *, agent_name: str, **_: Any) -> None:
        for _turn in range(3):
            await self.llm_client.generate(sampling_params=sampling_params)

    monkeypatch.setattr(VERLS, "_run_agent_loop", conversation)
    worker = SeededAgentLoopWorker.__new__(SeededAgentLoopWorker)
    worker.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(seed=run)))
    worker.llm_client = client = SimpleNamespace(generate=generate)
    request = {"raw_prompt": [{"role": "user", "content": "1+1"}], "session_id": 0, "index": 5, "uid": "anything", **of}
    trajectory = {"step": step, "validate": validate, "sample_index": 3, "rollout_n": 0}
    asyncio.run(worker._run_agent_loop(given, trajectory, agent_name="loop", **request))
    assert worker.llm_client is client and given == {"temperature": 0.7}, "the worker's own, shared by all responses"
    return [params["seed"] for params in asked if params == {**given, "seed": params["seed"]}]


def test_differs_by_run_step_kind_prompt_number_and_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    other = [{"role": "user", "content": "1+2"}]
    variants = [{}, {"run": 1}, {"step": 2}, {"validate": True}, {"session_id": 1}, {"index": 6}, {"raw_prompt": other}]
    seeds = [seed for variant in variants for seed in _seeds(monkeypatch, **variant)]
    assert len(set(seeds)) == len(seeds) == 21 and all(0 <= seed < 2**63 for seed in seeds)
    assert _seeds(monkeypatch, uid="b") == seeds[:3], "whenever, and under whatever key"
