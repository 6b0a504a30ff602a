"""This module takes existing responses to token space: the ids that the model read and wrote, and the tokens of steps
and errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from grail_advantage.analyze.lines import Ranges, Response, label_ranges
from grail_advantage.answers.text import TokenTexts
from grail_advantage.text_io import why

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenize(row: Response, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int], list[int]]:
    """Give the prompt as the model reads it, and the token ids of prompt and response.

    A prompt of messages goes through the chat template; one of text is taken as it is, with what the tokenizer puts in
    front of a text. A labelled text is a whole solution, and gets the end token if there is one; other texts get none.
    ValueError: messages without a chat template, or an empty prompt.
    """
    if isinstance(row.prompt, str):
        prompt = row.prompt
        front = []
        if not (tokenizer.bos_token and prompt.startswith(tokenizer.bos_token)):
            # A text that begins with the token would get it twice.
            front = _put_in_front(prompt, tokenizer)
    elif not tokenizer.chat_template:
        raise ValueError(
            f"{row.id}: the tokenizer has no chat template for its messages; give the text that it read"
        )
    else:
        begun = is_begun(row)
        how = {
            "add_generation_prompt": not begun,
            "continue_final_message": begun,
            "tokenize": False,
        }
        front = []
        try:
            prompt = tokenizer.apply_chat_template(list(row.prompt), **row.template, **how)
        except Exception as error:  # the template's own
            raise ValueError(
                f"{row.id}: the chat template does not take its prompt ({why(error)})"
            ) from error
    prompt_P = front + tokenizer.encode(prompt, add_special_tokens=False)
    if not prompt_P:
        raise ValueError(f"{row.id}: its prompt has no token; give a prompt of at least one")
    if not isinstance(row.response, str):
        return prompt, prompt_P, list(row.response)
    ids = tokenizer.encode(row.response, add_special_tokens=False)
    if row.labelled and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return prompt, prompt_P, ids


def with_messages(row: Response, tokenizer: PreTrainedTokenizerBase) -> Response:
    """A response whose prompt verl decoded without its control tokens, with the messages from which the chat template
    makes that very text; as it is where there are none."""
    if not row.decoded or not tokenizer.chat_template:
        return row
    pieces = re.split(r"\n?\b(system|user|assistant|model)\n+", str(row.prompt))
    pairs = zip(pieces[1::2], pieces[2::2], strict=True)
    messages = [{"role": role, "content": text} for role, text in pairs]
    # Qwen3's template adds an empty thought where thinking is off.
    for template in ({}, {"enable_thinking": False}):
        with suppress(Exception):  # the template's own
            # The last of the messages is the header of the response, which has no text yet.
            prompt = tokenizer.apply_chat_template(
                messages[:-1], tokenize=False, add_generation_prompt=True, **template
            )
            ids = tokenizer.encode(prompt, add_special_tokens=False)
            if tokenizer.decode(ids, skip_special_tokens=True) == row.prompt:
                return replace(row, prompt=messages[:-1], template=template, decoded=False)
    return row


def is_begun(row: Response) -> bool:
    """Tell whether the prompt ends in the beginning of the answer, a message of the assistant, which the response
    continues."""
    return not isinstance(row.prompt, str) and row.prompt[-1]["role"] == "assistant"


def _put_in_front(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Give the special tokens in front of a text, and not those after it, such as an end token."""
    text = f"{text} a"  # ends with another token than is put after it
    plain = tokenizer.encode(text, add_special_tokens=False)
    ids = tokenizer.encode(text)
    for start in range(len(ids)):
        if ids[start : start + len(plain)] == plain:
            return ids[:start]
    return []


def labels_of(
    row: Response, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, texts: TokenTexts
) -> dict[str, Any]:
    """Give a response's ``values``, and a labelled one's ``steps`` and ``wrong_step`` as ranges of its tokens ``ids``.

    The tokens' texts are not always the response's: SentencePiece puts a space in front, decoding takes spaces out, a
    normalizer writes other characters, a special token in the text has none.
    """
    labels: dict[str, Any] = {}
    if row.columns.get("values"):
        labels["values"] = row.columns["values"]
    if not row.labelled:
        return labels
    is_text = isinstance(row.response, str)
    text = str(row.response) if is_text else tokenizer.decode(ids, skip_special_tokens=True)
    steps, error = label_ranges(row, text)
    spans: Sequence[tuple[int, int]] | None = texts.spans_in(text, ids)
    # Only a text can be tokenized once more, for the places of its tokens.
    if spans is None and is_text:
        spans = _spans_of_tokenizer(text, ids, tokenizer, texts)
    pieces = texts(ids) if spans is None else [text[start:end] for start, end in spans]
    ranges = [list(bounds) for bounds in token_ranges([*steps, *error], pieces, spans)]
    labels["steps"] = ranges[: len(steps)]
    if error:
        labels["wrong_step"] = ranges[-1]
    return labels


def _spans_of_tokenizer(
    text: str, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, texts: TokenTexts
) -> list[tuple[int, int]]:
    """Say where the tokens of a text are in it, as the tokenizer says."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)[
        "offset_mapping"
    ]
    offsets += [(len(text), len(text))] * (len(ids) - len(offsets))  # the end token
    spans = []
    for token, (start, end) in zip(texts(ids), offsets, strict=True):
        # A space that the tokenizer puts in front has the place of the character after it.
        if token.isspace() and not text[start:end].isspace():
            end = start
        spans.append((start, end))
    return spans


def token_ranges(
    ranges: Sequence[tuple[int, int]],
    texts: Sequence[str],
    spans: Sequence[tuple[int, int]] | None = None,
) -> Ranges:
    """Give half-open ranges of characters as ranges of tokens: a token belongs where its first character is that is no
    blank. Of the tokens ``"= "``, ``" 8"``, ``"."`` in ``"=  8."`` the range (3, 4) has the second. ``spans``: where
    the tokens' texts are in that in which the characters are counted; a range that begins and ends within one token
    then has this token. Without them the text is the tokens' joined, and such a range is empty."""
    lengths_T = np.array([len(text) for text in texts], dtype=int)
    ends_T = np.cumsum(lengths_T) if spans is None else np.array([end for _, end in spans])
    starts_T = ends_T - lengths_T
    blanks = []
    for text in texts:
        # A token of blanks alone begins with its first one.
        blanks.append(len(text) - len(text.lstrip()) if text.strip() else 0)
    blanks_T = np.array(blanks)
    # A token without text is where the next one is, and belongs to what is before it.
    keys_T = starts_T + blanks_T - 0.5 * (lengths_T == 0)
    token_ranges = []
    for first, last in ranges:
        start = int(np.searchsorted(keys_T, first))
        end = int(np.searchsorted(keys_T, last))
        holds_T = (starts_T <= first) & (last <= ends_T)
        if spans is not None and start == end and holds_T.any():
            start = int(holds_T.argmax())
            end = start + 1
        token_ranges.append((start, end))
    return token_ranges
