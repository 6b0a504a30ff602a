"""The answer of a response, token by token.

:mod:`grail_advantage.answers.format` defines an answer for a text; :func:`find_answer_span` finds the generated tokens
that it falls on, by the bytes that each token covers. Nothing is decoded and encoded again: generated ids need not be
the ones that the tokenizer would choose. GRAIL (arXiv 2606.04889) aims its gradient at this span, OAR (arXiv
2601.07408) its perturbations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch

from grail_advantage.answers.format import BOXED, AnswerFormat, answer_format

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
TokenIds: TypeAlias = torch.Tensor | np.ndarray | Sequence[int]


@dataclass(frozen=True)
class AnswerSpan:
    r"""Half-open ranges of token indices of one complete answer; ``start <= content_start <= content_end <= end``.

    A token that covers both content and boundary bytes is content. A token that covers no byte (a special token, say)
    belongs by its place: between two content tokens it is content, elsewhere inside the span boundary.
    """

    start: int
    """First token that covers a byte of the span."""
    content_start: int
    r"""First token that covers a byte of the content; without content the token with the byte where it would begin,
    such as the closing brace of ``\boxed{}``; ``end`` where that is the end."""
    content_end: int
    """One past the last token that covers a byte of the content; ``content_start`` without content."""
    end: int
    """One past the last token that covers a byte of the span."""


def find_answer_span(
    token_ids: TokenIds,
    tokenizer: PreTrainedTokenizerBase,
    which: str = "last",
    answer: str | AnswerFormat = BOXED,
) -> AnswerSpan | None:
    """Find the tokens of one complete answer in a response.

    Args:
        token_ids: integers of shape (T,), as generated. Special tokens and ids outside the vocabulary cover no byte.
        tokenizer: one backed by the ``tokenizers`` library with byte-level, SentencePiece-style or plain-text tokens.
            Its table of token bytes is built at the first call and kept for as long as the tokenizer lives.
        which: which complete answer counts, the ``"first"`` or the ``"last"``.
        answer: the format of answers, see :func:`grail_advantage.answers.format.answer_format`.

    Returns:
        The span, in indices into ``token_ids``, or ``None`` if no answer is complete.

    Raises:
        ValueError: an unknown ``which`` or ``answer``, ids that are not one-dimensional integers, an unsupported
            tokenizer.
    """
    return find_answer_spans([token_ids], tokenizer, which, answer)[0]


def find_answer_spans(
    token_ids_rows: torch.Tensor | np.ndarray | Iterable[TokenIds],
    tokenizer: PreTrainedTokenizerBase,
    which: str = "last",
    answer: str | AnswerFormat = BOXED,
) -> list[AnswerSpan | None]:
    """:func:`find_answer_span` for many responses: of any lengths, or one (B, T) or jagged tensor."""
    if which not in ("first", "last"):
        raise ValueError(f"which: {which!r} is not a choice; use 'first' or 'last'")
    if isinstance(token_ids_rows, torch.Tensor):
        token_ids_rows = token_ids_rows.detach().cpu().unbind()
    form = answer_format(answer)
    table = _token_table(tokenizer, form)
    return [_find_in_row(row, table, form, which) for row in token_ids_rows]


def find_generated_spans(
    generated: Sequence[torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    which: str = "last",
    answer: str | AnswerFormat = BOXED,
) -> list[AnswerSpan | None]:
    """:func:`find_answer_spans` for responses with -1 in place of tokens that the model did not generate, such as a
    tool's: an answer that these interrupt is none."""
    spans = find_answer_spans(generated, tokenizer, which, answer)
    return [
        None if span is None or (tokens[span.start : span.end] < 0).any() else span
        for tokens, span in zip(generated, spans, strict=True)
    ]


def _find_in_row(
    row: TokenIds, table: _TokenTable, answer: AnswerFormat, which: str
) -> AnswerSpan | None:
    ids = row.detach().cpu().numpy() if isinstance(row, torch.Tensor) else np.asarray(row)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"token_ids: got shape {ids.shape} and dtype {ids.dtype}; pass one response of integers, or a list of "
            "them to find_answer_spans"
        )
    pieces, lengths_V = table
    ids = ids.astype(np.int64, copy=False)
    # The table's last place, without bytes, stands for every other id.
    ids = np.where((ids >= 0) & (ids < len(pieces)), ids, -1)
    boxes = list(answer.find(b"".join([pieces[token] for token in ids.tolist()])))
    if not boxes:
        return None
    start, content_start, content_end, end = boxes[0 if which == "first" else -1]
    offsets = start, min(content_start, end - 1), content_end - 1, end - 1
    # side="right" steps over the tokens without bytes, to the one that covers the byte.
    ends_T = np.cumsum(lengths_V[ids])
    first, content_first, content_last, last = ends_T.searchsorted(offsets, "right").tolist()
    content_start_token = content_first if content_start < end else last + 1
    content_end_token = content_last + 1 if content_start < content_end else content_start_token
    return AnswerSpan(first, content_start_token, content_end_token, last + 1)


_TokenTable: TypeAlias = tuple[list[bytes], np.ndarray]
"""Of each token, and in the last place of ids outside the vocabulary: the bytes that are searched, a space for a token
that does not matter to the format; and their numbers, int64 (V + 1,)."""
# The state of a tokenizer's vocabulary, and its tables.
_tables: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[Any, dict[AnswerFormat, _TokenTable]]] = (
    WeakKeyDictionary()
)


def _token_table(tokenizer: PreTrainedTokenizerBase, answer: AnswerFormat) -> _TokenTable:
    # Changes with every token added. len(tokenizer) does too, but lists the whole vocabulary (70 ms for Qwen's).
    size = _backend(tokenizer).get_vocab_size(with_added_tokens=False)
    added = {token: entry.special for token, entry in tokenizer.added_tokens_decoder.items()}
    state = (size, added)
    if tokenizer not in _tables or _tables[tokenizer][0] != state:
        _tables[tokenizer] = (state, {})
    _, tables = _tables[tokenizer]
    if answer not in tables:
        bytes_of = token_bytes(tokenizer, answer.markers)
        pieces = [b""] * (max(bytes_of, default=-1) + 2)
        for token, covered in bytes_of.items():
            pieces[token] = covered if answer.matters(covered) else b" "
        tables[answer] = pieces, np.array([len(piece) for piece in pieces])
    return tables[answer]


def token_bytes(
    tokenizer: PreTrainedTokenizerBase, with_text: Collection[str] = ()
) -> dict[int, bytes]:
    """Token id to the bytes that the token puts into the text; none for special tokens, which decoding leaves out, but
    for those named in ``with_text``.

    Raises:
        ValueError: an unsupported tokenizer, as for :func:`find_answer_span`.
    """
    steps = _decoding_steps(_backend(tokenizer))
    added = tokenizer.added_tokens_decoder
    silent = {
        token for token, entry in added.items() if entry.special and entry.content not in with_text
    }
    return {
        token: b"" if token in silent else _literal_bytes(text, steps, is_added=token in added)
        for text, token in tokenizer.get_vocab().items()
    }


def _backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"tokenizer: {type(tokenizer).__name__} is not backed by the tokenizers library, so its tokens' bytes are "
            "unknown; load it as a PreTrainedTokenizerFast"
        )
    return backend


def _decoding_steps(backend: Any) -> list[dict[str, Any]]:
    """The tokenizer's own rule for turning tokens into text, as the settings of its decoders in order, a sequence before
    its members. Without a decoder the pre-tokenizer tells how text was spelt in the vocabulary; without either, tokens
    are plain text."""

    def flat(settings: dict[str, Any]) -> list[dict[str, Any]]:
        members = settings.get("decoders", settings.get("pretokenizers", ()))
        return [settings, *chain(*map(flat, members))]

    part = backend.decoder or backend.pre_tokenizer
    steps = flat(json.loads(part.__getstate__())) if part else []
    if not backend.decoder:
        steps = [step for step in steps if step["type"] in ("ByteLevel", "Metaspace")]
    fused = False
    for step in steps:
        kind = step["type"]
        keeps_bytes = kind in ("Sequence", "ByteLevel", "Metaspace", "ByteFallback", "Fuse")
        keeps_bytes |= kind == "Replace" and "String" in step["pattern"]
        # It takes spaces from the ends of the text once Fuse has joined it, where no box can lose anything.
        keeps_bytes |= kind == "Strip" and step["content"] == " " and fused
        fused |= kind == "Fuse"
        if not keeps_bytes:
            raise ValueError(
                f"tokenizer: its decoder has the step {step}, under which the bytes of a token are not its own; use a "
                "byte-level, SentencePiece-style or plain-text tokenizer"
            )
    return steps


@cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's table: the bytes by the characters that spell them in a byte-level vocabulary."""
    # Not above, where nobody has a tokenizer yet.
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {char: byte for byte, char in bytes_to_unicode().items()}


def _literal_bytes(text: str, steps: list[dict[str, Any]], is_added: bool) -> bytes:
    """The bytes that a token, as the vocabulary or the list of added tokens spells it, puts into the text."""
    byte_of = _byte_of_char()
    for step in steps:
        # The vocabulary holds added tokens as they are, and so a token with a character outside the byte alphabet.
        if step["type"] == "ByteLevel" and not is_added and byte_of.keys() >= set(text):
            return bytes(byte_of[char] for char in text)
        if step["type"] == "ByteFallback" and _BYTE_TOKEN.fullmatch(text):
            return bytes([int(text[3:5], 16)])
        if step["type"] == "Metaspace":
            text = text.replace(step["replacement"], " ")
        if step["type"] == "Replace":
            text = text.replace(step["pattern"]["String"], step["content"])
    return text.encode()
