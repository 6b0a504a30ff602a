"""Options of the token-weighting methods, with presets and validation.

Source: GRAIL (arXiv 2606.04889). The preset ``official`` is the published behaviour; ``robust`` changes the choices that
distort the weights on real rollouts. Every difference between the two is one named option.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

LEAVES = ("embeddings", "first", "middle", "last")
ALIGNMENTS = ("predictor", "token")
SPANS = ("first", "last")
TARGETS = ("span", "content")
STATISTICS = ("response", "reasoning")
GATES = ("wrong", "correct", "all")

_CHOICES = {
    "leaf": LEAVES,
    "alignment": ALIGNMENTS,
    "span": SPANS,
    "target": TARGETS,
    "statistics": STATISTICS,
    "gate": GATES,
}
_NUMBERS = ("weight_mean", "weight_std", "weight_min", "weight_max", "content_weight")
_FLAGS = ("content_outside_gate", "normalize_mass", "mask_truncated")

_OFFICIAL: dict[str, Any] = {
    "leaf": "embeddings",
    "alignment": "predictor",
    "span": "first",
    "target": "span",
    "statistics": "response",
    "weight_mean": 1.0,
    "weight_std": 0.5,
    "weight_min": 0.5,
    "weight_max": 5.0,
    "content_weight": None,  # stands for weight_max
    "gate": "wrong",
    "content_outside_gate": True,
    "normalize_mass": False,
    "mask_truncated": True,
}
PRESETS: dict[str, dict[str, Any]] = {
    "official": _OFFICIAL,
    "robust": {
        **_OFFICIAL,
        "alignment": None,  # stands for "token" on embeddings and "predictor" on hidden states
        "span": "last",
        "target": "content",
        "statistics": "reasoning",
        "content_outside_gate": False,
        "normalize_mass": True,
    },
}


@dataclass(frozen=True)
class GrailConfig:
    """Options of GRAIL. An option left at ``None`` takes its preset's value, so that after construction none is ``None``.

    Raises:
        ValueError: an unknown option or value; the message names the option, the value and what is allowed.
    """

    preset: str = "official"
    """``official`` reproduces the published behaviour, ``robust`` mends what distorts it."""

    _: KW_ONLY

    leaf: str | None = None
    """Activation whose saliency is taken: ``embeddings``, or the output of the ``first``, ``middle`` or ``last`` but one
    decoder block (hidden states 1, n // 2 and n - 1 of n blocks)."""

    alignment: str | None = None
    """Which position's saliency belongs to a token: the ``predictor`` position before it, or the ``token`` itself."""

    span: str | None = None
    """Which complete ``\\boxed{...}`` of a response is its answer: the ``first`` or the ``last``."""

    target: str | None = None
    """Tokens whose log-likelihood is differentiated: the whole ``span``, or its ``content`` (the span where that is empty)."""

    statistics: str | None = None
    """Tokens over which the log scores are standardised: the whole ``response``, or the ``reasoning`` before the answer."""

    weight_mean: float | None = None
    """Weight at the mean log score, and of the answer's boundary tokens and everything behind it."""

    weight_std: float | None = None
    """Weight added per standard deviation of the log score; greater than 0."""

    weight_min: float | None = None
    """Lower clip of the weights; at least 0."""

    weight_max: float | None = None
    """Upper clip of the weights; at least ``weight_min``."""

    content_weight: float | None = None
    """Weight of the answer's content tokens; at least 0. Defaults to ``weight_max``."""

    gate: str | None = None
    """Rows that get weights: ``wrong`` (advantage <= 0), ``correct`` (advantage > 0) or ``all``."""

    content_outside_gate: bool | None = None
    """Whether answers of rows outside the gate still get ``content_weight``."""

    normalize_mass: bool | None = None
    """Whether a row's weights are scaled to sum to its number of response tokens."""

    mask_truncated: bool | None = None
    """Whether a response that hit the length limit without an end token gets advantage 0. Applied by the trainer, which
    knows the limit; :func:`grail_advantage.compute_token_weights` does not look at it."""

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"grail.preset={self.preset!r} is unknown; choose one of {', '.join(PRESETS)}")
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.alignment is None:
            object.__setattr__(self, "alignment", "token" if self.leaf == "embeddings" else "predictor")
        if self.content_weight is None:
            object.__setattr__(self, "content_weight", self.weight_max)
        self._validate()

    def _validate(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"grail.{name}={value!r} is unknown; choose one of {', '.join(allowed)}")
        for name in _FLAGS:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"grail.{name}={value!r} must be true or false")
        for name in _NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"grail.{name}={value!r} must be a finite number")
            object.__setattr__(self, name, float(value))
        if self.weight_std <= 0:
            raise ValueError(
                f"grail.weight_std={self.weight_std} must be greater than 0; for equal weights train with adv_estimator=grpo"
            )
        if self.weight_mean < 0:
            raise ValueError(
                f"grail.weight_mean={self.weight_mean} must be at least 0; a negative weight flips the advantage"
            )
        if self.weight_min < 0:
            raise ValueError(
                f"grail.weight_min={self.weight_min} must be at least 0; negative weights flip the advantage"
            )
        if self.weight_min > self.weight_max:
            raise ValueError(
                f"grail.weight_min={self.weight_min} is greater than grail.weight_max={self.weight_max}; swap them"
            )
        if self.content_weight < 0:
            raise ValueError(f"grail.content_weight={self.content_weight} must be at least 0")

    @classmethod
    def from_dict(cls, options: dict[str, Any]) -> GrailConfig:
        """Build from a mapping such as the ``algorithm.grail`` section of a run's configuration.

        Raises:
            ValueError: an unknown option, naming the known ones, or any error of the constructor.
        """
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise ValueError(f"grail.{name} is not an option; the options are {', '.join(known)}")
        return cls(**{name: value for name, value in options.items() if value is not None})
