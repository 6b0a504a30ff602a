"""What was received, position by position, beside what an explanation gives: where they differ by more than rounding, the most
frequent factor between them, and which positions some are.

Shape suffixes: N responses of all optimiser steps, T response tokens, V judged positions, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from .losses import Loss, Tokens, expect

LEFT, SMALL, NOTHING, NUMBER = 8.0, 1.0, 2.0, 12.0
"""Bits of a token that is not explained, that differs by rounding, that got nothing without a rule; of a free parameter."""
ROUNDED = 2**-6
FEW = 0.03
"""Of the tokens that differ: so few that have no explanation are told along with the others."""


@dataclass(frozen=True)
class Trained:
    """The responses of all micro-batches one after the other, float64."""

    rows_N: torch.Tensor
    update_N: torch.Tensor
    piece_N: torch.Tensor
    rank_N: torch.Tensor
    tokens: Tokens
    received_NT: torch.Tensor
    ignored_NT: torch.Tensor
    """Not judged: rounding decides there whether the loss clips, or the gradient is not finite."""
    precision: float

    def expected(self, loss: Loss, tokens: Tokens | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The account of the loss, also with other columns."""
        tokens = self.tokens if tokens is None else tokens
        if not callable(loss.account) and loss.account != "kl_cov":
            return expect(loss, tokens)
        parts = [expect(loss, tokens.of(self.piece_N == piece)) for piece in self.piece_N.unique()]
        value, clipped = zip(*parts, strict=True)
        return torch.cat(value), torch.cat(clipped)

    @cached_property
    def unit(self) -> float:
        """The size of an advantage; beside it small gradients are rounding."""
        own = self.tokens.advantages[self.tokens.advantages != 0]
        return float(own.square().mean().sqrt().nan_to_num())


@dataclass(frozen=True)
class Told:
    """A part of the explanation, as a finding has it."""

    name: str
    what: str
    size: float
    at_NT: torch.Tensor


@dataclass
class State:
    """An explanation without its factor."""

    tokens: Tokens
    loss: Loss
    value_NT: torch.Tensor
    bits: float = 0.0
    told: tuple[Told, ...] = ()
    kinds: tuple[str, ...] = ()
    free_NT: torch.Tensor | None = None
    """Positions whose value came in from elsewhere."""
    end: End = field(default=None, repr=False)  # type: ignore[assignment]

    @property
    def total(self) -> float:
        return self.bits + self.end.bits


@dataclass
class End:
    """The factor of an explanation, its added term, and what is left."""

    bits: float
    left_bits: float
    factor_V: torch.Tensor
    told: list[tuple[str, str, float, torch.Tensor]]
    """Name, sentence, size and where, (V,)."""
    rest_V: torch.Tensor
    value_V: torch.Tensor
    small_V: torch.Tensor
    patterns: set[str]
    """Names of what is told with a rule."""
    base_V: torch.Tensor
    """The factor that further parts assume: not one that was free for each response."""

    @property
    def free(self) -> bool:
        """Whether responses have factors of their own."""
        return any(name.startswith("scaled by") or name == "unexplained" for name, *_ in self.told)


class Pattern(NamedTuple):
    """Which positions."""

    bits: float
    what: str
    """Empty without a pattern."""
    kind: str
    """A group's name, ``token`` or ``all``."""
    at_V: torch.Tensor
    """The positions that the pattern has, also beside those that it was sought in."""


@dataclass(frozen=True)
class Divided:
    """Another divisor that may have been used."""

    what: str
    """Empty where it follows from another finding."""
    factor_N1: torch.Tensor
    """The intended divisor over it."""


class Judged:
    """What was received of a batch.

    Args:
        trained: what was received.
        loss: as declared.
        columns: the batch's ``advantages``, ``old`` log-probabilities and ``weights``, (B, T), of which another response's may
            have been used; several where it is not known what stands beside the mask, NaN where nothing is.
        divided: other divisors.
        counted: gives the divisors where other tokens are counted, from their (N, T) mask.
    """

    def __init__(
        self,
        trained: Trained,
        loss: Loss,
        columns: Mapping[str, Sequence[torch.Tensor]],
        divided: Sequence[Divided] = (),
        counted: Any = None,
    ) -> None:
        self.trained, self.loss, self.columns = trained, loss, columns
        self.divided, self.counted = list(divided), counted
        tokens, received_NT = trained.tokens, trained.received_NT
        mask_NT = tokens.mask
        near_NT = (
            mask_NT | roll(mask_NT, 1) | roll(mask_NT, -1) | roll(mask_NT, 2) | roll(mask_NT, -2) | (received_NT != 0)
        )
        self.at = (near_NT & ~trained.ignored_NT).nonzero(as_tuple=True)
        self.received_V, self.mask_V = received_NT[self.at], mask_NT[self.at]
        self.intended_NT, clipped_NT = trained.expected(loss)
        self.clipped_V = clipped_NT[self.at]
        self.unit = trained.unit + loss.kl_coef + abs(float(loss.options.get("coef") or 0.0))
        self.place_V = torch.arange(len(self.received_V))

    @cached_property
    def rounding(self) -> bool:
        """Whether most differences are small ones, so that they may be rounding."""
        value_V = self.intended_NT[self.at]
        received_V = self.received_V / self._one(value_V, self.received_V)
        off_V = self._off(value_V, received_V) & (received_V != 0) & (value_V != 0)
        small_V = off_V & ((received_V - value_V).abs() <= ROUNDED * value_V.abs())
        return 2 * int(small_V.sum()) > int(off_V.sum())

    @cached_property
    def wrong_V(self) -> torch.Tensor:
        """What was received otherwise than intended."""
        return self._off(self.intended_NT[self.at], self.received_V)

    def steps(self) -> torch.Tensor:
        """(U,) the most frequent factor of each optimiser step."""
        update_V = self.trained.update_N[self.at[0]]
        log_V = self._quotient(self.intended_NT[self.at], self.received_V)
        return self._modes(log_V, update_V, int(self.trained.update_N.max()) + 1)

    def spread(self, at_V: torch.Tensor) -> torch.Tensor:
        """Judged positions among all, (N, T)."""
        result_NT = torch.zeros_like(self.trained.tokens.mask)
        result_NT[self.at] = at_V
        return result_NT

    def _off(
        self, value_V: torch.Tensor, received_V: torch.Tensor, factor_V: torch.Tensor | float = 1.0
    ) -> torch.Tensor:
        """Where more than rounding lies between them; outside the mask, where anything was received. What was received is
        divided by the factor: a large one must not make it small beside a value of 0."""
        unit_V = torch.where(value_V == 0, self.unit / torch.as_tensor(factor_V).clamp(min=1), self.unit)
        size_V = torch.maximum(value_V.abs(), received_V.abs()) + torch.where(self.mask_V, unit_V, 0.0)
        return (received_V - value_V).abs() > self.trained.precision * size_V

    def _quotient(self, value_V: torch.Tensor, received_V: torch.Tensor) -> torch.Tensor:
        """Logarithm of the positive ones; NaN elsewhere, and where rounding is large."""
        strong_V = value_V.abs() > 0.02 * self.unit
        quotient_V = torch.where(strong_V & (received_V != 0), received_V / value_V, torch.nan)
        return torch.where(quotient_V > 0, quotient_V.clamp(1e-30, 1e30), torch.nan).log()

    def _modes(self, log_V: torch.Tensor, group_V: torch.Tensor, groups: int, least: float = 0.25) -> torch.Tensor:
        """The most frequent value of each group, as a factor; 1 where fewer than the share ``least`` have it."""
        at_K = (~log_V.isnan()).nonzero().squeeze(1)
        values_K, group_K = log_V[at_K], group_V[at_K]
        key_K, order_K = (group_K * 256.0 + values_K).sort()
        count_K = torch.searchsorted(key_K, key_K + 4 * self.trained.precision, right=True) - torch.arange(len(at_K))
        base = len(at_K) + 1
        rank_K = count_K * base + (len(at_K) - torch.arange(len(at_K)))
        best_G = torch.zeros(groups, dtype=torch.int64).scatter_reduce(0, group_K[order_K], rank_K, "amax")
        many_G = best_G // base >= least * torch.zeros(groups).index_add_(0, group_K, torch.ones(len(at_K)))
        place_G = (len(at_K) - best_G % base + (best_G // base - 1).clamp(min=0) // 2).clamp(0, max(0, len(at_K) - 1))
        if not len(at_K):
            return torch.ones(groups, dtype=torch.float64)
        return torch.where((best_G > 0) & many_G, values_K[order_K][place_G].exp(), 1.0)

    def _one(self, value_V: torch.Tensor, received_V: torch.Tensor) -> float:
        """The most frequent factor; 1 within rounding."""
        some = slice(None, None, max(1, len(value_V) // 8192))
        log_K = self._quotient(value_V, received_V)[some]
        factor = float(self._modes(log_K, torch.zeros(log_K.shape, dtype=torch.int64), 1)[0])
        return 1.0 if abs(math.log(factor)) < 1.5 * self.trained.precision else factor

    def _quick(
        self, value_V: torch.Tensor, factor_V: torch.Tensor, free_V: torch.Tensor | None = None
    ) -> tuple[float, torch.Tensor]:
        """About the bits of what an explanation leaves, with at most one more factor; and each position's."""
        received_V, more = self.received_V / factor_V, 0.0
        off_V = self._off(value_V, received_V, factor_V)
        if 3 * int(off_V.sum()) > len(off_V) and (one := self._one(value_V, received_V)) != 1:
            received_V, more = received_V / one, NUMBER
            off_V = self._off(value_V, received_V, factor_V * one)
        bits_V = self._bits(value_V, received_V, off_V, nothing=0.5)
        if free_V is not None:
            bits_V[off_V & free_V] = self._unknown(off_V, free_V)
        return float(bits_V.sum()) + more, bits_V

    def _unknown(self, off_V: torch.Tensor, free_V: torch.Tensor) -> float:
        """Bits of a position whose value came in from elsewhere: few where the others are explained."""
        known_V = self.mask_V & ~free_V
        return min(LEFT, 1 + 2 * LEFT * float((off_V & known_V).sum() / known_V.sum().clamp(min=1)))

    def _bits(
        self,
        value_V: torch.Tensor,
        received_V: torch.Tensor,
        off_V: torch.Tensor,
        nothing: float,
    ) -> torch.Tensor:
        bits_V = off_V.double() * LEFT
        if self.rounding:
            bits_V[off_V & ((received_V - value_V).abs() <= ROUNDED * value_V.abs())] = SMALL
        bits_V[off_V & (received_V == 0)] = nothing
        bits_V[off_V & ~self.mask_V & (value_V == 0)] = 1.0
        return bits_V

    # -------------------------------------------------------------------------------------------------------------- patterns

    @cached_property
    def _groups(self) -> dict[str, tuple[torch.Tensor, int]]:
        """By name the group of each position, and how many there are."""
        trained, n_V = self.trained, self.at[0]
        ranks = int(trained.rank_N.max()) + 1
        known = {
            "optimiser step": trained.update_N,
            "rank": trained.rank_N,
            "rank and optimiser step": trained.rank_N + ranks * trained.update_N,
            "micro-batch": trained.piece_N,
            "response": trained.rows_N,
            "response of an optimiser step": torch.arange(len(trained.rows_N)),
        }
        result: dict[str, tuple[torch.Tensor, int]] = {}
        for name, group_N in known.items():
            values, inverse_N = group_N.unique(return_inverse=True)
            if len(values) > 1 and not any(torch.equal(inverse_N[n_V], other) for other, _ in result.values()):
                result[name] = (inverse_N[n_V], len(values))
        return result

    @cached_property
    def _features(self) -> dict[str, torch.Tensor]:
        """By sentence a value of each position, of which some may be large."""
        tokens, mask_NT = self.trained.tokens, self.trained.tokens.mask
        order_NT, length_N1 = mask_NT.cumsum(dim=1), mask_NT.sum(dim=1, keepdim=True)
        before_NT = torch.nn.functional.pad(mask_NT, (1, 0))[:, :-1]
        turn_NT = (mask_NT & ~before_NT).cumsum(dim=1)
        position_NT = torch.arange(mask_NT.shape[1]).expand(mask_NT.shape)
        ratio_NT, sign_NT = tokens.log_ratio, tokens.advantages.sign()
        values = {
            "{} the first of their response": (order_NT == 1) & mask_NT,
            "{} the last of their response": (order_NT == length_N1) & mask_NT,
            "{} the first of a turn": mask_NT & ~before_NT,
            "{} the last of a turn": mask_NT & ~torch.nn.functional.pad(mask_NT, (0, 1))[:, 1:],
            "{} those with a positive advantage": sign_NT > 0,
            "{} those with a negative advantage": sign_NT < 0,
            "{} those from token {} on": position_NT + 1,
            "{} those up to token {}": -(position_NT + 1),
            "{} those of responses of {} tokens or more": length_N1.expand(mask_NT.shape),
            "{} those of responses of {} tokens or fewer": -length_N1.expand(mask_NT.shape),
            "{} those of turn {} and later": turn_NT,
            "{} the likely ones (log-probability from {})": tokens.log_probs,
            "{} the unlikely ones (log-probability up to {})": -tokens.log_probs,
            "{} those with a ratio on one side of the clip": sign_NT * ratio_NT,
            "{} those with a ratio far from 1": ratio_NT.abs(),
        }
        return {what: value_NT.double()[self.at] for what, value_NT in values.items()}

    def pattern(self, at_V: torch.Tensor, of_V: torch.Tensor, each: float = NOTHING) -> Pattern:
        """The shortest description of some positions among others; what is not among these has no part in it."""
        at_V = at_V & of_V
        count, best = int(at_V.sum()), Pattern(4 + each * float(at_V.sum()), "", "token", at_V)
        if not count or count == int(of_V.sum()):
            return Pattern(0.0, "", "all", at_V)
        for name, (group_V, groups) in self._groups.items():
            of_G = torch.zeros(groups).index_add_(0, group_V[of_V], torch.ones(int(of_V.sum())))
            at_G = torch.zeros(groups).index_add_(0, group_V[at_V], torch.ones(count))
            if bool(((at_G == 0) | (at_G == of_G)).all()):
                total, own = int((of_G > 0).sum()), int((at_G > 0).sum())
                bits = 4 + math.log2(max(1, math.comb(total, own)))
                if bits < best.bits:
                    best = Pattern(bits, f"all of {own} of {total} {plural(name)}", name, (at_G > 0)[group_V])
        at_K, others_K = (chosen_V.nonzero().squeeze(1) for chosen_V in (at_V, of_V & ~at_V))
        few_K, few_others_K = (each_K[:: 1 + len(each_K) // 1024] for each_K in (at_K, others_K))
        for what, value_V in self._features.items():
            if value_V[few_K].min() <= value_V[few_others_K].max():  # as most are: most of the time goes here
                continue
            inside = value_V[at_K].min()
            if inside > value_V[others_K].max():
                bits = 4.0 if len(value_V.unique()) == 2 else 10.0
                if bits < best.bits:
                    number = abs(float(inside))
                    best = Pattern(bits, what.format("all of", f"{number:.4g}"), "token", value_V >= inside)
        return best

    def _open(self, tokens: Tokens, loss: Loss) -> torch.Tensor:
        return self.trained.expected(unclipped(loss), tokens)[0][self.at]


def unclipped(loss: Loss) -> Loss:
    if "low" not in loss.options or loss.account == "dppo":
        return loss
    return replace(loss, options=dict(loss.options) | {"low": math.inf, "high": math.inf, "cap": None})


def roll(values_NT: torch.Tensor, by: int) -> torch.Tensor:
    """Each token has the value of the one ``by`` before it; 0 comes in at the end."""
    moved_NT = values_NT.roll(by, 1)
    moved_NT[:, slice(by) if by > 0 else slice(by, None)] = 0
    return moved_NT


def plural(name: str) -> str:
    """Of a group's name."""
    return (
        name.replace("response", "responses", 1)
        if name.startswith("response")
        else name.replace("micro-batch", "micro-batches") + ("s" if not name.startswith("micro") else "")
    )
