"""Faults of real trainers, each injected into a plain loop of 64 responses of up to 200 tokens with advantages of +1 and -1;
``python -m tests.core.receipt_faults`` prints their names. Each thread was read; the injections follow its description."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from grail_advantage.receipt import Loss, Receipt
from tests.core import receipt_loop
from tests.core.receipt_loop import CLIP, TOKEN_MEAN, MicroBatch, Rollout, ppo, receipt_of, tokens_of

B, T = 64, 200
rollout = partial(receipt_loop.rollout, responses=B, tokens=T, ties=True)
plain = partial(rollout, token_advantages=False)
MEAN_OF_MEANS = Loss("grpo", "clip", "seq-mean-token-mean", options=CLIP)
SUM_NORM = Loss("dr_grpo", "clip", "seq-mean-token-sum-norm", norm=float(T), options=CLIP)
FAULTS: list[tuple[str, str, Callable[[int], Receipt]]] = []
"""Names that are right, the thread and the fault, and what runs it."""


def fault(*names: str) -> Callable[[Callable[[int], Receipt]], Callable[[int], Receipt]]:
    return lambda run: FAULTS.append((" or ".join(names), str(run.__doc__), run)) or run


def lengths_of(micro: MicroBatch) -> torch.Tensor:
    """Tokens of each response of the micro-batch, (b, 1)."""
    return micro.mask.sum(dim=1, keepdim=True)


def with_batch(given: Rollout, **columns: Any) -> Rollout:
    return Rollout(replace(given.batch, **columns), given.policy_UBT, given.plan)


def simple(given: Rollout, declared: Loss = TOKEN_MEAN, divisor: Any = tokens_of, **changed: Any) -> Receipt:
    """Of PPO's loss with fields of the micro-batch that are changed by functions of it."""

    def loss(m: MicroBatch) -> torch.Tensor:
        return ppo(m, divisor(given, m), **{k: f(m) if callable(f) else f for k, f in changed.items()})

    return receipt_of(given, loss, declared)


def everything(given: Rollout, micro: MicroBatch) -> torch.Tensor:
    return given.batch.mask_BT.sum()


def own_tokens(given: Rollout, micro: MicroBatch) -> torch.Tensor:
    return micro.mask.sum() * micro.count


def first_of(given: Rollout) -> torch.Tensor:
    """The response's advantage for each of its places, (B, T)."""
    return given.batch.advantages_BT[:, :1].expand(B, T)


@fault("scaled")
def truncated_counted(seed: int) -> Receipt:
    """huggingface/trl#6369: masked truncated responses stay in the denominator"""
    given = plain(seed)
    before, mask = given.batch.mask_BT.sum(), given.batch.mask_BT & (torch.arange(B) != 5).unsqueeze(1)
    return simple(with_batch(given, mask_BT=mask), divisor=lambda given, m: before)


@fault("scaled")
def rejected_counted(seed: int) -> Receipt:
    """THUDM/slime#657: rejected tokens stay in the denominator"""
    given = rollout(seed)
    kept, total = torch.rand(B, T, generator=torch.Generator().manual_seed(seed)) >= 0.4, given.batch.mask_BT.sum()
    given = with_batch(given, mask_BT=given.batch.mask_BT & kept)
    return simple(given, divisor=lambda given, m: total, weights=lambda m: kept[m.rows].float())


@fault("scaled by micro-batch")
def ranks_by_own_tokens(seed: int) -> Receipt:
    """PrimeIntellect-ai/prime-rl#2359: each rank divides by its own tokens"""
    given = plain(seed, ranks=2)
    of_rank = [sum(int(given.batch.mask_BT[rows].sum()) for r, rows in given.plan[0] if r == k) for k in (0, 1)]
    return simple(given, divisor=lambda given, m: of_rank[m.rank])


@fault("swapped")
def last_turns_mask(seed: int) -> Receipt:
    """NovaSky-AI/SkyRL#1492: all turns get the last turn's token advantages"""
    generator = torch.Generator().manual_seed(seed)  # one turn a row, each on its own right-aligned tokens
    mask = torch.arange(T) >= T - torch.randint(5, T, (B, 1), generator=generator)
    scalar = torch.randn(B // 4, 1, generator=generator).sign().repeat_interleave(4, 0)
    of_last = (scalar * mask)[3::4].repeat_interleave(4, 0)
    given = with_batch(plain(seed), advantages_BT=scalar * mask, mask_BT=mask)
    return simple(given, advantages=lambda m: of_last[m.rows])


@fault("extra")
def noise_in_equal_rewards(seed: int) -> Receipt:
    """NVIDIA-NeMo/RL#4158: rounding in equal rewards is divided by its spread"""
    given = plain(seed)
    intended = torch.where(torch.arange(B).unsqueeze(1) < 8, 0.0, given.batch.advantages_BT)
    noise = torch.randn(8, 1, generator=torch.Generator().manual_seed(seed))
    noise = ((noise - noise.mean()) / noise.std()).expand(8, T)
    trained = torch.where(given.batch.mask_BT, torch.cat([noise, intended[8:]]), 0.0)
    return simple(with_batch(given, advantages_BT=intended), advantages=lambda m: trained[m.rows])


@fault("swapped")
def resampled_rows(seed: int) -> Receipt:
    """verl-project/verl#7957: advantages go back under keys of before resampling"""
    given, order = plain(seed), torch.arange(B)
    order[8:16], order[40:56] = order[8:16].roll(1), order[40:56].roll(3)
    return simple(given, advantages=lambda m: first_of(given)[order[m.rows]])


@fault("swapped")
def buffered_log_probs(seed: int) -> Receipt:
    """nishide-dev/unturtle#40: old log-probabilities cut along another dimension"""
    given = plain(seed)
    return simple(with_batch(given, old_log_probs_BT=given.batch.old_log_probs_BT.roll(2, 0)))


@fault("shifted")
def labels_one_on(seed: int) -> Receipt:
    """PrimeIntellect-ai/prime-rl#1525: the next token's log-probabilities, the rest unshifted"""
    given = rollout(seed)
    return simple(Rollout(given.batch, given.policy_UBT.roll(-1, 2), given.plan))


@fault("shifted")
def actions_one_on(seed: int) -> Receipt:
    """lucidrains/PaLM-rlhf-pytorch#31: action log-probabilities one position off"""
    moved = {name: lambda m, name=name: roll_in(getattr(m, name)) for name in ("advantages", "mask")}
    return simple(plain(seed), **moved)


def roll_in(values_bT: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(T) > 0, values_bT.roll(1, 1), 0)


@fault("outside")
def filled_with_end_tokens(seed: int) -> Receipt:
    """bingreeky/MemGen#33: filling after the end counts as response"""
    given = plain(seed)
    return simple(given, advantages=lambda m: first_of(given)[m.rows], mask=lambda m: torch.ones_like(m.mask))


@fault("outside")
def every_turn_trains(seed: int) -> Receipt:
    """THUDM/slime#1563: user and tool turns are in the loss mask"""
    given = plain(seed)
    whole = torch.arange(T) <= torch.where(given.batch.mask_BT, torch.arange(T), 0).amax(1, True)
    changed = {"advantages": lambda m: first_of(given)[m.rows], "mask": lambda m: whole[m.rows]}
    return simple(given, divisor=lambda given, m: whole.sum(), **changed)


def vocabulary(seed: int) -> tuple[Rollout, torch.Tensor]:
    """A rollout whose log-probabilities come from logits at temperature 0.6, and those of temperature 1."""
    given, logits = rollout(seed), torch.randn(B, T, 20, generator=torch.Generator().manual_seed(seed)) * 2
    policy = (logits / 0.6).log_softmax(-1)[..., 0]
    given = Rollout(replace(given.batch, old_log_probs_BT=policy), policy.expand(given.policy_UBT.shape), given.plan)
    return given, logits.log_softmax(-1)[..., 0]


@fault("stale")
def engine_without_temperature(seed: int) -> Receipt:
    """huggingface/trl#4159: engine's log-probabilities without temperature"""
    given, other = vocabulary(seed)
    return simple(with_batch(given, old_log_probs_BT=other))


@fault("stale")
def scaled_log_probs(seed: int) -> Receipt:
    """PrimeIntellect-ai/prime-rl#697: log-probabilities divided by the temperature"""
    given, other = vocabulary(seed)
    return simple(with_batch(given, old_log_probs_BT=other / 0.6))


@fault("stale")
def trainer_without_temperature(seed: int) -> Receipt:
    """NVIDIA-NeMo/RL#316: trainer's log-probabilities without temperature"""
    given, other = vocabulary(seed)
    return simple(Rollout(given.batch, other[None], given.plan))


@fault("not finite")
def masked_nan(seed: int) -> Receipt:
    """OpenRLHF/OpenRLHF#1240: NaN at a masked token"""
    given = rollout(seed)
    return simple(
        with_batch(given, old_log_probs_BT=given.batch.old_log_probs_BT.where(given.batch.mask_BT, torch.nan))
    )


@fault("sign")
def kl_maximised(seed: int) -> Receipt:
    """qiancheng0/ToolRL#52: the KL term is maximised"""
    declared = replace(TOKEN_MEAN, kl="k3", kl_coef=0.1)
    return simple(rollout(seed), declared, term=lambda m: -0.1 * ((m.ref - m.log_probs).exp() + m.log_probs))


@fault("rounded")
def engine_rounding(seed: int) -> Receipt:
    """verl-project/verl#6280: bf16 ratios differ from 1 with the micro-batch size"""
    given, noise = rollout(seed), torch.randn(B, T, generator=torch.Generator().manual_seed(seed))
    return simple(with_batch(given, old_log_probs_BT=given.batch.old_log_probs_BT + 0.008 * noise))


def replanned(seed: int, *rows: torch.Tensor) -> Receipt:
    """With other micro-batches in one step."""
    given = rollout(seed)
    return simple(Rollout(given.batch, given.policy_UBT, [[(0, piece) for piece in rows]]), divisor=everything)


@fault("repeated")
def padded_with_copies(seed: int) -> Receipt:
    """verl-project/verl-omni#602: a batch is filled with copies of its responses"""
    rows = torch.arange(B)
    return replanned(seed, *rows.split(6), rows[:2], rows[2:8])


@fault("missing", "repeated")
def uneven_sampler(seed: int) -> Receipt:
    """huggingface/trl#4531: samples come several times or never"""
    return replanned(seed, *torch.randint(B, (B,), generator=torch.Generator().manual_seed(seed)).split(8))


ROWS: tuple[tuple[str, str, Callable[[int], Receipt]], ...] = (
    ("scaled", "huggingface/trl#6024: `dapo` divides by the tokens of several updates",
     lambda seed: simple(plain(seed, updates=2, drift=0.0), divisor=everything)),
    ("scaled", "modelscope/ms-swift#10117: `dapo` is divided by the accumulation steps too",
     lambda seed: simple(rollout(seed, even=True), times=lambda m: 1 / m.count)),
    ("scaled", "NVIDIA-NeMo/RL#84: means of micro-batches are summed",
     lambda seed: simple(plain(seed, even=True), MEAN_OF_MEANS, lambda given, m: lengths_of(m) * len(m.rows))),
    ("scaled", "THUDM/slime#919: the sum over tokens is not divided",
     lambda seed: simple(plain(seed), divisor=lambda given, m: 1)),
    ("scaled", "verl-project/verl#3741: Dr. GRPO sums over responses",
     lambda seed: simple(rollout(seed), SUM_NORM, lambda given, m: float(T))),
    ("scaled by micro-batch", "allenai/open-instruct#1161: each micro-batch divides by its own tokens",
     lambda seed: simple(plain(seed), divisor=own_tokens)),
    ("scaled by response", "AI-Hypercomputer/maxtext#4025: mean over responses, not tokens",
     lambda seed: simple(plain(seed), divisor=lambda given, m: lengths_of(m) * len(m.update_rows))),
    ("scaled by response", "google/tunix#1662: a pack of responses counts as one",
     lambda seed: simple(rollout(seed, even=True), MEAN_OF_MEANS, own_tokens)),
    ("unclipped", "rllm-org/rllm#81: the clipped objective is not used",
     lambda seed: simple(rollout(seed, epochs=2), clip=False)),
    ("stale", "meta-pytorch/torchforge#571: the ratio is that of the policy to itself",
     lambda seed: simple(rollout(seed, epochs=2), old=lambda m: m.log_probs.detach())),
    ("weights", "verl-project/verl#3245: importance weights missing in most losses",
     lambda seed: simple(rollout(seed, weights=True), weights=1.0)),
)  # fmt: skip
FAULTS += ROWS


def named(place: int, seed: int) -> list[str]:
    """Names of the lines of the table, the first one first; notes too where the fault is one."""
    right, _, run = FAULTS[place]
    return [each.name for each in run(seed).findings if each.mismatch or right == "rounded"]


if __name__ == "__main__":
    for number, (_, said, _) in enumerate(FAULTS):
        print(f"{said}: {', '.join(dict.fromkeys(named(number, 1)))}")
