"""A second plug-in of ms-swift: it records what :mod:`examples.hosts.ms_swift` gets and gives, and plants a fault."""

import copy
import importlib
import os
from pathlib import Path

import torch
from swift.rewards.orm import ORM, orms
from swift.trainers.trainer_factory import TrainerFactory

from verl_cpu.tiny.task import boxed_answer

# The step from which one advantage a response reaches the loss, which a receipt must find
FIRST_FAULT = 2
module, name = TrainerFactory.TRAINER_MAPPING["grpo"].rsplit(".", 1)
TokenWeightGRPOTrainer = getattr(importlib.import_module(module), name)


class Boxed(ORM):
    """1 where the last box holds the answer."""

    def __call__(self, completions: list[str], solution: list[str], **_) -> list[float]:
        return [
            float(boxed_answer(text) == answer)
            for text, answer in zip(completions, solution, strict=True)
        ]


class RecordedTrainer(TokenWeightGRPOTrainer):
    def _postprocess_batch(self, samples, batches):
        policy = copy.deepcopy(self.accelerator.unwrap_model(self.model).state_dict())
        super()._postprocess_batch(samples, batches)
        step = self.state.global_step
        inputs = [
            {**batch["model_inputs"], **vars(batch["grpo_batch"])} for batch in batches
        ]
        torch.save(
            {
                "policy": policy,
                "batches": inputs,
                "base": torch.stack([sample.advantages for sample in samples]),
                "responses": [sample.response_token_ids for sample in samples],
            },
            Path(
                os.environ["RECORD"], f"step_{step}_of_{self.accelerator.process_index}.pt"
            ),
        )

    def _compute_loss_and_metrics(self, model, model_inputs, grpo_batch):
        # Two optimiser steps a rollout
        if self.state.global_step >= 2 * FIRST_FAULT:
            mask = grpo_batch.completion_mask
            grpo_batch = copy.copy(grpo_batch)
            mean = (grpo_batch.advantages * mask).sum(1, keepdim=True) / mask.sum(
                1, keepdim=True
            )
            grpo_batch.advantages = mean * mask
        return super()._compute_loss_and_metrics(model, model_inputs, grpo_batch)


orms["boxed"] = Boxed
TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.{RecordedTrainer.__name__}"
