"""The model on a device that mixes with no tensor of the CPU and has no float64: every method, and those of the page for
authors, weighs as on the CPU. As a program, which has the device for good, it prints the names of the methods that do not, each
with what went wrong."""

import contextlib
import sys
import traceback
from types import ModuleType

import torch
from torch.utils._pytree import tree_map_only

from grail_advantage import compute_token_weights
from grail_advantage.method import build
from tests import forked
from tests.core.common import FITTED, METHODS
from tests.core.test_doors import valid_weights
from tests.core.tiny_models import tiny_model
from tests.documentation import files, snippets

TURNS = {"tool_rewards": [[0.0], [1.0], [0.5]], "step_rewards": [[0.1], [0.2, 0.3], []]}
OWN = {
    name.removesuffix(".py"): text
    for name, text in files("write_your_own.md").items()
    if "@register(" in text
}
CLOSE = {"oar_g": 1e-3, "oar_p": 1e-4, "turning_points": 0.05}
"""Of the largest value, else 1e-5: differences of readings that are nearly the same have fewer digits."""


def check(name: str, **columns):
    """The results are those of the CPU, and lie where the ids do."""
    from tests.core import card

    arguments = valid_weights() | {
        "fields": TURNS,
        "config": build(name, FITTED if name == "fitted" else {}),
        "model": tiny_model(),
        **columns,
    }
    expected = compute_token_weights(**arguments)
    # Nothing moves by itself between the two: a tensor of the CPU in an operation of the card raises.
    with card.card():
        on_card = tree_map_only(
            torch.Tensor, lambda value: value.to(card.DEVICE), arguments
        )
        rewards = [torch.tensor(values).to(card.DEVICE) for values in TURNS["step_rewards"]]
        on_card["fields"] = TURNS | {"step_rewards": rewards}
        on_card["model"] = card.moved(arguments["model"])
        result = compute_token_weights(**on_card)
        assert result.failed.device == result.selected.device == card.DEVICE
        for part in ("weights", "scores", "advantages"):
            values = getattr(result, part)
            assert values.device == card.DEVICE, part
            size = getattr(expected, part).nan_to_num().abs().max().clamp(min=1e-30)
            torch.testing.assert_close(
                values.cpu() / size,
                getattr(expected, part) / size,
                rtol=0,
                atol=CLOSE.get(name, 1e-5),
                equal_nan=True,
                msg=part,
            )


def test_weights_are_those_of_the_cpu():
    done = forked.run("tests.core.test_device")
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-3000:]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for file, text in OWN.items():
        sys.modules[file] = ModuleType(file)
        exec(compile(text, file, "exec", dont_inherit=True), vars(sys.modules[file]))
    for snippet in snippets("write_your_own.md"):
        namespace = valid_weights().copy()
        with contextlib.redirect_stdout(None):
            exec(snippet, namespace)
        assert namespace["result"].weights.unique().numel() > 2
    # The last two with columns that are computed.
    cases = [(name, {}) for name in [*METHODS, *OWN]]
    cases += [
        (name, {"old_log_probs": None, "entropy": None}) for name in ("stare", "rlsd")
    ]
    for name, columns in cases:
        try:
            check(name, **columns)
        except Exception:
            print(name, traceback.format_exc()[-2000:])
