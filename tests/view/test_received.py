"""What tokens received, in its file beside the dump's: written, read along, damaged, in words, and as a command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from grail_advantage.dump import (
    DumpHeader,
    read_dump,
    received_table,
    write_received,
    write_step,
)
from grail_advantage.receipt import Finding, Receipt
from grail_advantage.receipt.report import NOTHING, run_receipt, write
from grail_advantage.receipt.report import main as own_main
from grail_advantage.view.receipt import main
from tests.dumps import dump_row, received_header, table_of

KEYS = ("a_0_0", "a_1_0", "b_0_0")
LENGTHS = (3, 4, 2)
NAN = float("nan")
SCALED = Finding(
    "scaled",
    "update 0: 3 tokens of 1 of 3 responses",
    0.5,
    "every token received 0.5 times what it should",
    (("a_1_0", 2, 0.5, 0.25),),
    "the denominator",
    tokens=3,
)
NOTE = Finding("unknown loss", "all updates", 0.0, "no formula", (), "", False)


def receipt(*findings: Finding) -> Receipt:
    """Of three responses in four optimiser steps, of which the last response was in none; the first one's in two."""
    received_UBT = torch.full((4, 3, 4), NAN)
    received_UBT[0, 0, :3] = torch.tensor([0.5, -1.0, 2.0])
    received_UBT[2, 0, :3] = torch.tensor([0.25, 0.0, 2.0])
    received_UBT[1, 1] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    received_BT = received_UBT.nanmean(dim=0)
    clipped_UBT = torch.where(received_UBT.isfinite(), 0.0, torch.nan)
    clipped_UBT[2, 0, 1] = 1.0
    return Receipt(
        received_BT, clipped_UBT.nanmean(dim=0), received_UBT, received_UBT, clipped_UBT, findings
    )


def header(step: int = 3, update: int = 0, *findings: Finding, **values: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "loss": "vanilla",
        "updates": 4,
        "tokens": 7,
        "clipped": 0.125,
    } | values
    return received_header(
        step, update=update, findings=[each.to_dict() for each in findings], **given
    )


def written(folder: Path, step: int = 3, *findings: Finding, update: int = 0) -> Path:
    rows = [
        dump_row([1.0] * length, step=step, row=place, key=key, update=update)
        for place, (key, length) in enumerate(zip(KEYS, LENGTHS, strict=True))
    ]
    write_step(folder, DumpHeader(step=step, update=update, method="grail"), table_of(rows))
    return write_received(
        folder, header(step, update, *findings), received_table(receipt(), KEYS, LENGTHS)
    )


def test_is_read_beside_the_responses(tmp_path: Path) -> None:
    path = written(tmp_path, update=1)
    assert path.name == "received_000003_update_1.parquet"
    dump = read_dump(tmp_path)
    first, second, third = dump
    assert dump.problems == [] and dump.steps == [3]
    assert first.received_T is not None and first.updates.tolist() == [0, 2]
    assert first.received_T.tolist() == [0.375, -0.5, 2.0]
    assert first.by_update_KT.tolist() == [[0.5, -1.0, 2.0], [0.25, 0.0, 2.0]]
    assert first.clipped_T.tolist() == [0.0, 0.5, 0.0]
    assert first.clipped_by_update_KT.tolist() == [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    assert second.received_T is not None and second.received_T.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert third.updates.tolist() == [] and len(third.received_T) == 2
    assert np.isnan(third.received_T).all() and len(third.by_update_KT) == 0
    assert pq.read_table(path).to_pylist()[0]["by_update"] == [[0.5, -1.0, 2.0], [0.25, 0.0, 2.0]]


def test_a_damaged_file_is_named_and_costs_no_response(tmp_path: Path) -> None:
    path = written(tmp_path, 3, SCALED)
    path.write_bytes(path.read_bytes()[:-20])
    dump = read_dump(tmp_path)
    assert [(row.key, row.received_T) for row in dump] == [(key, None) for key in KEYS]
    assert dump.receipts() == [] and len(dump.problems) == 1 and str(path) in dump.problems[0]


def test_findings_of_a_run_are_put_together() -> None:
    """Mismatches first, those that cover most tokens first."""
    lost = replace(SCALED, name="lost", tokens=5)
    headers = [
        header(1, clipped=0.0, tokens=30),
        header(2, 0, NOTE, SCALED, clipped=0.2, tokens=10),
    ]
    run = run_receipt([*headers, header(2, 1, SCALED, lost)])
    assert (run["receipts"], run["steps"], run["tokens"], run["losses"]) == (3, 12, 47, ["vanilla"])
    assert run["clipped"] == pytest.approx((0.2 * 10 + 0.125 * 7) / 47)
    findings = [
        tuple(each[k] for k in ("name", "step", "update", "receipts", "tokens"))
        for each in run["findings"]
    ]
    assert findings == [("scaled", 2, 0, 2, 6), ("lost", 2, 1, 1, 5), ("unknown loss", 2, 0, 1, 0)]


class TestCommand:
    def test_exit_status_by_severity(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for findings, status in (
            ((), (0, 0, 0)),
            ((NOTE,), (0, 1, 0)),
            ((NOTE, SCALED), (1, 1, 0)),
        ):
            written(tmp_path / "tokens", 1, *findings)
            for severity, expected in zip(("mismatch", "note", "nothing"), status, strict=True):
                assert main([str(tmp_path), "--fail-on", severity]) == expected
        assert main([str(tmp_path)]) == main([str(tmp_path / "tokens")]) == 1
        printed = capsys.readouterr().out
        assert all(
            part in printed
            for part in ("unknown loss", "scaled", "a_1_0", "0.25", "the denominator")
        )

    def test_json_and_the_address_of_each_token(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Tokens are counted from 1, as on the page, whose address counts from 0; there is no -0.0."""
        written(
            tmp_path,
            3,
            replace(SCALED, examples=(("a_1_0", 2, 0.5, -0.0), ("gone", 0, 1.0, 2.0))),
            update=1,
        )
        assert main([str(tmp_path), "--json"]) == 1
        printed = capsys.readouterr().out
        first, second = json.loads(printed)["findings"][0]["examples"]
        assert (first["response"], first["token"], first["intended"]) == (
            "a_1_0",
            3,
            0.5,
        ) and "-0.0" not in printed
        assert first["link"] == "#overlay=received&rollout=3u1.1&token=2" and "link" not in second
        assert main([str(tmp_path)]) == 1
        assert "report.html#overlay=received&rollout=3u1.1&token=2" in capsys.readouterr().out

    def test_the_receipts_of_a_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """As a loop of one's own writes them: by the command alone, and by the one that reads dumps too."""
        path = tmp_path / "receipts.jsonl"
        for step, findings in enumerate(((), (SCALED,))):
            write(path, receipt(*findings), "ppo", step)
        assert own_main([str(path)]) == main([str(path)]) == 1
        whole, again = capsys.readouterr().out.split("Receipt of ")[1:]
        assert whole == again and "a_1_0, token 3" in whole and "ppo" in whole

    def test_nothing_to_read(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([str(tmp_path)]) == NOTHING
        written(tmp_path).write_bytes(b"PAR1 broken")
        assert main([str(tmp_path)]) == NOTHING
        assert "received_000003.parquet" in capsys.readouterr().err

    def test_texts_of_a_file_cannot_act_on_the_terminal(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        evil = "\x1b[31mred\x07\u202e"
        finding = replace(
            SCALED, name=evil, what=evil, where=evil, causes=evil, examples=((evil, 1, 0.5, 0.2),)
        )
        write_received(tmp_path, header(1, 0, finding), received_table(receipt(), KEYS, LENGTHS))
        assert main([str(tmp_path)]) == 1
        printed = capsys.readouterr().out
        assert "red" in printed and not set("\x1b\x07\u202e") & set(printed)
