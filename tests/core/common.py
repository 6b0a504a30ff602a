"""The methods and reshapers of this package, how properties are tried, and what a module is called with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from torch import nn

from grail_advantage.maps import MAPS
from grail_advantage.method import methods

METHODS = [name for name, cls in methods().items() if cls.__module__.startswith("grail_advantage.")]
"""Without those of other projects, which may be installed."""
RESHAPERS = [name for name, known in MAPS.items() if known.function.__module__.startswith("grail_advantage.")]


def few(examples: int) -> settings:
    """So many examples of a property, the same ones every time."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


def some(names: Iterable[Any], by_day: Collection[Any]) -> list[Any]:
    """A test's parameters, of which those that are not ``by_day`` are nightly."""
    return [name if name in by_day else pytest.param(name, marks=pytest.mark.nightly) for name in names]


@contextmanager
def watch_inputs(module: nn.Module) -> Iterator[list[tuple[int, ...]]]:
    """Collect the shape of what each call of the module takes in."""
    shapes: list[tuple[int, ...]] = []

    def note(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        shapes.append(tuple((args[0] if args else next(iter(kwargs.values()))).shape))

    handle = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield shapes
    finally:
        handle.remove()
