"""The expected gradients of the methods by turn, enumerated in a small environment whose policy decides when to stop: one is
the true one, and the bias of the others is what they say.

In a turn the policy calls tool A or B, which gives a reward and says something, or stops; a third turn chooses between two
endings. Every group of responses is enumerated with its probability, the registered methods give its token advantages, and
autograd the gradients of log-probabilities. So the figures have no sampling error. The fixed variant has no stop: three turns.
In the truncated one the length limit cuts off what the tool says to every fifth call, which ends the response. As in verl's
tool agent loop, the call's reward counts and is the last of the list.

Shape suffixes: B responses, T response tokens, P parameters of the policy, R possible responses, K turns of a response.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from grail_advantage.data import Rollouts
from grail_advantage.method import build
from grail_advantage.methods.turn_rewards import list_a_turn

pytestmark = pytest.mark.slow
TURNS = 3
STOP = "stop"
SAID = {"": 0, "x": 1, "y": 2, "p": 3, "q": 4}
"""What tools say, which is all that the policy sees, as token ids; between two turns, each of the one token TURN."""
TURN = len(SAID)
STATES = json.loads(
    Path(__file__).with_name("environment.json").read_text(encoding="utf-8")
)
"""By what the policy saw and what it does: a logit, the reward, and what a tool then says, with probabilities."""
LOGITS = {
    saw: {did: action["logit"] for did, action in actions.items()}
    for saw, actions in STATES.items()
}
SAYS = {
    (saw, did): action["says"]
    for saw, actions in STATES.items()
    for did, action in actions.items()
    if action["says"]
}
REWARDS = {
    (saw, did): action["reward"]
    for saw, actions in STATES.items()
    for did, action in actions.items()
}
TOOL_REWARDS = {step: reward for step, reward in REWARDS.items() if step in SAYS}
OUTCOMES = {step: reward for step, reward in REWARDS.items() if step not in SAYS}
Step = tuple[str, str]
"""What the policy saw, and what it did."""


@dataclass(frozen=True)
class Environment:
    """The possible responses of a policy."""

    parameters_P: torch.Tensor  # float64; its logits, which have a gradient
    steps: list[list[Step]]  # R responses
    # Of each response's turns, (K,), as functions of the parameters
    log_probs: list[torch.Tensor]
    # float64; the probability of what the tools said, given the turns
    chances_R: torch.Tensor

    @property
    def probabilities_R(self) -> torch.Tensor:
        """Of each response, as a function of the parameters."""
        return (
            self.chances_R
            * torch.stack([turns_K.sum() for turns_K in self.log_probs]).exp()
        )

    @cached_property
    def turn_gradients(self) -> list[torch.Tensor]:
        """Of the log-probabilities of each response's turns, (K, P)."""
        return [
            torch.stack([self.gradient(log_prob) for log_prob in turns_K])
            for turns_K in self.log_probs
        ]

    def gradient(self, number: torch.Tensor) -> torch.Tensor:
        """The gradient (P,) of a number."""
        return torch.autograd.grad(number, self.parameters_P, retain_graph=True)[0]

    def expectation(self, value: Callable[[list[Step]], float]) -> torch.Tensor:
        """The mean of a value of responses, as a function of the parameters."""
        return (
            self.probabilities_R
            * torch.tensor([value(steps) for steps in self.steps], dtype=torch.float64)
        ).sum()

    def expected_gradient(
        self,
        name: str,
        options: Mapping[str, Any],
        size: int = 3,
        denominator: str = "constant",
    ) -> torch.Tensor:
        """What a step's gradient is on average, (P,); before any clipping. The loss of a group of ``size`` is the sum over its
        tokens, divided by ``size``, or by the ``tokens`` of the group, or by ``size`` times those of each ``response``."""
        groups = list(combinations_with_replacement(range(len(self.steps)), size))
        responses = [self.steps[place] for group in groups for place in group]
        of_turns_BK = turn_advantages(name, options, responses, size)
        probabilities = self.probabilities_R.detach()
        mean_P = torch.zeros_like(self.parameters_P)
        for number, group in enumerate(groups):
            # A group of the responses 0, 0, 1 comes in 3! / 2! orders.
            orders = math.factorial(size) / math.prod(
                map(math.factorial, Counter(group).values())
            )
            weight = orders * probabilities[list(group)].prod()
            turns = [len(self.steps[place]) for place in group]
            for member, place in enumerate(group):
                count = {
                    "constant": size,
                    "tokens": sum(turns),
                    "response": size * turns[member],
                }[denominator]
                advantages_K = of_turns_BK[number * size + member, : turns[member]]
                mean_P += weight * (advantages_K @ self.turn_gradients[place]) / count
        return mean_P.detach()


@cache
def environment(*, stops: bool, cut: float = 0.0) -> Environment:
    """With a policy that may stop, or with three turns; with this probability that a call's answer is cut off."""
    logits = {
        saw: {did: x for did, x in actions.items() if stops or did != STOP}
        for saw, actions in LOGITS.items()
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

    def go_on(steps_so_far: list[Step], saw: str, chance: float) -> None:
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

    def log_prob(step: Step) -> torch.Tensor:
        of_state = parameters_P[[places[step[0], did] for did in logits[step[0]]]]
        return parameters_P[places[step]] - of_state.logsumexp(0)

    go_on([], "", 1.0)
    log_probs = [torch.stack([log_prob(step) for step in steps_K]) for steps_K in steps]
    return Environment(
        parameters_P, steps, log_probs, torch.tensor(chances, dtype=torch.float64)
    )


def reward(steps: Sequence[Step]) -> float:
    """All rewards of a response."""
    return sum(map(REWARDS.__getitem__, steps))


def turn_advantages(
    name: str, options: Mapping[str, Any], responses: Sequence[Sequence[Step]], size: int
) -> torch.Tensor:
    """A method's advantages of turns (B, K) float64, 0 after the last: its scores, as the hosts ask for them, of groups of
    ``size`` neighbours."""
    method = build(name, options)
    count = len(responses)
    answers = [[[SAID[saw], TURN] for saw, _ in steps[1:]] for steps in responses]
    tokens = [torch.tensor([TURN, *chain.from_iterable(response)]) for response in answers]
    paid = [
        [TOOL_REWARDS[step] for step in steps if step in TOOL_REWARDS]
        for steps in responses
    ]
    rollouts = Rollouts(
        prompts=[torch.tensor([0])] * count,
        responses=tokens,
        mask=pad_sequence(tokens, batch_first=True) == TURN,
        advantages=torch.ones(count),
        groups=torch.arange(count) // size,
        rewards=torch.tensor(
            [OUTCOMES.get(steps[-1], 0.0) for steps in responses], dtype=torch.float64
        ),
        fields={
            "tool_rewards": [
                list_a_turn(*response)
                for response in zip(paid, map(len, responses), strict=True)
            ]
        },
    )
    # As the hosts: what has none trains nothing
    scores_BT = method.scores(rollouts, None).nan_to_num(0.0)
    of_turns_BK = torch.zeros(count, TURNS, dtype=torch.float64)
    for row, steps in enumerate(responses):
        cut = steps[-1] in SAYS  # the last call has no answer
        of_turns_BK[row, : len(steps)] = scores_BT[row, ::2][: len(steps)] * (
            not (cut and method.mask_truncated)
        )
    return of_turns_BK


def compared(found_P: torch.Tensor, exact_P: torch.Tensor) -> tuple[float, float]:
    """The scale of an expected gradient and what no scale mends: its part along the true one, and the length of the rest, both
    in lengths of the true one."""
    # The part along the true gradient, and the length of what is left.
    scale = float(found_P @ exact_P / (exact_P @ exact_P))
    return scale, float((found_P - scale * exact_P).norm() / exact_P.norm())


SIZES = (2, 3)
"""Responses to a prompt."""
PLAIN = {"deviation": False}
EXACT = 1e-10


def _close(found_P: torch.Tensor, expected_P: torch.Tensor) -> None:
    torch.testing.assert_close(found_P, expected_P, rtol=0, atol=EXACT)
    assert float(expected_P.norm()) > 0.05


def _truth(policy: Environment) -> torch.Tensor:
    return policy.gradient(policy.expectation(reward))


def _of_turns(
    policy: Environment, value: Callable[[Sequence[Step], int], float]
) -> torch.Tensor:
    """E[grad log pi(turn) * value], summed over turns."""
    total_P = torch.zeros_like(policy.parameters_P)
    probabilities_R = policy.probabilities_R.detach()
    for probability, steps, gradients_KP in zip(
        probabilities_R, policy.steps, policy.turn_gradients, strict=True
    ):
        total_P = total_P + sum(
            probability * value(steps, turn) * of_P
            for turn, of_P in enumerate(gradients_KP)
        )
    return total_P.detach()


def _returns(steps: Sequence[Step], turn: int, gamma: float = 1.0) -> float:
    """Discounted rewards from a turn on."""
    rewards = [*(TOOL_REWARDS[step] for step in steps[:-1]), OUTCOMES[steps[-1]]]
    return sum(
        gamma ** (later - turn) * rewards[later] for later in range(turn, len(rewards))
    )


@pytest.mark.parametrize("stops", [True, False])
def test_turn_rloo_is_the_true_gradient(stops: bool) -> None:
    """Which is that of the whole reward, or of the returns, credited to each turn."""
    policy = environment(stops=stops)
    assert float(policy.probabilities_R.sum()) == pytest.approx(1)
    assert {len(steps) for steps in policy.steps} == ({1, 2, 3} if stops else {3})
    for value in (lambda steps, turn: reward(steps), _returns):
        _close(_of_turns(policy, value), _truth(policy))
    for size in SIZES:
        for options in ({}, {"stopped": "zero"}):
            _close(
                policy.expected_gradient("turn_rloo", options, size=size), _truth(policy)
            )


def test_truncated_responses_train_without_bias_and_masked_ones_with() -> None:
    policy = environment(stops=True, cut=0.2)
    assert float(policy.probabilities_R.sum()) == pytest.approx(1)
    cut = [steps for steps in policy.steps if steps[-1] in TOOL_REWARDS]
    assert {len(steps) for steps in cut} == {1, 2}
    assert all(reward(steps) == sum(map(TOOL_REWARDS.get, steps)) for steps in cut)
    for options in ({}, {"stopped": "zero"}):
        _close(policy.expected_gradient("turn_rloo", options, size=2), _truth(policy))
    masked_P = policy.expected_gradient("turn_rloo", {"mask_truncated": True}, size=2)
    assert compared(masked_P, _truth(policy))[1] > 0.2


def test_a_discount_gives_the_gradient_of_discounted_returns() -> None:
    """Which is that of no reward; the baseline takes nothing from it."""
    policy = environment(stops=True)
    discounted_P = _of_turns(policy, lambda steps, turn: _returns(steps, turn, 0.6))
    _close(policy.expected_gradient("turn_rloo", {"gamma": 0.6}), discounted_P)


def test_the_others_are_biased() -> None:
    """The first turn's part of `mt_grpo` is right up to scale: it credits what later turns earn to the first turn alone."""
    policy = environment(stops=True)
    for size in SIZES:
        for name, options in {
            "mt_grpo": {},
            "turn_grpo": {"gamma": 1.0},
            "gigpo": {"gamma": 1.0},
        }.items():
            found_P = policy.expected_gradient(name, options | PLAIN, size=size)
            assert compared(found_P, _truth(policy))[1] > 0.02
            if name == "mt_grpo":  # the first turn's logits
                torch.testing.assert_close(
                    found_P[:3], (1 - 1 / size) * _truth(policy)[:3], rtol=0, atol=EXACT
                )


def test_with_a_fixed_number_of_turns_means_agree_up_to_scale_and_deviations_do_not() -> (
    None
):
    policy = environment(stops=False)
    exact_P = _truth(policy)
    options = {"gamma": 1.0, **PLAIN}
    _close(policy.expected_gradient("turn_grpo", options), 2 / 3 * exact_P)
    assert (
        compared(
            policy.expected_gradient("turn_grpo", {**options, "deviation": True}), exact_P
        )[1]
        > 0.02
    )


def test_denominators_that_the_policy_chooses() -> None:
    """They bias the unbiased method, too; with a fixed number of turns they are constant."""
    for denominator in ("tokens", "response"):
        for stops in (True, False):
            policy = environment(stops=stops)
            _, rest = compared(
                policy.expected_gradient("turn_rloo", {}, denominator=denominator),
                _truth(policy),
            )
            assert rest > 0.02 if stops else rest < EXACT
