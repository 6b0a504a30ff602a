"""Runs in TRL's trainer: the token dump with what tokens receive, conversations, and the examples."""

from __future__ import annotations

import pytest

from tests.trl_ext.environment import NEWEST, check

pytestmark = pytest.mark.slow


def test_checks() -> None:
    check(NEWEST, "dump", "turns", "example")
