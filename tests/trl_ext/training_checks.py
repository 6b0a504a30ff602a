"""A run that learns; run by test_trl.py with the newest TRL on the path."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from trl import GRPOTrainer

from grail_advantage.trl_ext import TokenWeightGRPOTrainer
from tests.core.tiny_models import END_ID, PAD_ID, char_tokenizer, encode, tiny_model
from tests.trl_ext import scripted

STEPS = 20
PROMPT = "An even digit?"
_BOXED = re.compile(r"\\boxed\{(\d)\}")


def warmed_up_model() -> Any:
    """Writes ``=d;\\boxed{d}`` with a random digit d: right half of the time, and the digit in front of the box decides."""
    model = tiny_model(layers=2, hidden_size=32, intermediate_size=64, initializer_range=0.02)
    rows = torch.tensor([encode(rf"{PROMPT}={digit};\boxed{{{digit}}}<end>") for digit in range(10)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        logits_BSV = model(input_ids=rows).logits[:, len(PROMPT) - 1 : -1]
        F.cross_entropy(logits_BSV.flatten(0, 1), rows[:, len(PROMPT) :].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def reward(completions: list[str], **_: Any) -> list[float]:
    matches = [_BOXED.search(text) for text in completions]
    return [float(match is not None and int(match[1]) % 2 == 0) for match in matches]


@pytest.mark.parametrize("method", ["grail", "surprisal"])
def test_twenty_steps_learn(tmp_path: Path, method: str) -> None:
    trainer = TokenWeightGRPOTrainer(
        warmed_up_model(),
        reward,
        scripted.config(
            tmp_path,
            num_generations=8,
            per_device_train_batch_size=32,
            max_completion_length=16,
            max_steps=STEPS,
            learning_rate=3e-3,
            optim="adamw_torch",
            loss_type="dr_grpo",
            num_iterations=2,
            steps_per_generation=2,
            gradient_accumulation_steps=2,
            seed=3,
        ),
        train_dataset=scripted.Dataset.from_dict({"prompt": [PROMPT] * 64}),
        processing_class=char_tokenizer(),
        token_weights=method,
    )
    assert isinstance(trainer, GRPOTrainer) and trainer._tokenizer.eos_token_id == END_ID != PAD_ID
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    selected = [
        entry[f"{method}/selected_rate"] for entry in trainer.state.log_history if f"{method}/selected_rate" in entry
    ]
    first, last = statistics.fmean(rewards[:2]), statistics.fmean(rewards[-2:])
    print(f"{method}: reward {first:.3f} -> {last:.3f}, selected {selected}")
    assert trainer.state.global_step == STEPS
    assert 0.3 < first < 0.75 and last > max(0.8, first + 0.2)
    assert max(selected) > 0.2
