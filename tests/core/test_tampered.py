"""Files that somebody has broken or prepared: reading ends, in little memory, with what is wrong and in which file."""

from __future__ import annotations

import gzip
import json
import os
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from grail_advantage import token_dump
from grail_advantage.report import data
from grail_advantage.report.figures import write_figures
from grail_advantage.report.page import write_report
from grail_advantage.token_dump import MOST_PROBLEMS, DumpHeader, DumpRow, read_dump, step_path, write_step
from recipe.evaluate.checkpoint import resolve_model

NAMES = ["../../escaped", "/etc/passwd", "a\0b", "..", "~/.bashrc", "$(touch escaped)", "x" * 5000]
"""Names that would matter if somebody made a path or a command of them."""


def row(place: int, name: str = "key_0_0") -> DumpRow:
    return DumpRow(
        step=3,
        row=place,
        key=name,
        group=0,
        id=name,
        gold=name,
        prompt=name,
        response=name,
        tokens=[name],
        token_ids_T=np.array([1]),
        prompt_ids=np.array([1]),
        mask_T=np.array([True]),
        weight_T=np.array([1.0], dtype=np.float32),
        score_T=np.array([0.5], dtype=np.float32),
    )


def written(folder: Path, rows: int = 4) -> Path:
    return write_step(folder, DumpHeader(step=3, method="grail"), [row(place) for place in range(rows)])


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


class TestBombs:
    """Small files that unpack to more than a machine holds."""

    MEGABYTE = 1 << 20

    @pytest.fixture(autouse=True)
    def _small_limits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(token_dump, "MOST_LINE", self.MEGABYTE)
        monkeypatch.setattr(token_dump, "_MOST_UNPACKED", 4 * self.MEGABYTE)
        monkeypatch.setattr(token_dump, "_MOST_RATIO", 50)

    def _problems(self, folder: Path, content: bytes) -> tuple[list[str], int]:
        """What is said of a file that holds this 64 times, and the most memory that reading it took."""
        path = step_path(folder, 1)
        with gzip.open(path, "wb", compresslevel=9) as file:
            for _ in range(64):
                file.write(content)
        assert path.stat().st_size < self.MEGABYTE // 4
        tracemalloc.start()
        try:
            found = read_dump(folder)
            assert not list(found)
            return [str(problem) for problem in found.problems], tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def test_a_line_without_an_end(self, tmp_path: Path) -> None:
        problems, most = self._problems(tmp_path, b"[" * self.MEGABYTE)
        assert problems == [
            f"{step_path(tmp_path, 1)}:1: the file has a line of more than 1 MiB, which no row of a dump needs; 0 whole lines "
            "are read"
        ]
        assert most < 8 * self.MEGABYTE

    def test_lines_without_an_end(self, tmp_path: Path) -> None:
        line = b'{"schema_version":2}\n'
        problems, most = self._problems(tmp_path, line * (self.MEGABYTE // len(line)))
        assert len(problems) == MOST_PROBLEMS + 1
        assert problems[-1].endswith(
            f":{MOST_PROBLEMS + 2}: {MOST_PROBLEMS} lines could not be read; the file is not read on"
        )
        assert most < 8 * self.MEGABYTE

    def test_rows_without_an_end(self, tmp_path: Path) -> None:
        path = written(tmp_path, rows=1)
        header, line, _ = gzip.decompress(path.read_bytes()).split(b"\n")
        with gzip.open(path, "wb") as file:
            file.write(header + b"\n")
            for _ in range(400):
                file.write((line + b"\n") * 100)
        found = read_dump(tmp_path)
        read = sum(1 for _ in found)
        assert 0 < read < 40_000
        assert [str(problem) for problem in found.problems] == [
            f"{path}:{read + 2}: the file unpacks to more than 4 MiB, which no dump of its size does; {read + 1} whole lines "
            "are read"
        ]


def test_the_limits_leave_room_for_a_dump(tmp_path: Path) -> None:
    """A row of 32,768 tokens, twenty methods of a comparison, is far from them."""
    tokens, draw = 32_768, np.random.default_rng(0)
    values = {name: draw.random(tokens, dtype=np.float32) for name in ("weight_T", "score_T", "entropy_T")}
    one = token_dump.MethodColumns(score_T=values["score_T"], weight_T=values["weight_T"])
    long = DumpRow(
        step=1,
        row=0,
        key="a_0_0",
        group=0,
        token_ids_T=np.arange(tokens),
        prompt_ids=np.arange(10),
        tokens=["token "] * tokens,
        response="token " * tokens,
        mask_T=np.ones(tokens, dtype=bool),
        methods={f"method_{number}": one for number in range(20)},
        **values,
    )
    line = token_dump._line(token_dump._row_record(long))
    assert len(line) < token_dump.MOST_LINE / 5


def test_any_bit_that_flips(tmp_path: Path) -> None:
    """Every byte of a small file in turn: rows are whole or named as lost, and nothing else happens."""
    path = written(tmp_path)
    content = path.read_bytes()
    draw = random.Random(0)
    told = 0
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        found = read_dump(tmp_path)
        rows = list(found)
        assert all(isinstance(each.row, int) and len(each.tokens) == len(each) for each in rows)
        assert all(str(path) in str(problem) for problem in found.problems)
        told += bool(found.problems)
        assert found.problems or [each.row for each in rows] == [0, 1, 2, 3]
    assert told > 0.9 * len(content), "gzip's own sums find a flipped bit"


def test_any_end_that_is_missing(tmp_path: Path) -> None:
    path = written(tmp_path)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        found = read_dump(tmp_path)
        assert [each.row for each in found] == list(range(len(list(found))))
        assert any(str(path) in str(problem) for problem in found.problems)


@pytest.mark.parametrize("version", [0, 3, 99, 2**62])
def test_foreign_versions(tmp_path: Path, version: int) -> None:
    path = tmp_path / "step_000001.jsonl"
    path.write_text(json.dumps({"schema_version": version, "method": "grail"}) + "\n")
    found = read_dump(tmp_path)
    assert not list(found)
    assert all(str(path) in str(problem) for problem in found.problems) and found.problems


def test_names_from_a_model_are_no_paths(tmp_path: Path) -> None:
    """Keys, ids, answers and methods: whatever they say, the files are those of the step."""
    run = tmp_path / "run"
    rows = [row(place, name) for place, name in enumerate(NAMES)]
    write_step(run / "tokens", DumpHeader(step=3, method=NAMES[0], model=NAMES[1]), rows)
    metrics = {"step": 1, "data": {f"{name}/average_weight": 1.0 for name in NAMES}}
    (run / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    before = everything(tmp_path)
    page = write_report(run)
    assert everything(tmp_path) - before == {"run/report.html"} and page == run / "report.html"
    figures = write_figures(data.open_run(run), tmp_path / "figures")
    assert {path.parent for path in figures} == {tmp_path / "figures"}
    assert {path.stem for path in figures} <= {"curves", "profile", "heat_map"}


class TestLinks:
    """A folder from somebody else, with links where the package would write, or read without an end."""

    def test_nothing_is_written_through_a_link(self, tmp_path: Path) -> None:
        precious = tmp_path / "precious"
        precious.write_text("precious")
        run = tmp_path / "run"
        path = written(run / "tokens")
        for link in (run / ".report.html.writing", run / "report.html", path.with_name(f".{path.name}.writing")):
            link.symlink_to(precious)
        write_report(run)
        written(run / "tokens")
        assert precious.read_text() == "precious"
        assert (run / "report.html").stat().st_size > 10_000 and not (run / "report.html").is_symlink()

    def test_what_is_no_file_is_not_read(self, tmp_path: Path) -> None:
        """A pipe and a device would be read for ever."""
        written(tmp_path / "tokens")
        os.mkfifo(tmp_path / "metrics.jsonl")
        (tmp_path / "metrics-2.jsonl").symlink_to("/dev/zero")
        os.mkfifo(tmp_path / "tokens" / "step_000009.jsonl.gz")
        (tmp_path / "tokens" / "step_000008.jsonl.gz").symlink_to("/dev/zero")
        run = data.open_run(tmp_path)
        assert run.metrics == {}
        assert run.dump.steps == [3] and len(list(run.dump)) == 4


def test_metrics_that_are_none(tmp_path: Path) -> None:
    """Steps and values that no logger writes; what is right beside them is read."""
    path = tmp_path / "metrics.jsonl"
    lines = [
        '{"step": 1, "data": {"a": 1}}',
        f'{{"step": {10**40}, "data": {{"a": 1}}}}',
        '{"step": -5, "data": {"a": 1}}',
        f'{{"step": 2, "data": {{"a": 1{"0" * 400}}}}}',
        '{"step": 3, "data": ["a"]}',
        "[" * 100_000,
        "\0\0\0",
        '{"step": 4, "data": {"a": NaN, "b": Infinity, "c": 1e999}}',
    ]
    path.write_text("\n".join(lines) + "\n")
    metrics, problems = data.read_metrics(tmp_path)
    assert metrics[1] == {"a": 1.0} and set(metrics) == {1, 4}
    assert [problem.line for problem in problems] == [2, 3, 4, 5, 6, 7]
    path.write_text("{\n" * 5000)
    _, problems = data.read_metrics(tmp_path)
    assert len(problems) == MOST_PROBLEMS + 1 and "5000 such lines" in str(problems[-1])


NO_RANKS = [
    *("", "{", "[]", "null", "[" * 100_000, "\udcff", '{"world_size": "x"}', '{"world_size": -1}', '{"world_size": 0}'),
    *('{"world_size": 1e300}', '{"world_size": 1000000000000}'),
]


@pytest.mark.parametrize("content", NO_RANKS, ids=lambda content: repr(content[:30]))
def test_a_checkpoint_to_evaluate_that_does_not_say_its_ranks(tmp_path: Path, content: str) -> None:
    """In no time, whatever number it names, and before anything of it is loaded."""
    checkpoint = tmp_path / "global_step_1" / "actor"
    checkpoint.mkdir(parents=True)
    (checkpoint / "fsdp_config.json").write_text(content, encoding="utf-8", errors="surrogateescape")
    (checkpoint / "model_world_size_1_rank_0.pt").write_bytes(b"cos\nsystem\n(S'touch escaped'\ntR.")
    with pytest.raises(ValueError, match=r"fsdp_config\.json does not say the world_size"):
        resolve_model(tmp_path / "global_step_1")
