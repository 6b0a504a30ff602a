"""How much a rank keeps of its activations, by its measurements of memory."""

from __future__ import annotations

import pytest

from grail_advantage.verl_ext.kept_activations import SHARE, KeptActivations


def measured() -> KeptActivations:
    """A rank whose update peaked at 1000 bytes, and whose activations take 2 bytes a token."""
    kept = KeptActivations()
    kept.note_forward(50, held=(100, 200), peaks=(300, 300))
    kept.note_update((300, 1000))
    return kept


def test_budget_is_a_share_of_what_an_update_needs() -> None:
    assert measured().tokens(held=100) == int(SHARE * (1000 - 100) / 2)
    assert measured().tokens(held=2000) == 0


def test_nothing_is_kept_before_an_update_and_a_forward_were_measured() -> None:
    kept = KeptActivations()
    assert kept.tokens(held=100) == 0
    kept.note_forward(50, held=(100, 200), peaks=(300, 300))
    assert kept.tokens(held=100) == 0


def test_the_most_bytes_of_a_token_count() -> None:
    kept = measured()
    kept.note_forward(50, held=(100, 150), peaks=(1000, 1000))
    assert kept.bytes_per_token == 2


def test_a_forward_above_the_limit_halves_the_share_and_is_no_limit() -> None:
    kept = measured()
    kept.note_forward(50, held=(100, 200), peaks=(1000, 1200))
    kept.note_update((1200, 1200))
    assert (kept.share, kept.limit) == (SHARE / 2, 1000)
    kept.note_forward(50, held=(100, 200), peaks=(1200, 1200))
    assert kept.share == SHARE / 2


def test_a_higher_update_raises_the_limit() -> None:
    kept = measured()
    kept.note_update((1000, 1500))
    assert kept.limit == 1500
    assert kept.tokens(held=100) == pytest.approx(SHARE * 1400 / 2, abs=1)
