"""The second study's report: what it may conclude and when, from raw files made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from study import alignment, report, work
from study.arms import ARMS, MAIN
from study.plan import CONTRASTS, NO_ARM, Job, RegimePlan, StudyPlan
from study.report import (
    Results,
    conclusions,
    contrast_table,
    drawn,
    last_accuracy,
    markdown,
    missing,
    outcome,
    plot_differences,
    write_report,
)
from study.statistics import equivalence_p, holm, paired
from study.tables import interval, p_value
from study.work import Files, settings_digest

SEEDS = (1, 2, 3, 4, 5)
PLAN = StudyPlan(
    regimes=(
        RegimePlan("misconceptions", SEEDS, tuning_seeds=(9,), measured_seeds=(1, 2), side_seeds=(1, 2)),
        RegimePlan("slips", SEEDS, tuning_seeds=(9,), measured_seeds=()),
    ),
    main_arms=tuple(arm for arm in MAIN if arm.name in ("uniform", "grail", "surprisal", "random_token")),
    side_arms=(ARMS["entropy"],),
    held_out_size=4,
)


def a_run(
    kind: str, arm: str, seed: int, right: tuple[str, str], regime: str = "misconceptions", rate: float = 1e-4
) -> dict[str, Any]:
    values = dict.fromkeys(work.RUN_COLUMNS, 0.5)
    values |= {"right_1": right[0], "right_2": right[1], "weight_seconds": 6.0, "processor_seconds": 90.0}
    values["accuracy"] = sum(int(digit) for part in right for digit in part) / 64
    return _row(Job(kind, regime, arm, seed, rate)) | values


def _row(job: Job) -> dict[str, Any]:
    return dict(zip(work.JOB_COLUMNS, job.key, strict=True)) | {
        "job_seconds": 180.0, "settings": settings_digest(PLAN, job.kind), "versions": "torch 1"
    }  # fmt: skip


def digits(accuracy: float, extra: float = 0) -> tuple[str, str]:
    """Four problems' right samples of eight, twice: so many of 32 more, in halves, on the mean of both."""
    both = round(2 * (32 * accuracy + extra))
    halves = (both // 2, both - both // 2)
    first, second = ("".join(str(min(8, max(0, (half + place) // 4))) for place in range(4)) for half in halves)
    return first, second


def a_study(tmp_path: Path, levels: dict[str, list[float]], seeds: tuple[int, ...] = SEEDS) -> Results:
    """By arm, of every seed, how many samples of 32 are right more than half."""
    files = Files(tmp_path)
    for arm, extra in levels.items():
        for seed in seeds:
            right = digits(0.5, extra[seed - 1])
            files.runs.append([a_run("main", arm, seed, right)])
    return Results.read(PLAN, files)


LEVEL: list[float] = [0, 1, 2, 0, 1]
BETTER: list[float] = [8, 8, 9, 8, 9]
LIKE: list[float] = [0.5, 1, 1.5, 0, 1]
"""Unlike ``LEVEL`` on two seeds, and level on average."""
NEARLY: list[float] = [8.5, 8, 8.5, 8, 9]
"""The same beside ``BETTER``."""
WORSE: list[float] = [-8, -8, -7, -8, -7]
WILD: list[float] = [9, -9, 12, -10, 3]


def test_outcome_is_the_share_of_right_samples_of_every_problem() -> None:
    row = {"right_1": "8040", "right_2": "8448"}
    assert outcome(row, PLAN).tolist() == [1.0, 0.25, 0.5, 0.5]


def test_contrast_is_paired_by_seed(tmp_path: Path) -> None:
    results = a_study(tmp_path, {"uniform": LEVEL, "grail": BETTER})
    found = results.contrast(PLAN.regimes[0], "grail", "uniform")
    differences = (np.array(BETTER) - np.array(LEVEL)) / 32
    assert found.paired == paired(differences.tolist())
    assert found.equivalence == equivalence_p(differences.tolist(), 0.015)
    assert found.both_ways[0] < found.paired.mean < found.both_ways[1]
    assert found.complete and found.seeds == SEEDS
    assert results.contrast(PLAN.regimes[0], "oar_g", "uniform") is None
    assert results.contrast(PLAN.regimes[1], "grail", "uniform") is None, "another regime has no runs"


def test_nothing_is_concluded_before_all_planned_seeds_are_there(tmp_path: Path) -> None:
    levels = {"uniform": LEVEL, "grail": LIKE, "surprisal": BETTER, "random_token": LEVEL}
    results = a_study(tmp_path, levels, seeds=SEEDS[:4])
    (said,) = conclusions(results)
    assert said.startswith("**Nothing is concluded yet.** Of 5 planned seeds of the regime misconceptions there are: ")
    assert "4" in said
    table = markdown(results)
    row = next(
        line for line in table.splitlines() if line.startswith(f"| {ARMS['surprisal'].label} | 4 of 5 | 0.0001 | ")
    )
    assert set(row.split(" | ")[3:-1]) == {"-"}, "neither accuracy nor effect on the way"


EQUAL = "**level within 1.5 points**"
OPEN = "nothing is shown"
NONE = "**No method was shown to stand above"


@pytest.mark.parametrize(
    ("grail", "surprisal", "random", "wanted"),
    [
        (NEARLY, BETTER, LEVEL, ["**better**", "**better**", "**better**", "recommendation for experiments"]),
        (LIKE, BETTER, NEARLY, [EQUAL, "**better**", EQUAL, "it is level within 1.5 points: what"]),
        (LIKE, BETTER, WILD, [EQUAL, "**better**", OPEN, "whether the place matters was not decided: what"]),
        (LIKE, BETTER, [16, 16, 16, 16, 15], [EQUAL, "**better**", "**worse**", "it is worse: what"]),
        (BETTER, LIKE, LEVEL, ["**better**", EQUAL, EQUAL, "recommended. GRAIL stands above uniform; its control"]),
        (WORSE, WILD, LEVEL, ["**worse**", OPEN, OPEN, "none is recommended."]),
    ],
)
def test_conclusions_by_rule(
    tmp_path: Path, grail: list[float], surprisal: list[float], random: list[float], wanted: list[str]
) -> None:
    results = a_study(tmp_path, {"uniform": LEVEL, "grail": grail, "surprisal": surprisal, "random_token": random})
    *said, others = conclusions(results)
    assert len(said) == 4
    assert others.startswith("Exploratory")
    for line, part in zip(said, wanted, strict=True):
        assert part in line, line
    assert said[3].startswith(NONE) == ("recommendation" not in wanted[3])
    p = [
        results.contrast(PLAN.regimes[0], *pair).paired.p
        for pair in (("grail", "uniform"), ("surprisal", "uniform"), ("surprisal", "random_token"))
    ]
    for line, corrected in zip(said[:3], holm(p), strict=True):
        assert f"p {p_value(corrected)} (Holm)" in line


def test_further_pairs_are_shown_without_a_correction_once_both_are_there(tmp_path: Path) -> None:
    regime = replace(PLAN.regimes[0], added=(ARMS["spread"],))
    plan = replace(PLAN, regimes=(regime, *PLAN.regimes[1:]))
    levels = {"uniform": LEVEL, "grail": LIKE, "surprisal": BETTER, "random_token": BETTER, "spread": NEARLY}
    results = replace(a_study(tmp_path, levels), plan=plan)
    found = results.contrast(regime, "random_token", "spread")
    said = f"{interval(found.paired, 100)} points, uncorrected p 1.000, of equivalence {p_value(found.equivalence)}."
    last = conclusions(results)[-1]
    assert last.startswith(
        f"Exploratory: wrong rows: a random token against {ARMS['spread'].label}: {said} Of the other main arms"
    )
    page = markdown(results)
    assert f"| wrong rows: a random token - {ARMS['spread'].label} | 5 |" in page
    assert f"| {ARMS['spread'].label} | 5 | " in page and page.count(f"| {ARMS['spread'].label} | ") == 2


def test_pairs_that_only_explain_stand_in_the_table_and_not_among_the_conclusions(tmp_path: Path) -> None:
    arms = ("uniform", "right_only", "grail", "grail_shuffled", "surprisal", "random_token")
    plan = replace(PLAN, main_arms=tuple(arm for arm in MAIN if arm.name in arms))
    levels = dict.fromkeys(arms, LEVEL) | {"right_only": BETTER, "grail": LIKE}
    results = replace(a_study(tmp_path, levels), plan=plan)
    page = markdown(results)
    for pair in (("right_only", "random_token"), ("grail", "grail_shuffled")):
        found = results.contrast(plan.regimes[0], *pair)
        label = f"{ARMS[pair[0]].label} - {ARMS[pair[1]].label}"
        assert f"| {label} | 5 |  |  | {interval(found.paired, 100)} |" in page
    assert not any(" against " in line for line in conclusions(results) if line.startswith("Exploratory"))


def test_the_short_table_holds_the_comparisons_once_all_seeds_are_there(tmp_path: Path) -> None:
    levels = {"uniform": LEVEL, "grail": LIKE, "surprisal": BETTER, "random_token": WILD}
    results = a_study(tmp_path / "all", levels)
    head, _, *rows = contrast_table(results)
    assert head == "| accuracy, points | difference | 95 % interval | p, Holm | so |"
    level = p_value(results.contrast(PLAN.regimes[0], "grail", "uniform").equivalence)
    assert [row.split(" | ")[-1] for row in rows] == [
        f"level within 1.5 (p {level}, uncorrected) |", "better |", "not decided |"
    ]  # fmt: skip
    corrected = holm([results.contrast(PLAN.regimes[0], *pair).paired.p for pair in CONTRASTS])
    for row, pair, p in zip(rows, CONTRASTS, corrected, strict=True):
        found = results.contrast(PLAN.regimes[0], *pair).paired
        assert row.startswith(f"| {ARMS[pair[0]].label}, against {ARMS[pair[1]].label} | {100 * found.mean:+.1f} | ")
        assert f" | {100 * found.low:+.1f} to {100 * found.high:+.1f} | {p_value(p)} | " in row
    assert contrast_table(a_study(tmp_path / "few", levels, seeds=SEEDS[:4])) == []


def test_other_arms_have_a_correction_of_their_own_and_are_named_once_all_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {"right_only": BETTER, "last_result": [-8, -7, -7, -8, -7], "oracle": WILD}
    compared = {arm: LEVEL for arm in ("uniform", "grail", "surprisal", "random_token")}
    plan = replace(PLAN, main_arms=tuple(arm for arm in MAIN if arm.name in compared | others))
    results = replace(a_study(tmp_path, compared | others), plan=plan)
    means = {}
    for arm in (*others, "random_token"):
        contrast = results.contrast(plan.regimes[0], arm, "uniform")
        means[arm] = f"{ARMS[arm].label} ({100 * contrast.paired.mean:+.1f})"
    said = conclusions(results)[-1]
    assert said == (
        "Exploratory: Of the other main arms (Holm's correction over these 4; most of their learning rates from one tuning "
        f"seed) above uniform: {means['right_only']}; below uniform: {means['last_result']}; "
        f"not told from uniform: {means['oracle']}, {means['random_token']}."
    )
    monkeypatch.setattr(report, "NAMED", 1)
    means = [
        f"{100 * results.contrast(plan.regimes[0], arm, 'uniform').paired.mean:+.1f}"
        for arm in ("random_token", "oracle")
    ]
    _, pair = said.split("not told from uniform: ")
    assert conclusions(results)[-1] == said.replace(pair, f"2 arms ({means[0]} to {means[1]}).")
    half = Files(tmp_path / "half")
    half.runs.append([row for row in results.rows["main"] if (row["arm"], row["seed"]) != ("oracle", "5")])
    assert not conclusions(Results.read(plan, half))[-1].startswith("Exploratory")


def test_an_arm_that_stands_above_only_without_the_correction_is_not_told_from_uniform(tmp_path: Path) -> None:
    nearly = [0.5 + level + more for level, more in zip(LEVEL, [2.5, 0.5, 1.5, 3.5, 0], strict=True)]
    levels = dict.fromkeys(("uniform", "grail", "surprisal", "random_token"), LEVEL) | {"right_only": nearly}
    plan = replace(PLAN, main_arms=tuple(arm for arm in MAIN if arm.name in levels))
    results = replace(a_study(tmp_path, levels), plan=plan)
    (found,) = (one for one in results.against_baseline(plan.regimes[0]) if one.arm == "right_only")
    assert 0.025 < found.paired.p < 0.05, "below the level alone, not times two"
    said = conclusions(results)[-1]
    assert "(Holm's correction over these 2; " in said and "above uniform" not in said
    assert f"not told from uniform: {ARMS['right_only'].label} ({100 * found.paired.mean:+.1f})" in said


def test_another_regime_is_told_of_by_its_whole_arms_with_a_correction_of_its_own(
    tmp_path: Path,
) -> None:
    primary = a_study(tmp_path, {arm: LEVEL for arm in ("uniform", "grail", "surprisal", "random_token")})
    plan = replace(
        PLAN, main_arms=tuple(arm for arm in MAIN if arm.name in primary.plan.pilot_arms or arm.name == "oracle")
    )
    levels = {"uniform": LEVEL, "grail": WORSE, "surprisal": BETTER, "random_token": NEARLY, "oracle": WILD}
    slips = [
        a_run("main", arm, seed, digits(0.5, level[seed - 1]), regime="slips")
        for arm, level in levels.items()
        for seed in SEEDS
    ]

    def of(name: str, left_out: tuple[str, int]) -> tuple[Results, str]:
        files = Files(tmp_path / name)
        files.runs.append([*primary.rows["main"], *[r for r in slips if (r["arm"], int(r["seed"])) != left_out]])
        found = Results.read(plan, files)
        section = markdown(found).split("## Regime slips\n")[1]
        said = section.strip().splitlines()[0]
        told = "[slips](#regime-slips)" in conclusions(found)[-1]
        assert told == said.startswith("Exploratory: ")
        return found, said

    results, said = of("no_oracle", ("oracle", 5))
    regime = plan.regimes[1]
    mean = {
        arm: f"{100 * results.contrast(regime, arm, 'uniform').paired.mean:+.1f}" for arm in levels if arm != "uniform"
    }
    placed = results.contrast(regime, "surprisal", "random_token")
    pick, control = ARMS["surprisal"].label, ARMS["random_token"].label
    assert said == (
        "Exploratory: 3 of 4 arms complete (Holm's correction over these; learning rates from 1 tuning seed), "
        f"above uniform: {pick} ({mean['surprisal']}), {control} ({mean['random_token']}); "
        f"below uniform: {ARMS['grail'].label} ({mean['grail']}). "
        f"There, {pick} against {control}: {interval(placed.paired, 100)} points, uncorrected p {p_value(placed.paired.p)}, "
        f"of equivalence {p_value(placed.equivalence)}."
    )
    assert f"| {ARMS['oracle'].label} | 4 of 5 |" in markdown(results).split("## Regime slips")[1]
    whole, said = of("whole", ("", 0))
    mean_of_oracle = f"{100 * whole.contrast(regime, 'oracle', 'uniform').paired.mean:+.1f}"
    assert said.startswith(
        "Exploratory: of 4 arms (Holm's correction over these; learning rates from 1 tuning seed), above"
    )
    assert f"not told from uniform: {ARMS['oracle'].label}" in said
    _, said = of("no_control", ("random_token", 5))
    assert said.startswith("Exploratory: 3 of 4 arms complete (Holm's correction over these; ")
    assert said.endswith(f"{ARMS['oracle'].label} ({mean_of_oracle}).") and control not in said
    assert not of("no_baseline", ("uniform", 5))[1].startswith("Exploratory")
    slips = [row for row in slips if row["arm"] in ("uniform", "grail")]
    _, said = of("one", ("", 0))
    assert said.startswith("Exploratory: 1 of 4 arms complete (no correction; ")


def test_the_plot_holds_what_is_complete(tmp_path: Path) -> None:
    levels = {"uniform": LEVEL, "grail": BETTER}
    few = a_study(tmp_path / "few", levels, seeds=SEEDS[:4])
    assert not drawn(few) and plot_differences(few, tmp_path / "few.png") == [] and "![" not in markdown(few)
    enough = a_study(tmp_path / "enough", levels)
    for seed in SEEDS[:4]:
        Files(tmp_path / "enough").runs.append([a_run("main", "surprisal", seed, digits(0.5))])
    enough = Results.read(PLAN, Files(tmp_path / "enough"))
    assert {regime: [c.arm for c in found] for regime, found in drawn(enough).items()} == {"misconceptions": ["grail"]}
    pictures = [plot_differences(enough, tmp_path / name)[0].read_bytes() for name in ("a.png", "b.png")]
    assert pictures[0] == pictures[1] and "](differences.png)" in markdown(enough)


def test_the_page_holds_all_that_was_measured_and_names_what_is_missing(tmp_path: Path) -> None:
    files = Files(tmp_path)
    a_study(tmp_path, {arm: LEVEL for arm in ("uniform", "grail", "surprisal", "random_token")})
    for seed in (1, 2):
        files.runs.append([a_run("side", "entropy", seed, digits(0.25))])
    for rate in PLAN.rates:
        files.runs.append([a_run("tune", "uniform", 9, digits(0.5 + 1000 * rate), rate=rate)])
    start = dict.fromkeys(work.START_COLUMNS, 0.25)
    files.start.append([_row(Job("start", "misconceptions", NO_ARM, seed)) | start for seed in SEEDS])
    for seed, gain in ((1, 0.4), (2, 0.2)):
        job = _row(Job("alignment", "misconceptions", NO_ARM, seed))
        shown = dict.fromkeys(alignment.FIGURES, gain) | {"weight_seconds": 1.0}
        files.alignment.append([job | {"measured": "uniform"} | shown])
        files.alignment.append([job | {"measured": "grail"} | shown | {"gain": gain * 1.5}])
    job = _row(Job("truth", "misconceptions", NO_ARM, 1))
    for method, value in (("grail", 0.61), ("result_token", 0.5)):
        files.truth.append(
            [job | {"method": method, "figure": "auroc_results", "split": "last", "value": value, "responses": 7}]
        )
    paths = write_report(PLAN, files, tmp_path)
    assert [path.name for path in paths] == ["REPORT.md", "differences.png"]
    text = paths[0].read_text(encoding="utf-8")
    assert text.index("## Conclusions") < text.index("## Regime misconceptions") < text.index("## What is missing")
    for wanted in (
        "Right before training, %: 25.0 ± 0.0 at temperature 0.6, ",
        "| uniform (Dr. GRPO) | 5 | 0.0001 |",
        "| wrong rows: least likely token - wrong rows: a random token | 5 |",
        "| entropy | 2 | 0.0001 |",
        "| 1.50 | 0.10 |",  # minutes
        "| entropy | 2 | 0.0001 | 25.0 ± 0.0 | -26.6 [-46.4, -6.7] | 2.2 | ",
        "| uniform (Dr. GRPO) | 1 | 54.7 | 59.4 | 70.3 | 0.0002, an end of the grid |",
        "| GRAIL, as published | 0.450 | 1.50 [1.50, 1.50] | 0.300 | 0.300 |",
        "| baseline: it is a result token |",
        "misconceptions: 9 of 12 runs `tune`",
        "misconceptions: 1 of 2 jobs `truth`",
        "slips: 20 of 20 runs `main`",
        "Nothing has been run.",
        "core-hours (",
    ):
        assert wanted in text, wanted
    assert "nan" not in text
    assert write_report(PLAN, files, tmp_path)[0].read_text(encoding="utf-8") == text
    assert "jobs `alignment`" not in text, "what is complete is not named"


def test_side_arms_that_never_acted_are_named(tmp_path: Path) -> None:
    plan = replace(PLAN, side_arms=(ARMS["entropy"], ARMS["stare"]))
    files = Files(tmp_path)
    a_study(tmp_path, {"uniform": LEVEL})
    for seed in (1, 2):
        like = a_run("main", "uniform", seed, digits(0.5, LEVEL[seed - 1]))
        times = {"processor_seconds": 91.0, "weight_seconds": 1.0}
        files.runs.append([like | times | {"kind": "side", "arm": "stare"}])
        files.runs.append([like | times | {"kind": "side", "arm": "entropy", "gradient_norm": 0.25 * seed}])
    said = "Number for number the runs of uniform, because what they wait for never came: "
    assert f"{said}STARE.\n" in markdown(Results.read(plan, files))
    assert said not in markdown(Results.read(replace(plan, side_arms=(ARMS["entropy"],)), files))


def test_the_pilot_shows_its_models_and_the_spread(tmp_path: Path) -> None:
    files = Files(tmp_path)
    start = dict.fromkeys(work.START_COLUMNS, 0.4)
    files.start.append([_row(Job("start", "misconceptions", NO_ARM, 7)) | start])
    plan = replace(PLAN, regimes=(replace(PLAN.regimes[0], pilot_seeds=(7, 8), tuning_seeds=(7,)),))
    assert "Pilot: 1 of 2 warmed-up models, 40.0 of the samples right." in markdown(Results.read(plan, files))
    for seed in (7, 8):
        files.runs.append([a_run("pilot", "uniform", seed, digits(0.5))])
        files.runs.append([a_run("pilot", "grail", seed, digits(0.5, 8 * (seed - 7)))])
    text = markdown(Results.read(plan, files))
    assert "| GRAIL, as published | 2 |" in text and "| 17.68 |" in text  # differences of 0 and 25 points
    # Of a tuning seed the pilot's run is one of tuning too.
    assert "| uniform (Dr. GRPO) | 1 | - | 50.0 | - | - |" in text


def test_the_published_page_is_made_from_the_files_beside_it() -> None:
    folder = Path(__file__).parents[2] / "docs" / "study2"
    page = (folder / "REPORT.md").read_text(encoding="utf-8")
    assert page == markdown(Results.read(StudyPlan(), Files(folder))), "run python -m study report"


def test_accuracy_behind_the_last_step_is_what_the_exact_one_is_compared_with(tmp_path: Path) -> None:
    row = {"right_1": "8888", "right_2": "8404"}
    assert last_accuracy(row, PLAN) == 0.5
    files = Files(tmp_path)
    for seed in SEEDS:
        files.runs.append([a_run("main", "uniform", seed, ("8888", "8444"))])  # exact accuracy 50 %
    cells = ["62.5", "50.0", "50.0", "50.0", "-12.5", "50.0", "0.0"]
    assert f"| uniform (Dr. GRPO) | {' | '.join(cells)} | " in markdown(Results.read(PLAN, files))


def test_the_plans_pairs_are_shown_at_temperature_1_too(tmp_path: Path) -> None:
    files = Files(tmp_path)
    hot = {
        "uniform": [0.5, 0.5, 0.5, 0.5, 0.5],
        "grail": [0.5, 0.6, 0.4, 0.7, 0.4],
        "surprisal": [0.7, 0.8, 0.7, 0.7, 0.7],
    }
    last = {"uniform": [4, 4, 4, 4, 4], "grail": [4, 6, 4, 5, 4], "surprisal": [5, 7, 6, 6, 6]}
    """Right samples of every problem after the last step, of eight; after the other one all."""
    for arm, values in hot.items():
        rows = [
            a_run("main", arm, seed, ("8888", str(count) * 4)) for seed, count in zip(SEEDS, last[arm], strict=True)
        ]
        files.runs.append([row | {"accuracy_hot": value} for row, value in zip(rows, values, strict=True)])
    page = markdown(Results.read(PLAN, files))
    assert "| after the last step, points | temperature 0.6 | p | temperature 1 | p |" in page
    for arm in ("grail", "surprisal"):
        cells = []
        for found in (paired([(count - 4) / 8 for count in last[arm]]), paired([value - 0.5 for value in hot[arm]])):
            cells += [interval(found, 100), p_value(found.p)]
        assert f"| {ARMS[arm].label} - {ARMS['uniform'].label} | {' | '.join(cells)} |" in page
    table = page.split("after the last step, points")[1].split("\n\n")[0]
    assert "+22.0 [+16.4, +27.6] | < 0.001 |" in table and ARMS["random_token"].label not in table


def test_only_the_plans_comparisons_are_corrected_and_two_seeds_are_not_tested(tmp_path: Path) -> None:
    files = Files(tmp_path)
    for arm, levels in {"uniform": LEVEL, "grail": BETTER, "surprisal": BETTER, "random_token": LIKE}.items():
        for seed in SEEDS:
            files.runs.append([a_run("main", arm, seed, digits(0.5, levels[seed - 1]), regime) for regime in (
                "misconceptions", "slips")])  # fmt: skip
    for seed in (1, 2):
        files.runs.append([a_run("side", "entropy", seed, digits(0.25))])
    text = markdown(Results.read(PLAN, files))
    first, second = text[: text.index("## Regime slips")], text[text.index("## Regime slips") :]

    def p_values(page: str, arm: str) -> list[str]:
        row = next(line for line in page.splitlines() if line.startswith(f"| {ARMS[arm].label} | ") and "[" in line)
        return row.split(" | ")[7:10]

    assert p_values(first, "grail") == ["< 0.001", "< 0.001", "1.000"]
    assert p_values(second, "grail") == ["< 0.001", "-", "1.000"]
    assert p_values(first, "entropy") == ["-", "-", "-"]


def test_an_empty_study_has_a_page(tmp_path: Path) -> None:
    text = markdown(Results.read(PLAN, Files(tmp_path)))
    assert "**Nothing is concluded yet.**" in text and text.count("Nothing has been run.") == 2
    assert "Processor time of the recorded jobs: 0.00 of the plan's 12 core-hours." in text


def test_a_finished_study_is_missing_nothing(tmp_path: Path) -> None:
    plan = replace(PLAN, regimes=(replace(PLAN.regimes[0], side_seeds=(), tuning_seeds=(), measured_seeds=()),))
    results = a_study(tmp_path, {arm: LEVEL for arm in ("uniform", "grail", "surprisal", "random_token")})
    assert missing(replace(results, plan=plan)) == ["Nothing."]
