"""Part d: flash attention. Packed rows on one GPU, and sequence parallelism where there are two."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import torch

from gpu_check.outcome import Outcome

LIMIT = 1.1
"""Factor that the saliency of a middling token may be off by in bfloat16."""


def run(outcome: Outcome, device: str = "cuda") -> None:
    """All checks of the part: saliencies in bfloat16 by verl's engine against those of a plain float32 model.

    Args:
        outcome: what they are written to.
        device: ``cuda``, or ``cpu`` in tests, where a reference takes the kernel's place.
    """
    from tests.verl_ext.gpu_checks import FLASH, flash_errors

    there = torch.cuda.device_count() if device == "cuda" else 1
    for ranks in sorted({layout.ranks for layout in FLASH.values()}):
        if ranks > there:
            for name in (name for name, layout in FLASH.items() if layout.ranks == ranks):
                outcome.not_run(name, f"needs {ranks} GPUs, here {'is' if there == 1 else 'are'} {there}")
            continue
        with outcome.attempt(f"flash attention on {ranks} GPUs"), tempfile.TemporaryDirectory() as folder:
            for name, error in flash_errors(Path(folder), ranks, device).items():
                factor = math.exp(error)
                outcome.check(name, factor < LIMIT, f"off by a factor {factor:.4f} (less than {LIMIT})")
