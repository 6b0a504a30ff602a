"""The two records that every host and every view share: the responses of an update, and what a method made of them.

A host, which is a trainer or a plain function, makes :class:`Rollouts`; :func:`grail_advantage.pipeline.weigh` makes a
:class:`StepRecord` of them, and :meth:`StepRecord.table` the rows of the token dump.

A response's *row* is its index in the tensors and lists of a record, its *place* that in the update's batch, and its *key* the
name that the host has for it.

Shape suffixes: B responses, P prompt tokens, T response tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from grail_advantage.answers.format import BOXED, AnswerFormat
from grail_advantage.answers.span import AnswerSpan, find_generated_spans
from grail_advantage.answers.text import TokenTexts, answer_text
from grail_advantage.batch import (
    ENTROPY,
    EXAMPLES,
    FIELD,
    GROUPS,
    MESSAGES,
    OLD_LOG_PROBS,
    REWARDS,
    TOKENS,
    Example,
    PassRow,
    RolloutBatch,
    token_mean,
    within_range,
)
from grail_advantage.receipt.tensors import check_numbers, check_tensor
from grail_advantage.signals.base import RowSelection, Signal
from grail_advantage.signals.turns import runs

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

DUMPED = {OLD_LOG_PROBS: "old_log_prob", ENTROPY: "entropy"}
"""Columns of a batch, by their names in the dump."""


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Responses of an update with all that their host knows of them, checked here once. Their tensors are on the CPU: those of
    another device are copied, so that a method never mixes devices.

    Example: the prompt ``[5, 6]`` and a response ``[7, 9, 9, 8]`` whose middle a tool wrote have
    ``prompts=[tensor([5, 6])]``, ``responses=[tensor([7, 9, 9, 8])]`` and ``mask_BT=[[True, False, False, True]]``.

    Raises:
        ValueError: parts that do not fit together, naming the one that does not.
    """

    prompts: Sequence[torch.Tensor]
    """int64 (P,) each."""
    responses: Sequence[torch.Tensor]
    """int64 (T,) each; with what tools and users said in them."""
    mask_BT: torch.Tensor
    """bool; the tokens that train. T is that of the longest response."""
    advantages_B: torch.Tensor
    """One advantage a response, before weighting. If it is not finite, or beyond :data:`grail_advantage.batch.LARGEST`, the
    response trains nothing. Give NaN to a response without a reward."""
    tokenizer: PreTrainedTokenizerBase | None
    """``None`` in a record that goes to another process."""
    answer: AnswerFormat = BOXED
    """The format of answers."""
    written_BT: torch.Tensor = None
    """bool; the tokens that the model wrote, by default those that train."""
    truncated_B: torch.Tensor | None = None
    """bool; responses that hit the length limit without an end token."""
    masked_B: torch.Tensor | None = None
    """bool; these responses train nothing, whatever their advantage."""
    groups_B: torch.Tensor | None = None
    """int64, at least 0; responses with the same number answer the same prompt."""
    rewards_B: torch.Tensor | None = None
    """float; the sum of each response's rewards, NaN where it could not be scored."""
    examples: Sequence[Example | None] | None = None
    """The prompts and data, ``None`` for a response that only fills up the batch."""
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """By name, one value a response, for methods that read ``field:NAME``."""
    columns_BT: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """float, by the names of :data:`DUMPED`: the columns that the host has already."""
    sessions: Sequence[tuple[Any, int]] | None = None
    """Each response's conversation, and its number in it. By default every response is a conversation of its own."""
    keys: Sequence[str] = ()
    """Names of the responses; by default their places."""
    places: Sequence[int] = ()
    """Indices in the update's batch; by default 0, 1, 2, ..."""
    facts: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """For the dump, one value or ``None`` a response: ``id``, ``ground_truth``, ``outcome`` and ``prompt`` (texts), ``reward``
    (a number), ``labels`` (a mapping)."""
    known_spans: dict[str, list[AnswerSpan | None]] = field(default_factory=dict, repr=False)
    """See :meth:`spans`, which adds to it."""

    def __post_init__(self) -> None:
        count = len(self.responses)
        for name, values in vars(self).items():
            if name not in ("known_spans", "facts"):
                object.__setattr__(self, name, _on_cpu(values))
        if self.written_BT is None:
            object.__setattr__(self, "written_BT", self.mask_BT)
        if not len(self.places):
            object.__setattr__(self, "places", range(count))
        if not len(self.keys):
            object.__setattr__(self, "keys", list(map(str, self.places)))
        self._check(count)

    def _check(self, count: int) -> None:
        lists = {
            "prompts": self.prompts,
            "examples": self.examples,
            "sessions": self.sessions,
            "keys": self.keys,
            "places": self.places,
        }
        lists |= {f"fields[{name!r}]": values for name, values in self.fields.items()}
        lists |= {f"facts[{name!r}]": values for name, values in self.facts.items()}
        for name, entries in lists.items():
            if entries is not None and len(entries) != count:
                raise ValueError(f"{name} must be one a response, {count} of them; got {len(entries)}")
        shape = (count, max(map(len, self.responses), default=0))
        for name in ("mask_BT", "written_BT"):
            if tuple(getattr(self, name).shape) != shape:
                raise ValueError(f"{name} must be (B, T) {shape}, got shape {tuple(getattr(self, name).shape)}")
        for name in ("advantages", "truncated", "masked", "groups", "rewards"):
            values_B = getattr(self, f"{name}_B")
            if values_B is None and name != "advantages":
                continue
            check_tensor(name, values_B)
            if tuple(values_B.shape) != shape[:1]:
                raise ValueError(f"{name} must be one number a response, shape ({count},); got {tuple(values_B.shape)}")
        for row, (prompt_P, response_T) in enumerate(zip(self.prompts, self.responses, strict=True)):
            if len(response_T) and not len(prompt_P):
                raise ValueError(f"response {row} has no prompt token before it; add at least one")
        self._check_groups()

    def _check_groups(self) -> None:
        groups_B = self.groups_B
        if groups_B is None:
            return
        check_numbers("groups", groups_B, "whole numbers")
        if (groups_B < 0).any():
            raise ValueError(
                f"groups holds {int(groups_B.min())}; numbers must be at least 0, as those of "
                "torch.unique(groups, return_inverse=True)[1]"
            )

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def lengths(self) -> list[int]:
        """Tokens of prompt and response."""
        return [len(prompt) + len(response) for prompt, response in zip(self.prompts, self.responses, strict=True)]

    @property
    def padded_length(self) -> int:
        """Positions of a row where prompts and responses are padded to the longest."""
        return max(map(len, self.prompts), default=0) + max(map(len, self.responses), default=0)

    @property
    def written(self) -> list[torch.Tensor]:
        """The responses with -1, a token without text, in place of the tokens that the model did not write."""
        return [
            torch.where(written_T[: len(response_T)], response_T, -1)
            for written_T, response_T in zip(self.written_BT, self.responses, strict=True)
        ]

    def spans(self, which: str) -> list[AnswerSpan | None]:
        """The first or the last complete answer of each response among the tokens that the model wrote."""
        if which not in self.known_spans:
            self.known_spans[which] = list(find_generated_spans(self.written, self.tokenizer, which, self.answer))
        return self.known_spans[which]

    def batch(
        self,
        signal: Signal,
        mean: Callable[[torch.Tensor, torch.Tensor], float] = token_mean,
        step: int = 0,
    ) -> RolloutBatch:
        """The responses as a method sees them: with what it reads and no more, and with advantage 0 where a response is masked.

        Args:
            signal: the method.
            mean: of (B, T) values under a mask, as the run's loss takes it.
            step: training step.

        Raises:
            ValueError: something that the method reads is not there.
        """
        for name, given in ((GROUPS, self.groups_B), (EXAMPLES, self.examples), (REWARDS, self.rewards_B)):
            if name in signal.reads and given is None:
                raise ValueError(f"{signal.name} reads {name}; pass {name}=")
        for name in signal.field_names:
            if name not in self.fields:
                raise ValueError(f"{signal.name} reads {FIELD}{name}; pass fields={{{name!r}: ...}}")
        masked_B = torch.zeros_like(self.advantages_B, dtype=torch.bool) if self.masked_B is None else self.masked_B
        if self.truncated_B is not None and signal.mask_truncated:
            masked_B = masked_B | self.truncated_B
        return RolloutBatch(
            mask_BT=self.mask_BT,
            advantages_B=torch.where(masked_B, 0.0, self.advantages_B),
            spans=self.spans(signal.span),
            columns_BT={},
            aggregate=mean,
            step=step,
            examples=self.examples,
            masked_B=masked_B,
            groups_B=self.groups_B.long() if self.groups_B is not None else None,
            tokens_BT=_padded(self.written, self.mask_BT) if TOKENS in signal.reads else None,
            tokenizer=self.tokenizer,
            rewards_B=self.rewards_B,
            messages_BT=_padded(self.responses, self.mask_BT) if MESSAGES in signal.reads else None,
            fields=self.fields,
            sessions=self._conversations(),
            keys=self.keys,
        )

    @property
    def turns_before(self) -> list[int]:
        """Of each response, how many turns its conversation took in the responses before it, as far as these are here."""
        turns = [len(runs(written_T)) for written_T in self.written_BT.cpu().numpy()]
        before = [0] * len(self)
        for rows in self._conversations():
            for row, count in zip(rows, accumulate((turns[row] for row in rows), initial=0), strict=False):
                before[row] = count
        return before

    def _conversations(self) -> list[list[int]]:
        """The rows of each, in their order."""
        found: dict[Any, list[tuple[int, int]]] = {}
        for row, (session, number) in enumerate(self.sessions or [(row, 0) for row in range(len(self))]):
            found.setdefault(session, []).append((number, row))
        return [[row for _, row in sorted(rows)] for rows in found.values()]

    def pass_row(self, row: int, batch: RolloutBatch | None = None) -> PassRow:
        """One response for a pass through the model, with its answer and advantage in a batch of :meth:`batch`; without either
        where there is none."""
        prompt_P, response_T = self.prompts[row], self.responses[row]
        return PassRow(
            tokens_S=torch.cat([prompt_P, response_T]),
            response_start=len(prompt_P),
            response_length=len(response_T),
            span=batch.spans[row] if batch is not None else None,
            advantage=float(batch.advantages_B[row]) if batch is not None else 0.0,
            group=int(self.groups_B[row]) if self.groups_B is not None else row,
            place=row,
            example=self.examples[row] if self.examples is not None else None,
        )

    def part(self, rows: Sequence[int]) -> Rollouts:
        """Some responses alone, in this order, copied to the CPU and without the tokenizer."""
        width = max((len(self.responses[row]) for row in rows), default=0)
        names = vars(self).keys() - {"tokenizer", "answer"}
        return replace(self, tokenizer=None, **{name: _of_rows(getattr(self, name), rows, width) for name in names})


def joined(parts: Sequence[Rollouts]) -> Rollouts:
    """Responses of several processes as one record, one part's after the other's. All parts have the same columns and lists."""
    first, width = parts[0], max(part.mask_BT.shape[1] for part in parts)

    def one_after_the_other(values: Sequence[Any]) -> Any:
        if isinstance(values[0], torch.Tensor):
            wide = (
                value if value.ndim == 1 else pad(value, (0, width - value.shape[1]))  # the shorter ones end in zeros
                for value in values
            )
            return torch.cat(list(wide))
        if isinstance(values[0], Mapping):
            return {name: one_after_the_other([value[name] for value in values]) for name in values[0]}
        return None if values[0] is None else [entry for value in values for entry in value]

    names = vars(first).keys() - {"tokenizer", "answer"}
    changes: dict[str, Any] = {name: one_after_the_other([getattr(part, name) for part in parts]) for name in names}
    return replace(first, **changes)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What a method made of an update's responses. Its columns are the token dump's."""

    signal: Signal
    step: int
    """Training step."""
    rollouts: Rollouts
    selection: RowSelection
    """The responses that the method scored."""
    scores_BT: torch.Tensor
    """float32; NaN where there is no score."""
    weights_BT: torch.Tensor
    """float32; 0 outside the mask."""
    advantages_BT: torch.Tensor
    """float32; the token advantages ``A_t``, 0 outside the mask."""
    non_finite_B: torch.Tensor
    """bool; scored responses with a score that is not finite."""
    no_scores: Sequence[str | None]
    """Why each response has no scores of its own; ``None`` where it has."""
    metrics: Mapping[str, float]
    """Figures of the batch, see :mod:`grail_advantage.metrics`."""

    def part(self, rows: Sequence[int]) -> StepRecord:
        """Some responses alone, in this order, copied to the CPU; for another thread or process."""
        rollouts = self.rollouts.part(rows)
        width = rollouts.mask_BT.shape[1]
        names = ("scores_BT", "weights_BT", "advantages_BT", "non_finite_B", "no_scores")
        return replace(
            self,
            rollouts=rollouts,
            selection=RowSelection(**_of_rows(vars(self.selection), rows, width)),
            **{name: _of_rows(getattr(self, name), rows, width) for name in names},
        )

    def table(self, texts: TokenTexts, others: Mapping[str, StepRecord] | None = None) -> pa.Table:
        """The responses as rows of the token dump: all columns of :data:`grail_advantage.dump.schema.SCHEMA` but ``step`` and
        ``update``. This is the only place that makes such rows.

        Args:
            texts: of the run's tokenizer.
            others: records of several methods over the same responses, by name, for the column ``methods``.
        """
        import pyarrow as pa

        from grail_advantage.dump.schema import SCHEMA, as_utf8

        rollouts, spans = self.rollouts, self.rollouts.spans(self.signal.span)
        ids = [response_T.cpu().numpy() for response_T in rollouts.responses]
        tokens, facts = [texts(ids_T) for ids_T in ids], rollouts.facts
        nothing: list[Any] = [None] * len(ids)

        def a_token(values_BT: torch.Tensor | None) -> list[Any]:
            if values_BT is None:
                return nothing
            return [
                values_T[: len(ids_T)] for values_T, ids_T in zip(values_BT.detach().cpu().numpy(), ids, strict=True)
            ]

        def of_policy(name: str) -> torch.Tensor | None:
            """A column of the host, without the values that some hosts have for a tool's tokens as well."""
            if name not in rollouts.columns_BT:
                return None
            return torch.where(rollouts.written_BT, rollouts.columns_BT[name].float(), torch.nan)

        usable_B1 = within_range(rollouts.advantages_B).unsqueeze(1)
        base_BT = torch.where(rollouts.mask_BT & usable_B1, rollouts.advantages_B.unsqueeze(1), 0.0)
        prompts = facts.get("prompt") or [texts.decode(prompt_P.tolist()) for prompt_P in rollouts.prompts]
        labels = [
            {**_tool_label(written_T), **(label or {})}
            for written_T, label in zip(rollouts.written, facts.get("labels", nothing), strict=True)
        ]
        of_methods = [
            [
                {
                    "name": as_utf8(name),
                    "score": scores_T,
                    "advantage": advantages_T if other.signal.gives == "advantages" else None,
                    "weight": weights_T,
                    "no_scores": reason,
                }
                for name, other in (others or {}).items()
                for scores_T, weights_T, advantages_T, reason in [other._of(row, len(ids_T))]
            ]
            for row, ids_T in enumerate(ids)
        ]
        columns: dict[str, Sequence[Any]] = {
            "row": rollouts.places,
            "group": rollouts.places if rollouts.groups_B is None else rollouts.groups_B.tolist(),
            "key": [as_utf8(key) for key in rollouts.keys],
            "prompt": [as_utf8(prompt) for prompt in prompts],
            "response": [as_utf8("".join(of_row)) for of_row in tokens],
            "reward": facts.get("reward", nothing),
            **{
                name: [as_utf8(fact) for fact in facts.get(name, nothing)] for name in ("id", "ground_truth", "outcome")
            },
            "answer": [
                as_utf8(answer_text(of_row, span, rollouts.answer)) for of_row, span in zip(tokens, spans, strict=True)
            ],
            "no_scores": self.no_scores,
            "truncated": [False] * len(ids) if rollouts.truncated_B is None else rollouts.truncated_B.tolist(),
            "span": [list(vars(span).values()) if span else None for span in spans],
            "prompt_ids": [prompt_P.cpu().numpy() for prompt_P in rollouts.prompts],
            "token_ids": ids,
            "tokens": [list(map(as_utf8, of_row)) for of_row in tokens],
            "mask": a_token(rollouts.mask_BT),
            "score": a_token(self.scores_BT),
            "weight": a_token(self.weights_BT),
            "base_advantage": a_token(base_BT.float()),
            "advantage": a_token(self.advantages_BT),
            **{of_dump: a_token(of_policy(name)) for name, of_dump in DUMPED.items()},
            "methods": of_methods,
            "labels": [json.dumps(label) if label else None for label in labels],
        }
        schema = pa.schema([column for column in SCHEMA if column.name not in ("step", "update")])
        arrays = [pa.array(columns[column.name], column.type) for column in schema]
        return pa.Table.from_arrays(arrays, schema=schema)

    def _of(self, row: int, length: int) -> tuple[Any, Any, Any, str | None]:
        values = (self.scores_BT, self.weights_BT, self.advantages_BT)
        return *(values_BT[row, :length].cpu().numpy() for values_BT in values), self.no_scores[row]


def _of_rows(values: Any, rows: Sequence[int], width: int) -> Any:
    """Some rows of a part of a record, tensors copied to the CPU: of a tensor (B,), or (B, T) up to a width; of a list; of each
    entry of a mapping. ``None`` stays."""
    if isinstance(values, torch.Tensor):
        chosen = values[list(rows)] if values.ndim == 1 else values[list(rows), :width]
        return chosen.detach().to("cpu", copy=True)
    if isinstance(values, Mapping):
        return {name: _of_rows(of_name, rows, width) for name, of_name in values.items()}
    if values is None:
        return None
    return [
        value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
        for value in map(values.__getitem__, rows)
    ]


def _on_cpu(values: Any) -> Any:
    """A part of a record with its tensors on the CPU, those of its lists and mappings, too."""
    if isinstance(values, torch.Tensor):
        return values if values.is_meta else values.cpu()
    if isinstance(values, Mapping):
        return {name: _on_cpu(of_name) for name, of_name in values.items()}
    if isinstance(values, list | tuple) and any(isinstance(value, torch.Tensor) for value in values):
        return [_on_cpu(value) for value in values]
    return values


def _padded(tokens: Sequence[torch.Tensor], like_BT: torch.Tensor) -> torch.Tensor:
    """int64 (B, T), -1 after the ends."""
    if not len(tokens):
        return torch.full_like(like_BT, -1, dtype=torch.int64)
    return pad_sequence(list(tokens), batch_first=True, padding_value=-1).long()


def _tool_label(written_T: torch.Tensor) -> dict[str, list[list[int]]]:
    """The half-open ranges of the tokens that a tool or a user wrote between the model's turns, as a label."""
    tool = [list(edges) for edges in runs((written_T < 0).cpu().numpy())]
    return {"tool": tool} if tool else {}
