"""Which signals and reshapers there are.

A signal (a method's scores and options) or a reshaper (a map from scores to weights) is one class in one file that registers
itself under a name; nothing else in this package names it. The built-in ones register when their packages are imported, those
of other projects through the entry-point group ``grail_advantage.signals``, whose members are modules that register on import:

    [project.entry-points."grail_advantage.signals"]
    mine = "my_package.my_signal"
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeVar

from grail_advantage.options import Options, option_fields

if TYPE_CHECKING:
    from grail_advantage.reshapers.base import Reshaper
    from grail_advantage.signals.base import Signal

ENTRY_POINTS = "grail_advantage.signals"

RESERVED = ("token_weights", "token_dump", "watchdog")
"""Sections of ``algorithm`` that belong to the trainer."""


class NameTakenError(ValueError):
    """Two classes want the same name."""


_SignalClass = TypeVar("_SignalClass", bound="type[Signal]")
_ReshaperClass = TypeVar("_ReshaperClass", bound="type[Reshaper]")


@dataclass(frozen=True)
class Method:
    """A registered signal: what ``algorithm.adv_estimator=<name>`` means."""

    name: str
    signal_class: type[Signal]
    fixed: Mapping[str, Any]
    """Options that the name itself sets."""

    @property
    def section(self) -> str:
        """Where its options stand, below ``algorithm``."""
        return self.signal_class.section

    def build(self, options: Mapping[str, Any]) -> Signal:
        """The signal with these options.

        Raises:
            ValueError: an option that the name sets, an unknown option or a value that is not allowed.
        """
        for name in self.fixed:
            if options.get(name) is not None:
                relatives = [other for other in methods().values() if other.signal_class is self.signal_class]
                meanings = " and ".join(f"{other.name} means {other.fixed[name]}" for other in relatives)
                raise ValueError(
                    f"{self.section}.{name}={options[name]!r} cannot be set in a run; algorithm.adv_estimator does it: "
                    f"{meanings}"
                )
        known = {entry.name for entry in option_fields(self.signal_class)}
        for name in options:
            maps = [map_name for map_name, found in reshapers().items() if _has_option(found, name)]
            if name not in known and maps and "reshaper_options" in known:
                raise ValueError(
                    f"{self.section}.{name} is not an option of this method but of the reshaper {' or '.join(maps)}; set it in "
                    f"{self.section}.reshaper_options"
                )
            owners = [other.section for other in methods().values() if other.has(name)]
            if name not in known and owners:
                raise ValueError(
                    f"{self.section}.{name} is not an option; it is one of {', '.join(sorted(set(owners)))}. The options of "
                    f"{self.section} are {', '.join(sorted(known))}"
                )
        return self.signal_class.from_dict({**options, **self.fixed})

    def has(self, name: str) -> bool:
        """Whether it has an option of this name."""
        return _has_option(self.signal_class, name)


_methods: dict[str, Method] = {}
_reshapers: dict[str, type[Reshaper]] = {}
_failures: dict[str, Exception] = {}


def register_signal(name: str, **fixed: Any) -> Callable[[_SignalClass], _SignalClass]:
    """Register a signal class, a frozen dataclass below :class:`grail_advantage.signals.base.Signal`.

    Args:
        name: what ``algorithm.adv_estimator`` calls it. Its options stand in ``algorithm.<name>``, or in
            ``algorithm.<section>`` where the class itself sets ``section``.
        fixed: options that the name sets, for a class that is registered under several names.

    Raises:
        ValueError: the name is taken or no identifier, or the class is no frozen dataclass below ``Signal``.
    """

    def register(signal_class: _SignalClass) -> _SignalClass:
        _check_class("signal", "Signal", name, signal_class)
        known = _methods.get(name)
        if known is not None and not _same(known.signal_class, signal_class):
            raise NameTakenError(
                f"signal {name!r} is registered already, by {_place(known.signal_class)}; choose another name"
            )
        if "section" not in vars(signal_class):
            signal_class.section = name
        _methods[name] = Method(name, signal_class, fixed)
        return signal_class

    return register


def register_reshaper(name: str) -> Callable[[_ReshaperClass], _ReshaperClass]:
    """Register a reshaper class, a frozen dataclass below :class:`grail_advantage.reshapers.base.Reshaper`.

    Raises:
        ValueError: the name is taken or no identifier, or the class is no frozen dataclass below ``Reshaper``.
    """

    def register(reshaper_class: _ReshaperClass) -> _ReshaperClass:
        _check_class("reshaper", "Reshaper", name, reshaper_class)
        known = _reshapers.get(name)
        if known is not None and not _same(known, reshaper_class):
            raise NameTakenError(f"reshaper {name!r} is registered already, by {_place(known)}; choose another name")
        reshaper_class.section = name
        _reshapers[name] = reshaper_class
        return reshaper_class

    return register


def methods() -> dict[str, Method]:
    """All registered signals by name."""
    _load()
    return dict(_methods)


def reshapers() -> dict[str, type[Reshaper]]:
    """All registered reshapers by name."""
    _load()
    return dict(_reshapers)


def method(name: str) -> Method:
    """The signal that is registered under a name.

    Raises:
        ValueError: there is none; the message lists those that there are, and the plug-ins that failed to import.
    """
    found = methods().get(name)
    if found is None:
        raise ValueError(
            f"{name!r} is no registered signal; choose one of {', '.join(sorted(methods()))}{failures_said()}"
        )
    return found


def method_of(signal: Signal) -> Method:
    """The name that a signal was registered under.

    Raises:
        ValueError: it is not registered.
    """
    for found in methods().values():
        if found.signal_class is type(signal) and all(
            getattr(signal, name) == value for name, value in found.fixed.items()
        ):
            return found
    raise ValueError(f"{type(signal).__name__} is no registered signal; put @register_signal('a_name') on the class")


def failures() -> dict[str, Exception]:
    """Plug-ins (entry points of the group ``grail_advantage.signals``) that raised on import, and what they raised."""
    _load()
    return dict(_failures)


def failures_said() -> str:
    """The same as the end of a message; empty where none failed."""
    return "".join(
        f"; the plug-in {name} failed to import: {type(error).__name__}: {error}" for name, error in failures().items()
    )


@cache
def _load() -> None:
    """Import every module of the two packages, and the plug-ins. One that fails stops no other and no run without it."""
    for package in ("grail_advantage.reshapers", "grail_advantage.signals"):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            importlib.import_module(module.name)
    for entry_point in entry_points(group=ENTRY_POINTS):
        try:
            entry_point.load()
        except Exception as error:
            _failures[f"{entry_point.name} ({entry_point.value})"] = error


def _check_class(what: str, base: str, name: str, registered: type) -> None:
    if not name.isidentifier() or name in RESERVED:
        raise ValueError(f"{what} {name!r}: the name must be an identifier, and none of {', '.join(RESERVED)}")
    if base not in [ancestor.__name__ for ancestor in registered.__mro__]:
        raise ValueError(f"{what} {name!r}: derive {registered.__name__} from grail_advantage.{base}")
    if not (is_dataclass(registered) and "__dataclass_params__" in vars(registered)):
        raise ValueError(f"{what} {name!r}: put @dataclass(frozen=True, kw_only=True) on {registered.__name__}")
    inherited = {entry.name for parent in registered.__bases__ if is_dataclass(parent) for entry in fields(parent)}
    for attribute in vars(registered):
        if attribute in inherited and attribute not in registered.__annotations__:
            raise ValueError(
                f"{what} {name!r}: {registered.__name__}.{attribute} redefines an option, which without a type does nothing; "
                f"write `{attribute}: <type> = option(...)`"
            )


def _has_option(options_class: type[Options], name: str) -> bool:
    return any(entry.name == name for entry in option_fields(options_class))


def _same(known: type, registered: type) -> bool:
    """Whether a class comes again because its module was loaded again."""
    return (known.__module__, known.__qualname__) == (registered.__module__, registered.__qualname__)


def _place(known: type) -> str:
    return f"{known.__module__}.{known.__qualname__}"
