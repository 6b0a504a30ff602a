"""Stands where an interpreter is asked for: has the command run in a fork of ``tests/fork_server.py``, and ends as that does.

It hands over its arguments, variables, folder and open files, and stays: a signal to it ends the fork, too. Run with ``-IS``,
so that it starts in a few milliseconds.
"""

import json
import os
import socket
import sys


def main() -> int:
    """Ask for the fork and wait for its end."""
    address, python, *arguments = sys.argv[1:]
    # Without the one that reads the folder, which is closed again by then.
    handed = [number for number in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{number}")]
    request = json.dumps(
        {
            "python": python,
            "arguments": arguments,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "numbers": handed,
        }
    ).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [len(request).to_bytes(8, "little")], handed)
        server.sendall(request)
        # Nobody else is to see an end of file that this process keeps open.
        for number in handed:
            if number > 2:
                os.close(number)
        status = server.recv(4)
    return int.from_bytes(status, "little", signed=True) if status else 1


if __name__ == "__main__":
    code = main()
    if code < 0:  # by a signal: end by the same one
        os.kill(os.getpid(), -code)
    sys.exit(code)
