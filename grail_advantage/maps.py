"""This module has the maps from a response's token scores to token weights. A map is a function ``f(x, m,
option=default, ...) -> Weights``: x float (B, T) scores, finite where m, bool (B, T), is true: the tokens that are
compared with each other. All in float64."""

import inspect
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import torch
from pydantic import BaseModel, ConfigDict, Field, create_model
from torch import Tensor

STRICT = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
Positive = Annotated[float, Field(gt=0)]
From0 = Annotated[float, Field(ge=0)]
Part = Annotated[float, Field(ge=0, le=1)]
Rule = Literal["linear", "sorted"]


class Weights(NamedTuple):
    """It is what a map, or a method without one, makes of scores."""

    values: Tensor  # float32 (B, T), at least 0; read where the mask is true
    lowest: float = -math.inf  # bounds that the weights were clipped to
    highest: float = math.inf
    # Of a scored response's tokens outside the mask, for methods without answer weights
    elsewhere: float = 1.0


class Map(NamedTuple):
    function: Callable[..., Weights]
    options: type[BaseModel]
    ranks: bool  # scores, so that coarse ones would matter


MAPS: dict[str, Map] = {}


def register_map(
    *, ranks: bool = False
) -> Callable[[Callable[..., Weights]], Callable[..., Weights]]:
    """Make a function the meaning of ``reshaper=<its name>``. Its arguments after x and m are its options; their
    annotations say what is allowed, as ``Annotated[float, Field(gt=0)]`` does. ValueError: the name is taken, or an
    option has no type."""

    def register(function: Callable[..., Weights]) -> Callable[..., Weights]:
        name = function.__name__
        first = MAPS.get(name)
        # A map comes again where its module is loaded again.
        if first and first.function.__module__ != function.__module__:
            module = first.function.__module__
            raise ValueError(
                f"the map {name} is registered already, by {module}; choose another name"
            )
        hints = get_type_hints(function, include_extras=True)
        options = inspect.signature(function).parameters
        fields: dict[str, Any] = {}
        for option in list(options)[2:]:
            if option not in hints:
                raise ValueError(
                    f"the map {name}: {option} has no type; write {option}: float = 1.0"
                )
            fields[option] = (hints[option], options[option].default)
        MAPS[name] = Map(function, create_model(name, __config__=STRICT, **fields), ranks)
        return function

    return register


def _mean(x: Tensor, m: Tensor) -> Tensor:
    """Take each response's mean over the mask, (B, 1)."""
    total = torch.where(m, x, 0.0).sum(-1, keepdim=True)
    return total / m.sum(-1, keepdim=True).clamp(min=1)


@register_map()
def log_zscore(
    x: Tensor,
    m: Tensor,
    weight_mean: From0 = 1,
    weight_std: Positive = 0.5,
    weight_min: From0 = 0.5,
    weight_max: From0 = 5,
) -> Weights:
    """``clip(weight_mean + weight_std z, weight_min, weight_max)``, ``z = (l - mean l) / sqrt(variance of l + 1e-8)``
    of the log scores ``l = log(x + 1e-8)``, with the population variance, in float64. Negative scores count as 0."""
    if weight_min > weight_max:
        raise ValueError(
            f"weight_min={weight_min} is greater than weight_max={weight_max}; swap them"
        )
    # In float64, as the division blows up what float32 rounds off the mean of nearly equal scores.
    log = torch.log(x.clamp(min=0).double() + 1e-8)
    z = log - _mean(log, m)
    # A response without a compared token has no mean to be far from: z is 0.
    z = z / (_mean(z.square(), m) + 1e-8).sqrt()
    z = z.where(m.any(-1, keepdim=True), 0.0).float()
    return Weights(
        (weight_mean + weight_std * z).clamp(weight_min, weight_max), weight_min, weight_max
    )


@register_map(ranks=True)
def bilevel(
    x: Tensor, m: Tensor, quantile: Part = 0.4, boost: From0 = 2.0, quantile_rule: Rule = "linear"
) -> Weights:
    """``max(h / tau, 0.1)`` where ``h < tau``, else ``1 + boost (h - tau) / (1 - tau)``: h is ``log(1 + score)`` scaled
    to [0, 1] over the response, tau its quantile, by ``quantile_rule`` between two sorted scores or the one at index
    ``floor(quantile T)``. Equal scores all have weight 1. A score below -1 counts as -1."""
    # Also where there is no response or no token, of which no extremum could be taken.
    if not m.any():
        return Weights(torch.ones_like(x, dtype=torch.float32), 0.1)
    log = torch.log1p(x.double().clamp(min=-1 + 1e-8))
    low = torch.where(m, log, math.inf).amin(-1, keepdim=True)
    high = torch.where(m, log, -math.inf).amax(-1, keepdim=True)
    uneven = m & (high > low)
    h = torch.where(uneven, (log - low) / (high - low), 0.0)
    tau = _quantile(h, m, quantile, quantile_rule)
    # tau is 1 where so many have the highest score that nothing is above it.
    above = torch.where(tau < 1, (h - tau) / (1 - tau), 0.0)
    w = torch.where(h < tau, (h / tau).clamp(min=0.1), 1 + boost * above)
    return Weights(torch.where(uneven, w, 1.0).float(), 0.1)


def _quantile(h: Tensor, m: Tensor, q: float, rule: str) -> Tensor:
    """Give each response's quantile over its masked values, (B, 1); 0 for a response without any."""
    count = m.sum(-1, keepdim=True)
    last = (count - 1).clamp(min=0)
    s = torch.where(count > 0, torch.where(m, h, math.inf).sort(-1).values, 0.0)
    # Of scores 0, 0.5, 1 and q = 0.4 the place is 0.8, and the quantile 0.4.
    place = q * last.double()  # between two of the sorted scores
    if rule == "sorted":
        # quantile=1 would be one past the last.
        place = torch.minimum((q * count.double()).floor(), last.double())
    index = place.long()
    below = s.gather(-1, index)
    above = s.gather(-1, torch.minimum(index + 1, last))
    return below + (place - index) * (above - below)


@register_map()
def mean_ratio(x: Tensor, m: Tensor, beta: Positive = 0.1) -> Weights:
    """``max(0, 1 + beta (x / mean x - 1))``; 1 where the mean is not above 0. For scores of at least 0 and beta of at
    most 1 a response's mean weight is 1; scores of both signs that cancel give weights without bound."""
    x = torch.where(m, x.double(), 0.0)
    mean = _mean(x, m)
    w = (1 + beta * (x / mean - 1)).clamp(min=0)
    return Weights(torch.where(m & (mean > 0), w, 1.0).float(), 0.0)


@register_map()
def power(x: Tensor, m: Tensor, exponent: Positive = 2.0) -> Weights:
    """``n x^g / sum x^g`` over a response's n tokens (repository of arXiv 2606.00257, with 2 on surprisal); 1 where the
    sum is below 1e-8. Negative scores count as 0."""
    x = torch.where(m, x.double().clamp(min=0), 0.0)
    count = m.sum(-1, keepdim=True)
    mean = _mean(x, m)
    # By the mean, so that no power that matters overflows.
    p = torch.where(mean > 0, x / mean, 0.0).pow(exponent)
    total = p.sum(-1, keepdim=True)
    # mean^g total is the sum of x^g.
    is_known = m & (mean.pow(exponent) * total >= 1e-8)
    return Weights(torch.where(is_known, count * p / total, 1.0).float())


def top_tokens(x: Tensor, m: Tensor, count: Tensor | int) -> Tensor:
    """Mark each response's highest scores, bool (B, T), as many as asked for where there are so many; of equal ones the
    earlier."""
    # Adding 0 turns a negative zero into a positive one, so that no sort distinguishes them.
    sortable = torch.where(m, x.double() + 0.0, -math.inf)
    order = sortable.sort(dim=-1, descending=True, stable=True).indices
    place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    # The inverse of the order: the token with the highest score has rank 0.
    rank = torch.empty_like(order).scatter_(-1, order, place)
    return m & (rank < count)


def count_of_share(share: float, count: Tensor) -> Tensor:
    """Compute ``max(1, ceil(share * count))``, int64, less the rounding that makes 0.07 * 100 a little more than 7."""
    return torch.ceil(share * (1 - 1e-12) * count.double()).long().clamp(min=1)


@register_map(ranks=True)
def top(
    x: Tensor,
    m: Tensor,
    k: Annotated[int, Field(ge=1)] = 1,
    share: Annotated[Part | None, Field(gt=0)] = None,
) -> Weights:
    """1 on the response's k highest scores, or on a share of its tokens, rounded up; 0 on all its other tokens."""
    if share is not None and k != 1:
        raise ValueError(f"k={k} and share={share}: give one of the two")
    count = k if share is None else count_of_share(share, m.sum(-1, keepdim=True))
    return Weights(top_tokens(x, m, count).float(), elsewhere=0.0)
