"""Base of the signals that are a saliency: a backward from some tokens' log-likelihood to an activation.

Not a method itself. A host may reuse a forward that it runs anyway, as verl's of the old log-probabilities, in place of a
separate pass. The scores are the same to rounding.

Shape suffixes: P positions from the one before the response on, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch

from grail_advantage.batch import PassRow
from grail_advantage.model.interface import Model, Range, RowScores, saliency_step
from grail_advantage.signals.base import SALIENCY, ReshapedSignal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Alignment = Literal["predictor", "token"]
Leaf = Literal["embeddings", "first", "middle", "last"]


def align_scores(values_P: torch.Tensor, response_length: int, alignment: str) -> torch.Tensor:
    """Assign the values of positions to response tokens.

    Args:
        values_P: of consecutive positions, the first being the first response token's predictor position. Positions after
            the last one given have none: the answer does not depend on them.
        response_length: number of response tokens T.
        alignment: ``predictor``: a token takes the value of the position before it; ``token``: of its own position.

    Returns:
        scores_T, same dtype, 0 after the positions given.
    """
    own = values_P[0 if alignment == "predictor" else 1 :][:response_length]
    return torch.cat([own, own.new_zeros(response_length - own.shape[0])])


class SaliencySignal(ReshapedSignal):
    """Score of a position: ``|| dL/dh * h ||_2`` with L the negative log-likelihood of :meth:`target_tokens` and h the
    activation :attr:`leaf`."""

    uses = SALIENCY
    needs_answer = True
    leaf: Leaf = "embeddings"
    """See :func:`grail_advantage.model.activations.leaf_module`."""
    alignment: Alignment = "predictor"
    """Which position's saliency belongs to a token, see :func:`align_scores`."""

    @property
    def on_any_forward(self) -> bool:
        """Whether the saliency can be taken on a forward that somebody else runs over the whole row: the signal neither
        changes the row nor runs the pass by itself."""
        own = type(self)
        return own.run is SaliencySignal.run and own.prepare_row is SaliencySignal.prepare_row

    def target_tokens(self, row: PassRow) -> Range:
        """The response tokens, as a half-open range, whose log-likelihood is differentiated."""
        raise NotImplementedError(f"{type(self).__name__} has no target_tokens()")

    def target_positions(self, row: PassRow) -> Range:
        """:meth:`target_tokens` counted from the row's first token."""
        start, end = self.target_tokens(row)
        return row.response_start + start, row.response_start + end

    def prepare_row(self, row: PassRow, tokenizer: PreTrainedTokenizerBase) -> PassRow:
        """Nothing after the target can influence it."""
        return replace(row, tokens_S=row.tokens_S[: self.target_positions(row)[1]])

    def row_scores(self, row: PassRow, saliency_P: torch.Tensor, norm_P: torch.Tensor) -> RowScores:
        """A response's scores from the saliency of its positions, the first being the one before the response."""
        return RowScores(align_scores(saliency_P, row.response_length, self.alignment), norm_P)

    def run(self, rows: Sequence[PassRow], model: Model) -> list[RowScores]:
        saliencies = model.micro_batches(
            rows,
            lambda micro: saliency_step(micro, [self.target_positions(row) for row in micro.rows], self.leaf),
            gradients=True,
        )
        return [
            self.row_scores(row, saliency_S[row.response_start - 1 :], norm_S[row.response_start - 1 :])
            for row, (saliency_S, norm_S) in zip(rows, saliencies, strict=True)
        ]
