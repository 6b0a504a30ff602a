"""This module has rules on settings, in one form for every host: what is refused, what is warned of, and what is
against a shortcut.

The tables are ``verl_ext/rules.py``, ``trl_ext/rules.py`` and ``recipe/rules.py``, and for every host
``methods/biases.py``. ``scripts/docs_pages.py`` writes them into the pages.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class Named(Protocol):
    """It holds a host's settings."""

    def named(self, option: str) -> str:
        """Give ``option=value``, for messages."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """It names a setting with which something does not work, or works otherwise than somebody may think."""

    option: str | tuple[str, ...]
    """The option that messages and pages name; several where any of them may be the cause."""
    when: Callable[[Any], Any]
    """Whether settings break the rule; of several options it gives the name of the one that is the cause."""
    because: str
    remedy: str | Callable[[Any], str]
    """A text, or a function that makes it of the settings."""
    warned: bool = False
    """Whether a run that breaks the rule starts all the same, with a warning."""

    def broken_by(self, settings: Named) -> str:
        """Give ``option=value`` of the cause in settings that break the rule; empty for others."""
        cause = self.when(settings)
        if not cause:
            return ""
        return settings.named(self.option if isinstance(self.option, str) else cause)


def check_rules(rules: Sequence[Rule], settings: Named, context: str = "") -> None:
    """Refuse settings that break a rule, and log a warning for each other rule that they break.

    Args:
        rules: a table.
        settings: of the run.
        context: with what a setting does not work, such as the method, as ``option=value``.

    Raises:
        ValueError: for the first rule that refuses, with the option, its value, the reason and the remedy.
    """
    # A run that is refused is warned of nothing
    for rule in sorted(rules, key=lambda rule: rule.warned):
        setting = rule.broken_by(settings)
        if not setting:
            continue
        with_what = ""
        if context not in ("", setting):
            with_what = f" with {context}"
        remedy = rule.remedy
        if not isinstance(remedy, str):
            remedy = remedy(settings)
        if not rule.warned:
            raise ValueError(f"{setting} does not work{with_what}: {rule.because}; {remedy}")
        logger.warning("%s is used%s: %s; %s", setting, with_what, rule.because, remedy)


def first_broken(rules: Sequence[Rule], settings: Named) -> str:
    """Give ``option=value: reason`` of the first rule that settings break; empty where they break none."""
    for rule in rules:
        if setting := rule.broken_by(settings):
            return f"{setting}: {rule.because}"
    return ""
