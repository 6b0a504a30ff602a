"""Settings for all tests, and which of them may run at the same time."""

from __future__ import annotations

import pytest
import torch

# The tests' tensors are tiny. Sharing them out over threads costs more than computing them, far more on a busy machine.
torch.set_num_threads(1)

# A whole verl run with two rollout replicas takes a third of a 24 GB machine, and Ray kills workers where memory runs short;
# so these come one after the other. The tests of any other file share what they start and stay together.
WHOLE_RUNS = (
    "test_training_run.py",
    "test_methods_run.py",
    "test_layouts_run.py",
    "test_cpu_platform.py",
    "test_killed_run.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Name the group of each test for ``pytest --dist loadgroup``; without it the groups mean nothing."""
    for item in items:
        group = "whole runs" if item.path.name in WHOLE_RUNS else item.path.name
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """pytest-xdist tells groups by the tests' ids; with a pytest that it cannot rename tests in, nothing stays together and
    every file starts its ranks on each worker."""
    grouped = getattr(session.config.option, "loadgroup", False)
    if grouped and session.items and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("this pytest-xdist does not group tests with this pytest; see requirements-cpu.txt")
