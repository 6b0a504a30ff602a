"""SHEAR: a token matters as much as its surroundings differ from every response of the other outcome.

Source: SHEAR (arXiv 2604.23318, section 3, Algorithm 1), from a detailed restatement of it; neither the paper's text nor its
authors' code was read. The distances between stretches of hidden states are in :mod:`.shear_distances`. The other outcome is
the other sign of the advantage: responses without an advantage, such as truncated ones where these are masked, are on
neither side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grail_advantage.batch import GROUPS, PassRow, RolloutBatch
from grail_advantage.model.interface import Model, RowScores
from grail_advantage.options import option
from grail_advantage.registry import register_signal
from grail_advantage.signals.base import HIDDEN_STATES, NormalizeMass, Reshaped, Signal
from grail_advantage.signals.shear_distances import EPSILON, ITERATIONS, TOLERANCE, shear_scores


@register_signal("shear")
class Shear(Signal):
    """A token's weight: the greatest distance of a window that holds it to the nearest window of the group's responses
    of the other outcome, relative to the group's mean norm of hidden states. Responses without an opposite have weight
    1.

    The hidden states of a rank's selected responses are held together on its device, in the model's precision: 32
    responses of 4096 tokens at 2560 dimensions are 0.7 GB in bf16.
    """

    formula = "greatest over windows with t of the least Sinkhorn distance to an opposing one, / mean ||h||"
    source = "arXiv 2604.23318, section 3, Algorithm 1 (from a restatement of it; neither the paper's text nor code was read)"
    cost = "1 on the responses with an advantage, and the distances"
    reads = frozenset({GROUPS})
    uses = HIDDEN_STATES
    whole_groups = True

    window: int = option(100, "tokens of a window", ge=1)

    stride: int = option(25, "tokens from the start of a window to the start of the next; at most window", ge=1)

    epsilon: float = option(
        EPSILON,
        "entropic regularisation, as a share of a pair's mean cost; exact optimal transport as it goes to 0",
        gt=0,
    )

    iterations: int = option(ITERATIONS, "most iterations for a pair of windows", ge=1)

    tolerance: float = option(TOLERANCE, "share of the mass that may still be misplaced when a pair is done", gt=0)

    normalize_mass: NormalizeMass = False

    def check(self) -> None:
        super().check()
        if self.stride > self.window:
            raise ValueError(
                f"{self.section}.stride={self.stride} is greater than {self.section}.window={self.window}, which leaves "
                "tokens out; lower it"
            )

    def run(self, rows: Sequence[PassRow], model: Model) -> list[RowScores]:
        hidden = model.micro_batches(rows, lambda micro: micro.hidden_states(), gradients=False)
        groups: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(row.group, []).append(index)
        all_scores = [torch.ones(row.response_length) for row in rows]  # copies that fill up a rank keep these
        for group, members in groups.items():
            if group < 0:
                continue
            scores = shear_scores(
                [hidden[index] for index in members],
                [rows[index].advantage > 0 for index in members],
                **{name: getattr(self, name) for name in ("window", "stride", "epsilon", "iterations", "tolerance")},
            )
            for index, scores_T in zip(members, scores, strict=True):
                all_scores[index] = scores_T
        return [RowScores(scores_T) for scores_T in all_scores]

    def reshape(self, scores_BT: torch.Tensor, statistics_BT: torch.Tensor, batch: RolloutBatch) -> Reshaped:
        """The scores are the weights."""
        return Reshaped(scores_BT.clamp(min=0))
