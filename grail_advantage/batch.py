"""A batch of responses as signals see it. A host, which is a trainer or a plain function, fills it in.

Shape suffixes: B responses, T response tokens, S positions of one prompt + response.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from grail_advantage.answers.span import AnswerSpan
from grail_advantage.receipt.tensors import check_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OLD_LOG_PROBS = "old_log_probs"
"""Column: log-probability of every response token under the policy before the update, at the sampling temperature."""
ENTROPY = "entropy"
"""Column: the policy's entropy in nats at every response token's predictor position, at the sampling temperature."""
GROUPS = "groups"
"""Which responses answer the same prompt: ``groups_B`` of the batch, ``group`` of a row of a pass."""
EXAMPLES = "examples"
"""Prompts as messages, and the columns of the data set."""
TOKENS = "tokens"
"""The responses' token ids and the tokenizer: ``tokens_BT`` and ``tokenizer`` of the batch."""
REWARDS = "rewards"
"""The responses' rewards: ``rewards_B`` of the batch."""
SESSIONS = "sessions"
"""Which responses are one conversation: ``sessions`` of the batch. A method that reads ``REWARDS`` without it is refused where
several are."""
MESSAGES = "messages"
"""The responses with what tools and users said in them: ``messages_BT`` of the batch."""
LARGEST = 1e18
"""A response whose reward or advantage is larger trains nothing, like one that is not finite: a weight and a gradient's norm,
which is squared, would take it out of float32."""
FIELD = "field:"
"""Prefix: ``field:NAME`` is a value a response of any kind, ``fields[NAME]`` of the batch."""


_Numbers = TypeVar("_Numbers", torch.Tensor, np.ndarray)


def field_names(reads: Iterable[str]) -> list[str]:
    """The names of the fields among what a signal reads."""
    return sorted(word.removeprefix(FIELD) for word in reads if word.startswith(FIELD))


def token_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> float:
    """Mean over the valid tokens of a batch; 0 without any."""
    return float(torch.where(mask_BT, values_BT, 0.0).double().sum() / mask_BT.sum().clamp(min=1))


def within_range(values: _Numbers) -> _Numbers:
    """Which rewards or advantages can train: bool, false for NaN, an infinity, and more than ``LARGEST``."""
    return abs(values) <= LARGEST


def outcome_of(reward: float | None) -> str | None:
    """``right`` for a reward above 0, ``wrong`` for another; ``None`` for none or one that is not finite."""
    if reward is None or not math.isfinite(reward):
        return None
    return "right" if reward > 0 else "wrong"


@dataclass(frozen=True)
class Example:
    """A response's prompt and data, for signals that ask differently."""

    messages: Sequence[Mapping[str, Any]]
    """The prompt as a chat, before the chat template."""
    columns: Mapping[str, Any]
    """The other columns of the response's data set; ``reward_model.ground_truth`` is the ground truth in verl's layout."""
    template_options: Mapping[str, Any]
    """Further arguments of the chat template, such as ``enable_thinking``."""


@dataclass(frozen=True)
class RolloutBatch:
    """Responses of one batch, padded on the right to T tokens.

    Raises:
        ValueError: parts that do not fit together, naming the one that does not.
    """

    mask_BT: torch.Tensor
    """bool; the tokens that train."""
    advantages_B: torch.Tensor
    """One advantage a response, before weighting; 0 for truncated responses where these are masked. It is detached from
    any graph. One that is not finite or beyond ``LARGEST`` becomes 0 and its response masked, so that no other response is
    compared with it."""
    spans: Sequence[AnswerSpan | None]
    """The responses' answers, in response-token indices."""
    columns_BT: Mapping[str, torch.Tensor]
    """Float columns that the signal asked for: ``OLD_LOG_PROBS``, ``ENTROPY``."""
    aggregate: Callable[[torch.Tensor, torch.Tensor], float] = token_mean
    """``aggregate(values_BT, mask_BT)``: a batch's mean as the run's loss takes it."""
    step: int = 0
    """Training step, for signals that change over a run; 0 where there is none."""
    examples: Sequence[Example | None] | None = None
    """The responses' prompts and data, for signals that read ``EXAMPLES``; ``None`` for a response that only fills up
    the batch."""
    masked_B: torch.Tensor | None = None
    """bool; responses that train nothing whatever their reward, as truncated ones where these are masked."""
    groups_B: torch.Tensor | None = None
    """int64, for signals that read ``GROUPS``; responses with the same number answer the same prompt."""
    tokens_BT: torch.Tensor | None = None
    """int64, for signals that read ``TOKENS``: the tokens that the model generated; -1 elsewhere, as for a tool's output."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """Likewise."""
    rewards_B: torch.Tensor | None = None
    """float, for signals that read ``REWARDS``; the sum of each response's rewards, NaN where it could not be scored."""
    messages_BT: torch.Tensor | None = None
    """int64, for signals that read ``MESSAGES``: all tokens of the responses, whoever wrote them; -1 after their ends."""
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """By name, for signals that read ``field:NAME``: one value a response, ``None`` for a response that has none."""
    sessions: Sequence[Sequence[int]] = ()
    """For signals that read ``SESSIONS``: of each conversation its responses, in their order. By default each is one."""
    keys: Sequence[str] = ()
    """The host's names of the responses, for messages; empty where there are none."""

    def __post_init__(self) -> None:
        if not self.sessions:
            object.__setattr__(self, "sessions", [[row] for row in range(len(self.mask_BT))])
        self._check()
        advantages_B = self.advantages_B.detach()
        can_train_B = within_range(advantages_B)
        if not can_train_B.all():
            masked_B = ~can_train_B if self.masked_B is None else self.masked_B | ~can_train_B
            object.__setattr__(self, "masked_B", masked_B)
        object.__setattr__(self, "advantages_B", torch.where(can_train_B, advantages_B, 0.0))

    def _check(self) -> None:
        """Refuse parts that do not fit together."""
        check_tensor("mask_BT", self.mask_BT)
        if self.mask_BT.dtype != torch.bool or self.mask_BT.ndim != 2:
            raise ValueError(
                f"mask_BT must be bool of shape (B, T), got {self.mask_BT.dtype} of shape {tuple(self.mask_BT.shape)}"
            )
        shape = tuple(self.mask_BT.shape)
        for name, values, kind, dims in (
            ("advantages_B", self.advantages_B, "numbers", 1),
            ("masked_B", self.masked_B, torch.bool, 1),
            ("groups_B", self.groups_B, torch.int64, 1),
            ("tokens_BT", self.tokens_BT, torch.int64, 2),
            ("messages_BT", self.messages_BT, torch.int64, 2),
            ("rewards_B", self.rewards_B, "floats", 1),
            *((f"columns_BT[{name!r}]", values, "floats", 2) for name, values in self.columns_BT.items()),
        ):
            if values is None:
                continue
            check_tensor(name, values)
            known = kind in ("numbers", values.dtype) or (kind == "floats" and values.is_floating_point())
            if not known or values.shape != shape[:dims]:
                raise ValueError(
                    f"{name} must be {kind} of shape {shape[:dims]}, got {values.dtype} of shape {tuple(values.shape)}"
                )
        one_a_row = [("spans", self.spans), ("examples", self.examples)]
        one_a_row += [(f"fields[{name!r}]", of_field) for name, of_field in self.fields.items()]
        for name, entries in one_a_row:
            if entries is not None and len(entries) != shape[0]:
                raise ValueError(f"{name} must be one a response, {shape[0]} of them; got {len(entries)}")
        if sorted(row for rows in self.sessions for row in rows) != list(range(shape[0])):
            raise ValueError(f"sessions must hold each of the {shape[0]} responses once, got {self.sessions}")
        if self.step < 0:
            raise ValueError(f"step={self.step} must be at least 0, the number of training steps done")

    @property
    def trains_B(self) -> torch.Tensor:
        """bool (B,); responses with a token that trains, and not masked."""
        return self.valid_B if self.masked_B is None else self.valid_B & ~self.masked_B

    @property
    def valid_B(self) -> torch.Tensor:
        """bool (B,); responses with a token that trains."""
        return self.mask_BT.any(dim=-1)


@dataclass(frozen=True)
class PassRow:
    """One row of a pass through the model."""

    tokens_S: torch.Tensor
    """int64; prompt + response. A signal may cut it where nothing matters any more, or change the prompt."""
    response_start: int
    """Index of the first response token, at least 1."""
    response_length: int
    """Number of response tokens, of which ``tokens_S`` may hold fewer."""
    span: AnswerSpan | None
    """The answer, relative to the response."""
    advantage: float
    group: int
    """Rows with the same number answer the same prompt; -1: a copy that fills up a rank, whose scores nobody reads."""
    place: int
    """The row's place in its batch."""
    example: Example | None = None
    """Only for signals that read ``EXAMPLES``, and only until :meth:`Signal.prepare_row`."""

    @property
    def length(self) -> int:
        """Number of tokens of the whole row, cut off or not."""
        return self.response_start + self.response_length

    @property
    def answer(self) -> AnswerSpan:
        """The span of a response that has one, as every response of a signal with ``needs_answer``.

        Raises:
            ValueError: the response has none.
        """
        if self.span is None:
            raise ValueError(f"response {self.place} has no answer span; set needs_answer for a signal that reads it")
        return self.span
