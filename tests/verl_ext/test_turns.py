"""Credit by turn in a step of verl's trainer: rewards of the reward function and of one's own agent loop, and verl's own
advantages for responses of one turn. Rewards of verl's agent loop are in ``test_hosts.py``."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch

from grail_advantage.method import build
from grail_advantage.methods.sessions import TurnMethod
from grail_advantage.verl_ext.settings import AGENT_LOOPS, PARALLEL_CALLS
from tests.core.tiny_models import encode
from tests.verl_ext.one_step import Step, row_of, same


class Talk(NamedTuple):
    """A response in parts, of which a tool wrote every second one, the rewards of its calls and its outcome."""

    parts: Sequence[str]
    rewards: list[float]
    outcome: float


TALKS = {
    "a_0_0": Talk(["ask", "two", "so 2<end>"], [0.5], 1.0),
    "a_1_0": Talk(["ask", "two", "again", "no", "3<end>"], [0.5, -0.25], 0.0),
    "a_2_0": Talk(["guess<end>"], [], 0.0),
    "b_0_0": Talk(["5<end>"], [], 1.0),
    "b_1_0": Talk(["six?", "no", "5<end>"], [0.25], 1.0),
    "b_2_0": Talk(["six?", "no", "six!<end>"], [0.0], 1.0),
}
"""The second prompt's responses have one outcome: GRPO gives them nothing."""


def _step(name: str, *overrides: str, **options) -> Step:
    rows = {}
    for key, talk in TALKS.items():
        extra = {"turn_scores": [], "tool_rewards": list(talk.rewards)}
        # Prompts of one length would not be nested.
        prompt = {"a": "Two?", "b": "Two and two?"}[key[0]]
        rows[key] = row_of(prompt, talk.parts, talk.outcome, extra_fields=extra)
    return Step(*overrides, method=build(name, options), rows=rows)


@pytest.fixture
def expected():
    """turn_rloo's, with the rewards of verl's agent loop."""
    return _step("turn_rloo").run()


def test_rewards_of_the_reward_function_and_of_ones_own_loop(expected):
    """A list that compute_score returns goes before the agent loop's; a field of any name, one reward a turn."""
    step = _step("turn_rloo")
    for row in step.rows.values():
        judged = row["extra_fields"]["tool_rewards"]
        # Those of the agent loop would give other advantages.
        row["extra_fields"]["tool_rewards"] = [9.0]
        row["extra_fields"]["reward_extra_info"] = {"tool_rewards": judged, "acc": 1.0}
    assert same(step.run(), expected)
    step = _step("turn_rloo", rewards="turn_scores", align="turns", outcome=False)
    for key, row in step.rows.items():
        row["extra_fields"]["turn_scores"] = [*TALKS[key].rewards, TALKS[key].outcome]
    assert same(step.run(), expected)
    # No response has a field of that name.
    with pytest.raises(ValueError, match="field:mine"):
        _step("turn_rloo", rewards="mine").run()


def test_rewards_are_those_after_a_penalty_in_the_reward():
    """One that is too large is NaN, as one that is not finite: a method of one's own may compare rewards without a look at
    them."""
    step = _step(
        "turn_rloo", "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.1"
    )
    for row in step.rows.values():
        row["old_log_probs"] = row["rollout_log_probs"]
        # Each token is 1 more likely than by the reference: 0.1 is taken off its reward.
        row["ref_log_prob"] = row["old_log_probs"] - 1
    step.rows["a_0_0"]["rm_scores"][-1] = 1e19
    step.run()
    rewards = [float(row["token_level_rewards"].sum()) for row in step.rows.values()]
    actual = step.trainer._weighed.rollouts.rewards.tolist()
    assert actual == pytest.approx([math.nan, *rewards[1:]], nan_ok=True)
    assert rewards[1:] != pytest.approx([talk.outcome for talk in TALKS.values()][1:])


@pytest.mark.parametrize("source", ["by the reward function", "by the loop", "by the data"])
def test_a_batch_without_a_call_trains(source):
    """``None`` is a response's value, also where no other response has more."""
    results = []
    for rewards in ([], None):
        column = {"mine": rewards}
        fields = {
            "by the reward function": {"extra_fields": {"reward_extra_info": column}},
            "by the loop": {"extra_fields": column},
            "by the data": column,
        }
        step = Step(method=build("turn_rloo", {"rewards": "mine"}))
        for row in step.rows.values():
            row.update(fields[source])
        results.append(step.run())
    assert same(*results)
    assert all(results[1][key].any() for key in ("a_0_0", "a_1_0", "a_2_0"))


def _session_of_two(step: Step) -> tuple[slice, slice]:
    """The session a_1 in two rows: its first turn, and the other two after its context was compressed. As verl's agent loop
    writes them, both carry the reward of the last one. The places of both in the whole response."""
    rows = step.rows
    talk = TALKS["a_1_0"]
    # The first reply is in neither row.
    cut, reply = (len(encode(part)) for part in talk.parts[:2])
    parts = (slice(cut), slice(cut + reply, None))
    session = rows["a_1_0"]
    for key, part in zip(("a_1_0", "a_1_1"), parts, strict=True):
        row = rows[key] = {**session, "extra_fields": {}}
        for name in ("responses", "response_mask", "loss_mask", "rollout_log_probs"):
            row[name] = session[name][part]
        row["rm_scores"] = torch.zeros(len(row["responses"]))
        row["rm_scores"][-1] = talk.outcome
    return parts


@pytest.mark.parametrize("source", ["by the loop", "by the reward function"])
def test_several_outputs_of_a_session_are_one_conversation(source, expected):
    """The loop gives each output its own turns' rewards; verl copies what the reward function returned to all outputs."""
    step = _step("turn_rloo", rewards="call_rewards")
    rows = step.rows
    for key, talk in TALKS.items():
        rows[key]["extra_fields"] = {"call_rewards": [[reward] for reward in talk.rewards]}
    # The whole session in one row has the same turns.
    first, last = _session_of_two(step)
    # The loop knows the turns of an output; the reward function saw the whole session.
    if source == "by the loop":
        rows["a_1_0"]["extra_fields"] = {"call_rewards": [[0.5]]}
        rows["a_1_1"]["extra_fields"] = {"call_rewards": [[-0.25], [None]]}
    else:
        for key in ("a_1_0", "a_1_1"):
            judged = {"call_rewards": [[0.5], [-0.25]]}
            rows[key]["extra_fields"] = {"reward_extra_info": judged}
    session_T = expected["a_1_0"]
    assert session_T[last].any()
    expected["a_1_0"] = session_T[first]
    expected["a_1_1"] = session_T[last]
    assert same(step.run(), expected)


def test_a_method_that_reads_rewards_and_knows_no_sessions_is_refused(monkeypatch):
    step = _step("turn_rloo", rewards="")
    monkeypatch.setattr(TurnMethod, "reads", TurnMethod.reads - {"sessions"})
    _session_of_two(step)
    with pytest.raises(ValueError, match="a_1_0 and a_1_1"):
        step.run()


@pytest.mark.parametrize(
    ("name", "base", "scale"),
    [
        ("mt_grpo", "grpo", 1),
        ("turn_grpo", "grpo", 1),
        ("gigpo", "grpo", 2),
        ("turn_rloo", "rloo", 1),
    ],
)
def test_one_turn_gives_verls_own_advantage(name, base, scale):
    """With the responses of the other tests of a step, which are of one turn."""
    verls = Step(f"algorithm.adv_estimator={base}").run()
    step = Step(method=build(name))
    for row in step.rows.values():
        row["extra_fields"] = {"turn_scores": [], "tool_rewards": []}
    # MT-GRPO adds 1e-4 to a deviation, verl 1e-6.
    rounding = 1e-3 if name == "mt_grpo" else 1e-6
    for key, advantages_T in step.run().items():
        torch.testing.assert_close(
            advantages_T, scale * verls[key], rtol=rounding, atol=1e-6
        )


def test_zero_advantage_responses_are_those_without_a_turn_that_trains(expected):
    """Not those in whose group GRPO finds one outcome."""
    of_b = [key for key in TALKS if key.startswith("b")]
    assert bool(expected["b_1_0"].any())
    step = _step("turn_rloo")
    # Without the reward of its call the second prompt's turns all have the return 1.
    for key in of_b[1:]:
        step.rows[key]["extra_fields"]["tool_rewards"] = [0.0]
    step.run()
    step.trainer._skips = True
    step.update()
    assert step.metrics["token_weights/skipped_responses"] == len(of_b)
    rows = step.rows
    assert [key for key in rows if not rows[key]["advantages"].any()] == of_b


@pytest.mark.parametrize(
    ("values", "override", "certain"),
    [
        (np.array([0.5, -0.25, 2.0]), "", True),
        ([0.5, -0.25, None], "", True),
        # Four rewards for three turns; a loop, or an option, with which a turn may make two calls.
        ([0.5, -0.25, 2.0, 2.0], "", False),
        ([0.5, -0.25, 2.0], f"{AGENT_LOOPS}=mine.yaml", False),
        ([0.5, -0.25, 2.0], f"{PARALLEL_CALLS}=2", False),
    ],
)
def test_as_many_rewards_as_turns(values, override, certain):
    """One each with verl's own loop and one call a turn, the last without an answer."""
    flat = _step("turn_rloo", *[override] * bool(override))
    listed = _step("turn_rloo")
    for step, rewards in ((flat, values), (listed, [[0.5], [-0.25], [values[2]]])):
        step.rows["a_1_0"]["extra_fields"]["tool_rewards"] = rewards
    advantages = flat.run()
    assert same(advantages, listed.run()) == certain == bool(advantages["a_1_0"].any())
    assert (flat.metrics["turn_rloo/non_finite_rate"] == 0) == certain
