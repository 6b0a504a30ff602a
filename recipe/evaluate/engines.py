"""Sampling with vLLM: one engine for each GPU or group of GPUs, by vLLM's own data parallelism.

Every sample is a request of its own whose seed follows from the evaluation's seed, the benchmark, the problem and the
sample's number alone. So it matters neither in which order and by which engine problems are sampled, nor in how many runs.

The last bits of the logits may depend on the rest of the batch. Measured with vLLM 0.28 on a CPU, float32 gave the same tokens
alone and in a batch, bfloat16 did not. So a CPU always computes in float32. On GPUs of compute capability 9.0 and above
``VLLM_BATCH_INVARIANT=1`` asks vLLM for the same numbers in any batch.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe.evaluate.store import KEY

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.v1.engine.async_llm import AsyncLLM


def sample_seed(name: str) -> int:
    """Seed of the sample ``SEED/BENCHMARK/INDEX/SAMPLE``: 63 bits of the SHA-256 of this name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def engine_version() -> str:
    """Name, version and mode of the engine; the version of the CPU build contains ``cpu``."""
    try:
        version = f"vllm {importlib.metadata.version('vllm')}"
    except importlib.metadata.PackageNotFoundError:
        raise ValueError("vLLM is not installed; scripts/setup_cpu.sh or scripts/setup_gpu.sh installs it") from None
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


def start_engine(model: Path, longest: int, engines: int, tensor_parallel_size: int) -> AsyncLLM:
    """Load the model into vLLM: on a GPU in the precision its weights are stored in, on a CPU in float32.

    Variables that vLLM reads while it starts are set, unless they are set already. vLLM raises ValueError where the model has
    fewer positions than the ``longest`` prompt with its response needs.
    """
    # Its warnings are about the choices made here, and would break the progress bar.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # FlashInfer's sampler is compiled at run time, for which many machines have no nvcc.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if "cpu" in engine_version():
        from grail_advantage.verl_cpu import environment

        environment.apply_defaults()
        options: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,  # compiling takes longer than it saves
            # A prompt read in pieces draws random numbers that vLLM gives back afterwards, which it cannot do on a CPU
            # ("CPU Generator does not use offset", GPUModelRunner._bookkeeping_sync in vLLM 0.28).
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(longest, 4096),
        }
        if tensor_parallel_size == 1:  # an engine's one worker needs no process of its own
            options["distributed_executor_backend"] = "uni"
    else:
        from transformers import AutoConfig

        # Left to itself, vLLM would convert float32 weights to 16 bits.
        dtype = AutoConfig.from_pretrained(model).get_text_config().dtype
        options = {"dtype": str(dtype or "auto").removeprefix("torch.")}
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

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


async def sample(
    start: Callable[[], AsyncLLM],
    wanted: Sequence[Mapping[str, Any]],
    sampling: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    done: Callable[[dict[str, Any]], object],
) -> None:
    """Start the engines and draw all ``wanted`` samples (key, ``prompt`` and ``prompt_ids``) in one go; ``done`` is called
    with each, as :class:`recipe.evaluate.store.Store` takes it, as soon as it is there.

    Raises:
        RuntimeError: an engine failed, or vLLM gave up on a sample.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.exceptions import EngineDeadError

    options = {name: value for name, value in sampling.items() if name not in ("samples", "seed")}
    # vLLM would load the tokenizer its own way.
    parameters = SamplingParams(**options, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False)
    engine = start()

    async def draw(each: Mapping[str, Any]) -> None:
        name = "/".join(str(each[part]) for part in KEY)
        own = parameters.clone()
        own.seed = sample_seed(f"{sampling['seed']}/{name}")
        async for output in engine.generate({"prompt_token_ids": each["prompt_ids"]}, own, name):
            final = output.outputs[0]
        if final.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended sample {name} with {final.finish_reason!r}")
        ids = list(final.token_ids)
        text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        named = {part: each[part] for part in (*KEY, "prompt")}
        done(named | {"seed": own.seed, "tokens": len(ids), "finish_reason": final.finish_reason, "text": text})

    try:
        await asyncio.gather(*map(draw, wanted))
    except EngineDeadError:
        raise RuntimeError("an engine ended; its output above says why. The same command resumes here") from None
    finally:
        engine.shutdown()
