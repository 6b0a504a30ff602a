"""The token dump: what is read is what was written, older files too; a damaged one costs itself, and a disk nothing else."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grail_advantage import dump as dump_module
from grail_advantage.dump import (
    DumpHeader,
    DumpOptions,
    MetricsFile,
    StepDump,
    read_dump,
    remove_steps,
    write_received,
    write_step,
)
from tests import hosts
from tests.dumps import changed, dump_row, received_header, table_of

OPTIONS = {"gate": "wrong", "statistics": None, "reshaper_options": {"sharpness": 0.5}}
OF_RUN = {"reshaper": "log_zscore", "model": "/models/a", "temperature": 0.8, "rows_in_step": 8, "answer": "hashes"}
HEADER = DumpHeader(step=3, method="grail", options=OPTIONS, special_tokens={151645: "<|im_end|>"}, **OF_RUN)


def received(keys: list[str], length: int = 2, **columns: Any) -> pa.Table:
    one, nothing = [[0.5] * length] * len(keys), [None] * len(keys)
    values = {"key": keys, "updates": [[0]] * len(keys), "received": one, "clipped": one}
    values |= {"by_update": [[each] for each in one], "clipped_by_update": nothing, "effect": nothing, **columns}
    return pa.table(values, schema=dump_module.RECEIVED_SCHEMA)


class TestReading:
    def test_header_and_rows(self, tmp_path: Path) -> None:
        """With every column, those of several methods included."""
        labels = [{"steps": [[0, 2], [2, 7]], "wrong_step": [2, 7]}, *[{}] * (hosts.COUNT - 1)]
        texts = [f"{row} \u202e" for row in range(hosts.COUNT)]
        rollouts = hosts.plain_rollouts(keys=texts)
        facts = {**rollouts.facts, "labels": labels, **dict.fromkeys(("id", "ground_truth"), texts)}
        others = {name: hosts.signal_of(name) for name in ("step_values", "surprisal")}
        table = hosts.plain_table(hosts.signal_of("grail"), replace(rollouts, facts=facts), others=others)
        header = replace(HEADER, update=1)
        path = write_step(tmp_path, header, table)
        assert path.name == "step_000003_update_1.parquet" and list(tmp_path.iterdir()) == [path]
        hosts.assert_same(hosts.dumped_table(tmp_path), table)
        dump = read_dump(tmp_path)
        rows = list(dump)
        assert dump.problems == [] and dump.steps == [3] and dump.files[0].header == header
        assert {(row.step, row.update) for row in rows} == {(3, 1)}
        hosts.assert_same(table_of(rows), table)
        assert rows[0].labels == labels[0] and rows[-1].labels == {"tool": [[12, 23]]}
        frame = pd.read_parquet(path)
        assert frame["weight"][0].dtype == np.float32 and list(frame["key"]) == texts

    def test_every_float32_keeps_its_bits(self, tmp_path: Path) -> None:
        """Among them subnormal ones, infinities and NaNs with a payload."""
        bits = np.random.default_rng(1).integers(0, 2**32, size=20_000, dtype=np.uint32)
        row = changed(dump_row(np.zeros(len(bits)), tokens=[""] * len(bits)), weight_T=bits.view(np.float32))
        write_step(tmp_path, HEADER, table_of([row]))
        (read,) = read_dump(tmp_path)
        np.testing.assert_array_equal(read.weight_T.view(np.uint32), bits)

    def test_a_table_has_what_was_received_by_key(self, tmp_path: Path) -> None:
        for step in (1, 2):
            write_step(tmp_path, replace(HEADER, step=step), table_of([dump_row([1.0, 2.0], key=key) for key in "abc"]))
        effect = [[0.25, math.nan], [1.0, 2.0]]
        write_received(tmp_path, received_header(2), received(["c", "a"], effect=effect, received=effect))
        dump = read_dump(tmp_path)
        table = dump.table(["received", "key", "effect", "step"])
        assert table.column_names == ["received", "key", "effect", "step"] and len(table) == 6
        assert table["effect"].to_pylist()[:5] == [None] * 3 + [[1.0, 2.0], None]
        assert dump.table(["weight"], steps=[2])["weight"].to_pylist() == [[1.0, 2.0]] * 3
        assert [row.effect_T is None for row in dump.rows([2])] == [False, True, False]
        (first, _, _) = dump.rows([2])
        assert (first.received_T.tolist(), first.by_update_KT.tolist()) == ([1.0, 2.0], [[0.5, 0.5]])
        assert first.clipped_by_update_KT is None and first.rollout_log_probs_T is None

    def test_an_older_folder_has_null_columns(self, tmp_path: Path) -> None:
        """As schema_version 4, and 1 of what was received, wrote them."""
        own = table_of([dump_row([1.0, 2.0], key="a")])
        own = own.append_column("step", pa.array([3])).append_column("update", pa.array([0]))
        step = {"grail_advantage": json.dumps({"schema_version": 4, "step": 3, "method": "grail"})}
        arrived = {"grail_advantage_received": json.dumps({**received_header(3), "schema_version": 1})}
        old = own.drop_columns(["rollout_log_probs"]).replace_schema_metadata(step)
        pq.write_table(old, tmp_path / "step_000003.parquet")
        old = received(["a"]).drop_columns(["clipped_by_update", "effect"]).replace_schema_metadata(arrived)
        pq.write_table(old, tmp_path / "received_000003.parquet")
        dump = read_dump(tmp_path)
        (read,) = dump
        assert dump.problems == [] and dump.files[0].header == DumpHeader(step=3, method="grail")
        assert read.weight_T.tolist() == [1.0, 2.0] and read.by_update_KT.tolist() == [[0.5, 0.5]]
        assert read.rollout_log_probs_T is read.clipped_by_update_KT is read.effect_T is None
        assert dump.receipts() == [received_header(3)]

    def test_a_damaged_file_costs_itself_and_is_named(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        write_step(tmp_path, replace(HEADER, step=4), table_of([dump_row([1.0], row=7)]))
        path = write_step(tmp_path, HEADER, table_of([dump_row([1.0])]))
        content, table = path.read_bytes(), pq.read_table(path)
        newer = {"grail_advantage": json.dumps({"schema_version": 99})}
        for other in (
            *(content[:-20], b"", b"no parquet", content[: len(content) // 2]),
            *(table.replace_schema_metadata({}), table.replace_schema_metadata(newer)),
        ):
            if isinstance(other, bytes):
                path.write_bytes(other)
            else:
                pq.write_table(other, path)
            caplog.clear()
            dump = read_dump(tmp_path)
            assert [row.row for row in dump] == [row.row for row in dump] == [7] and len(dump.table(["weight"])) == 1
            (problem,) = dump.problems
            assert str(path) in problem and problem in caplog.text


class TestWriting:
    def test_what_fails_leaves_the_file_that_was_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(file: int) -> None:
            raise OSError(28, "No space left on device")

        path = write_step(tmp_path, HEADER, table_of([dump_row([1.0])]))
        monkeypatch.setattr(dump_module.os, "fsync", fails)
        with pytest.raises(OSError, match="No space"):
            write_step(tmp_path, HEADER, table_of([dump_row([2.0])]))
        assert [row.weight_T.item() for row in read_dump(tmp_path)] == [1.0] and list(tmp_path.iterdir()) == [path]

    def test_a_resumed_run_removes_its_steps_and_nothing_else(self, tmp_path: Path) -> None:
        for step, update in ((1, 0), (9, 0), (10, 0), (10, 3), (11, 0)):
            write_step(tmp_path, replace(HEADER, step=step, update=update), table_of([]))
        write_received(tmp_path, received_header(10), received([]))
        others = ["notes.txt", "12.jsonl", "step_12.parquet.bak"]
        for name in [*others, ".step_000010.parquet.1.writing"]:
            (tmp_path / name).write_text("mine")
        assert len(remove_steps(tmp_path, 10)) == 4
        assert {path.name for path in tmp_path.iterdir()} == {"step_000001.parquet", "step_000009.parquet", *others}
        assert remove_steps(tmp_path / "nowhere", 0) == read_dump(tmp_path / "nowhere").steps == []

    def test_a_table_of_other_columns_or_lengths_is_refused(self, tmp_path: Path) -> None:
        table = table_of([dump_row([1.0, 2.0]), changed(dump_row([1.0, 2.0]), entropy_T=np.float32([1.0]))])
        text = pa.array(["a", "b"])
        for other in (table, table.drop_columns("mask"), table.set_column(0, "row", text)):
            with pytest.raises((ValueError, KeyError)):
                write_step(tmp_path, HEADER, other)
        assert not list(tmp_path.iterdir())


class TestStepDump:
    def _dump(self, folder: Path) -> StepDump:
        tokenizer = hosts.plain_rollouts().tokenizer
        return StepDump(DumpOptions(folder=folder), tokenizer, updates=1, model="m", temperature=1.0)

    def test_a_disk_that_hangs_costs_one_wait_and_its_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        dump, answers, calls = self._dump(tmp_path), threading.Event(), []
        monkeypatch.setattr(dump_module, "SECONDS", 0.1)
        dump._in_time(lambda: answers.wait(60))
        dump._in_time(lambda: calls.append("while it hangs"))
        assert dump.failed == 2 and calls == [] and len(caplog.messages) == 1
        answers.set()
        dump._disk.join(60)
        dump._in_time(lambda: calls.append("afterwards"))
        assert dump.failed == 2 and calls == ["afterwards"]

    def test_a_full_disk_is_counted_and_said_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        dump = self._dump(tmp_path / "folder")
        (tmp_path / "folder").write_text("no folder")
        rollouts = hosts.plain_rollouts()
        w = hosts.weighed(hosts.signal_of("uniform"), rollouts)
        for step in (1, 2):
            dump.write(step, 0, [w], rows_in_step=len(rollouts))
        assert dump.failed == 2 and len(caplog.messages) == 1 and "training continues" in caplog.text
        (tmp_path / "folder").unlink()
        dump.write(3, 0, [w], rows_in_step=len(rollouts))
        assert dump.failed == 2 and read_dump(tmp_path / "folder").steps == [3]


class TestMetricsFile:
    ONE, TWO, THREE = (json.dumps({"step": step, "data": {"a": step / 2}}).encode() + b"\n" for step in (1, 2, 3))

    @pytest.mark.parametrize(
        ("before", "kept"),
        [
            (None, b""),
            (ONE + TWO + THREE, ONE + TWO),
            (ONE + TWO[:-1], ONE + TWO),  # whole, by an editor
            (ONE + TWO[:9], ONE),  # half
            (ONE + THREE + TWO, ONE + TWO),
            (b'\xff\n[1]\nnull\n{"step": "x"}\n{"step": NaN}\n' + b"[" * 100_000 + b"\n" + ONE, ONE),
        ],
    )
    def test_lines_up_to_the_step_stay(self, tmp_path: Path, before: bytes | None, kept: bytes) -> None:
        path = tmp_path / "run/metrics.jsonl"
        if before is not None:
            path.parent.mkdir()
            path.write_bytes(before)
        file = MetricsFile(path, 2)
        file.add(3, {"a": np.float32(1.5), "b": "text", "c": [1.0], "d": None})
        assert path.read_bytes() == kept + self.THREE and file.failed == 0
        MetricsFile(path, -1)
        assert path.read_bytes() == b"", "a run that begins anew"
