"""Figures of runs and rollouts against values worked out by hand, and runs that are broken."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from grail_advantage.dump import DumpHeader, write_step
from grail_advantage.view.page import by_position, data
from tests.dumps import dump_row, method_columns, table_of

NAN = math.nan


def _log(path: Path, steps: dict[int, dict]) -> None:
    path.write_text("".join(json.dumps({"step": step, "data": values}) + "\n" for step, values in steps.items()))


def test_a_run_is_metrics_a_dump_or_both(tmp_path: Path) -> None:
    for folder in (tmp_path / "nothing", tmp_path / "empty_dump"):
        (folder / "tokens" if folder.name == "empty_dump" else folder).mkdir(parents=True)
        with pytest.raises(ValueError, match=r"neither metrics\.jsonl.* nor a token dump"):
            data.open_run(folder)
    with pytest.raises(ValueError, match="neither a folder nor a file"):
        data.open_run(tmp_path / "nowhere")
    run = tmp_path / "run"
    write_step(run / "tokens", DumpHeader(step=1, method="grail"), table_of([dump_row([1.0])]))
    _log(run / "metrics.jsonl", {1: {"training/global_step": 1}})
    both = data.open_run(run)
    assert (list(both.metrics), both.dump.steps, both.problems) == ([1], [1], [])
    assert data.open_run(run / "tokens").dump.steps == [1]
    (run / "tokens" / "step_000001.parquet").unlink()
    (problem,) = data.open_run(run).problems
    assert "holds no token dump" in str(problem)
    (run / "tokens").rmdir()
    assert data.open_run(run).dump is None


def test_bins_by_hand() -> None:
    counted = [by_position.binned(np.arange(count) + 1.0, bins).tolist() for count, bins in ((4, 2), (3, 2), (2, 4))]
    assert counted[:2] == [[1.5, 3.5], [1.0, 2.5]]  # of three, the places are 1/6, 3/6, 5/6
    assert counted[2] == pytest.approx([NAN, 1.0, NAN, 2.0], nan_ok=True)
    values = np.array([1.0, 3.0, NAN, 5.0, 7.0, 2.0])
    assert by_position.binned(values, 3).tolist() == [2.0, 5.0, 4.5]
    assert by_position.binned(values, 2) == pytest.approx([2.0, 14 / 3])
    assert by_position.binned(np.array([2.0]), 3) == pytest.approx([NAN, 2.0, NAN], nan_ok=True)
    row = dump_row([1.0] * 5, span=(3, 4, 5, 5), mask_T=[True, False, True, True, True])
    assert by_position.reasoning(row).tolist() == [True, False, True, False, False]
    assert by_position.reasoning(dump_row([1.0] * 2)).tolist() == [True, True]


def test_intervals() -> None:
    """By hand: five prompts of two rows: mean 4, residuals by prompt -8, -4, 0, 4 and 8, variance 5/4 * 160 / 100 = 2."""
    values, groups = np.repeat([[0.0], [2.0], [4.0], [6.0], [8.0]], 2, axis=0), np.repeat([7, 9, 8, 1, 0], 2)
    means = by_position.clustered_means(values, groups)
    assert means.mean.tolist() == [4.0] and means.rows == 10
    assert means.high - means.mean == pytest.approx([stats.t.ppf(0.975, 4) * math.sqrt(2)], rel=1e-4)
    few = by_position.clustered_means(values[:8], groups[:8])
    assert few.mean.tolist() == [3.0] and np.isnan(few.low).all() and np.isnan(few.high).all()
    values = np.random.default_rng(0).normal(size=(50, 3))
    means = by_position.clustered_means(values, np.arange(50))
    width = stats.t.ppf(0.975, 49) * values.std(axis=0, ddof=1) / math.sqrt(50)
    assert np.allclose(means.low, values.mean(axis=0) - width) and np.allclose(means.high, values.mean(axis=0) + width)
    values = np.array([[1.0, NAN], [3.0, NAN], [NAN, NAN], [5.0, 2.0], [7.0, NAN], [9.0, NAN]])
    means = by_position.clustered_means(values, np.arange(6))
    alone = by_position.clustered_means(np.array([[1.0], [3.0], [5.0], [7.0], [9.0]]), np.array([0, 1, 3, 4, 5]))
    assert means.mean.tolist() == [5.0, 2.0] and means.low[0] == alone.low[0] < 5
    assert np.isnan(means.low[1]), "one prompt says nothing of others"
    nothing = by_position.clustered_means(np.zeros((0, 2)), np.zeros(0, dtype=int))
    assert np.isnan(nothing.mean).all() and nothing.rows == 0


def test_student_against_scipy() -> None:
    degrees = np.array([1, 2, 3, 5, 10, 100, 1, 1023, 20_000])
    assert by_position.student_95(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-4)
    assert np.isnan(by_position.student_95(np.array([0, -1]))).all()


def test_table_by_hand() -> None:
    row = dump_row([2.0, 4.0, 9.0, 100.0], span=(2, 2, 3, 4), mask_T=[True, True, True, False])
    table = by_position.row_tables([row], bins=2)[""]
    assert table.profile.tolist() == [[2.0, 4.0]]
    assert (table.step.tolist(), table.outcome.tolist(), table.scored.tolist()) == ([1], ["right"], [True])
    rows = [dump_row([1.0], group=0), dump_row([1.0], group=0, update=1), dump_row([1.0], group=0, step=2)]
    assert by_position.row_tables(rows)[""].group.tolist() == [0, 1, 2]
    rows = [
        dump_row([1.0], methods={"a": method_columns(score_T=None, weight_T=np.array([3.0]), no_scores="no answer")}),
        dump_row([2.0], methods={"b": method_columns(score_T=None, weight_T=np.array([5.0]))}),
    ]
    tables = by_position.row_tables(rows, bins=1)
    assert tables["a"].profile.tolist() == [[3.0]] and tables["a"].scored.tolist() == [False]
    assert tables[""].profile.tolist() == [[1.0], [2.0]] and set(tables) == {"", "a", "b"}


def test_profiles_and_means_by_step_by_hand() -> None:
    """Steps 1 to 5; per step a correct and an incorrect response with scores, and one without."""
    rows = []
    for step in (1, 2, 3, 4, 5):
        rows += [
            dump_row([step, 1.0, 1.0, step], step=step, row=0, group=0),
            dump_row([2.0 * step, 0.0], step=step, row=1, group=0, outcome="wrong", truncated=True, reward=0.0),
            dump_row([1.0], step=step, row=2, group=1, outcome=None, no_scores="no answer"),
        ]
    table = by_position.row_tables(rows, bins=2)[""]
    means = by_position.profiles(table)
    # Correct responses: bins (step + 1) / 2 on both sides; one prompt a step, so that five are independent.
    assert list(means) == ["right", "wrong"] and means["right"].mean.tolist() == [2.0, 2.0]
    assert means["wrong"].mean.tolist() == [6.0, 0.0]
    half = stats.t.ppf(0.975, 4) * np.std([2.0, 4.0, 6.0, 8.0, 10.0], ddof=1) / math.sqrt(5)
    assert means["wrong"].low.tolist() == pytest.approx([6 - half, 0.0], rel=1e-4)
    steps, weights = by_position.by_step(table, "right")
    assert steps == [1, 2, 3, 4, 5]
    assert weights.tolist() == [[1.0, 1.0], [1.5, 1.5], [2.0, 2.0], [2.5, 2.5], [3.0, 3.0]]
    assert by_position.by_step(table, "wrong")[1][:, 0].tolist() == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert np.isnan(by_position.by_step(table, "right and wrong")[1]).all()
    assert by_position.by_step(by_position.row_tables([], bins=2)[""], "right")[1].shape == (0, 2)
