"""Credit by turn in TRL, with tools and environments; run by test_trl.py with TRL on the path."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grail_advantage import report
from grail_advantage.dump import read_dump
from grail_advantage.trl_ext import TokenWeightGRPOTrainer
from grail_advantage.view.receipt import main as receipt
from tests import documentation
from tests.trl_ext import conversations
from tests.trl_ext.conversations import KEYS, RESPONSES, SCRIPTS, Keypad, Script, build, script_of, speaking_model

guess = functools.partial(conversations.calls, name="guess", argument="value")
GROUP_SIZE = len(RESPONSES) // len(SCRIPTS)
TURNS = {"token_weight_options": {"align": "turns"}}
ENVIRONMENT = {"token_weights": "turn_rloo", "environment_factory": Keypad}


class Watched(TokenWeightGRPOTrainer):
    """Keeps what the loss is given."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self.seen = getattr(self, "seen", [])
        self.seen.append(dict(inputs))
        return super()._compute_loss(model, inputs)


def returns(script: Script, gamma: float) -> list[float]:
    rewards = [*script.rewards[:-1], script.rewards[-1] + script.outcome]
    return [
        math.fsum(gamma ** (later - turn) * rewards[later] for later in range(turn, len(rewards)))
        for turn in range(len(rewards))
    ]


def turn_rloo(place: int, group: Sequence[Script]) -> list[float]:
    own, others = returns(group[place], 1.0), [returns(each, 1.0) for each in group if each is not group[place]]
    first = math.fsum(other[0] for other in others) / len(others)
    reached = [[other[turn] for other in others if len(other) > turn] for turn in range(len(own))]
    return [value - (math.fsum(of) / len(of) if of else first) for value, of in zip(own, reached, strict=True)]


def gtpo(place: int, group: Sequence[Script]) -> list[float]:
    own, every = returns(group[place], 0.9), [returns(each, 0.9) for each in group]
    advantages = []
    for turn, value in enumerate(own):
        of = [values[turn] for values in every if len(values) > turn]
        mean = math.fsum(of) / len(of)
        spread = math.sqrt(math.fsum((each - mean) ** 2 for each in of) / max(1, len(of) - 1)) + 1e-6
        advantages.append((value - mean) / spread if len(of) > 1 else 0.0)
    return advantages


PLAIN = {"turn_rloo": turn_rloo, "gtpo": gtpo}


def expected(name: str, scripts: Sequence[Script] = RESPONSES) -> dict[str, list[float]]:
    """The advantages of a response's turns, by its first turn."""
    return {
        script.turns[0]: PLAIN[name](place % GROUP_SIZE, scripts[place - place % GROUP_SIZE :][:GROUP_SIZE])
        for place, script in enumerate(scripts)
    }


def turns_of(ids_T: torch.Tensor, mask_T: torch.Tensor, values_T: torch.Tensor) -> list[tuple[list[int], list[float]]]:
    """Tokens and values of each run of ones."""
    runs: list[tuple[list[int], list[float]]] = []
    before = False
    for token, inside, value in zip(ids_T.tolist(), mask_T.bool().tolist(), values_T.tolist(), strict=True):
        if inside and not before:
            runs.append(([], []))
        if inside:
            runs[-1][0].append(token)
            runs[-1][1].append(value)
        before = inside
    return runs


def assert_turns(turns: Sequence[tuple[list[int], list[float]]], wanted: dict[str, list[float]]) -> Script:
    """That each turn of a response has its advantage on all of its tokens."""
    script = script_of(turns[0][0])
    assert [len(tokens) for tokens, _ in turns] == [len(tokens) for tokens in script.tokens]
    assert [tokens for tokens, _ in turns] == script.tokens
    for (_, values), advantage in zip(turns, wanted[script.turns[0]], strict=True):
        np.testing.assert_allclose(values, advantage, rtol=1e-5, atol=1e-6)
    return script


def assert_advantages(batches: Sequence[dict[str, torch.Tensor]], wanted: dict[str, list[float]]) -> None:
    """Of all responses of a generation batch, and 0 outside their turns."""
    seen = []
    for batch in batches:
        mask_BT = batch["completion_mask"] * batch["tool_mask"]
        assert not batch["advantages"][~mask_BT.bool()].any()
        for row in zip(batch["completion_ids"], mask_BT, batch["advantages"], strict=True):
            seen.append(assert_turns(turns_of(*row), wanted))
    assert len(seen) == len({script.turns[0] for script in seen}) == len(RESPONSES)


@pytest.mark.parametrize("name", PLAIN)
def test_rewards_by_turn_are_what_an_environment_earns_by_calls(tmp_path: Path, name: str) -> None:
    """Also of parallel calls, and of calls that fail before the environment or in it."""
    trainer = build(tmp_path, Watched, weights={**ENVIRONMENT, "token_weights": name})
    trainer.train()
    assert_advantages(trainer.seen, expected(name))


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("beside", [False, True], ids=["tools", "environment"])
def test_rewards_by_turn_are_what_a_reward_function_logs(tmp_path: Path, name: str, beside: bool) -> None:
    """In front of what an environment has."""

    class Other(Keypad):
        judged = (1.0, 2.0)

    tools = {"environment_factory": Other} if beside else {"tools": [conversations.press]}
    options = {"token_weight_options": {"align": "turns", "rewards": "judged"}}
    weights = {"token_weights": name, **options, **tools}
    table = {"log_completions": True, **SIZES}
    trainer = build(tmp_path, Watched, reward=conversations.judged, weights=weights, **table)
    trainer.train()
    assert_advantages(trainer.seen, expected(name))


def test_the_outcome_is_trls_weighted_sum(tmp_path: Path) -> None:
    """Of reward functions and the environment's own, with what the environment earns after the last turn."""

    class Rewarding(Keypad):
        def get_reward(self) -> float:
            self.tool_rewards.append(0.125)
            return 0.5

    trainer = build(tmp_path, Watched, weights={**ENVIRONMENT, "environment_factory": Rewarding}, reward_weights=[2.0])
    trainer.train()
    scripts = [
        Script(each.turns, 2 * each.outcome + 0.5, [*each.rewards[:-1], each.rewards[-1] + 0.125]) for each in RESPONSES
    ]
    assert_advantages(trainer.seen, expected("turn_rloo", scripts))


def test_an_environment_that_keeps_its_list_counts_from_its_length(tmp_path: Path) -> None:
    class Keeping(Keypad):
        def __init__(self) -> None:
            super().reset()

        def reset(self, **_: Any) -> None:
            pass

    trainer = build(tmp_path, Watched, weights={**ENVIRONMENT, "environment_factory": Keeping}, max_steps=2)
    trainer.train()
    assert len(trainer.seen) == 2 and len(trainer.environments[0].tool_rewards) == 4
    for batch in trainer.seen:
        assert_advantages([batch], expected("turn_rloo"))


def test_environments_of_several_kinds(tmp_path: Path) -> None:
    """Of which one has no rewards by turn."""

    class Silent(Keypad):
        def reset(self, **_: Any) -> None:
            pass

        def press(self, key: str) -> str:
            """
            Press a key.

            Args:
                key: the key's letter.
            """
            return f"{key} is worth {KEYS[key]}"

    weights = {**ENVIRONMENT, "environment_factory": {"silent": Silent, "loud": Keypad}}
    data = conversations.prompts().add_column("environment", ["silent", "loud"])
    trainer = build(tmp_path, Watched, data=data, weights=weights)
    trainer.train()
    silent = [Script(each.turns, each.outcome, [0.0] * len(each.turns)) for each in SCRIPTS[conversations.SAFE]]
    assert_advantages(trainer.seen, expected("turn_rloo", [*silent, *RESPONSES[GROUP_SIZE:]]))


def test_the_update_is_that_of_a_loss_by_hand(tmp_path: Path) -> None:
    trainer = build(tmp_path, Watched, weights=ENVIRONMENT, learning_rate=0.5)
    trainer.train()
    (batch,) = trainer.seen
    model, wanted, total = speaking_model(), expected("turn_rloo"), torch.zeros(())
    for row in range(len(RESPONSES)):
        prompt_P = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
        response_T = batch["completion_ids"][row][batch["completion_mask"][row].bool()]
        mask_T = batch["tool_mask"][row][: len(response_T)]
        script, advantages_T = script_of(response_T.tolist()), torch.zeros(len(response_T))
        of_turns = zip(script.tokens, wanted[script.turns[0]], strict=True)
        advantages_T[mask_T.bool()] = torch.tensor([advantage for tokens, advantage in of_turns for _ in tokens])
        logits_TV = model(torch.cat([prompt_P, response_T])[None]).logits[0, len(prompt_P) - 1 : -1]
        log_probs_T = (logits_TV / conversations.TEMPERATURE).log_softmax(-1).gather(1, response_T[:, None])[:, 0]
        total = total - (advantages_T * log_probs_T).sum() / (len(RESPONSES) * trainer.max_completion_length)
    total.backward()
    moved = parameters(trainer.model) - parameters(speaking_model())
    by_hand = -0.5 * torch.cat([p.grad.flatten() for p in model.parameters()])
    assert by_hand.abs().max() > 1e-2
    torch.testing.assert_close(moved, by_hand, rtol=1e-3, atol=1e-4 * float(by_hand.abs().max()))


def parameters(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


SIZES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_dump_receipt_and_report_of_a_run(tmp_path: Path, loss_type: str) -> None:
    """Of two iterations in micro-batches; a tool's tokens receive nothing."""
    weights = {**ENVIRONMENT, "token_dump": {"folder": tmp_path / "tokens", "responses": None}}
    build(tmp_path, weights=weights, loss_type=loss_type, num_iterations=2, max_steps=2, **SIZES).train()
    (header,) = read_dump(tmp_path / "tokens").receipts()
    assert not [finding for finding in header["findings"] if finding["mismatch"]]
    wanted = expected("turn_rloo")
    for row, script in zip(read_dump(tmp_path / "tokens"), RESPONSES, strict=True):
        turns = turns_of(*map(torch.tensor, (row.token_ids_T, row.mask_T, row.advantage_T)))
        assert assert_turns(turns, wanted) is script
        by_turn = [sum(calls) or None for calls in row.labels["turn_rewards"]]
        assert by_turn == [reward or None for reward in script.rewards]
        assert row.reward == script.outcome
        assert len(row.labels.get("tool", [])) == len(script.turns) - 1
        assert not row.received_T[~row.mask_T.astype(bool)].any() and list(row.updates) == [0, 1]
        np.testing.assert_allclose(row.by_update_KT[0], row.advantage_T, rtol=1e-3, atol=1e-5)
    assert report.main([str(tmp_path)]) == 0 and receipt([str(tmp_path)]) == 0


def test_the_update_is_the_same_without_zero_advantage_conversations(tmp_path: Path) -> None:
    """Where a loss is divided by a micro-batch's tokens, a tool's do not count."""

    def of_the_safe(prompts: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [
            outcome if "safe" in prompt[-1]["content"] else 0.0
            for prompt, outcome in zip(prompts, conversations.outcomes(completion_ids), strict=True)
        ]

    tools = {"token_weights": "uniform", "tools": [conversations.press]}
    models = []
    for skip in (False, True):
        weights = {**tools, "skip_zero_advantage": skip}
        trainer = build(tmp_path, reward=of_the_safe, weights=weights, loss_type="bnpo", learning_rate=1.0, **SIZES)
        trainer.train()
        models.append(parameters(trainer.model) - parameters(speaking_model()))
    scale = float(models[0].abs().max())
    torch.testing.assert_close(models[1], models[0], rtol=1e-3, atol=1e-5 * scale)
    assert scale > 1e-2


def ended(script: Script, gaps: Sequence[int], limit: int) -> tuple[Script, list[int]]:
    """What is left of a response within a limit, and the tokens of its turns.

    Args:
        script: the response.
        gaps: tokens between its turns.
        limit: ``max_completion_length``.
    """
    length = len(script.tokens[0])
    rewards, counts = script.rewards[:1], [length]
    for tokens, gap, reward in zip(script.tokens[1:], gaps, script.rewards[1:], strict=True):
        left = min(len(tokens), limit - length - gap)
        if left <= 0:
            break
        whole = left == len(tokens)
        rewards, counts, length = [*rewards, reward if whole else 0.0], [*counts, left], length + gap + left
        if not whole:
            break
    return Script(script.turns[: len(counts)], script.outcome, rewards), counts


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("room", [-1, 0, 3])
def test_conversations_that_end_at_the_limit(tmp_path: Path, room: int, masked: bool) -> None:
    """Room for some tokens of the last turn of a response, or for none, or not even for the answer to its call, whose
    reward is then with the last turn there is. ``mask_truncated_completions`` takes it out of the loss, and not from
    the siblings."""
    whole = build(tmp_path, weights=ENVIRONMENT)
    whole.model.train()
    batch = whole._generate_and_score_completions([row for row in whole.train_dataset for _ in range(GROUP_SIZE)])
    gaps = [
        [end - begin for begin, end in tool_ranges(mask_T)] for mask_T in batch["completion_mask"] * batch["tool_mask"]
    ]
    cut = RESPONSES[1]
    limit = sum(map(len, cut.tokens[:-1])) + sum(gaps[1]) + room
    scripts, counts = zip(*(ended(*each, limit) for each in zip(RESPONSES, gaps, strict=True)), strict=True)
    wanted = expected("turn_rloo", scripts)
    assert len(scripts[1].turns) == 2 + (room > 0)

    weights = {**ENVIRONMENT, "token_dump": {"folder": tmp_path / "tokens", "responses": None}}
    options = {"max_completion_length": limit, "mask_truncated_completions": masked}
    build(tmp_path, weights=weights, **options).train()
    for row, script, of_turns, before in zip(read_dump(tmp_path / "tokens"), scripts, counts, RESPONSES, strict=True):
        tool = row.labels.get("tool", [])
        assert len(tool) == len(of_turns) - (room != 0 or before is not cut)
        written_T = torch.ones(len(row), dtype=torch.bool)
        for begin, end in tool:
            written_T[begin:end] = False
        turns = turns_of(torch.tensor(row.token_ids_T), written_T, torch.tensor(row.advantage_T))
        assert [len(values) for _, values in turns] == of_turns
        assert row.truncated == (
            sum(of_turns) < sum(map(len, before.tokens[: len(of_turns)])) or len(tool) == len(turns)
        )
        trains = not (masked and row.truncated)
        assert row.mask_T.astype(bool).tolist() == (written_T & trains).tolist()
        for (_, values), advantage in zip(turns, wanted[script.turns[0]], strict=True):
            np.testing.assert_allclose(values, advantage * trains, rtol=1e-5, atol=1e-6)


def tool_ranges(mask_T: torch.Tensor) -> list[tuple[int, int]]:
    """Of zeros between ones."""
    places = mask_T.nonzero().flatten().tolist()
    return [(begin + 1, end) for begin, end in itertools.pairwise(places) if end > begin + 1]


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
    weights: dict[str, Any] = {"token_weights": "turn_rloo"}
    scripts = GUESSES
    if file == "guess.py":
        weights |= {"environment_factory": names["Guess"]}
    else:
        game = names["Guess"]()
        game.reset(40)
        weights |= {"tools": [game.guess], **TURNS}
        failed = [[-0.6 if '"low"' in turn else -0.1 for turn in script.turns] for script in GUESSES]
        scripts = [
            Script(script.turns, script.outcome, rewards) for script, rewards in zip(GUESSES, failed, strict=True)
        ]
    data = conversations.prompts("Find the number.").add_column("number", [40])
    trainer = build(
        tmp_path,
        Watched,
        model=speaking_model({"Find the number.": GUESSES}),
        reward=None if file == "guess.py" else names["judge"],
        data=data,
        weights=weights,
        per_device_train_batch_size=GROUP_SIZE,
    )
    trainer.train()
    (batch,) = trainer.seen
    wanted = {script.turns[0]: turn_rloo(place, scripts) for place, script in enumerate(scripts)}
    for row in zip(
        batch["completion_ids"], batch["completion_mask"] * batch["tool_mask"], batch["advantages"], strict=True
    ):
        turns = turns_of(*row)
        (script,) = [script for script in scripts if script.tokens == [tokens for tokens, _ in turns]]
        for (_, values), advantage in zip(turns, wanted[script.turns[0]], strict=True):
            np.testing.assert_allclose(values, advantage, rtol=1e-5, atol=1e-6)


def test_fields_that_are_refused(tmp_path: Path) -> None:
    class Wordy(Keypad):
        def press(self, key: str) -> str:
            """
            Press a key.

            Args:
                key: the key's letter.
            """
            self.tool_rewards += ["good", "bad"]
            return key

    def twice(**named: Any) -> list[float]:
        conversations.judged(**named)
        return conversations.judged(**named)

    named = {"token_weight_options": {"align": "turns", "rewards": "judged"}}
    for weights, reward, message in (
        ({"tools": [conversations.press]}, conversations.outcomes, r"'tool_rewards', which is nowhere; have a reward"),
        ({"environment_factory": Wordy}, conversations.outcomes, r"response 0 has the reward \['good', 'bad'\]"),
        ({"tools": [conversations.press], **named}, twice, r"'judged', ...\) got 16 values; log one a response, 8"),
    ):
        with pytest.raises(ValueError, match=message):
            build(tmp_path, reward=reward, weights={"token_weights": "turn_rloo", **TURNS, **weights}).train()
