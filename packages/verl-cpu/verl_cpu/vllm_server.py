"""The vLLM-CPU server and replica. Importing this module imports vLLM; ``rollout`` does it on first use."""

from __future__ import annotations

import glob
import os
import tempfile
from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from verl_cpu.patches import cluster_job_id


class CpuVLLMHttpServer(vLLMHttpServer):
    """verl's vLLM server with the worker extension that vLLM-CPU can reload weights with, and the socket of this cluster."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        os.environ["VERL_RAY_JOB_ID"] = cluster_job_id()  # read by vLLM's worker, a child of this process
        path = self.model_config.local_path
        if glob.escape(path) != path:  # vLLM looks for the weights by a pattern
            self._link = tempfile.TemporaryDirectory(prefix="verl-cpu-model-")
            self.model_config.local_path = os.path.join(self._link.name, "model")
            os.symlink(os.path.abspath(path), self.model_config.local_path)

    def _get_worker_extension_cls(self) -> str:
        return "verl_cpu.vllm_worker.CpuWorkerExtension"


class CpuVLLMReplica(vLLMReplica):
    """verl's vLLM replica with :class:`CpuVLLMHttpServer` as its server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(CpuVLLMHttpServer)
