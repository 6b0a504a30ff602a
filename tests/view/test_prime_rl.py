"""The page of a prime-rl run, from files as its trainer writes them (``token_export.py``, commit 559b447)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grail_advantage.view.dump.files import read_dump
from grail_advantage.view.page.prime_rl import convert, main
from tests.core.tiny_models import char_tokenizer, encode
from tests.view.test_page import index_of

PROMPT, OTHER = "Two plus three?", "Nine?"
RIGHT, WRONG = r"It is \boxed{5}.<end>", r"Six, \boxed{6}<end>"
FLOATS = ("trainer_logprobs", "log_importance_ratio", "importance_ratio", "prob_delta", "ce_weights", "ref_kl_weights")


def record(prompt: str, response: str, advantage: float, place: int, **columns: Any) -> dict[str, Any]:
    """A line of the file, with the fields of ``TokenExporter.export``; values differ from token to token."""
    prompt_ids, response_ids = encode(prompt), encode(response)
    count, total = len(response_ids), len(prompt_ids) + len(response_ids)

    def of_response(value: Any, elsewhere: Any) -> list[Any]:
        return [elsewhere] * len(prompt_ids) + [value] * count

    values: dict[str, Any] = {
        "token_ids": prompt_ids + response_ids,
        "position_ids": list(range(total)),
        "loss_mask": of_response(True, False),
        "advantages": of_response(advantage, 0.0),
        "inference_logprobs": [0.0] * len(prompt_ids) + [-0.1 * at for at in range(count)],
        "entropy": [0.5] * len(prompt_ids) + [0.01 * at for at in range(count)],
        "mismatch_kl": [0.001 * at for at in range(total)],
        **{name: [None] * total for name in FLOATS},
        "is_masked": of_response(False, False),
        "is_masked_high": of_response(False, False),
        "is_masked_low": of_response(False, False),
        "rl_weights": [None] * total,
    } | columns
    facts = {"schema_version": 1, "step": 3, "rank": 0, "micro_step": 0, "micro_sequence_idx": place}
    return {**facts, "export_sequence_idx": place, "env_name": "gsm8k", **values}


def write(run: Path, step: int, *ranks: list[dict[str, Any]], stable: bool = True) -> None:
    folder = run / "token_exports" / f"step_{step}"
    folder.mkdir(parents=True)
    for rank, records in enumerate(ranks):
        lines = [
            json.dumps({**each, "step": step, "rank": rank}, separators=(",", ":"), allow_nan=False) for each in records
        ]
        (folder / f"rank_{rank}.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    if stable:
        (folder / "STABLE").touch()


@pytest.fixture
def model(tmp_path: Path) -> str:
    char_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_rows_are_those_of_the_export(tmp_path: Path, model: str) -> None:
    right, wrong = record(PROMPT, RIGHT, 0.5, 0), record(PROMPT, WRONG, -0.5, 1)
    # A second turn: the environment wrote five tokens; and tokens that the loss leaves out, weighs, or has no value for.
    several = record(OTHER, "Ten. No? Eleven.<end>", -0.25, 0)
    for name, value in (("loss_mask", False), ("advantages", 0.0)):
        several[name][len(OTHER) + 4 : len(OTHER) + 9] = [value] * 5
    several["is_masked"][-1], several["mismatch_kl"][-2] = True, None
    several["rl_weights"] = [0.0 if not trains else 2.0 for trains in several["loss_mask"]]
    write(tmp_path, 3, [right, wrong], [several])
    write(tmp_path, 12, [record(OTHER, RIGHT, 0.0, 0)])
    write(tmp_path, 13, [record(OTHER, RIGHT, 0.0, 0)], stable=False)
    convert(tmp_path, tmp_path / "out", model)

    dump = read_dump(tmp_path / "out" / "tokens")
    assert dump.steps == [3, 12] and not dump.problems
    rows = list(dump)
    assert [(row.step, row.row, row.key, row.group, row.outcome) for row in rows] == [
        *((3, 0, "0_0", 0, "right"), (3, 1, "0_1", 0, "wrong"), (3, 2, "1_0", 1, "wrong"), (12, 0, "0_0", 0, None)),
    ]
    for row, prompt, response, exported in zip(rows, (PROMPT, PROMPT), (RIGHT, WRONG), (right, wrong), strict=False):
        assert (row.prompt, row.response) == (prompt, response.removesuffix("<end>"))
        assert (row.prompt_ids.tolist(), row.token_ids_T.tolist()) == (encode(prompt), encode(response))
        assert row.answer == ("5" if exported is right else "6") and row.mask_T.all() and (row.weight_T == 1).all()
        for column, name in (
            *(("base_advantage_T", "advantages"), ("advantage_T", "advantages"), ("score_T", "mismatch_kl")),
            *(("old_log_prob_T", "inference_logprobs"), ("entropy_T", "entropy")),
        ):
            assert getattr(row, column).tolist() == np.float32(exported[name][len(PROMPT) :]).tolist(), column
    row, inside = rows[2], np.array(several["loss_mask"][len(OTHER) :])
    assert (row.prompt, row.response, len(row)) == (OTHER, "Ten. No? Eleven.", 17)
    assert inside.nonzero()[0].tolist() == [0, 1, 2, 3, *range(9, 17)]
    assert row.mask_T.tolist() == [*inside[:-1].tolist(), False]
    assert row.weight_T.tolist() == np.where(inside, 2.0, 0.0).tolist()
    assert row.advantage_T.tolist() == np.where(inside, -0.5, 0.0).tolist()
    assert np.isnan(row.score_T).tolist() == [False] * (len(row) - 2) + [True, False]


def test_the_page(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, [record(PROMPT, RIGHT, 0.5, 0), record(PROMPT, WRONG, -0.5, 1)])
    assert main([str(tmp_path), "--model", model]) == 0
    page = tmp_path / "token_report" / "report.html"
    assert capsys.readouterr().out == f"{page}\n" and page.exists()
    assert index_of(page.parent)["rows"]["outcome"] == ["right", "wrong"]


def test_what_is_refused(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--model", model]) == 1
    assert "set trainer.enable_token_export = true in prime-rl" in capsys.readouterr().err
    write(tmp_path, 1, [{**record(PROMPT, RIGHT, 0.5, 0), "schema_version": 2}])
    assert main([str(tmp_path), "--model", model]) == 1
    assert "rank_0.jsonl:1: its schema_version must be 1" in capsys.readouterr().err
