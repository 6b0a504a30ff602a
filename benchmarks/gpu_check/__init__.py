"""Checks that only a GPU can make, in independent parts: ``bash scripts/gpu_check.sh [PART ...]``.

Each part is one process (:mod:`~benchmarks.gpu_check.__main__`) that keeps its results on the disk as it goes
(:mod:`~benchmarks.gpu_check.outcome`). Part a needs torch and transformers alone, so nothing that every part imports
needs more.
"""
