"""The raw files, the plan's order, and the study in miniature: sittings, carrying on, repeating to the last bit."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from study import __main__ as command
from study import work
from study.arms import ADDED, ARMS
from study.plan import COMPARED, CONTRASTS, MEASUREMENTS, NO_ARM, RUNS, Job, RegimePlan, StudyPlan
from study.raw import RawFile
from study.trainer import RunSettings
from study.work import Files, Sitting, finished, settings_digest
from tests.study import made_up_answers

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
REPEATED = ("job_seconds", "processor_seconds", "weight_seconds")
"""Columns of measured time."""


# Raw files


def a_file(path: Path) -> RawFile:
    return RawFile(path / "data" / "runs.csv", ("arm", "value"))


def test_rows_come_back_as_they_were_and_are_appended(tmp_path: Path) -> None:
    file = a_file(tmp_path)
    assert file.read() == []
    file.append([{"arm": "a", "value": 0.1 + 0.2}])
    file.append([{"arm": "b, c", "value": 1e-7}, {"value": 3, "arm": "d"}])
    assert [row["arm"] for row in file.read()] == ["a", "b, c", "d"]
    assert float(file.read()[0]["value"]) == 0.1 + 0.2
    assert file.path.read_text().startswith("arm,value\na,0.30000000000000004\n")
    assert os.listdir(file.path.parent) == ["runs.csv"], "nothing is left beside it"


def test_a_crash_while_writing_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = a_file(tmp_path)
    file.append([{"arm": "a", "value": 1}])
    before = file.path.read_bytes()

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        file.append([{"arm": "b", "value": 2}])
    assert file.path.read_bytes() == before
    assert os.listdir(file.path.parent) == ["runs.csv"]


@pytest.mark.parametrize(
    ("text", "message"), [("arm,other\n", "has the columns arm, other"), ("arm,value\na,1\nb\n", "line 3 has 1 fields")]
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = a_file(tmp_path)
    file.path.parent.mkdir()
    file.path.write_text(text)
    with pytest.raises(ValueError, match=message):
        file.read()
    with pytest.raises(ValueError, match="a row has the fields"):
        file.append([{"arm": "a"}])


# The plan


def test_the_plan_holds_what_was_promised() -> None:
    plan = StudyPlan()
    by_name = {regime.name: regime for regime in plan.regimes}
    assert [*by_name] == ["misconceptions", "slips", "distractors"], "the primary regime comes first"
    assert [len(regime.main_seeds) for regime in plan.regimes] == [14, 10, 6]
    for regime in plan.regimes:
        assert not set(regime.main_seeds) & {*regime.tuning_seeds, *regime.pilot_seeds}
        assert set(regime.measured_seeds) | set(regime.side_seeds) <= set(regime.main_seeds)
        assert 0 not in regime.main_seeds, "seed 0 under slips is the first study's model"
    assert {arm for pair in CONTRASTS for arm in pair} <= {arm.name for arm in plan.main_arms}
    assert plan.run.temperature == 0.6 and plan.run.evaluate_at == (8, 12) and plan.run.samples == 8
    assert plan.held_out_size == 256


def test_the_written_plan_is_the_one_that_is_run() -> None:
    text = (Path(__file__).parents[2] / "docs" / "study2" / "PLAN.md").read_text(encoding="utf-8")
    plan = StudyPlan()

    def said(seeds: tuple[int, ...]) -> str:
        if len(seeds) < 3:
            return ", ".join(map(str, seeds))
        return f"{seeds[0]} to {seeds[-1]}"

    for regime in plan.regimes:
        cells = [regime.name, said(regime.main_seeds), said(regime.tuning_seeds), said(regime.pilot_seeds)]
        assert f"| {' | '.join(cells)} |".replace("|  |", "| |") in text
    costs = re.findall(r"\| (\w+) \| (\d+) \| (\d+) \| (\d+) \| [\d.]+ \|", text)
    assert [regime for regime, *_ in costs] == [regime.name for regime in plan.regimes]
    for regime, starts, runs, measurements in costs:
        kinds = [job.kind for job in plan.jobs({}) if job.regime == regime]
        counts = (
            kinds.count("start"),
            sum(kind in RUNS for kind in kinds),
            sum(kind in MEASUREMENTS for kind in kinds),
        )
        assert counts == (int(starts), int(runs), int(measurements)), regime
    for rate in ("5e-5", "1e-4", "2e-4"):
        assert rate in text and float(rate) in plan.rates
    assert "12 core-hours" in text and plan.hours == 12


def test_jobs_of_a_seed_follow_its_start_and_seeds_come_whole() -> None:
    jobs = list(StudyPlan().jobs({}))
    assert len(set(jobs)) == len(jobs)
    started: set[tuple[str, int]] = set()
    for job in jobs:
        if job.kind == "start":
            started.add((job.regime, job.seed))
        else:
            assert (job.regime, job.seed) in started
    compared = {arm for pair in CONTRASTS for arm in pair}
    assert {*COMPARED} == compared
    for regime in StudyPlan().regimes:
        seeds = list(regime.main_seeds)
        own = [job for job in jobs if job.regime == regime.name and job.kind in (*MEASUREMENTS, "tune", "main")]
        main = [job for job in own if job.kind == "main"]
        count = len(regime.together)
        first, others = main[: count * len(seeds)], main[count * len(seeds) :]
        assert [job.seed for job in first] == [seed for seed in seeds for _ in range(count)], (
            "all arms of a seed, then the next"
        )
        assert {job.arm for job in first} == {*regime.together} and not {job.arm for job in others} & {*regime.together}
        assert {*regime.together} <= compared
        assert [job.seed for job in others] == seeds * (len(others) // len(seeds)), "one arm after the other"
        alone = list(dict.fromkeys(job.arm for job in others))
        assert len(alone) == 11 - count + len(regime.added) and alone[: len(regime.added)] == [
            arm.name for arm in regime.added
        ]
        begin, end = own.index(first[-1]) + 1, own.index(next(job for job in own if job.arm == alone[0]))
        assert [(job.seed, job.kind) for job in own[begin:end]] == [
            (seed, kind) for seed in regime.measured_seeds for kind in MEASUREMENTS
        ], "behind the first arms"
    assert ADDED and not any(job.arm in {arm.name for arm in ADDED} for job in jobs if job.regime != "misconceptions")


def test_compared_arms_are_tuned_on_all_seeds_and_the_pilots_runs_count() -> None:
    plan = StudyPlan()
    regime = plan.regimes[0]
    runs = [job for job in plan.jobs({}) if job.kind in ("pilot", "tune") and job.regime == regime.name]
    for arm in plan.arms(regime):
        seeds = (2001, 2002) if arm.name in plan.pilot_arms else (2001,)
        own = [(job.seed, job.rate) for job in runs if job.arm == arm.name and job.seed != 2003]
        assert sorted(own) == sorted((seed, rate) for seed in seeds for rate in plan.rates), "each once"
    rows = [
        dict(zip(work.JOB_COLUMNS, job.key, strict=True)) | {"accuracy": str(0.5 + (job.rate == plan.pilot_rate))}
        for job in runs
    ]
    assert plan.tuned_rates(rows) == {(regime.name, arm.name): plan.pilot_rate for arm in plan.arms(regime)}
    assert len(plan.tuned_rates([row for row in rows if row["kind"] == "tune"])) == 8


def a_tuning(accuracy: Mapping[tuple[str, int, float], float]) -> list[dict[str, str]]:
    return [
        {
            "kind": "tune",
            "regime": "misconceptions",
            "arm": arm,
            "seed": str(seed),
            "rate": repr(rate),
            "accuracy": str(value),
        }
        for (arm, seed, rate), value in accuracy.items()
    ]


def test_the_rate_of_the_highest_mean_is_taken_once_all_are_there() -> None:
    plan = replace(TINY, regimes=(replace(TINY.regimes[0], tuning_seeds=(8, 9)),))
    found = {("uniform", 8, 1e-4): 0.5, ("uniform", 9, 1e-4): 0.5, ("uniform", 8, 1e-3): 0.9, ("uniform", 9, 1e-3): 0.2}
    assert plan.tuned_rates(a_tuning(found)) == {("misconceptions", "uniform"): 1e-3}
    assert plan.tuned_rates(a_tuning(found | {("uniform", 9, 1e-3): 0.1}))["misconceptions", "uniform"] == 1e-4, (
        "ties low"
    )
    del found["uniform", 9, 1e-3]
    assert plan.tuned_rates(a_tuning(found)) == {}


def test_jobs_wait_for_their_model_and_their_rate(tmp_path: Path) -> None:
    sitting = Sitting(TINY, Files(tmp_path), tmp_path, regimes=["misconceptions"], kinds=["tune", "main"])
    first = sitting.next_jobs([], 9)
    assert len(sitting.missing()) == 2 + 4 + 2
    assert first == [Job("start", "misconceptions", NO_ARM, 9), Job("start", "misconceptions", NO_ARM, 1)]
    for job in first:
        sitting.folder(job).mkdir()
    # Main runs are not ready while their learning rate is open.
    assert {job.kind for job in sitting.next_jobs([], 9)} == {"tune"}
    assert len(sitting.next_jobs([], 9)) == 4
    assert sitting.next_jobs(sitting.next_jobs([], 9)[:1], 1)[0] == Job("tune", "misconceptions", "uniform", 9, 1e-3)


def a_start(plan: StudyPlan, seed: int = 1) -> dict[str, Any]:
    job = Job("start", "misconceptions", NO_ARM, seed)
    values = dict.fromkeys(work.START_COLUMNS, 0.25)
    return dict(zip(work.JOB_COLUMNS, job.key, strict=True)) | values | {
        "job_seconds": 1.0, "settings": settings_digest(plan, "start"), "versions": "torch 1"
    }  # fmt: skip


def test_rows_of_other_settings_are_refused(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.start.append([a_start(TINY)])
    assert len(finished(files, TINY)) == 1
    with pytest.raises(ValueError, match="of other settings than these"):
        finished(files, replace(TINY, warm_up_steps=4))
    # What only a measurement depends on leaves the runs alone.
    assert settings_digest(TINY, "main") == settings_digest(replace(TINY, batches=3), "main")
    assert settings_digest(TINY, "alignment") != settings_digest(replace(TINY, batches=3), "alignment")


def test_a_model_made_again_must_be_the_one_of_then(tmp_path: Path) -> None:
    sitting = Sitting(TINY, Files(tmp_path), tmp_path, regimes=["misconceptions"], kinds=["tune"])
    job = Job("start", "misconceptions", NO_ARM, 1)
    sitting.keep(job, [a_start(TINY)])
    sitting.keep(job, [a_start(TINY)])
    assert len(sitting.files.start.read()) == 1
    with pytest.raises(ValueError, match=r"differs from the recorded one \(exact\): another machine"):
        sitting.keep(job, [a_start(TINY) | {"exact": 0.2500000001}])


# The study in miniature


def run(folder: Path, *arguments: str) -> None:
    command.main(["run", "--data-dir", str(folder / "data"), "--models", str(folder / "models"), *arguments], TINY)


def rows(folder: Path) -> dict[tuple[str, ...], dict[str, str]]:
    """All rows without their times."""
    found = {}
    for path in sorted((folder / "data").glob("*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                key = (
                    path.name,
                    *(row.get(name, "") for name in (*work.JOB_COLUMNS, "measured", "method", "figure", "split")),
                )
                assert key not in found
                found[key] = {name: value for name, value in row.items() if name not in REPEATED}
    return found


def test_the_study_in_miniature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, with answers that are right at random: an untrained model has none."""
    monkeypatch.setattr(work, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr("study.trainer.MAX_RESPONSE_TOKENS", 8)
    monkeypatch.setattr("study.work.MAX_RESPONSE_TOKENS", 8)
    monkeypatch.setattr("study.trainer.is_right", lambda tokenizer, problem, response: sum(response) % 2 == 0)
    run(tmp_path / "a", "--regimes", "misconceptions", "--hours", "0")
    assert rows(tmp_path / "a") == {}, "a sitting without time begins nothing"
    run(tmp_path / "a", "--regimes", "misconceptions", "--kinds", "tune", "--processes", "1")
    tuned = rows(tmp_path / "a")
    assert sum(key[1] == "tune" for key in tuned) == 4 and not any(key[1] == "main" for key in tuned)
    said = capsys.readouterr().out
    assert "core-hours left" in said and "rate 0.001" in said
    # The models are gone; the next sitting makes those again that it needs, and carries on.
    for path in (tmp_path / "a" / "models").iterdir():
        path.rename(tmp_path / f"gone {path.name}")
    run(tmp_path / "a", "--regimes", "misconceptions")
    whole = rows(tmp_path / "a")
    assert tuned.items() <= whole.items()
    kinds = [key[1] for key in whole]
    assert (kinds.count("main"), kinds.count("side"), kinds.count("start")) == (2, 1, 2)
    assert {key[6] for key in whole if key[1] == "alignment"} == {"uniform", "surprisal", "regression"}
    before = {path: path.read_bytes() for path in (tmp_path / "a" / "data").iterdir()}
    run(tmp_path / "a", "--regimes", "misconceptions")
    assert {path: path.read_bytes() for path in (tmp_path / "a" / "data").iterdir()} == before, "nothing is left to do"
    report = (tmp_path / "a" / "data" / "REPORT.md").read_text()
    assert "## Regime misconceptions" in report and "distractors: 2 of 2 runs `main`" in report


def test_the_plans_hours_end_a_sitting_and_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(work, "ProcessPoolExecutor", InThisProcess)
    files = Files(tmp_path / "data")
    files.start.append([a_start(TINY) | {"job_seconds": 3600 * TINY.hours - 239}])
    before = files.start.path.read_bytes()
    run(tmp_path, "--regimes", "misconceptions")
    assert files.start.path.read_bytes() == before and not files.runs.read(), "nothing began"
    said = capsys.readouterr().out
    assert (
        "No further job fits into the plan's 12 core-hours, though work is left: to continue, raise hours in study"
        in said
    )


def test_a_job_is_expected_to_take_what_those_took_that_are_most_like_it(tmp_path: Path) -> None:
    files = Files(tmp_path)
    expected = Sitting(TINY, files, tmp_path, regimes=[], kinds=[]).expected_seconds
    start, main = Job("start", "distractors", NO_ARM, 2), Job("main", "distractors", "uniform", 2)
    assert (expected()(start), expected()(main)) == (240, 150), "guesses"
    for seed, (regime, seconds) in enumerate([("misconceptions", 100), ("distractors", 200), ("distractors", 220)]):
        files.start.append([a_start(TINY) | {"regime": regime, "seed": seed, "job_seconds": seconds}])
    assert expected()(start) == 210 and expected()(replace(start, regime="slips")) == pytest.approx(520 / 3)
    assert expected()(main) == 150, "a warm-up says nothing of a run"
    for kind, regime, seconds in [("tune", "misconceptions", 10), ("tune", "distractors", 20), ("main", "slips", 30)]:
        row = dict.fromkeys(work.RUN_COLUMNS, 0) | {
            "kind": kind, "regime": regime, "arm": "uniform", "seed": 1, "rate": 1e-4, "job_seconds": seconds,
            "settings": settings_digest(TINY, kind), "versions": "torch 1",
        }  # fmt: skip
        files.runs.append([row])
    assert expected()(main) == 30, "the kind before the regime"
    assert expected()(replace(main, kind="side")) == 20, "then the regime"


class InThisProcess:
    """A pool of one, at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, function: Any, *arguments: Any) -> Any:
        from concurrent.futures import Future

        future: Future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_: Any) -> None:
        pass


@pytest.mark.slow
def test_two_processes_give_what_one_gives_to_the_last_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "do", made_up_answers.do)
    run(tmp_path / "one", "--processes", "1", "--kinds", "tune", "--regimes", "distractors")
    run(tmp_path / "two", "--processes", "2", "--kinds", "tune", "--regimes", "distractors")
    assert rows(tmp_path / "one") == rows(tmp_path / "two") != {}
    assert all(float(row["gradient_norm"]) > 0 for key, row in rows(tmp_path / "one").items() if key[1] == "tune")
