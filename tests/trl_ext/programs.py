"""Programs of test_trl.py, in which nothing is checked: two ranks joined by gloo through accelerate and one that is
alone, or with the word ``card`` weights on a device that is not the CPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.multiprocessing import start_processes
from trl import GRPOTrainer

from tests.trl_ext import world

OPTIONS: dict[str, dict[str, Any]] = {
    "grail": {"skip_zero_advantage": True},
    "stare": {"token_weight_options": {"threshold": 100.0}},
    "shear": {"token_weight_options": {"window": 6, "stride": 3}},
    "turn_rloo": {"environment_factory": world.Guess},
}


def run(name: str, folder: Path, world_size: int) -> dict[str, Any]:
    """Train; the figures, and the parameters at the end."""
    settings: dict[str, Any] = {
        "max_steps": 3,
        "loss_type": "dr_grpo",
        "learning_rate": 0.05,
    }
    # A group of eight in place of two of four.
    if name == "turn_rloo":  # the responses of one prompt are on all ranks
        settings = world.talks(*list(world.TALKS)[:1]) | settings | {"num_generations": 8}
    trainer = world.trained(
        folder,
        per_device_train_batch_size=8 // world_size,
        token_weights=name,
        token_dump=folder.parent / f"{name} of {world_size}",
        **settings | OPTIONS[name],
    )
    figures = {
        key.split("/")[-1]: value
        for key, value in trainer.state.log_history[0].items()
        if f"{name}/" in key
    }
    return {
        "figures": figures,
        "distributed": type(trainer.model_wrapped).__name__,
        "parameters": world.parameters(trainer.model),
    }


def start(rank: int, world_size: int, port: int, folder: Path) -> None:
    """Train with every method as a rank, in a process of its own."""
    # What torchrun sets.
    if world_size > 1:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        os.environ["WORLD_SIZE"] = str(world_size)
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    run_folder = folder / f"run{rank}of{world_size}"
    results = {name: run(name, run_folder, world_size) for name in OPTIONS}
    torch.save(results, folder / f"result{rank}of{world_size}.pt")


def on_card(folder: Path) -> None:
    """Print a line of JSON a method with the largest difference of token advantages from the CPU's."""
    # This process has the device for good, from before its first backward
    from tests.core import card

    batches = {}
    for name in ("grail", "uniform", "surprisal", "steer", "oar_p", "oar_g"):
        trainer = world.build(folder / name, token_weights=name)
        rows = [row for row in trainer.train_dataset for _ in range(world.GENERATIONS)]
        output = GRPOTrainer._generate_and_score_completions(trainer, rows)
        batches[name] = trainer, rows, output, trainer._weighted_advantages(rows, output)
    with card.card():
        for name, (trainer, rows, output, expected) in batches.items():
            moved = send_to_device(output, card.DEVICE)
            card.moved(trainer.model)
            trainer.accelerator.state.device = card.DEVICE
            advantages = trainer._weighted_advantages(rows, moved)
            assert advantages.device == card.DEVICE
            print(
                json.dumps(
                    [
                        name,
                        float(
                            (advantages.cpu() - expected).abs().max() / expected.abs().max()
                        ),
                    ]
                )
            )


if __name__ == "__main__":
    if sys.argv[1] == "card":
        sys.exit(on_card(Path(sys.argv[2])))
    # All at once; they are forks, so that TRL is imported once. One that fails ends the others.
    contexts = [
        start_processes(
            start,
            (world_size, int(sys.argv[1]), Path(sys.argv[2])),
            world_size,
            join=False,
            daemon=True,
            start_method="fork",
        )
        for world_size in (2, 1)
    ]
    for context in contexts:
        while not context.join():
            pass
