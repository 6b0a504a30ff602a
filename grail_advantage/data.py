"""The two records that every host and view shares: the responses of an update, and what a method made of them. Tensors
are on the CPU; only a model has a device. A response's *index* is its row in a record, its *place* that in the update's
batch, its *key* the host's name for it. Shapes, here and in all methods: B responses, T response tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from grail_advantage.answers.format import BOXED, AnswerFormat
from grail_advantage.answers.span import AnswerSpan, find_generated_spans
from grail_advantage.answers.text import TokenTexts, answer_text

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

    from grail_advantage.method import Method

OLD_LOG_PROBS, ENTROPY, ROLLOUT_LOG_PROBS = "old_log_probs", "entropy", "rollout_log_probs"
"""Columns, float (B, T): each response token's log-probability under the policy before the update, at the sampling
temperature, that policy's entropy in nats at the token's predictor position, and the log-probability that the engine
gave which sampled the token (for the dump alone)."""
DUMPED = {OLD_LOG_PROBS: "old_log_prob", ENTROPY: "entropy"}  # by their names in the dump
LARGEST = 1e18  # a larger reward or advantage trains nothing, like one that is not finite: its square leaves float32
_Numbers = TypeVar("_Numbers", Tensor, np.ndarray)


def within_range(values: _Numbers) -> _Numbers:
    """Which rewards or advantages can train: bool, false for NaN, an infinity, and more than ``LARGEST``."""
    return abs(values) <= LARGEST


def outcome_of(reward: float | None) -> str | None:
    """``right`` for a reward above 0, ``wrong`` for another; ``None`` for none or one that is not finite."""
    return None if reward is None or not math.isfinite(reward) else "right" if reward > 0 else "wrong"


def token_mean(values: Tensor, mask: Tensor) -> float:
    """Mean over the tokens of the mask; 0 without any."""
    return float(torch.where(mask, values, 0.0).double().sum() / mask.sum().clamp(min=1))


def runs(marked: np.ndarray) -> list[tuple[int, int]]:
    """The half-open ranges of marked tokens (T,); of those that the model wrote, its turns."""
    edges = np.diff(np.asarray(marked, dtype=bool), prepend=False, append=False).nonzero()[0].tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def checked(name: str, values: Any, kind: str, shape: Sequence[int] | None = None) -> Tensor:
    """A tensor of an argument on the CPU, without a graph: ``flags`` (bool, or 0 and 1) as bool, ``whole`` numbers as
    int64, ``floats`` or ``numbers`` (either). ValueError, naming the argument, for anything else or another shape."""
    if not isinstance(values, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(values).__name__}; use torch.tensor(...)")
    dtype, dense = values.dtype, values.layout == torch.strided and not (values.is_nested or values.is_meta)
    whole, floats = str(dtype)[6:9] in ("int", "uin"), dtype.is_floating_point and dtype.itemsize > 1
    kinds = {"whole": whole, "floats": floats, "numbers": whole or floats}
    fits = dense and kinds.get(kind, whole or floats or dtype == torch.bool)
    if not fits or (shape is not None and tuple(values.shape) != tuple(shape)):
        got = f"{dtype} of shape {tuple(values.shape)}, {values.layout}, on {values.device}"
        raise ValueError(f"{name} must be a dense tensor of {kind} of shape {shape and tuple(shape)}, got {got}")
    values = values.detach().cpu()
    if kind == "flags" and dtype != torch.bool and ((values != 0) & (values != 1)).any():
        raise ValueError(f"{name} must be bool or hold 0 and 1; a mask says which tokens or responses are meant")
    return values.bool() if kind == "flags" else values.long() if kind == "whole" else values


@dataclass(frozen=True)
class Example:
    """A response's prompt and data, for methods that ask differently."""

    messages: Sequence[Mapping[str, Any]]  # before the chat template
    columns: Mapping[str, Any]  # the data set's others; verl keeps the truth in reward_model.ground_truth
    template_options: Mapping[str, Any]  # of the chat template, such as enable_thinking


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Responses of an update, checked where they are made. Four fields are needed, the others as the method reads them.

    Example: the prompt ``[5, 6]`` and a response ``[7, 9, 9, 8]`` whose middle a tool wrote have
    ``prompts=[tensor([5, 6])]``, ``responses=[tensor([7, 9, 9, 8])]``, ``mask=[[True, False, False, True]]`` and
    ``advantages=[-0.5]``.

    Raises:
        ValueError: parts that do not fit together, naming the one that does not.
    """

    prompts: Sequence[Tensor]  # int64 (P,) each, at least one token
    responses: Sequence[Tensor]  # int64 (T,) each; with what tools and users said in them
    mask: Tensor  # bool (B, T): the tokens that train; T is that of the longest response
    advantages: Tensor  # (B,), before weighting; NaN, as without a reward, or more than LARGEST trains nothing
    tokenizer: PreTrainedTokenizerBase = None
    answer: AnswerFormat = BOXED
    written: Tensor = None  # bool (B, T): the tokens that the model wrote; by default those that train
    truncated: Tensor | None = None  # bool (B,): hit the length limit without an end token
    masked: Tensor | None = None  # bool (B,): train nothing, whatever their advantage
    groups: Tensor = None  # int64 (B,), at least 0; the same for responses to one prompt
    rewards: Tensor = None  # (B,): the sum of each response's rewards, NaN where it could not be scored
    sessions: Sequence[tuple[Any, int]] | None = None  # each response's conversation, and its number in it
    examples: Sequence[Example | None] | None = None
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # one value a response, for ``field:NAME``
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # those above that the host has already
    keys: Sequence[str] = ()
    places: Sequence[int] = ()  # by default 0, 1, 2, ... both
    # For the dump: id, ground_truth, outcome, prompt, reward, labels
    facts: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    mean: Callable[[Tensor, Tensor], float] = token_mean  # of values (B, T) under a mask, as the run's loss takes it
    step: int = 0
    span: str = "last"  # which complete answer of a response counts; set by for_method()
    known_spans: dict[str, list[AnswerSpan | None]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        count, width = len(self.responses), max(map(len, self.responses), default=0)
        put = partial(object.__setattr__, self)
        for name in ("prompts", "responses"):
            put(name, [of.detach().cpu() for of in getattr(self, name)])
        put("places", self.places if len(self.places) else range(count))
        put("keys", self.keys if len(self.keys) else list(map(str, self.places)))
        put("columns", {name: checked(name, of, "floats", (count, width)) for name, of in self.columns.items()})
        put("written", self.mask if self.written is None else self.written)
        for name, kind in _TENSORS.items():
            value, shape = getattr(self, name), (count, width) if name in ("mask", "written") else (count,)
            if value is not None or name in ("mask", "advantages"):
                put(name, checked(name, value, kind, shape))
        lists = {name: getattr(self, name) for name in ("prompts", "examples", "sessions", "keys", "places")}
        for kind in ("fields", "facts"):
            lists |= {f"{kind}[{name!r}]": of for name, of in getattr(self, kind).items()}
        for name, of in lists.items():
            rank = getattr(of, "ndim", int(hasattr(of, "__len__") and not isinstance(of, str)))
            if (of is not None or "[" in name) and (rank != 1 or len(of) != count):
                raise ValueError(f"{name} must be a list with one value a response, {count} of them; got {of!r}")
        if alone := [i for i, of in enumerate(self.responses) if len(of) and not len(self.prompts[i])]:
            raise ValueError(f"response {alone[0]} has no prompt token before it; add at least one")
        if self.groups is not None and (self.groups < 0).any():
            raise ValueError(f"groups holds {int(self.groups.min())}; number them from 0, as torch.unique does")

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def valid(self) -> Tensor:
        """bool (B,): with a token that trains; :attr:`trains`: and not masked."""
        return self.mask.any(dim=1)

    @property
    def trains(self) -> Tensor:
        return self.valid if self.masked is None else self.valid & ~self.masked

    @property
    def padded_length(self) -> int:
        """Positions of a row where prompts and responses are padded to the longest."""
        return max(map(len, self.prompts), default=0) + self.mask.shape[1]

    @cached_property
    def tokens(self) -> Tensor:
        """int64 (B, T): the ids that the model wrote, -1 elsewhere: on a tool's output, and after the end."""
        ids = torch.full(self.mask.shape, -1)
        for row, response in zip(ids, self.responses, strict=True):
            row[: len(response)] = response
        return torch.where(self.written, ids, -1)

    def spans(self, which: str) -> list[AnswerSpan | None]:
        """The first or the last complete answer of each response among the tokens that the model wrote."""
        if which not in self.known_spans:
            generated = [ids[: len(response)] for ids, response in zip(self.tokens, self.responses, strict=True)]
            self.known_spans[which] = list(find_generated_spans(generated, self.tokenizer, which, self.answer))
        return self.known_spans[which]

    @cached_property
    def answers(self) -> list[AnswerSpan | None]:
        return self.spans(self.span)

    @cached_property
    def answered(self) -> Tensor:
        return torch.tensor([span is not None for span in self.answers], dtype=torch.bool)

    @cached_property
    def bounds(self) -> Tensor:
        """int64 (B, 3): where each answer begins, and where its content begins and ends; zeros without an answer."""
        of = [(span.start, span.content_start, span.content_end) if span else (0, 0, 0) for span in self.answers]
        return torch.tensor(of, dtype=torch.long).reshape(-1, 3)

    @cached_property
    def conversations(self) -> list[list[int]]:
        """The responses of each session, in their order."""
        found: dict[Any, list[tuple[int, int]]] = {}
        for index, (name, number) in enumerate(self.sessions or [(index, 0) for index in range(len(self))]):
            found.setdefault(name, []).append((number, index))
        return [[index for _, index in sorted(of)] for of in found.values()]

    @property
    def turns_before(self) -> list[int]:
        """How many turns each response's conversation took in the responses before it, as far as these are here."""
        turns, before = [len(runs(written)) for written in self.written.numpy()], [0] * len(self)
        for indices in self.conversations:
            for one, after in pairwise(indices):
                before[after] = before[one] + turns[one]
        return before

    def for_method(self, method: Method) -> Rollouts:
        """As a method sees them, with advantage 0 where they must not train. ValueError: it reads what is not there."""
        lacks = [name for name in method.reads & {"groups", "examples", "rewards"} if getattr(self, name) is None]
        lacks += [f"fields of {name}" for name in method.field_names if name not in self.fields]
        if lacks:
            raise ValueError(f"{method.name} reads {', '.join(sorted(lacks))}, which the rollouts lack; pass them")
        masked = ~within_range(self.advantages)
        for flags in (self.masked, self.truncated if method.mask_truncated else None):
            masked = masked if flags is None else masked | flags
        advantages = torch.where(masked, 0.0, self.advantages)
        return replace(self, advantages=advantages, masked=masked, columns={}, span=method.span)

    def row(self, index: int) -> Row:
        """One response for a pass through the model."""
        prompt, response = self.prompts[index], self.responses[index]
        group = index if self.groups is None else int(self.groups[index])
        example = self.examples[index] if self.examples is not None else None
        tokens, advantage = torch.cat([prompt, response]), float(self.advantages[index])
        return Row(tokens, len(prompt), len(response), self.answers[index], advantage, group, index, example)

    def part(self, indices: Sequence[int]) -> Rollouts:
        """Some responses alone, in this order, as copies without the tokenizer: for another thread or process."""
        width = max((len(self.responses[index]) for index in indices), default=0)
        names = self.__dataclass_fields__.keys() - _SHARED
        return replace(self, tokenizer=None, **{name: _of_rows(getattr(self, name), indices, width) for name in names})


_SHARED = {"tokenizer", "answer", "mean", "step", "span"}
_TENSORS = {"mask": "flags", "written": "flags", "truncated": "flags", "masked": "flags"}
_TENSORS |= {"advantages": "numbers", "groups": "whole", "rewards": "numbers"}
"""Fields of :class:`Rollouts` that its responses share, and those that are tensors."""


def joined(parts: Sequence[Rollouts]) -> Rollouts:
    """Responses of several processes as one record, part by part. All have the same columns and lists."""
    width = max(part.mask.shape[1] for part in parts)

    def of_all(values: Sequence[Any]) -> Any:
        if isinstance(values[0], Tensor):  # the shorter ones end in zeros
            return torch.cat([of if of.ndim == 1 else pad(of, (0, width - of.shape[1])) for of in values])
        if isinstance(values[0], Mapping):
            return {name: of_all([of[name] for of in values]) for name in values[0]}
        return None if values[0] is None else [entry for of in values for entry in of]

    names = parts[0].__dataclass_fields__.keys() - _SHARED
    return replace(parts[0], **{name: of_all([getattr(part, name) for part in parts]) for name in names})


def _of_rows(values: Any, indices: Sequence[int], width: int) -> Any:
    """Some rows of a tensor (B,), or (B, T) up to a width, of a list, or of each entry of a mapping."""
    if isinstance(values, Tensor):
        return values[list(indices)] if values.ndim == 1 else values[list(indices), :width].clone()
    if isinstance(values, Mapping):
        return {name: _of_rows(of, indices, width) for name, of in values.items()}
    return None if values is None else [values[index] for index in indices]


@dataclass(frozen=True)
class Row:
    """One response on its way through the model."""

    tokens: Tensor  # int64: prompt + response; a method may cut it where nothing matters any more, or change the prompt
    start: int  # index of the first response token, at least 1
    length: int  # response tokens, of which ``tokens`` may hold fewer
    answer: Any  # AnswerSpan relative to the response; never None in a method with needs_answer
    advantage: float
    group: int  # -1: a copy that fills up a rank, whose scores nobody reads
    index: int
    example: Example | None = None


@dataclass(frozen=True)
class RowScores:
    """Results of a pass for one row."""

    scores: Tensor  # float32, of the response tokens from the first on; tokens after the last score have none
    norms: Tensor | None = None  # 1-D float32: the gradient norms of all positions looked at, for the metrics


@dataclass(frozen=True)
class Weighed:
    """What a method made of an update's responses."""

    method: Method
    rollouts: Rollouts  # the host's, with the columns that the method read
    selected: Tensor  # bool (B,): needed scores
    failed: Tensor  # bool (B,): selected, with a score or weight that is not finite
    scores: Tensor  # float32 (B, T); NaN where there is none
    weights: Tensor  # float32 (B, T), 0 outside the mask; 1 inside for a method that gives advantages
    advantages: Tensor  # float32 (B, T): A_t, 0 outside the mask
    by_score: Tensor  # bool (B, T): the weight comes from the token's score, not from an override
    low: Tensor  # bool (B, T): the weight from the score met its map's lower bound
    high: Tensor
    no_scores: Sequence[str | None] = ()  # why each response has no scores of its own; None where it has
    metrics: Mapping[str, float] = field(default_factory=dict)  # see grail_advantage.metrics

    def part(self, indices: Sequence[int]) -> Weighed:
        """Some responses alone, see :meth:`Rollouts.part`."""
        rollouts = self.rollouts.part(indices)
        names = self.__dataclass_fields__.keys() - {"method", "rollouts", "metrics"}
        of = {name: _of_rows(getattr(self, name), indices, rollouts.mask.shape[1]) for name in names}
        return replace(self, rollouts=rollouts, **of)

    def table(self, texts: TokenTexts, others: Mapping[str, Weighed] | None = None) -> pa.Table:
        """The responses as rows of the token dump, by the texts of the run's tokenizer: all columns of
        :data:`grail_advantage.dump.SCHEMA` but ``step`` and ``update``. ``others``: of several methods over the
        same responses, by name. This is the only place that makes such rows."""
        import pyarrow as pa

        from grail_advantage.dump import SCHEMA, as_utf8

        r, facts, nothing = self.rollouts, self.rollouts.facts, [None] * len(self.rollouts)
        ids, spans = [response.numpy() for response in r.responses], r.spans(self.method.span)
        tokens = [texts(of) for of in ids]

        def a_token(values: Tensor) -> list[np.ndarray]:
            return [of[: len(response)] for of, response in zip(values.numpy(), ids, strict=True)]

        def text(values: Sequence[Any]) -> list[str | None]:
            return [as_utf8(value) for value in values]

        def entry(name: str, of: Weighed) -> list[dict[str, Any]]:
            given = a_token(of.advantages) if of.method.gives == "advantages" else nothing
            columns = zip(a_token(of.scores), given, a_token(of.weights), of.no_scores, strict=True)
            names = ("score", "advantage", "weight", "no_scores")
            return [{"name": as_utf8(name), **dict(zip(names, row, strict=True))} for row in columns]

        entries = [entry(name, of) for name, of in (others or {}).items()]
        # Between the model's turns a tool or a user wrote.
        tool = [runs(~of[: len(response)].numpy()) for of, response in zip(r.written, ids, strict=True)]
        labels = [
            {**({"tool": of} if of else {}), **(label or {})}
            for of, label in zip(tool, facts.get("labels", nothing), strict=True)
        ]
        usable = r.mask & within_range(r.advantages)[:, None]
        columns: dict[str, Sequence[Any]] = {
            "row": r.places,
            "group": r.places if r.groups is None else r.groups.tolist(),
            "key": text(r.keys),
            "prompt": text(facts.get("prompt") or [texts.decode(prompt.tolist()) for prompt in r.prompts]),
            "response": text(["".join(of) for of in tokens]),
            "reward": facts.get("reward", nothing),
            **{name: text(facts.get(name, nothing)) for name in ("id", "ground_truth", "outcome")},
            "answer": text([answer_text(of, span, r.answer) for of, span in zip(tokens, spans, strict=True)]),
            "no_scores": self.no_scores,
            "truncated": [False] * len(ids) if r.truncated is None else r.truncated.tolist(),
            "span": [list(vars(span).values()) if span else None for span in spans],
            "prompt_ids": [prompt.numpy() for prompt in r.prompts],
            "token_ids": ids,
            "tokens": tokens,
            "mask": a_token(r.mask),
            "score": a_token(self.scores),
            "weight": a_token(self.weights),
            "base_advantage": a_token(torch.where(usable, r.advantages[:, None], 0.0).float()),
            "advantage": a_token(self.advantages),
            "methods": list(zip(*entries, strict=True)) if entries else [[]] * len(ids),
            "labels": [json.dumps(label) if label else None for label in labels],
        }
        for name in r.columns:  # some hosts have values for a tool's tokens as well
            columns[DUMPED.get(name, name)] = a_token(torch.where(r.written, r.columns[name].float(), torch.nan))
        schema = pa.schema([column for column in SCHEMA if column.name not in ("step", "update")])
        arrays = [pa.array(columns.get(column.name, nothing), column.type) for column in schema]
        return pa.Table.from_arrays(arrays, schema=schema)
