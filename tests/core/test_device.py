"""The model on a device that mixes with no tensor of the CPU and has no float64: every method weighs as on the CPU."""

from __future__ import annotations

import json

import pytest

from tests import forked
from tests.core.common import METHODS
from tests.documentation import files

OWN = [name.removesuffix(".py") for name, text in files("write_your_own.md").items() if "@register(" in text]
CLOSE = {"oar_g": 1e-3, "oar_p": 1e-4, "turning_points": 0.05}
"""Of the largest value, else 1e-5: differences of readings that are nearly the same have fewer digits."""


@pytest.fixture(scope="module")
def differences() -> dict[str, float | str]:
    done = forked.run("tests.core.on_card")
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.parametrize("name", [*METHODS, *OWN, "stare, own columns", "rlsd, own columns"])
def test_weights_are_those_of_the_cpu(name: str, differences: dict[str, float | str]) -> None:
    found = differences[name]
    assert isinstance(found, float), found
    assert found <= CLOSE.get(name, 1e-5)
