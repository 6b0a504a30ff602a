"""Changes of a loss: a column (shifted, of other responses, reversed, a power), the ratio, the clip or the KL term.

Shape suffixes: N responses of all optimiser steps, T response tokens, V judged positions, one after the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from .judged import NUMBER, ROUNDED, Judged, State, roll, unclipped
from .losses import Loss, Tokens

COMPARED = 64
"""Responses whose values are held against those that one received."""


@dataclass(frozen=True)
class Change:
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


class Changes(Judged):
    """Parts to be tried."""

    def _changes(self, state: State) -> Iterator[Change]:
        for changes in (self._advantages, self._old, self._weights, self._clips, self._kl):
            yield from changes(state)

    def _put(
        self,
        state: State,
        kind: str,
        name: str,
        what: str,
        size: float,
        bits: float,
        free: Any = None,
        **columns: torch.Tensor,
    ) -> Iterator[Change]:
        if kind not in state.kinds:
            tokens = replace(state.tokens, **columns)
            yield Change(kind, name, what, size, bits, tokens, state.loss, free_NT=free)

    def _edge(self, by: int) -> torch.Tensor:
        """The tokens into which a shift brings a value from elsewhere."""
        mask_NT = self.trained.tokens.mask
        order_NT = mask_NT.cumsum(dim=1)
        return mask_NT & (order_NT == (1 if by > 0 else mask_NT.sum(dim=1, keepdim=True)))

    def _advantages(self, state: State) -> Iterator[Change]:
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
            moved = {"advantages": roll(own_NT, by), "mask": roll(mask_NT, by)}
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

    def _flat(self, state: State) -> Iterator[Change]:
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

    def _implied(self, state: State, column: str) -> torch.Tensor:
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
            unit_NT = trained.expected(unclipped(state.loss), tokens)[0] - rest_NT
        implied_NT = torch.where((unit_NT != 0) & tokens.mask & ~trained.ignored_NT, value_NT / unit_NT, torch.nan)
        if column == "advantages":
            return implied_NT
        implied_NT = torch.where(implied_NT > 0, implied_NT, torch.nan)
        return implied_NT * tokens.weights if column == "weights" else tokens.old - implied_NT.log()

    def _of_others(self, state: State, column: str, called: str) -> Iterator[Change]:
        """A column of other responses: in an order that has a rule, or of any."""
        if f"rows of {column}" in state.kinds:
            return
        for given_BT in self.columns.get(column) or ():
            yield from self._of_rows(state, column, called, given_BT)

    def _of_rows(self, state: State, column: str, called: str, given_BT: torch.Tensor) -> Iterator[Change]:
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

    def _old(self, state: State) -> Iterator[Change]:
        tokens = state.tokens
        old_NT, own_NT = tokens.old, tokens.log_probs
        if not self.columns.get("old"):
            return
        for by in (1, -1):
            side = "before" if by > 0 else "after"
            what = f"tokens have the old log-probability of the token {side}"
            yield from self._put(state, "old", "shifted", what, by, 9, free=self._edge(by), old=roll(old_NT, by))
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
            yield Change("old", "stale", level, 1.0, 8, tokens, replace(state.loss, account=other))
            plain_NT = self.trained.expected(unclipped(state.loss), replace(tokens, old=own_NT))[0]
            zero_NT = self.trained.expected(state.loss, tokens)[1]
            kept_NT = torch.where(zero_NT, plain_NT - self._plain(state, own_NT), plain_NT)
            what = "the ratio is left out, the clip is not"
            yield Change("old", "stale", what, 1.0, 8, replace(tokens, old=own_NT), state.loss, value_NT=kept_NT)
        yield from self._of_others(state, "old", "old log-probabilities")

    def _plain(self, state: State, old_NT: torch.Tensor) -> torch.Tensor:
        """Without clip and KL term, by the ratio to ``old_NT``."""
        return self.trained.expected(replace(unclipped(state.loss), kl=None), replace(state.tokens, old=old_NT))[0]

    def _weights(self, state: State) -> Iterator[Change]:
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
            moved_NT = torch.where(mask_NT, roll(own_NT, by), 1.0)
            yield from self._put(state, "weights", "shifted", what, by, 9, free=self._edge(by), weights=moved_NT)
        yield from self._of_others(state, "weights", "importance weights")

    def _clips(self, state: State) -> Iterator[Change]:
        loss, tokens = state.loss, state.tokens
        if (
            "clip" in state.kinds
            or "low" not in loss.options
            or loss.account not in ("clip", "gspo", "clip_sequence", "geo_mean")
        ):
            return
        yield Change("clip", "unclipped", "no token is clipped", 0.0, 6, tokens, unclipped(loss))
        if loss.account != "clip":
            return
        if loss.options.get("cap") is not None:
            other = replace(loss, options=dict(loss.options) | {"cap": None})
            yield Change(
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
        yield Change("clip", "unclipped" if wider else "lost", what, high, 8 + NUMBER, tokens, other)
        rest_NT = self.trained.expected(loss, replace(tokens, advantages=torch.zeros_like(tokens.advantages)))[0]
        ratio_NT = tokens.log_ratio.exp()
        outside_NT = (ratio_NT < 1 - loss.options["low"]) | (ratio_NT > 1 + loss.options["high"])
        both_NT = torch.where(outside_NT, rest_NT, self.trained.expected(unclipped(loss), tokens)[0])
        yield Change("clip", "lost", "the clip takes both sides", 0.0, 8, tokens, loss, value_NT=both_NT)
        other = replace(
            loss, account="cispo", options={"lowest": 1 - loss.options["low"], "highest": 1 + loss.options["high"]}
        )
        yield Change(
            "clip", "unclipped", "clipped tokens train with the bound in the ratio's place", 0.0, 8, tokens, other
        )
        turned_NT = 2 * rest_NT - self.trained.expected(loss, replace(tokens, advantages=-tokens.advantages))[0]
        yield Change("clip", "unclipped", "the clip is on the other side", 0.0, 8, tokens, loss, value_NT=turned_NT)

    def _kl(self, state: State) -> Iterator[Change]:
        loss = state.loss
        if not loss.kl or "kl" in state.kinds:
            return
        for times, what in ((-1, "has the reversed sign"), (0, "is left out"), (2, "counts twice")):
            other = replace(loss, kl_coef=times * loss.kl_coef)
            yield Change("kl", "sign" if times < 0 else "extra", f"the KL term {what}", times, 6, state.tokens, other)
        for kind in {"k1", "k2", "k3"} - {loss.kl}:
            what = f"the KL term is `{kind}`"
            yield Change("kl", "extra", what, 1.0, 8, state.tokens, replace(loss, kl=kind))


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


def _roll_packed(values_NT: torch.Tensor, mask_NT: torch.Tensor, by: int) -> torch.Tensor:
    """Likewise along the tokens of the mask alone."""
    order_NT = torch.where(mask_NT, mask_NT.cumsum(dim=1) - 1, mask_NT.shape[1] - 1)
    packed_NT = torch.zeros_like(values_NT).scatter(1, torch.where(mask_NT, order_NT, 0), 0.0)
    n, t = mask_NT.nonzero(as_tuple=True)
    packed_NT[n, order_NT[n, t]] = values_NT[n, t]
    return torch.where(mask_NT, roll(packed_NT, by).gather(1, order_NT), 0.0)


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
