"""Losses by formula: the loss of each token before any mean, which is differentiated, and the divisor of the mean.

Shape suffixes: B responses of the rollout batch, b of a micro-batch, T response tokens, U steps of all epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

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
    account: str | Callable[[Tokens], torch.Tensor] | None = "clip"
    aggregation: str = "token-mean"  # one of AGGREGATIONS
    over: str = "update"  # one of OVER
    norm: float | None = None  # the constant of seq-mean-token-sum-norm: tokens
    # Of the formula: low, high, cap (the dual clip's), ...
    options: Mapping[str, Any] = field(default_factory=dict)
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
    settings_given = {name: value for name, value in options.items() if value is not None}
    low, high = (
        settings_given.get(f"clip_ratio_{side}", settings_given.get("clip_ratio", 0.2))
        for side in ("low", "high")
    )
    clip = {"low": low, "high": high}
    dppo = clip | {"cap": settings_given.get("clip_ratio_c", 20.0)}
    # bound: verl clamps log-ratios to 20 either way before exp().
    account, settings = {
        "vanilla": ("clip", clip | {"cap": settings_given.get("clip_ratio_c", 3.0), "bound": 20}),
        "gspo": ("gspo", clip),
        "cispo": ("cispo", {"lowest": 1 - low, "highest": 1 + high, "bound": 20}),
        "sapo": (
            "sapo",
            {name: settings_given.get(name, value) for name, value in SAPO.items()} | {"bound": 20},
        ),
        "gpg": ("reinforce", {}),
        "reinforce": ("reinforce", {}),
        "dppo_tv": ("dppo", dppo | {"divergence": "tv"}),
        "dppo_kl": ("dppo", dppo | {"divergence": "kl"}),
        "dro": ("dro", {"beta": settings_given.get("dro_beta")}),
        "geo_mean": ("geo_mean", clip),
        "kl_cov": (
            "kl_cov",
            {
                "ratio": settings_given.get("kl_cov_ratio", 2e-4),
                "coef": settings_given.get("ppo_kl_coef", 1.0),
            },
        ),
    }.get(mode, (None, {}))
    mean = "seq-mean-token-mean" if mode in ("sapo", "geo_mean") else aggregation
    one_mean = not kl or mean == aggregation  # otherwise there are two denominators in one gradient
    norm = settings_given.get("loss_scale_factor")
    return Loss(
        mode,
        account if one_mean else None,
        mean,
        norm=norm,
        options=settings,
        kl=kl,
        kl_coef=kl_coef,
    )


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
    low = options.get("epsilon", 0.2)
    ratio_bound = options.get("delta")
    if ratio_bound is None:
        ratio_bound = math.inf
    high = options.get("epsilon_high")
    if high is None:
        high = low
    account, settings = {
        "cispo": ("cispo", {"lowest": -math.inf, "highest": high, "bound": 20}),
        "sapo": (
            "sapo",
            {k: options.get(f"sapo_temperature_{k[4:]}", value) for k, value in SAPO.items()},
        ),
        "vespo": ("vespo", {k: options.get(f"vespo_{k}", value) for k, value in VESPO.items()}),
    }.get(loss_type, ("clip", {"low": low, "high": high, "most": ratio_bound}))
    aggregation, over = _TRL.get(loss_type, ("token-mean", "update"))
    # Both take tokens by what no column of the batch holds.
    unusual = (
        options.get("off_policy_mask_threshold") is not None
        or options.get("top_entropy_quantile", 1.0) < 1
    )
    beta = options.get("beta", 0.0)
    corrected = options.get("use_bias_correction_kl", False)
    settings["sequence"] = importance_sampling_level == "sequence"
    settings["corrected"] = corrected
    formula = account if loss_type in _TRL and not unusual else None
    norm = options.get("max_completion_length")
    return Loss(
        loss_type, formula, aggregation, over, norm, settings, "k3 of trl" if beta else None, beta
    )


@dataclass(frozen=True)
class Batch:
    """A rollout batch as the trainer intends it; all ranks' responses, in one order.

    A host that holds only part of an optimiser step's responses, or leaves some out of several steps, gives
    ``totals_U2``: the tokens and responses of each whole step, by which the loss divides. Else the batch is counted.
    """

    advantages_BT: torch.Tensor  # token advantages, after weighting
    mask_BT: torch.Tensor  # True where a token counts in the loss
    # As the loss gets them; None: its own ones, detached (ratio 1)
    old_log_probs_BT: torch.Tensor | None = None
    # Importance weights that multiply each token's loss beside the ratio
    weights_BT: torch.Tensor | None = None
    # The reference policy's, where the loss has a KL term
    ref_log_probs_BT: torch.Tensor | None = None
    # True for a response that is left out of the updates on purpose
    left_out_B: torch.Tensor | None = None
    updates: int = 1  # optimiser steps of an epoch
    epochs: int = 1  # how often each response is used
    ranks: int = 1  # whose gradients are averaged: each one's g is divided by it
    # The first update trains the policy of the old log-probabilities: its ratio is 1
    on_policy: bool = True
    # Names of the responses in findings; their numbers from 0 without
    keys: list[str] | None = None
    totals_U2: torch.Tensor | None = None


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
        columns: dict[str, Any] = {
            name: None if values is None else values[rows] for name, values in vars(self).items()
        }
        return Tokens(**columns)

    def row_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Over each response's tokens, (b, 1)."""
        return torch.where(self.mask, values, 0.0).sum(dim=1, keepdim=True)

    def row_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Likewise."""
        return self.row_sum(values) / self.mask.sum(dim=1, keepdim=True).clamp(min=1)


# Formulas: the loss of each token, before any mean.


def _ratio(t: Tokens, o: Mapping[str, Any]) -> torch.Tensor:
    """To the old policy; of the whole response where ``sequence`` is set."""
    bound = o.get("bound", math.inf)
    log_ratio = t.log_ratio
    if o.get("sequence"):
        log_ratio = t.row_mean(log_ratio)
    return log_ratio.clamp(-bound, bound).exp()


def _clip(t: Tokens, o: Mapping[str, Any], ratio: torch.Tensor) -> torch.Tensor:
    """PPO's, with the dual clip of arXiv:1912.09729 where there is a ``cap``, or TRL's bound of the ratio, ``most``."""
    unclipped = ratio.clamp(max=o.get("most", math.inf)) * t.advantages
    objective = torch.minimum(unclipped, ratio.clamp(1 - o["low"], 1 + o["high"]) * t.advantages)
    if o.get("cap") is not None:
        objective = torch.where(
            t.advantages < 0, torch.maximum(objective, o["cap"] * t.advantages), objective
        )
    return -objective * t.weights


def _sapo(t: Tokens, ratio: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
    """arXiv:2511.20347: a sigmoid gate of the ratio."""
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * t.advantages * t.weights


def _dppo(t: Tokens, o: Mapping[str, Any]) -> torch.Tensor:
    """arXiv:2602.04879: a token is left out whose probability moved too far, by total variation or binary KL."""
    log_new = t.log_probs.detach()
    new = t.log_probs.detach().exp()
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


def _geo_mean(t: Tokens, o: Mapping[str, Any]) -> torch.Tensor:
    """arXiv:2507.20673: the geometric mean of clamped ratios, one advantage a response."""
    sign = t.advantages.sign()
    weight = t.row_mean((t.weights + 1e-10).log()).exp()
    clipped = t.log_ratio.clamp(-o["low"], o["high"])
    bounded = sign * torch.minimum(sign * t.log_ratio, sign * clipped)
    return -(t.row_mean(t.advantages) * weight * t.row_mean(bounded).exp()).expand_as(sign)


def _vespo(t: Tokens, o: Mapping[str, Any]) -> torch.Tensor:
    """TRL: a gamma weight of the response's whole ratio, importance weights included."""
    least = math.log(1e-8)
    log_ratio = t.log_ratio.detach()
    moved = t.row_sum(log_ratio.clamp(-20, 20)) + t.row_sum(t.weights.log().clamp(least, 20))
    moved = moved.clamp(least, 20)
    is_correct = t.advantages >= 0
    k = torch.where(is_correct, o["k_pos"], o["k_neg"])
    rate = torch.where(is_correct, o["lambda_pos"], o["lambda_neg"])
    return -(rate + k * moved - rate * moved.exp()).exp() * t.advantages * t.log_probs


def _kl_cov(t: Tokens, o: Mapping[str, Any]) -> torch.Tensor:
    """arXiv:2505.22617: an absolute log-ratio is added for the tokens of the largest covariance in the micro-batch."""
    advantages = t.advantages[t.mask].float()
    log_probs = t.log_probs.detach()[t.mask].float()
    covariance = (advantages - advantages.mean()) * (log_probs - log_probs.mean())
    penalty = torch.zeros_like(t.advantages)
    largest = covariance.topk(max(1, int(len(covariance) * o["ratio"])))
    penalty[t.mask.nonzero()[largest.indices].unbind(1)] = o["coef"]
    return -(t.advantages * t.log_ratio.exp() - penalty * t.log_ratio.abs()) * t.weights


FORMULAS: Mapping[str, Callable[[Tokens, Mapping[str, Any]], torch.Tensor]] = {
    "clip": lambda t, o: _clip(t, o, _ratio(t, o)),
    # arXiv:2507.18071, the token form: the response's ratio for the token's own advantage
    # verl clamps the log-ratio at 10
    "gspo": lambda t, o: _clip(
        t,
        o,
        (t.row_mean(t.log_ratio).detach() + t.log_probs - t.log_probs.detach()).clamp(max=10).exp(),
    ),
    "cispo": lambda t, o: (
        -_ratio(t, o).clamp(o["lowest"], o["highest"]).detach()
        * t.advantages
        * t.log_probs
        * t.weights
    ),
    "sapo": lambda t, o: _sapo(
        t, _ratio(t, o), torch.where(t.advantages > 0, o["tau_pos"], o["tau_neg"])
    ),
    "reinforce": lambda t, o: -t.advantages * t.log_probs * t.weights,
    "dppo": _dppo,
    "dro": lambda t, o: (
        (o["beta"] / 2 * t.log_ratio.square() - t.advantages * t.log_ratio) * t.weights
    ),
    "geo_mean": _geo_mean,
    "vespo": _vespo,
    "kl_cov": _kl_cov,
}


def _kl_term(loss: Loss, t: Tokens) -> torch.Tensor:
    """Of each token; http://joschu.net/blog/kl-approx.html names the estimators."""
    assert loss.kl is not None and t.ref is not None
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
    return replace(
        loss, options={name: OPEN.get(name, value) for name, value in loss.options.items()}
    )


def expect(loss: Loss, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """The effective advantage that a known loss gives, KL term included, and where it clips; (b, T)."""

    def losses(loss: Loss, t: Tokens) -> torch.Tensor:
        if callable(loss.account):
            return loss.account(t)
        return FORMULAS[str(loss.account)](t, loss.options)

    def descent(values: torch.Tensor) -> torch.Tensor:
        total = torch.where(t.mask, values, 0.0).sum()
        slope = None
        # A loss that reads no log-probability has no graph.
        if total.requires_grad:
            (slope,) = torch.autograd.grad(total, t.log_probs, allow_unused=True)
        if slope is None:
            return torch.zeros_like(t.log_probs)
        return torch.where(t.mask, -slope, 0.0)

    with torch.enable_grad():
        t = replace(tokens, log_probs=tokens.log_probs.detach().requires_grad_())
        losses_bT = losses(loss, t)
        value = descent(losses_bT)
        term = descent(loss.kl_coef * _kl_term(loss, t)) if loss.kl and t.ref is not None else 0.0
    clipped = (value == 0) & (tokens.advantages * tokens.weights != 0)
    # By a whole response's ratio, and by a clamp, a clipped token trains too
    if loss.account in ("clip", "cispo"):
        clipped |= losses_bT.detach() != losses(opened(loss), tokens)
    return value + term, clipped & tokens.mask


def denominators(loss: Loss, batch: Batch, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """D of each piece's responses, (b, 1) float64: the divisor of a token's loss, means over ranks included."""
    lengths_B = batch.mask_BT.sum(dim=1).double()
    result = []
    for piece in pieces:
        same_step = [second for second in pieces if second.update == piece.update]
        same_rank = [second for second in same_step if second.rank == piece.rank]
        means = 1  # so many means are averaged
        # Example: two ranks of two micro-batches each, over="micro-batch": D is 4 times a micro-batch's own tokens.
        if loss.over == "micro-batch":
            rows = piece.rows_b
            means = batch.ranks * len(same_rank)
        elif loss.over == "rank":
            rows = torch.cat([second.rows_b for second in same_rank])
            means = batch.ranks
        elif loss.over == "batch" or batch.updates == 1:
            rows = torch.arange(len(lengths_B))
        else:
            rows = torch.cat([second.rows_b for second in same_step]).unique()
        tokens = float(lengths_B[rows].sum())
        responses = float(len(rows))
        if loss.over == "update" and batch.totals_U2 is not None:
            tokens, responses = batch.totals_U2[piece.update].tolist()
        if loss.over == "batch":
            tokens /= batch.updates
            responses /= batch.updates
        own_b = lengths_B[piece.rows_b].clamp(min=1)
        ones_b = torch.ones_like(own_b)
        responses = max(1.0, responses)
        divisor_b = {
            "token-mean": max(1.0, tokens) * ones_b,
            "token-sum": ones_b,
            "seq-mean-token-sum": responses * ones_b,
            "seq-mean-token-mean": responses * own_b,
            "seq-mean-token-sum-norm": responses
            * float(loss.norm or piece.width or batch.mask_BT.shape[1])
            * ones_b,
        }[loss.aggregation]
        result.append(means * divisor_b[:, None])
    return result
