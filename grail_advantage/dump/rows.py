"""A row of the token dump (:mod:`grail_advantage.dump.files`): one response, with its values a token.

Shape suffixes: T response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grail_advantage.answers.span import AnswerSpan

COLUMNS = ("score", "weight", "base_advantage", "advantage", "old_log_prob", "entropy")
"""The float columns of a row."""


@dataclass(frozen=True, kw_only=True)
class DumpHeader:
    """Properties that all responses of a file share."""

    step: int
    method: str
    """The method's registered name; of several, that of ``score`` and ``weight``."""
    update: int = 0
    """Which of the step's updates of the actor; more than one with ``trainer.v1.separate_async.parameter_sync_step``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """All options of the method."""
    reshaper: str | None = None
    model: str = ""
    temperature: float | None = None
    rows_in_step: int | None = None
    """Responses of the update's batch, without those that only fill it up."""
    special_tokens: Mapping[int, str] = field(default_factory=dict)
    """Names of the special tokens, which put nothing into the text, by id."""
    written_by: str = ""
    answer: str | None = None
    """The format of answers; ``None`` for methods that read none."""


@dataclass(frozen=True, kw_only=True)
class MethodColumns:
    """Scores and weights of one of several methods."""

    score_T: np.ndarray | None
    weight_T: np.ndarray
    no_scores: str | None = None
    advantage_T: np.ndarray | None = None
    """Of a method that gives token advantages; else it is the weight times the base advantage."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReceivedRow:
    """What the tokens of one response received, in the K optimiser steps of the update that it was in."""

    key: str
    """As the response's."""
    updates: np.ndarray
    """int64 (K,): the numbers of these optimiser steps, from 0 over all epochs; none of a response that was left out."""
    received_T: np.ndarray
    """float32: the effective advantage that arrived, the mean over the K steps; NaN where a token was in none."""
    clipped_T: np.ndarray
    """float32: the share of the K steps in which the loss clipped the token; NaN where that is not known."""
    by_update_KT: np.ndarray
    """float32: the effective advantage of each step."""

    def __len__(self) -> int:
        return len(self.received_T)


@dataclass(frozen=True, kw_only=True, eq=False)
class DumpRow:
    """One response. Arrays have its length T; float ones are float32 with NaN where there is no value.

    Raises:
        ValueError: columns of different lengths, or a span outside the response.
    """

    step: int
    row: int
    """Its place in the update's batch."""
    key: str
    """verl's key of the response, ``{prompt}_{session}_{output}``, which verl's own rollout dump calls ``uid``."""
    group: int
    """Responses of one update with the same number answer the same prompt."""
    update: int = 0
    id: str | None = None
    """The problem's name, where it has one."""
    prompt: str = ""
    """The text that the model saw."""
    response: str = ""
    """``"".join(tokens)``."""
    ground_truth: str | None = None
    reward: float | None = None
    outcome: str | None = None
    """``right`` (correct), ``wrong`` (incorrect), or ``None`` where it is not known."""
    answer: str | None = None
    """The text in the answer span."""
    truncated: bool = False
    no_scores: str | None = None
    """Why the response has no scores, if it has none."""
    span: AnswerSpan | None = None
    prompt_ids: np.ndarray
    token_ids_T: np.ndarray
    tokens: Sequence[str]
    """The text of each token. A character that several tokens share belongs to the last of them; special tokens have none."""
    mask_T: np.ndarray
    """bool; the tokens that train."""
    score_T: np.ndarray | None = None
    weight_T: np.ndarray
    base_advantage_T: np.ndarray | None = None
    advantage_T: np.ndarray | None = None
    old_log_prob_T: np.ndarray | None = None
    entropy_T: np.ndarray | None = None
    methods: Mapping[str, MethodColumns] = field(default_factory=dict)
    """By name, where several methods gave the response weights."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    """Token ranges ``[start, end]``, or lists of them, by name; the report marks ``wrong_step``."""
    received: ReceivedRow | None = None
    """What its tokens received, where the run kept that."""

    def __post_init__(self) -> None:
        columns: dict[str, Any] = {"tokens": self.tokens, "mask": self.mask_T}
        columns |= {name: getattr(self, f"{name}_T") for name in COLUMNS}
        for name, method in self.methods.items():
            columns |= {f"{name}'s score": method.score_T, f"{name}'s weight": method.weight_T}
            columns[f"{name}'s advantage"] = method.advantage_T
        for name, values in columns.items():
            if values is not None and len(values) != len(self):
                raise ValueError(f"response {self.row}: {name} has {len(values)} values for {len(self)} tokens")
        span = self.span
        if span and not 0 <= span.start <= span.content_start <= span.content_end <= span.end <= len(self):
            raise ValueError(f"response {self.row}: the span is not four token indices in order, at most {len(self)}")

    def __len__(self) -> int:
        return len(self.token_ids_T)
