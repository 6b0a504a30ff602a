"""Token advantages in TRL on a device that is not the CPU, in a process of its own: a line of JSON a method with the
largest difference from the CPU's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from grail_advantage.trl_ext import TokenWeightGRPOTrainer
from tests.core import card
from tests.trl_ext.world import build, generation_batch


class Kept(TokenWeightGRPOTrainer):
    def _weighted_advantages(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> torch.Tensor:
        self.kept = inputs, dict(output)
        return super()._weighted_advantages(inputs, output)


names = ("grail", "uniform", "surprisal", "steer", "oar_p", "oar_g")
trainers = {name: build(Path(sys.argv[1], name), Kept, weights={"token_weights": name}) for name in names}
expected = {name: generation_batch(trainer)["advantages"] for name, trainer in trainers.items()}
with card.card():
    for name, trainer in trainers.items():
        inputs, output = trainer.kept
        there = {key: of.to(card.DEVICE) if isinstance(of, torch.Tensor) else of for key, of in output.items()}
        card.moved(trainer.model)
        trainer.accelerator.state.device = card.DEVICE
        found = trainer._weighted_advantages(inputs, there)
        assert found.device == card.DEVICE
        difference = (found.cpu() - expected[name]).abs().max() / expected[name].abs().max()
        print(json.dumps([name, float(difference)]))
