"""What ``tests/fork_server.py`` imports once for all its forks: what the processes of a verl run and of its ranks import."""

from __future__ import annotations

# ruff: noqa: F401
from importlib.util import find_spec

import peft
import ray._private.workers.default_worker
import torch
import transfer_queue
import transformers.models.llama
import transformers.models.qwen3
import verl  # loads the plugin that makes the CPU verl's device
import verl.trainer.main_ppo
import verl.trainer.ppo.v1
import verl.workers.engine
import verl.workers.engine_workers

import grail_advantage.methods
import grail_advantage.verl_ext.worker
import recipe.main_grail

if find_spec("vllm"):
    import verl.workers.rollout.vllm_rollout.vllm_async_server
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core

    import grail_advantage.verl_cpu.rollout

torch.set_num_threads(1)
