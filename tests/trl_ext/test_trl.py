"""Token weights in TRL's trainer: the checks of this folder with the newest TRL and the newest transformers, with the
oldest TRL, and two ranks. ``test_trl_runs.py`` has the rest of the newest."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from grail_advantage.dump import read_dump
from tests.trl_ext.environment import NEWEST, OLDEST, check, run

pytestmark = pytest.mark.slow


def test_checks() -> None:
    check(NEWEST, "core")


@pytest.mark.nightly
def test_checks_with_the_oldest() -> None:
    """But for the examples: TRL 1.15 computes log-probabilities on a GPU alone."""
    check(OLDEST, "core", "dump", "turns")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results and dumps of the run with two ranks, and of the same run with one."""
    folder = tmp_path_factory.mktemp("trl_ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    run(["-m", "tests.trl_ext.programs", port, str(folder)], NEWEST)
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


@pytest.mark.parametrize("name", ["grail", "stare", "shear", "turn_rloo"])
def test_two_ranks_train_like_one(folder: Path, name: str) -> None:
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
    assert figures["truncated_rate"] == (0 if name == "turn_rloo" else 1 / 8)
    for figure in (
        "truncated_rate",
        "answer_found_rate",
        "selected_rate",
        "weight_one_rate",
    ):
        assert figures[figure] == pytest.approx(alone["figures"][figure]), figure
    dump, expected_dump = (read_dump(folder / f"{name} of {size}") for size in (2, 1))
    for receipts in (dump.receipts(), expected_dump.receipts()):
        assert len(receipts) == 3
        for receipt in receipts:
            assert not any(finding["mismatch"] for finding in receipt["findings"])
    # Three steps of eight responses.
    assert len(list(expected_dump)) == 24
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


def test_weights_on_another_device_are_those_of_the_cpu(tmp_path: Path) -> None:
    """One that mixes with no tensor of the CPU and has no float64, as Apple's MPS."""
    output = run(["-m", "tests.trl_ext.programs", "card", str(tmp_path)], NEWEST)
    differences = dict(
        json.loads(line) for line in output.splitlines() if line.startswith('["')
    )
    assert len(differences) == 6
    for name, value in differences.items():
        assert value < (1e-2 if "oar" in name else 1e-5), name
