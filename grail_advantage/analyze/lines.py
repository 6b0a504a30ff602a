"""Existing responses as they are read: JSON lines, verl's and TRL's own files, and where steps and errors are in texts."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from pyarrow import parquet

from grail_advantage.text_io import numbered_lines, read_json, why

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
    template: Mapping[str, Any] = field(default_factory=dict)  # options of the chat template; tools among them
    columns: Mapping[str, Any] = field(default_factory=dict)  # everything else
    decoded: bool = False  # the prompt is a text that lost its control tokens


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered objects of a file of JSON lines, whose empty lines are skipped, or of a parquet file. ValueError, naming
    file and line."""
    number = 0
    try:
        if path.suffix == ".parquet":
            yield from enumerate(parquet.read_table(path).to_pylist(), start=1)
            return
        for number, line in numbered_lines(path):
            record = read_json(line)
            if not isinstance(record, dict):
                raise ValueError("no object")
            yield number, record
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}{f':{number}' * bool(number)}: cannot be read as JSON ({why(error)})") from error


def read_responses(path: Path) -> list[Response]:
    """The responses of a file. ValueError, naming file and line, and what the line must have."""
    rows = dict[str, Response]()
    for number, record in json_lines(path):
        try:
            row = _response(record, number)
            if row.id in rows:
                raise ValueError(f"another line has the id {row.id!r}; give each its own")
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        rows[row.id] = row
    if not rows:
        raise ValueError(f"{path}: holds no response")
    given = {name: sum(getattr(row, name) is not None for row in rows.values()) for name in ("group", "reward")}
    given["ground_truth or a reward"] = sum((row.reward, row.ground_truth) != (None, None) for row in rows.values())
    for name, lines in given.items():
        if 0 < lines < len(rows):
            raise ValueError(f"{path}: {lines} of {len(rows)} lines have a {name}; give all of them one, or none")
    return list(rows.values())


def of_trainer(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record of verl's ``trainer.rollout_data_dir`` (0.7 to 0.9.1) or of TRL's ``log_completions`` with the keys of a
    line; another one as it is. TRL's rewards are summed without their functions' weights.

    Example: ``{"input": "user\\n1+1?", "output": "2", "gts": "2", "score": 1.0, "step": 7}``.
    """
    if {"input", "output", "score"} <= record.keys():
        names = {"input": "prompt", "output": "response", "score": "reward", "gts": "ground_truth"}
        line = {names.get(name, name): value for name, value in record.items()}
    elif {"prompt", "completion", "advantage"} <= record.keys():
        columns = list(record)
        rewards = [record[name] for name in columns[columns.index("completion") + 1 : columns.index("advantage")]]
        numbers = [value for value in rewards if isinstance(value, float) and math.isfinite(value)]
        prompt = record["prompt"]
        completion = record["completion"]
        if isinstance(prompt, list):  # parquet gives each message the keys of all
            prompt = [{key: value for key, value in entry.items() if value is not None} for entry in prompt]
        if isinstance(completion, list) and len(completion) == 1:
            completion = completion[0]["content"]
        line = {**record, "prompt": prompt, "response": completion, "reward": sum(numbers)}
    else:
        return record
    return {"group": json.dumps([record.get("step"), line["prompt"]]), **line}


def _response(record: Mapping[str, Any], number: int) -> Response:
    decoded = "input" in record and "prompt" not in record
    record = of_trainer(record)
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
    template = record.get("chat_template_kwargs")
    if not isinstance(template, dict | None):
        raise ValueError(f"chat_template_kwargs={str(template)[:40]!r} must be an object, the chat template's options")
    tools = record.get("tools")
    if not isinstance(tools, list | None):
        raise ValueError(f"tools={str(tools)[:40]!r} must be a list, as the chat template takes it")
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
        template={**(template or {}), **({"tools": tools} if tools else {})},
        columns={name: value for name, value in record.items() if name not in KEYS},
        decoded=decoded,
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
