"""Two ranks joined by gloo through accelerate, and one that is alone; see test_trl.py. Nothing is checked here."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from grail_advantage.trl_ext import TokenWeightGRPOTrainer
from tests.trl_ext import world

WEIGHTS: dict[str, dict[str, Any]] = {
    "grail": {"token_weights": "grail", "skip_zero_advantage": True},
    "stare": {"token_weights": "stare", "token_weight_options": {"threshold": 100.0}},
    "shear": {"token_weights": "shear", "token_weight_options": {"window": 6, "stride": 3}},
    "turn_rloo": {"token_weights": "turn_rloo", "environment_factory": world.Keypad},
}


def run(name: str, folder: Path, world_size: int) -> dict[str, Any]:
    """Train; the advantages of every generation batch of this rank, the figures, and the parameters at the end."""
    seen: list[dict[str, torch.Tensor]] = []

    class Recording(TokenWeightGRPOTrainer):
        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            output = super()._generate_and_score_completions(inputs)
            seen.append({part: output[part].clone() for part in ("completion_ids", "completion_mask", "advantages")})
            return output

    options: dict[str, Any] = {"max_steps": 3, "loss_type": "dr_grpo", "learning_rate": 0.05}
    options |= {"weights": {**WEIGHTS[name], "token_dump": folder.parent / f"{name} of {world_size}"}}
    build = world.build
    if name == "turn_rloo":  # the responses of one prompt are on all ranks
        options |= {"data": world.chats(world.SAFE), "num_generations": 8}
        build = world.talk
    trainer = build(folder, Recording, per_device_train_batch_size=8 // world_size, **options)
    trainer.train()
    figures = {key.split("/")[-1]: value for key, value in trainer.state.log_history[0].items() if f"{name}/" in key}
    result = {"batches": seen, "figures": figures, "distributed": type(trainer.model_wrapped).__name__}
    return {**result, "parameters": world.parameters(trainer.model).clone()}


def start(rank: int, world_size: int, port: int, folder: Path) -> None:
    """Train with every method as a rank, in a process of its own."""
    with (folder / f"log{rank}of{world_size}.txt").open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    if world_size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in WEIGHTS:
        try:
            results[name] = run(name, folder / f"run{rank}of{world_size}", world_size)
        except Exception:
            results[name] = traceback.format_exc()
            break  # the other rank waits for a counterpart
    torch.save(results, folder / f"result{rank}of{world_size}.pt")


if __name__ == "__main__":  # all at once; they are forks, so that TRL is imported once
    context, given = multiprocessing.get_context("fork"), (int(sys.argv[1]), Path(sys.argv[2]))
    pairs = [(rank, world_size) for world_size in (2, 1) for rank in range(world_size)]
    ranks = [context.Process(target=start, args=(*pair, *given), daemon=True) for pair in pairs]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(1500)
