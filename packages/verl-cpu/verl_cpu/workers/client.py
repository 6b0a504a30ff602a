"""Takes the place of a forked process: ``client.py SOCKET SCRIPT [ARGUMENT ...]``, with the standard library alone."""

import json
import os
import socket
import sys


def main() -> None:
    """Ask the server for a fork that runs the script, and wait for its end; without an answer, run the script."""
    address, *arguments = sys.argv[1:]
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "nice": os.nice(0),
    }
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
            socket.send_fds(connection, [b"."], [0, 1, 2])
            connection.sendall(json.dumps(request).encode())
            # The server reads to the end of the request.
            connection.shutdown(socket.SHUT_WR)
            # A fork says that it is there; a server that makes none closes, and the script runs here.
            if connection.recv(1):
                connection.recv(1)  # the fork holds its end of the connection as long as it lives
                return
    except OSError:
        pass
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
