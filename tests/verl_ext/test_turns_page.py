"""The agent loop and the reward function of examples/turns, and their command."""

from __future__ import annotations

import asyncio
import shlex
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap
from verl.workers.rollout.replica import TokenOutput

from grail_advantage import Rollouts
from grail_advantage.data import runs
from grail_advantage.verl_ext.checks import check_config
from tests.composed import VERL, compose
from tests.documentation import ROOT
from verl_cpu.tiny.model import build_tokenizer

FOLDER = ROOT / "examples/turns"
SAID = [
    (["1+1="], [0.0]),
    (["####3", "####2", "####2"], [0.0, 1.0, 0.0]),
    (["####2", "####3"], [1.0, -1.0]),
    (["####2"], [1.0]),
]
"""What the model says at most, and what its turns are worth where 2 is correct."""


def _module(name: str) -> ModuleType:
    """Of the example's folder, which is on no path."""
    module = ModuleType(name)
    exec(compile((FOLDER / f"{name}.py").read_text(), name, "exec"), vars(module))
    return module


class Server:
    """Gives what a model says, turn by turn."""

    def __init__(self, tokenizer: Any, turns: list[str]) -> None:
        self.tokenizer, self.turns = tokenizer, list(turns)

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict) -> TokenOutput:
        text = self.turns.pop(0) if self.turns else "yes"
        ids = [*self.tokenizer.encode(text), self.tokenizer.eos_token_id]
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), extra_fields={"max_global_steps": 1})


def _run(turns: list[str], limit: int = 400) -> tuple[AgentLoopOutput, dict[str, Any]]:
    """The response to a prompt, and what the reward function says of it."""
    tokenizer = build_tokenizer()
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"response_length": limit, "prompt_length": 50}}})
    (entry,) = yaml.safe_load((FOLDER / "my_loop.yaml").read_text())

    async def respond() -> AgentLoopOutput:
        assert entry.pop("_target_") == "my_loop.CheckAgain" and entry.pop("name") == "check_again" and not entry
        loop = _module("my_loop").CheckAgain(
            trainer_config=DictConfigWrap(config),
            server_manager=Server(tokenizer, turns),
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=DictConfigWrap(OmegaConf.create({})),
        )
        return await loop.run({}, raw_prompt=[{"role": "user", "content": "1+1"}])

    output = asyncio.run(respond())
    judged = _module("my_reward").compute_score("", "", "2", dict(output.extra_fields), num_turns=2)
    return output, judged


@pytest.mark.parametrize(("turns", "worth"), SAID)
def test_the_loop_and_its_rewards_have_the_same_turns(turns: list[str], worth: list[float]) -> None:
    output, judged = _run(turns)
    mask_BT = torch.tensor([output.response_mask]).bool()
    assert len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs or ())
    assert len(runs(output.response_mask)) == len(judged["turn_rewards"]) == output.num_turns / 2
    assert sum(judged["turn_rewards"]) == judged["score"] and output.extra_fields["max_global_steps"] == 1
    known = judged["turn_rewards"]
    assert known[: len(worth)] == worth and not any(known[len(worth) :])
    words = shlex.split((FOLDER / "run.sh").read_text().partition("pipefail\n")[2].replace("\\\n", " "))
    assert words[:4] == ["PYTHONPATH=.", "python3", "-m", "verl.trainer.main_ppo"]
    method = check_config(compose("ppo_trainer", words[4:-1], VERL)).method
    parts = {"prompts": [torch.tensor(output.prompt_ids)], "responses": [torch.tensor(output.response_ids)]}
    parts |= {"advantages": torch.ones(1), "groups": torch.zeros(1, dtype=torch.int64), "mask": mask_BT}
    rollouts = Rollouts(**parts, rewards=torch.tensor([judged["score"]]), fields={"turn_rewards": [known]})
    of_turns = method.scores(rollouts, None)[mask_BT].unique_consecutive()
    assert set(of_turns.tolist()) == {sum(known[turn:]) for turn in range(len(known))}


def test_the_loop_ends_where_the_response_is_full() -> None:
    output, judged = _run(["####3", "####2"], limit=40)
    assert len(output.response_ids) == 40 and len(runs(output.response_mask)) == len(judged["turn_rewards"]) == 1
