"""A plain loop for the receipt's tests: log-probabilities are the parameters, so gradients are those of the loss alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grail_advantage.receipt import Batch, Loss, Piece, Receipt, check

TOKEN_MEAN = Loss("ppo", "clip", "token-mean", options={"low": 0.2, "high": 0.2})
Step = list[tuple[int, Tensor]]
"""The micro-batches of an optimiser step: rank and responses."""


@dataclass(frozen=True)
class MicroBatch:
    """What a loss gets, (b, T); a fault changes it."""

    batch: Batch
    step: Step
    step_rows: Tensor  # all responses of the optimiser step
    rows: Tensor
    log_probs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor
    ref: Tensor
    count: int  # micro-batches of the step on this rank
    rank: int
    number: int  # among the step's micro-batches
    update: int
    divisor: Any  # of the sum over tokens, a number or (b, 1): the step's tokens for the mean over ranks
    times: Any = 1.0
    term: Any = 0.0  # added to the loss of each token
    bounds: tuple[float, float] = (0.8, 1.2)


@dataclass
class Rollout:
    """A rollout batch, and of each update the policy's log-probabilities and the micro-batches."""

    batch: Batch
    policy_UBT: Tensor
    plan: list[Step]


def rollout(
    seed: int,
    *,
    ranks: int = 1,
    updates: int = 1,
    epochs: int = 1,
    token_advantages: bool = True,
    weights: bool = False,
    even: bool = False,
    drift: float = 0.3,
    responses: int = 8,
    tokens: int = 12,
    ties: bool = False,
) -> Rollout:
    """Responses of 2 to 12 tokens with tool tokens between them, some without an advantage.

    The policy moves after the first update, by log-ratios of deviation ``drift``. ``even``: micro-batches of two responses,
    otherwise of one to four; ``token_advantages``: of each token, otherwise one a response; ``ties``: of +1 and -1 alone.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (responses, tokens)
    lengths = torch.randint(2, tokens + 1, (responses, 1), generator=generator)
    # One response is as long as any may be.
    lengths[0] = tokens
    place = torch.arange(tokens)
    # The first token is never a tool's.
    is_tool = (torch.rand(shape, generator=generator) < 0.3) & (place > 0)
    mask = (place < lengths) & ~is_tool
    advantages = torch.randn(responses, 1, generator=generator).expand(shape)
    if ties:
        advantages = advantages.sign()
    if token_advantages:
        advantages = advantages * torch.rand(shape, generator=generator).mul(2)
    advantages = torch.where(mask, advantages, 0.0)
    # One has no advantage.
    advantages[responses // 2] = 0.0
    old = -3 * torch.rand(shape, generator=generator) - 0.01
    moved = drift * torch.randn(updates * epochs, *shape, generator=generator)
    policy = (old + moved).clamp(max=-0.01)
    # The first update is on policy.
    policy[0] = old
    plan = []
    for _ in range(epochs):
        for rows in torch.randperm(responses, generator=generator).chunk(updates):
            step: Step = []
            for rank, share in enumerate(rows.chunk(ranks)):
                while len(share):
                    size = 2 if even else int(torch.randint(1, 5, (), generator=generator))
                    step.append((rank, share[:size]))
                    share = share[size:]
            plan.append(step)
    weights_BT = torch.rand(shape, generator=generator) + 0.5 if weights else None
    ref = (old + 0.2 * torch.randn(shape, generator=generator)).clamp(max=0.0)
    batch = Batch(
        advantages,
        mask,
        old,
        weights_BT,
        ref,
        updates=updates,
        epochs=epochs,
        ranks=ranks,
    )
    return Rollout(batch, policy, plan)


def changed(m: MicroBatch, **changes) -> MicroBatch:
    """With other fields: values, or functions of the micro-batch."""
    values = {
        name: change(m) if callable(change) else change for name, change in changes.items()
    }
    return replace(m, **values)


def ppo(micro: MicroBatch, **changes) -> Tensor:
    """PPO's clipped loss of a micro-batch, by its formula, with changed fields."""
    m = changed(micro, **changes)
    ratio = (m.log_probs - m.old).exp()
    objective = torch.minimum(ratio * m.advantages, ratio.clamp(*m.bounds) * m.advantages)
    return ((m.term - objective * m.weights * m.times) * m.mask / m.divisor).sum()


def train(loop: Rollout, loss: Callable[[MicroBatch], Tensor] = ppo) -> list[Piece]:
    """The pieces of an independent measurement: log-probabilities are leaves, whose ``grad`` is read."""
    batch = loop.batch
    weights_BT = batch.weights_BT
    if weights_BT is None:
        weights_BT = torch.ones_like(batch.advantages_BT)
    # In the order of the fields.
    columns = (
        batch.old_log_probs_BT,
        batch.advantages_BT,
        batch.mask_BT,
        weights_BT,
        batch.ref_log_probs_BT,
    )
    pieces = []
    for update, step in enumerate(loop.plan):
        step_rows = torch.cat([rows for _, rows in step])
        divisor = batch.mask_BT[step_rows].sum() / batch.ranks
        for number, (rank, rows) in enumerate(step):
            log_probs = loop.policy_UBT[update, rows].clone().requires_grad_()
            count = sum(owner == rank for owner, _ in step)
            m = MicroBatch(
                batch,
                step,
                step_rows,
                rows,
                log_probs,
                *(column[rows] for column in columns),
                count,
                rank,
                number,
                update,
                divisor,
            )
            # A loss that reads no log-probability gives 0.
            (loss(m) + 0 * log_probs.sum()).backward()
            pieces.append(Piece(rows, log_probs.detach(), log_probs.grad, update, rank))
    return pieces


def totals_of(loop: Rollout) -> Tensor:
    """Tokens that may train, and responses, of each update; (U, 2)."""
    steps = [torch.cat([rows for _, rows in step]) for step in loop.plan]
    return torch.tensor(
        [[int(loop.batch.mask_BT[rows].sum()), len(rows)] for rows in steps]
    )


def receipt_of(loop: Rollout, declared: Loss = TOKEN_MEAN, **changes) -> Receipt:
    """Of a loop with PPO's loss and changed fields, held against declared settings."""
    return check(loop.batch, declared, train(loop, lambda micro: ppo(micro, **changes)))


def names(receipt: Receipt) -> list[str]:
    """Of the mismatches."""
    return [finding.name for finding in receipt.findings if finding.mismatch]
