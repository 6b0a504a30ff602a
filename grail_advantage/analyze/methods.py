"""This module tells how a command line names the methods of an analysis, and which of them fit the lines."""

import json
import re
from collections.abc import Sequence
from typing import Any

from grail_advantage.analyze.lines import Response
from grail_advantage.analyze.tokens import is_begun
from grail_advantage.data import REF_LOG_PROBS
from grail_advantage.method import BaseMethod, build, methods
from grail_advantage.text_io import complain


def parse_method(spec: str) -> BaseMethod:
    """Give the method of ``NAME`` or ``NAME:option=value,option=value``; an option of options comes after a dot. Values
    are read as JSON (``true``, ``0.5``, ``"a,b"``), else as texts, in which ``\\,`` is a comma:
    ``pattern:expression=[0-9]{1\\,3}``. ValueError: an unknown method or option, or a value that is not allowed."""
    name, _, rest = spec.partition(":")
    options: dict[str, Any] = {}
    while rest:
        key, equals, rest = rest.partition("=")
        value, rest = _first_value(rest)
        *outer, last = key.split(".")
        place: Any = options
        for part in outer:
            if isinstance(place, dict):
                place = place.setdefault(part, {})
        if not equals or not isinstance(place, dict) or last in place:
            raise ValueError(
                f"--method {spec}: {key!r} must be option=value, and each option given once"
            )
        place[last] = value
    return build(name, options)


def _first_value(text: str) -> tuple[Any, str]:
    """Give the value that a text begins with, and what comes after the comma behind it."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        end = -1
    # Of 0.5abc JSON would read 0.5: a value ends at a comma or with the text.
    if end == len(text) or (end > 0 and text[end] == ","):
        return value, text[end + 1 :]
    written, *rest = re.split(r"(?<!\\),", text, maxsplit=1)
    return written.replace("\\,", ","), "".join(rest)


def methods_for(
    specs: Sequence[str],
    responses: Sequence[Response],
    advantages: str = "auto",
    reference: bool = False,
) -> dict[str, BaseMethod]:
    """Give the methods by how they are called; ``all``: the registered ones that fit, but for those with a pass for
    every token. ``reference``: whether there is a reference model. ValueError: a method that is unknown, named twice,
    or needs what the lines do not have."""
    takes_all = list(specs) == ["all"]
    chosen: dict[str, BaseMethod] = {}
    for spec in sorted(methods()) if takes_all else specs:
        method = parse_method(spec)
        lack = _lack(method, responses, advantages)
        if REF_LOG_PROBS in method.reads and not reference:
            lack = "reads reference log-probabilities; name the model with --reference"
        if takes_all and "for every" in method.cost:
            lack = "takes a pass for every token"
        if not lack and spec not in chosen:
            chosen[spec] = method
        elif takes_all:
            complain("analyze", f"left out: {spec} {lack}")
        else:
            raise ValueError(
                f"--method {spec} {lack or 'is given twice; give variants of a method other options'}"
            )
    return chosen


def _lack(method: BaseMethod, responses: Sequence[Response], advantages: str) -> str:
    """Say what the lines lack for a method, after its name; empty where it fits."""
    if method.lacks:
        return method.lacks
    for name in method.field_names:
        if all(name not in row.columns for row in responses):
            return f"reads the field {name}, which no line has; give the lines one"
    if "groups" in method.reads:
        by_reward = advantages == "rewards" or (
            advantages == "auto" and not any(row.labelled for row in responses)
        )
        if not by_reward or any(row.group is None or not row.judged for row in responses):
            return "compares the responses of one prompt; give each a group and a reward, and --advantages rewards"
    if "examples" in method.reads:
        if any(is_begun(row) for row in responses):
            return "asks again in other words, which a begun answer at the end of a prompt does not allow"
        if any(isinstance(row.prompt, str) for row in responses):
            return "asks the prompt again with more in it; give the prompts as messages"
        if all(row.ground_truth is None and not row.columns for row in responses):
            return "tells the model the answer; give the lines a ground_truth, or the column that its options name"
    return ""
