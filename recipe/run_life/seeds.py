"""Sampling that a run can repeat: each request has a seed of its own, by run, step, prompt, sample and turn.

vLLM samples a request without a seed from a generator that begins anew with every start and follows the arrival of
requests; verl's ``rollout.full_determinism`` gives all samples of a prompt the same seed, and so the same text. With

    actor_rollout_ref.rollout.agent.agent_loop_manager_class=recipe.run_life.seeds.SeededAgentLoopManager

the samples of a step follow from the weights, ``rollout.seed`` and the step alone, up to the rounding of the engine's
logits, which depends on what else is in a batch.
"""

import copy
import hashlib
import json
from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ


def request_seed(*parts: Any) -> int:
    """Returns a seed of 63 bits, by anything that can be written as JSON."""
    text = json.dumps(parts, sort_keys=True, default=str).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


class SeededTurns:
    """verl's client of the rollout servers for one response. Its first turn keeps the response's seed, later ones have
    their own: verl asks for all turns with the same parameters, and vLLM begins its numbers anew with each request."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._turn = 0

    async def generate(self, *args: Any, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        turn = self._turn
        self._turn = self._turn + 1
        if turn:
            sampling_params = {
                **sampling_params,
                "seed": request_seed(sampling_params["seed"], turn),
            }
        return await self._client.generate(*args, sampling_params=sampling_params, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class SeededAgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's worker, whose requests have seeds."""

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any
    ) -> Any:
        run = self.config.actor_rollout_ref.rollout.seed
        prompt = kwargs.get("index"), kwargs["raw_prompt"], kwargs["session_id"]
        seed = request_seed(run, trajectory["step"], trajectory["validate"], *prompt)
        # A worker has many responses at once: each gets a copy, with a client that counts its turns.
        worker = copy.copy(self)
        worker.llm_client = SeededTurns(self.llm_client)
        verls = super(SeededAgentLoopWorker, worker)._run_agent_loop
        return await verls({**sampling_params, "seed": seed}, trajectory, **kwargs)


class SeededAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager with :class:`SeededAgentLoopWorker`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(SeededAgentLoopWorker)
