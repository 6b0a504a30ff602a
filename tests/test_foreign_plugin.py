"""A plug-in of somebody else's that is installed: this project's tests of its own methods still pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {
    "foreign_method.py": """
from grail_advantage import Signal, register_signal


@register_signal("foreign_blame")
class ForeignBlame(Signal):
    uses = "logits"
    reads = frozenset({"entropy"})
    needs_answer = True
""",
    "foreign_method-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: foreign-method\nVersion: 1.0\n",
    "foreign_method-1.0.dist-info/entry_points.txt": "[grail_advantage.signals]\nforeign = foreign_method\n",
}
LISTING = (
    "tests/verl_ext/test_settings.py",
    "tests/verl_ext/test_estimators.py",
)
"""Tests that go through the registered methods."""


@pytest.mark.slow
def test_tests_of_the_methods_pass_beside_a_foreign_one(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    listed = "from grail_advantage.methods import methods; print(*methods())"
    done = subprocess.run([sys.executable, "-c", listed], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "foreign_blame" in done.stdout.split(), done.stderr
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *LISTING]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
