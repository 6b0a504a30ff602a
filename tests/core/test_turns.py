"""Credit by turn: turns in the mask, rewards by turn, and each method against loops over plain lists."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from grail_advantage.signals.turns import Turn, TurnSignal, runs
from grail_advantage.weighting import batch_weights, scores_of

from grail_advantage import RolloutBatch, compute_token_weights, turn_advantages, turns_to_tokens
from grail_advantage.methods import method
from grail_advantage.metrics import weight_metrics
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


def plain_turn_rloo(talk: Talk, group: list[Talk], gamma: float = 1.0, stopped: str = "left_out") -> list[float]:
    siblings = [other for other in group if other is not talk]
    values = []
    for turn in range(len(talk.turns)):
        with_turn = [_return(other, turn, gamma) for other in siblings if len(other.turns) > turn]
        if stopped == "zero":
            with_turn += [0.0] * (len(siblings) - len(with_turn))
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
    "turn_rloo": [{}, {"gamma": 0.5}, {"stopped": "zero"}],
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
    rows = {"1101011": [(0, 2), (3, 4), (5, 7)], "0111000": [(1, 4)], "0000000": [], "1111111": [(0, 7)], "": []}
    for row, expected in rows.items():
        assert runs(np.array([int(character) for character in row])) == expected


THREE = Talk(["a", "b", "c"], ["x", "y"], [1.0, 2.0], 8.0)
ALIGNED: dict[str, tuple[Any, dict[str, Any], list[float]]] = {
    "one for each answered call": ([1.0, 2.0], {}, [11, 10, 8]),
    "without the outcome": ([1.0, 2.0], {"outcome": False}, [3, 2, 0]),
    "the outcome alone": ([1.0, 2.0], {"rewards": ""}, [8, 8, 8]),
    "a discount": ([1.0, 2.0], {"gamma": 0.5}, [4, 6, 8]),
    "one a turn": ([1.0, 2.0, 4.0], {"align": "turns"}, [15, 14, 12]),
    "no reward for a call": ([1.0, None], {}, [9, 8, 8]),
    "no reward for a turn": ([None, 2.0, None], {"align": "turns"}, [10, 10, 8]),
    "several calls": ([[1.0, 0.5], [2.0]], {}, [11.5, 10, 8]),
    "several calls, one of them without a reward": ([[1.0, None], [None]], {}, [9, 8, 8]),
    "several calls, the last without an answer": ([[1.0], [2.0, 2.0], [4.0]], {}, [17, 16, 12]),
    "several calls in one turn": ([1.0, [2.0, 3.0], None], {"align": "turns"}, [14, 13, 8]),
    "arrays": (np.array([[1.0, 0.5], [2.0, 1.0]]), {}, [12.5, 11, 8]),
    "scores of states": ([0.25, 0.75], {"differences": True}, [8.75, 8.5, 8]),
    "scores of states, one unknown": ([0.25, None, 1.0], {"differences": True, "align": "turns"}, [9, 8.75, 8.75]),
    "scores of states after several calls": ([[0.5, 0.25], [1.0]], {"differences": True}, [9, 8.75, 8]),
}


@pytest.mark.parametrize(("rewards", "options", "expected"), ALIGNED.values(), ids=ALIGNED)
def test_how_rewards_by_turn_are_aligned(rewards: Any, options: dict[str, Any], expected: list[float]) -> None:
    talks = [THREE, Talk(["a"], [], [], 0.0)]
    batch = batch_of(talks)
    batch.fields["tool_rewards"][:] = [rewards, [0.0] if options.get("align") == "turns" else []]
    assert token_advantages(method("turn_rloo").build(options), batch)[0] == expected


def test_all_calls_of_the_only_turn_are_its() -> None:
    talks = [THREE, Talk(["a"], [], [0.5, 0.25, 0.25], 0.0)]
    assert token_advantages(method("turn_rloo").build({}), batch_of(talks)) == [[10, 9, 7], [-10]]


UNCERTAIN: dict[str, Any] = {
    "as many as turns": [1.0, 2.0, 0.5],
    "the last not scored": [1.0, 2.0, None],
    "more than turns": [1.0] * 5,
    "not a number": [NAN, 2.0],
    "infinite": [math.inf, 2.0],
    "too large": [1e30, 2.0],
    "infinite in a list": [[1.0, -math.inf], [0.0]],
}


@pytest.mark.parametrize("name", METHODS)
def test_what_is_uncertain_trains_nothing_and_is_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    signal, talks = method(name).build({}), [talk for talk in talks_of(3) if not talk.masked]
    many = next(row for row, talk in enumerate(talks) if len(talk.turns) == 3)
    expected = plain(name, [talk for row, talk in enumerate(talks) if row != many])
    for given in UNCERTAIN.values():
        caplog.clear()
        batch = replace(batch_of(talks), keys=[f"key_{row}" for row in range(len(talks))])
        batch.fields["tool_rewards"][many] = given
        selection = signal.select(batch)
        result = batch_weights(scores_of(signal, batch, selection, None), batch, selection, signal)
        figures = weight_metrics(result, batch.mask_BT, batch.advantages_B, selection, torch.zeros(0))
        assert figures["non_finite_rate"] == pytest.approx(1 / len(talks))
        assert f"{name}: 1 sessions train nothing. {name}.rewards=tool_rewards: response key_{many} has" in caplog.text
        advantages = token_advantages(signal, batch)
        assert set(advantages.pop(many)) == {0.0}
        close(advantages, expected, 1e-5)
    assert not signal.mask_truncated, "it would bias the gradient"


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "too few": (
        [1.0],
        {},
        r"turn_rloo\.rewards=tool_rewards: response the_key has 3 turns and the 1 rewards .* where align=calls wants 2 or 3",
    ),
    "too many lists": ([[1.0]] * 4, {}, r"3 turns and the 4 rewards .* where align=calls wants 2 or 3"),
    "one a turn": ([1.0] * 2, {"align": "turns"}, r"3 turns and the 2 rewards .* where align=turns wants 3;"),
    "nothing": (None, {}, "3 turns and the 0 rewards None"),
    "a number": (1.5, {}, r"response the_key has 1\.5; give it a list with a number, None or a list"),
    "a word": (["good", "bad"], {}, r"has the reward 'good'; give a number, None or a list of numbers"),
    "a word in a list": ([["good"], [1.0]], {}, r"has the reward \['good'\]; give a number"),
}


@pytest.mark.parametrize(("rewards", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_rewards_that_do_not_fit_name_the_response(rewards: Any, options: dict, message: str) -> None:
    talks = [Talk(["a"], [], [0.0] * ("align" in options), 0.0), Talk(["a", "b", "c"], ["x", "y"], rewards, 1.0)]
    with pytest.raises(ValueError, match=message):
        token_advantages(method("turn_rloo").build(options), replace(batch_of(talks), keys=["other", "the_key"]))


# --- several responses a session -------------------------------------------------------------------------------------


def parts_of(talk: Talk, draw: random.Random) -> list[Talk]:
    """A conversation cut into rows, each with the turns from one compression of its context to the next."""
    cuts = sorted(draw.sample(range(1, len(talk.turns)), draw.randint(0, len(talk.turns) - 1)))
    rewards = [*talk.rewards, None]
    rows = []
    for start, stop in pairwise([0, *cuts, len(talk.turns)]):
        row = Talk(talk.turns[start:stop], talk.said[start : stop - 1], [], NAN, talk.group)
        row.rewards = [[reward] for reward in rewards[start:stop]]  # a list for each turn, so that nothing is ambiguous
        rows.append(row)
    rows[-1].outcome = talk.outcome
    return rows


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("given", ["by row", "with the last row"])
def test_a_session_of_several_responses_is_one_conversation(name: str, given: str) -> None:
    """In any order in the batch; only the last one's reward counts. A first turn of a further row has no observation."""
    draw = random.Random(name)
    for seed in range(3):
        talks = [talk for talk in talks_of(seed) if not talk.masked]
        rows, numbers, of_turns = [], [], []
        for number, talk in enumerate(talks):
            parts = parts_of(talk, draw)
            talk.said = [f"{number} {row}" if part else said for row, part, said in _heard(parts, talk)]
            whole = [reward for part in parts for reward in part.rewards]
            for place, part in enumerate(parts):
                if given == "with the last row":
                    part.rewards = whole if part is parts[-1] else None
                rows.append(part)
                numbers.append((number, place))
                of_turns.append(part)
        order = draw.sample(range(len(rows)), len(rows))
        sessions: dict[int, list[tuple[int, int]]] = {}
        for row, place in enumerate(order):
            sessions.setdefault(numbers[place][0], []).append((numbers[place][1], row))
        batch = batch_of([rows[place] for place in order])
        batch = replace(batch, sessions=[[row for _, row in sorted(of)] for of in sessions.values()])
        found = token_advantages(method(name).build({}), batch)
        by_place = {place: found[row] for row, place in enumerate(order)}
        joined = [
            [value for place, (of, _) in enumerate(numbers) if of == number for value in by_place[place]]
            for number in range(len(talks))
        ]
        close(joined, plain(name, talks), 1e-5)


def _heard(parts: list[Talk], talk: Talk) -> Iterator[tuple[int, bool, str]]:
    """For each turn but the first: which row it is in, whether it begins it, and what was said before it."""
    begins = [(row, turn == 0) for row, part in enumerate(parts) for turn in range(len(part.turns))]
    for (row, begin), said in zip(begins[1:], talk.said, strict=True):
        yield row, begin, said


# --- plain lists -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_plain_lists_give_the_same(name: str) -> None:
    for seed in range(3):
        talks = [talk for talk in talks_of(seed) if not talk.masked]
        for options in OPTIONS[name]:
            found = turn_advantages(
                [[*talk.rewards, None] for talk in talks],
                [talk.outcome for talk in talks],
                [f"prompt {talk.group}" for talk in talks],
                method=name,
                before=[["", *talk.said] for talk in talks],
                **options,
            )
            of_tokens = [turns_to_tokens(of, talk.written) for of, talk in zip(found, talks, strict=True)]
            written = [
                [value for value, wrote in zip(of, talk.written, strict=True) if wrote]
                for of, talk in zip(of_tokens, talks, strict=True)
            ]
            close(written, plain(name, talks, **options), 1e-10)
            assert not any(
                value
                for of, talk in zip(of_tokens, talks, strict=True)
                for value, wrote in zip(of, talk.written, strict=True)
                if not wrote
            )


def test_plain_lists_with_sessions_and_without_certainty(caplog: pytest.LogCaptureFixture) -> None:
    whole = turn_advantages([[0.5, [1, 1], None], [0.0], [2.0]], [1.0, 0.0, None], "ppp")
    assert whole == [[2.5, 2.0, 0.0], [-2.75], [0.25]]
    rows = turn_advantages([[0.5, [1, 1]], [0.0], [None], [2.0]], [7.0, 0.0, 1.0, 0.0], "pppp", sessions="abac")
    assert rows == [[2.5, 2.0], [-2.75], [0.0], [0.25]]
    without = turn_advantages([[math.inf], [0.0], [2.0]], [0.0] * 3, "ppp", keys=["first", "b", "c"])
    assert without == [[0.0], [-2.0], [2.0]] and "row first trains nothing: it has the reward inf" in caplog.text
    assert turn_advantages([[0.2, 0.5], [0.0]], [0.0, 0.0], "pp", differences=True)[0] == pytest.approx([0.5, 0.3])
    assert turn_advantages([], [], []) == [] and turn_advantages([[]], [1.0], ["p"]) == [[]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"outcomes": [1.0]}, "outcomes must be one a row, 2 of them; got 1"),
        ({"keys": ["a"]}, "keys must be one a row"),
        ({"method": "grail"}, "method='grail' gives no advantages of turns"),
        ({"method": "gigpo"}, "pass before="),
        ({"method": "gigpo", "before": [[""], []]}, "before: row 1 has 1 turns and 0 observations"),
        ({"gama": 0.5}, "gama"),
        ({"rewards": [["good"], [0.0]]}, "rewards: row 0 has the reward 'good'"),
        ({"rewards": [1.0, [0.0]]}, "rewards: row 0 has 1.0; give it a list"),
    ],
)
def test_plain_lists_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    known: dict[str, Any] = {"rewards": [[1.0], [0.0]], "outcomes": [0.0, 0.0], "groups": ["p", "p"]}
    with pytest.raises(ValueError, match=message):
        turn_advantages(**known | arguments)
    with pytest.raises(ValueError, match="mask has 2 runs of tokens that the model wrote, advantages are 1 turns'"):
        turns_to_tokens([1.0], [1, 0, 1])


def test_what_a_method_sees_of_a_turn() -> None:
    class Seeing(TurnSignal):
        reads = TurnSignal.reads | {"old_log_probs", "field:score"}

        def turn_advantages(self, sessions: Sequence[Any]) -> list[np.ndarray]:
            seen.extend(sessions)
            return [session.rewards_K for session in sessions]

    seen: list[Any] = []
    talks = [THREE, Talk(["aa"], [], [], 0.0)]
    batch = batch_of(talks)
    log_probs_BT = -torch.rand(batch.mask_BT.shape)
    batch = replace(batch, columns_BT={"old_log_probs": log_probs_BT}, keys=["a", "b"])
    batch = replace(batch, fields={**batch.fields, "score": [{"x": 1}, None]})
    signal = Seeing()
    assert signal.select(replace(batch, columns_BT={})).selected_B.all()
    signal.scores(batch, None)
    first, second = seen
    assert first.key == "a" and first.turns == [Turn(0, 0, 1), Turn(0, 2, 3), Turn(0, 4, 5)]
    assert second.turns == [Turn(1, 0, 2)]
    assert [of.tolist() for of in second.log_probs] == [log_probs_BT[1, :2].tolist()]
    assert first.fields == {"score": [{"x": 1}], "tool_rewards": [[1.0, 2.0]]}


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
