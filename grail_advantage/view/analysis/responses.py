"""Responses to analyse: JSON lines, and the tokens that a model reads.

A line has ``prompt`` (a text as the model saw it, or a list of messages for the chat template) and ``response`` (a text, or the
generated token ids), and may have ``ground_truth``, ``reward``, ``group`` and ``id``. Other keys are columns that a
method may ask for.

Shape suffixes: B responses, P tokens of a prompt, T response tokens, L prompt + response.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grail_advantage.data import Example
from grail_advantage.receipt.foreign import numbered_lines, read_json, why

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
KEYS = ("prompt", "response", "ground_truth", "reward", "group", "id")


@dataclass(frozen=True, kw_only=True)
class Response:
    """One line."""

    id: str
    prompt: str | Messages
    response: str | Sequence[int]
    ground_truth: Any = None
    reward: float | None = None
    group: str | None = None
    """Responses with the same one answer the same prompt."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Everything else."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    """Half-open ranges of characters of the response, or lists of such, by name."""


@dataclass(frozen=True)
class Tokens:
    """A response as the model reads it."""

    prompt: str
    prompt_P: list[int]
    response_T: list[int]


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered objects of a file of JSON lines; empty lines are skipped.

    Raises:
        ValueError: naming file and line.
    """
    try:
        lines = numbered_lines(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({why(error)})") from error
    for number, line in lines:
        try:
            record = read_json(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: is no JSON ({why(error)})") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{number}: is no JSON object")
        yield number, record


def read_responses(path: Path) -> list[Response]:
    """The responses of a file.

    Raises:
        ValueError: naming file and line, and what the line must have.
    """
    responses = [_response(record, number, f"{path}:{number}") for number, record in json_lines(path)]
    if not responses:
        raise ValueError(f"{path}: holds no response")
    for name in ("group", "reward"):
        given = sum(getattr(row, name) is not None for row in responses)
        if 0 < given < len(responses):
            raise ValueError(f"{path}: {given} of {len(responses)} lines have a {name}; give all of them one, or none")
    scored = sum(row.reward is not None or row.ground_truth is not None for row in responses)
    if 0 < scored < len(responses):
        raise ValueError(
            f"{path}: {scored} of {len(responses)} lines have a ground_truth or a reward; give all of them one"
        )
    return responses


def _response(record: Mapping[str, Any], number: int, where: str) -> Response:
    for name in ("prompt", "response"):
        if name not in record:
            raise ValueError(
                f"{where}: has no {name}; a line has prompt (text or messages) and response (text or token ids)"
            )
    prompt, response, reward = record["prompt"], record["response"], record.get("reward")
    is_chat = (
        isinstance(prompt, list) and prompt and all(isinstance(entry, dict) and "role" in entry for entry in prompt)
    )
    if not is_chat and not (isinstance(prompt, str) and prompt):
        raise ValueError(f"{where}: prompt must be a text, or a list of messages with role and content")
    is_ids = isinstance(response, list) and all(type(token) is int and token >= 0 for token in response)
    if not is_ids and not isinstance(response, str):
        raise ValueError(f"{where}: response must be a text or a list of token ids")
    if isinstance(reward, bool):
        reward = float(reward)
    if reward is not None and not (isinstance(reward, int | float) and abs(reward) <= sys.float_info.max):
        raise ValueError(f"{where}: reward={str(reward)[:40]!r} must be a finite number")
    group = record.get("group")
    return Response(
        id=str(record.get("id", number)),
        prompt=prompt,
        response=response,
        ground_truth=record.get("ground_truth"),
        reward=None if reward is None else float(reward),
        group=None if group is None else str(group),
        columns={name: value for name, value in record.items() if name not in KEYS},
    )


def tokenize(row: Response, tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any]) -> Tokens:
    """The token ids of prompt and response.

    A prompt of messages goes through the chat template; one of text is taken as it is, with what the tokenizer puts in front of
    a text. A response of text gets no end token.

    Raises:
        ValueError: messages without a chat template, an empty prompt, or ids that the tokenizer does not have.
    """
    if isinstance(row.prompt, str):
        prompt = row.prompt
        prompt_P = tokenizer.encode(prompt, add_special_tokens=False)
        if not (tokenizer.bos_token and prompt.startswith(tokenizer.bos_token)):
            prompt_P = [*_put_in_front(prompt, tokenizer), *prompt_P]
    else:
        if not tokenizer.chat_template:
            raise ValueError(
                f"{row.id}: its prompt is a list of messages, and the tokenizer has no chat template; give the text that the "
                "model saw as prompt"
            )
        try:
            prompt = tokenizer.apply_chat_template(
                list(row.prompt), **{**template_options, "add_generation_prompt": True, "tokenize": False}
            )
        except Exception as error:  # the template's own
            raise ValueError(f"{row.id}: the chat template does not take its prompt ({why(error)})") from error
        prompt_P = tokenizer.encode(prompt, add_special_tokens=False)
    if not prompt_P:
        raise ValueError(f"{row.id}: its prompt has no token; give a prompt of at least one")
    if isinstance(row.response, str):
        response_T = tokenizer.encode(row.response, add_special_tokens=False)
    else:
        response_T = list(row.response)
        if response_T and max(response_T) >= len(tokenizer):
            raise ValueError(
                f"{row.id}: token id {max(response_T)} is not in the tokenizer's vocabulary of {len(tokenizer)}; give --model "
                "the model that generated the response"
            )
    return Tokens(prompt, prompt_P, response_T)


def _put_in_front(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens in front of a text, and not those behind it, such as an end token."""
    text = f"{text} a"  # ends with another token than is put behind
    whole, plain = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
    return next((whole[:start] for start in range(len(whole)) if whole[start : start + len(plain)] == plain), [])


def example_of(row: Response, template_options: Mapping[str, Any]) -> Example:
    """The response as methods see it that ask the prompt again; the ground truth is where verl's data sets have it.

    Raises:
        ValueError: the prompt is a text.
    """
    if isinstance(row.prompt, str):
        raise ValueError(
            f"{row.id}: its prompt is a text, and the method asks it again with more in it; give the prompt as messages"
        )
    columns = {**row.columns}
    if row.ground_truth is not None:
        columns["reward_model"] = {"ground_truth": row.ground_truth}
    return Example(row.prompt, columns, dict(template_options))
