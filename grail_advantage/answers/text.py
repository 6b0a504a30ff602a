"""The text of each token of a response (T tokens), such that joined they are the response."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from grail_advantage.answers.format import BOXED, AnswerFormat
from grail_advantage.answers.span import AnswerSpan, token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenTexts:
    """Texts of the tokens of a tokenizer, as for :func:`grail_advantage.find_answer_span`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        # The text of tokens as the tokenizer gives it, special ones included
        self.decode = tokenizer.decode
        self._bytes = token_bytes(tokenizer)
        added = tokenizer.added_tokens_decoder
        # Names of the tokens that have no text, by id.
        self.special_tokens = {
            token: entry.content for token, entry in added.items() if entry.special
        }

    def __call__(self, token_ids: Sequence[int] | np.ndarray) -> list[str]:
        """Texts of these tokens; ``""`` for special tokens and unknown ids. Bytes that are no UTF-8 become U+FFFD."""
        ids = np.asarray(token_ids).tolist()
        return decode_pieces([self._bytes.get(token, b"") for token in ids])

    def have_bytes(self, token_ids: np.ndarray) -> np.ndarray:
        """bool (T,): tokens that put bytes into the text, if only a part of a character."""
        return np.array([bool(self._bytes.get(token)) for token in token_ids.tolist()], dtype=bool)

    def spans_in(self, text: str, token_ids: Sequence[int]) -> list[tuple[int, int]] | None:
        """Half-open ranges of each token's characters in a text that is theirs but for blanks; ``None`` for another.

        In ``"2+ 3."`` the tokens ``" 2"``, ``"+ "``, ``" 3"``, ``" ."`` have (0, 1), (1, 3), (3, 4), (4, 5). A
        character that several tokens share is in the ranges of all of them.
        """
        tokens = self(token_ids)
        joined = "".join(tokens)
        if "".join(joined.split()) != "".join(text.split()):
            return None
        # Places of the characters that are no blank, and of the end, in the tokens' text and in the given one.
        from_K, to_K = (
            np.array(
                [place for place, character in enumerate(f"{either}.") if not character.isspace()]
            )
            for either in (joined, text)
        )
        place_J = np.arange(len(joined) + 1)
        next_J = np.searchsorted(from_K, place_J)
        # Blanks stand before the next character, as many as there are.
        least_K = np.concatenate([[0], to_K[:-1] + 1])
        to_J = np.maximum(to_K[next_J] - (from_K[next_J] - place_J), least_K[next_J])
        edges = edges_of(tokens)
        given_T = np.cumsum([len(self._bytes.get(token, b"")) for token in token_ids])
        whole_T = np.cumsum([len(token.encode()) for token in tokens])
        cut_T = given_T > whole_T  # within a character, which is in the text of a later token
        starts = to_J[edges[:-1]].tolist()
        return list(zip(starts, (to_J[edges[1:]] + cut_T).tolist(), strict=True))


def edges_of(texts: Sequence[str]) -> np.ndarray:
    """int64 (T + 1,): where the text of each token begins in the whole, and its end: 0, 2, 2, 5 of ``"ab", "", "cde"``."""
    return np.cumsum([0, *map(len, texts)])


def decode_pieces(pieces: Sequence[bytes]) -> list[str]:
    """Texts of consecutive pieces of UTF-8; a character in several pieces belongs to the last of them."""
    # A character that is cut off shows at the last piece with bytes, not at a token without text.
    last = max((i for i, piece in enumerate(pieces) if piece), default=0)
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    return [decode(piece, final=i == last) for i, piece in enumerate(pieces)]


def answer_text(
    tokens: Sequence[str], span: AnswerSpan | None, answer: AnswerFormat = BOXED
) -> str | None:
    """The text of an answer's content, such as that between the braces of a box."""
    if span is None:
        return None
    text = "".join(tokens[span.start : span.end]).encode("utf-8", "surrogatepass")
    for _, start, end, _ in answer.find(text):
        return text[start:end].decode("utf-8", "surrogatepass")
    # Its ends have no text (special tokens), or an expression reads text beside them.
    return "".join(tokens[span.content_start : span.content_end])
