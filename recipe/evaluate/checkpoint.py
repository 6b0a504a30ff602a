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
from pathlib import Path

_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_STAMP = "merged_from.json"
_LORA_META = "lora_train_meta.json"


def resolve_model(model: str | Path) -> Path:
    """Return the Hugging Face model folder of ``--model``: a model folder, ``.../global_step_N`` or its ``actor``, which is
    merged into ``actor_merged`` once, or ``ORG/NAME[@REVISION]`` of the hub, which is fetched into its cache.

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
    if _is_model(checkpoint / "huggingface") and not (checkpoint / _LORA_META).is_file():
        return checkpoint / "huggingface"  # trained with actor.checkpoint.save_contents that include hf_model
    config = checkpoint / "fsdp_config.json"
    if config.is_file():
        size = json.loads(config.read_text(encoding="utf-8"))["world_size"]
        shards = [f"model_world_size_{size}_rank_{rank}.pt" for rank in range(size)]
        if missing := [shard for shard in shards if not (checkpoint / shard).is_file()]:
            remedy = (
                "nodes without a common file system keep their ranks' files to themselves: copy them into one folder"
            )
            raise ValueError(f"{checkpoint} lacks {', '.join(missing)}; {remedy}")
        return _merged(checkpoint)
    if any(checkpoint.glob("model_world_size_*_rank_*.pt")):
        raise ValueError(f"{checkpoint} has no fsdp_config.json; copy it from the machine that ran rank 0")
    if steps := sorted(path.glob("global_step_*"), key=lambda step: (len(step.name), step.name)):
        raise ValueError(f"--model {path} holds several checkpoints; name one of them, for example {steps[-1]}")
    raise ValueError(
        f"--model {path} is neither a Hugging Face model (config.json with *.safetensors) nor a verl checkpoint "
        "(fsdp_config.json with model_world_size_*_rank_*.pt, in it or in its folder actor)"
    )


def fingerprint(folder: Path) -> str:
    """First 16 hexadecimal digits of a SHA-256 over a model folder's weights, configuration, tokenizer and template."""
    lines = []
    for path in sorted(
        {path for pattern in [*_FILES, *_WEIGHTS] for path in folder.glob(pattern) if path.name != _STAMP}
    ):
        with path.open("rb") as file:
            lines.append(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _is_model(folder: Path) -> bool:
    weights = [path for pattern in _WEIGHTS for path in folder.glob(pattern)]
    return (folder / "config.json").is_file() and any(not path.name.startswith("adapter_") for path in weights)


def _from_hub(model: str) -> Path:
    """The folder of the hub's cache that holds the model; without a connection, what the cache has."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    name, _, revision = model.partition("@")
    for cached in (False, True):
        try:  # of a commit named in full, the hub is asked even where its files are all in the cache
            folder = snapshot_download(name, revision=revision or None, allow_patterns=_FILES, local_files_only=cached)
            break
        except (httpx.HTTPError, HFValidationError, OSError) as error:
            reason = error
    else:
        raise ValueError(
            f"--model {model} is no folder here, and the Hugging Face hub does not give it ({reason}). Check the name; "
            "without a connection, fetch it elsewhere with: hf download ORG/NAME --local-dir DIR, and name DIR"
        )
    if not _is_model(Path(folder)):
        raise ValueError(f"--model {model} of the Hugging Face hub has no config.json with *.safetensors")
    return Path(folder)


def _merged(checkpoint: Path) -> Path:
    target = checkpoint.with_name(f"{checkpoint.name}_merged")
    files = {path: path.stat() for path in sorted(checkpoint.rglob("*")) if path.is_file()}
    stamp = json.dumps({str(path.relative_to(checkpoint)): [s.st_size, s.st_mtime_ns] for path, s in files.items()})
    if (target / _STAMP).is_file() and (target / _STAMP).read_text(encoding="utf-8") == stamp:
        return target

    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    print(f"merging {checkpoint} into {target}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    command += ["--local_dir", str(checkpoint), "--target_dir", str(temporary)]
    try:
        if code := subprocess.run(command, stdout=2, check=False).returncode:
            raise RuntimeError(f"verl.model_merger ended with status {code}; its output is above: {' '.join(command)}")
        if (temporary / "lora_adapter").is_dir():
            _add_lora(temporary)
        (temporary / _STAMP).write_text(stamp, encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _add_lora(folder: Path) -> None:
    """Add ``folder/lora_adapter`` to the base weights in ``folder`` and remove it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapter = folder / "lora_adapter"
    if not json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["lora_alpha"]:
        raise ValueError(
            f"the checkpoint has LoRA weights but no {_LORA_META} with their lora_alpha; restore that file"
        )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    shutil.rmtree(adapter)
    model.save_pretrained(folder)
