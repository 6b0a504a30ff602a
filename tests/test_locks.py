"""A run's folder is locked while the run lives, and by nothing afterwards; where it cannot be locked, a warning says so."""

import errno
import fcntl
import socket
import subprocess
import sys

import pytest

from grail_advantage.locks import LOCK, hold, let_go

HOLDER = """
import pathlib, sys
from grail_advantage.locks import hold
hold(pathlib.Path(sys.argv[1]), "", "")
print("held", flush=True)
input()
"""


def test_a_folder_is_held_until_its_process_ends(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    second = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert second.stdout.readline() == b"held\n"
        with pytest.raises(
            ValueError, match=r"option=.* belongs to a run that lives; .*, or the remedy"
        ):
            hold(tmp_path, "the remedy", "option")
    finally:
        second.kill()
        second.communicate()
    hold(tmp_path, "the remedy", "option")
    hold(tmp_path, "the remedy", "option")  # again in this process
    let_go(tmp_path)
    let_go(tmp_path)


@pytest.mark.parametrize(
    "number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO]
)
@pytest.mark.parametrize(
    "lock_text",
    [None, "", "junk", f"1\n{socket.gethostname()}\n", "4194304\nanother-node\n"],
)
def test_without_flock_a_run_resumes_on_any_node_with_a_warning(
    number, lock_text, tmp_path, monkeypatch, caplog
):
    """Whatever a killed run, or an earlier version, left as its lock."""

    def flock(*_):
        raise OSError(number, "no flock here")

    monkeypatch.setattr(fcntl, "flock", flock)
    if lock_text is not None:
        (tmp_path / LOCK).write_text(lock_text)
    for _start in range(2):
        caplog.clear()
        hold(tmp_path, "the remedy", "option")
        assert "cannot be locked" in caplog.text
        assert str(tmp_path) in caplog.text
        let_go(tmp_path)
    assert (
        lock_text is not None or number != errno.ENOSYS or not (tmp_path / LOCK).exists()
    ), "nothing that outlives the run"


def test_what_is_no_folder_is_left_to_who_writes_there(tmp_path, caplog):
    (tmp_path / "a file").touch()
    (tmp_path / "a link").symlink_to("/proc/nowhere")
    for path in tmp_path.iterdir():
        caplog.clear()
        hold(path, "the remedy", "option")
        assert "cannot be locked" in caplog.text
