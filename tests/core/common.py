"""The methods and reshapers of this package, and how properties are tried."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, settings

from grail_advantage import registry
from grail_advantage.methods import methods


def _ours(known: dict[str, Any]) -> list[str]:
    """Plug-ins of other projects may be installed."""
    return [name for name, registered in known.items() if registered.__module__.startswith("grail_advantage.")]


METHODS = _ours({name: method.signal_class for name, method in methods().items()})
RESHAPERS = _ours(registry.reshapers())


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
