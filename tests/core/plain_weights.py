"""Token weights of the methods that read old log-probabilities and entropies, the plain way, to compare the package with.

Nothing here is shared with the package but the span's four numbers: responses are lists of floats, and everything is a loop. A
weight list has one entry for each token of its response.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from grail_advantage import AnswerSpan, Method, Rollouts
from tests.core.common import rollouts_of, weighed
from tests.core.plain_maps import MAPS, chosen, part, to_mass

NAN = math.nan
Weights = list[list[float]]
SPAN = AnswerSpan(3, 4, 5, 6)  # three reasoning tokens, opening, one content token, closing; the rest is after it


@dataclass
class Row:
    """A response: one log-probability and one entropy for each token, both exact in float32."""

    advantage: float
    log_probs: Sequence[float] = ()
    entropies: Sequence[float] = ()
    span: AnswerSpan | None = None
    trained: Sequence[bool] = field(default=())
    """By default every token trains."""

    def __post_init__(self) -> None:
        length = max(len(self.log_probs), len(self.entropies))
        self.log_probs = list(self.log_probs) or [-1.0] * length
        self.entropies = list(self.entropies) or [1.0] * length
        self.trained = list(self.trained) or [True] * length

    @property
    def tokens(self) -> list[int]:
        """Indices of the tokens that train."""
        return [index for index, trained in enumerate(self.trained) if trained]

    def reasoning(self) -> list[int]:
        """Those of them before the answer."""
        return [index for index in self.tokens if self.span is not None and index < self.span.start]

    def ones(self) -> list[float]:
        """Weight 1 on every token that trains."""
        return [1.0 if trained else 0.0 for trained in self.trained]


def random_rows(seed: int, count: int = 12) -> list[Row]:
    """Responses of 0 to 14 tokens. Every second draw has few different values, so that ties abound."""
    draw = random.Random(seed)
    step = 64 if seed % 2 else 2
    rows = []
    for _ in range(count):
        length = draw.choice([0, 1, 2, 3, 5, 8, 14])
        start = draw.randint(0, length)
        content = draw.randint(start, length)
        end = draw.randint(content, length)
        has_answer = length > 0 and draw.random() < 0.7
        rows.append(
            Row(
                advantage=draw.choice([-2.0, -0.75, -0.0625, 0.0, 0.0625, 0.5, 1.25]),
                log_probs=[-draw.randint(0, 6 * step) / step for _ in range(length)],
                entropies=[draw.randint(0, 2 * step) / step for _ in range(length)],
                span=AnswerSpan(start, content, end, length) if has_answer else None,
                trained=[draw.random() < 0.8 for _ in range(length)] if draw.random() < 0.3 else (),
            )
        )
    return rows


def batch_of(rows: Sequence[Row], *, extra: int = 0, junk: float = NAN, **parts: Any) -> Rollouts:
    """The responses side by side, padded on the right, with ``junk`` wherever no token trains."""
    width = max((len(row.trained) for row in rows), default=0) + extra

    def column(name: str) -> torch.Tensor:
        known = [[v if t else junk for v, t in zip(getattr(row, name), row.trained, strict=True)] for row in rows]
        return torch.tensor([of + [junk] * (width - len(of)) for of in known]).reshape(len(rows), width)

    masks = [list(row.trained) + [False] * (width - len(row.trained)) for row in rows]
    columns = {"old_log_probs": column("log_probs"), "entropy": column("entropies")}
    ids, advantages = [[0] * width] * len(rows), [row.advantage for row in rows]
    return rollouts_of(ids, advantages, masks, [row.span for row in rows], columns=columns, **parts)


def weights_of(method: Method, rows: Sequence[Row], **parts: Any) -> Weights:
    """The package's weights of each response's tokens."""
    weights = weighed(method, batch_of(rows, **parts)).weights
    return [weights[index, : len(row.trained)].tolist() for index, row in enumerate(rows)]


def close(got: Sequence[Sequence[float]], expected: Sequence[Sequence[float]], tolerance: float = 1e-6) -> None:
    """Row by row, so that a failure names the response."""
    assert len(got) == len(expected)
    for index, (of_row, wanted) in enumerate(zip(got, expected, strict=True)):
        both = (torch.tensor(values, dtype=torch.float64) for values in (of_row, wanted))
        text = f"response {index}: {of_row} is not {wanted}"
        torch.testing.assert_close(*both, rtol=tolerance, atol=tolerance, msg=text)


def inside(row: Row, gate: str) -> bool:
    """Whether the gate lets the response through."""
    return {"wrong": row.advantage <= 0, "correct": row.advantage > 0, "all": True}[gate]


def through_map(
    rows: Sequence[Row],
    values: Callable[[Row], Sequence[float]],
    *,
    reshaper: str,
    gate: str,
    statistics: str,
    normalize_mass: bool = False,
    **options: Any,
) -> Weights:
    """A score for each token, one of the maps above, a gate and a statistics set."""
    all_weights = []
    for row in rows:
        weights = row.ones()
        places = row.reasoning() if statistics == "reasoning" else row.tokens
        scores = [max(0.0, values(row)[index]) for index in places]
        if inside(row, gate) and row.advantage != 0 and places and all(map(math.isfinite, scores)):
            mapped = MAPS[reshaper](scores, **options)
            if reshaper == "top":
                weights = [0.0] * len(weights)
            for index, weight in zip(places, mapped, strict=True):
                weights[index] = weight
            if normalize_mass:
                weights = to_mass(weights, row.tokens if reshaper == "top" else places)
        all_weights.append(weights)
    return all_weights


def surprisals(row: Row) -> list[float]:
    """-log p."""
    return [-value for value in row.log_probs]


def surprisal(rows: Sequence[Row], **options: Any) -> Weights:
    """Surprisal through a map."""
    settings = {"reshaper": "top", "gate": "wrong", "statistics": "reasoning"} | options
    return through_map(rows, surprisals, **settings)


def entropy(rows: Sequence[Row], **options: Any) -> Weights:
    """Entropy through a map."""
    settings = {"reshaper": "mean_ratio", "gate": "all", "statistics": "response"} | options
    return through_map(rows, lambda row: row.entropies, **settings)


def sound(row: Row, *columns: Sequence[float]) -> bool:
    """Whether every token that trains has finite values."""
    return all(math.isfinite(column[index]) for column in columns for index in row.tokens)


def each_token(
    rows: Sequence[Row],
    column: str,
    weight: Callable[[Row, int], float],
    *,
    normalize_mass: bool = False,
    taking_part: Callable[[Row], bool] = lambda row: row.advantage != 0,
) -> Weights:
    """A weight of its own for every token of the responses that take part and whose column is finite."""
    all_weights = []
    for row in rows:
        weights = row.ones()
        if taking_part(row) and sound(row, getattr(row, column)):
            for index in row.tokens:
                weights[index] = weight(row, index)
            if normalize_mass:
                weights = to_mass(weights, row.tokens)
        all_weights.append(weights)
    return all_weights


def high_entropy(rows: Sequence[Row], rho: float = 0.2, denominator: str = "selected", **mass: bool) -> Weights:
    """The tokens at or above the entropy that the share ends with, over all responses."""
    everything = [row.entropies[index] for row in rows if sound(row, row.entropies) for index in row.tokens]
    if not everything:
        return [row.ones() for row in rows]
    cut = sorted(everything, reverse=True)[part(rho, len(everything)) - 1]
    kept = sum(1 for value in everything if value >= cut)
    weight = len(everything) / kept if denominator == "selected" else 1.0
    of_token = lambda row, index: weight if row.entropies[index] >= cut else 0.0  # noqa: E731
    return each_token(rows, "entropies", of_token, taking_part=lambda row: True, **mass)


def entropy_bonus(rows: Sequence[Row], alpha: float = 0.4, kappa: float = 2.0, **mass: bool) -> Weights:
    """(A + min(alpha H, |A| / kappa)) / A."""

    def of_token(row: Row, index: int) -> float:
        bonus = min(alpha * max(0.0, row.entropies[index]), abs(row.advantage) / kappa)
        return (row.advantage + bonus) / row.advantage

    return each_token(rows, "entropies", of_token, **mass)


def probability(rows: Sequence[Row], alpha: float = 0.2, **mass: bool) -> Weights:
    """alpha p + 1 - alpha."""
    of_token = lambda row, index: alpha * math.exp(min(0.0, row.log_probs[index])) + 1 - alpha  # noqa: E731
    return each_token(rows, "log_probs", of_token, **mass)


def stare(
    rows: Sequence[Row],
    variant: str = "O1",
    threshold: float = 0.3,
    share: float = 0.1,
    strength: float = 0.1,
    normalize_mass: bool = False,
) -> Weights:
    """The least probable tokens of either sign, while the mean entropy is below the threshold."""
    usable = [row for row in rows if sound(row, row.entropies, row.log_probs)]
    everything = [row.entropies[index] for row in usable for index in row.tokens]
    all_weights = {id(row): row.ones() for row in rows}
    if math.fsum(everything) / max(1, len(everything)) < threshold:
        for sign, weight in ((1, 1 + strength), (-1, 1 - strength))[: 1 if variant == "O1" else 2]:
            places = [(row, index) for row in usable if row.advantage * sign > 0 for index in row.tokens]
            scores = [surprisals(row)[index] for row, index in places]
            for row, index in chosen(scores, places, min(len(places), part(share, len(places)))):
                all_weights[id(row)][index] = weight
        if normalize_mass:
            all_weights |= {id(row): to_mass(all_weights[id(row)], row.tokens) for row in usable}
    return [all_weights[id(row)] for row in rows]


def polarity(
    rows: Sequence[Row], right: float = 1.0, wrong: float = 1.0, spread: bool = False, spread_over: str = "both"
) -> Weights:
    """A weight for each sign, for each token or shared by the response's tokens."""

    def of_token(row: Row, index: int) -> float:
        sign = "right" if row.advantage > 0 else "wrong"
        weight = right if sign == "right" else wrong
        return weight / len(row.tokens) if spread and spread_over in (sign, "both") else weight

    return each_token(rows, "log_probs", of_token)


def steer(rows: Sequence[Row], highest: float = 1.2, lowest: float = 0.8, normalize_mass: bool = False) -> Weights:
    """Linear in |A (1 - p) (log p + H)| between the batch's extremes."""
    changes: dict[tuple[int, int], float] = {}
    for number, row in enumerate(rows):
        if row.advantage != 0 and sound(row, row.log_probs, row.entropies):
            for index in row.tokens:
                log_p, entropy_ = min(0.0, row.log_probs[index]), max(0.0, row.entropies[index])
                changes[number, index] = abs(row.advantage * (1 - math.exp(log_p)) * (log_p + entropy_))
    all_weights = [row.ones() for row in rows]
    if not changes or min(changes.values()) == max(changes.values()):
        return all_weights
    least, most = min(changes.values()), max(changes.values())
    for (number, index), change in changes.items():
        all_weights[number][index] = highest + (lowest - highest) * (change - least) / (most - least)
    compared = {number for number, _ in changes} if normalize_mass else set()
    return [to_mass(w, rows[n].tokens) if n in compared else w for n, w in enumerate(all_weights)]


METHODS: dict[str, Callable] = {
    **{"surprisal": surprisal, "entropy": entropy, "high_entropy": high_entropy, "entropy_bonus": entropy_bonus},
    **{"probability": probability, "stare": stare, "polarity": polarity, "steer": steer},
}
