"""What ``tests/forked.py`` imports once for all its forks."""

from __future__ import annotations

# ruff: noqa: F401
import peft
import torch
import transformers.models.llama
import transformers.models.qwen3
import verl  # loads the plugin that makes the CPU verl's device
import verl.trainer.main_ppo
import verl.workers.engine

import grail_advantage.registry
import grail_advantage.verl_ext.worker

torch.set_num_threads(1)
