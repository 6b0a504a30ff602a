"""Compare what each token received with what the loss says: a table of what differs, by how much and where.

What differs is explained by one change of the loss (a column, the ratio, the clip, the KL term) and one factor for each
optimiser step, rank, micro-batch or response. A pair costs the bits of its change, 12 for each free number, 8 for each
token that is left over, and less for tokens of a known kind, such as lost ones. The cheapest pair is told.

Effective advantages: ``wanted`` is what the loss says (a table calls it intended, a receipt expected), ``value`` what a
changed loss says, ``open`` what the loss says without its clip; ``received`` is what arrived, and ``got`` is received
divided by a factor. An update is an optimiser step.

Shape suffixes: B responses of the rollout batch, b those of a piece, N those of all optimiser steps, T response tokens,
E epochs, U steps over all epochs, G groups of the N, K some of the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import checked
from .arrived import PRECISION, Arrived
from .changes import NUMBER, WHOLE, changes, fitting_rows
from .losses import Batch, Loss
from .measure import Piece

CAUSES = {
    "outside": "the mask in the loss is not that of the batch: tool, prompt or padding tokens count",
    "lost": "a mask, filter or clip in the loss that the settings do not name; a token cut off at an end",
    "unclipped": "the clip is computed and not used, or its bounds are not those of the settings",
    "scaled": "the denominator, the number of micro-batches, or a mean over ranks",
    "scaled by micro-batch": "each micro-batch or rank divides by its own tokens or responses",
    "scaled by response": "another aggregation than the settings say: divided by each response's length, or not",
    "shifted": "log-probabilities are those of the next token, labels or masks are not: one position too far",
    "swapped": "a shuffle, sort or balance moved some columns and not others",
    "repeated": "responses were copied to fill a batch, or a batch was not taken off its queue",
    "missing": "a last micro-batch was dropped, or responses were filtered after the denominator was taken",
    "sign": "a reward, an advantage or the loss was negated",
    "flattened": "token advantages were reduced to one a response",
    "weights": "importance weights are not multiplied in, or twice",
    "stale": "old log-probabilities of another policy, temperature, precision or engine; or none in the ratio",
    "rounded": "bf16 in advantages, log-probabilities or the loss",
    "extra": "a further term of the loss: KL, an auxiliary or supervised loss",
    "not finite": "inf or NaN in log-probabilities or masked positions, multiplied by 0",
    "unknown loss": "no formula for this loss or for one of its settings: structure alone was checked",
    "unexplained": "none of the above",
}
"""Names of findings, with their usual causes."""
FIRST = ("missing", "repeated", "not finite", "outside")
"""Names whose mismatches are told before all others."""
NOISE = 1e-3
"""The first ratios are at most so far from 1, in the mean, by rounding."""
STALE = 0.02
"""The first ratios are at least so far from 1, in the mean, where another policy gave the old log-probabilities."""
ROUNDED = 2**-6
"""A difference, relative to what was intended, that may be rounding."""
GROUPING = 8.0
"""Bits that say in which groups a factor is constant."""


@dataclass(frozen=True)
class Finding:
    """A line of the table. Tokens are those of all optimiser steps: one of two steps counts twice."""

    name: str  # a key of CAUSES
    where: str  # such as: constant in each rank, 8 of 64 responses, in optimiser steps 2, 4
    size: float  # the factor, the share of tokens or responses, or how far the ratio is from 1, as `what` says
    what: str  # a sentence
    # At most three: response, token from 0, intended, received
    examples: tuple[tuple[str, int, float, float], ...] = ()
    causes: str = ""  # the usual ones
    # False for a note: a property that the loss declares, an unknown loss, rounding
    mismatch: bool = True
    tokens: int = 0
    # The smallest received / intended; None where nothing was intended, and of structure
    low: float | None = None
    high: float | None = None
    # Share of the tokens that differ from what was intended; None of structure
    explains: float | None = None
    # Other explanations that were tried, each with the share that it explains by itself
    also: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Finding:
        """The inverse of :meth:`to_dict`, also after JSON; what a later version added is left out."""
        entries = {entry.name: values[entry.name] for entry in fields(cls) if entry.name in values}
        # JSON has lists for tuples.
        entries["examples"] = tuple(map(tuple, entries.get("examples", ())))
        return cls(**entries)

    def __str__(self) -> str:
        tokens = [
            f"{key} token {t + 1}: {want:.4g} -> {got:.4g}" for key, t, want, got in self.examples
        ]
        name = self.name if self.mismatch else f"({self.name})"
        lines = [f"{name}: {self.what}", f"{self.tokens:,} tokens, {self.where}"]
        if tokens:
            lines.append(f"intended -> received: {'; '.join(tokens)}")
        lines.append(self.causes)
        return "\n  ".join(lines)


@dataclass(frozen=True)
class Receipt:
    """What arrived. Tensors are float32, with NaN for responses that an update does not hold."""

    # Effective advantage e = -g D, for the gradient g of the loss by the log-probability and the loss's denominator D;
    # the mean over the updates that the response was in
    received_BT: Tensor
    # Share of these updates in which the token was clipped; NaN for an unknown loss
    clipped_BT: Tensor
    received_UBT: Tensor  # e by update
    expected_UBT: Tensor  # what the loss says; NaN for an unknown loss
    clipped_UBT: Tensor  # share of its times in the update that the token was clipped; NaN for an unknown loss
    # Mismatches first; of these structure first, then those that cover most tokens
    findings: tuple[Finding, ...]
    seen_from: float = 1.0  # smallest factor above 1 that is found in an advantage of middle size, by the precision
    tokens: int = 0  # that may train, each once
    trained: int = 0  # of these, which received a gradient
    clipped: float | None = None  # mean share of clipping over these; None for an unknown loss
    responses: tuple[int, int] = (0, 0)  # those seen, and those of the whole batch

    @property
    def ok(self) -> bool:
        """No finding is a mismatch."""
        return not any(finding.mismatch for finding in self.findings)


class Explanation(NamedTuple):
    """A change of the loss and a factor, with what they leave."""

    bits: float
    label: str
    name: str  # the change's; "" for none
    what: str
    value_NT: Tensor  # what the changed loss gives
    factor_N1: Tensor
    by: str  # in which groups the factor is constant
    remaining: Mapping[str, Tensor]  # tokens that are left, by kind


def check(batch: Batch, loss: Loss, pieces: Iterable[Piece]) -> Receipt:
    """Compare the pieces of a rollout batch, of all ranks, micro-batches and updates, with the loss's settings.

    Raises:
        ValueError: an argument, or a part of one, of the wrong type, shape or range; the message names it.
    """
    with torch.device("cpu"):  # whatever the process's default device is
        batch, pieces = checked(batch, loss, pieces)
        # A KL term without its reference cannot be computed, so that no value of the loss is known.
        if loss.kl and batch.ref_log_probs_BT is None:
            loss = replace(loss, account=None)
        comparison = Comparison(batch, loss, pieces)
        comparison.structure(pieces)
        # Named once and then set to 0: NaN would fit no explanation.
        ignored_NT = comparison.ignored_NT
        comparison.add("not finite", "gradients are inf or NaN", ignored_NT)
        comparison.received_NT[ignored_NT] = 0.0
        if loss.account is None:
            outside_NT = ~comparison.mask_NT & (comparison.received_NT != 0)
            comparison.add("outside", "tokens outside the mask train", outside_NT)
        # Where no piece has a response there is no value to compare.
        elif len(comparison.rows_N):
            comparison.intend()
            comparison.first_ratio()
            comparison.differences()
        return comparison.receipt()


class Comparison(Arrived):
    """What arrived, and the findings on it."""

    differing = 0  # tokens that differ from what was intended
    also = ""  # as in Finding
    rounding = False  # most of what differs is small

    def __init__(self, batch: Batch, loss: Loss, pieces: list[Piece]) -> None:
        super().__init__(batch, loss, pieces)
        self.findings: list[Finding] = []
        self.keys = batch.keys or [str(row) for row in range(len(batch.mask_BT))]

    def receipt(self) -> Receipt:
        """Put each step's rows in their places of the rollout batch."""
        batch = self.batch
        B = len(batch.mask_BT)
        U = int(self.update_N.max()) + 1 if len(self.rows_N) else 1

        def by_update(values_NT: Tensor) -> Tensor:
            """Sums over the times that a response comes in an update; T may be 1."""
            values_UBT = torch.zeros(U, B, values_NT.shape[1], dtype=torch.float32)
            place = (self.update_N, self.rows_N)
            return values_UBT.index_put_(place, values_NT.float(), accumulate=True)

        held_UB1 = by_update(torch.ones(len(self.rows_N), 1))
        absent_UB1 = held_UB1 == 0
        unknown_UB1 = absent_UB1 | (self.loss.account is None)
        received_UBT = by_update(self.received_NT)
        trains_BT = (received_UBT != 0).any(dim=0)
        received_UBT = received_UBT.masked_fill(absent_UB1, torch.nan)
        # The gradients of a response that came twice add up in the step, so that they stay a sum.
        # Clipping is a share: 0.5 where one of the two was clipped.
        clipped_UBT = by_update(self.clipped_NT).masked_fill(unknown_UB1, torch.nan) / held_UB1
        clipped_BT = clipped_UBT.nanmean(dim=0)
        seen_B1 = held_UB1.any(dim=0)
        seen_BT = batch.mask_BT & seen_B1
        clipped = float(clipped_BT[seen_BT].mean())
        responses = B
        if batch.totals_U2 is not None:
            # Column 1 holds the responses of each step: over 2 epochs twice those of the batch.
            responses = int(batch.totals_U2[:, 1].sum()) // batch.epochs

        findings = sorted(
            self.findings,
            key=lambda finding: (
                not finding.mismatch,
                finding.name not in FIRST,
                -finding.tokens,
            ),
        )
        return Receipt(
            received_BT=received_UBT.nanmean(dim=0),
            clipped_BT=clipped_BT,
            received_UBT=received_UBT,
            expected_UBT=by_update(self.wanted_NT).masked_fill(unknown_UB1, torch.nan),
            clipped_UBT=clipped_UBT,
            findings=tuple(findings),
            # differs() allows precision * (advantage + unit), and a middle advantage is the unit.
            seen_from=1 + 2 * self.precision,
            tokens=int(seen_BT.sum()),
            trained=int((seen_BT & trains_BT).sum()),
            clipped=None if math.isnan(clipped) else clipped,
            responses=(int(seen_B1.sum()), responses),
        )

    def add(
        self,
        name: str,
        what: str,
        at_NT: Tensor,
        size: float = 0.0,
        place: str = "",
        wanted_NT: Tensor | None = None,
        times_NT: Tensor | None = None,
    ) -> None:
        """Add a line on the tokens ``at_NT`` that received something else than was wanted; none without such a token.

        What was wanted is by default what the loss says, and the times are what was received over it.
        """
        if wanted_NT is None:
            wanted_NT = self.wanted_NT
        if times_NT is None:
            times_NT = self.received_NT / wanted_NT
        # A line on rounding is about small differences, every other one is not.
        tolerance_NT = 1e-6 * (name != "rounded") * wanted_NT.abs()
        at_NT = at_NT & ~((self.received_NT - wanted_NT).abs() <= tolerance_NT)  # NaN differs
        places_K2 = at_NT.nonzero()
        n = places_K2[:, 0]
        if not len(n):
            return
        steps = ""
        if self.update_N.any():
            numbers = [str(int(step) + 1) for step in self.update_N[n].unique()[:8]]
            steps = f"in optimiser steps {', '.join(numbers)}"
        count = f"{len(self.rows_N[n].unique())} of {len(self.rows_N.unique())} responses"
        examples = []
        # At 0, 1/3 and 2/3 of what differs, so seldom of one response: of 9 the tokens 0, 3 and 6.
        for row, token in places_K2[:: max(1, len(n) // 3)][:3].tolist():
            intended = float(wanted_NT[row, token]) + 0.0  # no -0.0 in a table
            received = float(self.received_NT[row, token])
            examples.append((self.keys[int(self.rows_N[row])], token, intended, received))
        low, high = map(float, times_NT[at_NT].aminmax())
        has_bounds = math.isfinite(low) and math.isfinite(high)
        self.findings.append(
            Finding(
                name=name,
                where=", ".join(filter(None, (place, count, steps))),
                size=size or len(n) / max(1, int(self.mask_NT.sum())),
                what=what,
                examples=tuple(examples),
                causes=CAUSES[name],
                mismatch=name != "rounded",
                tokens=len(n),
                low=low if has_bounds else None,
                high=high if has_bounds else None,
                explains=len(n) / self.differing if self.differing else None,
                also=self.also,
            )
        )

    def structure(self, pieces: list[Piece]) -> None:
        """Find responses that an epoch never holds, or twice, that have an advantage and were left out, or whose prompt
        trains."""
        batch = self.batch
        B = len(batch.mask_BT)
        left_out_B = batch.left_out_B
        assert left_out_B is not None  # checked() fills it in
        trains_B = ((batch.advantages_BT != 0) & batch.mask_BT).any(dim=1)
        lengths_B = batch.mask_BT.sum(dim=1)
        epoch_N = self.update_N // batch.updates
        # Up to the last epoch that has a response, as training may stop early. An epoch before it
        # without any has them all missing.
        E = int(epoch_N.max()) + 1 if len(epoch_N) else 1
        times_EB = torch.stack([self.rows_N[epoch_N == e].bincount(minlength=B) for e in range(E)])
        outside_EB = torch.zeros(E, B, dtype=torch.bool)
        for piece in pieces:
            # One without a response may be of an epoch after the last.
            if piece.outside_b is not None and len(piece.rows_b):
                rows_K = piece.rows_b[piece.outside_b != 0]
                outside_EB[piece.update // batch.updates, rows_K] = True
        for name, what, at_EB in (
            ("lost", "left out with an advantage", (left_out_B & trains_B).expand(E, B)),
            ("missing", "in no micro-batch", (times_EB == 0) & ~left_out_B & (lengths_B > 0)),
            ("repeated", "in several micro-batches, or in one repeatedly", times_EB > 1),
            ("outside", "there with a gradient on the prompt or padding", outside_EB),
        ):
            rows = at_EB.any(dim=0).nonzero().flatten().tolist()
            if not rows:
                continue
            examples = ", ".join(self.keys[row] for row in rows[:3])
            self.findings.append(
                Finding(
                    name=name,
                    where=f"epochs {', '.join(str(int(e) + 1) for e in at_EB.any(dim=1).nonzero())}",
                    size=len(rows) / B,
                    what=f"{len(rows)} of {B} responses are {what} (such as {examples})",
                    causes=CAUSES[name],
                    tokens=int((at_EB * lengths_B).sum()),
                )
            )
        # What is unknown is told as a note: a receipt without it would say that the values fit.
        if self.loss.account is None:
            name = "unknown loss"
            what = f"`{self.loss.name}` with these settings has no formula here: structure alone was checked"
            self.findings.append(Finding(name, "", 0.0, what, causes=CAUSES[name], mismatch=False))

    def first_ratio(self) -> None:
        """Find first ratios that are not 1 although the batch is on policy."""
        old_BT = self.batch.old_log_probs_BT
        first_N = self.update_N == 0
        tokens = self.tokens.of(first_N)
        if not self.batch.on_policy or old_BT is None or not tokens.mask.any():
            return

        def ratio_distance(old_NT: Tensor, part: slice = slice(None)) -> float:
            # One enormous ratio must not hide what the others are: it counts as 10.
            away_NT = ((tokens.log_probs - old_NT).clamp(-20, 20).exp() - 1).abs().clamp(max=10)
            return float(away_NT[:, part][tokens.mask[:, part]].mean().nan_to_num(10.0))

        size = ratio_distance(tokens.old)
        if size <= NOISE:
            return
        # Half precision alone moves a ratio by as much as it rounds the log-probability.
        stale = STALE
        if self.precision > PRECISION[torch.float32]:
            stale += 2**-8 * float(tokens.log_probs[tokens.mask].abs().mean())
        # Another order of tokens or responses explains it where little is left of the distance.
        # Without the outermost positions, where roll() brings in the other end.
        shifted = min(ratio_distance(tokens.old.roll(by, 1), slice(1, -1)) for by in (1, -1))
        log_probs_NT = torch.where(tokens.mask, tokens.log_probs, torch.nan)
        swapped_N = fitting_rows(log_probs_NT, old_BT.double(), self.rows_N[first_N], 1e-3)
        name = "stale"
        if size <= stale:
            name = "rounded"
        elif shifted < size / 10:
            name = "shifted"
        elif ratio_distance(old_BT[swapped_N]) < size / 10:
            name = "swapped"
        moved_NT = (self.tokens.log_probs - self.tokens.old).abs() > NOISE
        at_NT = first_N[:, None] & self.mask_NT & moved_NT
        what = f"the first ratios are {size:.3g} from 1 in the mean"
        self.add(name, what, at_NT, size, wanted_NT=self.value(old=self.tokens.log_probs))

    def differences(self) -> None:
        """Find what does not fit the loss, and the shortest explanation."""
        differs_NT = self.differs(self.wanted_NT, self.received_NT)
        self.differing = int(differs_NT.sum())
        if not self.differing:
            return
        factor = self.middle(self.log_quotient(self.wanted_NT)).exp()
        # Beside the usual factor: the gradient of a scaled loss is rounded as well.
        away_NT = (self.received_NT / factor - self.wanted_NT).abs()
        small = int((differs_NT & (away_NT <= ROUNDED * self.wanted_NT.abs())).sum())
        # What received nothing, or should have, was not rounded.
        comparable_NT = differs_NT & (self.received_NT != 0) & (self.wanted_NT != 0)
        self.rounding = 2 * small > int(comparable_NT.sum())
        self.tell(self.explanation())

    def left(self, value_NT: Tensor, factor_N1: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What an explanation leaves: bits, (N,), and where, by kind.

        The smaller the bits of a kind, the sooner an explanation that leaves such tokens is told.
        """
        got_NT = self.received_NT / factor_N1
        rest_NT = self.differs(value_NT, got_NT, factor_N1)
        small_NT = (got_NT - value_NT).abs() <= ROUNDED * value_NT.abs()
        bits_N = torch.zeros(len(value_NT), dtype=torch.float64)
        unclipped_NT = self.clipped_NT & (value_NT == 0) & ~self.differs(self.open_NT, got_NT)
        kinds = {}
        # Each row: a kind, the bits of a token of it, the most that one response pays, and where.
        # With WHOLE, 6 bits, 100 lost tokens of a response cost as much as 12: it was lost as a whole.
        for name, bits, limit, at_NT in (
            ("lost", 0.5, WHOLE, got_NT == 0),
            ("outside", 1.0, WHOLE, ~self.mask_NT & (value_NT == 0)),
            ("unclipped", 1.0, WHOLE, unclipped_NT),
            ("sign", 8.0, WHOLE, ~self.differs(-value_NT, got_NT)),
            ("rounded", 1.0, math.inf, self.rounding & small_NT),
            ("", 8.0, math.inf, rest_NT),
        ):
            # A token is of the first kind that fits it.
            kinds[name] = rest_NT & at_NT
            bits_N += (bits * kinds[name].sum(dim=1).double()).clamp(max=limit)
            rest_NT = rest_NT & ~at_NT
        return bits_N, kinds

    def explanation(self) -> Explanation:
        """Try all explanations, and find the shortest. A change that leaves over a third of its tokens is not told."""
        value_NT = self.wanted_NT
        # changes() yields "no change" first, with the name "": its bits are finite, so that it
        # always replaces this one, and `best.remaining` has its kinds.
        best = Explanation(math.inf, "", "", "", value_NT, value_NT, "", {})
        tried: dict[str, float] = {}  # share of what differs that is explained
        for bits, name, what, value_NT in changes(self):
            changed_NT = self.differs(value_NT, self.wanted_NT)
            changed = int(changed_NT.sum())
            if name and not changed:
                continue
            log_NT = self.log_quotient(value_NT)
            # Each response with a factor of its own is the best that a change can do.
            finest_N1 = self.middle(log_NT, "response").exp()[:, None]
            least_bits = bits + float(self.left(value_NT, finest_N1)[0].sum())
            for factor_bits, factor_N1, by in self.factors(value_NT, log_NT):
                bits_N, kinds = self.left(value_NT, factor_N1)
                # "scaled by rank", and "scaled by " becomes "scaled".
                label = what or f"scaled by {by}".removesuffix(" by ")
                # Only a change alone, or a factor alone, has a share of its own.
                if not (name and by):
                    share = 1 - float(sum(kind.sum() for kind in kinds.values())) / self.differing
                    tried[label] = max(tried.get(label, 0.0), share)
                total = bits + factor_bits + float(bits_N.sum())
                # At most one in three of the tokens that a change changes does not fit with it.
                fits = not name or 3 * int((kinds[""] & changed_NT).sum()) <= changed
                if fits and total < best.bits:
                    best = Explanation(total, label, name, what, value_NT, factor_N1, by, kinds)
                # No other factor can be shorter. The first one is tried in any case, for its share.
                if least_bits >= best.bits:
                    break
            # An explanation as cheap as one number will do; but what looks reversed may be swapped.
            is_sign = best.name in ("sign", "swapped") or best.remaining["sign"].any()
            if best.bits <= NUMBER and not is_sign:
                break
        tried.pop(best.label)
        also = sorted((-share, label) for label, share in tried.items() if share > 0.01)
        self.also = "; ".join(f"{label} {-share:.0%}" for share, label in also[:3])
        return best

    def factors(self, value_NT: Tensor, log_NT: Tensor) -> Iterator[tuple[float, Tensor, str]]:
        """Yield bits, the factor of each response, and the group in which it is constant.

        A factor that lies within the spread of what it leaves explains nothing: each token has its own then.
        """
        ones_N1 = torch.ones(len(value_NT), 1, dtype=torch.float64)
        yield 0.0, ones_N1, ""
        log_one = self.middle(log_NT)
        spread = 2 * float(self.middle((log_NT - log_one).abs()))
        # Rounding alone gives up to 1 times the precision, and ``seen_from`` promises 2 times.
        common = 1.0
        if float(log_one.abs()) > max(spread, 1.5 * self.precision):
            common = float(log_one.exp())
            yield NUMBER, common * ones_N1, ""
        common_N = self.left(value_NT, common * ones_N1)[0]
        for by, group_N in self.groups.items():
            if not by:
                continue
            log_G = self.middle(log_NT, by)
            spread_G = self.middle((log_NT - log_G[group_N][:, None]).abs(), by)
            factor_G = torch.where(
                (log_G - math.log(common)).abs() > 2 * spread_G, log_G.exp(), common
            )
            saved_N = common_N - self.left(value_NT, factor_G[group_N][:, None])[0]
            price = NUMBER + math.log2(len(factor_G))
            chosen_G = torch.zeros_like(factor_G).index_add_(0, group_N, saved_N) > price
            # Where most groups have one of their own, those that too few tokens tell have it too.
            if 2 * chosen_G.sum() > len(chosen_G):
                chosen_G[:] = True
            if chosen_G.any():
                bits = GROUPING + NUMBER * (common != 1) + price * int(chosen_G.sum())
                yield bits, torch.where(chosen_G, factor_G, common)[group_N][:, None], by

    def tell(self, best: Explanation) -> None:
        """Add the lines of an explanation: its change, its factor, and what they leave."""
        got_NT = self.received_NT / best.factor_N1
        kinds = dict(best.remaining)
        rest_NT = kinds.pop("")
        rest_name = ""
        if rest_NT.any():
            rest_name = self.rest_name(rest_NT | kinds["rounded"], best.value_NT, got_NT)
        places = {kind: self.place(at_NT, best.value_NT) for kind, at_NT in kinds.items()}
        if rest_name == "stale":
            # A stale ratio also decides which tokens the clip takes, so that these belong to it.
            # Tokens with a place, such as the last of each response, have another cause.
            for kind in ("rounded", "lost", "unclipped"):
                if not places[kind]:
                    rest_NT = rest_NT | kinds.pop(kind)
        # Under a stale ratio the clip takes other tokens, and "unclipped" is no finding of its own.
        if best.name and not (rest_name == "stale" and best.name == "unclipped"):
            left_NT = torch.stack(list(best.remaining.values())).any(dim=0)
            away_NT = (self.received_NT - self.wanted_NT).abs()
            # At most a third of the difference is left, such as 0.1 of 0.3.
            nearer_NT = 3 * (got_NT - best.value_NT).abs() < away_NT
            changed_NT = self.differs(best.value_NT, self.wanted_NT)
            self.add(best.name, best.what, changed_NT & (nearer_NT | ~left_NT))
        self.tell_factor(best)
        for kind, what in (
            ("lost", "tokens with an advantage that no clip takes received nothing"),
            ("outside", "tokens outside the mask train"),
            ("unclipped", "tokens received a gradient that the clip should take"),
            ("sign", "tokens have the reversed sign"),
            ("rounded", f"tokens are off by at most {ROUNDED:.2%}"),
        ):
            if kind in kinds:
                self.add(kind, what, kinds[kind], place=places[kind])
        if not rest_NT.any():
            return
        got_K = got_NT[rest_NT]
        value_K = best.value_NT[rest_NT]
        added_K = got_K - value_K
        what = (
            f"tokens received {added_K.min():+.3g} to {added_K.max():+.3g} beside what they should"
        )
        if rest_name == "stale":
            times_K = got_K / value_K
            times_K = times_K[times_K.isfinite() & (times_K > 0)]
            low, high = percentiles(times_K)
            what = (
                f"the ratio in the loss is mostly {low:.3g} to {high:.3g} times that of the batch"
            )
        self.add(rest_name, what, rest_NT, place=self.place(rest_NT, best.value_NT))

    def tell_factor(self, best: Explanation) -> None:
        # A factor that rounding may give, such as exactly 1, is not told.
        logs_N1 = best.factor_N1.log().abs()
        at_NT = self.mask_NT & (self.received_NT != 0) & (logs_N1 > self.precision)
        if not at_NT.any():
            return
        low, high = map(float, best.factor_N1[at_NT.any(dim=1)].aminmax())
        name = {"": "scaled", "optimiser step": "scaled", "response": "scaled by response"}.get(
            best.by, "scaled by micro-batch"
        )
        if best.by == "response" and max(-math.log(low), math.log(high)) < ROUNDED:
            name = "rounded"
        times = f"{high:.4g}" if high / low <= 1.0001 else f"{low:.4g} to {high:.4g}"
        self.add(
            name,
            f"tokens received {times} times what they should",
            at_NT,
            size=high if high > 1 else low,
            place=f"constant in each {best.by}" if best.by else "",
            times_NT=best.factor_N1.expand_as(at_NT),
        )

    def rest_name(self, at_NT: Tensor, value_NT: Tensor, got_NT: Tensor) -> str:
        """The name of what no change and no factor explains."""
        # Whatever multiplies an advantage of 0 gives 0, so that something was added.
        advantages_NT = self.tokens.advantages
        if (advantages_NT[at_NT] == 0).any():
            return "extra"
        unweighed_NT = self.value(advantages=torch.zeros_like(value_NT))  # what no ratio multiplies
        at_NT = at_NT & self.differs(unweighed_NT, value_NT) & self.differs(unweighed_NT, got_NT)
        value_K = (value_NT - unweighed_NT)[at_NT]
        got_K = (got_NT - unweighed_NT)[at_NT]
        advantages_K = advantages_NT[at_NT]
        if is_added(value_K, got_K, advantages_K):
            return "extra"
        trains = int((self.mask_NT & (advantages_NT != 0) & (self.received_NT != 0)).sum())
        options = self.loss.options
        clips = self.loss.account == "clip" and not options.get("sequence")
        # A stale ratio is in most tokens: fewer than a tenth of them tell nothing, nor do under 20.
        # Without a clip by token there is no ratio to bound.
        if len(got_K) < max(20, 0.1 * trains) or not clips or self.batch.old_log_probs_BT is None:
            return "unexplained"
        # A stale ratio can only explain tokens that trained, so it must lie inside the clip: for a
        # positive advantage and high = 0.2, ratio <= 1.2. The 2 % that may lie outside are as many
        # as tell() leaves out of the range that it prints, 1 % at each end.
        times_K = got_K / value_K
        ratio_K = times_K * self.tokens.log_ratio.exp()[at_NT]
        margin = 1 + 2 * self.precision  # as in seen_from
        below_K = ratio_K <= (1 + options["high"]) * margin
        above_K = ratio_K >= (1 - options["low"]) / margin
        inside_K = torch.where(advantages_K > 0, below_K, above_K) & (times_K > 0)
        return "stale" if float(inside_K.double().mean()) > 0.98 else "unexplained"

    def place(self, at_NT: Tensor, value_NT: Tensor) -> str:
        """Which tokens they are among those that train, where a description fits all of them and no other."""
        mask_NT = self.mask_NT
        others_NT = mask_NT & (value_NT != 0) & ~at_NT
        if not (at_NT.any() and others_NT.any()):
            return ""
        order_NT = mask_NT.cumsum(dim=1)
        position_NT = torch.arange(1, at_NT.shape[1] + 1).expand_as(at_NT)
        lengths_NT = (
            torch.where(mask_NT, position_NT, 0).amax(dim=1, keepdim=True).expand_as(position_NT)
        )
        for what, values_NT in (
            ("the first of their response", order_NT == 1),
            ("the last of their response", order_NT == order_NT[:, -1:]),
            ("those with a positive advantage", self.tokens.advantages > 0),
            ("those with a negative advantage", self.tokens.advantages < 0),
            ("those from token {:.0f} on", position_NT),
            ("those of responses of {:.0f} tokens or more", lengths_NT),
        ):
            # 1 for a yes; of a number, that from which on it fits.
            least = values_NT[at_NT].min()
            if least > values_NT[others_NT].max():
                return what.format(int(least))
        return ""


def is_added(value_K: Tensor, got_K: Tensor, advantage_K: Tensor) -> bool:
    """Whether a term was added: got - value is then alike for positive and negative, large and small advantages, while
    got / value is not."""
    added = 0.0
    times = 0.0
    noise = 0.0
    for part_K in (advantage_K > 0, advantage_K.abs() > advantage_K.abs().median()):
        # Two samples of one distribution, of `count` values each, are less than 1.92 / sqrt(count)
        # apart in 95 % of cases. Of fewer than 4 that is nearly 1, the largest distance.
        count = min(int(part_K.sum()), int((~part_K).sum()))
        if count >= 4:
            added += ks_distance(got_K - value_K, part_K)
            times += ks_distance(got_K / value_K, part_K)
            noise += 2 / math.sqrt(count)
    # 0.7 and not 1: without a term both distances may be alike, by chance.
    return added < 0.7 * times and times > noise


def percentiles(values_K: Tensor) -> list[float]:
    """The 1st and the 99th percentile of values, float64."""
    # torch takes quantiles of 2^24 values at most.
    some_K = values_K[:: len(values_K) // 2**24 + 1]
    return some_K.quantile(torch.tensor([0.01, 0.99], dtype=torch.float64)).tolist()


def ks_distance(values_K: Tensor, part_K: Tensor) -> float:
    """The largest difference between the distribution functions of a part and of the rest (Kolmogorov and Smirnov)."""
    # Example: values 1 2 3 4 of which the part has 1 2: its function is 1 at 2, where the rest's is 0.
    values_K, order_K = values_K.sort()
    part_K = part_K[order_K].double()
    rest_K = 1 - part_K
    away_K = part_K.cumsum(0) / part_K.sum() - rest_K.cumsum(0) / rest_K.sum()
    # Of equal values the functions have all or none.
    ends_K = values_K.diff(append=values_K.new_full((1,), math.inf)) != 0
    return float(away_K[ends_K].abs().max())
