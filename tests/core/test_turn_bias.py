"""The expected gradients of the methods by turn, enumerated in a small environment whose policy decides when to stop: one is
the true one, and the bias of the others is what they say.

In a turn the policy calls tool A or B, which gives a reward and says something, or stops; a third turn chooses between two
endings. Every group of responses is enumerated with its probability, the registered methods give its token advantages, and
autograd the gradients of log-probabilities. So the figures have no sampling error. The fixed variant has no stop: three turns.
In the truncated one the length limit cuts off what the tool says to every fifth call, which ends the response. As in verl's
tool agent loop, the call's reward counts and is the last of the list.

Shape suffixes: B responses, P parameters of the policy, R possible responses, K turns of a response.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from grail_advantage import turn_advantages

pytestmark = pytest.mark.slow
STATES = json.loads(Path(__file__).with_name("environment.json").read_text())
"""By what the policy saw and what it does: a logit, the reward, and what a tool then says, with probabilities."""
ACTIONS = {
    (saw, did): action for saw, actions in STATES.items() for did, action in actions.items()
}
SAYS = {step: action["says"] for step, action in ACTIONS.items() if action["says"]}
REWARDS = {step: action["reward"] for step, action in ACTIONS.items()}
TOOL_REWARDS = {step: reward for step, reward in REWARDS.items() if step in SAYS}
OUTCOMES = {step: reward for step, reward in REWARDS.items() if step not in SAYS}
Step = tuple[str, str]
"""What the policy saw, and what it did."""


class Environment(NamedTuple):
    """The possible responses of a policy; all numbers are float64."""

    steps: list[list[Step]]  # R responses
    probabilities_R: Tensor
    # Of the log-probabilities of each response's turns, (K, P)
    turn_gradients: list[Tensor]
    # The gradient of the mean reward
    truth_P: Tensor

    def expected_gradient(
        self,
        name: str,
        options: Mapping[str, Any],
        size: int = 3,
        denominator: str = "constant",
    ) -> Tensor:
        """What a step's gradient is on average, (P,); before any clipping. The loss of a group of ``size`` is the sum over its
        tokens, divided by ``size``, or by the ``tokens`` of the group, or by ``size`` times those of each ``response``."""
        groups = list(combinations_with_replacement(range(len(self.steps)), size))
        responses = [self.steps[place] for group in groups for place in group]
        advantages_BK = turn_advantages(
            [[TOOL_REWARDS.get(step) for step in steps] for steps in responses],
            [OUTCOMES.get(steps[-1], 0.0) for steps in responses],
            # Neighbours answer one prompt.
            [row // size for row in range(len(responses))],
            method=name,
            before=[[saw for saw, _ in steps] for steps in responses],
            **options,
        )
        mean_P = torch.zeros_like(self.truth_P)
        for number, group in enumerate(groups):
            # A group of the responses 0, 0, 1 comes in 3! / 2! orders.
            orders = math.factorial(size) / math.prod(
                map(math.factorial, Counter(group).values())
            )
            weight = orders * self.probabilities_R[list(group)].prod()
            turns = [len(self.steps[place]) for place in group]
            for member, place in enumerate(group):
                # The last call has no answer: the response is truncated.
                if options.get("mask_truncated") and self.steps[place][-1] in SAYS:
                    continue
                count = {
                    "constant": size,
                    "tokens": sum(turns),
                    "response": size * turns[member],
                }[denominator]
                of_turns = advantages_BK[number * size + member]
                advantages_K = torch.tensor(of_turns, dtype=torch.float64)
                mean_P += weight * (advantages_K @ self.turn_gradients[place]) / count
        return mean_P


@cache
def environment(*, stops: bool, cut: float = 0.0) -> Environment:
    """With a policy that may stop, or with three turns; with this probability that a call's answer is cut off."""
    logits = {
        saw: {did: x["logit"] for did, x in actions.items() if stops or did != "stop"}
        for saw, actions in STATES.items()
    }
    places = {
        step: place
        for place, step in enumerate(
            (s, d) for s, actions in logits.items() for d in actions
        )
    }
    parameters_P = torch.tensor(
        [x for actions in logits.values() for x in actions.values()], dtype=torch.float64
    )
    parameters_P.requires_grad_()
    steps: list[list[Step]] = []
    chances: list[float] = []

    def go_on(steps_so_far, saw, chance):
        for did in logits[saw]:
            now = [*steps_so_far, (saw, did)]
            ends = [chance]
            if (saw, did) in SAYS:
                # A call that is cut off ends the response; it goes on with the rest of the probability.
                ends = [chance * cut] if cut else []
            steps.extend([now] * len(ends))
            chances.extend(ends)
            for answer, share in SAYS.get((saw, did), {}).items():
                go_on(now, answer, chance * share * (1 - cut))

    def log_prob(step):
        of_state = parameters_P[[places[step[0], did] for did in logits[step[0]]]]
        return parameters_P[places[step]] - of_state.logsumexp(0)

    def gradient(number):
        return torch.autograd.grad(number, parameters_P, retain_graph=True)[0]

    go_on([], "", 1.0)
    log_probs = [torch.stack([log_prob(step) for step in steps_K]) for steps_K in steps]
    of_turns_R = torch.stack([turns_K.sum() for turns_K in log_probs]).exp()
    probabilities_R = torch.tensor(chances, dtype=torch.float64) * of_turns_R
    rewards_R = torch.tensor(list(map(_returns, steps)), dtype=torch.float64)
    return Environment(
        steps,
        probabilities_R.detach(),
        [torch.stack(list(map(gradient, turns_K))) for turns_K in log_probs],
        gradient(probabilities_R @ rewards_R),
    )


def _returns(steps: Sequence[Step], turn: int = 0, gamma: float = 1.0) -> float:
    """Discounted rewards from a turn on."""
    return sum(gamma**delay * REWARDS[step] for delay, step in enumerate(steps[turn:]))


def bias(found_P: Tensor, exact_P: Tensor) -> float:
    """What no scale mends: the length of what is left of an expected gradient without its part along the true one, in
    lengths of that."""
    scale = found_P @ exact_P / (exact_P @ exact_P)
    return float((found_P - scale * exact_P).norm() / exact_P.norm())


SIZES = (2, 3)
"""Responses to a prompt."""
PLAIN = {"deviation": False}
EXACT = 1e-10


def _close(found_P: Tensor, expected_P: Tensor):
    torch.testing.assert_close(found_P, expected_P, rtol=0, atol=EXACT)
    assert float(expected_P.norm()) > 0.05


def _of_turns(policy: Environment, value: Callable[[Sequence[Step], int], float]) -> Tensor:
    """E[grad log pi(turn) * value], summed over turns."""
    total_P = torch.zeros_like(policy.truth_P)
    for probability, steps, gradients_KP in zip(
        policy.probabilities_R, policy.steps, policy.turn_gradients, strict=True
    ):
        for turn, gradient_P in enumerate(gradients_KP):
            total_P += probability * value(steps, turn) * gradient_P
    return total_P


@pytest.mark.parametrize("stops", [True, False])
def test_turn_rloo_is_the_true_gradient(stops):
    policy = environment(stops=stops)
    assert float(policy.probabilities_R.sum()) == pytest.approx(1)
    assert {len(steps) for steps in policy.steps} == ({1, 2, 3} if stops else {3})
    for size in SIZES:
        for options in ({}, {"stopped": "zero"}):
            _close(
                policy.expected_gradient("turn_rloo", options, size=size), policy.truth_P
            )


def test_truncated_responses_train_without_bias_and_masked_ones_with():
    policy = environment(stops=True, cut=0.2)
    assert float(policy.probabilities_R.sum()) == pytest.approx(1)
    cut = [steps for steps in policy.steps if steps[-1] in TOOL_REWARDS]
    assert {len(steps) for steps in cut} == {1, 2}
    for options in ({}, {"stopped": "zero"}):
        _close(policy.expected_gradient("turn_rloo", options, size=2), policy.truth_P)
    masked_P = policy.expected_gradient("turn_rloo", {"mask_truncated": True}, size=2)
    assert bias(masked_P, policy.truth_P) > 0.2


def test_a_discount_gives_the_gradient_of_discounted_returns():
    """Which is that of no reward; the baseline takes nothing from it."""
    policy = environment(stops=True)
    discounted_P = _of_turns(policy, lambda steps, turn: _returns(steps, turn, 0.6))
    _close(policy.expected_gradient("turn_rloo", {"gamma": 0.6}), discounted_P)


def test_the_others_are_biased():
    """The first turn's part of `mt_grpo` is right up to scale: it credits what later turns earn to the first turn alone."""
    policy = environment(stops=True)
    for size in SIZES:
        for name, options in {
            "mt_grpo": {},
            "turn_grpo": {"gamma": 1.0},
            "gigpo": {"gamma": 1.0},
        }.items():
            found_P = policy.expected_gradient(name, options | PLAIN, size=size)
            assert bias(found_P, policy.truth_P) > 0.02
            if name == "mt_grpo":  # the first turn's logits
                torch.testing.assert_close(
                    found_P[:3], (1 - 1 / size) * policy.truth_P[:3], rtol=0, atol=EXACT
                )


def test_with_a_fixed_number_of_turns_means_agree_up_to_scale_and_deviations_do_not():
    policy = environment(stops=False)
    options = {"gamma": 1.0, **PLAIN}
    _close(policy.expected_gradient("turn_grpo", options), 2 / 3 * policy.truth_P)
    divided_P = policy.expected_gradient("turn_grpo", {**options, "deviation": True})
    assert bias(divided_P, policy.truth_P) > 0.02


def test_denominators_that_the_policy_chooses():
    """They bias the unbiased method, too; with a fixed number of turns they are constant."""
    for denominator in ("tokens", "response"):
        for stops in (True, False):
            policy = environment(stops=stops)
            found_P = policy.expected_gradient("turn_rloo", {}, denominator=denominator)
            rest = bias(found_P, policy.truth_P)
            assert rest > 0.02 if stops else rest < EXACT
