"""Responses to analyse: JSON lines, the tokens that a model reads, and labels as ranges of tokens.

A line has ``prompt`` (a text as the model saw it, or a list of messages for the chat template) and ``response`` (a text,
or the generated token ids) or ``steps`` (texts, which blank lines join; beside
a ``response`` its parts), and may have ``reward``, ``ground_truth``,
``group`` and ``id``. With ``error`` it is labelled: the first incorrect step from 0 (without ``steps``, lines with text
are the steps), the half-open range ``[start, end]`` of its characters in the response, or null for none. Other keys are
columns that a method may ask for. Shape suffixes: P tokens of a prompt, T response tokens.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grail_advantage.answers.text import TokenTexts
from grail_advantage.data import Example
from grail_advantage.method import Method, build
from grail_advantage.receipt.foreign import numbered_lines, read_json, why

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ranges = list[tuple[int, int]]
KEYS = ("prompt", "response", "steps", "ground_truth", "reward", "group", "id", "error")
SEPARATOR = "\n\n"


@dataclass(frozen=True, kw_only=True)
class Response:
    """One line."""

    id: str
    prompt: str | Sequence[Mapping[str, Any]]
    response: str | Sequence[int]
    steps: Ranges | None = None  # half-open ranges of characters; None: the response's lines are its steps
    labelled: bool = False  # says where the first error is; None then says that there is none
    error: int | tuple[int, int] | None = None
    ground_truth: Any = None
    reward: float | None = None
    group: str | None = None  # the same for responses to one prompt
    columns: Mapping[str, Any] = field(default_factory=dict)  # everything else


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered objects of a file of JSON lines; empty lines are skipped. ValueError, naming file and line."""
    number = 0
    try:
        for number, line in numbered_lines(path):
            record = read_json(line)
            if not isinstance(record, dict):
                raise ValueError("no object")
            yield number, record
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}{f':{number}' * bool(number)}: cannot be read as JSON ({why(error)})") from error


def read_responses(path: Path) -> list[Response]:
    """The responses of a file. ValueError, naming file and line, and what the line must have."""
    rows, ids = list[Response](), set[str]()
    for number, record in json_lines(path):
        try:
            row = _response(record, number)
            if row.id in ids:
                raise ValueError(f"another line has the id {row.id!r}; give each its own")
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        ids.add(row.id)
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: holds no response")
    given = {name: sum(getattr(row, name) is not None for row in rows) for name in ("group", "reward")}
    given["ground_truth or a reward"] = sum(row.reward is not None or row.ground_truth is not None for row in rows)
    for name, lines in given.items():
        if 0 < lines < len(rows):
            raise ValueError(f"{path}: {lines} of {len(rows)} lines have a {name}; give all of them one, or none")
    return rows


def _response(record: Mapping[str, Any], number: int) -> Response:
    prompt: Any = record.get("prompt")
    response: Any = record.get("response")
    steps, ranges = record.get("steps"), None
    if isinstance(steps, list) and steps and all(isinstance(step, str) for step in steps):
        between = SEPARATOR if response is None else ""
        ranges = list(pairwise([0, *accumulate(len(step) + len(between) for step in steps)]))
        if response not in (None, text := between.join(steps)):
            raise ValueError("steps must be the response in parts")
        response = text
    chat = isinstance(prompt, list) and prompt and all(isinstance(entry, dict) and "role" in entry for entry in prompt)
    if not chat and not (isinstance(prompt, str) and prompt):
        raise ValueError(f"needs a prompt, a text or messages with role and content; its keys are {list(record)}")
    is_ids = isinstance(response, list) and all(type(token) is int and token >= 0 for token in response)
    if not is_ids and not isinstance(response, str):
        raise ValueError(f"needs a response, a text or token ids, or steps, texts; its keys are {list(record)}")
    reward, error, group = record.get("reward"), record.get("error"), record.get("group")
    if reward is not None and not (isinstance(reward, int | float) and abs(reward) <= sys.float_info.max):
        raise ValueError(f"reward={str(reward)[:40]!r} must be a finite number")
    row = Response(
        id=str(record.get("id", number)),
        prompt=prompt,
        response=response,
        steps=ranges,
        labelled="error" in record,
        error=tuple(error) if isinstance(error, list) else error,
        ground_truth=record.get("ground_truth"),
        reward=None if reward is None else float(reward),
        group=None if group is None else str(group),
        columns={name: value for name, value in record.items() if name not in KEYS},
    )
    if isinstance(response, str):
        label_ranges(row, response)
    return row


def label_ranges(row: Response, text: str) -> tuple[Ranges, Ranges]:
    """The characters of a response's steps and of its error, none or one. ValueError where ``error`` is neither a step
    nor a range of the text."""
    steps, error = row.steps or [match.span() for match in re.finditer(r"[^\n]*\S[^\n]*\n*", text)], row.error
    if error is None:
        return steps, []
    if type(error) is int and 0 <= error < len(steps):
        return steps, [steps[error]]
    if isinstance(error, tuple) and list(map(type, error)) == [int, int] and 0 <= error[0] < error[1] <= len(text):
        return steps, [error]
    last = len(steps) - 1
    raise ValueError(f"error={error!r:.40} is no step (0 to {last}) and no range [start, end] of the text")


def tokenize(
    row: Response, tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any]
) -> tuple[str, list[int], list[int]]:
    """The prompt as the model reads it, and the token ids of prompt and response.

    A prompt of messages goes through the chat template; one of text is taken as it is, with what the tokenizer puts in
    front of a text. A labelled text is a whole solution, and gets the end token if there is one; other texts get none.
    ValueError: messages without a chat template, an empty prompt, or ids that the tokenizer does not have.
    """
    if isinstance(row.prompt, str):
        prompt, front = row.prompt, []
        if not (tokenizer.bos_token and prompt.startswith(tokenizer.bos_token)):
            front = _put_in_front(prompt, tokenizer)
    elif not tokenizer.chat_template:
        raise ValueError(f"{row.id}: the tokenizer has no chat template for its messages; give the text that it read")
    else:
        options = {**template_options, "add_generation_prompt": True, "tokenize": False}
        try:
            prompt, front = tokenizer.apply_chat_template(list(row.prompt), **options), []
        except Exception as error:  # the template's own
            raise ValueError(f"{row.id}: the chat template does not take its prompt ({why(error)})") from error
    prompt_P = front + tokenizer.encode(prompt, add_special_tokens=False)
    if not prompt_P:
        raise ValueError(f"{row.id}: its prompt has no token; give a prompt of at least one")
    if isinstance(row.response, str):
        end = [tokenizer.eos_token_id] if row.labelled and tokenizer.eos_token_id is not None else []
        return prompt, prompt_P, tokenizer.encode(row.response, add_special_tokens=False) + end
    if (largest := max(row.response, default=0)) >= len(tokenizer):
        known = f"not in the tokenizer's vocabulary of {len(tokenizer)}"
        raise ValueError(f"{row.id}: token id {largest} is {known}; give --model the model that generated the response")
    return prompt, prompt_P, list(row.response)


def _put_in_front(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens in front of a text, and not those after it, such as an end token."""
    text = f"{text} a"  # ends with another token than is put after it
    whole, plain = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
    return next((whole[:start] for start in range(len(whole)) if whole[start : start + len(plain)] == plain), [])


def example_of(row: Response, template_options: Mapping[str, Any]) -> Example | None:
    """The response as methods see it that ask the prompt again; ``None`` where the prompt is a text. The ground truth is
    where verl's data sets have it."""
    if isinstance(row.prompt, str):
        return None
    truth = {} if row.ground_truth is None else {"reward_model": {"ground_truth": row.ground_truth}}
    return Example(row.prompt, {**row.columns, **truth}, dict(template_options))


def labels_of(
    row: Response, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, texts: TokenTexts
) -> dict[str, Any]:
    """A labelled response's ``steps`` and ``wrong_step`` as ranges of its tokens ``ids``; ``{}`` for another one.

    The tokens' texts are not always the response's: SentencePiece puts a space in front, decoding takes spaces out, a
    normalizer writes other characters, a special token in the text has none.
    """
    if not row.labelled:
        return {}
    given = isinstance(row.response, str)
    text = str(row.response) if given else tokenizer.decode(ids, skip_special_tokens=True)
    steps, error = label_ranges(row, text)
    spans: Sequence[tuple[int, int]] | None = texts.spans_in(text, ids)
    if spans is None and given:
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        offsets += [(len(text), len(text))] * (len(ids) - len(offsets))  # the end token
        # A space that the tokenizer puts in front has the place of the character after it.
        spans = [
            (start, start if token.isspace() and not text[start:end].isspace() else end)
            for token, (start, end) in zip(texts(ids), offsets, strict=True)
        ]
    pieces = texts(ids) if spans is None else [text[start:end] for start, end in spans]
    found = [list(of) for of in token_ranges([*steps, *error], pieces, spans)]
    return {"steps": found[: len(steps)], **({"wrong_step": found[-1]} if error else {})}


def token_ranges(
    ranges: Sequence[tuple[int, int]], texts: Sequence[str], spans: Sequence[tuple[int, int]] | None = None
) -> Ranges:
    """Half-open ranges of characters as ranges of tokens: a token belongs where its first character is that is no blank.
    Of the tokens ``"= "``, ``" 8"``, ``"."`` in ``"=  8."`` the range (3, 4) has the second. ``spans``: where the tokens'
    texts are in that in which the characters are counted; a range that begins and ends within one token then has this
    token. Without them the text is the tokens' joined, and such a range is empty."""
    ends_T = np.cumsum([len(text) for text in texts]) if spans is None else np.array([end for _, end in spans])
    starts_T = ends_T - [len(text) for text in texts]
    blanks_T = np.array([len(text) - len(text.lstrip()) if text.strip() else 0 for text in texts])
    # A token without text is where the next one is, and belongs to what is before it.
    keys_T = starts_T + blanks_T - 0.5 * np.array([not text for text in texts], dtype=bool)
    found = []
    for first, last in ranges:
        start, end = (int(np.searchsorted(keys_T, edge)) for edge in (first, last))
        holds_T = (starts_T <= first) & (last <= ends_T)
        if spans is not None and start == end and holds_T.any():
            start = int(holds_T.argmax())
            end = start + 1
        found.append((start, end))
    return found


def parse_method(spec: str) -> Method:
    """The method of ``NAME`` or ``NAME:option=value,option=value``; an option of options comes after a dot. Values are read as
    JSON (``true``, ``0.5``), else as texts. ValueError: an unknown method or option, or a value that is not allowed."""
    name, _, rest = spec.partition(":")
    return build(name, parse_options([part for part in rest.split(",") if part], f"--method {spec}"))


def parse_options(assignments: Sequence[str], where: str) -> dict[str, Any]:
    """``key=value`` pairs, ``a.b=value`` as a mapping in a mapping. ValueError: one without ``=``, or a key twice."""
    options: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not key or not equals:
            raise ValueError(f"{where}: {assignment!r} must be option=value")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        *outer, last = key.split(".")
        place = options
        for part in outer:
            place = place.setdefault(part, {})
        if not isinstance(place, dict) or last in place:
            raise ValueError(f"{where}: {key} is given twice")
        place[last] = value
    return options
