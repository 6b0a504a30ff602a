"""``fitted`` by plain loops over a response's steps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from grail_advantage import AnswerSpan
from grail_advantage.data import ENTROPY, OLD_LOG_PROBS
from grail_advantage.method import build
from tests.core.common import FITTED, rollouts_of, weighed
from tests.core.tiny_models import encode

FIT = json.loads(Path(FITTED["file"]).read_text())
TEXTS = ["1+1=2 2+2=5 so \\boxed{5} ok", "3=3 4=4 5=5", "\\boxed{1}"]
STEPS = [
    ["1+1=", "2 ", "2+2=", "5 ", "so ", "\\boxed{5} ok"],
    ["3=", "3 ", "4=", "4 ", "5=", "5"],
    ["\\boxed{1}"],
]
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
        is_answer = answered and step == len(peaks) - 1
        values = [
            1.0,
            math.log1p(peak),
            math.log1p(sum(surprisals[step])),
            max(entropies[step]),
        ]
        values += [
            not is_answer and peak == max(peaks[:last]),
            math.log1p(earlier_peak),
            math.log1p(sum_before),
        ]
        values += [
            step / max(1, len(peaks) - 1),
            is_answer,
            math.log1p(peak) * math.exp(-earlier_peak),
            math.exp(-sum_before),
        ]
        coefficients = FIT["correct"] if advantage > 0 else FIT["incorrect"]
        credit.append(
            abs(advantage) * sum(a * b for a, b in zip(values, coefficients, strict=True))
        )
    return credit


def test_credit_by_plain_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    longest = max(map(len, TEXTS))
    log_probs = -2 * torch.rand((3, longest), generator=generator)
    entropy = torch.rand((3, longest), generator=generator)
    # The first answer is followed by text, which is of its step; the third has nothing before it.
    start = TEXTS[0].index("\\")
    spans = [
        AnswerSpan(start, start + 7, start + 8, start + 9),
        None,
        AnswerSpan(0, 7, 8, 9),
    ]
    columns = {OLD_LOG_PROBS: log_probs, ENTROPY: entropy}
    r = rollouts_of(
        [encode(text) for text in TEXTS], ADVANTAGES, spans=spans, columns=columns
    )
    w = weighed(build("fitted", FITTED), r)
    expected = []
    for row, (steps, advantage) in enumerate(zip(STEPS, ADVANTAGES, strict=True)):
        assert "".join(steps) == TEXTS[row]
        # Steps of 4, 2 and 4 tokens begin at 0, 4 and 6.
        ends = np.cumsum(list(map(len, steps)))
        ranges = list(zip([0, *ends[:-1]], ends, strict=True))
        surprisals = [(-log_probs[row, a:b]).tolist() for a, b in ranges]
        entropies = [entropy[row, a:b].tolist() for a, b in ranges]
        credit = plain_credit(surprisals, entropies, advantage, spans[row] is not None)
        expected.append(np.repeat(credit, list(map(len, steps))))
    # Credits are scaled to the root mean square of the advantages, over tokens.
    square = sum(float(of_row @ of_row) for of_row in expected)
    uniform = sum(
        advantage**2 * len(text) for advantage, text in zip(ADVANTAGES, TEXTS, strict=True)
    )
    for row, of_row in enumerate(expected):
        got = w.advantages[row, : len(of_row)].numpy()
        np.testing.assert_allclose(
            got, of_row * math.sqrt(uniform / square), rtol=1e-4, atol=1e-6
        )
    trained = w.advantages[r.mask].double()
    assert (
        float(trained.square().sum()) == pytest.approx(uniform, rel=1e-5)
        and (trained < 0).any()
        and (trained > 0).any()
    )


def test_steps_unlike_those_of_the_fit_are_counted() -> None:
    longest = len(TEXTS[1])
    ordinary = {
        OLD_LOG_PROBS: -torch.full((1, longest), 0.1),
        ENTROPY: torch.full((1, longest), 0.1),
    }
    surprising = {**ordinary, OLD_LOG_PROBS: ordinary[OLD_LOG_PROBS].clone()}
    # In the last of six steps, of a fit whose steps were far less surprising.
    surprising[OLD_LOG_PROBS][0, -1] = -50.0
    rates = []
    for columns in (ordinary, surprising):
        r = rollouts_of([encode(TEXTS[1])], [0.5], spans=[None], columns=columns)
        rates.append(weighed(build("fitted", FITTED), r).metrics["outside_fit_rate"])
    assert rates == [0, pytest.approx(1 / 6)]


def test_a_file_that_is_none_of_the_fit_is_refused(tmp_path: Path) -> None:
    r = rollouts_of(
        [encode("1=1")],
        [0.5],
        spans=[None],
        columns={OLD_LOG_PROBS: -torch.ones(1, 3), ENTROPY: torch.ones(1, 3)},
    )
    with pytest.raises(ValueError, match="bench fit"):
        weighed(build("fitted"), r)
    path = tmp_path / "fit.json"
    # Other features, a coefficient for one of them, and no separator.
    for change in ({"features": ["constant"]}, {"incorrect": [1.0]}, {"separator": None}):
        path.write_text(json.dumps(FIT | change))
        with pytest.raises(ValueError, match="write one with python -m bench fit"):
            build("fitted", {"file": str(path)})
    with pytest.raises(ValueError, match="write one with python -m bench fit"):
        build("fitted", {"file": str(tmp_path / "none.json")})
