"""Agent loops with rewards by turn: verl's tool agent, with parallel calls, calls that fail and tools without a reward; and
that of examples/turns, with its reward function and its command."""

import asyncio
import shlex
from itertools import chain
from types import ModuleType

import pytest
import torch
import yaml
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

from grail_advantage.data import runs
from grail_advantage.verl_ext.entry import check_config
from grail_advantage.verl_ext.tool_agent import TurnToolAgent
from tests.composed import VERL, compose
from tests.core.common import rollouts_of
from tests.documentation import ROOT
from tests.recipe.test_agent import BOX, FIRST, SECOND, run_loop
from verl_cpu.tiny.model import build_tokenizer
from verl_cpu.tiny.shipped import build_agent_tokenizer

UNKNOWN = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
# The tool checks all calls of a turn against the same step of the chain.
CASES = {
    "one call a turn": ([FIRST, SECOND, BOX], [[1.0], [1.0]]),
    "two calls in the first turn": ([FIRST + SECOND, BOX], [[1.0, -1.0]]),
    "two calls in the second turn": ([FIRST, SECOND + SECOND, BOX], [[1.0], [1.0, 1.0]]),
    "an unknown tool": ([FIRST, UNKNOWN, BOX], [[1.0], [0.0]]),
    "no call": ([BOX], []),
}


def output_of(texts: list[str], **how) -> AgentLoopOutput:
    """What verl's loop, or another one, makes of a model that writes these turns."""
    return run_loop(build_agent_tokenizer(), texts, **how)[0]


@pytest.mark.parametrize(("texts", "expected"), CASES.values(), ids=CASES)
def test_the_calls_of_each_turn(texts, expected):
    output = output_of(texts, loop_class=TurnToolAgent, calls=2)
    stock = output_of(texts, calls=2)
    assert stock.extra_fields["tool_rewards"] == list(chain(*expected))
    assert output.extra_fields.pop("call_rewards") == expected
    for name in ("response_ids", "response_mask", "extra_fields"):
        assert getattr(output, name) == getattr(stock, name)
    assert len(runs(output.response_mask)) == len(texts)


@pytest.mark.parametrize("loop_class", [ToolAgentLoop, TurnToolAgent])
def test_a_call_whose_answer_does_not_fit_keeps_its_turn(loop_class):
    """Also in verl's own loop, which lists the call's reward before it finds no room for the answer: two turns, two
    rewards."""
    complete = output_of([FIRST, SECOND, BOX])
    # Up to the first token of the second answer.
    length = runs(complete.response_mask)[1][1] + 1
    output = output_of([FIRST, SECOND], length=length, loop_class=loop_class)
    assert output.response_mask == complete.response_mask[: length - 1]
    assert len(runs(output.response_mask)) == 2
    assert output.extra_fields["tool_rewards"] == [1.0, 1.0]
    assert output.extra_fields.get("call_rewards", [[1.0], [1.0]]) == [[1.0], [1.0]]


def test_calls_that_end_in_another_order_and_tools_without_a_reward(monkeypatch):
    """verl leaves a reward of ``None`` out of its list, which shifts the others."""
    rewards = [0.25, None, -1.0]
    inner = ToolAgentLoop._call_tool

    async def late(self: ToolAgentLoop, *args):
        reward = rewards.pop(0)
        response, _, rest = await inner(self, *args)
        await asyncio.sleep(0.05 * len(rewards))
        return response, reward, rest

    # The first call of the first turn ends last.
    monkeypatch.setattr(ToolAgentLoop, "_call_tool", late)
    output = output_of([FIRST + SECOND, SECOND, BOX], loop_class=TurnToolAgent, calls=2)
    assert output.extra_fields["call_rewards"] == [[0.25, None], [-1.0]]
    assert output.extra_fields["tool_rewards"] == [0.25, -1.0]


FOLDER = ROOT / "examples/turns"
TALKS = [
    (["1+1="], [0.0], 400),
    (["####3", "####2", "####2"], [0.0, 1.0, 0.0], 400),
    (["####2", "####3"], [1.0, -1.0], 400),
    (["####2"], [1.0], 400),
    (["####3", "####2"], [0.0], 40),
]
"""What the model says before it says yes, what its turns are worth where 2 is correct, and the most tokens of a response."""


def _module(name: str) -> ModuleType:
    """Of the example's folder, which is on no path."""
    module = ModuleType(name)
    exec(compile((FOLDER / f"{name}.py").read_text(), name, "exec"), vars(module))
    return module


@pytest.mark.parametrize(("turns", "worth", "limit"), TALKS)
def test_the_loop_and_its_rewards_have_the_same_turns(turns, worth, limit):
    """The score is their sum, a response ends where it is full, and the command's method sees what follows each turn."""
    (entry,) = yaml.safe_load((FOLDER / "my_loop.yaml").read_text())
    assert entry == {"_target_": "my_loop.CheckAgain", "name": "check_again"}
    # The loop asks again until the model says yes.
    loop = _module("my_loop").CheckAgain
    output, _ = run_loop(build_tokenizer(), [*turns, "yes"], length=limit, loop_class=loop)
    compute_score = _module("my_reward").compute_score
    judged = compute_score("", "", "2", dict(output.extra_fields), num_turns=2)
    rewards = judged["turn_rewards"]
    assert len(output.response_ids) == len(output.response_mask) <= limit
    assert len(runs(output.response_mask)) == len(rewards) == output.num_turns / 2
    # The turn that says yes is worth nothing.
    assert rewards == [*worth, *[0.0] * (len(rewards) - len(worth))]
    assert sum(rewards) == judged["score"]
    command = (
        (FOLDER / "run.sh").read_text().partition("pipefail\n")[2].replace("\\\n", " ")
    )
    # Without the shebang and the comment in front.
    words = shlex.split(command)
    assert words[:4] == ["PYTHONPATH=.", "python3", "-m", "verl.trainer.main_ppo"]
    method = check_config(compose("ppo_trainer", words[4:-1], VERL)).method
    rollouts = rollouts_of(
        [output.response_ids],
        [1.0],
        [output.response_mask],
        groups=torch.zeros(1, dtype=torch.int64),
        rewards=torch.tensor([judged["score"]]),
        fields={"turn_rewards": [rewards]},
    )
    # A turn's score is the sum of the rewards from it on.
    scores = method.scores(rollouts, None)[rollouts.mask].unique_consecutive()
    assert set(scores.tolist()) == {sum(rewards[turn:]) for turn in range(len(rewards))}
