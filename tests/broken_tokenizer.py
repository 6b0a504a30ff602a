"""A checkpoint whose tokenizer transformers reads wrongly: byte-level, under the class LlamaTokenizerFast."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedTokenizerFast


def save_under_class(tokenizer: PreTrainedTokenizerFast, folder: Path, tokenizer_class: str, model_type: str) -> Path:
    """Save a tokenizer as a checkpoint of the hub carries it: with the name of a class, and the type of its model."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": tokenizer_class}
    path.write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder
