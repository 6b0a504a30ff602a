"""Figures of the study's runs against values worked by hand, and its intervals and tests against plain enumerations."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from study.statistics import (
    Difference,
    Run,
    _student_quantile,
    area_under_curve,
    bootstrap_interval,
    compare,
    compare_ratio,
    compare_steps,
    false_alarm_rate,
    figures,
    missing_runs,
    not_comparable,
    pairs,
    read_runs,
    restricted_steps,
    sign_flip_p,
    steps_to_accuracy,
    target_accuracy,
)


def a_run(arm: str, seed: int, accuracies: dict[int, float], **changes: Any) -> Run:
    """A run with these accuracies by step; pass@3 is 0.2 above, a step takes 2 s and a tenth of it goes to weights."""
    evaluations = [
        {"step": step, "accuracy": accuracy, "pass_at_3": accuracy + 0.2, "correct": [0, 1, 3, 2]}
        for step, accuracy in accuracies.items()
    ]
    steps = [
        {"step": step, "seconds": 2.0, "seconds_weights": 0.2, "response_length": 50.0 + step, "entropy": 1 / step}
        for step in range(1, max(accuracies) + 1)
    ]
    values = {"label": arm.upper(), "group": "baseline" if arm == "grpo" else "main", "settings": {}, "versions": {}}
    return Run(
        **(values | {"arm": arm, "seed": seed, "seconds": 60.0, "steps": steps, "evaluations": evaluations} | changes)
    )


# One run


def test_figures_of_a_run_worked_by_hand() -> None:
    found = figures(a_run("grpo", 0, {0: 0.2, 10: 0.4, 30: 0.5}))
    assert found.last_step == 30
    assert found.start_accuracy == 0.2
    assert found.final_accuracy == pytest.approx(0.45)
    assert found.final_pass == pytest.approx(0.65)
    assert found.area == pytest.approx((10 * 0.3 + 20 * 0.45) / 30)
    assert found.response_length == pytest.approx(50 + np.mean(range(21, 31)))
    assert found.entropy == pytest.approx(sum(1 / step for step in range(21, 31)) / 10)
    assert found.seconds_step == 2.0
    assert found.seconds_weights == 0.2
    assert found.selected_rate is None and found.advantage_scale is None


def test_the_evaluation_before_training_is_never_a_final_one() -> None:
    found = figures(a_run("grpo", 0, {0: 0.2, 10: 0.8}))
    assert found.final_accuracy == 0.8
    assert found.final_pass == 1.0


def test_a_figure_that_some_steps_lack_is_taken_over_the_others() -> None:
    steps = [
        {"step": 1, "entropy": 0.5},
        {"step": 2, "entropy": float("nan")},
        {"step": 3},
        {"step": 4, "entropy": None},
    ]
    steps += [{"step": 5, "entropy": 0.7, "seconds": 9.0}]
    found = figures(a_run("grpo", 0, {0: 0.2, 5: 0.3}, steps=steps))
    assert found.entropy == pytest.approx(0.6)
    assert found.seconds_step == 9.0
    assert found.response_length is None


def test_seconds_are_a_median_and_not_moved_by_one_slow_step() -> None:
    steps = [{"step": step, "seconds": seconds} for step, seconds in enumerate([1.0, 2.0, 3.0, 500.0, 2.5], start=1)]
    assert figures(a_run("grpo", 0, {0: 0.2, 5: 0.3}, steps=steps)).seconds_step == 2.5


def test_area_of_uneven_points_and_of_a_single_one() -> None:
    assert area_under_curve([0, 1, 4], [0.0, 1.0, 0.0]) == pytest.approx((0.5 + 1.5) / 4)
    assert area_under_curve([7], [0.3]) == 0.3


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (0.1, 0.0),  # there from the start
        (0.2, 0.0),
        (0.3, 5.0),  # half-way between steps 0 and 10
        (0.4, 10.0),
        (0.55, 27.5),  # three quarters of the way from step 20 to step 30
        (0.61, None),
    ],
)
def test_steps_to_an_accuracy_are_interpolated(target: float, expected: float | None) -> None:
    run = a_run("grpo", 0, {0: 0.2, 10: 0.4, 20: 0.4, 30: 0.6})
    found = steps_to_accuracy(run, target)
    assert found is None if expected is None else found == pytest.approx(expected)


def test_first_crossing_counts_though_the_curve_falls_again() -> None:
    assert steps_to_accuracy(a_run("grpo", 0, {0: 0.2, 10: 0.6, 20: 0.1}), 0.4) == pytest.approx(5)


def test_runs_that_never_get_there_are_counted_and_restricted() -> None:
    runs = [
        a_run("x", 0, {0: 0.0, 10: 0.5}),
        a_run("x", 1, {0: 0.0, 10: 0.1}),
        a_run("x", 2, {0: 0.0, 10: 0.4, 20: 0.6}),
    ]
    # Steps 10, never and 15. The last one comes after the horizon.
    assert restricted_steps(runs, 0.5, horizon=20) == (pytest.approx((10 + 20 + 15) / 3), 1)
    assert restricted_steps(runs, 0.5, horizon=12) == (pytest.approx((10 + 12 + 12) / 3), 2)


def test_target_is_a_share_of_the_baselines_mean_gain() -> None:
    runs = [
        a_run("grpo", 0, {0: 0.2, 10: 0.6}),
        a_run("grpo", 1, {0: 0.4, 10: 0.8}),
        a_run("x", 0, {0: 0.1, 10: 1.0 - 0.2}),
    ]
    assert target_accuracy(runs) == pytest.approx(0.3 + 0.8 * 0.4)
    assert target_accuracy([run for run in runs if run.arm == "x"]) is None
    assert target_accuracy([a_run("grpo", 0, {0: 0.5, 10: 0.5})]) is None


# Pairs


def test_differences_are_taken_within_a_seed() -> None:
    runs = [a_run("grpo", seed, {0: 0.2, 10: 0.2 * seed}) for seed in (0, 1, 2, 3)]
    runs += [a_run("x", seed, {0: 0.2, 10: 0.2 * seed + gain}) for seed, gain in ((3, 0.03), (1, 0.01), (9, 0.5))]
    found = compare(runs, "x", "final_accuracy")
    assert found is not None
    assert found.seeds == (1, 3)
    assert found.value == pytest.approx(0.02)
    assert (found.low, found.high) == (pytest.approx(0.01), pytest.approx(0.03))
    assert found.sign == 1


def test_runs_evaluated_otherwise_are_not_paired() -> None:
    runs = [a_run("grpo", seed, {0: 0.2, 10: 0.5}) for seed in (0, 1, 2)]
    shorter = a_run("x", 0, {0: 0.2, 5: 0.5})
    fewer = a_run("x", 1, {0: 0.2, 10: 0.5})
    for evaluation in fewer.evaluations:
        evaluation["correct"].pop()
    runs += [shorter, fewer, a_run("x", 2, {0: 0.2, 10: 0.5})]
    assert [first.seed for first, _ in pairs(runs, "x")] == [2]
    assert not_comparable(runs, "x") == [0, 1]


def test_one_seed_has_a_difference_but_no_interval() -> None:
    runs = [a_run("grpo", 0, {0: 0.2, 10: 0.5}), a_run("x", 0, {0: 0.2, 10: 0.6})]
    found = compare(runs, "x", "final_accuracy")
    assert found == Difference((0,), pytest.approx(0.1), None, None, None)
    assert found.sign == 0
    assert compare(runs[:1], "x", "final_accuracy") is None


def test_a_figure_that_one_run_lacks_takes_its_seed_out() -> None:
    runs = [a_run("grpo", seed, {0: 0.2, 10: 0.5}) for seed in (0, 1)]
    runs += [
        a_run("x", 0, {0: 0.2, 10: 0.5}, steps=[{"step": 1, "entropy": 0.3}]),
        a_run("x", 1, {0: 0.2, 10: 0.5}, steps=[]),
    ]
    found = compare(runs, "x", "entropy")
    assert found is not None and found.seeds == (0,)


def test_steps_are_compared_with_the_last_step_for_runs_that_never_get_there() -> None:
    runs = [a_run("grpo", 0, {0: 0.0, 10: 1.0 - 0.2}), a_run("x", 0, {0: 0.0, 10: 0.1})]
    found = compare_steps(runs, "x", 0.4)
    assert found is not None and found.value == pytest.approx(10 - 5)


def test_a_ratio_is_a_geometric_mean() -> None:
    runs = []
    for seed, (base, arm) in enumerate([(1.0, 2.0), (4.0, 2.0)]):
        runs.append(a_run("grpo", seed, {0: 0.2, 1: 0.2}, steps=[{"step": 1, "seconds": base}]))
        runs.append(a_run("x", seed, {0: 0.2, 1: 0.2}, steps=[{"step": 1, "seconds": arm}]))
    found = compare_ratio(runs, "x", "seconds_step")
    assert found is not None
    assert found.value == pytest.approx(1.0)
    assert (found.low, found.high) == (pytest.approx(0.5), pytest.approx(2.0))


# Intervals


def test_bootstrap_interval_agrees_with_every_resample_enumerated() -> None:
    values = np.array([0.1, 0.4, -0.2, 0.3, 0.25, 0.7])
    means = [np.mean(draw) for draw in itertools.product(values, repeat=6)]
    tail = NormalDist().cdf(
        -2.5706 * (6 / 5) ** 0.5
    )  # Student's 97.5 % quantile with 5 degrees of freedom, from a table
    low, high = np.quantile(means, [tail, 1 - tail])
    found = bootstrap_interval(values)
    assert found == (pytest.approx(low, abs=0.02), pytest.approx(high, abs=0.02))
    assert low > -0.15 and high < 0.65  # so neither end is simply the smallest or the largest value
    assert found == bootstrap_interval(values)
    assert bootstrap_interval(values[:1]) is None


def test_bootstrap_interval_of_few_values_spans_them() -> None:
    assert bootstrap_interval(np.array([0.1, 0.4, 0.2])) == (pytest.approx(0.1), pytest.approx(0.4))


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.7062), (2, 4.3027), (4, 2.7764), (9, 2.2622), (120, 1.9799)])
def test_student_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert _student_quantile(degrees) == pytest.approx(quantile, abs=1e-4)


def test_bootstrap_interval_of_many_values_is_that_of_a_normal_mean() -> None:
    values = np.random.default_rng(1).standard_normal(400) + 3
    found = bootstrap_interval(values)
    error = values.std() / 20
    assert found == (
        pytest.approx(values.mean() - 1.96 * error, abs=0.01),
        pytest.approx(values.mean() + 1.96 * error, abs=0.01),
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 3.0], 2 / 8),  # only all signs alike reach the sum of 6
        ([1.0, -2.0, 3.0], 6 / 8),  # of |±1±2±3|, all but twice 0 reach 2
        ([0.0, 0.0], 1.0),
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 2 / 64),
    ],
)
def test_sign_flip_p_by_hand(values: list[float], expected: float) -> None:
    assert sign_flip_p(np.array(values)) == pytest.approx(expected)
    assert sign_flip_p(-np.array(values)) == pytest.approx(expected)


def test_sign_flip_p_is_left_out_where_it_is_not_exact_or_empty() -> None:
    assert sign_flip_p(np.ones(1)) is None
    assert sign_flip_p(np.ones(17)) is None


def test_false_alarm_rate_of_few_seeds_is_that_of_equal_signs_and_falls_to_the_nominal_one() -> None:
    # The interval over so few seeds spans their values, so it excludes zero whenever all signs agree.
    assert false_alarm_rate(2) == pytest.approx(1 / 2, abs=0.05)
    assert false_alarm_rate(3) == pytest.approx(1 / 4, abs=0.05)
    assert false_alarm_rate(12) == pytest.approx(0.05, abs=0.02)
    with pytest.raises(ValueError, match="seeds=1"):
        false_alarm_rate(1)


# Files


def _write(folder: Path, name: str, data: Any) -> None:
    (folder / name).write_text(data if isinstance(data, str) else json.dumps(data))


def _file(arm: str = "grpo", seed: int = 0, **changes: Any) -> dict[str, Any]:
    evaluations = [{"step": step, "accuracy": 0.5, "pass_at_3": 0.6, "correct": [1, 2]} for step in (5, 0)]
    return {"arm": arm, "seed": seed, "group": "baseline", "steps": [], "evaluations": evaluations} | changes


def test_runs_are_read_in_order_with_the_arm_as_label_where_there_is_none(tmp_path: Path) -> None:
    _write(tmp_path, "x-seed1.json", _file("x", 1, group="main", label="The X", seconds=3.5, settings={"a": 1}))
    _write(tmp_path, "grpo-seed10.json", _file(seed=10))
    _write(tmp_path, "grpo-seed2.json", _file(seed=2))
    runs = read_runs(tmp_path)
    assert [(run.arm, run.seed, run.label) for run in runs] == [
        ("grpo", 2, "grpo"),
        ("grpo", 10, "grpo"),
        ("x", 1, "The X"),
    ]
    assert [evaluation["step"] for evaluation in runs[0].evaluations] == [0, 5]
    assert runs[2].seconds == 3.5 and runs[2].settings == {"a": 1} and runs[0].seconds is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('{"arm": "grp', "not valid JSON"),
        ({"arm": "grpo", "seed": 0}, "has no group, steps, evaluations"),
        (_file(evaluations=[]), "no evaluation after step 0"),
        (_file(evaluations=[{"step": 0, "accuracy": 0.5, "pass_at_3": 0.5}]), "no evaluation after step 0"),
        (_file(evaluations=[{"step": 5, "accuracy": 25.0, "pass_at_3": 0.5}]), r"accuracy=25.0 at step 5"),
        (_file(evaluations=[{"step": 5, "accuracy": 0.5, "pass_at_3": float("nan")}]), r"pass_at_3=nan at step 5"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, data: Any, message: str) -> None:
    _write(tmp_path, "grpo-seed0.json", data)
    with pytest.raises(ValueError, match=message) as error:
        read_runs(tmp_path)
    assert "grpo-seed0.json" in str(error.value)


def test_no_run_and_a_run_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run"):
        read_runs(tmp_path)
    _write(tmp_path, "grpo-seed0.json", _file())
    _write(tmp_path, "copy.json", _file())
    with pytest.raises(ValueError, match="there twice"):
        read_runs(tmp_path)


def test_missing_runs_by_the_plan_and_without_one_by_the_other_arms() -> None:
    runs = [a_run("grpo", 0, {0: 0.2, 1: 0.2}), a_run("grpo", 1, {0: 0.2, 1: 0.2}), a_run("x", 0, {0: 0.2, 1: 0.2})]
    runs += [a_run("y", 1, {0: 0.2, 1: 0.2}), a_run("z", 0, {0: 0.2, 1: 0.2}, group="ablation")]
    assert missing_runs(runs) == [("x", 1), ("y", 0)]
    assert missing_runs(runs, [("grpo", 0), ("grpo", 7), ("w", 0)]) == [("grpo", 7), ("w", 0)]
