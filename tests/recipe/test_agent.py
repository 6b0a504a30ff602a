"""The agent task: its tool and rewards by hand, verl's own tool agent loop with the tiny tokenizer, and the model for it."""

import asyncio
import json
from dataclasses import asdict
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.tool_registry import load_all_tools
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from tests.composed import verls_on_cpu
from verl_cpu.tiny.agent import MAX_TURNS, call_text, check, compute_score
from verl_cpu.tiny.make_models import AgentSettings, measure
from verl_cpu.tiny.sampling import prompt_ids
from verl_cpu.tiny.shipped import (
    AGENT_FOLDER,
    RECORD,
    build_agent_tokenizer,
    load_agent,
    reply_ids,
    weights_digest,
)
from verl_cpu.tiny.task import Problem, problems

CHAIN = Problem.parse("7+5-3")
FIRST = call_text("7+5=12")
SECOND = call_text("12-3=9")
BOX = "\\boxed{9}"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_agent_tokenizer()


def test_the_tool_by_hand() -> None:
    assert check(CHAIN, 0, "7+5=12") == ("12", 1.0) and check(CHAIN, 0, "7+5=11") == (
        "12",
        -1.0,
    )
    assert check(CHAIN, 0, "12-3=9") == ("12", -1.0), (
        "a step too early takes up the first one all the same"
    )
    assert check(CHAIN, 1, "12-3=09") == check(CHAIN, 1, "11-3=8") == ("9", -1.0)
    assert check(CHAIN, 2, "9+1=10") == ("end", -1.0)


class Writer:
    """A rollout server's client that writes given turns."""

    def __init__(self, turns: list[list[int]]) -> None:
        self.turns = iter(turns)
        self.asked: list[list[int]] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], **_: Any
    ) -> TokenOutput:
        self.asked.append(list(prompt_ids))
        ids = next(self.turns)
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids))


def written(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The tokens of a turn, with the end token."""
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


def run_loop(
    tokenizer: PreTrainedTokenizerFast,
    texts: list[str],
    length: int = 184,
    loop_class: type[ToolAgentLoop] = ToolAgentLoop,
    calls: int = 1,
) -> tuple[Any, Writer]:
    """What verl's loop makes of a model that writes these turns, each with an end token; with this many parallel calls."""
    turns = {
        "format": "hermes",
        "max_assistant_turns": MAX_TURNS,
        "max_parallel_calls": calls,
    }
    overrides = ["data.max_prompt_length=32", f"data.max_response_length={length}"]
    for name, value in turns.items():
        overrides.append(f"actor_rollout_ref.rollout.multi_turn.{name}={value}")
    config = verls_on_cpu(*overrides)
    writer = Writer([written(tokenizer, text) for text in texts])
    tools = load_all_tools(str(AGENT_FOLDER.with_name("agent_tools.yaml")), None)

    async def run() -> Any:
        loop = loop_class(
            DictConfigWrap(config),
            server_manager=writer,
            tokenizer=tokenizer,
            hf_model_type="qwen3",
            data_config=DictConfigWrap(config.data),
            dataset_cls=RLHFDataset,
            processor=None,
            tools=ToolListWrap(tools),
        )
        return await loop.run({}, raw_prompt=[{"role": "user", "content": CHAIN.text}])

    return asyncio.run(run()), writer


CONVERSATIONS = {
    "perfect": ([FIRST, SECOND, BOX], ["12", "9"], [1.0, 1.0, 1.0], 1.0),
    "a wrong step": ([FIRST, call_text("12-3=8"), BOX], ["12", "9"], [1.0, -1.0, 1.0], 0.0),
    "a guess": ([BOX], [], [1.0], 0.0),
    "no JSON": ([FIRST, "<tool_call>{12-3}</tool_call>"], ["12"], [1.0, 0.0], 0.0),
    # The tool answers six calls too many with its end, and the eighth turn gets no reply.
    "never stops": (
        [FIRST] + [SECOND] * 7,
        ["12", "9"] + ["end"] * 5,
        [1.0, 1.0] + [-1.0] * 5 + [0.0],
        0.0,
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_verls_loop_plays_the_task(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    texts, replies, rewards, perfect = CONVERSATIONS[name]
    output, writer = run_loop(tokenizer, texts)
    ids: list[int] = []
    mask: list[int] = []
    prompt = prompt_ids(tokenizer, CHAIN)
    for turn, text in enumerate(texts):
        # As the demonstrations have it.
        assert writer.asked[turn] == prompt + ids
        response = written(tokenizer, text)
        reply = reply_ids(tokenizer, replies[turn]) if turn < len(replies) else []
        ids += response + reply
        # The reply is not the model's own.
        mask += [1] * len(response) + [0] * len(reply)
    assert (output.prompt_ids, output.response_ids, output.response_mask) == (
        prompt,
        ids,
        mask,
    )
    extra = {"problem": CHAIN.text, "num_turns": output.num_turns, **output.extra_fields}
    text = tokenizer.decode(output.response_ids, skip_special_tokens=True)
    expected = {"score": sum(rewards), "acc": perfect, "turn_rewards": rewards}
    assert compute_score("", text, "9", extra) == expected


def test_the_record_is_that_of_todays_settings_and_of_these_weights() -> None:
    record = json.loads((AGENT_FOLDER / RECORD).read_text())
    assert record["settings"] == asdict(AgentSettings())
    assert record["sha256"] == weights_digest(AGENT_FOLDER)
    model, tokenizer = load_agent()
    assert model.config.vocab_size == len(tokenizer)
    for value in model.state_dict().values():
        assert torch.equal(value, value.bfloat16().float())
    chosen = problems("validation", 64, seed=0)
    # The model can do the task, and seldom does it when it samples.
    greedy = measure(model, tokenizer, chosen, temperature=0.0)
    sampled = measure(model, tokenizer, chosen)
    assert greedy["perfect"] > 0.5 and sampled["perfect"] < 0.2, "it can, and seldom does"
