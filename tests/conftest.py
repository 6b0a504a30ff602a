"""Settings for all tests, where they run, and which of them may run at the same time."""

import gc
import logging
import os
import tempfile
from pathlib import Path

import pytest

from tests.clone import changed, files

# No test reads or leaves anything in the clone or at home: home, caches, the working folder and the one that configurations
# call PWD are an empty folder of this process. Before torch and others are imported, which read these variables.
AWAY = tempfile.TemporaryDirectory(prefix="away-", ignore_cleanup_errors=True)
OTHERS = """
OUTPUT_DIR DRY_RUN FRESH RAY_ADDRESS WANDB_RUN_ID WANDB_DIR VERL_PLATFORM VERL_USE_EXTERNAL_MODULES VERL_USE_EXTERNAL_PLUGINS
HF_HUB_CACHE HF_DATASETS_CACHE HF_MODULES_CACHE HF_ASSETS_CACHE HF_TOKEN_PATH TRANSFORMERS_CACHE TORCH_HOME TRITON_CACHE_DIR
VLLM_CACHE_ROOT VLLM_CONFIG_ROOT MPLCONFIGDIR XDG_DATA_HOME XDG_STATE_HOME
"""
"""Variables that would lead elsewhere, or change what a test starts."""
for name in OTHERS.split():
    os.environ.pop(name, None)
os.environ.update(
    HOME=AWAY.name,
    PWD=AWAY.name,
    HF_HOME=f"{AWAY.name}/huggingface",
    XDG_CACHE_HOME=f"{AWAY.name}/cache",
    XDG_CONFIG_HOME=f"{AWAY.name}/config",
    HYPOTHESIS_STORAGE_DIRECTORY=f"{AWAY.name}/hypothesis",
)

import torch  # noqa: E402

# The tests' tensors are tiny. Sharing them out over threads costs more than computing them, far more on a busy machine.
torch.set_num_threads(1)

# Files of a group run one after another, in one process. Whole verl runs take 6 to 10 GB, and Ray kills workers where that runs
# short; files with forks share the server of ``tests/forked.py``, whose imports take as long as many of their tests. Any other
# file is a group by itself; those that are named take over half a minute, and would leave other cores idle if they began last.
# The longest come first; the whole run of verl, of three minutes, waits for Ray more than it computes.
GROUPS = [
    "verl_ext/test_passes.py verl_ext/test_updates.py verl_ext/test_checks.py "
    "run_life/test_run_life.py benchmarks/test_benchmarks.py",
    "trl_ext/test_trl.py",
    "verl_ext/test_methods_run.py recipe/test_evaluate.py",
    "verl_ext/test_only_weights.py benchmarks/test_gpu_check.py",
    "run_life/test_watch.py",
    "recipe/test_wheel.py",
    "recipe/test_reward_processes.py",
    "verl_cpu/test_cpu_platform.py",
    "core/test_receipt.py",
]
TESTS = Path(__file__).parent
PLACES = {
    TESTS / file: place for place, files in enumerate(GROUPS) for file in files.split()
}
assert all(path.is_file() for path in PLACES), "a file of GROUPS is gone"


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """A text of 100 MB is in no test's name, which every process sends to the others."""
    return (
        f"{argname} of {len(val)}"
        if isinstance(val, str | bytes) and len(val) > 200
        else None
    )


@pytest.fixture(autouse=True)
def _loggers_speak(caplog):
    """Whatever a test before has configured of logging: libraries set levels, and disable loggers that are there already."""
    logging.disable(logging.NOTSET)
    caplog.set_level(logging.WARNING)
    for name, logger in list(logging.Logger.manager.loggerDict.items()):
        if name.split(".")[0] in ("grail_advantage", "recipe") and isinstance(
            logger, logging.Logger
        ):
            logger.disabled = False
            logger.propagate = True


def pytest_sessionstart(session: pytest.Session):
    # The process that starts the others looks after the clone
    if not hasattr(session.config, "workerinput"):
        session.config.stash[BEFORE] = files()


BEFORE = pytest.StashKey[dict[Path, int]]()


def pytest_collection_finish(session: pytest.Session):
    os.chdir(AWAY.name)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session):
    """Fail where a test left something in the clone."""
    if (earlier := session.config.stash.get(BEFORE, None)) is not None and (
        changes := changed(earlier, files())
    ):
        print("\nThe clone has other files than before the tests:", *changes, sep="\n  ")
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]):
    """Name the group of each test for ``pytest --dist loadgroup``, whose tests share what they start, longest groups first."""
    for item in items:
        item.add_marker(
            pytest.mark.xdist_group(
                str(PLACES.get(item.path, item.path.relative_to(TESTS)))
            )
        )
    items.sort(key=lambda item: PLACES.get(item.path, len(GROUPS)))
    gc.freeze()  # what is imported by now stays
