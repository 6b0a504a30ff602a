"""Methods that read the policy before the update: its surprisal and entropy at each token, which come from the forward
of the old log-probabilities and cost nothing. ``uniform`` and ``polarity``, which read nothing, are here too."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from grail_advantage.data import ENTROPY, OLD_LOG_PROBS, Rollouts
from grail_advantage.maps import MAPS, Weights, count_of_share, top_tokens
from grail_advantage.method import Among, Gate, Mapped, Method, option, register


def surprisal(r: Rollouts) -> Tensor:
    """``-old_log_prob``, at least 0 whatever rounds, float64 (B, T); NaN where it is not finite, as of a broken
    forward."""
    return _known(-r.columns[OLD_LOG_PROBS].double())


def entropy(r: Rollouts) -> Tensor:
    """In nats, at each token's predictor position, likewise."""
    return _known(r.columns[ENTROPY].double())


def _known(values: Tensor) -> Tensor:
    return torch.where(values.isfinite(), values.clamp(min=0), torch.nan)


class OfEntropy(Method):
    """Its scores are the entropies."""

    reads = frozenset({ENTROPY})

    def scores(self, r: Rollouts, of_pass: Tensor | None) -> Tensor:
        return entropy(r)


@register("uniform")
class Uniform(Method):
    """GRPO, with truncated responses masked as for every method, which differs from it only in the weights."""

    formula = "1"
    source = "the baseline"
    # Nothing is scored, compared or moved.
    gate: ClassVar = "all"  # type: ignore[misc]
    statistics: ClassVar = "response"  # type: ignore[misc]
    span: ClassVar = "last"  # type: ignore[misc]
    normalize_mass: ClassVar = False  # type: ignore[misc]
    control: ClassVar = "none"  # type: ignore[misc]

    def select(self, r: Rollouts) -> Tensor:
        return torch.zeros_like(r.valid)


@register("surprisal")
class Surprisal(Mapped):
    """By default the least probable reasoning token of an incorrect response carries its advantage; correct responses
    stay as they are."""

    formula = "map of s = -log p; by default 1 on the incorrect response's reasoning token with the highest s, else 0"
    source = (
        "control; the reshaper power: arXiv 2606.00257 (its repository, the file is not on record)"
    )
    reads = frozenset({OLD_LOG_PROBS})
    reshaper: str = option("top", "map from scores to weights")
    gate: Gate = option("wrong", "responses that get weights")
    statistics: Among = option("reasoning", "tokens that are scored and compared")

    def scores(self, r: Rollouts, of_pass: Tensor | None) -> Tensor:
        return surprisal(r)


@register("entropy")
class Entropy(OfEntropy, Mapped):
    """How undecided the policy was. The default map keeps each response's mean weight at 1 and ranks nothing."""

    formula = "map of H; by default 1 + 0.1 (H / response mean - 1)"
    source = "control"
    reshaper: str = option("mean_ratio", "map from scores to weights")

    @property
    def ranks_entropy(self) -> bool:  # type: ignore[override]
        return MAPS[self.reshaper].ranks


@register("entropy_bonus")
class EntropyBonus(OfEntropy):
    """``A_t = A + min(alpha H, |A| / kappa)`` as a weight: incorrect undecided tokens are pushed down
    less."""

    formula = "1 + sign(A) min(0.4 H / |A|, 1 / 2)"
    source = "arXiv 2506.14758 (restated: three ports, one in verl's `dp_actor.py`, with 0.4 for GRPO and 2)"
    alpha: float = option(0.4, "advantage added for each nat of entropy", gt=0)
    kappa: float = option(2.0, "the bonus is at most the kappa-th part of the advantage", gt=1)

    def weights(self, scores: Tensor, among: Tensor, r: Rollouts) -> Weights:
        a = r.advantages[:, None]
        bonus = (self.alpha * scores.double() / a.abs()).clamp(max=1 / self.kappa)
        # Where A is 0 the bonus is NaN or anything; such a response trains nothing, whatever its weights.
        w = 1 + a.sign() * bonus
        return Weights(w.float(), 1 - 1 / self.kappa, 1 + 1 / self.kappa)


@register("probability")
class Probability(Method):
    """``alpha p + 1 - alpha``: large gradients of improbable tokens do not drown those of probable ones."""

    formula = "0.2 p + 0.8"
    source = (
        "arXiv 2505.12929 (zhyang2226/AR-Lopti, `verl/trainer/ppo/ray_trainer.py`, `both_linear`)"
    )
    reads = frozenset({OLD_LOG_PROBS})
    alpha: float = option(
        0.2, "how much less an impossible token weighs than a certain one", gt=0, le=1
    )

    def scores(self, r: Rollouts, of_pass: Tensor | None) -> Tensor:
        return torch.exp(-surprisal(r))

    def weights(self, scores: Tensor, among: Tensor, r: Rollouts) -> Weights:
        return Weights((self.alpha * scores.double() + 1 - self.alpha).float())


@register("high_entropy")
class HighEntropy(OfEntropy):
    """Only the batch's tokens of highest entropy train; those of responses with advantage 0 are compared, too. The
    paper's equation divides the loss by all tokens, its code by the kept ones of each micro-batch; here the batch has
    one cut, by the policy before the update, which keeps ties."""

    formula = "N / k on the k of the batch's N tokens with the highest H, else 0; rho = k / N = 0.2"
    source = (
        "80/20, arXiv 2506.01939 (Shenzhi-Wang/Beyond-the-80-20-Rule-RLVR, `verl/trainer/ppo/core_algos.py`, "
        "`get_global_entropy_top_mask`)"
    )
    ranks_entropy = True
    whole_batch = True
    gate: ClassVar = "all"  # type: ignore[misc]
    rho: float = option(0.2, "share of the batch's tokens that train, rounded up", gt=0, le=1)
    denominator: Literal["selected", "all"] = option(
        "selected", "what the loss is averaged over: these tokens (their weights are N / k), or all"
    )

    def weights(self, scores: Tensor, among: Tensor, r: Rollouts) -> Weights:
        # Of 10 tokens and rho = 0.2 the two highest stay: the second of them is the cut.
        x = scores[among]
        cut = x.topk(int(count_of_share(self.rho, among.sum()))).values[-1]
        chosen = among & (scores >= cut)
        w = chosen.float()
        if self.denominator == "selected":
            w = w * (len(x) / int(chosen.sum()))
        return Weights(w)


@register("stare")
class Stare(Method):
    """The code chooses its tokens in each mini-batch of the update; here they are chosen once for the batch, of equal
    ones the earlier."""

    formula = (
        "1.1 on the 10 % of the batch's tokens with A > 0 of the lowest p, else 1 (C2: 0.9 on those with A < 0); "
        "1 where the batch's mean H is not below 0.3"
    )
    source = (
        "arXiv 2606.19236, sections 4.1 to 4.3 (hp-luo/STARE, `verl/trainer/ppo/core_algos.py`, "
        "`compute_stare_token_weights`, without the adaptive variant)"
    )
    reads = frozenset({OLD_LOG_PROBS, ENTROPY})
    whole_batch = True
    gate: ClassVar = "all"  # type: ignore[misc]
    variant: Literal["O1", "C2"] = option(
        "O1", "O1 raises tokens with A > 0; C2 also lowers those with A < 0"
    )
    threshold: float = option(
        0.3, "mean entropy in nats, as the loss takes it, from which on every weight is 1", gt=0
    )
    share: float = option(
        0.1, "share of the tokens of either sign that is chosen, rounded up", gt=0, le=1
    )
    strength: float = option(0.1, "how far the weights of the chosen tokens are from 1", gt=0, le=1)

    def scores(self, r: Rollouts, of_pass: Tensor | None) -> Tensor:
        # A response without a finite entropy has no score, so that it does not reach the batch's mean.
        return torch.where(entropy(r).isfinite(), surprisal(r), torch.nan)

    def weights(self, scores: Tensor, among: Tensor, r: Rollouts) -> Weights:
        w = torch.ones_like(scores)
        # Not >=, so that a mean that is NaN leaves every weight at 1.
        if not r.mean(torch.where(among, entropy(r), 0.0), among) < self.threshold:
            return Weights(w)
        for sign in (1,) if self.variant == "O1" else (1, -1):
            candidates = among & (r.advantages.sign() == sign)[:, None]
            count = count_of_share(self.share, candidates.sum())
            # As one row, since the tokens of the whole batch are compared.
            chosen = top_tokens(scores.flatten(), candidates.flatten(), count).view_as(w)
            w = torch.where(chosen, 1 + sign * self.strength, w)
        return Weights(w)


@register("steer")
class Steer(Method):
    """Tokens whose update would change the entropy most weigh least. p and H are those before the update, in the source
    the moving policy's: the same in the first mini-batch of a step with verl."""

    formula = "from 1.2 at the batch's least e to 0.8 at its largest, linearly; e = |A (1 - p) (log p + H)|"
    source = "arXiv 2510.10150 (zz-haooo/STEER, `verl/trainer/ppo/core_algos.py`, `compute_token_weights`, `linear`)"
    reads = frozenset({OLD_LOG_PROBS, ENTROPY})
    highest: float = option(1.2, "weight where the entropy changes least", ge=1)
    lowest: float = option(0.8, "weight where it changes most", ge=0, le=1)

    def scores(self, r: Rollouts, of_pass: Tensor | None) -> Tensor:
        s = surprisal(r)
        # Of a probability near 1 the difference 1 - p would keep few digits.
        rest = -torch.expm1(-s)
        return (r.advantages.double()[:, None] * (rest * (entropy(r) - s))).abs()

    def weights(self, scores: Tensor, among: Tensor, r: Rollouts) -> Weights:
        low, high = scores[among].double().aminmax()
        # Equal scores have no place between the two weights.
        if low == high:
            return Weights(torch.ones_like(scores))
        place = (scores.double() - low) / (high - low)
        return Weights((self.highest - (self.highest - self.lowest) * place).float())


@register("polarity")
class Polarity(Method):
    """PSR is ``wrong=0``, NSR ``right=0``, W-REINFORCE ``right=0.1``. The paper finds NSR the better half at pass@k;
    here, at toy scale, leaving wrong responses out helped accuracy (docs/evidence.md)."""

    formula = "right where A > 0, wrong where A < 0 (both 1); with spread divided by the response's number of tokens"
    source = (
        "PSR, NSR and W-REINFORCE, arXiv 2506.01347 (TianHongZXY/RLVR-Decomposed, `verl/trainer/ppo/core_algos.py`, "
        "`compute_psr_nsr_outcome_advantage`)"
    )
    # A response has one weight: moved it is where it was, and scaled to a mean of 1 it is 1.
    normalize_mass: ClassVar = False  # type: ignore[misc]
    control: ClassVar = "none"  # type: ignore[misc]
    right: float = option(1.0, "weight where A > 0", ge=0)
    wrong: float = option(1.0, "weight where A < 0", ge=0)
    spread: bool = option(False, "whether weights are divided by the response's number of tokens")
    spread_over: Literal["both", "right", "wrong"] = option(
        "both", "the responses in which spread=true divides"
    )

    def check(self) -> None:
        if self.right == self.wrong == 0:
            raise ValueError(
                f"{self.section}.right=0 and {self.section}.wrong=0: nothing would train; give one a weight"
            )

    def scores(self, r: Rollouts, of_pass: Tensor | None) -> Tensor:
        return r.advantages[:, None].expand(r.mask.shape)

    def weights(self, scores: Tensor, among: Tensor, r: Rollouts) -> Weights:
        right = r.advantages > 0
        ones = torch.ones_like(r.advantages, dtype=torch.float32)
        w = torch.where(right, self.right * ones, self.wrong * ones).double()
        if self.spread:
            divided = {"both": torch.ones_like(right), "right": right, "wrong": ~right}[
                self.spread_over
            ]
            w = torch.where(divided, w / r.mask.sum(dim=1).clamp(min=1), w)
        return Weights(w.float()[:, None].expand(scores.shape))
