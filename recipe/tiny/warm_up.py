"""Supervised warm-up on worked solutions, so that reinforcement learning starts from a model that is right now and then.

It ends when the model knows the task (greedy decoding is right on most held-out problems) but still slips when it
samples, because the solutions it was shown slip at a known rate. What is left to learn is then to slip less.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from recipe.tiny.sampling import accuracy, prompt_ids
from recipe.tiny.task import Problem, solve

_IGNORED = -100


@dataclass(frozen=True)
class WarmUpSettings:
    """Supervised training of the tiny model; the defaults take about two minutes on two cores."""

    error_rate: float = 0.22
    """Probability that a step of a training solution is wrong."""
    batch_size: int = 128
    learning_rate: float = 3e-3
    steps: int = 1500
    """The learning rate falls to a tenth along a cosine over these steps."""
    evaluate_every: int = 100
    greedy_target: float = 0.85
    """Training ends early once greedy decoding is right on this share of held-out problems ..."""
    sampled_target: float = 0.25
    """... and sampling at temperature 1 on this share."""
    max_seconds: float = 240.0
    """Time limit, which makes the result depend on the machine's speed only where it is reached."""
    seed: int = 0


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    train: list[Problem],
    validation: list[Problem],
    settings: WarmUpSettings,
    *,
    max_new_tokens: int,
    report: Callable[[str], None] = print,
) -> dict[str, float]:
    """Train ``model`` in place; returns the last step, loss, greedy and sampled accuracy, and the seconds taken."""
    rng = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.monotonic()
    result: dict[str, float] = {}
    model.train()
    for step in range(1, settings.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _schedule(step, settings.steps)
        batch = [
            (problem, solve(problem, settings.error_rate, rng)) for problem in rng.choices(train, k=settings.batch_size)
        ]
        loss = solution_loss(model, tokenizer, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        seconds = time.monotonic() - started
        out_of_time = seconds > settings.max_seconds
        if step % settings.evaluate_every and step != settings.steps and not out_of_time:
            continue
        model.eval()
        greedy = accuracy(model, tokenizer, validation, max_new_tokens=max_new_tokens, temperature=0.0)
        sampled = accuracy(model, tokenizer, validation, max_new_tokens=max_new_tokens, seed=settings.seed)
        model.train()
        seconds = time.monotonic() - started
        left = min(seconds / step * (settings.steps - step), max(0.0, settings.max_seconds - seconds))
        report(
            f"warm-up step {step}/{settings.steps}  loss {loss.item():.4f}  greedy {greedy:.2f}  sampled {sampled:.2f}"
            f"  {seconds:.0f} s, at most {left:.0f} s left"
        )
        result = {
            "step": step,
            "loss": loss.item(),
            "greedy_accuracy": greedy,
            "sampled_accuracy": sampled,
            "seconds": seconds,
        }
        if out_of_time or (greedy >= settings.greedy_target and sampled >= settings.sampled_target):
            break
    model.eval()
    return result


def solution_loss(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, batch: list[tuple[Problem, str]]
) -> torch.Tensor:
    """Mean cross-entropy over the solutions' tokens and their end tokens; scalar, float32."""
    rows = []
    for problem, solution in batch:
        prompt = prompt_ids(tokenizer, problem)
        response = tokenizer.encode(solution, add_special_tokens=False) + [tokenizer.eos_token_id]
        rows.append((prompt + response, [_IGNORED] * len(prompt) + response))
    longest = max(len(ids) for ids, _ in rows)
    ids_BL = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in rows])
    labels_BL = torch.tensor([labels + [_IGNORED] * (longest - len(labels)) for _, labels in rows])
    # Right padding needs no attention mask: a causal model's real tokens never look at it.
    logits_BLV = model(input_ids=ids_BL).logits
    return F.cross_entropy(logits_BLV[:, :-1].flatten(0, 1).float(), labels_BL[:, 1:].flatten(), ignore_index=_IGNORED)


def _schedule(step: int, steps: int) -> float:
    warm = min(1.0, step / 50)
    return warm * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
