"""The agent loop and the reward function of examples/turns, and their command."""

from __future__ import annotations

import shlex
from types import ModuleType

import pytest
import torch
import yaml

from grail_advantage import Rollouts
from grail_advantage.data import runs
from grail_advantage.verl_ext.checks import check_config
from tests.composed import VERL, compose
from tests.documentation import ROOT
from tests.recipe.test_agent import run_loop
from verl_cpu.tiny.model import build_tokenizer

FOLDER = ROOT / "examples/turns"
SAID = [
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


@pytest.mark.parametrize(("turns", "worth", "limit"), SAID)
def test_the_loop_and_its_rewards_have_the_same_turns(turns: list[str], worth: list[float], limit: int) -> None:
    """The score is their sum, a response ends where it is full, and the command's method sees what follows each turn."""
    (entry,) = yaml.safe_load((FOLDER / "my_loop.yaml").read_text())
    assert entry == {"_target_": "my_loop.CheckAgain", "name": "check_again"}
    loop, judge = _module("my_loop").CheckAgain, _module("my_reward").compute_score
    output, _ = run_loop(build_tokenizer(), [*turns, "yes"], length=limit, loop_class=loop)
    judged = judge("", "", "2", dict(output.extra_fields), num_turns=2)
    known, mask_BT = judged["turn_rewards"], torch.tensor([output.response_mask]).bool()
    assert len(output.response_ids) == len(output.response_mask) <= limit
    assert len(runs(output.response_mask)) == len(known) == output.num_turns / 2
    assert known[: len(worth)] == worth and not any(known[len(worth) :]) and sum(known) == judged["score"]
    words = shlex.split((FOLDER / "run.sh").read_text().partition("pipefail\n")[2].replace("\\\n", " "))
    assert words[:4] == ["PYTHONPATH=.", "python3", "-m", "verl.trainer.main_ppo"]
    method = check_config(compose("ppo_trainer", words[4:-1], VERL)).method
    parts = {"prompts": [torch.tensor(output.prompt_ids)], "responses": [torch.tensor(output.response_ids)]}
    parts |= {"advantages": torch.ones(1), "groups": torch.zeros(1, dtype=torch.int64), "mask": mask_BT}
    rollouts = Rollouts(**parts, rewards=torch.tensor([judged["score"]]), fields={"turn_rewards": [known]})
    of_turns = method.scores(rollouts, None)[mask_BT].unique_consecutive()
    assert set(of_turns.tolist()) == {sum(known[turn:]) for turn in range(len(known))}
