"""Every figure of a batch against a value worked out by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from grail_advantage import metrics
from grail_advantage.metrics import weight_metrics
from grail_advantage.signals.base import RowSelection
from grail_advantage.weighting import BatchWeights

WEIGHTS = [[0.5, 1.5, 5.0, 1.0], [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0] * 4]
MASK = [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [0] * 4]
ADVANTAGES = [-2.0, 1.0, 0.0, 7.0]  # the last row has no valid token and must count nowhere


def flags(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


def token_flags(*places: tuple[int, int]) -> torch.Tensor:
    marked = torch.zeros(4, 4, dtype=torch.bool)
    for row, token in places:
        marked[row, token] = True
    return marked


def example(gradient_norms: list[float]) -> dict[str, float]:
    result = BatchWeights(
        weights_BT=torch.tensor(WEIGHTS),
        non_finite_B=flags(0, 0, 1, 1),
        from_scores_BT=token_flags((0, 0), (0, 1), (0, 2), (0, 3)),
        at_lower_bound_BT=token_flags((0, 0)),
        at_upper_bound_BT=token_flags((0, 2), (0, 1)),
    )
    rows = RowSelection(answered_B=flags(1, 0, 1, 1), inside_gate_B=flags(1, 0, 1, 1), selected_B=flags(1, 0, 0, 1))
    return weight_metrics(
        result, torch.tensor(MASK), torch.tensor(ADVANTAGES), rows, torch.tensor(gradient_norms, dtype=torch.float32)
    )


def of_weights(
    weights_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    mask: torch.Tensor | None = None,
    norms: torch.Tensor | None = None,
) -> dict[str, float]:
    """Of a batch without scores."""
    none_BT = torch.zeros_like(weights_BT, dtype=torch.bool)
    none_B = torch.zeros_like(advantages_B, dtype=torch.bool)
    result = BatchWeights(weights_BT, none_B, none_BT, none_BT, none_BT)
    rows = RowSelection(none_B, none_B, none_B)
    return weight_metrics(
        result, ~none_BT if mask is None else mask, advantages_B, rows, torch.zeros(0) if norms is None else norms
    )


def test_every_figure_by_hand() -> None:
    norms = [float(value) for value in range(20, 0, -1)]
    assert example([*norms, math.inf, math.nan]) == pytest.approx(
        {
            "answer_found_rate": 2 / 3,
            "selected_rate": 1 / 3,
            "neutral_rate": 2 / 3,
            "non_finite_rate": 1 / 3,
            "average_weight": 13 / 9,  # 0.5 + 1.5 + 5 + six times 1, over nine tokens
            "weight_deviation": math.sqrt(33.5 / 9 - (13 / 9) ** 2),  # 0.25 + 2.25 + 25 + 6 = 33.5
            "clipped_low_rate": 1 / 4,
            "clipped_high_rate": 2 / 4,
            "effective_sample_ratio": (8**2 / (4 * 28.5) + 1 + 1) / 3,  # row 1: sum 8, sum of squares 28.5
            "top_share": 10 / 18,  # masses 1, 3, 10, 2 and 1, 1; a tenth of six tokens is one token
            "advantage_scale": 18 / (4 * 2 + 2 * 1),
            "gradient_norm_p10": 2.0,
            "gradient_norm_p90": 18.0,
        },
        rel=1e-6,
    )


def test_figures_of_a_batch_are_the_declared_ones() -> None:
    assert list(example([1.0])) == [*metrics.METRICS, *metrics.GRADIENT_METRICS]


def plainly(
    weights: list[list[float]], mask: list[list[int]], advantages: list[float], norms: list[float]
) -> dict[str, float]:
    """The figures of weights token by token, in fractions."""
    rows = [
        (
            [Fraction(w) for w, valid in zip(row, valid_row, strict=True) if valid],
            abs(Fraction(a)) if math.isfinite(a) else 0,
        )
        for row, valid_row, a in zip(weights, mask, advantages, strict=True)
        if any(valid_row)
    ]
    tokens = [w for row, _ in rows for w in row]
    mean = sum(tokens) / len(tokens)
    ratios = [sum(row) ** 2 / (len(row) * sum(w * w for w in row)) for row, _ in rows if any(row)]
    masses = sorted((w * a for row, a in rows if a for w in row), reverse=True)
    finite = sorted(norm for norm in norms if math.isfinite(norm))
    return {
        "neutral_rate": sum(all(w == 1 for w in row) for row, _ in rows) / len(rows),
        "average_weight": float(mean),
        "weight_deviation": math.sqrt(sum((w - mean) ** 2 for w in tokens) / len(tokens)),
        "effective_sample_ratio": float(sum(ratios) / len(ratios)),
        "top_share": float(sum(masses[: max(1, round(len(masses) / 10))]) / sum(masses)),
        "advantage_scale": float(sum(masses) / sum(len(row) * a for row, a in rows)),
        "gradient_norm_p10": finite[math.ceil(0.1 * len(finite)) - 1],
        "gradient_norm_p90": finite[math.ceil(0.9 * len(finite)) - 1],
    }


@pytest.mark.parametrize("level", [1.0, 300.0])
def test_figures_token_by_token(level: float) -> None:
    """Rows of all lengths, with gaps and without a token, to 12 digits."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(0, 48, (23, 1), generator=generator)
    lengths[5], lengths[6], lengths[7] = 0, 1, 47
    mask = (torch.arange(47) < lengths) & (torch.rand(23, 47, generator=generator) > 0.2)
    weights = level + 0.01 * torch.randn(23, 47, generator=generator)
    weights[torch.rand(23, generator=generator) > 0.7] = 1.0
    weights[8] = 0.0
    weights = weights * mask
    advantages = torch.randn(23, generator=generator)
    advantages[3], advantages[10], advantages[11] = 0.0, math.nan, -math.inf
    norms = torch.rand(1013, generator=generator)
    norms[17], norms[1000] = math.nan, math.inf
    before = norms.clone()
    got = of_weights(weights, advantages, mask, norms)
    expected = plainly(weights.tolist(), mask.tolist(), advantages.tolist(), norms.tolist())
    assert 0 < expected["neutral_rate"] < 1
    assert {name: got[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert torch.equal(norms.nan_to_num(), before.nan_to_num()), "the caller's are left alone"


def test_batches_of_nothing_and_of_equal_weights() -> None:
    none = torch.zeros(2, 3)
    assert of_weights(none, torch.zeros(2), mask=none) == {}
    # Valid tokens, but every advantage is 0: no mass to share out. Or every weight.
    for got in (of_weights(none + 1, torch.zeros(2)), of_weights(none, torch.ones(2))):
        assert got["top_share"] == got["advantage_scale"] == 0.0
        assert all(math.isfinite(value) for value in got.values())
    equal = of_weights(none + 1, torch.ones(2))
    assert equal["neutral_rate"] == equal["effective_sample_ratio"] == equal["advantage_scale"] == 1.0
    assert equal["weight_deviation"] == 0.0
