"""Faults with the names that they should get, written down before they were tried; ``python -m tests.core.receipt_blind``.

A loop of realistic size: 64 responses of 1 to 200 tokens with tool tokens between, groups of eight with ties of +1 and -1,
group-normalised or token advantages, uneven micro-batches, ranks, updates and epochs. A fault changes what the trainer holds;
two of them make a pair. A cell is a fault in a setting; it counts where the gradients differ from those of the clean loop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from grail_advantage.receipt import Batch, Loss, Piece, Receipt, check
from tests.core.receipt_loop import names, plan_of

B, T, GROUP = 64, 200, 8
LOW, HIGH, CAP = 0.2, 0.28, 3.0


@dataclass(frozen=True)
class Setting:
    """What a cell trains."""

    advantages: str = "ties"
    """``ties`` of +1 and -1; ``grouped``, normalised in each group; ``tokens``, grouped times a weight of each token."""
    ranks: int = 1
    updates: int = 1
    epochs: int = 1
    weights: bool = False
    kl: bool = False
    aggregation: str = "token-mean"
    dtype: torch.dtype = torch.float32
    seed: int = 0


@dataclass
class Trainer:
    """A loop's own columns and formula, which a fault changes; the batch keeps what was intended."""

    setting: Setting
    generator: torch.Generator
    batch: Batch
    policy_UBT: torch.Tensor
    plan: list[list[tuple[int, torch.Tensor]]]
    advantages: torch.Tensor
    mask: torch.Tensor
    old: torch.Tensor
    weights: torch.Tensor
    ref: torch.Tensor
    span: torch.Tensor
    """Where the response is, tool tokens included."""
    turn: torch.Tensor
    """Number of each token's turn, from 0."""
    token_weights: torch.Tensor
    low: float = LOW
    high: float = HIGH
    cap: float = CAP
    kl_coef: float = 0.0
    clip: str = "ppo"
    ratio: str = "own"
    divisor: str = "token-mean"
    over: str = "update"
    counted: torch.Tensor | None = None
    """Instead of the mask, in the divisor."""
    prompts: float = 0.0
    token: list[Callable[[Micro], torch.Tensor]] = field(default_factory=list)
    """Factors of each token's loss."""
    terms: list[Callable[[Micro], torch.Tensor]] = field(default_factory=list)
    """Further losses of each token."""
    pieces: list[Callable[[Piece], Piece]] = field(default_factory=list)


@dataclass(frozen=True)
class Micro:
    """A micro-batch in the loop."""

    trainer: Trainer
    rows: torch.Tensor
    log_probs: torch.Tensor
    update: int
    rank: int
    number: int
    """In its update."""
    step: list[tuple[int, torch.Tensor]]


def trainer_of(setting: Setting) -> Trainer:
    """A clean loop."""
    generator = torch.Generator().manual_seed(1000 + setting.seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    lengths = (1 + (T - 1) * uniform(B) ** 2).long()
    lengths[0], lengths[1] = T, 1
    position = torch.arange(T).expand(B, T)
    span = position < lengths.unsqueeze(1)
    start, width = 10 + (60 * uniform(B, 2)).long(), 3 + (12 * uniform(B, 2)).long()
    start[:, 1] += start[:, 0] + width[:, 0]
    tool = torch.zeros(B, T, dtype=torch.bool)
    turn = torch.zeros(B, T, dtype=torch.long)
    for gap in range(2):
        first, last = start[:, gap, None], (start + width)[:, gap, None]
        has = (last < lengths.unsqueeze(1) - 2) & (torch.arange(B) % 3 != 0).unsqueeze(1)
        tool |= has & (position >= first) & (position < last)
        turn += (has & (position >= last)).long()
    mask = span & ~tool
    right = uniform(B // GROUP, GROUP) < uniform(B // GROUP, 1).clamp(0.2, 0.8)
    right[:, 0], right[:, 1] = True, False
    right[2] = True
    rewards = right.float()
    advantages = 2 * rewards - 1
    advantages[2] = 0.0
    if setting.advantages != "ties":
        rewards = rewards + (0.0 if setting.advantages == "grouped" else 0.1) * uniform(B // GROUP, GROUP).round(
            decimals=1
        )
        centred = rewards - rewards.mean(1, keepdim=True)
        advantages = centred / (rewards.std(1, keepdim=True) + 1e-4)
    advantages = advantages.reshape(B, 1).expand(B, T).clone()
    answer = (position >= lengths.unsqueeze(1) - 12) & span
    token_weights = torch.where(answer, 5.0, 1.0)
    if setting.advantages == "tokens":
        advantages = advantages * token_weights
    advantages = torch.where(mask, advantages, 0.0)
    old = -(3 * uniform(B, T) ** 2) - 0.005
    steps = setting.updates * setting.epochs
    moved = torch.randn(steps, B, T, generator=generator) * 0.25
    policy = (old + moved).clamp(max=-0.002)
    policy[0] = old
    weights = 0.5 + uniform(B, T) if setting.weights else torch.ones(B, T)
    ref = (old + 0.3 * torch.randn(B, T, generator=generator)).clamp(max=-0.002)

    def sizes_of(count: int) -> list[int]:
        sizes: list[int] = []
        while sum(sizes) < count:
            sizes.append(min(2 + int(8 * uniform(1)), count - sum(sizes)))
        return sizes

    plan = plan_of(B, generator, sizes_of, epochs=setting.epochs, updates=setting.updates, ranks=setting.ranks)
    batch = Batch(
        advantages,
        mask,
        old,
        weights_BT=weights if setting.weights else None,
        ref_log_probs_BT=ref if setting.kl else None,
        updates=setting.updates,
        epochs=setting.epochs,
        ranks=setting.ranks,
    )
    return Trainer(
        setting,
        generator,
        batch,
        policy,
        plan,
        *(each.clone() for each in (advantages, mask, old, weights, ref)),
        span=span,
        turn=turn,
        token_weights=token_weights,
        kl_coef=0.1 if setting.kl else 0.0,
        divisor=setting.aggregation,
    )


def loss_of(setting: Setting) -> Loss:
    """The loss that the loop declares."""
    options = {"low": LOW, "high": HIGH, "cap": CAP}
    kl = {"kl": "k3", "kl_coef": 0.1} if setting.kl else {}
    return Loss("ppo", "clip", setting.aggregation, norm=float(T), options=options, **kl)


def token_losses(micro: Micro) -> torch.Tensor:
    """By the definition, (b, T)."""
    own, rows = micro.trainer, micro.rows
    advantages, mask, weights = own.advantages[rows], own.mask[rows], own.weights[rows]
    moved = torch.where(mask, micro.log_probs - own.old[rows], 0.0)
    if own.ratio == "sequence":
        mean = moved.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        moved = mean.detach() + micro.log_probs - micro.log_probs.detach()
    if own.ratio == "one":
        moved = micro.log_probs - micro.log_probs.detach()
    if own.ratio == "squared":
        moved = moved.detach() + moved
        moved = moved.detach() + micro.log_probs - micro.log_probs.detach()
    ratio = moved.exp()
    bounded = ratio.clamp(1 - own.low, 1 + own.high)
    objective = ratio * advantages
    if own.clip == "ppo":
        objective = torch.minimum(objective, bounded * advantages)
        capped = torch.maximum(objective, own.cap * advantages)
        objective = torch.where(advantages < 0, capped, objective)
    elif own.clip == "both sides":
        objective = bounded * advantages
    elif own.clip == "other side":
        objective = torch.maximum(objective, bounded * advantages)
    elif own.clip == "clamped":
        objective = bounded.detach() * advantages * micro.log_probs
    elif own.clip == "by the ratio, without it":
        kept = torch.minimum(objective, bounded * advantages) == objective
        objective = torch.where(kept, advantages * micro.log_probs, 0.0)
    value = -objective * weights
    gap = own.ref[rows] - micro.log_probs
    value = value + own.kl_coef * (gap.exp() - gap - 1)
    for factor in own.token:
        value = value * factor(micro)
    for term in own.terms:
        value = value + term(micro)
    return torch.where(mask, value, 0.0)


def divisors(micro: Micro) -> torch.Tensor | float:
    """Of each token's loss, for a gradient that is averaged over ranks."""
    own = micro.trainer
    lengths = (own.mask if own.counted is None else own.counted).sum(1).float()
    rows, times = torch.cat([rows for _, rows in micro.step]).unique(), 1.0 / own.setting.ranks
    if own.over == "micro-batch":
        rows, times = micro.rows, float(sum(rank == micro.rank for rank, _ in micro.step))
    elif own.over == "rank":
        rows, times = torch.cat([rows for rank, rows in micro.step if rank == micro.rank]), 1.0
    elif own.over == "rollout batch":
        rows = torch.arange(B)
    of_row = lengths[micro.rows].clamp(min=1).unsqueeze(1)
    tokens = lengths[rows].sum().clamp(min=1)
    return (
        times
        * {
            "token-mean": tokens,
            "seq-mean-token-sum": float(len(rows)),
            "seq-mean-token-mean": len(rows) * of_row,
            "seq-mean-token-sum-norm": float(len(rows) * T),
            "padded": float(len(rows) * T),
        }[own.divisor]
    )


def train(own: Trainer) -> list[Piece]:
    """The pieces; gradients are read off leaves."""
    pieces = []
    for update, step in enumerate(own.plan):
        for number, (rank, rows) in enumerate(step):
            log_probs = own.policy_UBT[update, rows].to(own.setting.dtype).requires_grad_()
            micro = Micro(own, rows, log_probs, update, rank, number, step)
            (token_losses(micro) / divisors(micro)).sum().backward()
            outside = torch.full((len(rows),), own.prompts) if own.prompts else None
            gradient = torch.zeros_like(log_probs) if log_probs.grad is None else log_probs.grad
            piece = Piece(rows, log_probs.detach(), gradient, update, rank, outside)
            for change in own.pieces:
                piece = change(piece)
            pieces.append(piece)
    return pieces


# ------------------------------------------------------------------------------------------------------------------- changes

Change = Callable[[Trainer], object]


def put(**values: object) -> Change:
    """Other values of the loop's fields."""
    return lambda own: [setattr(own, name, value) for name, value in values.items()]


def times(factor: Callable[[Micro], torch.Tensor | float]) -> Change:
    return lambda own: own.token.append(lambda micro: torch.as_tensor(factor(micro)))


def plus(term: Callable[[Micro], torch.Tensor]) -> Change:
    return lambda own: own.terms.append(term)


def column(name: str, change: Callable[[Trainer, torch.Tensor], torch.Tensor]) -> Change:
    return lambda own: setattr(own, name, change(own, getattr(own, name)))


def masked(chosen: Callable[[Trainer], torch.Tensor], counted: bool = True) -> Change:
    """Tokens that lose their gradient; they stay in the divisor unless not ``counted``."""

    def change(own: Trainer) -> None:
        if counted and own.counted is None:
            own.counted = own.mask.clone()
        own.mask = own.mask & ~chosen(own)

    return change


def filled(own: Trainer) -> torch.Tensor:
    """Advantages also beside the mask: those of the trained token before, or of the first one."""
    position = torch.where(own.mask, torch.arange(T), -1).cummax(1).values
    return own.advantages.gather(1, torch.where(position < 0, own.mask.long().argmax(1, keepdim=True), position))


def unmasked(chosen: Callable[[Trainer], torch.Tensor], counted: bool = False) -> Change:
    """Tokens beside the mask that train."""

    def change(own: Trainer) -> None:
        if not counted and own.counted is None:
            own.counted = own.mask.clone()
        own.advantages = filled(own)
        own.mask = own.mask | chosen(own)

    return change


def first(mask: torch.Tensor) -> torch.Tensor:
    return mask & (mask.cumsum(1) == 1)


def last(mask: torch.Tensor) -> torch.Tensor:
    return mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))


def rows_at(*rows: int) -> torch.Tensor:
    return torch.isin(torch.arange(B), torch.tensor(rows)).unsqueeze(1)


def longest(own: Trainer) -> torch.Tensor:
    """Truncated responses: the eight longest."""
    lengths = own.span.sum(1)
    return (lengths >= lengths.sort().values[-8]).unsqueeze(1)


def row_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, (values * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1), 0.0)


def values_of_rows(order: Callable[[Trainer], torch.Tensor]) -> Change:
    """Advantages of other responses, with their own mask."""

    def change(own: Trainer) -> None:
        own.advantages = torch.where(own.mask, filled(own)[order(own)], 0.0)

    return change


def in_micro_batches(own: Trainer) -> torch.Tensor:
    """Each micro-batch of the first epoch in reverse."""
    order = torch.arange(B)
    for step in own.plan[: own.setting.updates]:
        for _, rows in step:
            order[rows] = rows.flip(0)
    return order


def pair_of_rows(own: Trainer) -> torch.Tensor:
    """Two long responses with different advantages exchange them."""
    value = filled(own)[:, 0]
    lengths = own.mask.sum(1)
    ranked = lengths.argsort(descending=True).tolist()
    one = next(row for row in ranked if value[row] > 0)
    other = next(row for row in ranked if value[row] < 0)
    order = torch.arange(B)
    order[one], order[other] = other, one
    return order


def rolled(name: str, by: int) -> Change:
    def change(own: Trainer) -> None:
        values = getattr(own, name).roll(by, 1)
        values[:, 0 if by > 0 else -1] = 0
        setattr(own, name, values)

    return change


def both(*changes: Change) -> Change:
    return lambda own: [change(own) for change in changes]


def keep_mask_rolled(by: int) -> Change:
    """Advantages and mask of the token beside."""

    def change(own: Trainer) -> None:
        own.counted = own.mask.clone()
        for name in ("advantages", "mask"):
            rolled(name, by)(own)

    return change


def plan(change: Callable[[Trainer, list[tuple[int, torch.Tensor]], int], list[tuple[int, torch.Tensor]]]) -> Change:
    """Other micro-batches, while the divisors stay those of the intended plan."""

    def changed(own: Trainer) -> None:
        own.plan = [change(own, step, number) for number, step in enumerate(own.plan)]

    return changed


def drop_last(own: Trainer, step: list[tuple[int, torch.Tensor]], number: int) -> list[tuple[int, torch.Tensor]]:
    return step[:-1] if number % own.setting.updates == 0 else step


def double_first(own: Trainer, step: list[tuple[int, torch.Tensor]], number: int) -> list[tuple[int, torch.Tensor]]:
    return [*step, step[0]]


def double_for_last(own: Trainer, step: list[tuple[int, torch.Tensor]], number: int) -> list[tuple[int, torch.Tensor]]:
    return [*step[:-1], step[0]]


def nan_at(piece: Piece) -> Piece:
    gradient = piece.gradient_bT.clone()
    gradient[0] = torch.nan
    return replace(piece, gradient_bT=gradient) if 5 in piece.rows_b.tolist() else piece


def noise(own: Trainer, size: float, *shape: int) -> torch.Tensor:
    return size * torch.randn(*shape, generator=own.generator)


def old_of_engine(size: float) -> Change:
    """The batch has them too: the first ratio is not 1."""

    def change(own: Trainer) -> None:
        own.old = own.old + noise(own, size, B, T)
        own.batch = replace(own.batch, old_log_probs_BT=own.old)

    return change


def old_one_on(own: Trainer) -> None:
    own.old = own.old.roll(-1, 1)
    own.batch = replace(own.batch, old_log_probs_BT=own.old)


def old_of_rows(own: Trainer) -> None:
    own.old = own.old.roll(3, 0)
    own.batch = replace(own.batch, old_log_probs_BT=own.old)


def halved_temperature(own: Trainer) -> None:
    own.old = own.old / 0.6
    own.batch = replace(own.batch, old_log_probs_BT=own.old)


def random_tokens(own: Trainer, share: float) -> torch.Tensor:
    return torch.rand(B, T, generator=own.generator) < share


def squashed(own: Trainer, advantages: torch.Tensor) -> torch.Tensor:
    return advantages.clamp(-0.7, 0.7)


def weighed(power: float) -> Change:
    return column("weights", lambda own, weights: weights**power)


# -------------------------------------------------------------------------------------------------------------------- faults


@dataclass(frozen=True)
class Fault:
    """One, or a pair."""

    what: str
    names: tuple[frozenset[str], ...]
    """For each fault in it the names that are right."""
    change: Change
    settings: tuple[Setting, ...]

    @property
    def right(self) -> frozenset[str]:
        return frozenset().union(*self.names)


PLAIN = (Setting(), Setting("grouped", ranks=2, updates=2, epochs=2, seed=1), Setting("tokens", epochs=2, seed=2))
LATER = (Setting(epochs=3, seed=3), Setting("grouped", ranks=2, updates=2, epochs=2, seed=4))
WEIGHTED = (Setting(weights=True, seed=5), Setting("grouped", ranks=2, epochs=2, weights=True, seed=6))
BY_TOKEN = (Setting("tokens", seed=7), Setting("tokens", ranks=2, updates=2, epochs=2, seed=8))
KL = (Setting(kl=True, seed=9), Setting("grouped", epochs=2, kl=True, seed=10))
RANKS = (Setting(ranks=2, seed=11), Setting("grouped", ranks=2, epochs=2, seed=12))
UPDATES = (Setting(updates=2, seed=13), Setting("grouped", updates=4, epochs=2, seed=14))
MEANS = (Setting("grouped", aggregation="seq-mean-token-mean", epochs=2, seed=15),)
DISTINCT = (Setting("grouped", seed=16), Setting("grouped", ranks=2, updates=2, epochs=2, seed=17))


def one(what: str, name: str, change: Change, settings: Sequence[Setting] = PLAIN) -> Fault:
    return Fault(what, (frozenset(name.split(" or ")),), change, tuple(settings))


def two(what: str, name: str, other: str, changes: tuple[Change, Change], settings: Sequence[Setting] = PLAIN) -> Fault:
    return Fault(what, tuple(frozenset(each.split(" or ")) for each in (name, other)), both(*changes), tuple(settings))


LAST_LOST = masked(lambda own: last(own.mask))
FIRST_LOST = masked(lambda own: first(own.mask))
TRUNCATED = masked(longest)
DOUBLE = times(lambda micro: 2.0)
REVERSED = column("advantages", lambda own, advantages: -advantages)
OPEN = put(clip="none")
ITSELF = put(ratio="one")

SINGLES = (
    # Denominators.
    one("accumulation is not divided out: 4 times", "scaled", times(lambda micro: 4.0)),
    one("the loss scale of AMP stays", "scaled", times(lambda micro: 65536.0)),
    one("1 % too little", "scaled", times(lambda micro: 0.99)),
    one("a mean over ranks is not undone", "scaled", times(lambda micro: 1 / micro.trainer.setting.ranks), RANKS),
    one("padded positions are in the denominator", "scaled", put(divisor="padded")),
    one("sums are means over responses", "scaled", put(divisor="seq-mean-token-sum")),
    one("one update is divided by the rollout batch", "scaled", put(over="rollout batch"), UPDATES),
    one("tool tokens are in the denominator", "scaled", column("counted", lambda own, _: own.span)),
    one("each micro-batch divides by its tokens", "scaled by micro-batch", put(over="micro-batch")),
    one("each rank divides by its tokens", "scaled by micro-batch", put(over="rank"), RANKS),
    one(
        "the last micro-batch counts twice",
        "scaled by micro-batch",
        times(lambda micro: 2.0 if micro.number == len(micro.step) - 1 else 1.0),
    ),
    one("mean of means of responses", "scaled by response", put(divisor="seq-mean-token-mean")),
    one("mean over tokens for a mean of means", "scaled by response", put(divisor="token-mean"), MEANS),
    one("one response counts three times", "scaled by response", times(lambda m: 1.0 + 2.0 * rows_at(9)[m.rows])),
    one(
        "a weight of each problem",
        "scaled by response",
        times(lambda m: (1.0 + 0.17 * (m.rows // GROUP)).unsqueeze(1)),
    ),
    one("the second update counts half", "scaled", times(lambda m: 0.5 if m.update % 2 else 1.0), UPDATES),
    # Lost.
    one("the last token", "lost", LAST_LOST),
    one("the first token", "lost", FIRST_LOST),
    one("truncated responses", "lost", TRUNCATED),
    one("truncated responses, also in the denominator", "lost", masked(longest, counted=False)),
    one("negative advantages", "lost", masked(lambda own: own.advantages < 0)),
    one("one response", "lost", masked(lambda own: rows_at(12))),
    one("everything after token 100", "lost", masked(lambda own: (torch.arange(T) >= 100).expand(B, T))),
    one("a tenth of the tokens", "lost", masked(lambda own: random_tokens(own, 0.1))),
    one("unlikely tokens", "lost", masked(lambda own: own.old < -2)),
    one("turns after the first", "lost", masked(lambda own: own.turn > 0)),
    one("short responses", "lost", masked(lambda own: own.span.sum(1, keepdim=True) < 12)),
    one("one micro-batch", "lost", times(lambda micro: 0.0 if micro.number == 1 else 1.0)),
    one("a rank", "lost", times(lambda micro: float(micro.rank == 0)), RANKS),
    one("a narrower clip", "lost", put(low=0.1, high=0.1), LATER),
    one("a clip on both sides", "lost", put(clip="both sides"), LATER),
    one("the last token, also in the denominator", "lost", masked(lambda own: last(own.mask), counted=False)),
    # Outside.
    one("tool tokens", "outside", unmasked(lambda own: own.span)),
    one("tool tokens, also in the denominator", "outside", unmasked(lambda own: own.span, counted=True)),
    one("padding", "outside", unmasked(lambda own: torch.ones(B, T, dtype=torch.bool))),
    one("prompts", "outside", put(prompts=0.01)),
    one("the token after the end", "outside", unmasked(lambda own: own.span.roll(1, 1) & ~own.span)),
    # Alignment.
    one("advantages and mask one on", "shifted", keep_mask_rolled(1)),
    one("advantages and mask one back", "shifted", keep_mask_rolled(-1)),
    one("token advantages one on", "shifted", rolled("advantages", 1), BY_TOKEN),
    one("token advantages one back", "shifted", rolled("advantages", -1), BY_TOKEN),
    one("old log-probabilities one on", "shifted", rolled("old", 1)),
    one("old log-probabilities one back, in the batch too", "shifted", old_one_on, PLAIN[:2]),
    one("importance weights one on", "shifted", rolled("weights", 1), WEIGHTED),
    one("advantages of the response before", "swapped", values_of_rows(lambda own: torch.arange(B).roll(1))),
    one("advantages in reverse in each micro-batch", "swapped", values_of_rows(in_micro_batches)),
    one("advantages of two responses exchanged", "swapped or sign", values_of_rows(pair_of_rows)),
    one(
        "advantages in any order",
        "swapped",
        values_of_rows(lambda own: torch.randperm(B, generator=own.generator)),
    ),
    one(
        "advantages repeated, not interleaved",
        "swapped",
        values_of_rows(lambda own: torch.arange(B).reshape(B // GROUP, GROUP).T.reshape(-1)),
    ),
    one("old log-probabilities of other responses", "swapped", column("old", lambda own, old: old.roll(1, 0))),
    one("old log-probabilities of others, in the batch too", "swapped", old_of_rows, PLAIN[:2]),
    one("importance weights of others", "swapped", column("weights", lambda own, w: w.roll(1, 0)), WEIGHTED),
    # Signs, weights, ratios, clips.
    one("the loss is maximised", "sign", REVERSED),
    one("one micro-batch is maximised", "sign", times(lambda micro: -1.0 if micro.number == 1 else 1.0)),
    one("the size of advantages alone", "sign", column("advantages", lambda own, advantages: advantages.abs())),
    one("one response is reversed", "sign", column("advantages", lambda own, a: a * (1.0 - 2.0 * rows_at(12)))),
    one(
        "the mean of token advantages",
        "flattened",
        column("advantages", lambda own, a: row_mean(a, own.mask)),
        BY_TOKEN,
    ),
    one(
        "without token weights",
        "flattened or weights",
        column("advantages", lambda o, a: a / o.token_weights),
        BY_TOKEN,
    ),
    one("token weights twice", "weights", column("advantages", lambda own, a: a * own.token_weights), BY_TOKEN),
    one("importance weights left out", "weights", weighed(0), WEIGHTED),
    one("importance weights squared", "weights", weighed(2), WEIGHTED),
    one("importance weights inverted", "weights", weighed(-1), WEIGHTED),
    one("the ratio of the policy to itself", "stale", ITSELF, LATER),
    one("the ratio of the response", "stale", put(ratio="sequence"), LATER),
    one("the ratio squared", "stale", put(ratio="squared"), LATER),
    one("old log-probabilities of the reference", "stale", column("old", lambda own, _: own.ref), KL),
    one("old log-probabilities of an engine", "stale", old_of_engine(0.2), PLAIN[:2]),
    one("old log-probabilities of a temperature", "stale", halved_temperature, PLAIN[:2]),
    one(
        "other old log-probabilities than the batch's", "stale", column("old", lambda o, old: old + noise(o, 0.2, B, T))
    ),
    one("no clip", "unclipped", OPEN, LATER),
    one("a wider clip", "unclipped", put(low=0.5, high=0.5), LATER),
    one("the clip's other side", "unclipped or lost", put(clip="other side"), LATER),
    one("clipped tokens train with the bound", "unclipped", put(clip="clamped"), LATER),
    # Responses.
    one("the last micro-batch is dropped", "missing", plan(drop_last)),
    one("the last micro-batch of one update is dropped", "missing", plan(drop_last), UPDATES),
    one("a micro-batch comes twice", "repeated", plan(double_first)),
    one("one comes twice, one never", "missing or repeated", plan(double_for_last)),
    # Further terms.
    one("a supervised loss", "extra", plus(lambda micro: -0.1 * micro.log_probs)),
    one("a penalty on log-probabilities", "extra", plus(lambda micro: 0.1 * micro.log_probs**2)),
    one(
        "a KL term that is not declared",
        "extra",
        plus(lambda m: 0.1 * ((m.trainer.ref[m.rows] - m.log_probs).exp() + m.log_probs)),
    ),
    one("the KL term twice", "extra", put(kl_coef=0.2), KL),
    one("the KL term left out", "extra", put(kl_coef=0.0), KL),
    one("the KL term maximised", "sign", put(kl_coef=-0.1), KL),
    one("NaN in one response", "not finite", lambda own: own.pieces.append(nan_at)),
    # None of these.
    one("a discount of each position", "unexplained", times(lambda m: 0.99 ** torch.arange(T))),
    one("the first twenty tokens count half", "unexplained", times(lambda m: 1.0 - 0.5 * (torch.arange(T) < 20))),
    one("likely tokens count less", "unexplained", times(lambda m: 1 - m.log_probs.detach().exp())),
    one("large token advantages cut", "unexplained", column("advantages", squashed), BY_TOKEN),
)

PAIRS = (
    two("4 times, last token", "scaled", "lost", (times(lambda micro: 4.0), LAST_LOST)),
    two("reversed, twice", "sign", "scaled", (REVERSED, DOUBLE)),
    two("by micro-batch, first token", "scaled by micro-batch", "lost", (put(over="micro-batch"), FIRST_LOST)),
    two(
        "any order, twice",
        "swapped",
        "scaled",
        (values_of_rows(lambda own: torch.randperm(B, generator=own.generator)), DOUBLE),
        DISTINCT,
    ),
    two("weights squared, truncated", "weights", "lost", (weighed(2), TRUNCATED), WEIGHTED),
    two("weights left out, half", "weights", "scaled", (weighed(0), times(lambda micro: 0.5)), WEIGHTED),
    two("ratio of itself, first token", "stale", "lost", (ITSELF, FIRST_LOST), LATER),
    two("one on, twice", "shifted", "scaled", (keep_mask_rolled(1), DOUBLE)),
    two("tool tokens, half", "outside", "scaled", (unmasked(lambda own: own.span), times(lambda m: 0.5))),
    two("supervised, twice", "extra", "scaled", (DOUBLE, plus(lambda micro: -0.1 * micro.log_probs)), DISTINCT),
    two("micro-batch dropped, 4 times", "missing", "scaled", (plan(drop_last), times(lambda micro: 4.0))),
    two("micro-batch twice, last token", "repeated", "lost", (plan(double_first), LAST_LOST)),
    two(
        "flattened, half",
        "flattened",
        "scaled",
        (column("advantages", lambda o, a: row_mean(a, o.mask)), times(lambda m: 0.5)),
        BY_TOKEN,
    ),
    two("no clip, twice", "unclipped", "scaled", (OPEN, DOUBLE), LATER),
    two("no clip, truncated", "unclipped", "lost", (OPEN, TRUNCATED), LATER),
    two("mean of means, last token", "scaled by response", "lost", (put(divisor="seq-mean-token-mean"), LAST_LOST)),
    two("reversed, KL left out", "sign", "extra", (REVERSED, put(kl_coef=0.0)), KL),
    two(
        "token advantages one on, weights left out",
        "shifted",
        "weights",
        (rolled("advantages", 1), weighed(0)),
        (Setting("tokens", weights=True, seed=18),),
    ),
    two(
        "token weights twice, half",
        "weights",
        "scaled",
        (column("advantages", lambda o, a: a * o.token_weights), times(lambda m: 0.5)),
        BY_TOKEN,
    ),
    two("by rank, ratio of itself", "scaled by micro-batch", "stale", (put(over="rank"), ITSELF), RANKS[1:]),
)
FAULTS = SINGLES + PAIRS


@dataclass(frozen=True)
class Cell:
    """A fault in a setting."""

    fault: Fault
    setting: Setting
    said: tuple[str, ...]
    receipt: Receipt

    @property
    def first(self) -> bool:
        """The first name is right."""
        return bool(self.said) and self.said[0] in self.fault.right

    @property
    def only(self) -> bool:
        """Only right names, and one for each fault."""
        return set(self.said) <= self.fault.right and all(own & set(self.said) for own in self.fault.names)


def _gradients(pieces: Sequence[Piece]) -> dict[tuple[int, int, int], torch.Tensor]:
    return {
        (piece.update, row, place): piece.gradient_bT[n]
        for place, piece in enumerate(pieces)
        for n, row in enumerate(piece.rows_b.tolist())
    }


def cell(fault: Fault, setting: Setting) -> Cell | None:
    """The receipt's names; ``None`` where the fault changes nothing there."""
    clean = trainer_of(setting)
    own = trainer_of(setting)
    steps = own.plan
    fault.change(own)
    if own.plan is not steps:
        own = _with_divisors_of(own, steps)
    before, after = (train(each) for each in (clean, own))
    same = len(before) == len(after) and own.batch is not None and not own.prompts
    if same:
        scale = torch.cat([piece.gradient_bT.flatten() for piece in before]).abs().max()
        same = all(
            torch.equal(a.rows_b, b.rows_b) and bool(((a.gradient_bT - b.gradient_bT).abs() <= 1e-5 * scale).all())
            for a, b in zip(before, after, strict=True)
        )
    if same:
        return None
    receipt = check(own.batch, loss_of(setting), after)
    return Cell(fault, setting, tuple(names(receipt.findings)), receipt)


def _with_divisors_of(own: Trainer, steps: list[list[tuple[int, torch.Tensor]]]) -> Trainer:
    """The loop counts what it intended to train."""
    kept = {id(rows): number for number, step in enumerate(steps) for _, rows in step}

    def intended(micro: Micro) -> torch.Tensor:
        now = divisors(micro)
        step = steps[kept[id(micro.step[0][1])]]
        return torch.as_tensor(now) / torch.as_tensor(divisors(replace(micro, step=step)))

    own.token.append(intended)
    return own


def cells(faults: Sequence[Fault] = FAULTS) -> list[Cell]:
    """All visible ones."""
    return [known for fault in faults for setting in fault.settings if (known := cell(fault, setting)) is not None]


def quiet(count: int) -> list[tuple[Setting, Receipt]]:
    """Clean loops: ``count`` settings drawn at random."""
    result = []
    for seed in range(count):
        draw = torch.Generator().manual_seed(seed)

        def pick(*values: object, draw: torch.Generator = draw) -> object:
            return values[int(torch.randint(len(values), (), generator=draw))]

        setting = Setting(
            str(pick("ties", "grouped", "tokens")),
            *(int(pick(1, 2)) for _ in range(2)),  # type: ignore[call-overload]
            epochs=int(pick(1, 1, 3)),  # type: ignore[call-overload]
            weights=bool(pick(True, False)),
            kl=bool(pick(True, False)),
            aggregation=str(pick("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")),
            dtype=torch.bfloat16 if seed % 4 == 0 else torch.float32,
            seed=10_000 + seed,
        )
        own = trainer_of(setting)
        if setting.dtype == torch.bfloat16:  # the old ones come from the same forward passes
            own.old = own.old.bfloat16().float()
            own.batch = replace(own.batch, old_log_probs_BT=own.old)
        result.append((setting, check(own.batch, loss_of(setting), train(own))))
    return result


def main() -> None:
    """Print the figures, and every cell that is not right."""
    known = cells()
    for each in known:
        if not each.only or "-v" in sys.argv:
            mark = "only" if each.only else "first" if each.first else "WRONG" if each.said else "MISSED"
            print(f"{mark:6} {each.fault.what} {sorted(each.fault.right)} {each.setting}: {', '.join(each.said)}")
            if "-v" in sys.argv:
                print(*each.receipt.findings, sep="\n")
    first, only = (sum(getattr(each, name) for each in known) for name in ("first", "only"))
    missed = sum(not each.said for each in known)
    print(f"{len(FAULTS)} faults, {len(known)} visible cells: right first {first / len(known):.1%},", end=" ")
    print(f"only right {only / len(known):.1%}, missed {missed}")
    alarms = [setting for setting, receipt in quiet(400) if not receipt.ok]
    print(f"400 clean loops: {len(alarms)} alarms", *alarms, sep="\n")


if __name__ == "__main__":
    main()
