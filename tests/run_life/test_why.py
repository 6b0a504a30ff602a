"""Why a command ended: of real errors, and as the last line of a process whose log has no room."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ray.exceptions import ActorDiedError, RayTaskError
from safetensors import safe_open

from recipe.run_life import why as module
from recipe.run_life.watch import RunEnded
from recipe.run_life.why import why
from tests.run_life.test_watch import KILLED

ROOT = Path(__file__).parents[2]


def _full() -> None:
    with open("/dev/full", "w") as file:
        file.write("x")


def _of_ray() -> None:
    try:
        _full()
    except OSError as error:
        raise RayTaskError("fit", "Traceback ...\nOSError: [Errno 28] No space left on device", error) from None


def _behind_an_exit() -> None:
    """As Hydra ends."""
    try:
        _full()
    except OSError:
        raise SystemExit(1)  # noqa: B904


def _torchs() -> None:
    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")


def _quota() -> None:
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/home/a/b")


def _killed() -> None:
    error = ActorDiedError()
    error.error_msg = KILLED
    raise error


def _of_the_watch() -> None:
    raise SystemExit(1) from RunEnded(
        "\nends now.\n  died       WorkerDict, process 12 on 192.0.2.2\n  cause      gone"
    )


def _by_signal() -> None:
    raise RunEnded("\n  died       WorkerDict, process 12 on 192.0.2.2\n  cause      killed by signal 11")


def _memory() -> None:
    torch.empty(1 << 60)


def _zip(path: Path) -> None:
    path.write_bytes(b"PK not")
    zipfile.ZipFile(path)


def _cut(path: Path) -> None:
    torch.save({"a": torch.ones(9)}, path)
    path.write_bytes(path.read_bytes()[:-30])
    torch.load(path, weights_only=True)


class Settings:
    """No type that torch loads."""


@pytest.mark.parametrize("zipped", [True, False])
def test_a_whole_file_with_an_unknown_type_is_not_called_damaged(tmp_path: Path, zipped: bool) -> None:
    torch.save({"a": Settings()}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(Exception, match="Weights only load failed") as caught:
        torch.load(tmp_path / "a.pt", weights_only=True)
    line = why(caught.value)
    assert "Unsupported global" in line and "Settings" in line and "remove" not in line and "damaged" not in line, line


@pytest.mark.parametrize(
    "error",
    [
        ValueError("reward.url='http://[::1]: Connection refused' is no address"),
        ImportError("No module named 'out of memory'"),
        KeyError("died unexpectedly: SIGKILL, worker process has died"),
        AssertionError("Max retries exceeded must be positive"),
        RayTaskError(
            "fit", "Traceback ...\nValueError: it says [Errno 28]", ValueError("it says [Errno 28]")
        ).as_instanceof_cause(),
    ],
)
def test_the_words_that_an_error_quotes_are_no_cause(error: Exception) -> None:
    line = why(error)
    last = str(error).splitlines()[-1].strip("'").removeprefix("ValueError: ")
    assert last in line and not any(word in line for word in ("again", "give it more", "free some")), line


def _safetensors(path: Path) -> None:
    path.write_bytes(b"\x08")
    safe_open(path, framework="pt")


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        *((fails, ["no space is left"]) for fails in (_full, _of_ray, _behind_an_exit, _quota)),
        (_torchs, ["checkpoint could not be written", "disk"]),
        (_killed, ["WorkerDict, process 12403,", "SIGKILL", "memory"]),
        (_of_the_watch, ["WorkerDict, process 12 on 192.0.2.2", "SIGKILL"]),
        (_by_signal, ["WorkerDict, process 12", "SIGSEGV (signal 11)"]),
        (_memory, ["out of memory"]),
        *((fails, ["cut off or damaged"]) for fails in (_zip, _cut, _safetensors)),
        (lambda: os.environ["NO_SUCH"], ["KeyError: 'NO_SUCH'"]),
        (lambda: int("x"), ["invalid literal"]),
    ],
)
def test_the_cause_in_one_line(tmp_path: Path, fails: Callable, words: list[str]) -> None:
    with pytest.raises(BaseException) as caught:
        fails(tmp_path / "a.pt") if fails in (_zip, _cut, _safetensors) else fails()
    line = why(caught.value)
    assert all(word in line for word in words) and "\n" not in line, line


def test_torch_names_no_cause_so_the_disk_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError) as caught:
        _torchs()
    monkeypatch.setattr(module, "_free", lambda folder: 0.0)
    assert f"no space is left on the disk at {tmp_path}" in why(caught.value, [tmp_path])


def test_it_is_the_last_line_also_where_the_log_has_no_room() -> None:
    read, write = os.pipe()
    begin = "from recipe.run_life.why import last_line\nwith last_line('the run'), last_line('the run'):\n    "
    environment = {**os.environ, module.LAST_LINE: str(write), "PYTHONPATH": str(ROOT)}
    for log in ("/dev/full", None):
        with open(log or "/dev/null", "w") as file:
            done = subprocess.run(
                [
                    sys.executable,
                    "-c",
                    begin + ("print('x', flush=True)" if log else "raise KeyError('json')"),
                ],
                stdout=file,
                stderr=file if log else subprocess.PIPE,
                env=environment,
                pass_fds=[write],
                text=True,
                check=False,
            )
        line = os.read(read, 4096).decode()
        assert done.returncode != 0 and line.startswith("the run ended: ") and line.count("\n") == 1
        assert "no space is left" in line if log else done.stderr.endswith(line) and done.stderr.count(line) == 1
