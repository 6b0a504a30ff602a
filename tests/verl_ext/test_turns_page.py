"""The agent loop, the reward function and the command of docs/turns.md, as a reader copies them."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import shlex
from pathlib import Path
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
from tests.documentation import DOCS, write_files
from verl_cpu.tiny.model import build_tokenizer

SAID = [
    (["1+1="], [0.0], 400),
    (["####3", "####2", "####2"], [0.0, 1.0, 0.0], 400),
    (["####2", "####3"], [1.0, -1.0], 400),
    (["####2"], [1.0], 400),
    (["####3", "####2"], [0.0], 40),
]
"""What the model says at most, what its turns are worth where 2 is correct, and the most tokens."""


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Server:
    """Gives what a model says, turn by turn."""

    def __init__(self, tokenizer: Any, turns: list[str]) -> None:
        self.tokenizer, self.turns = tokenizer, list(turns)

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict) -> TokenOutput:
        text = self.turns.pop(0) if self.turns else "yes"
        ids = [*self.tokenizer.encode(text), self.tokenizer.eos_token_id]
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), extra_fields={"max_global_steps": 1})


def _run(folder: Path, turns: list[str], limit: int = 400) -> tuple[AgentLoopOutput, dict[str, Any]]:
    """The response to a prompt, and what the reward function says of it."""
    tokenizer = build_tokenizer()
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"response_length": limit, "prompt_length": 50}}})
    (entry,) = yaml.safe_load((folder / "my_loop.yaml").read_text())

    async def respond() -> AgentLoopOutput:
        assert entry.pop("_target_") == "my_loop.CheckAgain" and entry.pop("name") == "check_again" and not entry
        loop = _module(folder / "my_loop.py").CheckAgain(
            trainer_config=DictConfigWrap(config),
            server_manager=Server(tokenizer, turns),
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=DictConfigWrap(OmegaConf.create({})),
        )
        return await loop.run({}, raw_prompt=[{"role": "user", "content": "1+1"}])

    output = asyncio.run(respond())
    judged = _module(folder / "my_reward.py").compute_score("", "", "2", dict(output.extra_fields), num_turns=2)
    return output, judged


@pytest.mark.parametrize(("turns", "worth", "limit"), SAID)
def test_the_loop_and_its_rewards_have_the_same_turns(
    tmp_path: Path, turns: list[str], worth: list[float], limit: int
) -> None:
    write_files("turns.md", tmp_path)
    output, judged = _run(tmp_path, turns, limit)
    assert len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs or ()) <= limit
    known = judged["turn_rewards"]
    assert len(runs(output.response_mask)) == len(known) == -(-output.num_turns // 2)
    assert known[: len(worth)] == worth and not any(known[len(worth) :]) and sum(known) == judged["score"]
    found = re.search(r"<!-- command -->\n```bash\n(.*?)```", (DOCS / "turns.md").read_text(), re.DOTALL)
    words = shlex.split(found[1].replace("\\\n", " "))
    mask_BT = torch.tensor([output.response_mask]).bool()
    rollouts = Rollouts(
        prompts=[torch.tensor(output.prompt_ids)],
        responses=[torch.tensor(output.response_ids)],
        mask=mask_BT,
        advantages=torch.ones(1),
        groups=torch.zeros(1, dtype=torch.int64),
        rewards=torch.tensor([judged["score"]]),
        fields={"turn_rewards": [known]},
    )
    method = check_config(compose("ppo_trainer", words[words.index("verl.trainer.main_ppo") + 1 :], VERL)).method
    of_turns = method.scores(rollouts, None)[mask_BT].unique_consecutive()
    assert set(of_turns.tolist()) == {sum(known[turn:]) for turn in range(len(known))}
