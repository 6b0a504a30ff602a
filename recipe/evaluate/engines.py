"""Sampling with vLLM: one engine for each GPU or group of GPUs, by vLLM's own data parallelism.

Every sample is a request of its own whose seed follows from the evaluation's seed, the benchmark, the problem and the
sample's number alone. So it matters neither in which order and by which engine problems are sampled, nor in how many sittings.

The tokens themselves depend on vLLM: the last bits of the logits may depend on the rest of the batch, and a sample then differs
from where two tokens are almost equally likely. Measured with vLLM 0.28 on a CPU: in float32 the tokens were the same alone and
in a batch; in bfloat16 one of eight samples of 64 tokens differed. So a CPU always computes in float32. On GPUs of compute
capability 9.0 and above ``VLLM_BATCH_INVARIANT=1`` asks vLLM for the same numbers in any batch.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn; the defaults are those of the published evaluation."""

    samples: int = 3
    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 20
    max_tokens: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("samples", 1), ("temperature", 0), ("top_k", 0), ("max_tokens", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least {least}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p} must be above 0 and at most 1")


class Request(NamedTuple):
    """A problem to be sampled."""

    benchmark: str
    index: int
    prompt_ids: list[int]


class Answer(NamedTuple):
    """One response."""

    seed: int
    token_ids: list[int]
    """With the end token."""
    finish_reason: str
    """``stop`` or ``length``."""


def sample_seed(seed: int, benchmark: str, index: int, sample: int) -> int:
    """Seed of one sample: 63 bits of the SHA-256 of its identity."""
    text = f"{seed}/{benchmark}/{index}/{sample}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def engine_version() -> str:
    """Name, version and mode of the engine; the version of the CPU build contains ``cpu``."""
    try:
        version = f"vllm {importlib.metadata.version('vllm')}"
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            "vLLM is not installed; scripts/setup_cpu.sh installs its CPU build, requirements.txt names the one for GPUs"
        ) from None
    return f"{version}, batch-invariant" if os.environ.get("VLLM_BATCH_INVARIANT") == "1" else version


def engine_count(workers: int | None, tensor_parallel_size: int) -> int:
    """Number of engines: ``workers``, or as many as the GPUs in sight allow; with vLLM's CPU build one."""
    if "cpu" in engine_version():
        return workers or 1
    import torch

    gpus = torch.cuda.device_count()
    engines = workers or max(1, gpus // tensor_parallel_size)
    if (needed := engines * tensor_parallel_size) > gpus:
        asked = f"--workers {engines} x --tensor-parallel-size {tensor_parallel_size}"
        raise ValueError(f"{asked} needs {needed} GPUs, in sight are {gpus}; lower one of them")
    return engines


def check_length(model: Path, longest: int) -> None:
    """Refuse a ``longest`` prompt with response that the model in a Hugging Face folder has no positions for."""
    from transformers import AutoConfig

    positions = getattr(AutoConfig.from_pretrained(model).get_text_config(), "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise ValueError(
            f"{model} has {positions} positions, but the longest prompt and a response may need {longest}: lower "
            f"--max-tokens by {longest - positions}"
        )


def set_environment() -> None:
    """Variables that vLLM reads while it starts; those that are set already are left alone."""
    # Its warnings are about the choices made here, and would break the progress bar.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # FlashInfer's sampler is compiled at run time, for which many machines have no nvcc.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if "cpu" in engine_version():
        from grail_advantage.verl_cpu import environment

        environment.apply_defaults()


def start_engine(model: Path, longest: int, engines: int, tensor_parallel_size: int) -> AsyncLLM:
    """Load the model into vLLM: on a GPU in the precision its weights are stored in, on a CPU in float32."""
    set_environment()
    from transformers import AutoConfig
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    # Left to itself, vLLM would convert float32 weights to 16 bits.
    dtype = AutoConfig.from_pretrained(model).get_text_config().dtype
    options: dict[str, Any] = {"dtype": str(dtype or "auto").removeprefix("torch.")}
    if "cpu" in engine_version():
        options = {
            "dtype": "float32",
            "enforce_eager": True,  # compiling takes longer than it saves
            # A prompt read in pieces draws random numbers that vLLM gives back afterwards, which it cannot do on a CPU
            # ("CPU Generator does not use offset", GPUModelRunner._bookkeeping_sync in vLLM 0.28).
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(longest, 4096),
        }
    arguments = AsyncEngineArgs(
        model=str(model),
        max_model_len=longest,
        data_parallel_size=engines,
        tensor_parallel_size=tensor_parallel_size,
        # A prompt is short beside its response, and without the cache no sample's numbers come from another's batch.
        enable_prefix_caching=False,
        disable_log_stats=True,
        **options,
    )
    return AsyncLLM.from_engine_args(arguments)


def sampling_params(sampling: Sampling, seed: int) -> Any:
    """vLLM's parameters for one sample."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=seed,
        output_kind=RequestOutputKind.FINAL_ONLY,
        detokenize=False,  # the tokenizer that encoded the prompts decodes the responses
    )


async def sample(
    model: Path,
    requests: Sequence[Request],
    sampling: Sampling,
    longest: int,
    *,
    engines: int,
    tensor_parallel_size: int,
    done: Callable[[Request, list[Answer]], object],
) -> None:
    """Load the model and sample all problems in one go; call ``done`` for each of them as soon as its samples are there.

    Raises:
        RuntimeError: an engine failed, or vLLM gave up on a sample.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    engine = start_engine(model, longest, engines, tensor_parallel_size)

    async def answer(request: Request, number: int) -> Answer:
        seed = sample_seed(sampling.seed, request.benchmark, request.index, number)
        name = f"{request.benchmark}/{request.index}/{number}"
        prompt = {"prompt_token_ids": request.prompt_ids}
        async for output in engine.generate(prompt, sampling_params(sampling, seed), name):
            final = output.outputs[0]
        if final.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended sample {name} with {final.finish_reason!r}")
        return Answer(seed, list(final.token_ids), final.finish_reason)

    async def problem(request: Request) -> None:
        done(request, await asyncio.gather(*(answer(request, number) for number in range(sampling.samples))))

    try:
        await asyncio.gather(*map(problem, requests))
    except EngineDeadError:
        raise RuntimeError("an engine ended; its output above says why. The same command resumes here") from None
    finally:
        engine.shutdown()
