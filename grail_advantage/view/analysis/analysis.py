"""The definition of an analysis: responses, methods and settings, checked before a model is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grail_advantage.answers.format import BOXED, AnswerFormat
from grail_advantage.method import Method
from grail_advantage.model.activations import FORWARD_TOKENS
from grail_advantage.view.analysis.responses import Response, example_of

ADVANTAGES = ("auto", "wrong", "right")
ROUNDED = 2**-22
"""Relative distance of rewards that are equal in float32 but for the rounding of a sum."""


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Responses, methods and settings.

    Raises:
        ValueError: naming what is missing or not allowed, and the remedy.
    """

    responses: Sequence[Response]
    methods: Mapping[str, Method]
    """By the names of their columns."""
    model: str
    """For the records: path or name of the model."""
    temperature: float = 1.0
    tokens: int = FORWARD_TOKENS
    """Most tokens of a forward pass, padding counted."""
    advantages: str = "auto"
    """``auto``: from the rewards, where there are any; ``wrong`` and ``right``: every response counts as that."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template."""
    answer: AnswerFormat = BOXED
    """The format of answers."""

    def __post_init__(self) -> None:
        if not self.methods:
            raise ValueError("name at least one method")
        if not self.responses:
            raise ValueError("there are no responses")
        if self.advantages not in ADVANTAGES:
            raise ValueError(f"advantages={self.advantages!r} is unknown; choose one of {', '.join(ADVANTAGES)}")
        if not self.temperature > 0:
            raise ValueError(
                f"temperature={self.temperature} must be greater than 0; give the temperature of the sampling"
            )
        if self.tokens < 1:
            raise ValueError(f"tokens={self.tokens} must be at least 1")
        for label, method in self.methods.items():
            if "groups" in method.reads and any(row.group is None for row in self.responses):
                raise ValueError(
                    f"{label} compares the responses of one prompt; give every line a group, and a reward or a "
                    "ground_truth"
                )
            if "groups" in method.reads and (
                self.advantages != "auto" or any(r.reward is None for r in self.responses)
            ):
                raise ValueError(
                    f"{label} compares correct responses with incorrect ones; give every line a reward or a "
                    "ground_truth, and leave the advantages at auto"
                )
            for name in method.field_names:
                if all(name not in row.columns for row in self.responses):
                    raise ValueError(f"{label} reads the field {name}, which no line has; give the lines one")
            if "examples" in method.reads:
                for row in self.responses:
                    example_of(row, self.template_options)
                if all(row.ground_truth is None and not row.columns for row in self.responses):
                    raise ValueError(
                        f"{label} tells the model the answer; give the lines a ground_truth, or the column that its options "
                        "name"
                    )

    def row_advantages(self) -> tuple[list[float], str]:
        """One advantage a response, and where they come from, in words."""
        groups = [row.group for row in self.responses]
        known = [float(row.reward) for row in self.responses if row.reward is not None]
        if self.advantages != "auto" or len(known) < len(groups):
            why = "" if self.advantages != "auto" else ", as there is neither a reward nor a ground truth"
            value, word = (1.0, "correct (1)") if self.advantages == "right" else (-1.0, "incorrect (-1)")
            return [value] * len(groups), f"every response counts as {word}{why}"
        if None in groups:
            signs = [1.0 if reward > 0 else -1.0 for reward in known]
            return signs, "1 for a reward above 0, else -1, as no line has a group"
        of_group: dict[str | None, list[float]] = {}
        for group, reward in zip(groups, known, strict=True):
            of_group.setdefault(group, []).append(reward)
        # The mean of equal rewards is off by rounding, whose sign would count as a verdict.
        means = {
            group: float(np.mean(rewards))
            for group, rewards in of_group.items()
            if not math.isclose(min(rewards), max(rewards), rel_tol=ROUNDED)
        }
        differences = [reward - means.get(group, reward) for group, reward in zip(groups, known, strict=True)]
        return differences, "the reward less its group's mean"
