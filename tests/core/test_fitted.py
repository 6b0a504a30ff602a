"""``fitted`` by plain loops over a response's steps."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from grail_advantage.data import ENTROPY, OLD_LOG_PROBS, Weighed
from grail_advantage.method import build
from tests.core.common import FITTED, rollouts_of, weighed
from tests.core.tiny_models import encode

FIT = json.loads(Path(FITTED["file"]).read_text())
STEPS = [
    ["1+1=", "2 ", "2+2=", "5 ", "so ", "\\boxed{5} ok"],
    ["3=", "3 ", "4=", "4 ", "5=", "5"],
    ["\\boxed{1}"],
]
"""The first answer is followed by text, which is of its step; the third has nothing before it."""
TEXTS = list(map("".join, STEPS))
ADVANTAGES = [-0.75, 0.5, -0.25]


def plain_credit(
    surprisals: list[list[float]],
    entropies: list[list[float]],
    advantage: float,
    answered: bool,
) -> list[float]:
    """Of each step, before the scale."""
    peaks = [max(of_step) for of_step in surprisals]
    last = len(peaks) - answered
    credit = []
    for step, peak in enumerate(peaks):
        earlier_peak = max(peaks[:step], default=0.0)
        sum_before = sum(peaks[:step])
        is_answer = step == last
        values = [
            1.0,
            math.log1p(peak),
            math.log1p(sum(surprisals[step])),
            max(entropies[step]),
            not is_answer and peak == max(peaks[:last]),
            math.log1p(earlier_peak),
            math.log1p(sum_before),
            step / max(1, len(peaks) - 1),
            is_answer,
            math.log1p(peak) * math.exp(-earlier_peak),
            math.exp(-sum_before),
        ]
        coefficients = FIT["correct"] if advantage > 0 else FIT["incorrect"]
        credit.append(abs(advantage) * np.dot(values, coefficients))
    return credit


def test_credit_by_plain_loops():
    generator = torch.Generator().manual_seed(0)
    lengths = list(map(len, TEXTS))
    log_probs = -2 * torch.rand((3, max(lengths)), generator=generator)
    entropy = torch.rand((3, max(lengths)), generator=generator)
    columns = {OLD_LOG_PROBS: log_probs, ENTROPY: entropy}
    r = rollouts_of(
        [encode(text) for text in TEXTS], ADVANTAGES, known_spans={}, columns=columns
    )
    credits = []
    for row, (steps, advantage) in enumerate(zip(STEPS, ADVANTAGES, strict=True)):
        sizes = list(map(len, steps))
        surprisals, entropies = (
            [part.tolist() for part in values[row, : lengths[row]].split(sizes)]
            for values in (-log_probs, entropy)
        )
        answered = "boxed" in TEXTS[row]
        credit = plain_credit(surprisals, entropies, advantage, answered)
        credits.append(np.repeat(credit, sizes))
    expected = np.concatenate(credits)
    # Credits are scaled to the root mean square of the advantages, over tokens.
    scale = np.linalg.norm(np.repeat(ADVANTAGES, lengths)) / np.linalg.norm(expected)
    actual = weighed(build("fitted", FITTED), r).advantages[r.mask]
    np.testing.assert_allclose(actual, expected * scale, rtol=1e-4, atol=1e-6)


def weigh(last: float, **options: str) -> Weighed:
    """The second text, with this log-probability of its last token."""
    log_probs = torch.full((1, len(TEXTS[1])), -0.1)
    log_probs[0, -1] = last
    columns = {OLD_LOG_PROBS: log_probs, ENTROPY: torch.full_like(log_probs, 0.1)}
    r = rollouts_of([encode(TEXTS[1])], [0.5], columns=columns)
    return weighed(build("fitted", options), r)


def test_steps_unlike_those_of_the_fit_are_counted():
    # The last of six steps, of a fit whose steps were far less surprising.
    rates = [weigh(last, **FITTED).metrics["outside_fit_rate"] for last in (-0.1, -50.0)]
    assert rates == [0, pytest.approx(1 / 6)]


def test_a_file_that_is_none_of_the_fit_is_refused(tmp_path):
    # None at all.
    with pytest.raises(ValueError, match="write one with python -m bench fit"):
        weigh(-0.1)
    path = tmp_path / "fit.json"
    # Other features, a coefficient for one of them, and no separator.
    for change in ({"features": ["constant"]}, {"incorrect": [1.0]}, {"separator": None}):
        path.write_text(json.dumps(FIT | change))
        with pytest.raises(ValueError, match="write one with python -m bench fit"):
            build("fitted", {"file": str(path)})
