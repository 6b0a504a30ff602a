"""Compare what each token received with what the loss says, and name what does not fit (:mod:`.parts`).

Shape suffixes: B responses of the rollout batch, N those of all optimiser steps, T response tokens, U steps over all epochs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from .arguments import checked
from .changes import fitting_rows
from .judged import ROUNDED, Divided, Trained
from .losses import Batch, Loss, Tokens, denominators
from .measure import Piece
from .parts import Explainer

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
PRECISION = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2**-8, torch.bfloat16: 2**-5}
"""Relative error that a gradient of this type may have."""
NOISE, STALE = 1e-3, 0.02
"""Mean distances of the first ratios from 1: above the first by rounding, above the second of another policy."""


@dataclass(frozen=True)
class Finding:
    """What does not fit, where, how large."""

    name: str
    """A key of ``CAUSES``."""
    where: str
    """Such as ``120 tokens of 8 of 64 responses, in optimiser step 2 of 4``."""
    size: float
    """How large: the factor, the share of tokens or the ratio, as ``what`` says."""
    what: str
    """One sentence with the size."""
    examples: tuple[tuple[str, int, float, float], ...] = ()
    """Three tokens at most: response (key or number), token from 0, intended effective advantage, received one."""
    causes: str = ""
    """The usual causes, one line."""
    mismatch: bool = True
    """False for a note: a property that the loss declares, an unknown loss, rounding."""
    tokens: int = 0
    """Number of tokens with this fault; a token of two optimiser steps counts twice."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Finding:
        """The inverse of :meth:`to_dict`, also after JSON."""
        return cls(**values | {"examples": tuple(tuple(example) for example in values["examples"])})

    def __str__(self) -> str:
        """For a terminal: four lines at most."""
        lines = [f"{self.name if self.mismatch else f'({self.name})'}: {self.what}", f"  {self.where}"]
        tokens = [f"{key} token {t + 1}: {number(want)} -> {number(got)}" for key, t, want, got in self.examples]
        lines += [f"  intended -> received: {'; '.join(tokens)}"] if tokens else []
        return "\n".join([*lines, f"  usual causes: {self.causes}"] if self.mismatch else lines)


def number(value: float) -> str:
    """Four digits, with a sign where it is not 0."""
    return f"{value:+.4g}" if value else "0"


@dataclass(frozen=True)
class Receipt:
    """What arrived."""

    received_BT: torch.Tensor
    """float32: effective advantage e = -g D, the mean over the updates that the response was in; NaN where it was in none."""
    clipped_BT: torch.Tensor
    """float32: share of these updates in which the token was clipped; NaN likewise, and for an unknown loss."""
    received_UBT: torch.Tensor
    """float32: e by update; NaN for responses that the update does not hold."""
    expected_UBT: torch.Tensor
    """float32: what the loss says; NaN likewise, and for an unknown loss."""
    findings: tuple[Finding, ...]
    """Mismatches first; those that cover most tokens first."""
    seen_from: float = 1.0
    """The smallest factor above 1 that would be found in an advantage of middle size, by the gradients' precision."""

    @property
    def ok(self) -> bool:
        """No finding is a mismatch."""
        return not any(finding.mismatch for finding in self.findings)


def check(batch: Batch, loss: Loss, pieces: Iterable[Piece]) -> Receipt:
    """Compare the pieces of a rollout batch, of all ranks, micro-batches and updates, with the loss's settings.

    Raises:
        ValueError: an argument, or a part of one, of the wrong type, shape or range; the message names it.
    """
    batch, pieces = checked(batch, loss, pieces)
    if loss.kl and batch.ref_log_probs_BT is None:
        loss = replace(loss, account=None)
    return _Check(batch, loss, pieces).receipt()


class _Check:
    """One comparison."""

    def __init__(self, batch: Batch, loss: Loss, pieces: Sequence[Piece]) -> None:
        self.batch, self.loss, self.pieces = batch, loss, pieces
        self.divisor_N1 = torch.cat(denominators(loss, batch, pieces))
        self.rows_N = torch.cat([piece.rows_b for piece in pieces])
        counts = torch.tensor([len(piece.rows_b) for piece in pieces])
        self.update_N, self.rank_N, self.piece_N = (
            torch.tensor(values, dtype=torch.int64).repeat_interleave(counts)
            for values in zip(*((p.update, p.rank, place) for place, p in enumerate(pieces)), strict=True)
        )
        self.steps = max(piece.update for piece in pieces) + 1
        gradient_NT = torch.cat([piece.gradient_bT.double() for piece in pieces])
        self.received_NT = -gradient_NT * self.divisor_N1 / batch.ranks + 0.0
        self.precision = max(PRECISION[t] for p in pieces for t in (p.gradient_bT.dtype, p.log_probs_bT.dtype))
        self.tokens = self._tokens()
        self.wanted_NT = torch.zeros_like(self.received_NT)
        self.findings: list[Finding] = []

    def _tokens(self) -> Tokens:
        """The intended columns."""
        batch, rows_N = self.batch, self.rows_N
        log_probs_NT = torch.cat([piece.log_probs_bT.double() for piece in self.pieces])
        columns = (batch.advantages_BT, batch.weights_BT, batch.old_log_probs_BT, batch.ref_log_probs_BT)
        advantages, weights, old, ref = (None if each is None else each[rows_N].double() for each in columns)
        assert advantages is not None
        mask_NT = batch.mask_BT[rows_N].bool()
        weights = torch.ones_like(log_probs_NT) if weights is None else weights
        old = log_probs_NT if old is None else old
        return Tokens(torch.where(mask_NT, advantages, 0.0), weights, mask_NT, log_probs_NT, old, ref)

    def receipt(self) -> Receipt:
        """Compare, and name."""
        self._counted()
        self._declared()
        ignored_NT = self._not_finite()
        expected_NT = clipped_NT = torch.full_like(self.received_NT, torch.nan)
        trained = Trained(
            *(
                self.rows_N,
                self.update_N,
                self.piece_N,
                self.rank_N,
                self.tokens,
                self.received_NT,
                ignored_NT,
                self.precision,
            )
        )
        if self.loss.account is not None:
            expected_NT, clipped_NT = (each.double() for each in trained.expected(self.loss))
            self.wanted_NT = expected_NT
            trained = replace(trained, ignored_NT=ignored_NT | self._borderline(trained))
            self._first_ratio(trained)
            self._differences(trained)
        else:
            self._outside(~self.tokens.mask & (self.received_NT != 0))
        received_UBT, expected_UBT, clipped_UBT = (
            self._by_update(each) for each in (self.received_NT, expected_NT, clipped_NT)
        )
        self.findings.sort(key=lambda finding: (not finding.mismatch, -finding.tokens))
        means = (received_UBT.nanmean(dim=0), clipped_UBT.nanmean(dim=0))
        return Receipt(*means, received_UBT, expected_UBT, tuple(self.findings), 1 + 2 * self.precision)

    def _by_update(self, values_NT: torch.Tensor) -> torch.Tensor:
        result_UBT = torch.full((self.steps, *self.batch.mask_BT.shape), torch.nan)
        result_UBT[self.update_N, self.rows_N] = 0.0
        return result_UBT.index_put_((self.update_N, self.rows_N), values_NT.float(), accumulate=True)

    # --------------------------------------------------------------------------------------------------------------- findings

    def add(
        self,
        name: str,
        size: float,
        what: str,
        at_NT: torch.Tensor,
        *,
        note: bool = False,
        wanted_NT: torch.Tensor | None = None,
    ) -> None:
        """A finding at the tokens ``at_NT`` whose gradient is another than was intended; none without such a token."""
        wanted_NT = self.wanted_NT if wanted_NT is None else wanted_NT
        least = 0.0 if note else 1e-6
        at_NT = at_NT & ~((self.received_NT - wanted_NT).abs() <= least * wanted_NT.abs())
        places = at_NT.nonzero()
        if not len(places):
            return
        rows, of_rows = self.rows_N[places[:, 0]].unique(), len(self.rows_N.unique())
        where = f"{len(places):,} tokens of {len(rows)} of {of_rows} responses"
        where += self._in_steps(self.update_N[places[:, 0]])
        keys, examples = self.batch.keys, []
        for n, t in places[:: max(1, len(places) // 3)][:3].tolist():
            row = int(self.rows_N[n])
            values = (float(wanted_NT[n, t]) + 0.0, float(self.received_NT[n, t]) + 0.0)
            examples.append((keys[row] if keys else str(row), t, *values))
        self.findings.append(
            Finding(name, where, float(size), what, tuple(examples), CAUSES[name], not note, len(places))
        )

    def _in_steps(self, update_K: torch.Tensor) -> str:
        """The optimiser steps, counted from 1, where there are several."""
        if self.steps == 1:
            return ""
        own = (update_K.unique() + 1).tolist()
        if len(own) == self.steps:
            return f", in all {self.steps} optimiser steps"
        shown = ", ".join(map(str, own[:8])) + (", ..." if len(own) > 8 else "")
        return f", in optimiser step{'s' if len(own) > 1 else ''} {shown} of {self.steps}"

    def _counted(self) -> None:
        """Responses that an epoch holds never or twice, or that were left out with an advantage."""
        batch = self.batch
        B, lengths_B = len(batch.mask_BT), batch.mask_BT.sum(dim=1)
        left_out_B = torch.zeros(B, dtype=torch.bool) if batch.left_out_B is None else batch.left_out_B.bool()
        trains_B = ((batch.advantages_BT != 0) & batch.mask_BT.bool()).any(dim=1)
        kinds = {
            ("lost", "left out with an advantage"): [("", left_out_B & trains_B)],
            ("missing", "in no micro-batch"): [],
            ("repeated", "in several micro-batches, or in one repeatedly"): [],
        }
        missing, repeated = list(kinds)[1:]
        self.missing = {}
        for epoch in (self.update_N // batch.updates).unique().tolist():
            times_B = self.rows_N[self.update_N // batch.updates == epoch].bincount(minlength=B)
            self.missing[epoch] = (times_B == 0) & ~left_out_B & (lengths_B > 0)
            kinds[missing].append((f"epoch {epoch + 1}", self.missing[epoch]))
            kinds[repeated].append((f"epoch {epoch + 1}", times_B > 1))
        for (name, what), places in kinds.items():
            places = [(where, at_B) for where, at_B in places if at_B.any()]
            if not places:
                continue
            where, at_B = max(places, key=lambda place: int(place[1].sum()))
            rows = at_B.nonzero().squeeze(1).tolist()
            shown = ", ".join(batch.keys[row] if batch.keys else str(row) for row in rows[:3])
            sentence = f"{len(rows)} of {B} responses are {what} (such as {shown})"
            more = f", and {len(places) - 1} more" if len(places) > 1 else ""
            tokens = sum(int(lengths_B[own_B].sum()) for _, own_B in places)
            self.findings.append(
                Finding(
                    name, (where or "the rollout batch") + more, len(rows) / B, sentence, (), CAUSES[name], True, tokens
                )
            )

    def _declared(self) -> None:
        """Notes: an unknown loss, and weights that the loss itself gives micro-batches or updates."""
        batch, loss = self.batch, self.loss
        if loss.account is None:
            what = f"`{loss.name}` with these settings has no formula here: structure alone was checked"
            name, size = "unknown loss", 0.0
        else:
            plain = replace(loss, over="update", norm=loss.norm or float(batch.mask_BT.shape[1]))
            factor_N1 = torch.cat(denominators(plain, batch, self.pieces)) / self.divisor_N1
            low, high = (float(each) for each in factor_N1.aminmax()) if len(factor_N1) else (1.0, 1.0)
            if high / low < 1.001:
                return
            says = f"`{loss.name}`" if loss.over != "update" else f"`{loss.aggregation}` without a constant"
            what = f"a token's weight is from {low:.3g} to {high:.3g} times that of the mean over an update, as {says} says"
            name, size = "scaled by micro-batch", high / low
        self.findings.append(Finding(name, "all optimiser steps", size, what, (), CAUSES[name], False))

    def _not_finite(self) -> torch.Tensor:
        """Gradients that are inf or NaN, which are taken as 0 and not judged; and those of prompts. Returns the former."""
        broken_NT = ~self.received_NT.isfinite()
        self.add("not finite", int(broken_NT.sum()), f"{int(broken_NT.sum())} gradients are inf or NaN", broken_NT)
        self.received_NT[broken_NT] = 0.0
        outside = [
            torch.zeros(len(p.rows_b)) if p.outside_b is None else p.outside_b.float().cpu() for p in self.pieces
        ]
        outside_N = torch.cat(outside)
        if (count := int((outside_N != 0).sum())) > 0:
            what = f"the prompt or padding of {count} responses received a gradient"
            tokens = int(self.tokens.mask[outside_N != 0].sum())
            where = f"{count} responses" + self._in_steps(self.update_N[outside_N != 0])
            self.findings.append(
                Finding("outside", where, float(outside_N.max()), what, (), CAUSES["outside"], True, tokens)
            )
        return broken_NT

    def _outside(self, at_NT: torch.Tensor) -> None:
        if at_NT.any() and self.tokens.mask.any():
            share = float(at_NT.sum() / (self.received_NT != 0).sum())
            self.add("outside", share, f"{share:.2%} of the tokens that train are outside the mask", at_NT)

    def _borderline(self, trained: Trained) -> torch.Tensor:
        """Where a ratio is on a bound of the clip, on which rounding decides, or a tie halves the gradient."""
        tokens, size_NT = self.tokens, self.tokens.advantages.abs()
        result_NT = torch.zeros_like(tokens.mask)
        for advantages_NT in (size_NT, -size_NT):
            above_NT, below_NT = (
                trained.expected(
                    self.loss, replace(tokens, advantages=advantages_NT, old=tokens.old + by * self.precision)
                )[1]
                for by in (-1, 1)
            )
            result_NT |= above_NT != below_NT
        if self.loss.account in ("clip_sequence", "geo_mean"):
            return result_NT.any(dim=1, keepdim=True).expand_as(result_NT)
        return result_NT

    def _first_ratio(self, trained: Trained) -> None:
        """The first update on policy has ratio 1."""
        first_N = self.update_N == 0
        tokens = self.tokens.of(first_N)
        if not self.batch.on_policy or self.batch.old_log_probs_BT is None or not tokens.mask.any():
            return
        size = _distance(tokens, tokens.old)
        half = any(piece.log_probs_bT.dtype in (torch.bfloat16, torch.float16) for piece in self.pieces)
        allowed = STALE + (2**-8 * float(tokens.log_probs[tokens.mask].abs().mean()) if half else 0.0)
        shown_NT = first_N.unsqueeze(1) & self.tokens.mask & ((self.tokens.log_probs - self.tokens.old).abs() > NOISE)
        wanted_NT = trained.expected(self.loss, replace(self.tokens, old=self.tokens.log_probs))[0]
        name, what = "stale", f"the first ratios are {size:.3g} from 1 in the mean"
        if size < allowed:
            if size > NOISE:
                self.add("rounded", size, what, shown_NT, note=True, wanted_NT=wanted_NT)
            return
        for by in (1, -1):
            if _distance(tokens, tokens.old.roll(by, 1), slice(1, -1)) < size / 10:
                name = "shifted"
                what = f"the old log-probabilities are those of the token {'after' if by > 0 else 'before'}"
        old_BT, own_NT = self.batch.old_log_probs_BT.double(), torch.where(tokens.mask, tokens.log_probs, torch.nan)
        if _distance(tokens, old_BT[fitting_rows(own_NT, old_BT, self.rows_N[first_N], 1e-3)]) < size / 10:
            name, what = "swapped", "old log-probabilities are those of other responses"
        self.add(name, size, what, shown_NT, wanted_NT=wanted_NT)

    def _differences(self, trained: Trained) -> None:
        """What does not fit the loss, part by part."""
        batch = self.batch
        advantages_BT, mask_BT = batch.advantages_BT.double(), batch.mask_BT.bool()
        columns = {"advantages": [_filled(advantages_BT, mask_BT), torch.where(mask_BT, advantages_BT, 0.0)]}
        columns |= {
            name: [values_BT.double()]
            for name, values_BT in (("old", batch.old_log_probs_BT), ("weights", batch.weights_BT))
            if values_BT is not None
        }
        explainer = Explainer(trained, self.loss, columns, counted=self._counting)
        if not explainer.wrong_V.any():
            return
        explainer.divided = [*self._divided(), *self._of_missing(explainer)]
        best, alike = explainer.explain()
        told = explainer.told(best)
        names = {name for name, *_ in told}
        other = next((own for own in map(explainer.told, alike) if {name for name, *_ in own} != names), [])
        instead = names - {name for name, *_ in other}
        others = [f"{name}: {what}" for name, what, *_ in other if name not in names]
        for name, what, size, at_NT in told:
            if others and name in instead:
                what, others = f"{what} (or, which fits as well, {'; '.join(others)})", []
            small = name == "scaled by response" and "`" not in what and abs(math.log(abs(size))) < ROUNDED
            self.add("rounded" if small else name, size, what, at_NT, note=small or name == "rounded")
        if best.end.small_V.any():
            share = float(best.end.small_V.sum() / self.tokens.mask.sum())
            what = f"{share:.2%} of the tokens are off by at most {ROUNDED:.2%}"
            self.add("rounded", share, what, explainer.spread(best.end.small_V), note=True)

    def _divided(self) -> Iterator[Divided]:
        """Other divisors than the declared one."""
        loss, batch, pieces = self.loss, self.batch, self.pieces
        for rows_U in self._rows_of_updates():
            yield self._over(torch.cat(denominators(loss, batch, pieces, rows_U=rows_U)), "")
        known: list[torch.Tensor] = []
        norm = loss.norm or float(batch.mask_BT.shape[1])
        for over in ("update", "micro-batch", "rank", "batch"):
            for aggregation in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
                other = replace(loss, aggregation=aggregation, over=over, norm=norm)
                divided = self._over(torch.cat(denominators(other, batch, pieces)), "")
                variants = [divided.factor_N1]
                if over == "micro-batch":  # also summed
                    count_U = torch.zeros(self.steps).index_add_(
                        0, torch.tensor([p.update for p in pieces]), torch.ones(len(pieces))
                    )
                    variants.append(divided.factor_N1 * count_U[self.update_N].unsqueeze(1))
                for factor_N1 in variants:
                    relative_N1 = factor_N1 / factor_N1.mean()
                    if (relative_N1 - 1).abs().max() < 1e-6 or any(
                        torch.allclose(relative_N1, one, rtol=1e-6) for one in known
                    ):
                        continue
                    known.append(relative_N1)
                    of = {"update": "an optimiser step", "batch": "the rollout batch"}.get(over, f"each {over}")
                    yield Divided(f"as `{aggregation}` over {of} gives", factor_N1)

    def _over(self, divisor_N1: torch.Tensor, what: str) -> Divided:
        return Divided(what, self.divisor_N1 / divisor_N1)

    def _rows_of_updates(self) -> Iterator[list[torch.Tensor]]:
        """Where responses are missing or repeated: of each optimiser step those that it may have counted."""
        batch = self.batch
        there_U = [self.rows_N[self.update_N == update] for update in range(self.steps)]
        if all(len(rows) == len(rows.unique()) for rows in there_U) and not any(
            at_B.any() for at_B in self.missing.values()
        ):
            return
        yield [rows.unique() for rows in there_U]
        yield there_U
        planned_U = []
        for update, rows in enumerate(there_U):
            missing_B = self.missing.get(update // batch.updates, torch.zeros(0))
            short = len(rows.unique()) < len(batch.mask_BT) // batch.updates
            planned_U.append(torch.cat([rows.unique(), missing_B.nonzero().squeeze(1)]) if short else rows.unique())
        yield planned_U

    def _of_missing(self, explainer: Explainer) -> Iterator[Divided]:
        """Where several optimiser steps of an epoch lack responses, each may have counted any of them."""
        batch, lengths_B = self.batch, self.batch.mask_BT.sum(dim=1).double()
        factor_U, least_U = explainer.steps(), torch.ones(self.steps, dtype=torch.float64)
        for update in range(self.steps):
            missing_B = self.missing.get(update // batch.updates)
            rows = self.rows_N[self.update_N == update].unique()
            if missing_B is not None and missing_B.any() and len(rows) < len(lengths_B) // batch.updates:
                own = lengths_B[rows].sum() if self.loss.aggregation == "token-mean" else torch.tensor(float(len(rows)))
                more = lengths_B[missing_B].sum() if self.loss.aggregation == "token-mean" else missing_B.sum().double()
                least_U[update] = own / (own + more)
        if bool((least_U < 1).any()):
            common = float(torch.where(least_U == 1, factor_U, torch.nan).nanmedian().nan_to_num(1.0))
            relative_U = factor_U / common
            if bool(((relative_U >= least_U * (1 - 1e-3)) & (relative_U <= 1 + 1e-3)).all()):
                yield Divided("", relative_U[self.update_N].unsqueeze(1))

    def _counting(self, counted_NT: torch.Tensor) -> Iterator[Divided]:
        """The divisor where these tokens of the responses are counted."""
        counted_BT = self.batch.mask_BT.bool().clone()
        counted_BT[self.rows_N] = False
        counted_BT.index_put_((self.rows_N,), counted_NT, accumulate=False)
        yield self._over(torch.cat(denominators(self.loss, self.batch, self.pieces, counted_BT)), "")


def _distance(tokens: Tokens, old_NT: torch.Tensor, part: slice = slice(None)) -> float:
    """Mean distance of the ratio from 1."""
    ratio_NT = (tokens.log_probs - old_NT).clamp(-20, 20).exp()
    return float((ratio_NT - 1).abs()[:, part][tokens.mask[:, part]].clamp(max=10).mean().nan_to_num(math.inf))


def _filled(advantages_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Advantages; beside its mask those of a response that has one alone, NaN for others."""
    first_B1 = advantages_BT.gather(1, mask_BT.long().argmax(dim=1, keepdim=True))
    uniform_B1 = ((advantages_BT == first_B1) | ~mask_BT).all(dim=1, keepdim=True)
    return torch.where(uniform_B1, first_B1, torch.where(mask_BT, advantages_BT, torch.nan))
