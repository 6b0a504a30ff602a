"""Checks that only a GPU can make, in independent parts: ``bash scripts/gpu_check.sh [PART ...]``.

:mod:`~gpu_check.parts` names the parts and what they need; each runs in a process of its own with a time limit and writes
``benchmarks/results/gpu_check/PART.json``, from which :mod:`~gpu_check.page` writes the end of ``docs/gpu.md``. Part a
(:mod:`~gpu_check.plain`) needs torch, transformers, numpy and pydantic alone, so nothing that every part imports needs more.
"""
