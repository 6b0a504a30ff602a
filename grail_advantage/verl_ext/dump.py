"""The responses of an update of the actor for the token dump (:mod:`grail_advantage.dump`), in the trainer, and what
each of their tokens received in it (:mod:`grail_advantage.receipt`), as the workers read it
(:class:`grail_advantage.verl_ext.worker.UpdateReader`).

verl's own rollout dump (``trainer.rollout_data_dir``, ``PPOTrainer._log_rollout_data``) names the same responses by the
same keys, in its column ``uid``. Shape suffixes: B responses that are written, T response tokens, U optimiser steps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grail_advantage.data import (
    DUMPED,
    OLD_LOG_PROBS,
    REF_LOG_PROBS,
    ROLLOUT_LOG_PROBS,
    Rollouts,
    Weighed,
)
from grail_advantage.dump import StepDump, received_table
from grail_advantage.effect import effect_figures
from grail_advantage.receipt import Batch, Loss, Piece, Receipt, check, verl_loss
from grail_advantage.receipt.report import record_of
from grail_advantage.verl_ext.exchange import update_places
from grail_advantage.verl_ext.settings import (
    ACTOR,
    AGGREGATION,
    ENGINES,
    LOSS,
    MODEL,
    STRATEGY,
    TEMPERATURE,
    Settings,
)
from grail_advantage.verl_ext.worker import OptimiserStep

LOSS_COLUMNS = (OLD_LOG_PROBS, "rollout_is_weights", REF_LOG_PROBS)
"""What the loss reads of a response beside its advantages."""
COLUMNS = {name: name for name in (*DUMPED, ROLLOUT_LOG_PROBS, *LOSS_COLUMNS)} | {
    REF_LOG_PROBS: "ref_log_prob"
}
"""All columns of numbers that the dump takes, with verl's names of them."""
LOSS_OPTIONS = """
clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c loss_scale_factor tau_pos tau_neg
policy_loss.dro_beta policy_loss.kl_cov_ratio policy_loss.ppo_kl_coef
"""
"""The actor's options that :func:`grail_advantage.receipt.verl_loss` reads."""


class UpdateDump:
    """Writes the responses of updates, so many a step, from the trainer's process. An error in it does not stop the
    training, but for the OSError of a folder that cannot be made."""

    def __init__(
        self, settings: Settings, tokenizer: PreTrainedTokenizerBase, *, updates: int
    ) -> None:
        options = settings.dump
        assert options is not None, "no run without a folder makes a dump"
        self._settings = settings
        self._watches = options.received and settings[STRATEGY] in ENGINES
        self.marks: tuple[str, Tensor] | None = None
        """The setting ``WATCHED`` and the field ``PLACES`` of the update's batch, where workers are to watch it."""
        self._chosen: tuple[Weighed, int, int] | None = None
        """The responses that are written, the update's number, and how many responses the update has."""
        options.folder.mkdir(parents=True, exist_ok=True)
        self.steps = StepDump(
            options,
            tokenizer,
            updates=updates,
            model=str(settings[f"{MODEL}.path"]),
            temperature=float(settings[TEMPERATURE]),
        )
        """Chooses the responses, and writes their files."""

    def choose(self, weighed: Weighed, not_padding: Sequence[bool], *, update: int) -> None:
        """Choose the responses of an update that are written, and mark them for the workers.

        Args:
            not_padding: which responses do more than fill up the batch.
            update: the update's number in the step.
        """
        self.marks = None
        self._chosen = None
        r = weighed.rollouts
        with self.steps.attempt():
            groups = [] if r.groups is None else r.groups.tolist()
            chosen = self.steps.choose(r.step, update, groups, not_padding)
            if not chosen:
                return
            self._chosen = (weighed.part(chosen), update, sum(not_padding))
            if self._watches:
                self.marks = (f"{r.step}.{update}", update_places(len(r), chosen))

    def write(self, columns: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Hand the chosen responses to the writer. ``columns``: (B, T), of all responses of the update, that were not
        there when they were weighed."""
        if self._chosen is None:
            return
        part, update, count = self._chosen
        with self.steps.attempt():
            rollouts = part.rollouts
            late = dict(rollouts.columns)
            for name, values_BT in columns.items():
                # The columns are as wide as the longest response of the update, the part as its own longest.
                late[name] = values_BT[rollouts.places, : rollouts.mask.shape[1]]
            part = replace(part, rollouts=replace(rollouts, columns=late))
            # receive() compares with these columns.
            self._chosen = (part, update, count)
            self.steps.write(rollouts.step, update, [part], count)

    def receive(
        self,
        rollouts: Rollouts,
        workers: Any,
        sent: Sequence[bool],
        log_probs_now: Callable[[Sequence[int]], Tensor],
        *,
        on_policy: bool,
    ) -> dict[str, float]:
        """Hand what the responses received in the update, and in some steps its effect, to the writer; metrics.

        Args:
            rollouts: all responses of the update, of which those that were ``sent`` went into it.
            workers: the actor's worker group.
            log_probs_now: log-probabilities (B, T) of the responses at some places, by the actor as it is.
            on_policy: whether the old log-probabilities are those of the policy before the update.
        """
        if self.marks is None or self._chosen is None:
            return {}
        number, _ = self.marks
        self.marks = None
        part, update, _ = self._chosen
        metrics: dict[str, float] = {}
        with self.steps.attempt():
            of_ranks = []
            for reply in workers.take_received(number):
                # Raised in the worker, it would end the run; here it is one failed file.
                if isinstance(reply, Exception):
                    raise reply
                # None is of further ranks of a sequence-parallel group.
                if reply is not None:
                    of_ranks.append(reply)
            r = part.rollouts
            loss = loss_of(self._settings)
            receipt = receipt_of(
                part,
                of_ranks,
                sent=sent,
                tokens=rollouts.mask.sum(dim=1).tolist(),
                loss=loss,
                epochs=self._settings[f"{ACTOR}.ppo_epochs"],
                on_policy=on_policy,
            )
            metrics["receipt/findings"] = sum(finding.mismatch for finding in receipt.findings)
            if receipt.clipped is not None:
                metrics["receipt/clipped"] = receipt.clipped
            effect = None
            if self.steps.measures(r.step):
                effect = log_probs_now(r.places)[:, : r.mask.shape[1]] - r.columns[OLD_LOG_PROBS]
                figures = effect_figures(part.advantages, effect, r.mask, r.columns[OLD_LOG_PROBS])
                metrics |= {f"{part.method.name}/{name}": value for name, value in figures.items()}
            lengths = list(map(len, r.responses))
            header = record_of(receipt, loss.name, r.step, update)
            self.steps.write_received(header, received_table(receipt, r.keys, lengths, effect))
        return metrics


def loss_of(settings: Settings) -> Loss:
    """The loss of a run's update, by its settings."""
    options = {
        name.rsplit(".", 1)[-1]: settings[f"{ACTOR}.{name}"] for name in LOSS_OPTIONS.split()
    }
    if settings[f"{ACTOR}.use_kl_loss"]:
        options["kl"] = settings[f"{ACTOR}.kl_loss_type"]
        options["kl_coef"] = settings[f"{ACTOR}.kl_loss_coef"]
    return verl_loss(settings[LOSS] or "vanilla", settings[AGGREGATION], **options)


def receipt_of(
    part: Weighed,
    of_ranks: Sequence[list[OptimiserStep]],
    *,
    sent: Sequence[bool],
    tokens: Sequence[int],
    loss: Loss,
    epochs: int,
    on_policy: bool,
) -> Receipt:
    """The receipt of an update, over the written responses. The loss's denominators, tokens and responses, are counted
    over the whole optimiser step, or the check would divide wrongly.

    Args:
        part: the written responses.
        of_ranks: the optimiser steps of each data-parallel rank.
        sent, tokens: of each response of the whole batch, whether it went into the update, and its tokens that train.
        on_policy: whether the old log-probabilities are those of the policy before the update.
    """
    r = part.rollouts
    mask_BT = r.mask
    totals = []
    for of_update in zip(*of_ranks, strict=True):
        places = [place for step in of_update for place in step.places]
        totals.append([sum(tokens[place] for place in places), len(places)])
    updates = len(totals)
    # Responses that were left out received nothing that was read.
    left_out_B = ~torch.tensor([sent[place] for place in r.places])
    if loss.account == "kl_cov" and len(left_out_B) < len(tokens):
        # Which tokens it penalises follows from all responses of a micro-batch.
        loss = replace(loss, account=None)
    pieces = list(_pieces(of_ranks, mask_BT.shape[1]))
    if not pieces:
        # None of the written responses went into the update.
        nothing_UBT = torch.full((updates, *mask_BT.shape), torch.nan)
        nothing_BT = nothing_UBT[0]
        return Receipt(nothing_BT, nothing_BT, nothing_UBT, nothing_UBT, nothing_UBT, findings=())
    old_log_probs_BT, weights_BT, ref_log_probs_BT = map(r.columns.get, LOSS_COLUMNS)
    batch = Batch(
        advantages_BT=part.advantages,
        mask_BT=mask_BT,
        old_log_probs_BT=old_log_probs_BT,
        weights_BT=weights_BT,
        ref_log_probs_BT=ref_log_probs_BT,
        left_out_B=left_out_B,
        updates=updates // epochs,
        epochs=epochs,
        ranks=len(of_ranks),
        on_policy=on_policy,
        keys=list(r.keys),
        totals_U2=torch.tensor(totals),
    )
    receipt = check(batch, loss, pieces)
    columns = {}
    for name in ("received_BT", "clipped_BT", "received_UBT", "clipped_UBT"):
        columns[name] = getattr(receipt, name).masked_fill(left_out_B[:, None], torch.nan)
    return replace(receipt, **columns)


def _pieces(of_ranks: Sequence[list[OptimiserStep]], width: int) -> Iterator[Piece]:
    """The micro-batches of the optimiser steps that have a written response; also the others of these steps, which
    count."""
    for update, of_update in enumerate(zip(*of_ranks, strict=True)):
        pieces = [
            replace(piece, update=update, rank=rank).padded(width)
            for rank, step in enumerate(of_update)
            for piece in step.pieces
        ]
        if any(len(piece.rows_b) for piece in pieces):
            yield from pieces
