"""The arms of the third study on responses written by hand, and its page by rule."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from study import work
from study.arms import ARMS
from study.credit import ORACLES
from study.exact import token_advantages
from study.plan import Job
from study.plan3 import CONTRASTS_3, THIRD
from study.report3 import page
from study.results import Results
from study.statistics import holm
from study.tables import p_value
from study.work import Files, settings_digest
from tests.study.test_trainer import TOKENIZER, credited, model_of, response_of, rollouts


def kept(name: str, row: int) -> list[tuple[str, float]]:
    """Tokens of a row with an advantage, rounded to thirds."""
    found = response_of(row, credited(ARMS[name]))
    return [(token, round(3 * value)) for token, value in zip(*found.values(), strict=True) if value]


def test_mask_keeps_the_results_of_right_rows() -> None:
    # "ok 7+5=12;12-3=9;" and "4+4=8;8+1=9;", each with the advantage 2 / 3.
    assert kept("results_mask", 0) == [("1", 2), ("2", 2), ("9", 2)]
    assert kept("results_mask", 3) == [("8", 2), ("9", 2)]
    assert [kept("results_mask", row) for row in (1, 2, 4, 5)] == [[]] * 4
    sizes = [len(kept("random_mask", row)) for row in range(6)]
    assert sizes == [3, 0, 0, 2, 0, 0]
    assert kept("random_mask", 0) != kept("results_mask", 0)


def test_error_place_is_the_first_wrong_token() -> None:
    # 11 for 12: the first digit is right. The third row is cut off.
    assert [kept("error_place", row) for row in (1, 2, 4, 5)] == [[("1", -1)], [], [("7", -1)], [("9", -1)]]
    found = response_of(1, credited(ARMS["error_place"]))
    assert "".join(found["tokens"][: np.flatnonzero(found["values"])[0]]) == "7+5=1"
    assert kept("error_place", 0) == kept("uniform", 0) and len(kept("uniform", 0)) == len(rollouts().responses[0])
    assert kept("mask_and_error", 0) == kept("results_mask", 0) and kept("mask_and_error", 5) == [("9", -1)]


def test_oracle_by_step_sums_over_steps() -> None:
    batch, model = rollouts(), model_of()
    exact = token_advantages(model, TOKENIZER, batch.problems, batch.prompts, batch.responses)
    values = np.array(response_of(0, credited(ARMS["oracle_by_step"], model))["values"])
    tokens = response_of(0, credited(ARMS["oracle_by_step"], model))["tokens"]
    text, end = "".join(tokens), tokens.index(";") + 1
    assert text.startswith("ok 7+5=12;12-3=9;") and exact[0] is not None
    assert values[:end] == pytest.approx(exact[0][:end].sum(), rel=1e-4)
    second = end + tokens[end:].index(";") + 1
    assert values[end:second] == pytest.approx(exact[0][end:second].sum(), rel=1e-4)
    assert values[second:] == pytest.approx(exact[0][second:].sum(), rel=1e-4)
    assert set(ORACLES) == {arm.control for arm in ARMS.values() if "oracle" in arm.name}


def test_oracle_of_mixed_groups_leaves_the_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    both = credited(ARMS["oracle_mixed"]), credited(ARMS["oracle"])
    assert both[0].equal(both[1]), "both groups have both outcomes"
    batch = rollouts()
    batch.rewards_B[3:] = 1.0
    monkeypatch.setattr("tests.study.test_trainer.rollouts", lambda: batch)
    mixed, whole = credited(ARMS["oracle_mixed"]), credited(ARMS["oracle"])
    assert mixed[:3].equal(whole[:3]) and whole[3:].any() and not mixed[3:].any()


def test_step_values_by_hand() -> None:
    # Second group, advantages 2/3, -1/3, -1/3: the first two pass through 8, worth (2/3 - 1/3) / (2 + 1) = 1/9, and the last
    # one through 9, worth (-1/3) / (1 + 1) = -1/6. The rest of a row's advantage falls on the steps after.
    advantages = credited(ARMS["step_values"])
    for row, first, all_of_it in ((3, 1 / 9, 2 / 3), (4, 1 / 9, -1 / 3), (5, -1 / 6, -1 / 3)):
        found = response_of(row, advantages)
        end = found["tokens"].index(";") + 1
        assert found["values"][:end] == pytest.approx([first] * end, abs=1e-6)
        starts = [0, *(place + 1 for place, token in enumerate(found["tokens"]) if token == ";")]
        assert len(starts) == 3 and sum(found["values"][place] for place in starts) == pytest.approx(all_of_it)
    assert not any(response_of(2, advantages)["values"]), "cut off"


def a_page(folder: Path, levels: dict[str, float], name: str = "misconceptions") -> str:
    """With all main seeds of these arms, so many samples of 16 right on average."""
    files, generator = Files(folder), np.random.default_rng(0)
    for arm, level in levels.items():
        for seed in THIRD.regime(name).main_seeds:
            right = generator.binomial(8, level / 16, size=(2, 40))
            row: dict[str, Any] = dict.fromkeys(work.RUN_COLUMNS, 0.5)
            row |= dict(zip(work.JOB_COLUMNS, Job("main", name, arm, seed, 1e-4).key, strict=True))
            row |= {"right_1": "".join(map(str, right[0])), "right_2": "".join(map(str, right[1]))}
            row |= {"accuracy": right.mean() / 8, "job_seconds": 80.0, "versions": "torch 1"}
            files.runs.append([row | {"settings": settings_digest(THIRD, "main")}])
    return page(Results.read(THIRD, files))


def test_the_page_decides_by_the_plans_rules(tmp_path: Path) -> None:
    arms = [arm.name for arm in THIRD.main_arms]
    level = dict.fromkeys([*arms, "random_mask"], 8.0)
    assert "Nothing is concluded yet" in a_page(tmp_path / "some", {"uniform": 8.0, "oracle": 12.0})
    high = a_page(
        tmp_path / "high", level | {"oracle": 14.0, "results_mask": 11.0, "step_values": 11.0, "error_place": 11.0}
    )
    for words in (
        "at least 2 points above the mask, with",
        "localising wrong steps may pay",
        ": above it.",
        "`step_values` is recommended",
    ):
        assert words in high
    same = a_page(tmp_path / "same", level)
    for words in ("the rule is open", "no more localisers", "recommended to nobody", "is not recommended"):
        assert words in same
    # The corrected p-values by SciPy, from the rows.
    rows = [row for row in Files(tmp_path / "same").runs.read() if row["regime"] == "misconceptions"]
    accuracy = {(row["arm"], row["seed"]): float(row["accuracy"]) for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    plain = [stats.ttest_rel(*([accuracy[arm, seed] for seed in seeds] for arm in pair)).pvalue for pair in CONTRASTS_3]
    shown = [line.split(" | ")[4] for line in same.splitlines() if re.match(r"\| .* - .* \| 0.0001 / ", line)]
    assert shown == [p_value(p) for p in holm(plain)]


def test_the_third_plan() -> None:
    jobs = [job for job in THIRD.jobs({}) if job.regime == "misconceptions"]
    repeated = [job for job in THIRD.jobs({}) if job.regime == "choices"]
    assert {(job.kind, job.arm) for job in repeated} == {("start", "-")} | {
        (kind, arm.name) for kind in ("tune", "main") for arm in THIRD.main_arms
    }
    assert {job.seed for job in repeated} == {2001, *range(1, 7)} and len(repeated) == 7 + 7 * (3 + 6)
    tuned = {(job.arm, job.seed, job.rate) for job in jobs if job.kind == "tune"}
    assert len(tuned) == 11 * 2 * 3, "every arm on both seeds at all rates"
    main = [job.arm for job in jobs if job.kind == "main"]
    assert len(main) == 11 * 14 and set(main[: 7 * 14]) == {arm for pair in CONTRASTS_3 for arm in pair} | {"uniform"}
    rates = {("misconceptions", "uniform"): 1e-4, ("misconceptions", "right_only"): 2e-4}
    side = {(job.arm, job.rate) for job in THIRD.jobs(rates) if job.kind == "side"}
    assert side == {("uniform_24", 1e-4), ("right_only_24", 2e-4)}
    assert {job.kind for job in jobs} == {"start", "tune", "main", "side", "alignment"}
