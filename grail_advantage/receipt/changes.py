"""Changes of the loss that are tried as explanations: other columns, another clip or KL term, a term beside the loss.

Shape suffixes as in :mod:`.arrived`; K and P are some of the tokens, and pairs of them.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .arrived import Arrived
from .losses import Batch, opened

NUMBER = 12.0
"""Bits of a free number."""
WHOLE = 6.0
"""A response's tokens of one kind, such as lost ones, cost at most so many bits."""
SIDES = ((1, "of the token before"), (-1, "of the token after"))
Change = tuple[float, str, str, Tensor]
"""Bits, a finding's name, a sentence, and the value of each token."""


def changes(arrived: Arrived) -> Iterator[Change]:
    """Yield what the loss may have in place of what was intended, which is the first."""
    batch = arrived.batch
    tokens = arrived.tokens
    loss = arrived.loss
    value = arrived.value
    yield 0, "", "", arrived.wanted_NT
    yield from _advantages(arrived)
    for column, noun, values_BT in (
        ("advantages", "advantages", _whole_rows(batch)),
        ("old", "old log-probabilities", batch.old_log_probs_BT),
        ("weights", "importance weights", batch.weights_BT),
    ):
        if values_BT is None:
            continue
        for by, side in SIDES:
            moved_NT = _roll(getattr(tokens, column), by)
            yield 9, "shifted", f"{noun} {side}", value(**{column: moved_NT})
        for implied_NT in _implied(arrived, column):
            yield from _swapped(arrived, column, noun, implied_NT, values_BT.double())
    if batch.old_log_probs_BT is not None:
        yield 7, "stale", "the ratio is 1", value(old=tokens.log_probs)
        plain_NT = value(opened(loss), old=tokens.log_probs)
        plain_NT = torch.where(arrived.clipped_NT, arrived.wanted_NT, plain_NT)
        yield 8, "stale", "the ratio is 1 but for the clip", plain_NT
        if tokens.ref is not None:
            yield 7, "stale", "old log-probabilities are the reference's", value(old=tokens.ref)
    if batch.weights_BT is not None:
        weights_NT = tokens.weights
        yield 7, "weights", "importance weights are left out", value(weights=weights_NT**0)
        yield 7, "weights", "importance weights count twice", value(weights=weights_NT**2)
        what = "importance weights are the mean of each response"
        yield 8, "weights", what, value(weights=tokens.row_mean(weights_NT))
        for implied_NT in _implied(arrived, "weights"):
            bound = float(implied_NT.nan_to_num(0.0).max())
            what = f"importance weights are cut at {bound:.4g}"
            yield 8 + NUMBER, "weights", what, value(weights=weights_NT.clamp(max=bound))
    if "low" in loss.options and loss.account != "dppo":
        yield 6, "unclipped", "nothing is clipped", arrived.open_NT
    if loss.kl:
        for times, name, what in (
            (-1, "sign", "reversed"),
            (0, "extra", "left out"),
            (2, "extra", "twice"),
        ):
            changed_NT = value(replace(loss, kl_coef=times * loss.kl_coef))
            yield 6, name, f"the KL term is {what}", changed_NT
    yield from _added(arrived)


def _advantages(arrived: Arrived) -> Iterator[Change]:
    tokens = arrived.tokens
    own_NT = tokens.advantages
    value = arrived.value
    yield 2, "rounded", "advantages of bf16", value(advantages=own_NT.bfloat16().double())
    yield 5, "sign", "the sign is reversed", value(advantages=-own_NT)
    yield 6, "sign", "all advantages are positive", value(advantages=own_NT.abs())
    # As a host does that keeps one advantage a response.
    mean_NT = torch.where(tokens.mask, tokens.row_mean(own_NT), 0.0)
    yield 8, "flattened", "one advantage for each response", value(advantages=mean_NT)
    # The advantage before weighting is not in the batch: a response's smallest size stands for it, a factor does the rest.
    least_N1 = torch.where(own_NT != 0, own_NT.abs(), torch.inf).amin(dim=1, keepdim=True)
    if (own_NT.abs() > 1.001 * least_N1).any():
        plain_NT = own_NT.sign() * least_N1.nan_to_num(0, 0, 0)
        yield 8, "flattened", "token weights are left out", value(advantages=plain_NT)
    for by, side in SIDES:
        moved_NT = value(advantages=_roll(own_NT, by), mask=_roll(tokens.mask, by))
        yield 8, "shifted", f"advantages and mask {side}", moved_NT


def _added(arrived: Arrived) -> Iterator[Change]:
    """Yield the loss with a constant more in each advantage."""
    ones_NT = torch.ones_like(arrived.wanted_NT)
    plain = opened(arrived.loss)
    slope_NT = arrived.value(plain, advantages=ones_NT) - arrived.value(
        plain, advantages=0 * ones_NT
    )
    trains_NT = (
        arrived.mask_NT & ~arrived.ignored_NT & (arrived.received_NT != 0) & (slope_NT.abs() > 1e-3)
    )
    if not trains_NT.any():
        return
    # received = factor * (wanted + added * slope): the factor by pairs of tokens, in which what is added cancels.
    wanted_K = arrived.wanted_NT[trains_NT] / slope_NT[trains_NT]
    received_K = arrived.received_NT[trains_NT] / slope_NT[trains_NT]
    draw = torch.Generator().manual_seed(0)
    one_P, other_P = torch.randint(len(wanted_K), (2, 4000), generator=draw)
    apart_P = wanted_K[one_P] - wanted_K[other_P]
    factors_P = (received_K[one_P] - received_K[other_P]) / apart_P
    factors_P = factors_P[(apart_P.abs() > 0.1 * arrived.unit) & (factors_P > 0)]
    # Of no pair the median is NaN, with which nothing is added.
    for factor in (1.0, float(factors_P.median())):
        added = float((received_K / factor - wanted_K).median())
        if abs(added) < 1e3 * arrived.unit:
            value_NT = arrived.wanted_NT + torch.where(arrived.mask_NT, added * slope_NT, 0.0)
            yield 20, "extra", f"{added:+.4g} to each advantage is added", value_NT


def _implied(arrived: Arrived, column: str) -> Iterator[Tensor]:
    """Yield values of a column that would give what was received, as it is and without one factor of all tokens.

    They are NaN where none follows.
    """
    tokens = arrived.tokens
    ones_NT = torch.ones_like(tokens.weights)
    rest_NT = arrived.value(advantages=0 * ones_NT)
    # A loss is linear in advantages and weights, and in exp(-old): one evaluation tells the slope.
    plain_NT = tokens.log_probs if column == "old" else ones_NT

    def usual(values_NT: Tensor) -> Tensor:
        """The median size of a response's tokens, of which the median again: in another order it stays the same."""
        size_NT = torch.where(arrived.mask_NT & (values_NT != 0), values_NT.abs(), torch.nan)
        return size_NT.nanmedian(dim=1).values.nanmedian()

    factor = float(usual(arrived.received_NT) / usual(arrived.wanted_NT))
    # A set, as the second would try the first again where the factor is 1.
    for scale in {1.0, factor if 0 < factor < math.inf else 1.0}:
        value_NT = arrived.received_NT / scale - rest_NT
        if column == "advantages":
            sign_NT = torch.where(value_NT > 0, ones_NT, -1.0)  # by which the clip goes
            unit_NT = sign_NT * (arrived.value(advantages=sign_NT) - rest_NT)
        else:
            unit_NT = arrived.value(opened(arrived.loss), **{column: plain_NT}) - rest_NT
        follows_NT = (unit_NT != 0) & arrived.mask_NT & ~arrived.ignored_NT
        implied_NT = torch.where(follows_NT, value_NT / unit_NT, torch.nan)
        yield tokens.log_probs - implied_NT.log() if column == "old" else implied_NT


def _swapped(
    arrived: Arrived, column: str, noun: str, implied_NT: Tensor, values_BT: Tensor
) -> Iterator[Change]:
    """Yield values of other responses: of those whose own would give what was received."""
    rows_N = arrived.rows_N
    # Half precision in what was received is also in what it implies.
    chosen_N = fitting_rows(implied_NT, values_BT, rows_N, max(1e-3, 2 * arrived.precision))
    moved = int((chosen_N != rows_N).sum())
    if not moved:
        return
    bits = WHOLE + NUMBER * moved
    sums_B = values_BT.sum(dim=1)
    sums_N, chosen_sums_N = (sums_B[rows].sort().values for rows in (rows_N, chosen_N))
    if moved > 1 and torch.allclose(sums_N, chosen_sums_N, rtol=1e-3):
        # A permutation says less than as many free numbers.
        bits = 0.8 * math.log2(math.comb(len(rows_N), moved))
    what = f"{moved} of {len(rows_N)} responses have the {noun} of another one"
    yield bits, "swapped", what, arrived.value(**{column: values_BT[chosen_N]})


def _whole_rows(batch: Batch) -> Tensor:
    """The advantages; one that all of a response's tokens share stands beside them too, where another may be longer."""
    advantages_BT = torch.where(batch.mask_BT, batch.advantages_BT, 0.0)
    first_B1 = advantages_BT.gather(1, batch.mask_BT.long().argmax(dim=1, keepdim=True))
    shared_B1 = ((advantages_BT == first_B1) | ~batch.mask_BT).all(dim=1, keepdim=True)
    return torch.where(shared_B1, first_B1, advantages_BT)


def fitting_rows(wanted_NT: Tensor, values_BT: Tensor, rows_N: Tensor, near: float) -> Tensor:
    """For each response find the one whose values fit best at 64 of its tokens, its own where that fits as well."""
    missing_NT = ~wanted_NT.isfinite()
    # 64 of a response's finite places, evenly: a sort puts these first, in their order.
    count_N1 = (~missing_NT).sum(dim=1, keepdim=True).clamp(min=1)
    rank_NK = torch.arange(64) * count_N1 // 64
    place_NK = missing_NT.to(torch.uint8).argsort(dim=1, stable=True).gather(1, rank_NK)
    wanted_NK = wanted_NT.gather(1, place_NK)
    away_BNK = (values_BT[:, place_NK] - wanted_NK).abs()
    fits_BN = (away_BNK <= near * wanted_NK.abs() + 1e-12).sum(dim=2)
    best = fits_BN.max(dim=0)
    own_N = fits_BN[rows_N, torch.arange(len(rows_N))]
    return torch.where(own_N < best.values, best.indices, rows_N)


def _roll(values_NT: Tensor, by: int) -> Tensor:
    """Give each token the value of the one ``by`` before it; 0 comes in at the end."""
    moved_NT = values_NT.roll(by, 1)
    moved_NT[:, 0 if by > 0 else -1] = 0
    return moved_NT
