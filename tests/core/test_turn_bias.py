"""The expected gradients of the methods by turn, enumerated: one is the true one, and the others' bias is what they say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.core.turn_bias import OUTCOMES, TOOL_REWARDS, Environment, Step, compared, environment, reward

pytestmark = pytest.mark.slow

SIZES = (2, 3)
"""Responses to a prompt."""
PLAIN = {"deviation": False}
EXACT = 1e-10


def _close(found_P: torch.Tensor, expected_P: torch.Tensor) -> None:
    torch.testing.assert_close(found_P, expected_P, rtol=0, atol=EXACT)
    assert float(expected_P.norm()) > 0.05


def _truth(known: Environment) -> torch.Tensor:
    return known.gradient(known.expectation(reward))


@pytest.mark.parametrize("stops", [True, False])
def test_turn_rloo_is_the_true_gradient(stops: bool) -> None:
    known = environment(stops=stops)
    assert float(known.probabilities_R.sum()) == pytest.approx(1)
    assert {len(steps) for steps in known.steps} == ({1, 2, 3} if stops else {3})
    for size in SIZES:
        for options in ({}, {"stopped": "zero"}):
            for parts in (False, True):
                _close(known.expected_gradient("turn_rloo", options, size=size, parts=parts), _truth(known))


def test_truncated_responses_train_without_bias_and_masked_ones_with() -> None:
    known = environment(stops=True, cut=0.2)
    assert float(known.probabilities_R.sum()) == pytest.approx(1)
    cut = [steps for steps in known.steps if steps[-1] in TOOL_REWARDS]
    assert {len(steps) for steps in cut} == {1, 2} and all(
        reward(steps) == sum(map(TOOL_REWARDS.get, steps)) for steps in cut
    )
    for options in ({}, {"stopped": "zero"}):
        _close(known.expected_gradient("turn_rloo", options, size=2), _truth(known))
    masked_P = known.expected_gradient("turn_rloo", {"mask_truncated": True}, size=2)
    assert compared(masked_P, _truth(known))[1] > 0.2


def test_the_variance_of_a_group_of_one() -> None:
    """By plain sums: without siblings the advantages are the returns."""
    known = environment(stops=True)
    mean_P, square = torch.zeros(len(known.parameters_P), dtype=torch.float64), 0.0
    for probability, steps, log_probs_K in zip(
        known.probabilities_R.tolist(), known.steps, known.log_probs, strict=True
    ):
        gradient_P = torch.zeros_like(mean_P)
        for turn, log_prob in enumerate(log_probs_K):
            later = [TOOL_REWARDS[step] for step in steps[turn:-1]]
            gradient_P += (sum(later) + OUTCOMES[steps[-1]]) * known.gradient(log_prob)
        mean_P += probability * gradient_P
        square += probability * float((gradient_P**2).sum())
    found_P, variance = known.moments("turn_rloo", {}, size=1)
    torch.testing.assert_close(found_P, mean_P, rtol=0, atol=EXACT)
    assert variance == pytest.approx(square - float((mean_P**2).sum()), abs=EXACT)


def test_the_true_gradient_is_the_slope_of_the_mean_reward() -> None:
    """By finite differences of the parameters, without autograd."""
    known = environment(stops=True)
    exact_P, step = _truth(known), 1e-5
    for place in range(len(exact_P)):
        means = []
        for sign in (1, -1):
            with torch.no_grad():
                known.parameters_P[place] += sign * step
                moved = Environment.build(stops=True)
                moved.parameters_P.copy_(known.parameters_P)
                means.append(float(_mean_reward(moved)))
                known.parameters_P[place] -= sign * step
        assert (means[0] - means[1]) / (2 * step) == pytest.approx(float(exact_P[place]), abs=1e-8)


def _mean_reward(known: Environment) -> float:
    """By plain products of probabilities."""
    names = [(saw, did) for saw, did in dict.fromkeys(step for steps in known.steps for step in steps)]
    logits = dict(zip(sorted(names, key=_place), known.parameters_P.tolist(), strict=True))
    total = 0.0
    for chance, steps in zip(known.chances_R.tolist(), known.steps, strict=True):
        for step in steps:
            of_state = [math.exp(x) for (saw, _), x in logits.items() if saw == step[0]]
            chance *= math.exp(logits[step]) / sum(of_state)
        total += chance * reward(steps)
    return total


def _place(step: Step) -> tuple[int, int]:
    return "xypq".find(step[0]) if step[0] else -1, ["A", "B", "stop", "u", "v"].index(step[1])


def test_a_discount_gives_the_discounted_returns_of_the_turns() -> None:
    """Not the gradient of anything; the baseline takes nothing from it."""
    known, gamma = environment(stops=True), 0.6

    def discounted(steps: Sequence[Step], turn: int) -> float:
        rewards = [*(TOOL_REWARDS[step] for step in steps[:-1]), OUTCOMES[steps[-1]]]
        return sum(gamma ** (later - turn) * rewards[later] for later in range(turn, len(rewards)))

    expected_P = sum(_of_turns(known, lambda steps, k: discounted(steps, k)).values())
    _close(known.expected_gradient("turn_rloo", {"gamma": gamma}), expected_P)


def _of_turns(
    known: Environment,
    value: Callable[[Sequence[Step], int], float],
    key: Callable[[Sequence[Step], int], object] = lambda steps, turn: turn,
) -> dict[object, torch.Tensor]:
    """E[grad log pi(turn) * value], summed over turns with the same key."""
    sums: dict[object, torch.Tensor] = {}
    probabilities_R = known.probabilities_R.detach()
    for probability, steps, log_probs_K in zip(probabilities_R, known.steps, known.log_probs, strict=True):
        for turn, log_prob in enumerate(log_probs_K):
            part = probability * value(steps, turn) * known.gradient(log_prob)
            of = key(steps, turn)
            sums[of] = sums.get(of, 0) + part
    return sums


def _own_share(chance: float, size: int) -> float:
    """The mean share of a response in a mean over those that come so far, of which each does with this probability."""
    return (1 - (1 - chance) ** size) / (size * chance)


@pytest.mark.parametrize("size", SIZES)
def test_the_bias_of_mt_grpo(size: int) -> None:
    """What later turns earn is credited to the first turn alone."""
    known = environment(stops=True)
    outcome_P = known.gradient(known.expectation(lambda steps: OUTCOMES[steps[-1]]))
    of_first = _of_turns(known, lambda steps, turn: sum(TOOL_REWARDS[step] for step in steps[:-1]) * (turn == 0))
    found_P = known.expected_gradient("mt_grpo", PLAIN, size=size)
    _close(found_P, (1 - 1 / size) * (outcome_P + sum(of_first.values())))
    assert compared(found_P, _truth(known))[1] > 0.02
    at_start = slice(0, 3)  # the first turn's logits, whose part is right
    torch.testing.assert_close(found_P[at_start], (1 - 1 / size) * _truth(known)[at_start], rtol=0, atol=EXACT)


@pytest.mark.parametrize("size", SIZES)
def test_the_bias_of_gtpo(size: int) -> None:
    """Each turn's part has the right direction, and shrunk the more the fewer responses have the turn."""
    known = environment(stops=True)
    parts = _of_turns(known, lambda steps, turn: reward(steps) - sum(TOOL_REWARDS[step] for step in steps[:turn]))
    chances = [float(known.expectation(lambda steps, turn=turn: float(len(steps) > turn))) for turn in range(3)]
    expected_P = sum((1 - _own_share(chances[turn], size)) * parts[turn] for turn in range(3))
    found_P = known.expected_gradient("gtpo", {"gamma": 1.0, **PLAIN}, size=size)
    _close(found_P, expected_P)
    assert compared(found_P, _truth(known))[1] > 0.02


@pytest.mark.parametrize("size", SIZES)
def test_the_bias_of_gigpo(size: int) -> None:
    """The same by observation, beside the whole gradient of GRPO without a deviation."""
    known, omega = environment(stops=True), 0.7
    parts = _of_turns(
        known,
        lambda steps, turn: reward(steps) - sum(TOOL_REWARDS[step] for step in steps[:turn]),
        lambda steps, turn: steps[turn][0],
    )
    expected_P = (1 - 1 / size) * _truth(known)
    for saw, part_P in parts.items():
        chance = float(known.expectation(lambda steps, saw=saw: float(any(step[0] == saw for step in steps))))
        expected_P = expected_P + omega * (1 - _own_share(chance, size)) * part_P
    found_P = known.expected_gradient("gigpo", {"gamma": 1.0, "omega": omega, **PLAIN}, size=size)
    _close(found_P, expected_P)
    assert compared(found_P, _truth(known))[1] > 0.02


def test_with_a_fixed_number_of_turns_means_agree_up_to_scale_and_deviations_do_not() -> None:
    known = environment(stops=False)
    exact_P, options = _truth(known), {"gamma": 1.0, **PLAIN}
    _close(known.expected_gradient("gtpo", options), 2 / 3 * exact_P)
    assert compared(known.expected_gradient("gtpo", {**options, "deviation": True}), exact_P)[1] > 0.02


def test_denominators_that_the_policy_chooses() -> None:
    """They bias the unbiased method, too; with a fixed number of turns they are constant."""
    for denominator in ("tokens", "response"):
        for stops in (True, False):
            known = environment(stops=stops)
            _, rest = compared(known.expected_gradient("turn_rloo", {}, denominator=denominator), _truth(known))
            assert rest > 0.02 if stops else rest < EXACT
