"""The methods and maps of this package, responses with given numbers as a host, and how properties are tried."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.strategies import SearchStrategy, sampled_from
from torch import Tensor, nn

from grail_advantage.data import Rollouts, Row, RowScores, Weighed
from grail_advantage.maps import MAPS as ALL_MAPS
from grail_advantage.method import BaseMethod, methods
from grail_advantage.weigh import weigh
from tests.core.tiny_models import tiny_tokenizer

METHODS = [
    name for name, cls in methods().items() if cls.__module__.startswith("grail_advantage.")
]
"""Plug-ins of other projects may be installed."""
FITTED = {"file": str(Path(__file__).with_name("fitted.json"))}
"""Options without which ``fitted`` cannot run."""
MAPS = [
    name
    for name, entry in ALL_MAPS.items()
    if entry.function.__module__.startswith("grail_advantage.")
]


def rollouts_of(
    responses: Sequence[Sequence[int]],
    advantages: Sequence[float] | Tensor,
    trained: Sequence[Sequence[bool]] | Tensor | None = None,
    spans: Sequence[Any] | None = None,
    **parts,
) -> Rollouts:
    """Responses of these token ids after a prompt of one token, with answers where they are given."""
    mask = torch.zeros(
        len(responses), max(map(len, responses), default=0), dtype=torch.bool
    )
    for index, ids in enumerate(responses):
        mask[index, : len(ids)] = (
            torch.as_tensor(trained[index]) if trained is not None else True
        )
    answers = list(spans) if spans is not None else [None] * len(responses)
    fields = {
        "mask": mask,
        "tokenizer": tiny_tokenizer(),
        "known_spans": {"first": answers, "last": answers},
        "advantages": torch.as_tensor(advantages, dtype=torch.float32),
        "prompts": [torch.ones(1, dtype=torch.int64)] * len(responses),
        "responses": [torch.tensor(ids, dtype=torch.int64) for ids in responses],
    }
    return Rollouts(**fields | parts)


class Given:
    """A host whose pass gives these numbers, (B, T), and that has no columns."""

    def __init__(self, of_pass: Tensor | None = None):
        self.of_pass = of_pass

    def columns(
        self, names: Sequence[str], selected: Sequence[int]
    ) -> Mapping[str, Tensor]:
        return {}

    def scores(self, method: BaseMethod, rows: Sequence[Row]) -> list[RowScores]:
        return [RowScores(self.of_pass[row.index, : row.length]) for row in rows]


def weighed(
    method: BaseMethod, responses: Rollouts, of_pass: Tensor | None = None
) -> Weighed:
    """What a method makes of responses, the way every host goes; what holds for every method is checked."""
    w = weigh(responses, method, Given(of_pass))
    assert w.weights.dtype == w.advantages.dtype == w.scores.dtype == torch.float32
    assert w.weights.isfinite().all() and (w.weights >= 0).all()
    assert not w.advantages.isnan().any()
    assert not w.weights[~responses.mask].any() and not w.advantages[~responses.mask].any()
    return w


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


def sampled(options: Mapping[str, Sequence[Any]]) -> dict[str, SearchStrategy]:
    """Each option with any of its values."""
    return {name: sampled_from(values) for name, values in options.items()}


def some(names: Iterable[Any], by_day: Collection[Any]) -> list[Any]:
    """A test's parameters, of which those that are not ``by_day`` are nightly."""
    return [
        name if name in by_day else pytest.param(name, marks=pytest.mark.nightly)
        for name in names
    ]


@contextmanager
def watch_inputs(module: nn.Module) -> Iterator[list[tuple[int, ...]]]:
    """Collect the shape of what each call of the module takes in."""
    shapes: list[tuple[int, ...]] = []

    def note(_module, args, kwargs):
        shapes.append(tuple((args[0] if args else next(iter(kwargs.values()))).shape))

    handle = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield shapes
    finally:
        handle.remove()
