"""Which responses the ground truth is measured on, and the study's command from the first run to the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.tiny.task import Problem
from recipe.tiny.warm_up import WarmUpSettings
from study import __main__ as command
from study import ground_truth
from study.arms import ARMS, Arm
from study.runs import StudySettings
from study.task import study_tokenizer
from study.trainer import RunSettings

TOKENIZER = study_tokenizer()


def test_only_responses_with_one_wrong_step_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    written = [
        "7+5=12;12-3=9;\\boxed{9}",  # right
        "ok 7+5=11;(1+1=3)11-3=8;\\boxed{8}",  # one wrong step, and an aside that is no step
        "7+5=11;11-3=9;\\boxed{9}",  # two
        "7+5=12;12-3=9;\\boxed{8}",  # none, but a wrong answer
    ]
    monkeypatch.setattr(ground_truth, "SAMPLES", len(written))
    monkeypatch.setattr(ground_truth, "sample", lambda *_, **__: [TOKENIZER.encode(text) for text in written])
    (example,) = ground_truth.wrong_responses(None, TOKENIZER, [Problem.parse("7+5-3")])
    assert TOKENIZER.decode(example.response_ids) == written[1]
    assert [TOKENIZER.decode([example.response_ids[i]]) for i in sorted(example.error_tokens)] == ["1", "1"]
    assert [TOKENIZER.decode(example.response_ids[a:b]) for a, b in example.steps] == ["7+5=11", "11-3=8"]


@pytest.mark.slow
def test_the_command_runs_from_warm_up_to_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = StudySettings(
        run=RunSettings(steps=1, prompts=2, rollouts=2, epochs=1, evaluate_every=1),
        warm_up=WarmUpSettings(error_rate=0.2, steps=2, batch_size=4, evaluate_every=2),
        train_size=64,
        held_out_size=8,
    )
    monkeypatch.setattr(command, "StudySettings", lambda: settings)
    arguments = ["--output-dir", str(tmp_path), "--arms", "grpo", "oar_g", "--seeds", "0", "--processes", "1"]
    command.main([*arguments, "--command", "the command"])
    report = (tmp_path / "report" / "REPORT.md").read_text()
    assert "the command" in report
    assert "OAR-G" in report
    assert (tmp_path / "report" / "runs.csv").read_text().count("\n") == 3
    assert json.loads((tmp_path / "raw" / "oar_g-seed0.json").read_text())["steps"][0]["selected_rate"] >= 0
    capsys.readouterr()
    command.main([*arguments, "--report-only"])
    assert "REPORT.md" in capsys.readouterr().out


def test_arms_differ_and_start_from_the_same_base() -> None:
    names = [arm.name for arm in ARMS]
    assert len(set(names)) == len(names)

    def key(arm: Arm) -> tuple:
        return arm.weights, arm.control, arm.advantage, arm.loss_agg_mode

    assert len({key(arm) for arm in ARMS}) == len(ARMS)
