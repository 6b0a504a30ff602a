"""Tokenizers are loaded as their checkpoints mean them, and one that loses text is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from packaging.version import Version
from tokenizers import decoders, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from grail_advantage.answers.tokenizers import PROBES, load_tokenizer, lost_text
from recipe.tiny.model import build_tokenizer
from tests.broken_tokenizer import save_under_class
from tests.core import tiny_models
from tests.real_tokenizers import char_tokenizer, llama3_tokenizer, qwen_tokenizer, sentencepiece_tokenizer

TEXTS = ("a b\nc", r"\boxed{x = 2}", "12 + 30 = 42,\n  so $x^{2} \\le 42$.")


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_under_class(build_tokenizer(), tmp_path_factory.mktemp("broken"), "LlamaTokenizerFast", "llama")


@pytest.fixture
def damaged() -> PreTrainedTokenizerFast:
    """SentencePiece's rules over a byte-level vocabulary."""
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def test_what_transformers_makes_of_such_a_checkpoint(broken: Path, damaged: PreTrainedTokenizerFast) -> None:
    """The defect that this is about, up to transformers 5.10."""
    loaded, meant = AutoTokenizer.from_pretrained(broken), build_tokenizer()
    if Version(transformers.__version__) < Version("5.11"):
        for tokenizer in (loaded, damaged):
            assert tokenizer.decode(tokenizer.encode("a b\nc")) == "abc"
            assert tokenizer.decode(meant.encode(r"\boxed{x = 2}")) == r"\boxed{xĠ=Ġ2}"
    else:
        assert loaded.decode(loaded.encode("a b\nc")) == "a b\nc"


def test_is_read_as_it_is_meant(broken: Path) -> None:
    tokenizer, meant = load_tokenizer(broken), build_tokenizer()
    for text in TEXTS:
        assert tokenizer.encode(text) == meant.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == len(meant)  # transformers adds a token <unk>
    assert (tokenizer.eos_token, tokenizer.pad_token) == (meant.eos_token, meant.pad_token)


def test_damage_that_was_saved_is_refused_with_the_remedy(damaged: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    damaged.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"turns 'a b\\nc' into 'abc': .*take tokenizer\.json .*tokenizer_path"):
        load_tokenizer(tmp_path)


FAMILIES = {
    "Qwen3": (qwen_tokenizer, "Qwen2Tokenizer", "qwen3"),
    "R1-Distill-Llama": (llama3_tokenizer, "LlamaTokenizerFast", "llama"),
    "Llama 2": (lambda: sentencepiece_tokenizer("bpe"), "LlamaTokenizerFast", "llama"),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    """By the vocabularies and rules that the target models have, under the classes of their checkpoints."""
    build, tokenizer_class, model_type = FAMILIES[family]
    meant: PreTrainedTokenizerFast = build()
    loaded = load_tokenizer(save_under_class(meant, tmp_path, tokenizer_class, model_type))
    for text in (*TEXTS, *PROBES):
        assert loaded.encode(text, add_special_tokens=False) == meant.encode(text, add_special_tokens=False)
        assert loaded.decode(loaded.encode(text, add_special_tokens=False)).removeprefix(" ") == text


def test_a_small_vocabulary_is_no_loss() -> None:
    assert lost_text(char_tokenizer()) is None and lost_text(tiny_models.char_tokenizer()) is None
