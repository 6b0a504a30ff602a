"""Credit by step, fitted to values by rollouts.

Shapes: T tokens of a response, J steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import regex
import torch
from pydantic import BaseModel, Field
from torch import Tensor

from grail_advantage.answers.expressions import compile_expression
from grail_advantage.answers.text import TokenTexts
from grail_advantage.data import ENTROPY, OLD_LOG_PROBS, Rollouts
from grail_advantage.maps import STRICT
from grail_advantage.method import AdvantageMethod, Span, option, register
from grail_advantage.methods.policy import entropy, surprisal
from grail_advantage.methods.text import cut

FEATURES = (
    "constant",
    "largest surprisal",
    "sum of surprisals",
    "largest entropy",
    "has the response's largest surprisal",
    "largest surprisal before the step",
    "sum of the largest before the step",
    "place",
    "is the answer",
    "largest surprisal if none before",
    "no surprisal before the step",
)
Row = Annotated[list[float], Field(min_length=len(FEATURES), max_length=len(FEATURES))]


class Fit(BaseModel):
    """The file of a fit."""

    model_config = STRICT

    features: tuple[str, ...]
    separator: str
    incorrect: Row  # coefficients of responses with a negative advantage
    correct: Row
    lowest: Row  # of each feature in the fit's steps
    highest: Row
    origin: dict[str, Any]


@lru_cache
def read_fit(path: str) -> Fit:
    """ValueError: the file is none of ``bench fit``."""
    try:
        fit = Fit.model_validate_json(Path(path).read_bytes(), strict=False)
        if fit.features != FEATURES:
            raise ValueError(f"it has the features {fit.features}")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"fitted.file={path!r}: {error}; write one with python -m bench fit FOLDER OUT"
        ) from error
    return fit


def starts_of_steps(
    texts: TokenTexts, ids: np.ndarray, separator: regex.Pattern[str], answer_start: int | None
) -> list[int]:
    """The first token of each step; the answer and all after it are one."""
    step_T, _ = cut(texts(ids), texts.have_bytes(ids), separator)
    starts = [0, *(1 + np.flatnonzero(np.diff(step_T))).tolist()]
    if answer_start is None:
        return starts
    # Steps from 0, 6 and 11 with an answer from 9 on begin at 0, 6 and 9.
    return [start for start in starts if start < answer_start] + [answer_start]


def features(
    surprisal_T: np.ndarray, entropy_T: np.ndarray, starts: list[int], is_answered: bool
) -> np.ndarray:
    """:data:`FEATURES` of each step, float64 (J, 11). ``is_answered``: the last step is the answer."""
    steps = len(starts)
    largest = np.maximum.reduceat(surprisal_T, starts)
    is_answer = np.arange(steps) >= steps - is_answered
    peak = largest[~is_answer].max(initial=0.0)
    earlier = np.maximum.accumulate([0.0, *largest[:-1]])
    sum_before = np.cumsum([0.0, *largest[:-1]])
    columns = [
        np.ones(steps),
        np.log1p(largest),
        np.log1p(np.add.reduceat(surprisal_T, starts)),
        np.maximum.reduceat(entropy_T, starts),
        ~is_answer & (largest == peak),
        np.log1p(earlier),
        np.log1p(sum_before),
        np.arange(steps) / max(1, steps - 1),
        is_answer,
        np.log1p(largest) * np.exp(-earlier),
        np.exp(-sum_before),
    ]
    return np.stack(columns, axis=1).astype(np.float64)


@register("fitted")
class Fitted(AdvantageMethod):
    """``python -m bench fit`` (docs/bench.md) fits a linear model of it for one model and task, on other problems'
    steps; it goes stale as the policy moves. The advantages of the responses that are weighed together are scaled to the
    root mean square, over tokens, of their own A."""

    formula = "A_t = c |A| b f(step), b of A's sign fitted to values by rollouts, f of the step's surprisal, entropy and place"
    source = "this project"
    reads = frozenset({OLD_LOG_PROBS, ENTROPY, "tokens", "tokenizer"})
    metrics: ClassVar[dict[str, str]] = {
        "outside_fit_rate": "share of steps with a feature outside the fit's range"
    }
    span: ClassVar[Span] = "first"  # type: ignore[misc]

    file: str = option("", "what python -m bench fit wrote; its whole path where Ray runs")

    def check(self) -> None:
        if self.file:
            read_fit(self.file)

    @property
    def lacks(self) -> str:
        return "" if self.file else "needs the option file, which python -m bench fit writes"

    @property
    def reads_answer(self) -> bool:
        return True

    def select(self, r: Rollouts) -> Tensor:
        return r.trains & (r.advantages != 0)

    def scores(self, r: Rollouts, of_pass: Tensor | None) -> Tensor:
        fit = read_fit(self.file)
        scores = torch.zeros_like(r.mask, dtype=torch.float64)
        for index, starts, features_JF in self._steps(r, fit.separator):
            advantage = float(r.advantages[index])
            credit_J = (
                abs(advantage)
                * features_JF
                @ np.array(fit.correct if advantage > 0 else fit.incorrect)
            )
            # Steps that begin at 0, 4, 9 of 12 tokens have 4, 5, 3.
            lengths_J = np.diff([*starts, len(r.responses[index])])
            scores[index, : sum(lengths_J)] = torch.from_numpy(credit_J.repeat(lengths_J))
        trained = r.mask & self.select(r)[:, None] & scores.isfinite().all(dim=1, keepdim=True)
        uniform = r.advantages.double()[:, None].expand(scores.shape)
        # Where every credit is 0 there is nothing to scale.
        credited = scores[trained].square().sum().clamp(min=1e-30)
        scale = (uniform[trained].square().sum() / credited).sqrt()
        return scores * scale

    def own_figures(self, r: Rollouts) -> dict[str, float]:
        fit = read_fit(self.file)
        steps = [features_JF for _, _, features_JF in self._steps(r, fit.separator)]
        if not steps:
            return {}
        features_NF = np.concatenate(steps)
        outside_NF = (features_NF < np.array(fit.lowest) - 1e-6) | (
            features_NF > np.array(fit.highest) + 1e-6
        )
        return {"outside_fit_rate": float(outside_NF.any(axis=1).mean())}

    def _steps(self, r: Rollouts, separator: str) -> Iterator[tuple[int, list[int], np.ndarray]]:
        """Index, first tokens of the steps and their features, for each selected response."""
        texts = TokenTexts(r.tokenizer)
        expression = compile_expression(separator, "separator")
        # Some hosts have values for the tokens of a tool as well.
        surprisal_BT = torch.where(r.written, surprisal(r), 0.0).numpy()
        entropy_BT = torch.where(r.written, entropy(r), 0.0).numpy()
        for index in self.select(r).nonzero().flatten().tolist():
            length = len(r.responses[index])
            is_answered = bool(r.answered[index])
            answer_start = int(r.bounds[index, 0]) if is_answered else None
            starts = starts_of_steps(
                texts, r.tokens[index, :length].numpy(), expression, answer_start
            )
            yield (
                index,
                starts,
                features(
                    surprisal_BT[index, :length], entropy_BT[index, :length], starts, is_answered
                ),
            )
