"""Do scores find the error of a response, and the tokens that its answer depends on? Measured where both are known.

Wrong responses have exactly one error, in a result that the answer depends on. Of every response, over its reasoning (the
tokens before the answer), ties counting half:

- ``auroc_all``: the wrong result's tokens against all others. To be a result token is enough for most of it, so that the score
  "it is a result" is reported beside every method.
- ``auroc_results``: against the tokens of the other results that the answer depends on. "It is a result" has 0.5 here.
- ``relevance``: tokens of steps, and of asides that a step uses, against filler and the other asides; for right and wrong rows.
- ``weight_ratio``: mean weight of the wrong result's tokens over that of all result tokens of the response; not for hard
  selections, which have it only where they hit a result.
- ``rank_correlation``: of the scores with the exact token advantage, in wrong rows with its negative.

Splits of the first two: the error in the ``first`` step (with others after it), in a ``middle`` one, in the ``last``, and
``not_last``.

Shape suffixes: B rows, L prompt + response, T response tokens, N reasoning tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from grail_advantage import compute_token_weights
from grail_advantage.options import option_fields
from grail_advantage.signals.base import Signal
from study.arms import ARMS
from study.exact import token_advantages
from study.rollouts import examples
from study.statistics import auroc, spearman
from study.task import ASIDE_RESULT, OTHER, RESULT, StudyProblem, TokenReading, read_tokens

METHODS = ("grail", "grail_robust", "oar_g", "oar_g_port", "oar_p", "surprisal", "entropy")
LABELS = {method: ARMS[method].label for method in METHODS} | {"surprisal": "surprisal"}
"""For people; an arm's label names the use of its score."""
BASELINES = {"result_token": "it is a result token", "position": "later in the text"}
SPLITS = ("all", "first", "middle", "last", "not_last")
FIGURES = ("auroc_all", "auroc_results", "relevance", "weight_ratio", "rank_correlation")
_BATCH = 64

Key = tuple[str, str, str]
"""Method, figure and split; the split of ``relevance`` and ``rank_correlation`` is ``right`` or ``wrong``."""


@dataclass(frozen=True)
class Row:
    """One response to be judged."""

    problem: StudyProblem
    prompt: list[int]
    response: list[int]
    read: TokenReading
    right: bool
    reasoning: int
    """Number of tokens before the answer."""


def rows_of(
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[StudyProblem],
    prompts: Sequence[list[int]],
    responses: Sequence[list[int]],
    at_most: int,
) -> list[Row]:
    """The responses that can be judged, in their order: at most so many with one wrong result, and so many without an error."""
    kept: dict[bool, list[Row]] = {False: [], True: []}
    for problem, prompt, response in zip(problems, prompts, responses, strict=True):
        read = read_tokens(problem, response, tokenizer)
        kinds = [error.kind for error in read.reading.errors]
        if read.reading.box is None or kinds not in ([], ["result"]) or not read.reading.steps:
            continue
        reasoning = next(place for place, offset in enumerate(read.offsets) if offset >= read.reading.box_start)
        kept[not kinds].append(Row(problem, prompt, response, read, not kinds, reasoning))
    return [*kept[False][:at_most], *kept[True][:at_most]]


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[Row],
    methods: Sequence[str] = METHODS,
) -> dict[Key, list[float]]:
    """The figures of every response that has them, by method (or baseline), figure and split."""
    figures: dict[Key, list[float]] = defaultdict(list)
    exact = token_advantages(
        model, tokenizer, [row.problem for row in rows], [row.prompt for row in rows], [row.response for row in rows]
    )
    for method in methods:
        for row, advantage_T, (scores_T, weights_T) in zip(
            rows, exact, scores_and_weights(model, tokenizer, rows, ARMS[method].signal), strict=True
        ):
            for key, value in row_figures(row, scores_T, weights_T, advantage_T).items():
                figures[method, *key].append(value)
    for row, advantage_T in zip(rows, exact, strict=True):
        baselines = {
            "result_token": np.isin(row.read.role_T, (RESULT, ASIDE_RESULT)).astype(float),
            "position": np.arange(len(row.response), dtype=float),
        }
        for name, scores_T in baselines.items():
            for key, value in row_figures(row, scores_T, None, advantage_T).items():
                figures[name, *key].append(value)
    return {key: [value for value in values if math.isfinite(value)] for key, values in figures.items()}


def row_figures(
    row: Row, scores_T: np.ndarray, weights_T: np.ndarray | None, advantage_T: np.ndarray | None
) -> dict[tuple[str, str], float]:
    """All figures of one response by figure and split; nan where one is not defined for it."""
    read, inside = row.read, slice(0, row.reasoning)
    scores_N = scores_T[inside]
    if not np.isfinite(scores_N).all():
        return {}
    side = "right" if row.right else "wrong"
    decisive_N, role_N, error_N = read.decisive_T[inside], read.role_T[inside], read.error_T[inside]
    worded_N = role_N != OTHER
    figures = {("relevance", side): auroc(scores_N[worded_N], decisive_N[worded_N])}
    if advantage_T is not None:
        sign = 1.0 if row.right else -1.0
        figures["rank_correlation", side] = spearman(scores_N, sign * advantage_T[inside])
    if row.right:
        return figures
    result_N = np.isin(role_N, (RESULT, ASIDE_RESULT)) & decisive_N
    for split in splits_of(row):
        figures["auroc_all", split] = auroc(scores_N, error_N)
        figures["auroc_results", split] = auroc(scores_N[result_N], error_N[result_N])
    if weights_T is not None:
        weights_N = weights_T[inside]
        ratio = float(weights_N[error_N].mean() / weights_N[result_N].mean()) if weights_N.min() > 0 else math.nan
        figures["weight_ratio", "all"] = ratio
    return figures


def splits_of(row: Row) -> list[str]:
    """Splits that the error of a wrong response belongs to."""
    pieces = row.read.reading.pieces
    step = pieces[row.read.piece_T[np.flatnonzero(row.read.error_T)[0]]].step
    if step == len(row.read.reading.steps) - 1:
        return ["all", "last"]
    return ["all", "not_last", "first" if step == 0 else "middle"]


def scores_and_weights(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row], signal: Signal
) -> list[tuple[np.ndarray, np.ndarray]]:
    """A method's scores and weights, its gate open so that right rows have scores too; (T,) each a row."""
    if "gate" in option_fields(type(signal)):
        signal = signal.replace(gate="all")
    pairs = []
    for first in range(0, len(rows), _BATCH):
        batch = rows[first : first + _BATCH]
        ids_BL, mask_BL, response_BL = tensors(batch)
        weighed = compute_token_weights(
            model,
            tokenizer,
            ids_BL,
            mask_BL,
            response_BL,
            torch.tensor([1.0 if row.right else -1.0 for row in batch]),
            signal,
            groups=torch.arange(len(batch)),
            examples=examples([row.problem for row in batch]),
        )
        for index in range(len(batch)):
            inside_L = response_BL[index]
            scores_T, weights_T = (
                values[index, inside_L].double().numpy() for values in (weighed.scores, weighed.weights)
            )
            pairs.append((scores_T, weights_T))
    return pairs


def tensors(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, attention mask and response mask of right-padded rows, each (B, L)."""
    width = max(len(row.prompt) + len(row.response) for row in rows)
    ids_BL = torch.zeros(len(rows), width, dtype=torch.long)
    mask_BL, response_BL = torch.zeros_like(ids_BL, dtype=torch.bool), torch.zeros_like(ids_BL, dtype=torch.bool)
    for index, row in enumerate(rows):
        start, end = len(row.prompt), len(row.prompt) + len(row.response)
        ids_BL[index, :end] = torch.tensor([*row.prompt, *row.response])
        mask_BL[index, :end] = True
        response_BL[index, start:end] = True
    return ids_BL, mask_BL, response_BL


def summary(figures: Mapping[Key, Sequence[float]]) -> dict[Key, tuple[float, int]]:
    """Mean and number of responses of every figure that any response has."""
    return {key: (float(np.mean(values)), len(values)) for key, values in figures.items() if values}
