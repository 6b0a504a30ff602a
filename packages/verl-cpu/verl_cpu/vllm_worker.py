"""Patch: weight reload inside a vLLM-CPU worker.

``vLLMColocateWorkerExtension.update_weights_from_ipc`` (verl/workers/rollout/vllm_rollout/utils.py, verl 0.9.1) loads
each received bucket into the live parameters. vLLM-CPU 0.28 has repacked these for its kernels and dropped their
loaders ("Parameter has no attribute weight_loader"). vLLM's own ``reload_weights`` undoes and redoes the repacking, but
wants all weights in one call, so the buckets are collected first. It can go when vLLM-CPU keeps its loaders or verl
calls ``reload_weights`` itself.

With tied embeddings the output head receives no weights of its own, and ``reload_weights`` (vllm/model_executor/
model_loader/reload/layerwise.py, ``finalize_layerwise_processing``, vLLM 0.28) leaves its packed copy of the old
embeddings in use. The head is therefore packed again afterwards. That half can go when vLLM does it.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


class CpuWorkerExtension(vLLMColocateWorkerExtension):
    """Mixed into vLLM's CPU worker; receives the trainer's weights and reloads the model from them."""

    def update_weights_from_ipc(
        self, peft_config: dict[str, Any] | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Receive every bucket, then reload the model in place.

        Called by verl's ``ServerAdapter.update_weights`` once per synchronisation, with ``use_shm=True`` on this
        platform. Raises ValueError for LoRA adapters, which this path does not load.
        """
        if peft_config is not None:
            raise ValueError(
                "actor_rollout_ref.model.lora_rank > 0 needs an adapter in the rollout, which the CPU platform does "
                "not load; set actor_rollout_ref.model.lora.merge=True"
            )
        weights: list[tuple[str, torch.Tensor]] = []
        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        # The sender reuses the bucket's memory as soon as the callback returns.
        receiver.receive_weights(
            on_bucket_received=lambda bucket, is_last: weights.extend((name, t.clone()) for name, t in bucket)
        )
        self.model_runner.reload_weights(weights_iterator=iter(weights))
        for layer in self.model_runner.get_model().modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)
