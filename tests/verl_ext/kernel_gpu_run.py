"""Run by test_layouts_gpu in its own interpreter, on a GPU: saliency passes with verl's fused kernels.

Usage: ``python -m tests.verl_ext.kernel_gpu_run DIRECTORY``. The directory holds the model and the rows as ``plan.pt``;
``result.pt`` is written into it. Nothing is judged here.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.verl_ext.saliency_pass_ranks import Pass, Setup, build_engine, run_pass

SETUPS = {
    f"{kernels}{', packed' if packed else ''}": Setup("model", "fsdp", packed=packed, kernels=kernels)
    for kernels in ("torch", "triton")
    for packed in (False, True)
}
TEMPERATURE = 0.7


def main(folder: Path) -> None:
    """Run every setup and save its saliencies, or its traceback."""
    import verl  # noqa: F401  loads the plugin

    torch.cuda.set_device(0)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=0, world_size=1
    )
    rows = torch.load(folder / "plan.pt", weights_only=False)
    results: dict[str, Any] = {}
    for name, setup in SETUPS.items():
        try:
            engine = build_engine(setup, folder)
            results[name] = run_pass(engine, rows, Pass("embeddings", "official", TEMPERATURE, rows=3))["saliency"]
        except Exception:
            results[name] = traceback.format_exc()
    torch.save(results, folder / "result.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
