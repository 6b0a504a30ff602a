"""The benchmarks' problems, their samples drawn with vLLM, and the file that keeps each as soon as it is drawn.

A sample's seed follows from the evaluation's seed, the benchmark, the problem and the sample's number: neither order nor engine
nor resuming matters. But logits may depend on the rest of the batch in their last bits: with vLLM 0.28 on a CPU, bfloat16 gave
other tokens alone than in a batch, float32 the same. So a CPU computes in float32.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import pandas as pd
from tqdm.asyncio import tqdm

from grail_advantage.receipt.foreign import numbered_lines, plain_file, read_json, why
from grail_advantage.reward import check_ground_truths
from recipe.data.prepare import file_stem

KEY = ["benchmark", "index", "sample", "prompt"]
"""A sample's name, with a hash of its prompt's token ids. A sample also has ``seed``, ``tokens`` (with the end token),
``finish_reason`` (``stop`` or ``length``) and ``text``."""


def load_benchmarks(names: list[str], data_dir: Path, prompt: str = "corrected") -> pd.DataFrame:
    """Read what :mod:`recipe.data.prepare` writes into ``data_dir`` with a prompt, for every name: a row a problem with
    ``benchmark``, ``index`` in its file, ``messages`` (the chat that asks for it) and ``gold`` (the ground truth). Rows
    whose ground truth cannot be used are named; ValueError for a benchmark without another."""
    files = {name: data_dir / f"{file_stem(name, prompt)}.parquet" for name in names}
    if missing := ",".join(name for name, file in files.items() if not file.is_file()):
        make = f"bash scripts/prepare_data.sh --train none --benchmarks {missing} --prompt {prompt} --output-dir {data_dir}"
        raise ValueError(f"{data_dir} lacks {missing}; make it with: {make}")
    tables = {}
    for name, file in files.items():
        with foreign(file, "is no parquet file of recipe.data.prepare"):
            table = pd.read_parquet(file)
            columns = {"messages": table["prompt"].map(list), "gold": table["reward_model"].str["ground_truth"]}
            tables[name] = pd.DataFrame(columns)
        check_ground_truths(tables[name]["gold"], str(file))
    return pd.concat(tables, names=["benchmark", "index"]).reset_index()


def read_samples(path: Path) -> pd.DataFrame:
    """The samples in a file's lines, but for the settings and a line that a kill cut off."""
    samples = []
    with foreign(path, "cannot be read"):
        for _, line in numbered_lines(path):
            with suppress(ValueError):
                sample = read_json(line)
                samples += [sample] if isinstance(sample, dict) and "settings" not in sample else []
    return pd.DataFrame(samples, columns=None if samples else KEY)


@contextmanager
def foreign(path: Path, what: str) -> Iterator[None]:
    """Within, an error of a file that is not what it should be is a ``ValueError`` that names it."""
    try:
        plain_file(path)
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{path}: {what} ({type(error).__name__}: {why(error)})") from error


@contextmanager
def open_samples(path: Path, settings: dict[str, Any]) -> Iterator[TextIO]:
    """Open a file of samples to append to it; ValueError if its first line, which holds the settings of all samples, has
    others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        with foreign(path, "cannot be read"):
            pass
    with path.open("a", encoding="utf-8") as file:
        text, first = path.read_text(encoding="utf-8", errors="replace"), json.dumps({"settings": settings}) + "\n"
        if text.count("\n") < 2:  # no sample is there
            file.truncate(0)
            file.write(first)
        elif not text.startswith(first):
            there, remedy = text.partition("\n")[0], "use the former or another --output-dir"
            raise ValueError(f"{path} was begun with other settings: {there}, not {first.strip()}; {remedy}")
        elif not text.endswith("\n"):
            file.write("\n")
        yield file


def context(model: Path) -> int | None:
    """Tokens that a model takes, prompt included; ``None`` where its positions are scaled, or it does not say."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    scaled = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default") != "default"
    return None if scaled else getattr(config, "max_position_embeddings", None)


def start_engine(model: Path, longest: int, workers: int | None, tensor_parallel_size: int) -> Any:
    """Load the model into vLLM's ``AsyncLLM``, for prompts with responses of up to ``longest`` tokens: on a GPU in the
    precision its weights are stored in, on a CPU in float32. ``workers`` are engines, by default as many as GPUs allow."""
    # Its warnings are about the choices made here. FlashInfer's sampler is compiled at run time, often without an nvcc.
    for name, value in {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_USE_FLASHINFER_SAMPLER": "0"}.items():
        os.environ.setdefault(name, value)
    import torch
    from transformers import AutoConfig

    # Left to itself, vLLM would convert float32 weights to 16 bits.
    dtype = str(AutoConfig.from_pretrained(model).get_text_config().dtype or "auto").removeprefix("torch.")
    options: dict[str, Any] = {"tensor_parallel_size": tensor_parallel_size, "max_model_len": longest, "dtype": dtype}
    options["data_parallel_size"] = workers or max(1, torch.cuda.device_count() // tensor_parallel_size)
    if "cpu" in importlib.metadata.version("vllm"):
        from verl_cpu import environment

        environment.apply_defaults()
        # Compiling takes longer than it saves. A prompt read in pieces draws random numbers that vLLM gives back afterwards,
        # which it cannot do on a CPU ("CPU Generator does not use offset", GPUModelRunner._bookkeeping_sync in vLLM 0.28).
        options |= {"dtype": "float32", "enforce_eager": True, "enable_chunked_prefill": False}
        backend = "uni" if tensor_parallel_size == 1 else "mp"  # an engine's one worker needs no process of its own
        options |= {"max_num_batched_tokens": max(longest, 4096), "distributed_executor_backend": backend}
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    # A prompt is short beside its response, and without the cache no sample's numbers come from another's batch.
    options |= {"enable_prefix_caching": False, "disable_log_stats": True}
    with tempfile.TemporaryDirectory() as folder:
        path = model
        if glob.escape(str(path)) != str(path):  # vLLM looks for the weights by a pattern
            path = Path(folder, "model")
            path.symlink_to(model.absolute())
        return AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(path), **options))


async def draw(start: Callable, wanted: pd.DataFrame, sampling: dict[str, Any], tokenizer: Any, file: TextIO) -> None:
    """Start the engine and draw the ``wanted`` samples (:data:`KEY` and ``prompt_ids``), each into ``file`` at once."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    options = {name: value for name, value in sampling.items() if name not in ("samples", "seed")}
    options |= {"output_kind": RequestOutputKind.FINAL_ONLY, "detokenize": False}  # vLLM would load its own tokenizer
    SamplingParams(**options)  # refuses what makes no sense, before the engine starts
    engine = start()

    async def one(sample: dict[str, Any]) -> None:
        name = "/".join(str(sample[part]) for part in KEY[:3])
        seed = int.from_bytes(hashlib.sha256(f"{sampling['seed']}/{name}".encode()).digest()[:8], "big") >> 1
        parameters, prompt = SamplingParams(**options, seed=seed), {"prompt_token_ids": sample["prompt_ids"]}
        async for output in engine.generate(prompt, parameters, name):
            final = output.outputs[0]
        if final.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended sample {name} with {final.finish_reason!r}")
        text = tokenizer.decode(final.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        drawn = {"seed": seed, "tokens": len(final.token_ids), "finish_reason": final.finish_reason, "text": text}
        print(json.dumps({part: sample[part] for part in KEY} | drawn, ensure_ascii=False), file=file, flush=True)

    try:
        await tqdm.gather(*map(one, wanted.to_dict("records")), desc="sampling", unit=" samples")
    finally:
        engine.shutdown()
