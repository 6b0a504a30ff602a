"""GRAIL: a token matters as much as the model's own answer depends on its activation.

Source: GRAIL (arXiv 2606.04889). The preset ``official`` is the published behaviour; ``robust`` chooses otherwise in these
places, each an option of its own. It was not shown to train better, and trained worse under slips (docs/evidence.md).

- tokens after the answer have exactly no gradient, and drag the statistics of the whole response down: ``statistics``;
- the embedding at the predictor position is the *previous* token's: ``alignment``;
- the reward function reads the last box: ``span``; and not the letters of ``\\boxed``: ``target``;
- content weights hit responses that the gate excludes: ``content_outside_gate``;
- the clip is not symmetric and the answer has weight 5, so that the sum of the response's weights grows: ``normalize_mass``.
"""

from __future__ import annotations

from typing import Any, Literal

from grail_advantage.answers.span import AnswerSpan
from grail_advantage.batch import PassRow
from grail_advantage.model.interface import Range
from grail_advantage.options import option
from grail_advantage.registry import register_signal
from grail_advantage.reshapers.bilevel import BilevelOptions
from grail_advantage.reshapers.log_zscore import LogZscoreOptions
from grail_advantage.signals.base import AnswerWeights, GateOption, NormalizeMass, Span, StatisticsOption
from grail_advantage.signals.saliency import Alignment, Leaf, SaliencySignal

OF_PRESET: Any = None
"""The default of an option that its preset sets."""
OFFICIAL = {
    "alignment": "predictor",
    "span": "first",
    "target": "span",
    "statistics": "response",
    "content_outside_gate": True,
    "normalize_mass": False,
}
ROBUST = {
    "alignment": "token",  # with the embeddings as the activation
    "span": "last",
    "target": "content",
    "statistics": "reasoning",
    "content_outside_gate": False,
    "normalize_mass": True,
}


def target_range(span: AnswerSpan, target: str) -> Range:
    """Half-open response-token range whose log-likelihood is differentiated: the span, or its content where not empty."""
    if target == "content" and span.content_end > span.content_start:
        return span.content_start, span.content_end
    return span.start, span.end


@register_signal("grail")
class Grail(LogZscoreOptions, BilevelOptions, SaliencySignal):
    """GRAIL. An option left at ``None`` takes its preset's value, so that after construction none is ``None``."""

    formula = "clip(1 + 0.5 z, 0.5, 5), z the response's standardised log || dL/dh * h ||; answer content 5"
    source = "arXiv 2606.04889 (declare-lab/grail, `src/train/grail_trainer.py`, `compute_grail_weights`)"
    cost = "1 on the selected responses; 2 where their forward cannot be shared"

    preset: Literal["official", "robust"] = option(
        "official", "official reproduces the published behaviour, robust chooses otherwise in several places"
    )

    leaf: Leaf = option(
        "embeddings",
        "activation whose saliency is taken: the embeddings, or the output of the first, middle or last but one decoder block "
        "(hidden states 1, n // 2 and n - 1 of n blocks)",
    )

    alignment: Alignment = option(
        None, "which position's saliency belongs to a token: the predictor position before it, or the token itself"
    )

    span: Span = option(None, "which complete \\boxed{...} of a response is its answer: the first or the last")

    target: Literal["span", "content"] = option(
        None,
        "tokens whose log-likelihood is differentiated: the whole span, or its content (the span where that is empty)",
    )

    statistics: StatisticsOption = OF_PRESET

    content_weight: float = option(
        None, "weight of the answer's content tokens; at least 0; weight_max by default", ge=0
    )

    gate: GateOption = "wrong"

    content_outside_gate: bool = option(None, "whether answers of responses outside the gate still get content_weight")

    normalize_mass: NormalizeMass = OF_PRESET

    def __init__(self, preset: str | None = None, **options: Any) -> None:
        super().__init__(**options | {"preset": preset})

    @classmethod
    def completed(cls, options: dict[str, Any]) -> dict[str, Any]:
        filled = (ROBUST if options.get("preset") == "robust" else OFFICIAL) | options
        if "alignment" not in options and options.get("leaf", "embeddings") != "embeddings":
            filled["alignment"] = "predictor"
        return {"content_weight": filled.get("weight_max", cls.model_fields["weight_max"].default)} | filled

    @property
    def answer_weights(self) -> AnswerWeights:  # type: ignore[override]
        return AnswerWeights(self.content_weight, self.weight_mean, self.content_outside_gate)

    def target_tokens(self, row: PassRow) -> Range:
        return target_range(row.answer, self.target)
