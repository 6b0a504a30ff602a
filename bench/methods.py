"""The methods of a run: registered ones by name, the reference methods that know the answer, and the shuffled control.

Shape suffixes: B responses, L prompt + response, T response tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.policy import SampledBatch
from bench.task import RESULT, WORD
from grail_advantage import compute_token_weights
from grail_advantage.batch import FIELD, RolloutBatch
from grail_advantage.methods import methods
from grail_advantage.signals.base import Gate, Reshaped, RowSelection, Signal
from grail_advantage.signals.rlsd import PLACE
from grail_advantage.signals.turns import TurnSignal
from grail_advantage.view.analysis.specs import parse_method
from recipe.hashing import digest

SHUFFLES = 20
STEP_END = ";"
SUITED = {
    "step_values": f"step_values:separator={STEP_END}",
    "pattern": rf"pattern:expression=(?P<content>-?\d+){STEP_END}",
    # The tiny models have never read English: the request is the answer alone.
    "rlsd": f"rlsd:request={PLACE}",
    # Responses have some 60 tokens; the default window of 100 would hold them whole.
    "shear": "shear:window=16,stride=4",
}
"""Methods whose defaults suit other texts, as they run on the two tasks where no options are given."""
VARIANTS = ("grail:preset=robust", "oar_g:variant=grail_port", "polarity:wrong=0")
"""Run beside the defaults where all methods run."""


class NeedsMoreError(ValueError):
    """A method needs something that the bench's tasks do not have; the message says what."""


class _Reference(Signal):
    """Base of the reference methods. They are registered under no name: no run can train with them."""

    def scores(self, batch: RolloutBatch, of_pass_BT: torch.Tensor | None) -> torch.Tensor:
        scores_BT = torch.zeros(batch.mask_BT.shape)
        lengths = batch.mask_BT.sum(dim=1).tolist()
        for row, (length, known) in enumerate(zip(lengths, self.known(batch), strict=True)):
            scores_BT[row, :length] = torch.as_tensor(self.score(length, known), dtype=torch.float32)
        return scores_BT

    def known(self, batch: RolloutBatch) -> Sequence[Any]:
        """What is known of each response."""
        return next((batch.fields[word.removeprefix(FIELD)] for word in self.reads), [None] * len(batch.mask_BT))

    def score(self, length: int, known: Any) -> np.ndarray:
        """(T,) of one response."""
        raise NotImplementedError

    def reshape(self, scores_BT: torch.Tensor, statistics_BT: torch.Tensor, batch: RolloutBatch) -> Reshaped:
        return Reshaped(scores_BT)


class Place(_Reference):
    """A token weighs more the earlier it is, since first errors come early; 1 on average."""

    def score(self, length: int, known: Any) -> np.ndarray:
        return 2 * np.arange(length, 0, -1) / (length + 1)


class Kind(_Reference):
    """1 on the digits of results and on words for operations, 0 elsewhere."""

    reads: ClassVar[frozenset[str]] = frozenset({"field:bench_kinds"})

    def score(self, length: int, known: Any) -> np.ndarray:
        return np.isin(known, (RESULT, WORD))


class FirstError(_Reference):
    """In incorrect responses 1 on the first wrong token, 0 elsewhere; weight 1 where it is not known."""

    reads: ClassVar[frozenset[str]] = frozenset({"field:bench_first_wrong"})
    gate: Gate = "wrong"

    def score(self, length: int, known: Any) -> np.ndarray:
        return np.ones(length) if known is None else np.arange(length) == known


class ExactCredit(_Reference):
    """The exact token advantages in groups with both outcomes; the response's advantage where they are not known."""

    reads: ClassVar[frozenset[str]] = frozenset({"field:bench_exact"})
    gives: ClassVar[str] = "advantages"

    def select(self, batch: RolloutBatch) -> RowSelection:
        selection = super().select(batch)
        known_B = torch.tensor([known is not None for known in self.known(batch)])
        return RowSelection(selection.answered_B, selection.inside_gate_B, selection.selected_B & known_B)

    def score(self, length: int, known: Any) -> np.ndarray:
        return np.zeros(length) if known is None else known


REFERENCES: dict[str, type[Signal]] = {
    "place alone": Place,
    "kind alone": Kind,
    "first error": FirstError,
    "exact credit": ExactCredit,
}
"""Measured beside every method; ``uniform`` is, too."""
BASELINE = "uniform"


def method_specs(names: Sequence[str]) -> list[str]:
    """The methods of a run in order, the references first; all registered ones and ``VARIANTS`` where no name is given.

    Raises:
        ValueError: an unknown method or option; the message lists those that there are.
    """
    chosen = [BASELINE, *(names or (*sorted(methods()), *VARIANTS))]
    for spec in chosen:
        signal_of(spec)
    return list(dict.fromkeys([*REFERENCES, *chosen]))


def signal_of(spec: str) -> Signal:
    """A method by its name, with ``SUITED`` options where it has none, or as ``NAME:option=value,option=value``."""
    return REFERENCES[spec]() if spec in REFERENCES else parse_method(SUITED.get(spec, spec))


def source_digest(spec: str) -> str:
    """Of the file that the method is in and of its options, so that another version is measured anew."""
    signal = signal_of(spec)
    return digest([Path(inspect.getfile(type(signal))).read_text(encoding="utf-8"), repr(signal)])


def check_needs(signal: Signal, fields: Collection[str]) -> None:
    """NeedsMoreError for a method of turns, or of other fields than these."""
    if isinstance(signal, TurnSignal):
        raise NeedsMoreError("needs turns")
    if missing := set(signal.field_names).difference(fields):
        raise NeedsMoreError(f"needs the field {', '.join(sorted(missing))}")


def credit(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: SampledBatch, signal: Signal, step: int = 0
) -> torch.Tensor:
    """A method's token advantages, float32 (B, L), 0 outside the responses and in truncated ones.

    Raises:
        NeedsMoreError: it reads something that the batch does not have, as turns.
    """
    check_needs(signal, batch.fields)
    return compute_token_weights(
        model,
        tokenizer,
        batch.input_ids_BL,
        batch.attention_mask_BL,
        batch.response_mask_BL,
        batch.advantages_B,
        signal,
        old_log_probs=batch.old_log_probs_BL,
        entropy=batch.entropy_BL,
        groups=batch.groups_B,
        rewards=batch.rewards_B,
        examples=batch.examples,
        masked=batch.truncated_B,
        fields=batch.fields,
        step=step,
    ).advantages


def shuffled(advantages_BL: torch.Tensor, response_mask_BL: torch.Tensor, uniform_BL: np.ndarray) -> torch.Tensor:
    """The same token advantages on other tokens of the same response, drawn by random numbers (B, L)."""
    mask_BL = response_mask_BL.bool()
    # The response's tokens in random order, the others after them; a stable order of the mask lists their places alike.
    order_BL = torch.where(mask_BL, torch.from_numpy(uniform_BL), 2.0).argsort(dim=1)
    places_BL = torch.where(mask_BL, 0.0, 2.0).argsort(dim=1, stable=True)
    return advantages_BL.scatter(1, places_BL, advantages_BL.gather(1, order_BL))


def all_shuffled(batch: SampledBatch, advantages_BL: torch.Tensor, count: int, seed: int) -> Iterator[torch.Tensor]:
    """``count`` shuffled controls, the same permutations for every method."""
    generator = np.random.default_rng([seed, 4])
    for _ in range(count):
        yield shuffled(advantages_BL, batch.response_mask_BL, generator.random(tuple(batch.input_ids_BL.shape)))
