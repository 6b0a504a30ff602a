"""How well token scores find the step that went wrong, on responses for which that step is known.

Every method scores the reasoning tokens of wrong responses; the true tokens are those on which the first error stands. By
response: precision among the top k, reciprocal rank of the best true token, AUROC, which step has the highest mean score, the
weight on the wrong step, and rank agreement with OAR-P, whose counterfactuals are the costly reference. Intervals are
bootstraps over responses.

Tied scores count with their expectation over a random order of the tied tokens. So the baseline ``random``, which scores all
tokens alike, has the exact expectation of a random order. Ranks use scores; weights are a monotone map of them, with clips.

Sources: GRAIL (arXiv 2606.04889), OAR (arXiv 2601.07408).

Shape suffixes: B responses, L prompt + response, N reasoning tokens of one response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grail_advantage import GrailConfig, OarConfig, compute_token_weights
from grail_advantage.answer_span import find_answer_spans
from grail_advantage.reshapers.log_zscore import log_zscore_weights
from study.statistics import bootstrap_interval

METHODS: dict[str, tuple[str, GrailConfig | OarConfig]] = {
    "grail_official": ("GRAIL official", GrailConfig("official")),
    "grail_robust": ("GRAIL robust", GrailConfig("robust")),
    "grail_robust_predictor": ("GRAIL robust (predictor alignment)", GrailConfig("robust", alignment="predictor")),
    "grail_robust_first": ("GRAIL robust (first block)", GrailConfig("robust", leaf="first")),
    "grail_robust_last": ("GRAIL robust (last block)", GrailConfig("robust", leaf="last")),
    "oar_g_official": ("OAR-G official", OarConfig(method="gradient", variant="official")),
    "oar_g_grail_port": ("OAR-G (GRAIL's port)", OarConfig(method="gradient", variant="grail_port")),
    "oar_p": ("OAR-P (counterfactual)", OarConfig(method="perturbation")),
}
"""Name to label and options."""
REFERENCE = "oar_p"
BASELINES = {
    "random": "baseline: random order",
    "position": "baseline: latest tokens first",
    "surprisal": "baseline: least likely tokens first",
}
METRICS = {
    "auroc": "AUROC",
    "precision_at_true": "precision at number of true tokens",
    "precision_at_1": "precision at 1",
    "precision_at_3": "precision at 3",
    "precision_at_5": "precision at 5",
    "reciprocal_rank": "mean reciprocal rank",
    "step_found": "wrong step has the highest mean score",
    "lift": "weight share of the wrong step / its token share",
    "spearman": "Spearman correlation with OAR-P",
}
TOP = (1, 3, 5)
_BATCH = 64


@dataclass(frozen=True)
class Example:
    """One wrong response and what is wrong with it; token indices count from the response's first token."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    error_tokens: frozenset[int]
    """The wrong tokens of the first wrong step."""
    steps: Sequence[tuple[int, int]] = ()
    """Half-open token ranges of the written steps. The one with the first wrong token is the wrong step."""


@dataclass(frozen=True)
class _Scored:
    """What one method makes of one response's reasoning tokens."""

    scores_N: np.ndarray
    weights_N: np.ndarray


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    methods: Mapping[str, tuple[str, GrailConfig | OarConfig]] | None = None,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """Judge the methods and the baselines on one model.

    Left out are responses without a complete answer, and those without a true or without an innocent token before it.

    Args:
        model: the causal language model whose scores are judged.
        tokenizer: the tokenizer of the ids.
        examples: wrong responses.
        methods: name to label and options; :data:`METHODS` by default. The responses have advantage -1.
        temperature: sampling temperature, for GRAIL.

    Returns:
        JSON-ready: ``examples``, ``used``, ``left_out`` (count by reason), ``reasoning_tokens`` and ``true_tokens`` (means),
        and ``methods``: by name ``label``, ``baseline`` (bool), ``responses`` (with finite scores) and ``metrics``: by
        name of :data:`METRICS` a ``{value, low, high, responses}``, or ``None`` where no response has the metric; and
        ``minus``: by baseline and metric the same figures of the paired difference. ``low`` and ``high`` are ``None`` with
        a single response.

    Raises:
        ValueError: no example can be used, or an index outside its response.
    """
    methods = METHODS if methods is None else methods
    used, lengths, left_out = _usable(examples, tokenizer)
    if not used:
        raise ValueError(
            f"none of {len(examples)} examples can be used ({left_out}); pass wrong responses with an answer"
        )

    scored = {
        name: _method_scores(model, tokenizer, used, lengths, config, temperature)
        for name, (_, config) in methods.items()
    }
    scored |= _baseline_scores(model, used, lengths, temperature)
    labels = {name: label for name, (label, _) in methods.items()} | BASELINES
    rows: dict[str, list[dict[str, float | None] | None]] = {
        name: [
            None
            if one is None
            else example_metrics(one.scores_N, one.weights_N, example, _scores_of(scored.get(REFERENCE), row))
            for row, (one, example) in enumerate(zip(scored[name], used, strict=True))
        ]
        for name in scored
    }
    return {
        "examples": len(examples),
        "used": len(used),
        "left_out": left_out,
        "reasoning_tokens": float(np.mean(lengths)),
        "true_tokens": float(np.mean([len(example.error_tokens) for example in used])),
        "methods": {
            name: {
                "label": labels[name],
                "baseline": name in BASELINES,
                "responses": sum(row is not None for row in rows[name]),
                "metrics": {metric: _mean(_column(rows[name], metric)) for metric in METRICS},
                "minus": {
                    baseline: {
                        metric: _mean(_column(rows[name], metric) - _column(rows[baseline], metric))
                        for metric in METRICS
                    }
                    for baseline in BASELINES
                    if baseline != name
                },
            }
            for name in rows
        },
    }


def _usable(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Example], list[int], dict[str, int]]:
    """Usable examples with their true tokens cut to the reasoning, its lengths, and how many were left out and why."""
    for number, example in enumerate(examples):
        length = len(example.response_ids)
        for token in example.error_tokens:
            if not 0 <= token < length:
                raise ValueError(f"examples[{number}].error_tokens has {token}, outside its {length} response tokens")
        for start, end in example.steps:
            if not 0 <= start < end <= length:
                raise ValueError(
                    f"examples[{number}].steps has {(start, end)}, no range of its {length} response tokens"
                )
    spans = find_answer_spans([example.response_ids for example in examples], tokenizer, "last")
    used, lengths = [], []
    left_out = {"no answer": 0, "no true token before the answer": 0, "only true tokens": 0}
    for example, span in zip(examples, spans, strict=True):
        if span is None:
            left_out["no answer"] += 1
            continue
        true = frozenset(token for token in example.error_tokens if token < span.start)
        if not true:
            left_out["no true token before the answer"] += 1
        elif len(true) == span.start:
            left_out["only true tokens"] += 1
        else:
            steps = tuple((start, end) for start, end in example.steps if end <= span.start)
            used.append(Example(example.prompt_ids, example.response_ids, true, steps))
            lengths.append(span.start)
    return used, lengths, left_out


def _method_scores(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    lengths: Sequence[int],
    config: GrailConfig | OarConfig,
    temperature: float,
) -> list[_Scored | None]:
    """Scores and weights of the reasoning tokens; ``None`` for a response with a score that is not finite."""
    scored: list[_Scored | None] = []
    for first in range(0, len(examples), _BATCH):
        batch = examples[first : first + _BATCH]
        ids_BL, mask_BL, response_BL = _tensors(batch, next(model.parameters()).device)
        wrong_B = torch.full((len(batch),), -1.0, device=ids_BL.device)
        result = compute_token_weights(
            model, tokenizer, ids_BL, mask_BL, response_BL, wrong_B, config, temperature=temperature
        )
        for row, length in enumerate(lengths[first : first + _BATCH]):
            inside_L = response_BL[row]
            scores_N = result.scores[row, inside_L][:length].double().cpu().numpy()
            weights_N = result.weights[row, inside_L][:length].double().cpu().numpy()
            scored.append(_Scored(scores_N, weights_N) if np.isfinite(scores_N).all() else None)
    return scored


def _baseline_scores(
    model: PreTrainedModel, examples: Sequence[Example], lengths: Sequence[int], temperature: float
) -> dict[str, list[_Scored | None]]:
    """The baselines' scores, turned into weights as GRAIL's robust preset does it."""
    scored: dict[str, list[_Scored | None]] = {name: [] for name in BASELINES}
    for example, length in zip(examples, lengths, strict=True):
        scores = {
            "random": np.ones(length),
            "position": np.arange(1.0, length + 1),
            "surprisal": _surprisal(model, example, length, temperature),
        }
        for name, scores_N in scores.items():
            scored[name].append(_Scored(scores_N, _reshaped(scores_N)) if np.isfinite(scores_N).all() else None)
    return scored


@torch.no_grad()
def _surprisal(model: PreTrainedModel, example: Example, length: int, temperature: float) -> np.ndarray:
    """Negative log-likelihood of each reasoning token under the model."""
    start = len(example.prompt_ids)
    ids_S = [*example.prompt_ids, *list(example.response_ids)[:length]]
    ids_1S = torch.tensor([ids_S], device=next(model.parameters()).device)
    was_training = model.training
    model.eval()
    try:
        logits_SV = model(input_ids=ids_1S, use_cache=False).logits[0].float()
    finally:
        model.train(was_training)
    log_probs_NV = torch.log_softmax(logits_SV[start - 1 : -1] / temperature, dim=-1)
    return -log_probs_NV.gather(1, ids_1S[0, start:, None])[:, 0].double().cpu().numpy()


def _reshaped(scores_N: np.ndarray) -> np.ndarray:
    options = GrailConfig("robust")
    weights_1N = log_zscore_weights(
        torch.from_numpy(scores_N).unsqueeze(0),
        torch.ones(1, len(scores_N), dtype=torch.bool),
        weight_mean=options.weight_mean,
        weight_std=options.weight_std,
        weight_min=options.weight_min,
        weight_max=options.weight_max,
    )
    return weights_1N[0].double().numpy()


def _tensors(examples: Sequence[Example], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, attention mask and response mask of right-padded rows, each (B, L)."""
    width = max(len(example.prompt_ids) + len(example.response_ids) for example in examples)
    ids_BL = torch.zeros(len(examples), width, dtype=torch.long, device=device)
    mask_BL, response_BL = torch.zeros_like(ids_BL, dtype=torch.bool), torch.zeros_like(ids_BL, dtype=torch.bool)
    for row, example in enumerate(examples):
        start, end = len(example.prompt_ids), len(example.prompt_ids) + len(example.response_ids)
        ids_BL[row, :end] = torch.tensor([*example.prompt_ids, *example.response_ids])
        mask_BL[row, :end] = True
        response_BL[row, start:end] = True
    return ids_BL, mask_BL, response_BL


def _scores_of(scored: Sequence[_Scored | None] | None, row: int) -> np.ndarray | None:
    one = scored[row] if scored is not None else None
    return None if one is None else one.scores_N


def _column(rows: Sequence[Mapping[str, float | None] | None], metric: str) -> np.ndarray:
    """One metric of every response, NaN where a response has none."""
    return np.array([np.nan if row is None or row[metric] is None else row[metric] for row in rows], dtype=float)


def _mean(values_B: np.ndarray) -> dict[str, float | int | None] | None:
    values = values_B[~np.isnan(values_B)]
    if not len(values):
        return None
    ends = bootstrap_interval(values, "responses") or (None, None)
    return {"value": float(values.mean()), "low": ends[0], "high": ends[1], "responses": len(values)}


def example_metrics(
    scores_N: np.ndarray, weights_N: np.ndarray, example: Example, reference_N: np.ndarray | None = None
) -> dict[str, float | None]:
    """Every metric of one response; ``None`` where it is not defined for it (no steps, constant scores, no reference).

    Args:
        scores_N: finite scores of the reasoning tokens, the higher the more important.
        weights_N: their weights, at least 0.
        example: its ``error_tokens`` are true, the other tokens before N innocent; both kinds must be there.
        reference_N: OAR-P's scores of the same tokens.
    """
    true_N = np.isin(np.arange(len(scores_N)), list(example.error_tokens))
    wrong = wrong_step(example)
    return {
        "auroc": auroc(scores_N, true_N),
        "precision_at_true": precision_at(scores_N, true_N, int(true_N.sum())),
        **{f"precision_at_{k}": precision_at(scores_N, true_N, k) for k in TOP},
        "reciprocal_rank": reciprocal_rank(scores_N, true_N),
        "step_found": None if wrong is None else step_found(scores_N, example.steps, wrong),
        "lift": None if wrong is None else lift(weights_N, *wrong),
        "spearman": None if reference_N is None else spearman(scores_N, reference_N),
    }


def wrong_step(example: Example) -> tuple[int, int] | None:
    """The step with the first wrong token; ``None`` if no step holds it."""
    first = min(example.error_tokens)
    return next(((start, end) for start, end in example.steps if start <= first < end), None)


def precision_at(scores_N: np.ndarray, true_N: np.ndarray, k: int) -> float:
    """Expected share of true tokens among the k highest scores; among all tokens where there are fewer than k."""
    k = min(k, len(scores_N))
    cut = np.sort(scores_N)[-k]
    above_N, tied_N = scores_N > cut, scores_N == cut
    seats = k - above_N.sum()  # the tied tokens share what the higher ones left of the k
    return float((true_N[above_N].sum() + true_N[tied_N].sum() * seats / tied_N.sum()) / k)


def reciprocal_rank(scores_N: np.ndarray, true_N: np.ndarray) -> float:
    """Expected ``1 / rank`` of the highest-ranked true token, ranks from 1."""
    best = scores_N[true_N].max()
    above = int((scores_N > best).sum())
    tied = int((scores_N == best).sum())
    true = int((true_N & (scores_N == best)).sum())
    # The first of `true` tokens in a random order of `tied` stands at place i with this probability.
    return sum(comb(tied - i, true - 1) / comb(tied, true) / (above + i) for i in range(1, tied - true + 2))


def auroc(scores_N: np.ndarray, true_N: np.ndarray) -> float:
    """Probability that a true token has a higher score than an innocent one, ties counting half."""
    true, innocent = scores_N[true_N][:, None], scores_N[~true_N][None]
    return float(np.mean((true > innocent) + 0.5 * (true == innocent)))


def step_found(scores_N: np.ndarray, steps: Sequence[tuple[int, int]], wrong: tuple[int, int]) -> float:
    """1 if the wrong step's mean score is the highest of all steps, ``1 / m`` if it is one of m highest, else 0."""
    means = {step: float(scores_N[step[0] : step[1]].mean()) for step in steps}
    highest = max(means.values())
    tied = [step for step, mean in means.items() if np.isclose(mean, highest, rtol=1e-12, atol=0)]
    return 1 / len(tied) if wrong in tied else 0.0


def lift(weights_N: np.ndarray, start: int, end: int) -> float | None:
    """Share of the weight on tokens ``start .. end - 1`` divided by their share of the tokens; ``None`` without weight."""
    total = weights_N.sum()
    return float(weights_N[start:end].sum() / total * len(weights_N) / (end - start)) if total > 0 else None


def spearman(first_N: np.ndarray, second_N: np.ndarray) -> float | None:
    """Rank correlation with average ranks for ties; ``None`` where either is constant."""
    ranks = [average_ranks(values) for values in (first_N, second_N)]
    centred = [values - values.mean() for values in ranks]
    norm = np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum())
    return float((centred[0] * centred[1]).sum() / norm) if norm > 0 else None


def average_ranks(values_N: np.ndarray) -> np.ndarray:
    """Ranks from 1 for the smallest; tied values share the mean of their ranks."""
    _, group_N, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[group_N]
