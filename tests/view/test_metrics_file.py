"""A run's figures beside the training: which lines stay at a start, and what becomes of one that cannot be written."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grail_advantage.dump.metrics_file import MetricsFile
from grail_advantage.view.page.data import read_metrics

ONE, TWO, THREE = (json.dumps({"step": step, "data": {"a": step / 2}}).encode() for step in (1, 2, 3))
NEXT = {"step": 3, "data": {"a": 0.25}}


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        (None, b""),
        (b"", b""),
        (b"\n\n", b""),
        (ONE + b"\n" + TWO + b"\n", ONE + b"\n" + TWO + b"\n"),
        (ONE + b"\n" + TWO, ONE + b"\n" + TWO + b"\n"),  # whole, by an editor
        *((ONE + b"\n" + TWO[:end], ONE + b"\n") for end in range(1, len(TWO))),  # half, anywhere
        (ONE + b"\n" + TWO + b"\n" + THREE + b"\n", ONE + b"\n" + TWO + b"\n"),
        (ONE + b"\n" + THREE + b"\n" + TWO + b"\n", ONE + b"\n" + TWO + b"\n"),
        (ONE[:9] + b"\n" + TWO + b"\n", TWO + b"\n"),
        (ONE[:9] + TWO + b"\n" + ONE + b"\n", ONE + b"\n"),
        (ONE + b"\r\n" + TWO + b"\r\n", ONE + b"\n" + TWO + b"\n"),
        (b"\xff\xfe\x00\n" + ONE + b"\n", ONE + b"\n"),
        (b"\x00" * 4096 + b"\n" + ONE + b"\n", ONE + b"\n"),  # a machine that went down
        (b'[1]\n"step"\n1\nnull\n{"data": {}}\n{"step": null}\n{"step": "x"}\n{"step": [1]}\n', b""),
        (b'{"step": NaN, "data": {}}\n{"step": Infinity}\n' + b"[" * 100_000 + b"\n" + ONE + b"\n", ONE + b"\n"),
    ],
)
def test_lines_up_to_the_step_stay(tmp_path: Path, before: bytes | None, kept: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    if before is not None:
        path.write_bytes(before)
    file = MetricsFile(path, 2)
    file.add(3, NEXT["data"])
    assert path.read_bytes() == kept + json.dumps(NEXT).encode() + b"\n" and file.failed == 0
    MetricsFile(path, -1)
    assert path.read_bytes() == b"", "a run that begins anew"


def _removed(folder: Path) -> None:
    shutil.rmtree(folder)


def _moved(folder: Path) -> None:
    folder.rename(f"{folder}.away")


def _other_folder(folder: Path) -> None:
    os.chdir(folder.parent.parent)


@pytest.mark.parametrize("happens", [_removed, _moved, _other_folder])
def test_later_lines_are_where_the_run_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = MetricsFile("run/metrics.jsonl", -1)
    file.add(1, {"a": 0.5})
    happens(tmp_path / "run")
    file.add(2, {"a": 1.0})
    assert TWO in (tmp_path / "run/metrics.jsonl").read_bytes() and file.failed == 0


def _full_disk(path: Path) -> None:
    path.symlink_to("/dev/full")


def _a_file_above(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("")


@pytest.mark.parametrize("happens", [_full_disk, Path.mkdir, _a_file_above])
def test_a_line_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, happens: Callable[[Path], None]
) -> None:
    path = tmp_path / "run/metrics.jsonl"
    path.parent.mkdir()
    happens(path)
    file = MetricsFile(path, 2)
    for step in (3, 4, 5):
        file.add(step, {"a": 1.0})
        file.write(ONE + b"\n")
    file.close()
    assert file.failed == 6
    assert [str(path) in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("room", range(1, 2 * len(ONE) + 3, 5))
def test_a_disk_that_is_full_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Bytes of a line that had room stay nowhere, also where they cannot be taken back."""
    path = tmp_path / "metrics.jsonl"
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    file = MetricsFile(path, -1)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        for line in (ONE, TWO, THREE):
            file.write(line + b"\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    whole = [ONE, TWO, THREE][: room // (len(ONE) + 1)]
    assert path.read_bytes() == b"".join(line + b"\n" for line in whole) and file.failed == 3 - len(whole)
    file.write(THREE + b"\n")
    path.write_bytes(path.read_bytes() + ONE[:9])
    file._half = True  # as after an error while they were taken back
    file.write(TWO + b"\n")
    assert set(read_metrics(tmp_path)[0]) == {*range(1, len(whole) + 1), 2, 3}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (1, 1),
        (0.5, 0.5),
        (True, 1),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (Fraction(1, 2), 0.5),
        *((value, None) for value in ("text", [1.0], {"a": 1}, None, Decimal(1), 1j, object(), threading.Lock())),
        *((value, None) for value in (torch.ones(3), np.ones(3), {1}, b"1")),
    ],
)
def test_a_figure_that_is_no_number_is_left_out(tmp_path: Path, given: Any, expected: float | None) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", -1)
    file.add(1, {"a": given, "b": 2.0, ("c", 1): 3.0, "\udc80": float("nan")})
    values = read_metrics(tmp_path)[0][1]
    assert values["b"] == 2.0 and values.get("a") == expected and file.failed == 0
