"""Compare what each token received with what the loss says, and name what does not fit.

Of several explanations the simplest is taken that leaves fewest tokens; what it leaves is named token by token.

Shape suffixes: B responses of the rollout batch, n responses of an optimiser step, T response tokens, U steps over all epochs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from grail_advantage.receipt.losses import Batch, Loss, Tokens, denominators, expect
from grail_advantage.receipt.measure import Piece

if TYPE_CHECKING:
    import pyarrow as pa

    from grail_advantage.dump.schema import FindingRecord

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
ROUNDED = 2**-6
NOISE, STALE = 1e-3, 0.02
"""Mean distances of the first ratios from 1: above the first by rounding, above the second of another policy."""


@dataclass(frozen=True)
class Finding:
    """What does not fit, where, how large."""

    name: str
    """A key of ``CAUSES``."""
    where: str
    """Such as ``update 2: 8 of 64 responses``."""
    size: float
    """How large: the factor, the share of tokens or the ratio, as ``what`` says."""
    what: str
    """One sentence with the size."""
    examples: tuple[tuple[str, int, float, float], ...] = ()
    """Three tokens at most: response (key or number), token, intended effective advantage, received one."""
    causes: str = ""
    """The usual causes, one line."""
    mismatch: bool = True
    """False for a note: a property that the loss declares, an unknown loss, rounding."""

    def to_dict(self) -> FindingRecord:
        """For JSON."""
        return cast("FindingRecord", asdict(self))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Finding:
        """The inverse of :meth:`to_dict`, also after JSON."""
        return cls(**values | {"examples": tuple(tuple(example) for example in values["examples"])})

    def __str__(self) -> str:
        """For a terminal: four lines at most."""
        lines = [f"{self.name if self.mismatch else f'({self.name})'}: {self.what}", f"  {self.where}"]
        tokens = [f"{key} token {t}: {want:+.4g} -> {got:+.4g}" for key, t, want, got in self.examples]
        lines += [f"  intended -> received: {'; '.join(tokens)}"] if tokens else []
        return "\n".join([*lines, f"  usual causes: {self.causes}"] if self.mismatch else lines)


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

    @property
    def ok(self) -> bool:
        """No finding is a mismatch."""
        return not any(finding.mismatch for finding in self.findings)

    def table(self, keys: Sequence[str], lengths: Sequence[int]) -> pa.Table:
        """The receipt as :func:`grail_advantage.dump.store.write_received` writes it, a row a response.

        Args:
            keys: of its B responses.
            lengths: tokens of each.
        """
        import pyarrow as pa  # only here: nothing else of the receipt needs it

        from grail_advantage.dump.schema import RECEIVED_SCHEMA, as_utf8

        columns: dict[str, list[Any]] = {name: [] for name in RECEIVED_SCHEMA.names}
        for place, (key, length) in enumerate(zip(keys, lengths, strict=True)):
            by_update_UT = self.received_UBT[:, place, :length].float()
            held_K = by_update_UT.isfinite().any(dim=1).nonzero().flatten()
            columns["key"].append(as_utf8(key))
            columns["updates"].append(held_K.numpy())
            columns["received"].append(self.received_BT[place, :length].float().numpy())
            columns["clipped"].append(self.clipped_BT[place, :length].float().numpy())
            columns["by_update"].append(list(by_update_UT[held_K].numpy()))
        return pa.table(columns, schema=RECEIVED_SCHEMA)


def check(batch: Batch, loss: Loss, pieces: Sequence[Piece]) -> Receipt:
    """Compare the pieces of a rollout batch, of all ranks, micro-batches and updates, with the loss's settings.

    Raises:
        ValueError: no pieces, or one whose shape does not fit the batch.
    """
    batch, pieces = _on_cpu(batch), [_on_cpu(piece) for piece in pieces]
    B, T = batch.mask_BT.shape
    for piece in pieces:
        if piece.log_probs_bT.shape != (len(piece.rows_b), T) or piece.gradient_bT.shape != piece.log_probs_bT.shape:
            raise ValueError(
                f"a piece of shape {tuple(piece.log_probs_bT.shape)} for {len(piece.rows_b)} x {T}: use padded()"
            )
    if not pieces:
        raise ValueError("no piece was read: call Watch.read() before each micro-batch's loss")
    if loss.kl and batch.ref_log_probs_BT is None:
        loss = replace(loss, account=None)
    steps = _steps(batch, loss, pieces)
    received_UBT = torch.full((max(steps) + 1, B, T), torch.nan)
    expected_UBT, clipped_UBT = received_UBT.clone(), received_UBT.clone()
    findings = _counted(batch, pieces) + _declared(batch, loss, pieces)
    for number, step in sorted(steps.items()):
        received_UBT[number, step.rows_n] = 0.0
        received_UBT[number].index_add_(0, step.rows_n, step.received_nT.float())
        namer = _Namer(batch, step)
        if loss.account is None:
            namer.structure()
        else:
            expected_nT, clipped_nT = step.expected(loss)
            expected_UBT[number, step.rows_n] = expected_nT.float()
            clipped_UBT[number, step.rows_n] = clipped_nT.float()
            namer.compare(loss, expected_nT, clipped_nT)
        findings += namer.findings
    return Receipt(
        received_UBT.nanmean(dim=0), clipped_UBT.nanmean(dim=0), received_UBT, expected_UBT, tuple(_merged(findings))
    )


def _on_cpu(values: Any) -> Any:
    """The batch or piece with its tensors in the host's memory."""
    moved = {name: value.cpu() for name, value in vars(values).items() if isinstance(value, torch.Tensor)}
    return replace(values, **moved)


@dataclass(frozen=True)
class _Step:
    """An optimiser step: its micro-batches one after the other, float64."""

    number: int
    rows_n: torch.Tensor
    piece_n: torch.Tensor
    tokens: Tokens
    received_nT: torch.Tensor
    outside_n: torch.Tensor
    precision: float

    def expected(self, loss: Loss, **changes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The account of the loss, also with other tensors than the batch's."""
        tokens = replace(self.tokens, **changes)
        parts = [expect(loss, tokens.of(self.piece_n == piece)) for piece in self.piece_n.unique()]
        value, clipped = zip(*parts, strict=True)
        return torch.cat(value), torch.cat(clipped)


def _steps(batch: Batch, loss: Loss, pieces: Sequence[Piece]) -> dict[int, _Step]:
    factors, result = denominators(loss, batch, pieces), {}
    zeros_BT = torch.zeros_like(batch.mask_BT, dtype=torch.float64)
    for number in {piece.update for piece in pieces}:
        own = [(piece, factor) for piece, factor in zip(pieces, factors, strict=True) if piece.update == number]
        rows_n = torch.cat([piece.rows_b for piece, _ in own])
        log_probs_nT = torch.cat([piece.log_probs_bT for piece, _ in own]).double()
        columns = (batch.advantages_BT, batch.weights_BT, batch.old_log_probs_BT, batch.ref_log_probs_BT)
        advantages, weights, old, ref = (None if each is None else each[rows_n].double() for each in columns)
        assert advantages is not None
        weights = zeros_BT[rows_n] + 1 if weights is None else weights
        old = log_probs_nT if old is None else old
        mask_nT = batch.mask_BT[rows_n].bool()
        result[number] = _Step(
            number,
            rows_n,
            torch.cat([torch.full((len(piece.rows_b),), place) for place, (piece, _) in enumerate(own)]),
            Tokens(torch.where(mask_nT, advantages, 0.0), weights, mask_nT, log_probs_nT, old, ref),
            torch.cat([-piece.gradient_bT.double() * factor / batch.ranks for piece, factor in own]),
            torch.cat([torch.zeros(len(p.rows_b)) if p.outside_b is None else p.outside_b.float() for p, _ in own]),
            max(PRECISION[dtype] for piece, _ in own for dtype in (piece.gradient_bT.dtype, piece.log_probs_bT.dtype)),
        )
    return result


class _Namer:
    """Names what does not fit in one optimiser step."""

    def __init__(self, batch: Batch, step: _Step) -> None:
        self.batch, self.step = batch, step
        self.findings: list[Finding] = []
        self._borderline_nT = torch.zeros_like(step.tokens.mask)
        """Where rounding decides whether the loss clips."""

    def add(
        self, name: str, size: float, what: str, at_nT: torch.Tensor, wanted_nT: torch.Tensor, note: bool = False
    ) -> None:
        """A finding at the tokens ``at_nT``."""
        step, places = self.step, at_nT.nonzero()
        rows, pieces = step.rows_n[at_nT.any(dim=1)].unique(), step.piece_n[at_nT.any(dim=1)].unique().tolist()
        where = f"update {step.number}: {len(places)} tokens of {len(rows)} of {len(step.rows_n)} responses"
        if len(pieces) < len(step.piece_n.unique()):
            where += f", micro-batches {', '.join(map(str, pieces[:8]))}"
        keys, examples = self.batch.keys, []
        for n, t in places[:: max(1, len(places) // 3)][:3].tolist():
            row = int(step.rows_n[n])
            examples.append((keys[row] if keys else str(row), t, float(wanted_nT[n, t]), float(step.received_nT[n, t])))
        self.findings.append(Finding(name, where, float(size), what, tuple(examples), CAUSES[name], not note))

    def structure(self) -> None:
        """What needs no formula: gradients that are not finite, or outside the mask."""
        step, none_nT = self.step, torch.zeros_like(self.step.received_nT)
        broken_nT = ~step.received_nT.isfinite()
        if broken_nT.any():
            self.add(
                "not finite",
                int(broken_nT.sum()),
                f"{int(broken_nT.sum())} gradients are inf or NaN",
                broken_nT,
                none_nT,
            )
        step.received_nT[broken_nT] = 0.0
        outside_nT = ~step.tokens.mask & (step.received_nT != 0)
        if outside_nT.any() and self.step.tokens.mask.any():
            self._outside(outside_nT, none_nT)
        if step.outside_n.any():
            at_nT = (step.outside_n != 0).unsqueeze(1) & (torch.arange(none_nT.shape[1]) == 0)
            what = f"the prompt or padding of {int((step.outside_n != 0).sum())} responses received a gradient"
            self.add("outside", float(step.outside_n.max()), what, at_nT, none_nT)

    def _outside(self, at_nT: torch.Tensor, wanted_nT: torch.Tensor) -> None:
        share = float(at_nT.sum() / (self.step.received_nT != 0).sum())
        self.add("outside", share, f"{share:.2%} of the tokens that train are outside the mask", at_nT, wanted_nT)

    def compare(self, loss: Loss, expected_nT: torch.Tensor, clipped_nT: torch.Tensor) -> None:
        """Received against expected."""
        step = self.step
        if not step.received_nT.isfinite().all() or step.outside_n.any():
            self.structure()
        self._first_ratio()
        self._borderline_nT = self._borderline(loss)
        differs_nT = self._differs(expected_nT)
        if not differs_nT.any():
            return
        name, what, size, best_nT, fewest = "", "", 0.0, expected_nT, math.inf
        # Among small errors a factor or a swap that fits some better by chance explains nothing.
        small = bool((differs_nT <= ((step.received_nT - expected_nT).abs() <= ROUNDED * expected_nT.abs())).all())
        for candidate in self._candidates(loss, expected_nT):
            left = int(self._differs(candidate[3]).sum())
            if (20 if small else 1.25) * left < fewest:
                (name, what, size, best_nT), fewest = candidate, left
            if not left:
                break
        if name:
            self.add(name, size, what, self._differs(expected_nT), expected_nT, note=name == "rounded")
        self._left(best_nT, expected_nT, clipped_nT)

    def _borderline(self, loss: Loss) -> torch.Tensor:
        """Where a ratio is on a bound of the clip, on which rounding decides, or a tie halves the gradient."""
        step, size_nT = self.step, self.step.tokens.advantages.abs()
        result_nT = torch.zeros_like(step.tokens.mask)
        for advantages_nT in (size_nT, -size_nT):
            above_nT, below_nT = (
                step.expected(loss, advantages=advantages_nT, old=step.tokens.old + by * step.precision)[1]
                for by in (-1, 1)
            )
            result_nT |= above_nT != below_nT
        if loss.account in ("clip_sequence", "geo_mean"):
            return result_nT.any(dim=1, keepdim=True).expand_as(result_nT)
        return result_nT

    def _differs(self, wanted_nT: torch.Tensor) -> torch.Tensor:
        """Where more than rounding lies between them; outside the mask, where anything was received."""
        received_nT, tokens = self.step.received_nT, self.step.tokens
        size = tokens.advantages[tokens.advantages != 0].square().mean().sqrt().nan_to_num()
        allowed_nT = self.step.precision * (torch.maximum(wanted_nT.abs(), received_nT.abs()) + size)
        fits_nT = (received_nT - wanted_nT).abs() <= torch.where(tokens.mask, allowed_nT, 0.0)
        return ~fits_nT & ~self._borderline_nT

    def _first_ratio(self) -> None:
        """The first update on policy has ratio 1."""
        step, tokens = self.step, self.step.tokens
        if step.number or not self.batch.on_policy or self.batch.old_log_probs_BT is None or not tokens.mask.any():
            return
        size, shown_nT = _distance(tokens, tokens.old), tokens.mask & ((tokens.log_probs - tokens.old).abs() > NOISE)
        if size < STALE:
            if size > NOISE:
                what = f"the first ratios are {size:.2g} from 1 in the mean"
                self.add("rounded", size, what, shown_nT, tokens.advantages, note=True)
            return
        name, what = "stale", f"the first ratios are {size:.3g} from 1 in the mean"
        for by in (1, -1):
            if _distance(tokens, tokens.old.roll(by, 1), slice(1, -1)) < size / 10:
                name, what = (
                    "shifted",
                    f"the old log-probabilities are those of the token {'after' if by > 0 else 'before'}",
                )
        other_nT = self._other_rows(tokens.log_probs, tokens.old)[0]
        if _distance(tokens, other_nT) < size / 10:
            name, what = "swapped", "old log-probabilities are those of other responses"
        self.add(name, size, what, shown_nT, tokens.advantages)

    def _other_rows(self, wanted_nT: torch.Tensor, given_nT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For each response the values of the one that fit ``wanted_nT`` best at some of its tokens, and which."""
        mask_nT, chosen_n = self.step.tokens.mask, torch.arange(len(given_nT))
        most = max(16, 10**8 // len(given_nT) ** 2)
        for n in range(len(given_nT)):
            at = (mask_nT[n] & wanted_nT[n].isfinite()).nonzero().squeeze(1)
            at = at[:: max(1, len(at) // most)]
            if len(at):
                fits_n = ((given_nT[:, at] - wanted_nT[n, at]).abs() <= 1e-3 * wanted_nT[n, at].abs()).sum(dim=1)
                chosen_n[n] = n if fits_n[n] == fits_n.max() else fits_n.argmax()
        return given_nT[chosen_n], chosen_n

    def _candidates(self, loss: Loss, expected_nT: torch.Tensor) -> Iterator[tuple[str, str, float, torch.Tensor]]:
        """Explanations, the simplest first: name, sentence, size and what they expect."""
        step, tokens = self.step, self.step.tokens
        quotient_nT = torch.where(
            (expected_nT != 0) & (step.received_nT != 0), step.received_nT / expected_nT, torch.nan
        )
        yield "", "", 0.0, expected_nT
        if not step.received_nT.any():
            return
        factor = float(quotient_nT.nanmedian())
        if factor > 0:
            yield "scaled", f"every token received {factor:.4g} times what it should", factor, factor * expected_nT
        elif factor <= 0:  # NaN: no token received any of what it should
            size = "" if math.isclose(factor, -1, rel_tol=1e-3) else f", times {-factor:.4g}"
            yield "sign", f"the sign is reversed{size}", factor, factor * expected_nT
        coarse_nT = tokens.advantages.bfloat16().double()
        yield "rounded", "advantages are those of bf16", ROUNDED, step.expected(loss, advantages=coarse_nT)[0]
        of_row = quotient_nT.nanmedian(dim=1, keepdim=True).values
        reversed_n1 = (of_row + 1).abs() < 1e-3
        what = f"{int(reversed_n1.sum())} of {len(of_row)} responses have the reversed sign"
        yield "sign", what, -1.0, torch.where(reversed_n1, -expected_nT, expected_nT)
        for by in (1, -1):
            moved = {name: _roll(getattr(tokens, name), by) for name in ("advantages", "mask", "old")}
            side = "before" if by > 0 else "after"
            for names in (("advantages", "mask"), ("advantages",), ("old",)):
                what = (
                    f"tokens have the {' and '.join(names).replace('old', 'old log-probability')} of the token {side}"
                )
                yield "shifted", what, by, step.expected(loss, **{name: moved[name] for name in names})[0]
        if not torch.equal(tokens.old, tokens.log_probs):
            yield "stale", "the ratio in the loss is 1", 1.0, step.expected(loss, old=tokens.log_probs)[0]
        if self.batch.weights_BT is not None:
            ones_nT, twice_nT = torch.ones_like(tokens.weights), tokens.weights.square()
            yield "weights", "the importance weights are left out", 0.0, step.expected(loss, weights=ones_nT)[0]
            yield "weights", "the importance weights count twice", 2.0, step.expected(loss, weights=twice_nT)[0]
        if "low" in loss.options:
            open_loss = replace(loss, options=dict(loss.options) | {"low": math.inf, "high": math.inf, "cap": None})
            if loss.account != "dppo":
                yield "unclipped", "no token is clipped", 0.0, step.expected(open_loss)[0]
        if loss.kl:
            for times, what in ((-1, "has the reversed sign"), (0, "is left out"), (2, "counts twice")):
                other = replace(loss, kl_coef=times * loss.kl_coef)
                yield "extra" if times != -1 else "sign", f"the KL term {what}", times, step.expected(other)[0]
        unit_nT = step.expected(replace(loss, kl=None), advantages=torch.ones_like(tokens.advantages))[0]
        implied_nT = torch.where(unit_nT != 0, step.received_nT / unit_nT, torch.nan)
        for given_nT in (_filled(tokens), tokens.advantages):
            other_nT, chosen_n = self._other_rows(implied_nT, given_nT)
            count = int((chosen_n != torch.arange(len(chosen_n))).sum())
            other_nT = torch.where(tokens.mask, other_nT, 0.0)
            what = f"{count} of {len(chosen_n)} responses have the advantages of another one"
            yield "swapped", what, count, step.expected(loss, advantages=other_nT)[0]
        uniform_n = (_filled(tokens) == _filled(tokens)[:, :1]).all(dim=1)
        if not uniform_n.all():
            row_nT = torch.where(tokens.mask, implied_nT.nanmedian(dim=1, keepdim=True).values.nan_to_num(), 0.0)
            yield (
                "flattened",
                "each response has one advantage for all its tokens",
                0.0,
                step.expected(loss, advantages=row_nT)[0],
            )
        added = float((step.received_nT - expected_nT)[tokens.mask].median())
        what = f"every token received {added:+.4g} beside what the advantages give"
        yield (
            "extra",
            what,
            self._share(torch.where(tokens.mask, added, 0.0)),
            expected_nT + torch.where(tokens.mask, added, 0.0),
        )
        of_piece = [quotient_nT[step.piece_n == piece] for piece in range(int(step.piece_n.max()) + 1)]
        by_piece = torch.stack(
            [own.nanmedian() if len(own) else torch.tensor(1.0).double() for own in of_piece]
        ).nan_to_num(1.0)
        for name, factors in (
            ("micro-batch", by_piece[step.piece_n].unsqueeze(1)),
            ("response", of_row.nan_to_num(1.0)),
        ):
            what = f"from {float(factors.min()):.4g} to {float(factors.max()):.4g} times what it should be, by {name}"
            yield f"scaled by {name}", what, float(factors.abs().max()), factors * expected_nT

    def _left(self, best_nT: torch.Tensor, expected_nT: torch.Tensor, clipped_nT: torch.Tensor) -> None:
        """Name what the best explanation leaves, token by token."""
        step, mask_nT, left_nT = self.step, self.step.tokens.mask, self._differs(best_nT)
        if (outside_nT := left_nT & ~mask_nT).any():
            self._outside(outside_nT, expected_nT)
        left_nT = left_nT & mask_nT
        intended = int((mask_nT & (expected_nT != 0)).sum()) or 1
        error_nT = torch.where(best_nT != 0, step.received_nT / best_nT - 1, math.inf).abs()
        kinds = {
            "lost": (step.received_nT == 0) & (best_nT != 0),
            "unclipped": clipped_nT & (best_nT == 0),
            "sign": (error_nT - 2).abs() < 2 * step.precision + 1e-9,
            "rounded": error_nT <= ROUNDED,
        }
        sentences = {
            "lost": "of the tokens with an advantage that no clip takes received nothing",
            "unclipped": "of the tokens received a gradient that the clip should take",
            "sign": "of the tokens have the reversed sign",
            "rounded": f"of the tokens are off by at most {ROUNDED:.2%}",
        }
        for name, where_nT in kinds.items():
            at_nT = left_nT & where_nT
            share = int(at_nT.sum()) / intended
            if share:
                self.add(name, share, f"{share:.2%} {sentences[name]}", at_nT, expected_nT, note=name == "rounded")
            left_nT = left_nT & ~at_nT
        if not left_nT.any():
            return
        difference_nT = torch.where(left_nT, step.received_nT - best_nT, 0.0)
        share = self._share(difference_nT)
        name = self._kind_of_rest(left_nT, best_nT, difference_nT)
        low, high = (
            (float(q) for q in (step.received_nT / best_nT)[left_nT & (best_nT != 0)].aminmax())
            if name == "stale"
            else (0, 0)
        )
        what = {
            "extra": f"{share:.2%} of the gradient is not what the advantages give",
            "stale": f"tokens received {low:.3g} to {high:.3g} times what they should: another ratio or weight in the loss",
            "unexplained": f"{int(left_nT.sum())} tokens received something else",
        }[name]
        self.add(name, share, what, left_nT, expected_nT)

    def _share(self, part_nT: torch.Tensor) -> float:
        """Of the gradient, by its norm."""
        return float((part_nT.norm() / self.step.received_nT.norm()).nan_to_num())

    def _kind_of_rest(self, left_nT: torch.Tensor, best_nT: torch.Tensor, difference_nT: torch.Tensor) -> str:
        """Added, or multiplied: what is added does not grow with the advantage and comes without one too."""
        size, change = best_nT[left_nT].abs(), difference_nT[left_nT].abs()
        if (size == 0).any() or len(size) < 8:
            return "extra" if (size == 0).any() else "unexplained"
        order = size.argsort()
        small, large = order[: len(order) // 2], order[len(order) // 2 :]
        growth, expected = change[large].median() / change[small].median(), size[large].median() / size[small].median()
        if expected > 1.3:
            return "stale" if growth > expected**0.5 else "extra"
        return "unexplained"


def _roll(values_nT: torch.Tensor, by: int) -> torch.Tensor:
    """Each token has the value of the one ``by`` before it; 0 comes in at the end."""
    moved_nT = values_nT.roll(by, 1)
    moved_nT[:, 0 if by > 0 else -1] = 0
    return moved_nT


def _distance(tokens: Tokens, old_nT: torch.Tensor, part: slice = slice(None)) -> float:
    """Mean distance of the ratio from 1."""
    ratio_nT = (tokens.log_probs - old_nT).clamp(-20, 20).exp()
    return float((ratio_nT - 1).abs()[:, part][tokens.mask[:, part]].clamp(max=10).mean().nan_to_num(math.inf))


def _filled(tokens: Tokens) -> torch.Tensor:
    """Advantages; those of a response that has one alone also beyond its end."""
    first_n1 = tokens.advantages.gather(1, tokens.mask.long().argmax(dim=1, keepdim=True))
    uniform_n1 = ((tokens.advantages == first_n1) | ~tokens.mask).all(dim=1, keepdim=True)
    return torch.where(uniform_n1, first_n1, tokens.advantages)


def _counted(batch: Batch, pieces: Sequence[Piece]) -> list[Finding]:
    """Responses that an epoch holds never or twice, or that were left out with an advantage."""
    B, findings = len(batch.mask_BT), []
    left_out_B = torch.zeros(B, dtype=torch.bool) if batch.left_out_B is None else batch.left_out_B.bool()
    empty_B = ~batch.mask_BT.bool().any(dim=1)
    trains_B = ((batch.advantages_BT != 0) & batch.mask_BT.bool()).any(dim=1)
    kinds = [("lost", left_out_B & trains_B, "left out with an advantage", "the rollout batch")]
    for epoch in sorted({piece.update // batch.updates for piece in pieces}):
        rows = torch.cat([piece.rows_b for piece in pieces if piece.update // batch.updates == epoch])
        times_B = rows.bincount(minlength=B)
        kinds.append(("missing", (times_B == 0) & ~left_out_B & ~empty_B, "in no micro-batch", f"epoch {epoch}"))
        kinds.append(("repeated", times_B > 1, "in several micro-batches, or in one repeatedly", f"epoch {epoch}"))
    for name, at_B, what, where in kinds:
        if at_B.any():
            rows = at_B.nonzero().squeeze(1).tolist()
            shown = ", ".join(batch.keys[row] if batch.keys else str(row) for row in rows[:3])
            share = len(rows) / B
            sentence = f"{len(rows)} of {B} responses are {what} (such as {shown})"
            findings.append(Finding(name, where, share, sentence, (), CAUSES[name]))
    return findings


def _declared(batch: Batch, loss: Loss, pieces: Sequence[Piece]) -> list[Finding]:
    """Notes: an unknown loss, and weights that the loss itself gives micro-batches or updates."""
    if loss.account is None:
        what = f"`{loss.name}` with these settings has no formula here: structure alone was checked"
        return [Finding("unknown loss", "all updates", 0.0, what, (), CAUSES["unknown loss"], False)]
    plain = replace(loss, over="update", norm=loss.norm or float(batch.mask_BT.shape[1]))
    pairs = zip(denominators(plain, batch, pieces), denominators(loss, batch, pieces), strict=True)
    factors = torch.cat([plain_b1 / own_b1 for plain_b1, own_b1 in pairs])
    low, high = float(factors.min()), float(factors.max())
    if high / low < 1.001:
        return []
    says = f"`{loss.name}`" if loss.over != "update" else f"`{loss.aggregation}` without a constant"
    what = f"a token's weight is from {low:.3g} to {high:.3g} times that of the mean over an update, as {says} says"
    return [
        Finding("scaled by micro-batch", "all updates", high / low, what, (), CAUSES["scaled by micro-batch"], False)
    ]


def _merged(findings: Sequence[Finding]) -> Iterator[Finding]:
    """One finding of a name: the largest, with all places."""
    for name, mismatch in dict.fromkeys((finding.name, finding.mismatch) for finding in findings):
        same = [finding for finding in findings if (finding.name, finding.mismatch) == (name, mismatch)]
        largest = max(same, key=lambda finding: abs(finding.size))
        more = f", and {len(same) - 1} more" if len(same) > 1 else ""
        yield replace(largest, where=largest.where + more)
