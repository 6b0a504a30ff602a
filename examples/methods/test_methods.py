"""Keep it beside your methods: `pytest test_methods.py`."""

from pathlib import Path

import pytest

from grail_advantage.check import main

FILES = [
    file for file in sorted(Path(__file__).parent.glob("*.py")) if not file.name.startswith("test_")
]
FIELDS = ["--field", "step_rewards=[0.5, -1]", "--field", "tool_rewards=[0.25]"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_method_keeps_the_contract(file):
    assert main([str(file), *FIELDS]) == 0
