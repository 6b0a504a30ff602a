"""Credit by turn in TRL, with tools and environments; run by test_trl.py with TRL on the path."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grail_advantage import report
from grail_advantage.data import runs
from grail_advantage.dump import read_dump
from grail_advantage.trl_ext import TokenWeightGRPOTrainer
from grail_advantage.view.receipt import main as receipt
from tests import documentation
from tests.trl_ext import world
from tests.trl_ext.world import RESPONSES, Keypad, Script, mismatches, new_model, parameters, script_of, talks, trained

guess = functools.partial(world.calls, name="guess", argument="value")
GROUP_SIZE = 4
ENVIRONMENT = {"token_weights": "turn_rloo", "environment_factory": Keypad}


class Watched(TokenWeightGRPOTrainer):
    """Keeps what the loss is given."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self.__dict__.setdefault("seen", []).append(dict(inputs))
        return super()._compute_loss(model, inputs)


def press() -> Any:
    """As a plain function."""
    keypad = Keypad()
    keypad.reset()
    return keypad.press


def judged(completions: list[Any], completion_ids: list[list[int]], log_extra: Any, **_: Any) -> list[float]:
    """A reward function that judges each turn by the tool's messages after it."""
    of_responses: list[list[float]] = [[] for _ in completions]
    for rewards, completion in zip(of_responses, completions, strict=True):
        for message in completion:
            if message["role"] == "assistant":
                rewards.append(0.0)
            elif "is worth" in message["content"]:
                rewards[-1] += float(message["content"].split()[-1])
    log_extra("judged", of_responses)
    return world.outcomes()(completion_ids)


def turn_rloo(place: int, group: Sequence[Script]) -> list[float]:
    """The advantages of a response's turns: its return less the mean of the others' that reached as far."""

    def returns(script: Script) -> list[float]:
        rewards = [*script.rewards[:-1], script.rewards[-1] + script.outcome]
        return [sum(rewards[turn:]) for turn in range(len(rewards))]

    others = [returns(each) for each in group if each is not group[place]]
    reached = [[of[turn] for of in others if len(of) > turn] for turn in range(len(group[place].turns))]
    means = [sum(of) / len(of) if of else sum(other[0] for other in others) / len(others) for of in reached]
    return [value - mean for value, mean in zip(returns(group[place]), means, strict=True)]


def expected(scripts: Sequence[Script] = RESPONSES) -> dict[str, list[float]]:
    """The advantages of a response's turns, by its first turn."""
    groups = [scripts[start : start + GROUP_SIZE] for start in range(0, len(scripts), GROUP_SIZE)]
    return {script.turns[0]: turn_rloo(at, group) for group in groups for at, script in enumerate(group)}


def assert_turns(ids: Any, mask: Any, values: Any, wanted: dict[str, list[float]], of: Any = RESPONSES) -> Script:
    """That the turns of a response are the script's, and each has its advantage on all of its tokens, 0 between."""
    ids, mask, values = (np.array(part) for part in (ids, mask, values))
    script, turns = script_of(ids[: len(mask)].tolist(), of), runs(mask)
    assert [ids[start:end].tolist() for start, end in turns] == script.tokens and not values[mask == 0].any()
    for (start, end), advantage in zip(turns, wanted[script.turns[0]], strict=True):
        np.testing.assert_allclose(values[start:end], advantage, rtol=1e-5, atol=1e-6)
    return script


def assert_batches(batches: Sequence[dict[str, Any]], wanted: dict[str, list[float]], **of: Any) -> None:
    found = []
    for batch in batches:
        rows = batch["completion_ids"], batch["completion_mask"] * batch["tool_mask"], batch["advantages"]
        found += [assert_turns(*row, wanted, **of) for row in zip(*rows, strict=True)]
    assert len({script.turns[0] for script in found}) == len(found) == len(wanted)


def test_rewards_by_turn_and_their_way_into_dump_receipt_and_report(tmp_path: Path) -> None:
    """What an environment earns by calls, also in parallel, and by calls that fail before it or in it. Two iterations
    in micro-batches; a tool's tokens receive nothing."""
    weights = {**ENVIRONMENT, "token_dump": {"folder": tmp_path / "tokens", "responses": None}}
    options = talks() | {"loss_type": "bnpo", "num_iterations": 2, "max_steps": 2}
    options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    wanted = expected()
    assert_batches(trained(tmp_path, Watched, weights=weights, **options).seen[:4], wanted)
    assert mismatches(tmp_path / "tokens") == [[]]
    for row, script in zip(read_dump(tmp_path / "tokens"), RESPONSES, strict=True):
        assert assert_turns(row.token_ids_T, row.mask_T, row.advantage_T, wanted) is script
        by_turn = [sum(calls) or None for calls in row.labels["turn_rewards"]]
        assert by_turn == [reward or None for reward in script.rewards] and row.reward == script.outcome
        assert len(row.labels.get("tool", [])) == len(script.turns) - 1
        assert not row.received_T[~row.mask_T.astype(bool)].any() and list(row.updates) == [0, 1]
        np.testing.assert_allclose(row.by_update_KT[0], row.advantage_T, rtol=1e-3, atol=1e-5)
    assert report.main([str(tmp_path)]) == 0 and receipt([str(tmp_path)]) == 0


@pytest.mark.parametrize("beside", [False, True], ids=["tools", "an environment"])
def test_what_a_reward_function_logs_comes_first(tmp_path: Path, beside: bool) -> None:
    weights = {"token_weights": "turn_rloo", "token_weight_options": {"align": "turns", "rewards": "judged"}}
    other = type("Other", (Keypad,), {"judged": (1.0, 2.0)})
    weights |= {"environment_factory": other} if beside else {"tools": [press()]}
    trainer = trained(tmp_path, Watched, reward=judged, weights=weights, log_completions=True, **talks())
    assert_batches(trainer.seen, expected())


def test_the_outcome_is_trls_weighted_sum(tmp_path: Path) -> None:
    """Of reward functions and the environment's own, with what the environment earns after the last turn; an
    environment that keeps its list counts from its length."""

    class Rewarding(Keypad):
        def __init__(self) -> None:
            super().reset()

        def reset(self, **_: Any) -> None:
            pass

        def get_reward(self) -> float:
            self.tool_rewards.append(0.125)
            return 0.5

    weights = {**ENVIRONMENT, "environment_factory": Rewarding}
    after = [(each, [*each.rewards[:-1], each.rewards[-1] + 0.125]) for each in RESPONSES]
    wanted = expected([Script(each.turns, 2 * each.outcome + 0.5, rewards) for each, rewards in after])
    for batch in trained(tmp_path, Watched, weights=weights, reward_weights=[2.0], max_steps=2, **talks()).seen:
        assert_batches([batch], wanted)


def test_the_update_is_the_same_without_zero_advantage_conversations(tmp_path: Path) -> None:
    """Where a loss is divided by a micro-batch's tokens, a tool's do not count."""
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1.0}
    sizes["reward"] = lambda completion_ids, **_: [float(len(ids) > 200) for ids in completion_ids]
    weights, moved = {"token_weights": "uniform", "environment_factory": Keypad}, []
    for skip in (False, True):
        options = talks() | sizes | {"loss_type": "bnpo", "weights": {**weights, "skip_zero_advantage": skip}}
        moved.append(parameters(trained(tmp_path, **options).model) - parameters(new_model(layers=1)))
    scale = float(moved[0].abs().max())
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-3, atol=1e-5 * scale)
    assert scale > 1e-2


@pytest.mark.parametrize(("limit", "masked"), [(150, False), (200, True), (283, False), (283, True)])
def test_conversations_that_end_at_the_limit(tmp_path: Path, limit: int, masked: bool) -> None:
    """Within a turn, or at a tool's answer, which TRL drops: the reward of its call is with the last turn there is.
    ``mask_truncated_completions`` takes a response out of the loss, and not from its siblings."""
    for name, options in {
        "whole": {},
        "cut": {"max_completion_length": limit, "mask_truncated_completions": masked},
    }.items():
        weights = {**ENVIRONMENT, "token_dump": {"folder": tmp_path / name, "responses": None}}
        trained(tmp_path, weights=weights, **talks() | options)
    scripts, kept, rows = [], [], list(read_dump(tmp_path / "cut"))
    for row, whole, script in zip(rows, read_dump(tmp_path / "whole"), RESPONSES, strict=True):
        written = whole.mask_T.astype(bool)[: len(row)]
        turns = runs(written)
        ended = turns[-1][1] == len(row) and row.token_ids_T[-1] == script.tokens[len(turns) - 1][-1]
        assert list(row.token_ids_T) == list(whole.token_ids_T[: len(row)])
        assert row.truncated == (not ended)
        rewards = [*script.rewards[: len(turns) - 1], script.rewards[len(turns) - 1] if ended else 0.0]
        scripts.append(Script(script.turns[: len(turns)], script.outcome, rewards))
        kept.append((written, turns, not (masked and row.truncated)))
    assert len({row.truncated for row in rows}) == 2
    wanted = expected(scripts)
    for row, script, (written, turns, trains) in zip(rows, scripts, kept, strict=True):
        assert row.mask_T.astype(bool).tolist() == (written & trains).tolist()
        for (start, end), advantage in zip(turns, wanted[script.turns[0]], strict=True):
            np.testing.assert_allclose(row.advantage_T[start:end], advantage * trains, rtol=1e-5, atol=1e-6)


GUESSES = [
    Script([guess(50), guess(40), "It is 40: found."], 1.0, [0.8, 0.2, 0.0]),
    Script([guess(90, 30), "I give up."], 0.0, [0.8, 0.0]),
    Script(["40?"], 0.0, [0.0]),
    Script([guess("low"), guess(41), "It is 41."], 0.0, [0.0, 0.98, 0.0]),
]
"""Of the page's game, with the rewards of its environment."""


@pytest.mark.parametrize("file", ["guess.py", "judge.py"])
def test_the_examples_of_the_page(tmp_path: Path, file: str) -> None:
    names: dict[str, Any] = {}
    for text in documentation.files("trl.md").values():
        exec(text, names)
    options, scripts = talks({"Find the number.": GUESSES}), GUESSES
    options["weights"] = {"token_weights": "turn_rloo", "environment_factory": names["Guess"]}
    options["reward"] = None
    if file == "judge.py":
        game = names["Guess"]()
        game.reset(40)
        options["weights"] = {
            "token_weights": "turn_rloo",
            "tools": [game.guess],
            "token_weight_options": {"align": "turns"},
        }
        failed = [[-0.6 if '"low"' in turn else -0.1 for turn in script.turns] for script in GUESSES]
        scripts = [each._replace(rewards=rewards) for each, rewards in zip(GUESSES, failed, strict=True)]
        options["reward"] = names["judge"]
    options["data"] = options["data"].add_column("number", [40])
    assert_batches(
        trained(tmp_path, Watched, per_device_train_batch_size=4, **options).seen, expected(scripts), of=scripts
    )


def test_fields_that_are_refused(tmp_path: Path) -> None:
    """Nowhere, and not one value a response."""

    def twice(**named: Any) -> list[float]:
        return judged(**named) and judged(**named)

    for name, reward in (("tool_rewards", world.outcomes()), ("judged", twice)):
        weights = {"token_weights": "turn_rloo", "tools": [press()]}
        weights["token_weight_options"] = {"align": "turns", "rewards": name}
        with pytest.raises(ValueError, match=name):
            trained(tmp_path, reward=reward, weights=weights, **talks())
