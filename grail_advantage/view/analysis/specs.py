"""Methods as they are named on the command line: ``grail``, ``grail:preset=robust,gate=all``,
``surprisal:reshaper=power,reshaper_options.exponent=1``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from grail_advantage.method import Method, build


def parse_method(spec: str) -> Method:
    """The method of ``NAME`` or ``NAME:option=value,option=value``.

    Values are read as JSON (``true``, ``0.5``), else as texts. An option of options comes after a dot.

    Raises:
        ValueError: an unknown method or option, or a value that is not allowed.
    """
    name, _, rest = spec.partition(":")
    return build(name, parse_options([part for part in rest.split(",") if part], f"--method {spec}"))


def parse_options(assignments: Sequence[str], where: str) -> dict[str, Any]:
    """``key=value`` pairs, ``a.b=value`` as a mapping in a mapping.

    Raises:
        ValueError: one without ``=``, or the same key twice.
    """
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
            if not isinstance(place, dict):
                raise ValueError(f"{where}: {key} is given twice")
        if last in place:
            raise ValueError(f"{where}: {key} is given twice")
        place[last] = value
    return options


def parse_methods(specs: Sequence[str]) -> dict[str, Method]:
    """The methods by what they are called on the command line, in order.

    Raises:
        ValueError: as :func:`parse_method`; the same one twice.
    """
    methods: dict[str, Method] = {}
    for spec in specs:
        if spec in methods:
            raise ValueError(f"--method {spec} is given twice; give variants of a method other options")
        methods[spec] = parse_method(spec)
    return methods
