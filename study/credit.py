"""Token advantages of every arm on a rollout batch.

Shape suffixes: B rows, L prompt + response, T response tokens, V vocabulary, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from verl.trainer.ppo import core_algos

from grail_advantage import compute_token_weights
from study.arms import Arm
from study.exact import first_wrong, right_continuation, token_advantages
from study.regression import Regression, token_features
from study.rollouts import Rollouts, alike, examples
from study.task import BOX, END, RESULT, TokenReading

ORACLES = ("oracle", "oracle_by_step", "oracle_mixed")


@dataclass
class State:
    """Outputs of a policy on its rollouts before the update, and the state that a run keeps between batches."""

    old_log_probs_BL: torch.Tensor
    """Log-probability of each token, 0 in the first column."""
    entropy_BL: torch.Tensor
    """Entropy in nats of the distribution that each token was drawn from, 0 in the first column."""
    hidden_BLD: torch.Tensor
    """Input of the output embeddings at the position before each token, 0 in the first column."""
    regression: Regression = field(default_factory=Regression)


def policy_state(model: PreTrainedModel, rollouts: Rollouts) -> State:
    """One forward over the batch, without gradients."""
    ids_BL = rollouts.input_ids_BL
    old_log_probs_BL, entropy_BL = torch.zeros(ids_BL.shape), torch.zeros(ids_BL.shape)
    hidden_BLD = torch.zeros(*ids_BL.shape, model.config.hidden_size)
    lengths_B = rollouts.attention_mask_BL.sum(dim=1)
    for rows in alike(torch.arange(len(ids_BL)), lengths_B):
        width = int(lengths_B[rows].max())
        with torch.no_grad():
            output = model(input_ids=ids_BL[rows, :width], output_hidden_states=True)
        log_probs_BLV = output.logits[:, :-1].float().log_softmax(dim=-1)
        chosen_BL = log_probs_BLV.gather(-1, ids_BL[rows, 1:width, None])[:, :, 0]
        old_log_probs_BL[rows, 1:width] = chosen_BL
        entropy_BL[rows, 1:width] = -(log_probs_BLV.exp() * log_probs_BLV).sum(dim=-1)
        hidden_BLD[rows, 1:width] = output.hidden_states[-1][:, :-1].float()  # the last of them is after the final norm
    return State(old_log_probs_BL, entropy_BL, hidden_BLD)


def credit(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    rollouts: Rollouts,
    arm: Arm,
    state: State,
    random_numbers_BL: np.ndarray,
    step: int,
) -> torch.Tensor:
    """Token advantages of a batch, float32 (B, L), 0 outside the responses and in truncated ones.

    Args:
        model: the policy before the update.
        tokenizer: its tokenizer.
        rollouts: the batch.
        arm: how to assign credit.
        state: from :func:`policy_state`.
        random_numbers_BL: for the controls that draw, at least as wide as the batch.
        step: training step.
    """
    mask_BL = rollouts.response_mask_BL.bool()
    rows_B = sequence_advantages(rollouts, arm)
    if arm.control in (*ORACLES, "regression"):
        return _without_weights(model, tokenizer, rollouts, arm, state, rows_B)
    log_probs_BL = state.old_log_probs_BL
    if arm.control == "random_token":
        log_probs_BL = torch.from_numpy(-random_numbers_BL[:, : mask_BL.shape[1]]).float()
    elif arm.control == "last_result":
        log_probs_BL = -_last_result(rollouts)
    signal = arm.signal
    gives_advantages = signal.gives == "advantages"
    credited = compute_token_weights(
        model,
        tokenizer,
        rollouts.input_ids_BL,
        rollouts.attention_mask_BL,
        rollouts.response_mask_BL,
        rows_B,
        signal,
        old_log_probs=log_probs_BL,
        entropy=state.entropy_BL,
        groups=torch.from_numpy(rollouts.groups_B),
        examples=examples(rollouts.problems),
        step=step,
        masked=rollouts.truncated_B if gives_advantages else None,
    )
    if gives_advantages:
        return credited.advantages
    weights_BL = credited.weights
    if arm.control == "shuffled":
        weights_BL = shuffled(weights_BL, rollouts, random_numbers_BL)
    elif arm.control == "spread":
        # Rows that the method leaves alone weigh 1 throughout; in the others the box weighs 0.
        weighed_B1 = ((weights_BL == 0) & mask_BL).any(dim=1, keepdim=True)
        sum_B1 = weights_BL.sum(dim=1, keepdim=True)
        weights_BL = torch.where(weighed_B1 & (sum_B1 > 0), weights_BL / sum_B1, weights_BL)
    elif arm.control == "right_only":
        weights_BL = weights_BL * (rows_B > 0).unsqueeze(1)
    elif arm.control == "error_place":
        weights_BL = torch.where((rows_B < 0).unsqueeze(1), _first_error(rollouts, tokenizer), weights_BL)
    return weights_BL * rows_B.unsqueeze(1)


def _without_weights(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    rollouts: Rollouts,
    arm: Arm,
    state: State,
    rows_B: torch.Tensor,
) -> torch.Tensor:
    """Advantages of the controls that give each token its own."""
    mask_BL = rollouts.response_mask_BL.bool()
    whole = rows_B.double().numpy()
    if arm.control in ORACLES:
        exact = token_advantages(model, tokenizer, rollouts.problems, rollouts.prompts, rollouts.responses)
        advantages = [
            np.full(len(response), whole[row]) if known is None else known
            for row, (response, known) in enumerate(zip(rollouts.responses, exact, strict=True))
        ]
        if arm.control == "oracle_by_step":
            advantages = [
                advantage_T if known is None else by_step(advantage_T, read)
                for advantage_T, known, read in zip(advantages, exact, rollouts.reads, strict=True)
            ]
        elif arm.control == "oracle_mixed":
            mixed_B = (rows_B != 0).numpy()
            mixed = {group for group in np.unique(rollouts.groups_B) if mixed_B[rollouts.groups_B == group].any()}
            advantages = [
                advantage_T * (group in mixed) for advantage_T, group in zip(advantages, rollouts.groups_B, strict=True)
            ]
    else:
        features = [
            token_features(
                -state.old_log_probs_BL[row, inside_L].double().numpy(),
                state.entropy_BL[row, inside_L].double().numpy(),
                state.hidden_BLD[row, inside_L].double().numpy(),
            )
            for row, inside_L in enumerate(mask_BL)
        ]
        advantages, _ = state.regression.advantages(features, rollouts.rewards_B.double().numpy(), rollouts.groups_B)
    advantages_BL = torch.zeros(mask_BL.shape)
    for row, advantage_T in enumerate(advantages):
        advantages_BL[row, mask_BL[row]] = torch.from_numpy(advantage_T).float()
    return torch.where(rollouts.truncated_B.unsqueeze(1), 0.0, advantages_BL)


def by_step(advantage_T: np.ndarray, read: TokenReading) -> np.ndarray:
    """The sum over each step on all of its tokens; a step goes up to and with its end, the last one to the response's."""
    step_T = np.cumsum(np.concatenate([[0], read.role_T[:-1] == END]))
    return np.bincount(step_T, advantage_T)[step_T]


def sequence_advantages(rollouts: Rollouts, arm: Arm) -> torch.Tensor:
    """One advantage a row by verl's estimator, (B,); 0 for a response without an end token, as in the published set-up."""
    mask_BL = rollouts.response_mask_BL
    last_B1 = (mask_BL * torch.arange(mask_BL.shape[1])).argmax(dim=1, keepdim=True)
    rewards_BL = torch.zeros(mask_BL.shape).scatter(1, last_B1, rollouts.rewards_B.unsqueeze(1))
    advantages_BL, _ = core_algos.compute_grpo_outcome_advantage(
        token_level_rewards=rewards_BL,
        response_mask=mask_BL,
        index=rollouts.groups_B,
        norm_adv_by_std_in_grpo=arm.advantage == "grpo",
    )
    rows_B = advantages_BL.gather(1, last_B1).squeeze(1)
    return torch.where(rollouts.truncated_B, 0.0, rows_B)


def shuffled(weights_BL: torch.Tensor, rollouts: Rollouts, random_numbers_BL: np.ndarray) -> torch.Tensor:
    """The same weights on other tokens of the same kind of the same response: their effect apart from their place.

    The box and what follows it keep theirs: the answer's weight is a constant of the method, no score.
    """
    weights_BL = weights_BL.clone()
    for row, read in enumerate(rollouts.reads):
        start = len(rollouts.prompts[row])
        for role in set(np.unique(read.role_T)) - {BOX}:
            places = start + np.flatnonzero(read.role_T == role)
            order = np.argsort(random_numbers_BL[row, places], kind="stable")
            weights_BL[row, places] = weights_BL[row, places[order]]
    return weights_BL


def _first_error(rollouts: Rollouts, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """1 on the first wrong token of each response, else 0, (B, L); where no right continuation says which token that is, on the
    first one of the first error."""
    marked_BL = torch.zeros(rollouts.input_ids_BL.shape)
    for row, (problem, response, read) in enumerate(
        zip(rollouts.problems, rollouts.responses, rollouts.reads, strict=True)
    ):
        if read.error_T.any():
            right = right_continuation(problem, response, read, tokenizer)
            wrong = None if right is None else first_wrong(response, right)
            place = int(read.error_T.argmax()) if wrong is None else wrong
            marked_BL[row, len(rollouts.prompts[row]) + place] = 1.0
    return marked_BL


def _last_result(rollouts: Rollouts) -> torch.Tensor:
    """1 on the first digit of each response's last result, else 0; (B, L)."""
    marked_BL = torch.zeros(rollouts.input_ids_BL.shape)
    for row, read in enumerate(rollouts.reads):
        results = np.flatnonzero(read.role_T == RESULT)
        if len(results):
            last = results[read.piece_T[results] == read.piece_T[results[-1]]][0]
            marked_BL[row, len(rollouts.prompts[row]) + last] = 1.0
    return marked_BL
