"""The benchmarks' problems, their samples drawn with vLLM, and the file that keeps each as soon as it is drawn.

A sample's seed follows from the evaluation's seed, benchmark, problem and number, whatever the order and the engine.
But logits may depend on the batch in their last bits: with vLLM 0.28 on a CPU, bfloat16 gave other tokens alone than in
a batch, float32 the same. So a CPU computes in float32.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import pandas as pd
import torch
from huggingface_hub import snapshot_download
from tqdm.asyncio import tqdm

from grail_advantage.reward import check_ground_truths
from recipe.data.specs import ENDINGS

KEY = ["benchmark", "index", "sample", "prompt"]
"""A sample's name, with a hash of its prompt's token ids. A sample also has ``seed``, ``tokens`` (with the end token),
``finish_reason`` (``stop`` or ``length``) and ``text``."""
FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]  # that are fetched of a model on the hub


def load_benchmarks(names: list[str], data_dir: Path, prompt: str = "corrected") -> pd.DataFrame:
    """Read what :mod:`recipe.data.prepare` wrote: a row a problem with ``benchmark``, ``index`` in its file,
    ``messages`` (the chat that asks for it) and ``gold``. ValueError for a benchmark that is not there or unusable."""
    tables = {}
    for name in names:
        if not (file := data_dir / f"{name}{ENDINGS[prompt]}").is_file():
            make = f"bash scripts/prepare_data.sh --train none --benchmarks {','.join(names)} --prompt {prompt}"
            raise ValueError(f"{data_dir} lacks {name}; make it with: {make} --output-dir {data_dir}")
        table = pd.read_parquet(file)
        gold = table["reward_model"].str["ground_truth"]
        check_ground_truths(gold, str(file))
        tables[name] = pd.DataFrame({"messages": table["prompt"].map(list), "gold": gold})
    return pd.concat(tables, names=["benchmark", "index"]).reset_index()


def read_samples(path: Path) -> pd.DataFrame:
    """The samples in a file's lines, but for the settings and a line that a kill cut off."""
    samples = []
    for line in path.read_bytes().splitlines():
        with suppress(ValueError):
            samples += [] if "settings" in (sample := json.loads(line)) else [sample]
    return pd.DataFrame(samples, columns=None if samples else KEY).drop_duplicates(KEY, ignore_index=True)


def open_samples(path: Path, settings: dict[str, Any]) -> TextIO:
    """Open a file of samples to append to it. Its first line holds the settings of all; ValueError if they differ."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file, first = path.open("a+", encoding="utf-8", errors="surrogateescape"), json.dumps({"settings": settings}) + "\n"
    file.seek(0)
    if (there := file.readline()) not in ("", first):
        raise ValueError(f"{path} was begun with other settings: {there}not {first}use those or another --output-dir")
    file.write("\n" if there else first)  # a kill may have cut off the last line, even within a character
    return file


def resolve_model(model: str) -> tuple[Path, str]:
    """The folder of ``--model`` and a hash of its weights: a Hugging Face model's, ``.../global_step_N``, which is
    merged once, or that of a name on the hub, which is fetched into its cache."""
    path = Path(model) if Path(model).is_dir() else Path(snapshot_download(model, allow_patterns=FILES))
    if any((path / "actor").glob("model_world_size_*_rank_*.pt")):
        path = merge(path / "actor", path / "actor_merged")
    if not (weights := sorted([*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin")])):
        raise ValueError(f"--model {model} is neither a model folder with weights nor a run's folder global_step_N")
    return path, digest([hashlib.file_digest(file.open("rb"), "sha256").hexdigest() for file in weights])


def merge(checkpoint: Path, merged: Path) -> Path:
    """Join the weights of a verl checkpoint in a folder beside it, which is there when it is whole."""
    if merged.is_dir():
        return merged
    with TemporaryDirectory(dir=merged.parent) as folder:
        command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", checkpoint]
        subprocess.run([*command, "--target_dir", made := Path(folder, "merged")], stdout=2, check=True)
        if (adapter := made / "lora_adapter").is_dir():  # beside base weights that verl 0.9.1 leaves as they were
            from peft import PeftModel
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(made, dtype="auto")
            PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(made)
        return made.rename(merged)


def digest(value: Any) -> str:
    """First 16 hexadecimal digits of the SHA-256 of a value's JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def start_engine(model: Path, longest: int, tensor_parallel_size: int) -> Any:
    """Load the model into vLLM's engine, or into as many as the GPUs allow, for ``longest`` tokens with the prompt."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are about the choices made here
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # compiled at run time, often without an nvcc
    engines = max(1, torch.cuda.device_count() // tensor_parallel_size)
    options: dict[str, Any] = {"tensor_parallel_size": tensor_parallel_size, "data_parallel_size": engines}
    # A prompt is short beside its response, and without the cache no sample's numbers come from another's batch.
    options |= {"max_model_len": longest, "enable_prefix_caching": False, "disable_log_stats": True}
    if "cpu" in version("vllm"):
        from verl_cpu import environment

        environment.apply_defaults()
        # A prompt read in pieces draws random numbers that vLLM gives back, which a CPU cannot ("CPU Generator does not
        # use offset", GPUModelRunner._bookkeeping_sync in vLLM 0.28). Compiling takes longer than it saves.
        options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(longest, 4096)}
        options |= {"dtype": "float32", "enforce_eager": True, "distributed_executor_backend": "uni"}
    from vllm import AsyncEngineArgs, AsyncLLMEngine

    return AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=str(model), **options))


async def draw(start: Callable, wanted: pd.DataFrame, sampling: dict[str, Any], tokenizer: Any, file: TextIO) -> None:
    """Start the engine and draw the ``wanted`` samples (:data:`KEY` and ``prompt_ids``), each into ``file`` at once."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    options = {name: value for name, value in sampling.items() if name not in ("samples", "seed")}
    options |= {"output_kind": RequestOutputKind.FINAL_ONLY, "detokenize": False}  # vLLM would load its own tokenizer
    SamplingParams(**options)  # refuses what makes no sense, before the engine starts
    engine = start()

    async def one(sample: dict[str, Any]) -> None:
        name = "/".join(str(sample[part]) for part in KEY[:3])
        seed = int(hashlib.sha256(f"{sampling['seed']}/{name}".encode()).hexdigest()[:16], 16) >> 1
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
