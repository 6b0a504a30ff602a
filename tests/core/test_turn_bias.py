"""The expected gradients of the methods by turn, enumerated: one is the true one, and the others' bias is what they say."""

from __future__ import annotations

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


def _of_turns(
    known: Environment,
    value: Callable[[Sequence[Step], int], float],
    key: Callable[[Sequence[Step], int], object] = lambda steps, turn: turn,
) -> dict[object, torch.Tensor]:
    """E[grad log pi(turn) * value], summed over turns with the same key."""
    sums: dict[object, torch.Tensor] = {}
    probabilities_R = known.probabilities_R.detach()
    for probability, steps, gradients_KP in zip(probabilities_R, known.steps, known.turn_gradients, strict=True):
        for turn, gradient_P in enumerate(gradients_KP):
            of = key(steps, turn)
            sums[of] = sums.get(of, 0) + probability * value(steps, turn) * gradient_P
    return sums


def _returns(steps: Sequence[Step], turn: int, gamma: float = 1.0) -> float:
    """Discounted rewards from a turn on."""
    rewards = [*(TOOL_REWARDS[step] for step in steps[:-1]), OUTCOMES[steps[-1]]]
    return sum(gamma ** (later - turn) * rewards[later] for later in range(turn, len(rewards)))


def _own_share(chance: float, size: int) -> float:
    """The mean share of a response in a mean over those that come so far, of which each does with this probability."""
    return (1 - (1 - chance) ** size) / (size * chance)


@pytest.mark.parametrize("stops", [True, False])
def test_turn_rloo_is_the_true_gradient(stops: bool) -> None:
    """Which is that of the whole reward, or of the returns, credited to each turn."""
    known = environment(stops=stops)
    assert float(known.probabilities_R.sum()) == pytest.approx(1)
    assert {len(steps) for steps in known.steps} == ({1, 2, 3} if stops else {3})
    for value in (lambda steps, turn: reward(steps), _returns):
        _close(sum(_of_turns(known, value).values()), _truth(known))
    for size in SIZES:
        for options in ({}, {"stopped": "zero"}):
            for parts in (False, True):
                _close(known.expected_gradient("turn_rloo", options, size=size, parts=parts), _truth(known))


def test_truncated_responses_train_without_bias_and_masked_ones_with() -> None:
    known = environment(stops=True, cut=0.2)
    assert float(known.probabilities_R.sum()) == pytest.approx(1)
    cut = [steps for steps in known.steps if steps[-1] in TOOL_REWARDS]
    assert {len(steps) for steps in cut} == {1, 2}
    assert all(reward(steps) == sum(map(TOOL_REWARDS.get, steps)) for steps in cut)
    for options in ({}, {"stopped": "zero"}):
        _close(known.expected_gradient("turn_rloo", options, size=2), _truth(known))
    masked_P = known.expected_gradient("turn_rloo", {"mask_truncated": True}, size=2)
    assert compared(masked_P, _truth(known))[1] > 0.2


def test_a_discount_and_the_variance_of_a_group_of_one() -> None:
    """A discount's is the gradient of nothing; the baseline takes nothing from it. Without siblings advantages are returns."""
    known = environment(stops=True)
    discounted_P = sum(_of_turns(known, lambda steps, turn: _returns(steps, turn, 0.6)).values())
    _close(known.expected_gradient("turn_rloo", {"gamma": 0.6}), discounted_P)
    square = 0.0
    for probability, steps, of_KP in zip(
        known.probabilities_R.tolist(), known.steps, known.turn_gradients, strict=True
    ):
        gradient_P = sum(_returns(steps, turn) * of_P for turn, of_P in enumerate(of_KP))
        square += probability * float((gradient_P**2).sum())
    found_P, variance = known.moments("turn_rloo", {}, size=1)
    _close(found_P, _truth(known))
    assert variance == pytest.approx(square - float((_truth(known) ** 2).sum()), abs=EXACT)


@pytest.mark.parametrize("size", SIZES)
def test_the_bias_of_the_others(size: int) -> None:
    """MT-GRPO credits what later turns earn to the first turn, whose part is right. GTPO shrinks a turn's part the more, the
    fewer responses have it, GiGPO that of an observation, beside the whole gradient of GRPO without a deviation."""
    known, omega, grpo = environment(stops=True), 0.7, 1 - 1 / size

    def chance(of: Callable[[Sequence[Step]], bool]) -> float:
        return float(known.expectation(lambda steps: float(of(steps))))

    def shrunk(share: float) -> float:
        return 1 - _own_share(share, size)

    outcome_P = known.gradient(known.expectation(lambda steps: OUTCOMES[steps[-1]]))
    of_first = _of_turns(known, lambda steps, turn: sum(TOOL_REWARDS[step] for step in steps[:-1]) * (turn == 0))
    by_turn = _of_turns(known, _returns)
    by_sight = _of_turns(known, _returns, lambda steps, turn: steps[turn][0])
    gtpo_P = sum(shrunk(chance(lambda steps, k=k: len(steps) > k)) * part_P for k, part_P in by_turn.items())
    gigpo_P = sum(
        shrunk(chance(lambda steps, saw=saw: any(step[0] == saw for step in steps))) * part_P
        for saw, part_P in by_sight.items()
    )
    expected = {
        "mt_grpo": ({}, grpo * (outcome_P + sum(of_first.values()))),
        "gtpo": ({"gamma": 1.0}, gtpo_P),
        "gigpo": ({"gamma": 1.0, "omega": omega}, grpo * _truth(known) + omega * gigpo_P),
    }
    for name, (options, expected_P) in expected.items():
        found_P = known.expected_gradient(name, options | PLAIN, size=size)
        _close(found_P, expected_P)
        assert compared(found_P, _truth(known))[1] > 0.02
        if name == "mt_grpo":  # the first turn's logits
            torch.testing.assert_close(found_P[:3], grpo * _truth(known)[:3], rtol=0, atol=EXACT)


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
