"""Credit by step, fitted to values by rollouts.

Shapes: T tokens of a response, J steps."""

from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import BaseModel, Field
from torch import Tensor

from grail_advantage.data import ENTROPY, OLD_LOG_PROBS, Rollouts
from grail_advantage.maps import STRICT
from grail_advantage.method import AdvantageMethod, option, register
from grail_advantage.methods.policy import entropy, surprisal
from grail_advantage.methods.text import starts_of_steps, steps_of

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
# A number for each feature.
Row = Annotated[list[float], Field(min_length=11, max_length=11)]


class Fit(BaseModel):
    """The file of a fit."""

    model_config = STRICT

    features: tuple[str, ...]
    separator: str
    incorrect: Row  # coefficients of responses with a negative advantage
    correct: Row
    lowest: Row  # of each feature in the fit's steps
    highest: Row
    origin: dict


@cache
def read_fit(path: str) -> Fit:
    """ValueError: the file is none of ``bench fit``."""
    try:
        fit = Fit.model_validate_json(Path(path).read_bytes())
        if fit.features != FEATURES:
            raise ValueError(f"it has the features {fit.features}")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"fitted.file={path!r}: {error}; write one with python -m bench fit FOLDER OUT"
        ) from error
    return fit


def features(
    surprisal_T: np.ndarray, entropy_T: np.ndarray, starts: list[int], is_answered: bool
) -> np.ndarray:
    """:data:`FEATURES` of each step, float64 (J, 11). ``is_answered``: the last step is the answer."""
    steps = len(starts)
    place = np.arange(steps)
    is_reasoning = place < steps - is_answered
    largest = np.maximum.reduceat(surprisal_T, starts)
    log_largest = np.log1p(largest)
    # Before the first step nothing was surprising.
    previous = [0.0, *largest[:-1]]
    earlier = np.maximum.accumulate(previous)
    sum_before = np.cumsum(previous)
    columns = [
        np.ones(steps),
        log_largest,
        np.log1p(np.add.reduceat(surprisal_T, starts)),
        np.maximum.reduceat(entropy_T, starts),
        is_reasoning & (largest == largest[is_reasoning].max(initial=0.0)),
        np.log1p(earlier),
        np.log1p(sum_before),
        place / max(1, steps - 1),
        ~is_reasoning,
        log_largest * np.exp(-earlier),
        np.exp(-sum_before),
    ]
    return np.column_stack(columns)


@register("fitted")
class Fitted(AdvantageMethod):
    """``python -m bench fit`` (docs/bench.md) fits a linear model of it for one model and task, on other problems'
    steps; it goes stale as the policy moves. The advantages of the responses that are weighed together are scaled to the
    root mean square, over tokens, of their own A."""

    formula = "A_t = c |A| b f(step), b of A's sign fitted to values by rollouts, f of the step's surprisal, entropy and place"
    source = "this project"
    reads = frozenset({OLD_LOG_PROBS, ENTROPY, "tokens", "tokenizer"})
    reads_answer: ClassVar = True
    metrics: ClassVar[dict[str, str]] = {
        "outside_fit_rate": "share of steps with a feature outside the fit's range"
    }
    span = "first"  # type: ignore[misc]

    file: str = option("", "what python -m bench fit wrote; its whole path where Ray runs")

    def check(self) -> None:
        if self.file:
            read_fit(self.file)

    @property
    def lacks(self) -> str:
        return "" if self.file else "needs the option file, which python -m bench fit writes"

    def select(self, r: Rollouts) -> Tensor:
        return r.trains & (r.advantages != 0)

    def scores(self, r: Rollouts, of_pass: Tensor | None) -> Tensor:
        fit = read_fit(self.file)
        # Some hosts have values for the tokens of a tool as well.
        signals = torch.stack([surprisal(r), entropy(r)]).where(r.written, 0.0).numpy()
        uniform = r.advantages.double()[:, None].expand(r.mask.shape)
        scores = torch.zeros_like(uniform)
        outside = []
        for index, (step_T, _) in steps_of(r, self.select(r), fit.separator).items():
            length = len(r.responses[index])
            answer = r.answers[index]
            starts = starts_of_steps(step_T[:length], answer)
            surprisal_T, entropy_T = signals[:, index, :length]
            features_JF = features(surprisal_T, entropy_T, starts, answer is not None)
            is_beyond_JF = abs(features_JF - features_JF.clip(fit.lowest, fit.highest)) > 1e-6
            outside.extend(is_beyond_JF.any(axis=1))
            advantage = float(r.advantages[index])
            coefficients = fit.correct if advantage > 0 else fit.incorrect
            # Each step's credit goes to the end, where that of the next one does not take its place.
            for start, credit in zip(
                starts, abs(advantage) * features_JF @ coefficients, strict=True
            ):
                scores[index, start:] = credit
        r.figures["outside_fit_rate"] = float(np.mean(outside))
        # Responses that are not selected have credit and advantage 0.
        trained = r.mask & scores.isfinite().all(dim=1, keepdim=True)
        # Where every credit is 0 there is nothing to scale.
        return scores * uniform[trained].norm() / scores[trained].norm().clamp(min=1e-15)
