"""Every method, and those of the page for authors, in the plain API on a device that is not the CPU; in a process of its own.

Prints a line of JSON a method: what went wrong, or the largest difference from the CPU's weights.
"""

from __future__ import annotations

import copy
import json
import traceback
from typing import Any

import torch

from grail_advantage import compute_token_weights
from grail_advantage.data import Example
from grail_advantage.method import build
from tests.core import card
from tests.core.common import METHODS
from tests.core.test_doors import valid_weights
from tests.core.tiny_models import tiny_model
from tests.documentation import files

TURNS = {"tool_rewards": [[0.0], [1.0], [0.5]], "step_rewards": [[0.1], [0.2, 0.3], []]}
ASKED = Example([{"role": "user", "content": "?"}], {"reward_model": {"ground_truth": "7"}}, {})


def compare(name: str, **columns: Any) -> float:
    """The largest difference, as a part of the largest value."""
    given = valid_weights() | {"fields": TURNS, "config": build(name), "model": tiny_model(), **columns}
    given |= {"examples": [ASKED] * 3, "tokenizer": copy.copy(given["tokenizer"])}
    given["tokenizer"].chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    expected = compute_token_weights(**given)
    with card.card():
        there = {
            name: value.to(card.DEVICE) if isinstance(value, torch.Tensor) else value for name, value in given.items()
        }
        rewards = [torch.tensor(of_row).to(card.DEVICE) for of_row in TURNS["step_rewards"]]
        there |= {"fields": TURNS | {"step_rewards": rewards}, "model": card.moved(given["model"])}
        found, differences = compute_token_weights(**there), []
        assert found.failed.device == found.selected.device == card.DEVICE
        for part in ("weights", "scores", "advantages"):
            value, other = getattr(found, part), getattr(expected, part)
            assert value.device == card.DEVICE and torch.equal(value.cpu().isnan(), other.isnan()), part
            difference, largest = (value.cpu() - other).nan_to_num().abs().max(), other.nan_to_num().abs().max()
            differences.append(float(difference) / max(1e-30, float(largest)))
        return max(differences)


def main() -> None:
    torch.set_num_threads(1)
    own = {name.removesuffix(".py"): text for name, text in files("write_your_own.md").items() if "@register(" in text}
    for name, text in own.items():
        exec(compile(text, name, "exec", dont_inherit=True), {"__name__": name})
    nothing = {"old_log_probs": None, "entropy": None}  # they are computed
    tried = {name: (lambda name=name: compare(name)) for name in [*METHODS, *own]}
    tried |= {f"{name}, own columns": (lambda name=name: compare(name, **nothing)) for name in ("stare", "rlsd")}
    for name, run in tried.items():
        try:
            print(json.dumps([name, run()]))
        except Exception:
            print(json.dumps([name, traceback.format_exc()[-2000:]]))


if __name__ == "__main__":
    main()
