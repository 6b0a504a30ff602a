"""One training run of the study, in one process and one thread.

Advantages, loss and its aggregation are verl's own functions, token weights those of
:func:`grail_advantage.compute_token_weights`; sampling and the optimiser loop are plain torch. So a run is the same number for
number whenever it is repeated on the same machine, which a run through an asynchronous rollout server is not, and costs a
fraction of it.

Shape suffixes: B rows, L prompt + response, T response tokens, V vocabulary, D hidden.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from verl.trainer.ppo import core_algos
from verl.workers.config import FSDPActorConfig

from grail_advantage import compute_token_weights
from grail_advantage.batch import Example
from recipe.tiny.sampling import prompt_ids
from recipe.tiny.task import boxed_answer
from study.arms import Arm
from study.exact import Texts, exact_accuracy, token_advantages
from study.regression import Regression, token_features
from study.sampling import sample
from study.task import (
    ASIDE,
    ASIDE_RESULT,
    BOX,
    FILL,
    MAX_RESPONSE_TOKENS,
    RESULT,
    StudyProblem,
    TokenReading,
    read_tokens,
)

MICRO_BATCHES = 4
ORDER, TRAINING, EVALUATION, CONTROL = range(4)
"""Independent streams of random numbers of a seed."""


@dataclass(frozen=True)
class RunSettings:
    """Settings that all arms share."""

    steps: int = 12
    """Rollout batches."""
    prompts: int = 16
    """Problems in a rollout batch."""
    rollouts: int = 8
    """Responses a problem."""
    epochs: int = 4
    """Optimiser steps on each rollout batch, all of it at once."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    gradient_norm: float = 1.0
    evaluate_at: tuple[int, ...] = (8, 12)
    """Steps after which accuracy is measured; the outcome is the mean over them. The last one is the last step."""
    temperature: float = 0.6
    """Of the outcome."""
    samples: int = 8
    """Samples a held-out problem for the outcome."""
    samples_hot: int = 2
    """Samples a held-out problem at temperature 1, after the last step."""

    def __post_init__(self) -> None:
        for name in ("steps", "prompts", "epochs", "samples", "samples_hot", "temperature"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if self.rollouts < 2:
            raise ValueError(f"rollouts={self.rollouts} must be at least 2: a group of one has no relative advantage")
        if self.samples > 9:
            raise ValueError(f"samples={self.samples} must be at most 9: the raw file holds one digit a problem")
        if not self.evaluate_at or max(self.evaluate_at) != self.steps or min(self.evaluate_at) < 1:
            raise ValueError(f"evaluate_at={self.evaluate_at} must lie in 1 to steps={self.steps} and end with it")


@dataclass(frozen=True)
class Rollouts:
    """One batch: prompt and response side by side, padded on the right."""

    input_ids_BL: torch.Tensor
    attention_mask_BL: torch.Tensor
    response_mask_BL: torch.Tensor
    rewards_B: torch.Tensor
    truncated_B: torch.Tensor
    groups_B: np.ndarray
    problems: Sequence[StudyProblem]
    """The problem of each row."""
    prompts: list[list[int]]
    responses: list[list[int]]
    reads: list[TokenReading]


@dataclass(frozen=True)
class Sampled:
    """Result of sampling held-out problems."""

    right: list[int]
    """Right samples of each problem."""
    accuracy: float
    length: float
    """Response tokens; this and the next two are means over samples."""
    filler: float
    """Tokens of filler."""
    asides: float
    """Tokens of asides."""


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


def numbers(seed: int, stream: int, step: int, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers in [0, 1) of one stream of a seed."""
    return np.random.default_rng([seed, stream, step]).random(shape)


def roll_out(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[StudyProblem],
    rollouts: int,
    seed: int,
    step: int,
) -> Rollouts:
    """Sample ``rollouts`` responses to each problem at temperature 1 and judge them."""
    asked = [problem for problem in problems for _ in range(rollouts)]
    prompts = [prompt_ids(tokenizer, problem) for problem in asked]
    uniform_BT = torch.from_numpy(numbers(seed, TRAINING, step, (len(asked), MAX_RESPONSE_TOKENS)))
    return as_rollouts(tokenizer, asked, prompts, sample(model, tokenizer, prompts, uniform_BT), rollouts)


def as_rollouts(
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[StudyProblem],
    prompts: list[list[int]],
    responses: list[list[int]],
    rollouts: int,
) -> Rollouts:
    """Judge responses and pad them; ``rollouts`` consecutive rows are a group."""
    longest = max(len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True))
    ids_BL = torch.full((len(prompts), longest), tokenizer.pad_token_id)
    starts_B1 = torch.tensor([len(prompt) for prompt in prompts]).unsqueeze(1)
    ends_B1 = starts_B1 + torch.tensor([len(response) for response in responses]).unsqueeze(1)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids_BL[row, : len(prompt) + len(response)] = torch.tensor(prompt + response)
    position_L = torch.arange(longest)
    return Rollouts(
        input_ids_BL=ids_BL,
        attention_mask_BL=(position_L < ends_B1).long(),
        response_mask_BL=((position_L >= starts_B1) & (position_L < ends_B1)).long(),
        rewards_B=torch.tensor(
            [float(is_right(tokenizer, *row)) for row in zip(problems, responses, strict=True)], dtype=torch.float32
        ),
        truncated_B=torch.tensor([response[-1] != tokenizer.eos_token_id for response in responses]),
        groups_B=np.arange(len(prompts)) // rollouts,
        problems=problems,
        prompts=prompts,
        responses=responses,
        reads=[
            read_tokens(problem, response, tokenizer) for problem, response in zip(problems, responses, strict=True)
        ],
    )


def is_right(tokenizer: PreTrainedTokenizerFast, problem: StudyProblem, response: Sequence[int]) -> bool:
    """Whether the last complete box holds the exact integer."""
    return boxed_answer(tokenizer.decode(response, skip_special_tokens=True)) == str(problem.answer)


def sample_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[StudyProblem],
    samples: int,
    temperature: float,
    seed: int,
    step: int,
) -> Sampled:
    """Accuracy on held-out problems; arms of a seed draw from the same random numbers, steps from others."""
    asked = [problem for problem in problems for _ in range(samples)]
    prompts = [prompt_ids(tokenizer, problem) for problem in problems for _ in range(samples)]
    uniform_BT = torch.from_numpy(numbers(seed, EVALUATION, step, (len(asked), MAX_RESPONSE_TOKENS)))
    responses = sample(model, tokenizer, prompts, uniform_BT, temperature=temperature)
    right_PS = np.array(
        [is_right(tokenizer, problem, response) for problem, response in zip(asked, responses, strict=True)]
    ).reshape(-1, samples)
    # Wording hardly differs between a problem's samples: the first one of each is read.
    roles = [
        read_tokens(problem, response, tokenizer).role_T
        for problem, response in zip(problems, responses[::samples], strict=True)
    ]
    return Sampled(
        right=right_PS.sum(axis=1).tolist(),
        accuracy=float(right_PS.mean()),
        length=float(np.mean([len(response) for response in responses])),
        filler=float(np.mean([(role_T == FILL).sum() for role_T in roles])),
        asides=float(np.mean([np.isin(role_T, (ASIDE, ASIDE_RESULT)).sum() for role_T in roles])),
    )


def policy_state(model: PreTrainedModel, rollouts: Rollouts) -> State:
    """One forward over the batch, without gradients."""
    ids_BL = rollouts.input_ids_BL
    old_log_probs_BL, entropy_BL = torch.zeros(ids_BL.shape), torch.zeros(ids_BL.shape)
    hidden_BLD = torch.zeros(*ids_BL.shape, model.config.hidden_size)
    lengths_B = rollouts.attention_mask_BL.sum(dim=1)
    for rows in _alike(torch.arange(len(ids_BL)), lengths_B):
        width = int(lengths_B[rows].max())
        with torch.no_grad():
            output = model(input_ids=ids_BL[rows, :width], output_hidden_states=True)
        log_probs_BLV = output.logits[:, :-1].float().log_softmax(dim=-1)
        chosen_BL = log_probs_BLV.gather(-1, ids_BL[rows, 1:width, None])[:, :, 0]
        old_log_probs_BL[rows, 1:width] = chosen_BL
        entropy_BL[rows, 1:width] = -(log_probs_BLV.exp() * log_probs_BLV).sum(dim=-1)
        hidden_BLD[rows, 1:width] = output.hidden_states[-1][:, :-1].float()  # the last of them is after the final norm
    return State(old_log_probs_BL, entropy_BL, hidden_BLD)


def _alike(rows_B: torch.Tensor, lengths_B: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows of like length together, so that little padding is computed."""
    return rows_B[lengths_B[rows_B].argsort(stable=True)].chunk(MICRO_BATCHES)


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
    if arm.control in ("oracle", "regression"):
        whole = rows_B.double().numpy()
        if arm.control == "oracle":
            exact = token_advantages(model, tokenizer, rollouts.problems, rollouts.prompts, rollouts.responses)
            advantages = [
                np.full(len(response), whole[row]) if known is None else known
                for row, (response, known) in enumerate(zip(rollouts.responses, exact, strict=True))
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
            advantages, _ = state.regression.advantages(
                features, rollouts.rewards_B.double().numpy(), rollouts.groups_B
            )
        advantages_BL = torch.zeros(mask_BL.shape)
        for row, advantage_T in enumerate(advantages):
            advantages_BL[row, mask_BL[row]] = torch.from_numpy(advantage_T).float()
        return torch.where(rollouts.truncated_B.unsqueeze(1), 0.0, advantages_BL)
    log_probs_BL = state.old_log_probs_BL
    if arm.control == "random_token":
        log_probs_BL = torch.from_numpy(-random_numbers_BL[:, : mask_BL.shape[1]]).float()
    elif arm.control == "last_result":
        log_probs_BL = -_last_result(rollouts)
    signal = arm.signal
    weights_BL = compute_token_weights(
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
    ).weights
    if arm.control == "shuffled":
        weights_BL = shuffled(weights_BL, rollouts, random_numbers_BL)
    elif arm.control == "spread":
        # Rows that the method leaves alone weigh 1 throughout; in the others the box weighs 0.
        weighed_B1 = ((weights_BL == 0) & mask_BL).any(dim=1, keepdim=True)
        sum_B1 = weights_BL.sum(dim=1, keepdim=True)
        weights_BL = torch.where(weighed_B1 & (sum_B1 > 0), weights_BL / sum_B1, weights_BL)
    elif arm.control == "right_only":
        weights_BL = weights_BL * (rows_B > 0).unsqueeze(1)
    return weights_BL * rows_B.unsqueeze(1)


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


def examples(problems: Sequence[StudyProblem]) -> list[Example]:
    """The question of each row."""
    return [
        Example(
            messages=[{"role": "user", "content": problem.text}],
            columns={"reward_model": {"ground_truth": str(problem.answer)}},
            template_options={},
        )
        for problem in problems
    ]


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


def _last_result(rollouts: Rollouts) -> torch.Tensor:
    """1 on the first digit of each response's last result, else 0; (B, L)."""
    marked_BL = torch.zeros(rollouts.input_ids_BL.shape)
    for row, read in enumerate(rollouts.reads):
        results = np.flatnonzero(read.role_T == RESULT)
        if len(results):
            last = results[read.piece_T[results] == read.piece_T[results[-1]]][0]
            marked_BL[row, len(rollouts.prompts[row]) + last] = 1.0
    return marked_BL


@dataclass(frozen=True)
class Update:
    """Outcome of the optimiser steps on one batch."""

    gradient_norm: float
    """Mean over the epochs, before clipping."""
    clipped: int
    errors: int
    """Tokens of first errors with an advantage, over all epochs but the first, and how many of them were clipped."""


def update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    rollouts: Rollouts,
    advantages_BL: torch.Tensor,
    old_log_probs_BL: torch.Tensor,
    arm: Arm,
    settings: RunSettings,
) -> Update:
    """The optimiser steps on one rollout batch."""
    error_BL = _error_tokens(rollouts) & (advantages_BL != 0)
    norms, clipped, errors = [], 0, 0
    for epoch in range(settings.epochs):
        for rows, log_probs_BL in gradient(model, rollouts, advantages_BL, old_log_probs_BL, arm, settings):
            width = log_probs_BL.shape[1]
            marked_BL = error_BL[rows, 1 : width + 1]
            ratio_BL = (log_probs_BL - old_log_probs_BL[rows, 1 : width + 1]).exp()
            sign_BL = advantages_BL[rows, 1 : width + 1].sign()
            outside_BL = ((sign_BL > 0) & (ratio_BL > 1 + settings.clip_high)) | (
                (sign_BL < 0) & (ratio_BL < 1 - settings.clip_low)
            )
            if epoch:
                clipped += int((outside_BL & marked_BL).sum())
                errors += int(marked_BL.sum())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_norm)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return Update(float(np.mean(norms)), clipped, errors)


def gradient(
    model: PreTrainedModel,
    rollouts: Rollouts,
    advantages_BL: torch.Tensor,
    old_log_probs_BL: torch.Tensor,
    arm: Arm,
    settings: RunSettings,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Add the gradient of verl's loss over the whole batch to the parameters' gradients.

    Returns:
        of every micro-batch the rows and the log-probabilities of their tokens, from the second position on; without the
        rows, and the ends of rows, that have no advantage.
    """
    mask_BL = rollouts.response_mask_BL
    actor = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=settings.rollouts,
        use_dynamic_bsz=True,
        clip_ratio_low=settings.clip_low,
        clip_ratio_high=settings.clip_high,
        clip_ratio_c=1e9,  # the published loss has no second clip
        global_batch_info={
            "loss_scale_factor": MAX_RESPONSE_TOKENS,
            "global_batch_size": len(mask_BL),
            "batch_num_tokens": int(mask_BL.sum()),
        },
    )
    # A token without an advantage adds exactly nothing, and none looks at what follows it: rows end with the last token that
    # has one, and rows without any are left out. One row stays in any case, so that every parameter has a gradient.
    taught_BL = advantages_BL != 0
    ends_B = torch.where(taught_BL, torch.arange(1, taught_BL.shape[1] + 1), 0).amax(dim=1)
    live_B = ends_B.nonzero().flatten()
    if not len(live_B):
        live_B, ends_B = torch.tensor([0]), rollouts.attention_mask_BL.sum(dim=1)
    micro_batches = []
    for rows in _alike(live_B, ends_B):  # the gradients add up to the whole batch's
        width = int(ends_B[rows].max())
        ids_BL = rollouts.input_ids_BL[rows, :width]
        logits_BLV = model(input_ids=ids_BL).logits[:, :-1].float()
        log_probs_BL = logits_BLV.log_softmax(dim=-1).gather(-1, ids_BL[:, 1:].unsqueeze(-1)).squeeze(-1)
        loss, _ = core_algos.compute_policy_loss_vanilla(
            old_log_prob=old_log_probs_BL[rows, 1:width],
            log_prob=log_probs_BL,
            advantages=advantages_BL[rows, 1:width],
            response_mask=mask_BL[rows, 1:width],
            loss_agg_mode=arm.loss_agg_mode,
            config=actor,
        )
        loss.backward()
        micro_batches.append((rows, log_probs_BL.detach()))
    return micro_batches


def _error_tokens(rollouts: Rollouts) -> torch.Tensor:
    marked_BL = torch.zeros(rollouts.input_ids_BL.shape, dtype=torch.bool)
    for row, read in enumerate(rollouts.reads):
        start = len(rollouts.prompts[row])
        marked_BL[row, start : start + len(read.error_T)] = torch.from_numpy(read.error_T)
    return marked_BL


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    train_problems: Sequence[StudyProblem],
    held_out: Sequence[StudyProblem],
    texts: Texts,
    arm: Arm,
    learning_rate: float,
    settings: RunSettings,
    seed: int,
) -> dict[str, Any]:
    """Train ``model`` in place and return the run's figures, as :mod:`study.raw` names them.

    Args:
        model: the warmed-up model.
        tokenizer: its tokenizer.
        train_problems: problems that batches are drawn from.
        held_out: problems that accuracy is measured on.
        texts: right solutions of these, for the exact accuracy.
        arm: how to assign credit.
        learning_rate: Adam's, constant.
        settings: the rest.
        seed: of all random numbers.
    """
    order = random.Random(f"order {seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    model.eval()  # the model has no dropout; evaluation mode only makes that explicit
    kept, updates, rewards, sampled = Regression(), [], [], {}
    training = weighing = 0.0
    for step in range(1, settings.steps + 1):
        started = time.process_time()
        chosen = order.sample(train_problems, settings.prompts)
        rollouts = roll_out(model, tokenizer, chosen, settings.rollouts, seed, step)
        rewards.append(float(rollouts.rewards_B.mean()))
        state = policy_state(model, rollouts)
        state.regression = kept
        before = time.process_time()
        drawn_BL = numbers(seed, CONTROL, step, tuple(rollouts.input_ids_BL.shape))
        advantages_BL = credit(model, tokenizer, rollouts, arm, state, drawn_BL, step)
        weighing += time.process_time() - before
        updates.append(update(model, optimizer, rollouts, advantages_BL, state.old_log_probs_BL, arm, settings))
        training += time.process_time() - started
        if step in settings.evaluate_at:
            sampled[step] = sample_accuracy(
                model, tokenizer, held_out, settings.samples, settings.temperature, seed, step
            )
    last = sampled[settings.steps]
    errors = sum(one.errors for one in updates)
    return {
        "accuracy": float(np.mean([one.accuracy for one in sampled.values()])),
        **{f"right_{number}": "".join(map(str, one.right)) for number, one in enumerate(sampled.values(), 1)},
        **figures_of(model, tokenizer, held_out, texts, settings, seed),
        "length": last.length,
        "filler": last.filler,
        "asides": last.asides,
        "reward": float(np.mean(rewards)),
        "clipped_errors": sum(one.clipped for one in updates) / errors if errors else 0.0,
        "gradient_norm": float(np.mean([one.gradient_norm for one in updates])),
        "processor_seconds": training,
        "weight_seconds": weighing,
    }


def figures_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    held_out: Sequence[StudyProblem],
    texts: Texts,
    settings: RunSettings,
    seed: int,
) -> dict[str, float]:
    """Secondary accuracies of a model: at temperature 1, greedy, and exact under given wording."""
    beyond = settings.steps + 1  # a stream of its own
    return {
        "accuracy_hot": sample_accuracy(model, tokenizer, held_out, settings.samples_hot, 1.0, seed, beyond).accuracy,
        "accuracy_greedy": sample_accuracy(model, tokenizer, held_out, 1, 0.0, seed, beyond).accuracy,
        "exact": exact_accuracy(model, tokenizer, texts, temperature=settings.temperature),
        "exact_hot": exact_accuracy(model, tokenizer, texts),
    }
