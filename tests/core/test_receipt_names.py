"""The receipt's first name is right, and names that are not right are few: over the faults of ``receipt_blind.py``."""

from __future__ import annotations

import pytest
import torch

from tests.core.receipt_blind import FAULTS, Cell, cell, quiet

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    """Each fault in one of its settings, in turn."""
    chosen = ((fault, fault.settings[place % len(fault.settings)]) for place, fault in enumerate(FAULTS))
    return [known for fault, setting in chosen if (known := cell(fault, setting)) is not None]


def test_nothing_is_missed_and_the_first_name_is_right(cells: list[Cell]) -> None:
    assert len(cells) > 95 and all(one.said for one in cells)
    first = sum(one.first for one in cells) / len(cells)
    only = sum(one.only for one in cells) / len(cells)
    assert first >= 0.9 and only >= 0.8, [(one.fault.what, one.said) for one in cells if not one.only]


def test_every_example_differs_from_what_was_intended(cells: list[Cell]) -> None:
    examples = [example for one in cells for finding in one.receipt.findings for example in finding.examples]
    assert len(examples) > 250
    for _, _, intended, received in examples:
        assert abs(intended - received) > 1e-6 * abs(intended) or received != received
        assert str(intended) != "-0.0" and str(received) != "-0.0"


def test_findings_that_cover_most_tokens_come_first(cells: list[Cell]) -> None:
    for one in cells:
        shown = [(not finding.mismatch, -finding.tokens) for finding in one.receipt.findings]
        assert shown == sorted(shown)


def test_no_alarm_in_clean_loops() -> None:
    checked = quiet(48)
    assert any(setting.dtype == torch.bfloat16 for setting, _ in checked)
    assert [(setting, *map(str, receipt.findings)) for setting, receipt in checked if not receipt.ok] == []
