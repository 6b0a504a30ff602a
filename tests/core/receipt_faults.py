"""Faults injected into the plain loop: of real trainers, whose threads were read and are named, and made-up ones, one to three
at a time. ``python -m tests.core.receipt_faults`` prints the receipt's names, and how often its first line is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from grail_advantage.receipt import Loss, Receipt, check
from tests.core import receipt_loop
from tests.core.receipt_loop import CLIP, MicroBatch, Rollout, ppo, train

B = 32
T = 60
Change = Callable[[Rollout, MicroBatch], MicroBatch]
Prepare = Callable[[Rollout, torch.Generator], Rollout]
"""Changes the batch, whose tokens the loop has counted, the policy or the plan."""
LOSS = Loss("ppo", "clip", "token-mean", norm=float(T), options=CLIP)


def put(**fields: Callable[[Rollout, MicroBatch], Any]) -> Change:
    return lambda given, m: replace(
        m, **{name: change(given, m) for name, change in fields.items()}
    )


def times(factor: Callable[[Rollout, MicroBatch], Any]) -> Change:
    return put(times=lambda g, m: m.times * factor(g, m))


def masked(chosen: Callable[[MicroBatch], torch.Tensor]) -> Change:
    """Tokens that lose their gradient; they stay in the divisor."""
    return times(lambda g, m: (~chosen(m)).float())


def rolled(*columns: str, by: int = 1) -> Change:
    inside = (torch.arange(T) > 0) if by > 0 else (torch.arange(T) < T - 1)
    return put(
        **{k: lambda g, m, k=k: torch.where(inside, getattr(m, k).roll(by, 1), 0) for k in columns}
    )


def other_rows(rows: torch.Tensor) -> Change:
    """Advantages of other responses, one for each of their places."""
    return put(advantages=lambda g, m: torch.where(m.mask, first_of(g)[rows[m.rows]], 0.0))


def lengths(m: MicroBatch) -> torch.Tensor:
    return m.mask.sum(1, keepdim=True)


def first_of(given: Rollout) -> torch.Tensor:
    """The response's advantage, (B, 1)."""
    return given.batch.advantages_BT[:, :1]


def whole_of(given: Rollout) -> torch.Tensor:
    """The mask to each response's last token."""
    return torch.arange(T) <= torch.where(given.batch.mask_BT, torch.arange(T), 0).amax(1, True)


def of_rank(given: Rollout, m: MicroBatch) -> torch.Tensor:
    return given.batch.mask_BT[
        torch.cat([rows for rank, rows in given.plan[m.update] if rank == m.rank])
    ].sum()


def mean(g: Rollout, m: MicroBatch) -> torch.Tensor:
    return torch.where(m.mask, (m.advantages * m.mask).sum(1, keepdim=True) / lengths(m), 0.0)


def columns(**changes: Callable[[Rollout, torch.Generator], Any]) -> Prepare:
    return lambda g, draw: replace(
        g, batch=replace(g.batch, **{name: of(g, draw) for name, of in changes.items()})
    )


def plan(pieces: Callable[[torch.Generator], list[torch.Tensor]]) -> Prepare:
    """Other micro-batches in one step."""
    return lambda g, draw: replace(g, plan=[[(0, rows) for rows in pieces(draw)]])


def by_turn(g: Rollout, draw: torch.Generator) -> Rollout:
    """Four rows of one turn each, on tokens of its own at the right, with an advantage of its own."""
    mask = torch.arange(T) >= T - torch.randint(5, T, (B, 1), generator=draw)
    of_rows = torch.randn(B // 4, 1, generator=draw).sign().repeat_interleave(4, 0)
    return replace(g, batch=replace(g.batch, advantages_BT=of_rows * mask, mask_BT=mask))


def whitened(g: Rollout, m: MicroBatch) -> torch.Tensor:
    trained = g.batch.advantages_BT[g.batch.mask_BT]
    return torch.where(m.mask, (m.advantages - trained.mean()) / trained.std(), 0.0)


def less_its_groups_mean(g: Rollout, m: MicroBatch) -> torch.Tensor:
    """Once more, of the rewards 0 and 1 of groups of eight."""
    rewards = (first_of(g) > 0).float().reshape(-1, 8)
    means = rewards.mean(1, keepdim=True).expand(-1, 8).reshape(-1, 1)
    return torch.where(m.mask, m.advantages - means[m.rows], 0.0)


def detached(g: Rollout, m: MicroBatch) -> MicroBatch:
    """The gradient of the log-probability in place of the ratio's, where the clip leaves it."""
    ratio = (m.log_probs - m.old).detach().exp()
    (low, high) = m.bounds
    kept = torch.where(m.advantages > 0, ratio <= high, ratio >= low)
    return replace(m, old=m.log_probs.detach(), times=m.times * kept)


def away(size: float) -> Change:
    """Old log-probabilities of a policy so far away."""
    return put(old=lambda g, m: m.old + size * DRIFT[m.rows])


def before(column: str, of_batch: str) -> Change:
    """A column's values of the response before."""
    return put(**{column: lambda g, m: getattr(g.batch, of_batch).roll(1, 0)[m.rows]})


def temperatures(policy: float, old: float, scale: float = 1.0) -> Prepare:
    """Of the policy's log-probabilities and of the old ones, which are divided by the scale."""

    def prepared(g: Rollout, draw: torch.Generator) -> Rollout:
        logits = torch.randn(B, T, 20, generator=draw) * 2
        policy_BT, old_BT = ((logits / of).log_softmax(-1)[..., 0] for of in (policy, old))
        return Rollout(replace(g.batch, old_log_probs_BT=old_BT / scale), policy_BT[None], g.plan)

    return prepared


ALL = torch.arange(B)
RESAMPLED = torch.cat([ALL[:4], ALL[4:8].roll(1), ALL[8:20], ALL[20:28].roll(3), ALL[28:]])
NOISE = torch.randn(8, 1, generator=torch.Generator().manual_seed(1))
NOISE = torch.cat([(NOISE - NOISE.mean()) / NOISE.std(), torch.zeros(B - 8, 1)])
"""Advantages of responses with equal rewards."""
DRIFT = torch.randn(B, T, generator=torch.Generator().manual_seed(2))
OTHER = -3 * torch.rand(B, T, generator=torch.Generator().manual_seed(3))
"""Another policy's distance, and the log-probabilities of a reference that the batch does not hold."""
BY_MICRO = put(divisor=lambda g, m: m.mask.sum() * m.count)
BY_ALL = put(divisor=lambda g, m: g.batch.mask_BT.sum())
KL = {times: put(term=lambda g, m, times=times: times * m.term) for times in (-1, 0, 2)}
SAME = put()

ONE = {"token_advantages": False}
"""An advantage a response."""
SMALL = ({}, {"ties": True})
PLAIN = (ONE, {"ranks": 2, "updates": 2, "epochs": 2} | ONE, {"epochs": 2})
LATER = ({"epochs": 3}, {"ranks": 2, "updates": 2, "epochs": 2} | ONE)
RANKS = ({"ranks": 2} | ONE, {"ranks": 2, "epochs": 2})
WEIGHTED = ({"weights": True}, {"ranks": 2, "epochs": 2, "weights": True} | ONE)
BY_TOKEN = ({}, {"ranks": 2, "updates": 2, "epochs": 2})
WITH_KL = ({"kl": True}, {"epochs": 2, "kl": True} | ONE)
FLAT = PLAIN[:2]
EVEN = {"even": True, "aggregation": "seq-mean-token-mean"}
NORM = {"aggregation": "seq-mean-token-sum-norm"}


class Fault(NamedTuple):
    right: str
    """Names of which the first line should have one."""
    what: str
    """A thread of a real trainer and what was wrong, or what is made up."""
    change: Change | tuple[Change, ...]
    settings: tuple[dict[str, Any], ...]
    prepare: Prepare = lambda given, draw: given


FAULTS = [Fault(*row) for row in (
    ("scaled", "huggingface/trl#6369: masked truncated responses stay in the denominator", SAME, FLAT[:1] * 2,
     columns(mask_BT=lambda g, draw: g.batch.mask_BT & (ALL != 5)[:, None])),
    ("scaled", "THUDM/slime#657: rejected tokens stay in the denominator", SAME, SMALL,
     columns(mask_BT=lambda g, draw: g.batch.mask_BT & (torch.rand(B, T, generator=draw) >= 0.4))),
    ("swapped", "NovaSky-AI/SkyRL#1492: all turns get the last turn's token advantages",
     (BY_ALL, put(advantages=lambda g, m: g.batch.advantages_BT[m.rows // 4 * 4 + 3])), (ONE, ONE), by_turn),
    ("extra", "NVIDIA-NeMo/RL#4158: rounding in equal rewards is divided by its spread",
     put(advantages=lambda g, m: m.advantages + NOISE[m.rows] * m.mask), (ONE, ONE),
     columns(advantages_BT=lambda g, draw: torch.where(ALL[:, None] < 8, 0.0, g.batch.advantages_BT))),
    ("swapped", "verl-project/verl#7957: advantages go back under keys of before resampling", other_rows(RESAMPLED), FLAT),
    ("swapped", "nishide-dev/unturtle#40: old log-probabilities cut along another dimension", SAME, (ONE, ONE),
     columns(old_log_probs_BT=lambda g, draw: g.batch.old_log_probs_BT.roll(2, 0))),
    ("shifted", "PrimeIntellect-ai/prime-rl#1525: the next token's log-probabilities, the rest unshifted", SAME, SMALL,
     lambda g, draw: replace(g, policy_UBT=g.policy_UBT.roll(-1, 2))),
    ("shifted", "lucidrains/PaLM-rlhf-pytorch#31: the actions' log-probabilities one off", rolled("advantages", "mask"), PLAIN),
    ("outside", "bingreeky/MemGen#33: filling after the end counts as response",
     put(mask=lambda g, m: torch.ones_like(m.mask), advantages=lambda g, m: first_of(g)[m.rows]), FLAT),
    ("outside", "THUDM/slime#1563: user and tool turns are in the loss mask",
     put(divisor=lambda g, m: whole_of(g).sum(), advantages=lambda g, m: first_of(g)[m.rows],
         mask=lambda g, m: whole_of(g)[m.rows]), (ONE, ONE)),
    ("stale", "huggingface/trl#4159: engine's log-probabilities without temperature", SAME, SMALL, temperatures(0.6, 1)),
    ("stale", "PrimeIntellect-ai/prime-rl#697: divided by the temperature", SAME, SMALL, temperatures(0.6, 1, 0.6)),
    ("stale", "NVIDIA-NeMo/RL#316: trainer's log-probabilities without temperature", SAME, SMALL, temperatures(1, 0.6)),
    ("not finite", "OpenRLHF/OpenRLHF#1240: NaN at a masked token", SAME, SMALL,
     columns(old_log_probs_BT=lambda g, draw: g.batch.old_log_probs_BT.where(g.batch.mask_BT, torch.nan))),
    ("sign", "qiancheng0/ToolRL#52: the KL term is maximised", KL[-1], WITH_KL),
    ("rounded", "verl-project/verl#6280: bf16 ratios differ from 1 with the micro-batch size", SAME, SMALL,
     columns(old_log_probs_BT=lambda g, draw: g.batch.old_log_probs_BT + 0.008 * torch.randn(B, T, generator=draw))),
    ("repeated", "verl-project/verl-omni#602: a batch is filled with copies of its responses", BY_ALL, SMALL,
     plan(lambda draw: [*ALL.split(6), ALL[:2], ALL[2:8]])),
    ("missing or repeated", "huggingface/trl#4531: samples come several times or never", BY_ALL, SMALL,
     plan(lambda draw: list(torch.randint(B, (B,), generator=draw).split(8)))),
    ("scaled", "huggingface/trl#6024: `dapo` divides by the tokens of several updates", BY_ALL,
     ({"updates": 2, "drift": 0.0} | ONE,) * 2),
    ("scaled", "modelscope/ms-swift#10117: by the accumulation too", times(lambda g, m: 1 / m.count), ({"even": True},) * 2),
    ("scaled", "NVIDIA-NeMo/RL#84: means are summed", put(divisor=lambda g, m: lengths(m) * len(m.rows)), (EVEN | ONE,) * 2),
    ("scaled", "THUDM/slime#919: the sum over tokens is not divided", put(divisor=lambda g, m: 1), FLAT[:1] * 2),
    ("scaled", "verl-project/verl#3741: Dr. GRPO sums over responses", put(divisor=lambda g, m: float(T)), (NORM, NORM)),
    ("scaled by micro-batch", "PrimeIntellect-ai/prime-rl#2359: each rank divides by its tokens", put(divisor=of_rank), RANKS),
    ("scaled by micro-batch", "allenai/open-instruct#1161: each micro-batch divides by its own tokens", BY_MICRO, PLAIN),
    ("scaled by response", "AI-Hypercomputer/maxtext#4025: mean over responses, not tokens",
     put(divisor=lambda g, m: lengths(m) * len(m.update_rows) / g.batch.ranks), PLAIN),
    ("scaled by response", "google/tunix#1662: a pack of responses counts as one", BY_MICRO, (EVEN, EVEN)),
    ("unclipped", "rllm-org/rllm#81: the clipped objective is not used", put(bounds=lambda g, m: (0.0, torch.inf)), LATER),
    ("stale", "meta-pytorch/torchforge#571: the policy's ratio to itself", put(old=lambda g, m: m.log_probs.detach()), LATER),
    ("weights", "verl-project/verl#3245: importance weights missing in most losses", put(weights=lambda g, m: 1.0), WEIGHTED),
    ("scaled", "4 times", times(lambda g, m: 4.0), PLAIN),
    ("scaled", "1 % too little", times(lambda g, m: 0.99), PLAIN),
    ("scaled", "the second update counts half", times(lambda g, m: 0.5 if m.update % 2 else 1.0), LATER),
    ("scaled by micro-batch", "one micro-batch twice", times(lambda g, m: 2.0 if m.number == 1 else 1.0), PLAIN),
    ("scaled by response", "one response three times", times(lambda g, m: 1 + 2.0 * (m.rows[:, None] == 9)), PLAIN),
    ("lost", "the last token", masked(lambda m: m.mask.cumsum(1) == lengths(m)), PLAIN),
    ("lost", "the first token", masked(lambda m: m.mask.cumsum(1) == 1), PLAIN),
    ("lost", "long responses", masked(lambda m: (lengths(m) > 35).expand_as(m.mask)), PLAIN),
    ("lost", "one micro-batch", times(lambda g, m: float(m.number != 1)), PLAIN),
    ("lost", "a rank", times(lambda g, m: float(m.rank == 0)), RANKS),
    ("lost", "a narrower clip", put(bounds=lambda g, m: (0.9, 1.1)), LATER),
    ("shifted", "advantages and mask one back", rolled("advantages", "mask", by=-1), PLAIN),
    ("shifted", "advantages one on", rolled("advantages"), BY_TOKEN),
    ("shifted", "old log-probabilities one on", rolled("old"), PLAIN),
    ("shifted", "importance weights one on", rolled("weights"), WEIGHTED),
    ("swapped", "advantages in any order", other_rows(torch.randperm(B, generator=torch.Generator().manual_seed(0))), FLAT),
    ("outside", "a constant in one micro-batch", put(mask=lambda g, m: m.mask | (m.number == 1),
     term=lambda g, m: m.term + 1e-3 * m.divisor * m.log_probs * (m.number == 1)), PLAIN),
    ("sign", "the loss is maximised", put(advantages=lambda g, m: -m.advantages), PLAIN),
    ("sign", "the size alone", put(advantages=lambda g, m: m.advantages.abs()), PLAIN),
    ("sign", "one response is reversed", times(lambda g, m: 1 - 2.0 * (m.rows[:, None] == 9)), PLAIN),
    ("flattened", "the mean of token advantages", put(advantages=mean), BY_TOKEN),
    ("weights", "importance weights twice", put(weights=lambda g, m: m.weights**2), WEIGHTED),
    ("stale", "the reference's old ones", put(old=lambda g, m: m.ref), WITH_KL),
    *(("stale", f"old ones of a policy {size} away, and not the batch's", away(size), PLAIN) for size in (0.03, 0.1, 0.3)),
    ("stale", "the clip by the ratio, and no ratio", detached, LATER),
    ("swapped", "old ones of the response before, and not the batch's", before("old", "old_log_probs_BT"), PLAIN),
    ("swapped", "importance weights of the response before", before("weights", "weights_BT"), WEIGHTED),
    ("weights", "the mean importance weight of the response",
     put(weights=lambda g, m: (m.weights * m.mask).sum(1, keepdim=True) / lengths(m)), WEIGHTED),
    ("weights", "importance weights of 1 at most", put(weights=lambda g, m: m.weights.clamp(max=1.0)), WEIGHTED),
    ("extra or scaled", "advantages whitened", put(advantages=whitened), PLAIN),
    ("extra", "the batch's mean is taken off", put(advantages=lambda g, m: m.advantages - 0.3 * m.mask), PLAIN),
    ("extra or scaled by response", "the group's mean is taken off twice", put(advantages=less_its_groups_mean), PLAIN),
    ("extra", "a KL term that no setting names", put(term=lambda g, m: 0.05 * (m.log_probs - OTHER[m.rows]) ** 2 / 2), PLAIN),
    ("unclipped", "a wider clip", put(bounds=lambda g, m: (0.5, 1.5)), LATER),
    ("extra", "a penalty on log-probabilities", put(term=lambda g, m: m.term + 0.1 * m.log_probs**2), PLAIN),
    ("extra", "the KL term twice", KL[2], WITH_KL),
    ("extra", "the KL term left out", KL[0], WITH_KL),
    ("unexplained", "a discount of each position", times(lambda g, m: 0.99 ** torch.arange(T)), PLAIN),
    ("unexplained", "the first ten count half", times(lambda g, m: 1 - 0.5 * (torch.arange(T) < 10)), PLAIN),
)]  # fmt: skip
TOGETHER = (
    ("4 times", "the last token"), ("the loss is maximised", "4 times"), ("1161", "the first token"),
    ("in any order", "4 times"), ("weights twice", "long responses"), ("3245", "4 times"),
    ("torchforge#571", "the first token"), ("pytorch#31", "4 times"), ("MemGen#33", "4 times"), ("the mean of", "4 times"),
    ("rllm#81", "4 times"), ("maxtext#4025", "the last token"), ("term left out", "the loss is maximised"),
    ("4 times", "the loss is maximised", "the last token"), ("3245", "4 times", "the first token"),
)  # fmt: skip
"""Parts of the names of faults; the first one's settings."""
for parts in TOGETHER:
    several = [next(fault for fault in FAULTS if part in fault.what) for part in parts]
    right = " or ".join(fault.right for fault in several)
    changes = tuple(fault.change for fault in several)
    FAULTS.append(Fault(right, f"together: {', '.join(parts)}", changes, several[0].settings))
THREADS = FAULTS[:30]
MADE_UP = FAULTS[30:]


def looped(
    seed: int,
    changes: tuple[Change, ...],
    prepare: Prepare = FAULTS[-1].prepare,
    dtype: Any = None,
    **setting: Any,
) -> Any:
    """The loop's batch, its loss as declared, and what it measured."""
    with_kl = setting.pop("kl", False)
    aggregation = setting.pop("aggregation", LOSS.aggregation)
    declared = replace(
        LOSS, aggregation=aggregation, **{"kl": "k3", "kl_coef": 0.1} if with_kl else {}
    )
    given = receipt_loop.rollout(seed, responses=B, tokens=T, **{"ties": bool(seed % 2)} | setting)
    old_BT = given.batch.old_log_probs_BT.to(dtype or torch.float32).float()
    counted_BT = given.batch.mask_BT
    policy_UBT = given.policy_UBT.to(dtype or torch.float32)
    given = Rollout(replace(given.batch, old_log_probs_BT=old_BT), policy_UBT, given.plan)
    given = prepare(given, torch.Generator().manual_seed(seed))

    def loss(m: MicroBatch) -> torch.Tensor:
        divisor = {
            "token-mean": counted_BT[m.update_rows].sum(),
            "seq-mean-token-sum": len(m.update_rows),
            "seq-mean-token-mean": len(m.update_rows) * lengths(m),
            "seq-mean-token-sum-norm": len(m.update_rows) * T,
        }[aggregation] / given.batch.ranks
        gap = m.ref - m.log_probs
        m = replace(
            m, divisor=divisor, term=0.1 * (gap.exp() - gap - 1) if with_kl else torch.zeros(())
        )
        for change in changes:
            m = change(given, m)
        return ppo(m)

    batch = given.batch if with_kl else replace(given.batch, ref_log_probs_BT=None)
    return batch, declared, train(given, loss)


def cells(faults: list[Fault], every: int = 1) -> list[tuple[Fault, list[str], Receipt]]:
    """Faults in all of their settings, or each ``every``-th one, with the names that the receipt says; made-up ones where the
    gradients are not a clean loop's."""
    result = []
    for fault, (seed, setting) in [(of, each) for of in faults for each in enumerate(of.settings)][
        ::every
    ]:
        changes = fault.change if isinstance(fault.change, tuple) else (fault.change,)
        batch, declared, pieces = looped(seed, changes, fault.prepare, **setting)
        after, before = (
            torch.cat([p.gradient_bT for p in own])
            for own in (pieces, looped(seed, (), **setting)[2])
        )
        if fault in THREADS or ((after - before).abs() > 1e-5 * before.abs().max()).any():
            receipt = check(batch, declared, pieces)
            said = [
                each.name for each in receipt.findings if each.mismatch or fault.right == "rounded"
            ]
            result.append((fault, said, receipt))
    return result


def wrong(known: list[tuple[Fault, list[str], Receipt]]) -> list[str]:
    """Those whose first line has no right name."""
    return [
        f"{of.what}: {said}"
        for of, said, _ in known
        if not set(said[:1]) & set(of.right.split(" or "))
    ]


def quiet(count: int) -> list[tuple[dict[str, Any], Receipt]]:
    """Clean loops: ``count`` settings drawn at random, a quarter of them in bf16."""
    result = []
    for seed in range(count):
        draw = torch.Generator().manual_seed(seed)
        choices: dict[str, tuple[Any, ...]] = {
            "ranks": (1, 2),
            "updates": (1, 2),
            "epochs": (1, 1, 3),
        }
        choices |= {name: (True, False) for name in ("weights", "kl", "token_advantages")}
        choices["aggregation"] = (
            "token-mean",
            "seq-mean-token-mean",
            "seq-mean-token-sum",
            "seq-mean-token-sum-norm",
        )
        setting = {
            name: of[int(torch.randint(len(of), (), generator=draw))]
            for name, of in choices.items()
        }
        setting["dtype"] = torch.bfloat16 if seed % 4 == 0 else torch.float32
        result.append((setting, check(*looped(seed, (), **setting))))
    return result


if __name__ == "__main__":
    for chosen in (THREADS, MADE_UP):
        known = cells(chosen)
        print(*(f"{fault.what}: {', '.join(said)}" for fault, said, _ in known), sep="\n")
        missed = sum(not said for _, said, _ in known)
        print(
            f"{len(known)} cells, {missed} missed, with another first line:",
            *wrong(known),
            sep="\n",
        )
    print(
        "400 clean loops, alarms:", [setting for setting, receipt in quiet(400) if not receipt.ok]
    )
