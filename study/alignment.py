"""How near an arm's update comes to the gradient of accuracy, at one checkpoint and without training.

The yardstick G is the exact gradient of accuracy at temperature 1 (:func:`study.exact.accuracy_gradient`) on training
problems. Several rollout batches are drawn, the same for all arms, and g is an arm's ascent direction on one of them:

- ``gain``: what one step of Adam, ``g / (|g| + 1e-8)`` for its first one, raises accuracy by to first order, over what a step
  at the same rate along G itself would; mean over batches. Arms differ in scale, and Adam does not see it.
- ``cosine``: of the mean of g over batches with G.
- ``signal_to_noise``: ``|E g|^2 / E |g - E g|^2``, both estimated without bias from the batches.

Shape suffixes: N batches, P parameters.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from study.arms import Arm
from study.credit import credit, policy_state
from study.exact import accuracy_gradient, right_texts
from study.regression import Regression
from study.rollouts import CONTROL, numbers, roll_out
from study.task import StudyProblem
from study.trainer import RunSettings, gradient

ADAM_EPSILON = 1e-8
FIGURES = ("gain", "cosine", "signal_to_noise")


def adam_step(gradient_P: torch.Tensor) -> torch.Tensor:
    """Adam's first step at rate 1 along an ascent direction."""
    return gradient_P / (gradient_P.abs() + ADAM_EPSILON)


def gain(update_P: torch.Tensor, yardstick_P: torch.Tensor) -> float:
    """First-order gain of Adam's first step along an update, as a share of that along the yardstick."""
    yardstick_P = yardstick_P.double()
    return float(yardstick_P @ adam_step(update_P).double() / (yardstick_P @ adam_step(yardstick_P)))


def cosine(first_P: torch.Tensor, second_P: torch.Tensor) -> float:
    """Cosine of two directions; 0 where one is zero."""
    norm = float(first_P.double().norm() * second_P.double().norm())
    return float(first_P.double() @ second_P.double()) / norm if norm else 0.0


def signal_to_noise(mean_P: torch.Tensor, squares: Sequence[float]) -> float:
    """``|E g|^2 / E |g - E g|^2`` from the mean of N updates and their squared norms; may come out below 0.

    Raises:
        ValueError: fewer than two updates.
    """
    count = len(squares)
    if count < 2:
        raise ValueError(f"signal_to_noise needs two updates or more, got {count}")
    squared_mean = float(mean_P.double().square().sum())
    noise = (float(np.mean(squares)) - squared_mean) * count / (count - 1)
    return (squared_mean - noise / count) / noise if noise > 0 else float("inf")


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[StudyProblem],
    arms: Sequence[Arm],
    settings: RunSettings,
    *,
    batches: int,
    yardstick_problems: int,
    seed: int,
) -> dict[str, dict[str, float]]:
    """The figures of every arm at one model, and the processor time of its token weights a batch.

    Args:
        model: the policy; its parameters do not change.
        tokenizer: its tokenizer.
        problems: training problems.
        arms: the arms.
        settings: of the runs.
        batches: rollout batches.
        yardstick_problems: how many of the problems the exact gradient is over, one wording each.
        seed: of all random numbers.
    """
    model.eval()
    texts = right_texts(problems[:yardstick_problems], tokenizer, 1, seed)
    yardstick_P = accuracy_gradient(model, tokenizer, texts)
    order = random.Random(f"alignment {seed}")
    gains: dict[str, list[float]] = {arm.name: [] for arm in arms}
    sums = {arm.name: torch.zeros_like(yardstick_P) for arm in arms}
    squares: dict[str, list[float]] = {arm.name: [] for arm in arms}
    seconds = dict.fromkeys(gains, 0.0)
    regressions = {arm.name: Regression() for arm in arms}
    for batch in range(1, batches + 1):
        rollouts = roll_out(model, tokenizer, order.sample(problems, settings.prompts), settings.rollouts, seed, batch)
        state = policy_state(model, rollouts)
        drawn_BL = numbers(seed, CONTROL, batch, tuple(rollouts.input_ids_BL.shape))
        for arm in arms:
            state.regression = regressions[arm.name]
            started = time.process_time()
            advantages_BL = credit(model, tokenizer, rollouts, arm, state, drawn_BL, batch)
            seconds[arm.name] += time.process_time() - started
            model.zero_grad(set_to_none=True)
            gradient(model, rollouts, advantages_BL, state.old_log_probs_BL, arm, settings)
            update_P = -torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            gains[arm.name].append(gain(update_P, yardstick_P))
            sums[arm.name] += update_P / batches
            squares[arm.name].append(float(update_P.double().square().sum()))
    model.zero_grad(set_to_none=True)
    return {
        arm.name: {
            "gain": float(np.mean(gains[arm.name])),
            "cosine": cosine(sums[arm.name], yardstick_P),
            "signal_to_noise": signal_to_noise(sums[arm.name], squares[arm.name]),
            "seconds": seconds[arm.name] / batches,
        }
        for arm in arms
    }
