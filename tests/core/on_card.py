"""Every method, and those of the page for authors, in the plain API on a device that is not the CPU; in a process of its own.

Prints a line of JSON a method: what went wrong, or the largest difference from the CPU's weights.
"""

from __future__ import annotations

import copy
import json
import traceback
from typing import Any

import torch

from grail_advantage import TokenWeights, compute_token_weights
from grail_advantage.data import Example
from grail_advantage.method import build
from tests.core import card
from tests.core.common import METHODS
from tests.core.test_doors import valid_weights
from tests.core.tiny_models import tiny_model
from tests.documentation import files

PAGE = "write_your_own.md"
TURNS = {"tool_rewards": [[0.0], [1.0], [0.5]], "step_rewards": [[0.1], [0.2, 0.3], []]}


def arguments(name: str) -> dict[str, Any]:
    given = valid_weights() | {"fields": TURNS, "config": build(name), "model": tiny_model()}
    given["examples"] = [Example([{"role": "user", "content": "?"}], {"reward_model": {"ground_truth": "7"}}, {})] * 3
    given["tokenizer"] = copy.copy(given["tokenizer"])
    given["tokenizer"].chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return given


def moved(given: dict[str, Any]) -> dict[str, Any]:
    """Everything on the card, the numbers of a field as well."""
    there = {name: value.to(card.DEVICE) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    there["fields"] = TURNS | {
        "step_rewards": [torch.tensor(of_row).to(card.DEVICE) for of_row in TURNS["step_rewards"]]
    }
    return there | {"model": card.moved(given["model"])}


def largest(found: TokenWeights, expected: TokenWeights) -> float:
    differences = []
    for name in ("weights", "scores", "advantages"):
        value, other = getattr(found, name), getattr(expected, name)
        assert value.device == card.DEVICE == found.failed.device == found.selected.device
        assert torch.equal(value.cpu().isnan(), other.isnan()), name
        differences.append(
            float((value.cpu() - other).nan_to_num().abs().max()) / max(1e-30, float(other.nan_to_num().abs().max()))
        )
    return max(differences)


def compare(name: str, **columns: Any) -> float:
    given = arguments(name) | columns
    expected = compute_token_weights(**given)
    with card.card():
        return largest(compute_token_weights(**moved(given)), expected)


def main() -> None:
    torch.set_num_threads(1)
    own = {name.removesuffix(".py"): text for name, text in files(PAGE).items() if "@register(" in text}
    for name, text in own.items():
        exec(compile(text, name, "exec"), {"__name__": name})
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
