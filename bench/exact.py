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
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from bench.task import BOX, END, RESULT, WORD, WORDS, BenchProblem, Errors, TokenReading, apply, read_tokens, solve
from verl_cpu.tiny.loss import padded, token_log_probs
from verl_cpu.tiny.sampling import prompt_ids

TOGETHER = 64
"""Texts of a forward."""


class Text(NamedTuple):
    """A correct solution, by tokens."""

    prompt: list[int]
    response: list[int]
    deciding_T: np.ndarray
    """bool; the tokens whose probabilities count, see :func:`deciding_tokens`."""


def correct_texts(problems: Sequence[BenchProblem], tokenizer: PreTrainedTokenizerFast, seed: int) -> list[Text]:
    """A correct solution of each problem, the same ones for the same arguments."""
    rng, texts = random.Random(f"wording {seed}"), []
    for problem in problems:
        response = tokenizer.encode(solve(problem, Errors(), rng), add_special_tokens=False)
        deciding_T = deciding_tokens(read_tokens(problem, response, tokenizer))
        texts.append(Text(prompt_ids(tokenizer, problem), response, deciding_T))
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
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: Sequence[Text]
) -> list[torch.Tensor]:
    """Log-probability of each response token, that of a deciding word among :data:`bench.task.WORDS`; (T,) each, with the
    gradient where it is enabled. All texts go through one forward."""
    prompts, responses, _ = zip(*texts, strict=True)
    chosen_BL, log_probs_BLV = token_log_probs(model, padded(prompts, responses, tokenizer.pad_token_id).ids_BL)
    words_W = torch.tensor(tokenizer.convert_tokens_to_ids(list(WORDS)))
    words_BL = log_probs_BLV[:, :, words_W].logsumexp(dim=-1)
    found = []
    for row, (prompt, response, deciding_T) in enumerate(texts):
        here = row, slice(len(prompt) - 1, len(prompt) - 1 + len(response))
        word_T = torch.isin(torch.tensor(response), words_W) & torch.from_numpy(deciding_T)
        found.append(chosen_BL[here] - torch.where(word_T, words_BL[here], 0.0))
    return found


def correct_probabilities(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: Sequence[Text]
) -> torch.Tensor:
    """Probability that each text is correct under its wording, (B,); their mean is the exact accuracy."""
    pairs = zip(log_probabilities(model, tokenizer, texts), texts, strict=True)
    return torch.stack([of_tokens_T[torch.from_numpy(text.deciding_T)].sum().exp() for of_tokens_T, text in pairs])


def accuracy_gradients(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: Sequence[Text], size: int
) -> torch.Tensor:
    """Gradient of the exact accuracy with respect to all parameters, of every ``size`` texts alone: (C, N) float32. The
    parameters' own gradients are left alone."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    chunks = []
    for first in range(0, len(texts), size):
        mean = correct_probabilities(model, tokenizer, texts[first : first + size]).mean()
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
    known = [(row, right) for row, right in enumerate(corrections) if right is not None]
    for first in range(0, len(known), TOGETHER):
        some = known[first : first + TOGETHER]
        reads = [read_tokens(problems[row], right, tokenizer) for row, right in some]
        texts = [Text(prompts[row], right, deciding_tokens(of)) for (row, right), of in zip(some, reads, strict=True)]
        log_probs = log_probabilities(model, tokenizer, texts)
        for (row, right), (*_, deciding_T), log_probs_T in zip(some, texts, log_probs, strict=True):
            counted_T = np.where(deciding_T, log_probs_T.double().numpy(), 0.0)
            value_T = np.exp(np.append(counted_T[::-1].cumsum()[::-1], 0.0))
            wrong = first_wrong(responses[row], right)
            advantage_T = np.zeros(len(responses[row]))
            advantage_T[:wrong] = np.diff(value_T)[:wrong]
            if wrong is not None:
                advantage_T[wrong] = -value_T[wrong]
            advantages[row] = advantage_T
    return advantages
