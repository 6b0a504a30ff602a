"""Rules on settings: one record for what a host refuses, what it warns of, and where it does without a shortcut; a file
``rules.py`` of each host has its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

Text = str | Callable[[Any], str]  # a text, or a function that makes it of the settings


class Obstacle(NamedTuple):
    """Something in the way of a shortcut, or of a method: a setting as ``option=value`` or a part of the model, and
    why."""

    setting: str
    because: str


@dataclass(frozen=True)
class Rule:
    """A setting with which something does not work. Settings have ``named(option)``, which gives ``option=value``."""

    id: str
    option: Text
    when: Callable[[Any], Any]  # whether settings break the rule
    because: str
    remedy: Text
    example: Any  # that breaks it, for the test: overrides of Hydra's with verl, arguments by name with TRL

    def obstacle(self, subject: Any) -> Obstacle:
        return Obstacle(subject.named(_made(self.option, subject)), self.because)

    def warning(self, subject: Any) -> str:
        setting, because = self.obstacle(subject)
        return f"{setting}: {because}; {_made(self.remedy, subject)}"


def _made(text: Text, subject: Any) -> str:
    return text if isinstance(text, str) else text(subject)


def broken(rules: Iterable[Rule], subject: Any) -> Iterator[Obstacle]:
    """What settings break of these rules."""
    return (rule.obstacle(subject) for rule in rules if rule.when(subject))


def refuse(rules: Iterable[Rule], subject: Any, beside: str = "") -> None:
    """ValueError for the first rule that settings break, naming the option, its value, the reason and the remedy;
    ``beside``: with what the setting does not work, such as the method, as ``option=value``."""
    for rule in rules:
        if rule.when(subject):
            setting, because = rule.obstacle(subject)
            with_what = beside and f" with {beside}"
            raise ValueError(f"{setting} does not work{with_what}: {because}; {_made(rule.remedy, subject)}")


def refuse_forced(shortcut: str, obstacles: Iterable[Obstacle], remedy: str) -> None:
    """ValueError for the first obstacle to a shortcut, ``option=value``, that somebody forces."""
    for setting, because in obstacles:
        raise ValueError(f"{shortcut} does not work with {setting}: {because}; {remedy}")
