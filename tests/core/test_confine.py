"""What a process that compares answers can still do: see it try, from inside, past Python where that makes a difference."""

from __future__ import annotations

import ctypes
import functools
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from grail_advantage.reward import _confine, _verify_pool

WORKER = Path(_confine.__file__).with_name("_verify_worker.py")
LAYERS = ["privileges", "limits", "landlock", "seccomp"]

# Each action gives its result; what the system refuses raises OSError. `folder` is writable, with a file in it.
ACTIONS = {
    "read a library": "open(json.__file__).read(1)",
    "read /etc/passwd": "open('/etc/passwd').read(1)",
    "read the environment of this process": "open('/proc/self/environ').read(1)",
    "list a folder": "os.listdir(folder)",
    "write a file": "open(folder / 'file', 'r+')",
    "empty a file": "os.open(folder / 'file', os.O_RDONLY | os.O_TRUNC)",
    "truncate a file": "os.truncate(folder / 'file', 0)",
    "make a file": "os.open(folder / 'new', os.O_CREAT | os.O_RDONLY)",
    "make a folder": "os.mkdir(folder / 'inner')",
    "make a link": "os.symlink('/etc/passwd', folder / 'link')",
    "remove a file": "os.unlink(folder / 'file')",
    "rename a file": "os.rename(folder / 'file', folder / 'other')",
    "change a mode": "os.chmod(folder / 'file', 0)",
    "change an owner": "os.chown(folder / 'file', os.getuid(), os.getgid())",
    "change a time": "os.utime(folder / 'file', (0, 0))",
    "write into a file that is open": "os.write(opened, b'x')",
    "make a TCP socket": "socket.socket()",
    "make a UDP socket": "socket.socket(type=socket.SOCK_DGRAM)",
    "make a local socket": "socket.socket(socket.AF_UNIX)",
    "make a pair of sockets": "socket.socketpair()",
    "connect a socket that is open": "inherited.connect(listening.getsockname())",
    "fork": "child(os.fork())",
    "start a program": "subprocess.run(['/bin/true'])",
    "become another program": "os.execv('/bin/true', ['true'])",
    "start a thread": "start_thread()",
    "signal another process": "os.kill(os.getppid(), 0)",
    "raise a limit": "resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))",
    "leave the name spaces": "libc('unshare', 0x10000000)",
    "trace itself": "libc('ptrace', 0, 0, 0, 0)",
    "use io_uring": "libc('syscall', 425, 1, 0)",
    "open many files": "[os.open(json.__file__, os.O_RDONLY) for _ in range(200)]",
}
EVERYTHING_BUT_LIBRARIES = set(ACTIONS) - {"read a library"}
BY_LANDLOCK = {
    "read /etc/passwd",
    "read the environment of this process",
    "list a folder",
    "write a file",
    "empty a file",
    "truncate a file",
    "make a file",
    "make a folder",
    "make a link",
    "remove a file",
    "rename a file",
}
READS = {"read /etc/passwd", "read the environment of this process", "list a folder"}
BY_LIMITS = {"write into a file that is open", "open many files"}
BY_SECCOMP = EVERYTHING_BUT_LIBRARIES - READS - BY_LIMITS - {"connect a socket that is open"}

PROGRAM = """
import ctypes, importlib.util, json, os, resource, signal, socket, subprocess, sys, sysconfig, tempfile, threading
from pathlib import Path

plan = json.loads(sys.argv[1])
spec = importlib.util.spec_from_file_location("_confine", plan["module"])
confine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(confine)

folder = Path(plan["folder"])
(folder / "file").write_text("text")
opened = os.open(folder / "file", os.O_WRONLY)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
listening = socket.create_server(("127.0.0.1", 0))
inherited = socket.socket()


def child(pid):
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def start_thread():
    try:
        threading.Thread(target=int).start()
    except RuntimeError as error:
        raise OSError(str(error)) from error


def libc(name, *arguments):
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)


readable = [Path(sysconfig.get_path("stdlib"))]
layers = {
    "privileges": confine._drop_privileges,
    "limits": confine._limit,
    "landlock": lambda: confine._restrict_files(readable),
    "seccomp": confine._filter_calls,
}
found = {}
if plan["layers"] is None:
    found["said"] = confine.confine(readable)
else:
    for layer in plan["layers"]:
        layers[layer]()
refused = []
for name, action in plan["actions"].items():
    try:
        eval(action)
    except (OSError, ValueError):  # the latter from setrlimit
        refused.append(name)
    # The next action finds the file as it was, where nothing keeps it from being mended.
    try:
        (folder / "file").touch()
        (folder / "file").chmod(0o600)
    except OSError:
        pass
print(json.dumps({**found, "refused": refused}))
"""


@functools.cache
def missing() -> dict[str, str]:
    """Layers that this machine does not have."""
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, _plan(Path("/tmp"), None, {})], capture_output=True, text=True, check=True
    )
    return json.loads(found.stdout)["said"][1]


def _plan(folder: Path, layers: list[str] | None, actions: dict[str, str]) -> str:
    return json.dumps({"module": _confine.__file__, "folder": str(folder), "layers": layers, "actions": actions})


def refused(folder: Path, layers: list[str] | None, actions: dict[str, str] = ACTIONS) -> set[str]:
    """The actions that fail in a process with these layers, with all if ``None``."""
    for layer in LAYERS if layers is None else layers:
        if layer in missing():
            pytest.skip(f"no {layer} here: {missing()[layer]}")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, _plan(folder, layers, actions)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout)["refused"])


def test_behind_all_layers_nothing_is_left_but_reading_libraries(tmp_path: Path) -> None:
    assert refused(tmp_path, None) == EVERYTHING_BUT_LIBRARIES


def test_without_layers_everything_works(tmp_path: Path) -> None:
    """Otherwise the other tests would see nothing. What replaces the process or changes it is left out."""
    left_out = {"become another program", "leave the name spaces", "trace itself", "use io_uring"}
    actions = {name: action for name, action in ACTIONS.items() if name not in left_out}
    assert not refused(tmp_path, [], actions)


def test_landlock_alone(tmp_path: Path) -> None:
    actions = {name: action for name, action in ACTIONS.items() if name in BY_LANDLOCK | {"read a library"}}
    assert refused(tmp_path, ["privileges", "landlock"], actions) == BY_LANDLOCK


def test_landlock_alone_keeps_from_the_network(tmp_path: Path) -> None:
    """From version 4 of its interface on."""
    version = ctypes.CDLL(None).syscall(444, None, 0, 1)
    if version < 4:
        pytest.skip(f"version {version} of Landlock's interface has no network")
    name = "connect a socket that is open"
    assert refused(tmp_path, ["privileges", "landlock"], {name: ACTIONS[name]}) == {name}


def test_seccomp_alone(tmp_path: Path) -> None:
    actions = {name: action for name, action in ACTIONS.items() if name in BY_SECCOMP | {"read a library"}}
    assert refused(tmp_path, ["privileges", "seccomp"], actions) == BY_SECCOMP


def test_limits_alone(tmp_path: Path) -> None:
    actions = {name: action for name, action in ACTIONS.items() if name in BY_LIMITS | {"read a library"}}
    assert refused(tmp_path, ["limits"], actions) == BY_LIMITS


# --- the filter ------------------------------------------------------------------------------------------------------


def _answer(program: bytes, architecture: int, number: int, arguments: tuple[int, ...] = (0,) * 6) -> int:
    """What a filter in classic BPF answers; a plain interpreter of the instructions that seccomp(2) allows here."""
    words = {0: number, 4: architecture}
    for place, argument in enumerate(arguments):
        words[16 + 8 * place], words[20 + 8 * place] = argument & 0xFFFFFFFF, argument >> 32
    instructions = [program[i : i + 8] for i in range(0, len(program), 8)]
    place, accumulator = 0, 0
    while True:
        code, operand = (
            int.from_bytes(instructions[place][:2], "little"),
            int.from_bytes(instructions[place][4:], "little"),
        )
        yes, no = instructions[place][2:4]
        place += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            accumulator = words[operand]
            continue
        holds = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}[code]
        place += yes if holds else no


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_call_of_the_table_is_refused_and_no_other(machine: str) -> None:
    """On both architectures, whichever this is."""
    column, architecture = _confine._ARCHITECTURES[machine]
    numbers = {entry[column] for entry in _confine._FORBIDDEN.values()} - {None}
    opening = {entry[column]: place for entry, place in _confine._OPENING if entry[column] is not None}
    program = _confine._program(architecture, sorted(numbers), list(opening.items()))
    allow, refuse = 0x7FFF0000, 0x00050001
    for number in range(600):
        assert _answer(program, architecture, number) == (refuse if number in numbers else allow), number
    for number, place in opening.items():
        for flags in (1, 2, 0o100, 0o1000, 0o2000001):
            arguments = [0] * 6
            arguments[place] = flags
            assert _answer(program, architecture, number, tuple(arguments)) == refuse
        arguments[place] = 0o2000000  # O_CLOEXEC, for reading
        assert _answer(program, architecture, number, tuple(arguments)) == allow
    assert _answer(program, architecture, 0x40000000 + 1) == refuse
    assert _answer(program, architecture ^ 1, 0) == 0x80000000


@pytest.mark.skipif(platform.machine() not in _confine._ARCHITECTURES, reason="no table of system calls")
def test_the_table_has_this_machines_numbers() -> None:
    """Where the kernel's headers are installed."""
    headers = [
        Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        Path("/usr/include/asm/unistd_64.h"),
        Path("/usr/include/asm-generic/unistd.h"),
    ]
    known: dict[str, int] = {}
    for header in headers if platform.machine() == "x86_64" else headers[2:]:
        if header.is_file():
            for line in header.read_text().splitlines():
                words = line.split()
                if len(words) == 3 and words[0] == "#define" and words[1].startswith("__NR") and words[2].isdecimal():
                    known[words[1].removeprefix("__NR3264_").removeprefix("__NR_")] = int(words[2])
            break
    else:
        pytest.skip("no kernel headers")
    column = _confine._ARCHITECTURES[platform.machine()][0]
    numbers = {name: entry[column] for name, entry in _confine._FORBIDDEN.items() if entry[column] is not None}
    wrong = {name: number for name, number in numbers.items() if known.get(name, number) != number}
    assert not wrong
    assert len(numbers.keys() & known.keys()) > 50


# --- the worker ------------------------------------------------------------------------------------------------------

IN_WORKER = """
import importlib.util, json, os, socket, subprocess, sys

spec = importlib.util.spec_from_file_location("_verify_worker", sys.argv[1])
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)
compare = worker.equal
worker.equal = lambda gold, pred: eval(gold[3:]) if gold.startswith("do ") else compare(gold, pred)
if sys.argv[2] == "without hook":
    sys.addaudithook = lambda hook: None
worker.main(3.0, 1 << 30, 1 << 40)
"""


def in_worker(expressions: list[str], hook: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Have a worker evaluate expressions in the place of comparisons: what it says at first, and its replies."""
    requests = "".join(json.dumps({"gold": text, "pred": "x+1"}) + "\n" for text in expressions)
    done = subprocess.run(
        [sys.executable, "-c", IN_WORKER, str(WORKER), "with hook" if hook else "without hook"],
        input=requests,
        capture_output=True,
        text=True,
        timeout=60,
    )
    ready, *replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(replies) == len(expressions), done.stderr
    return ready, replies


def test_a_worker_compares_and_does_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("secret")
    attempts = {
        "read": f"do open({str(tmp_path / 'file')!r}).read()",
        "write": f"do open({str(tmp_path / 'file')!r}, 'w')",
        "connect": "do socket.create_connection(('127.0.0.1', 9))",
        "start": "do subprocess.run(['/bin/true'])",
        "signal": "do os.kill(os.getppid(), 0)",
    }
    ready, replies = in_worker(["1+x", *attempts.values(), "2+x"], hook=False)
    if ready["missing"]:
        pytest.skip(f"this kernel lacks {ready['missing']}")
    assert ready["confined"] == LAYERS
    first, *others, last = replies
    assert (first["equal"], last["equal"]) == (True, False)
    assert {name: reply.get("error") for name, reply in zip(attempts, others, strict=True)} == dict.fromkeys(
        attempts, "PermissionError"
    )
    assert (tmp_path / "file").read_text() == "secret"
    # The interpreter's own hook is a wall of its own, for kernels without these layers.
    _, replies = in_worker([attempts[name] for name in ("write", "connect", "start", "signal")], hook=True)
    assert [reply.get("error") for reply in replies] == ["PermissionError"] * 4


def test_a_worker_gets_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds libraries is all that it gets of the environment."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    worker = _verify_pool._Worker(1.0)
    worker.start()
    try:
        path, deadline = Path(f"/proc/{worker._process.pid}/environ"), time.monotonic() + 60
        # Empty until the kernel has loaded the program, which may be after the process was made.
        while not (found := path.read_bytes()) and time.monotonic() < deadline:
            time.sleep(0.01)
        environment = found.split(b"\0")
    finally:
        worker.stop()
    assert b"PYTHONPATH=/nowhere" in environment and b"PYTHONHASHSEED=0" in environment
    assert not any(entry.startswith(b"HF_TOKEN") for entry in environment)
