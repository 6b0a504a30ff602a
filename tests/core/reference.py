"""GRAIL's token weights (arXiv 2606.04889) the plain way, to compare the package with.

Nothing here is shared with the package. Every row goes alone through a full forward pass over all its positions,
padding included, in float64; all logits are computed, the leaf's gradient comes from `inputs_embeds` and
`output_hidden_states` instead of hooks, and everything after it is Python floats in loops. The tokenizer must be
character-level: one token is one character, so that spans are found by counting braces in a string.
"""

import copy
import math
import re
from functools import cache
from typing import NamedTuple

import torch

from tests.core.plain_weights import MAPS, to_mass
from tests.core.tiny_models import decode

OFFICIAL = {
    "leaf": "embeddings",
    "alignment": "predictor",
    "span": "first",
    "target": "span",
    "gate": "wrong",
    "statistics": "response",
    "reshaper": "log_zscore",
    "weight_mean": 1.0,
    "weight_std": 0.5,
    "weight_min": 0.5,
    "weight_max": 5.0,
    "content_weight": None,
    "content_outside_gate": True,
    "normalize_mass": False,
    "control": "none",
}
ROBUST = {
    "alignment": None,
    "span": "last",
    "target": "content",
    "statistics": "reasoning",
    "content_outside_gate": False,
    "normalize_mass": True,
}
Span = tuple[int, int, int, int]
"""Of an answer, relative to the response: start, content_start, content_end, end."""


def resolve(preset: str, **overrides: object) -> dict:
    """A preset's options with overrides, and the two options that follow from others filled in."""
    options = OFFICIAL | (ROBUST if preset == "robust" else {}) | overrides
    assert set(options) == set(OFFICIAL)
    if options["alignment"] is None:
        options["alignment"] = "token" if options["leaf"] == "embeddings" else "predictor"
    if options["content_weight"] is None:
        options["content_weight"] = options["weight_max"]
    return options


class ReferenceResult(NamedTuple):
    """B rows of L floats, and a span or None for a row; scores are NaN outside the response and in rows without a span."""

    weights: list[list[float]]
    scores: list[list[float]]
    spans: list[Span | None]


def partner(text: str, at: int, opener: str, closer: str) -> int:
    """Where the closer of the opener at this place begins; -1 without one."""
    # An opener counts up, a closer down; at 0 the pair is complete.
    depth = 0
    while at < len(text):
        if text.startswith(opener, at):
            depth = depth + 1
            at = at + len(opener)
        elif text.startswith(closer, at):
            depth -= 1
            if depth == 0:
                return at
            at += len(closer)
        else:
            at += 1
    return -1


def boxed_spans(text: str) -> list[Span]:
    """All complete boxes of a string."""
    opening = "\\boxed{"
    # A brace behind an odd number of backslashes is a sign.
    text = re.sub(
        r"\\+[{}]", lambda m: m[0][:-1] + "." if len(m[0]) % 2 == 0 else m[0], text
    )
    spans = []
    at = text.find(opening)
    while at >= 0:
        close = partner(text, at + len(opening) - 1, "{", "}")
        if close >= 0:
            spans.append((at, at + len(opening), close, close + 1))
        at = text.find(opening, max(close, at + 1))
    return spans


class PlainModel:
    """A float64 copy of a model in evaluation mode, and the position scores that were computed with it so far."""

    def __init__(self, model: torch.nn.Module):
        self.model = copy.deepcopy(model).double().eval()
        # Transformers puts the normed output into hidden_states[n]; with the norm in the head it is the last block's own.
        self.model.lm_head = torch.nn.Sequential(self.model.model.norm, self.model.lm_head)
        self.model.model.norm = torch.nn.Identity()
        self.scores = cache(self._scores)

    def _scores(
        self,
        ids: tuple[int, ...],
        attention: tuple[int, ...],
        targets: tuple[int, ...],
        leaf: str,
        temperature: float,
    ) -> list[float]:
        """`||dL/dh_p * h_p||_2` of each position p of one padded row; `targets` are the target tokens' own positions."""
        embeds = (
            self.model.get_input_embeddings()(torch.tensor([ids])).detach().requires_grad_()
        )
        output = self.model(
            inputs_embeds=embeds,
            attention_mask=torch.tensor([attention]),
            position_ids=torch.tensor([attention]).cumsum(-1).sub(1).clamp(min=0),
            use_cache=False,
            output_hidden_states=True,
        )
        blocks = len(self.model.model.layers)
        assert len(output.hidden_states) == blocks + 1
        assert output.logits.shape[1] == len(ids)
        index = {"embeddings": 0, "first": 1, "middle": blocks // 2, "last": blocks - 1}[
            leaf
        ]
        hidden = embeds if index == 0 else output.hidden_states[index]
        loss = torch.zeros((), dtype=torch.float64)
        for target in targets:
            # A token is predicted at the position before it.
            scaled = output.logits[0, target - 1] / temperature
            loss = loss - (scaled[ids[target]] - torch.logsumexp(scaled, dim=-1))
        (gradient,) = torch.autograd.grad(loss, hidden)
        return (gradient * hidden)[0].norm(dim=-1).tolist()


def row_weights(
    scores: list[float], span: Span | None, advantage: float, options: dict
) -> list[float]:
    """Weights of one response from its T tokens' scores."""
    length = len(scores)
    if span is None or advantage == 0:
        return [1.0] * length
    start, content_start, content_end, _ = span
    outside = (options["gate"] == "wrong" and advantage > 0) or (
        options["gate"] == "correct" and advantage <= 0
    )
    # Outside the gate nothing is weighed but, perhaps, the answer.
    weights = [1.0 if outside else options["weight_mean"]] * length
    if not outside:
        counted = range(length) if options["statistics"] == "response" else range(start)
        numbers = {}
        if options["reshaper"] == "log_zscore":
            for name in ("weight_mean", "weight_std", "weight_min", "weight_max"):
                numbers[name] = options[name]
        mapped = MAPS[options["reshaper"]]([scores[t] for t in counted], **numbers)
        for t, weight in zip(counted, mapped, strict=True):
            weights[t] = 1.0 if options["control"] == "answer" else weight
    if not outside or options["content_outside_gate"]:
        for t in range(start, length):
            is_content = content_start <= t < content_end
            weights[t] = options["content_weight" if is_content else "weight_mean"]
    if options["normalize_mass"] and not outside:
        return to_mass(weights, range(length))
    return weights


def reference_weights(
    model: PlainModel,
    input_ids: list[list[int]],
    attention_mask: list[list[int]],
    response_mask: list[list[int]],
    advantages: list[float],
    options: dict,
    temperature: float = 1.0,
) -> ReferenceResult:
    """Weights, scores and spans of a padded batch."""
    result = ReferenceResult([], [], [])
    rows = zip(input_ids, attention_mask, response_mask, advantages, strict=True)
    for ids, attention, mask, advantage in rows:
        positions = [p for p in range(len(ids)) if mask[p] == 1]
        spans = boxed_spans(decode(ids[p] for p in positions)) or [None]
        span = spans[0 if options["span"] == "first" else -1]
        token_scores = [math.nan] * len(positions)
        if span is not None:
            first, content_start, content_end, past = span
            if options["target"] == "content" and content_start < content_end:
                first = content_start
                past = content_end
            # Positions of the padded row, where the answer's tokens are.
            targets = tuple(positions[first:past])
            at_position = model.scores(
                tuple(ids), tuple(attention), targets, options["leaf"], temperature
            )
            shift = {"predictor": 1, "token": 0}[options["alignment"]]
            token_scores = [at_position[p - shift] for p in positions]
        token_weights = row_weights(token_scores, span, advantage, options)
        result.weights.append([0.0] * len(ids))
        result.scores.append([math.nan] * len(ids))
        for p, weight, score in zip(positions, token_weights, token_scores, strict=True):
            result.weights[-1][p] = weight
            result.scores[-1][p] = score
        result.spans.append(span)
    return result
