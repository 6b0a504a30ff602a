"""The agent task: its tool and rewards by hand, verl's own tool agent loop with the tiny tokenizer, and its model."""

import asyncio
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.tool_registry import load_all_tools
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from tests.composed import verls_on_cpu
from verl_cpu.tiny.agent import MAX_TURNS, call_text, check, compute_score
from verl_cpu.tiny.make_models import measure
from verl_cpu.tiny.sampling import prompt_ids
from verl_cpu.tiny.shipped import (
    AGENT_FOLDER,
    build_agent_tokenizer,
    load_agent,
    reply_ids,
)
from verl_cpu.tiny.task import Problem, problems

CHAIN = Problem.parse("7+5-3")
FIRST = call_text("7+5=12")
SECOND = call_text("12-3=9")
BOX = "\\boxed{9}"


@pytest.fixture(scope="module")
def tokenizer():
    return build_agent_tokenizer()


def test_calls_of_the_tool_that_are_nearly_right():
    # A step too early takes up the first one all the same.
    assert check(CHAIN, 0, "12-3=9") == ("12", -1.0)
    assert check(CHAIN, 1, "12-3=09") == check(CHAIN, 1, "11-3=8") == ("9", -1.0)


class Writer:
    """A rollout server's client that writes given turns."""

    def __init__(self, turns: list[list[int]]):
        self.turns = iter(turns)
        self.asked = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_) -> TokenOutput:
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
    turns = "actor_rollout_ref.rollout.multi_turn"
    config = verls_on_cpu(
        "data.max_prompt_length=32",
        f"data.max_response_length={length}",
        f"{turns}.format=hermes",
        f"{turns}.max_assistant_turns={MAX_TURNS}",
        f"{turns}.max_parallel_calls={calls}",
    )
    writer = Writer([written(tokenizer, text) for text in texts])
    tools = load_all_tools(str(AGENT_FOLDER.with_name("agent_tools.yaml")), None)

    async def run():
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
def test_verls_loop_plays_the_task(tokenizer, name):
    texts, replies, rewards, perfect = CONVERSATIONS[name]
    output, writer = run_loop(tokenizer, texts)
    ids = []
    mask = []
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


def test_the_model_can_do_the_task_and_seldom_does_when_it_samples():
    chosen = problems("validation", 64, seed=0)
    greedy = measure(*load_agent(), chosen, temperature=0.0)
    sampled = measure(*load_agent(), chosen)
    assert greedy["perfect"] > 0.5
    assert sampled["perfect"] < 0.2
