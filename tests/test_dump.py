"""The token dump: what is read is what was written, older files too; a damaged one costs itself, and a disk nothing else; and a
foreign run's folder, of which nothing acts and through whose links nothing is written."""

import json
import math
import os
import sys
import threading
import unicodedata
from dataclasses import replace

import numpy as np
import pandas as pd
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
from grail_advantage.text_io import visible
from grail_advantage.view.page import write_report
from grail_advantage.view.run import open_run, read_metrics
from grail_advantage.weigh import weigh
from tests import hosts
from tests.core.common import Given
from tests.dumps import dump_row, received, received_header, table_of

HEADER = DumpHeader(
    step=3,
    method="grail",
    options={"statistics": None, "reshaper_options": {"sharpness": 0.5}},
    special_tokens={151645: "<|im_end|>"},
    reshaper="log_zscore",
    model="/models/a",
    temperature=0.8,
    rows_in_step=8,
    answer="hashes",
)


class TestReading:
    def test_header_and_rows(self, tmp_path):
        """With every column, those of several methods included."""
        label = {"steps": [[0, 2], [2, 7]], "wrong_step": [2, 7]}
        labels = [label, *[{}] * (hosts.COUNT - 1)]
        texts = [f"{row} \u202e" for row in range(hosts.COUNT)]
        # Keys and texts hold a character that changes the direction of others.
        rollouts = hosts.plain_rollouts(keys=texts)
        facts = {**rollouts.facts, "labels": labels, "id": texts, "ground_truth": texts}
        methods = {name: hosts.signal_of(name) for name in ("step_values", "surprisal")}
        rollouts = replace(rollouts, facts=facts)
        table = hosts.plain_table(hosts.signal_of("grail"), rollouts, by_method=methods)
        header = replace(HEADER, update=1)
        path = write_step(tmp_path, header, table)
        assert path.name == "step_000003_update_1.parquet"
        assert list(tmp_path.iterdir()) == [path]
        dump = read_dump(tmp_path)
        rows = list(dump)
        assert dump.problems == []
        assert dump.files[0].header == header
        assert {(row.step, row.update) for row in rows} == {(3, 1)}
        hosts.assert_same(table_of(rows), table)
        # As other programs read it.
        frame = pd.read_parquet(path)
        assert frame["weight"][0].dtype == np.float32
        assert list(frame["key"]) == texts

    def test_a_table_has_what_was_received_by_key(self, tmp_path):
        written = table_of([dump_row([1.0, 2.0], key=key) for key in "abc"])
        for step in (1, 2):
            write_step(tmp_path, replace(HEADER, step=step), written)
        values = [[0.25, math.nan], [1.0, 2.0]]
        none = [None, None]
        arrived = received(["c", "a"], values, effect=values, clipped_by_update=none)
        write_received(tmp_path, received_header(2), arrived)
        dump = read_dump(tmp_path)
        table = dump.table(["received", "key", "effect", "step"])
        assert table.column_names == ["received", "key", "effect", "step"]
        # None of step 1, and of step 2 the last of the file is the first.
        assert table["effect"].to_pylist()[:5] == [None] * 3 + [[1.0, 2.0], None]
        first, second, third = dump.rows([2])
        assert first.received_T.tolist() == [1.0, 2.0]
        assert first.by_update_KT.tolist() == [[1.0, 2.0]]
        assert second.effect_T is first.clipped_by_update_KT is None
        assert third.effect_T is not None

    def test_older_and_newer_files(self, tmp_path):
        """As schema_version 4 and 5, and 1 of what was received, wrote them; a later version's is named."""
        written = table_of([dump_row([1.0, 2.0], key="a")])
        written = written.drop_columns("rollout_log_probs").append_column("update", [[0]])
        for step, version, method in ((3, 4, "grail"), (4, 99, "grail"), (5, 5, "gigpo")):
            record = {"schema_version": version, "step": step, "method": method}
            table = written.append_column("step", [[step]])
            table = table.replace_schema_metadata({"grail_advantage": json.dumps(record)})
            pq.write_table(table, tmp_path / f"step_00000{step}.parquet")
        header = received_header(3)
        record = json.dumps({"schema_version": 1, **header})
        arrived = received(["a"], [[0.5, 0.5]])
        arrived = arrived.drop_columns(["clipped_by_update", "effect"])
        arrived = arrived.replace_schema_metadata({"grail_advantage_received": record})
        pq.write_table(arrived, tmp_path / "received_000003.parquet")
        dump = read_dump(tmp_path)
        row, _ = dump
        (problem,) = dump.problems
        assert "step_000004.parquet" in problem
        headers = [dump.files[place].header for place in (0, 2)]
        # The method of the second gave advantages, which its header did not say yet.
        assert headers == [
            DumpHeader(step=3, method="grail"),
            DumpHeader(step=5, method="gigpo", gave_advantages=True),
        ]
        assert row.weight_T.tolist() == [1.0, 2.0]
        assert row.by_update_KT.tolist() == [[0.5, 0.5]]
        assert row.rollout_log_probs_T is row.clipped_by_update_KT is row.effect_T is None
        assert dump.receipts() == [header]


class TestWriting:
    def test_what_fails_leaves_the_file_that_was_there(self, tmp_path, monkeypatch):
        row = dump_row([1.0, 2.0])
        path = write_step(tmp_path, HEADER, table_of([row]))
        uneven = table_of([row, dump_row([1.0, 2.0], entropy_T=[1.0])])
        for refused in (uneven, table_of([row]).drop_columns("mask")):
            with pytest.raises((ValueError, KeyError)):
                write_step(tmp_path, HEADER, refused)

        def full(file):
            raise OSError

        monkeypatch.setattr(dump_module.os, "fsync", full)
        with pytest.raises(OSError):
            write_step(tmp_path, HEADER, table_of([dump_row([2.0])]))
        assert [len(row) for row in read_dump(tmp_path)] == [2]
        assert list(tmp_path.iterdir()) == [path]

    def test_a_resumed_run_removes_its_steps_and_nothing_else(self, tmp_path):
        for step, update in ((9, 0), (10, 0), (10, 3), (11, 0)):
            write_step(tmp_path, replace(HEADER, step=step, update=update), table_of([]))
        write_received(tmp_path, received_header(10), received([], []))
        # Names that are like those of the dump, and an unfinished file of it.
        unrelated = {"notes.txt", "12.jsonl", "step_12.parquet.bak"}
        for name in (*unrelated, ".step_000010.parquet.1.writing"):
            (tmp_path / name).write_text("mine")
        assert len(remove_steps(tmp_path, 10)) == 4
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"step_000009.parquet", *unrelated}
        assert remove_steps(tmp_path / "nowhere", 0) == []

    def test_a_disk_that_fails_or_hangs_costs_its_files(
        self, tmp_path, monkeypatch, caplog
    ):
        """And, if it hangs, one wait; it is said once."""
        rollouts = hosts.plain_rollouts()
        folder = tmp_path / "folder"
        options = DumpOptions(folder=folder)
        dump = StepDump(options, rollouts.tokenizer, updates=1, model="m", temperature=1.0)
        weighed = [weigh(rollouts, hosts.signal_of("uniform"), Given())]
        # A file where the folder should be: the first step fails, the second does not.
        folder.write_text("no folder")
        dump.write(1, 0, weighed, rows_in_step=len(rollouts))
        assert dump.failed == 1
        folder.unlink()
        dump.write(2, 0, weighed, rows_in_step=len(rollouts))
        assert dump.failed == 1
        assert read_dump(folder).steps == [2]
        monkeypatch.setattr(dump_module, "SECONDS", 0.1)
        answers = threading.Event()
        calls = []
        dump._in_time(lambda: answers.wait(60))
        dump._in_time(lambda: calls.append("while it hangs"))
        assert dump.failed == 3
        assert calls == []
        assert len(caplog.messages) == 1
        answers.set()
        dump._disk.join(60)
        dump._in_time(lambda: calls.append("afterwards"))
        assert dump.failed == 3
        assert calls == ["afterwards"]


ONE, TWO, THREE = (
    json.dumps({"step": step, "data": {"a": step / 2}}).encode() + b"\n"
    for step in (1, 2, 3)
)
BROKEN = b'\xff\n[1]\nnull\n{"step": "x"}\n{"step": NaN}\n' + b"[" * 100_000 + b"\n"


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        # The last line may be whole, by an editor, or half.
        (ONE + TWO[:-1], ONE + TWO),
        (ONE + TWO[:9], ONE),
        (ONE + THREE + TWO, ONE + TWO),
        (BROKEN + ONE, ONE),
    ],
)
def test_lines_of_metrics_up_to_the_step_stay(tmp_path, earlier, later):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(earlier)
    file = MetricsFile(path, 2)
    file.add(3, {"a": np.float32(1.5), "b": "text", "c": [1.0], "d": None})
    assert path.read_bytes() == later + THREE
    assert file.failed == 0
    # A run that begins anew.
    MetricsFile(path, -1)
    assert path.read_bytes() == b""


def test_metrics_are_strict_json(tmp_path):
    """Which has no NaN and no infinity: such a figure is null, and is read as NaN."""
    path = tmp_path / "run/metrics.jsonl"
    data = {"a": math.nan, "b": -math.inf, "c": np.float32("inf"), "d": 1.5}
    MetricsFile(path, -1).add(3, data)
    strict = {**dict.fromkeys("abc"), "d": 1.5}
    assert json.loads(path.read_text())["data"] == strict
    figures = read_metrics(path, [])
    assert math.isnan(figures["a"][3])
    assert figures["d"] == {3: 1.5}


def test_no_visible_character_acts():
    text = visible("".join(map(chr, range(sys.maxunicode + 1))), breaks=False)
    text.encode()
    kinds = {unicodedata.category(sign) for sign in set(text) - {"\u200d"}}
    assert kinds.isdisjoint(["Cc", "Cf", "Cs", "Zl", "Zp"])
    assert visible(text, breaks=False) == text


def test_links_and_pipes_in_a_foreign_folder(tmp_path):
    """Nothing is written through a link, and what is no plain file, which may have no end, is not read."""
    precious = tmp_path / "precious"
    run = tmp_path / "run"
    precious.write_text("precious")
    table = table_of([dump_row([1.0, 2.0])])
    path = write_step(run / "tokens", HEADER, table)
    path.unlink()
    page = run / "report.html"
    # Where the dump and the report write are links to a file of the user.
    for link in (page, path):
        link.symlink_to(precious)
    write_step(run / "tokens", HEADER, table)
    write_report(run)
    assert precious.read_text() == "precious"
    assert not path.is_symlink()
    assert not page.is_symlink()
    os.mkfifo(run / "metrics.jsonl")
    opened = open_run(run)
    assert opened.metrics == {}
    assert len(list(opened.dump)) == 1


def test_options_without_a_folder_are_refused():
    with pytest.raises(ValueError, match=r"token_dump\.folder is missing; name"):
        DumpOptions.of_section("token_dump", {"every": 2})
