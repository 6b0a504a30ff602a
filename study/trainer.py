"""One training run of the study, in one process and one thread.

Advantages, loss and its aggregation are verl's own functions, token weights those of
:func:`grail_advantage.compute_token_weights`; sampling and the optimiser loop are plain torch. So a run is the same number for
number whenever it is repeated on the same machine, which a run through an asynchronous rollout server is not, and costs a
fraction of it.

Shape suffixes: B rows, L prompt + response, V vocabulary.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from verl.trainer.ppo import core_algos
from verl.workers.config import FSDPActorConfig

from study.arms import Arm
from study.credit import credit, policy_state
from study.exact import Texts, exact_accuracy
from study.regression import Regression
from study.rollouts import CONTROL, Rollouts, alike, numbers, roll_out, sample_accuracy
from study.task import MAX_RESPONSE_TOKENS, StudyProblem


@dataclass(frozen=True)
class RunSettings:
    """Settings that all arms share."""

    steps: int = 12
    """Rollout batches."""
    prompts: int = 16
    """Problems in a rollout batch."""
    rollouts: int = 8
    """Responses a problem."""
    epochs: int = 4
    """Optimiser steps on each rollout batch, all of it at once."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    gradient_norm: float = 1.0
    evaluate_at: tuple[int, ...] = (8, 12)
    """Steps after which accuracy is measured; the outcome is the mean over them. The last one is the last step."""
    temperature: float = 0.6
    """Of the outcome."""
    samples: int = 8
    """Samples a held-out problem for the outcome."""
    samples_hot: int = 2
    """Samples a held-out problem at temperature 1, after the last step."""

    def __post_init__(self) -> None:
        for name in ("steps", "prompts", "epochs", "samples", "samples_hot", "temperature"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if self.rollouts < 2:
            raise ValueError(f"rollouts={self.rollouts} must be at least 2: a group of one has no relative advantage")
        if self.samples > 9:
            raise ValueError(f"samples={self.samples} must be at most 9: the raw file holds one digit a problem")
        if not self.evaluate_at or max(self.evaluate_at) != self.steps or min(self.evaluate_at) < 1:
            raise ValueError(f"evaluate_at={self.evaluate_at} must lie in 1 to steps={self.steps} and end with it")


@dataclass(frozen=True)
class Update:
    """Outcome of the optimiser steps on one batch."""

    gradient_norm: float
    """Mean over the epochs, before clipping."""
    clipped: int
    errors: int
    """Tokens of first errors with an advantage, over all epochs but the first, and how many of them were clipped."""


def update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    rollouts: Rollouts,
    advantages_BL: torch.Tensor,
    old_log_probs_BL: torch.Tensor,
    arm: Arm,
    settings: RunSettings,
) -> Update:
    """The optimiser steps on one rollout batch."""
    error_BL = _error_tokens(rollouts) & (advantages_BL != 0)
    norms, clipped, errors = [], 0, 0
    for epoch in range(settings.epochs):
        for rows, log_probs_BL in gradient(model, rollouts, advantages_BL, old_log_probs_BL, arm, settings):
            width = log_probs_BL.shape[1]
            marked_BL = error_BL[rows, 1 : width + 1]
            ratio_BL = (log_probs_BL - old_log_probs_BL[rows, 1 : width + 1]).exp()
            sign_BL = advantages_BL[rows, 1 : width + 1].sign()
            outside_BL = ((sign_BL > 0) & (ratio_BL > 1 + settings.clip_high)) | (
                (sign_BL < 0) & (ratio_BL < 1 - settings.clip_low)
            )
            if epoch:
                clipped += int((outside_BL & marked_BL).sum())
                errors += int(marked_BL.sum())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_norm)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return Update(float(np.mean(norms)), clipped, errors)


def gradient(
    model: PreTrainedModel,
    rollouts: Rollouts,
    advantages_BL: torch.Tensor,
    old_log_probs_BL: torch.Tensor,
    arm: Arm,
    settings: RunSettings,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Add the gradient of verl's loss over the whole batch to the parameters' gradients.

    Returns:
        of every micro-batch the rows and the log-probabilities of their tokens, from the second position on; without the
        rows, and the ends of rows, that have no advantage.
    """
    mask_BL = rollouts.response_mask_BL
    actor = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=arm.rollouts or settings.rollouts,
        use_dynamic_bsz=True,
        clip_ratio_low=settings.clip_low,
        clip_ratio_high=settings.clip_high,
        clip_ratio_c=1e9,  # the published loss has no second clip
        global_batch_info={
            "loss_scale_factor": MAX_RESPONSE_TOKENS,
            "global_batch_size": len(mask_BL),
            "batch_num_tokens": int(mask_BL.sum()),
        },
    )
    # A token without an advantage adds exactly nothing, and none looks at what follows it: rows end with the last token that
    # has one, and rows without any are left out. One row stays in any case, so that every parameter has a gradient.
    taught_BL = advantages_BL != 0
    ends_B = torch.where(taught_BL, torch.arange(1, taught_BL.shape[1] + 1), 0).amax(dim=1)
    live_B = ends_B.nonzero().flatten()
    if not len(live_B):
        live_B, ends_B = torch.tensor([0]), rollouts.attention_mask_BL.sum(dim=1)
    micro_batches = []
    for rows in alike(live_B, ends_B):  # the gradients add up to the whole batch's
        width = int(ends_B[rows].max())
        ids_BL = rollouts.input_ids_BL[rows, :width]
        logits_BLV = model(input_ids=ids_BL).logits[:, :-1].float()
        log_probs_BL = logits_BLV.log_softmax(dim=-1).gather(-1, ids_BL[:, 1:].unsqueeze(-1)).squeeze(-1)
        loss, _ = core_algos.compute_policy_loss_vanilla(
            old_log_prob=old_log_probs_BL[rows, 1:width],
            log_prob=log_probs_BL,
            advantages=advantages_BL[rows, 1:width],
            response_mask=mask_BL[rows, 1:width],
            loss_agg_mode=arm.loss_agg_mode,
            config=actor,
        )
        loss.backward()
        micro_batches.append((rows, log_probs_BL.detach()))
    return micro_batches


def _error_tokens(rollouts: Rollouts) -> torch.Tensor:
    marked_BL = torch.zeros(rollouts.input_ids_BL.shape, dtype=torch.bool)
    for row, read in enumerate(rollouts.reads):
        start = len(rollouts.prompts[row])
        marked_BL[row, start : start + len(read.error_T)] = torch.from_numpy(read.error_T)
    return marked_BL


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    train_problems: Sequence[StudyProblem],
    held_out: Sequence[StudyProblem],
    texts: Texts,
    arm: Arm,
    learning_rate: float,
    settings: RunSettings,
    seed: int,
) -> dict[str, Any]:
    """Train ``model`` in place and return the run's figures, as :mod:`study.raw` names them.

    Args:
        model: the warmed-up model.
        tokenizer: its tokenizer.
        train_problems: problems that batches are drawn from.
        held_out: problems that accuracy is measured on.
        texts: right solutions of these, for the exact accuracy.
        arm: how to assign credit.
        learning_rate: Adam's, constant.
        settings: the rest.
        seed: of all random numbers.
    """
    order = random.Random(f"order {seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    model.eval()  # the model has no dropout; evaluation mode only makes that explicit
    kept, updates, rewards, sampled = Regression(), [], [], {}
    training = weighing = 0.0
    for step in range(1, settings.steps + 1):
        started = time.process_time()
        chosen = order.sample(train_problems, settings.prompts)
        rollouts = roll_out(model, tokenizer, chosen, arm.rollouts or settings.rollouts, seed, step)
        rewards.append(float(rollouts.rewards_B.mean()))
        state = policy_state(model, rollouts)
        state.regression = kept
        before = time.process_time()
        drawn_BL = numbers(seed, CONTROL, step, tuple(rollouts.input_ids_BL.shape))
        advantages_BL = credit(model, tokenizer, rollouts, arm, state, drawn_BL, step)
        weighing += time.process_time() - before
        updates.append(update(model, optimizer, rollouts, advantages_BL, state.old_log_probs_BL, arm, settings))
        training += time.process_time() - started
        if step in settings.evaluate_at:
            sampled[step] = sample_accuracy(
                model, tokenizer, held_out, settings.samples, settings.temperature, seed, step
            )
    last = sampled[settings.steps]
    errors = sum(one.errors for one in updates)
    return {
        "accuracy": float(np.mean([one.accuracy for one in sampled.values()])),
        **{f"right_{number}": "".join(map(str, one.right)) for number, one in enumerate(sampled.values(), 1)},
        **figures_of(model, tokenizer, held_out, texts, settings, seed),
        "length": last.length,
        "filler": last.filler,
        "asides": last.asides,
        "reward": float(np.mean(rewards)),
        "clipped_errors": sum(one.clipped for one in updates) / errors if errors else 0.0,
        "gradient_norm": float(np.mean([one.gradient_norm for one in updates])),
        "processor_seconds": training,
        "weight_seconds": weighing,
    }


def figures_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    held_out: Sequence[StudyProblem],
    texts: Texts,
    settings: RunSettings,
    seed: int,
) -> dict[str, float]:
    """Secondary accuracies of a model: at temperature 1, greedy, and exact under given wording."""
    beyond = settings.steps + 1  # a stream of its own
    return {
        "accuracy_hot": sample_accuracy(model, tokenizer, held_out, settings.samples_hot, 1.0, seed, beyond).accuracy,
        "accuracy_greedy": sample_accuracy(model, tokenizer, held_out, 1, 0.0, seed, beyond).accuracy,
        "exact": exact_accuracy(model, tokenizer, texts, temperature=settings.temperature),
        "exact_hot": exact_accuracy(model, tokenizer, texts),
    }
