"""The alignment measure on gradients made by hand, and that it leaves a model as it was."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from study.alignment import adam_step, signal_to_noise


def test_step_is_that_of_torchs_adam() -> None:
    gradient = torch.tensor([0.3, -2e-8, 0.0, 5.0])
    parameter = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.Adam([parameter], lr=1.0)
    parameter.grad = -gradient  # an ascent direction
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), adam_step(gradient))


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
