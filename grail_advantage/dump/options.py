"""The options of a token dump: ``algorithm.token_dump`` in verl, ``token_dump`` in TRL."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TOKENS = "tokens"
"""Where a run has its dump, by convention."""
METRICS_FILE = "metrics.jsonl"
"""A run's metrics: of verl's ``file`` logger, or TRL's figures."""


@dataclass(frozen=True)
class DumpOptions:
    """See docs/token_dump.md."""

    folder: Path
    every: int = 1
    """Steps from one dump to the next."""
    responses: int | None = 64
    """Most responses of a step; ``None`` for all."""
    received: bool = True
    """Whether what their tokens receive in the updates is written as well."""

    def check(self, where: str) -> None:
        """Refuse values that are not allowed.

        Args:
            where: in front of an option's name in messages.

        Raises:
            ValueError: naming the option.
        """
        for name, value in (("every", self.every), ("responses", self.responses)):
            if (name, value) != ("responses", None) and (type(value) is not int or value < 1):
                raise ValueError(f"{where}{name}={value!r} must be a whole number, at least 1")
        if type(self.received) is not bool:
            raise ValueError(f"{where}received={self.received!r} must be true or false")

    def make_folder(self, where: str) -> None:
        """Make the folder where it is missing.

        Raises:
            ValueError: it cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{where}folder={self.folder} cannot be made here: {error}; choose another") from error
