"""The token dump: what is read is what was written, older files too; a damaged one costs itself, and a disk nothing else; and a
foreign run's folder, of which nothing acts and through whose links nothing is written."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grail_advantage import dump as of_dump
from grail_advantage.dump import (
    DumpHeader,
    MetricsFile,
    StepDump,
    read_dump,
    remove_steps,
    write_received,
    write_step,
)
from grail_advantage.text_io import visible
from grail_advantage.view.page import write_report
from grail_advantage.view.run import open_run, read_metrics
from grail_advantage.weigh import weigh
from tests import hosts
from tests.core.common import Given
from tests.dumps import dump_row, received_header, table_of

OF_RUN = {
    "reshaper": "log_zscore",
    "model": "/models/a",
    "temperature": 0.8,
    "rows_in_step": 8,
    "answer": "hashes",
}
OPTIONS = {"statistics": None, "reshaper_options": {"sharpness": 0.5}}
HEADER = DumpHeader(
    step=3, method="grail", options=OPTIONS, special_tokens={151645: "<|im_end|>"}, **OF_RUN
)


def received(keys: list[str], **columns: Any) -> pa.Table:
    """What two tokens of each response received in one update."""
    received_T = [0.5, 0.5]
    row = {"updates": [0], "received": received_T, "clipped": received_T, "by_update": [received_T]}
    rows = [{"key": key, **row} for key in keys]
    for name, values in columns.items():
        for place, value in enumerate(values):
            rows[place][name] = value
    return pa.Table.from_pylist(rows, schema=of_dump.RECEIVED_SCHEMA)


def step_file(folder: Path, **changes: Any) -> Path:
    """Write a step's file with one response, of the weights 1 and 2."""
    return write_step(folder, replace(HEADER, **changes), table_of([dump_row([1.0, 2.0])]))


def weights_of(folder: Path) -> list[list[float]]:
    return [row.weight_T.tolist() for row in read_dump(folder)]


class TestReading:
    def test_header_and_rows(self, tmp_path: Path) -> None:
        """With every column, those of several methods included."""
        header = replace(HEADER, update=1)
        labels = [{"steps": [[0, 2], [2, 7]], "wrong_step": [2, 7]}, *[{}] * (hosts.COUNT - 1)]
        # Texts with a sign that changes the direction of writing.
        texts = [f"{row} \u202e" for row in range(hosts.COUNT)]
        rollouts = hosts.plain_rollouts(keys=texts)
        rollouts.facts.update(labels=labels, id=texts, ground_truth=texts)
        by_method = {name: hosts.signal_of(name) for name in ("step_values", "surprisal")}
        table = hosts.plain_table(hosts.signal_of("grail"), rollouts, by_method=by_method)
        path = write_step(tmp_path, header, table)
        assert path.name == "step_000003_update_1.parquet" and list(tmp_path.iterdir()) == [path]
        dump = read_dump(tmp_path)
        rows = list(dump)
        assert dump.problems == [] and dump.files[0].header == header
        assert {(row.step, row.update) for row in rows} == {(3, 1)} and rows[0].labels == labels[0]
        hosts.assert_same(table_of(rows), table)
        # Another reader finds the same.
        frame = pd.read_parquet(path)
        assert frame["weight"][0].dtype == np.float32 and list(frame["key"]) == texts

    def test_a_table_has_what_was_received_by_key(self, tmp_path: Path) -> None:
        responses = table_of([dump_row([1.0, 2.0], key=key) for key in "abc"])
        for step in (1, 2):
            write_step(tmp_path, replace(HEADER, step=step), responses)
        # In step 2, in another order than the responses, and nothing of b.
        effect = [[0.25, math.nan], [1.0, 2.0]]
        arrived = received(["c", "a"], effect=effect, received=effect)
        write_received(tmp_path, received_header(2), arrived)
        dump = read_dump(tmp_path)
        table = dump.table(["received", "key", "effect", "step"])
        assert table.column_names == ["received", "key", "effect", "step"] and len(table) == 6
        assert table["effect"].to_pylist()[:5] == [None] * 3 + [[1.0, 2.0], None]
        first, second, third = dump.rows([2])
        assert first.received_T.tolist() == [1.0, 2.0]
        assert first.by_update_KT.tolist() == [[0.5, 0.5]] and first.clipped_by_update_KT is None
        assert second.effect_T is None and third.effect_T is not None

    def test_older_and_newer_files(self, tmp_path: Path) -> None:
        """As schema_version 4 and 5, and 1 of what was received, wrote them; a later version's is named."""

        def write(file: str, table: pa.Table, name: str, **record: Any) -> None:
            table = table.replace_schema_metadata({name: json.dumps(record)})
            pq.write_table(table, tmp_path / f"{file}.parquet")

        written = table_of([dump_row([1.0, 2.0], key="a")]).drop_columns(["rollout_log_probs"])
        for column, number in (("step", 3), ("update", 0)):
            written = written.append_column(column, pa.array([number]))
        for version, step, method in ((4, 3, "grail"), (99, 4, "grail"), (5, 5, "gigpo")):
            record = {"schema_version": version, "step": step, "method": method}
            # One response, and in step 5 none.
            write(f"step_00000{step}", written[: 5 - step], "grail_advantage", **record)
        arrived = received(["a"]).drop_columns(["clipped_by_update", "effect"])
        header = received_header(3)
        write("received_000003", arrived, "grail_advantage_received", schema_version=1, **header)
        dump = read_dump(tmp_path)
        (read,) = dump
        (problem,) = dump.problems
        assert "step_000004.parquet" in problem
        assert dump.files[0].header == DumpHeader(step=3, method="grail")
        assert dump.files[2].header == DumpHeader(step=5, method="gigpo", gave_advantages=True)
        assert read.weight_T.tolist() == [1.0, 2.0] and read.by_update_KT.tolist() == [[0.5, 0.5]]
        assert read.rollout_log_probs_T is read.clipped_by_update_KT is read.effect_T is None
        assert dump.receipts() == [header]


class TestWriting:
    def test_what_fails_leaves_the_file_that_was_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = step_file(tmp_path)
        # One entropy for two tokens, and no mask.
        uneven = table_of([dump_row([3.0, 4.0], entropy_T=[1.0])])
        for refused in (uneven, table_of([dump_row([3.0])]).drop_columns("mask")):
            with pytest.raises((ValueError, KeyError)):
                write_step(tmp_path, HEADER, refused)

        def fail(_: int) -> None:
            raise OSError("the disk is full")

        monkeypatch.setattr(of_dump.os, "fsync", fail)
        with pytest.raises(OSError, match="full"):
            write_step(tmp_path, HEADER, table_of([dump_row([3.0])]))
        assert weights_of(tmp_path) == [[1.0, 2.0]] and list(tmp_path.iterdir()) == [path]

    def test_a_resumed_run_removes_its_steps_and_nothing_else(self, tmp_path: Path) -> None:
        for step, update in ((1, 0), (9, 0), (10, 0), (10, 3), (11, 0)):
            step_file(tmp_path, step=step, update=update)
        write_received(tmp_path, received_header(10), received([]))
        unrelated = {"notes.txt", "12.jsonl", "step_12.parquet.bak"}
        for name in (*unrelated, ".step_000010.parquet.1.writing"):
            (tmp_path / name).write_text("mine")
        # Three files of responses, and one of what they received.
        assert len(remove_steps(tmp_path, 10)) == 4
        earlier = {"step_000001.parquet", "step_000009.parquet"}
        assert {path.name for path in tmp_path.iterdir()} == earlier | unrelated
        assert remove_steps(tmp_path / "nowhere", 0) == read_dump(tmp_path / "nowhere").steps == []

    def test_a_disk_that_fails_or_hangs_costs_its_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """And, if it hangs, one wait; it is said once."""
        rollouts = hosts.plain_rollouts()
        folder = tmp_path / "folder"
        options = of_dump.DumpOptions(folder=folder)
        dump = StepDump(options, rollouts.tokenizer, updates=1, model="m", temperature=1.0)
        part = weigh(rollouts, hosts.signal_of("uniform"), Given())
        # A file is where the folder should be, and then it is not.
        folder.write_text("no folder")
        for step in (1, 2):
            dump.write(step, 0, [part], rows_in_step=len(rollouts))
        assert dump.failed == 2
        folder.unlink()
        dump.write(3, 0, [part], rows_in_step=len(rollouts))
        assert dump.failed == 2 and read_dump(folder).steps == [3]
        # The disk hangs: the file that waits is lost, and the next one is not tried.
        monkeypatch.setattr(of_dump, "SECONDS", 0.1)
        answers = threading.Event()
        calls = []
        dump._in_time(lambda: answers.wait(60))
        dump._in_time(lambda: calls.append("while it hangs"))
        assert dump.failed == 4 and calls == [] and len(caplog.messages) == 1
        answers.set()
        dump._disk.join(60)
        dump._in_time(lambda: calls.append("afterwards"))
        assert dump.failed == 4 and calls == ["afterwards"]


ONE, TWO, THREE = (
    json.dumps({"step": step, "data": {"a": step / 2}}).encode() + b"\n" for step in (1, 2, 3)
)
BROKEN = b'\xff\n[1]\nnull\n{"step": "x"}\n{"step": NaN}\n' + b"[" * 100_000 + b"\n"


def test_lines_of_metrics_up_to_the_step_stay(tmp_path: Path) -> None:
    """The last one may be whole, by an editor, or half."""
    path = tmp_path / "run/metrics.jsonl"
    MetricsFile(path, -1).add(3, {"a": np.float32(1.5), "b": "text", "c": [1.0], "d": None})
    assert path.read_bytes() == THREE
    for lines, remaining in (
        (ONE + TWO[:-1], ONE + TWO),
        (ONE + TWO[:9], ONE),
        (ONE + THREE + TWO, ONE + TWO),
        (BROKEN + ONE, ONE),
    ):
        path.write_bytes(lines)
        file = MetricsFile(path, 2)
        file.add(3, {"a": np.float32(1.5)})
        assert path.read_bytes() == remaining + THREE and file.failed == 0
    # A run that begins anew.
    MetricsFile(path, -1)
    assert path.read_bytes() == b""


def test_metrics_are_strict_json(tmp_path: Path) -> None:
    """Which has no NaN and no infinity: such a figure is null, and is read as NaN."""
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path, -1).add(3, {"a": math.nan, "b": -math.inf, "c": np.float32("inf"), "d": 1.5})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    data = json.loads(path.read_text(), parse_constant=refuse)["data"]
    assert data == {**dict.fromkeys("abc"), "d": 1.5}
    figures = read_metrics(path, [])
    assert math.isnan(figures["a"][3]) and figures["d"] == {3: 1.5}


def test_no_visible_character_acts() -> None:
    text = visible("".join(map(chr, range(sys.maxunicode + 1))), breaks=False)
    text.encode()
    assert {unicodedata.category(sign) for sign in set(text) - {"\u200d"}}.isdisjoint(
        ["Cc", "Cf", "Cs", "Zl", "Zp"]
    )
    assert visible(text, breaks=False) == text


def test_links_and_pipes_in_a_foreign_folder(tmp_path: Path) -> None:
    """Nothing is written through a link, and what is no plain file, which may have no end, is not read."""
    precious = tmp_path / "precious"
    run = tmp_path / "run"
    page = tmp_path / "run/report.html"
    precious.write_text("precious")
    path = step_file(run / "tokens")
    path.unlink()
    for link in (page, path):
        link.symlink_to(precious)
    step_file(run / "tokens")
    write_report(run)
    assert precious.read_text() == "precious" and not path.is_symlink() and not page.is_symlink()
    os.mkfifo(run / "metrics.jsonl")
    opened = open_run(run)
    assert opened.metrics == {} and opened.dump.steps == [3] and len(list(opened.dump)) == 1
