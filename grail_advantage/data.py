"""The two records that every host and view shares: the responses of an update, and what a method made of them.

A host makes :class:`Rollouts`; :func:`grail_advantage.weigh.weigh` makes :class:`Weighed` of them, whose :meth:`~Weighed.table`
is the token dump. Their tensors are on the CPU; only a model has a device. A response's *index* is its row in a record, its
*place* the row in the update's batch, its *key* the host's name for it.

Shapes here and in all methods: B responses, T response tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from grail_advantage.answers.format import BOXED, AnswerFormat
from grail_advantage.answers.span import AnswerSpan, find_generated_spans
from grail_advantage.answers.text import TokenTexts, answer_text

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

    from grail_advantage.method import Method

OLD_LOG_PROBS, ENTROPY = "old_log_probs", "entropy"
"""Columns, float (B, T): log-probability of each response token under the policy before the update, at the sampling temperature,
and that policy's entropy in nats at the token's predictor position."""
DUMPED = {OLD_LOG_PROBS: "old_log_prob", ENTROPY: "entropy"}
"""The columns, by their names in the dump."""
LARGEST = 1e18
"""A larger reward or advantage trains nothing, like one that is not finite: its square leaves float32."""

_Numbers = TypeVar("_Numbers", torch.Tensor, np.ndarray)


def within_range(values: _Numbers) -> _Numbers:
    """Which rewards or advantages can train: bool, false for NaN, an infinity, and more than ``LARGEST``."""
    return abs(values) <= LARGEST


def outcome_of(reward: float | None) -> str | None:
    """``right`` for a reward above 0, ``wrong`` for another; ``None`` for none or one that is not finite."""
    if reward is None or not math.isfinite(reward):
        return None
    return "right" if reward > 0 else "wrong"


def token_mean(values: torch.Tensor, mask: torch.Tensor) -> float:
    """Mean over the tokens of the mask; 0 without any."""
    return float(torch.where(mask, values, 0.0).double().sum() / mask.sum().clamp(min=1))


def runs(marked: np.ndarray) -> list[tuple[int, int]]:
    """The half-open ranges of marked tokens (T,); of those that the model wrote, its turns."""
    edges = np.diff(np.asarray(marked, dtype=bool), prepend=False, append=False).nonzero()[0].tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def checked(name: str, values: Any, kind: str, *shapes: tuple[int, ...]) -> torch.Tensor:
    """A tensor of an argument, on the CPU and without a graph: ``flags`` as bool, ``whole`` as int64.

    Raises:
        ValueError: no dense tensor of ``flags`` (bool, or 0 and 1), ``whole`` numbers, ``floats`` or ``numbers`` (the last two) of
            one of these shapes; naming the argument.
    """
    if not isinstance(values, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(values).__name__}; use torch.tensor(...)")
    if values.layout != torch.strided or values.is_nested or values.is_meta or values.is_quantized:
        raise ValueError(f"{name} must be a dense tensor with values, got {values.layout} on {values.device}")
    floats, known = values.is_floating_point() and values.dtype.itemsize > 1, str(values.dtype)[6:].rstrip("0123468")
    fits = {"whole": known in ("int", "uint"), "floats": floats, "numbers": floats or known in ("int", "uint")}
    if not fits.get(kind, floats or known in ("int", "uint", "bool")):
        raise ValueError(f"{name} must hold {kind.replace('whole', 'whole numbers')}, got {values.dtype}")
    if shapes and tuple(values.shape) not in shapes:
        raise ValueError(f"{name} must have the shape {' or '.join(map(str, shapes))}, got {tuple(values.shape)}")
    values = values.detach().cpu()
    if kind == "flags" and values.dtype != torch.bool and ((values != 0) & (values != 1)).any():
        raise ValueError(f"{name} must be bool or hold 0 and 1; a mask says which tokens or responses are meant")
    return {"flags": values.bool, "whole": values.long}.get(kind, lambda: values)()


@dataclass(frozen=True)
class Example:
    """A response's prompt and data, for methods that ask differently."""

    messages: Sequence[Mapping[str, Any]]
    """The prompt as a chat, before the chat template."""
    columns: Mapping[str, Any]
    """The other columns of the response's data set; ``reward_model.ground_truth`` is the ground truth in verl's layout."""
    template_options: Mapping[str, Any]
    """Further arguments of the chat template, such as ``enable_thinking``."""


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Responses of an update, checked where they are made. Four fields are needed, the others as the method reads them.

    Example: the prompt ``[5, 6]`` and a response ``[7, 9, 9, 8]`` whose middle a tool wrote have
    ``prompts=[tensor([5, 6])]``, ``responses=[tensor([7, 9, 9, 8])]``, ``mask=[[True, False, False, True]]`` and
    ``advantages=[-0.5]``.

    Raises:
        ValueError: parts that do not fit together, naming the one that does not.
    """

    prompts: Sequence[torch.Tensor]
    """int64 (P,) each, at least one token."""
    responses: Sequence[torch.Tensor]
    """int64 (T,) each; with what tools and users said in them."""
    mask: torch.Tensor
    """bool (B, T): the tokens that train. T is that of the longest response."""
    advantages: torch.Tensor
    """(B,), before weighting. A response with NaN, as without a reward, an infinity or more than ``LARGEST`` trains nothing."""
    tokenizer: PreTrainedTokenizerBase | None = None
    answer: AnswerFormat = BOXED
    """The format of answers."""
    written: torch.Tensor | None = None
    """bool (B, T): the tokens that the model wrote; by default those that train."""
    truncated: torch.Tensor | None = None
    """bool (B,): hit the length limit without an end token."""
    masked: torch.Tensor | None = None
    """bool (B,): train nothing, whatever their advantage."""
    groups: torch.Tensor | None = None
    """int64 (B,), at least 0; responses with the same number answer the same prompt."""
    rewards: torch.Tensor | None = None
    """float (B,): the sum of each response's rewards, NaN where it could not be scored."""
    sessions: Sequence[tuple[Any, int]] | None = None
    """Each response's conversation, and its number in it. By default every response is a conversation of its own."""
    examples: Sequence[Example | None] | None = None
    """The prompts and data, ``None`` for a response that only fills up the batch."""
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """By name, one value a response of any kind, for methods that read ``field:NAME``."""
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """``OLD_LOG_PROBS`` and ``ENTROPY``, as far as the host has them already."""
    keys: Sequence[str] = ()
    """By default the places."""
    places: Sequence[int] = ()
    """By default 0, 1, 2, ..."""
    facts: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """For the dump, one value or ``None`` a response: ``id``, ``ground_truth``, ``outcome`` and ``prompt`` (texts), ``reward``
    (a number), ``labels`` (a mapping)."""
    mean: Callable[[torch.Tensor, torch.Tensor], float] = token_mean
    """``mean(values, mask)``, (B, T) both, as the run's loss takes it."""
    step: int = 0
    """Training step, for methods that change over a run."""
    span: str = "last"
    """Which complete answer of a response counts, ``first`` or ``last``; set by :meth:`for_method`."""
    known_spans: dict[str, list[AnswerSpan | None]] = field(default_factory=dict, repr=False)
    """See :meth:`spans`, which adds to it."""

    def __post_init__(self) -> None:
        count, width = len(self.responses), max(map(len, self.responses), default=0)
        own = {"written": self.mask} if self.written is None else {}
        own |= {"places": range(count)} if not len(self.places) else {}
        own |= {"keys": list(map(str, self.places or range(count)))} if not len(self.keys) else {}
        for name, values in own.items():
            object.__setattr__(self, name, values)
        kinds = {"mask": "flags", "written": "flags", "truncated": "flags", "masked": "flags"}
        kinds |= {"advantages": "numbers", "groups": "whole", "rewards": "numbers"}
        for name, kind in kinds.items():
            values, shape = getattr(self, name), (count, width) if name in ("mask", "written") else (count,)
            if values is not None or name in ("mask", "advantages"):
                object.__setattr__(self, name, checked(name, values, kind, shape))
        columns = {name: checked(name, values, "floats", (count, width)) for name, values in self.columns.items()}
        object.__setattr__(self, "columns", columns)
        for name in ("prompts", "responses"):
            object.__setattr__(self, name, [values.detach().cpu() for values in getattr(self, name)])
        lists = {name: getattr(self, name) for name in ("prompts", "examples", "sessions", "keys", "places")}
        lists |= {f"fields[{name!r}]": values for name, values in self.fields.items()}
        lists |= {f"facts[{name!r}]": values for name, values in self.facts.items()}
        for name, entries in lists.items():
            if entries is not None and (isinstance(entries, str) or getattr(entries, "ndim", 1) != 1):
                raise ValueError(f"{name} must be a list with one value a response, got {entries!r}")
            if entries is not None and len(entries) != count:
                raise ValueError(f"{name} must be one a response, {count} of them; got {len(entries)}")
        for index, (prompt, response) in enumerate(zip(self.prompts, self.responses, strict=True)):
            if len(response) and not len(prompt):
                raise ValueError(f"response {index} has no prompt token before it; add at least one")
        if self.groups is not None and (self.groups < 0).any():
            raise ValueError(f"groups holds {int(self.groups.min())}; number them from 0, as torch.unique does")

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def valid(self) -> torch.Tensor:
        """bool (B,): with a token that trains."""
        return self.mask.any(dim=1)

    @property
    def trains(self) -> torch.Tensor:
        """bool (B,): with a token that trains, and not masked."""
        return self.valid if self.masked is None else self.valid & ~self.masked

    @property
    def padded_length(self) -> int:
        """Positions of a row where prompts and responses are padded to the longest."""
        return max(map(len, self.prompts), default=0) + self.mask.shape[1]

    @cached_property
    def tokens(self) -> torch.Tensor:
        """int64 (B, T): the ids that the model wrote, -1 elsewhere: on a tool's output, and after the end."""
        if not len(self):
            return torch.full(self.mask.shape, -1)
        ids = pad_sequence(list(self.responses), batch_first=True, padding_value=-1).long()
        return torch.where(self.written, ids, -1)

    def spans(self, which: str) -> list[AnswerSpan | None]:
        """The first or the last complete answer of each response among the tokens that the model wrote."""
        if which not in self.known_spans:
            generated = [ids[: len(response)] for ids, response in zip(self.tokens, self.responses, strict=True)]
            self.known_spans[which] = list(find_generated_spans(generated, self.tokenizer, which, self.answer))
        return self.known_spans[which]

    @cached_property
    def answers(self) -> list[AnswerSpan | None]:
        """The answer that counts of each response."""
        return self.spans(self.span)

    @cached_property
    def answered(self) -> torch.Tensor:
        """bool (B,)"""
        return torch.tensor([span is not None for span in self.answers], dtype=torch.bool)

    @cached_property
    def bounds(self) -> torch.Tensor:
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
        """Of each response, how many turns its conversation took in the responses before it, as far as these are here."""
        turns, before = [len(runs(written)) for written in self.written.numpy()], [0] * len(self)
        for indices in self.conversations:
            for index, count in zip(indices, accumulate((turns[i] for i in indices), initial=0), strict=False):
                before[index] = count
        return before

    def for_method(self, method: Method) -> Rollouts:
        """The responses as a method sees them: with advantage 0 where they must not train, and nothing that it does not read.

        Raises:
            ValueError: something that the method reads is not there.
        """
        for name in ("groups", "examples", "rewards"):
            if name in method.reads and getattr(self, name) is None:
                raise ValueError(f"{method.name} reads {name}; pass {name}=")
        for name in method.field_names:
            if name not in self.fields:
                raise ValueError(f"{method.name} reads field:{name}; pass fields={{{name!r}: ...}}")
        masked = ~within_range(self.advantages)
        if self.masked is not None:
            masked |= self.masked
        if self.truncated is not None and method.mask_truncated:
            masked |= self.truncated
        advantages = torch.where(masked, 0.0, self.advantages)
        return replace(self, advantages=advantages, masked=masked, columns={}, span=method.span)

    def row(self, index: int) -> Row:
        """One response for a pass through the model."""
        prompt, response = self.prompts[index], self.responses[index]
        return Row(
            tokens=torch.cat([prompt, response]),
            start=len(prompt),
            length=len(response),
            answer=self.answers[index],
            advantage=float(self.advantages[index]),
            group=index if self.groups is None else int(self.groups[index]),
            index=index,
            example=self.examples[index] if self.examples is not None else None,
        )

    def part(self, indices: Sequence[int]) -> Rollouts:
        """Some responses alone, in this order, as copies without the tokenizer: for another thread or process."""
        width = max((len(self.responses[index]) for index in indices), default=0)
        names = vars(self).keys() & set(self.__dataclass_fields__) - _SHARED
        return replace(self, tokenizer=None, **{name: _of_rows(getattr(self, name), indices, width) for name in names})


_SHARED = {"tokenizer", "answer", "mean", "step", "span"}
"""Fields of :class:`Rollouts` that its responses share."""


def joined(parts: Sequence[Rollouts]) -> Rollouts:
    """Responses of several processes as one record, one part's after the other's. All parts have the same columns and lists."""
    width = max(part.mask.shape[1] for part in parts)

    def one_after_the_other(values: Sequence[Any]) -> Any:
        if isinstance(values[0], torch.Tensor):  # the shorter ones end in zeros
            return torch.cat([of if of.ndim == 1 else pad(of, (0, width - of.shape[1])) for of in values])
        if isinstance(values[0], Mapping):
            return {name: one_after_the_other([of[name] for of in values]) for name in values[0]}
        return None if values[0] is None else [entry for of in values for entry in of]

    names = set(parts[0].__dataclass_fields__) - _SHARED
    changes: dict[str, Any] = {name: one_after_the_other([getattr(part, name) for part in parts]) for name in names}
    return replace(parts[0], **changes)


def _of_rows(values: Any, indices: Sequence[int], width: int) -> Any:
    """Some rows of a part of a record: of a tensor (B,), or (B, T) up to a width; of a list; of each entry of a mapping."""
    if isinstance(values, torch.Tensor):
        return values[list(indices)] if values.ndim == 1 else values[list(indices), :width].clone()
    if isinstance(values, Mapping):
        return {name: _of_rows(of, indices, width) for name, of in values.items()}
    return None if values is None else [values[index] for index in indices]


@dataclass(frozen=True)
class Row:
    """One response on its way through the model."""

    tokens: torch.Tensor
    """int64 (S,); prompt + response. A method may cut it where nothing matters any more, or change the prompt."""
    start: int
    """Index of the first response token, at least 1."""
    length: int
    """Response tokens, of which ``tokens`` may hold fewer."""
    answer: Any
    """:class:`AnswerSpan` relative to the response; never ``None`` in a method with ``needs_answer``."""
    advantage: float
    group: int
    """Rows with the same number answer the same prompt; -1: a copy that fills up a rank, whose scores nobody reads."""
    index: int
    """In the record."""
    example: Example | None = None
    """For methods that read ``examples``, until :meth:`Method.prepare`."""


@dataclass(frozen=True)
class RowScores:
    """Results of a pass for one row."""

    scores: torch.Tensor
    """float32; of the response tokens from the first on. Tokens after the last score have none."""
    norms: torch.Tensor | None = None
    """1-D float32: the gradient norms of the positions looked at, for the metrics; of a pass with gradients."""


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """What a method made of an update's responses."""

    method: Method
    rollouts: Rollouts
    """The host's, with the columns that the method read."""
    selected: torch.Tensor
    """bool (B,): needed scores."""
    failed: torch.Tensor
    """bool (B,): selected, with a score or weight that is not finite."""
    scores: torch.Tensor
    """float32 (B, T); NaN where there is none."""
    weights: torch.Tensor
    """float32 (B, T); 0 outside the mask. 1 inside for a method that gives advantages."""
    advantages: torch.Tensor
    """float32 (B, T): ``A_t``, 0 outside the mask."""
    by_score: torch.Tensor
    """bool (B, T): the weight comes from the token's score, not from an override."""
    low: torch.Tensor
    """bool (B, T): the weight from the score met its map's lower bound."""
    high: torch.Tensor
    """Likewise the upper one."""
    no_scores: Sequence[str | None] = ()
    """Why each response has no scores of its own; ``None`` where it has."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Figures of the batch, see :mod:`grail_advantage.metrics`."""

    def part(self, indices: Sequence[int]) -> Weighed:
        """Some responses alone, see :meth:`Rollouts.part`."""
        rollouts = self.rollouts.part(indices)
        names = self.__dataclass_fields__.keys() - {"method", "rollouts", "metrics"}
        of = {name: _of_rows(getattr(self, name), indices, rollouts.mask.shape[1]) for name in names}
        return replace(self, rollouts=rollouts, **of)

    def table(self, texts: TokenTexts, others: Mapping[str, Weighed] | None = None) -> pa.Table:
        """The responses as rows of the token dump: all columns of :data:`grail_advantage.dump.schema.SCHEMA` but ``step`` and
        ``update``. This is the only place that makes such rows.

        Args:
            texts: of the run's tokenizer.
            others: of several methods over the same responses, by name, for the column ``methods``.
        """
        import pyarrow as pa

        from grail_advantage.dump.schema import SCHEMA, as_utf8

        r, facts, nothing = self.rollouts, self.rollouts.facts, [None] * len(self.rollouts)
        ids, spans = [response.numpy() for response in r.responses], r.spans(self.method.span)
        tokens = [texts(of) for of in ids]

        def a_token(values: torch.Tensor) -> list[np.ndarray]:
            return [of[: len(response)] for of, response in zip(values.numpy(), ids, strict=True)]

        def text(values: Sequence[Any]) -> list[str | None]:
            return [as_utf8(value) for value in values]

        usable = r.mask & within_range(r.advantages)[:, None]
        known = {  # some hosts have values for a tool's tokens as well
            of_dump: a_token(torch.where(r.written, r.columns[name].float(), torch.nan))
            for name, of_dump in DUMPED.items()
            if name in r.columns
        }
        labels = [
            {**_tool_label(written[: len(response)]), **(label or {})}
            for written, response, label in zip(r.written, ids, facts.get("labels", nothing), strict=True)
        ]
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
            "tokens": list(map(text, tokens)),
            "mask": a_token(r.mask),
            "score": a_token(self.scores),
            "weight": a_token(self.weights),
            "base_advantage": a_token(torch.where(usable, r.advantages[:, None], 0.0).float()),
            "advantage": a_token(self.advantages),
            **known,
            "methods": [
                [{"name": as_utf8(name), **other._entry(index, len(of))} for name, other in (others or {}).items()]
                for index, of in enumerate(ids)
            ],
            "labels": [json.dumps(label) if label else None for label in labels],
        }
        schema = pa.schema([column for column in SCHEMA if column.name not in ("step", "update")])
        arrays = [pa.array(columns.get(column.name, nothing), column.type) for column in schema]
        return pa.Table.from_arrays(arrays, schema=schema)

    def _entry(self, index: int, length: int) -> dict[str, Any]:
        """Of the column ``methods``."""
        of = {"score": self.scores, "weight": self.weights, "advantage": self.advantages}
        entry: dict[str, Any] = {name: values[index, :length].numpy() for name, values in of.items()}
        entry["advantage"] = entry["advantage"] if self.method.gives == "advantages" else None
        return entry | {"no_scores": self.no_scores[index]}


def _tool_label(written: torch.Tensor) -> dict[str, list[list[int]]]:
    """The half-open ranges of the tokens that a tool or a user wrote between the model's turns, as a label."""
    tool = [list(edges) for edges in runs(~written.numpy())]
    return {"tool": tool} if tool else {}
