"""Accuracy without sampling, its gradient, and the exact advantage of every token, under given wording.

Free choices without consequence (filler, asides and when to write them) are held to a given text; the tokens that decide the
answer (the digits of results and where they end, and words that choose an operation) are the model's own. A text is correct
with the product of the probabilities of its correct decisive tokens. Where a word chooses an operation, filler or an aside is
a free choice, too: the probability there is that of the correct word among the two words. Two errors that cancel each other
count as wrong here, and a copied left side as right; :mod:`study.trainer` measures by how much this differs from sampling.

Shape suffixes: B rows, L prompt + response, T response tokens, V vocabulary.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from recipe.tiny.sampling import prompt_ids
from study.task import (
    ASIDE,
    ASIDE_RESULT,
    BOX,
    END,
    RESULT,
    WORD,
    WORDS,
    StudyProblem,
    TokenReading,
    apply,
    read_tokens,
    right_solution,
    text_of,
)

ROWS_TOGETHER = 64


@dataclass(frozen=True)
class Texts:
    """Right solutions, by tokens."""

    prompts: list[list[int]]
    responses: list[list[int]]
    decided: list[np.ndarray]
    """bool (T,) a row: the tokens whose probabilities count, see :func:`deciding_tokens`."""


def right_texts(
    problems: Sequence[StudyProblem], tokenizer: PreTrainedTokenizerFast, wordings: int, seed: int
) -> Texts:
    """``wordings`` right solutions of each problem, the same ones for the same arguments."""
    rng = random.Random(f"wording {seed}")
    texts = Texts([], [], [])
    for problem in problems:
        for _ in range(wordings):
            response = tokenizer.encode(right_solution(problem, rng), add_special_tokens=False)
            texts.prompts.append(prompt_ids(tokenizer, problem))
            texts.responses.append(response)
            texts.decided.append(deciding_tokens(read_tokens(problem, response, tokenizer)))
    return texts


def deciding_tokens(read: TokenReading) -> np.ndarray:
    """bool (T,): the digits of the results that the answer depends on, the token at which each ends, likewise the box, and the
    words that say which operation a step takes."""
    pieces, roles, owner = read.reading.pieces, read.role_T, read.piece_T
    starts = np.array(read.offsets[:-1])
    result_T = np.isin(roles, (RESULT, ASIDE_RESULT)) & read.decisive_T
    # The bracket that closes an aside belongs to it as the bracket that opens it does; only the first ends the result.
    ends = np.array([piece.result_end for piece in pieces] + [-1])
    closed_T = np.isin(roles, (END, ASIDE)) & read.decisive_T & (starts == ends[owner])
    box_T = np.zeros(len(roles), dtype=bool)
    if read.reading.box is not None:
        box_T = (roles == BOX) & (starts >= read.reading.box[0]) & (starts <= read.reading.box[1])
    return result_T | closed_T | box_T | ((roles == WORD) & read.decisive_T)


def log_right(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: Texts, *, temperature: float = 1.0
) -> list[torch.Tensor]:
    """Log-probability of each response token, that of a deciding word among :data:`study.task.WORDS`; (T,) a row, with the
    gradient where it is enabled."""
    rows = []
    for first in range(0, len(texts.prompts), ROWS_TOGETHER):
        rows += token_log_probs(
            model,
            tokenizer,
            texts.prompts[first : first + ROWS_TOGETHER],
            texts.responses[first : first + ROWS_TOGETHER],
            temperature,
            decided=texts.decided[first : first + ROWS_TOGETHER],
        )
    return rows


def token_log_probs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    temperature: float = 1.0,
    *,
    decided: Sequence[np.ndarray] | None = None,
) -> list[torch.Tensor]:
    """Log-probability of each response token, (T,) a row, in the precision of the model; one forward.

    With ``decided``, bool (T,) a row, a deciding word of :data:`study.task.WORDS` has its log-probability among these words.
    """
    rows = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    longest = max(len(row) for row in rows)
    ids_BL = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
    # Padding on the right needs no attention mask: a causal model's real tokens never look at it.
    log_probs_BLV = (model(input_ids=ids_BL).logits[:, :-1] / temperature).log_softmax(dim=-1)
    chosen_BL = log_probs_BLV.gather(-1, ids_BL[:, 1:, None])[:, :, 0]
    if decided is not None:
        words_W = torch.tensor(tokenizer.convert_tokens_to_ids(list(WORDS)))
        word_BL = torch.isin(ids_BL[:, 1:], words_W)
        for row, (prompt, decided_T) in enumerate(zip(prompts, decided, strict=True)):
            response = slice(len(prompt) - 1, len(prompt) - 1 + len(decided_T))
            word_BL[row, response] &= torch.from_numpy(decided_T)
            word_BL[row, : response.start] = word_BL[row, response.stop :] = False
        chosen_BL = chosen_BL - torch.where(word_BL, log_probs_BLV[:, :, words_W].logsumexp(dim=-1), 0.0)
    return [
        chosen_BL[row, len(prompt) - 1 : len(prompt) + len(response) - 1]
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]


def right_probabilities(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: Texts, *, temperature: float = 1.0
) -> torch.Tensor:
    """Probability that each text goes right under its wording, (B,)."""
    return torch.stack(
        [
            log_probs_T[torch.from_numpy(decided_T)].sum().exp()
            for log_probs_T, decided_T in zip(
                log_right(model, tokenizer, texts, temperature=temperature), texts.decided, strict=True
            )
        ]
    )


@torch.no_grad()
def exact_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: Texts, *, temperature: float = 1.0
) -> float:
    """Mean probability of going right."""
    return float(right_probabilities(model, tokenizer, texts, temperature=temperature).double().mean())


def accuracy_gradient(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: Texts, *, temperature: float = 1.0
) -> torch.Tensor:
    """Gradient of :func:`exact_accuracy` with respect to all parameters, flat, float32. The parameters' own gradients are
    left alone."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for first in range(0, len(texts.prompts), ROWS_TOGETHER):
        rows = slice(first, first + ROWS_TOGETHER)
        part = Texts(texts.prompts[rows], texts.responses[rows], texts.decided[rows])
        mean = right_probabilities(model, tokenizer, part, temperature=temperature).sum() / len(texts.prompts)
        for sums, gradient in zip(total, torch.autograd.grad(mean, parameters), strict=True):
            sums += gradient
    return torch.cat([sums.flatten() for sums in total])


def right_continuation(
    problem: StudyProblem, response_ids: Sequence[int], read: TokenReading, tokenizer: PreTrainedTokenizerFast
) -> list[int] | None:
    """The response as it would read in the same wording without its first error; itself where it has none.

    ``None`` where the wording cannot lead to the answer: without a box, with more or fewer steps than the problem, or without a
    word where operations are offered.
    """
    reading = read.reading
    text, _ = text_of(response_ids, tokenizer)
    if reading.box is None or len(reading.steps) != len(problem.steps) or not text.isascii():
        return None
    if not reading.errors:
        return list(response_ids)
    parts, at, value = [], 0, problem.first
    for piece in reading.pieces:
        if piece.step is None:
            continue
        operator, term = problem.steps[piece.step]
        if piece.aside:
            written = f"{''.join(piece.left)}={term}"
        else:
            left, value = f"{value}{operator}{term}", apply(value, operator, term)
            written = f"{left}={value}"
            if problem.choices:
                if piece.word is None:
                    return None
                word = WORDS[problem.choices[piece.step].index((operator, term))]
                parts, at = [*parts, text[at : piece.word[0]], word], piece.word[1]
        parts += [text[at : piece.start], written]
        at = piece.end
    right = "".join([*parts, text[at : reading.box[0]], str(value), text[reading.box[1] :]])
    # Generated ids need not be the ones that the tokenizer would choose: what is right so far stays as it was generated.
    same = next(place for place, (a, b) in enumerate(zip(right + "\0", text + "\1", strict=False)) if a != b)
    kept = bisect_right(read.offsets, same) - 1
    ids = [*response_ids[:kept], *tokenizer.encode(right[read.offsets[kept] :], add_special_tokens=False)]
    return [*ids, tokenizer.eos_token_id] if response_ids[-1] == tokenizer.eos_token_id else ids


def first_wrong(response_ids: Sequence[int], right_ids: Sequence[int]) -> int | None:
    """The first token in which a response departs from its :func:`right_continuation`; ``None`` where it does not."""
    pairs = enumerate(zip(response_ids, right_ids, strict=False))
    return next((place for place, (own, right) in pairs if own != right), None)


@torch.no_grad()
def token_advantages(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[StudyProblem],
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
) -> list[np.ndarray | None]:
    """By how much each token of a response raised or lowered the probability of the right answer, in the response's wording.

    Before a token this is the product of the probabilities of all right deciding tokens from there on, in the response
    continued rightly; after the first wrong token it is 0.

    Returns:
        float64 (T,) a response; ``None`` where :func:`right_continuation` gives none.
    """
    advantages: list[np.ndarray | None] = [None] * len(responses)
    rows, continued, decided = [], [], []
    for row, (problem, response) in enumerate(zip(problems, responses, strict=True)):
        right = right_continuation(problem, response, read_tokens(problem, response, tokenizer), tokenizer)
        if right is not None:
            rows.append(row)
            continued.append(right)
            decided.append(deciding_tokens(read_tokens(problem, right, tokenizer)))
    texts = Texts([list(prompts[row]) for row in rows], continued, decided)
    for row, right, decided_T, log_probs_T in zip(
        rows, continued, decided, log_right(model, tokenizer, texts), strict=True
    ):
        counted_T = np.where(decided_T, log_probs_T.double().numpy(), 0.0)
        value_T = np.exp(np.append(counted_T[::-1].cumsum()[::-1], 0.0))
        own = list(responses[row])
        wrong = first_wrong(own, right)
        advantage_T = np.zeros(len(own))
        if wrong is None:
            advantage_T[:] = np.diff(value_T)
        else:
            advantage_T[:wrong] = np.diff(value_T)[:wrong]
            advantage_T[wrong] = -value_T[wrong]
        advantages[row] = advantage_T
    return advantages
