"""The names of signals and reshapers.

A signal (a method's scores and options) or a reshaper (a map from scores to weights) is one class in one file that registers
itself under a name; nothing else in this package names it. The built-in ones register when their packages are imported, those
of other projects through the entry-point group ``grail_advantage.signals``, whose members are modules that register on import:

    [project.entry-points."grail_advantage.signals"]
    mine = "my_package.my_signal"

Imports nothing of this package, so that everything in it may import this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

ENTRY_POINTS = "grail_advantage.signals"

RESERVED = ("token_weights", "token_dump")
"""Sections of ``algorithm`` that belong to the trainer."""

_Class = TypeVar("_Class", bound=type)

_signals: dict[str, Any] = {}
_reshapers: dict[str, Any] = {}
_failures: dict[str, Exception] = {}


class NameTakenError(ValueError):
    """Two classes want the same name."""


def register_signal(name: str, **fixed: Any) -> Callable[[_Class], _Class]:
    """Register a class below :class:`grail_advantage.signals.base.Signal`.

    Args:
        name: what ``algorithm.adv_estimator`` calls it. Its options are in ``algorithm.<name>``, or in
            ``algorithm.<section>`` where the class itself sets ``section``.
        fixed: options that the name sets, for a class that is registered under several names.

    Raises:
        ValueError: the name is taken or no identifier, or the class is no ``Signal``.
    """

    def register(signal_class: Any) -> Any:
        _add(_signals, "signal", name, signal_class)
        if "section" not in vars(signal_class):
            signal_class.section = name
        signal_class.names = {**vars(signal_class).get("names", {}), name: fixed}
        return signal_class

    return register


def register_reshaper(name: str) -> Callable[[_Class], _Class]:
    """Register a class below :class:`grail_advantage.reshapers.base.Reshaper`.

    Raises:
        ValueError: the name is taken or no identifier, or the class is no ``Reshaper``.
    """

    def register(reshaper_class: Any) -> Any:
        _add(_reshapers, "reshaper", name, reshaper_class)
        reshaper_class.section = name
        return reshaper_class

    return register


def signals() -> dict[str, Any]:
    """All registered signal classes by name."""
    _load_plugins()
    return dict(_signals)


def reshapers() -> dict[str, Any]:
    """All registered reshaper classes by name."""
    _load_plugins()
    return dict(_reshapers)


def failures() -> dict[str, Exception]:
    """Plug-ins (entry points of the group ``grail_advantage.signals``) that raised on import, and what they raised."""
    _load_plugins()
    return dict(_failures)


def failure_message() -> str:
    """The same as the end of a message; empty where none failed."""
    return "".join(
        f"; the plug-in {name} failed to import: {type(error).__name__}: {error}" for name, error in failures().items()
    )


@cache
def _load_plugins() -> None:
    """Import the plug-ins. One that fails stops no other and no run without it."""
    for entry_point in entry_points(group=ENTRY_POINTS):
        try:
            entry_point.load()
        except Exception as error:
            _failures[f"{entry_point.name} ({entry_point.value})"] = error


def _add(known: dict[str, Any], kind: str, name: str, registered: Any) -> None:
    if not name.isidentifier() or name in RESERVED:
        raise ValueError(f"{kind} {name!r}: the name must be an identifier, and none of {', '.join(RESERVED)}")
    if getattr(registered, "registers_as", None) != kind:
        raise ValueError(f"{kind} {name!r}: derive {registered.__name__} from grail_advantage.{kind.capitalize()}")
    # A class comes again where its module is loaded again.
    if name in known and _place(known[name]) != _place(registered):
        raise NameTakenError(f"{kind} {name!r} is registered already, by {_place(known[name])}; choose another name")
    known[name] = registered


def _place(registered: type) -> str:
    return f"{registered.__module__}.{registered.__qualname__}"
