"""Ground truths of any type: read where the meaning is plain, else named with their rows; a run without others stops."""

import datetime
import logging
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch

from grail_advantage import reward
from tests.composed import compose, prepare
from tests.recipe.test_reward import misjudged

# A ground truth, a right box and an incorrect one; verdicts.jsonl has those of JSON's types.
PLAIN = [
    (Decimal("3.50"), "3.5", "350"), (Decimal("1E+2"), "100", "1"), (Fraction(-1, 2), r"-\frac{1}{2}", "2"),
    (b"\\frac{1}{2}", "0.5", "2"), (np.bytes_(b"7"), "7", "55"),
    (("2", "3"), "3, 2", "2"), ([b"5", Decimal("3.50")], "5, 3.5", "3"),
    ({2, 3}, "3, 2", "3"), (pd.Series(["2", "3"]), "2, 3", "2"),
    (np.int64(27), "27", "2"), (np.float16(0.1), "0.1", "0.099976"),
    (np.array("5", object), "5", "6"), (np.array([b"5"]), "5", "53"), (np.str_('["5"]'), "5", "6"), (np.True_, "True", "False"),
    (torch.tensor(12345.678), "12345.678", "12345.677734375"), (torch.tensor([2, 3]), "2, 3", "2"),
]  # fmt: skip


def test_plain_meanings_are_read():
    cases = [(truth, box, 1.0) for truth, box, _ in PLAIN]
    assert misjudged([*cases, *((truth, box, 0.0) for truth, _, box in PLAIN)]) == []


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError


ITSELF = []
ITSELF.append(ITSELF)
UNUSABLE = [
    None, {}, {"answer": "5"}, [], ["5", None], [""], ["5", {"a": 1}], set(), "", r"\boxed{}", "[]", "{}",
    float("nan"), float("inf"), Decimal("NaN"), Decimal("1E+5000"), np.float32("inf"), np.array([1.5, np.nan]),
    np.array(None), np.datetime64("2020-01-01", "ns"), np.zeros(1, [("a", int)])[0], torch.tensor(0.1, dtype=torch.bfloat16),
    pd.NA, pd.NaT, datetime.date(2020, 1, 1), b"\xff\xfe", object(), Unshown(), ITSELF, 10**5000,
    '{"answer": "5"}', "{'answer': 5}", "[5, null]", "[null]", "[None, '5']", "[nan]", "nan", "null", "<NA>", "NaT",
]  # fmt: skip


def test_what_cannot_be_read_is_said_once(monkeypatch, caplog):
    """Also where the response has no box."""
    for truth in UNUSABLE:
        caplog.clear()
        # A warning of this process is repeated for each truth.
        monkeypatch.setattr(reward, "_reported", set())
        for text in ("no box", r"\boxed{5}", r"\boxed{nan}", r"\boxed{0}"):
            result = reward.compute_score("", text, truth, {"index": 7})
            assert (result["score"], result["verify_failed"]) == (
                0.0,
                result["answer_found"],
            )
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert record.getMessage().startswith("row 7: ground_truth is ")


def test_rows_of_a_data_set_are_named_once(caplog):
    check = reward.check_ground_truths
    assert check(["5", None, Decimal("3.5"), *[{}] * 9, "x" * 1001], "here") == [
        1,
        *range(3, 13),
    ]
    assert "here: 11 of 13" in caplog.text
    assert "row 3 ({})" in caplog.text
    assert "row 8" not in caplog.text, "five examples are enough"
    caplog.clear()
    assert check(iter(["5", 6]), "here") == check([], "here") == []
    assert not caplog.records
    # One that can be used is enough.
    assert check([*[None] * 9, "5"], "here") == [*range(9)]
    assert "here: 9 of 10" in caplog.text
    with pytest.raises(
        ValueError, match=r"here: 2 of 2 .*row 0 \(None\), row 1 \(a Unshown"
    ):
        check([None, Unshown()], "here")


def test_runs_with_verl_name_files_and_rows_before_they_start(tmp_path, caplog):
    truths = {
        "good.parquet": ["5"],
        "decimals.parquet": [Decimal("3.50")],
        "some.parquet": ["5", None, "6"],
        "none.parquet": [{"answer": 5}, {"answer": 6}],
        "good.jsonl": ["5", "6"],
        "some.jsonl": ["5", None, "6"],
    }
    for name, values in truths.items():
        table = pd.DataFrame(
            {"reward_model": [{"ground_truth": truth} for truth in values]}
        )
        if "parquet" in name:
            table.to_parquet(tmp_path / name)
        else:
            table.to_json(tmp_path / name, orient="records", lines=True)
    function = "reward.custom_reward_function.path"
    val_files = f"data.val_files=[{tmp_path}/good.parquet]"

    def start(train, *overrides):
        """The warnings of a run with this training file."""
        caplog.clear()
        train_files = f"data.train_files={tmp_path}/{train}"
        prepare(compose("grail_trainer", [train_files, val_files, *overrides]))
        return [message for message in caplog.messages if "ground truths" in message]

    # verl itself names a file that is missing.
    for name in ("good.jsonl", "decimals.parquet", "missing.parquet"):
        assert start(name) == []
    for name in ("some.parquet", "some.jsonl"):
        (message,) = start(name)
        assert message.startswith(f"data.train_files={tmp_path}/{name}: 1 of 3")
        assert "row 1 (None)" in message
    for reader in ("algorithm.adv_estimator=grpo", f"{function}=pkg://recipe.reward"):
        with pytest.raises(ValueError, match=r"none\S*: 2 of 2 .*row 0 \(.*'answer': 5"):
            start("none.parquet", reader)
    # Somebody's own reward function may read anything.
    assert start("none.parquet", f"{function}=mine.py") == []
