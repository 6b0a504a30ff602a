"""This module reads existing responses: JSON lines, verl's and TRL's own files, and where steps and errors are in
texts."""

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
    """It holds one line."""

    id: str
    prompt: str | Sequence[Mapping[str, Any]]
    response: str | Sequence[int]
    # Half-open ranges of characters; None: the response's lines are its steps
    steps: Ranges | None = None
    labelled: bool = False  # says where the first error is; None then says that there is none
    error: int | tuple[int, int] | None = None
    ground_truth: Any = None
    reward: float | None = None
    group: str | None = None  # the same for responses to one prompt
    # Options of the chat template; tools among them
    template: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)  # everything else
    decoded: bool = False  # the prompt is a text that lost its control tokens

    @property
    def judged(self) -> bool:
        """Tell whether the line has a reward, or a ground truth to make one of."""
        return self.reward is not None or self.ground_truth is not None


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Give the numbered objects of a file of JSON lines, whose empty lines are skipped, or of a parquet file.
    ValueError, naming file and line."""
    # 0 while the file itself cannot be read.
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
        place = f"{path}:{number}" if number else path
        raise ValueError(f"{place}: cannot be read as JSON ({why(error)})") from error


def read_responses(path: Path) -> list[Response]:
    """Give the responses of a file. ValueError, naming file and line, and what the line must have."""
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
    counts = {
        "group": sum(row.group is not None for row in rows.values()),
        "reward": sum(row.reward is not None for row in rows.values()),
        "ground_truth or a reward": sum(row.judged for row in rows.values()),
    }
    for name, lines in counts.items():
        if 0 < lines < len(rows):
            raise ValueError(
                f"{path}: {lines} of {len(rows)} lines have a {name}; give all of them one, or none"
            )
    return list(rows.values())


def of_trainer(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give a record of verl's ``trainer.rollout_data_dir`` (0.7 to 0.9.1) or of TRL's ``log_completions`` with the keys
    of a line; another one stays as it is. TRL's rewards are summed without their functions' weights.

    Example: ``{"input": "user\\n1+1?", "output": "2", "gts": "2", "score": 1.0, "step": 7}``.
    """
    if {"input", "output", "score"} <= record.keys():
        names = {"input": "prompt", "output": "response", "score": "reward", "gts": "ground_truth"}
        line = {names.get(name, name): value for name, value in record.items()}
    elif {"prompt", "completion", "advantage"} <= record.keys():
        columns = list(record)
        # TRL has a column for each reward function between these two.
        functions = columns[columns.index("completion") + 1 : columns.index("advantage")]
        # A function that does not judge a response leaves null or NaN.
        rewards = [
            record[name]
            for name in functions
            if isinstance(record[name], float) and math.isfinite(record[name])
        ]
        line = {**record, "response": record["completion"], "reward": sum(rewards)}
        if isinstance(line["prompt"], list):
            # Parquet gives each message the keys of all.
            line["prompt"] = [
                {key: value for key, value in message.items() if value is not None}
                for message in line["prompt"]
            ]
        if isinstance(line["response"], list) and len(line["response"]) == 1:
            line["response"] = line["response"][0]["content"]
    else:
        return record
    # By step as well: a prompt comes again in a later epoch, under another policy.
    return {"group": json.dumps([record.get("step"), line["prompt"]]), **line}


def _response(record: Mapping[str, Any], number: int) -> Response:
    """Read a line; ValueError for one that lacks something."""
    # verl writes the prompt as a text that lost its control tokens.
    decoded = "input" in record and "prompt" not in record
    record = of_trainer(record)
    prompt: Any = record.get("prompt")
    is_chat = isinstance(prompt, list) and all(
        isinstance(message, dict) and "role" in message for message in prompt
    )
    if not prompt or not (is_chat or isinstance(prompt, str)):
        raise ValueError(
            f"needs a prompt, a text or messages with role and content; its keys are {list(record)}"
        )
    response: Any = record.get("response")
    steps = record.get("steps")
    ranges = None
    if isinstance(steps, list) and steps and all(isinstance(step, str) for step in steps):
        separator = SEPARATOR if response is None else ""
        # Steps "a" and "bc" are (0, 3) and (3, 7) of "a\n\nbc": the blank line belongs to the step before it.
        ranges = list(pairwise([0, *accumulate(len(step) + len(separator) for step in steps)]))
        text = separator.join(steps)
        if response not in (None, text):
            raise ValueError("steps must be the response in parts")
        response = text
    # isinstance() would take JSON's true for a number.
    is_ids = isinstance(response, list) and all(
        type(token) is int and token >= 0 for token in response
    )
    if not is_ids and not isinstance(response, str):
        raise ValueError(
            f"needs a response, a text or token ids, or steps, texts; its keys are {list(record)}"
        )
    template = record.get("chat_template_kwargs")
    if not isinstance(template, dict | None):
        raise ValueError(
            f"chat_template_kwargs={str(template)[:40]!r} must be an object, the chat template's options"
        )
    tools = record.get("tools")
    if not isinstance(tools, list | None):
        raise ValueError(f"tools={str(tools)[:40]!r} must be a list, as the chat template takes it")
    reward = record.get("reward")
    # JSON has whole numbers that are too large for a float.
    if reward is not None and not (
        isinstance(reward, int | float) and abs(reward) <= sys.float_info.max
    ):
        raise ValueError(f"reward={str(reward)[:40]!r} must be a finite number")
    options = dict(template or {})
    if tools:
        options["tools"] = tools
    error = record.get("error")
    group = record.get("group")
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
        template=options,
        columns={name: value for name, value in record.items() if name not in KEYS},
        decoded=decoded,
    )
    if isinstance(response, str):
        # For its error alone: here the message still gets the number of the line.
        label_ranges(row, response)
    return row


def label_ranges(row: Response, text: str) -> tuple[Ranges, Ranges]:
    """Find the characters of a response's steps and of its error, none or one. ValueError where ``error`` is neither a
    step nor a range of the text."""
    # By default the lines with text.
    steps = row.steps or [match.span() for match in re.finditer(r"[^\n]*\S[^\n]*\n*", text)]
    error = row.error
    if error is None:
        return steps, []
    # By type(): JSON's true is no number.
    if type(error) is int and 0 <= error < len(steps):
        return steps, [steps[error]]
    match error:
        case [start, end] if type(start) is type(end) is int and 0 <= start < end <= len(text):
            return steps, [error]
    raise ValueError(
        f"error={error!r:.40} is no step (0 to {len(steps) - 1}) and no range [start, end] of the text"
    )
