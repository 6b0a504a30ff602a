"""Options of the token-weighting methods, with presets and validation.

Source: GRAIL (arXiv 2606.04889) and OAR (arXiv 2601.07408). GRAIL's preset ``official`` is the published behaviour; ``robust``
changes the choices that distort the weights on real rollouts. Every difference between the two is one named option.

What a configuration means to :mod:`grail_advantage.weighting` is the same for every method: which span, which rows, which
statistics set, which reshaper, and what becomes of the tokens that have no score (:class:`WeightingOptions`).
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Protocol, TypeVar

LEAVES = ("embeddings", "first", "middle", "last")
ALIGNMENTS = ("predictor", "token")
SPANS = ("first", "last")
TARGETS = ("span", "content")
STATISTICS = ("response", "reasoning")
GATES = ("wrong", "correct", "all")
RESHAPERS = ("log_zscore", "bilevel")
METHODS = ("gradient", "perturbation")
VARIANTS = ("official", "grail_port")
PROBES = ("answer_mean", "last", "answer_joint")

_GRAIL_CHOICES = {
    "leaf": LEAVES,
    "alignment": ALIGNMENTS,
    "span": SPANS,
    "target": TARGETS,
    "statistics": STATISTICS,
    "gate": GATES,
    "reshaper": RESHAPERS,
}
_OAR_CHOICES = {"method": METHODS, "variant": VARIANTS, "probe": PROBES, "reshaper": RESHAPERS}

_OFFICIAL: dict[str, Any] = {
    "leaf": "embeddings",
    "alignment": "predictor",
    "span": "first",
    "target": "span",
    "statistics": "response",
    "reshaper": "log_zscore",
    "weight_mean": 1.0,
    "weight_std": 0.5,
    "weight_min": 0.5,
    "weight_max": 5.0,
    "quantile": 0.4,
    "boost": 2.0,
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
class AnswerWeights:
    """Weights that a method gives to an answer and everything behind it, whatever their scores."""

    content: float
    """Of the answer's content tokens."""
    others: float
    """Of its boundary tokens and of what comes behind it."""
    outside_gate: bool
    """Whether the answers of rows outside the gate get them too."""


class WeightingOptions(Protocol):
    """What :mod:`grail_advantage.weighting` reads of a configuration."""

    span: str
    gate: str
    statistics: str
    reshaper: str
    weight_mean: float
    weight_std: float
    weight_min: float
    weight_max: float
    quantile: float
    quantile_rule: str
    """How a quantile that falls between two scores is taken: ``linear`` between them, or ``sorted``: the score at index
    ``floor(quantile * T)`` of the T sorted ones."""
    boost: float
    normalize_mass: bool
    answer_weights: AnswerWeights | None
    """``None``: the tokens outside the statistics set weigh 1 and take no part in the row's mass."""


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
    """Tokens over which the scores are standardised: the whole ``response``, or the ``reasoning`` before the answer."""

    reshaper: str | None = None
    """Map from scores to weights: ``log_zscore``, or OAR's ``bilevel``."""

    weight_mean: float | None = None
    """Weight at the mean log score, and of the answer's boundary tokens and everything behind it."""

    weight_std: float | None = None
    """Weight added per standard deviation of the log score; greater than 0."""

    weight_min: float | None = None
    """Lower clip of the weights; at least 0."""

    weight_max: float | None = None
    """Upper clip of the weights; at least ``weight_min``."""

    quantile: float | None = None
    """Bi-level: share of the tokens that weigh less than 1; in [0, 1]."""

    boost: float | None = None
    """Bi-level: weight added from the quantile to the highest score; at least 0."""

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
        _check_choices("grail", self, _GRAIL_CHOICES)
        _check_flags("grail", self, ("content_outside_gate", "normalize_mass", "mask_truncated"))
        _check_reshaper_options("grail", self)
        _take_numbers("grail", self, ("content_weight",))
        if self.content_weight < 0:
            raise ValueError(f"grail.content_weight={self.content_weight} must be at least 0")

    @property
    def quantile_rule(self) -> str:
        """See :class:`WeightingOptions`."""
        return "linear"

    @property
    def answer_weights(self) -> AnswerWeights:
        """See :class:`WeightingOptions`."""
        return AnswerWeights(self.content_weight, self.weight_mean, self.content_outside_gate)

    @classmethod
    def from_dict(cls, options: dict[str, Any]) -> GrailConfig:
        """Build from a mapping such as the ``algorithm.grail`` section of a run's configuration.

        Raises:
            ValueError: an unknown option, naming the known ones, or any error of the constructor.
        """
        return _from_dict("grail", cls, options)


@dataclass(frozen=True)
class OarConfig:
    """Options of OAR-G and OAR-P.

    The answer is the last complete ``\\boxed{...}``, every row with one gets weights, and tokens outside the statistics set
    weigh 1.

    Raises:
        ValueError: an unknown option or value; the message names the option, the value and what is allowed.
    """

    method: str = "gradient"
    """``gradient``: OAR-G, how the answer reacts to noise on the embeddings; ``perturbation``: OAR-P, how it reacts to each
    token's replacement by the padding token."""

    _: KW_ONLY

    variant: str = "official"
    """``official``: the scored tokens are the reasoning before the answer. ``grail_port``, as the authors of GRAIL ran it:
    OAR-G scores the whole response, at the position before each token, by the noisy embedding; the quantile is the next
    sorted score instead of an interpolated one."""

    probe: str = "answer_mean"
    """What stands for the answer: ``answer_mean``, the mean logits of the answer's tokens; ``last``, the logits of the row's
    last position; ``answer_joint``, the mean log-likelihood of the answer's tokens."""

    noise_std: float = 1e-3
    """OAR-G: standard deviation of the noise; greater than 0."""

    noise_seed: int = 0
    """OAR-G: seed of the noise; at least 0."""

    max_perturbations: int | None = None
    """OAR-P: most tokens replaced in a row, evenly spaced, the scores between them interpolated; ``None``: all."""

    reshaper: str = "bilevel"
    """Map from scores to weights: ``bilevel``, or GRAIL's ``log_zscore``."""

    quantile: float = 0.4
    """Bi-level: share of the tokens that weigh less than 1; in [0, 1]."""

    boost: float = 2.0
    """Bi-level: weight added from the quantile to the highest score; at least 0."""

    weight_mean: float = 1.0
    """Log-z-score: weight at the mean log score."""

    weight_std: float = 0.5
    """Log-z-score: weight added per standard deviation of the log score; greater than 0."""

    weight_min: float = 0.5
    """Log-z-score: lower clip of the weights; at least 0."""

    weight_max: float = 5.0
    """Log-z-score: upper clip of the weights; at least ``weight_min``."""

    normalize_mass: bool = True
    """Whether the weights of a row's statistics set are scaled to sum to its number of tokens."""

    mask_truncated: bool = True
    """As in :class:`GrailConfig`."""

    def __post_init__(self) -> None:
        _check_choices("oar", self, _OAR_CHOICES)
        _check_flags("oar", self, ("normalize_mass", "mask_truncated"))
        _check_reshaper_options("oar", self)
        _take_numbers("oar", self, ("noise_std",))
        if self.noise_std <= 0:
            raise ValueError(f"oar.noise_std={self.noise_std} must be greater than 0; without noise every score is 0")
        _check_whole_number("oar.noise_seed", self.noise_seed, at_least=0)
        if self.max_perturbations is not None:
            _check_whole_number("oar.max_perturbations", self.max_perturbations, at_least=1)

    @property
    def span(self) -> str:
        """See :class:`WeightingOptions`."""
        return "last"

    @property
    def gate(self) -> str:
        """See :class:`WeightingOptions`."""
        return "all"

    @property
    def statistics(self) -> str:
        """See :class:`WeightingOptions`; the tokens that have scores."""
        return "response" if (self.method, self.variant) == ("gradient", "grail_port") else "reasoning"

    @property
    def alignment(self) -> str:
        """OAR-G: which position's score belongs to a token, as in :class:`GrailConfig`."""
        return "predictor" if self.variant == "grail_port" else "token"

    @property
    def quantile_rule(self) -> str:
        """See :class:`WeightingOptions`."""
        return "sorted" if self.variant == "grail_port" else "linear"

    @property
    def answer_weights(self) -> None:
        """See :class:`WeightingOptions`."""
        return None

    @classmethod
    def from_dict(cls, options: dict[str, Any]) -> OarConfig:
        """Build from a mapping such as the ``algorithm.oar`` section of a run's configuration; ``None`` means the default.

        Raises:
            ValueError: an unknown option, naming the known ones, or any error of the constructor.
        """
        return _from_dict("oar", cls, options)


_Config = TypeVar("_Config", GrailConfig, OarConfig)


def _from_dict(section: str, config_class: type[_Config], options: dict[str, Any]) -> _Config:
    known = [field.name for field in fields(config_class)]
    for name in options:
        if name not in known:
            raise ValueError(f"{section}.{name} is not an option; the options are {', '.join(known)}")
    return config_class(**{name: value for name, value in options.items() if value is not None})


def _check_choices(section: str, config: Any, choices: dict[str, tuple[str, ...]]) -> None:
    for name, allowed in choices.items():
        value = getattr(config, name)
        if value not in allowed:
            raise ValueError(f"{section}.{name}={value!r} is unknown; choose one of {', '.join(allowed)}")


def _check_flags(section: str, config: Any, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise ValueError(f"{section}.{name}={value!r} must be true or false")


def _take_numbers(section: str, config: Any, names: tuple[str, ...]) -> None:
    """Refuse what is no finite number and make floats of the others."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{section}.{name}={value!r} must be a finite number")
        object.__setattr__(config, name, float(value))


def _check_whole_number(option: str, value: Any, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{option}={value!r} must be a whole number, at least {at_least}")


def _check_reshaper_options(section: str, config: Any) -> None:
    """The options of both reshapers, whichever is chosen, so that switching brings no surprise."""
    _take_numbers(section, config, ("weight_mean", "weight_std", "weight_min", "weight_max", "quantile", "boost"))
    if config.weight_std <= 0:
        raise ValueError(
            f"{section}.weight_std={config.weight_std} must be greater than 0; for equal weights train with adv_estimator=grpo"
        )
    if config.weight_mean < 0:
        raise ValueError(
            f"{section}.weight_mean={config.weight_mean} must be at least 0; a negative weight flips the advantage"
        )
    if config.weight_min < 0:
        raise ValueError(
            f"{section}.weight_min={config.weight_min} must be at least 0; negative weights flip the advantage"
        )
    if config.weight_min > config.weight_max:
        raise ValueError(
            f"{section}.weight_min={config.weight_min} is greater than {section}.weight_max={config.weight_max}; swap them"
        )
    if not 0 <= config.quantile <= 1:
        raise ValueError(f"{section}.quantile={config.quantile} must be between 0 and 1")
    if config.boost < 0:
        raise ValueError(
            f"{section}.boost={config.boost} must be at least 0; a negative one weighs the highest scores least"
        )
