"""The study's statistics against numbers worked out by hand, enumeration, and SciPy's own tests."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from study.statistics import (
    auroc,
    equivalence_p,
    holm,
    paired,
    pass_at,
    spearman,
    two_way_bootstrap,
)


def test_paired_by_hand() -> None:
    found = paired([1.0, 2.0, 3.0])
    # Mean 2, deviation 1, error 1 / sqrt 3; t = 3.4641 with 2 degrees of freedom has p = 1 - t / sqrt(2 + t^2) = 0.0742.
    assert (found.mean, found.deviation, found.count) == (2.0, 1.0, 3)
    assert found.p == pytest.approx(1 - math.sqrt(12 / 14), abs=1e-12)
    assert (found.low, found.high) == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), rel=1e-6)
    values = np.random.default_rng(0).normal(0.3, 1, 9)
    assert paired(values).p == pytest.approx(stats.ttest_1samp(values, 0).pvalue)


def test_holm_by_hand() -> None:
    # Sorted .01 .02 .03 .04: x 4, x 3, x 2, x 1, and never below an earlier one.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_equivalence_by_hand() -> None:
    # Mean 1, deviation 1, three values: distances to 3 and -3 are 2 and 4 over 1 / sqrt 3; the nearer one decides.
    t = 2 * math.sqrt(3)
    assert equivalence_p([0.0, 1.0, 2.0], 3.0) == pytest.approx((1 - t / math.sqrt(2 + t * t)) / 2, abs=1e-12)
    assert equivalence_p([0.0, -1.0, -2.0], 3.0) == pytest.approx(equivalence_p([0.0, 1.0, 2.0], 3.0))
    assert equivalence_p([0.0, 1.0, 2.0], 0.5) > 0.5, "a mean beyond the bound"
    values = np.random.default_rng(1).normal(0.1, 1, 12)
    ends = [stats.ttest_1samp(values, -0.8, alternative="greater"), stats.ttest_1samp(values, 0.8, alternative="less")]
    assert equivalence_p(values, 0.8) == pytest.approx(max(end.pvalue for end in ends))
    assert math.isnan(equivalence_p([1.0], 3.0))


def test_two_way_bootstrap_agrees_with_every_resample_enumerated() -> None:
    values = np.array([[0.0, 1.0], [4.0, 8.0]])
    means = []
    for seeds in itertools.product(range(2), repeat=2):
        for first, second in itertools.product(itertools.product(range(2), repeat=2), repeat=2):
            drawn = [values[seeds[0], list(first)].mean(), values[seeds[1], list(second)].mean()]
            means.append(np.mean(drawn))
    exact = np.quantile(np.repeat(means, 1000), [0.025, 0.975])
    assert two_way_bootstrap(values) == pytest.approx(exact, abs=1e-12)


def test_rank_figures_by_hand() -> None:
    scores = np.array([3.0, 1.0, 2.0, 2.0])
    # True ones 3 and 2: above 1 and 2 (two wins), and above 1 and level with 2 (one and a half), of four pairs.
    assert auroc(scores, np.array([True, False, True, False])) == 3.5 / 4
    assert math.isnan(auroc(scores, np.ones(4, dtype=bool)))
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([10.0, 30.0, 20.0])) == pytest.approx(0.5)
    assert math.isnan(spearman(np.ones(3), np.arange(3.0)))


def test_pass_at_is_the_share_of_subsets_with_a_right_sample() -> None:
    for right, k in itertools.product(range(5), range(1, 5)):
        subsets = list(itertools.combinations([True] * right + [False] * (4 - right), k))
        assert pass_at([right], 4, k) == pytest.approx(np.mean([any(subset) for subset in subsets]))
    assert pass_at([0, 4], 4, 2) == 0.5
