"""Patch: a gloo process group on the CPU platform.

``verl/utils/distributed.py``, ``initialize_global_process_group_ray`` (verl 0.9.1) builds the backend string
``cpu:gloo,<device>:<backend>``. On the CPU platform that is ``cpu:gloo,cpu:gloo``, which torch refuses because it
names one device twice. The patch passes ``cpu:gloo`` where the caller leaves the backend open. It can go when verl
leaves the second half away on ``cpu``.
"""

from __future__ import annotations

from functools import wraps

from verl.utils import distributed


def patch() -> None:
    """Replace ``initialize_global_process_group_ray`` before the modules that import it by name are loaded."""
    original = distributed.initialize_global_process_group_ray

    @wraps(original)
    def initialize(timeout_second: float | None = None, backend: str | None = None) -> None:
        original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize
