"""The smoke run, as far as that goes without a GPU: that each of its claims can fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipe.run_life.identity import RUN_DEFINITION
from recipe.smoke import SUMMARY, claims, report

TRAINED = {
    "actor/pg_loss": 0.01,
    "actor/grad_norm": 0.2,
    "critic/score/mean": 0.5,
    "training/rollout_actor_probs_pearson_corr": 0.999,
    "grail/selected_rate": 0.3,
    "grail/weight_deviation": 0.4,
    "grail/non_finite_rate": 0.0,
}


def finished_run(folder: Path, method: str = "grail") -> tuple[Path, Path]:
    """What training and evaluation leave of a run in which all went well."""
    checkpoints, evaluation = folder / "checkpoints", folder / "evaluation"
    (checkpoints / "global_step_2/actor").mkdir(parents=True)
    (checkpoints / RUN_DEFINITION).write_text(json.dumps({"definition": {"algorithm.adv_estimator": method}}))
    data = {name.replace("grail/", f"{method}/"): value for name, value in TRAINED.items()}
    write_metrics(folder, [{"step": 1, "data": data}, {"step": 2, "data": data}])
    evaluation.mkdir()
    results = {"benchmarks": {"aime24": {"problems": 16, "unanswered": {"value": 0.25}}}}
    (evaluation / "results.json").write_text(json.dumps(results))
    return folder, evaluation


def write_metrics(folder: Path, records: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def unproved(folder: Path) -> list[str]:
    return [claim.what for claim in claims(folder, folder / "evaluation") if not claim.proved]


def _metric(name: str, *values: float | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for record, value in zip(records, values, strict=True):
            record["data"][name] = value
            if value is None:
                del record["data"][name]
        write_metrics(folder, records)

    return change


def _no_answers(folder: Path) -> None:
    results = {"benchmarks": {"aime24": {"problems": 16, "unanswered": {"value": 1.0}}}}
    (folder / "evaluation/results.json").write_text(json.dumps(results))


BROKEN: dict[str, Callable[[Path], None]] = {
    "the loss is a number": _metric("actor/pg_loss", 0.1, float("nan")),
    "the gradients are numbers, and not all 0": _metric("actor/grad_norm", 0.0, 0.0),
    "correct and incorrect answers in one batch": _metric("critic/score/mean", 0.0, 1.0),
    "grail's weights differ between tokens": _metric("grail/weight_deviation", 0.0, 0.0),
    "the checkpoint was written": lambda folder: (folder / "checkpoints/global_step_2/actor").rmdir(),
    "the checkpoint was evaluated, and answers": _no_answers,
}


def test_each_claim_can_hold_and_can_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(*finished_run(tmp_path / "whole", "oar_g")) and "NOT PROVED" not in capsys.readouterr().out
    assert all(claim["proved"] for claim in json.loads((tmp_path / "whole" / SUMMARY).read_text()))
    for number, (claim, change) in enumerate(BROKEN.items()):
        folder, evaluation = finished_run(tmp_path / str(number))
        change(folder)
        assert unproved(folder) == [claim] and not report(folder, evaluation)
    folder, _ = finished_run(tmp_path / "missing")
    _metric("actor/pg_loss", 0.1, None)(folder)
    assert unproved(folder) == ["the loss is a number"], "a metric that is not there proves nothing"
