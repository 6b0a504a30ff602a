"""Compare what each token received with what the loss says: a table of what differs, by how much and where.

What differs is explained by one change of the loss (a column, the ratio, the clip, the KL term) and one factor for each
optimiser step, rank, micro-batch or response. All pairs are tried and the shortest is told, in bits: of the change, 12
for each free number, 8 for each token that is left over.

Shape suffixes: B responses of the rollout batch, N those of all optimiser steps, T response tokens, E epochs, U steps
over all epochs, G groups of the N, K some of the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import torch

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
"""Names that are told before all others."""
NOISE = 1e-3
"""The first ratios are at most so far from 1, in the mean, by rounding."""
STALE = 0.02
"""The first ratios are at least so far from 1, in the mean, where another policy gave the old log-probabilities."""
ROUNDED = 2**-6
"""A difference, relative to what was intended, that may be rounding."""


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
        return cls(
            **entries
            | {"examples": tuple(tuple(example) for example in entries.get("examples", ()))}
        )

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

    # Effective advantage e = -g D, the mean over the updates that the response was in
    received_BT: torch.Tensor
    # Share of these updates in which the token was clipped; NaN for an unknown loss
    clipped_BT: torch.Tensor
    received_UBT: torch.Tensor  # e by update
    expected_UBT: torch.Tensor  # what the loss says; NaN for an unknown loss
    clipped_UBT: torch.Tensor  # 1 where the update clipped the token; NaN for an unknown loss
    # Mismatches first; of these structure first, then those that cover most tokens
    findings: tuple[Finding, ...]
    seen_from: float = 1.0  # smallest factor above 1 that is found in an advantage of middle size, by the precision
    tokens: int = 0  # that may train, each once
    trained: int = 0  # of these, which received a gradient
    clipped: float | None = None  # mean share of clipping over these; None for an unknown loss
    responses: tuple[int, int] = (0, 0)  # those seen, and those of the whole update

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
    value_NT: torch.Tensor  # what the changed loss gives
    factor_N1: torch.Tensor
    by: str  # in which groups the factor is constant
    remaining: Mapping[str, torch.Tensor]  # tokens that are left, by kind


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
        arrived = Arrived(batch, loss, pieces)
        table = _Table(arrived)
        table.structure(pieces)
        # Named once and then set to 0: NaN would fit no explanation.
        table.add("not finite", "gradients are inf or NaN", arrived.ignored_NT)
        arrived.received_NT[arrived.ignored_NT] = 0.0
        if loss.account is None:
            outside_NT = ~arrived.mask_NT & (arrived.received_NT != 0)
            table.add("outside", "tokens outside the mask train", outside_NT)
        else:
            arrived.intend()
            table.first_ratio()
            table.differences()
        return _receipt(arrived, table.findings)


def _receipt(arrived: Arrived, findings: list[Finding]) -> Receipt:
    """Put each step's rows in their places of the rollout batch."""
    batch = arrived.batch
    B, T = batch.mask_BT.shape
    has_formula = arrived.loss.account is not None
    place = (arrived.update_N, arrived.rows_N)
    U = int(arrived.update_N.max()) + 1 if len(arrived.rows_N) else 1
    held_UB1 = torch.zeros(U, B, 1, dtype=torch.float32)
    # Added, as a response may come twice in an update.
    held_UB1.index_put_(
        place, torch.ones(len(arrived.rows_N), 1, dtype=torch.float32), accumulate=True
    )

    def by_update(values_NT: torch.Tensor, defined: bool = True) -> torch.Tensor:
        values_UBT = torch.zeros(U, B, T, dtype=torch.float32)
        values_UBT.index_put_(place, values_NT.float(), accumulate=True)
        return values_UBT.masked_fill((held_UB1 == 0) | (not defined), torch.nan)

    received_UBT = by_update(arrived.received_NT)
    # Of a response that came twice it is a share, too.
    clipped_UBT = by_update(arrived.clipped_NT, has_formula) / held_UB1
    clipped_BT = clipped_UBT.nanmean(dim=0)
    seen_B = held_UB1.any(dim=0)[:, 0]
    trained_BT = batch.mask_BT & seen_B[:, None]
    tokens = int(trained_BT.sum())
    moved_BT = (received_UBT.nan_to_num(0.0) != 0).any(dim=0)
    clipped = None
    if has_formula and tokens:
        clipped = float(clipped_BT[trained_BT].mean())
    responses = B
    if batch.totals_U2 is not None:
        responses = int(batch.totals_U2[:, 1].sum()) // batch.epochs
    return Receipt(
        received_BT=received_UBT.nanmean(dim=0),
        clipped_BT=clipped_BT,
        received_UBT=received_UBT,
        expected_UBT=by_update(arrived.wanted_NT, has_formula),
        clipped_UBT=clipped_UBT,
        findings=tuple(
            sorted(
                findings,
                key=lambda finding: (
                    not finding.mismatch,
                    finding.name not in FIRST,
                    -finding.tokens,
                ),
            )
        ),
        seen_from=1 + 2 * arrived.precision,
        tokens=tokens,
        trained=int((trained_BT & moved_BT).sum()),
        clipped=clipped,
        responses=(int(seen_B.sum()), responses),
    )


class _Table:
    """The findings of one comparison."""

    def __init__(self, arrived: Arrived) -> None:
        self.arrived = arrived
        self.findings: list[Finding] = []
        self.differs = 0  # tokens that differ from what was intended
        self.also = ""
        self.rounding = False  # most of what differs is small

    def add(
        self,
        name: str,
        what: str,
        at_NT: torch.Tensor,
        size: float = 0.0,
        place: str = "",
        wanted_NT: torch.Tensor | None = None,
        times_NT: torch.Tensor | None = None,
    ) -> None:
        """Add a line on the tokens ``at_NT`` that received something else than was wanted; none without such a token.

        What was wanted is by default what the loss says, and the times are what was received over it.
        """
        arrived = self.arrived
        if wanted_NT is None:
            wanted_NT = arrived.wanted_NT
        if times_NT is None:
            times_NT = arrived.received_NT / wanted_NT
        # A line on rounding is about small differences, every other one is not.
        tolerance_NT = 1e-6 * (name != "rounded") * wanted_NT.abs()
        at_NT = at_NT & ~((arrived.received_NT - wanted_NT).abs() <= tolerance_NT)  # NaN differs
        n, t = at_NT.nonzero(as_tuple=True)
        if not len(n):
            return
        where = [f"{len(arrived.rows_N[n].unique())} of {len(arrived.rows_N.unique())} responses"]
        if place:
            where.insert(0, place)
        if arrived.update_N.any():
            steps = ", ".join(str(int(step) + 1) for step in arrived.update_N[n].unique()[:8])
            where.append(f"in optimiser steps {steps}")
        examples = []
        # From the beginning, the middle and the end of what differs, so seldom of one response.
        for k in range(0, len(n), max(1, len(n) // 3))[:3]:
            row = int(n[k])
            token = int(t[k])
            # + 0.0: no -0.0 in a table.
            intended = float(wanted_NT[row, token]) + 0.0
            received = float(arrived.received_NT[row, token]) + 0.0
            examples.append((self.key(int(arrived.rows_N[row])), token, intended, received))
        times_K = times_NT[at_NT]
        low = None
        high = None
        if times_K.isfinite().all():
            low, high = map(float, times_K.aminmax())
        self.findings.append(
            Finding(
                name=name,
                where=", ".join(where),
                size=size or len(n) / max(1, int(arrived.mask_NT.sum())),
                what=what,
                examples=tuple(examples),
                causes=CAUSES[name],
                mismatch=name != "rounded",
                tokens=len(n),
                low=low,
                high=high,
                explains=len(n) / self.differs if self.differs else None,
                also=self.also,
            )
        )

    def key(self, row: int) -> str:
        keys = self.arrived.batch.keys
        return keys[row] if keys else str(row)

    def structure(self, pieces: list[Piece]) -> None:
        """Find responses in an epoch never or twice, left out with an advantage, or whose prompt trains."""
        arrived = self.arrived
        batch = arrived.batch
        B = len(batch.mask_BT)
        left_out_B = batch.left_out_B
        if left_out_B is None:
            left_out_B = torch.zeros(B, dtype=torch.bool)
        trains_B = ((batch.advantages_BT != 0) & batch.mask_BT).any(dim=1)
        lengths_B = batch.mask_BT.sum(dim=1)
        epoch_N = arrived.update_N // batch.updates
        times_EB = torch.stack(
            [arrived.rows_N[epoch_N == e].bincount(minlength=B) for e in epoch_N.unique()]
        )
        outside_B = torch.zeros(B, dtype=torch.bool)
        for piece in pieces:
            if piece.outside_b is not None:
                outside_B[piece.rows_b[piece.outside_b != 0]] = True
        for name, what, at_EB in (
            ("lost", "left out with an advantage", (left_out_B & trains_B)[None]),
            ("missing", "in no micro-batch", (times_EB == 0) & ~left_out_B & (lengths_B > 0)),
            ("repeated", "in several micro-batches, or in one repeatedly", times_EB > 1),
            ("outside", "there with a gradient on the prompt or padding", outside_B[None]),
        ):
            rows = at_EB.any(dim=0).nonzero().flatten().tolist()
            if not rows:
                continue
            examples = ", ".join(map(self.key, rows[:3]))
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
        if arrived.loss.account is None:
            name = "unknown loss"
            what = f"`{arrived.loss.name}` with these settings has no formula here: structure alone was checked"
            self.findings.append(Finding(name, "", 0.0, what, causes=CAUSES[name], mismatch=False))

    def first_ratio(self) -> None:
        """Find first ratios that are not 1 although the batch is on policy."""
        arrived = self.arrived
        old_BT = arrived.batch.old_log_probs_BT
        first_N = arrived.update_N == 0
        tokens = arrived.tokens.of(first_N)
        if not arrived.batch.on_policy or old_BT is None or not tokens.mask.any():
            return

        def distance(old_NT: torch.Tensor, part: slice = slice(None)) -> float:
            # One enormous ratio must not hide what the others are: it counts as 10.
            away_NT = ((tokens.log_probs - old_NT).clamp(-20, 20).exp() - 1).abs()
            away_K = away_NT[:, part][tokens.mask[:, part]]
            return float(away_K.clamp(max=10).mean().nan_to_num(10.0))

        size = distance(tokens.old)
        if size <= NOISE:
            return
        # Half precision alone moves a ratio by as much as it rounds the log-probability.
        stale = STALE
        if arrived.precision > PRECISION[torch.float32]:
            stale += 2**-8 * float(tokens.log_probs[tokens.mask].abs().mean())
        own_NT = torch.where(tokens.mask, tokens.log_probs, torch.nan)
        # Another order of tokens or responses explains it where little is left of the distance.
        if size <= stale:
            name = "rounded"
        # Without the outermost positions, where roll() brings in the other end.
        elif min(distance(tokens.old.roll(by, 1), slice(1, -1)) for by in (1, -1)) < size / 10:
            name = "shifted"
        elif (
            distance(old_BT[fitting_rows(own_NT, old_BT.double(), arrived.rows_N[first_N], 1e-3)])
            < size / 10
        ):
            name = "swapped"
        else:
            name = "stale"
        moved_NT = (arrived.tokens.log_probs - arrived.tokens.old).abs() > NOISE
        at_NT = first_N[:, None] & arrived.mask_NT & moved_NT
        what = f"the first ratios are {size:.3g} from 1 in the mean"
        self.add(name, what, at_NT, size, wanted_NT=arrived.value(old=arrived.tokens.log_probs))

    def differences(self) -> None:
        """Find what does not fit the loss, and the shortest explanation."""
        arrived = self.arrived
        differs_NT = arrived.off(arrived.wanted_NT, arrived.received_NT)
        self.differs = int(differs_NT.sum())
        if not self.differs:
            return
        factor = arrived.middle(arrived.quotient(arrived.wanted_NT), "").exp()
        # Beside the usual factor: the gradient of a scaled loss is rounded as well.
        away_NT = (arrived.received_NT / factor - arrived.wanted_NT).abs()
        small = int((differs_NT & (away_NT <= ROUNDED * arrived.wanted_NT.abs())).sum())
        # What received nothing, or should have, was not rounded.
        comparable_NT = differs_NT & (arrived.received_NT != 0) & (arrived.wanted_NT != 0)
        self.rounding = 2 * small > int(comparable_NT.sum())
        self.tell(self.explanation())

    def left(
        self, value_NT: torch.Tensor, factor_N1: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """What an explanation leaves: bits, (N,), and where, by kind."""
        arrived = self.arrived
        got_NT = arrived.received_NT / factor_N1
        rest_NT = arrived.off(value_NT, got_NT, factor_N1)
        small_NT = (got_NT - value_NT).abs() <= ROUNDED * value_NT.abs()
        bits_N = torch.zeros(len(value_NT), dtype=torch.float64)
        kinds = {}
        for name, bits, limit, at_NT in (
            ("lost", 0.5, WHOLE, got_NT == 0),
            ("outside", 1.0, WHOLE, ~arrived.mask_NT & (value_NT == 0)),
            (
                "unclipped",
                1.0,
                WHOLE,
                arrived.clipped_NT & (value_NT == 0) & ~arrived.off(arrived.open_NT, got_NT),
            ),
            ("sign", 8.0, WHOLE, ~arrived.off(-value_NT, got_NT)),
            ("rounded", 1.0, math.inf, self.rounding & small_NT),
            ("", 8.0, math.inf, rest_NT),
        ):
            # A token is of the first kind that fits it.
            kinds[name] = rest_NT & at_NT
            bits_N += (bits * kinds[name].sum(dim=1).double()).clamp(max=limit)
            rest_NT = rest_NT & ~at_NT
        return bits_N, kinds

    def explanation(self) -> Explanation:
        """Try all explanations, and find the shortest. None is told that leaves most of what it changes."""
        arrived = self.arrived
        value_NT = arrived.wanted_NT
        # None is shorter: the first change
        best = Explanation(math.inf, "", "", "", value_NT, value_NT, "", {})
        tried: dict[str, float] = {}  # share of what differs that is explained
        for bits, name, what, value_NT in changes(arrived):
            if name and not arrived.off(value_NT, arrived.wanted_NT).any():
                continue
            log_NT = arrived.quotient(value_NT)
            finest_N1 = arrived.middle(log_NT, "response").exp()[:, None]
            for more, factor_N1, by in self.factors(value_NT, log_NT):
                bits_N, kinds = self.left(value_NT, factor_N1)
                label = what or f"scaled by {by}".removesuffix(" by ")
                if not (name and by):
                    share = 1 - float(sum(kind.sum() for kind in kinds.values())) / self.differs
                    tried[label] = max(tried.get(label, 0.0), share)
                total = bits + more + float(bits_N.sum())
                if total < best.bits and (not name or self.explains(value_NT, kinds[""])):
                    best = Explanation(total, label, name, what, value_NT, factor_N1, by, kinds)
                # Each response with a factor of its own is the best that a change can do.
                if bits + float(self.left(value_NT, finest_N1)[0].sum()) >= best.bits:
                    break
            # What looks reversed may be swapped too.
            if (
                best.bits <= NUMBER
                and best.name not in ("sign", "swapped")
                and not best.remaining["sign"].any()
            ):
                break
        also = sorted(
            (-share, label)
            for label, share in tried.items()
            if label != best.label and share > 0.01
        )
        self.also = "; ".join(f"{label} {-share:.0%}" for share, label in also[:3])
        return best

    def explains(self, value_NT: torch.Tensor, rest_NT: torch.Tensor) -> bool:
        """Whether most of the tokens that a change changes then fit; ``rest_NT``: those that do not."""
        changed_NT = self.arrived.off(value_NT, self.arrived.wanted_NT)
        return 3 * int((rest_NT & changed_NT).sum()) <= int(changed_NT.sum())

    def factors(
        self, value_NT: torch.Tensor, log_NT: torch.Tensor
    ) -> Iterator[tuple[float, torch.Tensor, str]]:
        """Yield bits, the factor of each response, and the group in which it is constant.

        A factor that lies within the spread of what it leaves explains nothing: each token has its own then.
        """
        arrived = self.arrived
        ones_N1 = torch.ones(len(value_NT), 1, dtype=torch.float64)
        yield 0.0, ones_N1, ""
        log_one = arrived.middle(log_NT, "")
        spread = 2 * float(arrived.middle((log_NT - log_one).abs(), ""))
        # Below this the factor may be rounding.
        common = 1.0
        if float(log_one.abs()) > max(spread, 1.5 * arrived.precision):
            common = float(log_one.exp())
            yield NUMBER, common * ones_N1, ""
        common_N = self.left(value_NT, common * ones_N1)[0]
        for by, group_N in arrived.groups.items():
            if not by:
                continue
            log_G = arrived.middle(log_NT, by)
            spread_G = arrived.middle((log_NT - log_G[group_N][:, None]).abs(), by)
            own_G = torch.where(
                (log_G - math.log(common)).abs() > 2 * spread_G, log_G.exp(), common
            )
            saved_N = common_N - self.left(value_NT, own_G[group_N][:, None])[0]
            price = NUMBER + math.log2(len(own_G))
            chosen_G = torch.zeros_like(own_G).index_add_(0, group_N, saved_N) > price
            # Where most groups have one of their own, those that too few tokens tell have it too.
            if 2 * chosen_G.sum() > len(chosen_G):
                chosen_G[:] = True
            if chosen_G.any():
                bits = 8 + NUMBER * (common != 1) + price * int(chosen_G.sum())
                yield bits, torch.where(chosen_G, own_G, common)[group_N][:, None], by

    def tell(self, best: Explanation) -> None:
        """Add the lines of an explanation: its change, its factor, and what they leave."""
        arrived = self.arrived
        got_NT = arrived.received_NT / best.factor_N1
        kinds = dict(best.remaining)
        rest_NT = kinds.pop("")
        rest = ""
        if rest_NT.any():
            rest = self.rest(rest_NT | kinds["rounded"], best.value_NT, got_NT)
        places = {kind: self.place(at_NT, best.value_NT) for kind, at_NT in kinds.items()}
        if rest == "stale":
            # The clip takes and leaves tokens by the ratio in the loss, too.
            for kind in ("rounded", "lost", "unclipped"):
                if not places[kind]:
                    rest_NT = rest_NT | kinds.pop(kind)
        if best.name and not (rest == "stale" and best.name == "unclipped"):
            left_NT = torch.stack(list(best.remaining.values())).any(dim=0)
            away_NT = (arrived.received_NT - arrived.wanted_NT).abs()
            nearer_NT = 3 * (got_NT - best.value_NT).abs() < away_NT
            changed_NT = arrived.off(best.value_NT, arrived.wanted_NT)
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
        if rest == "stale":
            times_K = got_K / value_K
            times_K = times_K[times_K.isfinite() & (times_K > 0)]
            low, high = times_K.quantile(torch.tensor([0.01, 0.99], dtype=torch.float64))
            what = (
                f"the ratio in the loss is mostly {low:.3g} to {high:.3g} times that of the batch"
            )
        self.add(rest, what, rest_NT, place=self.place(rest_NT, best.value_NT))

    def tell_factor(self, best: Explanation) -> None:
        arrived = self.arrived
        logs_N1 = best.factor_N1.log().abs()
        at_NT = arrived.mask_NT & (arrived.received_NT != 0) & (logs_N1 > arrived.precision)
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

    def rest(self, at_NT: torch.Tensor, value_NT: torch.Tensor, got_NT: torch.Tensor) -> str:
        """The name of what no change and no factor explains."""
        arrived = self.arrived
        # Whatever multiplies an advantage of 0 gives 0, so that something was added.
        if (arrived.tokens.advantages[at_NT] == 0).any():
            return "extra"
        # What no ratio multiplies
        unweighed_NT = arrived.value(advantages=torch.zeros_like(value_NT))
        at_NT = at_NT & arrived.off(unweighed_NT, value_NT) & arrived.off(unweighed_NT, got_NT)
        value_K = (value_NT - unweighed_NT)[at_NT]
        got_K = (got_NT - unweighed_NT)[at_NT]
        own_K = arrived.tokens.advantages[at_NT]
        if is_added(value_K, got_K, own_K):
            return "extra"
        return "stale" if self.is_ratio(at_NT, got_K / value_K) else "unexplained"

    def is_ratio(self, at_NT: torch.Tensor, times_K: torch.Tensor) -> bool:
        """Whether factors of tokens are those of another ratio: of many tokens, and none where a clip would take it."""
        arrived = self.arrived
        options = arrived.loss.options
        own_NT = arrived.tokens.advantages
        trains = int((arrived.mask_NT & (own_NT != 0) & (arrived.received_NT != 0)).sum())
        clips = arrived.loss.account == "clip" and not options.get("sequence")
        # Few tokens tell nothing; without a clip by token there is no ratio to bound.
        if (
            len(times_K) < max(20, 0.1 * trains)
            or not clips
            or arrived.batch.old_log_probs_BT is None
        ):
            return False
        ratio_K = times_K * arrived.tokens.log_ratio.exp()[at_NT]
        margin = 1 + 2 * arrived.precision
        below_K = ratio_K <= (1 + options["high"]) * margin
        above_K = ratio_K >= (1 - options["low"]) / margin
        inside_K = torch.where(own_NT[at_NT] > 0, below_K, above_K) & (times_K > 0)
        return float(inside_K.double().mean()) > 0.98

    def place(self, at_NT: torch.Tensor, value_NT: torch.Tensor) -> str:
        """Which tokens they are among those that train, where a description fits all of them and no other."""
        arrived = self.arrived
        mask_NT = arrived.mask_NT
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
            ("those with a positive advantage", arrived.tokens.advantages > 0),
            ("those with a negative advantage", arrived.tokens.advantages < 0),
            ("those from token {:.0f} on", position_NT),
            ("those of responses of {:.0f} tokens or more", lengths_NT),
        ):
            # 1 for a yes; of a number, that from which on it fits.
            least = values_NT[at_NT].min()
            if least > values_NT[others_NT].max():
                return what.format(int(least))
        return ""


def is_added(value_K: torch.Tensor, got_K: torch.Tensor, advantage_K: torch.Tensor) -> bool:
    """Whether what tokens received beside a value is alike for positive and negative, large and small advantages, and how
    many times the value they received is not."""
    added = 0.0
    times = 0.0
    noise = 0.0
    for part_K in (advantage_K > 0, advantage_K.abs() > advantage_K.abs().median()):
        count = min(int(part_K.sum()), int((~part_K).sum()))
        if count >= 4:
            added += distance(got_K - value_K, part_K)
            times += distance(got_K / value_K, part_K)
            noise += 2 / math.sqrt(count)
    return added < 0.7 * times and times > noise


def distance(values_K: torch.Tensor, part_K: torch.Tensor) -> float:
    """The largest one between the distribution functions of a part and of the rest (Kolmogorov and Smirnov)."""
    # Example: values 1 2 3 4 of which the part has 1 2: its function is 1 at 2, where the rest's is 0.
    part_K = part_K[values_K.argsort()].double()
    rest_K = 1 - part_K
    of_part_K = part_K.cumsum(0) / part_K.sum()
    of_rest_K = rest_K.cumsum(0) / rest_K.sum()
    return float((of_part_K - of_rest_K).abs().max())
