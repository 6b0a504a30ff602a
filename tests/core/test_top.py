"""The map `top` by hand, against loops, and what it refuses."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch

from grail_advantage.registry import reshapers
from grail_advantage.reshapers.top import Top, count_of_share
from tests.core import plain_weights


def weights(top: Top, scores: list[list[float]], mask: list[list[bool]] | None = None) -> list[list[float]]:
    scores_BT = torch.tensor(scores, dtype=torch.float64)
    mask_BT = torch.tensor(mask) if mask is not None else torch.ones_like(scores_BT, dtype=torch.bool)
    found = top.weights(scores_BT, mask_BT, torch.ones(len(scores)))
    assert found.dtype == torch.float32
    return found.tolist()


def test_by_hand() -> None:
    scores = [[0.5, 3.0, 2.0, 1.0]]
    assert weights(Top(), scores) == [[0, 1, 0, 0]]
    assert weights(Top(k=2), scores) == [[0, 1, 1, 0]]
    assert weights(Top(k=4), scores) == weights(Top(k=9), scores) == [[1, 1, 1, 1]]
    assert weights(Top(), [[-3.0, -1.0, -2.0]]) == [[0, 1, 0]]


def test_exactly_k_of_equal_scores_the_earlier_ones() -> None:
    assert weights(Top(k=2), [[1.0, 2.0, 2.0, 2.0, 0.0]]) == [[0, 1, 1, 0, 0]]
    assert weights(Top(k=3), [[5.0] * 6]) == [[1, 1, 1, 0, 0, 0]]
    many = weights(Top(k=100), [[1.0] * 5000])[0]
    assert many == [1.0] * 100 + [0.0] * 4900
    assert weights(Top(), [[-0.0, 0.0, -0.0]]) == weights(Top(), [[0.0, -0.0, 0.0]]) == [[1, 0, 0]]


def test_only_the_statistics_set_is_chosen_from() -> None:
    scores = [[9.0, 1.0, math.nan, 2.0, math.inf], [4.0, 3.0, 2.0, 1.0, 0.0]]
    mask = [[False, True, False, True, False], [False] * 5]
    assert weights(Top(), scores, mask) == [[0, 0, 0, 1, 0], [0] * 5]
    assert weights(Top(k=5), scores, mask) == [[0, 1, 0, 1, 0], [0] * 5]


def test_share_by_hand() -> None:
    falling = [[float(10 - index) for index in range(10)]]
    for share, kept in ((0.05, 1), (0.1, 1), (0.11, 2), (0.3, 3), (0.95, 10), (1.0, 10)):
        assert weights(Top(share=share), falling) == [[1.0] * kept + [0.0] * (10 - kept)]
    rows = weights(Top(share=0.5), [[3.0, 2.0, 1.0]] * 3, [[True] * 3, [True, True, False], [False, False, True]])
    assert rows == [[1, 1, 0], [1, 0, 0], [0, 0, 1]]


def test_a_share_that_is_a_whole_number_in_decimals_is_that_number() -> None:
    assert math.ceil(0.07 * 100) == 8  # what a product of floats makes of 7
    for hundredths in range(1, 101):
        share = hundredths / 100
        counts = torch.arange(0, 3001)
        expected = [max(1, math.ceil(Fraction(hundredths, 100) * count)) for count in range(3001)]
        assert count_of_share(share, counts).tolist() == expected, share


@pytest.mark.parametrize("seed", range(20))
def test_against_loops(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(0, 12) for _ in range(8)]
    rows = [[draw.randint(-2, 3 if seed % 2 else 300) / 4 for _ in range(12)] for _ in lengths]
    masks = [[index < length and draw.random() < 0.8 for index in range(12)] for length in lengths]
    for options in ({"k": 1}, {"k": 3}, {"share": 0.25}, {"share": 0.7}):
        found = weights(Top(**options), rows, masks)
        for scores, mask, of_row in zip(rows, masks, found, strict=True):
            places = [index for index in range(12) if mask[index]]
            expected = plain_weights.top([scores[index] for index in places], **options)
            assert [of_row[index] for index in places] == expected


def test_the_choice_is_made_in_the_precision_that_is_given() -> None:
    scores = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)
    assert Top().weights(scores, torch.ones_like(scores, dtype=torch.bool), torch.ones(1)).tolist() == [[0, 1]]


def test_no_rows_and_no_tokens() -> None:
    for shape in ((0, 4), (3, 0)):
        found = Top(share=0.5).weights(torch.zeros(shape), torch.zeros(shape, dtype=torch.bool), torch.zeros(shape[0]))
        assert found.shape == shape


def test_options() -> None:
    assert reshapers()["top"] is Top
    assert (Top().k, Top().share, Top(share=1).share, Top(k=None).k) == (1, None, 1.0, 1)
    assert (Top.elsewhere, Top.ranks) == (0.0, True)
    refused = [
        ({"k": 0}, "top.k=0 must be a whole number, at least 1"),
        ({"k": 1.5}, "top.k=1.5 must be a whole number"),
        ({"k": True}, "top.k=True must be a whole number"),
        ({"share": 0}, "top.share=0.0 must be greater than 0"),
        ({"share": 1.1}, "top.share=1.1 must be at most 1"),
        ({"share": math.nan}, "top.share=nan must be a finite number"),
        ({"k": 2, "share": 0.5}, "top.k=2 and top.share=0.5: give one of the two"),
        ({"count": 2}, "top.count is not an option; the options are k, share"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=f"^{message.replace('.', '[.]')}"):
            Top.from_dict(options)
