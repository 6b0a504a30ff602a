"""An update's old log-probabilities by its own first forward, in the workers.

Before each update verl runs a forward over the whole batch, for the log-probabilities of the policy as it is. Where an
epoch over the batch is one optimiser step, the update's first forward gives the same numbers, and the other one can
go: ``old = log_prob.detach()``. Every ratio of the first epoch is then exactly 1; further epochs take ``old`` from the
first. NeMo-RL calls this ``force_on_policy_ratio``, slime ``can_reuse_log_probs_in_loss``.
:func:`grail_advantage.verl_ext.rules.why_not_reuse` has the settings with which it would not be exact.

Shape suffixes: R responses of a micro-batch, T response tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

from grail_advantage.data import ENTROPY, OLD_LOG_PROBS, Rollouts
from grail_advantage.verl_ext.exchange import PLACES, nested

REUSE = "reuse_log_probs"
"""Setting of a batch that has no old log-probabilities but the field ``PLACES``: they are those of its update."""
CALCULATE = "calculate_entropy"  # verl's setting of a batch whose forward also gives entropies


class OwnForward:
    """The old log-probabilities and entropies that an update's first forward gave to this rank's responses."""

    def __init__(self) -> None:
        self.columns: dict[str, dict[int, Tensor]] = {OLD_LOG_PROBS: {}, ENTROPY: {}}
        """Values (T,) of each response, by its place in the update's batch."""
        self._loss_reads_entropy = False

    @contextmanager
    def of_update(self, worker: Any, data: TensorDict) -> Iterator[None]:
        """Within, the loss function of verl's ``TrainingWorker`` gets old log-probabilities."""
        self._loss_reads_entropy = tu.get(data, CALCULATE, default=False)
        loss_fn = worker.loss_fn
        entropy_from_logits = worker.engine.compute_entropy_from_logits

        def with_old_log_probs(model_output: Any, data: TensorDict, dp_group: Any = None) -> Any:
            data["old_log_probs"] = nested(
                self._keep(OLD_LOG_PROBS, model_output["log_probs"], data)
            )
            if ENTROPY in model_output:
                self._keep(ENTROPY, model_output[ENTROPY], data)
            if not self._loss_reads_entropy:
                # Or the loss would report an entropy bonus.
                model_output.pop(ENTROPY, None)
            return loss_fn(model_output=model_output, data=data, dp_group=dp_group)

        worker.loss_fn = with_old_log_probs
        if not self._loss_reads_entropy:  # no graph of what no gradient goes through
            worker.engine.compute_entropy_from_logits = torch.no_grad()(entropy_from_logits)
        try:
            yield
        finally:
            worker.loss_fn = loss_fn
            worker.engine.compute_entropy_from_logits = entropy_from_logits

    def ask_for_entropies(self, data: TensorDict) -> None:
        """Have the forward of an optimiser step give entropies, in the first epoch alone."""
        first_epoch = not self.columns[OLD_LOG_PROBS]
        tu.assign_non_tensor(data, **{CALCULATE: first_epoch or self._loss_reads_entropy})

    def _keep(self, name: str, values: Tensor, data: TensorDict) -> Sequence[Tensor]:
        """Returns those of the first epoch for a micro-batch, and keeps them if this is it. ``values``: nested, of
        prompt and response."""
        places_R = data[PLACES][:, 0].tolist()
        values_R = response_from_nested(values.detach(), data["response_mask"]).unbind()
        first_epoch = self.columns[name]
        for place, values_T in zip(places_R, values_R, strict=True):
            if place >= 0:  # a filler has no place
                # A further epoch finds the first one's values, and leaves them.
                first_epoch.setdefault(place, values_T)
        # A filler compares with itself: its ratio is 1.
        return [
            first_epoch.get(place, values_T)
            for place, values_T in zip(places_R, values_R, strict=True)
        ]


def columns_of_ranks(
    ranks: Sequence[Mapping[str, Mapping[int, Tensor]] | None], rollouts: Rollouts
) -> dict[str, Tensor]:
    """The columns of all ranks that have any, float32 (B, T); NaN in responses that were not in the update."""
    nothing_BT = torch.full(rollouts.mask.shape, torch.nan, dtype=torch.float32, device="cpu")
    columns = {OLD_LOG_PROBS: nothing_BT, ENTROPY: nothing_BT.clone()}
    for of_rank in filter(None, ranks):
        for name, of_responses in of_rank.items():
            for place, values_T in of_responses.items():
                columns[name][place, : len(values_T)] = values_T
    return columns
