"""A method by turns in somebody else's package: one class with one function, through the same helpers as this project's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = {
    "foreign_turns.py": '''
from grail_advantage import option, register
from grail_advantage.methods.turns import TurnMethod


@register("foreign_turns")
class ForeignTurns(TurnMethod):
    """A turn's own reward, times a factor."""

    formula, source = "scale r", "a test"
    scale: float = option(2.0, "factor")

    def advantages(self, sessions):
        return [self.scale * session.rewards for session in sessions]
''',
    "foreign_turns-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: foreign-turns\nVersion: 1.0\n",
    "foreign_turns-1.0.dist-info/entry_points.txt": "[grail_advantage.signals]\nforeign = foreign_turns\n",
    "run.py": """
import json

import torch

from grail_advantage import compute_token_weights
from grail_advantage.method import build
from grail_advantage.verl_ext.settings import algorithm_sections

ids = torch.tensor([[1, 5, 6, 9, 7], [1, 5, 9, 9, 7]])
mask = torch.tensor([[0, 1, 1, 0, 1], [0, 1, 0, 0, 1]])
from tests.core.tiny_models import char_tokenizer, tiny_model

found = compute_token_weights(
    tiny_model(layers=1), char_tokenizer(), ids, torch.ones_like(ids), mask, torch.zeros(2),
    build("foreign_turns", {"rewards": "my_rewards", "align": "turns", "scale": 3.0}),
    groups=torch.zeros(2, dtype=torch.int64), rewards=torch.zeros(2), fields={"my_rewards": [[1.0, 2.0], [0.0, -1.0]]},
)
print(json.dumps([found.advantages.tolist(), algorithm_sections()["foreign_turns"]]))
""",
}


def test_a_foreign_method_by_turns(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "run.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    advantages, section = json.loads(done.stdout.splitlines()[-1])
    assert advantages == [[0, 3, 3, 0, 6], [0, 0, 0, 0, -3]]
    shared = {
        "rewards": "tool_rewards",
        "align": "calls",
        "differences": False,
        "outcome": True,
        "mask_truncated": False,
    }
    of_every_method = {"gate": "all", "statistics": "response", "span": "last", "normalize_mass": False}
    assert section == {**of_every_method, **shared, "scale": 2.0}
