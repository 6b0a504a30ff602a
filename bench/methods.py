"""The methods of a run: registered ones by name, the reference methods that know the answer, and the shuffled control.

Shape suffixes: B responses, L prompt + response, T response tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.code import code_digest
from bench.places import SHUFFLES
from bench.policy import ANSWER, EXACT, SampledBatch
from bench.task import RESULT, WORD
from grail_advantage import compute_token_weights
from grail_advantage.answers.format import BOXED
from grail_advantage.data import ENTROPY, OLD_LOG_PROBS, Rollouts
from grail_advantage.maps import Weights
from grail_advantage.method import Method, methods, option
from grail_advantage.methods.rlsd import PLACE
from grail_advantage.methods.turns import TurnMethod
from grail_advantage.model.activations import FORWARD_TOKENS
from grail_advantage.view.analysis.specs import parse_method
from recipe.hashing import digest

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


OWN = "bench_"
"""Begins the names of the fields that only the references may read."""


class NeedsMoreError(ValueError):
    """A method needs something that the bench's tasks do not have; the message says what."""


@dataclass(frozen=True)
class Credit:
    """What a method made of a batch."""

    advantages_BL: torch.Tensor
    """float32; 0 outside the responses and in truncated ones."""
    moved_BL: torch.Tensor
    """bool; tokens whose advantage comes from a score of theirs."""
    scored: list[bool | None]
    """Whether a response has scores, all of them finite; ``None`` where the method asks for none."""


class Reference(Method):
    """Base of the reference methods, which read what the bench knows. They are registered under no name: no run can train with
    them."""

    def scores(self, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
        scores_BT = torch.zeros(r.mask.shape)
        for row, (length, known) in enumerate(zip(r.mask.sum(dim=1).tolist(), self.known(r), strict=True)):
            scores_BT[row, :length] = torch.as_tensor(self.score(length, known), dtype=torch.float32)
        return scores_BT

    def known(self, r: Rollouts) -> Sequence[Any]:
        """What is known of each response."""
        return next((r.fields[name] for name in self.field_names), [None] * len(r))

    def score(self, length: int, known: Any) -> np.ndarray:
        """(T,) of one response."""
        raise NotImplementedError

    def weights(self, scores: torch.Tensor, among: torch.Tensor, r: Rollouts) -> Weights:
        return Weights(scores)


class Place(Reference):
    """A token weighs more the earlier it is, since first errors come early; 1 on average."""

    def score(self, length: int, known: Any) -> np.ndarray:
        return 2 * np.arange(length, 0, -1) / (length + 1)


class Kind(Reference):
    """1 on the digits of results and on words for operations, 0 elsewhere."""

    reads = frozenset({"field:bench_kinds"})

    def score(self, length: int, known: Any) -> np.ndarray:
        return np.ones(length) if known is None else np.isin(known, (RESULT, WORD))


class FirstError(Reference):
    """In incorrect responses 1 on the first wrong tokens, 0 elsewhere; weight 1 where they are not known."""

    reads = frozenset({"field:bench_first_wrong"})
    gate: Literal["wrong", "correct", "all"] = option("wrong", "responses that get weights")

    def score(self, length: int, known: Any) -> np.ndarray:
        return np.ones(length) if known is None else np.isin(np.arange(length), known)


class ExactCredit(Reference):
    """The exact token advantages in groups with both outcomes; the response's advantage where they are not known."""

    reads = frozenset({f"field:{EXACT}"})
    gives = "advantages"

    def select(self, r: Rollouts) -> torch.Tensor:
        return super().select(r) & torch.tensor([known is not None for known in self.known(r)])

    def score(self, length: int, known: Any) -> np.ndarray:
        return np.zeros(length) if known is None else known


REFERENCES: dict[str, type[Method]] = {"place alone": Place, "kind alone": Kind}
REFERENCES |= {"first error": FirstError, "exact credit": ExactCredit}
"""Measured beside every method; ``uniform`` is, too."""
BASELINE = "uniform"


def method_specs(names: Sequence[str], task: bool = True) -> list[str]:
    """The methods of a run in order, the references first; all registered ones and ``VARIANTS`` where no name is given, on
    solutions (``task=False``) without those that run a pass for every token.

    Raises:
        ValueError: an unknown method or option; the message lists those that there are.
    """
    chosen = [BASELINE, *(names or (*sorted(methods()), *VARIANTS))]
    of_specs = [method_of(spec, task) for spec in chosen]
    if not names and not task:
        chosen = [spec for spec, method in zip(chosen, of_specs, strict=True) if "for every" not in method.cost]
    return list(dict.fromkeys([*REFERENCES, *chosen]))


def method_of(spec: str, task: bool = True) -> Method:
    """A method by its name, on the tasks with ``SUITED`` options, or as ``NAME:option=value,option=value``."""
    return REFERENCES[spec]() if spec in REFERENCES else parse_method(SUITED.get(spec, spec) if task else spec)


def source_digest(spec: str) -> str:
    """Of a method's options and all code that it and the bench are made of, so that another version is measured anew."""
    method = method_of(spec)
    modules = {base.__module__.partition(".")[0] for base in type(method).__mro__} - {"builtins", "pydantic"}
    return digest([repr(method), code_digest(frozenset(modules | {"bench"}))])


def check_needs(method: Method, fields: Collection[str], lacks: Mapping[str, str] | None = None) -> None:
    """NeedsMoreError for a method of turns, of other fields than these, or of something that the batch lacks."""
    if isinstance(method, TurnMethod):
        raise NeedsMoreError("needs turns")
    known = {name for name in fields if isinstance(method, Reference) or not name.startswith(OWN)}
    if missing := set(method.field_names) - known:
        raise NeedsMoreError(f"needs the field {', '.join(sorted(missing))}")
    for word, reason in (lacks or {}).items():
        if word in method.reads or (word == ANSWER and method.skips_unanswered):
            raise NeedsMoreError(reason)


def credit(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: SampledBatch,
    method: Method,
    step: int = 0,
    tokens: int = FORWARD_TOKENS,
) -> Credit:
    """A method's token advantages. It gets copies, and of the batch only what it says that it reads.

    Raises:
        NeedsMoreError: it reads something that the batch does not have, as turns.
    """
    check_needs(method, batch.fields, batch.lacks)

    def copied(values: Any) -> Any:
        return values.to(model.device, copy=True) if isinstance(values, torch.Tensor) else deepcopy(values)

    columns = {OLD_LOG_PROBS: batch.old_log_probs_BL, ENTROPY: batch.entropy_BL, "groups": batch.groups_B}
    columns |= {"rewards": batch.rewards_B, "examples": batch.examples}
    result = compute_token_weights(
        model,
        tokenizer,
        *map(copied, (*batch.padded, batch.advantages_B)),
        config=method,
        **{word: copied(values) for word, values in columns.items() if word in method.reads},
        masked=copied(batch.truncated_B),
        fields={name: copied(batch.fields[name]) for name in method.field_names},
        step=step,
        answer=batch.answer or BOXED,
        tokens=tokens,
    )
    scored_B = (result.selected & ~result.failed).cpu()
    moved_BL = batch.padded.response_BL & scored_B[:, None]
    if method.gives == "weights":
        moved_BL &= result.scores.isfinite().cpu()
        if method.statistics == "reasoning" or method.answer_weights() is not None:
            ends_B = torch.tensor([0 if span is None else span.start for span in result.spans])
            moved_BL &= batch.padded.response_BL.cumsum(dim=1) <= ends_B[:, None]
    asked = zip(result.selected.tolist(), scored_B.tolist(), strict=True)
    return Credit(result.advantages.cpu(), moved_BL, [scored if selected else None for selected, scored in asked])


def shuffled(credit: Credit, uniform_BL: np.ndarray) -> torch.Tensor:
    """The advantages of the scored tokens on other scored tokens of the same response, drawn by random numbers (B, L)."""
    # The scored tokens in random order, the others after them; a stable order of the mask lists their places alike.
    order_BL = torch.where(credit.moved_BL, torch.from_numpy(uniform_BL), 2.0).argsort(dim=1)
    places_BL = torch.where(credit.moved_BL, 0.0, 2.0).argsort(dim=1, stable=True)
    moved_BL = credit.advantages_BL.scatter(1, places_BL, credit.advantages_BL.gather(1, order_BL))
    return torch.where(credit.moved_BL, moved_BL, credit.advantages_BL)


def all_shuffled(credit: Credit, seed: int, count: int = SHUFFLES) -> Iterator[torch.Tensor]:
    """``count`` shuffled controls, the same random numbers for every method."""
    generator = np.random.default_rng([seed, 4])
    for _ in range(count):
        yield shuffled(credit, generator.random(tuple(credit.moved_BL.shape)))
