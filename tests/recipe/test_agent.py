"""The agent task: its tool and rewards by hand, verl's own tool agent loop with the tiny tokenizer, and the model for it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.tool_registry import load_all_tools
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from recipe.tiny import agent_model
from recipe.tiny.agent import MAX_TURNS, call_text, called_step, check, compute_score, turn_rewards
from recipe.tiny.agent_model import REPLY_END, REPLY_START, build_agent_tokenizer, load_agent
from recipe.tiny.model import TURN_END, TURN_START
from recipe.tiny.prepare import default_settings, prepare
from recipe.tiny.sampling import prompt_ids, sample
from recipe.tiny.shipped import weights_digest
from recipe.tiny.task import Problem, boxed_answer, problems
from tests.composed import compose

CHAIN = Problem.parse("7+5-3")
FIRST, SECOND, BOX = call_text("7+5=12"), call_text("12-3=9"), "\\boxed{9}"


def reply_ids(tokenizer: PreTrainedTokenizerFast, reply: str) -> list[int]:
    """The tokens between two turns of the model, as verl writes them after a turn's end token."""
    text = f"\n{TURN_START}user\n{REPLY_START}{reply}{REPLY_END}{TURN_END}\n{TURN_START}assistant\n"
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_agent_tokenizer()


CHECKED_BY_HAND = [
    (0, "7+5=12", ("12", 1.0)),
    (0, "7+5=11", ("12", -1.0)),
    (0, "12-3=9", ("12", -1.0)),  # a step too early takes up the first one all the same
    (1, "12-3=9", ("9", 1.0)),
    (1, "11-3=8", ("9", -1.0)),  # does not start from the tool's reply
    (1, "12-3=09", ("9", -1.0)),
    (2, "9+1=10", ("end", -1.0)),
    (0, "", ("12", -1.0)),
]


@pytest.mark.parametrize(("taken", "step", "expected"), CHECKED_BY_HAND)
def test_the_tool_by_hand(taken: int, step: str, expected: tuple[str, float]) -> None:
    assert check(CHAIN, taken, step) == expected


def test_rewards_by_hand() -> None:
    assert turn_rewards([1.0, -1.0], 3, True) == [1.0, -1.0, 1.0]
    assert turn_rewards([1.0, -1.0], 3, False) == [1.0, -1.0, 0.0]
    assert turn_rewards([], 1, True) == [1.0]
    assert turn_rewards([1.0, 1.0], 2, False) == [1.0, 1.0]  # the call that reached the longest length

    def score(text: str, calls: list[float]) -> tuple[float, float, list[float]]:
        extra = {"problem": CHAIN.text, "tool_rewards": calls, "num_turns": 2 * (len(calls) + 1)}
        result = compute_score("", text, "9", extra)
        return result["score"], result["acc"], result["turn_rewards"]

    assert score(FIRST + SECOND + BOX, [1.0, 1.0]) == (3.0, 1.0, [1.0, 1.0, 1.0])
    assert score(FIRST + SECOND + BOX, [1.0, -1.0]) == (1.0, 0.0, [1.0, -1.0, 1.0])
    assert score(FIRST + SECOND + "\\boxed{8}", [1.0, 1.0]) == (2.0, 0.0, [1.0, 1.0, 0.0])
    assert score(BOX, []) == (1.0, 0.0, [1.0])  # guessed
    assert score(FIRST + SECOND + SECOND + BOX, [1.0, 1.0, -1.0]) == (2.0, 0.0, [1.0, 1.0, -1.0, 1.0])


def test_called_step() -> None:
    assert called_step(FIRST) == "7+5=12" and called_step(BOX) is None
    assert called_step("<tool_call>{not json}</tool_call>") is None
    assert called_step('<tool_call>{"name": "check"}</tool_call>') is None
    assert called_step("<tool_call>7</tool_call>") is None


# ------------------------------------------------------------------------------------------------------------- verl's own loop


class Writer:
    """A rollout server's client that writes given turns."""

    def __init__(self, turns: list[list[int]]) -> None:
        self.turns = iter(turns)
        self.asked: list[list[int]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        self.asked.append(list(prompt_ids))
        return TokenOutput(token_ids=next(self.turns))


def run_loop(tokenizer: PreTrainedTokenizerFast, texts: list[str], length: int = 184) -> tuple[Any, Writer]:
    """What verl's loop makes of a model that writes these turns, each with an end token."""
    rollout = "actor_rollout_ref.rollout"
    overrides = [
        f"{rollout}.multi_turn.format=hermes",
        f"{rollout}.multi_turn.max_assistant_turns={MAX_TURNS}",
        "data.max_prompt_length=32",
        f"data.max_response_length={length}",
    ]
    config = compose("cpu_trainer", overrides)
    tools = load_all_tools(str(agent_model.FOLDER.parent / "agent_tools.yaml"), None)
    writer = Writer([[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in texts])

    async def run() -> Any:
        loop = ToolAgentLoop(
            trainer_config=DictConfigWrap(config),
            server_manager=writer,
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(config.data),
            tools=ToolListWrap(tools),
            hf_model_type="qwen3",
        )
        return await loop.run({}, raw_prompt=[{"role": "user", "content": CHAIN.text}])

    return asyncio.run(run()), writer


WRONG = call_text("12-3=8")
CONVERSATIONS = {
    "perfect": ([FIRST, SECOND, BOX], ["12", "9"], [1.0, 1.0, 1.0], 1.0),
    "a wrong step": ([FIRST, WRONG, BOX], ["12", "9"], [1.0, -1.0, 1.0], 0.0),
    "stops early": ([FIRST, "\\boxed{12}"], ["12"], [1.0, 0.0], 0.0),
    "a guess": ([BOX], [], [1.0], 0.0),
    "a call too many": ([FIRST, SECOND, SECOND, BOX], ["12", "9", "end"], [1.0, 1.0, -1.0, 1.0], 0.0),
    "no JSON": ([FIRST, "<tool_call>{12-3}</tool_call>"], ["12"], [1.0, 0.0], 0.0),
    "never stops": ([FIRST, SECOND, *[SECOND] * 6], ["12", "9", *["end"] * 5], [1.0, 1.0, *[-1.0] * 5, 0.0], 0.0),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_verls_loop_plays_the_task(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    texts, replies, rewards, perfect = CONVERSATIONS[name]
    output, writer = run_loop(tokenizer, texts)
    ids: list[int] = []
    mask: list[int] = []
    for turn, text in enumerate(texts):
        assert writer.asked[turn] == prompt_ids(tokenizer, CHAIN) + ids  # as the demonstrations have it
        own = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        tools = reply_ids(tokenizer, replies[turn]) if turn < len(replies) else []
        ids, mask = ids + own + tools, mask + [1] * len(own) + [0] * len(tools)
    assert output.prompt_ids == prompt_ids(tokenizer, CHAIN)
    assert (output.response_ids, output.response_mask) == (ids, mask)

    extra = {"problem": CHAIN.text, "num_turns": output.num_turns, **output.extra_fields}
    score = compute_score("", tokenizer.decode(output.response_ids, skip_special_tokens=True), "9", extra)
    assert score == {"score": sum(rewards), "acc": perfect, "turn_rewards": rewards}


def test_a_reply_that_does_not_fit_ends_the_conversation(tokenizer: PreTrainedTokenizerFast) -> None:
    output, _ = run_loop(tokenizer, [FIRST], length=len(tokenizer.encode(FIRST)) + 3)
    assert all(output.response_mask) and output.extra_fields["tool_rewards"] == [1.0]
    extra = {"problem": CHAIN.text, "num_turns": output.num_turns, **output.extra_fields}
    assert compute_score("", FIRST, "9", extra)["turn_rewards"] == [1.0]


def test_the_longest_conversation_fits(tokenizer: PreTrainedTokenizerFast) -> None:
    """Six steps, a call too many and the answer, with two digits everywhere; the model's positions hold it with its prompt."""
    texts = [call_text("10+9=19")] * (MAX_TURNS - 1) + ["\\boxed{19}"]
    tokens = sum(len(tokenizer.encode(text, add_special_tokens=False)) + 1 for text in texts)
    tokens += sum(len(reply_ids(tokenizer, reply)) for reply in ["19"] * 6 + ["end"])
    assert tokens <= 184 and tokenizer.model_max_length >= 184 + 32


# ---------------------------------------------------------------------------------------------------- the SFT-initialised model


def test_the_prepared_folder_holds_model_template_and_problems(tmp_path: Path) -> None:
    settings = replace(default_settings("agent", 3), train_size=8, validation_size=4)
    assert prepare(tmp_path, settings, report=lambda _: None) and not prepare(tmp_path, settings, report=lambda _: None)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.encode(FIRST) == build_agent_tokenizer().encode(FIRST)
    assert tokenizer.decode(tokenizer.encode(FIRST), skip_special_tokens=True) == FIRST
    messages = [{"role": "user", "content": "7+5-3"}, {"role": "tool", "content": "12"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False).endswith(
        "<|im_start|>user\n<tool_response>12</tool_response><|im_end|>\n"
    )
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert [row["extra_info"]["problem"] for row in rows] == [problem.text for problem in problems("train", 8, seed=3)]
    with pytest.raises(ValueError, match=r"--warm-up.*leave it out"):
        default_settings("agent", 0, anew=True)


def play(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    chosen: list[Problem],
    *,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[list[float]]:
    """Each problem's rewards by turn, from conversations with transformers' ``generate``. Temperature 0 is greedy."""
    contexts = [prompt_ids(tokenizer, problem) for problem in chosen]
    rewards: list[list[float]] = [[] for _ in chosen]
    active = list(range(len(chosen)))
    for turn in range(MAX_TURNS):
        prompts = [contexts[row] for row in active]
        options = {"temperature": temperature, "max_new_tokens": 16, "seed": seed + turn}
        responses = sample(model, tokenizer, prompts, **options)
        going_on = []
        for row, ids in zip(active, responses, strict=True):
            problem, text = chosen[row], tokenizer.decode(ids)
            step = called_step(text)
            if step is None or turn == MAX_TURNS - 1:
                rewards[row] = turn_rewards(rewards[row], turn + 1, boxed_answer(text) == str(problem.answer))
                continue
            reply, reward = check(problem, turn, step)
            rewards[row].append(reward)
            contexts[row] += ids + reply_ids(tokenizer, reply)
            going_on.append(row)
        active = going_on
        if not active:
            break
    return rewards


def perfect(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, chosen: list[Problem], **options: float
) -> float:
    """Share of conversations without a mistake."""
    rewards = play(model, tokenizer, chosen, **options)
    return sum(row == [1.0] * (len(each.steps) + 1) for row, each in zip(rewards, chosen, strict=True)) / len(chosen)


def test_the_record_is_that_of_these_weights() -> None:
    record = json.loads((agent_model.FOLDER / "record.json").read_text())
    assert record["sha256"] == weights_digest(agent_model.FOLDER)
    model, tokenizer = load_agent()
    assert model.config.vocab_size == len(tokenizer)
    for value in model.state_dict().values():
        assert torch.equal(value, value.bfloat16().float())
    chosen = problems("validation", 64, seed=0)
    greedy, sampled = perfect(model, tokenizer, chosen, temperature=0.0), perfect(model, tokenizer, chosen)
    assert greedy > 0.5 and sampled < 0.2, "it can, and seldom does"
