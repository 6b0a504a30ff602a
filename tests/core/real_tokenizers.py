"""Tokenizers for tests, made without a network: two real vocabularies and small ones.

The real ones come from files inside packages, which are not imported: ``dashscope`` carries the Qwen BPE and ``llama-models``
that of Llama 3. Without its package a tokenizer skips the test that asks for it.
"""

import base64
import json
import os
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Literal
from unittest import mock

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast

_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""The word splitting of both; Qwen takes digits one by one, Llama 3 up to three at a time."""
TOKENS = json.loads(Path(__file__).with_suffix(".json").read_text())
"""In the order of their ids; ``llama3_special`` without the reserved ones at its end, ``qwen3_text`` being no special ones."""
QWEN_TEXT = TOKENS["qwen3_text"]


def _file_of_package(package: str, name: str) -> Path:
    try:
        (file,) = (
            file for file in metadata.files(package) or () if file.as_posix() == name
        )
    except (metadata.PackageNotFoundError, ValueError):
        pytest.skip(
            f"needs the package {package} with its {name}: pip install --no-deps {package}"
        )
    return Path(str(file.locate()))


def qwen_vocabulary() -> Path:
    """The Qwen BPE file: base64 token and id on each line, 151643 of them."""
    return _file_of_package("dashscope", "dashscope/resources/qwen.tiktoken")


def llama3_vocabulary() -> Path:
    """The same of Llama 3, 128000 of them."""
    return _file_of_package("llama-models", "llama_models/llama3/tokenizer.model")


def read_vocabulary(path: Path) -> dict[int, bytes]:
    """Token id to token bytes, straight from the file."""
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return {int(token): base64.b64decode(text) for text, token in lines}


def _convert(vocabulary: Path, digits: str, special: list[str]) -> Tokenizer:
    pytest.importorskip(
        "tiktoken", reason="transformers reads vocabulary files of this kind with tiktoken"
    )
    from transformers.convert_slow_tokenizer import TikTokenConverter

    # tiktoken would copy the file to a cache that outlives the package's version.
    with mock.patch.dict(os.environ, TIKTOKEN_CACHE_DIR=""):
        backend = TikTokenConverter(
            str(vocabulary), pattern=_SPLIT.replace("DIGITS", digits)
        ).converted()
    # The vocabulary files end where the special tokens begin.
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special]
    )
    return backend


@lru_cache
def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of Qwen3, 151669 tokens."""
    backend = _convert(qwen_vocabulary(), r"\p{N}", TOKENS["qwen3_special"])
    backend.normalizer = normalizers.NFC()
    backend.add_tokens(
        [AddedToken(token, normalized=False, special=False) for token in QWEN_TEXT]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


@lru_cache
def llama3_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of Llama 3, 128256 tokens."""
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(3, 248)]
    backend = _convert(
        llama3_vocabulary(), r"\p{N}{1,3}", TOKENS["llama3_special"] + reserved
    )
    special = {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "pad_token": "<|finetune_right_pad_id|>",
    }
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@lru_cache
def sentencepiece_tokenizer(kind: Literal["bpe", "unigram"]) -> PreTrainedTokenizerFast:
    """A small vocabulary in SentencePiece's spelling: ``▁`` for a space, ``<0x..>`` for bytes of unknown characters.

    Learned from four sentences. ``bpe`` decodes as Llama 2 does, ``unigram`` through a Metaspace decoder.
    """
    backend = Tokenizer.from_file(
        str(Path(__file__).with_name(f"sentencepiece_{kind}.json"))
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def save_as_llamas(tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """Save a tokenizer as a checkpoint of the hub carries it: with the name of a class, and the type of its model."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}
    path.write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder
