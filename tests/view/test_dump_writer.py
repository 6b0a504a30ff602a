"""The thread that writes dumps beside the training, which nothing of it stops."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest

from grail_advantage.dump.schema import DumpHeader
from grail_advantage.dump.store import read_dump, write_step
from grail_advantage.dump_writer import DumpWriter
from tests.dumps import dump_row, table_of


class TestWriter:
    def _submit(self, writer: DumpWriter, step: int, *, then=lambda: None, write=write_step) -> None:
        table = table_of([dump_row([1.0], step=step)])
        writer.submit(lambda folder: (then(), write(folder, DumpHeader(step=step, method="grail"), table)))

    def test_writes_beside_and_close_waits(self, tmp_path: Path) -> None:
        writer, gate = DumpWriter(tmp_path), threading.Event()
        self._submit(writer, 1, then=lambda: gate.wait(10))
        self._submit(writer, 2)
        assert list(tmp_path.iterdir()) == [], "nothing is written in the caller's thread"
        gate.set()
        writer.close()
        assert read_dump(tmp_path).steps == [1, 2] and writer.failed == 0
        self._submit(writer, 3)  # a trainer may close and go on
        writer.close()
        assert read_dump(tmp_path).steps == [1, 2, 3]

    def test_a_failing_disk_is_counted_and_said_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        def full(folder: Path, header: DumpHeader, table: pa.Table) -> Path:
            if header.step < 3:
                raise OSError(28, "No space left on device")
            return write_step(folder, header, table)

        writer = DumpWriter(tmp_path)
        for step in (1, 2, 3):
            self._submit(writer, step, write=full)
        writer.close()
        assert writer.failed == 2 and read_dump(tmp_path).steps == [3]
        (message,) = caplog.messages
        assert "No space left on device" in message and "training continues" in message
