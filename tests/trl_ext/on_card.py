"""Token advantages in TRL with the model and the batch on a device that is not the CPU; run in a process of its own.

Prints a line of JSON a method: the largest difference from the CPU's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.core import card
from tests.trl_ext import scripted

METHODS = ("grail", "uniform", "surprisal", "steer", "oar_p", "oar_g")


class Kept(scripted.ScriptedTokenWeights):
    """Keeps what the weights are made of."""

    def _weighted_advantages(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> torch.Tensor:
        self.kept = inputs, dict(output)
        return super()._weighted_advantages(inputs, output)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    trainers = {name: scripted.build(folder / name, Kept, weights={"token_weights": name}) for name in METHODS}
    expected = {name: scripted.generation_batch(trainer)["advantages"] for name, trainer in trainers.items()}

    def there(value: Any) -> Any:
        return value.to(card.DEVICE) if isinstance(value, torch.Tensor) else value

    with card.card():
        for name, trainer in trainers.items():
            inputs, output = trainer.kept
            card.moved(trainer.model)
            trainer.accelerator.state.device = card.DEVICE
            trainer._rewards, trainer.reward_weights = there(trainer._rewards), there(trainer.reward_weights)
            found = trainer._weighted_advantages(inputs, {key: there(value) for key, value in output.items()})
            assert found.device == card.DEVICE
            difference = (found.cpu() - expected[name]).abs().max() / expected[name].abs().max()
            print(json.dumps([name, float(difference)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
