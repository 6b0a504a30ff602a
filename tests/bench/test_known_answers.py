"""Known answers: a perfect method reaches the ceiling, a useless one is its own control, a wrong yardstick is caught."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch

from bench import agreement, places
from bench.agreement import Yardstick
from bench.methods import NeedsMoreError, all_shuffled, credit, shuffled, signal_of
from bench.places import of_response
from bench.policy import Label
from bench.statistics import Estimate, pooled
from grail_advantage import Reshaped, Signal
from grail_advantage.batch import RolloutBatch
from grail_advantage.signals.turns import TurnSignal
from tests.bench.never_wrong import TOKENIZER
from tests.bench.small import OF_UPDATE, OTHERS, Small, small, yardstick_of


class Noise(Signal):
    """Random weights: nothing can be found with them."""

    def scores(self, batch: RolloutBatch, of_pass_BT: torch.Tensor | None) -> torch.Tensor:
        return torch.rand(batch.mask_BT.shape, generator=torch.Generator().manual_seed(0))

    def reshape(self, scores_BT: torch.Tensor, statistics_BT: torch.Tensor, batch: RolloutBatch) -> Reshaped:
        return Reshaped(scores_BT)


class Rewarded(Noise):
    """A response's reward is the weight of all its tokens."""

    reads: ClassVar[frozenset[str]] = frozenset({"rewards"})

    def scores(self, batch: RolloutBatch, of_pass_BT: torch.Tensor | None) -> torch.Tensor:
        assert batch.rewards_B is not None
        return batch.rewards_B[:, None].expand(batch.mask_BT.shape)


class Turned(Signal):
    """Reads rewards of turns."""

    reads: ClassVar[frozenset[str]] = frozenset({"field:tool_rewards"})


class Praise(Signal):
    """Gives the first error of an incorrect response a large positive advantage, and all other tokens a small negative one."""

    reads: ClassVar[frozenset[str]] = frozenset({"field:bench_first_wrong"})
    gives: ClassVar[str] = "advantages"

    def scores(self, batch: RolloutBatch, of_pass_BT: torch.Tensor | None) -> torch.Tensor:
        scores_BT = torch.full(batch.mask_BT.shape, -0.1)
        for row, token in enumerate(batch.fields["bench_first_wrong"]):
            scores_BT[row, [] if token is None else token] = 5.0
        return scores_BT


@pytest.fixture(scope="module")
def made() -> Small:
    return small()


def figures(made: Small, signal: Signal) -> dict[str, Estimate]:
    advantages_BL = credit(made.model, TOKENIZER, made.batch, signal)
    measured = agreement.measure(
        made.model, made.batch, advantages_BL, made.yardstick, 0, shuffles=5, update_shuffles=2
    )
    return measured | places.measure(made.batch, advantages_BL, 0)


def test_a_perfect_method_reaches_the_ceiling(made: Small) -> None:
    measured, ceiling = figures(made, signal_of("exact credit")), made.yardstick.ceiling.value
    assert measured["credit"].value == pytest.approx(1, abs=1e-5)
    assert measured["credit_shuffled"].value < 0.3
    assert measured["token"].value == measured["alike"].value == measured["hit"].value == 1
    # 64 responses a problem are nearly free of the noise of sampling.
    assert ceiling > 0.2 and measured["update"].value == pytest.approx(ceiling, abs=0.35 * ceiling)
    assert measured["update_gain"].value > 0.5 * measured["update"].value
    first = figures(made, signal_of("first error"))
    assert first["token"].value == first["hit"].value == 1 and first["token_gain"].value > 0.4


def test_a_useless_method_is_its_control(made: Small) -> None:
    measured = figures(made, Noise())
    for name in ("token", "step"):
        assert measured[name].value == pytest.approx(0.5, abs=0.08)
    for name in ("token_gain", "step_gain", "hit_gain", "credit_gain"):
        assert abs(measured[name].value) < 4 * measured[name].error + 0.01, name
    same = figures(made, signal_of("uniform"))
    for name in ("token", "step", "hit", "credit", "update"):
        assert same[f"{name}_gain"].value == pytest.approx(0, abs=1e-6), name


def test_a_method_that_praises_the_error_finds_nothing(made: Small) -> None:
    measured = figures(made, Praise())
    assert [measured[name].value for name in ("token", "alike", "hit")] == [0, 0, 0] and measured["step"].value < 0.5


def test_several_models_carry_the_differences_between_them() -> None:
    two = pooled([Estimate(0.75, 0.02, 80), Estimate(0.35, 0.02, 80)])
    assert (two.value, two.count) == (0.55, 2) and two.half == pytest.approx(12.706 * 0.2, rel=1e-3)
    # 95 % of the intervals hold the truth, wherever the spread comes from: models, problems or both.
    generator = np.random.default_rng(0)
    for of_models, of_problems in ((0.1, 0.02), (0.0, 0.05), (0.05, 0.05)):
        covered = []
        for _ in range(2000):
            values = generator.normal(0.5, of_models, 4) + generator.normal(0, of_problems, 4)
            mean = pooled([Estimate(value, of_problems, 80) for value in values])
            covered.append(abs(mean.value - 0.5) <= mean.half)
        assert 0.935 < np.mean(covered) < 0.965


def test_a_yardstick_of_the_same_problems_is_caught(made: Small) -> None:
    with pytest.raises(ValueError, match="7 of the yardstick's 7 problems are the update's own"):
        yardstick_of(made.model, OF_UPDATE)
    with pytest.raises(ValueError, match="1 of the yardstick's 7 problems"):
        yardstick_of(made.model, [*OTHERS[1:], OF_UPDATE[0]])
    # What it would have shown: every update that learns its own problems, by heart too, is near it.
    same = Yardstick(made.yardstick.own_GN, made.yardstick.own_GN)
    assert same.ceiling.value == pytest.approx(1, abs=1e-6) and made.yardstick.ceiling.value < 0.9
    (update_GN,) = agreement.updates(
        made.model, made.batch, [credit(made.model, TOKENIZER, made.batch, signal_of("uniform"))]
    )
    assert same.cosines(update_GN)[0] > made.yardstick.cosines(update_GN)[0] + 0.3


def test_the_update_is_the_gradient_of_the_weighted_log_probabilities(made: Small) -> None:
    batch, model = made.batch, made.model
    advantages_BL = credit(model, TOKENIZER, batch, signal_of("place alone"))
    (update_GN,) = agreement.updates(model, batch, [advantages_BL])
    total = torch.zeros(())
    for row in (batch.groups_B == 0).nonzero().flatten().tolist():
        ids_L = batch.input_ids_BL[row, : int(batch.attention_mask_BL[row].sum())]
        log_probs_LV = model(input_ids=ids_L[None]).logits[0].log_softmax(-1)
        for place in range(1, len(ids_L)):
            total = total + advantages_BL[row, place] * log_probs_LV[place - 1, ids_L[place]]
    gradients = torch.autograd.grad(total, list(model.parameters()))
    plain_N = torch.cat([gradient.flatten() for gradient in gradients])
    torch.testing.assert_close(update_GN[0], plain_N, rtol=1e-3, atol=1e-4 * float(plain_N.abs().max()))


def test_errors_are_jackknives_of_plain_cosines(made: Small) -> None:
    yardstick, own = made.yardstick, made.yardstick.own_GN

    def plain(groups: list[int], parts: list[int]) -> float:
        first, second = own[groups].sum(0).double(), yardstick.parts_CN[parts].sum(0).double()
        return float(first @ second / first.norm() / second.norm())

    groups, parts = list(range(len(own))), list(range(len(yardstick.parts_CN)))
    value, without_G, without_C = yardstick.cosines(own)
    assert value == pytest.approx(plain(groups, parts), rel=1e-3)
    assert without_G[2] == pytest.approx(plain([0, 1, *groups[3:]], parts), rel=1e-3)
    assert without_C[1] == pytest.approx(plain(groups, [0, *parts[2:]]), rel=1e-3)
    variance = sum((len(left) - 1) * np.var(left) for left in (without_G, without_C))
    assert yardstick.ceiling.error == pytest.approx(np.sqrt(variance))


def test_shuffling_moves_values_within_their_response_alone(made: Small) -> None:
    batch = made.batch
    values_BL = torch.rand(batch.input_ids_BL.shape) * batch.response_mask_BL
    one, two = all_shuffled(batch, values_BL, 2, 0)
    assert not torch.equal(one, values_BL) and not torch.equal(one, two)
    for row in range(0, len(values_BL), 37):
        assert sorted(batch.response(row, one)) == sorted(batch.response(row, values_BL))
    assert not one[batch.response_mask_BL == 0].any()
    by_hand = shuffled(
        torch.tensor([[9.0, 1.0, 2.0, 3.0, 9.0]]), torch.tensor([[0, 1, 1, 1, 0]]), np.array([[0, 0.5, 0.9, 0.1, 0]])
    )
    assert by_hand.tolist() == [[9, 3, 1, 2, 9]]


def test_figures_of_a_response_by_hand() -> None:
    label = Label(2, np.array([0, 1, 1, 0], dtype=bool), np.array([1, 0, 1, 0], dtype=bool))
    figures_of_response = of_response(np.array([3.0, 1.0, 3.0, 2.0]), label)
    assert figures_of_response == {"token": 2.5 / 3, "alike": 0.5, "step": 1.5 / 4, "hit": 0.5, "hit_step": 0.5}


def test_labels_are_the_first_wrong_token_of_incorrect_responses(made: Small) -> None:
    """This model writes ``a+b=r;\\boxed{r}``: the first wrong token is that of the result."""
    batch, seen = made.batch, 0
    for row, label in enumerate(batch.labels):
        text = TOKENIZER.decode(batch.input_ids_BL[row][batch.response_mask_BL[row].bool()], skip_special_tokens=True)
        problem = OF_UPDATE[row // 64]
        correct = text.endswith(f"\\boxed{{{problem.answer}}}")
        assert batch.rewards_B[row] == correct and not (correct and label)
        if label is not None and text == f"{problem.text}={problem.answer + 1};\\boxed{{{problem.answer + 1}}}":
            seen += 1
            assert label.token == 4 and label.step_T.tolist() == [True] * 6 + [False] * (len(label.step_T) - 6)
            assert label.alike_T.nonzero()[0].tolist() == [4]
    assert seen > 50


def test_methods_that_need_more_say_so(made: Small) -> None:
    with pytest.raises(NeedsMoreError, match="needs the field tool_rewards"):
        credit(made.model, TOKENIZER, made.batch, Turned())
    with pytest.raises(NeedsMoreError, match="needs turns"):
        credit(made.model, TOKENIZER, made.batch, type("Mine", (TurnSignal,), {})())
    with pytest.raises(NeedsMoreError, match="needs the field mine"):
        credit(
            made.model,
            TOKENIZER,
            made.batch,
            type("Named", (Noise,), {"field_names": property(lambda self: ["mine"])})(),
        )


def test_a_method_may_read_rewards_and_is_of_turns_by_its_base_alone(made: Small) -> None:
    advantages_BL = credit(made.model, TOKENIZER, made.batch, type("TurnSignal", (Rewarded,), {})())
    expected_B1 = (made.batch.rewards_B * made.batch.advantages_B)[:, None]
    torch.testing.assert_close(advantages_BL, expected_B1 * made.batch.response_mask_BL)
    assert advantages_BL.any()


def test_the_small_model_knows_its_sums(made: Small) -> None:
    """Else the tests above would say little."""
    mixed = (made.batch.advantages_B != 0).view(len(OF_UPDATE), -1).any(dim=1)
    assert mixed.all() and 0.2 < made.batch.rewards_B.mean() < 0.9
    assert sum(exact is not None for exact in made.batch.exact) > 0.8 * len(made.batch.exact)
