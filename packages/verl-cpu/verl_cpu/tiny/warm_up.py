"""SFT on worked solutions, so that reinforcement learning starts from a model that is sometimes correct.

It ends when the model knows the task (greedy decoding is correct on most held-out problems) but still slips when it
samples, because the solutions it was shown slip at a known rate. Reinforcement learning can then teach it to slip less.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from recipe.tiny.sampling import MAX_RESPONSE_TOKENS, judge, prompt_ids
from recipe.tiny.task import Problem, solve

_IGNORED = -100
_REPORT_EVERY = 20


@dataclass(frozen=True)
class WarmUpSettings:
    """Supervised training of the tiny model; the defaults take one to two minutes on two cores."""

    error_rate: float = 0.22
    """Probability that a step of a training solution is incorrect."""
    batch_size: int = 32
    learning_rate: float = 3e-3
    steps: int = 800
    """At most so many, however long they take; the learning rate falls to a tenth along a cosine over them."""
    evaluate_every: int = 100
    greedy_target: float = 0.9
    """Training ends once greedy decoding is correct on this share of held-out problems ..."""
    sampled_target: float = 0.25
    """... and sampling at temperature 1 on this share."""
    seed: int = 0


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    train: list[Problem],
    validation: list[Problem],
    settings: WarmUpSettings,
    report: Callable[[str], None] = print,
    *,
    solve: Callable[[Problem, float, random.Random], str] = solve,
    max_new_tokens: int = MAX_RESPONSE_TOKENS,
    micro_batches: int = 1,
) -> dict[str, float]:
    """Train ``model`` in place; returns the last step, loss, greedy and sampled accuracy, and the seconds taken.

    ``solve`` writes the training solutions, ``max_new_tokens`` limits the sampled ones. With more than one of
    ``micro_batches``, a batch's solutions go through the model in so many parts of like length, which pads less; the gradient
    is the same up to rounding.
    """
    rng = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.monotonic()
    model.train()
    for step in range(1, settings.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _schedule(step, settings.steps)
        chosen = rng.choices(train, k=settings.batch_size)
        batch = [(problem, solve(problem, settings.error_rate, rng)) for problem in chosen]
        loss = _add_gradient(model, tokenizer, batch, micro_batches)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        last = step == settings.steps
        line = f"warm-up step {step}/{settings.steps}  loss {loss.item():.4f}"
        if last or step % settings.evaluate_every == 0:
            model.eval()
            greedy = judge(model, tokenizer, validation, temperature=0.0, max_new_tokens=max_new_tokens)["right"]
            sampled = judge(model, tokenizer, validation, seed=settings.seed, max_new_tokens=max_new_tokens)["right"]
            model.train()
            last |= greedy >= settings.greedy_target and sampled >= settings.sampled_target
            line += f"  greedy {greedy:.2f}  sampled {sampled:.2f}"
        elif step % _REPORT_EVERY:
            continue
        seconds = time.monotonic() - started
        left = seconds / step * (settings.steps - step)
        report(f"{line}  {seconds:.0f} s, " + ("done" if last else f"at most {left:.0f} s left"))
        if last:
            break
    model.eval()
    if sampled < settings.sampled_target:
        report(
            f"warning: warm-up ended at {sampled:.2f} sampled accuracy, below sampled_target={settings.sampled_target}; "
            f"give it more than steps={settings.steps}"
        )
    return {
        "step": step,
        "loss": loss.item(),
        "greedy_accuracy": greedy,
        "sampled_accuracy": sampled,
        "seconds": round(seconds, 1),
    }


def _add_gradient(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, batch: list[tuple[Problem, str]], parts: int
) -> torch.Tensor:
    """Add the gradient of the mean cross-entropy over the solutions' tokens and end tokens; its value, a float32 scalar."""
    rows = [_row(tokenizer, *one) for one in batch]
    if parts > 1:
        rows.sort(key=lambda row: len(row[0]))
    tokens = sum(label != _IGNORED for _, labels in rows for label in labels)
    size = math.ceil(len(rows) / parts)
    total = torch.zeros((), device=model.device)
    for first in range(0, len(rows), size):
        loss = _summed_loss(model, tokenizer, rows[first : first + size]) / tokens
        loss.backward()
        total += loss.detach()
    return total


def _row(tokenizer: PreTrainedTokenizerFast, problem: Problem, solution: str) -> tuple[list[int], list[int]]:
    """Token ids and labels of a problem with its solution."""
    prompt = prompt_ids(tokenizer, problem)
    response = [*tokenizer.encode(solution, add_special_tokens=False), tokenizer.eos_token_id]
    return prompt + response, [_IGNORED] * len(prompt) + response


def _summed_loss(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rows: Sequence[tuple[list[int], list[int]]]
) -> torch.Tensor:
    longest = max(len(ids) for ids, _ in rows)
    ids_BL = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in rows])
    labels_BL = torch.tensor([labels + [_IGNORED] * (longest - len(labels)) for _, labels in rows])
    # Right padding needs no attention mask: a causal model's real tokens never look at it.
    logits_BLV = model(input_ids=ids_BL.to(model.device)).logits[:, :-1].flatten(0, 1).float()
    labels_BL = labels_BL[:, 1:].to(model.device)
    return F.cross_entropy(logits_BLV, labels_BL.flatten(), ignore_index=_IGNORED, reduction="sum")


def _schedule(step: int, steps: int) -> float:
    warm = min(1.0, 16 * step / steps)
    return warm * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
