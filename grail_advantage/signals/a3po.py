"""A3PO: unlikely tokens of right rows and likely tokens of wrong rows weigh more, less so from step to step.

Source: arXiv 2512.21625, known from its abstract and from descriptions of it; no code was read. Read there: which tokens are
chosen in rows of either sign, a share of 20 %, a factor of 2 that falls to 1 over the training. Chosen here: the number of
steps, the rounding of the share, and that tokens are chosen row by row, with the policy before the update.

Shape suffixes: B rows, T response tokens.
"""

from __future__ import annotations

import torch

from grail_advantage.batch import OLD_LOG_PROBS, RolloutBatch
from grail_advantage.options import option
from grail_advantage.registry import register_signal
from grail_advantage.reshapers.top import count_of_share, top_tokens
from grail_advantage.signals.base import Reshaped, Signal, normalize_mass_option
from grail_advantage.signals.policy_columns import surprisal


@register_signal("a3po")
class A3poConfig(Signal):
    """2 on the least likely fifth of the tokens of rows with a positive advantage, and on the most likely fifth in rows with a
    negative one.

    Of equally likely tokens the earlier ones are chosen.
    """

    formula = (
        "rho on the 20 % of a row's tokens with the lowest p where A > 0, with the highest p where A < 0, else 1; rho falls "
        "from 2 to 1 over 200 steps"
    )
    source = "arXiv 2512.21625 (reading)"
    reads = frozenset({OLD_LOG_PROBS})

    rho: float = option(2.0, "weight of the chosen tokens at step 0; at least 1", ge=1)

    share: float = option(0.2, "share of a row's tokens that is chosen, rounded up; in (0, 1]", gt=0, le=1)

    decay_steps: int = option(
        200, "training steps over which the weight of the chosen tokens falls linearly to 1; 0: it stays", ge=0
    )

    normalize_mass: bool = normalize_mass_option(False)

    def scores(self, batch: RolloutBatch, of_pass_BT: torch.Tensor | None) -> torch.Tensor:
        """See :class:`grail_advantage.signals.base.Signal`."""
        return surprisal(batch)

    def reshape(self, scores_BT: torch.Tensor, statistics_BT: torch.Tensor, batch: RolloutBatch) -> Reshaped:
        """See :class:`grail_advantage.signals.base.Signal`."""
        left = max(0.0, 1 - batch.step / self.decay_steps) if self.decay_steps else 1.0
        count_B1 = count_of_share(self.share, statistics_BT.sum(dim=-1, keepdim=True))
        towards_BT = torch.where(batch.advantages_B.unsqueeze(1) > 0, scores_BT, -scores_BT)
        chosen_BT = top_tokens(towards_BT, statistics_BT, count_B1)
        return Reshaped(torch.where(chosen_BT, 1 + (self.rho - 1) * left, 1.0))
