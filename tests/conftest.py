"""Settings for all tests, and which of them may run at the same time."""

from __future__ import annotations

import gc

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
    "test_resume_run.py",
)


# Files of half a minute and more on one core, the longest first: one that begins last leaves the other cores idle.
LONGEST = (
    "test_trl.py",
    "test_shared_forward.py",
    "test_sequence_parallel.py",
    "test_saliency_pass.py",
    "test_pass_memory.py",
    "test_three_ranks.py",
    "test_oar_pass.py",
    "test_reward.py",
    "test_setup.py",
    "test_launch_scripts.py",
    "test_identity.py",
    "test_checks.py",
    "test_benchmarks.py",
    "test_gpu_check.py",
    "test_browser.py",
    "test_adapters.py",
    "test_wheel.py",
    "test_layout_table.py",
    "test_driver.py",
    "test_nodes.py",
    "test_ranks.py",
    "test_work.py",
    "test_inference_passes.py",
    "test_evaluate.py",
    "test_layouts.py",
    "test_estimators.py",
    "test_token_weights.py",
    "test_sharded_models.py",
    "test_smoke.py",
    "test_tokenizers.py",
)
_RANKS = {"whole runs": -1, **{name: rank for rank, name in enumerate(LONGEST)}}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Name the group of each test for ``pytest --dist loadgroup``, and put the longest groups first.

    The order holds with ``--no-loadscope-reorder`` alone: pytest-xdist begins with the groups of most tests otherwise.
    """
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=lambda item: _RANKS.get(_group(item), len(LONGEST)))


def _group(item: pytest.Item) -> str:
    return "whole runs" if item.path.name in WHOLE_RUNS else item.path.name


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """pytest-xdist tells groups by the tests' ids; with a pytest that it cannot rename tests in, nothing stays together and
    every file starts its ranks on each worker.

    What is imported and collected by now stays: the garbage collector need not go through it again.
    """
    gc.collect()
    gc.freeze()
    grouped = getattr(session.config.option, "loadgroup", False)
    if grouped and session.items and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("this pytest-xdist does not group tests with this pytest; see requirements-cpu.txt")
