"""Takes from a process what comparing two answers does not need: files, network, other processes, privileges.

sympy evaluates text as Python, and the text is a model's. The audit hook of ``_verify_worker`` refuses what would reach the
system, but it lives in the interpreter that it guards. The layers here are the kernel's, need no privilege, and cannot be taken
off again:

- ``privileges``: ``no_new_privs``; of root's capabilities none stays but reading files of other users;
- ``limits``: no file grows, no process starts, few files open at once;
- ``landlock`` (Linux 5.13, Documentation/userspace-api/landlock.rst): nothing is read but the libraries, nothing is written,
  made or removed; from ABI 4 no TCP, from ABI 6 no signals to others;
- ``seccomp``: no sockets, no processes, no signals, no change to a file's owner, mode or times, which Landlock lets pass.

A layer that the kernel, or a container around this process, does not have is left out and named. Needs the standard library
alone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

_OPEN_FILES = 64
_READ_OTHERS_FILES = (1 << 1) | (1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: Landlock says which files

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_FILTER = 2
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same on every architecture
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many rights to files Landlock knows, by the version of its interface; later versions know as many as the last."""

_FORBIDDEN: dict[str, tuple[int, int | None]] = {
    # network; io_uring would do the same without these calls
    "socket": (41, 198),
    "socketpair": (53, 199),
    "io_uring_setup": (425, 425),
    # processes and threads
    "clone": (56, 220),
    "clone3": (435, 435),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    # other processes
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    # what makes, removes and renames, where there is no Landlock
    "creat": (85, None),
    "openat2": (437, 437),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "rmdir": (84, None),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    # what Landlock lets pass
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    # limits, name spaces, the kernel
    "setrlimit": (160, 164),
    "prlimit64": (302, 261),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "chroot": (161, 51),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
}
"""System calls by their numbers on x86-64 (arch/x86/entry/syscalls/syscall_64.tbl) and 64-bit ARM
(include/uapi/asm-generic/unistd.h)."""
_OPENING: tuple[tuple[tuple[int, int | None], int], ...] = (((257, 56), 2), ((2, None), 1))
"""``openat`` and ``open``, and which argument their flags are."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the table above, and the kernel's AUDIT_ARCH."""
_X32 = 0x40000000
"""Numbers from here on are the x32 interface's, a second door to the same calls on x86-64."""


def confine(readable: Iterable[Path]) -> tuple[list[str], dict[str, str]]:
    """Confine this thread and what it starts, for good. To be called while there is one thread.

    Args:
        readable: folders and files that may still be read.

    Returns:
        The layers that hold, and those that could not be had with the reason.
    """
    layers: dict[str, Callable[[], None]] = {
        "privileges": _drop_privileges,
        "limits": _limit,
        "landlock": lambda: _restrict_files(readable),
        "seccomp": _filter_calls,
    }
    active, missing = [], {}
    for name, apply in layers.items():
        try:
            apply()
        except OSError as error:
            missing[name] = error.strerror or str(error)
        else:
            active.append(name)
    return active, missing


def lower_limit(kind: int, value: int) -> None:
    """Set a limit of this process, hard and soft, to this value, or leave it where it is lower already."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _limit() -> None:
    lower_limit(resource.RLIMIT_FSIZE, 0)  # pipes are no files
    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_NPROC, 0)
    lower_limit(resource.RLIMIT_NOFILE, _OPEN_FILES)


def _drop_privileges() -> None:
    if not sys.platform.startswith("linux"):
        raise OSError(errno.ENOSYS, f"not on {sys.platform}")
    libc = _libc()
    _call("no_new_privs", libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    # capget and capset with version 3 of their structures: two words each of effective, permitted, inheritable.
    head = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    sets = ctypes.create_string_buffer(24)
    _call("capget", libc.capget(head, sets))
    permitted = struct.unpack("=6I", sets.raw)[1] & _READ_OTHERS_FILES
    sets = ctypes.create_string_buffer(struct.pack("=6I", permitted, permitted, 0, 0, 0, 0), 24)
    _call("capset", libc.capset(head, sets))


def _restrict_files(readable: Iterable[Path]) -> None:
    libc = _libc()
    version = _call("landlock", libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))
    rights = (1 << _FILE_RIGHTS.get(version, max(_FILE_RIGHTS.values()))) - 1
    handled = struct.pack("=Q", rights)
    handled += struct.pack("=Q", 0b11) if version >= 4 else b""  # TCP: bind, connect
    handled += struct.pack("=Q", 0b11) if version >= 6 else b""  # abstract sockets and signals stay inside
    rules = _call("landlock_create_ruleset", libc.syscall(_LANDLOCK_CREATE, handled, ctypes.c_size_t(len(handled)), 0))
    try:
        for path in readable:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                allowed = _READ_FILE | (_READ_DIR if path.is_dir() else 0)
                beneath = struct.pack("=Qi", allowed, place)
                _call(f"landlock_add_rule for {path}", libc.syscall(_LANDLOCK_ADD, rules, 1, beneath, 0))
            finally:
                os.close(place)
        _call("landlock_restrict_self", libc.syscall(_LANDLOCK_RESTRICT, rules, 0))
    finally:
        os.close(rules)


def _filter_calls() -> None:
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    column, architecture = _ARCHITECTURES[machine]
    numbers = [number for entry in _FORBIDDEN.values() if (number := entry[column]) is not None]
    opening = [(number, place) for entry, place in _OPENING if (number := entry[column]) is not None]
    program = _program(architecture, numbers, opening)
    code = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions, padding, their address.
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))
    _call("seccomp", _libc().prctl(_PR_SET_SECCOMP, _SECCOMP_FILTER, head, 0, 0))


def _program(architecture: int, numbers: Sequence[int], opening: Sequence[tuple[int, int]]) -> bytes:
    """A filter in classic BPF: EPERM for these system calls, the end for another architecture's, all others pass.

    An instruction is code, jump if true, jump if false, operand; jumps count from the next instruction.

    Args:
        architecture: the kernel's AUDIT_ARCH.
        numbers: of the calls that are refused.
        opening: of the calls that open files, with the place of their flags among the arguments; refused for writing.
    """
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, refuse, allow = 0x80000000, 0x00050000 | errno.EPERM, 0x7FFF0000
    tests = [(equal, number) for number in numbers] + [(at_least, _X32)]
    # Behind each jump so many instructions are left before those that answer.
    instructions = [
        (load, 0, 0, 4),  # seccomp_data.arch
        (equal, 1, 0, architecture),
        (answer, 0, 0, kill),
        (load, 0, 0, 0),  # seccomp_data.nr
    ]
    rest = len(tests) + 3 * len(opening)
    for test, number in tests:
        rest -= 1
        instructions.append((test, rest + 1, 0, number))
    for number, place in opening:
        rest -= 3
        flags = 16 + 8 * place  # seccomp_data.args, the lower half on these machines
        instructions += [(equal, 0, 2, number), (load, 0, 0, flags), (any_bit, rest + 1, rest, _WRITING)]
    instructions += [(answer, 0, 0, allow), (answer, 0, 0, refuse)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(what: str, result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result
