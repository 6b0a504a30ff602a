"""What vLLM and the trainer need of a machine, each tried alone, in about a minute.

    python -m benchmarks.gpu_check.machine cuda

A line of JSON for each: its name, whether it holds, and a detail, with the remedy where it does not. Part l reads them from
a process of its own, as a fault can take the GPU's state along.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch.multiprocessing.reductions import reduce_tensor
from torch.nn import functional

from benchmarks.setup import random_model

FLASH_ATTN = find_spec("flash_attn") is not None


def vllm_finds_the_gpu(device: str) -> str:
    """vLLM looks for it through NVML, which torch does not need. Remedy: add the folder of libnvidia-ml.so.1 to
    LD_LIBRARY_PATH; in Docker --gpus all."""
    from vllm.platforms import current_platform

    assert current_platform.is_cuda(), f"vLLM took the platform {type(current_platform).__name__}"
    return f"compute capability {current_platform.get_device_capability()}"


def vllm_kernels(device: str) -> str:
    """One of vLLM's compiled kernels against torch's. Remedy: this wheel has none for the GPU; take the vLLM of verl's
    image (Dockerfile)."""
    import vllm._custom_ops as kernels

    values = torch.randn(64, 1024, device=device, dtype=torch.bfloat16)
    output = torch.empty_like(values)
    kernels.rms_norm(output, values, torch.ones_like(values[0]), 1e-6)
    return limited(output, functional.rms_norm(values.float(), (1024,)))


def attention(device: str) -> str:
    """The trainer's, of two responses in one row, in bfloat16 against each alone in float32; logits and gradients.
    Remedy: +actor_rollout_ref.model.override_config.attn_implementation=sdpa."""
    name = "sdpa"
    if device == "cuda":
        from recipe import without_flash_attn

        name = "flash_attention_2" if FLASH_ATTN else without_flash_attn.ATTENTION
    packed = random_model("small", device, torch.bfloat16)
    packed.set_attn_implementation(name)
    alone = random_model("small", device, torch.float32)
    lengths = [100, 200]
    tokens_1N = torch.randint(8000, (1, 300), device=device)
    positions_1N = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    logits = packed(input_ids=tokens_1N, position_ids=positions_1N, use_cache=False).logits[0].float()
    expected = torch.cat([alone(input_ids=part).logits[0] for part in tokens_1N.split(lengths, dim=1)])
    upstream = torch.randn_like(expected)
    gradients = [
        torch.autograd.grad((output * upstream).sum(), model.get_input_embeddings().weight)[0]
        for output, model in ((logits, packed), (expected, alone))
    ]
    return f"{name}, logits {limited(logits, expected)}, gradients {limited(*gradients)}"


def log_probabilities(device: str) -> str:
    """verl's, of bfloat16 logits, as its engine computes them in a run, against float64. Remedy: VERL_DISABLE_FLASH_ATTN_CE=1
    in the environment."""
    from verl.utils.torch_functional import logprobs_from_logits

    if not FLASH_ATTN:
        import recipe.without_flash_attn  # noqa: F401
    vocabulary = 151936 if device == "cuda" else 1000
    logits = torch.randn(512, vocabulary, device=device, dtype=torch.bfloat16)
    labels = torch.randint(vocabulary, (512,), device=device)
    expected = -functional.cross_entropy(logits.double(), labels, reduction="none")
    return limited(logprobs_from_logits(logits, labels), expected, most=1e-5)


def cuda_ipc(device: str) -> str:
    """verl hands weights to vLLM as memory of the GPU that another process reads. Remedy: in Docker --ipc=host; no
    PYTORCH_CUDA_ALLOC_CONF."""
    context = multiprocessing.get_context("spawn")
    answers, memory = context.Queue(), torch.ones(2**22, device=device)
    context.Process(target=_add_up, args=(reduce_tensor(memory), answers), daemon=True).start()
    assert answers.get(timeout=60) == 2**22
    return "another process reads the GPU's memory"


def _add_up(handle: tuple[Callable, tuple], answers: Any) -> None:
    function, arguments = handle
    answers.put(float(function(*arguments).sum()))


def sleep_mode(device: str) -> str:
    """vLLM's allocator gives its memory to the trainer while that works. Remedy: a lower ROLLOUT_GPU_MEM_UTIL with
    actor_rollout_ref.rollout.free_cache_engine=False +actor_rollout_ref.rollout.enable_sleep_mode=False."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.get_instance()
    with allocator.use_memory_pool(tag="weights"):
        memory = torch.ones(2**28, device=device)
    free_before, _ = torch.cuda.mem_get_info()
    allocator.sleep(offload_tags=())
    free, _ = torch.cuda.mem_get_info()
    allocator.wake_up()
    assert free - free_before > memory.nbytes / 2, f"{free - free_before} of {memory.nbytes} bytes were freed"
    return f"{(free - free_before) / 2**30:.1f} GiB freed"


def limited(actual: torch.Tensor, expected: torch.Tensor, most: float = 0.05) -> str:
    """How far one tensor is off the other, as a share of its size; AssertionError: by more than ``most``."""
    error = float((actual.detach() - expected.detach()).double().norm() / expected.detach().double().norm())
    detail = f"off by {error:.2g} of their size, at most {most:g}"
    assert error <= most, detail
    return detail


CHECKS = {
    "cpu": (attention, log_probabilities),
    "cuda": (vllm_finds_the_gpu, vllm_kernels, attention, log_probabilities, cuda_ipc, sleep_mode),
}


def main(device: str) -> None:
    """Try everything that the device has. Of a check that fails the docstring says what it is for, and the remedy."""
    for check in CHECKS[device]:
        holds = True
        try:
            detail = check(device)
        except Exception as error:
            traceback.print_exc()
            holds = False
            detail = f"{type(error).__name__}: {error}. {' '.join(str(check.__doc__).split())}"
        print(json.dumps([check.__name__.replace("_", " "), holds, detail]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)  # destructors of vLLM's allocator end in an error
