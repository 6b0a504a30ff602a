"""The private parts of TRL's ``GRPOTrainer`` that token weights use, with lines of TRL 1.16.0. Nothing of TRL is replaced.

``TokenWeightGRPOTrainer`` overrides ``_generate_and_score_completions`` (grpo_trainer.py:2324): TRL's loss takes advantages of
shape (B, T) from subclasses (line 3055), and its maintainers want them made there (huggingface/trl#4525). It can be another
method when TRL has a public one for advantages. It also overrides ``_calculate_rewards`` (line 1579) and ``_generate`` (line
2193), to read their results, ``_generate_single_turn`` (line 1763), to look at the environments between turns,
``_compute_loss`` (line 3020), to leave responses out, and ``_get_per_token_logps_and_entropies`` (line 1419), whose result it
reads the gradient of. The functions below can go as each says.

``RELIED_ON`` lists them, and a TRL that lacks one is refused by its name, whatever its version.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from trl import GRPOTrainer


@dataclass(frozen=True)
class ReliedOn:
    """A method of ``GRPOTrainer`` as token weights need it."""

    name: str
    arguments: tuple[str, ...] = ()
    """That are passed by name or place."""
    source: tuple[str, ...] = ()
    """Texts that its source holds."""


RELIED_ON = (
    ReliedOn("_prepare_inputs", source=("self._generate_and_score_completions(",)),
    ReliedOn(
        "_generate_and_score_completions",
        ("inputs",),
        (
            *('"prompt_ids": ', '"prompt_mask": ', '"completion_ids": ', '"completion_mask": ', '"advantages": '),
            *('output["old_per_token_logps"]', "self._calculate_rewards("),
        ),
    ),
    ReliedOn("_generate", ("prompts",), ("return prompt_ids, completion_ids, tool_mask, completions",)),
    ReliedOn("_generate_single_turn"),
    ReliedOn("_tool_call_loop", source=("= self._generate_single_turn(", "for idx in range(len(idxs_with_tool)):")),
    ReliedOn("_log_completion_extra", ("column", "values"), ("self._pending_extra_logs[column].extend(values)",)),
    ReliedOn("_calculate_rewards", ("inputs",)),
    ReliedOn("_get_per_token_logps_and_entropies"),
    # Advantages of one number a token, and what a loss is divided by.
    ReliedOn(
        "_compute_loss",
        ("model", "inputs"),
        (
            *('mask = completion_mask if "tool_mask" not in inputs else completion_mask * inputs["tool_mask"]',),
            *("if advantages.dim() == 1:", "advantages.unsqueeze(1)", 'inputs["num_items_in_batch"]'),
            *(".sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()", ".sum() / mask.sum().clamp(min=1.0)"),
            "(per_token_loss.size(0) * self.max_completion_length)",
            "self._get_per_token_logps_and_entropies(",
        ),
    ),
)


TOOL_MASK = 2
"""Place of ``tool_mask`` in what ``_generate`` returns."""


def missing_methods(trainer_class: type) -> list[str]:
    """What a trainer's class lacks of :data:`RELIED_ON`, each in words; empty where all is there."""
    missing = []
    for needed in RELIED_ON:
        method = getattr(trainer_class, needed.name, None)
        if method is None:
            missing.append(f"{needed.name}()")
            continue
        arguments = inspect.signature(method).parameters
        missing += [f"the argument {name} of {needed.name}()" for name in needed.arguments if name not in arguments]
        if needed.source:
            try:
                source = inspect.getsource(method)
            except (OSError, TypeError):
                source = ""
            missing += [f"`{text.strip()}` in {needed.name}()" for text in needed.source if text not in source]
    return missing


def loss_mask(inputs: Mapping[str, Any]) -> torch.Tensor:
    """The tokens that count in the loss, int64 (B, T), by ``_compute_loss`` (line 3027): those that a tool wrote do not."""
    mask_BT: torch.Tensor = inputs["completion_mask"]
    return mask_BT * inputs["tool_mask"] if "tool_mask" in inputs else mask_BT


def rows_that_train(inputs: Mapping[str, Any], loss_type: str) -> tuple[dict[str, Any], float]:
    """A micro-batch without the responses whose token advantages are all 0, and what its loss is to be multiplied by.

    Such a response adds 0 to the sum of ``_compute_loss`` and counts in what this is divided by (lines 3151 to 3171): the
    number of responses, or with ``bnpo`` their tokens. ``cispo`` and ``dapo`` divide by ``num_items_in_batch``, that of the
    whole generation batch. One response always stays, as the processes' backwards wait for each other.

    Can go when TRL leaves them out itself (huggingface/trl#3130): when
    ``test_the_update_is_the_same_without_zero_advantage_responses`` passes without it.
    """
    mask_BT = loss_mask(inputs)
    trains_B = (inputs["advantages"] * mask_BT != 0).any(dim=1)
    if not trains_B.any():
        trains_B[0] = True
    kept = {name: values[trains_B] if getattr(values, "ndim", 0) else values for name, values in inputs.items()}
    if loss_type in ("cispo", "dapo"):
        return kept, 1.0
    if loss_type == "bnpo":
        return kept, int(loss_mask(kept).sum().clamp(min=1)) / int(mask_BT.sum().clamp(min=1))
    return kept, int(trains_B.sum()) / len(trains_B)


def reward_sums(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The responses' rewards as TRL sums its functions' (line 2763), float (B,); NaN for a response that none of them scored.

    Args:
        rewards: (B, number of reward functions), NaN where a function gave none.
        weights: ``reward_weights``, one a function.
    """
    sums_B = (rewards * weights.to(rewards.device)).nansum(dim=1)
    return torch.where(rewards.isnan().all(dim=1), torch.nan, sums_B)


def in_equal_group(rewards: torch.Tensor, generations: int) -> torch.Tensor:
    """bool (B,): the rewards of the response's group are equal, to rounding of a sum in float32 and NaN left out. TRL takes
    their mean off (lines 2785 and 2794), and what rounding leaves of three rewards of 0.7 is an advantage of 6e-4.

    Args:
        rewards: (B,) sums of the reward functions, or (B, F) where TRL takes off the mean of each function.
        generations: responses of a group.
    """
    groups = rewards.reshape(len(rewards) // generations, generations, -1)
    most, least = groups.nan_to_num(-torch.inf).amax(dim=1), groups.nan_to_num(torch.inf).amin(dim=1)
    equal = most - least <= 2**-22 * torch.maximum(most.abs(), least.abs())
    return equal.all(dim=1).repeat_interleave(generations)


def logged_columns(trainer: GRPOTrainer) -> Mapping[str, list[Any]]:
    """What this process's reward functions logged of its responses with ``log_extra``, by column.

    They are in ``_pending_extra_logs`` (grpo_trainer.py:1563) until TRL puts them into the table of completions. Can go when
    TRL hands them out: when ``test_rewards_by_turn_are_what_a_reward_function_logs`` passes without it.
    """
    columns: Mapping[str, list[Any]] = trainer._pending_extra_logs
    return columns


def written_lengths(completion_ids_BT: torch.Tensor, mask_BT: torch.Tensor, pad_token_id: int) -> torch.Tensor:
    """Tokens of each response, int64 (B,), also of one that TRL's ``mask_truncated_completions`` masks as a whole.

    Such a response ends in no padding token, or TRL would not call it truncated; so it has all tokens up to the padding.

    Args:
        completion_ids_BT: padded on the right.
        mask_BT: bool; TRL's ``completion_mask``.
        pad_token_id: of the padding.
    """
    places_T = torch.arange(1, mask_BT.shape[1] + 1, device=mask_BT.device)
    unmasked_BT = torch.where(mask_BT.any(dim=1, keepdim=True), mask_BT, completion_ids_BT != pad_token_id)
    return torch.where(unmasked_BT, places_T, 0).amax(dim=1)


def log_in_training(trainer: GRPOTrainer, name: str, value: float) -> None:
    """Add a value to the figures whose means TRL logs next.

    They are in ``_metrics`` (grpo_trainer.py:1080). ``Trainer.log`` would make an entry of its own, and ``log_metric``, which
    reward functions get, keeps a value until the next generation. Can go when a trainer can call ``log_metric``: when
    ``test_figures_stand_in_the_logs_and_the_table_keeps_its_advantages`` passes with it.
    """
    trainer._metrics["train"][name].append(value)
