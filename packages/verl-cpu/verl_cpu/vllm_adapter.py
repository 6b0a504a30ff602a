"""The trainer's side of the weights' way to vLLM-CPU. Importing this module imports verl's vLLM rollout."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout import ServerAdapter

from verl_cpu.patches import cluster_job_id, ray_job_id


class CpuServerAdapter(ServerAdapter):
    """verl's adapter, whose socket no other Ray cluster of this machine uses (:func:`patches.one_socket_a_cluster`)."""

    zmq_handle: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.zmq_handle = self.zmq_handle.replace(ray_job_id(), cluster_job_id())
