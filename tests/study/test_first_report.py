"""The first study's report: what it concludes, from figures worked out by hand, and that the published page is its output."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from scipy import stats

from study import __main__ as command
from study.first_report import MAIN, METHODS, FirstStudy, conclusions, markdown, write_first_report
from study.statistics import holm

FOLDER = Path(__file__).parents[2] / "docs" / "study"


@pytest.fixture(scope="module")
def study() -> FirstStudy:
    return FirstStudy.read(FOLDER)


def test_the_published_page_is_made_from_the_files_beside_it(study: FirstStudy) -> None:
    assert (FOLDER / "REPORT.md").read_text(encoding="utf-8") == markdown(study), "run python -m study first"


def test_p_values_are_paired_t_tests_with_holms_correction(study: FirstStudy) -> None:
    with (FOLDER / "runs.csv").open() as file:
        runs = list(csv.DictReader(file))

    def accuracies(arm: str) -> list[float]:
        return [float(row["final_accuracy"]) for row in sorted(runs, key=lambda row: row["seed"]) if row["arm"] == arm]

    plain = [stats.ttest_rel(accuracies(arm), accuracies("grpo")).pvalue for arm in MAIN]
    assert list(study.corrected("final_accuracy").values()) == pytest.approx(holm(plain))
    difference = study.difference("oar_g", "final_accuracy")
    assert difference.count == 5
    assert difference.mean == pytest.approx(100 * (sum(accuracies("oar_g")) - sum(accuracies("grpo"))) / 5)


def test_the_page_says_what_the_study_could_not_show(study: FirstStudy) -> None:
    text = markdown(study)
    first = text.index("## What was found")
    assert first < text.index("## Main comparison"), "conclusions come first"
    for wanted in (
        "**No method trained better than Dr. GRPO.**",
        "variant `official`",
        "was never trained",
        "learning rate was not tuned",
        "one warmed-up model",
        "Adam divides",
        "less than half the variance",
        "p by paired t-tests with Holm's correction",
    ):
        assert wanted in text, wanted
    assert "multiple of GRPO" not in text and "seconds" not in text, "no times of arms"


def test_result_tokens_stand_beside_what_token_type_alone_gives(study: FirstStudy) -> None:
    for split in ("all", "last", "not_last"):
        assert float(study.token_figure("result_token", "auroc_results", split)["value"]) == 0.5
        for method in METHODS:
            row = study.token_figure(method, "auroc_results", split)
            assert float(row["low"]) <= float(row["value"]) <= float(row["high"])
    counts = [
        int(study.token_figure("grail", "auroc_results", split)["responses"]) for split in ("last", "not_last", "all")
    ]
    assert counts[0] + counts[1] == counts[2]


def a_study(gains: dict[str, float]) -> FirstStudy:
    """Five seeds; every arm that far above the baseline, give or take."""
    runs = [
        {"arm": arm, "label": arm, "seed": str(seed)}
        | {
            name: str(0.5 + seed / 100 + gains.get(arm, 0.0) + (0.001 * seed * (arm != "grpo")))
            for name in ("final_accuracy", "area", "final_pass", "start_accuracy")
        }
        for arm in ("grpo", *MAIN)
        for seed in range(5)
    ]
    tokens = [
        {
            "method": method,
            "figure": figure,
            "split": split,
            "value": "0.6",
            "low": "0.5",
            "high": "0.7",
            "responses": "9",
        }
        for method in (*METHODS, "result_token", "position")
        for figure in ("auroc_all", "auroc_results")
        for split in ("all", "last", "not_last")
    ]
    return FirstStudy(runs, [], [], tokens)


def test_conclusions_follow_from_the_figures() -> None:
    gains = {"grail_official": 0.03, "grail_robust": -0.03, "oar_g": -0.002, "shuffled": -0.002, "oracle": 0.03}
    said = conclusions(a_study(gains))
    assert len(said) == 5
    assert "No method trained better" not in said[0]
    above, below, open_ = (
        said[0].split(f"{side}: ")[1].split(";")[0] for side in ("above", "below", "no difference shown")
    )
    assert "grail_official (+3.2 [" in above and "oracle" in above
    assert "grail_robust (-2.8 [" in below
    assert "oar_g" not in above + below and "OAR-G" in open_ and "shuffled" in open_
    said = conclusions(a_study(gains | {"grail_official": 0.0}))
    assert said[0].startswith("**No method trained better than Dr. GRPO.**"), "an oracle is no method"


def test_the_command_writes_page_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in FOLDER.glob("*.csv"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    command.main(["first", "--data-dir", str(tmp_path)])
    assert (tmp_path / "REPORT.md").read_bytes() == (FOLDER / "REPORT.md").read_bytes()
    for name in ("learning_curves.png", "differences.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    again = [path.read_bytes() for path in write_first_report(tmp_path)]
    assert [path.read_bytes() for path in write_first_report(tmp_path)] == again
    assert "REPORT.md" in capsys.readouterr().out


def test_the_model_made_anew_is_that_of_then(study: FirstStudy) -> None:
    assert study.disagreement(["grail", "grail_robust", "oar_p", "surprisal"]) < 1e-9
    assert 0.001 < study.disagreement(["oar_g", "oar_g_port"]) < 0.1, "its noise is drawn otherwise"
    moved = [dict(row) for row in study.result_tokens]
    for row in moved:
        if (row["method"], row["figure"], row["split"]) == ("oar_p", "auroc_all", "all"):
            row["value"] = str(float(row["value"]) + 0.4)
    found = FirstStudy(study.runs, study.curves, study.truth, moved)
    assert found.disagreement(["grail", "oar_p"]) == pytest.approx(0.4, abs=1e-9)
