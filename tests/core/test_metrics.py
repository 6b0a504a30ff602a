"""Every figure of a batch against a computation token by token, and those of an update's effect by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from grail_advantage import AnswerSpan, Grail, Rollouts, metrics
from grail_advantage.data import Weighed
from grail_advantage.effect import effect_figures, rank_correlation
from grail_advantage.method import build
from grail_advantage.metrics import figures
from tests.core.common import rollouts_of, weighed

SPAN = AnswerSpan(0, 0, 1, 1)


def weighed_of(r: Rollouts, weights: torch.Tensor, **parts: torch.Tensor) -> Weighed:
    """As a method made it; by default nothing was chosen."""
    none_of = {name: torch.zeros(len(r), dtype=torch.bool) for name in ("selected", "failed")}
    none = {name: torch.zeros_like(r.mask) for name in ("by_score", "low", "high")}
    seen = r.for_method(build("uniform"))
    numbers = {
        "weights": weights,
        "scores": weights,
        "advantages": weights * seen.advantages[:, None],
    }
    return Weighed(
        method=build("uniform"), rollouts=seen, **{**none_of, **none, **numbers, **parts}
    )


def plainly(w: Weighed, norms: list[float]) -> dict[str, float]:
    """The figures token by token, in fractions."""
    masks = w.rollouts.mask.tolist()
    flags = {"low": w.low, "high": w.high}
    sizes = [abs(Fraction(a)) if math.isfinite(a) else 0 for a in w.rollouts.advantages.tolist()]
    rows = [
        [Fraction(x) for x, valid in zip(*values, strict=True) if valid]
        for values in zip(w.weights.tolist(), masks, strict=True)
    ]
    counted = [row for row in range(len(rows)) if rows[row]]
    tokens = [x for row in rows for x in row]
    mean = sum(tokens) / len(tokens)
    ratios = [sum(row) ** 2 / (len(row) * sum(x * x for x in row)) for row in rows if any(row)]
    masses = sorted(
        (x * size for row, size in zip(rows, sizes, strict=True) if size for x in row), reverse=True
    )
    changes = dict.fromkeys(metrics.CHANGE, Fraction(0))
    for row, answered in enumerate(w.rollouts.answered.tolist()):
        base = Fraction(w.rollouts.advantages[row].item())
        for token, weight in enumerate(w.weights[row].tolist()):
            if masks[row][token]:
                sign = (base > 0) - (base < 0) if answered and token == 0 else 0
                changes[metrics.CHANGE[(2, 0, 1)[sign]]] += abs(base * (Fraction(weight) - 1))
    finite = sorted(norm for norm in norms if math.isfinite(norm))
    rates = {
        "weight_one_rate": [all(x == 1 for x in row) for row in rows],
        "answer_found_rate": w.rollouts.answered.tolist(),
        "selected_rate": w.selected.tolist(),
        "non_finite_rate": w.failed.tolist(),
    }
    return {
        **{
            name: sum(values[row] for row in counted) / len(counted)
            for name, values in rates.items()
        },
        **{name: float(change / sum(changes.values())) for name, change in changes.items()},
        **{
            f"clipped_{name}_rate": int(values.sum()) / int(w.by_score.sum())
            for name, values in flags.items()
        },
        "average_weight": float(mean),
        "weight_deviation": math.sqrt(sum((x - mean) ** 2 for x in tokens) / len(tokens)),
        "effective_sample_ratio": float(sum(ratios) / len(ratios)),
        "top_share": float(sum(masses[: max(1, round(len(masses) / 10))]) / sum(masses)),
        "advantage_scale": float(
            sum(masses) / sum(len(row) * size for row, size in zip(rows, sizes, strict=True))
        ),
        "gradient_norm_p10": finite[math.ceil(0.1 * len(finite)) - 1],
        "gradient_norm_p90": finite[math.ceil(0.9 * len(finite)) - 1],
    }


@pytest.mark.parametrize("level", [1.0, 300.0])
def test_figures_token_by_token(level: float) -> None:
    """Responses of all lengths, with gaps and without a token, to 12 digits."""
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator) > 0.5

    mask = (torch.arange(47) < torch.randint(0, 48, (23, 1), generator=generator)) & drawn(23, 47)
    # One response without a token, one without a gap.
    mask[5] = False
    mask[7] = True
    weights = level + 0.01 * torch.randn(23, 47, generator=generator)
    weights[torch.rand(23, generator=generator) > 0.7] = 1.0
    weights[8] = 0.0
    advantages = torch.randn(23, generator=generator)
    norms = torch.rand(1013, generator=generator)
    advantages[3] = 0.0
    # Neither counts: no mass, and no change.
    advantages[10] = math.nan
    advantages[11] = -math.inf
    norms[17] = math.nan
    norms[1000] = math.inf
    copy = norms.clone()
    by_score = mask & drawn(23, 47)
    r = rollouts_of(
        [[0] * 47] * 23,
        advantages,
        mask.tolist(),
        [SPAN if has_answer else None for has_answer in drawn(23)],
    )
    flags = {name: by_score & drawn(23, 47) for name in ("low", "high")}
    w = weighed_of(
        r, weights * mask, by_score=by_score, selected=drawn(23), failed=drawn(23), **flags
    )
    got = figures(w, norms)
    expected = plainly(w, norms.tolist())
    # Both kinds of response are there.
    assert 0 < expected["weight_one_rate"] < 1
    assert got == pytest.approx(expected, rel=1e-12)
    assert list(got) == [*metrics.METRICS, *metrics.GRADIENT_METRICS]
    assert torch.equal(norms.nan_to_num(), copy.nan_to_num()), "the caller's are left alone"


def test_what_a_change_consists_of() -> None:
    """An answer's bonus of 4 on one token of a correct and on two of an incorrect response, scores alone, and nothing."""
    spans = [AnswerSpan(2, 2, 3, 3), AnswerSpan(1, 2, 4, 4)]
    r = rollouts_of([[0] * 4] * 2, [1.0, -0.25], spans=spans)
    of_pass = torch.tensor([[1.0, 1.0, 1.0, 1.0], [9.0, 1.0, 1.0, 1.0]])
    for options, shares in (
        ({"control": "answer"}, [4 / 6, 2 / 6, 0.0]),
        ({"control": "answer", "content_outside_gate": False}, [0.0, 1.0, 0.0]),
        ({"content_weight": 1.0}, [0.0, 0.0, 1.0]),
        ({"content_weight": 1.0, "control": "answer"}, [0.0, 0.0, 0.0]),
    ):
        figures = weighed(Grail(**options), r, of_pass).metrics
        assert [figures[name] for name in metrics.CHANGE] == pytest.approx(shares)


def test_an_updates_effect_by_hand() -> None:
    """Of the tokens with an advantage 2 of 4 move with it, by 0.5 of 0.7; A_t varies in the first response alone."""
    advantages = torch.tensor([[2.0, 0.0, 1.0], [-1.0, -1.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    # With A_t: 0.3 and -0.2. Against it: -0.1 and 0.1. The -0.5 has no advantage, the last token none that trains.
    effect = torch.tensor([[0.3, -0.5, -0.1], [-0.2, 0.1, math.nan]])
    log_probs = torch.tensor([[0.0, 0.5, 0.9], [0.995, 0.4, 0.5]]).log()
    arguments = mask, log_probs
    assert effect_figures(advantages, effect, *arguments) == {
        "moved_with_advantage_rate": 0.5,
        "moved_with_advantage_weighted": pytest.approx(5 / 7),
        "moved_with_advantage_p50": 0.0,
        "moved_with_advantage_p90": 0.0,
        "moved_with_advantage_p100": 1.0,
        "credit_change_correlation": pytest.approx(1.0),
    }
    # Of an update of other responses alone, and of one that was not measured.
    names = [f"moved_with_advantage_{name}" for name in ("rate", "p50", "p90", "p100")]
    assert effect_figures(advantages, torch.zeros(2, 3), *arguments) == dict.fromkeys(names, 0.0)
    assert effect_figures(advantages, torch.full((2, 3), math.nan), *arguments) == {}


def test_rank_correlation() -> None:
    """By hand with ties: ranks 1.5, 1.5, 3 and 1, 2, 3."""
    assert rank_correlation(np.array([4.0, 4.0, 9.0]), np.array([-1.0, 0.0, 7.0])) == pytest.approx(
        0.75**0.5
    )
    assert math.isnan(rank_correlation(np.array([1.0, 1.0]), np.array([1.0, 2.0])))
    assert math.isnan(rank_correlation(np.array([]), np.array([])))
