"""The end of an explanation: one factor (or one by micro-batch, by response), an added term, and the tokens that got nothing.

Shape suffixes: N responses of all optimiser steps, T response tokens, V judged positions, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .judged import FEW, LEFT, NUMBER, ROUNDED, SMALL, Divided, End, Judged, State
from .losses import kl_slope

Ending = tuple[float, torch.Tensor, torch.Tensor, Callable[[], list[tuple[str, str, float, torch.Tensor]]]]
"""Bits, factor and added term of each position, and what is told of them."""


class Endings(Judged):
    """Ends of explanations."""

    def close(self, state: State) -> End:
        """The shortest end of an explanation."""
        value_V = state.value_NT[self.at]
        free_V = None if state.free_NT is None else state.free_NT[self.at]
        best: End | None = None
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

    def _ends(self, value_V: torch.Tensor, state: State) -> Iterator[Ending]:
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

    def _on_some(self, value_V: torch.Tensor, one: float) -> Iterator[Ending]:
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
        factor_V = torch.ones_like(value_V).masked_fill(at_V, more) * one
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
        if not (at_V & self.mask_V).any():
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

    def _added(self, value_V: torch.Tensor, one: float, state: State) -> Iterator[Ending]:
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
        state: State,
    ) -> End:
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
        return End(
            bits + left_bits + free_bits, left_bits, factor_V, told, rest_V, value_V, small_V, patterns, factor_V
        )

    def rest(self, state: State) -> tuple[str, str, float] | None:
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

    def _is_ratio(self, state: State, at_V: torch.Tensor, times_K: torch.Tensor) -> bool:
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


def _kind(name: str) -> str:
    return "response" if name.startswith("response") else "micro-batch"
