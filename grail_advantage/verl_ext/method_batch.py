"""A batch of verl's as a method sees it: base advantages, truncated rows, and the rows that need scores.

Shape suffixes: B rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from transformers import GenerationConfig, PreTrainedTokenizerBase
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from grail_advantage.batch import EXAMPLES, TOKENS, PassRow, RolloutBatch
from grail_advantage.signals.base import RowSelection, Signal
from grail_advantage.verl_ext.settings import BASE, BASES, base_of
from grail_advantage.verl_ext.transfer import Rollouts


@dataclass(frozen=True)
class MethodBatch:
    """A batch as the method sees it, and the rows that need scores."""

    batch: RolloutBatch
    base_advantages_BT: torch.Tensor
    """verl's advantages, before truncated rows are set to 0."""
    advantages_BT: torch.Tensor
    """The same, with 0 on truncated rows where these are masked."""
    truncated_B: torch.Tensor
    unjudged_B: torch.Tensor
    """Rows whose reward, or verl's advantage for it, is not finite; their advantages are 0."""
    rows: RowSelection

    def is_of(self, mask_BT: torch.Tensor, base_advantages_BT: torch.Tensor) -> bool:
        """Whether it was made with this mask and these advantages of verl's."""
        return torch.equal(self.batch.mask_BT, mask_BT) and torch.equal(self.base_advantages_BT, base_advantages_BT)

    @property
    def scored_rows(self) -> list[int]:
        """The rows that need scores."""
        return self.rows.selected_B.nonzero().flatten().tolist()


def build_method_batch(
    signal: Signal,
    rollouts: Rollouts,
    mask_BT: torch.Tensor,
    base_advantages_BT: torch.Tensor,
    *,
    truncated_B: torch.Tensor,
    unjudged_B: torch.Tensor,
    aggregate: Callable[[torch.Tensor, torch.Tensor], float],
    step: int,
    tokenizer: PreTrainedTokenizerBase,
) -> MethodBatch:
    """Mask truncated rows, and have the method choose the rows that need scores (:meth:`Signal.select`).

    Args:
        signal: the method.
        rollouts: prompts and responses.
        mask_BT: bool; the tokens that train.
        base_advantages_BT: verl's, finite.
        truncated_B: from :func:`truncated_rows`.
        unjudged_B: see :class:`MethodBatch`.
        aggregate: a mean over the batch as the run's loss takes it.
        step: training step.
        tokenizer: the model's.
    """
    advantages_BT = base_advantages_BT
    if signal.mask_truncated:
        advantages_BT = torch.where(truncated_B.unsqueeze(1), 0.0, advantages_BT)
    batch = RolloutBatch(
        mask_BT=mask_BT,
        advantages_B=response_advantages(advantages_BT),
        spans=rollouts.spans,
        columns_BT={},
        aggregate=aggregate,
        step=step,
        examples=rollouts.examples if EXAMPLES in signal.reads else None,
        masked_B=(truncated_B & signal.mask_truncated) | unjudged_B,
        groups_B=torch.tensor(rollouts.groups),
        tokens_BT=rollouts.tokens_BT if TOKENS in signal.reads else None,
        tokenizer=tokenizer,
        fields=rollouts.fields,
    )
    return MethodBatch(batch, base_advantages_BT, advantages_BT, truncated_B, unjudged_B, signal.select(batch))


def response_advantages(advantages_BT: torch.Tensor) -> torch.Tensor:
    """The advantage of each response, (B,): verl gives it to every token that trains, and 0 to the others."""
    largest_B1 = advantages_BT.abs().argmax(dim=1, keepdim=True)
    return advantages_BT.gather(1, largest_B1).squeeze(1)


def pass_row(rollouts: Rollouts, seen: MethodBatch, row: int) -> PassRow:
    """One row for the pass of a signal."""
    prompt, response = rollouts.prompts[row], rollouts.responses[row]
    return PassRow(
        tokens_S=torch.cat([prompt, response]),
        response_start=len(prompt),
        response_length=len(response),
        span=seen.batch.spans[row],
        advantage=float(seen.batch.advantages_B[row]),
        group=rollouts.groups[row],
        place=row,
        example=rollouts.examples[row],
    )


def reward_advantages(
    rewards_BT: torch.Tensor,
    rollouts: Rollouts,
    mask_BT: torch.Tensor,
    config: DictConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The advantages that ``PPOTrainer._compute_advantage`` makes of rewards alone, by verl's own code.

    A row whose reward is not finite gets 0, and no other row is compared with it.

    Args:
        rewards_BT: rewards of the tokens.
        rollouts: prompts and responses.
        mask_BT: bool; the tokens that train.
        config: the run's.

    Returns:
        Advantages (B, T), all finite, and the rows that got 0 for a reward that is not finite, or too large; bool (B,).
    """
    judged_B = rewards_BT.sum(dim=1).isfinite()[_last_outputs(rollouts.keys)]
    compared_BT = mask_BT & judged_B.unsqueeze(1)  # some estimators compare whole batches
    groups: list[Any] = [
        group if judged else f"unjudged {place}"
        for place, (group, judged) in enumerate(zip(rollouts.groups, judged_B.tolist(), strict=True))
    ]
    data = DataProto.from_dict(
        {
            "token_level_rewards": torch.where(judged_B.unsqueeze(1), rewards_BT, 0.0),
            "response_mask": compared_BT.long(),
        },
        non_tensors={"uid": np.array(groups, dtype=object)},
    )
    data = compute_advantage_for_multi_trajectories(
        data,
        batch_keys=rollouts.keys,
        adv_estimator=base_of(config),
        num_repeat=config.actor_rollout_ref.rollout.n,
        norm_adv_by_std_in_grpo=config.algorithm.get("norm_adv_by_std_in_grpo", True),
        config=config.algorithm,
    )
    advantages_BT = data.batch["advantages"]
    known_B = advantages_BT.isfinite().all(dim=1)  # False where finite rewards overflow in the mean
    return torch.where(known_B.unsqueeze(1), advantages_BT, 0.0), ~(judged_B & known_B)


def check_one_advantage_a_response(advantages_BT: torch.Tensor, mask_BT: torch.Tensor, base: str) -> None:
    """Refuse advantages that differ within a response.

    Raises:
        ValueError: naming the option.
    """
    if base in BASES:
        return
    lowest_B = torch.where(mask_BT, advantages_BT, torch.inf).amin(dim=1)
    highest_B = torch.where(mask_BT, advantages_BT, -torch.inf).amax(dim=1)
    if (lowest_B < highest_B).any():
        raise ValueError(
            f"{BASE}={base} gives the tokens of a response different advantages, and token weights multiply one"
        )


def mean_of_loss(config: DictConfig) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """A mean over a batch as the run's loss takes it."""

    def mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> float:
        actor = config.actor_rollout_ref.actor
        value = agg_loss(
            loss_mat=values_BT,
            loss_mask=mask_BT.to(values_BT.dtype),
            loss_agg_mode=actor.loss_agg_mode,
            loss_scale_factor=actor.get("loss_scale_factor", None),
        )
        return float(value)

    return mean


def _last_outputs(keys: Sequence[str]) -> list[int]:
    """For each row the row of the last output of its session, whose reward is the session's."""
    last: dict[str, tuple[int, int]] = {}
    for row, key in enumerate(keys):
        session, output = key.rsplit("_", 1)
        last[session] = max(last.get(session, (-1, row)), (int(output), row))
    return [last[key.rsplit("_", 1)[0]][1] for key in keys]


def truncated_rows(rollouts: Rollouts, rollout: DictConfig, context_length: int, end_tokens: set[int]) -> torch.Tensor:
    """Rows, bool (B,), whose response reached the length limit without an end token.

    The limit is that of verl's rollout servers (``generate`` of ``vLLMHttpServer``, ``TRTLLMHttpServer`` and, with one
    position kept free, ``SGLangHttpServer``). Each turn of a conversation has the room that the turns before it left, so a
    whole row has the same limit.

    Args:
        rollouts: prompts and responses.
        rollout: ``actor_rollout_ref.rollout``.
        context_length: positions of the model.
        end_tokens: from :func:`end_token_ids`.
    """
    context = context_length - (rollout.name == "sglang")
    truncated = []
    for prompt, response in zip(rollouts.prompts, rollouts.responses, strict=True):
        room = min(rollout.prompt_length + rollout.response_length, context) - len(prompt)
        ended = len(response) > 0 and int(response[-1]) in end_tokens
        truncated.append(len(response) >= min(rollout.response_length, room) and not ended)
    return torch.tensor(truncated, dtype=torch.bool)


def end_token_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None) -> set[int]:
    """Token ids that end a response: the tokenizer's, and those that the rollout engine takes from the generation config."""
    from_model = getattr(generation_config, "eos_token_id", None)
    from_model = from_model if isinstance(from_model, list) else [from_model]
    return {token for token in [tokenizer.eos_token_id, *from_model] if token is not None}
