"""The model on a device that mixes with no tensor of the CPU and has no float64: every method, and those of the page for
authors, weighs as on the CPU. As a program, which has the device for good, it prints a line of JSON a method: what went wrong,
or the largest difference from the CPU."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from types import ModuleType
from typing import Any

import pytest
import torch

from grail_advantage import compute_token_weights
from grail_advantage.method import build
from tests import forked
from tests.core.common import FITTED, METHODS
from tests.core.test_doors import valid_weights
from tests.core.test_rlsd import example, tiny_tokenizer
from tests.core.tiny_models import char_tokenizer, tiny_model
from tests.documentation import files, snippets

TURNS = {"tool_rewards": [[0.0], [1.0], [0.5]], "step_rewards": [[0.1], [0.2, 0.3], []]}
OWN = {
    name.removesuffix(".py"): text
    for name, text in files("write_your_own.md").items()
    if "@register(" in text
}
COMPUTED = [f"{name}, own columns" for name in ("stare", "rlsd")]
CLOSE = {"oar_g": 1e-3, "oar_p": 1e-4, "turning_points": 0.05}
"""Of the largest value, else 1e-5: differences of readings that are nearly the same have fewer digits."""


def compare(name: str, **columns: Any) -> float:
    """The largest difference, as a part of the largest value."""
    from tests.core import card

    arguments = valid_weights() | {
        "fields": TURNS,
        "config": build(name, FITTED if name == "fitted" else {}),
        "model": tiny_model(),
        **columns,
    }
    arguments["examples"] = [example("?", "7")] * 3
    arguments["tokenizer"] = tiny_tokenizer()
    expected = compute_token_weights(**arguments)
    # Nothing moves by itself between the two: a tensor of the CPU in an operation of the card raises.
    with card.card():
        on_card = {
            key: argument.to(card.DEVICE) if isinstance(argument, torch.Tensor) else argument
            for key, argument in arguments.items()
        }
        rewards = [torch.tensor(of_row).to(card.DEVICE) for of_row in TURNS["step_rewards"]]
        on_card["fields"] = TURNS | {"step_rewards": rewards}
        on_card["model"] = card.moved(arguments["model"])
        result = compute_token_weights(**on_card)
        differences = []
        assert result.failed.device == result.selected.device == card.DEVICE
        for part in ("weights", "scores", "advantages"):
            value = getattr(result, part)
            expected_value = getattr(expected, part)
            assert value.device == card.DEVICE and torch.equal(
                value.cpu().isnan(), expected_value.isnan()
            ), part
            difference = (value.cpu() - expected_value).nan_to_num().abs().max()
            largest = expected_value.nan_to_num().abs().max()
            differences.append(float(difference) / max(1e-30, float(largest)))
        return max(differences)


@pytest.fixture(scope="module")
def differences() -> dict[str, float | str]:
    done = forked.run("tests.core.test_device")
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.parametrize("name", [*METHODS, *OWN, *COMPUTED])
def test_weights_are_those_of_the_cpu(name: str, differences: dict[str, float | str]) -> None:
    difference = differences[name]
    assert isinstance(difference, float), difference
    assert difference <= CLOSE.get(name, 1e-5)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for file, text in OWN.items():
        sys.modules[file] = ModuleType(file)
        exec(compile(text, file, "exec", dont_inherit=True), vars(sys.modules[file]))
    for snippet in snippets("write_your_own.md"):
        namespace = valid_weights() | {"tokenizer": char_tokenizer()}
        with contextlib.redirect_stdout(None):
            exec(snippet, namespace)
        assert namespace["result"].weights.unique().numel() > 2
    nothing = {"old_log_probs": None, "entropy": None}  # they are computed
    for name in [*METHODS, *OWN, *COMPUTED]:
        try:
            result: float | str = compare(name.split(",")[0], **nothing if name in COMPUTED else {})
        except Exception:
            result = traceback.format_exc()[-2000:]
        print(json.dumps([name, result]))
