"""Credit by turn in TRL, with tools and environments; run by test_trl.py with TRL on the path."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from grail_advantage import report
from grail_advantage.data import runs
from grail_advantage.dump import read_dump
from grail_advantage.methods.turn_lists import turn_advantages
from grail_advantage.trl_ext import TokenWeightGRPOTrainer
from grail_advantage.view.receipt import main as receipt
from tests.trl_ext import world
from tests.trl_ext.world import RESPONSES, Guess, Script, judge, mismatches, talks, trained

ENVIRONMENT = {"token_weights": "turn_rloo", "environment_factory": Guess}


class Watched(TokenWeightGRPOTrainer):
    """Keeps what the loss is given."""

    def _compute_loss(self, model, inputs):
        self.__dict__.setdefault("seen", []).append(dict(inputs))
        return super()._compute_loss(model, inputs)


def expected(scripts: Sequence[Script] = RESPONSES) -> dict[str, list[float]]:
    """The advantages of a response's turns, by its first turn."""
    groups = [place // world.GENERATIONS for place in range(len(scripts))]
    rewards = [script.rewards for script in scripts]
    advantages = turn_advantages(rewards, [script.outcome for script in scripts], groups)
    return {
        script.turns[0]: turns for script, turns in zip(scripts, advantages, strict=True)
    }


def by_turn(mask_T: np.ndarray, advantages: Sequence[float]) -> np.ndarray:
    """Each turn's advantage on all of its tokens; 0 between, where the tools' tokens are."""
    values_T = np.zeros(len(mask_T))
    for (start, end), advantage in zip(runs(mask_T), advantages, strict=True):
        values_T[start:end] = advantage
    return values_T


def assert_turns(ids, mask, values, advantages: dict[str, list[float]]) -> Script:
    """That the turns of a response are the script's, and each has its advantage."""
    ids, mask, values = (np.array(part) for part in (ids, mask, values))
    script = world.script_of(ids[: len(mask)].tolist(), RESPONSES)
    assert [ids[start:end].tolist() for start, end in runs(mask)] == script.tokens
    expected_T = by_turn(mask, advantages[script.turns[0]])
    assert_allclose(values, expected_T, rtol=1e-5, atol=1e-6)
    return script


def assert_batches(batches: Sequence[dict[str, Any]], advantages: dict[str, list[float]]):
    """That all responses are there, each in one batch, and each turn has its advantage."""
    scripts = []
    for batch in batches:
        # TRL's two masks: no padding, and no tool.
        mask_BT = batch["completion_mask"] * batch["tool_mask"]
        for row in zip(batch["completion_ids"], mask_BT, batch["advantages"], strict=True):
            scripts.append(assert_turns(*row, advantages).turns[0])
    assert sorted(scripts) == sorted(advantages)


def test_rewards_by_turn_and_their_way_into_dump_receipt_and_report(tmp_path):
    """What an environment earns by calls, also in parallel, and by calls that fail before it or in it. Two iterations
    in micro-batches; a tool's tokens receive nothing."""
    settings = {
        "loss_type": "bnpo",
        "num_iterations": 2,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "token_dump": tmp_path / "tokens",
    }
    trainer = trained(tmp_path, Watched, **talks() | ENVIRONMENT | settings)
    advantages = expected()
    # The first iteration: four micro-batches of two responses.
    assert_batches(trainer.seen[:4], advantages)
    assert mismatches(tmp_path / "tokens") == [[]]
    for row, script in zip(read_dump(tmp_path / "tokens"), RESPONSES, strict=True):
        assert (
            assert_turns(row.token_ids_T, row.mask_T, row.advantage_T, advantages) is script
        )
        turn_rewards = [sum(calls) for calls in row.labels["turn_rewards"]]
        assert (turn_rewards, row.reward) == (list(script.rewards), script.outcome)
        # A tool answers after every turn but the last.
        assert len(row.labels.get("tool", [])) == len(script.turns) - 1
        assert not row.received_T[~row.mask_T].any()
        assert len(row.updates) == 2
        assert_allclose(row.by_update_KT[0], row.advantage_T, rtol=1e-3, atol=1e-5)
    assert report.main([str(tmp_path)]) == 0 and receipt([str(tmp_path)]) == 0


@pytest.mark.parametrize(
    "environment",
    [{"tools": [world.GAME.guess]}, {"environment_factory": Guess}],
    ids=["tools", "an environment"],
)
def test_what_a_reward_function_logs_comes_first(tmp_path, environment):
    """As the page's ``judge.py``; an environment's own reward counts, too."""
    options = {"token_weights": "turn_rloo", "token_weight_options": {"align": "turns"}}
    scripts = []
    for script in RESPONSES:
        failures = [
            turn.count("null") + turn.count("no_such_tool") for turn in script.turns
        ]
        # The judge and the environment each give the outcome.
        outcome = script.outcome * (1 + ("environment_factory" in environment))
        scripts.append(
            Script(script.turns, outcome, [-0.1 - 0.5 * count for count in failures])
        )
    settings = {"reward_funcs": judge, "log_completions": True}
    trainer = trained(tmp_path, Watched, **talks() | options | environment | settings)
    assert_batches(trainer.seen, expected(scripts))


def test_the_outcome_is_trls_weighted_sum(tmp_path):
    """Of reward functions and the environment's own, with what the environment earns after the last turn; an
    environment that keeps its list counts from its length."""

    class Rewarding(Guess):
        def reset(self, number, **row):
            # A list that grows over the episodes.
            rewards = getattr(self, "tool_rewards", [])
            super().reset(number)
            self.tool_rewards = rewards

        def get_reward(self):
            self.tool_rewards.append(0.125)
            return 0.5

    scripts = []
    for script in RESPONSES:
        # get_reward() appends 1/8 after the last turn, and gives 1/2.
        rewards = [*script.rewards[:-1], script.rewards[-1] + 0.125]
        scripts.append(Script(script.turns, 2 * script.outcome + 0.5, rewards))
    options = {
        "environment_factory": Rewarding,
        "reward_funcs": world.outcomes(),
        "reward_weights": [2.0],
        "max_steps": 2,
    }
    for batch in trained(tmp_path, Watched, **talks() | ENVIRONMENT | options).seen:
        assert_batches([batch], expected(scripts))


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """The rows of a dump of conversations that no limit ends."""
    folder = tmp_path_factory.mktemp("complete")
    trained(folder, token_dump=folder, **talks() | ENVIRONMENT)
    return list(read_dump(folder))


@pytest.mark.parametrize(
    ("limit", "masked"), [(150, False), (200, True), (250, False), (300, True)]
)
def test_conversations_that_end_at_the_limit(tmp_path, complete, limit, masked):
    """Within a turn, or at a tool's answer, which TRL drops: the reward of its call is with the last turn there is.
    ``mask_truncated_completions`` takes a response out of the loss, and not from its siblings."""
    # So long that some conversations end, and some do not.
    limits = {"max_completion_length": limit, "mask_truncated_completions": masked}
    trained(tmp_path, token_dump=tmp_path, **talks() | ENVIRONMENT | limits)
    rows = list(read_dump(tmp_path))
    scripts = []
    written = []
    for row, full, script in zip(rows, complete, RESPONSES, strict=True):
        mask_T = full.mask_T[: len(row)]
        turns = runs(mask_T)
        last = len(turns) - 1
        # The last turn is whole where its end token is there.
        end = turns[last][1]
        is_whole_turn = row.token_ids_T[end - 1] == script.tokens[last][-1]
        assert list(row.token_ids_T) == list(full.token_ids_T[: len(row)])
        assert row.truncated == (end < len(row) or not is_whole_turn)
        # A call that was not made has no reward.
        rewards = [*script.rewards[:last], script.rewards[last] * is_whole_turn]
        scripts.append(Script(script.turns[: len(turns)], row.reward, rewards))
        written.append(mask_T)
    assert len({row.truncated for row in rows}) == 2
    advantages = expected(scripts)
    for row, script, mask_T in zip(rows, scripts, written, strict=True):
        trains = not (masked and row.truncated)
        assert row.mask_T.tolist() == (mask_T & trains).tolist()
        expected_T = by_turn(mask_T, advantages[script.turns[0]]) * trains
        assert_allclose(row.advantage_T, expected_T, rtol=1e-5, atol=1e-6)


def test_fields_that_are_refused(tmp_path):
    """Nowhere, and not one value a response."""

    # Two values a response.
    def twice(**named):
        return judge(**named) and judge(**named)

    for name, reward in (("elsewhere", judge), ("tool_rewards", twice)):
        options = {
            "token_weights": "turn_rloo",
            "token_weight_options": {"align": "turns", "rewards": name},
            "tools": [world.GAME.guess],
            "reward_funcs": reward,
        }
        with pytest.raises(ValueError, match=name):
            trained(tmp_path, **talks() | options)
