"""Token weights in TRL's trainer.

verl 0.9.1 does not start where it can import TRL, so everything with TRL runs in processes that have it on their path:
the checks of this folder with the newest TRL and the newest transformers, with the oldest TRL, and two ranks.
By hand: ``PYTHONPATH=.venv/trl .venv/bin/python -m pytest tests/trl_ext/core_checks.py``.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grail_advantage.dump import read_dump

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NEWEST = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["trl"]
"""The newest TRL, the newest transformers, and what this one needs newer than verl's."""
OLDEST = ["trl==1.15.0"]
"""The oldest TRL, with verl's transformers."""
CHECKS = [f"tests/trl_ext/{name}_checks.py" for name in ("core", "dump", "turns")]
EXAMPLE_CHECKS = "tests/trl_ext/example_checks.py"
"""Not with TRL 1.15, which computes log-probabilities on a GPU alone."""
TIMEOUT = 1800


def trl_folder(packages: list[str]) -> Path:
    """A folder with these packages alone, kept beside the environment's packages."""
    folder = Path(sys.prefix) / (
        "trl" if packages == NEWEST else f"trl-{packages[0].split('==')[1]}"
    )
    names = [f"{package.replace('-', '_').replace('==', '-')}.dist-info" for package in packages]
    if not all((folder / name).exists() for name in names):
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--upgrade",
            "--target",
            str(folder),
        ]
        done = subprocess.run([*pip, *packages], capture_output=True, text=True, timeout=TIMEOUT)
        assert not done.returncode, done.stderr
    return folder


def run(command: list[str], packages: list[str]) -> str:
    """Its output, with these packages on the path, nothing sent anywhere, nothing fetched; fails with it."""
    quiet = {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "GLOO_SOCKET_IFNAME": "lo",
        "DO_NOT_TRACK": "1",
    }
    quiet |= dict.fromkeys(("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"), "1") | {
        "WANDB_MODE": "disabled"
    }
    options: dict[str, Any] = {
        "env": {**os.environ, **quiet, "PYTHONPATH": str(trl_folder(packages))},
        "cwd": ROOT,
    }
    done = subprocess.run(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
        **options,
    )
    if done.returncode:
        pytest.fail(done.stdout[-20_000:])
    return done.stdout


@pytest.mark.parametrize(
    ("packages", "files"),
    [
        pytest.param(NEWEST, [*CHECKS, EXAMPLE_CHECKS], id="newest"),
        pytest.param(OLDEST, CHECKS, id="oldest", marks=pytest.mark.nightly),
    ],
)
def test_checks(packages: list[str], files: list[str]) -> None:
    output = run(["-m", "pytest", "-p", "no:cacheprovider", *files], packages)
    assert "skipped" not in output
    assert all(re.search(rf"^{file} \.", output, re.MULTILINE) for file in files), output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results and dumps of the run with two ranks, and of the same run with one."""
    folder = tmp_path_factory.mktemp("trl_ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    run(["-m", "tests.trl_ext.programs", port, str(folder)], NEWEST)
    return folder


@pytest.mark.parametrize("name", ["grail", "stare", "shear", "turn_rloo"])
def test_two_ranks_train_like_one(folder: Path, name: str) -> None:
    """Parameters, figures, the dump with every advantage, and a receipt without a finding."""
    files = [folder / f"result{rank}of{size}.pt" for rank, size in ((0, 1), (0, 2), (1, 2))]
    assert all(file.exists() for file in files), [
        log.read_text()[-3000:] for log in folder.glob("log*.txt")
    ]
    alone, *together = (torch.load(file).get(name, "did not come this far") for file in files)
    assert all(isinstance(finding, dict) for finding in (alone, *together)), (alone, together)
    assert [result["distributed"] for result in together] == ["DistributedDataParallel"] * 2
    assert torch.equal(*(result["parameters"] for result in together))
    torch.testing.assert_close(together[0]["parameters"], alone["parameters"], rtol=1e-3, atol=1e-4)
    figures = together[0]["figures"]  # those that the main process logs
    assert (
        figures["truncated_rate"]
        == alone["figures"]["truncated_rate"]
        == (0 if name == "turn_rloo" else 1 / 8)
    )
    for figure in ("answer_found_rate", "selected_rate", "weight_one_rate"):
        assert figures[figure] == pytest.approx(alone["figures"][figure]), figure
    dumps = {size: read_dump(folder / f"{name} of {size}") for size in (1, 2)}
    for dump in dumps.values():
        receipts = dump.receipts()
        assert len(receipts) == 3
        assert not any(
            finding["mismatch"] for receipt in receipts for finding in receipt["findings"]
        )
    assert len(list(dumps[1])) == 24
    for row, expected in zip(dumps[2], dumps[1], strict=True):
        for column in (
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
        ):
            assert getattr(row, column) == getattr(expected, column), column
        for column in (
            "advantage_T",
            "score_T",
            "weight_T",
            "old_log_prob_T",
            "entropy_T",
            "received_T",
        ):
            close = (
                {"atol": 2e-3, "rtol": 2e-3}
                if column == "advantage_T"
                else {"atol": 5e-3, "rtol": 5e-3}
            )
            np.testing.assert_allclose(
                getattr(row, column), getattr(expected, column), **close, err_msg=column
            )


def test_weights_on_another_device_are_those_of_the_cpu(tmp_path: Path) -> None:
    """One that mixes with no tensor of the CPU and has no float64, as Apple's MPS."""
    output = run(["-m", "tests.trl_ext.programs", "card", str(tmp_path)], NEWEST)
    differences = dict(json.loads(line) for line in output.splitlines() if line.startswith('["'))
    assert len(differences) == 6 and all(
        value < (1e-2 if "oar" in name else 1e-5) for name, value in differences.items()
    ), output
