"""Checks that only a GPU can make, in independent parts: ``bash scripts/gpu_check.sh [PART ...]``.

:mod:`~benchmarks.gpu_check.parts` names the parts and what they need; each runs in a process of its own with a time limit and
keeps ``PART.json`` in the folder of results up to date, from which :mod:`~benchmarks.gpu_check.page` writes ``page.md``.
Part a needs this package's own requirements alone (torch, transformers, numpy, pydantic), so nothing that every part imports
needs more.
"""
