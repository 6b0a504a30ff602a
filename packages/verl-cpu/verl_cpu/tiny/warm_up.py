"""Supervised fine-tuning (SFT) on worked solutions, so that reinforcement learning starts from a model that is
sometimes right.

It ends when the model knows the task (greedy decoding is correct on most held-out problems) but still slips when it
samples, because the solutions it was shown slip at a known rate. Shape suffixes: B rows, L tokens, V vocabulary.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from verl_cpu.tiny.sampling import MAX_RESPONSE_TOKENS, judge, prompt_ids
from verl_cpu.tiny.task import Problem, solve

Row = tuple[list[int], list[int]]
"""Token ids of a prompt, and of the response that is trained on."""
IGNORED = -100


def fine_tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    batches: Iterable[list[Row]],
    learning_rate: Callable[[int], float],
) -> Iterator[tuple[int, float]]:
    """Train ``model`` in place by AdamW, a batch a step, and yield each step's number, from 1 on, and its loss. The
    batches may be made while it trains; ``learning_rate`` is of a step, by its number."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step, rows in enumerate(batches, start=1):
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = _loss(model, tokenizer.pad_token_id, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.eval()
        yield step, loss.item()


def _loss(model: PreTrainedModel, padding: int, rows: Sequence[Row]) -> torch.Tensor:
    """The mean over the responses' tokens."""
    longest = max(len(prompt) + len(response) for prompt, response in rows)

    def padded(filler: int, rows: Iterable[list[int]]) -> torch.Tensor:
        return torch.tensor([row + [filler] * (longest - len(row)) for row in rows], device=model.device)

    ids_BL = padded(padding, (prompt + response for prompt, response in rows))
    labels_BL = padded(IGNORED, ([IGNORED] * len(prompt) + response for prompt, response in rows))
    # Right padding needs no attention mask: a causal model's real tokens never look at it.
    logits_BLV = model(input_ids=ids_BL).logits[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(logits_BLV, labels_BL[:, 1:].flatten(), ignore_index=IGNORED)


@dataclass(frozen=True)
class WarmUpSettings:
    """Supervised training of the tiny model; the defaults take one to two minutes on two cores."""

    error_rate: float = 0.22  # probability that a step of a training solution is incorrect
    batch_size: int = 32
    learning_rate: float = 3e-3  # falls to a tenth along a cosine over the steps
    steps: int = 800  # at most, however long they take
    evaluate_every: int = 100
    # Training ends once greedy decoding, and sampling at temperature 1, are correct on these shares of held-out
    # problems.
    greedy_target: float = 0.9
    sampled_target: float = 0.25
    seed: int = 0

    def learning_rate_of(self, step: int) -> float:
        """The learning rate of a step, by its number, from 1 on."""
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * step / self.steps))
        return self.learning_rate * (min(1.0, 16 * step / self.steps) * cosine)


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    train: list[Problem],
    validation: list[Problem],
    settings: WarmUpSettings,
    report: Callable[[str], None] = print,
    max_new_tokens: int = MAX_RESPONSE_TOKENS,
) -> dict[str, float]:
    """Train ``model`` in place; returns the last step, loss, greedy and sampled accuracy, and the seconds taken.
    ``max_new_tokens`` limits sampled solutions."""
    rng, started = random.Random(settings.seed), time.monotonic()

    def written(problem: Problem) -> Row:
        solution = tokenizer.encode(solve(problem, settings.error_rate, rng), add_special_tokens=False)
        return prompt_ids(tokenizer, problem), [*solution, tokenizer.eos_token_id]

    chosen = (rng.choices(train, k=settings.batch_size) for _ in range(settings.steps))
    batches = ([written(problem) for problem in problems] for problems in chosen)
    for step, loss in fine_tune(model, tokenizer, batches, settings.learning_rate_of):
        if step != settings.steps and step % settings.evaluate_every:
            continue
        greedy = judge(model, tokenizer, validation, temperature=0.0, max_new_tokens=max_new_tokens)["right"]
        sampled = judge(model, tokenizer, validation, seed=settings.seed, max_new_tokens=max_new_tokens)["right"]
        seconds = round(time.monotonic() - started, 1)
        figures = f"loss {loss:.4f}  greedy {greedy:.2f}  sampled {sampled:.2f}"
        report(f"warm-up step {step}/{settings.steps}  {figures}  {seconds} s")
        if greedy >= settings.greedy_target and sampled >= settings.sampled_target:
            break
    if sampled < settings.sampled_target:
        report(f"warning: the warm-up ended below sampled_target={settings.sampled_target}; give it more steps")
    return {"step": step, "loss": loss, "greedy_accuracy": greedy, "sampled_accuracy": sampled, "seconds": seconds}
