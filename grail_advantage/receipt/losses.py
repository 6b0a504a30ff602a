"""Losses by formula: the effective advantage that a token should receive, and the denominator that its aggregation says.

Shape suffixes: B responses of the rollout batch, b of a micro-batch, T response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .measure import Piece

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
OVER = ("update", "micro-batch", "rank", "batch")
_VERLS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")
KL = (*_VERLS, *(f"{name}+" for name in _VERLS), "k3 of trl")


@dataclass(frozen=True)
class Loss:
    """A loss as its settings say. Made by :func:`verl_loss` or :func:`trl_loss`, or by hand for a loop of one's own."""

    name: str
    """For reports, such as ``vanilla`` or ``dapo``."""
    account: str | Callable[[Tokens], torch.Tensor] | None = "clip"
    """The formula: a key of ``ACCOUNTS``; a function from :class:`Tokens` to the loss of each token, (b, T) before any mean, of
    which the derivative is taken; ``None`` for an unknown loss, of which the structure alone is checked."""
    aggregation: str = "token-mean"
    """``token-mean``, ``token-sum``, ``seq-mean-token-sum``, ``seq-mean-token-mean`` or ``seq-mean-token-sum-norm``."""
    over: str = "update"
    """What the mean is over: ``update``, all responses of an optimiser step; ``micro-batch``, the mean over micro-batches of
    each one's mean (a property that TRL's ``grpo`` or ``bnpo`` declare); ``batch``, the rollout batch's mean over its
    updates (TRL's ``dapo``)."""
    norm: float | None = None
    """The constant of ``seq-mean-token-sum-norm``: tokens."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the formula: ``low``, ``high``, ``cap`` (the dual clip's), ..."""
    kl: str | None = None
    """The estimator of a KL term in the loss: ``k1``, ``k2`` or ``k3``, also with verl's ``+``; ``None`` without one."""
    kl_coef: float = 0.0


def verl_loss(
    mode: str,
    aggregation: str,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float | None = None,
    loss_scale_factor: float | None = None,
    kl: str | None = None,
    kl_coef: float = 0.0,
    **options: Any,
) -> Loss:
    """The loss of verl 0.9.1 of the name ``actor.policy_loss.loss_mode``.

    Args:
        mode: ``loss_mode``; one that is not known here gives a loss of which the structure alone is checked.
        aggregation: ``actor.loss_agg_mode``.
        clip_ratio: ``actor.clip_ratio``; the other names are those of the actor's options too.
        clip_ratio_low: likewise.
        clip_ratio_high: likewise.
        clip_ratio_c: likewise.
        loss_scale_factor: likewise; where it is unset, the width of the padded micro-batch, which pieces give.
        kl: ``actor.kl_loss_type`` where ``actor.use_kl_loss`` is set.
        kl_coef: ``actor.kl_loss_coef``.
        **options: ``tau_pos``, ``tau_neg`` (sapo), ``dro_beta``, ``kl_cov_ratio``, ``ppo_kl_coef``.
    """
    low = clip_ratio if clip_ratio_low is None else clip_ratio_low
    high = clip_ratio if clip_ratio_high is None else clip_ratio_high
    clip = {"low": low, "high": high}
    dppo = clip | {"cap": 20.0 if clip_ratio_c is None else clip_ratio_c}
    account, settings = {
        "vanilla": ("clip", clip | {"cap": 3.0 if clip_ratio_c is None else clip_ratio_c, "bound": 20}),
        "gspo": ("gspo", clip),
        "cispo": ("cispo", {"lowest": 1 - low, "highest": 1 + high}),
        "sapo": ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05, "bound": 20} | options),
        "gpg": ("reinforce", {}),
        "reinforce": ("reinforce", {}),
        "dppo_tv": ("dppo", dppo | {"divergence": "tv"}),
        "dppo_kl": ("dppo", dppo | {"divergence": "kl"}),
        "dro": ("dro", {"beta": options.get("dro_beta")}),
        "geo_mean": ("geo_mean", clip),
        "kl_cov": ("kl_cov", {"ratio": options.get("kl_cov_ratio", 2e-4), "coef": options.get("ppo_kl_coef", 1.0)}),
    }.get(mode, (None, {}))
    own = "seq-mean-token-mean" if mode in ("sapo", "geo_mean") else aggregation
    known = not kl or own == aggregation  # otherwise there are two denominators in one gradient
    return Loss(mode, account if known else None, own, norm=loss_scale_factor, options=settings, kl=kl, kl_coef=kl_coef)


def trl_loss(loss_type: str, importance_sampling_level: str = "token", **options: Any) -> Loss:
    """The loss of TRL 1.16 of this ``loss_type``.

    Args:
        loss_type: as in ``GRPOConfig``; an unknown one gives a loss of which the structure alone is checked.
        importance_sampling_level: ``token`` or ``sequence``.
        **options: ``epsilon``, ``epsilon_high``, ``delta``, ``max_completion_length``, ``beta``, ``sapo_temperature_pos``,
            ``sapo_temperature_neg``, named as in ``GRPOConfig``.
    """
    sequence, low = importance_sampling_level == "sequence", options.get("epsilon", 0.2)
    high = low if options.get("epsilon_high") is None else options["epsilon_high"]
    delta = options.get("delta")
    clip = {"low": low, "high": high if delta is None else min(high, delta - 1), "cap": delta}
    sapo = {"tau_pos": options.get("sapo_temperature_pos", 1.0), "tau_neg": options.get("sapo_temperature_neg", 1.05)}
    vespo = {f"{k}_{sign}": options.get(f"vespo_{k}_{sign}", VESPO[k, sign]) for k, sign in VESPO}
    account, settings = {
        "cispo": ("cispo", {"lowest": -math.inf, "highest": high}),
        "sapo": ("sapo", sapo),
        "vespo": ("vespo", vespo),
    }.get(loss_type, ("clip_sequence" if sequence else "clip", clip))
    means: dict[str, tuple[str | None, str]] = {
        "grpo": ("seq-mean-token-mean", "micro-batch"),
        "sapo": ("seq-mean-token-mean", "micro-batch"),
        "bnpo": ("token-mean", "micro-batch"),
        "dr_grpo": ("seq-mean-token-sum-norm", "micro-batch"),
        "luspo": ("seq-mean-token-sum", "micro-batch"),
        "dapo": ("token-mean", "batch"),
        "cispo": ("token-mean", "batch"),
        "vespo": ("token-mean", "batch"),
    }
    aggregation, over = means.get(loss_type, (None, "update"))
    beta, norm = options.get("beta", 0.0), options.get("max_completion_length")
    unusual = options.get("off_policy_mask_threshold") is not None or options.get("top_entropy_quantile", 1.0) < 1
    known = aggregation is not None and not unusual
    kl = "k3 of trl" if beta else None
    settings = settings | {"sequence": sequence, "corrected": options.get("use_bias_correction_kl", False)}
    return Loss(loss_type, account if known else None, aggregation or "token-mean", over, norm, settings, kl, beta)


VESPO = {("k", "pos"): 2.0, ("k", "neg"): 3.0, ("lambda", "pos"): 3.0, ("lambda", "neg"): 2.0}


@dataclass(frozen=True)
class Layout:
    """For hosts that hold only part of an optimiser step's responses, or leave some out of several steps."""

    update_of_B: torch.Tensor | None = None
    """(B,) or (epochs, B) the update of an epoch, from 0, that a left-out response would be in."""
    totals_U2: torch.Tensor | None = None
    """(U, 2): the loss's denominators of each optimiser step, tokens and responses. Give them if the batch holds only part of
    each step; without them the batch and its ``left_out_B`` are counted."""


@dataclass(frozen=True)
class Batch:
    """A rollout batch as the trainer intends it; all ranks' responses, in one order."""

    advantages_BT: torch.Tensor
    """Token advantages, after weighting."""
    mask_BT: torch.Tensor
    """True where a token counts in the loss."""
    old_log_probs_BT: torch.Tensor | None = None
    """As the loss gets them; ``None``: the loss takes the detached log-probabilities themselves (ratio 1)."""
    weights_BT: torch.Tensor | None = None
    """What multiplies each token's loss beside the ratio (verl's ``rollout_is_weights``, TRL's
    ``importance_sampling_ratio``)."""
    ref_log_probs_BT: torch.Tensor | None = None
    """The reference policy's, where the loss has a KL term."""
    left_out_B: torch.Tensor | None = None
    """True for a response that is left out of the updates on purpose; it still counts in the denominators."""
    updates: int = 1
    """Optimiser steps of an epoch."""
    epochs: int = 1
    """How often each response is used."""
    ranks: int = 1
    """Ranks whose gradients are averaged: each one's g is divided by it."""
    on_policy: bool = True
    """The old log-probabilities are those of the policy that the first update trains, so the first ratio is 1."""
    keys: list[str] | None = None
    """Names of the responses in findings; their numbers from 0 without."""
    layout: Layout = Layout()


@dataclass(frozen=True)
class Tokens:
    """Tokens of a micro-batch as a formula sees them, all (b, T)."""

    advantages: torch.Tensor
    weights: torch.Tensor
    mask: torch.Tensor
    log_probs: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor | None = None

    @property
    def log_ratio(self) -> torch.Tensor:
        return torch.where(self.mask, self.log_probs - self.old, 0.0)

    def of(self, rows: torch.Tensor) -> Tokens:
        """The tokens of some responses."""
        return Tokens(*(None if each is None else each[rows] for each in vars(self).values()))

    def row_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over each response's tokens, (b, 1)."""
        kept = torch.where(self.mask, values, 0.0)
        return kept.sum(dim=1, keepdim=True) / self.mask.sum(dim=1, keepdim=True).clamp(min=1)


Account = tuple[torch.Tensor, torch.Tensor]
"""The effective advantage, and where the loss clips, (b, T) both."""


def _clipped(advantages: torch.Tensor, ratio: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """Where PPO's clip takes the gradient, with the dual clip of arXiv:1912.09729 where there is a ``cap``."""
    above = (advantages > 0) & (ratio > 1 + options["high"])
    below = (advantages < 0) & (ratio < 1 - options["low"])
    return above | below | ((advantages < 0) & (ratio > (options.get("cap") or torch.inf)))


def _clip(tokens: Tokens, options: Mapping[str, Any]) -> Account:
    log_ratio, bound = tokens.log_ratio, options.get("bound", torch.inf)
    ratio = log_ratio.clamp(-bound, bound).exp()
    clipped = _clipped(tokens.advantages, ratio, options) | (log_ratio.abs() > bound)
    return torch.where(clipped, 0.0, tokens.advantages * tokens.weights * ratio), clipped


def _clip_sequence(tokens: Tokens, options: Mapping[str, Any]) -> Account:
    """TRL: one ratio a response, whose gradient each token gets alike."""
    ratio = tokens.row_mean(tokens.log_ratio).exp()
    clipped = _clipped(tokens.advantages, ratio, options)
    passed = torch.where(clipped, 0.0, tokens.advantages * tokens.weights)
    return (ratio * tokens.row_mean(passed)).expand_as(passed), clipped


def _gspo(tokens: Tokens, options: Mapping[str, Any]) -> Account:
    """arXiv:2507.18071, the token form: the response's ratio for the token's own advantage."""
    log_ratio = tokens.row_mean(tokens.log_ratio)
    clipped = _clipped(tokens.advantages, log_ratio.clamp(max=10).exp(), options) | (log_ratio > 10)
    return torch.where(clipped, 0.0, tokens.advantages * tokens.weights * log_ratio.exp()), clipped


def _cispo(tokens: Tokens, options: Mapping[str, Any]) -> Account:
    """arXiv:2506.13585: the ratio is clamped and no gradient goes through it, so a clipped token trains too."""
    log_ratio = tokens.row_mean(tokens.log_ratio) if options.get("sequence") else tokens.log_ratio
    ratio = log_ratio.clamp(-20, 20).exp()
    clamped = ratio.clamp(options["lowest"], options["highest"])
    return tokens.advantages * tokens.weights * clamped, (ratio != clamped).expand_as(tokens.mask)


def _sapo(tokens: Tokens, options: Mapping[str, Any]) -> Account:
    """arXiv:2511.20347: a sigmoid gate of the ratio."""
    log_ratio = tokens.row_mean(tokens.log_ratio) if options.get("sequence") else tokens.log_ratio
    ratio = log_ratio.exp()
    tau = torch.where(tokens.advantages > 0, options["tau_pos"], options["tau_neg"]).to(ratio.dtype)
    gate = torch.sigmoid(tau * (ratio - 1))
    value = tokens.advantages * tokens.weights * 4 * gate * (1 - gate) * ratio
    value = torch.where(log_ratio.abs() > options.get("bound", torch.inf), 0.0, value)
    return tokens.row_mean(value).expand_as(value) if options.get("sequence") else value, torch.zeros_like(tokens.mask)


def _reinforce(tokens: Tokens, options: Mapping[str, Any]) -> Account:
    return tokens.advantages * tokens.weights, torch.zeros_like(tokens.mask)


def _dppo(tokens: Tokens, options: Mapping[str, Any]) -> Account:
    """arXiv:2602.04879: a token is left out whose probability moved too far, by total variation or binary KL."""
    new, old = tokens.log_probs.exp(), tokens.old.exp()
    if options["divergence"] == "tv":
        risen, fallen = new - old > options["high"], new - old < -options["low"]
    else:
        binary = old * (tokens.old - tokens.log_probs) + (1 - old) * ((1 - old + 1e-8) / (1 - new + 1e-8)).log()
        risen, fallen = (binary > options["high"]) & (new > old), (binary > options["low"]) & (new < old)
    clipped = torch.where(tokens.advantages > 0, risen, fallen)
    ratio = tokens.log_ratio.clamp(-20, 20).exp().clamp(max=options["cap"])
    return torch.where(clipped, 0.0, tokens.advantages * tokens.weights * ratio), clipped


def _dro(tokens: Tokens, options: Mapping[str, Any]) -> Account:
    value = (tokens.advantages - options["beta"] * tokens.log_ratio) * tokens.weights
    return value, torch.zeros_like(tokens.mask)


def _geo_mean(tokens: Tokens, options: Mapping[str, Any]) -> Account:
    """arXiv:2507.20673: the geometric mean of clamped ratios, one advantage a response."""
    log_ratio, sign = tokens.log_ratio, tokens.advantages.sign()
    clamped = log_ratio.clamp(-options["low"], options["high"])
    clipped = sign * clamped < sign * log_ratio
    ratio = tokens.row_mean(torch.where(clipped, clamped, log_ratio) * sign.abs()).exp()
    weight = tokens.row_mean((tokens.weights + 1e-10).log()).exp()
    value = tokens.row_mean(tokens.advantages) * weight * ratio
    return torch.where(clipped | (sign == 0), 0.0, value.expand_as(sign)), clipped


def _vespo(tokens: Tokens, options: Mapping[str, Any]) -> Account:
    """TRL: a gamma weight of the response's whole ratio, importance weights included."""
    log_ratio = torch.where(tokens.mask, tokens.log_ratio.clamp(-20, 20), 0.0).sum(dim=1, keepdim=True)
    least = math.log(1e-8)
    weight = torch.where(tokens.mask, tokens.weights.log().clamp(least, 20), 0.0).sum(dim=1, keepdim=True)
    log_weight, up = (log_ratio + weight).clamp(least, 20), tokens.advantages >= 0
    k = torch.where(up, options["k_pos"], options["k_neg"])
    rate = torch.where(up, options["lambda_pos"], options["lambda_neg"])
    phi = (rate + k * log_weight - rate * log_weight.exp()).exp()
    return tokens.advantages * phi, torch.zeros_like(tokens.mask)


def _kl_cov(tokens: Tokens, options: Mapping[str, Any]) -> Account:
    """arXiv:2505.22617: an absolute log-ratio is added for the tokens of the largest covariance in the micro-batch."""
    kept, value = tokens.mask, tokens.advantages * tokens.weights * tokens.log_ratio.exp()
    advantages, log_probs = tokens.advantages[kept].float(), tokens.log_probs[kept].float()
    covariance = (advantages - advantages.mean()) * (log_probs - log_probs.mean())
    chosen = torch.zeros_like(covariance, dtype=torch.bool)
    chosen[covariance.topk(max(1, int(len(covariance) * options["ratio"]))).indices] = True
    penalty = torch.zeros_like(value).masked_scatter(kept, torch.where(chosen, options["coef"], 0.0).to(value.dtype))
    return value - penalty * tokens.weights * tokens.log_ratio.sign(), torch.zeros_like(kept)


ACCOUNTS: Mapping[str, Callable[[Tokens, Mapping[str, Any]], Account]] = {
    "clip": _clip,
    "clip_sequence": _clip_sequence,
    "gspo": _gspo,
    "cispo": _cispo,
    "sapo": _sapo,
    "reinforce": _reinforce,
    "dppo": _dppo,
    "dro": _dro,
    "geo_mean": _geo_mean,
    "vespo": _vespo,
    "kl_cov": _kl_cov,
}


def expect(loss: Loss, tokens: Tokens) -> Account:
    """The effective advantage that a known loss gives, KL term included, and where it clips; 0 outside the mask."""
    assert loss.account is not None
    if callable(loss.account):
        value, clipped = _derivative(loss.account, tokens)
    else:
        value, clipped = ACCOUNTS[loss.account](tokens, loss.options)
    if loss.kl and tokens.ref is not None:
        value = value - loss.kl_coef * kl_slope(loss, tokens)
    return torch.where(tokens.mask, value, 0.0), clipped & tokens.mask


def _derivative(account: Callable[[Tokens], torch.Tensor], tokens: Tokens) -> Account:
    """Of a loss by token, on columns without a history."""
    with torch.enable_grad():
        log_probs = tokens.log_probs.detach().requires_grad_()
        total = torch.where(tokens.mask, account(replace(tokens, log_probs=log_probs)), 0.0).sum()
        (gradient,) = torch.autograd.grad(total, log_probs, allow_unused=True) if total.requires_grad else (None,)
    value = torch.zeros_like(tokens.log_probs) if gradient is None else -gradient
    return value, (value == 0) & (tokens.advantages != 0)


def kl_slope(loss: Loss, tokens: Tokens) -> torch.Tensor:
    """The derivative of the KL term; http://joschu.net/blog/kl-approx.html names the estimators."""
    assert loss.kl is not None and tokens.ref is not None
    difference = tokens.log_probs - tokens.ref
    k3, slope = (-difference).exp() + difference - 1, 1 - (-difference).exp()
    if loss.kl == "k3 of trl":
        if not loss.options.get("corrected"):
            return slope
        if not loss.options.get("sequence"):  # the term is multiplied by the ratio, which has a gradient too
            return (slope + k3) * tokens.log_ratio.exp()
        return (slope + tokens.row_mean(k3)) * tokens.row_mean(tokens.log_ratio).exp()
    if loss.kl in ("k2", "mse") or loss.kl.endswith("+"):
        return difference
    if loss.kl in ("k1", "kl"):
        return torch.ones_like(difference)
    if loss.kl == "abs":
        return difference.sign()
    return torch.where((difference.abs() > 20) | (k3 > 10), 0.0, slope)


def denominators(
    loss: Loss,
    batch: Batch,
    pieces: Sequence[Piece],
    counted_BT: torch.Tensor | None = None,
    rows_U: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """D of each piece's responses, (b, 1) float64: the divisor of a token's loss, means over ranks included.

    Args:
        loss: gives the aggregation.
        batch: intended.
        pieces: of all ranks.
        counted_BT: tokens that are counted instead of the mask's; responses without one are not.
        rows_U: responses that each optimiser step counts, instead of those that the batch says.
    """
    lengths_B = (batch.mask_BT if counted_BT is None else counted_BT).sum(dim=1).double()
    there_B = torch.ones_like(lengths_B) if counted_BT is None else (lengths_B > 0).double()
    result = []
    for piece in pieces:
        rows_b, together = piece.rows_b, [other for other in pieces if other.update == piece.update]
        times = 1.0
        if loss.over == "micro-batch":
            count_B, times = rows_b, batch.ranks * sum(other.rank == piece.rank for other in together)
        elif loss.over == "rank":
            count_B, times = torch.cat([other.rows_b for other in together if other.rank == piece.rank]), batch.ranks
        else:
            count_B = _rows_of_update(batch, piece.update, together) if rows_U is None else rows_U[piece.update]
        tokens, responses = lengths_B[count_B].sum(), there_B[count_B].sum()
        if loss.over == "update" and batch.layout.totals_U2 is not None:
            total, of_responses = batch.layout.totals_U2[piece.update].double().unbind()
            tokens = tokens - batch.mask_BT.sum(dim=1)[count_B].sum() + total
            responses = responses - len(count_B) + of_responses
        if loss.over == "batch":
            tokens, responses = lengths_B.sum() / batch.updates, there_B.sum() / batch.updates
        own_b, width = lengths_B[rows_b].clamp(min=1), loss.norm or piece.width or batch.mask_BT.shape[1]
        ones_b, responses = torch.ones_like(own_b), responses.clamp(min=1)
        each_b = {
            "token-mean": tokens.clamp(min=1) * ones_b,
            "token-sum": ones_b,
            "seq-mean-token-sum": ones_b * responses,
            "seq-mean-token-mean": responses * own_b,
            "seq-mean-token-sum-norm": ones_b * responses * width,
        }[loss.aggregation]
        result.append((times * each_b).unsqueeze(1))
    return result


def _rows_of_update(batch: Batch, update: int, pieces: Sequence[Piece]) -> torch.Tensor:
    """The responses that an update is over, those left out included."""
    if batch.updates == 1:
        return torch.arange(len(batch.mask_BT))
    rows, plan_B = torch.cat([piece.rows_b for piece in pieces]), batch.layout.update_of_B
    if batch.left_out_B is not None and plan_B is not None:
        plan_B = plan_B if plan_B.ndim == 1 else plan_B[update // batch.updates]
        rows = torch.cat([rows, (batch.left_out_B & (plan_B == update % batch.updates)).nonzero().squeeze(1)])
    return rows.unique()
