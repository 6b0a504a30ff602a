"""Methods whose token advantages mix the response's own advantage with a signed log-ratio: ``lam A + (1 - lam) D_t``."""

from typing import Literal

import torch
from torch import Tensor

from grail_advantage.data import OLD_LOG_PROBS, REF_LOG_PROBS, Rollouts, runs
from grail_advantage.method import AdvantageMethod, option, register
from grail_advantage.methods.rlsd import Privileged


class Signed(AdvantageMethod):
    """A method gives :meth:`signal`."""

    lam: float = option(
        0.9, "share of the response's own advantage; 0: the signal alone", ge=0, le=1
    )
    over: Literal["token", "turn", "response"] = option(
        "token", "a token's signal: its own, or the mean over its turn or response"
    )

    def signal(self, r: Rollouts, of_pass: Tensor | None) -> Tensor:
        """float32 (B, T)."""
        raise NotImplementedError(f"{type(self).__name__} has no signal()")

    def scores(self, r: Rollouts, of_pass: Tensor | None) -> Tensor:
        signal = self.signal(r, of_pass).double()
        if self.over != "token":
            signal = averaged(signal, r, by_turn=self.over == "turn")
        return self.lam * r.advantages.double()[:, None] + (1 - self.lam) * signal


def averaged(values: Tensor, r: Rollouts, *, by_turn: bool) -> Tensor:
    """The mean of values (B, T) over the tokens that train of each token's turn, or of its response."""
    means = torch.zeros_like(values)
    for index, trains in enumerate(r.mask):
        spans = runs(r.written[index].numpy()) if by_turn else [(0, len(trains))]
        for start, stop in spans:
            of_span = values[index, start:stop][trains[start:stop]]
            # The mean of nothing would be NaN, and fail the response.
            if len(of_span):
                means[index, start:stop] = of_span.mean()
    return means


@register("self_distillation")
class SelfDistillation(Privileged, Signed):
    """The policy is its own teacher, as for ``rlsd``. A response without privileged text, or with a log-probability that
    is not finite, keeps its own advantage. Biased: its expectation is no gradient of the reward. The paper also distils
    over the whole vocabulary, and from a slow copy of the policy, without which it reports worse results; its mix of 0.9
    helped the smallest model and cost larger ones a little."""

    formula = "A_t = lam A + (1 - lam) (log p' - log p); lam = 0.9"
    source = (
        "SDPO, arXiv 2601.20802 (the mix: equation 3, in a translation, and TRL 1.16.0, "
        "`experimental/sdpo/sdpo_trainer.py`, lines 1138 to 1140; the signal: lasgroup/SDPO at 0e6d510, "
        "`verl/trainer/ppo/core_algos.py`, lines 1165 and 1166)"
    )
    cost = "1 on the responses that train"


@register("progress_advantage")
class ProgressAdvantage(Signed):
    """How far training has raised a token's probability over a reference. The source only scores with it, and trains
    nothing. At ``lam=0`` no reward counts, nothing trains where the policy still is the reference, and later the update
    moves on in the direction that it has taken."""

    formula = "A_t = lam A + (1 - lam) (log p - log p_ref); lam = 0.9, in the source 0"
    source = (
        "arXiv 2606.26080 (deeplearning-wisc/progress-advantage at 9284b4c, `pa/scoring.py`, "
        "`per_step_progress_advantage`, with beta = 1; `over=turn` is its token aggregation `mean`)"
    )
    reads = frozenset({OLD_LOG_PROBS, REF_LOG_PROBS})

    def signal(self, r: Rollouts, of_pass: Tensor | None) -> Tensor:
        return r.columns[OLD_LOG_PROBS].float() - r.columns[REF_LOG_PROBS].float()
