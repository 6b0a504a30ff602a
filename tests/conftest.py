"""Settings for all tests, and which of them may run at the same time."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

# The tests' tensors are tiny. Sharing them out over threads costs more than computing them, far more on a busy machine.
torch.set_num_threads(1)

# Files of a group run one after another, in one process. A whole verl run with two engines takes up to 10 GB of memory, one
# with a single engine 6 GB, and Ray kills workers where that runs short: at most one of each kind at a time. Files with ranks
# share the fork server of ``tests/forked.py``, whose imports take as long as many of their tests.
GROUPS = {
    "two engines": ("test_methods_run.py", "test_evaluate.py"),
    "one engine": ("test_only_weights.py", "test_agent_run.py"),
    "forks": (
        *("test_passes.py", "test_pass_details.py", "test_zero_advantage_update.py", "test_models.py", "test_ranks.py"),
        *("test_benchmarks.py", "test_command_line.py"),
    ),
    # A process fine-tunes the bench's small model once, and writes the reports for the browser once.
    "bench": ("test_known_answers.py", "test_train.py", "test_run.py"),
    "pages": ("test_browser.py", "test_browser_hostile.py"),
}
# A file of more than half a minute that begins last would leave the other cores idle.
LONGEST = (
    *("test_gpu_check.py", "test_watch.py", "test_trl.py", "test_wheel.py", "test_reward_processes.py"),
    *("test_cpu_platform.py", "test_launch_scripts.py", "test_checks.py"),
    *("test_published_setup.py", "test_shared_micro_batches.py", "test_layouts.py", "test_token_weights.py"),
)
_ORDER = (*GROUPS, *LONGEST)
_GROUP_OF = {file: group for group, files in GROUPS.items() for file in files}


def _group(item: pytest.Item) -> str:
    return _GROUP_OF.get(item.path.name, item.path.name)


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
