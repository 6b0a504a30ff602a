"""GRAIL: a token matters as much as the model's own answer depends on its activation.

Source: GRAIL (arXiv 2606.04889). The preset ``official`` is the published behaviour; ``robust`` chooses otherwise in these
places, each an option of its own. It trained no better in the project's studies, and worse under slips (docs/which_method.md).

- tokens behind the answer have exactly no gradient, and drag the statistics of the whole response down: ``statistics``;
- the embedding at the predictor position is the *previous* token's: ``alignment``;
- the reward judges the last box: ``span``; and not the letters of ``\\boxed``: ``target``;
- content weights hit rows that the gate excludes: ``content_outside_gate``;
- the clip is not symmetric and the answer weighs 5, so that the row's mass grows: ``normalize_mass``.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from grail_advantage.answer_span import AnswerSpan
from grail_advantage.batch import PassRow
from grail_advantage.model_interface import Range
from grail_advantage.options import option
from grail_advantage.registry import register_signal
from grail_advantage.reshapers.bilevel import BilevelOptions
from grail_advantage.reshapers.log_zscore import LogZscoreOptions
from grail_advantage.signals.base import AnswerWeights, gate_option, normalize_mass_option, statistics_option
from grail_advantage.signals.saliency import SaliencySignal

PRESETS: dict[str, dict[str, Any]] = {
    "official": {
        "alignment": "predictor",
        "span": "first",
        "target": "span",
        "statistics": "response",
        "content_outside_gate": True,
        "normalize_mass": False,
    },
    "robust": {
        "alignment": None,  # stands for "token" on embeddings and "predictor" on hidden states
        "span": "last",
        "target": "content",
        "statistics": "reasoning",
        "content_outside_gate": False,
        "normalize_mass": True,
    },
}


def target_range(span: AnswerSpan, target: str) -> Range:
    """Half-open response-token range whose log-likelihood is differentiated: the span, or its content where not empty."""
    if target == "content" and span.content_end > span.content_start:
        return span.content_start, span.content_end
    return span.start, span.end


@register_signal("grail")
@dataclass(frozen=True)
class GrailConfig(LogZscoreOptions, BilevelOptions, SaliencySignal):
    """GRAIL. An option left at ``None`` takes its preset's value, so that after construction none is ``None``.

    Raises:
        ValueError: an unknown option or value; the message names the option, the value and what is allowed.
    """

    formula: ClassVar[str] = "clip(1 + 0.5 z, 0.5, 5), z the row's standardised log || dL/dh * h ||; answer content 5"
    source: ClassVar[str] = "arXiv 2606.04889 (code)"
    cost: ClassVar[str] = "1 on the selected rows; 2 where their forward cannot be shared"

    preset: str = option(
        "official",
        "official reproduces the published behaviour, robust chooses otherwise in several places",
        choices=tuple(PRESETS),
    )

    _: KW_ONLY

    leaf: str = option(
        "embeddings",
        "activation whose saliency is taken: the embeddings, or the output of the first, middle or last but one decoder block "
        "(hidden states 1, n // 2 and n - 1 of n blocks)",
        choices=("embeddings", "first", "middle", "last"),
    )

    alignment: str = option(
        None,
        "which position's saliency belongs to a token: the predictor position before it, or the token itself",
        choices=("predictor", "token"),
    )

    span: str = option(
        None,
        "which complete \\boxed{...} of a response is its answer: the first or the last",
        choices=("first", "last"),
    )

    target: str = option(
        None,
        "tokens whose log-likelihood is differentiated: the whole span, or its content (the span where that is empty)",
        choices=("span", "content"),
    )

    statistics: str = statistics_option(None)

    content_weight: float = option(
        None, "weight of the answer's content tokens; at least 0; weight_max by default", kind=float, at_least=0
    )

    gate: str = gate_option("wrong")

    content_outside_gate: bool = option(
        None, "whether answers of rows outside the gate still get content_weight", kind=bool
    )

    normalize_mass: bool = normalize_mass_option(None)

    def complete(self) -> None:
        """See :class:`grail_advantage.options.Options`."""
        for name, value in PRESETS.get(self.preset, {}).items():
            if getattr(self, name) is None:
                self._set(name, value)
        if self.alignment is None:
            self._set("alignment", "token" if self.leaf == "embeddings" else "predictor")
        if self.content_weight is None:
            self._set("content_weight", self.weight_max)

    @property
    def answer_weights(self) -> AnswerWeights:
        """See :class:`grail_advantage.signals.base.Signal`."""
        return AnswerWeights(self.content_weight, self.weight_mean, self.content_outside_gate)

    def target_tokens(self, row: PassRow) -> Range:
        """See :class:`SaliencySignal`."""
        return target_range(row.span, self.target)
