"""The raw files, the plan's order, and the study in miniature: sittings, carrying on, repeating to the last bit."""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from study import __main__ as command
from study import rollouts, work
from study import screen as screening
from study.arms import ARMS
from study.plan import NO_ARM, Job, RegimePlan, StudyPlan
from study.raw import RawFile
from study.trainer import RunSettings
from study.work import Files, Sitting, finished, settings_digest

TINY = StudyPlan(
    regimes=(
        RegimePlan("misconceptions", main_seeds=(1,), tuning_seeds=(9,), measured_seeds=(1,), side_seeds=(1,)),
        RegimePlan("distractors", main_seeds=(1,), tuning_seeds=(9,), measured_seeds=()),
    ),
    rates=(1e-4, 1e-3),
    main_arms=(ARMS["uniform"], ARMS["surprisal"]),
    side_arms=(ARMS["regression"],),
    run=RunSettings(steps=2, prompts=2, rollouts=4, epochs=1, evaluate_at=(1, 2), samples=2, samples_hot=1),
    warm_up_steps=3,
    warm_up_batch=4,
    train_size=16,
    held_out_size=4,
    batches=2,
    yardstick_problems=4,
    judged=2,
)


def test_rows_come_back_as_they_were_and_a_crash_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RawFile(tmp_path / "data" / "runs.csv", ("arm", "value"))
    assert file.read() == []
    file.append([{"arm": "a", "value": 0.1 + 0.2}])
    file.append([{"arm": "b, c", "value": 1e-7}, {"value": 3, "arm": "d"}])
    assert [row["arm"] for row in file.read()] == ["a", "b, c", "d"] and float(file.read()[0]["value"]) == 0.1 + 0.2
    before = file.path.read_bytes()

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "replace", crash)
        file.append([{"arm": "b", "value": 2}])
    assert file.path.read_bytes() == before and os.listdir(file.path.parent) == ["runs.csv"]
    for text, message in (
        ("arm,other\n", "has the columns arm, other"),
        ("arm,value\na,1\nb\n", "line 3 has not 2 fields"),
    ):
        file.path.write_text(text)
        with pytest.raises(ValueError, match=message):
            file.read()
    with pytest.raises(ValueError, match="a row has the fields"):
        file.append([{"arm": "a"}])


def a_start(plan: StudyPlan, seed: int = 1) -> dict[str, Any]:
    job = Job("start", "misconceptions", NO_ARM, seed)
    values = dict.fromkeys(work.START_COLUMNS, 0.25) | dict(zip(work.JOB_COLUMNS, job.key, strict=True))
    return values | {"job_seconds": 1.0, "settings": settings_digest(plan, "start"), "versions": "torch 1"}


def test_rows_of_other_settings_and_models_made_otherwise_are_refused(tmp_path: Path) -> None:
    sitting = Sitting(TINY, Files(tmp_path), tmp_path, regimes=["misconceptions"], kinds=["tune"])
    job = Job("start", "misconceptions", NO_ARM, 1)
    for _ in range(2):
        sitting.keep(job, [a_start(TINY)])
    assert len(finished(sitting.files, TINY)) == len(sitting.files.start.read()) == 1
    with pytest.raises(ValueError, match=r"differs from the recorded one \(exact\): another machine"):
        sitting.keep(job, [a_start(TINY) | {"exact": 0.2500000001}])
    with pytest.raises(ValueError, match="of other settings than these"):
        finished(sitting.files, replace(TINY, warm_up_steps=4))
    # What only a measurement depends on leaves the runs alone.
    assert settings_digest(TINY, "main") == settings_digest(replace(TINY, batches=3), "main")
    assert settings_digest(TINY, "alignment") != settings_digest(replace(TINY, batches=3), "alignment")


class InThisProcess:
    """A pool of one, at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, function: Any, *arguments: Any) -> Future:
        future: Future = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self, **_: Any) -> None:
        pass


def rows(folder: Path, name: str) -> pd.DataFrame:
    """A raw file without its times."""
    frame = pd.read_csv(folder / "data" / f"{name}.csv", dtype=str)
    return frame.drop(columns=[column for column in frame if column.endswith("seconds")])


@pytest.mark.slow
def test_the_study_in_miniature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, with answers that are right at random: an untrained model has none."""
    monkeypatch.setattr(work, "ProcessPoolExecutor", InThisProcess)
    for module in (rollouts, work):
        monkeypatch.setattr(module, "MAX_RESPONSE_TOKENS", 8)
    monkeypatch.setattr(rollouts, "is_right", lambda tokenizer, problem, response: sum(response) % 2 == 0)
    data, models = tmp_path / "data", tmp_path / "models"

    def run(*arguments: str) -> None:
        shared = ["--data-dir", str(data), "--models", str(models), "--regimes", "misconceptions"]
        command.main(["run", *shared, *arguments], TINY)

    run("--hours", "0")
    assert not (data / "start.csv").exists(), "a sitting without time begins nothing"
    run("--kinds", "tune", "--processes", "1")
    tuned, starts = rows(tmp_path, "runs"), rows(tmp_path, "start")
    assert tuned.kind.tolist() == ["tune"] * 4 and "core-hours left" in capsys.readouterr().out
    # The models are gone; the next sitting makes those again that it needs, and carries on.
    for path in models.iterdir():
        path.rename(tmp_path / f"gone {path.name}")
    run()
    whole = rows(tmp_path, "runs")
    assert whole[:4].equals(tuned) and whole.kind.value_counts().to_dict() == {"tune": 4, "main": 2, "side": 1}
    assert rows(tmp_path, "start")[: len(starts)].equals(starts)
    assert set(rows(tmp_path, "alignment").measured) == {"uniform", "surprisal", "regression"}
    before = {path: path.read_bytes() for path in data.iterdir()}
    run()
    assert {path: path.read_bytes() for path in data.iterdir()} == before, "nothing is left to do"
    report = (data / "REPORT.md").read_text()
    assert "## Regime misconceptions" in report and "distractors: 2 of 2 runs `main`" in report
    capsys.readouterr()
    monkeypatch.setattr(screening, "YARDSTICK_PROBLEMS", 4)
    command.main(["screen", "--seed", "1", "--models", str(models)], TINY)
    screened = capsys.readouterr().out.splitlines()
    assert "warm-up of seed 1" in screened[0] and len(screened) == 4 + len(TINY.main_arms)
    labels = sorted(line.split(" | ")[0] for line in screened[4:])
    assert labels == [f"| {label}" for label in sorted(arm.label for arm in TINY.main_arms)]
    # Another job's rows would not fit into the plan's hours any more.
    Files(tmp_path / "full").start.append([a_start(TINY) | {"job_seconds": 3600 * TINY.hours - 239}])
    data, models = tmp_path / "full", tmp_path / "none"
    run()
    assert "No further job fits into the plan's 12 core-hours" in capsys.readouterr().out
    assert not (data / "runs.csv").exists()
