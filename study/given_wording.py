"""GSM8K's solutions with errors that are likely under a model: the texts of a problem, and their exact probabilities.

See :mod:`study.real_model`. Shape suffixes: B texts of a problem, T response tokens, K tokens at which a choice is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from grail_advantage.view.analysis.responses import json_lines
from study.localisation.gsm8k_edits import CannotEditError
from study.localisation.solutions import SUFFIX, Solution, edited
from study.task import BOX, FILL, LEFT, OTHER, RESULT, Error, Piece, Reading, TokenReading
from study.truth import Row

EDITS = 60
"""Tries to change a result of a solution."""


@dataclass(frozen=True)
class Question:
    """The problem."""

    text: str
    answer: str


@dataclass(frozen=True)
class Texts:
    """The texts of one problem."""

    rows: list[Row]
    """The right one first."""
    places: list[int]
    """The response token at which each wrong one departs, in their order."""
    tokens: list[int]
    """Its token there."""


def problems(path: Path, tokenizer: PreTrainedTokenizerBase, *, count: int, longest: int) -> Iterator[Texts]:
    """The first ``count`` problems of a file of which a result can be changed in several ways, up to ``longest`` tokens.

    Args:
        path: GSM8K, JSON lines with ``question`` and ``answer``.
        tokenizer: a fast one, with a chat template.
        count: at most so many.
        longest: tokens of prompt and response.
    """
    for _, record in json_lines(path):
        if count == 0:
            return
        texts = texts_of(record, tokenizer)
        if texts is not None and max(len(row.prompt) + len(row.response) for row in texts.rows) <= longest:
            count -= 1
            yield texts


def texts_of(record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Texts | None:
    """All texts of one problem, or ``None`` where there are fewer than two wrong ones."""
    wrong: dict[str, Solution] = {}
    right = None
    for seed in range(EDITS):
        try:
            one, right = edited(record, "", seed, twins=True)
        except CannotEditError:
            return None
        wrong.setdefault(one.response, one)
    if right is None or len(wrong) < 2:
        return None
    rows, places, tokens = [row_of(right, tokenizer, right=True)], [], []
    for solution in wrong.values():
        row = row_of(solution, tokenizer, right=False)
        pairs = enumerate(zip(row.response, rows[0].response, strict=False))
        place = next((place for place, (own, other) in pairs if own != other), None)
        # Where the tokenizer splits the two differently, they part before the changed result; such a text is left out.
        if place is not None and row.read.error_T[place] and row.response[place] not in (
            token for at, token in zip(places, tokens, strict=True) if at == place
        ):  # fmt: skip
            error_T = row.read.error_T & (np.arange(len(row.response)) >= place)
            rows.append(replace(row, read=replace(row.read, error_T=error_T)))
            places.append(place)
            tokens.append(row.response[place])
    return Texts(rows, places, tokens) if len(rows) > 2 else None


_NUMERIC = re.compile(r"[\d+*/=%$€£-]")


def row_of(solution: Solution, tokenizer: PreTrainedTokenizerBase, *, right: bool) -> Row:
    """A solution by tokens: results, other tokens of calculations, words."""
    text = solution.response
    coded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    box = text.rindex("\\boxed{")
    wrong = None if right or solution.wrong_result is None else solution.results[solution.wrong_result]
    roles, owners, errors = [], [], []
    for start, end in coded["offset_mapping"]:
        owner = next((n for n, (first, past) in enumerate(solution.results) if start < past and end > first), -1)
        covered = text[start:end].strip()
        if end > box:  # a token may begin with the space before it
            role = BOX
        elif owner >= 0:
            role = RESULT
        elif _NUMERIC.search(covered):
            role = LEFT
        else:
            role = FILL if covered.isalpha() else OTHER
        roles.append(role)
        owners.append(owner)
        errors.append(wrong is not None and start < wrong[1] and end > wrong[0])
    role_T = np.array([*roles, OTHER])  # the end token
    pieces = [
        # Results are counted instead of steps: the last one is the last step.
        Piece(start, end, start, end, ("", "", ""), text[start:end], text[start:end], place, False)
        for place, (start, end) in enumerate(solution.results)
    ]
    starts = [start for start, _ in coded["offset_mapping"]]
    reasoning = next(place for place, (_, end) in enumerate(coded["offset_mapping"]) if end > box)
    read = TokenReading(
        Reading(pieces, [] if wrong is None else [Error(*wrong, "result")], (box + 7, len(text)), box),
        role_T,
        np.array([*owners, -1]),
        np.isin(role_T, (LEFT, RESULT)),
        np.array([*errors, False]),
        [*starts, len(text), len(text)],
    )
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": solution.problem + SUFFIX}], add_generation_prompt=True, return_dict=False
    )
    response = [*coded["input_ids"], tokenizer.eos_token_id]
    question = Question(solution.problem + SUFFIX, solution.gold or "")
    return Row(question, prompt, response, read, right, reasoning)


@dataclass(frozen=True)
class Choices:
    """Log-probabilities of what can be chosen."""

    places: list[int]
    """The response tokens at which a choice is made, K of them."""
    right_K: torch.Tensor
    """Of the right token at each place."""
    wrong: list[torch.Tensor]
    """Of each wrong text's own token at its place."""

    def of_texts(self, texts: Texts) -> torch.Tensor:
        """Log-probability of every text, (B,)."""
        before_K = self.right_K.cumsum(dim=0) - self.right_K
        departures = [before_K[self.places.index(at)] + own for at, own in zip(texts.places, self.wrong, strict=True)]
        return torch.stack([self.right_K.sum(), *departures])


def choices(log_probs_KV: torch.Tensor, texts: Texts) -> Choices:
    """From the log-probabilities at the right text's places, in their order, (K, V)."""
    right_T, places = texts.rows[0].response, sorted(set(texts.places))
    rights: list[torch.Tensor] = []
    wrong: dict[int, torch.Tensor] = {}
    for place, log_probs_V in zip(places, log_probs_KV, strict=True):
        here = [n for n, at in enumerate(texts.places) if at == place]
        chosen = log_probs_V[[right_T[place], *(texts.tokens[n] for n in here)]].log_softmax(dim=0)
        rights.append(chosen[0])
        wrong |= dict(zip(here, chosen[1:], strict=True))
    return Choices(places, torch.stack(rights), [wrong[n] for n in range(len(texts.places))])


def exact_advantages(texts: Texts, made: Choices) -> list[np.ndarray]:
    """Of every text, by how much each token changes the probability of the right one; (T,) float64."""
    value = np.exp(np.append(made.right_K.detach().double().numpy()[::-1].cumsum()[::-1], 0.0))
    advantages = []
    for n, row in enumerate(texts.rows):
        advantage_T = np.zeros(len(row.response))
        for k, place in enumerate(made.places):
            if n and place == texts.places[n - 1]:
                advantage_T[place] = -value[k]
                break
            advantage_T[place] = value[k + 1] - value[k]
        advantages.append(advantage_T)
    return advantages
