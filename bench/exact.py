"""Accuracy without sampling, its gradient, and the exact advantage of every token, under given wording.

Free choices without consequence (filler, asides and when to write them) are held to a given text; the tokens that decide the
answer (the digits of results and where they end, and words that choose an operation) are the model's own. A text is correct
with the product of the probabilities of its deciding tokens. Where a word chooses an operation, filler or an aside is a free
choice, too: the probability there is that of the correct word among the two words. Two errors that cancel each other count as
wrong here.

Shape suffixes: B responses, L prompt + response, T response tokens, V vocabulary, N parameters, C chunks.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from bench.task import BOX, END, RESULT, WORD, WORDS, BenchProblem, Errors, TokenReading, apply, read_tokens, solve
from verl_cpu.tiny.sampling import prompt_ids

TOGETHER = 64
"""Texts of a forward."""


@dataclass(frozen=True)
class Texts:
    """Correct solutions, by tokens."""

    prompts: list[list[int]]
    responses: list[list[int]]
    deciding: list[np.ndarray]
    """bool (T,) each: the tokens whose probabilities count, see :func:`deciding_tokens`."""

    def part(self, chosen: slice) -> Texts:
        """Some of them."""
        return Texts(self.prompts[chosen], self.responses[chosen], self.deciding[chosen])


def correct_texts(problems: Sequence[BenchProblem], tokenizer: PreTrainedTokenizerFast, seed: int) -> Texts:
    """A correct solution of each problem, the same ones for the same arguments."""
    rng = random.Random(f"wording {seed}")
    texts = Texts([], [], [])
    for problem in problems:
        response = tokenizer.encode(solve(problem, Errors(), rng), add_special_tokens=False)
        texts.prompts.append(prompt_ids(tokenizer, problem))
        texts.responses.append(response)
        texts.deciding.append(deciding_tokens(read_tokens(problem, response, tokenizer)))
    return texts


def deciding_tokens(read: TokenReading) -> np.ndarray:
    """bool (T,): the digits of steps' results, the token at which each ends, likewise the box, and the words that say which
    operation a step takes."""
    starts, kind_T = np.array(read.offsets[:-1]), read.kind_T
    ends_T = (kind_T == END) & np.isin(starts, [step.result[1] for step in read.reading.steps])
    box_T = np.zeros(len(kind_T), dtype=bool)
    if read.reading.box is not None:
        box_T = (kind_T == BOX) & (starts >= read.reading.box[0]) & (starts <= read.reading.box[1])
    return (kind_T == RESULT) | (kind_T == WORD) | ends_T | box_T


def log_probabilities(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: Texts, temperature: float = 1.0
) -> list[torch.Tensor]:
    """Log-probability of each response token, that of a deciding word among :data:`bench.task.WORDS`; (T,) each, with the
    gradient where it is enabled. All texts go through one forward."""
    rows = [[*prompt, *response] for prompt, response in zip(texts.prompts, texts.responses, strict=True)]
    longest = max(map(len, rows))
    # Padding on the right needs no attention mask: a causal model's real tokens never look at it.
    ids_BL = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
    log_probs_BLV = (model(input_ids=ids_BL).logits[:, :-1] / temperature).log_softmax(dim=-1)
    chosen_BL = log_probs_BLV.gather(-1, ids_BL[:, 1:, None])[:, :, 0]
    words_W = torch.tensor(tokenizer.convert_tokens_to_ids(list(WORDS)))
    counted_BL = torch.zeros_like(chosen_BL, dtype=torch.bool)
    places = [slice(len(p) - 1, len(p) - 1 + len(r)) for p, r in zip(texts.prompts, texts.responses, strict=True)]
    for row, (place, deciding_T) in enumerate(zip(places, texts.deciding, strict=True)):
        counted_BL[row, place] = torch.from_numpy(deciding_T)
    word_BL = torch.isin(ids_BL[:, 1:], words_W) & counted_BL
    chosen_BL = chosen_BL - torch.where(word_BL, log_probs_BLV[:, :, words_W].logsumexp(dim=-1), 0.0)
    return [chosen_BL[row, place] for row, place in enumerate(places)]


def correct_probabilities(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: Texts, temperature: float = 1.0
) -> torch.Tensor:
    """Probability that each text is correct under its wording, (B,)."""
    log_probs = log_probabilities(model, tokenizer, texts, temperature)
    pairs = zip(log_probs, texts.deciding, strict=True)
    return torch.stack([log_probs_T[torch.from_numpy(deciding_T)].sum().exp() for log_probs_T, deciding_T in pairs])


@torch.no_grad()
def exact_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: Texts, temperature: float = 1.0
) -> float:
    """Mean probability of a correct response."""
    parts = [
        correct_probabilities(model, tokenizer, texts.part(slice(first, first + TOGETHER)), temperature)
        for first in range(0, len(texts.prompts), TOGETHER)
    ]
    return float(torch.cat(parts).double().mean())


def accuracy_gradients(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: Texts, size: int
) -> torch.Tensor:
    """Gradient of :func:`exact_accuracy` with respect to all parameters, of every ``size`` texts alone: (C, N) float32. The
    parameters' own gradients are left alone."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    chunks = []
    for first in range(0, len(texts.prompts), size):
        mean = correct_probabilities(model, tokenizer, texts.part(slice(first, first + size))).mean()
        chunks.append(torch.cat([part.flatten() for part in torch.autograd.grad(mean, parameters)]))
    return torch.stack(chunks)


def corrected(
    problem: BenchProblem, response_ids: Sequence[int], read: TokenReading, tokenizer: PreTrainedTokenizerFast
) -> list[int] | None:
    """The response as it would read in the same wording without an error; itself where it has none.

    ``None`` where the wording cannot lead to the answer: without a box, with more or fewer steps than the problem, or without a
    word where operations are offered.
    """
    reading, text = read.reading, read.text
    if reading.box is None or len(reading.steps) != len(problem.steps) or not text.isascii():
        return None
    if not reading.wrong:
        return list(response_ids)
    parts, at, value = [], 0, problem.first
    for number, step in enumerate(reading.steps):
        operation = problem.steps[number]
        left, value = f"{value}{operation[0]}{operation[1]}", apply(value, *operation)
        if problem.choices:
            if step.word is None:
                return None
            parts += [text[at : step.word[0]], WORDS[problem.choices[number].index(operation)]]
            at = step.word[1]
        parts += [text[at : step.start], f"{left}={value}"]
        at = step.end
    right = "".join([*parts, text[at : reading.box[0]], str(value), text[reading.box[1] :]])
    # Generated ids need not be the ones that the tokenizer would choose: what is correct so far stays as it was generated.
    same = next(place for place, (a, b) in enumerate(zip(right + "\0", text + "\1", strict=False)) if a != b)
    kept = bisect_right(read.offsets, same) - 1
    ids = [*response_ids[:kept], *tokenizer.encode(right[read.offsets[kept] :], add_special_tokens=False)]
    return [*ids, tokenizer.eos_token_id] if response_ids[-1] == tokenizer.eos_token_id else ids


def first_wrong(response_ids: Sequence[int], corrected_ids: Sequence[int] | None) -> int | None:
    """The first token in which a response departs from its :func:`corrected` text; ``None`` where it does not."""
    pairs = enumerate(zip(response_ids, corrected_ids or (), strict=False))
    return next((place for place, (own, right) in pairs if own != right), None)


@torch.no_grad()
def token_advantages(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[list[int]],
    responses: Sequence[list[int]],
    corrections: Sequence[list[int] | None],
    problems: Sequence[BenchProblem],
) -> list[np.ndarray | None]:
    """By how much each token of a response raised or lowered the probability of the correct answer, in the response's wording:
    float64 (T,) a response, ``None`` where there is no correction.

    Before a token this is the product of the probabilities of all correct deciding tokens from there on, in the corrected
    response; after the first wrong token it is 0.
    """
    advantages: list[np.ndarray | None] = [None] * len(responses)
    known = [row for row, right in enumerate(corrections) if right is not None]
    for first in range(0, len(known), TOGETHER):
        rows = known[first : first + TOGETHER]
        rights = [corrections[row] or [] for row in rows]
        deciding = [
            deciding_tokens(read_tokens(problems[row], right, tokenizer))
            for row, right in zip(rows, rights, strict=True)
        ]
        log_probs = log_probabilities(model, tokenizer, Texts([prompts[row] for row in rows], rights, deciding))
        for row, right, deciding_T, log_probs_T in zip(rows, rights, deciding, log_probs, strict=True):
            counted_T = np.where(deciding_T, log_probs_T.double().numpy(), 0.0)
            value_T = np.exp(np.append(counted_T[::-1].cumsum()[::-1], 0.0))
            wrong = first_wrong(responses[row], right)
            advantage_T = np.zeros(len(responses[row]))
            advantage_T[:wrong] = np.diff(value_T)[:wrong]
            if wrong is not None:
                advantage_T[wrong] = -value_T[wrong]
            advantages[row] = advantage_T
    return advantages
