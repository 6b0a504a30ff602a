"""What the processes of a whole verl run import."""

from __future__ import annotations

# ruff: noqa: F401
import ray._private.workers.default_worker
import transfer_queue
import verl.trainer.main_ppo
import verl.trainer.ppo.v1
import verl.workers.engine
import verl.workers.engine_workers
import verl.workers.rollout.vllm_rollout.vllm_async_server
import vllm.v1.engine.async_llm
import vllm.v1.engine.core

import grail_advantage.verl_ext.cpu.rollout
import grail_advantage.verl_ext.worker
import recipe.main_grail
import tests.imported
