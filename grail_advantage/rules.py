"""Rules on settings: one record for what a host refuses, what it warns of, and where it does without a shortcut.

Each host has its tables of rules in a file ``rules.py``: :mod:`grail_advantage.verl_ext.rules`,
:mod:`grail_advantage.trl_ext.rules`, and the recipe's. Every rule carries a setting that breaks it, with which one test goes
through all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Text = str | Callable[[Any], str]
"""A text, or a function that makes it of the settings."""


class Subject(Protocol):
    """Settings that rules are about."""

    def named(self, option: str) -> str:
        """``option=value``, for messages."""


class Obstacle(NamedTuple):
    """Something in the way of a shortcut, or of a method."""

    setting: str
    """A setting as ``option=value``, or a part of the model."""
    because: str


@dataclass(frozen=True)
class Rule:
    """A setting with which something does not work."""

    id: str
    """A short name of its own."""
    option: Text
    """The option that a message names, with its value."""
    when: Callable[[Any], Any]
    """Whether settings break the rule."""
    because: str
    remedy: Text
    example: Any
    """A setting that breaks it: overrides of Hydra's with verl, arguments by name with TRL. The first ones
    are the point, others are what it takes for them."""

    def obstacle(self, subject: Subject) -> Obstacle:
        """The setting and the reason, of settings that break the rule."""
        return Obstacle(subject.named(_made(self.option, subject)), self.because)

    def warning(self, subject: Subject) -> str:
        """The warning of settings that break the rule."""
        setting, because = self.obstacle(subject)
        return f"{setting}: {because}; {_made(self.remedy, subject)}"

    def message(self, subject: Subject, beside: str) -> str:
        """The refusal of settings that break the rule; ``beside``: with what the setting does not work."""
        setting, because = self.obstacle(subject)
        return f"{setting} does not work{beside and ' with '}{beside}: {because}; {_made(self.remedy, subject)}"


def _made(text: Text, subject: Subject) -> str:
    return text if isinstance(text, str) else text(subject)


def broken(rules: Iterable[Rule], subject: Subject) -> Iterator[Obstacle]:
    """What settings break of these rules."""
    return (rule.obstacle(subject) for rule in rules if rule.when(subject))


def refuse(rules: Iterable[Rule], subject: Subject, beside: str = "") -> None:
    """Refuse settings that break a rule.

    Args:
        rules: a table.
        subject: the settings.
        beside: with what the setting does not work, such as the method, as ``option=value``.

    Raises:
        ValueError: for the first rule that is broken, naming the option, its value, the reason and the remedy.
    """
    for rule in rules:
        if rule.when(subject):
            raise ValueError(rule.message(subject, beside))


def refuse_forced(shortcut: str, obstacles: Iterable[Obstacle], remedy: str) -> None:
    """Refuse a shortcut that somebody forces where it would change the update.

    Args:
        shortcut: as ``option=value``.
        obstacles: what is in its way.
        remedy: what to do instead.

    Raises:
        ValueError: for the first obstacle, naming the shortcut, the setting, the reason and the remedy.
    """
    for setting, because in obstacles:
        raise ValueError(f"{shortcut} does not work with {setting}: {because}; {remedy}")
