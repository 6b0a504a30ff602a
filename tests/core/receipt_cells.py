"""Made-up faults, one to three at a time, in settings of ranks, updates, epochs, weights and a KL term; ``python -m
tests.core.receipt_cells`` prints how often the receipt's first line is right. A fault changes fields of each micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from grail_advantage.receipt import Loss, Receipt, check
from tests.core import receipt_loop
from tests.core.receipt_loop import CLIP, MicroBatch, Rollout, names, ppo, train

B, T = 32, 60
Change = Callable[[Rollout, MicroBatch], MicroBatch]
LOSS = Loss("ppo", "clip", "token-mean", norm=float(T), options=CLIP)


def put(**fields: Callable[[Rollout, MicroBatch], Any]) -> Change:
    return lambda given, m: replace(m, **{name: change(given, m) for name, change in fields.items()})


def times(factor: Callable[[Rollout, MicroBatch], Any]) -> Change:
    return put(times=lambda g, m: m.times * factor(g, m))


def masked(chosen: Callable[[MicroBatch], torch.Tensor]) -> Change:
    """Tokens that lose their gradient; they stay in the divisor."""
    return times(lambda g, m: (~chosen(m)).float())


def rolled(*columns: str, by: int = 1) -> Change:
    inside = (torch.arange(T) > 0) if by > 0 else (torch.arange(T) < T - 1)
    return put(**{k: lambda g, m, k=k: torch.where(inside, getattr(m, k).roll(by, 1), 0) for k in columns})


def other_rows(rows: torch.Tensor) -> Change:
    """Advantages of other responses, one for each of their places."""
    return put(advantages=lambda g, m: torch.where(m.mask, g.batch.advantages_BT[:, :1][rows[m.rows]], 0.0))


def lengths(m: MicroBatch) -> torch.Tensor:
    return m.mask.sum(1, keepdim=True)


def of_rank(given: Rollout, m: MicroBatch) -> torch.Tensor:
    return given.batch.mask_BT[torch.cat([rows for rank, rows in given.plan[m.update] if rank == m.rank])].sum()


def mean(g: Rollout, m: MicroBatch) -> torch.Tensor:
    return torch.where(m.mask, (m.advantages * m.mask).sum(1, keepdim=True) / lengths(m), 0.0)


DOUBLE, REVERSED = times(lambda g, m: 2.0), put(advantages=lambda g, m: -m.advantages)
FIRST_LOST, LAST_LOST = masked(lambda m: m.mask.cumsum(1) == 1), masked(lambda m: m.mask.cumsum(1) == lengths(m))
LONG_LOST = masked(lambda m: (lengths(m) > 35).expand_as(m.mask))
OPEN, ITSELF = put(bounds=lambda g, m: (0.0, torch.inf)), put(old=lambda g, m: m.log_probs.detach())
BY_MICRO = put(divisor=lambda g, m: m.mask.sum() * m.count)
BY_RANK = put(divisor=of_rank)
BY_RESPONSE = put(divisor=lambda g, m: lengths(m) * len(m.update_rows) / g.batch.ranks)
TOOLS = put(mask=lambda g, m: torch.ones_like(m.mask), advantages=lambda g, m: g.batch.advantages_BT[m.rows, :1])
ANY_ORDER = other_rows(torch.randperm(B, generator=torch.Generator().manual_seed(0)))
KL = {times: put(term=lambda g, m, times=times: times * m.term) for times in (-1, 0, 2)}
WEIGHTS_OUT, WEIGHTS_TWICE = put(weights=lambda g, m: 1.0), put(weights=lambda g, m: m.weights**2)
SUPERVISED = put(term=lambda g, m: m.term - 0.1 * m.log_probs)

PLAIN = ({"token_advantages": False}, {"ranks": 2, "updates": 2, "epochs": 2, "token_advantages": False}, {"epochs": 2})
LATER = ({"epochs": 3}, {"ranks": 2, "updates": 2, "epochs": 2, "token_advantages": False})
RANKS = ({"ranks": 2, "token_advantages": False}, {"ranks": 2, "epochs": 2})
WEIGHTED = ({"weights": True}, {"ranks": 2, "epochs": 2, "weights": True, "token_advantages": False})
BY_TOKEN = ({}, {"ranks": 2, "updates": 2, "epochs": 2})
WITH_KL = ({"kl": True}, {"epochs": 2, "kl": True, "token_advantages": False})
FLAT = PLAIN[:2]

FAULTS: tuple[tuple[str, str, Change | tuple[Change, ...], tuple[dict[str, Any], ...]], ...] = (
    ("4 times", "scaled", times(lambda g, m: 4.0), PLAIN),
    ("the loss scale stays", "scaled", times(lambda g, m: 65536.0), PLAIN),
    ("1 % too little", "scaled", times(lambda g, m: 0.99), PLAIN),
    ("a mean over ranks", "scaled", times(lambda g, m: 0.5), RANKS),
    ("padding in the divisor", "scaled", put(divisor=lambda g, m: m.mask.shape[1] * len(m.update_rows)), PLAIN),
    ("the second update counts half", "scaled", times(lambda g, m: 0.5 if m.update % 2 else 1.0), LATER),
    ("each micro-batch by its tokens", "scaled by micro-batch", BY_MICRO, PLAIN),
    ("each rank by its tokens", "scaled by micro-batch", BY_RANK, RANKS),
    ("one micro-batch twice", "scaled by micro-batch", times(lambda g, m: 2.0 if m.number == 1 else 1.0), PLAIN),
    ("mean of means", "scaled by response", BY_RESPONSE, PLAIN),
    ("one response three times", "scaled by response", times(lambda g, m: 1 + 2.0 * (m.rows[:, None] == 9)), PLAIN),
    ("the last token", "lost", LAST_LOST, PLAIN),
    ("the first token", "lost", FIRST_LOST, PLAIN),
    ("long responses", "lost", LONG_LOST, PLAIN),
    ("negative advantages", "lost", masked(lambda m: m.advantages < 0), PLAIN),
    ("all after token 30", "lost", masked(lambda m: (torch.arange(T) >= 30).expand_as(m.mask)), PLAIN),
    ("unlikely tokens", "lost", masked(lambda m: m.old < -2), PLAIN),
    ("one micro-batch", "lost", times(lambda g, m: float(m.number != 1)), PLAIN),
    ("a rank", "lost", times(lambda g, m: float(m.rank == 0)), RANKS),
    ("a narrower clip", "lost", put(bounds=lambda g, m: (0.9, 1.1)), LATER),
    ("tool tokens", "outside", TOOLS, FLAT),
    ("advantages and mask one on", "shifted", rolled("advantages", "mask"), PLAIN),
    ("advantages and mask one back", "shifted", rolled("advantages", "mask", by=-1), PLAIN),
    ("advantages one on", "shifted", rolled("advantages"), BY_TOKEN),
    ("old log-probabilities one on", "shifted", rolled("old"), PLAIN),
    ("importance weights one on", "shifted", rolled("weights"), WEIGHTED),
    ("advantages of the response before", "swapped", other_rows(torch.arange(B).roll(1)), FLAT),
    ("advantages in any order", "swapped", ANY_ORDER, FLAT),
    ("the loss is maximised", "sign", REVERSED, PLAIN),
    ("one micro-batch is maximised", "sign", times(lambda g, m: -1.0 if m.number == 1 else 1.0), PLAIN),
    ("the size alone", "sign", put(advantages=lambda g, m: m.advantages.abs()), PLAIN),
    ("one response is reversed", "sign", times(lambda g, m: 1 - 2.0 * (m.rows[:, None] == 9)), PLAIN),
    ("the mean of token advantages", "flattened", put(advantages=mean), BY_TOKEN),
    ("importance weights left out", "weights", WEIGHTS_OUT, WEIGHTED),
    ("importance weights twice", "weights", WEIGHTS_TWICE, WEIGHTED),
    ("importance weights inverted", "weights", put(weights=lambda g, m: 1 / m.weights), WEIGHTED),
    ("the ratio of the policy to itself", "stale", ITSELF, LATER),
    ("the reference's old ones", "stale", put(old=lambda g, m: m.ref), WITH_KL),
    ("no clip", "unclipped", OPEN, LATER),
    ("a wider clip", "unclipped", put(bounds=lambda g, m: (0.5, 1.5)), LATER),
    ("a supervised loss", "extra", SUPERVISED, PLAIN),
    ("a penalty on log-probabilities", "extra", put(term=lambda g, m: m.term + 0.1 * m.log_probs**2), PLAIN),
    ("the KL term twice", "extra", KL[2], WITH_KL),
    ("the KL term left out", "extra", KL[0], WITH_KL),
    ("the KL term maximised", "sign", KL[-1], WITH_KL),
    ("a discount of each position", "unexplained", times(lambda g, m: 0.99 ** torch.arange(T)), PLAIN),
    ("the first ten count half", "unexplained", times(lambda g, m: 1 - 0.5 * (torch.arange(T) < 10)), PLAIN),
    ("together", "scaled + lost", (times(lambda g, m: 4.0), LAST_LOST), PLAIN),
    ("together", "sign + scaled", (REVERSED, DOUBLE), PLAIN),
    ("together", "scaled by micro-batch + lost", (BY_MICRO, FIRST_LOST), PLAIN),
    ("together", "swapped + scaled", (ANY_ORDER, DOUBLE), FLAT),
    ("together", "weights + lost", (WEIGHTS_TWICE, LONG_LOST), WEIGHTED),
    ("together", "weights + scaled", (WEIGHTS_OUT, DOUBLE), WEIGHTED),
    ("together", "stale + lost", (ITSELF, FIRST_LOST), LATER),
    ("together", "shifted + scaled", (rolled("advantages", "mask"), DOUBLE), PLAIN),
    ("together", "outside + scaled", (TOOLS, DOUBLE), FLAT),
    ("together", "flattened + scaled", (put(advantages=mean), DOUBLE), BY_TOKEN),
    ("together", "unclipped + scaled", (OPEN, DOUBLE), LATER),
    ("together", "scaled by response + lost", (BY_RESPONSE, LAST_LOST), PLAIN),
    ("together", "sign + extra", (REVERSED, KL[0]), WITH_KL),
    ("together", "scaled + sign + lost", (DOUBLE, REVERSED, LAST_LOST), PLAIN),
    ("together", "scaled + weights + lost", (DOUBLE, WEIGHTS_OUT, FIRST_LOST), WEIGHTED),
)


class Cell(NamedTuple):
    """Faults in a setting, the names that are right, those that the receipt says, and the receipt."""

    what: str
    right: list[str]
    said: list[str]
    receipt: Receipt


def looped(seed: int, changes: tuple[Change, ...], dtype: torch.dtype = torch.float32, **setting: Any) -> Any:
    """The loop's rollout, its loss as declared, and what it measured."""
    with_kl = setting.pop("kl", False)
    declared = replace(LOSS, aggregation=setting.pop("aggregation", LOSS.aggregation))
    given = receipt_loop.rollout(seed, responses=B, tokens=T, ties=bool(seed % 2), **setting)
    batch = given.batch if with_kl else replace(given.batch, ref_log_probs_BT=None)
    old_BT = given.batch.old_log_probs_BT.to(dtype)
    given = Rollout(replace(given.batch, old_log_probs_BT=old_BT.float()), given.policy_UBT.to(dtype), given.plan)

    def loss(m: MicroBatch) -> torch.Tensor:
        rows, lengths_b1 = m.update_rows, lengths(m)
        divisor = {
            "token-mean": given.batch.mask_BT[rows].sum(),
            "seq-mean-token-sum": len(rows),
            "seq-mean-token-mean": len(rows) * lengths_b1,
            "seq-mean-token-sum-norm": len(rows) * T,
        }[declared.aggregation] / given.batch.ranks
        gap = m.ref - m.log_probs
        m = replace(m, divisor=divisor, term=0.1 * (gap.exp() - gap - 1) if with_kl else torch.zeros(()))
        for change in changes:
            m = change(given, m)
        return ppo(m, None)

    kl_term = {"kl": "k3", "kl_coef": 0.1} if with_kl else {}
    return replace(batch, old_log_probs_BT=old_BT.float()), replace(declared, **kl_term), train(given, loss)


def cells(every: int = 1) -> list[Cell]:
    """All faults in all of their settings, or each ``every``-th one, where the gradients differ from a clean loop's."""
    result = []
    flat = [(*fault[:3], *each) for fault in FAULTS for each in enumerate(fault[3])]
    for what, right, change, seed, setting in flat[::every]:
        batch, declared, pieces = looped(seed, change if isinstance(change, tuple) else (change,), **setting)
        after, before = (torch.cat([p.gradient_bT for p in own]) for own in (pieces, looped(seed, (), **setting)[2]))
        if ((after - before).abs() > 1e-5 * before.abs().max()).any():
            receipt = check(batch, declared, pieces)
            result.append(Cell(f"{what} {setting}", right.split(" + "), names(receipt.findings), receipt))
    return result


def quiet(count: int) -> list[tuple[dict[str, Any], Receipt]]:
    """Clean loops: ``count`` settings drawn at random, a quarter of them in bf16."""
    result = []
    for seed in range(count):
        draw = torch.Generator().manual_seed(seed)
        choices: dict[str, tuple[Any, ...]] = {"ranks": (1, 2), "updates": (1, 2), "epochs": (1, 1, 3)}
        choices |= {name: (True, False) for name in ("weights", "kl", "token_advantages")}
        choices["aggregation"] = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
        setting = {name: of[int(torch.randint(len(of), (), generator=draw))] for name, of in choices.items()}
        dtype = torch.bfloat16 if seed % 4 == 0 else torch.float32
        result.append((setting | {"dtype": dtype}, check(*looped(seed, (), dtype, **setting))))
    return result


if __name__ == "__main__":
    known, alarms = cells(), [setting for setting, receipt in quiet(400) if not receipt.ok]
    wrong = [each for each in known if not set(each.said[:1]) & set(each.right)]
    print(*(f"{each.what} {each.right} -> {each.said}" for each in wrong), sep="\n")
    print(f"{len(known)} cells: {len(wrong)} first lines wrong, {sum(not each.said for each in known)} missed")
    print(f"400 clean loops: {len(alarms)} alarms", *alarms)
