"""From rollouts to token advantages: the one way that every host goes.

    base advantages -> which responses need scores -> columns -> a pass through the model -> scores -> weights -> advantages

A host is what has the responses and the model: verl's trainer, TRL's, or a plain model. It implements :class:`Host`;
:func:`weigh` does the rest.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from grail_advantage.batch import PassRow, RolloutBatch, within_range
from grail_advantage.metrics import weight_metrics
from grail_advantage.model.interface import RowScores
from grail_advantage.record import DUMPED, Rollouts, StepRecord
from grail_advantage.signals.base import RowSelection, Signal
from grail_advantage.weighting import batch_weights, put_row, scores_of


class Host(Protocol):
    """What :func:`weigh` asks of whoever has the responses and the model."""

    def rollouts(self) -> Rollouts:
        """The responses of the update."""

    def columns(self, names: Sequence[str], selected: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """Columns of the batch, float (B, T) each.

        Args:
            names: of ``OLD_LOG_PROBS`` and ``ENTROPY``, those that the method reads.
            selected: rows of the responses that get scores. Where there are none, nothing is read.
        """

    def scores(self, signal: Signal, rows: Sequence[PassRow]) -> Sequence[RowScores]:
        """Scores of a method that uses something of the model, in the order of the rows: :meth:`Signal.run` on rows that went
        through :meth:`Signal.prepare_row`. Called with no rows, too, since other ranks may have some."""

    def mean(self, values_BT: torch.Tensor, mask_BT: torch.Tensor) -> float:
        """A mean over the batch as the run's loss takes it."""


def weigh(host: Host, signal: Signal, step: int = 0) -> StepRecord:
    """Token weights and advantages of a host's responses.

    Args:
        host: has the responses and the model.
        signal: the method.
        step: training step, at least 0, for methods that change over a run.

    Raises:
        ValueError: something that the method reads is missing or does not fit.
    """
    rollouts = host.rollouts()
    batch = rollouts.batch(signal, host.mean, step)
    selection = signal.select(batch)
    selected = selection.selected_B.nonzero().flatten().tolist()
    names = [name for name in DUMPED if name in signal.reads]
    if names:
        columns_BT = host.columns(names, selected)
        batch = replace(batch, columns_BT={name: values_BT.cpu() for name, values_BT in columns_BT.items()})
    of_pass_BT, norms = None, torch.zeros(0)
    if signal.uses:
        of_pass_BT = torch.full(batch.mask_BT.shape, torch.nan)
        rows = [rollouts.pass_row(row, batch) for row in selected]
        of_rows = host.scores(signal, rows)
        for row, scores in zip(rows, of_rows, strict=True):
            put_row(of_pass_BT, row.place, row.response_length, scores, signal)
        of_rows_norms = [scores.gradient_norms.cpu() for scores in of_rows if scores.gradient_norms is not None]
        norms = torch.cat([norms, *of_rows_norms])

    scores_BT = scores_of(signal, batch, selection, of_pass_BT)
    result = batch_weights(scores_BT, batch, selection, signal)
    base_BT = batch.advantages_B.float().unsqueeze(1).expand(batch.mask_BT.shape)
    metrics = weight_metrics(result, batch.mask_BT, batch.advantages_B, selection, norms)
    return StepRecord(
        signal=signal,
        step=step,
        rollouts=replace(rollouts, columns_BT={**rollouts.columns_BT, **batch.columns_BT}),
        selection=selection,
        scores_BT=torch.full_like(result.weights_BT, torch.nan) if scores_BT is None else scores_BT,
        weights_BT=result.weights_BT,
        advantages_BT=result.advantages(base_BT, batch.mask_BT),
        non_finite_B=result.non_finite_B,
        no_scores=_reasons(signal, rollouts, batch, selection, result.non_finite_B),
        metrics={**metrics, **_rates(rollouts)},
    )


def _rates(rollouts: Rollouts) -> dict[str, float]:
    """Shares of the responses in which the model wrote something."""
    written_B = rollouts.written_BT.any(dim=1)
    count = max(1, int(written_B.sum()))
    rates = {"unjudged_rate": ~within_range(rollouts.advantages_B)}
    if rollouts.truncated_B is not None:
        rates["truncated_rate"] = rollouts.truncated_B
    return {name: int((of_B & written_B).sum()) / count for name, of_B in rates.items()} if written_B.any() else {}


def _reasons(
    signal: Signal, rollouts: Rollouts, batch: RolloutBatch, selection: RowSelection, non_finite_B: torch.Tensor
) -> list[str | None]:
    """Why each response has no scores of its own, the first reason that holds; ``None`` where it has."""
    truncated_B = torch.zeros_like(batch.valid_B) if rollouts.truncated_B is None else rollouts.truncated_B
    reasons: list[str | None] = []
    for selected, non_finite, valid, truncated, zero, answered, inside in zip(
        *(selection.selected_B.tolist(), non_finite_B.tolist(), batch.valid_B.tolist(), truncated_B.tolist()),
        *((batch.advantages_B == 0).tolist(), selection.answered_B.tolist(), selection.inside_gate_B.tolist()),
        strict=True,
    ):
        if selected:
            reasons.append("non-finite scores" if non_finite else None)
        elif not valid:
            reasons.append("no token trains")
        elif truncated and signal.mask_truncated:
            reasons.append("truncated")
        elif zero:
            reasons.append("advantage 0")
        elif signal.skips_unanswered and not answered:
            reasons.append("no answer")
        else:
            reasons.append("not scored" if inside else "outside the gate")
    return reasons
