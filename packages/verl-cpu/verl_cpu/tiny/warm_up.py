"""SFT on worked solutions, so that reinforcement learning starts from a model that is sometimes correct.

It ends when the model knows the task (greedy decoding is correct on most held-out problems) but still slips when it
samples, because the solutions it was shown slip at a known rate. Reinforcement learning can then teach it to slip less.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from verl_cpu.tiny.sampling import MAX_RESPONSE_TOKENS, judge, prompt_ids
from verl_cpu.tiny.sft import Row, fine_tune, labelled
from verl_cpu.tiny.task import Problem, solve

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
    *,
    solve: Callable[[Problem, float, random.Random], str] = solve,
    max_new_tokens: int = MAX_RESPONSE_TOKENS,
    micro_batches: int = 1,
) -> dict[str, float]:
    """Train ``model`` in place; returns the last step, loss, greedy and sampled accuracy, and the seconds taken.

    ``solve`` writes the training solutions, ``max_new_tokens`` limits the sampled ones; ``micro_batches``:
    :func:`verl_cpu.tiny.sft.fine_tune`.
    """
    rng = random.Random(settings.seed)

    def written(problem: Problem) -> Row:
        solution = tokenizer.encode(solve(problem, settings.error_rate, rng), add_special_tokens=False)
        return labelled(prompt_ids(tokenizer, problem), [*solution, tokenizer.eos_token_id])

    chosen = (rng.choices(train, k=settings.batch_size) for _ in range(settings.steps))
    batches = ([written(problem) for problem in problems] for problems in chosen)
    started = time.monotonic()
    for step, loss in fine_tune(model, tokenizer, batches, settings.learning_rate_of, micro_batches=micro_batches):
        last = step == settings.steps
        line = f"warm-up step {step}/{settings.steps}  loss {loss:.4f}"
        if last or step % settings.evaluate_every == 0:
            greedy = judge(model, tokenizer, validation, temperature=0.0, max_new_tokens=max_new_tokens)["right"]
            sampled = judge(model, tokenizer, validation, seed=settings.seed, max_new_tokens=max_new_tokens)["right"]
            last |= greedy >= settings.greedy_target and sampled >= settings.sampled_target
            line += f"  greedy {greedy:.2f}  sampled {sampled:.2f}"
        elif step % _REPORT_EVERY:
            continue
        seconds = time.monotonic() - started
        left = seconds / step * (settings.steps - step)
        report(f"{line}  {seconds:.0f} s, " + ("done" if last else f"at most {left:.0f} s left"))
        if last:
            break
    if sampled < settings.sampled_target:
        report(
            f"warning: warm-up ended at {sampled:.2f} sampled accuracy, below sampled_target={settings.sampled_target}; "
            f"give it more than steps={settings.steps}"
        )
    return {
        "step": step,
        "loss": loss,
        "greedy_accuracy": greedy,
        "sampled_accuracy": sampled,
        "seconds": round(seconds, 1),
    }
