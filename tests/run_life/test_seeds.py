"""Each response has a seed of its own, which follows from what it is and from nothing else."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.run_life.seeds import SeededAgentLoopWorker, SeededTurns, request_seed

VERLS = SeededAgentLoopWorker.__mro__[1]
MESSAGES = [{"role": "user", "content": "1+1"}]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The sampling parameters with which verl's own worker is called."""
    found: list[dict[str, Any]] = []

    async def run(self: Any, sampling_params: dict, trajectory: dict, *, agent_name: str, **kwargs: Any) -> str:
        assert isinstance(self.llm_client, SeededTurns)
        found.append(sampling_params)
        return f"{agent_name} {kwargs['session_id']}"

    monkeypatch.setattr(VERLS, "_run_agent_loop", run)
    return found


def _seed(asked: list[dict[str, Any]], *, run: int = 0, step: int = 1, validate: bool = False, **kwargs: Any) -> int:
    worker = SeededAgentLoopWorker.__new__(SeededAgentLoopWorker)
    worker.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(seed=run)))
    worker.llm_client = client = SimpleNamespace()
    given = {"temperature": 0.7}
    request = {"raw_prompt": MESSAGES, "session_id": 0, "index": 5, "uid": "anything", **kwargs}
    trajectory = {"step": step, "validate": validate, "sample_index": 3, "rollout_n": 0}
    answer = asyncio.run(worker._run_agent_loop(given, trajectory, agent_name="loop", **request))
    assert answer == f"loop {request['session_id']}" and given == {"temperature": 0.7}
    assert worker.llm_client is client, "the worker's own, shared by all responses"
    assert asked[-1].pop("temperature") == 0.7
    (seed,) = asked[-1].values()
    return seed


def test_differs_by_run_step_kind_prompt_and_number(asked: list[dict[str, Any]]) -> None:
    other = [{"role": "user", "content": "1+2"}]
    variants = [{}, {"run": 1}, {"step": 2}, {"validate": True}, {"session_id": 1}, {"index": 6}, {"raw_prompt": other}]
    seeds = [_seed(asked, **variant) for variant in variants]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)

    assert _seed(asked, uid="a") == _seed(asked, uid="b") == seeds[0]  # whenever, and under whatever key
    many = {request_seed(0, step, sample) for step, sample in itertools.product(range(100), range(256))}
    assert len(many) == 100 * 256


def test_each_turn_has_a_seed_of_its_own() -> None:
    """verl's loops send the same parameters for every turn of a response."""
    asked: list[dict[str, Any]] = []

    class Client:
        tokenizer = "verl's"

        async def generate(self, request_id: str, *, sampling_params: dict[str, Any], prompt_ids: list[int]) -> str:
            asked.append(sampling_params)
            return f"{request_id} {prompt_ids}"

    async def conversation() -> None:
        turns = SeededTurns(Client())
        for turn in range(4):
            assert await turns.generate("a", prompt_ids=[turn], sampling_params=given) == f"a [{turn}]"
        assert turns.tokenizer == "verl's"

    given = {"temperature": 0.7, "seed": 5}
    asyncio.run(conversation())
    seeds = [params["seed"] for params in asked]
    assert seeds[0] == 5 and len(set(seeds)) == 4 and given == {"temperature": 0.7, "seed": 5}
    assert all(params == {"temperature": 0.7, "seed": seed} for params, seed in zip(asked, seeds, strict=True))
    asyncio.run(conversation())
    assert [params["seed"] for params in asked[4:]] == seeds
