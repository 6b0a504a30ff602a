"""The benchmarks' problems, their samples drawn with vLLM, and the file that keeps each as soon as it is drawn.

A sample's seed follows from the evaluation's seed, benchmark, problem and number, whatever the order and the engine.
But logits may depend on the batch in their last bits: with vLLM 0.28 on a CPU, bfloat16 gave other tokens alone than in
a batch, float32 the same. So a CPU computes in float32.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, TextIO

import pandas as pd
import torch
from huggingface_hub import snapshot_download
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tqdm.asyncio import tqdm

from grail_advantage.reward import check_ground_truths
from grail_advantage.text_io import open_plain, read_json
from recipe.data.specs import ENDINGS

FILES = ["*.safetensors", "pytorch_model*.bin", "*.json", "*.jinja", "*.txt", "*.model"]
"""The files of a model that say how it samples: its weights, configurations, tokenizer and chat template."""
# In a merged folder this file names those of which it was made.
MERGED_FROM = ".merged_from"
Count = Annotated[int, Field(ge=0, lt=2**53)]


class Record(BaseModel):
    """A record in a file that somebody else may have written. It may hold more than is named here."""

    model_config = ConfigDict(strict=True, extra="ignore")


class Key(Record):
    """A sample's name, with a hash of its prompt's token ids."""

    benchmark: str
    index: Count
    sample: Count
    prompt: str


class Sample(Key):
    """A line of ``generations.jsonl``; ``tokens`` counts the end token, too. A line also has the sample's ``seed``."""

    tokens: Count
    finish_reason: Literal["stop", "length"]
    text: str


KEY = list(Key.model_fields)


def check(kind: type[Record], record: Any) -> None:
    """ValueError: a record of a file lacks something, which the message names, or has it in another type."""
    try:
        kind.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "the value"
        raise ValueError(f"{name}: {first['msg']}") from None


def load_benchmarks(names: list[str], data_dir: Path, prompt: str) -> pd.DataFrame:
    """Read what :mod:`recipe.data.prepare` wrote: a row a problem with ``benchmark``, ``index`` in its file,
    ``messages`` (the chat that asks for it) and ``gold``. ValueError for a benchmark that is not there or unusable."""
    tables = {}
    for name in names:
        file = data_dir / f"{name}{ENDINGS[prompt]}"
        if not file.is_file():
            make = f"bash scripts/prepare_data.sh --train none --benchmarks {','.join(names)} --prompt {prompt}"
            raise ValueError(
                f"{data_dir} lacks {name}; make it with: {make} --output-dir {data_dir}"
            )
        table = pd.read_parquet(file)
        gold = table["reward_model"].str["ground_truth"]
        check_ground_truths(gold, str(file))
        tables[name] = pd.DataFrame({"messages": table["prompt"].map(list), "gold": gold})
    return pd.concat(tables, names=["benchmark", "index"]).reset_index()


def records(path: Path) -> Iterator[Any]:
    """Yields the values of a file of JSON lines, ``None`` for a line that has none."""
    with open_plain(path) as file:
        for line in file:
            try:
                yield read_json(line)
            except ValueError:
                yield None


def read_samples(path: Path) -> pd.DataFrame:
    """Returns the samples in a file's lines, but for the settings and what is no sample, such as a line that a kill cut
    off."""
    samples = []
    for record in records(path):
        with suppress(ValueError):
            check(Sample, record)
            samples.append(record)
    # Without samples there are the columns by which others are merged.
    frame = pd.DataFrame(samples) if samples else pd.DataFrame(columns=list(Sample.model_fields))
    return frame.drop_duplicates(KEY, ignore_index=True)


def read_settings(path: Path) -> dict:
    """Returns the settings with which a file of samples was begun; none where its first line has none."""
    match next(records(path), None):
        case {"settings": dict(settings)}:
            return settings
    return {}


def open_samples(path: Path, settings: dict) -> TextIO:
    """Open a file of samples to append to it. Its first line holds the settings of all; ValueError names those that
    differ."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", encoding="utf-8")
    if file.tell() == 0:
        file.write(json.dumps({"settings": settings}) + "\n")
        return file
    begun = read_settings(path)
    if not begun:
        raise ValueError(
            f"{path} does not begin with the settings of an evaluation; use another --output-dir"
        )
    unequal = [f"{name}: {a!r} there, {b!r} here" for name, a, b in differing(begun, settings)]
    if unequal:
        raise ValueError(
            f"{path} was begun with other settings ({'; '.join(unequal)}); use those or another --output-dir"
        )
    # A kill may have cut off the last line, even within a character.
    file.write("\n")
    return file


def differing(first: dict, second: dict) -> list[tuple]:
    """Returns the names under which two mappings have other values, with both."""
    pairs = [(name, first.get(name), second.get(name)) for name in {**first, **second}]
    return [(name, a, b) for name, a, b in pairs if a != b]


def resolve_model(model: str) -> tuple[Path, str]:
    """Returns the folder of ``--model`` and a hash of its :data:`FILES`: a Hugging Face model's, ``.../global_step_N``,
    which is merged once, or that of a name on the hub, which is fetched into its cache.

    Raises:
        ValueError: it is none of these, an adapter, or a checkpoint or a model of which a part is missing.
    """
    path = Path(model) if Path(model).is_dir() else fetch(model)
    if any((path / "actor").glob("model_world_size_*_rank_*.pt")):
        path = merge(path / "actor", path / "actor_merged")
    if (path / "adapter_config.json").is_file():
        raise ValueError(
            f"--model {model} is an adapter, without the weights that it adapts; merge them into a folder, with "
            "peft: AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload().save_pretrained(FOLDER) and "
            "AutoTokenizer.from_pretrained(ADAPTER).save_pretrained(FOLDER)"
        )
    safetensors = any(path.glob("*.safetensors"))
    if not safetensors and not any(path.glob("pytorch_model*.bin")):
        raise ValueError(
            f"--model {model} is neither a model folder with weights nor a run's folder global_step_N"
        )
    kind = "model.safetensors" if safetensors else "pytorch_model.bin"
    # Of weights in parts an index names them all: a broken download may lack some.
    if any(path.glob(kind.replace(".", "-*-of-*."))):
        again = "fetch or copy the model again"
        index = path / f"{kind}.index.json"
        refuse_missing(path, [index.name], again)
        refuse_missing(path, json.loads(index.read_bytes())["weight_map"].values(), again)
    files = sorted({file for pattern in FILES for file in path.glob(pattern)})
    return path, digest(
        [[file.name, hashlib.file_digest(file.open("rb"), "sha256").hexdigest()] for file in files]
    )


def fetch(model: str) -> Path:
    """Returns the folder of a model on the hub, with its ``.bin`` files where it has no other weights."""
    path = Path(snapshot_download(model, allow_patterns=FILES, ignore_patterns="*.bin"))
    if not any(path.glob("*.safetensors")):
        snapshot_download(model, allow_patterns=FILES)
    return path


def refuse_missing(folder: Path, names: Iterable[str], remedy: str) -> None:
    """ValueError: a folder lacks a file."""
    if missing := sorted({name for name in names if not (folder / name).is_file()}):
        raise ValueError(f"{folder} is not whole, it lacks {missing[0]}: {remedy}")


def merge(checkpoint: Path, merged: Path) -> Path:
    """Join the weights of a verl checkpoint in a folder beside it, unless that was made of these files.

    Raises:
        ValueError: a part of the checkpoint is missing.
    """
    another = "take another global_step_N, or copy it again"
    refuse_missing(checkpoint, ["fsdp_config.json", "huggingface/config.json"], another)
    ranks = json.loads((checkpoint / "fsdp_config.json").read_bytes())["world_size"]
    refuse_missing(
        checkpoint, [f"model_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)], another
    )
    files = {
        str(file.relative_to(checkpoint)): [file.stat().st_size, file.stat().st_mtime_ns]
        for file in sorted(checkpoint.rglob("*"))
        if file.is_file()
    }
    source = json.dumps({"verl": version("verl"), "files": files})
    stamp = merged / MERGED_FROM
    # A later start of the run writes the same global_step_N anew.
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == source:
        return merged
    # In the folder's file system, so that it comes under its name at once, and whole.
    with TemporaryDirectory(dir=merged.parent) as folder:
        target = Path(folder, "merged")
        command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
        command += ["--local_dir", str(checkpoint), "--target_dir", str(target)]
        subprocess.run(command, stdout=2, check=True)
        # verl 0.9.1 leaves the base weights beside an adapter as they were.
        if (target / "lora_adapter").is_dir():
            add_adapter(target, checkpoint)
        (target / MERGED_FROM).write_text(source, encoding="utf-8")
        shutil.rmtree(merged, ignore_errors=True)
        return target.rename(merged)


def add_adapter(merged: Path, checkpoint: Path) -> None:
    """Add the adapter that verl's merger leaves in a folder to the base weights there.

    Raises:
        ValueError: its scale is missing, for which the merger writes 0, or weights that peft does not read as LoRA's.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    adapter = merged / "lora_adapter"
    if not json.loads((adapter / "adapter_config.json").read_bytes())["lora_alpha"]:
        raise ValueError(
            f"{checkpoint} has LoRA weights and no lora_alpha, so that they would add nothing to the base model; write "
            'the run\'s actor_rollout_ref.model.lora_rank and lora_alpha into lora_train_meta.json there, as {"r": 32, '
            '"lora_alpha": 64}'
        )
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(merged, dtype="auto"), str(adapter)
    )
    with safe_open(adapter / "adapter_model.safetensors", "pt") as weights:
        unread = sorted(set(weights.keys()) ^ set(get_peft_model_state_dict(adapted)))
    if unread:
        raise ValueError(
            f"{checkpoint} has an adapter that is not plain LoRA, such as {unread[0]}; merge it with peft"
        )
    adapted.merge_and_unload().save_pretrained(merged)
    shutil.rmtree(adapter)


def digest(value: Any) -> str:
    """Returns the first 16 hexadecimal digits of the SHA-256 of a value's JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def start_engine(
    model: Path, longest: int, tensor_parallel_size: int, *, prefix_cache: bool = False
) -> Any:
    """Load the model into vLLM's engine, or into as many as the GPUs allow, for ``longest`` tokens with the prompt."""
    # Its warnings are about the choices made here; its sampler is compiled at run time, often without an nvcc.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    options: dict = {}
    if "cpu" in version("vllm"):
        from verl_cpu import environment

        environment.apply_defaults()
        # A prompt read in pieces draws random numbers that vLLM gives back, which a CPU cannot ("CPU Generator does not
        # use offset", GPUModelRunner._bookkeeping_sync in vLLM 0.28). Compiling takes longer than it saves.
        options.update(
            enable_chunked_prefill=False,
            max_num_batched_tokens=max(longest, 4096),
            dtype="float32",
            enforce_eager=True,
            distributed_executor_backend="uni",
        )
    from vllm import AsyncEngineArgs, AsyncLLMEngine

    arguments = AsyncEngineArgs(
        model=str(model),
        tensor_parallel_size=tensor_parallel_size,
        data_parallel_size=max(1, torch.cuda.device_count() // tensor_parallel_size),
        max_model_len=longest,
        # A prompt is short beside its response, and without the cache no sample's numbers come from another's batch.
        enable_prefix_caching=prefix_cache,
        disable_log_stats=True,
        **options,
    )
    return AsyncLLMEngine.from_engine_args(arguments)


async def draw(
    start: Callable, samples: pd.DataFrame, sampling: dict, tokenizer: Any, file: TextIO
) -> None:
    """Start the engine and draw samples, of which :data:`KEY` and ``prompt_ids`` are given, each into ``file`` at once."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    options = {
        **{name: value for name, value in sampling.items() if name not in ("samples", "seed")},
        "output_kind": RequestOutputKind.FINAL_ONLY,
        # vLLM would load its own tokenizer.
        "detokenize": False,
    }
    # Refuses what makes no sense, before the engine starts.
    SamplingParams(**options)
    engine = start()

    async def draw_one(sample: dict) -> None:
        name = "/".join(str(sample[part]) for part in KEY[:3])
        seed = int(hashlib.sha256(f"{sampling['seed']}/{name}".encode()).hexdigest()[:16], 16) >> 1
        prompt = {"prompt_token_ids": sample["prompt_ids"]}
        async for output in engine.generate(prompt, SamplingParams(**options, seed=seed), name):
            final = output.outputs[0]
        if final.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended sample {name} with {final.finish_reason!r}")
        text = tokenizer.decode(
            final.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        drawn = {
            **{part: sample[part] for part in KEY},
            "seed": seed,
            "tokens": len(final.token_ids),
            "finish_reason": final.finish_reason,
            "text": text,
        }
        print(json.dumps(drawn, ensure_ascii=False), file=file, flush=True)

    records = samples.to_dict("records")
    try:
        await tqdm.gather(*map(draw_one, records), desc="sampling", unit=" samples")
    finally:
        engine.shutdown()
