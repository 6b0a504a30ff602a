"""Reshapers: maps from token scores to token weights, with their options.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch

from grail_advantage.options import Options, option, option_fields
from grail_advantage.registry import failure_message, reshapers


class Reshaper(Options):
    """Base of every reshaper: a frozen model whose fields are its options. It keeps no state."""

    registers_as: ClassVar[str] = "reshaper"
    lowest: ClassVar[float] = -math.inf
    highest: ClassVar[float] = math.inf
    """Bounds that the weights are clipped to, for the metrics; a property where an option sets them."""
    elsewhere: ClassVar[float] = 1.0
    """Weight of a scored response's tokens outside the statistics set. They count in the sum of its weights unless this
    is 1."""
    ranks: ClassVar[bool] = False
    """Whether it ranks scores or cuts at a quantile of them, so that coarse scores would matter."""

    @abstractmethod
    def weights(self, scores_BT: torch.Tensor, statistics_BT: torch.Tensor, advantages_B: torch.Tensor) -> torch.Tensor:
        """Weights of the tokens of a batch.

        Args:
            scores_BT: scores, any floating dtype; finite where the mask is true.
            statistics_BT: bool; the tokens that are weighed. Responses without scores have none.
            advantages_B: one advantage a response, before weighting.

        Returns:
            float32 (B, T), at least 0; read only where ``statistics_BT`` is true.
        """


class ReshaperChoice(Options):
    """The options of a signal whose scores may go through any reshaper.

    A signal names its default by redefining ``reshaper``. Options that it has in common with the reshaper, by deriving from the
    same class of options (such as :class:`grail_advantage.reshapers.bilevel.BilevelOptions`), are handed on.
    """

    reshaper: str = option("log_zscore", "map from scores to weights, by its registered name")

    reshaper_options: dict[str, Any] = option({}, "further options of the chosen map, by their names in its own table")

    @property
    def reshaping(self) -> Reshaper:
        """The chosen reshaper.

        Raises:
            ValueError: an unknown reshaper or option, or a value that is not allowed.
        """
        known = reshapers()
        if self.reshaper not in known:
            raise ValueError(
                f"{self.section}.reshaper={self.reshaper!r} is unknown; choose one of {', '.join(sorted(known))}"
                f"{failure_message()}"
            )
        chosen = known[self.reshaper]
        common = (set(chosen.__mro__) & set(type(self).__mro__)) - set(Options.__mro__)
        own = {name: getattr(self, name) for options_class in common for name in option_fields(options_class)}
        try:
            return chosen.from_dict({**own, **self.further_options(self.reshaper), **self.reshaper_options})
        except ValueError as error:
            raise ValueError(f"{self.section}.reshaper_options: {error}") from error

    def further_options(self, reshaper: str) -> dict[str, Any]:
        """Options of a reshaper that follow from others of the signal."""
        return {}

    def check(self) -> None:
        super().check()
        _ = self.reshaping
