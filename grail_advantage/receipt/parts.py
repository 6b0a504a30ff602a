"""Explain what tokens received by parts: what differs between the loss that ran and the one that was intended.

A part changes a column (shifted, of other responses, reversed, a power), the ratio, the clip or the KL term, for all responses
or some; after the parts come one factor (or one by micro-batch, by response), an added term, and the tokens that got nothing.
Explanations are compared by their length in bits: that of the parts and of their free parameters, and some for each token that
is left over. The shortest is taken, then parts are put to it as long as they shorten it.

Shape suffixes: N responses of all optimiser steps, T response tokens, V judged positions, one after the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from .losses import Loss, Tokens, expect, kl_slope

LEFT, SMALL, NOTHING, NUMBER = 8.0, 1.0, 2.0, 12.0
"""Bits of a token that is not explained, that differs by rounding, that got nothing without a rule; of a free parameter."""
ROUNDED = 2**-6
DEPTH, BEAM = 3, 2
COMPARED = 64
"""Responses whose values are held against those that one received."""
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
class _State:
    """An explanation without its factor."""

    tokens: Tokens
    loss: Loss
    value_NT: torch.Tensor
    bits: float = 0.0
    told: tuple[Told, ...] = ()
    kinds: tuple[str, ...] = ()
    free_NT: torch.Tensor | None = None
    """Positions whose value came in from elsewhere."""
    end: _End = field(default=None, repr=False)  # type: ignore[assignment]

    @property
    def total(self) -> float:
        return self.bits + self.end.bits


@dataclass
class _End:
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


_Ending = tuple[float, torch.Tensor, torch.Tensor, Callable[[], list[tuple[str, str, float, torch.Tensor]]]]
"""Bits, factor and added term of each position, and what is told of them."""


class _Pattern(NamedTuple):
    """Which positions."""

    bits: float
    what: str
    """Empty without a pattern."""
    kind: str
    """A group's name, ``token`` or ``all``."""
    at_V: torch.Tensor
    """The positions that the pattern has, also beside those that it was sought in."""


@dataclass(frozen=True)
class _Change:
    """A part to be tried."""

    kind: str
    name: str
    what: str
    size: float
    bits: float
    tokens: Tokens
    loss: Loss
    value_NT: torch.Tensor | None = None
    free_NT: torch.Tensor | None = None


@dataclass(frozen=True)
class Divided:
    """Another divisor that may have been used."""

    what: str
    """Empty where it follows from another finding."""
    factor_N1: torch.Tensor
    """The intended divisor over it."""


class Explainer:
    """Finds the shortest explanation of a batch.

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
            mask_NT
            | _roll(mask_NT, 1)
            | _roll(mask_NT, -1)
            | _roll(mask_NT, 2)
            | _roll(mask_NT, -2)
            | (received_NT != 0)
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

    def told(self, state: _State) -> list[tuple[str, str, float, torch.Tensor]]:
        """An explanation's name, sentence, size and (N, T) positions, part by part."""
        result = [(part.name, part.what, part.size, part.at_NT) for part in state.told]
        result += [(name, what, size, self.spread(at_V)) for name, what, size, at_V in state.end.told]
        rest = self.rest(state)
        if rest is None:
            return result
        at_V = state.end.rest_V
        if result and (count := int(at_V.sum())) < FEW * int(self.wrong_V.sum()):
            name, what, *place = max(result, key=lambda told: int(told[3].sum()))
            at = next(place for place, told in enumerate(result) if told[0] == name and told[1] == what)
            result[at] = (name, f"{what}; {count} tokens received something else", *place)
            return result
        if rest[0] == "stale":  # which the clip takes or leaves by another ratio
            of_clip = [
                told
                for told in state.end.told
                if told[0] in ("lost", "unclipped") and told[0] not in state.end.patterns
            ]
            result = [told for told in result if told[0] not in {name for name, *_ in of_clip}]
            at_V = torch.stack([at_V, *(told[3] for told in of_clip)]).any(dim=0)
        return [*result, (*rest, self.spread(at_V))]

    # ------------------------------------------------------------------------------------------------------------- judgement

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

    def pattern(self, at_V: torch.Tensor, of_V: torch.Tensor, each: float = NOTHING) -> _Pattern:
        """The shortest description of some positions among others."""
        count, best = int(at_V.sum()), _Pattern(4 + each * float(at_V.sum()), "", "token", at_V)
        if not count or count == int(of_V.sum()):
            return _Pattern(0.0, "", "all", at_V)
        for name, (group_V, groups) in self._groups.items():
            of_G = torch.zeros(groups).index_add_(0, group_V[of_V], torch.ones(int(of_V.sum())))
            at_G = torch.zeros(groups).index_add_(0, group_V[at_V], torch.ones(count))
            if bool(((at_G == 0) | (at_G == of_G)).all()):
                total, own = int((of_G > 0).sum()), int((at_G > 0).sum())
                bits = 4 + math.log2(max(1, math.comb(total, own)))
                if bits < best.bits:
                    best = _Pattern(bits, f"all of {own} of {total} {_plural(name)}", name, (at_G > 0)[group_V])
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
                    best = _Pattern(bits, what.format("all of", f"{number:.4g}"), "token", value_V >= inside)
        return best

    # ---------------------------------------------------------------------------------------------------- factor and leftovers

    def close(self, state: _State) -> _End:
        """The shortest end of an explanation."""
        value_V = state.value_NT[self.at]
        free_V = None if state.free_NT is None else state.free_NT[self.at]
        best: _End | None = None
        for bits, factor_V, added_V, told in self._ends(value_V, state):
            if best is not None and bits + self._least(value_V + added_V, factor_V) >= best.bits:
                continue
            end = self._left(bits, value_V + added_V, factor_V, told(), free_V, state)
            if best is None or end.bits < best.bits:
                best = end
            if best.bits <= NUMBER or (best.left_bits < 1 and best.bits <= 2 * NUMBER):
                break
        assert best is not None
        if best.free:
            best.base_V = self._one(value_V, self.received_V) * torch.ones_like(value_V)
        return best

    def _least(self, value_V: torch.Tensor, factor_V: torch.Tensor) -> float:
        """Bits that a factor leaves at least."""
        received_V = self.received_V / factor_V
        off_V = self._off(value_V, received_V, factor_V)
        return float(self._bits(value_V, received_V, off_V, nothing=0.0).sum())

    def _ends(self, value_V: torch.Tensor, state: _State) -> Iterator[_Ending]:
        """Factors and added terms: bits, factor, term (before the factor), and what is told of them."""
        ones_V, none_V, received_V = torch.ones_like(value_V), torch.zeros_like(value_V), self.received_V
        yield 0.0, ones_V, none_V, list
        if not received_V.any():
            return
        one, trains_V = self._one(value_V, received_V), self.mask_V & (value_V != 0) & (received_V != 0)
        if one != 1:
            yield NUMBER, one * ones_V, none_V, partial(self._scaled, one * ones_V, "")
        for divided in [*self.divided, *self._counted(value_V, one)]:
            own_V = divided.factor_N1[self.at[0], 0]
            more = self._one(value_V, received_V / own_V)
            fits_V = ~self._off(value_V, received_V / (more * own_V)) & trains_V
            if 4 * int(fits_V.sum()) < int(trains_V.sum()):
                continue
            bits = (6.0 if divided.what else 3.0) + (NUMBER if more != 1 else 0.0)
            shown_V = more * (own_V if divided.what else ones_V)
            yield bits, more * own_V, none_V, partial(self._scaled, shown_V, divided.what)
        for name in (
            "optimiser step",
            "rank and optimiser step",
            "rank",
            "micro-batch",
            "response",
            "response of an optimiser step",
        ):
            if name in self._groups:
                group_V, groups = self._groups[name]
                factor_V, bits = self._by_group(value_V, one, group_V, groups)
                yield bits, factor_V, none_V, partial(self._scaled, factor_V, "")
        yield from self._on_some(value_V, one)
        yield from self._added(value_V, one, state)

    def _by_group(
        self, value_V: torch.Tensor, one: float, group_V: torch.Tensor, groups: int
    ) -> tuple[torch.Tensor, float]:
        """A factor of each group, where it explains more than it costs."""
        own_G = self._modes(self._quotient(value_V, self.received_V), group_V, groups, least=0.5)
        saved_V = self._saved(value_V, one * torch.ones_like(value_V), own_G[group_V])
        saved_G = torch.zeros(groups, dtype=torch.float64).index_add_(0, group_V, saved_V)
        each = NUMBER + math.log2(groups)
        other_G = (saved_G > 0) & bool((saved_G > each).any())
        if int(other_G[group_V].sum()) < FEW * int(self.wrong_V.sum()):
            other_G[:] = False
        bits = 8 + (NUMBER if one != 1 else 0) + float(saved_G[other_G].clamp(max=each).sum())
        return torch.where(other_G, own_G, one)[group_V], bits

    def _saved(self, value_V: torch.Tensor, factor_V: torch.Tensor, other_V: torch.Tensor) -> torch.Tensor:
        """Bits that another factor saves, by position."""
        parts = []
        for each_V in (factor_V, other_V):
            received_V = self.received_V / each_V
            off_V = self._off(value_V, received_V, each_V)
            parts.append(self._bits(value_V, received_V, off_V, nothing=0.5))
        return parts[0] - parts[1]

    def _on_some(self, value_V: torch.Tensor, one: float) -> Iterator[_Ending]:
        """One more factor, of some tokens that have a pattern."""
        received_V = self.received_V / one
        rest_V = self._off(value_V, received_V) & self.mask_V & (received_V != 0) & (value_V != 0)
        if int(rest_V.sum()) < 4:
            return
        log_V = torch.where(rest_V, self._quotient(value_V, received_V), torch.nan)
        more = float(self._modes(log_V, torch.zeros_like(self.place_V), 1)[0])
        at_V = rest_V & ~self._off(value_V, received_V / more)
        if 2 * int(at_V.sum()) < int(rest_V.sum()):
            return
        bits, what, kind, _ = self.pattern(at_V, self.mask_V & (value_V != 0), each=4.0)
        if not what:
            return
        factor_V = torch.where(at_V, more, 1.0) * one
        name = {"token": "unexplained", "optimiser step": "scaled", "all": "scaled"}.get(
            kind, f"scaled by {_kind(kind)}"
        )
        told = self._scaled(one * torch.ones_like(value_V), "") if one != 1 else []
        told.append(
            (
                name,
                f"{int(at_V.sum())} tokens received {more * one:.4g} times what they should, {what}",
                more * one,
                at_V,
            )
        )
        yield bits + NUMBER + (NUMBER if one != 1 else 0), factor_V, torch.zeros_like(value_V), told.copy

    def _scaled(self, factor_V: torch.Tensor, why: str) -> list[tuple[str, str, float, torch.Tensor]]:
        """What is told of a factor."""
        own_V = factor_V[self.mask_V & (self.received_V != 0)]
        at_V = (factor_V.log().abs() > self.trained.precision) & (self.received_V != 0)
        if not at_V.any():
            return []
        low, high, size = float(own_V.min()), float(own_V.max()), float(own_V.max() if own_V.max() > 1 else own_V.min())
        because = f", {why}" if why else ""
        if high / low - 1 < 4 * self.trained.precision:
            middle = float(own_V.median())
            return [("scaled", f"every token received {middle:.4g} times what it should{because}", middle, at_V)]
        name, kind = "scaled by response", "response"
        for group, called in (("optimiser step", "scaled"), ("micro-batch", "scaled by micro-batch")):
            if group in self._groups and self._constant(factor_V, *self._groups[group]):
                name, kind = called, group
                break
        if "rank and optimiser step" in self._groups and name == "scaled by micro-batch":
            kind = "rank" if self._constant(factor_V, *self._groups["rank and optimiser step"]) else kind
        what = f"from {low:.4g} to {high:.4g} times what it should be, by {kind}{because}"
        values = own_V.log().unique()
        if len(values) == 2 and not because:
            _, what_of, *_ = self.pattern(at_V, self.mask_V & (self.received_V != 0))
            if what_of and float(factor_V[~at_V & self.mask_V].log().abs().max()) < self.trained.precision:
                return [
                    (
                        name,
                        f"tokens received {float(factor_V[at_V].median()):.4g} times what they should, {what_of}",
                        size,
                        at_V,
                    )
                ]
        return [(name, what, size, at_V)]

    def _constant(self, factor_V: torch.Tensor, group_V: torch.Tensor, groups: int) -> bool:
        there_V = self.mask_V & (self.received_V != 0)
        low_G = torch.full((groups,), torch.inf, dtype=torch.float64).scatter_reduce(
            0, group_V[there_V], factor_V[there_V], "amin"
        )
        high_G = torch.zeros(groups, dtype=torch.float64).scatter_reduce(0, group_V[there_V], factor_V[there_V], "amax")
        return bool((high_G <= low_G * (1 + 4 * self.trained.precision)).all())

    def _counted(self, value_V: torch.Tensor, one: float) -> Iterator[Divided]:
        """Divisors that count the tokens which train: without those that got nothing, with those beside the mask."""
        if self.counted is None:
            return
        trained = self.trained
        mask_NT, received_NT = trained.tokens.mask, trained.received_NT
        lost_NT, beside_NT = torch.zeros_like(mask_NT), ~mask_NT & (received_NT != 0)
        lost_NT[self.at] = self.mask_V & (self.received_V == 0) & (value_V != 0)
        if lost_NT.any():
            trains_V = self.mask_V & (value_V != 0)
            at_V = self.pattern(lost_NT[self.at] & trains_V, trains_V).at_V  # also tokens with an advantage of 0
            yield from self.counted(mask_NT & ~lost_NT)
            kept_NT = mask_NT & ~self.spread(at_V)
            judged_N1 = (kept_NT & self.spread(torch.ones_like(at_V))).any(dim=1, keepdim=True)
            yield from self.counted(
                kept_NT & judged_N1
            )  # of a response whose judged tokens are gone, the others are too
        if beside_NT.any():
            position_T = torch.arange(mask_NT.shape[1])
            last_N1 = torch.where(mask_NT, position_T, -1).amax(dim=1, keepdim=True)
            for counted_NT in (mask_NT | beside_NT, position_T <= last_N1, torch.ones_like(mask_NT)):
                yield from self.counted(counted_NT)

    def _added(self, value_V: torch.Tensor, one: float, state: _State) -> Iterator[_Ending]:
        """A term that is proportional to something else than the advantage: received = factor x (value + term)."""
        tokens = state.tokens
        off_V = self._off(value_V, self.received_V / one)
        if int(off_V.sum()) < 8:
            return
        log_probs_NT = tokens.log_probs
        bases = [("for each token", torch.ones_like(log_probs_NT)), ("times the log-probability", log_probs_NT)]
        bases.append(("for each token with a positive advantage", (tokens.advantages > 0).double()))
        bases.append(("times the probability", log_probs_NT.exp()))
        if tokens.ref is not None:
            for kind in ("k3", "k2"):
                slope_NT = kl_slope(replace(self.loss, kl=kind, options={}), tokens)
                bases.append((f"times the slope of a KL term ({kind})", slope_NT))
        generator = torch.Generator().manual_seed(0)
        for number, (what, basis_NT) in enumerate(bases):
            basis_V = torch.where(self.mask_V, basis_NT[self.at], 0.0)
            there_K = (basis_V.abs() > 1e-3).nonzero().squeeze(1)
            if len(there_K) < 8:
                continue
            u_K, v_K = value_V[there_K] / basis_V[there_K], self.received_V[there_K] / basis_V[there_K]
            pair = torch.randint(len(there_K), (2, 2000), generator=generator)
            du, dv = u_K[pair[0]] - u_K[pair[1]], v_K[pair[0]] - v_K[pair[1]]
            apart = du.abs() > 0.1 * self.unit
            slopes = torch.where(apart & (dv / du > 0), dv / du, torch.nan).log()
            zeros = torch.zeros(slopes.shape, dtype=torch.int64)
            factor = float(self._modes(slopes, zeros, 1, least=0.1)[0])
            factor = 1.0 if abs(math.log(factor)) < 4 * self.trained.precision else factor
            added_K = v_K / factor - u_K
            weight_K = basis_V[there_K].abs()
            added = _middle(added_K, weight_K)
            fits_K = (added_K - added).abs() * weight_K < 4 * self.trained.precision * (
                self.unit + abs(added) * weight_K
            )
            if 5 * int(fits_K.sum()) < 3 * len(there_K) or abs(added) < 4 * self.trained.precision:
                continue
            term_V = added * basis_V
            share = float((term_V * factor).norm() / self.received_V.norm())
            sentence = f"{added * factor:+.4g} {what} was added, {share:.2%} of the gradient"
            told = self._scaled(factor * torch.ones_like(value_V), "")
            told.append(("extra", sentence, share, term_V != 0))
            yield (
                (6 if not number else 8) + NUMBER + (NUMBER if factor != 1 else 0),
                factor * torch.ones_like(value_V),
                term_V,
                told.copy,
            )

    def _left(
        self,
        bits: float,
        value_V: torch.Tensor,
        factor_V: torch.Tensor,
        told: list[Any],
        free_V: torch.Tensor | None,
        state: _State,
    ) -> _End:
        """What a factor and a term leave, and its bits."""
        received_V = self.received_V / factor_V
        off_V = self._off(value_V, received_V, factor_V)
        free_bits = 0.0
        if free_V is not None:
            free_bits = self._unknown(off_V, free_V) * float((off_V & free_V).sum())
            off_V &= ~free_V
        told, left_bits, patterns = list(told), 0.0, set()
        lost_V = off_V & (received_V == 0)
        trains_V = self.mask_V & (value_V != 0)
        if lost_V.any():
            own, what, *_ = self.pattern(lost_V & trains_V, trains_V)
            share = float(lost_V.sum() / trains_V.sum())
            sentence = f"{share:.2%} of the tokens with an advantage that no clip takes received nothing"
            told.append(("lost", sentence + (f": {what.replace('all of ', '', 1)}" if what else ""), share, lost_V))
            left_bits += own
            patterns |= {"lost"} if what else set()
        beside_V = off_V & ~self.mask_V & (value_V == 0)
        if beside_V.any():
            share = float(beside_V.sum() / (received_V != 0).sum())
            told.append(("outside", f"{share:.2%} of the tokens that train are outside the mask", share, beside_V))
            left_bits += 4 + float(beside_V.sum())
        off_V = off_V & ~lost_V & ~beside_V
        clipped_V = off_V & self.clipped_V & (value_V == 0)
        if clipped_V.any():
            open_V = self._open(state.tokens, state.loss)
            clipped_V &= ~self._off(open_V, received_V)
        if clipped_V.any():
            share = float(clipped_V.sum() / self.mask_V.sum())
            sentence = f"{share:.2%} of the tokens received a gradient that the clip should take"
            told.append(("unclipped", sentence, share, clipped_V))
            left_bits += 4 + float(clipped_V.sum())
            off_V = off_V & ~clipped_V
        turned_V = off_V & ~self._off(-value_V, received_V)
        if turned_V.any():
            own, what, *_ = self.pattern(turned_V, trains_V)
            told.append(
                (
                    "sign",
                    f"{int(turned_V.sum())} tokens have the reversed sign" + (f": {what}" if what else ""),
                    -1.0,
                    turned_V,
                )
            )
            left_bits += own
            off_V = off_V & ~turned_V
        small_V = off_V & self.rounding & ((received_V - value_V).abs() <= ROUNDED * value_V.abs())
        rest_V = off_V & ~small_V
        left_bits += SMALL * float(small_V.sum()) + LEFT * float(rest_V.sum())
        return _End(
            bits + left_bits + free_bits, left_bits, factor_V, told, rest_V, value_V, small_V, patterns, factor_V
        )

    def rest(self, state: _State) -> tuple[str, str, float] | None:
        """Name, sentence and size of what no part explains: added, or multiplied, with numbers."""
        end, tokens = state.end, state.tokens
        at_V, advantages_V = end.rest_V, tokens.advantages[self.at]
        if not at_V.any():
            return None
        received_V = self.received_V / end.factor_V
        difference_V = torch.where(at_V, received_V - end.value_V, 0.0)
        share = float(difference_V.norm() / received_V.norm())
        own_K, got_K = end.value_V[at_V], received_V[at_V]
        low, high = (float(each) for each in (got_K - own_K).aminmax())
        added = f"received from {low:+.3g} to {high:+.3g} beside it, {share:.2%} of the gradient"
        times_K = (got_K / own_K)[own_K != 0]
        positive = bool(len(times_K)) and float((times_K > 0).double().mean()) > 0.98
        plain = bool((advantages_V[at_V] != 0).all())
        if plain and positive and self._is_ratio(state, at_V & (end.value_V != 0), times_K):
            low, high = (float(each) for each in times_K.aminmax())
            return "stale", f"the ratio in the loss is {low:.3g} to {high:.3g} times the one of the batch", share
        if not plain or self._independent(own_K, got_K):
            return "extra", f"{int(at_V.sum())} tokens {added}", share
        if not positive:
            return "unexplained", f"{int(at_V.sum())} tokens {added}", share
        low, high = (float(each) for each in times_K.aminmax())
        _, what, *_ = self.pattern(at_V, self.mask_V & (end.value_V != 0))
        sentence = f"{int(at_V.sum())} tokens received {low:.3g} to {high:.3g} times what they should"
        return "unexplained", sentence + (f", {what}" if what else ""), share

    @staticmethod
    def _independent(own_K: torch.Tensor, got_K: torch.Tensor) -> bool:
        """Whether what is added is alike for positive and negative, large and small values, rather than what they are
        multiplied by."""
        own_K, got_K = own_K[own_K != 0], got_K[own_K != 0]
        size_K = own_K.abs()
        splits = [
            part_K for part_K in (own_K > 0, size_K > size_K.median()) if 4 <= int(part_K.sum()) <= len(own_K) - 4
        ]
        if not splits:
            return False
        added, times = (
            sum(_apart(values_K, part_K) for part_K in splits) for values_K in (got_K - own_K, got_K / own_K)
        )
        return added < 0.7 * times

    def _is_ratio(self, state: _State, at_V: torch.Tensor, times_K: torch.Tensor) -> bool:
        """Whether factors of tokens are ratios: of most tokens, around 1, and not beyond the clip, which took the others."""
        options = state.loss.options
        trains_V = self.mask_V & (state.tokens.advantages[self.at] != 0) & (self.received_V != 0)
        if state.loss.account != "clip" or not self.columns.get("old") or 2 * int(at_V.sum()) < int(trains_V.sum()):
            return False
        ratio_K = times_K * state.tokens.log_ratio.exp()[self.at][at_V]
        sign_K, margin = state.tokens.advantages.sign()[self.at][at_V], 1 + 2 * self.trained.precision
        inside_K = torch.where(
            sign_K > 0, ratio_K <= (1 + options["high"]) * margin, ratio_K >= (1 - options["low"]) / margin
        )
        both = min(float((ratio_K > 1).double().mean()), float((ratio_K < 1).double().mean()))
        return float(inside_K.double().mean()) > 0.99 and both > 0.1

    def _open(self, tokens: Tokens, loss: Loss) -> torch.Tensor:
        return self.trained.expected(_unclipped(loss), tokens)[0][self.at]

    # --------------------------------------------------------------------------------------------------------------- search

    def explain(self) -> tuple[_State, list[_State]]:
        """The shortest explanation, and others that explain as much and are about as short."""
        root = _State(self.trained.tokens, self.loss, self.intended_NT)
        root.end = self.close(root)
        best, beam, states = root, [root], [root]
        if root.end.left_bits < 1 and all(name.startswith("scaled") for name, *_ in root.end.told):
            return root, []
        for _ in range(DEPTH):
            children = [child for state in beam for child in self._children(state)]
            if not children:
                break
            children.sort(key=lambda pair: pair[0])
            beam = []
            for _, child in children[: 2 * BEAM]:
                child.end = self.close(child)
                beam.append(child)
            beam = sorted(beam, key=lambda state: state.total)[:BEAM]
            states += beam
            if beam[0].total > best.total - max(4, 0.1 * best.end.left_bits):
                break
            best = beam[0]
            if best.end.left_bits < 24:
                break
        if best.end.rest_V.any():
            return best, []
        alike = [
            state
            for state in states
            if state is not best
            and not state.end.rest_V.any()
            and state.end.small_V.sum() <= best.end.small_V.sum()
            and state.total <= 1.3 * best.total + 8
        ]
        return best, sorted(alike, key=lambda state: state.total)

    def _children(self, state: _State) -> Iterator[tuple[float, _State]]:
        """Explanations with one part more: for all responses, or for those that it fits better."""
        bases = [state.end.base_V, state.end.factor_V] if state.end.free else [state.end.base_V]
        changes = list(self._changes(state))
        for base_V in bases:
            yield from self._with_base(state, changes, base_V)

    def _with_base(
        self, state: _State, changes: Sequence[_Change], base_V: torch.Tensor
    ) -> Iterator[tuple[float, _State]]:
        """Likewise, by what they leave after a factor of each position."""
        value_V = state.value_NT[self.at]
        _, before_V = self._quick(value_V, base_V)
        for change in changes:
            other_NT = change.value_NT
            if other_NT is None:
                other_NT = self.trained.expected(change.loss, change.tokens)[0]
            other_V = other_NT[self.at]
            changed_V = self._off(value_V, other_V)
            if not (changed_V & self.wrong_V).any():
                continue
            free_NT = change.free_NT if state.free_NT is None else state.free_NT
            free_V = None if free_NT is None else free_NT[self.at]
            quick, after_V = self._quick(other_V, base_V, free_V)
            if free_V is not None:
                after_V = torch.where(free_V, before_V, after_V)
            yield state.bits + change.bits + quick, self._child(state, change, other_NT, free_NT, change.bits, "")
            if change.loss is not state.loss:
                continue
            n_V, count = self.at[0], len(self.trained.rows_N)
            saved_N = torch.zeros(count, dtype=torch.float64).index_add_(0, n_V, before_V - after_V)
            better_N, differs_N = saved_N > LEFT, torch.zeros(count, dtype=torch.bool)
            differs_N[n_V[changed_V]] = True
            if not better_N.any() or bool((better_N | ~differs_N).all()):
                continue
            own, what, *_ = self.pattern(better_N[n_V] & changed_V, changed_V, each=6.0)
            own = min(own, 4 + 8.0 * float(better_N.sum()))
            chosen_N1 = better_N.unsqueeze(1)
            mixed_NT = torch.where(chosen_N1, other_NT, state.value_NT)
            free_NT = None if free_NT is None else free_NT & chosen_N1
            quick, _ = self._quick(mixed_NT[self.at], base_V, None if free_NT is None else free_NT[self.at])
            tokens = Tokens(
                *(
                    None if a is None or b is None else torch.where(chosen_N1, a, b)
                    for a, b in zip(vars(change.tokens).values(), vars(state.tokens).values(), strict=True)
                )
            )
            where = what or f"{int(better_N.sum())} of {count} responses"
            child = self._child(state, replace(change, tokens=tokens), mixed_NT, free_NT, change.bits + own, where)
            yield state.bits + change.bits + own + quick, child

    def _child(
        self,
        state: _State,
        change: _Change,
        value_NT: torch.Tensor,
        free_NT: torch.Tensor | None,
        bits: float,
        where: str,
    ) -> _State:
        size_NT = torch.maximum(value_NT.abs(), state.value_NT.abs()) + self.unit
        at_NT = (value_NT - state.value_NT).abs() > self.trained.precision * size_NT
        what = change.what + (f", in {where}" if where else "")
        return _State(
            change.tokens,
            change.loss,
            value_NT,
            state.bits + bits,
            (*state.told, Told(change.name, what, change.size, at_NT)),
            (*state.kinds, change.kind),
            free_NT,
        )

    # --------------------------------------------------------------------------------------------------------------- changes

    def _changes(self, state: _State) -> Iterator[_Change]:
        for changes in (self._advantages, self._old, self._weights, self._clips, self._kl):
            yield from changes(state)

    def _put(
        self,
        state: _State,
        kind: str,
        name: str,
        what: str,
        size: float,
        bits: float,
        free: Any = None,
        **columns: torch.Tensor,
    ) -> Iterator[_Change]:
        if kind not in state.kinds:
            tokens = replace(state.tokens, **columns)
            yield _Change(kind, name, what, size, bits, tokens, state.loss, free_NT=free)

    def _edge(self, by: int) -> torch.Tensor:
        """The tokens into which a shift brings a value from elsewhere."""
        mask_NT = self.trained.tokens.mask
        order_NT = mask_NT.cumsum(dim=1)
        return mask_NT & (order_NT == (1 if by > 0 else mask_NT.sum(dim=1, keepdim=True)))

    def _advantages(self, state: _State) -> Iterator[_Change]:
        tokens = state.tokens
        own_NT, mask_NT = tokens.advantages, tokens.mask
        yield from self._put(state, "sign", "sign", "the sign is reversed", -1.0, 5, advantages=-own_NT)
        for sign, what in ((1, "positive"), (-1, "negative")):
            yield from self._put(
                state, "sign", "sign", f"all advantages are {what}", -1.0, 6, advantages=sign * own_NT.abs()
            )
        coarse_NT = own_NT.bfloat16().double()
        yield from self._put(
            state, "rounded", "rounded", "advantages are those of bf16", ROUNDED, 2, advantages=coarse_NT
        )
        if int((own_NT != 0).sum()) == 0:
            return
        for by in (1, -1, 2, -2):
            side = f"{'the token' if abs(by) == 1 else 'two tokens'} {'before' if by > 0 else 'after'}"
            moved = {"advantages": _roll(own_NT, by), "mask": _roll(mask_NT, by)}
            yield from self._put(
                state, "shift", "shifted", f"tokens have the advantages and mask of {side}", by, 8, **moved
            )
            column_T = torch.arange(mask_NT.shape[1])
            wrapped_NT = mask_NT & ((column_T < by) if by > 0 else (column_T >= mask_NT.shape[1] + by))
            for kind, packed_NT in (
                ("", moved["advantages"]),
                (" along the trained ones", _roll_packed(own_NT, mask_NT, by)),
            ):
                advantages_NT = torch.where(mask_NT, packed_NT, 0.0)
                what = f"tokens have the advantages of {side}{kind}"
                yield from self._put(state, "shift", "shifted", what, by, 10, free=wrapped_NT, advantages=advantages_NT)
        bound = float(self._implied(state, "advantages").nan_to_num().abs().max())
        what = f"advantages beyond {bound:.4g} count as that"
        cut_NT = own_NT.clamp(-bound, bound)
        yield from self._put(state, "cut", "unexplained", what, bound, 8 + NUMBER, advantages=cut_NT)
        differs_N1 = _differs_within(own_NT, mask_NT)
        if differs_N1.any():
            yield from self._flat(state)
        yield from self._of_others(state, "advantages", "advantages")

    def _flat(self, state: _State) -> Iterator[_Change]:
        """Without the differences within a response, or with their square."""
        tokens = state.tokens
        own_NT, mask_NT = tokens.advantages, tokens.mask
        size_NT = torch.where(mask_NT & (own_NT != 0), own_NT.abs(), torch.nan)
        least_N1 = size_NT.nan_to_num(torch.inf).amin(dim=1, keepdim=True)
        least_N1 = torch.where(least_N1.isinf(), 1.0, least_N1)
        first_N1 = own_NT.gather(1, mask_NT.long().argmax(dim=1, keepdim=True))
        last_N1 = own_NT.gather(1, torch.where(mask_NT, torch.arange(own_NT.shape[1]), 0).amax(dim=1, keepdim=True))
        rows = {
            "their mean": tokens.row_mean(own_NT),
            "the first token's": first_N1,
            "the last token's": last_N1,
            "their sum": tokens.row_mean(own_NT) * mask_NT.sum(dim=1, keepdim=True),
        }
        implied_NT = self._implied(state, "advantages")
        rows["another number"] = implied_NT.nanmedian(dim=1, keepdim=True).values.nan_to_num()
        for which, value_N1 in rows.items():
            what = f"each response has one advantage for all its tokens, {which}"
            bits = 6.0 if which != "another number" else NUMBER * len(own_NT)
            advantages_NT = torch.where(mask_NT, value_N1.expand_as(own_NT), 0.0)
            yield from self._put(state, "flat", "flattened", what, 0.0, bits, advantages=advantages_NT)
        rows_NT = {"flattened": own_NT.sign() * least_N1, "weights": own_NT * own_NT.abs() / least_N1}
        most_N1 = size_NT.nan_to_num(0.0).amax(dim=1, keepdim=True) / least_N1
        times = float(
            most_N1[_differs_within(own_NT, mask_NT)].median()
        )  # of a response whose tokens all have the large weight
        for name, values_NT in rows_NT.items():
            more = times if name == "weights" else 1 / times
            closer_NT = (implied_NT - more * values_NT).abs() < (implied_NT - values_NT).abs()
            whole_N1 = ~_differs_within(own_NT, mask_NT) & (closer_NT & mask_NT).any(dim=1, keepdim=True)
            values_NT = torch.where(whole_N1, more * values_NT, values_NT)
            what = "token weights count twice" if name == "weights" else "token weights are left out"
            of_V = (mask_NT & ~_differs_within(own_NT, mask_NT))[self.at]
            bits = 7 + self.pattern(whole_N1.expand_as(mask_NT)[self.at] & of_V, of_V, each=1.0).bits
            yield from self._put(state, "flat", name, what, 2.0, bits, advantages=values_NT)

    def _implied(self, state: _State, column: str) -> torch.Tensor:
        """Values of a column that would give what was received; NaN where none follows, (N, T)."""
        trained, tokens = self.trained, state.tokens
        factor_NT = torch.ones_like(trained.received_NT)
        factor_NT[self.at] = state.end.base_V
        zeros_NT = torch.zeros_like(tokens.advantages)
        rest_NT = trained.expected(state.loss, replace(tokens, advantages=zeros_NT))[0]
        value_NT = trained.received_NT / factor_NT - rest_NT
        if column == "advantages":
            up_NT = trained.expected(state.loss, replace(tokens, advantages=zeros_NT + 1))[0] - rest_NT
            down_NT = rest_NT - trained.expected(state.loss, replace(tokens, advantages=zeros_NT - 1))[0]
            unit_NT = torch.where(
                value_NT > 0, up_NT, torch.where(value_NT < 0, down_NT, torch.minimum(up_NT, down_NT))
            )
        else:
            unit_NT = trained.expected(_unclipped(state.loss), tokens)[0] - rest_NT
        implied_NT = torch.where((unit_NT != 0) & tokens.mask & ~trained.ignored_NT, value_NT / unit_NT, torch.nan)
        if column == "advantages":
            return implied_NT
        implied_NT = torch.where(implied_NT > 0, implied_NT, torch.nan)
        return implied_NT * tokens.weights if column == "weights" else tokens.old - implied_NT.log()

    def _of_others(self, state: _State, column: str, called: str) -> Iterator[_Change]:
        """A column of other responses: in an order that has a rule, or of any."""
        if f"rows of {column}" in state.kinds:
            return
        for given_BT in self.columns.get(column) or ():
            yield from self._of_rows(state, column, called, given_BT)

    def _of_rows(self, state: _State, column: str, called: str, given_BT: torch.Tensor) -> Iterator[_Change]:
        """Likewise; ``given_BT`` is NaN where a response's value is not known."""
        trained, mask_NT = self.trained, state.tokens.mask
        rows_N, kind = trained.rows_N, f"rows of {column}"
        implied_NT = self._implied(state, column)
        scales = [1.0]
        if column == "advantages":
            own_N, got_N = (
                _row_sizes(each) for each in (torch.where(mask_NT, given_BT[rows_N], torch.nan), implied_NT)
            )
            more = float(got_N.nanmedian() / own_N.nanmedian())
            if math.isfinite(more) and more > 0 and abs(math.log(more)) > 1e-2:
                scales.append(more)
        for scale in scales:
            chosen_N = fitting_rows(implied_NT / scale, given_BT, rows_N, max(1e-3, 2 * trained.precision))
            moved_N = chosen_N != rows_N
            if not moved_N.any():
                continue
            pairs = set(zip(rows_N[moved_N].tolist(), chosen_N[moved_N].tolist(), strict=True))
            what = f"{len(pairs)} of {len(rows_N.unique())} responses have the {called} of another one"
            own, got = (_counted_rows(given_BT[each]) for each in (rows_N, chosen_N))
            bits = 6 + NUMBER * len(pairs)
            if own == got and len(pairs) > 1:  # as many of each value as before
                bits = 0.8 * math.log2(math.comb(len(rows_N.unique()), len(pairs)))
            rules = [(f"{what}: {rule}", order_N, 11.0) for rule, order_N in self._orders()]
            for sentence, order_N, length in ((what, chosen_N, bits), *rules):
                other_NT = torch.where(mask_NT, given_BT[order_N], 0.0)
                unknown_NT = other_NT.isnan()
                values = {column: torch.where(unknown_NT, 0.0, other_NT)}
                count = int((order_N != rows_N).sum())
                free_NT = unknown_NT if unknown_NT.any() else None
                yield from self._put(state, kind, "swapped", sentence, count, length, free=free_NT, **values)

    def _orders(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Orders of responses that mistakes give: rule and, for each of the N, the response whose values it has."""
        rows_N, piece_N = self.trained.rows_N, self.trained.piece_N
        B = int(rows_N.max()) + 1
        everything_B = torch.arange(B)
        rules = [(f"of the one {'before' if by > 0 else 'after'}", everything_B.roll(by)) for by in (1, -1)]
        rules.append(("in reverse", everything_B.flip(0)))
        rules += [
            (
                f"repeated, not interleaved ({B // size} groups of {size})",
                everything_B.reshape(B // size, size).T.reshape(-1),
            )
            for size in range(2, B)
            if B % size == 0
        ]
        for rule, order_B in rules:
            yield rule, order_B[rows_N]
        for rule in (
            "in reverse in each micro-batch",
            "of the next one in each micro-batch",
            "of the one before in each micro-batch",
        ):
            order_N = rows_N.clone()
            for piece in piece_N.unique():
                own = rows_N[piece_N == piece]
                order_N[piece_N == piece] = own.flip(0) if "reverse" in rule else own.roll(-1 if "next" in rule else 1)
            yield rule, order_N

    def _old(self, state: _State) -> Iterator[_Change]:
        tokens = state.tokens
        old_NT, own_NT = tokens.old, tokens.log_probs
        if not self.columns.get("old"):
            return
        for by in (1, -1):
            side = "before" if by > 0 else "after"
            what = f"tokens have the old log-probability of the token {side}"
            yield from self._put(state, "old", "shifted", what, by, 9, free=self._edge(by), old=_roll(old_NT, by))
        ratios = {
            "the ratio in the loss is 1": own_NT,
            "the ratio counts twice": 2 * old_NT - own_NT,
            "the ratio is inverted": 2 * own_NT - old_NT,
        }
        if tokens.ref is not None:
            ratios["old log-probabilities are those of the reference"] = tokens.ref
        moved_N1 = tokens.row_mean(own_NT - old_NT)
        ratios["the ratio is the mean one of the response"] = own_NT - moved_N1
        for what, other_NT in ratios.items():
            yield from self._put(state, "old", "stale", what, 1.0, 7, old=other_NT)
        if state.loss.account in ("clip", "gspo", "clip_sequence") and "old" not in state.kinds:
            other = {"clip": "gspo", "gspo": "clip", "clip_sequence": "clip"}[str(state.loss.account)]
            level = "the ratio is the whole response's" if other == "gspo" else "the ratio is each token's"
            yield _Change("old", "stale", level, 1.0, 8, tokens, replace(state.loss, account=other))
            plain_NT = self.trained.expected(_unclipped(state.loss), replace(tokens, old=own_NT))[0]
            zero_NT = self.trained.expected(state.loss, tokens)[1]
            kept_NT = torch.where(zero_NT, plain_NT - self._plain(state, own_NT), plain_NT)
            what = "the ratio is left out, the clip is not"
            yield _Change("old", "stale", what, 1.0, 8, replace(tokens, old=own_NT), state.loss, value_NT=kept_NT)
        yield from self._of_others(state, "old", "old log-probabilities")

    def _plain(self, state: _State, old_NT: torch.Tensor) -> torch.Tensor:
        """Without clip and KL term, by the ratio to ``old_NT``."""
        return self.trained.expected(replace(_unclipped(state.loss), kl=None), replace(state.tokens, old=old_NT))[0]

    def _weights(self, state: _State) -> Iterator[_Change]:
        if not self.columns.get("weights"):
            return
        own_NT, mask_NT = state.tokens.weights, state.tokens.mask
        powers = {0: "are left out", 2: "count twice", -1: "divide", 0.5: "count half (their square root)"}
        for power, what in powers.items():
            yield from self._put(
                state, "weights", "weights", f"the importance weights {what}", power, 7, weights=own_NT**power
            )
        mean_NT = state.tokens.row_mean(own_NT).expand_as(own_NT)
        yield from self._put(
            state, "weights", "weights", "the importance weights are the response's mean", 1.0, 8, weights=mean_NT
        )
        implied_NT = self._implied(state, "weights")
        for bound, called in (
            (implied_NT.nan_to_num(-1.0).max(), "max"),
            (implied_NT.nan_to_num(torch.inf).min(), "min"),
        ):
            if torch.isfinite(bound) and bound > 0:
                cut_NT = own_NT.clamp(**{called: float(bound)})
                what = f"the importance weights are cut at {float(bound):.4g}"
                yield from self._put(state, "weights", "weights", what, float(bound), 8 + NUMBER, weights=cut_NT)
        for by in (1, -1):
            what = f"tokens have the importance weight of the token {'before' if by > 0 else 'after'}"
            moved_NT = torch.where(mask_NT, _roll(own_NT, by), 1.0)
            yield from self._put(state, "weights", "shifted", what, by, 9, free=self._edge(by), weights=moved_NT)
        yield from self._of_others(state, "weights", "importance weights")

    def _clips(self, state: _State) -> Iterator[_Change]:
        loss, tokens = state.loss, state.tokens
        if (
            "clip" in state.kinds
            or "low" not in loss.options
            or loss.account not in ("clip", "gspo", "clip_sequence", "geo_mean")
        ):
            return
        yield _Change("clip", "unclipped", "no token is clipped", 0.0, 6, tokens, _unclipped(loss))
        if loss.account != "clip":
            return
        if loss.options.get("cap") is not None:
            other = replace(loss, options=dict(loss.options) | {"cap": None})
            yield _Change(
                "clip", "unclipped", "large ratios of negative advantages are not clipped", 0.0, 7, tokens, other
            )
        ratio_V, sign_V = tokens.log_ratio.exp()[self.at], tokens.advantages.sign()[self.at]
        there_V = self.mask_V & (self.received_V != 0)
        high = float(torch.where(there_V & (sign_V > 0), ratio_V, 1.0).max()) - 1
        low = 1 - float(torch.where(there_V & (sign_V < 0), ratio_V, 1.0).min())
        margin = 1 + 2 * self.trained.precision
        wider = high > loss.options["high"] * margin or low > loss.options["low"] * margin
        bounds = {"low": low * margin, "high": high * margin}
        what = f"the clip is at {1 - low:.3g} and {1 + high:.3g}"
        other = replace(loss, options=dict(loss.options) | bounds)
        yield _Change("clip", "unclipped" if wider else "lost", what, high, 8 + NUMBER, tokens, other)
        rest_NT = self.trained.expected(loss, replace(tokens, advantages=torch.zeros_like(tokens.advantages)))[0]
        ratio_NT = tokens.log_ratio.exp()
        outside_NT = (ratio_NT < 1 - loss.options["low"]) | (ratio_NT > 1 + loss.options["high"])
        both_NT = torch.where(outside_NT, rest_NT, self.trained.expected(_unclipped(loss), tokens)[0])
        yield _Change("clip", "lost", "the clip takes both sides", 0.0, 8, tokens, loss, value_NT=both_NT)
        other = replace(
            loss, account="cispo", options={"lowest": 1 - loss.options["low"], "highest": 1 + loss.options["high"]}
        )
        yield _Change(
            "clip", "unclipped", "clipped tokens train with the bound in the ratio's place", 0.0, 8, tokens, other
        )
        turned_NT = 2 * rest_NT - self.trained.expected(loss, replace(tokens, advantages=-tokens.advantages))[0]
        yield _Change("clip", "unclipped", "the clip is on the other side", 0.0, 8, tokens, loss, value_NT=turned_NT)

    def _kl(self, state: _State) -> Iterator[_Change]:
        loss = state.loss
        if not loss.kl or "kl" in state.kinds:
            return
        for times, what in ((-1, "has the reversed sign"), (0, "is left out"), (2, "counts twice")):
            other = replace(loss, kl_coef=times * loss.kl_coef)
            yield _Change("kl", "sign" if times < 0 else "extra", f"the KL term {what}", times, 6, state.tokens, other)
        for kind in {"k1", "k2", "k3"} - {loss.kl}:
            what = f"the KL term is `{kind}`"
            yield _Change("kl", "extra", what, 1.0, 8, state.tokens, replace(loss, kl=kind))


# ------------------------------------------------------------------------------------------------------------------- helpers


def fitting_rows(wanted_NT: torch.Tensor, given_BT: torch.Tensor, own_N: torch.Tensor, near: float) -> torch.Tensor:
    """For each response the one whose values fit best, its own where that fits as well. NaN is not wanted. Of many responses
    those are compared that fit at most of a few tokens."""
    chosen_N = own_N.clone()
    there_NT = wanted_NT.isfinite()
    other_NT = there_NT & ~_near(given_BT[own_N], wanted_NT, near)
    for n in other_NT.any(dim=1).nonzero().squeeze(1).tolist():
        at, rows = there_NT[n].nonzero().squeeze(1), torch.arange(len(given_BT))
        if len(rows) > COMPARED:
            some = at[:: max(1, len(at) // 16)]
            fits_B = _near(given_BT[:, some], wanted_NT[n, some], near).sum(dim=1)
            rows = fits_B.argsort(descending=True, stable=True)[:COMPARED].sort().values
        fits_K = _near(given_BT[rows[:, None], at], wanted_NT[n, at], near).sum(dim=1)
        if len(at) - other_NT[n].sum() < fits_K.max():
            chosen_N[n] = rows[fits_K.argmax()]
    return chosen_N


def _near(values: torch.Tensor, wanted: torch.Tensor, near: float) -> torch.Tensor:
    return (values - wanted).abs() <= near * wanted.abs() + 1e-12


def _unclipped(loss: Loss) -> Loss:
    if "low" not in loss.options or loss.account == "dppo":
        return loss
    return replace(loss, options=dict(loss.options) | {"low": math.inf, "high": math.inf, "cap": None})


def _roll(values_NT: torch.Tensor, by: int) -> torch.Tensor:
    """Each token has the value of the one ``by`` before it; 0 comes in at the end."""
    moved_NT = values_NT.roll(by, 1)
    moved_NT[:, slice(by) if by > 0 else slice(by, None)] = 0
    return moved_NT


def _roll_packed(values_NT: torch.Tensor, mask_NT: torch.Tensor, by: int) -> torch.Tensor:
    """Likewise along the tokens of the mask alone."""
    order_NT = torch.where(mask_NT, mask_NT.cumsum(dim=1) - 1, mask_NT.shape[1] - 1)
    packed_NT = torch.zeros_like(values_NT).scatter(1, torch.where(mask_NT, order_NT, 0), 0.0)
    n, t = mask_NT.nonzero(as_tuple=True)
    packed_NT[n, order_NT[n, t]] = values_NT[n, t]
    return torch.where(mask_NT, _roll(packed_NT, by).gather(1, order_NT), 0.0)


def _differs_within(values_NT: torch.Tensor, mask_NT: torch.Tensor) -> torch.Tensor:
    """(N, 1) whether a response has several values."""
    first_N1 = values_NT.gather(1, mask_NT.long().argmax(dim=1, keepdim=True))
    return ((values_NT != first_N1) & mask_NT).any(dim=1, keepdim=True)


def _row_sizes(values_NT: torch.Tensor) -> torch.Tensor:
    """(N,) the middle size of each response's values that are not 0; NaN without one."""
    return torch.where(values_NT != 0, values_NT.abs(), torch.nan).nanmedian(dim=1).values


def _counted_rows(values_NT: torch.Tensor) -> Counter[float]:
    """How many responses have which sum."""
    return Counter(round(float(each), 4) for each in values_NT.nansum(dim=1))


def _apart(values_K: torch.Tensor, part_K: torch.Tensor) -> float:
    """The largest distance between the distribution functions of a part and of the rest (Kolmogorov and Smirnov)."""
    order_K = values_K.argsort()
    part_K = part_K[order_K].double()
    return float((part_K.cumsum(0) / part_K.sum() - (1 - part_K).cumsum(0) / (1 - part_K).sum()).abs().max())


def _middle(values_K: torch.Tensor, weight_K: torch.Tensor) -> float:
    """The weighted median."""
    order_K = values_K.argsort()
    total_K = weight_K[order_K].cumsum(0)
    return float(values_K[order_K[int(torch.searchsorted(total_K, total_K[-1:] / 2))]])


def _plural(name: str) -> str:
    """Of a group's name."""
    return (
        name.replace("response", "responses", 1)
        if name.startswith("response")
        else name.replace("micro-batch", "micro-batches") + ("s" if not name.startswith("micro") else "")
    )


def _kind(name: str) -> str:
    return "response" if name.startswith("response") else "micro-batch"
