"""Compare what each token received with what the loss says: a table of what differs, by how much and where.

What differs is explained by one change of the loss (a column, the ratio, the clip, the KL term) and one factor for each
optimiser step, rank, micro-batch or response. All pairs are tried and the shortest is told, in bits: of the change, 12
for each free number, 8 for each token that is left over.

Shape suffixes: B responses of the rollout batch, N those of all optimiser steps, T response tokens, U steps over all
epochs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch.nn.functional import pad

from .arguments import checked
from .losses import Batch, Loss, Tokens, denominators, expect, opened
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
PRECISION = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2**-8, torch.bfloat16: 2**-5}
"""Relative error that a gradient of this type may have."""
NOISE, STALE, ROUNDED = 1e-3, 0.02, 2**-6
"""Mean distances of the first ratios from 1, by rounding and of another policy; a difference that may be rounding."""
READ = ("gradient_bT", "log_probs_bT")
LOOK_ALIKE = ("sign", "swapped")
"""Names of which one is told beside the other where both explain what differs."""
Change = tuple[float, str, str, torch.Tensor]
"""Bits, a finding's name, a sentence, and the value of each token."""
NUMBER, WHOLE = 12.0, 6.0
"""Bits of a free number; at most, of a response's tokens of one kind, such as lost ones."""


@dataclass(frozen=True)
class Finding:
    """A line of the table. Tokens are those of all optimiser steps: one of two steps counts twice."""

    name: str  # a key of CAUSES
    where: str  # such as: constant in each rank, 8 of 64 responses, in optimiser steps 2, 4
    size: float  # the factor, the share of tokens or the ratio, as `what` says
    what: str  # a sentence
    # At most three: response, token from 0, intended, received
    examples: tuple[tuple[str, int, float, float], ...] = ()
    causes: str = ""  # the usual ones
    mismatch: bool = True  # False for a note: a property that the loss declares, an unknown loss, rounding
    tokens: int = 0
    low: float | None = None  # the smallest received / intended; None where nothing was intended, and of structure
    high: float | None = None
    explains: float | None = None  # share of the tokens that differ from what was intended; None of structure
    also: str = ""  # other explanations that were tried, each with the share that it explains by itself

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Finding:
        """The inverse of :meth:`to_dict`, also after JSON; what a later version added is left out."""
        own = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        return cls(**own | {"examples": tuple(tuple(example) for example in own.get("examples", ()))})

    def __str__(self) -> str:
        tokens = [f"{key} token {t + 1}: {want:.4g} -> {got:.4g}" for key, t, want, got in self.examples]
        lines = [
            f"{self.name if self.mismatch else f'({self.name})'}: {self.what}",
            f"{self.tokens:,} tokens, {self.where}",
        ]
        return "\n  ".join([*lines, *[f"intended -> received: {'; '.join(tokens)}"] * bool(tokens), self.causes])


@dataclass(frozen=True)
class Receipt:
    """What arrived. Tensors are float32, with NaN for responses that an update does not hold."""

    received_BT: torch.Tensor  # effective advantage e = -g D, the mean over the updates that the response was in
    clipped_BT: torch.Tensor  # share of these updates in which the token was clipped; NaN for an unknown loss
    received_UBT: torch.Tensor  # e by update
    expected_UBT: torch.Tensor  # what the loss says; NaN for an unknown loss
    clipped_UBT: torch.Tensor  # 1 where the update clipped the token; NaN for an unknown loss
    findings: tuple[Finding, ...]  # mismatches first; of these structure first, then those that cover most tokens
    seen_from: float = 1.0  # smallest factor above 1 that is found in an advantage of middle size, by the precision
    tokens: int = 0  # that trained, each once
    clipped: float | None = None  # mean share of clipping over these; None for an unknown loss
    responses: tuple[int, int] = (0, 0)  # those seen, and those of the whole update

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

    def __init__(self, batch: Batch, loss: Loss, pieces: list[Piece]) -> None:
        self.batch, self.loss, self.pieces = batch, loss, pieces
        counts = torch.tensor([len(piece.rows_b) for piece in pieces])
        of_pieces = zip(*((piece.update, piece.rank, place) for place, piece in enumerate(pieces)), strict=True)
        update_N, rank_N, piece_N = (torch.tensor(values).repeat_interleave(counts) for values in of_pieces)
        self.rows_N, self.update_N, self.piece_N = torch.cat([piece.rows_b for piece in pieces]), update_N, piece_N
        self.groups = {"": 0 * update_N, "optimiser step": update_N, "rank": rank_N + batch.ranks * update_N}
        self.groups |= {"micro-batch": piece_N, "response": torch.arange(len(self.rows_N))}
        self.divisor_N1 = torch.cat(denominators(loss, batch, pieces))
        gradient_NT, own_NT = (torch.cat([getattr(p, name).double() for p in pieces]) for name in READ)
        self.received_NT = -gradient_NT * self.divisor_N1 / batch.ranks + 0.0
        self.precision = max(PRECISION[getattr(piece, name).dtype] for piece in pieces for name in READ)
        columns = (batch.weights_BT, batch.old_log_probs_BT, batch.ref_log_probs_BT)
        weights, old, ref = (None if each is None else each[self.rows_N].double() for each in columns)
        self.mask_NT, weights = batch.mask_BT[self.rows_N], torch.ones_like(own_NT) if weights is None else weights
        old = own_NT if old is None else old
        advantages = torch.where(self.mask_NT, batch.advantages_BT[self.rows_N].double(), 0.0)
        self.t = Tokens(advantages, weights, self.mask_NT, own_NT, old, ref)
        size = float(advantages[advantages != 0].square().mean().sqrt().nan_to_num())
        self.unit = size + loss.kl_coef + abs(float(loss.options.get("coef") or 0.0))
        self.wanted_NT, self.ignored_NT = torch.zeros_like(self.received_NT), ~self.received_NT.isfinite()
        self.findings: list[Finding] = []
        self.differs, self.also = 0, ""

    def receipt(self) -> Receipt:
        """Compare, and tell."""
        self._structure()
        self.add("not finite", "gradients are inf or NaN", self.ignored_NT)
        self.received_NT[self.ignored_NT] = 0.0
        expected_NT = clipped_NT = torch.full_like(self.received_NT, torch.nan)
        if self.loss.account is None:
            self.add("outside", "tokens outside the mask train", ~self.mask_NT & (self.received_NT != 0))
        else:
            expected_NT, clipped_NT = self.expect()
            self.wanted_NT = expected_NT
            self._first_ratio()
            self._differences(clipped_NT)
        structure = ("missing", "repeated", "not finite")
        self.findings.sort(key=lambda each: (not each.mismatch, each.name not in structure, -each.tokens))
        (B, T), at = self.batch.mask_BT.shape, (self.update_N, self.rows_N)
        held_UB1 = torch.zeros(int(self.update_N.max()) + 1 if len(self.rows_N) else 1, B, 1)
        held_UB1.index_put_(at, torch.ones(len(self.rows_N), 1), accumulate=True)
        nothing_UBT = torch.where(held_UB1 > 0, 0.0, torch.nan).expand(-1, -1, T)
        values = (self.received_NT.float(), expected_NT.float(), clipped_NT.float())
        received, expected, clipped = (nothing_UBT.clone().index_put_(at, each, accumulate=True) for each in values)
        clipped /= held_UB1  # of a response that came twice it is a share too
        seen_B, totals = held_UB1.any(dim=0)[:, 0], self.batch.totals_U2
        responses = (int(seen_B.sum()), B if totals is None else int(totals[:, 1].sum()) // self.batch.epochs)
        means, trained_BT = (received.nanmean(dim=0), clipped.nanmean(dim=0)), self.batch.mask_BT & seen_B[:, None]
        tokens, known = int(trained_BT.sum()), self.loss.account is not None and trained_BT.any()
        share = float(means[1][trained_BT].mean()) if known else None
        findings, seen_from = tuple(self.findings), 1 + 2 * self.precision
        return Receipt(*means, received, expected, clipped, findings, seen_from, tokens, share, responses)

    def expect(self, loss: Loss | None = None, **columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What a loss gives and where it clips, also with other columns."""
        loss, tokens = loss or self.loss, replace(self.t, **columns)
        if not callable(loss.account) and loss.account != "kl_cov":
            return expect(loss, tokens)
        value, clipped = zip(*(expect(loss, tokens.of(self.piece_N == k)) for k in self.piece_N.unique()), strict=True)
        return torch.cat(value), torch.cat(clipped)

    def add(self, name: str, what: str, at_NT: torch.Tensor, size: float = 0.0, place: str = "", **given: Any) -> None:
        """A line on the tokens ``at_NT`` that received something else than was intended; none without such a token.

        ``given`` may have ``wanted_NT``, in place of what the loss says, and a factor, in place of received / intended.
        """
        wanted_NT = given.get("wanted_NT", self.wanted_NT)
        at_NT = at_NT & ~((self.received_NT - wanted_NT).abs() <= 1e-6 * (name != "rounded") * wanted_NT.abs())
        n, t = at_NT.nonzero(as_tuple=True)
        if not len(n):
            return
        where = [place] * bool(place) + [f"{len(self.rows_N[n].unique())} of {len(self.rows_N.unique())} responses"]
        steps = ", ".join(str(int(step) + 1) for step in self.update_N[n].unique()[:8])
        where += [f"in optimiser steps {steps}"] * bool(self.update_N.any())
        examples: list[tuple[str, int, float, float]] = []
        for k in range(0, len(n), max(1, len(n) // 3))[:3]:
            want, got = (float(each[n[k], t[k]]) + 0.0 for each in (wanted_NT, self.received_NT))
            examples.append((self._key(int(self.rows_N[n[k]])), int(t[k]), want, got))
        times = given.get("factor_NT", self.received_NT / wanted_NT)[at_NT]
        low, high = (float(each) for each in times.aminmax()) if times.isfinite().all() else (None, None)
        size, share = size or len(n) / max(1, int(self.mask_NT.sum())), len(n) / self.differs if self.differs else None
        told = (", ".join(where), size, what, tuple(examples), CAUSES[name], name != "rounded", len(n))
        self.findings.append(Finding(name, *told, low, high, share, self.also))

    def _key(self, row: int) -> str:
        return self.batch.keys[row] if self.batch.keys else str(row)

    def _structure(self) -> None:
        """Responses in an epoch never or twice, left out with an advantage, or whose prompt trains."""
        batch, loss, B = self.batch, self.loss, len(self.batch.mask_BT)
        left_out_B = torch.zeros(B, dtype=torch.bool) if batch.left_out_B is None else batch.left_out_B
        trains_B = ((batch.advantages_BT != 0) & batch.mask_BT).any(dim=1)
        epoch_N, lengths_B = self.update_N // batch.updates, batch.mask_BT.sum(dim=1)
        times_EB = torch.stack([self.rows_N[epoch_N == epoch].bincount(minlength=B) for epoch in epoch_N.unique()])
        beside = [torch.zeros(len(p.rows_b)) if p.outside_b is None else p.outside_b for p in self.pieces]
        beside_B = torch.isin(torch.arange(B), self.rows_N[torch.cat(beside) != 0])
        for name, what, at_EB in (
            ("lost", "left out with an advantage", (left_out_B & trains_B)[None]),
            ("missing", "in no micro-batch", (times_EB == 0) & ~left_out_B & (lengths_B > 0)),
            ("repeated", "in several micro-batches, or in one repeatedly", times_EB > 1),
            ("outside", "there with a gradient on the prompt or padding", beside_B[None]),
        ):
            if at_EB.any():
                rows = at_EB.any(dim=0).nonzero().flatten().tolist()
                what = f"{len(rows)} of {B} responses are {what} (such as {', '.join(map(self._key, rows[:3]))})"
                where = f"epochs {', '.join(str(int(e) + 1) for e in at_EB.any(dim=1).nonzero())}"
                tokens = int((at_EB * lengths_B).sum())
                self.findings.append(Finding(name, where, len(rows) / B, what, (), CAUSES[name], tokens=tokens))
        if loss.account is None:
            what = f"`{loss.name}` with these settings has no formula here: structure alone was checked"
            self.findings.append(Finding("unknown loss", "", 0.0, what, (), CAUSES["unknown loss"], False))

    def _first_ratio(self) -> None:
        """The first update on policy has ratio 1."""
        first_N, old_BT = self.update_N == 0, self.batch.old_log_probs_BT
        t = self.t.of(first_N)
        if not self.batch.on_policy or old_BT is None or not t.mask.any():
            return

        def distance(old_NT: torch.Tensor, part: slice = slice(None)) -> float:
            away_NT = ((t.log_probs - old_NT).clamp(-20, 20).exp() - 1).abs()
            return float(away_NT[:, part][t.mask[:, part]].clamp(max=10).mean().nan_to_num(10.0))

        size, half = distance(t.old), self.precision > PRECISION[torch.float32]
        name, what = "rounded", f"the first ratios are {size:.3g} from 1 in the mean"
        if size > STALE + half * 2**-8 * float(t.log_probs[t.mask].abs().mean()):
            beside = min(distance(t.old.roll(by, 1), slice(1, -1)) for by in (1, -1)) < size / 10
            own_NT, old_BT = torch.where(t.mask, t.log_probs, torch.nan), old_BT.double()
            others = distance(old_BT[fitting_rows(own_NT, old_BT, self.rows_N[first_N], 1e-3)]) < size / 10
            name = "shifted" if beside else "swapped" if others else "stale"
        if size > NOISE:
            at_NT = first_N[:, None] & self.mask_NT & ((self.t.log_probs - self.t.old).abs() > NOISE)
            self.add(name, what, at_NT, size, wanted_NT=self.expect(old=self.t.log_probs)[0])

    def _differences(self, clipped_NT: torch.Tensor) -> None:
        """What does not fit the loss."""
        of_response = self.loss.account == "geo_mean" or self.loss.options.get("sequence")
        for sign in (1, -1):  # where a ratio is on a bound of the clip, rounding decides, or a tie halves the gradient
            own, nudge = sign * self.t.advantages.abs(), self.precision
            below, above = (self.expect(advantages=own, old=self.t.old + by * nudge)[1] for by in (1, -1))
            tie_NT = (below ^ above).any(dim=1, keepdim=True) if of_response else below ^ above
            self.ignored_NT = self.ignored_NT | tie_NT
        wanted_NT, received_NT = self.wanted_NT, self.received_NT
        wrong_NT = self.off(wanted_NT, received_NT)
        self.differs = int(wrong_NT.sum())
        if not self.differs:
            return
        self.clipped_NT, self.open_NT = clipped_NT, self.expect(opened(self.loss))[0]
        self.rounding, one = False, self.middle(self.quotient(wanted_NT), "").exp()
        small_NT = wrong_NT & ((received_NT / one - wanted_NT).abs() <= ROUNDED * wanted_NT.abs())
        self.rounding = 2 * int(small_NT.sum()) > int((wrong_NT & (received_NT != 0) & (wanted_NT != 0)).sum())
        self._search()

    def off(self, value_NT: torch.Tensor, got_NT: torch.Tensor, factor_N1: Any = 1.0) -> torch.Tensor:
        """Where more than rounding lies between them; outside the mask, where anything was received.

        What was received is divided by the factor: a large one must not make it small beside a value of 0.
        """
        unit_NT = torch.where(value_NT == 0, self.unit / torch.as_tensor(factor_N1).clamp(min=1), self.unit)
        size_NT = torch.maximum(value_NT.abs(), got_NT.abs()) + torch.where(self.mask_NT, unit_NT, 0.0)
        return ~((got_NT - value_NT).abs() <= self.precision * size_NT) & ~self.ignored_NT

    def quotient(self, value_NT: torch.Tensor) -> torch.Tensor:
        """Logarithm of received / value, where that is positive; NaN elsewhere, and where rounding is large."""
        strong_NT = (value_NT.abs() > 0.02 * self.unit) & ~self.ignored_NT & (self.received_NT / value_NT > 0)
        return torch.where(strong_NT, self.received_NT / value_NT, torch.nan).log()

    def middle(self, log_NT: torch.Tensor, by: str) -> torch.Tensor:
        """The median of each group, (G,); 0 of one without values."""
        n, t = log_NT.isfinite().nonzero(as_tuple=True)
        group_K, value_K = self.groups[by][n], log_NT[n, t].clamp(-99, 99)
        value_K = value_K[(256.0 * group_K + value_K).argsort()]
        count_G = group_K.bincount(minlength=int(self.groups[by].max()) + 1)
        place_G = (count_G.cumsum(0) - (count_G + 2) // 2).clamp(0)
        return torch.where(count_G > 0, pad(value_K, (0, 1))[place_G], 0.0)

    def left(self, value_NT: torch.Tensor, factor_N1: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """What an explanation leaves: bits, (N,), and where, by kind."""
        got_NT, bits_N, kinds = self.received_NT / factor_N1, torch.zeros(len(value_NT), dtype=torch.float64), {}
        away_NT = (got_NT - value_NT).abs()
        rest_NT, small_NT = self.off(value_NT, got_NT, factor_N1), away_NT <= ROUNDED * value_NT.abs()
        # 8 for a difference as large as an advantage, down to 2 for one that is hardly seen
        size_NT = away_NT * torch.as_tensor(factor_N1).clamp(min=1) / self.unit
        bits_NT = 2 + 6 * (1 + size_NT / self.precision).log() / math.log(1 + 1 / self.precision)
        bits_NT = bits_NT.clamp(max=8.0)
        for name, bits, most, at_NT in (
            ("lost", 0.5, WHOLE, got_NT == 0),
            ("outside", 1.0, WHOLE, ~self.mask_NT & (value_NT == 0)),
            ("unclipped", 1.0, WHOLE, self.clipped_NT & (value_NT == 0) & ~self.off(self.open_NT, got_NT)),
            ("sign", 8.0, WHOLE, ~self.off(-value_NT, got_NT)),
            ("rounded", 1.0, math.inf, self.rounding & small_NT),
            ("", bits_NT, math.inf, rest_NT),
        ):
            kinds[name] = rest_NT & at_NT
            bits_N += torch.where(kinds[name], bits, 0.0).sum(dim=1).clamp(max=most)
            rest_NT = rest_NT & ~at_NT
        return bits_N, kinds

    def _search(self) -> None:
        """Try all explanations, and tell the shortest. None is told that leaves most of what it changes."""
        best: tuple[Any, ...] = (math.inf,)
        tried: dict[str, float] = {}
        for bits, name, what, value_NT in self._changes():
            if name and not self.off(value_NT, self.wanted_NT).any():
                continue
            log_NT = self.quotient(value_NT)
            finest_N1 = self.middle(log_NT, "response").exp()[:, None]
            if bits + float(self.left(value_NT, finest_N1)[0].sum()) >= best[0]:
                if name in LOOK_ALIKE:
                    tried[what] = self._share(self.left(value_NT, torch.ones_like(finest_N1))[1])
                continue
            for more, factor_N1, by in self._factors(value_NT, log_NT):
                bits_N, kinds = self.left(value_NT, factor_N1)
                total, label = bits + more + float(bits_N.sum()), what or f"scaled{by and f' by {by}'}"
                tried[label] = max(tried.get(label, 0.0), self._share(kinds) if not (name and by) else 0.0)
                if total < best[0] and (not name or self._explains(value_NT, factor_N1, kinds[""])):
                    best = (total, label, name, what, value_NT, factor_N1, by, kinds)
            reversed_too = best[2] in LOOK_ALIKE or best[-1]["sign"].any()
            if best[0] <= NUMBER and not reversed_too:
                break
        others = sorted((-share, what) for what, share in tried.items() if what != best[1] and share > 0.01)
        self.also = "; ".join(f"{what} {-share:.0%}" for share, what in others[:3])
        self._tell(*best[2:])

    def _explains(self, value_NT: torch.Tensor, factor_N1: torch.Tensor, rest_NT: torch.Tensor) -> bool:
        """Whether most of the tokens that a change changes then fit, or are much nearer; ``rest_NT``: those that do not."""
        changed_NT = self.off(value_NT, self.wanted_NT)
        before = (self.received_NT - self.wanted_NT)[changed_NT].abs().sum()
        after = (self.received_NT - value_NT * factor_N1)[changed_NT].abs().sum()
        return 3 * int((rest_NT & changed_NT).sum()) <= int(changed_NT.sum()) or bool(3 * after <= before)

    def _share(self, kinds: Mapping[str, torch.Tensor]) -> float:
        """Of the tokens that differ, those that are not left."""
        return 1 - float(sum(kind.sum() for kind in kinds.values())) / self.differs

    def _factors(
        self, value_NT: torch.Tensor, log_NT: torch.Tensor
    ) -> Iterator[tuple[float, torch.Tensor, str | None]]:
        """Bits, factor of each response, its group: ``None`` where it follows from tokens that are lost or outside.

        A factor that lies within the spread of what it leaves explains nothing: each token has its own then.
        """
        ones_N1 = torch.ones(len(value_NT), 1, dtype=torch.float64)
        log_one = self.middle(log_NT, "")
        least = torch.clamp(2 * self.middle((log_NT - log_one).abs(), ""), min=1.5 * self.precision)
        one = float(log_one.exp()) if float(log_one.abs()) > float(least) else 1.0
        yield 0.0, ones_N1, ""
        if one != 1:
            yield NUMBER, one * ones_N1, ""
        for counted_BT in self._counted(value_NT):
            factor_N1 = self.divisor_N1 / torch.cat(denominators(self.loss, self.batch, self.pieces, counted_BT))
            if float(self.middle((log_NT - factor_N1.log()), "").abs()) < 4 * self.precision:
                yield 3.0, factor_N1, None
        before_N = self.left(value_NT, one * ones_N1)[0]
        for by, group_N in list(self.groups.items())[1:]:
            log_G = self.middle(log_NT, by)
            spread_G = self.middle((log_NT - log_G[group_N][:, None]).abs(), by)
            stands_out_G = (log_G - math.log(one)).abs() > 2 * spread_G
            own_G = torch.where(stands_out_G, log_G.exp(), one)
            saved_N = before_N - self.left(value_NT, own_G[group_N][:, None])[0]
            chosen_G = torch.zeros_like(own_G).index_add_(0, group_N, saved_N) > NUMBER + math.log2(len(own_G))
            chosen_G |= 2 * chosen_G.sum() > len(chosen_G)
            if chosen_G.any():
                bits = 8 + NUMBER * (one != 1) + (NUMBER + math.log2(len(own_G))) * int(chosen_G.sum())
                yield bits, torch.where(chosen_G, own_G, one)[group_N][:, None], by

    def _counted(self, value_NT: torch.Tensor) -> Iterator[torch.Tensor]:
        """Tokens that a divisor may count which follows what trains: without those that are lost, with those outside."""
        mask_BT, rows_N = self.batch.mask_BT, self.rows_N
        lost_NT = self.mask_NT & (self.received_NT == 0) & (value_NT != 0)
        outside_NT = ~self.mask_NT & (self.received_NT != 0)
        if not (lost_NT | outside_NT).any():
            return
        trains_NT = self.mask_NT & ~lost_NT | outside_NT
        last_NT = self.mask_NT.flip(1).cummax(dim=1).values.flip(1)
        # Of responses with an advantage of 0 nobody sees what is lost: those tokens that fit the same description.
        likely = [trains_NT, trains_NT & ~self.alike(lost_NT, self.mask_NT & (value_NT != 0))[1]]
        likely += [trains_NT | last_NT, torch.ones_like(trains_NT)] if outside_NT.any() else []
        for counted_NT in likely:
            counted_BT = mask_BT.clone()
            counted_BT[rows_N] = counted_NT
            yield counted_BT

    def _changes(self) -> Iterator[Change]:
        """What the loss may have in place of what was intended, which is the first."""
        yield 0, "", "", self.wanted_NT
        yield from self._other_advantages()
        yield from self._other_ratios()
        yield from self._other_weights()
        yield from self._other_clips()
        if self.loss.kl:
            for times, name, what in ((-1, "sign", "reversed"), (0, "extra", "left out"), (2, "extra", "twice")):
                loss = replace(self.loss, kl_coef=times * self.loss.kl_coef)
                yield 6, name, f"the KL term is {what}", self.expect(loss)[0]
        yield from self._added()

    def _other_advantages(self) -> Iterator[Change]:
        t, own, mask = self.t, self.t.advantages, self.mask_NT

        def of(advantages: torch.Tensor, **columns: torch.Tensor) -> torch.Tensor:
            return self.expect(None, advantages=advantages, **columns)[0]

        yield 2, "rounded", "advantages of bf16", of(own.bfloat16().double())
        yield 5, "sign", "the sign is reversed", of(-own)
        yield 6, "sign", "all advantages are positive", of(own.abs())
        one = self.middle(self.quotient(self.wanted_NT).abs(), "").exp()
        gained = self.off(self.wanted_NT, self.received_NT / one).sum(1) - self.off(
            -self.wanted_NT, self.received_NT / one
        ).sum(1)
        reversed_N1 = (gained > 0)[:, None]
        if reversed_N1.any():
            rows, count = self.rows_N[reversed_N1[:, 0]], int(reversed_N1.sum())
            what = f"{len(rows.unique())} of {len(self.rows_N.unique())} responses have the reversed sign"
            yield 5 * count, "sign", what, of(torch.where(reversed_N1, -own, own))
            loss_NT = torch.where(reversed_N1, 2 * of(0 * own) - self.wanted_NT, self.wanted_NT)
            yield 5 * count, "sign", f"the loss of {what.replace(' have ', ' has ')}", loss_NT
        yield 8, "flattened", "one advantage for each response", of(torch.where(mask, t.row_mean(own), 0.0))
        least_N1 = torch.where(own != 0, own.abs(), torch.inf).amin(dim=1, keepdim=True)
        times = (own.abs() / least_N1).nan_to_num(0.0)
        weighed_N1 = times.amax(dim=1, keepdim=True) > 1.001
        if weighed_N1.any():
            yield 8, "flattened", "token weights are left out", of(own.sign() * least_N1.nan_to_num(0, 0, 0))
            # Nobody sees the weight in a response of which all tokens have the same: 1, or the largest of the others.
            largest = times.amax(dim=1)[weighed_N1[:, 0]].median()
            for rest in (1.0, largest):
                yield 8, "weights", "token weights count twice", of(own * torch.where(weighed_N1, times, rest))
        for by, side in ((1, "of the token before"), (-1, "of the token after")):
            yield 8, "shifted", f"advantages and mask {side}", of(roll(own, by), mask=roll(mask, by))
            yield 10, "shifted", f"advantages {side}", of(roll(own, by) * mask)
        first = self.batch.advantages_BT.gather(1, self.batch.mask_BT.long().argmax(dim=1, keepdim=True)).double()
        alike = ((self.batch.advantages_BT == first) | ~self.batch.mask_BT).all(dim=1, keepdim=True)
        given = torch.where(alike, first, torch.where(self.batch.mask_BT, self.batch.advantages_BT, 0.0))
        for implied in self._implied("advantages"):
            bound = float(implied.abs().nan_to_num(0.0).max())
            if 0 < bound < float(own.abs().max()):
                yield (
                    8 + NUMBER,
                    "unexplained",
                    f"advantages are cut at {bound:.4g}",
                    of(own.clamp(-bound, bound)),
                )
            yield from self._swapped("advantages", "advantages", implied, given)

    def _other_ratios(self) -> Iterator[Change]:
        t, old_BT = self.t, self.batch.old_log_probs_BT
        if old_BT is None:
            return
        for by, side in ((1, "of the token before"), (-1, "of the token after")):
            yield 9, "shifted", f"old log-probabilities {side}", self.expect(old=roll(t.old, by))[0]
        yield 7, "stale", "the ratio is 1", self.expect(old=t.log_probs)[0]
        yield 7, "stale", "the ratio counts twice", self.expect(old=2 * t.old - t.log_probs)[0]
        yield 8, "stale", "one ratio for each response", self.expect(old=t.log_probs - t.row_mean(t.log_ratio))[0]
        plain = self.expect(opened(self.loss), old=t.log_probs)[0]
        yield 8, "stale", "the ratio is 1 but for the clip", torch.where(self.clipped_NT, self.wanted_NT, plain)
        if t.ref is not None:
            yield 7, "stale", "old log-probabilities are the reference's", self.expect(old=t.ref)[0]
        for implied in self._implied("old"):
            yield from self._swapped("old", "old log-probabilities", implied, old_BT.double())

    def _other_weights(self) -> Iterator[Change]:
        t, weights_BT = self.t, self.batch.weights_BT
        if weights_BT is None:
            return
        for by, side in ((1, "of the token before"), (-1, "of the token after")):
            yield 9, "shifted", f"importance weights {side}", self.expect(weights=roll(t.weights - 1, by) + 1)[0]
        for power, what in ((0, "are left out"), (2, "count twice"), (-1, "divide")):
            yield 7, "weights", f"importance weights {what}", self.expect(weights=t.weights**power)[0]
        mean = t.row_mean(t.weights).expand_as(t.weights)
        yield 8, "weights", "importance weights are the mean of each response", self.expect(weights=mean)[0]
        for implied in self._implied("weights"):
            for bounds in ({"max": implied.nan_to_num(0.0).max()}, {"min": implied.nan_to_num(torch.inf).min()}):
                (bound,) = map(float, bounds.values())
                what = f"importance weights are cut at {bound:.4g}"
                yield 8 + NUMBER, "weights", what, self.expect(weights=t.weights.clamp(**bounds))[0]
            yield from self._swapped("weights", "importance weights", implied, weights_BT.double())

    def _other_clips(self) -> Iterator[Change]:
        loss, ratio = self.loss, self.t.log_ratio.exp()
        if "low" not in loss.options or loss.account == "dppo":
            return
        low, high, whole = 1 - loss.options["low"], 1 + loss.options["high"], self.expect(opened(loss))[0]
        yield 6, "unclipped", "nothing is clipped", whole
        yield 8, "lost", "the clip takes both sides", torch.where((ratio < low) | (ratio > high), 0.0, whole)
        bounded = replace(loss, account="cispo", options={"lowest": low, "highest": high})
        yield 8, "unclipped", "clipped tokens train with the bound in the ratio's place", self.expect(bounded)[0]

    def _added(self) -> Iterator[Change]:
        """Terms beside the loss that go with something else than the advantage."""
        t, ones = self.t, torch.ones_like(self.wanted_NT)
        terms = {
            "to each token": ones,
            "times the log-probability": t.log_probs,
            "times the probability": t.log_probs.exp(),
        }
        terms["to each advantage"] = self.expect(opened(self.loss), advantages=ones)[0]
        terms["to each advantage"] -= self.expect(opened(self.loss), advantages=0 * ones)[0]
        if t.ref is not None:
            terms["times the slope of a KL term (k2)"] = t.log_probs - t.ref
            terms["times the slope of a KL term (k3)"] = 1 - (t.ref - t.log_probs).exp()
        draw = torch.Generator().manual_seed(0)
        for what, slope_NT in terms.items():
            there_NT = self.mask_NT & ~self.ignored_NT & (self.received_NT != 0) & (slope_NT.abs() > 1e-3)
            if not there_NT.any():
                continue
            # received = factor * (wanted + added * slope): the factor by pairs, in which what is added cancels
            wanted_K, received_K = (each[there_NT] / slope_NT[there_NT] for each in (self.wanted_NT, self.received_NT))
            one_P, other_P = torch.randint(len(wanted_K), (2, 4000), generator=draw)
            apart_P = wanted_K[one_P] - wanted_K[other_P]
            factors_P = (received_K[one_P] - received_K[other_P]) / apart_P
            factors_P = factors_P[(apart_P.abs() > 0.1 * self.unit) & (factors_P > 0)]
            for factor in (1.0, float(factors_P.median()) if len(factors_P) else 1.0):
                added = float((received_K / factor - wanted_K).median())
                if not abs(added) < 1e3 * self.unit:
                    continue
                value_NT = self.wanted_NT + torch.where(self.mask_NT, added * slope_NT, 0.0)
                yield 20, "extra", f"{added:+.4g} {what} is added", value_NT

    def _implied(self, column: str) -> Iterator[torch.Tensor]:
        """Values of a column that would give what was received, as it is and without one factor; NaN where none follows."""
        ones = torch.ones_like(self.wanted_NT)
        rest = self.expect(advantages=0 * ones)[0]
        sizes = [(self.received_NT / self.wanted_NT)[self.mask_NT].abs().nanmedian()]
        # In another order the responses' sizes stay the same.
        of_rows = (
            torch.where(self.mask_NT & (each != 0), each.abs(), torch.nan)
            for each in (self.received_NT, self.wanted_NT)
        )
        received_N, wanted_N = (each.nanmedian(dim=1).values for each in of_rows)
        sizes.append(received_N.nanmedian() / wanted_N.nanmedian())
        for scale in {1.0, *(float(size) for size in sizes if 0 < float(size) < math.inf)}:
            value = self.received_NT / scale - rest
            if column == "advantages":
                up, down = self.expect(advantages=ones)[0] - rest, rest - self.expect(advantages=-ones)[0]
                unit = torch.where(value > 0, up, down)
            else:
                plain = {"old": self.t.log_probs} if column == "old" else {"weights": ones}
                unit = self.expect(opened(self.loss), **plain)[0] - rest
            implied = torch.where((unit != 0) & self.mask_NT & ~self.ignored_NT, value / unit, torch.nan)
            if column != "advantages":
                implied = torch.where(implied > 0, implied, torch.nan)
            yield self.t.log_probs - implied.log() if column == "old" else implied

    def _swapped(self, column: str, called: str, implied: torch.Tensor, given_BT: torch.Tensor) -> Iterator[Change]:
        """Values of other responses: of those whose own would give what was received."""
        rows_N, B = self.rows_N, len(given_BT)
        chosen_N = fitting_rows(implied, given_BT, rows_N, max(1e-3, 2 * self.precision))
        if not (chosen_N != rows_N).any():
            return
        moves = (chosen_N - rows_N) % B
        move = moves[moves != 0].mode().values
        if 2 * int((moves == move).sum()) > len(moves):  # all moved alike: also those of which too few tokens say it
            chosen_N = (rows_N + move) % B
        moved, all_rows = int((chosen_N != rows_N).sum()), len(rows_N)
        before, after = (given_BT.sum(dim=1)[each_N].sort().values for each_N in (rows_N, chosen_N))
        bits = WHOLE + NUMBER * moved
        if moved > 1 and torch.allclose(before, after, rtol=1e-3):  # as many of each value as before
            bits = 0.8 * math.log2(math.comb(all_rows, moved))
        values = given_BT[chosen_N]
        values = torch.where(self.mask_NT, values, 0.0) if column == "advantages" else values
        what = f"{moved} of {all_rows} responses have the {called} of another one"
        yield bits, "swapped", what, self.expect(None, **{column: values})[0]

    def _tell(self, name: str, what: str, value_NT: Any, factor_N1: Any, by: str | None, kinds: dict[str, Any]) -> None:
        """The lines of an explanation."""
        got_NT, rest_NT = self.received_NT / factor_N1, kinds[""]
        rest = self._rest(rest_NT | kinds["rounded"], value_NT, got_NT) if rest_NT.any() else ""
        changed_NT = torch.zeros_like(rest_NT)
        if name:
            left_NT = torch.stack(list(kinds.values())).any(dim=0)
            nearer_NT = 3 * (got_NT - value_NT).abs() < (self.received_NT - self.wanted_NT).abs()
            changed_NT = self.off(value_NT, self.wanted_NT) & (nearer_NT | ~left_NT)
        if rest == "stale":
            # The clip takes and leaves tokens by the ratio in the loss, too.
            kinds = dict(kinds)
            for kind in ("rounded", "lost", "unclipped"):
                if not self.place(kinds[kind], value_NT):
                    rest_NT = rest_NT | kinds.pop(kind)
            if name == "unclipped":
                rest_NT, name = rest_NT | changed_NT, ""
        if name:
            self.add(name, what, changed_NT)
        at_NT = self.mask_NT & (self.received_NT != 0) & (factor_N1.log().abs() > self.precision)
        if by is not None and at_NT.any():
            low, high = (float(each) for each in factor_N1[at_NT.any(dim=1)].aminmax())
            small = by == "response" and max(-math.log(low), math.log(high)) < ROUNDED
            called = {"": "", "optimiser step": "", "response": " by response"}.get(by, " by micro-batch")
            what = f"tokens received {f'{low:.4g} to ' if high / low > 1.0001 else ''}{high:.4g} times what they should"
            place = f"constant in each {by}" if by else ""
            given = {"size": high if high > 1 else low, "factor_NT": factor_N1.expand_as(at_NT)}
            self.add("rounded" if small else f"scaled{called}", what, at_NT, place=place, **given)
        for kind, what in {
            "lost": "tokens with an advantage that no clip takes received nothing",
            "outside": "tokens outside the mask train",
            "unclipped": "tokens received a gradient that the clip should take",
            "sign": "tokens have the reversed sign",
            "rounded": f"tokens are off by at most {ROUNDED:.2%}",
        }.items():
            if kind in kinds:
                self.add(kind, what, kinds[kind], place=self.place(kinds[kind], value_NT))
        if rest_NT.any():
            value, got = value_NT[rest_NT], got_NT[rest_NT]
            added = got - value
            what = f"tokens received {added.min():+.3g} to {added.max():+.3g} beside what they should"
            if rest == "stale":
                times = got / value
                low, high = times[times.isfinite() & (times > 0)].quantile(torch.tensor([0.01, 0.99]).double())
                what = f"the ratio in the loss is mostly {low:.3g} to {high:.3g} times that of the batch"
            self.add(rest, what, rest_NT, place=self.place(rest_NT, value_NT))

    def _rest(self, at_NT: torch.Tensor, value_NT: torch.Tensor, got_NT: torch.Tensor) -> str:
        """The name of what no change and no factor explains."""
        if (self.t.advantages[at_NT] == 0).any():
            return "extra"
        beside_NT = self.expect(advantages=torch.zeros_like(value_NT))[0]  # what no ratio multiplies
        at_NT = at_NT & self.off(beside_NT, value_NT) & self.off(beside_NT, got_NT)
        value, got = (value_NT - beside_NT)[at_NT], (got_NT - beside_NT)[at_NT]
        own, ratio = self.t.advantages[at_NT], self.t.log_ratio.exp()[at_NT]
        if not self._is_ratio(at_NT, got / value):
            return "extra" if is_added(value, got, own) else "unexplained"
        # The clip cuts the ratios of a positive advantage above, those of a negative one below.
        low, high = 1 - self.loss.options["low"], 1 + self.loss.options["high"]
        uncut = torch.stack([(low < each) & (each < high) for each in (ratio, got / value * ratio)]).all(dim=0)
        return "extra" if is_added(value[uncut], got[uncut], own[uncut]) else "stale"

    def _is_ratio(self, at_NT: torch.Tensor, times: torch.Tensor) -> bool:
        """Whether factors of tokens are those of another ratio: of many tokens, on both sides of 1, and none where the clip
        would have taken it."""
        options, trains_NT = self.loss.options, self.mask_NT & (self.t.advantages != 0) & (self.received_NT != 0)
        clips = self.loss.account == "clip" and not options.get("sequence")
        few = len(times) < max(20, 0.1 * int(trains_NT.sum()))
        if few or not clips or self.batch.old_log_probs_BT is None:
            return False
        ratio, up = times * self.t.log_ratio.exp()[at_NT], self.t.advantages[at_NT] > 0
        margin = 1 + 2 * self.precision
        inside = torch.where(up, ratio <= (1 + options["high"]) * margin, ratio >= (1 - options["low"]) / margin)
        both = min(float((times > 1).double().mean()), float((times < 1).double().mean()))
        return float((inside & (times > 0)).double().mean()) > 0.98 and both > 0.1

    def place(self, at_NT: torch.Tensor, value_NT: torch.Tensor) -> str:
        """Which tokens they are among those that train, where a description fits all of them and no other."""
        return self.alike(at_NT, self.mask_NT & (value_NT != 0))[0]

    def alike(self, at_NT: torch.Tensor, among_NT: torch.Tensor) -> tuple[str, torch.Tensor]:
        """A description that fits tokens and none of the others among some, and all tokens that train and fit it; none, and
        the tokens themselves, without one."""
        others_NT = among_NT & ~at_NT
        order_NT, position_NT = self.mask_NT.cumsum(dim=1), torch.arange(1, at_NT.shape[1] + 1).expand_as(at_NT)
        lengths_NT = torch.where(self.mask_NT, position_NT, 0).amax(dim=1, keepdim=True).expand_as(position_NT)
        for what, values in {
            "the first of their response": order_NT == 1,
            "the last of their response": order_NT == order_NT[:, -1:],
            "those with a positive advantage": self.t.advantages > 0,
            "those with a negative advantage": self.t.advantages < 0,
            "those from token {:.0f} on": position_NT,
            "those up to token {:.0f}": -position_NT,
            "those of responses of {:.0f} tokens or more": lengths_NT,
            "those of responses of {:.0f} tokens or fewer": -lengths_NT,
        }.items():
            if at_NT.any() and others_NT.any() and values[at_NT].min() > values[others_NT].max():
                least = int(values[at_NT].min())
                return what.format(abs(least)), self.mask_NT & (values >= least)
        return "", at_NT


def fitting_rows(wanted_NT: torch.Tensor, given_BT: torch.Tensor, own_N: torch.Tensor, near: float) -> torch.Tensor:
    """For each response the one whose values fit best at 64 of its tokens, its own where that fits as well."""
    missing_NT = ~wanted_NT.isfinite()
    rank_NK = torch.arange(64) * (~missing_NT).sum(dim=1, keepdim=True).clamp(min=1) // 64
    place_NK = missing_NT.to(torch.uint8).argsort(dim=1, stable=True).gather(1, rank_NK)
    wanted_NK = wanted_NT.gather(1, place_NK)
    fits_BN = ((given_BT[:, place_NK] - wanted_NK).abs() <= near * wanted_NK.abs() + 1e-12).sum(dim=2)
    most = fits_BN.max(dim=0)
    return torch.where(fits_BN[own_N, torch.arange(len(own_N))] < most.values, most.indices, own_N)


def is_added(value_K: torch.Tensor, got_K: torch.Tensor, advantage_K: torch.Tensor) -> bool:
    """Whether what tokens received beside a value is alike for positive and negative, large and small advantages, and how
    many times the value they received is not."""
    added = times = noise = 0.0
    for part_K in (advantage_K > 0, advantage_K.abs() > advantage_K.abs().median()):
        count = min(int(part_K.sum()), int((~part_K).sum()))
        if count >= 4:
            added += distance(got_K - value_K, part_K)
            times += distance(got_K / value_K, part_K)
            noise += 2 / math.sqrt(count)
    return added < 0.7 * times and times > noise


def distance(values_K: torch.Tensor, part_K: torch.Tensor) -> float:
    """The largest one between the distribution functions of a part and of the rest (Kolmogorov and Smirnov)."""
    part_K = part_K[values_K.argsort()].double()
    return float((part_K.cumsum(0) / part_K.sum() - (1 - part_K).cumsum(0) / (1 - part_K).sum()).abs().max())


def roll(values_NT: torch.Tensor, by: int) -> torch.Tensor:
    """Each token has the value of the one ``by`` before it; 0 comes in at the end."""
    moved_NT = values_NT.roll(by, 1)
    moved_NT[:, 0 if by > 0 else -1] = 0
    return moved_NT
