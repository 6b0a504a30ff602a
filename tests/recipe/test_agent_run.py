"""One step of the agent example by verl's own loop and engine: turns, their rewards and their advantages by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grail_advantage import turn_advantages, turns_to_tokens
from grail_advantage.data import runs
from grail_advantage.dump import DumpRow
from grail_advantage.view.page import write_report
from tests.verl_ext import whole_run
from verl_cpu.tiny.agent import called_step, check
from verl_cpu.tiny.prepare import prepare
from verl_cpu.tiny.shipped import AGENT_FOLDER, build_agent_tokenizer, reply_ids
from verl_cpu.tiny.task import Problem, boxed_answer

PROMPTS, RESPONSES = 4, 4


ROLLOUT = "actor_rollout_ref.rollout"


def one_step(folder: Path, *more: str) -> whole_run.WholeRun:
    prepare(folder / "agent", "agent")
    rollout = ROLLOUT
    overrides = [
        "algorithm.adv_estimator=turn_rloo",
        f"data.train_files={folder / 'agent' / 'train.parquet'}",
        f"data.val_files={folder / 'agent' / 'validation.parquet'}",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=32",
        "data.max_response_length=184",
        f"actor_rollout_ref.model.path={folder / 'agent' / 'model'}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024",
        f"{rollout}.n={RESPONSES}",
        f"{rollout}.log_prob_max_token_len_per_gpu=1024",
        f"{rollout}.multi_turn.enable=True",
        f"{rollout}.multi_turn.format=hermes",
        f"{rollout}.multi_turn.tool_config_path={AGENT_FOLDER.with_name('agent_tools.yaml')}",
        f"{rollout}.multi_turn.max_assistant_turns=8",
        "trainer.total_training_steps=1",
        *more,
    ]
    return whole_run.run(folder, overrides, rows=4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> whole_run.WholeRun:
    return one_step(
        tmp_path_factory.mktemp("agent"),
        "algorithm.turn_rloo.rewards=turn_rewards",
        "algorithm.turn_rloo.align=turns",
        "algorithm.turn_rloo.outcome=False",
        f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
        "reward.custom_reward_function.path=pkg://verl_cpu.tiny.agent",
    )


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> whole_run.WholeRun:
    """Two calls in every turn, and two responses in every conversation of two turns or more."""
    folder = tmp_path_factory.mktemp("compressed")
    loops = folder / "loops.yaml"
    loops.write_text("- {name: compressing, _target_: tests.verl_ext.compressing_agent.CompressingAgent}\n")
    return one_step(
        folder,
        "algorithm.turn_rloo.rewards=call_rewards",
        f"{ROLLOUT}.multi_turn.max_parallel_calls=2",
        f"{ROLLOUT}.agent.agent_loop_config_path={loops}",
        f"{ROLLOUT}.agent.default_agent_loop=compressing",
        "reward.custom_reward_function.path=pkg://tests.verl_ext.compressing_agent",
    )


def played_again(row: DumpRow) -> tuple[list[int], list[float]]:
    """The turn of each token, -1 for the tool's, and the turns' rewards, from the tokens alone."""
    tokenizer = build_agent_tokenizer()
    problem = Problem.parse(re.search(r"[\d+-]{3,}", row.prompt)[0])
    ids, at = row.token_ids_T.tolist(), 0
    turns: list[int] = []
    rewards: list[float] = []
    while True:
        end = ids.index(tokenizer.eos_token_id, at) + 1
        turns += [len(rewards)] * (end - at)
        text = tokenizer.decode(ids[at:end])
        step = called_step(text)
        if step is None or end == len(ids):
            assert end == len(ids)
            return turns, [*rewards, float(boxed_answer(text) == str(problem.answer))]
        reply, reward = check(problem, len(rewards), step)
        between = reply_ids(tokenizer, reply)
        at = end + len(between)
        assert ids[end:at] == between
        turns += [-1] * len(between)
        rewards.append(reward)


@pytest.mark.nightly
def test_turns_rewards_and_advantages(run: whole_run.WholeRun) -> None:
    rows = run.dump(1)
    assert len(rows) == PROMPTS * RESPONSES and len({row.group for row in rows}) == PROMPTS
    played = [played_again(row) for row in rows]
    assert len({len(rewards) for _, rewards in played}) > 1, "conversations of different lengths"
    for row, (turns, rewards) in zip(rows, played, strict=True):
        assert row.labels["turn_rewards"] == rewards and row.reward == sum(rewards)
        assert row.mask_T.tolist() == [turn >= 0 for turn in turns]
        siblings = [
            of for other, (_, of) in zip(rows, played, strict=True) if other.group == row.group and other is not row
        ]
        expected = []
        for turn in range(len(rewards)):
            there = [sum(of[turn:]) for of in siblings if len(of) > turn] or [sum(of) for of in siblings]
            expected.append(sum(rewards[turn:]) - sum(there) / len(there))
        assert row.advantage_T == pytest.approx([expected[turn] if turn >= 0 else 0.0 for turn in turns], abs=1e-5)
    assert run.metrics(1)["critic/score/mean"] == pytest.approx(sum(row.reward for row in rows) / len(rows))
    assert write_report(run.folder / "dump").stat().st_size > 0


@pytest.mark.nightly
def test_parallel_calls_and_conversations_of_two_responses(compressed: whole_run.WholeRun) -> None:
    """Against plain lists; the answer's reward, which verl copies to both responses, counts once."""
    rows = sorted(compressed.dump(1), key=lambda row: row.key)
    sessions = [row.key.rsplit("_", 1)[0] for row in rows]
    assert len(set(sessions)) == PROMPTS * RESPONSES and len(rows) > len(set(sessions))
    masks = [row.mask_T.astype(int).tolist() for row in rows]
    rewards = []
    for row, mask in zip(rows, masks, strict=True):
        of_calls = row.labels.get("turn_rewards", [])
        assert all(len(of_turn) == 2 for of_turn in of_calls)
        rewards.append([*of_calls, *[None] * (len(runs(mask)) - len(of_calls))])
    expected = turn_advantages(rewards, [row.reward for row in rows], [row.group for row in rows], sessions=sessions)
    assert len({value for of_row in expected for value in of_row}) > 3
    for row, mask, of_row in zip(rows, masks, expected, strict=True):
        assert row.advantage_T == pytest.approx(turns_to_tokens(of_row, mask), abs=1e-5)
    assert write_report(compressed.folder / "dump").stat().st_size > 0
