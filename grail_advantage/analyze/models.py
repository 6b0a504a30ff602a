"""This module names and loads the model of an analysis, and tells whether responses and options fit it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from grail_advantage.answers.tokenizers import load_tokenizer
from grail_advantage.data import Rollouts
from grail_advantage.text_io import why

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Loadable = tuple[PreTrainedTokenizerBase, Callable[[], PreTrainedModel]]

PACKAGED = ("smollm2", "tiny")  # the models that packages have, by name
ANOTHER = "give --model the model that generated the response"


def model_of(name: str, device: str = "cpu", dtype: str = "auto") -> Loadable:
    """Give a model's tokenizer, and a function that loads the model on its device. ValueError: one cannot be loaded."""
    try:
        if name in PACKAGED:
            model, tokenizer = _load_packaged(name)
            if dtype != "auto":
                model = model.to(getattr(torch, dtype))
            return tokenizer, lambda: model.to(device).eval()
        tokenizer = load_tokenizer(name)
    except (OSError, ImportError) as error:
        raise ValueError(f"--model {name}: {str(error).strip().splitlines()[0]}") from error

    def load() -> PreTrainedModel:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()

    return tokenizer, load


def _load_packaged(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Give a model of :data:`PACKAGED`; ImportError where its package is not installed."""
    if name == "tiny":
        from verl_cpu.tiny.shipped import load_shipped

        return load_shipped()
    from verl_cpu.tiny.smollm2 import load_smollm2

    return load_smollm2()


def files_digest(name: str) -> str | None:
    """Tell whether the files of a model's folder, or a file, have changed: the digest is of their names, sizes and
    times. It is ``None`` for a name on the hub or a packaged model."""
    paths = [Path(name), *Path(name).rglob("*")]
    facts = []
    for file in sorted(filter(Path.is_file, paths)):
        status = file.stat()
        facts.append((file.name, status.st_size, status.st_mtime_ns))
    return digest(repr(facts)) if facts else None


def digest(text: str) -> str:
    """Give a text's SHA-256."""
    # JSON's escapes allow half a surrogate pair.
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def check_options(temperature: float, tokens: int, device: str) -> None:
    """Raise ValueError, naming the option, for a number or a device with which no model runs."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(
            f"--temperature {temperature} must be a number above 0, that of the sampling"
        )
    if tokens < 1:
        raise ValueError(f"--tokens {tokens} must be at least 1")
    try:
        # torch alone knows which devices it can use here.
        values = torch.zeros(1, device=device)
    # Torch's, of a name or of a device that is not there
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"--device {device} cannot be used here ({why(error)}); use cpu"
        ) from error
    if values.is_meta:
        raise ValueError(f"--device {device} computes nothing; use cpu")


def check_fits(model: PreTrainedModel, r: Rollouts) -> None:
    """Raise ValueError, naming a response, for token ids or a length that the model does not have."""
    vocabulary = model.get_input_embeddings().num_embeddings
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    for key, prompt, response in zip(r.keys, r.prompts, r.responses, strict=True):
        row = torch.cat([prompt, response])
        if int(row.max()) >= vocabulary:
            raise ValueError(
                f"{key}: token id {int(row.max())} is not one of the model's {vocabulary}; {ANOTHER}"
            )
        if len(row) > positions:
            raise ValueError(
                f"{key}: its {len(row)} tokens are more than the model's {positions} positions "
                "(max_position_embeddings); leave the line out"
            )
