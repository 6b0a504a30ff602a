"""Credit by turn in other trainers, as docs/turns.md has it: its examples, and its lines for SkyRL and verifiers on objects
with the fields of theirs."""

from __future__ import annotations

import doctest
import re
from types import SimpleNamespace
from typing import Any

import grail_advantage
import grail_advantage.methods.turns
from grail_advantage import turn_advantages
from tests.documentation import DOCS, files


def _function(name: str) -> Any:
    found: dict[str, Any] = {}
    exec(files("turns.md")[f"for_{name}.py"], found)
    return next(value for key, value in found.items() if key in ("skyrl_advantages", "credit"))


def test_examples() -> None:
    runner, parser = doctest.DocTestRunner(), doctest.DocTestParser()
    blocks = re.findall(r"```pycon\n(>>> .*?)```", (DOCS / "turns.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    runner.run(parser.get_doctest(blocks[0], {}, "turns.md", None, None))
    for test in doctest.DocTestFinder().find(
        grail_advantage.methods.turns, globs={name: getattr(grail_advantage, name) for name in grail_advantage.__all__}
    ):
        runner.run(test)
    assert runner.summarize() == (0, 5)


def test_skyrl() -> None:
    """One row a conversation, and one row a turn: the same advantages."""
    ids = [SimpleNamespace(instance_id="p", repetition_id=number) for number in range(2)]
    whole = {
        "rewards": [[0.0, 0.5, 0.0, 0.0, 1.0], [0.0, 0.25]],
        "loss_masks": [[1, 1, 0, 1, 1], [1, 1]],
        "trajectory_ids": ids,
    }
    expected = [[1.25, 1.25, 0.0, 0.75, 0.75], [-1.25, -1.25]]
    assert _function("skyrl")(whole) == expected
    by_step = {
        "rewards": [[0.0, 0.5], [0.0, 1.0], [0.0, 0.25]],
        "loss_masks": [[1, 1]] * 3,
        "trajectory_ids": [ids[0], ids[0], ids[1]],
    }
    assert _function("skyrl")(by_step) == [[1.25, 1.25], [0.75, 0.75], [-1.25, -1.25]]


def test_verifiers() -> None:
    def trace(rewards: list[Any], outcome: float, masks: list[list[bool]]) -> SimpleNamespace:
        nodes = [SimpleNamespace(sampled=False, mask=[False], advantages=None)]
        for mask in masks:
            nodes += [SimpleNamespace(sampled=True, mask=mask, advantages=None)]
            nodes += [SimpleNamespace(sampled=False, mask=[False] * 3, advantages=None)]
        return SimpleNamespace(info={"turn_rewards": rewards}, reward=outcome, nodes=nodes)

    traces = [trace([0.5, None], 1.0, [[False, True, True], [False, True]]), trace([[0.0, 0.25]], 0.0, [[True]])]
    _function("verifiers")(traces, ["p", "p"])
    first, second = turn_advantages([[0.5, None], [0.25]], [1.0, 0.0], ["p", "p"])
    assert [node.advantages for node in traces[0].nodes] == [None, [first[0]] * 2, None, [first[1]], None]
    assert [node.advantages for node in traces[1].nodes] == [None, second, None]
