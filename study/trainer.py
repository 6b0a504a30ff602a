"""One training run of the study, in one process and one thread.

Advantages, loss and its aggregation are verl's own functions, token weights those of
:func:`grail_advantage.compute_token_weights`, rewards those of :mod:`recipe.reward`; sampling and the optimiser loop are plain
torch. So a run is the same number for number whenever it is repeated on the same machine, which a run through an
asynchronous rollout server is not, and costs a fraction of it.

Shape suffixes: B rows, L prompt + response, V vocabulary.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from verl.trainer.ppo import core_algos
from verl.utils.torch_functional import entropy_from_logits
from verl.workers.config import FSDPActorConfig

from grail_advantage import compute_token_weights
from recipe.reward import compute_score
from recipe.tiny.sampling import prompt_ids, sample
from recipe.tiny.task import Problem
from study.arms import Arm
from study.task import MAX_RESPONSE_TOKENS, error_tokens

DATA_SOURCE = "tiny_chain_sum"
MICRO_BATCHES = 4
ORACLE_WEIGHT = 20.0


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
    learning_rate: float = 5e-5
    clip_low: float = 0.2
    clip_high: float = 0.28
    gradient_norm: float = 1.0
    evaluate_every: int = 4
    evaluation_samples: int = 3
    """Samples of each held-out problem, at temperature 1."""

    def __post_init__(self) -> None:
        for name in ("steps", "prompts", "epochs", "learning_rate", "evaluate_every"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if self.rollouts < 2:
            raise ValueError(f"rollouts={self.rollouts} must be at least 2: a group of one has no relative advantage")
        if self.evaluation_samples < 3:
            raise ValueError(f"evaluation_samples={self.evaluation_samples} must be at least 3 for pass@3")


@dataclass(frozen=True)
class Rollouts:
    """One batch: prompt and response side by side, padded on the right."""

    input_ids_BL: torch.Tensor
    attention_mask_BL: torch.Tensor
    response_mask_BL: torch.Tensor
    rewards_B: torch.Tensor
    truncated_B: torch.Tensor
    problems: Sequence[Problem]
    """The problem of each row."""
    groups_B: np.ndarray


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    train_problems: Sequence[Problem],
    held_out: Sequence[Problem],
    arm: Arm,
    settings: RunSettings,
    seed: int,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train ``model`` in place and return the run's figures: ``steps`` and ``evaluations``, one dict each."""
    order = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    model.eval()  # the model has no dropout; evaluation mode only says so
    steps: list[dict[str, float]] = []
    evaluations = [evaluate(model, tokenizer, held_out, settings, seed, step=0)]
    report(f"{arm.name} seed {seed}: held-out accuracy {evaluations[0]['accuracy']:.3f} before")
    for step in range(1, settings.steps + 1):
        started = time.perf_counter()
        chosen = order.sample(train_problems, settings.prompts)
        rollouts = roll_out(model, tokenizer, chosen, settings.rollouts, generator=_generator(seed, 1, step))
        figures = _update(model, tokenizer, optimizer, rollouts, arm, settings, generator=_generator(seed, 3, step))
        steps.append({"step": step, **figures, "seconds": time.perf_counter() - started})
        if step % settings.evaluate_every == 0 or step == settings.steps:
            evaluations.append(evaluate(model, tokenizer, held_out, settings, seed, step=step))
            pace = statistics.fmean(entry["seconds"] for entry in steps)
            report(
                f"{arm.name} seed {seed}: step {step}/{settings.steps}  held-out accuracy "
                f"{evaluations[-1]['accuracy']:.3f}  {pace:.1f} s/step"
            )
    return {"steps": steps, "evaluations": evaluations}


def roll_out(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    rollouts: int,
    generator: torch.Generator,
) -> Rollouts:
    """Sample ``rollouts`` responses to each problem at temperature 1 and judge them."""
    prompts = [prompt_ids(tokenizer, problem) for problem in problems for _ in range(rollouts)]
    responses = sample(model, tokenizer, prompts, max_new_tokens=MAX_RESPONSE_TOKENS, generator=generator)
    longest = max(len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True))
    ids_BL = torch.full((len(prompts), longest), tokenizer.pad_token_id)
    starts_B1 = torch.tensor([len(prompt) for prompt in prompts]).unsqueeze(1)
    ends_B1 = starts_B1 + torch.tensor([len(response) for response in responses]).unsqueeze(1)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids_BL[row, : len(prompt) + len(response)] = torch.tensor(prompt + response)
    position_L = torch.arange(longest)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    gold = [str(problem.answer) for problem in problems for _ in range(rollouts)]
    return Rollouts(
        input_ids_BL=ids_BL,
        attention_mask_BL=(position_L < ends_B1).long(),
        response_mask_BL=((position_L >= starts_B1) & (position_L < ends_B1)).long(),
        rewards_B=torch.tensor(
            [compute_score(DATA_SOURCE, text, answer)["score"] for text, answer in zip(texts, gold, strict=True)]
        ),
        truncated_B=torch.tensor([response[-1] != tokenizer.eos_token_id for response in responses]),
        problems=[problem for problem in problems for _ in range(rollouts)],
        groups_B=np.repeat(np.arange(len(problems)), rollouts),
    )


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    settings: RunSettings,
    seed: int,
    step: int,
) -> dict[str, Any]:
    """Held-out accuracy and pass@3; the noise of the sampling is the same for all arms of a seed."""
    n = settings.evaluation_samples
    rollouts = roll_out(model, tokenizer, problems, n, generator=_generator(seed, 2, 0))
    correct = rollouts.rewards_B.reshape(-1, n).sum(dim=1).int().tolist()
    # Unbiased from n >= 3 samples: 1 - C(n - c, 3) / C(n, 3).
    missed = [(n - c) * (n - c - 1) * (n - c - 2) / (n * (n - 1) * (n - 2)) for c in correct]
    return {
        "step": step,
        "accuracy": sum(correct) / (n * len(correct)),
        "pass_at_3": 1 - sum(missed) / len(missed),
        "response_length": float(rollouts.response_mask_BL.sum(dim=1).double().mean()),
        "correct": correct,
    }


def _update(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    optimizer: torch.optim.Optimizer,
    rollouts: Rollouts,
    arm: Arm,
    settings: RunSettings,
    generator: torch.Generator,
) -> dict[str, float]:
    """Advantages, token weights and the optimiser steps on one rollout batch."""
    mask_BL = rollouts.response_mask_BL
    with torch.no_grad():
        logits_BLV = model(input_ids=rollouts.input_ids_BL).logits[:, :-1].float()
        old_log_probs_BL = _log_probs(logits_BLV, rollouts.input_ids_BL)
        entropy = float(entropy_from_logits(logits_BLV)[mask_BL[:, 1:].bool()].mean())
    advantages_BL = _advantages(rollouts, arm, logits_BLV, old_log_probs_BL)
    # As in the published set-up, for every arm: a response without an end token teaches nothing.
    advantages_BL = torch.where(rollouts.truncated_B.unsqueeze(1), 0.0, advantages_BL)

    figures = {}
    started = time.perf_counter()
    if arm.weights is not None:
        result = compute_token_weights(
            model,
            tokenizer,
            rollouts.input_ids_BL,
            rollouts.attention_mask_BL,
            mask_BL,
            advantages_BL.gather(1, advantages_BL.abs().argmax(dim=1, keepdim=True)).squeeze(1),
            arm.weights,
        )
        weights_BL = result.weights
        if arm.control == "shuffled":
            weights_BL = shuffled(weights_BL, mask_BL, generator)
        advantages_BL = advantages_BL * weights_BL
        figures = {name: result.stats[name] for name in ("selected_rate", "weight_deviation", "advantage_scale")}
    elif arm.control == "oracle":
        advantages_BL = advantages_BL * oracle_weights(rollouts, advantages_BL, tokenizer)
    figures["seconds_weights"] = time.perf_counter() - started

    actor = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=settings.rollouts,
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
    # Rows of like length together, so that little padding is computed; the gradients add up to the whole batch's.
    micro_batches = rollouts.attention_mask_BL.sum(dim=1).argsort().chunk(MICRO_BATCHES)
    for _ in range(settings.epochs):
        for rows in micro_batches:
            width = int(rollouts.attention_mask_BL[rows].sum(dim=1).max())
            ids_BL = rollouts.input_ids_BL[rows, :width]
            loss, _ = core_algos.compute_policy_loss_vanilla(
                old_log_prob=old_log_probs_BL[rows, : width - 1],
                log_prob=_log_probs(model(input_ids=ids_BL).logits[:, :-1].float(), ids_BL),
                advantages=advantages_BL[rows, 1:width],
                response_mask=mask_BL[rows, 1:width],
                loss_agg_mode=arm.loss_agg_mode,
                config=actor,
            )
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {
        "reward": float(rollouts.rewards_B.mean()),
        "entropy": entropy,
        "response_length": float(mask_BL.sum(dim=1).double().mean()),
        "truncated_rate": float(rollouts.truncated_B.double().mean()),
        **figures,
    }


def shuffled(weights_BL: torch.Tensor, mask_BL: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The same weights on other tokens of the same response: what they do apart from where they stand."""
    weights_BL = weights_BL.clone()
    for weights_L, mask_L in zip(weights_BL, mask_BL.bool(), strict=True):
        own = weights_L[mask_L]
        weights_L[mask_L] = own[torch.randperm(len(own), generator=generator)]
    return weights_BL


def oracle_weights(rollouts: Rollouts, advantages_BL: torch.Tensor, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """What a method would give that knew the truth: in wrong responses ``ORACLE_WEIGHT`` times as much on the tokens of the
    first error as on the others, each row's weights summing to its number of tokens."""
    mask_BL = rollouts.response_mask_BL
    weights_BL = mask_BL.float()
    for row, problem in enumerate(rollouts.problems):
        if not (advantages_BL[row] < 0).any():
            continue
        start = int(mask_BL[row].argmax())
        response = rollouts.input_ids_BL[row, mask_BL[row].bool()].tolist()
        for index in error_tokens(problem, response, tokenizer):
            weights_BL[row, start + index] = ORACLE_WEIGHT
    return weights_BL * (mask_BL.sum(dim=1, keepdim=True) / weights_BL.sum(dim=1, keepdim=True))


def _advantages(rollouts: Rollouts, arm: Arm, logits_BLV: torch.Tensor, old_log_probs_BL: torch.Tensor) -> torch.Tensor:
    """Sequence advantages (or, for the optimal token baseline, token advantages) by verl's estimators, (B, L)."""
    mask_BL = rollouts.response_mask_BL
    last_B1 = (mask_BL * torch.arange(mask_BL.shape[1])).argmax(dim=1, keepdim=True)
    rewards_BL = torch.zeros(mask_BL.shape).scatter(1, last_B1, rollouts.rewards_B.unsqueeze(1))
    if arm.advantage == "optimal_token_baseline":
        probs_squared_BL = logits_BLV.softmax(dim=-1).square().sum(dim=-1)
        advantages_BL, _ = core_algos.compute_optimal_token_baseline_advantage(
            token_level_rewards=rewards_BL[:, 1:],
            response_mask=mask_BL[:, 1:],
            index=rollouts.groups_B,
            old_log_probs=old_log_probs_BL,
            sum_pi_squared=probs_squared_BL,
        )
        return torch.cat([torch.zeros(len(mask_BL), 1), advantages_BL * mask_BL[:, 1:]], dim=1)
    advantages_BL, _ = core_algos.compute_grpo_outcome_advantage(
        token_level_rewards=rewards_BL,
        response_mask=mask_BL,
        index=rollouts.groups_B,
        norm_adv_by_std_in_grpo=arm.advantage == "grpo",
    )
    return advantages_BL


def _log_probs(logits_BLV: torch.Tensor, ids_BL: torch.Tensor) -> torch.Tensor:
    return logits_BLV.log_softmax(dim=-1).gather(-1, ids_BL[:, 1:].unsqueeze(-1)).squeeze(-1)


def _generator(seed: int, stream: int, step: int) -> torch.Generator:
    entropy = np.random.SeedSequence([seed, stream, step]).generate_state(1)[0]
    return torch.Generator().manual_seed(int(entropy))
