"""Models of published shapes with random weights and a tokenizer of as many words: nothing is downloaded.

Random weights take the time and memory of trained ones. Imports torch and transformers alone.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from functools import cache

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from verl_cpu.tiny.model import CHAT_TEMPLATE, END_OF_TEXT, TURN_END, TURN_START

NAMES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
SHAPES = {
    name: dict(zip(NAMES, sizes, strict=True))
    for name, sizes in {
        "Qwen3-0.6B": (151936, 1024, 3072, 28, 16, 8, 128),
        "Qwen3-4B": (151936, 2560, 9728, 36, 32, 8, 128),
        # One forward over the batch of the CPU benchmarks takes about a second on one thread, almost all of it matrix products.
        "small": (8192, 256, 768, 6, 4, 2, 64),
        "toy": (512, 32, 64, 2, 2, 1, 32),
    }.items()
}
"""Options of ``Qwen3Config`` by the shape's name."""


def random_model(shape: Mapping[str, int], device: str, dtype: torch.dtype, tied: bool = True) -> PreTrainedModel:
    """A Qwen3 model with freshly drawn weights, in evaluation mode."""
    config = Qwen3Config(**shape, tie_word_embeddings=tied, max_position_embeddings=32768, attn_implementation="sdpa")
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


@cache
def wordy_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Single bytes, then words without a meaning, as many as the vocabulary needs, and Qwen's special tokens."""
    letters, special = byte_letters(), [END_OF_TEXT, TURN_START, TURN_END]
    words = [*letters, *(f"w{index}" for index in range(vocabulary - len(letters) - len(special))), *special]
    backend = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = {"pad_token": END_OF_TEXT, "eos_token": TURN_END, "additional_special_tokens": [TURN_START]}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHAT_TEMPLATE, **names)


def byte_letters() -> list[str]:
    """The first tokens of :func:`wordy_tokenizer`, one a byte."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def release() -> None:
    """Give back what dropped tensors held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
