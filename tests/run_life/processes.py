"""Which processes live, and what becomes of them."""

import time
from collections.abc import Callable
from typing import Any

import psutil


def lives(process: psutil.Process) -> bool:
    """Whether it is more than an exit status."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def comes_true(
    condition: Callable[[], Any], seconds: float = 60.0, pause: float = 0.05
) -> bool:
    """Whether something comes true within this time, in which it is asked after each pause."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True
