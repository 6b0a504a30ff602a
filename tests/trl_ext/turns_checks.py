"""Credit by turn in TRL, with tools and environments; run by test_trl.py with TRL on the path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

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

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self.__dict__.setdefault("seen", []).append(dict(inputs))
        return super()._compute_loss(model, inputs)


def expected(scripts: Sequence[Script] = RESPONSES) -> dict[str, list[float]]:
    """The advantages of a response's turns, by its first turn."""
    groups = [place // world.GENERATIONS for place in range(len(scripts))]
    rewards = [script.rewards for script in scripts]
    advantages = turn_advantages(rewards, [script.outcome for script in scripts], groups)
    return {script.turns[0]: of_turns for script, of_turns in zip(scripts, advantages, strict=True)}


def assert_turns(ids: Any, mask: Any, values: Any, advantages: dict[str, list[float]]) -> Script:
    """That the turns of a response are the script's, and each has its advantage on all of its tokens, 0 between."""
    ids, mask, values = (np.array(part) for part in (ids, mask, values))
    script = world.script_of(ids[: len(mask)].tolist(), RESPONSES)
    turns = runs(mask)
    assert [ids[start:end].tolist() for start, end in turns] == script.tokens and not values[
        mask == 0
    ].any()
    for (start, end), advantage in zip(turns, advantages[script.turns[0]], strict=True):
        np.testing.assert_allclose(values[start:end], advantage, rtol=1e-5, atol=1e-6)
    return script


def assert_batches(batches: Sequence[dict[str, Any]], advantages: dict[str, list[float]]) -> None:
    scripts = []
    for batch in batches:
        rows = (
            batch["completion_ids"],
            batch["completion_mask"] * batch["tool_mask"],
            batch["advantages"],
        )
        scripts += [assert_turns(*row, advantages) for row in zip(*rows, strict=True)]
    assert len({script.turns[0] for script in scripts}) == len(scripts) == len(advantages)


def test_rewards_by_turn_and_their_way_into_dump_receipt_and_report(tmp_path: Path) -> None:
    """What an environment earns by calls, also in parallel, and by calls that fail before it or in it. Two iterations
    in micro-batches; a tool's tokens receive nothing."""
    weights = {**ENVIRONMENT, "token_dump": {"folder": tmp_path / "tokens", "responses": None}}
    options = talks() | {"loss_type": "bnpo", "num_iterations": 2, "max_steps": 2}
    options["per_device_train_batch_size"] = 2
    options["gradient_accumulation_steps"] = 4
    advantages = expected()
    assert_batches(trained(tmp_path, Watched, weights=weights, **options).seen[:4], advantages)
    assert mismatches(tmp_path / "tokens") == [[]]
    for row, script in zip(read_dump(tmp_path / "tokens"), RESPONSES, strict=True):
        assert assert_turns(row.token_ids_T, row.mask_T, row.advantage_T, advantages) is script
        by_turn = [sum(calls) or None for calls in row.labels["turn_rewards"]]
        assert (
            by_turn == [reward or None for reward in script.rewards]
            and row.reward == script.outcome
        )
        assert len(row.labels.get("tool", [])) == len(script.turns) - 1
        assert not row.received_T[~row.mask_T.astype(bool)].any() and list(row.updates) == [0, 1]
        np.testing.assert_allclose(row.by_update_KT[0], row.advantage_T, rtol=1e-3, atol=1e-5)
    assert report.main([str(tmp_path)]) == 0 and receipt([str(tmp_path)]) == 0


@pytest.mark.parametrize("column", [False, True], ids=["tools", "an environment"])
def test_what_a_reward_function_logs_comes_first(tmp_path: Path, column: bool) -> None:
    """As the page's ``judge.py``; an environment's own reward counts, too."""
    weights = {"token_weights": "turn_rloo", "token_weight_options": {"align": "turns"}}
    weights |= {"environment_factory": Guess} if column else {"tools": [world.GAME.guess]}
    failing = ("null", "no_such_tool")
    judged = [
        [-0.1 - 0.5 * sum(map(turn.count, failing)) for turn in script.turns]
        for script in RESPONSES
    ]
    outcomes = [script.outcome * (1 + column) for script in RESPONSES]
    scripts = [
        Script(script.turns, *rewards)
        for script, *rewards in zip(RESPONSES, outcomes, judged, strict=True)
    ]
    options = talks() | {"reward": judge, "weights": weights, "log_completions": True}
    trainer = trained(tmp_path, Watched, **options)
    assert_batches(trainer.seen, expected(scripts))


def test_the_outcome_is_trls_weighted_sum(tmp_path: Path) -> None:
    """Of reward functions and the environment's own, with what the environment earns after the last turn; an
    environment that keeps its list counts from its length."""

    class Rewarding(Guess):
        def reset(self, number: int, **row: Any) -> None:
            rewards = getattr(self, "tool_rewards", [])
            super().reset(number)
            self.tool_rewards = rewards

        def get_reward(self) -> float:
            self.tool_rewards.append(0.125)
            return 0.5

    options = talks() | {
        "weights": {**ENVIRONMENT, "environment_factory": Rewarding},
        "reward": world.outcomes(),
    }
    later = [(script, [*script.rewards[:-1], script.rewards[-1] + 0.125]) for script in RESPONSES]
    advantages = expected(
        [Script(script.turns, 2 * script.outcome + 0.5, rewards) for script, rewards in later]
    )
    for batch in trained(tmp_path, Watched, reward_weights=[2.0], max_steps=2, **options).seen:
        assert_batches([batch], advantages)


@pytest.mark.parametrize(
    ("limit", "masked"), [(150, False), (200, True), (250, False), (300, True)]
)
def test_conversations_that_end_at_the_limit(tmp_path: Path, limit: int, masked: bool) -> None:
    """Within a turn, or at a tool's answer, which TRL drops: the reward of its call is with the last turn there is.
    ``mask_truncated_completions`` takes a response out of the loss, and not from its siblings."""
    for name, options in {
        "whole": {},
        "cut": {"max_completion_length": limit, "mask_truncated_completions": masked},
    }.items():
        weights = {**ENVIRONMENT, "token_dump": {"folder": tmp_path / name, "responses": None}}
        trained(tmp_path, weights=weights, **talks() | options)
    scripts = []
    parts = []
    rows = list(read_dump(tmp_path / "cut"))
    for row, complete, script in zip(rows, read_dump(tmp_path / "whole"), RESPONSES, strict=True):
        written = complete.mask_T.astype(bool)[: len(row)]
        turns = runs(written)
        last = len(turns) - 1
        end = turns[-1][1]
        whole_turn = row.token_ids_T[end - 1] == script.tokens[last][-1]
        assert list(row.token_ids_T) == list(complete.token_ids_T[: len(row)])
        assert row.truncated == (end < len(row) or not whole_turn)
        rewards = [*script.rewards[:last], script.rewards[last] if whole_turn else 0.0]
        scripts.append(Script(script.turns[: len(turns)], row.reward, rewards))
        parts.append((written, turns, not (masked and row.truncated)))
    assert len({row.truncated for row in rows}) == 2
    advantages = expected(scripts)
    for row, script, (written, turns, trains) in zip(rows, scripts, parts, strict=True):
        assert row.mask_T.astype(bool).tolist() == (written & trains).tolist()
        for (start, end), advantage in zip(turns, advantages[script.turns[0]], strict=True):
            np.testing.assert_allclose(
                row.advantage_T[start:end], advantage * trains, rtol=1e-5, atol=1e-6
            )


def test_fields_that_are_refused(tmp_path: Path) -> None:
    """Nowhere, and not one value a response."""

    def twice(**named: Any) -> list[float]:
        return judge(**named) and judge(**named)

    for name, reward in (("elsewhere", judge), ("tool_rewards", twice)):
        weights = {"token_weights": "turn_rloo", "tools": [world.GAME.guess]}
        weights["token_weight_options"] = {"align": "turns", "rewards": name}
        with pytest.raises(ValueError, match=name):
            trained(tmp_path, **talks() | {"reward": reward, "weights": weights})
