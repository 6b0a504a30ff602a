"""Part c: flash attention. Packed rows on one GPU, and sequence parallelism where there are two."""

from __future__ import annotations

from gpu_check.outcome import Outcome
from gpu_check.pytest_checks import run_tests

TESTS = ("tests/verl_ext/test_flash_attention_gpu.py",)


def run(outcome: Outcome, device: str = "cuda") -> None:
    """All checks of the part: weights in bfloat16 by verl's engine against a plain float32 model.

    Args:
        outcome: what they are written to.
        device: the tests find it themselves, and skip without a GPU.
    """
    with outcome.attempt("flash attention"):
        run_tests(outcome, TESTS)
