"""The micro-batches of all ranks and steps as one table: what each token received, beside the columns that the loss reads.

Shape suffixes: B responses of the rollout batch, N those of all optimiser steps, T response tokens, G groups of the N.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .losses import Batch, Loss, Tokens, denominators, expect, opened
from .measure import Piece

PRECISION = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2**-8, torch.bfloat16: 2**-5}
"""Relative error that a gradient of this type may have."""


class Arrived:
    """The responses of all pieces as N rows. Of tokens in ``ignored_NT`` nothing is said: there rounding decides."""

    def __init__(self, batch: Batch, loss: Loss, pieces: list[Piece]) -> None:
        self.batch = batch
        self.loss = loss
        self.rows_N = torch.cat([piece.rows_b for piece in pieces])
        # Pieces of 2 and 3 responses: 0 0 1 1 1.
        counts = torch.tensor([len(piece.rows_b) for piece in pieces])
        self.piece_N = torch.arange(len(pieces)).repeat_interleave(counts)
        self.update_N = torch.tensor([piece.update for piece in pieces])[self.piece_N]
        rank_N = torch.tensor([piece.rank for piece in pieces])[self.piece_N]
        self.groups = {
            "": torch.zeros_like(self.rows_N),
            "optimiser step": self.update_N,
            # Ranks 0 and 1 of the second step are 2 and 3: a factor may differ from step to step.
            "rank": rank_N + batch.ranks * self.update_N,
            "micro-batch": self.piece_N,
            "response": torch.arange(len(self.rows_N)),
        }
        gradient_NT = torch.cat([piece.gradient_bT.double() for piece in pieces])
        divisor_N1 = torch.cat(denominators(loss, batch, pieces))
        # + 0.0: no -0.0 in a table.
        self.received_NT = -gradient_NT * divisor_N1 / batch.ranks + 0.0
        # The coarsest type that the gradient went through says how much may be rounding.
        self.precision = max(
            PRECISION[values_bT.dtype]
            for piece in pieces
            for values_bT in (piece.gradient_bT, piece.log_probs_bT)
        )
        log_probs_NT = torch.cat([piece.log_probs_bT.double() for piece in pieces])
        self.mask_NT = batch.mask_BT[self.rows_N]
        columns_BT = {
            "advantages": torch.where(batch.mask_BT, batch.advantages_BT, 0),
            "weights": batch.weights_BT,
            "old": batch.old_log_probs_BT,
            "ref": batch.ref_log_probs_BT,
        }
        columns = {"weights": torch.ones_like(log_probs_NT), "old": log_probs_NT}
        for name, values_BT in columns_BT.items():
            if values_BT is not None:
                columns[name] = values_BT[self.rows_N].double()
        self.tokens = Tokens(mask=self.mask_NT, log_probs=log_probs_NT, **columns)
        # The size of a usual gradient, in advantages: differences are small or large beside it.
        advantages_K = self.tokens.advantages[self.tokens.advantages != 0]
        size = float(advantages_K.square().mean().sqrt().nan_to_num())
        self.unit = size + loss.kl_coef + abs(float(loss.options.get("coef") or 0.0))
        self.ignored_NT = ~self.received_NT.isfinite()
        self.wanted_NT = torch.zeros_like(self.received_NT)
        self.clipped_NT = torch.zeros_like(self.mask_NT)
        self.open_NT = self.wanted_NT

    def intend(self) -> None:
        """Compute what a known loss gives and clips, and what it gives without a clip."""
        self.wanted_NT, self.clipped_NT = self.expect()
        self.open_NT = self.value(opened(self.loss))
        # Where a ratio is on a bound of the clip, rounding decides, or a tie halves the gradient.
        of_response = self.loss.account == "geo_mean" or self.loss.options.get("sequence")
        for sign in (1, -1):
            advantages_NT = sign * self.tokens.advantages.abs()
            below_NT, above_NT = (
                self.expect(advantages=advantages_NT, old=self.tokens.old + moved)[1]
                for moved in (self.precision, -self.precision)
            )
            tie_NT = below_NT ^ above_NT
            if of_response:
                tie_NT = tie_NT.any(dim=1, keepdim=True)
            self.ignored_NT |= tie_NT

    def expect(self, loss: Loss | None = None, /, **columns: Tensor) -> tuple[Tensor, Tensor]:
        """What a loss gives and where it clips, also with other columns."""
        loss = loss or self.loss
        tokens = replace(self.tokens, **columns)
        if not callable(loss.account) and loss.account != "kl_cov":
            return expect(loss, tokens)
        # Such a loss may compare the tokens of a micro-batch.
        parts = [expect(loss, tokens.of(self.piece_N == place)) for place in self.piece_N.unique()]
        values, clipped = zip(*parts, strict=True)
        return torch.cat(values), torch.cat(clipped)

    def value(self, loss: Loss | None = None, /, **columns: Tensor) -> Tensor:
        """What a loss gives."""
        return self.expect(loss, **columns)[0]

    def differs(self, value_NT: Tensor, got_NT: Tensor, factor_N1: Any = 1.0) -> Tensor:
        """Where more than rounding lies between them; outside the mask, where anything was received.

        What was received is divided by the factor: a large one must not make it small beside a value of 0.
        """
        factor_N1 = torch.as_tensor(factor_N1, dtype=torch.float64)
        unit_NT = torch.where(value_NT == 0, self.unit / factor_N1.clamp(min=1), self.unit)
        size_NT = torch.maximum(value_NT.abs(), got_NT.abs()) + unit_NT * self.mask_NT
        return ~((got_NT - value_NT).abs() <= self.precision * size_NT) & ~self.ignored_NT

    def log_quotient(self, value_NT: Tensor) -> Tensor:
        """Logarithm of received / value, where that is positive; NaN elsewhere, and where rounding is large."""
        times_NT = self.received_NT / value_NT
        clear_NT = (value_NT.abs() > 0.02 * self.unit) & ~self.ignored_NT & (times_NT > 0)
        return torch.where(clear_NT, times_NT, torch.nan).log()

    def middle(self, values_NT: Tensor, by: str = "") -> Tensor:
        """The median of each group, (G,), each between -99 and 99; 0 of one without values."""
        n, t = values_NT.isfinite().nonzero(as_tuple=True)
        group_K = self.groups[by][n]
        # Within 99 of 0, so that one sort by 256 for each group keeps the groups apart.
        value_K = values_NT[n, t].clamp(-99, 99)
        value_K = value_K[(256.0 * group_K + value_K).argsort()]  # by group, within it by value
        count_G = group_K.bincount(minlength=int(self.groups[by].max()) + 1)
        # Of three values the second, and of four the second too.
        place_G = (count_G.cumsum(0) - (count_G + 2) // 2).clamp(0)
        return torch.where(count_G > 0, pad(value_K, (0, 1))[place_G], 0.0)
