"""Faults of real trainers, each injected into a plain loop of 64 responses of up to 200 tokens with advantages of +1 and -1;
``python -m tests.core.receipt_faults`` prints the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from grail_advantage.receipt import Loss, Receipt, check
from tests.core import receipt_loop
from tests.core.receipt_loop import MicroBatch, Rollout, names, train

B, T = 64, 200
rollout = partial(receipt_loop.rollout, responses=B, tokens=T, ties=True)
CLIP = {"low": 0.2, "high": 0.2}
TOKEN_MEAN = Loss("ppo", "clip", "token-mean", options=CLIP)


def ppo(micro: MicroBatch, divisor: Any, *, clip: bool = True, **changed: torch.Tensor) -> torch.Tensor:
    """PPO's clipped loss of a micro-batch, by its formula.

    Args:
        micro: the micro-batch.
        divisor: of the sum over tokens; a number or (b, 1).
        clip: take the smaller of the two objectives.
        **changed: tensors instead of the micro-batch's.
    """
    micro = replace(micro, **changed)
    ratio = (micro.log_probs - micro.old).exp()
    objective = ratio * micro.advantages
    if clip:
        objective = torch.minimum(objective, ratio.clamp(0.8, 1.2) * micro.advantages)
    return -(objective * micro.weights * micro.mask / divisor).sum()


def tokens_of(given: Rollout, micro: MicroBatch) -> torch.Tensor:
    """Tokens of the whole optimiser step."""
    return given.batch.mask_BT[micro.update_rows].sum()


def lengths_of(micro: MicroBatch) -> torch.Tensor:
    """Tokens of each response of the micro-batch, (b, 1)."""
    return micro.mask.sum(dim=1, keepdim=True)


def receipt_of(
    given: Rollout, loss: Callable[[MicroBatch], torch.Tensor], declared: Loss = TOKEN_MEAN, **intended: Any
) -> Receipt:
    """Of a loop with this loss, held against declared settings and a batch with other ``intended`` values."""
    return check(replace(given.batch, **intended), declared, train(given, loss))


def rows_on_a_rank(seed: int) -> Rollout:
    return rollout(seed, ranks=2, token_advantages=False)


# ------------------------------------------------------------------------------------------------------------- denominators


def generation_batch(seed: int) -> Receipt:
    """Four updates' worth of tokens divide one update."""
    given = rollout(seed, updates=2, token_advantages=False, drift=0.0)
    everything = given.batch.mask_BT.sum()
    return receipt_of(given, lambda micro: ppo(micro, everything))


def truncated_counted(seed: int) -> Receipt:
    """A masked response's tokens stay in the denominator."""
    given = rollout(seed, token_advantages=False)
    before = given.batch.mask_BT.sum()
    mask = given.batch.mask_BT.clone()
    mask[5] = False
    return receipt_of(
        Rollout(replace(given.batch, mask_BT=mask), given.policy_UBT, given.plan), lambda m: ppo(m, before)
    )


def accumulated_twice(seed: int) -> Receipt:
    """A loss over the window's tokens is divided by the number of micro-batches too."""
    given = rollout(seed, even=True)
    return receipt_of(given, lambda micro: ppo(micro, tokens_of(given, micro)) / micro.count)


def summed_micro_batches(seed: int) -> Receipt:
    """Means of micro-batches are summed."""
    given = rollout(seed, even=True, token_advantages=False)
    declared = Loss("grpo", "clip", "seq-mean-token-mean", options=CLIP)
    return receipt_of(given, lambda micro: ppo(micro, lengths_of(micro) * len(micro.rows)), declared)


def no_division(seed: int) -> Receipt:
    given = rollout(seed, token_advantages=False)
    return receipt_of(given, lambda micro: ppo(micro, 1))


def rejected_counted(seed: int) -> Receipt:
    """Tokens that rejection sampling takes out have weight 0 and count in the denominator."""
    given = rollout(seed)
    rejected = torch.rand(given.batch.mask_BT.shape, generator=torch.Generator().manual_seed(seed)) < 0.4
    kept = given.batch.mask_BT & ~rejected
    total = given.batch.mask_BT.sum()
    return receipt_of(given, lambda m: ppo(m, total, weights=(~rejected[m.rows]).float()), mask_BT=kept)


def rows_summed(seed: int) -> Receipt:
    """Dr. GRPO: the sum over responses, not their mean."""
    given = rollout(seed)
    declared = Loss("dr_grpo", "clip", "seq-mean-token-sum-norm", norm=float(T), options=CLIP)
    return receipt_of(given, lambda micro: ppo(micro, float(T)), declared)


def ranks_by_own_tokens(seed: int) -> Receipt:
    given = rows_on_a_rank(seed)
    of_rank = {
        rank: sum(int(given.batch.mask_BT[rows].sum()) for r, rows in given.plan[0] if r == rank) for rank in (0, 1)
    }
    rank_of = {int(row): rank for rank, rows in given.plan[0] for row in rows}
    return receipt_of(given, lambda micro: ppo(micro, of_rank[rank_of[int(micro.rows[0])]]))


def micro_batches_by_own_tokens(seed: int) -> Receipt:
    given = rollout(seed, token_advantages=False)
    return receipt_of(given, lambda micro: ppo(micro, micro.mask.sum() * micro.count))


def other_aggregation(seed: int) -> Receipt:
    """Asked for the mean over tokens, got the mean over responses of their means."""
    given = rollout(seed, token_advantages=False)
    return receipt_of(given, lambda micro: ppo(micro, lengths_of(micro) * len(micro.update_rows)))


def packed_as_one(seed: int) -> Receipt:
    """Two responses packed into one row count as one."""
    given = rollout(seed, even=True)
    declared = Loss("grpo", "clip", "seq-mean-token-mean", options=CLIP)
    return receipt_of(given, lambda micro: ppo(micro, micro.mask.sum() * micro.count), declared)


# ---------------------------------------------------------------------------------------------------------------- alignment


def last_turns_mask(seed: int) -> Receipt:
    """One turn a row, each on its own right-aligned tokens: all turns get the last one's advantages, masked there."""
    given = rollout(seed, token_advantages=False)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(T) >= T - torch.randint(5, T, (B, 1), generator=generator)
    scalar = torch.randn(B // 4, 1, generator=generator).sign().repeat_interleave(4, 0)
    given = Rollout(replace(given.batch, advantages_BT=scalar * mask, mask_BT=mask), given.policy_UBT, given.plan)
    of_last = (scalar * mask)[3::4].repeat_interleave(4, 0)
    return receipt_of(given, lambda micro: ppo(micro, tokens_of(given, micro), advantages=of_last[micro.rows]))


def noise_in_equal_rewards(seed: int) -> Receipt:
    """Rewards of a group differ by rounding alone, and are divided by their standard deviation."""
    given = rollout(seed, token_advantages=False)
    equal = torch.arange(B) < 8
    intended = torch.where(equal.unsqueeze(1), 0.0, given.batch.advantages_BT)
    noise = torch.randn(8, 1, generator=torch.Generator().manual_seed(seed))
    noise = ((noise - noise.mean()) / noise.std()).expand(8, T)
    trained = torch.where(given.batch.mask_BT, torch.cat([noise, intended[8:]]), 0.0)
    given = Rollout(replace(given.batch, advantages_BT=intended), given.policy_UBT, given.plan)
    return receipt_of(given, lambda micro: ppo(micro, tokens_of(given, micro), advantages=trained[micro.rows]))


def resampled_rows(seed: int) -> Receipt:
    """Advantages are written back under the keys of before a resampling."""
    given = rollout(seed, token_advantages=False)
    order = torch.arange(B)
    order[8:16], order[40:56] = order[8:16].roll(1), order[40:56].roll(3)
    values = given.batch.advantages_BT[:, :1]
    return receipt_of(given, lambda m: ppo(m, tokens_of(given, m), advantages=values[order[m.rows]].expand(-1, T)))


def buffered_log_probs(seed: int) -> Receipt:
    """Old log-probabilities are cut along another dimension than the responses."""
    given = rollout(seed, token_advantages=False)
    wrong = given.batch.old_log_probs_BT.roll(2, 0)
    given = Rollout(replace(given.batch, old_log_probs_BT=wrong), given.policy_UBT, given.plan)
    return receipt_of(given, lambda micro: ppo(micro, tokens_of(given, micro)))


def labels_one_on(seed: int) -> Receipt:
    """The trainer's log-probabilities are of the next token; old ones, mask and advantages are not shifted."""
    given = rollout(seed)
    given = Rollout(given.batch, given.policy_UBT.roll(-1, 2), given.plan)
    return receipt_of(given, lambda micro: ppo(micro, tokens_of(given, micro)))


def actions_one_on(seed: int) -> Receipt:
    """Log-probabilities of actions are taken one position beside the mask's."""
    given = rollout(seed, token_advantages=False)
    return receipt_of(
        given,
        lambda m: ppo(
            m,
            tokens_of(given, m),
            advantages=m.advantages.roll(1, 1),
            mask=torch.where(torch.arange(T) == 0, False, m.mask.roll(1, 1)),
        ),
    )


def filled_with_end_tokens(seed: int) -> Receipt:
    """What follows the first end token is filled with end tokens, which the mask takes for a response."""
    given = rollout(seed, token_advantages=False)
    values = given.batch.advantages_BT[:, :1]
    full = torch.ones_like(given.batch.mask_BT)
    return receipt_of(
        given, lambda m: ppo(m, given.batch.mask_BT.sum(), advantages=values[m.rows].expand(-1, T), mask=full[m.rows])
    )


def every_turn_trains(seed: int) -> Receipt:
    """The loss mask is 1 from the first answer on, over user and tool turns."""
    given = rollout(seed, token_advantages=False)
    values = given.batch.advantages_BT[:, :1]
    last = torch.where(given.batch.mask_BT, torch.arange(T), 0).amax(1, True)
    whole = torch.arange(T) <= last
    return receipt_of(given, lambda m: ppo(m, whole.sum(), advantages=values[m.rows].expand(-1, T), mask=whole[m.rows]))


# --------------------------------------------------------------------------------------------------- ratios, clips and terms


def clip_unused(seed: int) -> Receipt:
    """The clipped objective is computed; the mean is taken of the other one."""
    given = rollout(seed, epochs=2)
    return receipt_of(given, lambda micro: ppo(micro, tokens_of(given, micro), clip=False))


def ratio_of_itself(seed: int) -> Receipt:
    """The old log-probabilities are the detached new ones."""
    given = rollout(seed, epochs=2)
    return receipt_of(given, lambda micro: ppo(micro, tokens_of(given, micro), old=micro.log_probs.detach()))


def vocabulary(seed: int) -> tuple[Rollout, torch.Tensor]:
    """A rollout whose log-probabilities come from logits at temperature 0.6, and these logits."""
    given = rollout(seed)
    logits = torch.randn(*given.batch.mask_BT.shape, 20, generator=torch.Generator().manual_seed(seed)) * 2
    policy = (logits / 0.6).log_softmax(-1)[..., 0]
    batch = replace(given.batch, old_log_probs_BT=policy)
    return Rollout(batch, policy.expand(given.policy_UBT.shape), given.plan), logits


def with_old(given: Rollout, old_BT: torch.Tensor) -> Receipt:
    given = Rollout(replace(given.batch, old_log_probs_BT=old_BT), given.policy_UBT, given.plan)
    return receipt_of(given, lambda micro: ppo(micro, tokens_of(given, micro)))


def engine_without_temperature(seed: int) -> Receipt:
    given, logits = vocabulary(seed)
    return with_old(given, logits.log_softmax(-1)[..., 0])


def scaled_log_probs(seed: int) -> Receipt:
    """Log-probabilities, not logits, are divided by the temperature."""
    given, logits = vocabulary(seed)
    return with_old(given, logits.log_softmax(-1)[..., 0] / 0.6)


def trainer_without_temperature(seed: int) -> Receipt:
    given, logits = vocabulary(seed)
    given = Rollout(given.batch, logits.log_softmax(-1)[None, ..., 0], given.plan)
    return receipt_of(given, lambda micro: ppo(micro, tokens_of(given, micro)))


def masked_nan(seed: int) -> Receipt:
    """A masked old log-probability is NaN, and NaN times 0 is NaN."""
    given = rollout(seed)
    old = given.batch.old_log_probs_BT.clone()
    old[~given.batch.mask_BT] = torch.nan
    given = Rollout(replace(given.batch, old_log_probs_BT=old), given.policy_UBT, given.plan)
    return receipt_of(given, lambda micro: ppo(micro, tokens_of(given, micro)))


def kl_maximised(seed: int) -> Receipt:
    given = rollout(seed)
    declared = replace(TOKEN_MEAN, kl="k3", kl_coef=0.1)

    def loss(m: MicroBatch) -> torch.Tensor:
        gap = m.ref - m.log_probs
        return ppo(m, tokens_of(given, m)) - 0.1 * ((gap.exp() - gap - 1) * m.mask).sum() / tokens_of(given, m)

    return receipt_of(given, loss, declared)


def weights_left_out(seed: int) -> Receipt:
    given = rollout(seed, weights=True)
    return receipt_of(given, lambda m: ppo(m, tokens_of(given, m), weights=torch.ones_like(m.weights)))


def engine_rounding(seed: int) -> Receipt:
    """Another micro-batch size gives other roundings in bf16."""
    given = rollout(seed)
    noise = 0.008 * torch.randn(given.batch.mask_BT.shape, generator=torch.Generator().manual_seed(seed))
    return with_old(given, given.batch.old_log_probs_BT + noise)


# ----------------------------------------------------------------------------------------------------------------- responses


def replanned(given: Rollout, *rows: torch.Tensor) -> Rollout:
    return Rollout(given.batch, given.policy_UBT, [[(0, piece) for piece in rows]])


def padded_with_copies(seed: int) -> Receipt:
    everything = torch.arange(B)
    given = replanned(rollout(seed), *everything.split(6), everything[:2], everything[2:8])
    return receipt_of(given, lambda micro: ppo(micro, given.batch.mask_BT.sum()))


def uneven_sampler(seed: int) -> Receipt:
    """Some samples come several times, others never."""
    drawn = torch.randint(B, (B,), generator=torch.Generator().manual_seed(seed))
    given = replanned(rollout(seed), *drawn.split(8))
    return receipt_of(given, lambda micro: ppo(micro, given.batch.mask_BT.sum()))


@dataclass(frozen=True)
class Fault:
    """One of history."""

    thread: str
    """Repository and number."""
    what: str
    """One line for the table."""
    name: str
    """Of the finding that it is."""
    run: Callable[[int], Receipt]
    also: str = ""
    """A second name that is right."""


FAULTS = (
    Fault("huggingface/trl#6024", "`dapo` divides by the tokens of several updates", "scaled", generation_batch),
    Fault("huggingface/trl#6369", "masked truncated responses stay in the denominator", "scaled", truncated_counted),
    Fault("modelscope/ms-swift#10117", "`dapo` is divided by the accumulation steps too", "scaled", accumulated_twice),
    Fault("NVIDIA-NeMo/RL#84", "means of micro-batches are summed", "scaled", summed_micro_batches),
    Fault("THUDM/slime#919", "the sum over tokens is not divided", "scaled", no_division),
    Fault("THUDM/slime#657", "rejected tokens stay in the denominator", "scaled", rejected_counted),
    Fault("verl-project/verl#3741", "Dr. GRPO sums over responses", "scaled", rows_summed),
    Fault(
        "PrimeIntellect-ai/prime-rl#2359",
        "each rank divides by its own tokens",
        "scaled by micro-batch",
        ranks_by_own_tokens,
    ),
    Fault(
        "allenai/open-instruct#1161",
        "each micro-batch divides by its own tokens",
        "scaled by micro-batch",
        micro_batches_by_own_tokens,
    ),
    Fault(
        "AI-Hypercomputer/maxtext#4025",
        "mean over responses, not tokens",
        "scaled by response",
        other_aggregation,
    ),
    Fault("google/tunix#1662", "a pack of responses counts as one", "scaled by response", packed_as_one),
    Fault("NovaSky-AI/SkyRL#1492", "all turns get the last turn's token advantages", "swapped", last_turns_mask),
    Fault("NVIDIA-NeMo/RL#4158", "rounding in equal rewards is divided by its spread", "extra", noise_in_equal_rewards),
    Fault("verl-project/verl#7957", "advantages go back under keys of before resampling", "swapped", resampled_rows),
    Fault(
        "nishide-dev/unturtle#40",
        "old log-probabilities cut along another dimension",
        "swapped",
        buffered_log_probs,
    ),
    Fault(
        "PrimeIntellect-ai/prime-rl#1525",
        "the next token's log-probabilities, the rest unshifted",
        "shifted",
        labels_one_on,
    ),
    Fault("lucidrains/PaLM-rlhf-pytorch#31", "action log-probabilities one position off", "shifted", actions_one_on),
    Fault("bingreeky/MemGen#33", "filling after the end counts as response", "outside", filled_with_end_tokens),
    Fault("THUDM/slime#1563", "user and tool turns are in the loss mask", "outside", every_turn_trains),
    Fault("rllm-org/rllm#81", "the clipped objective is not used", "unclipped", clip_unused),
    Fault("meta-pytorch/torchforge#571", "the ratio is that of the policy to itself", "stale", ratio_of_itself),
    Fault(
        "huggingface/trl#4159",
        "engine's log-probabilities without temperature",
        "stale",
        engine_without_temperature,
    ),
    Fault("PrimeIntellect-ai/prime-rl#697", "log-probabilities divided by the temperature", "stale", scaled_log_probs),
    Fault(
        "NVIDIA-NeMo/RL#316",
        "trainer's log-probabilities without temperature",
        "stale",
        trainer_without_temperature,
    ),
    Fault("OpenRLHF/OpenRLHF#1240", "NaN at a masked token", "not finite", masked_nan),
    Fault("qiancheng0/ToolRL#52", "the KL term is maximised", "sign", kl_maximised),
    Fault("verl-project/verl#3245", "importance weights missing in most losses", "weights", weights_left_out),
    Fault("verl-project/verl#6280", "bf16 ratios differ from 1 with the micro-batch size", "rounded", engine_rounding),
    Fault(
        "verl-project/verl-omni#602", "a batch is filled with copies of its responses", "repeated", padded_with_copies
    ),
    Fault("huggingface/trl#4531", "samples come several times or never", "missing", uneven_sampler, "repeated"),
)
"""Each thread was read; the injections follow its description, not its code."""


def named(fault: Fault, seed: int) -> list[str]:
    """Names that the receipt gives it, the first finding first; notes too where the fault is one."""
    receipt = fault.run(seed)
    return names(receipt.findings) if fault.name != "rounded" else [finding.name for finding in receipt.findings]


def table() -> str:
    """For docs/dev/receipt_faults.md."""
    lines = ["| thread | the fault | the receipt says |", "|---|---|---|"]
    for fault in FAULTS:
        findings = ", ".join(dict.fromkeys(named(fault, 1)))
        lines.append(f"| {fault.thread} | {fault.what} | {findings} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
    for fault in FAULTS:
        print(f"\n{fault.thread}: {fault.what} [{fault.name}]", *fault.run(1).findings, sep="\n")
