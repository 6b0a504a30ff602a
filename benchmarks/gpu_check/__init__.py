"""Checks that only a GPU can make, in independent parts: ``bash scripts/gpu_check.sh [PART ...]``."""
