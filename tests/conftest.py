"""Settings for all tests, and which of them may run at the same time."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import pytest
import torch

# The tests' tensors are tiny. Sharing them out over threads costs more than computing them, far more on a busy machine.
torch.set_num_threads(1)

# Files of a group run one after another, in one process. Whole verl runs take 6 to 10 GB, and Ray kills workers where that runs
# short; files with forks share the server of ``tests/forked.py``, whose imports take as long as many of their tests. Any other
# file is a group by itself; those that are named take over half a minute, and would leave other cores idle if they began last.
GROUPS = [
    "verl_ext/test_methods_run.py recipe/test_evaluate.py",
    "verl_ext/test_only_weights.py benchmarks/test_gpu_check.py",
    "verl_ext/test_passes.py verl_ext/test_updates.py verl_ext/test_checks.py "
    "run_life/test_run_life.py benchmarks/test_benchmarks.py",
    *("trl_ext/test_trl.py", "run_life/test_watch.py", "recipe/test_wheel.py"),
    *("recipe/test_reward_processes.py", "verl_cpu/test_cpu_platform.py", "core/test_receipt.py"),
]
TESTS = Path(__file__).parent
PLACES = {TESTS / file: place for place, files in enumerate(GROUPS) for file in files.split()}
assert all(path.is_file() for path in PLACES), "a file of GROUPS is gone"


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """A text of 100 MB is in no test's name, which every process sends to the others."""
    return f"{argname} of {len(val)}" if isinstance(val, str | bytes) and len(val) > 200 else None


@pytest.fixture(autouse=True)
def _loggers_speak(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a test before has configured of logging: libraries set levels, and disable loggers that are there already."""
    logging.disable(logging.NOTSET)
    caplog.set_level(logging.WARNING)
    for name, logger in list(logging.Logger.manager.loggerDict.items()):
        if name.split(".")[0] in ("grail_advantage", "recipe") and isinstance(logger, logging.Logger):
            logger.disabled, logger.propagate = False, True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Name the group of each test for ``pytest --dist loadgroup``, whose tests share what they start, longest groups first."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(str(PLACES.get(item.path, item.path.relative_to(TESTS)))))
    items.sort(key=lambda item: PLACES.get(item.path, len(GROUPS)))
    gc.freeze()  # what is imported by now stays
