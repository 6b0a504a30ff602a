"""Token weights in TRL on two ranks, joined by gloo through accelerate, beside one that is alone; and on a device that is
not the CPU. Run by test_trl.py with TRL on the path, before the other checks: here forks train, and one that is made
after a backward has none on another device."""

import multiprocessing
import os
import socket
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import send_to_device
from torch.multiprocessing import start_processes
from trl import GRPOTrainer

from grail_advantage.dump import read_dump
from tests.trl_ext import world

OPTIONS = {
    "grail": {"skip_zero_advantage": True},
    "stare": {"token_weight_options": {"threshold": 100.0}},
    "shear": {"token_weight_options": {"window": 6, "stride": 3}},
    "turn_rloo": {"environment_factory": world.Guess},
}


def train(name: str, folder: Path, world_size: int) -> dict[str, Any]:
    """Train; the figures, and the parameters at the end."""
    settings = {
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
    return {
        "figures": trainer.state.log_history[0],
        "distributed": type(trainer.model_wrapped).__name__,
        "parameters": world.parameters(trainer.model),
    }


def run(rank: int, world_size: int, port: int, folder: Path):
    """Train with every method as a rank, in a process of its own."""
    # What torchrun sets.
    if world_size > 1:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        os.environ["WORLD_SIZE"] = str(world_size)
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    run_folder = folder / f"run{rank}of{world_size}"
    results = {name: train(name, run_folder, world_size) for name in OPTIONS}
    torch.save(results, folder / f"result{rank}of{world_size}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Results and dumps of the run with two ranks, and of the same run with one."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # All at once; they are forks, so that TRL is imported once. One that fails ends the others.
    contexts = [
        start_processes(
            run,
            (world_size, port, folder),
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
    return folder


EQUAL = (
    "step",
    "update",
    "row",
    "key",
    "group",
    "prompt",
    "response",
    "reward",
    "no_scores",
    "span",
)
CLOSE = {"advantage_T": 2e-3} | dict.fromkeys(
    ("score_T", "weight_T", "old_log_prob_T", "entropy_T", "received_T"), 5e-3
)


@pytest.mark.parametrize("name", OPTIONS)
def test_two_ranks_train_like_one(folder, name):
    """Parameters, figures, the dump with every advantage, and a receipt without a finding."""
    alone, first, second = (
        torch.load(folder / f"result{rank}of{size}.pt")[name]
        for rank, size in ((0, 1), (0, 2), (1, 2))
    )
    assert first["distributed"] == second["distributed"] == "DistributedDataParallel"
    # Both ranks hold the same parameters, to the bit.
    assert torch.equal(first["parameters"], second["parameters"])
    torch.testing.assert_close(
        first["parameters"], alone["parameters"], rtol=1e-3, atol=1e-4
    )
    # The main process logs.
    figures = first["figures"]
    # One of the eight responses is cut off.
    assert figures[f"{name}/truncated_rate"] == (0 if name == "turn_rloo" else 1 / 8)
    for rate in ("answer_found_rate", "selected_rate", "weight_one_rate"):
        figure = f"{name}/{rate}"
        assert figures[figure] == pytest.approx(alone["figures"][figure]), rate
    # Three steps of eight responses.
    for size in (2, 1):
        assert world.mismatches(folder / f"{name} of {size}") == [[]] * 3
    dump, expected_dump = (list(read_dump(folder / f"{name} of {size}")) for size in (2, 1))
    assert len(expected_dump) == 24
    for row, expected in zip(dump, expected_dump, strict=True):
        for column in EQUAL:
            assert getattr(row, column) == getattr(expected, column), column
        for column, tolerance in CLOSE.items():
            np.testing.assert_allclose(
                getattr(row, column),
                getattr(expected, column),
                atol=tolerance,
                rtol=tolerance,
                err_msg=column,
            )


def differences_on_card(folder: Path) -> dict[str, float]:
    """The largest difference of token advantages from the CPU's, by method."""
    # This process has the device for good, from before its first backward
    from tests.core import card

    batches = {}
    for name in ("grail", "uniform", "surprisal", "steer", "oar_p", "oar_g"):
        trainer = world.build(folder / name, token_weights=name)
        rows = [row for row in trainer.train_dataset for _ in range(world.GENERATIONS)]
        output = GRPOTrainer._generate_and_score_completions(trainer, rows)
        batches[name] = trainer, rows, output, trainer._weighted_advantages(rows, output)
    differences = {}
    with card.card():
        for name, (trainer, rows, output, expected) in batches.items():
            moved = send_to_device(output, card.DEVICE)
            card.moved(trainer.model)
            trainer.accelerator.state.device = card.DEVICE
            advantages = trainer._weighted_advantages(rows, moved)
            assert advantages.device == card.DEVICE
            difference = (advantages.cpu() - expected).abs().max() / expected.abs().max()
            differences[name] = float(difference)
    return differences


def test_weights_on_another_device_are_those_of_the_cpu(tmp_path):
    """One that mixes with no tensor of the CPU and has no float64, as Apple's MPS."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        differences = process.submit(differences_on_card, tmp_path).result()
    assert len(differences) == 6
    for name, value in differences.items():
        assert value < (1e-2 if "oar" in name else 1e-5), name
