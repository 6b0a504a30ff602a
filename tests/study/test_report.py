"""The study's report: what it concludes from which figures, what it names, and that it is made of the raw files alone."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from grail_advantage import GrailConfig
from study.report import _setting, conclusions, curves, plot_differences, verdict, write_report
from study.saliency_truth import BASELINES, METRICS
from study.statistics import Difference, Run, compare, read_runs

HEADER = {
    "command": "bash scripts/study.sh",
    "hardware": "2 cores | shared",
    "versions": {"torch": "2.13.0", "python": "3.11"},
    "date": "2026-01-02",
}
LABELS = {"grpo": "GRPO", "grail_robust": "GRAIL, robust", "grail_last": "GRAIL, last block"}
GROUPS = {"grpo": "baseline", "grail_robust": "main", "grail_last": "ablation"}


def a_file(arm: str, seed: int, gain: float, **changes: Any) -> dict[str, Any]:
    """A finished run that ends at ``0.5 + seed / 100 + gain``."""
    accuracies = {0: 0.25, 10: 0.4 + gain / 2, 20: 0.5 + seed / 100 + gain, 30: 0.5 + seed / 100 + gain}
    steps = [
        {"step": step, "reward": 0.5, "entropy": 0.6, "response_length": 60.0, "seconds": 2.0, "seconds_weights": 0.4}
        | {"selected_rate": 0.3, "advantage_scale": 1.25}
        for step in range(1, 31)
    ]
    if arm == "grpo":
        steps = [{"step": step["step"], "entropy": 0.6, "response_length": 60.0, "seconds": 1.6} for step in steps]
    return {
        "arm": arm,
        "label": LABELS.get(arm, arm),
        "seed": seed,
        "group": GROUPS.get(arm, "main"),
        "settings": {"seed": seed, "learning_rate": 1e-3, "estimator": arm},
        "versions": {"torch": "2.13.0"},
        "seconds": 90.0,
        "steps": steps,
        "evaluations": [
            {"step": step, "accuracy": accuracy, "pass_at_3": accuracy + 0.1, "correct": [1, 2, 3]}
            for step, accuracy in accuracies.items()
        ],
    } | changes


GAINS = (0.02, 0.05, 0.03, 0.04, 0.06)


def write_study(folder: Path, gains: dict[str, tuple[float, ...]]) -> Path:
    folder.mkdir(exist_ok=True)
    for arm, by_seed in gains.items():
        for seed, gain in enumerate(by_seed):
            (folder / f"{arm}-seed{seed}.json").write_text(json.dumps(a_file(arm, seed, gain)))
    return folder


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Five seeds: the main arm above GRPO in all of them, the ablation on both sides of it."""
    return write_study(
        tmp_path / "raw", {"grpo": (0.0,) * 5, "grail_robust": GAINS, "grail_last": (0.05, -0.05, 0.04, -0.04, 0)}
    )


def a_figure(value: float, low: float | None, high: float | None) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "responses": 40}


def a_truth(minus_random: tuple[float, float], minus_position: tuple[float, float]) -> dict[str, Any]:
    """One method and the baselines; intervals of the AUROC's differences are given."""
    plain = {metric: a_figure(0.7, 0.6, 0.8) for metric in METRICS}
    ends = {"random": minus_random, "position": minus_position, "surprisal": (-0.1, 0.1)}
    minus = {name: {metric: a_figure(sum(end) / 2, *end) for metric in METRICS} for name, end in ends.items()}
    methods = {
        "grail_robust": {"label": "GRAIL, robust", "baseline": False, "responses": 39, "metrics": plain, "minus": minus}
    }
    for name, label in BASELINES.items():
        metrics = plain | {"spearman": None}
        methods[name] = {"label": label, "baseline": True, "responses": 40, "metrics": metrics, "minus": {}}
    left_out = {"no answer": 3, "only true tokens": 0}
    counts = {"examples": 43, "used": 40, "left_out": left_out, "reasoning_tokens": 61.23, "true_tokens": 1.5}
    return {"trained": counts | {"methods": methods}}


# Conclusions


def test_a_difference_is_claimed_only_where_its_interval_excludes_zero(study: Path) -> None:
    main, area, ablations, cost = conclusions(read_runs(study))
    # The ends are at 0.096 % of the resampled means: 1 in 3125 is all 2 points, 5 in 3125 are four times 2 and once 3.
    assert main == (
        "Final accuracy against GRPO, points, 95 % intervals over 5 seeds. Above it: GRAIL, robust (+4.0 [+2.2, +5.8])."
    )
    assert area.startswith("Mean accuracy while training") and "Above it: GRAIL, robust" in area
    assert ablations.startswith("Ablations, final accuracy against GRPO")
    assert "No difference could be shown: GRAIL, last block (+0.0 [" in ablations and "Above" not in ablations
    assert cost == "Time of a training step as a multiple of GRPO's: GRAIL, robust 1.25 [1.25, 1.25]."


def test_a_result_against_the_method_is_reported_alike(tmp_path: Path) -> None:
    losses = tuple(-gain for gain in GAINS)
    runs = read_runs(write_study(tmp_path / "raw", {"grpo": (0.0,) * 5, "grail_robust": losses}))
    assert conclusions(runs)[0] == (
        "Final accuracy against GRPO, points, 95 % intervals over 5 seeds. Below it: GRAIL, robust (-4.0 [-5.8, -2.2])."
    )


def test_few_seeds_conclude_nothing_however_far_their_interval_is_from_zero(tmp_path: Path) -> None:
    runs = read_runs(write_study(tmp_path / "raw", {"grpo": (0.0,) * 4, "grail_robust": (0.2, 0.21, 0.22, 0.23)}))
    assert compare(runs, "grail_robust", "final_accuracy").sign == 1
    said = conclusions(runs)[0]
    assert "Fewer than 5 seeds, so nothing is concluded: GRAIL, robust (+21.5 [" in said
    assert "Above" not in said


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.01, 0.02, "Above it"),
        (-0.02, -0.01, "Below it"),
        (-0.01, 0.02, "No difference could be shown"),
        (0.0, 0.02, "No difference could be shown"),
        (-0.02, 0.0, "No difference could be shown"),
    ],
)
def test_verdict_by_the_interval(low: float, high: float, expected: str) -> None:
    assert verdict(Difference((0, 1, 2, 3, 4), (low + high) / 2, low, high, 0.0625)) == expected
    assert verdict(Difference((0, 1), (low + high) / 2, low, high, 0.5)).startswith("Fewer than 5 seeds")
    assert verdict(None) == "No seed in common"


def test_ground_truth_is_concluded_from_the_paired_differences(study: Path) -> None:
    said = conclusions(read_runs(study), a_truth((0.1, 0.3), (-0.3, -0.1)))[3]
    assert said == (
        "Finding the wrong tokens (AUROC, trained model, 40 wrong responses). Against a random order, better: GRAIL, robust. "
        "Against taking the latest tokens first, worse: GRAIL, robust."
    )
    said = conclusions(read_runs(study), a_truth((-0.1, 0.3), (0.1, 0.3)))[3]
    assert "random order, no difference shown: GRAIL, robust" in said
    assert "latest tokens first, better: GRAIL, robust" in said


def test_at_most_five_lines_and_none_without_a_baseline(study: Path) -> None:
    runs = read_runs(study)
    assert len(conclusions(runs, a_truth((0.1, 0.3), (-0.3, -0.1)))) == 5
    assert conclusions([run for run in runs if run.arm != "grpo"]) == [
        "There is no run of grpo, so nothing could be compared."
    ]


# Files


def test_report_holds_every_section_and_figure(study: Path, tmp_path: Path) -> None:
    truth_path = tmp_path / "truth.json"
    truth_path.write_text(json.dumps(a_truth((0.1, 0.3), (-0.3, -0.1))))
    paths = write_report(study, tmp_path / "out", HEADER, truth_path=truth_path)
    assert [path.name for path in paths] == [
        "REPORT.md", "runs.csv", "curves.csv", "truth.csv", "learning_curves.png", "differences.png",
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths if path.suffix == ".png")
    text = paths[0].read_text()
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == [
        "## What was asked",
        "## Set-up",
        "## Main comparison",
        "## Ablations",
        "## Ground truth: do the scores find the wrong step?",
        "## Costs",
        "## Conclusions",
        "## Limitations",
    ]
    for wanted in (
        "| hardware | 2 cores \\| shared |",
        "| versions | torch 2.13.0, python 3.11 |",
        "| time of the 15 runs together | 0.38 h |",
        "| setting `learning_rate` | `0.001` |",
        "| GRAIL, robust | `grail_robust` | main | 0, 1, 2, 3, 4 | 30 | `estimator`: grail_robust |",
        "| GRPO | 5 | 25.0 ± 0.0 | 52.0 ± 1.6 |",
        "40 of 43 wrong responses (left out: 3 no answer); on average 1.5 of 61.2 reasoning tokens are true ones.",
        "| GRAIL, robust (39 responses) | 0.70 [0.60, 0.80] |",
        "| GRAIL, robust | +0.20 [+0.10, +0.30] | -0.20 [-0.30, -0.10] | +0.00 [-0.10, +0.10] |",
        "| GRAIL, robust | 2.00 ± 0.00 | 0.40 ± 0.00 | 1.25 [1.25, 1.25] | 1.5 | 30.0 ± 0.0 | 1.250 ± 0.000 |",
        "- GRAIL, last block, final accuracy: no difference could be shown, +0.0 [",
        "p cannot be below 0.0625",
    ):
        assert wanted in text, wanted
    for line in conclusions(read_runs(study), json.loads(truth_path.read_text())):
        assert f"- {line}\n" in text
    assert "Missing runs" not in text and "Not compared" not in text and "nan" not in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    for line, rule in itertools.pairwise(tables):
        if set(rule) <= set("|-:"):
            assert line.replace("\\|", "").count("|") == rule.count("|")


def test_csv_files_hold_every_run_and_evaluation(study: Path, tmp_path: Path) -> None:
    write_report(study, tmp_path / "out", HEADER)
    runs = list(csv.DictReader((tmp_path / "out" / "runs.csv").open()))
    assert len(runs) == 15
    row = next(row for row in runs if (row["arm"], row["seed"]) == ("grail_robust", "1"))
    assert float(row["final_accuracy"]) == pytest.approx(0.56)
    assert float(row["final_pass"]) == pytest.approx(0.66)
    # GRPO starts at 0.25 and ends at 0.52 on average; 80 % of the way is at 0.466, on the way from 0.425 to 0.56.
    assert float(row["target_accuracy"]) == pytest.approx(0.466)
    assert float(row["steps_to_target"]) == pytest.approx(10 + 10 * (0.466 - 0.425) / (0.56 - 0.425))
    found = list(csv.DictReader((tmp_path / "out" / "curves.csv").open()))
    assert len(found) == 60
    assert {"arm": "grpo", "seed": "3", "step": "10", "accuracy": "0.4", "pass_at_3": "0.5"} in found
    assert not (tmp_path / "out" / "truth.csv").exists()
    assert "Not measured." in (tmp_path / "out" / "REPORT.md").read_text()


def test_equal_files_give_equal_reports(study: Path, tmp_path: Path) -> None:
    first, second = (write_report(study, tmp_path / name, HEADER) for name in ("a", "b"))
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_missing_and_incomparable_runs_are_named(study: Path, tmp_path: Path) -> None:
    (study / "grail_robust-seed2.json").unlink()
    short = a_file("grail_last", 1, 0.0)
    short["evaluations"] = short["evaluations"][:3]
    (study / "grail_last-seed1.json").write_text(json.dumps(short))
    plan = [(arm, seed) for arm in (*LABELS, "oar_p") for seed in range(5)]
    text = write_report(study, tmp_path / "out", HEADER, expected=plan)[0].read_text()
    wanted = ["`grail_robust` seed 2", *[f"`oar_p` seed {seed}" for seed in range(5)]]
    assert f"Missing runs: {', '.join(wanted)}." in text
    assert "Not compared: `grail_last` seed 1, evaluated at other steps" in text
    assert "Fewer than 5 seeds, so nothing is concluded: GRAIL, robust (" in text
    without_plan = write_report(study, tmp_path / "out", HEADER)[0].read_text()
    assert "Missing runs: `grail_robust` seed 2.\n" in without_plan


@pytest.mark.parametrize(
    "arms", [{"grpo": (0.0,), "grail_robust": (0.1,)}, {"grpo": (0.0,)}, {"grail_last": (0.1, 0.2)}]
)
def test_a_study_of_few_runs_gives_a_report(arms: dict[str, tuple[float, ...]], tmp_path: Path) -> None:
    paths = write_report(write_study(tmp_path / "raw", arms), tmp_path / "out", HEADER | {"question": "Which one?"})
    text = paths[0].read_text()
    assert "## What was asked\n\nWhich one?\n" in text and "nan" not in text
    assert all(path.stat().st_size for path in paths)
    if len(arms) == 2:
        assert "+10.0, no interval" in text
        assert "Fewer than 5 seeds, so nothing is concluded: GRAIL, robust (+10.0, no interval)." in text
        assert "A single seed, so no interval: GRAIL, robust, GRPO." in text


def test_a_damaged_ground_truth_is_named(study: Path, tmp_path: Path) -> None:
    (tmp_path / "truth.json").write_text("{")
    with pytest.raises(ValueError, match=r"truth\.json is not valid JSON"):
        write_report(study, tmp_path / "out", HEADER, truth_path=tmp_path / "truth.json")


def test_curves_are_averaged_over_the_steps_that_all_runs_have(study: Path) -> None:
    runs = [run for run in read_runs(study) if run.arm == "grpo"][:2]
    runs[1] = Run(**(vars(runs[1]) | {"evaluations": runs[1].evaluations[1:]}))
    steps, accuracies = curves(runs)
    assert steps == [10, 20, 30]
    assert accuracies[:, 1].tolist() == [0.5, 0.51]


def test_forest_plot_shows_each_interval(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn, read back from matplotlib's axes before they are closed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    runs = read_runs(study)
    plot_differences(runs, tmp_path / "forest.png")
    panel = pyplot.gcf().axes[0]
    monkeypatch.undo()
    drawn = [line.get_xydata().tolist() for line in panel.lines]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["GRAIL, robust (5)", "GRAIL, last block (5)"]
    for height, arm in ((1, "grail_robust"), (0, "grail_last")):
        found = compare(runs, arm, "final_accuracy")
        assert [[100 * found.value, height]] in drawn
        assert [[100 * found.low, height], [100 * found.high, height]] in drawn
    pyplot.close("all")


def test_an_arms_settings_are_told_by_what_is_not_a_default() -> None:
    options = {
        name: getattr(GrailConfig("robust", leaf="last", alignment="token"), name) for name in ("preset", "leaf")
    }
    arm = {"weights": options, "method": "GrailConfig", "control": "shuffled", "advantage": "dr_grpo"}
    assert _setting(arm) == "GrailConfig(preset=robust, leaf=last), control shuffled, advantage dr_grpo"
    assert _setting({"weights": None, "method": None, "advantage": "grpo"}) == "advantage grpo"
    assert _setting(3) == "3"
