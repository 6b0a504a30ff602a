"""A trainer of a tiny model whose responses are written down instead of sampled; all after the sampler is real."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils as trl_utils

from grail_advantage.trl_ext import TokenWeightGRPOTrainer
from tests.core.tiny_models import END, Rollout, char_tokenizer, encode, tiny_model

GENERATIONS, TEMPERATURE = 4, 0.9
GROUPS = {
    "Two plus three, what is that?": [
        (r"Two and three make \boxed{6}, so six it is.<end>", 0.0),
        (r"\boxed{4} no, it is \boxed{\frac{1}{2}} not \boxed{0.25} or<end>", 0.0),
        (r"Clearly \boxed{5}.<end>", 1.0),
        ("I do not know, boxed{3} or {4}.<end>", 0.0),
    ],
    "Nine?": [
        (r"I take it to be \boxed{9}", 1.0),  # truncated
        (r"=\boxed{6}<end>", 0.0),
        ("It must be 9, I say.<end>", 1.0),
        ("So it is 10, I say<end>", 0.0),
    ],
}
"""Responses and rewards by prompt."""
REWARDS = {(prompt, text.removesuffix(END)): reward for prompt, answers in GROUPS.items() for text, reward in answers}
TRUNCATED = 4
"""Response without an end token."""
MICRO = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
"""A generation batch of 8 responses in four micro-batches, for two updates."""


class PlainLogProbs:
    """The output head of TRL 1.15, which is written in Triton alone and so missing on a machine without a GPU."""

    @staticmethod
    def apply(hidden_ND, weight_VD, bias_V, targets_N, temperature, _chunk, softcap, scale, outputs):
        assert softcap is None and scale == 1.0
        log_probs_NV = (torch.nn.functional.linear(hidden_ND, weight_VD, bias_V).float() / temperature).log_softmax(-1)
        entropy_N = -(log_probs_NV.exp() * log_probs_NV).sum(-1) if "entropy" in outputs else None
        return log_probs_NV.gather(1, targets_N[:, None])[:, 0], entropy_N, None, None, None


if trl_utils._ChunkedLogProbFunction is None:
    trl_utils._ChunkedLogProbFunction = PlainLogProbs


def reward(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    """That of the script."""
    texts = ([of if isinstance(of, str) else of[-1]["content"] for of in each] for each in (prompts, completions))
    return [REWARDS[pair] for pair in zip(*texts, strict=True)]


def rollouts(*, mask_truncated: bool = True) -> list[Rollout]:
    """The same responses with their advantages worked out by hand: reward minus the group's mean."""
    rows = []
    for prompt, answers in GROUPS.items():
        mean = sum(reward for _, reward in answers) / len(answers)
        for text, of in answers:
            rows.append(Rollout(prompt, text, 0.0 if mask_truncated and not text.endswith(END) else of - mean))
    return rows


class Scripted:
    """In front of a trainer class: the k-th response to a prompt in a call is the k-th of the script."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        seen: Counter = Counter()
        responses = []
        for ids in prompt_ids:
            prompt = next(prompt for prompt in GROUPS if prompt in self.processing_class.decode(ids))
            responses.append(encode(GROUPS[prompt][seen[prompt]][0]))
            seen[prompt] += 1
        return responses, None


class ScriptedTokenWeights(Scripted, TokenWeightGRPOTrainer):
    pass


class Stock(Scripted, GRPOTrainer):
    """TRL's own trainer."""


def parameters(model: Any) -> torch.Tensor:
    """All of a model's, flat."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def config(folder: Path, **options: Any) -> GRPOConfig:
    """Settings of a small run on the CPU."""
    settings = {"output_dir": str(folder), "num_generations": GENERATIONS, "max_completion_length": 64}
    settings |= {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "gradient_accumulation_steps": 1}
    settings |= {"temperature": TEMPERATURE, "scale_rewards": "none", "beta": 0.0, "optim": "sgd"}
    settings |= {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "shuffle_dataset": False}
    settings |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    settings |= {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    return GRPOConfig(**(settings | options))


def prompts(**columns: list[Any]) -> Dataset:
    return Dataset.from_dict({"prompt": list(GROUPS), **columns})


def build(folder: Path, trainer_class: Any = ScriptedTokenWeights, /, **given: Any) -> Any:
    """A trainer in training mode, between two steps, with ``weights`` for its own arguments; others are TRL's
    settings. The process forgets the precision of the one before."""
    AcceleratorState._reset_state()
    parts = {"model": tiny_model, "data": prompts, "tokenizer": char_tokenizer, "weights": dict}
    model, data, tokenizer, weights = (given.pop(name) if name in given else make() for name, make in parts.items())
    options = {"train_dataset": data, "processing_class": tokenizer, **weights}
    trainer = trainer_class(model, reward, config(folder, **given), **options)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def generation_batch(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    """The trainer's batch of all responses."""
    return trainer._generate_and_score_completions([row for row in trainer.train_dataset for _ in range(GENERATIONS)])


def response_values(values_BL: torch.Tensor, mask_BL: torch.Tensor) -> list[torch.Tensor]:
    """The response tokens' values of each response."""
    return [values_L[mask_L.bool()] for values_L, mask_L in zip(values_BL, mask_BL, strict=True)]
