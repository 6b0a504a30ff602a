"""Log-z-score reshaping against values worked out by hand."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from grail_advantage.reshapers.log_zscore import log_zscore, log_zscore_weights

PUBLISHED = {"weight_mean": 1.0, "weight_std": 0.5, "weight_min": 0.5, "weight_max": 5.0}


def scores_of(*log_scores: float) -> torch.Tensor:
    """Scores (1, T), float64, whose `log(s + 1e-8)` is as given."""
    return torch.tensor([[math.exp(value) - 1e-8 for value in log_scores]], dtype=torch.float64)


def everything(scores_BT: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(scores_BT, dtype=torch.bool)


def close(got: torch.Tensor, expected: list, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32), rtol=tolerance, atol=tolerance)


def test_population_variance() -> None:
    # Logs 0, 0, 0, 4: mean 1, population variance 3 (sample variance 4).
    scores = scores_of(0, 0, 0, 4)
    root = 3**0.5
    close(log_zscore(scores, everything(scores)), [[-1 / root, -1 / root, -1 / root, 3 / root]])


def test_statistics_come_from_the_mask_and_every_token_is_scored() -> None:
    # Over the first two tokens: mean 0, variance 1.
    scores = scores_of(-1, 1, 3, -5)
    mask = torch.tensor([[True, True, False, False]])
    close(log_zscore(scores, mask), [[-1, 1, 3, -5]])


def test_masked_tokens_may_hold_anything() -> None:
    scores = torch.cat([scores_of(-1, 1), torch.tensor([[math.nan, math.inf]])], dim=1)
    mask = torch.tensor([[True, True, False, False]])
    close(log_zscore(scores, mask)[:, :2], [[-1, 1]])


def test_epsilon_inside_the_logarithm() -> None:
    # Score 0 has log 1e-8 and score 3e-8 has log 4e-8, so their distance is log 4 and the other two lie in between.
    scores = torch.tensor([[0.0, 1e-8, 3e-8, 1e-8]])
    close(log_zscore(scores, everything(scores)), [[-(2**0.5), 0, 2**0.5, 0]], 1e-4)
    assert math.log(1e-8) == pytest.approx(-18.42, abs=0.01)
    with_one = torch.tensor([[0.0, 1.0]])
    first_only = torch.tensor([[True, False]])
    # A single token in the statistics: std is sqrt(1e-8) = 1e-4, so z of the other is its log distance times 1e4.
    close(log_zscore(with_one, first_only), [[0.0, 18.420681 * 1e4]], 1e-4)


def test_epsilon_under_the_root() -> None:
    # Logs +-1e-4: variance 1e-8, std sqrt(2e-8). Outside the root the epsilon would leave z = +-1.
    scores = scores_of(-1e-4, 1e-4)
    close(log_zscore(scores, everything(scores)), [[-(0.5**0.5), 0.5**0.5]], 2e-3)


@pytest.mark.parametrize("length", [1, 10, 1000, 4096])
@pytest.mark.parametrize("score", [0.0, 1e-6, 0.3])
def test_equal_scores_weigh_the_mean(score: float, length: int) -> None:
    """A rounding error of 1e-6 in the mean log would show: divided by sqrt(1e-8) it moves the weight by 0.005."""
    scores = torch.full((1, length), score)
    close(log_zscore_weights(scores, everything(scores), **PUBLISHED), [[1.0] * length], 1e-6)


def test_an_empty_statistics_set_gives_zero() -> None:
    scores = torch.tensor([[0.1, 0.2, 0.3]])
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    assert log_zscore(scores, nothing).tolist() == [[0.0] * 3]
    assert log_zscore_weights(scores, nothing, **PUBLISHED).tolist() == [[1.0] * 3]


def test_z_has_mean_zero_and_variance_one_over_its_set() -> None:
    scores = torch.rand(5, 40, generator=torch.Generator().manual_seed(0)) * 1e-3
    mask = torch.arange(40) < torch.tensor([[2], [3], [17], [39], [40]])
    z = log_zscore(scores, mask)
    for row in range(5):
        values = z[row, mask[row]].tolist()
        assert statistics.fmean(values) == pytest.approx(0, abs=1e-5)
        assert statistics.pvariance(values) == pytest.approx(1, abs=1e-5)


def test_scale_of_the_scores_does_not_matter() -> None:
    scores = torch.rand(3, 50, generator=torch.Generator().manual_seed(1)) + 0.1
    z = log_zscore(scores, everything(scores))
    torch.testing.assert_close(log_zscore(1000 * scores, everything(scores)), z, rtol=1e-4, atol=1e-4)


def test_weights_are_scaled_and_clipped_at_both_bounds() -> None:
    # Logs with mean 0 and variance 1 over four tokens; the others lie at z = -1.5, -3, 7.9 and 20.
    scores = scores_of(-1, 1, -1, 1, -1.5, -3, 7.9, 16)
    mask = torch.tensor([[True] * 4 + [False] * 4])
    close(log_zscore_weights(scores, mask, **PUBLISHED), [[0.5, 1.5, 0.5, 1.5, 0.5, 0.5, 4.95, 5.0]])
    other = {"weight_mean": 2.0, "weight_std": 0.1, "weight_min": 1.8, "weight_max": 2.5}
    close(log_zscore_weights(scores, mask, **other), [[1.9, 2.1, 1.9, 2.1, 1.85, 1.8, 2.5, 2.5]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_result_is_float32(dtype: torch.dtype) -> None:
    scores = torch.tensor([[0.25, 1.0, 4.0]], dtype=dtype)  # exact in every type
    expected = [[-(1.5**0.5), 0.0, 1.5**0.5]]
    close(log_zscore(scores, everything(scores)), expected)
    assert log_zscore_weights(scores, everything(scores), **PUBLISHED).dtype == torch.float32


def test_rows_and_width_do_not_matter() -> None:
    """A row's weights are the same to the bit whatever the batch's width is."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        scores = torch.exp(2 * torch.randn(8, 300, generator=generator))
        lengths = torch.randint(1, 300, (8, 1), generator=generator)
        mask = torch.arange(300) < lengths
        together = log_zscore_weights(scores, mask, **PUBLISHED)
        for row in range(8):
            length = int(lengths[row])
            alone = log_zscore_weights(scores[row : row + 1, :length], mask[row : row + 1, :length], **PUBLISHED)
            assert torch.equal(alone[0], together[row, :length]), (seed, row)


def log_normal_scores(deviation: float) -> torch.Tensor:
    """(1, 800) scores at the quantiles of a log-normal law of median 1: the same every time, without a random draw."""
    law = statistics.NormalDist(0.0, deviation)
    return torch.tensor([[math.exp(law.inv_cdf((index + 0.5) / 800)) for index in range(800)]])


def test_tokens_behind_the_answer_flatten_the_weights_of_those_before_it() -> None:
    """Why the statistics should be taken over the reasoning: tokens behind the answer have score 0, so log 1e-8.

    With 800 log-normal scores alone the spread is 0.44 (0.5 less what the clip takes). Zeros behind them bring a share p
    of one far value into the statistics: the other tokens sit around z = sqrt(p / (1 - p)), and their spread becomes
    `0.5 * d / sqrt(18.42^2 * p * (1 - p) + d^2 * (1 - p))`, d being the deviation of the logs. 400 zeros, p = 1/3, raise
    the mean to 1.35 and shrink the spread to 0.07; as many zeros as scores, p = 1/2, raise the mean to 1.5.
    """
    deviation = 1.2
    scores = log_normal_scores(deviation)
    alone = log_zscore_weights(scores, everything(scores), **PUBLISHED)
    assert float(alone.mean()) == pytest.approx(1.04, abs=0.005)
    assert float(alone.std(correction=0)) == pytest.approx(0.434, abs=0.005)

    for trailing, mean, spread in ((400, 1.35, 0.069), (800, 1.5, 0.065)):
        padded = torch.cat([scores, torch.zeros(1, trailing)], dim=1)
        weights = log_zscore_weights(padded, everything(padded), **PUBLISHED)[:, :800]
        share = trailing / (800 + trailing)
        formula = 0.5 * deviation / math.sqrt(18.42**2 * share * (1 - share) + deviation**2 * (1 - share))
        assert formula == pytest.approx(spread, abs=5e-4)
        assert float(weights.mean()) == pytest.approx(mean, abs=0.005)
        assert float(weights.std(correction=0)) == pytest.approx(formula, rel=0.01)

        reasoning = torch.arange(800 + trailing) < 800
        kept = log_zscore_weights(padded, reasoning.unsqueeze(0), **PUBLISHED)[:, :800]
        torch.testing.assert_close(kept, alone, rtol=1e-5, atol=1e-5)
