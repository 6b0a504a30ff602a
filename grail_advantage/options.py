"""Options of signals and reshapers: declared once, as the fields of a frozen dataclass.

The declaration is all there is: the checks at construction, the section of a run's configuration and the tables of the
documentation follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, Self


@dataclass(frozen=True)
class OptionRule:
    """What an option may be."""

    doc: str
    kind: type
    """``bool``, ``int``, ``float``, ``str`` or ``dict``."""
    choices: Sequence[str] = ()
    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    why: str = ""
    """Why the bound is there, or what to do instead; ends the message of a value below it."""
    optional: bool = False
    """Whether ``None`` is a value; otherwise it stands for the default."""


def option(
    default: Any,
    doc: str,
    *,
    kind: type | None = None,
    choices: Sequence[str] = (),
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    why: str = "",
) -> Any:
    """A field of an :class:`Options` dataclass.

    Args:
        default: the default; with ``None`` either no value is a value (give its ``kind``), or the class fills it in
            (:meth:`Options.complete`).
        doc: what it does, for the documentation; of a number also its unit or what it is relative to.
        kind: type of the values; by default that of the default, so that 1 means whole numbers and 1.0 any.
        choices: the allowed words, of a ``str``.
        above: bound that a number must exceed.
        at_least: least number allowed.
        at_most: greatest number allowed.
        why: why the lower bound is there, or what to do instead, for the message.
    """
    if kind is None:
        kind = type(default) if default is not None else str
    rule = OptionRule(doc, kind, tuple(choices), above, at_least, at_most, why, optional=default is None)
    if kind is dict:
        return field(default_factory=dict, hash=False, metadata={"rule": rule})
    return field(default=default, metadata={"rule": rule})


@dataclass(frozen=True)
class Options:
    """Base of every dataclass of options. ``None`` stands for an option's default.

    A field without :func:`option` is an argument of the constructor alone, not an option of a run.

    Raises:
        ValueError: a value that is not allowed, at construction; the message names the option and the way out.
    """

    section: ClassVar[str] = "options"
    """Where the options stand in a run's configuration, below ``algorithm``; for messages."""

    def __post_init__(self) -> None:
        for entry in option_fields(type(self)):
            if getattr(self, entry.name) is None:
                self._set(entry.name, default_of(entry))
        self.complete()
        for entry in option_fields(type(self)):
            self._check(entry.name, rule_of(entry))
        self.check()

    def complete(self) -> None:
        """Fill in what is ``None`` and follows from other options."""

    def check(self) -> None:
        """Refuse combinations; each option alone is valid here."""

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Build from a mapping such as the section of a run's configuration.

        Raises:
            ValueError: an unknown option, naming the known ones, or any error of the constructor.
        """
        known = [entry.name for entry in option_fields(cls)]
        for name in options:
            if name not in known:
                raise ValueError(f"{cls.section}.{name} is not an option; the options are {', '.join(known) or 'none'}")
        return cls(**options)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check(self, name: str, rule: OptionRule) -> None:
        value = getattr(self, name)
        if value is None and rule.optional:
            return
        said = f"{self.section}.{name}={value!r}"
        if rule.kind is bool and not isinstance(value, bool):
            raise ValueError(f"{said} must be true or false")
        if rule.choices and value not in rule.choices:
            raise ValueError(f"{said} is unknown; choose one of {', '.join(rule.choices)}")
        if rule.kind is dict and not isinstance(value, Mapping):
            raise ValueError(f"{said} must be a mapping of options")
        if rule.kind is str and not isinstance(value, str):
            raise ValueError(f"{said} must be a text")
        if rule.kind is int and (
            isinstance(value, bool)
            or not isinstance(value, int)
            or (rule.at_least is not None and value < rule.at_least)
        ):
            least = "" if rule.at_least is None else f", at least {rule.at_least}"
            raise ValueError(f"{said} must be a whole number{least}")
        if rule.kind is int:
            self._check_bounds(said, value, rule)
        if rule.kind is float:
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{said} must be a finite number")
            self._set(name, float(value))
            self._check_bounds(f"{self.section}.{name}={float(value)}", float(value), rule)

    def _check_bounds(self, said: str, value: float, rule: OptionRule) -> None:
        why = f"; {rule.why}" if rule.why else ""
        if rule.above is not None and value <= rule.above:
            raise ValueError(f"{said} must be greater than {rule.above}{why}")
        outside = (rule.at_least is not None and value < rule.at_least) or (
            rule.at_most is not None and value > rule.at_most
        )
        if outside and rule.at_least is not None and rule.at_most is not None:
            raise ValueError(f"{said} must be between {rule.at_least} and {rule.at_most}{why}")
        if outside and rule.at_most is not None:
            raise ValueError(f"{said} must be at most {rule.at_most}{why}")
        if outside:
            raise ValueError(f"{said} must be at least {rule.at_least}{why}")


def option_fields(cls: type[Options]) -> list[Field]:
    """The options of a class, in the order of their declaration."""
    return [entry for entry in fields(cls) if "rule" in entry.metadata]


def rule_of(entry: Field) -> OptionRule:
    """What :func:`option` was told."""
    return entry.metadata["rule"]


def default_of(entry: Field) -> Any:
    """What stands in where nothing is given; ``None`` where the class works it out."""
    return entry.default_factory() if entry.default_factory is not MISSING else entry.default
