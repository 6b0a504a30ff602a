"""This module has the two records that every host and view shares: the responses of an update, and what a method made
of them. Tensors are on the CPU; only a model has a device. A response's *index* is its row in a record, its *place*
that in the update's batch, its *key* the host's name for it. Shapes, here and in all methods: B responses, T response
tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from grail_advantage.answers.format import BOXED, AnswerFormat
from grail_advantage.answers.span import AnswerSpan, find_generated_spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grail_advantage.method import BaseMethod

OLD_LOG_PROBS = "old_log_probs"
ENTROPY = "entropy"
REF_LOG_PROBS = "ref_log_probs"
ROLLOUT_LOG_PROBS = "rollout_log_probs"
"""Columns, float (B, T), a value a response token. The first is its log-probability under the policy before the update,
at the sampling temperature; the second that policy's entropy, in nats, at the token's predictor position; the third the
log-probability under the run's reference; the last the one that the sampling engine gave (for the dump alone)."""
OF_POLICY = (OLD_LOG_PROBS, ENTROPY)  # that a forward of the policy gives
# By names in the dump
DUMPED = {OLD_LOG_PROBS: "old_log_prob", ENTROPY: "entropy", REF_LOG_PROBS: "ref_log_prob"}
# A larger reward or advantage trains nothing, like one that is not finite: sums of squares would leave float32.
LARGEST = 1e18


def within_range(values: Any) -> Any:
    """Say which rewards or advantages can train: false for NaN, an infinity, and more than ``LARGEST``. A tensor or an
    array gives bool of its shape, a number a bool."""
    # In half precision LARGEST is rounded, or an infinity; whole numbers would be rounded to the default dtype.
    if isinstance(values, Tensor) and values.dtype not in (torch.float32, torch.float64):
        values = values.float()
    return abs(values) <= LARGEST


def outcome_of(reward: float | None) -> str | None:
    """Call a reward above 0 ``right``, another ``wrong``; ``None`` for none or one that is not finite."""
    if reward is None or not math.isfinite(reward):
        return None
    return "right" if reward > 0 else "wrong"


def token_mean(values: Tensor, mask: Tensor) -> float:
    """Take the mean over the tokens of the mask; 0 without any."""
    return float(torch.where(mask, values, 0.0).double().sum() / mask.sum().clamp(min=1))


def runs(marked: np.ndarray) -> list[tuple[int, int]]:
    """Give the half-open ranges of marked tokens (T,). Those that the model wrote make its turns."""
    # Of [0, 1, 1, 0, 1] the edges are 1, 3, 4, 5, and so the ranges (1, 3) and (4, 5).
    changes = np.diff(np.asarray(marked, dtype=bool), prepend=False, append=False)
    edges = np.flatnonzero(changes).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def stacked(micro_batches: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Put tensors of micro-batches, each padded to a length of its own, together as tensors of all responses, with
    zeros after the ends.

    A micro-batch gives as many tensors as any other, (b, W) each. Its first tensor sets its length; a narrower one is of
    the last positions. Example: ids ``[[5, 6, 7]]`` and a mask ``[[1, 1]]`` of the last two, then ids ``[[8]]`` and a
    mask ``[[1]]``, give ``[[5, 6, 7], [8, 0, 0]]`` and ``[[0, 1, 1], [1, 0, 0]]``."""
    width = max(tensors[0].shape[1] for tensors in micro_batches)
    columns: list[list[Tensor]] = [[] for _ in micro_batches[0]]
    for tensors in micro_batches:
        length = tensors[0].shape[1]
        for column, values in zip(columns, tensors, strict=True):
            column.append(pad(values, (length - values.shape[1], width - length)))
    return [torch.cat(column) for column in columns]


def checked(name: str, values: Any, kind: str, shape: Sequence[int] | None = None) -> Tensor:
    """Give the tensor of an argument on the CPU, without a graph: ``flags`` (bool, or 0 and 1) as bool, ``whole``
    numbers as int64, ``floats`` or ``numbers`` (either). ValueError, naming the argument, for anything else or another
    shape."""
    if not isinstance(values, Tensor):
        raise ValueError(
            f"{name} must be a tensor, got {type(values).__name__}; use torch.tensor(...)"
        )
    dtype = values.dtype
    is_float = dtype.is_floating_point
    fits = (
        # A sparse, nested or meta tensor has a shape, and no values to look at.
        values.layout == torch.strided
        and not (values.is_nested or values.is_meta or values.is_quantized or dtype.is_complex)
        and not (is_float and dtype.itemsize == 1)  # float8 has no arithmetic
        and (kind == "flags" or dtype != torch.bool)
        and not (kind == "whole" and is_float)
        and not (kind == "floats" and not is_float)
    )
    if not fits or (shape is not None and tuple(values.shape) != tuple(shape)):
        got = f"{values.dtype} of shape {tuple(values.shape)}, {values.layout}, on {values.device}"
        raise ValueError(
            f"{name} must be a dense tensor of {kind} of shape {shape and tuple(shape)}, got {got}"
        )
    values = values.detach().cpu()
    if kind == "flags":
        if ((values != 0) & (values != 1)).any():
            raise ValueError(
                f"{name} must be bool or hold 0 and 1; a mask says which tokens or responses are meant"
            )
        return values.bool()
    if kind == "whole":
        return values.long()
    return values


def _check_one_a_response(name: str, values: Any, count: int) -> None:
    """Raise ValueError, naming the argument, for anything but a list of ``count`` values."""
    is_list = hasattr(values, "__len__") and not isinstance(values, str)
    # In this order: len() of an array without dimensions raises.
    if not is_list or getattr(values, "ndim", 1) != 1 or len(values) != count:
        raise ValueError(
            f"{name} must be a list with one value a response, {count} of them; got {values!r}"
        )


@dataclass(frozen=True)
class Example:
    """It holds a response's prompt and data, for methods that ask differently."""

    messages: Sequence[Mapping[str, Any]]  # before the chat template
    # The data set's others; verl keeps the truth in reward_model.ground_truth
    columns: Mapping[str, Any]
    template_options: Mapping[str, Any]  # of the chat template, such as enable_thinking


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """It holds the responses of an update, which are checked where it is made. Four fields are needed, the others as
    the method reads them.

    Example: the prompt ``[5, 6]`` and a response ``[7, 9, 9, 8]`` whose middle a tool wrote have
    ``prompts=[tensor([5, 6])]``, ``responses=[tensor([7, 9, 9, 8])]``,
    ``mask=tensor([[True, False, False, True]])`` and ``advantages=tensor([-0.5])``.

    Raises:
        ValueError: parts that do not fit together, naming the one that does not.
    """

    prompts: Sequence[Tensor]  # int64 (P,) each, at least one token
    responses: Sequence[Tensor]  # int64 (T,) each; with what tools and users said in them
    mask: Tensor  # bool (B, T): the tokens that train; T is that of the longest response
    # (B,), before weighting; NaN (no reward) or more than LARGEST trains nothing
    advantages: Tensor
    tokenizer: PreTrainedTokenizerBase = None
    answer: AnswerFormat = BOXED
    # bool (B, T): the tokens that the model wrote; by default those that train
    written: Tensor = None  # type: ignore[assignment]
    truncated: Tensor | None = None  # bool (B,): hit the length limit without an end token
    masked: Tensor | None = None  # bool (B,): train nothing, whatever their advantage
    groups: Tensor | None = None  # int64 (B,), at least 0; the same for responses to one prompt
    # (B,): the sum of each response's rewards, NaN where it could not be scored
    rewards: Tensor | None = None
    # Each response's conversation, and its place there; the responses of one are sorted by it
    sessions: Sequence[tuple[Any, int]] | None = None
    examples: Sequence[Example | None] | None = None
    # One value a response, for ``field:NAME``
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    # The columns of READS that the host has; weigh() makes them NaN, for a method, where the model did not write
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    keys: Sequence[str] = ()
    places: Sequence[int] = ()  # by default 0, 1, 2, ... both
    # For the dump: id, ground_truth, outcome, prompt, reward, labels
    facts: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    # Of values (B, T) under a mask, as the run's loss takes it
    mean: Callable[[Tensor, Tensor], float] = token_mean
    step: int = 0
    span: str = "last"  # which complete answer of a response counts; set by for_method()
    # A method's own metrics of the batch, which its scores() puts here
    figures: dict[str, float] = field(default_factory=dict, repr=False)
    known_spans: dict[str, list[AnswerSpan | None]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        count = len(self.responses)
        width = max(map(len, self.responses), default=0)

        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)  # the class is frozen

        put("prompts", [prompt.detach().cpu() for prompt in self.prompts])
        put("responses", [response.detach().cpu() for response in self.responses])
        put("places", self.places if len(self.places) else range(count))
        put("keys", self.keys if len(self.keys) else list(map(str, self.places)))
        shape = (count, width)
        columns = self.columns.items()
        put("columns", {name: checked(name, column, "floats", shape) for name, column in columns})
        put("written", self.mask if self.written is None else self.written)
        for name, kind in _TENSORS.items():
            value = getattr(self, name)
            # These two are needed: checked() refuses None by their names.
            if value is not None or name in ("mask", "advantages"):
                rank = 2 if name in ("mask", "written") else 1
                put(name, checked(name, value, kind, shape[:rank]))
        for name in ("prompts", "examples", "sessions", "keys", "places"):
            values = getattr(self, name)
            if values is not None:
                _check_one_a_response(name, values, count)
        for kind in ("fields", "facts"):
            for name, values in getattr(self, kind).items():
                _check_one_a_response(f"{kind}[{name!r}]", values, count)
        for index, (prompt, response) in enumerate(zip(self.prompts, self.responses, strict=True)):
            # The first token is predicted at the position before it.
            if len(response) and not len(prompt):
                raise ValueError(
                    f"response {index} has no prompt token before it; add at least one"
                )
        # -1 is the group of copies that fill up a rank.
        if self.groups is not None and (self.groups < 0).any():
            raise ValueError(
                f"groups holds {int(self.groups.min())}; number them from 0, as torch.unique does"
            )

    @classmethod
    def from_padded(
        cls,
        input_ids: Tensor,
        attention_mask: Tensor,
        response_mask: Tensor,
        *,
        written: Tensor | None = None,
        mask: Tensor | None = None,
        columns: Mapping[str, Tensor | None] = MappingProxyType({}),
        **parts: Any,
    ) -> Rollouts:
        """Make rollouts of padded rows, without the padding and the tokens after the response, on which no score
        depends.

        Example: the rows ``[[0, 5, 6, 7, 9, 9, 8]]`` with the response mask ``[[0, 0, 0, 1, 0, 0, 1]]`` and every token
        attended to but the first have the prompt ``[5, 6]``, the response ``[7, 9, 9, 8]`` and the mask ``[1, 0, 0,
        1]``: a tool wrote the two nines.

        Args:
            input_ids: (B, L) int64, prompt + response, padded on any side.
            attention_mask: (B, L) bool or 0/1.
            response_mask: (B, L) bool or 0/1; the response is everything from the first of these tokens to the last.
            written: (B, L), those of them that the model wrote; by default all.
            mask: (B, L), those of them that train; by default ``written``.
            columns: (B, L) float, as :attr:`columns`; ``None`` for one that is not there.
            parts: the other fields, ``advantages`` among them.

        Raises:
            ValueError: an argument of the wrong type, shape or dtype, naming it.
        """
        ids = checked("input_ids", input_ids, "whole")
        if ids.ndim != 2:
            raise ValueError(f"input_ids has the shape {tuple(ids.shape)}; it must be (B, L)")
        attended = checked("attention_mask (beside input_ids)", attention_mask, "flags", ids.shape)
        marked = checked("response_mask (beside input_ids)", response_mask, "flags", ids.shape)
        if (marked & ~attended).any():
            raise ValueError(
                "response_mask marks a padding token; it must lie inside attention_mask"
            )
        has_begun = marked.cumsum(dim=-1) > 0
        goes_on = marked.flip(-1).cumsum(dim=-1).flip(-1) > 0
        # From the first marked token to the last: what a tool wrote between them is part of the response.
        is_response = has_begun & goes_on & attended
        is_prompt = attended & ~has_begun
        lengths = is_response.sum(dim=-1, keepdim=True)
        width = int(lengths.max()) if len(lengths) else 0
        # "cpu" by name, here and elsewhere: torch.set_default_device() may have set another one.
        inside = torch.arange(width, device="cpu") < lengths

        def aligned(name: str, values: Tensor, kind: str) -> Tensor:
            """Take the values of the responses, (B, T), out of those of whole rows, (B, L)."""
            values = checked(name, values, kind, ids.shape)
            values_BT = values.new_zeros(inside.shape)
            values_BT[inside] = values[is_response]
            return values_BT

        written_BT = aligned("written", marked if written is None else written, "flags")
        # Some hosts have values for a tool's tokens, which nobody sampled; 0 there, as in columns_from().
        columns_BT = {
            name: torch.where(written_BT, aligned(name, values, "floats").float(), 0.0)
            for name, values in columns.items()
            if values is not None
        }
        return cls(
            prompts=[row[where] for row, where in zip(ids, is_prompt, strict=True)],
            responses=[row[where] for row, where in zip(ids, is_response, strict=True)],
            mask=written_BT if mask is None else aligned("mask", mask, "flags"),
            written=written_BT,
            columns=columns_BT,
            **parts,
        )

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def valid(self) -> Tensor:
        """Say which responses have a token that trains, bool (B,)."""
        return self.mask.any(dim=1)

    @property
    def trains(self) -> Tensor:
        """Say which of these are not masked either, bool (B,)."""
        return self.valid if self.masked is None else self.valid & ~self.masked

    @property
    def padded_length(self) -> int:
        """Count the positions of a row where prompts and responses are padded to the longest."""
        return max(map(len, self.prompts), default=0) + self.mask.shape[1]

    @cached_property
    def tokens(self) -> Tensor:
        """Give the ids that the model wrote, int64 (B, T); -1 elsewhere: on a tool's output, and after the end."""
        ids = self.mask.new_full(self.mask.shape, -1, dtype=torch.int64)
        for row, response in zip(ids, self.responses, strict=True):
            row[: len(response)] = response
        return torch.where(self.written, ids, -1)

    def spans(self, which: str) -> list[AnswerSpan | None]:
        """Give the first or the last complete answer of each response among the tokens that the model wrote."""
        # In a field, which replace() and part() hand on, so that a part without the tokenizer has them too.
        if which not in self.known_spans:
            rows = zip(self.tokens, self.responses, strict=True)
            generated = [ids[: len(response)] for ids, response in rows]
            spans = find_generated_spans(generated, self.tokenizer, which, self.answer)
            self.known_spans[which] = spans
        return self.known_spans[which]

    @property
    def knows_answers(self) -> bool:
        """Tell whether answers can be looked for; a batch without a tokenizer is for methods that need none."""
        return self.tokenizer is not None or self.span in self.known_spans

    @cached_property
    def answers(self) -> list[AnswerSpan | None]:
        """Give the answer of each response that counts for the method."""
        return self.spans(self.span)

    @cached_property
    def answered(self) -> Tensor:
        """Say which responses have an answer, bool (B,)."""
        return torch.tensor(
            [span is not None for span in self.answers], dtype=torch.bool, device="cpu"
        )

    @cached_property
    def bounds(self) -> Tensor:
        """Say where each answer begins, and where its content begins and ends, int64 (B, 3); zeros without an
        answer."""
        bounds = [
            (0, 0, 0) if span is None else (span.start, span.content_start, span.content_end)
            for span in self.answers
        ]
        return torch.tensor(bounds, dtype=torch.int64, device="cpu").reshape(-1, 3)

    @property
    def content(self) -> Tensor:
        """Mark the tokens of each answer's content, bool (B, T)."""
        position = torch.arange(self.mask.shape[1], device="cpu")
        _, start, end = self.bounds[:, :, None].unbind(1)  # (B, 1) each
        return (position >= start) & (position < end)

    @property
    def reasoning(self) -> Tensor:
        """Mark the tokens before each answer, bool (B, T); none in a response without one."""
        return torch.arange(self.mask.shape[1], device="cpu") < self.bounds[:, :1]

    @cached_property
    def conversations(self) -> list[list[int]]:
        """Give the responses of each session, in their order."""
        members: dict[Any, list[tuple[int, int]]] = {}
        for index in range(len(self)):
            # Without sessions each response is a conversation of its own.
            name, number = self.sessions[index] if self.sessions else (index, 0)
            members.setdefault(name, []).append((number, index))
        return [[index for _, index in sorted(session)] for session in members.values()]

    @property
    def turns_before(self) -> list[int]:
        """Count how many turns each response's conversation took in the responses before it, as far as these are
        here."""
        turns = [len(runs(written)) for written in self.written.numpy()]
        counts = [0] * len(self)
        # Responses of 2, 1 and 3 turns in one conversation have 0, 2 and 3 before them.
        for indices in self.conversations:
            for earlier, later in pairwise(indices):
                counts[later] = counts[earlier] + turns[earlier]
        return counts

    def for_method(self, method: BaseMethod) -> Rollouts:
        """Give the rollouts as a method sees them, with advantage 0 where they must not train. ValueError: it reads
        what is not there."""
        parts = {"groups": self.groups, "examples": self.examples, "rewards": self.rewards}
        lacks = [name for name, part in parts.items() if name in method.reads and part is None]
        lacks += [f"fields of {name}" for name in method.field_names if name not in self.fields]
        if method.needs_tokenizer and self.tokenizer is None:
            lacks += ["tokenizer"]
        if lacks:
            raise ValueError(
                f"{method.name} reads {', '.join(sorted(lacks))}, which the rollouts lack; pass them"
            )
        # Masked responses stay in the batch: others of their group may be compared with them.
        masked = ~within_range(self.advantages)
        if self.masked is not None:
            masked = masked | self.masked
        if self.truncated is not None and method.mask_truncated:
            masked = masked | self.truncated
        # A half-precision advantage would round all that a method computes with it.
        advantages = self.advantages
        if advantages.dtype != torch.float64:
            advantages = advantages.float()
        advantages = advantages.masked_fill(masked, 0.0)
        # Without columns: weigh() adds those that the method says it reads, and no other.
        # A new dict of figures, so that methods which see one batch do not see each other's.
        return replace(
            self, advantages=advantages, masked=masked, columns={}, figures={}, span=method.span
        )

    def row(self, index: int) -> Row:
        """Give one response for a pass through the model."""
        return replace(
            self._plain_row(index),
            answer=self.answers[index] if self.knows_answers else None,
            advantage=float(self.advantages[index]),
            group=index if self.groups is None else int(self.groups[index]),
            example=None if self.examples is None else self.examples[index],
        )

    def plain_rows(self) -> list[Row]:
        """Give every response that has a token, without its answer, for
        :func:`grail_advantage.model.hugging_face.read_columns`."""
        return [
            self._plain_row(index) for index, response in enumerate(self.responses) if len(response)
        ]

    def _plain_row(self, index: int) -> Row:
        prompt = self.prompts[index]
        response = self.responses[index]
        tokens = torch.cat([prompt, response])
        return Row(
            tokens, len(prompt), len(response), answer=None, advantage=0.0, group=index, index=index
        )

    def columns_from(
        self, rows: Sequence[Row], values: Sequence[Mapping[str, Tensor]], names: Sequence[str]
    ) -> dict[str, Tensor]:
        """Give the named values (T,) of some rows as columns, float32 (B, T), 0 where the model did not write."""
        columns = {}
        for name in names:
            column = torch.zeros(self.mask.shape, dtype=torch.float32, device="cpu")
            for row, values_of_row in zip(rows, values, strict=True):
                column[row.index, : row.length] = values_of_row[name]
            columns[name] = torch.where(self.written, column, 0.0)
        return columns

    def part(self, indices: Sequence[int]) -> Rollouts:
        """Give some responses alone, in this order, as copies without the tokenizer: for another thread or process."""
        width = max((len(self.responses[index]) for index in indices), default=0)
        return replace(self, tokenizer=None, **_parts(self, indices, width))


# Fields of :class:`Rollouts` and :class:`Weighed` that their responses share.
_SHARED = {"tokenizer", "answer", "mean", "step", "span", "figures"}
_SHARED |= {"method", "rollouts", "gave_advantages", "metrics"}
# Those of Rollouts that are tensors.
_TENSORS = dict.fromkeys(("mask", "written", "truncated", "masked"), "flags")
_TENSORS |= dict(advantages="numbers", groups="whole", rewards="numbers")


def joined(parts: Sequence[Rollouts]) -> Rollouts:
    """Put responses of several processes into one record, part by part. All have the same columns and lists."""
    width = max(part.mask.shape[1] for part in parts)

    def join(values: Sequence[Any]) -> Any:
        """Put the parts' values of a field together."""
        first = values[0]
        if isinstance(first, Tensor):
            if first.ndim > 1:  # the shorter ones end in zeros
                values = [pad(part, (0, width - part.shape[1])) for part in values]
            return torch.cat(list(values))
        if isinstance(first, Mapping):
            return {name: join([part[name] for part in values]) for name in first}
        if first is None:
            return None
        return [entry for part in values for entry in part]

    names = parts[0].__dataclass_fields__.keys() - _SHARED
    return replace(
        parts[0], **{name: join([getattr(part, name) for part in parts]) for name in names}
    )


def _parts(record: Rollouts | Weighed, indices: Sequence[int], width: int) -> dict[str, Any]:
    """Give the fields of some responses alone."""
    names = record.__dataclass_fields__.keys() - _SHARED
    return {name: _of_rows(getattr(record, name), indices, width) for name in names}


def _of_rows(values: Any, indices: Sequence[int], width: int) -> Any:
    """Give some rows of a tensor (B,), or (B, T) up to a width, of a list, or of each entry of a mapping."""
    if values is None:
        return None
    if isinstance(values, Mapping):
        return {name: _of_rows(column, indices, width) for name, column in values.items()}
    if not isinstance(values, Tensor):
        return [values[index] for index in indices]
    rows = values[list(indices)]  # a copy
    # Without contiguous() what lies beyond the width would go along to another process.
    return rows if rows.ndim == 1 else rows[:, :width].contiguous()


@dataclass(frozen=True)
class Row:
    """It is one response on its way through the model."""

    tokens: Tensor  # int64: prompt + response; a method may cut it, or change the prompt
    start: int  # index of the first response token, at least 1
    length: int  # response tokens, of which ``tokens`` may hold fewer
    answer: Any  # AnswerSpan relative to the response; never None in a method with needs_answer
    advantage: float
    group: int  # -1: a copy that fills up a rank, whose scores nobody reads
    index: int
    example: Example | None = None


@dataclass(frozen=True)
class RowScores:
    """It holds the results of a pass for one row."""

    scores: Tensor  # float32, of the response tokens from the first on; tokens after the last score have none
    # 1-D float32: the gradient norms of all positions looked at, for the metrics
    norms: Tensor | None = None

    def on_cpu(self) -> RowScores:
        """Give a copy for another process, and for :func:`grail_advantage.weigh.weigh`."""
        norms = None if self.norms is None else self.norms.float().cpu()
        return RowScores(self.scores.float().cpu(), norms)


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """It says what a method made of an update's responses."""

    method: BaseMethod
    rollouts: Rollouts  # the host's, with the columns that the method read
    selected: Tensor  # bool (B,): needed scores
    failed: Tensor  # bool (B,): selected, with a score or weight that is not finite
    scores: Tensor  # float32 (B, T); NaN where there is none
    # float32 (B, T), 0 outside the mask; 1 inside for a method that gives advantages
    weights: Tensor
    advantages: Tensor  # float32 (B, T): A_t, 0 outside the mask
    by_score: Tensor  # bool (B, T): the weight comes from the token's score, not from an override
    low: Tensor  # bool (B, T): the weight from the score met its map's lower bound
    high: Tensor
    gave_advantages: bool = False  # the method gives token advantages, not weights
    # Why each response has no scores of its own; None where it has
    no_scores: Sequence[str | None] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)  # see grail_advantage.metrics

    def part(self, indices: Sequence[int]) -> Weighed:
        """Give some responses alone, see :meth:`Rollouts.part`."""
        rollouts = self.rollouts.part(indices)
        return replace(self, rollouts=rollouts, **_parts(self, indices, rollouts.mask.shape[1]))

    def advantages_under(self, masks: Sequence[Tensor]) -> list[Tensor]:
        """Give the token advantages in a trainer's own layout: float32 (b, W) for each micro-batch, by its mask (b, W)
        of the tokens that train, 0 elsewhere. The masks mark the tokens of :attr:`Rollouts.mask`, in the same order."""
        # Masks [[1, 0], [1, 1]] and [[0, 1]] take the first three of four values, and the last.
        counts = [int(mask.sum()) for mask in masks]
        parts = self.advantages[self.rollouts.mask].split(counts)
        return [
            torch.zeros(mask.shape, dtype=torch.float32, device="cpu").masked_scatter(
                mask.cpu().bool(), part
            )
            for mask, part in zip(masks, parts, strict=True)
        ]
