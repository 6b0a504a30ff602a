"""One history of a run that was started several times: verl's file and tensorboard loggers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from verl.utils.tracking import Tracking

from recipe.run_life.loggers import keep_steps, one_history

BACKENDS = ["file", "tensorboard"]


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tensorboard"))


def _life(resumed_at: int, steps: range, value: float) -> None:
    """A run that is killed: nothing is closed."""
    trainer = {"logger": BACKENDS, "project_name": "project", "experiment_name": "experiment"}
    with one_history(OmegaConf.create({"trainer": trainer}), resumed_at, None):
        logs = Tracking("project", "experiment", BACKENDS)
    for step in steps:
        logs.log({"value": value}, step)
    logs.logger["tensorboard"].writer.flush()  # as the trainer does after each step
    logs._finished = True  # its __del__ is not what ends a killed run


def _file(tmp_path: Path) -> list[tuple[int, float]]:
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["data"]["value"]) for line in map(json.loads, lines)]


def _tensorboard(tmp_path: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars("value")]


def test_no_step_twice_and_none_lost(tmp_path: Path) -> None:
    """Killed after step 7 with a checkpoint of step 5, then after step 8 with that of step 7."""
    _life(0, range(0, 8), 1.0)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 8, "data": {"va')
    _life(5, range(6, 9), 2.0)
    _life(7, range(8, 11), 3.0)
    expected = [*((step, 1.0) for step in range(6)), (6, 2.0), (7, 2.0), (8, 3.0), (9, 3.0), (10, 3.0)]
    assert _file(tmp_path) == expected
    assert _tensorboard(tmp_path) == expected


def test_keep_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    keep_steps(path, 2)
    assert not path.exists()
    for content, kept in (
        (b"", b""),
        (b'{"step": 1}\n{"step": 2}\n{"step": 3}\n', b'{"step": 1}\n{"step": 2}\n'),
        (b'{"step": 1}\n{"step": 2}', b'{"step": 1}\n'),
        (b'{"step": 1}\nnot json\n[1]\n{"a": 1}\n{"step": 2}\n', b'{"step": 1}\n{"step": 2}\n'),
    ):
        path.write_bytes(content)
        keep_steps(path, 2)
        assert [file.read_bytes() for file in tmp_path.iterdir()] == [kept]
