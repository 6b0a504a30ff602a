"""Token weights in TRL's trainer: the checks of this folder with the newest TRL and the newest transformers, and with the
oldest TRL."""

import pytest

from tests.trl_ext.environment import NEWEST, OLDEST, check

pytestmark = pytest.mark.slow


def test_checks():
    check(NEWEST, "ranks", "core", "dump", "turns", "example")


@pytest.mark.nightly
def test_checks_with_the_oldest():
    """But for the examples: TRL 1.15 computes log-probabilities on a GPU alone."""
    check(OLDEST, "core", "dump", "turns")
