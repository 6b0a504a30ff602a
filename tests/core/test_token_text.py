"""Texts of tokens: joined they are the response, whatever bytes a token covers."""

from __future__ import annotations

import numpy as np
import pytest

from grail_advantage import find_answer_span
from grail_advantage.answers.text import TokenTexts, answer_text, decode_pieces
from tests.core.real_tokenizers import llama3_tokenizer, qwen_tokenizer


class TestTexts:
    def test_a_shared_character_stands_at_its_last_token(self) -> None:
        euro, family = "€".encode(), "👨".encode()
        pieces = [b"a", euro[:1], euro[1:2], euro[2:] + b"b", b"", family[:2], family[2:]]
        assert decode_pieces(pieces) == ["a", "", "", "€b", "", "", "👨"]

    def test_bytes_that_are_no_text_become_replacement_characters(self) -> None:
        assert decode_pieces([b"\xe2", b"a", b"\xff"]) == ["", "\ufffda", "\ufffd"]
        assert decode_pieces([b"a", b"\xe2\x82", b""]) == ["a", "\ufffd", ""]
        assert decode_pieces([]) == []

    @pytest.mark.slow
    @pytest.mark.parametrize("make", [qwen_tokenizer, llama3_tokenizer], ids=["qwen", "llama3"])
    def test_joined_they_are_what_the_tokenizer_decodes(self, make) -> None:
        tokenizer = make()
        texts = TokenTexts(tokenizer)
        text = "So 7€ = 👨‍👩‍👧 and \\boxed{\\text{naïve}}\n\n  zero\u200bwidth"
        ids = tokenizer.encode(text, add_special_tokens=False)
        # Byte by byte, as a model may write it, and with an end token and an unknown id after it.
        alphabet = {covered: token for token, covered in texts._bytes.items() if len(covered) == 1}
        by_byte = [alphabet[bytes([byte])] for byte in text.encode()]
        for written in (ids, by_byte, np.array(by_byte)):
            joined = texts([*written, tokenizer.eos_token_id, 10**9])
            assert "".join(joined) == text == tokenizer.decode(written, skip_special_tokens=True)
            assert len(joined) == len(written) + 2 and joined[-2:] == ["", ""]
        assert texts.special_tokens[tokenizer.eos_token_id] == tokenizer.eos_token
        span = find_answer_span(by_byte, tokenizer)
        assert answer_text(texts(by_byte), span) == "\\text{naïve}"
