"""Credit by turn: turns in the mask, rewards by turn, and each method against loops over plain lists."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from grail_advantage import RolloutBatch, compute_token_weights
from grail_advantage.methods import method
from grail_advantage.metrics import weight_metrics
from grail_advantage.signals.turns import _warn_of_ambiguous_rewards, find_turns, said_before, shuffle_turns
from grail_advantage.weighting import batch_weights, scores_of
from tests.core.plain_weights import close
from tests.core.test_text_methods import token_advantages
from tests.core.tiny_models import Rollout, char_tokenizer, encode, make_batch, tiny_model

NAN = math.nan
METHODS = ("turn_rloo", "mt_grpo", "gtpo", "gigpo")


@dataclass
class Talk:
    """A response: its turns, with what was said between two of them."""

    turns: list[str]
    said: list[str]
    rewards: list[float]
    outcome: float
    group: int = 0
    masked: bool = False
    advantage: float = 0.5
    written: list[bool] = field(init=False)
    text: str = field(init=False)

    def __post_init__(self) -> None:
        pieces = [(turn, True) for turn in self.turns]
        for place, said in reversed(list(enumerate(self.said))):
            pieces.insert(place + 1, (said, False))
        self.text = "".join(text for text, _ in pieces)
        self.written = [wrote for text, wrote in pieces for _ in text]


def batch_of(talks: Sequence[Talk], rewards: str = "tool_rewards") -> RolloutBatch:
    width = max(len(talk.text) for talk in talks) + 2
    messages_BT = torch.full((len(talks), width), -1)
    mask_BT = torch.zeros((len(talks), width), dtype=torch.bool)
    for row, talk in enumerate(talks):
        messages_BT[row, : len(talk.text)] = torch.tensor(encode(talk.text))
        mask_BT[row, : len(talk.text)] = torch.tensor(talk.written)
    return RolloutBatch(
        mask_BT=mask_BT,
        advantages_B=torch.tensor([0.0 if talk.masked else talk.advantage for talk in talks]),
        spans=[None] * len(talks),
        columns_BT={},
        masked_B=torch.tensor([talk.masked for talk in talks]),
        groups_B=torch.tensor([talk.group for talk in talks]),
        tokens_BT=torch.where(mask_BT, messages_BT, -1),
        tokenizer=char_tokenizer(),
        rewards_B=torch.tensor([talk.outcome for talk in talks], dtype=torch.float64),
        messages_BT=messages_BT,
        fields={rewards: [talk.rewards for talk in talks]},
    )


def talks_of(seed: int, turns: tuple[int, int] = (1, 4)) -> list[Talk]:
    draw = random.Random(seed)
    talks = []
    for group in [*range(3)] * 5:
        count = draw.randint(*turns)
        talks.append(
            Talk(
                ["a" * draw.randint(1, 3) for _ in range(count)],
                [draw.choice(["yes", "no"]) for _ in range(count - 1)],
                [draw.choice([0.0, 0.5, 1.0, -0.25]) for _ in range(count - 1)],
                draw.choice([0.0, 1.0, 0.3]),
                group,
                masked=draw.random() < 0.1,
            )
        )
    return talks


# --- plain computations ----------------------------------------------------------------------------------------------


def _return(talk: Talk, turn: int, gamma: float) -> float:
    rewards = [*talk.rewards, talk.outcome]
    return math.fsum(gamma ** (later - turn) * rewards[later] for later in range(turn, len(rewards)))


def _compared(value: float, others: list[float], deviation: bool, epsilon: float = 1e-6) -> float:
    if len(others) == 1:
        return 0.0
    divisor = statistics.stdev(others) + epsilon if deviation else 1.0
    return (value - statistics.fmean(others)) / divisor


def plain_turn_rloo(talk: Talk, group: list[Talk], gamma: float = 1.0) -> list[float]:
    siblings = [other for other in group if other is not talk]
    values = []
    for turn in range(len(talk.turns)):
        with_turn = [_return(other, turn, gamma) for other in siblings if len(other.turns) > turn]
        instead = [_return(other, 0, gamma) for other in siblings] or [0.0]
        values.append(_return(talk, turn, gamma) - statistics.fmean(with_turn or instead))
    return values


def plain_mt_grpo(talk: Talk, group: list[Talk], alpha: float = 1.0, deviation: bool = True) -> list[float]:
    """Its authors' assignment: ``assigned = outcome + alpha * turn * before_result``, or ``combined`` without a result."""

    def advantage(value: Callable[[Talk], float]) -> float:
        return _compared(value(talk), [value(other) for other in group], deviation, 1e-4)

    outcome = advantage(lambda one: one.outcome)
    if not talk.rewards:
        return [advantage(lambda one: math.fsum(one.rewards) + one.outcome)]
    return [outcome + alpha * advantage(lambda one: math.fsum(one.rewards)), *[outcome] * len(talk.rewards)]


def plain_gtpo(talk: Talk, group: list[Talk], gamma: float = 0.9, deviation: bool = True) -> list[float]:
    return [
        _compared(
            _return(talk, turn, gamma),
            [_return(other, turn, gamma) for other in group if len(other.turns) > turn],
            deviation,
        )
        for turn in range(len(talk.turns))
    ]


def plain_gigpo(
    talk: Talk, group: list[Talk], gamma: float = 0.95, omega: float = 1.0, deviation: bool = True
) -> list[float]:
    whole = _compared(_return(talk, 0, 1.0), [_return(other, 0, 1.0) for other in group], deviation)
    values = []
    for turn in range(len(talk.turns)):
        heard = ["", *talk.said][turn]
        alike = [
            _return(other, place, gamma)
            for other in group
            for place, said in enumerate(["", *other.said])
            if said == heard
        ]
        values.append(whole + omega * _compared(_return(talk, turn, gamma), alike, deviation))
    return values


PLAIN: dict[str, Callable[..., list[float]]] = {
    "turn_rloo": plain_turn_rloo,
    "mt_grpo": plain_mt_grpo,
    "gtpo": plain_gtpo,
    "gigpo": plain_gigpo,
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "turn_rloo": [{}, {"gamma": 0.5}],
    "mt_grpo": [{}, {"alpha": 0.5, "deviation": False}],
    "gtpo": [{}, {"gamma": 1.0, "deviation": False}],
    "gigpo": [{}, {"gamma": 0.5, "omega": 0.25, "deviation": False}],
}


def plain(name: str, talks: list[Talk], **options: Any) -> list[list[float]]:
    """Token advantages of the tokens that the model wrote."""
    advantages = []
    for talk in talks:
        group = [other for other in talks if other.group == talk.group]
        of_turns = PLAIN[name](talk, group, **options)
        of_tokens = [value for turn, value in zip(talk.turns, of_turns, strict=True) for _ in turn]
        advantages.append([0.0] * len(of_tokens) if talk.masked else of_tokens)
    return advantages


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", range(4))
def test_methods_against_loops(name: str, seed: int) -> None:
    """Masked responses train nothing and count for the others, as in GRPO."""
    talks = talks_of(seed)
    for options in OPTIONS[name]:
        advantages = token_advantages(method(name).build(options), batch_of(talks))
        close(advantages, plain(name, talks, **options), 1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_through_the_plain_host(name: str) -> None:
    """The mask has gaps where a tool spoke."""
    talks = [talk for talk in talks_of(9) if not talk.masked]
    batch = make_batch([Rollout("Two?", talk.text, talk.advantage) for talk in talks], "both", extra=2)
    inside_BL = batch.response_mask.bool()
    mask_BL = torch.zeros_like(batch.response_mask)
    mask_BL[inside_BL] = torch.tensor([wrote for talk in talks for wrote in talk.written]).long()
    known = {
        "groups": torch.tensor([talk.group for talk in talks]),
        "fields": {"tool_rewards": [talk.rewards for talk in talks]},
        "rewards": torch.tensor([talk.outcome for talk in talks]),
    }
    inputs = (batch.input_ids, batch.attention_mask, mask_BL, batch.advantages)
    signal, model = method(name).build({}), tiny_model(layers=1)
    result = compute_token_weights(model, char_tokenizer(), *inputs, signal, **known)
    close(
        [row[mask == 1].tolist() for row, mask in zip(result.advantages, mask_BL, strict=True)],
        plain(name, talks),
        1e-5,
    )
    assert not result.advantages[mask_BL == 0].any() and all(map(math.isfinite, result.stats.values()))
    with pytest.raises(ValueError, match=f"{name} reads rewards; pass rewards="):
        compute_token_weights(model, char_tokenizer(), *inputs, signal, **known | {"rewards": None})
    with pytest.raises(ValueError, match=rf"{name} reads field:tool_rewards; pass fields=\{{'tool_rewards'"):
        compute_token_weights(model, char_tokenizer(), *inputs, signal, **known | {"fields": None})


def test_every_method_takes_responses_with_gaps() -> None:
    """Tokens of a tool change nothing of a method without a pass but the places of its weights."""
    whole = make_batch([Rollout("Two?", "ab cd", 1.0), Rollout("Two?", "ab", -1.0)], "right")
    gap = make_batch([Rollout("Two?", "abTOOL cd", 1.0), Rollout("Two?", "ab", -1.0)], "right")
    gap.response_mask[0, 6:10] = 0
    log_probs = torch.tensor([-0.5, -0.1, -2.0, -0.3, -0.2, -0.7, -0.4])
    weights = []
    for batch in (whole, gap):
        old_BL = torch.zeros(batch.input_ids.shape)
        old_BL[batch.response_mask.bool()] = log_probs
        signal = method("surprisal").build({"gate": "all", "reshaper": "power", "statistics": "response"})
        result = compute_token_weights(
            tiny_model(layers=1), char_tokenizer(), *batch.tensors(), signal, old_log_probs=old_BL
        )
        weights.append(torch.cat([torch.tensor(of) for of in batch.of_responses(result.weights)]))
        assert not result.weights[batch.response_mask == 0].any()
    torch.testing.assert_close(weights[0], weights[1])
    assert len(weights[0].unique()) > 3
    computed = compute_token_weights(
        tiny_model(layers=1), char_tokenizer(), *gap.tensors(), method("surprisal").build({})
    )
    assert math.isfinite(computed.stats["advantage_scale"])


def test_turns_are_runs_of_ones() -> None:
    rows = ["1101011", "0111000", "0000000", "1111111"]
    mask_BT = torch.tensor([[character == "1" for character in row] for row in rows])
    expected = [[0, 0, -1, 1, -1, 2, 2], [-1, 0, 0, 0, -1, -1, -1], [-1] * 7, [0] * 7]
    assert find_turns(mask_BT).tolist() == expected
    assert find_turns(mask_BT[:, :0]).shape == (4, 0)
    messages = [said_before(np.arange(7), np.array(turns)) for turns in expected]
    assert messages == [[(), (2,), (4,)], [()], [], [()]]
    assert said_before(np.arange(5), np.array([-1, 0, -1, -1, 1])) == [(), (2, 3)]


def test_how_rewards_by_turn_are_aligned() -> None:
    talk = Talk(["a", "b", "c"], ["x", "y"], [1.0, 2.0, 4.0], 8.0)
    alone = Talk(["a"], [], [], 0.0)

    def advantages(talk: Talk, **options: Any) -> list[float]:
        return token_advantages(method("turn_rloo").build(options), batch_of([talk, alone]))[0]

    assert advantages(talk) == [0.0, 0.0, 0.0]  # the last call was not answered, or a turn made two
    talk.rewards = [1.0, 2.0]
    assert advantages(talk) == [11.0, 10.0, 8.0]
    assert advantages(talk, outcome=False) == [3.0, 2.0, 0.0]
    assert advantages(talk, rewards="") == [8.0, 8.0, 8.0]
    assert advantages(talk, gamma=0.5) == [4.0, 6.0, 8.0]
    talk.rewards, alone.rewards = [1.0, 2.0, 4.0], [0.5]
    assert advantages(talk, align="turns") == [14.5, 13.5, 11.5]
    talk.rewards = [1.0, 2.0]
    assert advantages(talk) == [10.5, 9.5, 7.5]  # the only turn's only call is certain


@pytest.mark.parametrize("name", METHODS)
def test_an_unscored_turn_counts_0_and_ambiguous_rewards_train_nothing(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_of_ambiguous_rewards.cache_clear()
    signal, talks = method(name).build({}), [talk for talk in talks_of(3) if not talk.masked]
    many = next(row for row, talk in enumerate(talks) if len(talk.turns) > 2)
    given = talks[many].rewards
    for unscored in (None, NAN):
        batch = batch_of(talks)
        batch.fields["tool_rewards"][many] = [unscored, *given[1:]]
        talks[many].rewards = [0.0, *given[1:]]
        close(token_advantages(signal, batch), plain(name, talks), 1e-5)
    expected = plain(name, [talk for row, talk in enumerate(talks) if row != many])
    for ambiguous in ([*given, 1.0], [*given, None], [math.inf, *given[1:]], [1e30, *given[1:]]):
        batch = batch_of(talks)
        batch.fields["tool_rewards"][many] = ambiguous
        selection = signal.select(batch)
        result = batch_weights(scores_of(signal, batch, selection, None), batch, selection, signal)
        figures = weight_metrics(result, batch.mask_BT, batch.advantages_B, selection, torch.zeros(0))
        assert figures["non_finite_rate"] == pytest.approx(1 / len(talks))
        advantages = token_advantages(signal, batch)
        assert set(advantages.pop(many)) == {0.0}
        close(advantages, expected, 1e-5)
    assert caplog.text.count(f"use {name}.align=turns") == 1
    assert (
        f"{name}, step 0: 1 of {len(talks)} selected responses have a score that is not finite, and train nothing"
        in caplog.text
    )
    assert not signal.mask_truncated, "it would bias the gradient"


REFUSED = {
    "too few": (
        [1.0],
        {},
        r"turn_rloo\.rewards=tool_rewards: response 1 of the batch has 3 turns and 1 rewards, where .*=calls",
    ),
    "too many": ([1.0] * 4, {}, r"3 turns and 4 rewards, where turn_rloo\.align=calls wants 2 or 3; with turns"),
    "one a turn": ([1.0] * 2, {"align": "turns"}, r"3 turns and 2 rewards, where turn_rloo\.align=turns wants 3;"),
    "nothing": (None, {}, "3 turns and 0 rewards"),
    "a number": (1.5, {}, r"response 1 of the batch has 1\.5; give it a list of numbers"),
    "a word": (["good", "bad"], {}, r"has \['good', 'bad'\]; give it a list of numbers"),
}


@pytest.mark.parametrize(("rewards", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_rewards_that_do_not_fit_name_the_response(rewards: Any, options: dict, message: str) -> None:
    talks = [Talk(["a"], [], [0.0] * ("align" in options), 0.0), Talk(["a", "b", "c"], ["x", "y"], rewards, 1.0)]
    with pytest.raises(ValueError, match=message):
        token_advantages(method("turn_rloo").build(options), batch_of(talks))


@pytest.mark.parametrize("name", METHODS)
def test_what_is_not_finite_is_compared_with_nothing(name: str) -> None:
    talks = [talk for talk in talks_of(3) if not talk.masked]
    batch = batch_of(talks)
    many = next(row for row, talk in enumerate(talks) if len(talk.turns) > 1)
    others = [talk for row, talk in enumerate(talks) if row != many]
    expected = plain(name, others)
    signal = method(name).build({})
    batch.rewards_B[many] = NAN  # the host masks such a response
    batch.masked_B[many], batch.advantages_B[many] = True, 0.0
    advantages = token_advantages(signal, batch)
    assert set(advantages.pop(many)) == {0.0}
    close(advantages, expected, 1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_responses_that_fill_up_a_batch_or_lose_tokens(name: str) -> None:
    """A filler has no turn, whatever is in its fields; a token that a correction drops keeps its turn, untrained."""
    talks = [talk for talk in talks_of(5) if not talk.masked]
    expected = plain(name, talks)
    batch = batch_of([*talks, Talk([], ["filler"], [1.0, 2.0], 0.0, group=7)])
    batch.mask_BT[0, 0] = False
    advantages = token_advantages(method(name).build({}), batch)
    expected[0][0] = 0.0
    close(advantages[:-1], expected, 1e-5)
    assert advantages[-1] == []


@pytest.mark.parametrize("name", METHODS)
def test_batches_without_a_token(name: str) -> None:
    for shape in ((0, 3), (2, 0), (0, 0), (2, 3)):
        empty_BT = torch.full(shape, -1)
        batch = RolloutBatch(
            mask_BT=empty_BT >= 0,
            advantages_B=torch.zeros(shape[0]),
            spans=[None] * shape[0],
            columns_BT={},
            groups_B=torch.zeros(shape[0], dtype=torch.int64),
            tokens_BT=empty_BT,
            rewards_B=torch.zeros(shape[0]),
            messages_BT=empty_BT,
            fields={"tool_rewards": [[]] * shape[0]},
        )
        assert token_advantages(method(name).build({}), batch) == [[]] * shape[0]


def test_a_response_with_advantage_0_may_have_turns_that_train() -> None:
    talks = [Talk(["a", "b"], ["x"], [1.0], 0.0, advantage=0.0), Talk(["a", "b"], ["x"], [0.0], 0.0, advantage=0.0)]
    signal, batch = method("turn_rloo").build({}), batch_of(talks)
    assert signal.select(batch).selected_B.tolist() == [True, True]
    assert token_advantages(signal, batch) == [[1.0, 0.0], [-1.0, 0.0]]
    talks[0].rewards = [0.0]
    assert signal.select(batch_of(talks)).selected_B.tolist() == [False, False]


def test_the_control_permutes_the_turns_of_a_response() -> None:
    talks = [Talk(["a", "bb", "ccc"], ["x", "y"], [1.0, 2.0], 4.0), Talk(["a"], [], [], 0.0)]
    batch = batch_of(talks)
    turn_BT = find_turns(batch.tokens_BT >= 0)
    advantages_BT = method("turn_rloo").build({}).scores(batch, None)
    seen = set()
    for seed in range(30):
        shuffled_BT = shuffle_turns(advantages_BT, turn_BT, torch.Generator().manual_seed(seed))
        of_turns = [shuffled_BT[0, turn_BT[0] == turn].unique().tolist() for turn in range(3)]
        assert all(len(of) == 1 for of in of_turns) and sorted(of_turns) == [[4.0], [6.0], [7.0]]
        assert torch.equal(shuffled_BT[1], advantages_BT[1]) and not shuffled_BT[turn_BT < 0].any()
        seen.add(str(of_turns))
    assert len(seen) == 6


def test_mt_grpo_by_hand() -> None:
    """Three responses, two of which call: T is 1, 0, 0 and O is 0, 1, 0; a mean of 1/3 and a deviation of 3 ** -0.5 each."""
    talks = [
        Talk(["a", "b"], ["x"], [1.0], 0.0),
        Talk(["a", "b", "c"], ["x", "y"], [0.0, 0.0], 1.0),
        Talk(["a"], [], [], 0.0),
    ]
    ours = token_advantages(method("mt_grpo").build({"alpha": 0.5}), batch_of(talks))
    high, low = 2 / 3 / (3**-0.5 + 1e-4), -1 / 3 / (3**-0.5 + 1e-4)
    combined = -2 / 3 / (3**-0.5 + 1e-4)  # of 1, 1, 0, whose mean is 2/3
    close(ours, [[low + 0.5 * high, low], [high + 0.5 * low, high, high], [combined]], 1e-5)
