"""A plain loop for the receipt's tests: log-probabilities are the parameters, so gradients are those of the loss alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from grail_advantage.receipt import Batch, Loss, Piece, Receipt, check

RESPONSES = 8
TOKENS = 12
CLIP = {"low": 0.2, "high": 0.2}
TOKEN_MEAN = Loss("ppo", "clip", "token-mean", options=CLIP)


@dataclass(frozen=True)
class MicroBatch:
    """What a loss gets, (b, T); a fault changes it."""

    rows: torch.Tensor
    log_probs: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    weights: torch.Tensor
    ref: torch.Tensor
    update_rows: torch.Tensor
    """All responses of the optimiser step."""
    count: int
    """Micro-batches of the step on this rank."""
    rank: int = 0
    number: int = 0
    """Among the step's micro-batches."""
    update: int = 0
    divisor: Any = 1.0
    """Of the sum over tokens; a number or (b, 1). As given, the step's tokens for the mean over ranks."""
    times: Any = 1.0
    term: Any = 0.0
    """Added to the loss of each token."""
    bounds: tuple[float, float] = (0.8, 1.2)


@dataclass
class Rollout:
    """A rollout batch, the policy's log-probabilities at each update, and which rank's micro-batches take what."""

    batch: Batch
    policy_UBT: torch.Tensor
    plan: list[list[tuple[int, torch.Tensor]]] = field(default_factory=list)
    """Of each update: rank and responses."""


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
    responses: int = RESPONSES,
    tokens: int = TOKENS,
    ties: bool = False,
) -> Rollout:
    """Responses of 2 to 12 tokens with tool tokens between them, some without an advantage.

    The policy moves after the first update, by log-ratios of deviation ``drift``. ``even``: micro-batches of two responses,
    otherwise of one to four; ``token_advantages``: of each token, otherwise one a response; ``ties``: of +1 and -1 alone.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (responses, tokens)
    lengths = torch.randint(2, tokens + 1, (responses,), generator=generator)
    lengths[0] = tokens
    mask = torch.arange(tokens) < lengths.unsqueeze(1)
    mask &= ~((torch.rand(shape, generator=generator) < 0.3) & (torch.arange(tokens) > 0))
    advantages = torch.randn(responses, 1, generator=generator).expand(shape)
    advantages = advantages.sign() if ties else advantages
    if token_advantages:
        advantages = advantages * torch.rand(shape, generator=generator).mul(2)
    advantages = torch.where(mask, advantages, 0.0)
    advantages[responses // 2] = 0.0
    old = -3 * torch.rand(shape, generator=generator) - 0.01
    policy = (old + drift * torch.randn(updates * epochs, *shape, generator=generator)).clamp(
        max=-0.01
    )
    policy[0] = old
    plan = []
    for _ in range(epochs):
        for rows in torch.randperm(responses, generator=generator).chunk(updates):
            step = []
            for rank, share in enumerate(rows.chunk(ranks)):
                sizes = [2] * (len(share) // 2) if even else []
                while sum(sizes) < len(share):
                    size = int(torch.randint(1, 5, (), generator=generator))
                    sizes.append(min(size, len(share) - sum(sizes)))
                step += [(rank, piece) for piece in share.split(sizes)]
            plan.append(step)
    weights_BT = torch.rand(shape, generator=generator) + 0.5 if weights else None
    ref = (old + 0.2 * torch.randn(shape, generator=generator)).clamp(max=0.0)
    return Rollout(
        Batch(advantages, mask, old, weights_BT, ref, None, updates, epochs, ranks), policy, plan
    )


def ppo(micro: MicroBatch, **changed: Any) -> torch.Tensor:
    """PPO's clipped loss of a micro-batch, by its formula, with changed fields: values, or functions of the micro-batch."""
    m = replace(micro, **{name: of(micro) if callable(of) else of for name, of in changed.items()})
    ratio = (m.log_probs - m.old).exp()
    objective = torch.minimum(ratio * m.advantages, ratio.clamp(*m.bounds) * m.advantages)
    return ((m.term - objective * m.weights * m.times) * m.mask / m.divisor).sum()


def train(given: Rollout, loss: Callable[[MicroBatch], torch.Tensor] = ppo) -> list[Piece]:
    """The pieces of an independent measurement: log-probabilities are leaves, whose ``grad`` is read."""
    batch = given.batch
    pieces = []
    weights = torch.ones_like(batch.advantages_BT) if batch.weights_BT is None else batch.weights_BT
    columns = (
        batch.old_log_probs_BT,
        batch.advantages_BT,
        batch.mask_BT,
        weights,
        batch.ref_log_probs_BT,
    )
    for update, step in enumerate(given.plan):
        of_step = torch.cat([rows for _, rows in step])
        divisor = batch.mask_BT[of_step].sum() / batch.ranks
        for number, (rank, rows) in enumerate(step):
            log_probs = given.policy_UBT[update, rows].clone().requires_grad_()
            own = [column[rows] for column in columns if column is not None]
            count = sum(other == rank for other, _ in step)
            value = loss(
                MicroBatch(rows, log_probs, *own, of_step, count, rank, number, update, divisor)
            )
            if value.requires_grad:
                value.backward()
            gradient = torch.zeros_like(log_probs) if log_probs.grad is None else log_probs.grad
            pieces.append(Piece(rows, log_probs.detach(), gradient, update, rank))
    return pieces


def receipt_of(given: Rollout, declared: Loss = TOKEN_MEAN, **changed: Any) -> Receipt:
    """Of a loop with PPO's loss and changed fields, held against declared settings."""
    return check(given.batch, declared, train(given, lambda micro: ppo(micro, **changed)))


def names(findings: Sequence[Any]) -> list[str]:
    """Of the mismatches."""
    return [finding.name for finding in findings if finding.mismatch]
