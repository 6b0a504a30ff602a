"""The alignment measure on gradients made by hand, and that it leaves a model as it was."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from recipe.tiny.model import build_model
from study.alignment import adam_step, cosine, gain, measure, signal_to_noise
from study.arms import ARMS
from study.task import study_problems, study_tokenizer
from study.trainer import RunSettings


def test_gain_is_the_share_of_the_ideal_steps() -> None:
    yardstick = torch.tensor([3.0, -1.0, 2.0])
    # Adam's step is the sign: along the yardstick it gains 3 + 1 + 2, with one sign wrong 3 - 1 + 2.
    assert gain(torch.tensor([0.1, -5.0, 1.0]), yardstick) == pytest.approx(1)
    assert gain(torch.tensor([0.1, 5.0, 1.0]), yardstick) == pytest.approx(4 / 6)
    assert gain(-yardstick, yardstick) == pytest.approx(-1)
    assert gain(torch.tensor([0.1, 0.0, 0.0]), yardstick) == pytest.approx(3 / 6)


def test_step_is_that_of_torchs_adam() -> None:
    gradient = torch.tensor([0.3, -2e-8, 0.0, 5.0])
    parameter = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.Adam([parameter], lr=1.0)
    parameter.grad = -gradient  # an ascent direction
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), adam_step(gradient))


def test_cosine_by_hand() -> None:
    assert cosine(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])) == pytest.approx(1 / math.sqrt(2))
    assert cosine(torch.zeros(2), torch.ones(2)) == 0


def test_signal_to_noise_by_hand_and_without_bias() -> None:
    # Updates (1, 1) and (1, -1): mean (1, 0), each 1 away from it. Noise 2 (of 2 - 1), signal 1 - 2 / 2 = 0.
    assert signal_to_noise(torch.tensor([1.0, 0.0]), [2.0, 2.0]) == pytest.approx(0)
    generator = np.random.default_rng(0)
    ratios = []
    for _ in range(300):
        updates = generator.normal(size=(8, 50)) + 0.5
        ratios.append(signal_to_noise(torch.from_numpy(updates.mean(axis=0)), (updates**2).sum(axis=1).tolist()))
    assert np.mean(ratios) == pytest.approx(0.25, rel=0.05)
    with pytest.raises(ValueError, match="two updates"):
        signal_to_noise(torch.ones(2), [2.0])
    assert signal_to_noise(torch.ones(2), [2.0, 2.0]) == math.inf


def test_arms_are_measured_and_the_model_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = study_tokenizer()
    model = build_model(tokenizer, 0)
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr("study.rollouts.MAX_RESPONSE_TOKENS", 12)
    # An untrained model is never right: rewards are made up.
    rewards = iter(range(1000))
    monkeypatch.setattr("study.rollouts.is_right", lambda *_: next(rewards) % 3 == 0)
    # Of a model that is never right the gradient vanishes beside Adam's epsilon.
    count = sum(parameter.numel() for parameter in model.parameters())
    yardstick = torch.randn(count, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("study.alignment.accuracy_gradient", lambda *_: yardstick)
    settings = RunSettings(steps=1, prompts=2, rollouts=4, evaluate_at=(1,))
    problems = study_problems("slips", "train", 8, 0)
    arms = [ARMS[name] for name in ("uniform", "right_only", "oracle")]
    found = measure(model, tokenizer, problems, arms, settings, batches=2, yardstick_problems=4, seed=0)
    assert set(found) == {"uniform", "right_only", "oracle"}
    assert -1 <= found["uniform"]["gain"] <= 1 and found["uniform"]["gain"] != found["right_only"]["gain"]
    assert all((value == before[name]).all() for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
