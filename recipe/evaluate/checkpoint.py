"""From ``--model`` to a folder that vLLM loads: a Hugging Face model, fetched or merged from a verl checkpoint.

verl writes ``global_step_N/actor`` with one file of weights a rank (``verl/utils/checkpoint/fsdp_checkpoint_manager.py``, verl
0.9.1) and brings the program that joins them, ``verl.model_merger``. It puts LoRA weights into a folder of their own beside
the *untouched* base weights; here they are added in, because vLLM would otherwise sample from the base model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# Everything that decides the samples: weights, configuration, tokenizer, chat template.
_HASHED = (*_WEIGHTS, "*.json", "*.jinja", "*.txt", "*.model")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
_STAMP = "merged_from.json"
_MOST_RANKS = 1 << 16
_ADAPTER = "lora_adapter"
_LORA_META = "lora_train_meta.json"


def resolve_model(model: str | Path) -> Path:
    """Return a Hugging Face model folder, fetching a model of the hub into its cache, or merging a verl checkpoint into
    ``PATH_merged`` beside it, if need be.

    A merged folder is used again as long as the checkpoint's files are the same.

    Args:
        model: a Hugging Face model folder, ``.../global_step_N``, ``.../global_step_N/actor``, or ``ORG/NAME[@REVISION]`` of
            the Hugging Face hub. A folder goes before a model of the hub.

    Raises:
        ValueError: there is no such folder or model, it holds no weights, or a part of the checkpoint is missing.
        RuntimeError: verl's merger failed.
    """
    path = Path(model)
    if not path.is_dir():
        if _HUB_ID.fullmatch(str(model)):
            return _from_hub(str(model))
        raise ValueError(f"--model {model} is not a folder, and not ORG/NAME[@REVISION] of the Hugging Face hub either")
    if _is_model(path):
        return path
    checkpoint = path / "actor" if (path / "actor").is_dir() else path
    shards = _shards(checkpoint)
    exported = checkpoint / "huggingface"
    if _is_model(exported) and not (checkpoint / _LORA_META).is_file():
        return exported  # trained with actor.checkpoint.save_contents that include hf_model
    if shards:
        return _merged(checkpoint, shards)
    steps = sorted(path.glob("global_step_*"), key=lambda step: (len(step.name), step.name))
    if steps:
        raise ValueError(f"--model {path} holds several checkpoints; name one of them, for example {steps[-1]}")
    raise ValueError(
        f"--model {path} is neither a Hugging Face model (config.json with *.safetensors) nor a verl checkpoint "
        "(fsdp_config.json with model_world_size_*_rank_*.pt, in it or in its folder actor)"
    )


def _from_hub(model: str) -> Path:
    """The folder of the hub's cache that holds the model; files in the cache are not fetched again."""
    name, _, revision = model.partition("@")
    folder = _snapshot(model, name, revision, _HUB_FILES)
    if not _is_model(folder):
        # Most models have these beside safetensors of the same size.
        folder = _snapshot(model, name, revision, [*_HUB_FILES, _WEIGHTS[1]])
    if not _is_model(folder):
        raise ValueError(
            f"--model {model} of the Hugging Face hub has no config.json with *.safetensors or *.bin weights"
        )
    return folder


def _snapshot(model: str, name: str, revision: str, files: list[str]) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    unreachable = (httpx.HTTPError, HFValidationError, OSError)
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=files))
    except unreachable as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    try:
        # For a commit named in full, the hub is asked even where its files are all there.
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=files, local_files_only=True))
    except unreachable:
        raise ValueError(
            f"--model {model} is no folder here, and the Hugging Face hub does not give it ({reason}). Check the name; without "
            "a connection, fetch it elsewhere with: hf download ORG/NAME --local-dir DIR, and name DIR"
        ) from None


def fingerprint(folder: Path) -> str:
    """First 16 hexadecimal digits of a SHA-256 over the content of a model folder's files."""
    files = sorted({path for pattern in _HASHED for path in folder.glob(pattern) if path.is_file()})
    files = [path for path in files if path.name != _STAMP]
    with ThreadPoolExecutor(4) as executor:  # hashing releases the interpreter lock
        digests = list(executor.map(_file_digest, files))
    names = [f"{path.name} {digest}" for path, digest in zip(files, digests, strict=True)]
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(
        path for pattern in _WEIGHTS for path in folder.glob(pattern) if not path.name.startswith("adapter_")
    )


def _shards(checkpoint: Path) -> list[Path]:
    """The weight files of an FSDP checkpoint, all ranks; empty if it is none."""
    config = checkpoint / "fsdp_config.json"
    if not config.is_file():
        if any(checkpoint.glob("model_world_size_*_rank_*.pt")):
            raise ValueError(f"{checkpoint} has no fsdp_config.json; copy it from the machine that ran rank 0")
        return []
    try:
        world_size = int(json.loads(config.read_text(encoding="utf-8"))["world_size"])
        if not 0 < world_size <= _MOST_RANKS:
            raise ValueError(f"{world_size} ranks")
    except (OSError, ValueError, RecursionError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{config} does not say the world_size ({error!r}); the checkpoint is broken") from None
    shards = [checkpoint / f"model_world_size_{world_size}_rank_{rank}.pt" for rank in range(world_size)]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if len(missing) == world_size:
        return []
    if missing:
        raise ValueError(
            f"{checkpoint} lacks {', '.join(missing)}; nodes without a common file system keep their ranks' files to "
            "themselves: copy them into one folder"
        )
    return shards


def _merged(checkpoint: Path, shards: list[Path]) -> Path:
    target = checkpoint.with_name(f"{checkpoint.name}_merged")
    sources = [*shards, *sorted(path for path in (checkpoint / "huggingface").glob("*") if path.is_file())]
    sources += [path for path in [checkpoint / _LORA_META] if path.is_file()]
    stamp = {str(path.relative_to(checkpoint)): [path.stat().st_size, path.stat().st_mtime_ns] for path in sources}
    stamp_path = target / _STAMP
    if stamp_path.is_file() and stamp_path.read_bytes() == _json(stamp):
        return target

    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    print(f"merging {checkpoint} into {target}", file=sys.stderr, flush=True)
    try:
        command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
        command += ["--local_dir", str(checkpoint), "--target_dir", str(temporary)]
        code = subprocess.run(command, stdout=2, check=False).returncode
        if code:
            raise RuntimeError(
                f"verl.model_merger ended with status {code}; its output above says why: {' '.join(command)}"
            )
        if (temporary / _ADAPTER).is_dir():
            _add_lora(temporary)
        (temporary / _STAMP).write_bytes(_json(stamp))
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _add_lora(folder: Path) -> None:
    """Add ``folder/lora_adapter`` to the base weights in ``folder`` and remove it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapter = folder / _ADAPTER
    if not json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["lora_alpha"]:
        raise ValueError(
            f"the checkpoint has LoRA weights but no {_LORA_META} with their lora_alpha; restore that file"
        )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    shutil.rmtree(adapter)
    model.save_pretrained(folder)
