"""The token dump: responses read back bit for bit, by this reader and by others; what is broken is named and left out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grail_advantage.dump.schema import DumpHeader
from grail_advantage.dump.store import dumped_steps, read_dump, remove_steps, write_step
from tests import hosts
from tests.dumps import dump_row, table_of

NAN = math.nan
HEADER = DumpHeader(
    step=3,
    method="grail",
    options={"gate": "wrong", "statistics": None, "reshaper_options": {"sharpness": 0.5}},
    reshaper="log_zscore",
    model="/models/a",
    temperature=0.8,
    rows_in_step=8,
    special_tokens={151645: "<|im_end|>"},
    written_by="grail_advantage 0",
    answer="hashes",
)


class TestRoundTrip:
    def test_header_and_rows(self, tmp_path: Path) -> None:
        """With every column, those of several methods included."""
        labels = [{"steps": [[0, 2], [2, 7]], "wrong_step": [2, 7]}, *[{}] * (hosts.COUNT - 1)]
        texts = [f"{row} \u202e" for row in range(hosts.COUNT)]
        rollouts = hosts.plain_rollouts(keys=texts)
        rollouts = replace(
            rollouts, facts={**rollouts.facts, "labels": labels, **dict.fromkeys(("id", "ground_truth"), texts)}
        )
        method = hosts.signal_of("grail")
        others = {name: hosts.signal_of(name) for name in ("step_values", "surprisal")}
        table = hosts.plain_table(method, rollouts, others=others)
        header = replace(HEADER, update=1)
        path = write_step(tmp_path / "new", header, table)
        assert path.name == "step_000003_update_1.parquet" and list(path.parent.iterdir()) == [path]
        hosts.assert_same(hosts.dumped_table(path.parent), table)
        dump = read_dump(tmp_path / "new")
        rows = list(dump)
        assert dump.problems == [] and dump.steps == [3] and dump.files[0].header == header
        assert {(row.step, row.update) for row in rows} == {(3, 1)}
        read = table_of(rows)
        tool = read["labels"].to_pylist()[-1]
        assert json.loads(tool) == {"tool": [[12, 23]]} and rows[0].labels == labels[0]
        hosts.assert_same(read, table)
        frame = pytest.importorskip("pandas").read_parquet(path)
        assert frame["weight"][0].dtype == np.float32 and list(frame["key"]) == texts

    def test_every_float32_keeps_its_bits(self, tmp_path: Path) -> None:
        """Among them subnormal ones, infinities and NaNs with a payload."""
        bits = np.random.default_rng(1).integers(0, 2**32, size=20_000, dtype=np.uint32)
        row = replace(dump_row(np.zeros(len(bits)), tokens=[""] * len(bits)), weight_T=bits.view(np.float32))
        write_step(tmp_path, HEADER, table_of([row]))
        (read,) = read_dump(tmp_path)
        np.testing.assert_array_equal(read.weight_T.view(np.uint32), bits)


class TestFiles:
    def test_updates_of_a_step_have_files_of_their_own(self, tmp_path: Path) -> None:
        for update in (0, 1, 10):
            write_step(tmp_path, replace(HEADER, step=1, update=update), table_of([dump_row([float(update)])]))
        write_step(tmp_path, replace(HEADER, step=12), table_of([dump_row([9.0])]))
        dump = read_dump(tmp_path)
        assert [(row.step, row.update) for row in dump] == [(1, 0), (1, 1), (1, 10), (12, 0)]
        assert [row.weight_T.item() for row in dump] == [0.0, 1.0, 10.0, 9.0]
        assert [row.step for row in dump.rows([12])] == [12] and dumped_steps(tmp_path) == dump.steps == [1, 12]

    def test_what_fails_leaves_the_file_that_was_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(table: pa.Table, file: Any, **options: Any) -> None:
            file.write(b"PAR1")
            raise OSError(28, "No space left on device")

        path = write_step(tmp_path, HEADER, table_of([dump_row([1.0])]))
        monkeypatch.setattr(pq, "write_table", fail)
        with pytest.raises(OSError, match="No space"):
            write_step(tmp_path, HEADER, table_of([dump_row([2.0])]))
        assert [row.weight_T.item() for row in read_dump(tmp_path)] == [1.0] and list(tmp_path.iterdir()) == [path]

    def test_a_resumed_run_removes_its_steps_and_nothing_else(self, tmp_path: Path) -> None:
        for step, update in ((1, 0), (9, 0), (10, 0), (10, 3), (11, 0)):
            write_step(tmp_path, replace(HEADER, step=step, update=update), table_of([]))
        others = ["notes.txt", "12.jsonl", "step_12.parquet.bak"]
        for name in [*others, ".step_000010.parquet.1.writing"]:
            (tmp_path / name).write_text("mine")
        removed = ["step_000010.parquet", "step_000010_update_3.parquet", "step_000011.parquet"]
        assert [path.name for path in remove_steps(tmp_path, 10)] == removed
        assert {path.name for path in tmp_path.iterdir()} == {"step_000001.parquet", "step_000009.parquet", *others}
        assert remove_steps(tmp_path / "nowhere", 0) == dumped_steps(tmp_path / "nowhere") == []


class TestBroken:
    def test_a_file_that_is_none_of_a_dump_is_named_and_the_others_are_read(self, tmp_path: Path) -> None:
        write_step(tmp_path, replace(HEADER, step=4), table_of([dump_row([1.0], row=7)]))
        path = write_step(tmp_path, HEADER, table_of([dump_row([1.0], row=row) for row in range(3)]))
        content, table = path.read_bytes(), pq.read_table(path)

        def changed(name: str, values: list) -> pa.Table:
            column = table.schema.field(name)
            return table.set_column(table.column_names.index(name), column, pa.array(values, column.type))

        def headed(header: Any) -> pa.Table:
            text = header if isinstance(header, str) else json.dumps(header)
            return table.replace_schema_metadata({"grail_advantage": text})

        header = json.loads(table.schema.metadata[b"grail_advantage"])
        for other, message in (
            (content[:-20], ""),
            (b"", ""),
            (b"no parquet", ""),
            (table.replace_schema_metadata({}), "its metadata has no header"),
            (headed(header | {"schema_version": 2}), "schema_version is 2; this version reads 4"),
            (headed(header | {"special_tokens": 5}), "special_tokens"),
            (headed([1]), ""),
            (table.drop_columns("weight"), "its columns are others"),
            (table.slice(0, 0), "it holds no responses"),
            (changed("weight", [[1.0], [1.0, 2.0], [1.0]]), "weight has 2 values for 1 tokens"),
            (changed("span", [[0, 1, 2, 3]] * 3), "the span is not four token indices in order, at most 1"),
            (changed("labels", ["{"] * 3), ""),
            (changed("labels", ["[" * 100_000] * 3), "nests too deeply"),
            (headed("[" * 100_000), ""),
        ):
            if isinstance(other, bytes):
                path.write_bytes(other)
            else:
                pq.write_table(other, path)
            dump = read_dump(tmp_path)
            assert [row.row for row in dump] == [row.row for row in dump] == [7]
            (problem,) = dump.problems
            assert problem.startswith(f"{path}: is damaged or no token dump (") and message in problem
            assert len(problem) < len(str(path)) + 300

    def test_a_table_that_the_reader_would_refuse_is_not_written(self, tmp_path: Path) -> None:
        table = table_of([dump_row([1.0, 2.0]), replace(dump_row([1.0, 2.0]), entropy_T=np.float32([1.0]))])
        for other, message in (
            (table, "entropy has 1 values for 2 tokens"),
            (table.drop_columns("mask"), "mask"),
            (table.set_column(0, "row", pa.array(["a", "b"])), "not that of a token dump"),
        ):
            with pytest.raises(ValueError, match=message):
                write_step(tmp_path, HEADER, other)
        assert not list(tmp_path.iterdir())
