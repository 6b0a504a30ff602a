"""Settings for all tests, and which of them may run at the same time."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import pytest
import torch

# The tests' tensors are tiny. Sharing them out over threads costs more than computing them, far more on a busy machine.
torch.set_num_threads(1)

TESTS = Path(__file__).parent
# Files of a group run one after another, in one process. Whole verl runs take 6 to 10 GB, and Ray kills workers where that runs
# short; files with forks share the server of ``tests/forked.py``, whose imports take as long as many of their tests.
GROUPS = {
    "two engines": ("verl_ext/test_methods_run.py", "recipe/test_evaluate.py"),
    "one engine": ("verl_ext/test_only_weights.py",),
    "forks": (
        *("verl_ext/test_passes.py", "verl_ext/test_updates.py", "verl_ext/test_checks.py"),
        *("run_life/test_run_life.py", "benchmarks/test_benchmarks.py"),
    ),
}
# A file of more than half a minute that begins last would leave the other cores idle.
LONGEST = (
    *("trl_ext/test_trl.py", "benchmarks/test_gpu_check.py", "run_life/test_watch.py", "recipe/test_wheel.py"),
    *("recipe/test_reward_processes.py", "verl_cpu/test_cpu_platform.py", "core/test_receipt.py"),
)
_ORDER = (*GROUPS, *LONGEST)
_GROUP_OF = {file: group for group, files in GROUPS.items() for file in files}
assert all((TESTS / file).is_file() for file in (*_GROUP_OF, *LONGEST)), "a file of GROUPS or LONGEST is gone"


def _group(item: pytest.Item) -> str:
    file = item.path.relative_to(TESTS).as_posix()
    return _GROUP_OF.get(file, file)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """A text of 100 MB is in no test's name, which every process sends to the others."""
    return f"{argname} of {len(val)}" if isinstance(val, str | bytes) and len(val) > 200 else None


@pytest.fixture(autouse=True)
def _loggers_speak(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a test before has configured of logging: libraries set levels, and disable loggers that are there already."""
    logging.disable(logging.NOTSET)
    caplog.set_level(logging.WARNING)
    for name in ("grail_advantage", "recipe"):
        for logger in [logging.getLogger(name), *_below(name)]:
            logger.disabled, logger.propagate = False, True


def _below(name: str) -> list[logging.Logger]:
    known = logging.Logger.manager.loggerDict.items()
    return [logger for other, logger in known if other.startswith(f"{name}.") and isinstance(logger, logging.Logger)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Name the group of each test for ``pytest --dist loadgroup``, whose tests share what they start, longest groups first."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=lambda item: _ORDER.index(_group(item)) if _group(item) in _ORDER else len(_ORDER))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """pytest-xdist tells groups by the tests' ids; with a pytest in which it cannot rename tests, nothing stays together."""
    gc.collect()
    gc.freeze()  # what is imported by now stays
    grouped = getattr(session.config.option, "loadgroup", False)
    if grouped and session.items and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("this pytest-xdist does not group tests with this pytest; see requirements-cpu.txt")
