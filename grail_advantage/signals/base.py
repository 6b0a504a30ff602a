"""Signals: a method's options, the responses that it needs, and its token scores.

``A_t = w_t * A``: a signal gives a score to each response token and turns scores into weights, through a reshaper or by a map
of its own. It knows no trainer and keeps nothing between batches. For each batch :func:`grail_advantage.pipeline.weigh` calls

1. :meth:`Signal.select`: which responses need scores,
2. :meth:`Signal.prepare_row` and :meth:`Signal.run`, where :attr:`Signal.uses` names something of the model: their scores,
3. :meth:`Signal.scores`, with the columns that :attr:`Signal.reads` names,
4. :meth:`Signal.reshape`: scores to weights.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

import torch
from pydantic import Field

from grail_advantage.batch import (
    ENTROPY,
    EXAMPLES,
    FIELD,
    GROUPS,
    MESSAGES,
    OLD_LOG_PROBS,
    REWARDS,
    SESSIONS,
    TOKENS,
    PassRow,
    RolloutBatch,
    field_names,
)
from grail_advantage.options import Options
from grail_advantage.reshapers.base import ReshaperChoice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grail_advantage.model.interface import Model, RowScores

SALIENCY = "saliency"
"""Uses: a backward from tokens' log-likelihood to an activation."""
LOGITS = "logits"
"""Uses: logits at chosen positions, with whatever the signal does to activations."""
SEQUENCES = "sequences"
"""Uses: forwards of sequences that the signal makes up, after a cache of keys and values."""
LOG_PROBS = "log_probs"
"""Uses: log-probabilities of the response tokens."""
HIDDEN_STATES = "hidden_states"
"""Uses: the input of the output embeddings at the response tokens: the last block's output after the final norm."""
Gate = Literal["wrong", "correct", "all"]
Span = Literal["first", "last"]
Statistics = Literal["response", "reasoning"]
# The types of options that several signals have.
GateOption = Annotated[
    Gate, Field(description="responses that get weights: wrong (advantage <= 0), correct (advantage > 0) or all")
]
StatisticsOption = Annotated[
    Statistics,
    Field(
        description="tokens that are scored and compared with each other: the whole response, or the reasoning before the "
        "answer"
    ),
]
NormalizeMass = Annotated[
    bool, Field(description="whether the weights of a response's weighed tokens are scaled to sum to their number")
]
MaskTruncated = Annotated[
    bool,
    Field(
        description="whether a response that hit the length limit without an end token gets advantage 0; applied by the "
        "trainer, which knows the limit"
    ),
]
USES = ("", SALIENCY, LOGITS, SEQUENCES, LOG_PROBS, HIDDEN_STATES)
GIVES = ("weights", "advantages")
READS = (OLD_LOG_PROBS, ENTROPY, GROUPS, EXAMPLES, TOKENS, REWARDS, SESSIONS, MESSAGES)


@dataclass(frozen=True)
class RowSelection:
    """Which responses are which; every field is a bool tensor of shape (B,)."""

    answered_B: torch.Tensor
    """The response has a complete answer span."""
    inside_gate_B: torch.Tensor
    """The gate takes responses of this advantage's sign. With advantage 0 always ``True``: the weights multiply 0, so either
    value would do."""
    selected_B: torch.Tensor
    """The response needs scores."""


@dataclass(frozen=True)
class AnswerWeights:
    """Weights that a method gives to an answer and everything after it, whatever their scores."""

    content: float
    """Of the answer's content tokens."""
    others: float
    """Of its boundary tokens and of everything after it."""
    outside_gate: bool
    """Whether the answers of responses outside the gate get them too."""


@dataclass(frozen=True)
class Reshaped:
    """The result of :meth:`Signal.reshape`."""

    weights_BT: torch.Tensor
    """float32; read only in scored responses, and there only on the tokens that the signal weighs by score."""
    lowest: float = -math.inf
    highest: float = math.inf
    """Bounds that the weights were clipped to."""
    elsewhere: float = 1.0
    """Weight of the scored responses' tokens outside the statistics set, for signals without answer weights."""


class Signal(Options):
    """Base of every signal: a frozen model whose fields with a description are its options.

    A signal may override class variables and fields (``gate: Gate = "wrong"``), turn a field into an option, or set fields from
    its options in :meth:`complete`.
    """

    registers_as: ClassVar[str] = "signal"
    names: ClassVar[dict[str, dict[str, Any]]] = {}
    """The names that this class is registered under, and the options that each of them sets."""
    formula: ClassVar[str] = ""
    """The weight, in one line of plain text, for the page of all methods."""
    source: ClassVar[str] = ""
    """Where the method comes from, and how well that is known."""
    cost: ClassVar[str] = "0"
    """Cost on top of GRPO's step in forwards over the batch, for the page of all methods; a backward to an
    activation, which computes no parameter's gradient, counts as one."""
    reads: ClassVar[frozenset[str]] = frozenset()
    """Parts of the batch that it reads: names of :mod:`grail_advantage.batch`, and ``field:NAME`` for any field of it."""
    columns: ClassVar[tuple[str, ...]] = ()
    """Columns of the data set that it reads, of a signal that reads ``EXAMPLES``."""
    uses: ClassVar[str] = ""
    """The part of the model that it uses: one of the words above, or nothing."""
    gives: ClassVar[str] = "weights"
    """``advantages``: :meth:`scores` are token advantages of either sign, which take the place of ``w_t * A`` in the selected
    responses; :meth:`reshape` is not called. Such a signal may select responses whose advantage is 0."""
    without_scores: ClassVar[Literal["base", "nothing"]] = "base"
    """For a signal that gives advantages: a selected response with a score that is not finite gets its own advantage
    (``base``), or 0 on every token (``nothing``)."""
    ranks_entropy: ClassVar[bool] = False
    """Whether it ranks tokens by entropy or cuts at a quantile of it, so that coarse values would matter."""
    whole_groups: ClassVar[bool] = False
    """Whether :meth:`run` must see all selected responses of a group together."""
    whole_batch: ClassVar[bool] = False
    """Whether every response with a token is scored, since the signal compares the tokens of the whole batch."""
    needs_answer: ClassVar[bool] = False
    """Whether responses without an answer get no scores. They then have weight 1."""
    answer_weights: ClassVar[AnswerWeights | None] = None
    """``None``: the tokens outside the statistics set weigh :attr:`Reshaped.elsewhere`."""

    span: Span = "last"
    """Which complete answer of a response counts."""
    gate: Gate = "all"
    statistics: Statistics = "response"
    normalize_mass: bool = False

    mask_truncated: MaskTruncated = True

    @property
    def name(self) -> str:
        """Its name in ``algorithm.adv_estimator``.

        Raises:
            ValueError: the class is not registered.
        """
        for name, fixed in vars(type(self)).get("names", {}).items():
            if all(getattr(self, option_name) == value for option_name, value in fixed.items()):
                return name
        raise ValueError(f"{type(self).__name__} is no registered signal; put @register_signal('a_name') on the class")

    @property
    def field_names(self) -> list[str]:
        """The fields of the batch that it reads; a signal may take them from an option of its own."""
        return field_names(self.reads)

    @property
    def skips_unanswered(self) -> bool:
        """Whether responses without an answer have weight 1."""
        return self.needs_answer or (self.statistics == "reasoning" and self.answer_weights is None)

    @property
    def reads_answer(self) -> bool:
        """Whether a response's weights depend on its answer."""
        return self.skips_unanswered or self.answer_weights is not None

    def check(self) -> None:
        """See :class:`Options`; also the words by which the signal says what it needs."""
        super().check()
        for name, values, words in (
            ("reads", [word for word in self.reads if not word.startswith(FIELD)], READS),
            ("uses", [self.uses], USES),
            ("gives", [self.gives], GIVES),
            ("gate", [self.gate], get_args(Gate)),
            ("statistics", [self.statistics], get_args(Statistics)),
            ("span", [self.span], get_args(Span)),
        ):
            for value in set(values).difference(words):
                known = ", ".join(map(repr, words))
                raise ValueError(f"{type(self).__name__}.{name}: {value!r} is unknown; choose of {known}")

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuse a tokenizer that the signal cannot work with.

        Raises:
            ValueError: naming the remedy.
        """

    def select(self, batch: RolloutBatch) -> RowSelection:
        """Find the responses that need scores: inside the gate, with an answer where one is needed, a token that trains, and an
        advantage that is not 0. Leaving the others out is exact, as their token advantages do not depend on scores."""
        device = batch.advantages_B.device

        def rows_with(condition: Iterable[bool]) -> torch.Tensor:
            return torch.tensor(list(condition), dtype=torch.bool, device=device)

        answered_B = rows_with(span is not None for span in batch.spans)
        positive_B = batch.advantages_B > 0
        inside_B = {"wrong": ~positive_B, "correct": positive_B, "all": torch.ones_like(positive_B)}[self.gate]
        matters_B = batch.advantages_B != 0
        selected_B = inside_B & matters_B & batch.valid_B
        if self.needs_answer:
            selected_B = selected_B & answered_B
        if self.statistics == "reasoning" and self.answer_weights is None:
            selected_B = selected_B & rows_with(span is not None and span.start > 0 for span in batch.spans)
        return RowSelection(answered_B, inside_B | ~matters_B, batch.valid_B if self.whole_batch else selected_B)

    def prepare_row(self, row: PassRow, tokenizer: PreTrainedTokenizerBase) -> PassRow:
        """The row as the pass needs it: cut, or with another prompt. Runs where the tokenizer is, before rows are shared
        out."""
        return row

    def row_cost(self, row: PassRow) -> int:
        """Cost of a prepared row compared with others, for sharing them out."""
        return len(row.tokens_S)

    def run(self, rows: Sequence[PassRow], model: Model) -> list[RowScores]:
        """Scores of these rows, in their order. Runs where the model is.

        With a sharded model this is a collective: every rank calls it with as many rows, and must make the same calls of
        ``model`` in the same order, whatever its rows hold.
        """
        raise NotImplementedError(f"{type(self).__name__} names uses={self.uses!r} and has no run()")

    def scores(self, batch: RolloutBatch, of_pass_BT: torch.Tensor | None) -> torch.Tensor:
        """Scores of the batch, float (B, T), read in selected responses only; a pass gives its own by default.

        Args:
            batch: with the columns that the signal reads.
            of_pass_BT: what :meth:`run` gave, NaN elsewhere; ``None`` for a signal that uses nothing of the model.

        Returns:
            (B, T); a response has weight 1 where any token of its statistics set has no finite score.
        """
        if of_pass_BT is None:
            raise NotImplementedError(f"{type(self).__name__} uses nothing of the model and has no scores()")
        return of_pass_BT

    def reshape(self, scores_BT: torch.Tensor, statistics_BT: torch.Tensor, batch: RolloutBatch) -> Reshaped:
        """Turn scores into weights.

        Args:
            scores_BT: finite where ``statistics_BT`` is true, and in the scored responses of a signal with answer weights.
            statistics_BT: bool; the statistics sets of the scored responses.
            batch: the batch.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no reshape(); derive it from ReshapedSignal, or write one"
        )


class ReshapedSignal(ReshaperChoice, Signal):
    """Base of the signals whose scores go through a reshaper that the user chooses."""

    def reshape(self, scores_BT: torch.Tensor, statistics_BT: torch.Tensor, batch: RolloutBatch) -> Reshaped:
        chosen = self.reshaping
        weights_BT = chosen.weights(scores_BT, statistics_BT, batch.advantages_B)
        return Reshaped(weights_BT, chosen.lowest, chosen.highest, chosen.elsewhere)
