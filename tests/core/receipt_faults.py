"""Faults injected into the plain loop: of real trainers, whose threads were read and are named, and made-up ones, one to three
at a time. ``python -m tests.core.receipt_faults`` prints the receipt's names, and how often its first line is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grail_advantage.receipt import Batch, Receipt, check
from tests.core import receipt_loop
from tests.core.receipt_loop import TOKEN_MEAN, MicroBatch, Rollout, changed, ppo, train

B = 32
T = 60
Change = Callable[[MicroBatch], MicroBatch]
Prepare = Callable[[Rollout, torch.Generator], Rollout]
"""Changes the batch, whose tokens the loop has counted, the policy or the plan."""
LOSS = replace(TOKEN_MEAN, norm=float(T))


def put(**fields) -> Change:
    """Another value of a micro-batch's fields, or a function of it."""
    return partial(changed, **fields)


def times(factor: Callable[[MicroBatch], Any]) -> Change:
    """A factor of the loss. Tokens whose factor is 0 stay in the divisor."""
    return lambda m: replace(m, times=m.times * factor(m))


def rolled(*columns: str, by: int = 1) -> Change:
    """Columns with each token's value of the one before it, or after it."""
    # The first position, or the last, has no neighbour on that side.
    is_inside = (torch.arange(T) > 0) if by > 0 else (torch.arange(T) < T - 1)

    def change(m):
        # What comes in from the other end is 0.
        moved = {
            name: torch.where(is_inside, getattr(m, name).roll(by, 1), 0)
            for name in columns
        }
        return replace(m, **moved)

    return change


def other_rows(rows: Tensor) -> Change:
    """Advantages of other responses, one for each of their places."""
    return put(advantages=lambda m: m.batch.advantages_BT[rows[m.rows], :1] * m.mask)


def lengths(m: MicroBatch) -> Tensor:
    return m.mask.sum(1, keepdim=True)


def first(m: MicroBatch) -> Tensor:
    """The response's advantage, (b, 1)."""
    return m.batch.advantages_BT[m.rows, :1]


def written(batch: Batch) -> Tensor:
    """The mask to each response's last token."""
    place = torch.arange(T)
    return place <= torch.where(batch.mask_BT, place, 0).amax(1, True)


def rank_tokens(m: MicroBatch) -> Tensor:
    rows = torch.cat([rows for rank, rows in m.step if rank == m.rank])
    return m.batch.mask_BT[rows].sum()


def column(name: str, values: Callable[[Batch, torch.Generator], Tensor]) -> Prepare:
    """Another column of the batch."""
    return lambda loop, draw: replace(
        loop, batch=replace(loop.batch, **{name: values(loop.batch, draw)})
    )


def plan(pieces: Callable[[torch.Generator], Sequence[Tensor]]) -> Prepare:
    """Other micro-batches in one step."""
    return lambda loop, draw: replace(loop, plan=[[(0, rows) for rows in pieces(draw)]])


def by_turn(loop: Rollout, draw: torch.Generator) -> Rollout:
    """Four rows of one turn each, on tokens of its own at the right, with an advantage of its own."""
    mask = torch.arange(T) >= T - torch.randint(5, T, (B, 1), generator=draw)
    # Rows 0 to 3 are the turns of one response.
    signs = torch.randn(B // 4, 1, generator=draw).sign().repeat_interleave(4, 0)
    return replace(
        loop, batch=replace(loop.batch, advantages_BT=signs * mask, mask_BT=mask)
    )


def whitened(m: MicroBatch) -> Tensor:
    trained = m.batch.advantages_BT[m.batch.mask_BT]
    return (m.advantages - trained.mean()) / trained.std() * m.mask


def less_its_groups_mean(m: MicroBatch) -> Tensor:
    """Once more, of the rewards 0 and 1 of groups of eight."""
    # A positive advantage stands for the reward 1.
    rewards = (m.batch.advantages_BT[:, 0] > 0).float().reshape(-1, 8)
    means = rewards.mean(1).repeat_interleave(8)
    return (m.advantages - means[m.rows, None]) * m.mask


def detached(m: MicroBatch) -> MicroBatch:
    """The gradient of the log-probability in place of the ratio's, where the clip leaves it."""
    ratio = (m.log_probs - m.old).detach().exp()
    low, high = m.bounds
    is_left = torch.where(m.advantages > 0, ratio <= high, ratio >= low)
    return replace(m, old=m.log_probs.detach(), times=m.times * is_left)


def temperatures(policy: float, old: float, scale: float = 1.0) -> Prepare:
    """Of the policy's log-probabilities and of the old ones, which are divided by the scale."""

    def prepared(loop, draw):
        # Of twenty tokens the first was sampled.
        logits = torch.randn(B, T, 20, generator=draw) * 2
        policy_BT, old_BT = ((logits / t).log_softmax(-1)[..., 0] for t in (policy, old))
        batch = replace(loop.batch, old_log_probs_BT=old_BT / scale)
        return Rollout(batch, policy_BT[None], loop.plan)

    return prepared


ALL = torch.arange(B)
# Two stretches of responses have each other's places.
RESAMPLED = torch.cat([ALL[:4], ALL[4:8].roll(1), ALL[8:20], ALL[20:28].roll(3), ALL[28:]])
SHUFFLED = torch.randperm(B, generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(8, 1, generator=torch.Generator().manual_seed(1))
NOISE = torch.cat([(NOISE - NOISE.mean()) / NOISE.std(), torch.zeros(B - 8, 1)])
"""Advantages of responses with equal rewards."""
DRIFT = torch.randn(B, T, generator=torch.Generator().manual_seed(2))
OTHER = -3 * torch.rand(B, T, generator=torch.Generator().manual_seed(3))
"""Another policy's distance, and the log-probabilities of a reference that the batch does not hold."""
BY_MICRO = put(divisor=lambda m: m.mask.sum() * m.count)
BY_ALL = put(divisor=lambda m: m.batch.mask_BT.sum())
SAME = put()

ONE = {"token_advantages": False}
"""An advantage a response."""
SMALL = ({}, {"ties": True})
PLAIN = (ONE, {"ranks": 2, "updates": 2, "epochs": 2} | ONE, {"epochs": 2})
LATER = ({"epochs": 3}, {"ranks": 2, "updates": 2, "epochs": 2} | ONE)
RANKS = ({"ranks": 2} | ONE, {"ranks": 2, "epochs": 2})
WEIGHTED = ({"weights": True}, {"ranks": 2, "epochs": 2, "weights": True} | ONE)
BY_RESPONSE = (ONE, ONE)
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
    prepare: Prepare = lambda loop, draw: loop


FAULTS = [Fault(*row) for row in (
    ("scaled", "huggingface/trl#6369: masked truncated responses stay in the denominator", SAME, BY_RESPONSE,
     column("mask_BT", lambda batch, draw: batch.mask_BT & (ALL != 5)[:, None])),
    ("scaled", "THUDM/slime#657: rejected tokens stay in the denominator", SAME, SMALL,
     column("mask_BT", lambda batch, draw: batch.mask_BT & (torch.rand(B, T, generator=draw) >= 0.4))),
    ("swapped", "NovaSky-AI/SkyRL#1492: all turns get the last turn's token advantages",
     (BY_ALL, put(advantages=lambda m: m.batch.advantages_BT[m.rows // 4 * 4 + 3])), BY_RESPONSE, by_turn),
    ("extra", "NVIDIA-NeMo/RL#4158: rounding in equal rewards is divided by its spread",
     put(advantages=lambda m: m.advantages + NOISE[m.rows] * m.mask), BY_RESPONSE,
     column("advantages_BT", lambda batch, draw: batch.advantages_BT * (ALL[:, None] >= 8))),
    ("swapped", "verl-project/verl#7957: advantages go back under keys of before resampling", other_rows(RESAMPLED), FLAT),
    ("swapped", "nishide-dev/unturtle#40: old log-probabilities cut along another dimension", SAME, BY_RESPONSE,
     column("old_log_probs_BT", lambda batch, draw: batch.old_log_probs_BT.roll(2, 0))),
    ("shifted", "PrimeIntellect-ai/prime-rl#1525: the next token's log-probabilities, the rest unshifted", SAME, SMALL,
     lambda loop, draw: replace(loop, policy_UBT=loop.policy_UBT.roll(-1, 2))),
    ("shifted", "lucidrains/PaLM-rlhf-pytorch#31: the actions' log-probabilities one off", rolled("advantages", "mask"), PLAIN),
    ("outside", "bingreeky/MemGen#33: filling after the end counts as response",
     put(mask=lambda m: torch.ones_like(m.mask), advantages=first), FLAT),
    ("outside", "THUDM/slime#1563: user and tool turns are in the loss mask",
     put(divisor=lambda m: written(m.batch).sum(), advantages=first, mask=lambda m: written(m.batch)[m.rows]), BY_RESPONSE),
    ("stale", "huggingface/trl#4159: engine's log-probabilities without temperature", SAME, SMALL, temperatures(0.6, 1)),
    ("stale", "PrimeIntellect-ai/prime-rl#697: divided by the temperature", SAME, SMALL, temperatures(0.6, 1, 0.6)),
    ("stale", "NVIDIA-NeMo/RL#316: trainer's log-probabilities without temperature", SAME, SMALL, temperatures(1, 0.6)),
    ("not finite", "OpenRLHF/OpenRLHF#1240: NaN at a masked token", SAME, SMALL,
     column("old_log_probs_BT", lambda batch, draw: batch.old_log_probs_BT.where(batch.mask_BT, torch.nan))),
    ("sign", "qiancheng0/ToolRL#52: the KL term is maximised", put(term=lambda m: -m.term), WITH_KL),
    ("rounded", "verl-project/verl#6280: bf16 ratios differ from 1 with the micro-batch size", SAME, SMALL,
     column("old_log_probs_BT", lambda batch, draw: batch.old_log_probs_BT + 0.008 * torch.randn(B, T, generator=draw))),
    ("repeated", "verl-project/verl-omni#602: a batch is filled with copies of its responses", BY_ALL, SMALL,
     plan(lambda draw: [*ALL.split(6), ALL[:2], ALL[2:8]])),
    ("missing or repeated", "huggingface/trl#4531: samples come several times or never", BY_ALL, SMALL,
     plan(lambda draw: torch.randint(B, (B,), generator=draw).split(8))),
    ("scaled", "huggingface/trl#6024: `dapo` divides by the tokens of several updates", BY_ALL,
     ({"updates": 2, "drift": 0.0} | ONE,) * 2),
    ("scaled", "modelscope/ms-swift#10117: by the accumulation too", times(lambda m: 1 / m.count), ({"even": True},) * 2),
    ("scaled", "NVIDIA-NeMo/RL#84: means are summed", put(divisor=lambda m: lengths(m) * len(m.rows)), (EVEN | ONE,) * 2),
    ("scaled", "THUDM/slime#919: the sum over tokens is not divided", put(divisor=1), BY_RESPONSE),
    ("scaled", "verl-project/verl#3741: Dr. GRPO sums over responses", put(divisor=float(T)), (NORM, NORM)),
    ("scaled by micro-batch", "PrimeIntellect-ai/prime-rl#2359: each rank divides by its tokens",
     put(divisor=rank_tokens), RANKS),
    ("scaled by micro-batch", "allenai/open-instruct#1161: each micro-batch divides by its own tokens", BY_MICRO, PLAIN),
    ("scaled by response", "AI-Hypercomputer/maxtext#4025: mean over responses, not tokens",
     put(divisor=lambda m: lengths(m) * len(m.step_rows) / m.batch.ranks), PLAIN),
    ("scaled by response", "google/tunix#1662: a pack of responses counts as one", BY_MICRO, (EVEN, EVEN)),
    ("unclipped", "rllm-org/rllm#81: the clipped objective is not used", put(bounds=(0.0, torch.inf)), LATER),
    ("stale", "meta-pytorch/torchforge#571: the policy's ratio to itself", put(old=lambda m: m.log_probs.detach()), LATER),
    ("weights", "verl-project/verl#3245: importance weights missing in most losses", put(weights=1.0), WEIGHTED),
    ("scaled", "4 times", times(lambda m: 4.0), PLAIN),
    ("scaled", "1 % too little", times(lambda m: 0.99), PLAIN),
    ("scaled", "the second update counts half", times(lambda m: 0.5 if m.update % 2 else 1.0), LATER),
    ("scaled by micro-batch", "one micro-batch twice", times(lambda m: 1.0 + (m.number == 1)), PLAIN),
    ("scaled by response", "one response three times", times(lambda m: 1 + 2.0 * (m.rows[:, None] == 9)), PLAIN),
    ("lost", "the last token", times(lambda m: m.mask.cumsum(1) != lengths(m)), PLAIN),
    ("lost", "the first token", times(lambda m: m.mask.cumsum(1) != 1), PLAIN),
    ("lost", "long responses", times(lambda m: lengths(m) <= 35), PLAIN),
    ("lost", "one micro-batch", times(lambda m: m.number != 1), PLAIN),
    ("lost", "a rank", times(lambda m: m.rank == 0), RANKS),
    ("lost", "a narrower clip", put(bounds=(0.9, 1.1)), LATER),
    ("shifted", "advantages and mask one back", rolled("advantages", "mask", by=-1), PLAIN),
    ("shifted", "advantages one on", rolled("advantages"), BY_TOKEN),
    ("shifted", "old log-probabilities one on", rolled("old"), PLAIN),
    ("shifted", "importance weights one on", rolled("weights"), WEIGHTED),
    ("swapped", "advantages in any order", other_rows(SHUFFLED), FLAT),
    ("outside", "a constant in one micro-batch", put(mask=lambda m: m.mask | (m.number == 1),
     term=lambda m: m.term + 1e-3 * m.divisor * m.log_probs * (m.number == 1)), PLAIN),
    ("sign", "the loss is maximised", put(advantages=lambda m: -m.advantages), PLAIN),
    ("sign", "the size alone", put(advantages=lambda m: m.advantages.abs()), PLAIN),
    ("sign", "one response is reversed", times(lambda m: 1 - 2.0 * (m.rows[:, None] == 9)), PLAIN),
    ("flattened", "the mean of token advantages",
     put(advantages=lambda m: (m.advantages * m.mask).sum(1, keepdim=True) / lengths(m) * m.mask), BY_TOKEN),
    ("weights", "importance weights twice", put(weights=lambda m: m.weights**2), WEIGHTED),
    ("stale", "the reference's old ones", put(old=lambda m: m.ref), WITH_KL),
    *(("stale", f"old ones of a policy {size} away, and not the batch's",
       put(old=lambda m, size=size: m.old + size * DRIFT[m.rows]), PLAIN) for size in (0.03, 0.1, 0.3)),
    ("stale", "the clip by the ratio, and no ratio", detached, LATER),
    ("swapped", "old ones of the response before, and not the batch's",
     put(old=lambda m: m.batch.old_log_probs_BT.roll(1, 0)[m.rows]), PLAIN),
    ("swapped", "importance weights of the response before",
     put(weights=lambda m: m.batch.weights_BT.roll(1, 0)[m.rows]), WEIGHTED),
    ("weights", "the mean importance weight of the response",
     put(weights=lambda m: (m.weights * m.mask).sum(1, keepdim=True) / lengths(m)), WEIGHTED),
    ("weights", "importance weights of 1 at most", put(weights=lambda m: m.weights.clamp(max=1.0)), WEIGHTED),
    ("extra or scaled", "advantages whitened", put(advantages=whitened), PLAIN),
    ("extra", "the batch's mean is taken off", put(advantages=lambda m: m.advantages - 0.3 * m.mask), PLAIN),
    ("extra or scaled by response", "the group's mean is taken off twice", put(advantages=less_its_groups_mean), PLAIN),
    ("extra", "a KL term that no setting names", put(term=lambda m: 0.05 * (m.log_probs - OTHER[m.rows]) ** 2 / 2), PLAIN),
    ("unclipped", "a wider clip", put(bounds=(0.5, 1.5)), LATER),
    ("extra", "a penalty on log-probabilities", put(term=lambda m: m.term + 0.1 * m.log_probs**2), PLAIN),
    ("extra", "the KL term twice", put(term=lambda m: 2 * m.term), WITH_KL),
    ("extra", "the KL term left out", put(term=0.0), WITH_KL),
    ("unexplained", "a discount of each position", times(lambda m: 0.99 ** torch.arange(T)), PLAIN),
    ("unexplained", "the first ten count half", times(lambda m: 1 - 0.5 * (torch.arange(T) < 10)), PLAIN),
)]  # fmt: skip
TOGETHER = (
    ("4 times", "the last token"),
    ("the loss is maximised", "4 times"),
    ("1161", "the first token"),
    ("in any order", "4 times"),
    ("weights twice", "long responses"),
    ("3245", "4 times"),
    ("torchforge#571", "the first token"),
    ("pytorch#31", "4 times"),
    ("MemGen#33", "4 times"),
    ("the mean of", "4 times"),
    ("rllm#81", "4 times"),
    ("maxtext#4025", "the last token"),
    ("term left out", "the loss is maximised"),
    ("4 times", "the loss is maximised", "the last token"),
    ("3245", "4 times", "the first token"),
)
"""Parts of the names of faults; the first one's settings."""
for parts in TOGETHER:
    several = [next(fault for fault in FAULTS if part in fault.what) for part in parts]
    right = " or ".join(fault.right for fault in several)
    changes = tuple(fault.change for fault in several)
    FAULTS.append(
        Fault(right, f"together: {', '.join(parts)}", changes, several[0].settings)
    )
THREADS = FAULTS[:30]
MADE_UP = FAULTS[30:]


def looped(
    seed: int,
    changes: tuple[Change, ...] = (),
    prepare: Prepare = FAULTS[-1].prepare,
    *,
    dtype: torch.dtype = torch.float32,
    kl: bool = False,
    aggregation: str = LOSS.aggregation,
    **setting,
):
    """The loop's batch, its loss as declared, and what it measured."""
    options = {"ties": bool(seed % 2)} | setting
    loop = receipt_loop.rollout(seed, responses=B, tokens=T, **options)
    # What the loss divides by was counted before the fault.
    counted_BT = loop.batch.mask_BT
    old_BT = loop.batch.old_log_probs_BT.to(dtype).float()
    batch = replace(loop.batch, old_log_probs_BT=old_BT)
    loop = Rollout(batch, loop.policy_UBT.to(dtype), loop.plan)
    loop = prepare(loop, torch.Generator().manual_seed(seed))

    def loss(m):
        responses = len(m.step_rows) / m.batch.ranks
        divisors = {
            "token-mean": counted_BT[m.step_rows].sum() / m.batch.ranks,
            "seq-mean-token-sum": responses,
            "seq-mean-token-mean": responses * lengths(m),
            "seq-mean-token-sum-norm": responses * T,
        }
        gap = m.ref - m.log_probs
        # The estimator k3.
        term = 0.1 * kl * (gap.exp() - gap - 1)
        m = replace(m, divisor=divisors[aggregation], term=term)
        for change in changes:
            m = change(m)
        return ppo(m)

    batch = loop.batch
    declared = replace(LOSS, aggregation=aggregation)
    if kl:
        declared = replace(declared, kl="k3", kl_coef=0.1)
    else:
        batch = replace(batch, ref_log_probs_BT=None)
    return batch, declared, train(loop, loss)


def cells(
    faults: list[Fault], stride: int = 1
) -> Iterator[tuple[Fault, list[str], Receipt]]:
    """Faults in all of their settings, or one in ``stride``, with the names that the receipt says; made-up ones where the
    gradients are not a clean loop's."""
    all_cells = [
        (fault, seed, setting)
        for fault in faults
        for seed, setting in enumerate(fault.settings)
    ]
    for fault, seed, setting in all_cells[::stride]:
        changes = fault.change if isinstance(fault.change, tuple) else (fault.change,)
        batch, declared, pieces = looped(seed, changes, fault.prepare, **setting)
        # A made-up fault may change nothing, such as a clip that takes no token.
        faulty, clean = (
            torch.cat([piece.gradient_bT for piece in pieces])
            for pieces in (pieces, looped(seed, **setting)[2])
        )
        if fault in MADE_UP and (faulty - clean).abs().max() <= 1e-5 * clean.abs().max():
            continue
        receipt = check(batch, declared, pieces)
        # A note is the right answer to rounding alone.
        is_note = fault.right == "rounded"
        names = [
            finding.name for finding in receipt.findings if finding.mismatch or is_note
        ]
        yield fault, names, receipt


def misnamed(results: Sequence[tuple[Fault, list[str], Receipt]]) -> list[str]:
    """Those whose first line has no right name."""
    return [
        f"{fault.what}: {names}"
        for fault, names, _ in results
        if not set(names[:1]) & set(fault.right.split(" or "))
    ]


def quiet(count: int) -> Iterator[tuple[dict[str, Any], Receipt]]:
    """Clean loops: ``count`` settings drawn at random, a quarter of them in bf16."""
    choices: dict[str, Sequence[Any]] = {
        "ranks": (1, 2),
        "updates": (1, 2),
        "epochs": (1, 1, 3),
        "weights": (True, False),
        "kl": (True, False),
        "token_advantages": (True, False),
        "aggregation": (
            "token-mean",
            "seq-mean-token-mean",
            "seq-mean-token-sum",
            "seq-mean-token-sum-norm",
        ),
    }
    for seed in range(count):
        draw = torch.Generator().manual_seed(seed)
        setting = {
            name: values[int(torch.randint(len(values), (), generator=draw))]
            for name, values in choices.items()
        }
        # One in four.
        dtype = torch.bfloat16 if seed % 4 == 0 else torch.float32
        yield setting, check(*looped(seed, dtype=dtype, **setting))


if __name__ == "__main__":
    for faults in (THREADS, MADE_UP):
        results = list(cells(faults))
        print(
            *(f"{fault.what}: {', '.join(names)}" for fault, names, _ in results), sep="\n"
        )
        missed = sum(not names for _, names, _ in results)
        print(f"{len(results)} cells, {missed} missed, with another first line:")
        print(*misnamed(results), sep="\n")
    alarms = [setting for setting, receipt in quiet(400) if not receipt.ok]
    print("400 clean loops, alarms:", alarms)
