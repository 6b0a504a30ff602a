"""Losses by formula: the loss of each token before any mean, which is differentiated, and the divisor of the mean.

Shape suffixes: B responses of the rollout batch, b of a micro-batch, T response tokens, U steps of all epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .measure import Piece

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
OVER = ("update", "micro-batch", "rank", "batch")
_VERLS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")
KL = (*_VERLS, *(f"{name}+" for name in _VERLS), "k3 of trl")


@dataclass(frozen=True)
class Loss:
    """A loss as its settings say: made by :func:`verl_loss` or :func:`trl_loss`, or by hand for a loop of one's own.

    ``account`` is a key of ``FORMULAS``; a function from :class:`Tokens` to the loss of each token, (b, T) before any
    mean; or ``None`` for an unknown loss, of which the structure alone is checked. The mean is ``over`` an optimiser
    ``update``'s responses; over each ``micro-batch`` or ``rank``, and then over these (TRL's ``grpo``, ``bnpo``); or
    over the rollout ``batch``, divided by its updates (TRL's ``dapo``).
    """

    name: str
    account: str | Callable[[Tokens], Tensor] | None = "clip"
    aggregation: str = "token-mean"  # one of AGGREGATIONS
    over: str = "update"  # one of OVER
    norm: float | None = None  # the constant of seq-mean-token-sum-norm: tokens
    options: Mapping[str, Any] = field(
        default_factory=dict
    )  # of the formula: low, high, cap (the dual clip's), ...
    kl: str | None = None  # the estimator of a KL term in the loss, one of KL
    kl_coef: float = 0.0


def verl_loss(
    mode: str, aggregation: str, *, kl: str | None = None, kl_coef: float = 0.0, **options: Any
) -> Loss:
    """The loss of verl 0.9.1 of the name ``actor.policy_loss.loss_mode``; an unknown one is checked by structure alone.

    Args:
        mode: ``loss_mode``.
        aggregation: ``actor.loss_agg_mode``.
        kl: ``actor.kl_loss_type`` where ``actor.use_kl_loss`` is set.
        kl_coef: ``actor.kl_loss_coef``.
        **options: of the actor, by their names there: ``clip_ratio``, ``clip_ratio_low``, ``clip_ratio_high``,
            ``clip_ratio_c``, ``loss_scale_factor`` (unset: the width of the padded micro-batch, which pieces give),
            ``tau_pos``, ``tau_neg``, ``dro_beta``, ``kl_cov_ratio``, ``ppo_kl_coef``.
    """
    option = _set(options).get
    ratio_bound = option("clip_ratio", 0.2)
    low = option("clip_ratio_low", ratio_bound)
    high = option("clip_ratio_high", ratio_bound)
    clip = {"low": low, "high": high}
    dppo = clip | {"cap": option("clip_ratio_c", 20.0)}
    sapo = {name: option(name, value) for name, value in SAPO.items()}
    kl_cov = {"ratio": option("kl_cov_ratio", 2e-4), "coef": option("ppo_kl_coef", 1.0)}
    # bound: verl clamps log-ratios to 20 either way before exp().
    account, settings = {
        "vanilla": ("clip", clip | {"cap": option("clip_ratio_c", 3.0), "bound": 20}),
        "gspo": ("gspo", clip),
        "cispo": ("cispo", {"lowest": 1 - low, "highest": 1 + high, "bound": 20}),
        "sapo": ("sapo", sapo | {"bound": 20}),
        "gpg": ("reinforce", {}),
        "reinforce": ("reinforce", {}),
        "dppo_tv": ("dppo", dppo | {"divergence": "tv"}),
        "dppo_kl": ("dppo", dppo | {"divergence": "kl"}),
        "dro": ("dro", {"beta": option("dro_beta")}),
        "geo_mean": ("geo_mean", clip),
        "kl_cov": ("kl_cov", kl_cov),
    }.get(mode, (None, {}))
    mean = "seq-mean-token-mean" if mode in ("sapo", "geo_mean") else aggregation
    if kl and mean != aggregation:
        account = None  # there are two denominators in one gradient
    norm = option("loss_scale_factor")
    return Loss(mode, account, mean, norm=norm, options=settings, kl=kl, kl_coef=kl_coef)


def _set(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that have a value."""
    return {name: value for name, value in options.items() if value is not None}


OPEN = {
    "low": math.inf,
    "high": math.inf,
    "cap": None,
    "most": math.inf,
    "lowest": -math.inf,
    "highest": math.inf,
}
"""Bounds that take nothing."""
SAPO = {"tau_pos": 1.0, "tau_neg": 1.05}
VESPO = {"k_pos": 2.0, "k_neg": 3.0, "lambda_pos": 3.0, "lambda_neg": 2.0}
_TRL = {
    **dict.fromkeys(("grpo", "sapo"), ("seq-mean-token-mean", "micro-batch")),
    **dict.fromkeys(("dapo", "cispo", "vespo"), ("token-mean", "batch")),
    "bnpo": ("token-mean", "micro-batch"),
    "dr_grpo": ("seq-mean-token-sum-norm", "micro-batch"),
    "luspo": ("seq-mean-token-sum", "micro-batch"),
}


def trl_loss(loss_type: str, importance_sampling_level: str = "token", **options: Any) -> Loss:
    """The loss of TRL 1.16 of this ``loss_type``; of an unknown one the structure alone is checked.

    Args:
        loss_type: as in ``GRPOConfig``.
        importance_sampling_level: ``token`` or ``sequence``.
        **options: named as there: ``epsilon``, ``epsilon_high``, ``delta``, ``max_completion_length``, ``beta``,
            ``sapo_...``, ``vespo_...``, ``use_bias_correction_kl``, ``off_policy_mask_threshold``,
            ``top_entropy_quantile``.
    """
    option = _set(options).get
    low = option("epsilon", 0.2)
    high = option("epsilon_high", low)
    sapo = {name: option(f"sapo_temperature_{name[4:]}", value) for name, value in SAPO.items()}
    vespo = {name: option(f"vespo_{name}", value) for name, value in VESPO.items()}
    account, settings = {
        "cispo": ("cispo", {"lowest": -math.inf, "highest": high, "bound": 20}),
        "sapo": ("sapo", sapo),
        "vespo": ("vespo", vespo),
    }.get(loss_type, ("clip", {"low": low, "high": high, "most": option("delta", math.inf)}))
    settings["sequence"] = importance_sampling_level == "sequence"
    settings["corrected"] = option("use_bias_correction_kl", False)
    # Both take tokens by what no column of the batch holds.
    is_unusual = "off_policy_mask_threshold" in _set(options)
    is_unusual |= option("top_entropy_quantile", 1.0) < 1
    beta = option("beta", 0.0)
    aggregation, over = _TRL.get(loss_type, ("token-mean", "update"))
    return Loss(
        loss_type,
        None if is_unusual or loss_type not in _TRL else account,
        aggregation,
        over,
        option("max_completion_length"),
        settings,
        "k3 of trl" if beta else None,
        beta,
    )


@dataclass(frozen=True)
class Batch:
    """A rollout batch as the trainer intends it; all ranks' responses, in one order.

    A host that holds only part of an optimiser step's responses, or leaves some out of several steps, gives
    ``totals_U2``: the tokens and responses of each whole step, by which the loss divides. Else the batch is counted.
    """

    advantages_BT: Tensor  # token advantages, after weighting
    mask_BT: Tensor  # True where a token counts in the loss
    # As the loss gets them; None: its own ones, detached (ratio 1)
    old_log_probs_BT: Tensor | None = None
    # Importance weights that multiply each token's loss beside the ratio
    weights_BT: Tensor | None = None
    ref_log_probs_BT: Tensor | None = None  # the reference policy's, where the loss has a KL term
    # True for a response that is left out of the updates on purpose
    left_out_B: Tensor | None = None
    updates: int = 1  # optimiser steps of an epoch
    epochs: int = 1  # how often each response is used
    ranks: int = 1  # whose gradients are averaged: each one's g is divided by it
    # The first update trains the policy of the old log-probabilities: its ratio is 1
    on_policy: bool = True
    # Names of the responses in findings; their numbers from 0 without
    keys: list[str] | None = None
    totals_U2: Tensor | None = None


@dataclass(frozen=True)
class Tokens:
    """Tokens of a micro-batch as a formula sees them, all (b, T)."""

    advantages: Tensor
    weights: Tensor
    mask: Tensor
    log_probs: Tensor
    old: Tensor
    ref: Tensor | None = None

    @property
    def log_ratio(self) -> Tensor:
        return torch.where(self.mask, self.log_probs - self.old, 0.0)

    def of(self, rows: Tensor) -> Tokens:
        """The tokens of some responses."""
        columns = {name: values[rows] for name, values in vars(self).items() if values is not None}
        return Tokens(**columns)

    def row_sum(self, values: Tensor) -> Tensor:
        """Over each response's tokens, (b, 1)."""
        return torch.where(self.mask, values, 0.0).sum(dim=1, keepdim=True)

    def row_mean(self, values: Tensor) -> Tensor:
        """Likewise."""
        return self.row_sum(values) / self.mask.sum(dim=1, keepdim=True).clamp(min=1)


# Formulas: the loss of each token, before any mean.
Options = Mapping[str, Any]


def _ratio(t: Tokens, o: Options) -> Tensor:
    """To the old policy; of the whole response where ``sequence`` is set."""
    bound = o.get("bound", math.inf)
    log_ratio = t.log_ratio
    if o.get("sequence"):
        log_ratio = t.row_mean(log_ratio)
    return log_ratio.clamp(-bound, bound).exp()


def _clip(t: Tokens, o: Options, ratio: Tensor) -> Tensor:
    """PPO's, with the dual clip of arXiv:1912.09729 where there is a ``cap``, or TRL's bound of the ratio, ``most``."""
    unclipped = ratio.clamp(max=o.get("most", math.inf)) * t.advantages
    objective = torch.minimum(unclipped, ratio.clamp(1 - o["low"], 1 + o["high"]) * t.advantages)
    if o.get("cap") is not None:
        objective = torch.where(
            t.advantages < 0, torch.maximum(objective, o["cap"] * t.advantages), objective
        )
    return -objective * t.weights


def _gspo(t: Tokens, o: Options) -> Tensor:
    """arXiv:2507.18071, the token form: the response's ratio for the token's own advantage."""
    log_ratio = t.row_mean(t.log_ratio).detach() + t.log_probs - t.log_probs.detach()
    return _clip(t, o, log_ratio.clamp(max=10).exp())  # verl's clamp


def _cispo(t: Tokens, o: Options) -> Tensor:
    ratio = _ratio(t, o).clamp(o["lowest"], o["highest"]).detach()
    return -ratio * t.advantages * t.log_probs * t.weights


def _sapo(t: Tokens, o: Options) -> Tensor:
    """arXiv:2511.20347: a sigmoid gate of the ratio."""
    tau = torch.where(t.advantages > 0, o["tau_pos"], o["tau_neg"])
    return -torch.sigmoid(tau * (_ratio(t, o) - 1)) * 4 / tau * t.advantages * t.weights


def _dppo(t: Tokens, o: Options) -> Tensor:
    """arXiv:2602.04879: a token is left out whose probability moved too far, by total variation or binary KL."""
    log_new = t.log_probs.detach()
    new = log_new.exp()
    old = t.old.exp()
    moved = (new - old).abs()
    if o["divergence"] == "kl":
        moved_otherwise = ((1 - old + 1e-8) / (1 - new + 1e-8)).log()
        moved = old * (t.old - log_new) + (1 - old) * moved_otherwise
    too_high = (moved > o["high"]) & (new > old)
    too_low = (moved > o["low"]) & (new < old)
    left_out = torch.where(t.advantages > 0, too_high, too_low)
    # verl's clamps, of the log-ratio and then of the ratio.
    ratio = t.log_ratio.detach().clamp(-20, 20).exp().clamp(max=o["cap"])
    return -torch.where(left_out, 0.0, ratio * t.advantages * t.log_probs) * t.weights


def _dro(t: Tokens, o: Options) -> Tensor:
    moved = t.log_ratio
    return (o["beta"] / 2 * moved.square() - t.advantages * moved) * t.weights


def _geo_mean(t: Tokens, o: Options) -> Tensor:
    """arXiv:2507.20673: the geometric mean of clamped ratios, one advantage a response."""
    sign = t.advantages.sign()
    weight = t.row_mean((t.weights + 1e-10).log()).exp()
    clipped = t.log_ratio.clamp(-o["low"], o["high"])
    bounded = sign * torch.minimum(sign * t.log_ratio, sign * clipped)
    return -(t.row_mean(t.advantages) * weight * t.row_mean(bounded).exp()).expand_as(sign)


def _vespo(t: Tokens, o: Options) -> Tensor:
    """TRL: a gamma weight of the response's whole ratio, importance weights included."""
    least = math.log(1e-8)
    log_ratio = t.log_ratio.detach()
    moved = t.row_sum(log_ratio.clamp(-20, 20)) + t.row_sum(t.weights.log().clamp(least, 20))
    moved = moved.clamp(least, 20)
    is_correct = t.advantages >= 0
    k = torch.where(is_correct, o["k_pos"], o["k_neg"])
    rate = torch.where(is_correct, o["lambda_pos"], o["lambda_neg"])
    return -(rate + k * moved - rate * moved.exp()).exp() * t.advantages * t.log_probs


def _kl_cov(t: Tokens, o: Options) -> Tensor:
    """arXiv:2505.22617: an absolute log-ratio is added for the tokens of the largest covariance in the micro-batch."""
    advantages = t.advantages[t.mask].float()
    log_probs = t.log_probs.detach()[t.mask].float()
    covariance = (advantages - advantages.mean()) * (log_probs - log_probs.mean())
    penalty = torch.zeros_like(t.advantages)
    largest = covariance.topk(max(1, int(len(covariance) * o["ratio"])))
    penalty[t.mask.nonzero()[largest.indices].unbind(1)] = o["coef"]
    return -(t.advantages * t.log_ratio.exp() - penalty * t.log_ratio.abs()) * t.weights


FORMULAS: Mapping[str, Callable[[Tokens, Options], Tensor]] = {
    "clip": lambda t, o: _clip(t, o, _ratio(t, o)),
    "gspo": _gspo,
    "cispo": _cispo,
    "sapo": _sapo,
    "reinforce": lambda t, o: -t.advantages * t.log_probs * t.weights,
    "dppo": _dppo,
    "dro": _dro,
    "geo_mean": _geo_mean,
    "vespo": _vespo,
    "kl_cov": _kl_cov,
}


def _kl_term(loss: Loss, t: Tokens) -> Tensor:
    """Of each token; http://joschu.net/blog/kl-approx.html names the estimators."""
    assert loss.kl and t.ref is not None
    moved = t.log_probs - t.ref
    if loss.kl == "k3 of trl":
        term = (-moved).exp() + moved - 1
        if loss.options.get("corrected"):
            term = term * _ratio(t, loss.options)
        return term
    # With a + the value is that of another estimator, and the gradient that of k2.
    if loss.kl in ("k2", "mse") or loss.kl.endswith("+"):
        return moved.square() / 2
    if loss.kl == "abs":
        return moved.abs()
    if loss.kl in ("k1", "kl"):
        return moved
    # verl clamps both, so that no gradient comes from beyond.
    bounded = (-moved).clamp(-20, 20)
    return (bounded.exp() - bounded - 1).clamp(-10, 10)


def opened(loss: Loss) -> Loss:
    """The loss without a clip or clamp of the ratio."""
    if loss.account == "dppo":
        return loss
    return replace(loss, options={**loss.options, **OPEN})


def expect(loss: Loss, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The effective advantage that a known loss gives, KL term included, and where it clips; (b, T)."""

    def losses(loss: Loss, t: Tokens) -> Tensor:
        if callable(loss.account):
            return loss.account(t)
        return FORMULAS[str(loss.account)](t, loss.options)

    def descent(values: Tensor) -> Tensor:
        # 0 times: a loss that reads no log-probability has no graph.
        total = torch.where(t.mask, values + 0 * t.log_probs, 0.0).sum()
        (slope,) = torch.autograd.grad(total, t.log_probs)
        return torch.where(t.mask, -slope, 0.0)

    with torch.enable_grad():
        t = replace(tokens, log_probs=tokens.log_probs.detach().requires_grad_())
        losses_bT = losses(loss, t)
        value = descent(losses_bT)
        term = descent(loss.kl_coef * _kl_term(loss, t)) if loss.kl else 0.0
    clipped = (value == 0) & (tokens.advantages * tokens.weights != 0)
    # By a whole response's ratio, and by a clamp, a clipped token trains too.
    if loss.account in ("clip", "cispo"):
        clipped |= losses_bT.detach() != losses(opened(loss), tokens)
    return value + term, clipped & tokens.mask


def denominators(loss: Loss, batch: Batch, pieces: Sequence[Piece]) -> list[Tensor]:
    """D of each piece's responses, (b, 1) float64: the divisor of a token's loss, means over ranks included."""
    lengths_B = batch.mask_BT.sum(dim=1).double()
    result = []
    for piece in pieces:
        same_step = [second for second in pieces if second.update == piece.update]
        same_rank = [second for second in same_step if second.rank == piece.rank]
        rows = torch.arange(len(lengths_B))
        means = 1  # so many means are averaged
        # Example: two ranks of two micro-batches each, over="micro-batch": D is 4 times a micro-batch's own tokens.
        if loss.over == "micro-batch":
            rows = piece.rows_b
            means = batch.ranks * len(same_rank)
        elif loss.over == "rank":
            rows = torch.cat([second.rows_b for second in same_rank])
            means = batch.ranks
        elif loss.over == "update" and batch.updates > 1:
            rows = torch.cat([second.rows_b for second in same_step]).unique()
        tokens = float(lengths_B[rows].sum())
        responses = float(len(rows))
        if loss.over == "update" and batch.totals_U2 is not None:
            tokens, responses = batch.totals_U2[piece.update].tolist()
        if loss.over == "batch":
            tokens /= batch.updates
            responses /= batch.updates
        responses = max(1.0, responses)
        lengths_b1 = lengths_B[piece.rows_b, None].clamp(min=1)
        divisor: Any = {
            "token-mean": max(1.0, tokens),
            "token-sum": 1.0,
            "seq-mean-token-sum": responses,
            "seq-mean-token-mean": responses * lengths_b1,
            "seq-mean-token-sum-norm": responses
            * float(loss.norm or piece.width or batch.mask_BT.shape[1]),
        }[loss.aggregation]
        result.append(means * divisor * torch.ones_like(lengths_b1))
    return result
