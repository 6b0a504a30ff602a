"""Credit by turn: turns in the mask, rewards by turn, and each method against loops over plain lists. Then the methods that
read the text of tokens."""

import math
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
import regex
import torch

from grail_advantage import Rollouts, turn_advantages, turns_to_tokens
from grail_advantage.answers.text import decode_pieces
from grail_advantage.method import BaseMethod, build
from grail_advantage.methods.text import Pattern, StepValues, cut, matched, result
from tests.core.common import rollouts_of, weighed
from tests.core.plain_weights import close
from tests.core.tiny_models import END, encode, read_lines

NAN = math.nan


@dataclass(eq=False)
class Talk:
    """A response: its turns, with what was said between two of them."""

    turns: list[str]
    replies: list[str]
    rewards: list[float]
    outcome: float
    group: int = 0
    masked: bool = False
    advantage: float = 0.5
    written: list[bool] = field(init=False)
    text: str = field(init=False)

    def __post_init__(self):
        # A reply stands between two turns; of one after the last turn the host has tokens, too.
        pieces = [(turn, True) for turn in self.turns]
        for place, answer in reversed(list(enumerate(self.replies))):
            pieces.insert(place + 1, (answer, False))
        self.text = "".join(text for text, _ in pieces)
        self.written = [wrote for text, wrote in pieces for _ in encode(text)]


def batch_of(talks: Sequence[Talk], **parts) -> Rollouts:
    fields = {
        "masked": torch.tensor([talk.masked for talk in talks]),
        "groups": torch.tensor([talk.group for talk in talks]),
        "rewards": torch.tensor([talk.outcome for talk in talks], dtype=torch.float64),
        "fields": {"tool_rewards": [talk.rewards for talk in talks]},
    }
    ids = [encode(talk.text) for talk in talks]
    advantages = [talk.advantage for talk in talks]
    return rollouts_of(ids, advantages, [talk.written for talk in talks], **fields | parts)


def of_rows(values: torch.Tensor, r: Rollouts) -> list[list[float]]:
    """Of the tokens that the model wrote."""
    return [row[wrote].tolist() for row, wrote in zip(values, r.written, strict=True)]


def token_advantages(method: BaseMethod, r: Rollouts) -> list[list[float]]:
    return of_rows(weighed(method, r).advantages, r)


def talks_of(seed: int, *, masked: bool = False) -> list[Talk]:
    draw = random.Random(seed)
    talks = []
    # Five conversations of each of three prompts, in turn.
    for group in [*range(3)] * 5:
        turns = ["a" * draw.randint(1, 3) for _ in range(draw.randint(1, 4))]
        answers = [draw.choice(["yes", "no"]) for _ in turns[1:]]
        rewards = [draw.choice([0.0, 0.5, 1.0, -0.25]) for _ in answers]
        talks.append(
            Talk(
                turns,
                answers,
                rewards,
                draw.choice([0.0, 1.0, 0.3]),
                group,
                masked and draw.random() < 0.1,
            )
        )
    return talks


def _return(talk: Talk, turn: int, gamma: float) -> float:
    rewards = [*talk.rewards, talk.outcome]
    return math.fsum(gamma**delay * reward for delay, reward in enumerate(rewards[turn:]))


def _compared(
    value: float, returns: list[float], deviation: bool, epsilon: float = 1e-6
) -> float:
    if len(returns) == 1:
        return 0.0
    divisor = statistics.stdev(returns) + epsilon if deviation else 1.0
    return (value - statistics.fmean(returns)) / divisor


def plain_turn_rloo(
    talk: Talk, group: list[Talk], gamma: float = 1.0, stopped: str = "left_out"
) -> list[float]:
    siblings = [sibling for sibling in group if sibling is not talk]
    values = []
    for turn in range(len(talk.turns)):
        with_turn = [
            _return(sibling, turn, gamma)
            for sibling in siblings
            if len(sibling.turns) > turn
        ]
        if stopped == "zero":
            with_turn += [0.0] * (len(siblings) - len(with_turn))
        # Where no sibling has the turn, the mean of their first turns; 0 without siblings.
        instead = [_return(sibling, 0, gamma) for sibling in siblings] or [0.0]
        values.append(_return(talk, turn, gamma) - statistics.fmean(with_turn or instead))
    return values


def plain_mt_grpo(
    talk: Talk, group: list[Talk], alpha: float = 1.0, deviation: bool = True
) -> list[float]:
    """Its authors' assignment: ``assigned = outcome + alpha * turn * before_result``, or ``combined`` without a result."""

    def advantage(value):
        return _compared(value(talk), [value(member) for member in group], deviation, 1e-4)

    # In a conversation without a call the one turn has all that is earned.
    outcome = advantage(lambda member_talk: member_talk.outcome)
    if not talk.rewards:
        return [
            advantage(
                lambda member_talk: math.fsum(member_talk.rewards) + member_talk.outcome
            )
        ]
    return [
        outcome + alpha * advantage(lambda member_talk: math.fsum(member_talk.rewards)),
        *[outcome] * len(talk.rewards),
    ]


def plain_turn_grpo(
    talk: Talk, group: list[Talk], gamma: float = 0.9, deviation: bool = True
) -> list[float]:
    values = []
    for turn in range(len(talk.turns)):
        returns = [
            _return(member, turn, gamma) for member in group if len(member.turns) > turn
        ]
        values.append(_compared(_return(talk, turn, gamma), returns, deviation))
    return values


def plain_gigpo(
    talk: Talk,
    group: list[Talk],
    gamma: float = 0.95,
    omega: float = 1.0,
    deviation: bool = True,
) -> list[float]:
    outcome = plain_turn_grpo(talk, group, 1.0, deviation)[0]
    values = []
    for turn, heard in enumerate(["", *talk.replies]):
        places = [
            (member, place)
            for member in group
            for place, answer in enumerate(["", *member.replies])
            if answer == heard
        ]
        returns = [_return(member, place, gamma) for member, place in places]
        values.append(
            outcome + omega * _compared(_return(talk, turn, gamma), returns, deviation)
        )
    return values


PLAIN = {
    "turn_rloo": (plain_turn_rloo, [{}, {"gamma": 0.5}, {"stopped": "zero"}]),
    "mt_grpo": (plain_mt_grpo, [{}, {"alpha": 0.5, "deviation": False}]),
    "turn_grpo": (plain_turn_grpo, [{}, {"gamma": 1.0, "deviation": False}]),
    "gigpo": (plain_gigpo, [{}, {"gamma": 0.5, "omega": 0.25, "deviation": False}]),
}
"""And the options that each is tried with."""
each_method = pytest.mark.parametrize("name", PLAIN)


def plain(name: str, talks: list[Talk], **options) -> list[list[float]]:
    """Token advantages of the tokens that the model wrote."""
    advantages = []
    for talk in talks:
        of_turns = PLAIN[name][0](
            talk, [member for member in talks if member.group == talk.group], **options
        )
        of_tokens = np.repeat(of_turns, list(map(len, talk.turns)))
        advantages.append((of_tokens * (not talk.masked)).tolist())
    return advantages


@each_method
def test_methods_and_plain_lists_against_loops(name):
    """Masked responses train nothing and count for the others, as in GRPO. A response that fills up a batch has no turn,
    whatever is in its fields; a token that a correction drops keeps its turn, untrained."""
    for seed in range(4):
        talks = talks_of(seed, masked=True)
        trained = [talk for talk in talks if not talk.masked]
        # A filler of another group, and a turn whose first token a correction has dropped.
        r = batch_of([*talks, Talk([], ["filler"], [1.0, 2.0], 0.0, group=7)])
        r = replace(r, mask=r.mask.clone())
        r.mask[0, 0] = False
        for options in PLAIN[name][1]:
            expected = plain(name, talks, **options)
            expected[0][0] = 0.0
            close(token_advantages(build(name, options), r), [*expected, []], 1e-5)
            advantages = turn_advantages(
                [[*talk.rewards, None] for talk in trained],
                [talk.outcome for talk in trained],
                [f"prompt {talk.group}" for talk in trained],
                method=name,
                before=[["", *talk.replies] for talk in trained],
                **options,
            )
            for turn_values, talk, expected_values in zip(
                advantages, trained, plain(name, trained, **options), strict=True
            ):
                of_tokens = np.array(turns_to_tokens(turn_values, talk.written))
                wrote = np.array(talk.written)
                assert of_tokens[wrote] == pytest.approx(
                    expected_values, rel=1e-10, abs=1e-10
                )
                assert not of_tokens[~wrote].any()


# Rewards 1 and 2 with the outcome 8: from its three turns on it earns 11, 10 and 8.
THREE = Talk(["a", "b", "c"], ["x", "y"], [1.0, 2.0], 8.0)
ALIGNED = read_lines("aligned.jsonl")
"""Of a response of three turns: a list of rewards, options, and each turn's advantage."""


def test_how_rewards_by_turn_are_aligned():
    arrays = {
        "rewards": np.array([[1.0, 0.5], [2.0, 1.0]]),
        "options": {},
        "advantages": [12.5, 11, 8],
    }
    for case in [*ALIGNED, arrays]:
        rewards = [0.0] if case["options"].get("align") == "turns" else []
        r = batch_of(
            [THREE, Talk(["a"], [], [], 0.0)],
            fields={"tool_rewards": [case["rewards"], rewards]},
        )
        assert (
            token_advantages(build("turn_rloo", case["options"]), r)[0]
            == case["advantages"]
        ), case
    talks = [THREE, Talk(["a"], [], [0.5, 0.25, 0.25], 0.0)]
    assert token_advantages(build("turn_rloo"), batch_of(talks)) == [[10, 9, 7], [-10]], (
        "all calls of the only turn"
    )


UNCERTAIN = [
    [1.0, 2.0, 0.5],
    [NAN, 2.0],
    [1e30, 2.0],
    [10**400, 2],
    [[1.0, -math.inf], [0.0]],
    None,  # None: an outcome that is not finite
]


@each_method
def test_what_is_uncertain_trains_nothing_and_is_named(name, caplog):
    """And is compared with nothing: rewards of no certain turn, and an outcome that is not finite."""
    method = build(name)
    talks = talks_of(3)
    # Of three turns: two rewards would be certain, three are not.
    many = next(row for row, talk in enumerate(talks) if len(talk.turns) == 3)
    expected = plain(name, [talk for row, talk in enumerate(talks) if row != many])
    for rewards in UNCERTAIN:
        caplog.clear()
        r = batch_of(talks, keys=[f"key_{row}" for row in range(len(talks))])
        if rewards is None:
            # the host masks such a response
            r.rewards[many] = NAN
            r.masked[many] = True
        else:
            r.fields["tool_rewards"][many] = rewards
            assert weighed(method, r).metrics["non_finite_rate"] == pytest.approx(
                1 / len(talks)
            )
        advantages = token_advantages(method, r)
        assert name in caplog.text and f"key_{many}" in caplog.text
        assert set(advantages.pop(many)) == {0.0}
        close(advantages, expected, 1e-5)
    assert not method.mask_truncated, "it would bias the gradient"


def parts_of(talk: Talk, draw: random.Random) -> list[Talk]:
    """A conversation cut into rows, each with the turns from one compression of its context to the next."""
    cuts = sorted(
        draw.sample(range(1, len(talk.turns)), draw.randint(0, len(talk.turns) - 1))
    )
    # lists, so that nothing is ambiguous
    rewards = [[reward] for reward in (*talk.rewards, None)]
    rows = []
    for start, stop in pairwise([0, *cuts, len(talk.turns)]):
        rows.append(
            Talk(
                talk.turns[start:stop],
                talk.replies[start : stop - 1],
                rewards[start:stop],
                NAN,
                talk.group,
            )
        )
    rows[-1].outcome = talk.outcome
    for at in cuts:
        # No other turn begins like the first of a further row
        talk.replies[at - 1] = f"{id(talk)} {at}"
    return rows


@each_method
def test_a_session_of_several_responses_is_one_conversation(name):
    """In any order in the batch; only the last one's reward counts. A first turn of a further row has no observation. Each row
    has its turns' rewards, or the last one all of them."""
    draw = random.Random(name)
    for seed in range(4):
        talks = talks_of(seed)
        rows_by_session = []
        for number, talk in enumerate(talks):
            parts = parts_of(talk, draw)
            all_rewards = [reward for part in parts for reward in part.rewards]
            for part in parts if seed % 2 else ():
                part.rewards = all_rewards if part is parts[-1] else None
            rows_by_session += [((number, place), part) for place, part in enumerate(parts)]
        # A batch may hold the rows in any order.
        draw.shuffle(rows_by_session)
        sessions, rows = zip(*rows_by_session, strict=True)
        advantages = token_advantages(build(name), batch_of(rows, sessions=sessions))
        joined: list[list[float]] = [[] for _ in talks]
        for (number, _), of_row in sorted(zip(sessions, advantages, strict=True)):
            joined[number] += of_row
        close(joined, plain(name, talks), 1e-5)


def test_plain_lists_with_sessions_and_without_certainty(caplog):
    # The third row has no reward of its own: it ends the first row's conversation, whose outcome is 1.
    rows = turn_advantages(
        [[0.5, [1, 1]], [0.0], [None], [2.0]], [7.0, 0.0, 1.0, 0.0], "pppp", sessions="abac"
    )
    assert rows == [[2.5, 2.0], [-2.75], [0.0], [0.25]]
    # The infinite row is compared with no other: 0 and 2 are each less the other one.
    without = turn_advantages(
        [[math.inf], [0.0], [2.0]], [0.0] * 3, "ppp", keys=["first", "b", "c"]
    )
    assert (
        without == [[0.0], [-2.0], [2.0]]
        and "first" in caplog.text
        and "inf" in caplog.text
    )
    assert turn_advantages([], [], []) == [] and turn_advantages([[]], [1.0], ["p"]) == [[]]


def test_a_response_with_advantage_0_may_have_turns_that_train():
    talks = [Talk(["a", "b"], ["x"], [reward], 0.0, advantage=0.0) for reward in (1.0, 0.0)]
    method = build("turn_rloo")
    assert weighed(method, batch_of(talks)).selected.tolist() == [True, True]
    # The first turns earn 1 and 0, each less the sibling's; the second ones earn nothing.
    assert token_advantages(method, batch_of(talks)) == [[1.0, 0.0], [-1.0, 0.0]]
    talks[0].rewards = [0.0]
    assert weighed(method, batch_of(talks)).selected.tolist() == [False, False]


def sentence(advantage: float, text: str, group: int = 0, masked: bool = False) -> Talk:
    """A response of one turn, which ends."""
    return Talk([text + END], [], [], advantage, group, masked, advantage)


SUMS = [
    sentence(1.0, "3+4=7, 7*2= $1,400.50."),
    sentence(-1.0, "3+4=8 then 8="),
    sentence(0.5, "none here"),
    sentence(0.0, "1=1"),
]
# The numbers after an equals sign: of the first text 7 and 1,400.50, of the second 8 once.
RIGHT = "....#.......#########.."
WRONG = "....#........."
NONE = "." * 10
UNTRAINED = "1" * 4
PICTURES = [
    ({}, [RIGHT, WRONG.replace("#", "."), NONE, UNTRAINED]),
    ({"gate": "wrong", "elsewhere": 1}, ["1" * 23, WRONG, "1" * 10, UNTRAINED]),
    ({"gate": "all", "inside": 3, "outside": 0.5}, [RIGHT, WRONG, NONE, UNTRAINED]),
    (
        {"expression": r"=7(?P<content>, 7)"},
        [".....###...............", NONE + "....", NONE, UNTRAINED],
    ),
]
"""Inside is #, outside a dot, and 1 a weight of 1; the last character is the end token."""


def test_what_matches_is_inside():
    r = batch_of(SUMS)
    for options, pictures in PICTURES:
        values = {
            "#": options.get("inside", 1.0),
            ".": options.get("outside", 0.0),
            "1": 1.0,
        }
        weights = of_rows(weighed(Pattern(**options), r).weights, r)
        close(weights, [[values[sign] for sign in picture] for picture in pictures])


def test_an_expression_that_takes_too_long_leaves_the_row_as_it_is():
    w = weighed(
        Pattern(expression="(a|aa)+$"), batch_of([sentence(1.0, "a" * 60 + "b"), SUMS[0]])
    )
    assert w.failed.tolist() == [True, False]
    assert w.weights[0].tolist() == [1.0] * 62


def test_a_token_with_the_first_bytes_of_a_character_that_matches_is_inside():
    """And one with the first bytes of a character is of the step that the character is in."""
    euro = "€".encode()
    # The third token has no text, and is of the step that ends before it.
    pieces = [b"a", b";", b"", euro[:1], euro[1:2], euro[2:] + b"b", b"", b"c"]
    texts = decode_pieces(pieces)
    have_bytes = np.array(list(map(bool, pieces)))
    inside = matched(texts, have_bytes, regex.compile("€"))
    assert inside.tolist() == [False, False, False, True, True, True, False, False]
    steps, states = cut(texts, have_bytes, regex.compile(";"))
    assert steps.tolist() == [0, 0, 0, 1, 1, 1, 1, 1] and states == [(0, "a;"), (1, "€bc")]


def plain_step_values(rows: Sequence[Talk], shrink: float) -> list[Sequence[float]]:
    """Over characters, with sums over all pairs of responses."""
    steps_of = {
        id(row): re.findall(r"[^;]*;+|[^;]+$", row.text.removesuffix(END)) or [""]
        for row in rows
    }
    used = [row for row in rows if not row.masked and math.isfinite(row.advantage)]

    def state(line):
        numbers = re.findall(r"-?[0-9]+", line)
        return int(numbers[-1]) if numbers else " ".join(line.split())

    def value(row, place):
        if place == len(steps_of[id(row)]) - 1:
            return row.advantage
        siblings = [
            (sibling, steps_of[id(sibling)])
            for sibling in used
            if sibling.group == row.group
        ]
        current = state(steps_of[id(row)][place])
        same_state = []
        for sibling, steps in siblings:
            if place < len(steps) - 1 and state(steps[place]) == current:
                same_state.append(sibling.advantage)
        return math.fsum(same_state) / (len(same_state) + shrink)

    advantages = []
    for row in rows:
        if row not in used:
            advantages.append([0.0] * len(row.written))
            continue
        steps = steps_of[id(row)]
        values = [0.0, *(value(row, place) for place in range(len(steps)))]
        lengths = list(map(len, steps))
        # The end token is of the last step.
        lengths[-1] += 1
        # Values 0, 0.5, 1 give the steps 0.5 and 0.5.
        advantages.append(np.repeat(np.diff(values), lengths))
    return advantages


@pytest.mark.parametrize("seed", range(4))
def test_step_values_against_loops(seed):
    """Masked responses, and those whose advantage is not finite, count in no state and train nothing; those with 0 do both."""
    draw = random.Random(seed)
    rows = []
    for group in [*range(3)] * 8:
        steps = [
            draw.choice(["1=-2", "so 3", "say", "say it", "4"])
            for _ in range(draw.randint(1, 4))
        ]
        text = "".join(step + draw.choice([";", ";;"]) for step in steps).rstrip(
            ";" * draw.randint(0, 1)
        )
        advantage = draw.choice(
            [0.0, 0.5, 1.25, -0.75, *([NAN, -math.inf] if seed % 2 else [])]
        )
        rows.append(sentence(advantage, text, group, masked=draw.random() < 0.15))
    for shrink in (1.0, 0.0, 2.5):
        advantages = token_advantages(
            StepValues(separator=";+", shrink=shrink), batch_of(rows)
        )
        close(advantages, plain_step_values(rows, shrink), 1e-5)


RESULTS = {
    "so 1,200.50 it is": "1200.5",
    "-0.0": "0",
    "= -007": "-7",
    "+3.": "3",
    # After a digit, a letter or a bracket the sign is an operator.
    "10-3": "3",
    "x-3, y=-4": "-4",
    "(1)-3": "3",
    # Commas part thousands alone.
    "(3,4)": "4",
    "1,2345": "2345",
    "12,345,678": "12345678",
    " a  b\n": "a b",
    "12, then": "12",
}


def test_results():
    assert {step: result(step) for step in RESULTS} == RESULTS
