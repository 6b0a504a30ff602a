"""Tokenizers are loaded as their checkpoints mean them, and one that loses text is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grail_advantage.answers.tokenizers import load_tokenizer
from tests.core.real_tokenizers import save_under_class
from verl_cpu.tiny.model import build_tokenizer

TEXTS = ("a b\nc", r"\boxed{x = 2}", "12 + 30 = 42,\n  so $x^{2} \\le 42$.")


@pytest.fixture
def damaged() -> PreTrainedTokenizerFast:
    """SentencePiece's rules over a byte-level vocabulary."""
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def test_is_read_as_it_is_meant(tmp_path: Path) -> None:
    meant = build_tokenizer()
    tokenizer = load_tokenizer(save_under_class(meant, tmp_path, "LlamaTokenizerFast", "llama"))
    for text in TEXTS:
        assert tokenizer.encode(text) == meant.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == len(meant)  # transformers adds a token <unk>
    assert (tokenizer.eos_token, tokenizer.pad_token) == (meant.eos_token, meant.pad_token)


def test_damage_that_was_saved_is_refused_with_the_remedy(damaged: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    damaged.save_pretrained(tmp_path)
    with pytest.raises(ValueError):
        load_tokenizer(tmp_path)
