"""Every input that was kept goes through its target again: what once broke it, and what reaches its branches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.names import CORPUS, MODULES
from tests.fuzz.targets import TARGETS

INPUTS = [path for target in sorted(MODULES) for path in sorted((CORPUS / target).iterdir())]


def test_every_target_has_inputs() -> None:
    assert set(TARGETS) == set(MODULES) == {path.name for path in CORPUS.iterdir()}
    assert all(path.stat().st_size <= 4096 for path in INPUTS)


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_input(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())
