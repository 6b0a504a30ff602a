"""GRAIL: a token matters as much as the model's own answer depends on its activation.

The preset ``official`` is as published (arXiv 2606.04889). ``robust`` was not shown to train better, and trained worse
under slips (docs/evidence.md); it chooses otherwise in

- ``statistics``: tokens after the answer have no gradient, and drag the whole response's statistics down;
- ``alignment``: the embedding at the predictor position is the *previous* token's;
- ``span``: the reward function reads the last box; ``target``: and not the letters of ``\\boxed``;
- ``content_outside_gate``: content weights hit responses that the gate excludes;
- ``normalize_mass``: the clip is not symmetric and the answer has weight 5: the sum of a response's weights grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from grail_advantage.data import Row, RowScores
from grail_advantage.method import Among, Gate, Mapped, Span, option, register
from grail_advantage.model.hooks import capture_leaf, gradient_at
from grail_advantage.model.interface import MicroBatch, Model, Range

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Alignment = Literal["predictor", "token"]
PRESETS: dict[str, dict[str, Any]] = {
    "official": {"alignment": "predictor", "span": "first", "target": "span", "statistics": "response",
                 "content_outside_gate": True, "normalize_mass": False},
    "robust": {"alignment": "token", "span": "last", "target": "content", "statistics": "reasoning",
               "content_outside_gate": False, "normalize_mass": True},
}  # fmt: skip


def row_scores(
    micro: MicroBatch, values_BS: Tensor, gradient_BSD: Tensor, range_of: Callable[[Row], Range]
) -> list[RowScores]:
    """Scores of each row, the values at a range of positions, and the norms of the gradient from the position on that
    predicts the first response token. A forward may have ended before the end of the range: 0 there, as no answer
    depends on what comes after it."""
    norms_BS = torch.linalg.vector_norm(gradient_BSD, dim=-1)
    results = []
    for row, values_S, norms_S in zip(
        micro.rows, micro.per_row(values_BS), micro.per_row(norms_BS), strict=True
    ):
        first, end = range_of(row)
        scores_T = values_S[first:end]
        scores_T = pad(scores_T, (0, end - first - len(scores_T)))
        results.append(RowScores(scores_T, norms_S[row.start - 1 :]))
    return results


class MapOptions(Mapped):
    """It has the options of the maps that GRAIL and OAR choose between."""

    weight_std: float = option(
        0.5, "reshaper=log_zscore: weight added per standard deviation of the log score", gt=0
    )
    weight_min: float = option(0.5, "reshaper=log_zscore: lower clip", ge=0)
    weight_max: float = option(5.0, "reshaper=log_zscore: upper clip; at least weight_min", ge=0)
    quantile: float = option(
        0.4, "reshaper=bilevel: share of the tokens with weight below 1", ge=0, le=1
    )
    boost: float = option(
        2.0, "reshaper=bilevel: weight added from the quantile to the highest score", ge=0
    )


class Saliency(Mapped):
    """Score of a position: ``|| dL/dh * h ||_2`` with L the negative log-likelihood of :meth:`targets` and h the
    activation."""

    uses = "saliency"
    needs_answer = True
    leaf: Literal["embeddings", "first", "middle", "last"] = option(
        "embeddings",
        "activation: the embeddings, or hidden states 1, n // 2 or n - 1 of n decoder blocks",
    )
    alignment: Alignment = option(
        "predictor", "whose saliency a token takes: the predictor position's before it, or its own"
    )

    def targets(self, row: Row) -> Range:
        """The response tokens, as a half-open range, whose log-likelihood is differentiated."""
        raise NotImplementedError(f"{type(self).__name__} has no targets()")

    def target_positions(self, row: Row) -> Range:
        """:meth:`targets` counted from the row's first token."""
        start, end = self.targets(row)
        return row.start + start, row.start + end

    def prepare(self, row: Row, tokenizer: PreTrainedTokenizerBase) -> Row:
        # Nothing after the target can influence it.
        return replace(row, tokens=row.tokens[: self.target_positions(row)[1]])

    def run(self, rows: Sequence[Row], model: Model) -> list[RowScores]:
        return model.micro_batches(rows, self._step, gradients=True)

    def _step(self, micro: MicroBatch) -> list[RowScores]:
        """One forward and one backward to the activation. A micro-batch without any targets goes through both, too: other
        ranks need its part in gathering parameters."""
        with capture_leaf(micro.leaf(self.leaf)) as leaves:
            loss = -micro.log_likelihood([self.target_positions(row) for row in micro.rows])
        gradient = gradient_at(loss, leaves[0])
        saliency = torch.linalg.vector_norm(gradient * leaves[0].detach().float(), dim=-1)
        return row_scores(micro, saliency, gradient, self._scored)

    def _scored(self, row: Row) -> Range:
        """The positions whose saliency the response tokens take: of a response from 4 on, those from 3 on, or from 4."""
        first = row.start - (self.alignment == "predictor")
        return first, first + row.length


@register("grail")
class Grail(Saliency, MapOptions):
    """``null`` stands for the preset's value."""

    formula = "clip(1 + 0.5 z, 0.5, 5), z the response's standardised log || dL/dh * h ||; answer content 5"
    source = "arXiv 2606.04889 (declare-lab/grail, `src/train/grail_trainer.py`, `compute_grail_weights`)"
    cost = "2 on the selected responses"

    preset: Literal["official", "robust"] = option("official", "as above")
    gate: Gate = option("wrong", "responses that get weights")
    alignment: Alignment = option(
        None, "a token's saliency: that of the position before it, or its own"
    )
    span: Span = option(None, "which complete answer of a response counts, by the preset")
    target: Literal["span", "content"] = option(
        None, "tokens whose log-likelihood is differentiated"
    )
    statistics: Among = option(None, "tokens that are scored and compared, by the preset")
    weight_mean: float = option(
        1.0, "weight at the mean log score, of the answer's boundary and of all after it", ge=0
    )
    content_weight: float = option(
        None, "weight of the answer's content tokens; weight_max by default", ge=0
    )
    content_outside_gate: bool = option(None, "whether answers outside the gate get content_weight")
    normalize_mass: bool = option(
        None, "whether a response's weights sum to their number, by the preset"
    )

    # The preset may be given by its place: Grail("robust").
    def __init__(self, preset: str | None = None, **options: Any) -> None:
        super().__init__(**options | {"preset": preset})

    @classmethod
    def completed(cls, options: dict[str, Any]) -> dict[str, Any]:
        filled = PRESETS["robust" if options.get("preset") == "robust" else "official"] | options
        # An embedding at the predictor position is the previous token's; a block's output predicts the token.
        if "alignment" not in options and options.get("leaf", "embeddings") != "embeddings":
            filled["alignment"] = "predictor"
        return {"content_weight": filled.get("weight_max", 5.0)} | filled

    def answer_weights(self) -> tuple[float, float, bool]:
        return self.content_weight, self.weight_mean, self.content_outside_gate

    def targets(self, row: Row) -> Range:
        answer = row.answer
        # An empty box has no content.
        if self.target == "content" and answer.content_end > answer.content_start:
            return answer.content_start, answer.content_end
        return answer.start, answer.end
