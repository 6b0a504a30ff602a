"""Files and texts that others wrote: each costs at most itself and one sentence, within seconds, and nothing printed acts."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from grail_advantage import analyze, report
from grail_advantage.dump import (
    RECEIVED_SCHEMA,
    DumpHeader,
    write_received,
    write_step,
)
from grail_advantage.receipt.foreign import read_json, say, visible
from grail_advantage.view import receipt
from recipe.evaluate.__main__ import main as evaluate
from tests.core.common import some
from tests.dumps import changed, dump_row, received_header, table_of
from tests.recipe.test_evaluate import HAND_CASE, make_run

SECONDS = 30
DIGITS = "9" * 400
DEEP = "[" * 200_000


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """A test that waits for a pipe fails."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def run_of(folder: Path) -> Path:
    """A whole run of two steps."""
    for step in (1, 2):
        write_step(folder / "tokens", DumpHeader(step=step, method="grail"), table_of([dump_row([1.0], step=step)]))
        one = [[0.5]]
        columns = {"key": ["a_0_0"], "updates": [[0]], "received": one, "clipped": one, "by_update": [one]}
        columns |= {"clipped_by_update": [one], "effect": [None]}
        received = pa.table(columns, schema=RECEIVED_SCHEMA)
        write_received(folder / "tokens", received_header(step, updates=1, tokens=1, loss="vanilla"), received)
    lines = [{"step": step, "data": {"critic/score/mean": 0.5}} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def called(main: Callable[[list[str]], Any], *arguments: str | Path) -> tuple[Any, str, str]:
    """Exit status, output and errors of a command; what is printed acts on no terminal."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code
            if isinstance(status, str):
                print(status, file=err)
    acts_not(out.getvalue() + err.getvalue())
    return status, out.getvalue(), err.getvalue()


def acts_not(text: str) -> None:
    hidden = ("Cc", "Cf", "Cs", "Zl", "Zp")
    assert not [c for c in text if c not in "\n\u200d" and unicodedata.category(c) in hidden], repr(text)


def shown_path(path: Path) -> str:
    return visible(str(path), breaks=False)


# ---------------------------------------------------------------------------------------------------------------------- files


def _socket(path: Path) -> None:
    place = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(place)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 * 2**30)


ODD: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "log of the kernel": lambda path: path.symlink_to("/proc/kmsg"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a pipe": lambda path: (os.mkfifo(path.with_name("pipe")), path.symlink_to("pipe")),
    "folder": Path.mkdir,
}
"""What is no plain file."""
BYTES: dict[str, bytes] = {
    "empty": b"",
    "zeros": bytes(1000),
    "noise": bytes(range(256)) * 40,
    "half a line": b'{"step": 1, "da',
    "deep": DEEP.encode(),
    "deep in a line": b'{"step": 1, "data": ' + DEEP.encode(),
    "number alone": b"5",
    "list": b"[]",
    "null": b"null",
    "text": b'"text"',
    "empty object": b"{}",
    "utf-16": '{"step": 1, "data": {}}'.encode("utf-16"),
    "10,000 digits": b'{"step": ' + b"9" * 10_000 + b', "data": {}}',
    "step beyond": b'{"step": ' + DIGITS.encode() + b', "data": {"a": 1}}',
    "no mapping": b'{"step": 1, "data": [1]}',
    "no step": b'{"data": {"a": 1}}',
    "fraction of a step": b'{"step": 1.5, "data": {}}',
    "controls": b"\x1b]0;title\x07\x1b[2J\r\n",
}
"""Contents of a file that should have JSON."""
JSON_CASES = [*ODD, *BYTES, "3 GiB"]
OF_A_KIND = (
    *(
        "pipe",
        "endless device",
        "dangling link",
        "folder",
        "empty",
        "noise",
        "half a line",
        "deep",
        "list",
        "10,000 digits",
    ),
    *("controls", "3 GiB"),
)
BY_DAY = some(JSON_CASES, OF_A_KIND)
"""One reader is behind all commands: the log of metrics meets every case by day, the other files one of a kind."""


def plant(path: Path, case: str) -> None:
    """Put something in the place of a file, or of none."""
    path.unlink(missing_ok=True)
    if case in ODD:
        ODD[case](path)
    elif case in BYTES:
        path.write_bytes(BYTES[case])
    elif case == "3 GiB":
        _sparse(path)
    else:
        raise AssertionError(case)


def one_sentence(err: str, path: Path) -> None:
    """Exactly one line names the file."""
    naming = [line for line in err.splitlines() if shown_path(path) in line]
    assert len(naming) == 1 and len(naming[0]) < len(str(path)) + 400 and err.count("\n") <= 2, err


@pytest.mark.parametrize("name", ["metrics.jsonl", "trainer_state.json"])
@pytest.mark.parametrize("case", JSON_CASES)
def test_a_file_of_metrics(tmp_path: Path, case: str, name: str) -> None:
    """Beside a dump it costs the curves; alone, and as RUN itself, the run is refused with its name."""
    run = run_of(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    plant(run / name, case)
    status, _, err = called(report.main, run)
    assert status == 0
    if case not in ("empty", "log of the kernel") or name == "trainer_state.json":
        one_sentence(err, run / name)
    alone = tmp_path / "alone"
    alone.mkdir()
    plant(alone / name, case)
    for arguments in ([alone], [alone / name], [alone, "--summary"], [alone, "--terminal"], [run, "--against", alone]):
        status, out, err = called(report.main, *arguments)
        assert (status, out) == (1, "") and err.count("\n") == 1, (arguments, err)
    assert called(receipt.main, alone)[0] == called(receipt.main, alone / name)[0] == 2


def test_numbers_of_400_digits_and_half_lines_cost_only_themselves(tmp_path: Path) -> None:
    lines = (
        f'{{"step": 1, "data": {{"a": {DIGITS}, "b": 2.0, "c": -{DIGITS}, "d": 1e999, "e": NaN}}}}\n{{"step": 2, "da'
    )
    (tmp_path / "metrics.jsonl").write_text(lines)
    status, _, err = called(report.main, tmp_path)
    assert status == 0 and f"{tmp_path}/metrics.jsonl:2: is no line" in err
    assert report.data.open_run(tmp_path).metrics[1]["b"] == 2.0
    assert read_json(f"[{DIGITS}, -{DIGITS}, {'9' * 300}]") == [float("inf"), float("-inf"), int("9" * 300)]


@pytest.mark.parametrize("case", [*BY_DAY, "loss of a list", "texts for numbers", "infinite", "finding of half"])
def test_a_file_of_receipts(tmp_path: Path, case: str) -> None:
    path = tmp_path / "receipts.jsonl"
    good = {"step": 1, "update": 0, "loss": "a", "findings": [], "updates": 1, "tokens": 3, "clipped": None}
    finding = {"name": "scaled", "where": "w", "size": 1.0, "what": "x", "examples": [], "causes": "", "mismatch": True}
    other: dict[str, Any] = {
        "loss of a list": {"loss": ["a"]},
        "texts for numbers": {"seen_from": "a", "clipped": "b"},
        "infinite": {"tokens": 10**400, "clipped": 1e999},
        "finding of half": {"findings": [finding | {"examples": [[1, "a"]]}]},
    }
    if case in other:
        path.write_text(json.dumps(good | other[case]) + "\n" + json.dumps(good))
    else:
        plant(path, case)
    status, out, err = called(receipt.main, path)
    assert status == 2 and err.count("\n") == 1 and ("over 3 tokens" in out) == (case in other)


@pytest.mark.parametrize("case", [*BY_DAY, "no prompt", "odd messages"])
def test_responses_to_analyse(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in them; a template that fails is the line's fault."""
    from verl_cpu.tiny.model import build_tokenizer

    monkeypatch.setattr(analyze, "load_tokenizer", lambda name: build_tokenizer())
    path = tmp_path / "responses.jsonl"
    odd = {"no prompt": {"response": "a"}, "odd messages": {"prompt": [{"role": [1]}], "response": "a", "reward": 1}}
    if case in odd:
        path.write_text(json.dumps(odd[case]))
    else:
        plant(path, case)
    arguments = [path, "--model", "m", "--method", "surprisal", "--out", tmp_path / "out"]
    status, out, err = called(analyze.main, *arguments)
    assert status not in (0, None) and out == "" and err.count("\n") <= 2, err


def test_what_may_not_be_read() -> None:
    """As a user without the right to; root has it."""
    if os.geteuid():
        pytest.skip("needs root, to become a user")
    with tempfile.TemporaryDirectory() as folder:
        run = run_of(Path(folder) / "run")
        for path in (
            run / "tokens" / "step_000002.parquet",
            run / "metrics.jsonl",
            run / "tokens" / "received_000001.parquet",
        ):
            path.chmod(0)
        for path in (Path(folder), run, run / "tokens"):
            path.chmod(0o755)
        page = Path(folder) / "page.html"
        os.seteuid(65534)
        try:
            status, _, err = called(report.main, run, "--output", "/dev/shm/page_of_nobody.html")
            assert status == 0 and err.count("Permission denied") == err.count("\n") == 3, err
            assert called(report.main, run)[0] == 1  # where it may not write
            assert called(receipt.main, run)[2].count("Permission denied") == 1
        finally:
            os.seteuid(0)
            Path("/dev/shm/page_of_nobody.html").unlink(missing_ok=True)
        assert not page.exists()


# ---------------------------------------------------------------------------------------------------------------------- texts

TEXTS = [
    "\x1b[2J\x1b[31mred", "\x1b]0;title\x07", "\x1b]8;;http://x\x1b\\link", "\x1bPq\x1b\\", "\x9b31m", "a\rb", "a\nb",
    "a\x08\x08b", "\u202egnp.exe", "\u2066a\u2069", "\u200ba\ufeff", "a\u2028b\u2029", "a\x85b", "\x7f", "\x07", "\u061c",
    "\U000e0041", "\udc80", "[red]markup[/red]", "%s{}%(x)s", "é\u0301日本",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_a_text_wherever_one_is_printed(tmp_path: Path, text: str) -> None:
    kept = text.encode("utf-8", "replace").decode()
    run = tmp_path / f"run {text}"
    row = dump_row([1.0, 2.0], tokens=[kept, "b"], step=1)
    row = changed(
        row,
        **dict.fromkeys(("key", "id", "prompt", "response", "ground_truth", "outcome", "answer", "no_scores"), kept),
    )
    header = DumpHeader(
        step=1, method=kept, model=kept, options={kept: kept}, reshaper=kept, special_tokens={0: kept}, answer=kept
    )
    write_step(run / "tokens", header, table_of([row]))
    finding: Any = {
        "name": kept,
        "where": kept,
        "size": 1.0,
        "what": kept,
        "examples": [(kept, 0, 1.0, None)],
        "causes": kept,
    }
    one = [[0.5, 0.5]]
    columns = {"key": [kept], "updates": [[0]], "received": one, "clipped": one, "by_update": [one]}
    columns |= {"clipped_by_update": [one], "effect": [None]}
    received = received_header(1, loss=kept, findings=[finding | {"mismatch": True}], updates=1, tokens=2)
    write_received(run / "tokens", received, pa.table(columns, schema=RECEIVED_SCHEMA))
    names = {kept: 1.0, f"val-core/{kept}/acc/mean@1": 0.5, f"{kept}/average_weight": 1.0}
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "data": names}) + "\n{\n")
    (run / "tokens" / f"step_{text.replace('/', '')}.parquet").touch()
    os.mkfifo(run / "tokens" / "step_000007.parquet")
    for arguments in (
        [run],
        [run, "--summary"],
        [run, "--terminal"],
        [run, "--terminal", "--step", "9"],
        [run / text],
        [tmp_path],
    ):
        called(report.main, *arguments)
    assert called(receipt.main, run)[0] == 1 and called(receipt.main, run, "--json")[0] == 1
    record = vars(received) | {"findings": [finding], "clipped": None}
    (tmp_path / f"{text.replace('/', '')}.jsonl").write_text(json.dumps(record) + "\n{")
    assert called(receipt.main, tmp_path / f"{text.replace('/', '')}.jsonl")[0] == 1
    called(receipt.main, tmp_path / text)
    (tmp_path / "two" / text.replace("/", "") / "tokens").mkdir(parents=True)
    (tmp_path / "two" / "b" / "tokens").mkdir(parents=True)
    status, _, err = called(report.main, tmp_path / "two")
    assert status == 1 and "several runs" in err and err.count("\n") == 1


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_a_text_in_an_evaluation_or_a_response(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = text.encode("utf-8", "replace").decode()
    folders = [tmp_path / f"{name} {text}".replace("/", "") for name in "ab"]
    for folder in folders:
        results = make_run(folder, HAND_CASE)
        results["run"] |= {"model": text, "engine": text, text: text}
        results["benchmarks"] = {f"{name} {kept}": row for name, row in results["benchmarks"].items()}
        (folder / "results.json").write_text(json.dumps(results))
    status, out, _ = called(evaluate, "--compare", *folders)
    assert status is None and "compared with A" in out
    results["run"]["template"][text] = text
    (folders[1] / "results.json").write_text(json.dumps(results))
    assert "cannot be compared" in called(evaluate, "--compare", *folders)[2]
    called(evaluate, "--regrade", folders[1])
    from verl_cpu.tiny.model import build_tokenizer

    monkeypatch.setattr(analyze, "load_tokenizer", lambda name: build_tokenizer())
    path = tmp_path / f"{text.replace('/', '')}.jsonl"
    for line in (
        {"prompt": [{"role": text}], "response": "a"},
        {"id": text, "prompt": "", "response": text, "reward": text},
    ):
        path.write_text(json.dumps(line))
        arguments = [path, "--model", "m", "--method", "surprisal", "--out", tmp_path / "out"]
        status, _, err = called(analyze.main, *arguments)
        assert status not in (0, None) and err


def test_a_terminal_without_the_character() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    say("é \x1b \u202e", file=file)
    file.seek(0)
    assert file.read() == "\\xe9 \\u241b <U+202E>\n"
