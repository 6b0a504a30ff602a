"""The second study's report: its conclusions by rule, its page from the files beside it, and figures of that page by pandas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from scipy import stats

from study import work
from study.arms import ARMS, MAIN
from study.plan import Job, RegimePlan, StudyPlan
from study.report import conclusions
from study.results import Results
from study.statistics import holm
from study.tables import p_value
from study.work import Files, settings_digest

FOLDER = Path(__file__).parents[2] / "docs" / "study2"
SEEDS = (1, 2, 3, 4, 5)
PLAN = StudyPlan(
    regimes=(RegimePlan("misconceptions", SEEDS, tuning_seeds=(9,), measured_seeds=(1, 2)),),
    main_arms=tuple(arm for arm in MAIN if arm.name in ("uniform", "grail", "surprisal", "random_token")),
    held_out_size=4,
)


def a_study(folder: Path, levels: dict[str, list[float]], seeds: tuple[int, ...] = SEEDS) -> Results:
    """By arm, of every seed, how many samples of 32 are right more than half, on the mean of both evaluations."""
    files = Files(folder)
    for arm, extra in levels.items():
        for seed in seeds:
            both = round(2 * (16 + extra[seed - 1]))
            parts = (both // 2, both - both // 2)
            right = ["".join(str(min(8, max(0, (part + place) // 4))) for place in range(4)) for part in parts]
            job = Job("main", "misconceptions", arm, seed, 1e-4)
            row: dict[str, Any] = dict.fromkeys(work.RUN_COLUMNS, 0.5) | dict(
                zip(work.JOB_COLUMNS, job.key, strict=True)
            )
            row |= {"job_seconds": 180.0, "settings": settings_digest(PLAN, "main"), "versions": "torch 1"}
            files.runs.append([row | {"right_1": right[0], "right_2": right[1]}])
    return Results.read(PLAN, files)


LEVEL: list[float] = [0, 1, 2, 0, 1]
BETTER: list[float] = [8, 8, 9, 8, 9]
LIKE: list[float] = [0.5, 1, 1.5, 0, 1]
"""Unlike ``LEVEL`` on two seeds, and level on average."""
NEARLY: list[float] = [8.5, 8, 8.5, 8, 9]
"""The same beside ``BETTER``."""
WORSE: list[float] = [-8, -8, -7, -8, -7]
WILD: list[float] = [9, -9, 12, -10, 3]


EQUAL, OPEN = "not shown to differ (the planned", "nothing is shown"


@pytest.mark.parametrize(
    ("grail", "surprisal", "random", "wanted"),
    [
        (NEARLY, BETTER, LEVEL, ["**better**", "**better**", "**better**", "recommendation for experiments"]),
        (LIKE, BETTER, WILD, [EQUAL, "**better**", OPEN, "whether the place matters was not decided: what"]),
        (WORSE, WILD, LEVEL, ["**worse**", OPEN, OPEN, "none is recommended."]),
    ],
)
def test_conclusions_by_rule(
    tmp_path: Path, grail: list[float], surprisal: list[float], random: list[float], wanted: list[str]
) -> None:
    results = a_study(tmp_path, {"uniform": LEVEL, "grail": grail, "surprisal": surprisal, "random_token": random})
    *said, others = conclusions(results)
    assert others.startswith("Exploratory") and all(part in line for line, part in zip(said, wanted, strict=True))
    assert said[3].startswith("**No method was shown to stand above") == ("recommendation" not in wanted[3])
    pairs = (("grail", "uniform"), ("surprisal", "uniform"), ("surprisal", "random_token"))
    p_values = [results.contrast(PLAN.regimes[0], *pair).paired.p for pair in pairs]
    for line, corrected in zip(said[:3], holm(p_values), strict=True):
        assert f"p {p_value(corrected)} (Holm)" in line


def test_figures_of_the_published_page_by_pandas() -> None:
    """Accuracy, difference from uniform, p-value and ground truth, straight from the CSV files."""
    page = (FOLDER / "REPORT.md").read_text(encoding="utf-8")
    runs = pd.read_csv(FOLDER / "runs.csv", dtype={"right_1": str, "right_2": str})
    main = runs[(runs.kind == "main") & (runs.regime == "misconceptions")]
    right = (
        sum(main[name].map(lambda digits: sum(map(int, digits)) / (8 * len(digits))) for name in ("right_1", "right_2"))
        / 2
    )
    by_arm = main.assign(right=right).pivot(index="seed", columns="arm", values="right") * 100
    for name in ("grail", "surprisal", "oracle", "spread"):
        difference = by_arm[name] - by_arm.uniform
        test = stats.ttest_1samp(difference, 0)
        low, high = test.confidence_interval(0.95)
        cells = [f"{by_arm[name].mean():.1f} ± {by_arm[name].std():.1f}"]
        cells += [f"{difference.mean():+.1f} [{low:+.1f}, {high:+.1f}]", f"{difference.std():.1f}"]
        (row,) = (
            line for line in page.splitlines() if line.startswith(f"| {ARMS[name].label} | 14 | ") and "±" in line
        )
        assert f" | {' | '.join(cells)} | " in row and f" | {p_value(test.pvalue)} | " in row
    truth = pd.read_csv(FOLDER / "truth.csv").query("regime == 'misconceptions' and figure == 'auroc_results'")
    means = truth.groupby(["method", "split"]).value.mean()
    assert (
        "| surprisal | " in page
        and f" | {means['surprisal', 'all']:.2f} | {means['surprisal', 'first']:.2f} | " in page
    )


def test_how_far_the_figures_carry_by_pandas() -> None:
    """pass@8, the correlation of alignment with the outcome, and hit rates, straight from the CSV files."""
    page = (FOLDER / "REPORT.md").read_text(encoding="utf-8")
    runs = pd.read_csv(FOLDER / "runs.csv", dtype={"right_1": str, "right_2": str})
    main = runs[(runs.kind == "main") & (runs.regime == "misconceptions")]
    # Of 8 samples, pass@8 is whether any is right.
    any_right = sum(
        main[name].map(lambda digits: 1 - digits.count("0") / len(digits)) for name in ("right_1", "right_2")
    )
    by_arm = main.assign(found=50 * any_right).pivot(index="seed", columns="arm", values="found")
    for name in ("surprisal", "oracle"):
        difference = by_arm[name] - by_arm.uniform
        low, high = stats.ttest_1samp(difference, 0).confidence_interval(0.95)
        assert f" | {difference.mean():+.1f} [{low:+.1f}, {high:+.1f}] |\n" in page
    alignment = pd.read_csv(FOLDER / "alignment.csv").query("regime == 'misconceptions'")
    gains = alignment.pivot(index="seed", columns="measured", values="gain")
    relative = gains.div(gains.uniform, axis=0).mean()
    accuracy = main.groupby("arm").accuracy.mean()
    assert f"r = {relative.loc[accuracy.index].corr(accuracy):.2f} [" in page
    picks = pd.read_csv(FOLDER / "selections.csv").pivot(index=["seed", "arm"], columns="figure", values="value")
    for name in ("surprisal", "random_token", "last_result"):
        own = picks.xs(name, level="arm")
        share = 100 * own.error / own.rows
        cells = f"| {ARMS[name].label} | {own.rows.sum():.0f} | {share.mean():.0f} ({share.min():.0f}, {share.max():.0f}) | "
        assert cells in page
