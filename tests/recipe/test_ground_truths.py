"""Ground truths of any type: read where the meaning is plain, else named once with their rows; a run without others stops."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from grail_advantage import reward
from recipe.evaluate.sampling import load_benchmarks
from tests.composed import compose, prepare
from tests.recipe.test_reward import judge


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(reward, "_truths", {True: 0, False: 0})
    return


PLAIN: list[tuple[Any, str, str]] = [  # ground truth, a right box, a wrong one
    (Decimal("3.50"), "3.5", "350"), (Decimal("27"), "27", "2"), (Decimal("1E+2"), "100", "1"),
    (Decimal("-0.5"), r"-\frac12", "0.5"),
    (Fraction(3, 4), "0.75", "3"), (Fraction(-1, 2), r"-\frac{1}{2}", "2"), (Fraction(8, 2), "4", "8"),
    (b"5", "5", "53"), (bytearray(b"5"), "5", "53"), (memoryview(b"5"), "5", "53"), (b"\\frac{1}{2}", "0.5", "2"),
    (np.bytes_(b"7"), "7", "55"),
    ([5], "5", "6"), (["5"], "5", "6"), (("2", "3"), "3, 2", "2"), ([["5"]], "5", "6"), ([b"5"], "5", "53"),
    ([Decimal("3.50")], "3.5", "3"),
    ({2, 3}, "3, 2", "3"), (frozenset({"5"}), "5", "6"), (pd.Series(["2", "3"]), "2, 3", "2"),
    (np.int64(27), "27", "2"), (np.float16(0.1), "0.1", "0.099976"), (np.float32(12345.678), "12345.678", "12345.677734375"),
    (np.array([0.1], np.float16), "0.1", "1"), (np.longdouble(2.5), "2.5", "2"), (np.array(5), "5", "6"),
    (np.array("5", object), "5", "6"),
    (np.str_('["5"]'), "5", "6"), (np.array([b"5"]), "5", "53"), (np.ma.array([2, 3]), "2,3", "2"),
    (torch.tensor(5), "5", "6"), (torch.tensor(12345.678), "12345.678", "12345.677734375"), (torch.tensor([2, 3]), "2, 3", "2"),
    (pa.scalar("5"), "5", "6"), (pa.scalar(Decimal("3.50")), "3.5", "3"), (1 + 2j, "1+2i", "1"), (-1j, "-i", "1"),
    (True, r"\text{True}", "False"), (np.True_, "True", "False"), (1e22, "10^{22}", "22"), (2.0, "2", "20"),
    (5, "5", "6"), (0.5, r"\frac{1}{2}", "5"), (1e-07, "10^{-7}", "7"), (np.array(["$2$", "3"], object), "3,2", "2"),
    ('["5"]', "5", "6"), ("['5']", "5", "6"), ('["2", "3"]', "3, 2", "2"), ('"5"', "5", "6"), (r'["\frac{1}{2}"]', "0.5", "2"),
    (r'["\\frac{1}{2}"]', "0.5", "2"), (r"['$2n-2$']", "2n-2", "2n"), (r'["1\\,000", "\\theta"]', r"1000, \theta", "1000"),
    ("[5]", "5", "6"), ("[1, 2]", "[1, 2]", "(1, 2)"), ("f'(x)", "f'(x)", "f(x)"), ("None", r"\text{none}", "5"),
    (r"\{\}", r"\emptyset", "5"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("truth", "right", "wrong"), PLAIN, ids=[f"{n}-{type(each[0]).__name__}" for n, each in enumerate(PLAIN)]
)
def test_plain_meanings_are_read(truth: Any, right: str, wrong: str) -> None:
    results = [judge(truth, box) for box in (right, wrong)]
    assert [(result["score"], result["verify_failed"]) for result in results] == [(1.0, 0.0), (0.0, 0.0)]


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError


ITSELF: list[Any] = []
ITSELF.append(ITSELF)
UNUSABLE: list[Any] = [
    None, {}, {"answer": "5"}, [], [None], ["5", None], [""], ["5", {"a": 1}], set(), "", "  ", "$$", r"\boxed{}", "[]", "{}",
    float("nan"), float("inf"), Decimal("NaN"), Decimal("Infinity"), Decimal("1E+5000"), complex("nan"), np.nan,
    np.float32("inf"),
    np.array([]), np.array([1.5, np.nan]), np.array(None), np.ma.masked, np.datetime64("2020-01-01", "ns"),
    np.timedelta64(5, "s"),
    np.zeros(1, [("a", int)])[0], torch.tensor(0.1, dtype=torch.bfloat16), torch.tensor(float("nan")), pd.NA, pd.NaT,
    pd.Timestamp("2020"), datetime.date(2020, 1, 1), b"\xff\xfe", b"", object(), Unshown(), ITSELF, 10**5000,
    '{"answer": "5"}', "{'answer': 5}", "[5, null]", "[null]", "[None, '5']", "[nan]", "nan", "NaN", "null", "<NA>", "NaT",
    "b'5'", "Decimal('3.50')", "Fraction(1, 2)", "np.float64(3.5)", "array(['5'], dtype=object)", str(object()),
]  # fmt: skip


@pytest.mark.parametrize("truth", UNUSABLE, ids=[f"{n}-{type(each).__name__}" for n, each in enumerate(UNUSABLE)])
def test_what_cannot_be_read_is_said(truth: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Once for each process, also where the response has no box."""
    for text in ("no box", r"\boxed{5}", r"\boxed{nan}", r"\boxed{0}"):
        result = reward.compute_score("", text, truth, {"index": 7})
        assert (result["score"], result["verify_failed"]) == (0.0, result["answer_found"])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.getMessage().startswith("row 7: ground_truth is ")


def test_a_process_whose_ground_truths_are_all_unreadable_stops() -> None:
    for _ in range(reward.ENOUGH - 1):
        reward.compute_score("", r"\boxed{5}", None)
    with pytest.raises(ValueError, match="none of the first 256 ground truths can be read, such as None"):
        reward.compute_score("", r"\boxed{5}", None)


def test_one_that_can_be_read_keeps_a_process_going() -> None:
    assert judge("5", "5")["score"] == 1.0
    for _ in range(2 * reward.ENOUGH):
        reward.compute_score("", r"\boxed{5}", None)


def test_rows_of_a_data_set_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    assert reward.check_ground_truths(["5", None, Decimal("3.5"), *[{}] * 9, "x" * 1001], "here") == [1, *range(3, 13)]
    (record,) = caplog.records
    assert "here: 11 of 13 ground truths" in record.getMessage() and "row 1 (None), row 3 ({})" in record.getMessage()
    assert "row 8" not in record.getMessage()
    caplog.clear()
    assert reward.check_ground_truths(iter(["5", 6]), "here") == reward.check_ground_truths([], "here") == []
    assert not caplog.records
    with pytest.raises(ValueError, match=r"here: 2 of 2 .*row 0 \(None\), row 1 \(a Unshown that cannot be shown"):
        reward.check_ground_truths([None, Unshown()], "here")


def written(file: Path, truths: list[Any]) -> Path:
    rows = [{"prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": truth}} for truth in truths]
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_runs_with_verl_name_files_and_rows_before_they_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, suffix: str
) -> None:
    good, some = written(tmp_path / f"good{suffix}", ["5", "6"]), written(tmp_path / f"some{suffix}", ["5", None, "6"])
    none = written(tmp_path / f"none{suffix}", [{"answer": 5}, {"answer": 6}])

    def start(train: Path, *overrides: str) -> list[str]:
        caplog.clear()
        required = [
            "actor_rollout_ref.actor.use_dynamic_bsz=True",
            "actor_rollout_ref.rollout.n=4",
        ]
        files = [f"data.train_files={train}", f"data.val_files=[{good}]"]
        prepare(compose("grail_trainer", [*required, *files, *overrides]))
        return [record.getMessage() for record in caplog.records if "ground truths" in record.getMessage()]

    assert start(good) == []
    for estimator in ("grail", "grpo"):
        (message,) = start(some, f"algorithm.adv_estimator={estimator}")
        assert (
            message.startswith(f"data.train_files={some}: 1 of 3 ground truths cannot be used")
            and "row 1 (None)" in message
        )
        with pytest.raises(ValueError, match=r"none\S*: 2 of 2 ground truths cannot be used.*row 0 \(.*'answer': 5"):
            start(none, f"algorithm.adv_estimator={estimator}")
    assert start(none, "reward.custom_reward_function.path=mine.py") == []  # which may read anything
    with pytest.raises(ValueError, match="cannot be used"):
        start(none, "reward.custom_reward_function.path=pkg://grail_advantage.reward")
    assert start(tmp_path / "missing.parquet") == []  # verl says so
    assert start(written(tmp_path / "decimals.parquet", [Decimal("3.50"), Decimal("27")])) == []


def test_evaluation_names_rows_and_refuses_a_benchmark_without_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path / "amc23.parquet", ["5", "nan", "6"])
    assert list(load_benchmarks(["amc23"], tmp_path)["gold"]) == ["5", "nan", "6"]
    (record,) = caplog.records
    assert "amc23.parquet: 1 of 3" in record.getMessage() and "row 1 ('nan')" in record.getMessage()
    written(tmp_path / "amc23.parquet", ["", "nan"])
    with pytest.raises(ValueError, match=r"amc23\.parquet: 2 of 2"):
        load_benchmarks(["amc23"], tmp_path)
