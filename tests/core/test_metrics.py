"""Every figure of a batch against a computation token by token, and those of an update's effect by hand."""

import math
from math import fsum
from statistics import fmean, pstdev

import numpy as np
import pytest
import torch

from grail_advantage import AnswerSpan, metrics
from grail_advantage.data import Weighed
from grail_advantage.effect import effect_figures, rank_correlation
from grail_advantage.method import build
from grail_advantage.metrics import figures
from tests.core.common import rollouts_of

SPAN = AnswerSpan(0, 0, 1, 1)


def plainly(w: Weighed, norms: list[float]) -> dict[str, float]:
    """The figures token by token; of answers the content is the first token."""
    advantages = w.rollouts.advantages
    sizes = advantages.abs().tolist()
    rows = [
        x[mask].tolist()
        for x, mask in zip(w.weights.double(), w.rollouts.mask, strict=True)
    ]
    counted = [index for index, row in enumerate(rows) if row]
    tokens = [x for row in rows for x in row]
    pairs = list(zip(rows, sizes, strict=True))
    masses = sorted((x * size for row, size in pairs if size for x in row), reverse=True)
    tenth = masses[: round(len(masses) / 10)]
    finite = sorted(filter(math.isfinite, norms))
    change = (w.weights.double() - 1).abs() * advantages.abs()[:, None]
    of_answers = torch.where(w.rollouts.answered & w.rollouts.mask[:, 0], change[:, 0], 0.0)
    total = float(change[w.rollouts.mask].sum())
    correct = float(of_answers[advantages > 0].sum()) / total
    incorrect = float(of_answers[advantages < 0].sum()) / total
    rates = {
        "answer_found_rate": w.rollouts.answered,
        "selected_rate": w.selected,
        "weight_one_rate": torch.tensor([set(row) == {1} for row in rows]),
        "non_finite_rate": w.failed,
    }
    return {
        **{name: fmean(flags[counted].tolist()) for name, flags in rates.items()},
        "average_weight": fmean(tokens),
        "weight_deviation": pstdev(tokens),
        "clipped_low_rate": int(w.low.sum()) / int(w.by_score.sum()),
        "clipped_high_rate": int(w.high.sum()) / int(w.by_score.sum()),
        "effective_sample_ratio": fmean(
            fmean(row) ** 2 / fmean(x * x for x in row) for row in rows if any(row)
        ),
        "top_share": fsum(tenth) / fsum(masses),
        "advantage_scale": fsum(masses) / fsum(len(row) * size for row, size in pairs),
        "change_correct_answers": correct,
        "change_incorrect_answers": incorrect,
        "change_scores": 1 - correct - incorrect,
        # The nearest rank.
        "gradient_norm_p10": finite[math.ceil(0.1 * len(finite)) - 1],
        "gradient_norm_p90": finite[math.ceil(0.9 * len(finite)) - 1],
    }


@pytest.mark.parametrize("level", [1.0, 300.0])
def test_figures_token_by_token(level):
    """Responses of all lengths, with gaps and without a token, to 12 digits."""
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape):
        return torch.rand(shape, generator=generator) > 0.5

    mask = (torch.arange(47) < torch.randint(0, 48, (23, 1), generator=generator)) & drawn(
        23, 47
    )
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
    spans = [SPAN if has_answer else None for has_answer in drawn(23)]
    r = rollouts_of([[0] * 47] * 23, advantages, mask, spans).for_method(build("uniform"))
    w = Weighed(
        method=build("uniform"),
        rollouts=r,
        selected=drawn(23),
        failed=drawn(23),
        scores=weights,
        weights=weights * mask,
        advantages=weights * mask * r.advantages[:, None],
        by_score=by_score,
        low=by_score & drawn(23, 47),
        high=by_score & drawn(23, 47),
    )
    got = figures(w, norms)
    expected = plainly(w, norms.tolist())
    # Every kind of response is there.
    assert all(expected.values()) and expected["weight_one_rate"] < 1
    assert got == pytest.approx(expected, rel=1e-12)
    assert list(got) == [*metrics.METRICS, *metrics.GRADIENT_METRICS]
    # The caller's norms are left alone.
    assert torch.equal(norms.nan_to_num(), copy.nan_to_num())


def test_an_updates_effect_by_hand():
    """Of the tokens with an advantage 2 of 4 move with it, by 0.5 of 0.7; A_t varies in the first response alone."""
    advantages = torch.tensor([[2.0, 0.0, 1.0], [-1.0, -1.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    # With A_t: 0.3 and -0.2. Against it: -0.1 and 0.1. The -0.5 has no advantage, the last token none that trains.
    effect = torch.tensor([[0.3, -0.5, -0.1], [-0.2, 0.1, math.nan]])
    log_probs = torch.tensor([[0.0, 0.5, 0.9], [0.995, 0.4, 0.5]]).log()
    assert effect_figures(advantages, effect, mask, log_probs) == {
        "moved_with_advantage_rate": 0.5,
        "moved_with_advantage_weighted": pytest.approx(5 / 7),
        "moved_with_advantage_p50": 0.0,
        "moved_with_advantage_p90": 0.0,
        "moved_with_advantage_p100": 1.0,
        "credit_change_correlation": pytest.approx(1.0),
    }
    # Of an update of other responses alone, and of one that was not measured.
    names = [f"moved_with_advantage_{name}" for name in ("rate", "p50", "p90", "p100")]
    assert effect_figures(advantages, torch.zeros(2, 3), mask, log_probs) == dict.fromkeys(
        names, 0.0
    )
    assert effect_figures(advantages, effect + math.nan, mask, log_probs) == {}


def test_rank_correlation():
    """By hand with ties: ranks 1.5, 1.5, 3 and 1, 2, 3."""
    correlation = rank_correlation(np.array([4.0, 4.0, 9.0]), np.array([-1.0, 0.0, 7.0]))
    assert correlation == pytest.approx(0.75**0.5)
    assert math.isnan(rank_correlation(np.array([1.0, 1.0]), np.array([1.0, 2.0])))
    assert math.isnan(rank_correlation(np.array([]), np.array([])))
