"""From ``--model`` to a folder that vLLM loads: a Hugging Face model, fetched or merged from a verl checkpoint.

``verl.model_merger`` (verl 0.9.1) leaves LoRA weights beside the *untouched* base weights, from which vLLM would sample.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from grail_advantage.receipt.foreign import open_plain, read_bytes, read_json

_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]


def resolve_model(model: str | Path) -> Path:
    """Return the Hugging Face model folder of ``--model``: a model folder, ``.../global_step_N`` or its ``actor``, which is
    merged into ``actor_merged`` once, or ``ORG/NAME[@REVISION]`` of the hub, which is fetched into its cache."""
    path = Path(model)
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        name, _, revision = str(model).partition("@")
        try:
            path = Path(snapshot_download(name, revision=revision or None, allow_patterns=_FILES))
        except Exception as error:
            raise ValueError(f"--model {model} is no folder here, and not to be had from the hub: {error}") from None
    checkpoint = path / "actor" if (path / "actor").is_dir() else path
    if any(checkpoint.glob("model_world_size_*_rank_*.pt")):
        return _merged(checkpoint)
    if not [*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin")]:
        raise ValueError(f"--model {model} is neither a model folder with weights nor a run's folder global_step_N")
    return path


def fingerprint(folder: Path) -> str:
    """First 16 hexadecimal digits of a SHA-256 over a model folder's weights, configuration, tokenizer and template."""
    files = {path for pattern in [*_FILES, "pytorch_model*.bin"] for path in folder.glob(pattern)}
    hashes = []
    for path in sorted(files - {folder / "merged_from.json"}):  # of earlier versions
        with open_plain(path) as file:
            hashes.append(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}")
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()[:16]


def _merged(checkpoint: Path) -> Path:
    target = checkpoint.with_name(f"{checkpoint.name}_merged")
    if target.is_dir() and target.stat().st_ctime > max(path.stat().st_ctime for path in checkpoint.rglob("*")):
        return target
    with TemporaryDirectory(dir=target.parent) as folder:
        merged = Path(folder) / target.name
        command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
        command += ["--local_dir", str(checkpoint), "--target_dir", str(merged)]
        if subprocess.run(command, stdout=2, check=False).returncode:
            raise RuntimeError(f"verl.model_merger failed; its output is above: {' '.join(command)}")
        if (adapter := merged / "lora_adapter").is_dir():
            _add_lora(merged, adapter)
        shutil.rmtree(target, ignore_errors=True)
        return merged.rename(target)


def _add_lora(folder: Path, adapter: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = read_json(read_bytes(adapter / "adapter_config.json"))
    if not (isinstance(config, dict) and config.get("lora_alpha")):
        raise ValueError("the checkpoint has LoRA weights but no lora_train_meta.json with lora_alpha; restore it")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(folder)
    shutil.rmtree(adapter)
