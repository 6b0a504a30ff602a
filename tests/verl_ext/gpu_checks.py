"""Checks of verl's engine that need a GPU: plain functions, which ``scripts/gpu_check.sh`` and the tests call.

A run of this module is one rank; ``device="cpu"`` has a reference attention in place of flash attention's kernel, and none of
verl's triton kernels.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from grail_advantage.verl_ext.shared_forward import DeviceWatch
from tests.verl_ext import pass_plan as plan
from tests.verl_ext.engines import HALF, REFERENCE, Setup
from tests.verl_ext.pass_ranks import Experiments
from tests.verl_ext.plain_model import Plain, log_errors
from tests.verl_ext.rank_group import of_all_ranks, on_gpus, run_rank, start_ranks

KERNELS = {
    f"{kernels}{', packed' if packed else ''}": Setup("wide", "fsdp", 1, packed=packed, kernels=kernels)
    for kernels in ("torch", "triton")
    for packed in (False, True)
}
"""Backends of verl's fused kernels."""
FLASH = {
    f"{strategy}, {ranks} GPU{'s' if ranks > 1 else ''}{f', {shared} a sequence' if shared > 1 else ''}": Setup(
        "qwen3", strategy, ranks, packed=True, sequence_parallel=shared, attention=REFERENCE, options=HALF
    )
    for ranks, shared in ((1, 1), (2, 1), (2, 2))
    for strategy in ("fsdp", "fsdp2")
}
"""Packed rows in bfloat16, the last two with sequence parallelism."""
MODULE = "tests.verl_ext.gpu_checks"


def flash_errors(folder: Path, ranks: int, device: str = "cuda") -> dict[str, float]:
    """By layout of so many GPUs, the median ``|log(found / expected)|`` of saliencies in bfloat16 with flash attention; a plain
    float32 model gives the expected ones."""
    plain = Plain(plan.write_models(folder))
    results = start_ranks(MODULE, folder, ranks, gpus=device == "cuda")
    return {
        name: float(log_errors(plain, of_all_ranks(results, "halved", name), setup).median())
        for name, setup in FLASH.items()
        if setup.ranks == ranks
    }


def kernel_errors(folder: Path, device: str = "cuda") -> dict[str, float]:
    """By backend of verl's fused kernels, how far its scores are from a plain model's, in parts of a row's largest score."""
    plain = Plain(plan.write_models(folder))
    results = start_ranks(MODULE, folder, 1, gpus=device == "cuda")
    rollouts, _ = plan.pass_rows("saliency, robust", 0, 1)
    errors = {}
    for name in of_device(device):
        (scores,) = of_all_ranks(results, "kernels", name)
        errors[name] = 0.0
        for rollout, scores_T in zip(rollouts, scores, strict=True):
            expected_T = plain.scores("wide", "saliency, robust")[rollout][: len(scores_T)]
            if not torch.equal(scores_T.isnan(), expected_T.isnan()):
                errors[name] = torch.inf
            elif (there_T := ~expected_T.isnan()).any():
                error = (scores_T - expected_T)[there_T].abs().max() / expected_T[there_T].abs().max()
                errors[name] = max(errors[name], float(error))
    return errors


def of_device(device: str) -> dict[str, Setup]:
    """The kernels that a device has."""
    return {name: setup for name, setup in KERNELS.items() if device == "cuda" or setup.kernels == "torch"}


def seconds_of_work(products: int = 100) -> tuple[float, float, float]:
    """Seconds in which the host hands work out to the GPU, those that ``DeviceWatch`` gives for it, and those until its end.

    Handing out takes a moment only; the watch has to see how long the GPU works.
    """
    watch, matrix_DD = DeviceWatch(), torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    with watch.running():
        for _ in range(products):
            matrix_DD @ matrix_DD
    handed_out = time.perf_counter() - start
    seconds = watch.seconds()
    return handed_out, seconds, time.perf_counter() - start


if __name__ == "__main__":
    of_size = {name: setup for name, setup in FLASH.items() if setup.ranks == int(sys.argv[2])}
    device = "cuda" if on_gpus() else "cpu"
    kernels = of_device(device) if sys.argv[2] == "1" else {}
    run_rank(Experiments, {"halved": of_size, "kernels": kernels}, sys.argv[1:])
