"""Imports of the processes of ``tests/forked.py``, which multiprocessing's fork server makes once."""

from __future__ import annotations

# ruff: noqa: F401
import gc

import peft
import torch
import transfer_queue
import transformers.models.llama
import transformers.models.qwen3
import verl  # loads the plug-in that makes the CPU verl's device
import verl.trainer.main_ppo
import verl.trainer.ppo.v1
import verl.workers.engine
import verl.workers.engine_workers

import grail_advantage.methods
import grail_advantage.verl_ext.worker
import recipe.run_life.trainer

torch.set_num_threads(1)
# No fork looks for garbage in the imports again, which took a quarter of the ranks' time.
gc.collect()
gc.freeze()
