"""Files that somebody has broken or prepared: reading ends, in little memory, with what is wrong and in which file."""

from __future__ import annotations

import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from grail_advantage.dump import parquet
from grail_advantage.dump.files import DumpHeader, DumpRow, read_dump, write_step
from grail_advantage.view.page import data
from grail_advantage.view.page.page import write_report
from tests.dumps import dump_row


def row(place: int, name: str = "key_0_0") -> DumpRow:
    return dump_row(
        [1.0], tokens=[name], step=3, row=place, key=name, id=name, ground_truth=name, prompt=name, score_T=[0.5]
    )


def written(folder: Path, rows: int = 4) -> Path:
    return write_step(folder, DumpHeader(step=3, method="grail"), [row(place) for place in range(rows)])


def test_a_row_group_that_says_it_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of 64 MiB packs into some kilobytes; the file's own metadata says what it unpacks to."""
    monkeypatch.setattr(parquet, "MOST_BYTES", 1 << 20)
    path = write_step(tmp_path, DumpHeader(step=3, method="grail"), [replace(row(0), prompt="x" * (64 << 20))])
    assert path.stat().st_size < 1 << 17
    tracemalloc.start()
    try:
        dump = read_dump(tmp_path)
        assert list(dump) == [] and "larger than one of a dump can be" in str(dump.problems[0])
        assert max(tracemalloc.get_traced_memory()[1], pa.total_allocated_bytes()) < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("cut", [False, True], ids=["a bit flipped", "an end missing"])
def test_damage_anywhere(tmp_path: Path, cut: bool) -> None:
    """At every 97th byte: a file is named, or its responses are as they were; nothing is raised."""
    path = written(tmp_path)
    whole, content = [_values(each) for each in read_dump(tmp_path)], path.read_bytes()
    for place in range(0, len(content), 97):
        flipped = bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]
        path.write_bytes(content[:place] + (b"" if cut else flipped))
        dump = read_dump(tmp_path)
        rows = [_values(each) for each in dump]
        assert rows == whole or (dump.problems and not cut) or (dump.problems and not rows)
        assert all(str(path) in str(problem) for problem in dump.problems)


def _values(row: DumpRow) -> tuple:
    return row.key, row.token_ids_T.tolist(), row.tokens, row.weight_T.tolist(), row.score_T.tolist()


class TestLinks:
    """A folder from somebody else, with links where the package would write, or read without an end."""

    def test_nothing_is_written_through_a_link(self, tmp_path: Path) -> None:
        precious = tmp_path / "precious"
        precious.write_text("precious")
        run = tmp_path / "run"
        path = written(run / "tokens")
        unfinished = [file.with_name(f".{file.name}.{os.getpid()}.writing") for file in (run / "report.html", path)]
        for link in (*unfinished, run / "report.html"):
            link.symlink_to(precious)
        write_report(run)
        written(run / "tokens")
        assert precious.read_text() == "precious"
        assert (run / "report.html").stat().st_size > 10_000 and not (run / "report.html").is_symlink()

    def test_what_is_no_file_is_not_read(self, tmp_path: Path) -> None:
        """A pipe and a device would be read for ever."""
        written(tmp_path / "tokens")
        os.mkfifo(tmp_path / "metrics.jsonl")
        os.mkfifo(tmp_path / "tokens" / "step_000009.parquet")
        (tmp_path / "tokens" / "step_000008.parquet").symlink_to("/dev/zero")
        run = data.open_run(tmp_path)
        assert run.metrics == {}
        assert run.dump.steps == [3] and len(list(run.dump)) == 4
