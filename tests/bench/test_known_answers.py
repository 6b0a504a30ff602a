"""Known answers: a perfect method reaches the ceiling, a useless one is its own control, a wrong yardstick is caught."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import agreement, results, work
from bench.agreement import Yardstick
from bench.methods import Credit, NeedsMoreError, Reference, all_shuffled, credit, method_of, shuffled
from bench.places import Label, by_step, labelled, of_error
from bench.policy import SampledBatch
from bench.statistics import Estimate, above_controls, auroc, pooled
from grail_advantage import Method, Rollouts, Weights
from grail_advantage.methods.turns import TurnMethod
from tests.bench.never_wrong import TOKENIZER
from tests.bench.small import OF_UPDATE, OTHERS, Small, small, yardstick_of

pytestmark = pytest.mark.slow


class Noise(Method):
    """Random weights: nothing can be found with them."""

    def scores(self, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
        return torch.rand(r.mask.shape, generator=torch.Generator().manual_seed(0))

    def weights(self, scores: torch.Tensor, among: torch.Tensor, r: Rollouts) -> Weights:
        return Weights(scores)


class Rewarded(Noise):
    """A response's reward is the weight of all its tokens."""

    reads = frozenset({"rewards"})

    def scores(self, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
        assert r.rewards is not None
        return r.rewards[:, None].expand(r.mask.shape)


class Vandal(Noise):
    """Writes into all that it is given."""

    reads = frozenset({"groups", "rewards", "tokens", "entropy", "old_log_probs", "examples", "field:own"})

    def scores(self, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
        for values in (r.groups, r.rewards, r.advantages, r.tokens):
            values.zero_()
        for values in r.columns.values():
            values.zero_()
        r.fields["own"][0].append(1)
        r.examples[0].columns["gone"] = True
        return torch.ones(r.mask.shape)


class Turned(Method):
    """Reads rewards of turns."""

    reads = frozenset({"field:tool_rewards"})


class Praise(Reference):
    """Gives the first error of an incorrect response a large positive advantage, and all other tokens a small negative one."""

    reads = frozenset({"field:bench_first_wrong"})
    gives = "advantages"

    def scores(self, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
        scores_BT = torch.full(r.mask.shape, -0.1)
        for row, tokens in enumerate(r.fields["bench_first_wrong"]):
            scores_BT[row, tokens or []] = 5.0
        return scores_BT


@pytest.fixture(scope="module")
def made() -> Small:
    return small()


def measured(method: Method, yardstick: Yardstick | None) -> tuple[dict[str, Estimate], list[results.Result]]:
    """As a run measures, of a method in place of a name; without a yardstick no update."""
    job = work.Job("small", 0, (), work.Settings(update_shuffles=2), Path())
    prepared = work.Prepared(lambda: small().model, TOKENIZER, small().batch, yardstick, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "method_of", lambda spec, task: method)
        return work.measure(small().model, prepared, "planted", job)


@cache
def of_place() -> list[results.Result]:
    """The blame by place alone, the same for every method."""
    return measured(method_of("place alone"), None)[1]


def figures(made: Small, method: Method) -> dict[str, Estimate]:
    """All that a run has of a method."""
    known, responses = measured(method, made.yardstick)
    return known | results.places(responses, of_place())


def test_a_perfect_method_reaches_the_ceiling(made: Small) -> None:
    found, ceiling = figures(made, method_of("exact credit")), made.yardstick.own.value
    assert found["credit"].value == pytest.approx(1, abs=1e-5)
    assert found["credit_shuffled"].value < 0.3
    assert found["first"].value == found["first_hit"].value == 1
    # 64 responses a problem are nearly free of the noise of sampling.
    assert ceiling > 0.2 and found["update"].value == pytest.approx(ceiling, abs=0.35 * ceiling)
    assert found["update_gain"].value > 0.5 * found["update"].value
    first = figures(made, method_of("first error"))
    assert first["first"].value == first["first_hit"].value == 1 and first["first_gain"].value > 0.4


def test_a_useless_method_is_its_control(made: Small) -> None:
    found = figures(made, Noise())
    assert abs(found["first"].value - 0.5) < 4 * found["first"].error + 0.01
    for name in ("first_gain", "first_hit_gain", "credit_gain"):
        assert abs(found[name].value) < 4 * found[name].error + 0.01, name
    same = figures(made, method_of("uniform"))
    for name in ("first", "first_hit", "credit", "update"):
        assert same[f"{name}_gain"].value == pytest.approx(0, abs=1e-6), name


def test_a_method_that_praises_the_error_finds_nothing(made: Small) -> None:
    found = figures(made, Praise())
    assert [found[name].value for name in ("first", "first_hit")] == [0, 0]


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
    assert same.own.value == pytest.approx(1, abs=1e-6) and made.yardstick.own.value < 0.9
    (update_GN,) = agreement.updates(
        made.model, made.batch, [credit(made.model, TOKENIZER, made.batch, method_of("uniform")).advantages_BL]
    )
    assert same.cosines(update_GN)[0] > made.yardstick.cosines(update_GN)[0] + 0.3


def test_the_update_is_the_gradient_of_the_weighted_log_probabilities(made: Small) -> None:
    batch, model = made.batch, made.model
    advantages_BL = credit(model, TOKENIZER, batch, method_of("place alone")).advantages_BL
    (update_GN,) = agreement.updates(model, batch, [advantages_BL])
    total = torch.zeros(())
    for row in (batch.groups_B == 0).nonzero().flatten().tolist():
        ids_L = batch.padded.ids_BL[row, : int(batch.padded.attention_BL[row].sum())]
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
    assert yardstick.own.error == pytest.approx(np.sqrt(variance))


def test_shuffling_moves_scored_tokens_within_their_response_alone(made: Small) -> None:
    batch = made.batch
    moved_BL = batch.padded.response_BL & (torch.rand(batch.padded.ids_BL.shape) < 0.7)
    given = Credit(torch.rand(moved_BL.shape) * batch.padded.response_BL, moved_BL, [])
    one, two = all_shuffled(given, 0, 2)
    assert not torch.equal(one, given.advantages_BL) and not torch.equal(one, two)
    assert torch.equal(one[~moved_BL], given.advantages_BL[~moved_BL])
    for row in range(0, len(moved_BL), 37):
        assert sorted(one[row].tolist()) == sorted(given.advantages_BL[row].tolist())
    of_hand = Credit(torch.tensor([[9.0, 1.0, 2.0, 3.0, 9.0]]), torch.tensor([[0, 1, 1, 1, 0]]).bool(), [])
    assert shuffled(of_hand, np.array([[0, 0.5, 0.9, 0.1, 0]])).tolist() == [[9, 3, 1, 2, 9]]


def test_an_answers_own_weight_is_not_shuffled(made: Small) -> None:
    """GRAIL gives the answer weight 5 whatever its score."""
    given = credit(made.model, TOKENIZER, made.batch, method_of("grail"))
    heavy_BL = (given.advantages_BL.abs() - 5 * made.batch.advantages_B.abs()[:, None]).abs() < 1e-6
    heavy_BL &= given.advantages_BL != 0
    assert heavy_BL.any() and given.moved_BL.any() and not (heavy_BL & given.moved_BL)[:, -1].any()
    for row in [row for row, scored in enumerate(given.scored) if scored][::7]:
        mask_T = made.batch.padded.response_BL[row]
        text = TOKENIZER.decode(made.batch.padded.ids_BL[row][mask_T])
        if text.count("boxed") == 1:
            assert given.moved_BL[row][mask_T].sum() == text.index("\\boxed")  # a token a character up to there


def test_figures_by_hand() -> None:
    """Three steps of two tokens; the fourth holds the answer."""
    values_T = np.array([3.0, 1.0, 3.0, 2.0, 0.0, 1.0, 9.0])
    step_T, kind_T = np.array([0, 0, 1, 1, 2, 2, 3]), np.array([1, 2, 1, 2, 1, 2, 1])
    first_T = np.arange(7) == 2
    label = labelled(Label("a", "p", step_T, kind_T, 1, first_T), np.arange(7) < 6)
    assert label.step == 1 and label.step_T.tolist() == [0, 0, 1, 1, 2, 2, -1]
    found = by_step(values_T, label)
    assert found["step"].tolist() == [0.5, 1, 0] and found["hit"].tolist() == [0, 1, 0]
    assert found["token"][1] == (3.5 + 3) / 8 and found["alike"][1] == (1.5 + 2) / 4
    assert found["after"][1] == 0 and np.isnan(found["after"][[0, 2]]).all()
    figures_of_error = of_error(values_T, label)
    assert (figures_of_error["first"], figures_of_error["first_hit"]) == (1.5 / 2, 0.5)
    # Steps without a compared token are none; an error among them is no label.
    assert labelled(Label("a", "p", step_T, kind_T, 3), np.arange(7) < 6) is None
    assert labelled(Label("a", "p", step_T, kind_T, 1), step_T != 0).step == 0
    assert labelled(Label("a", "p", step_T, kind_T), np.arange(7) < 2, fewest=2) is None


def test_step_figures_are_those_of_plain_loops() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        length, steps = int(rng.integers(8, 30)), int(rng.integers(2, 6))
        step_T = np.sort(np.concatenate([np.arange(steps), rng.integers(0, steps, length - steps)]))
        label = Label("a", "p", step_T, rng.integers(0, 3, length))
        values_T = rng.integers(0, 4, length).astype(float)
        found = by_step(values_T, label)
        for step in range(steps):
            mine_T = step_T == step
            assert found["token"][step] == pytest.approx(auroc(values_T, mine_T))
            pairs = [(a, b) for a in np.flatnonzero(mine_T) for b in np.flatnonzero(~mine_T)]
            wins = [(values_T[a] > values_T[b]) + (values_T[a] == values_T[b]) / 2 for a, b in pairs]
            alike = [w for w, (a, b) in zip(wins, pairs, strict=True) if label.kind_T[a] == label.kind_T[b]]
            assert found["token"][step] == pytest.approx(np.mean(wins))
            assert found["alike"][step] == pytest.approx(np.mean(alike)) if alike else np.isnan(found["alike"][step])
            means = np.array([values_T[step_T == one].mean() for one in range(steps)])
            above = [(means[step] > m) + (means[step] == m) / 2 for one, m in enumerate(means) if one != step]
            assert found["step"][step] == pytest.approx(np.mean(above))
            after = [(a > b) + (a == b) / 2 for a in means[step + 1 :] for b in means[:step]]
            assert found["after"][step] == pytest.approx(np.mean(after)) if after else np.isnan(found["after"][step])


def test_differences_from_controls_hold_the_truth_in_19_of_20_samples() -> None:
    """Values and controls with the same effect of place and no difference, all or ten controls a value."""
    rng = np.random.default_rng(0)
    covered: tuple[list[bool], list[bool]] = ([], [])
    for _ in range(1500):
        places_W = rng.random(40)
        own_W = np.sin(3 * places_W) + rng.normal(0, 0.3, 40)
        controls_WC = np.sin(3 * places_W)[:, None] + rng.normal(0, 0.2, 25) + rng.normal(0, 0.1, (40, 25))
        strangers_WC = np.argsort(rng.random((40, 25)), axis=1) >= 10
        for place, of_WC in enumerate((controls_WC, np.where(strangers_WC, np.nan, controls_WC))):
            _, gain = above_controls(own_W, of_WC, range(40), range(25))
            covered[place].append(abs(gain.value) <= gain.half)
    assert all(0.935 < np.mean(of) < 0.965 for of in covered), list(map(np.mean, covered))


def test_labels_are_the_first_wrong_token_of_incorrect_responses(made: Small) -> None:
    """This model writes ``a+b=r;\\boxed{r}``: the first wrong token is that of the result."""
    batch, seen = made.batch, 0
    for row, label in enumerate(batch.labels):
        text = TOKENIZER.decode(batch.padded.ids_BL[row][batch.padded.response_BL[row]], skip_special_tokens=True)
        problem = OF_UPDATE[row // 64]
        correct = text.endswith(f"\\boxed{{{problem.answer}}}")
        assert batch.rewards_B[row] == correct and not (correct and label)
        if label is not None and text == f"{problem.text}={problem.answer + 1};\\boxed{{{problem.answer + 1}}}":
            seen += 1
            assert label.step == 0 and label.first_T.nonzero()[0].tolist() == [4]
    assert seen > 50


def test_methods_that_need_more_say_so(made: Small) -> None:
    with pytest.raises(NeedsMoreError, match="needs the field tool_rewards"):
        credit(made.model, TOKENIZER, made.batch, Turned())
    with pytest.raises(NeedsMoreError, match="needs turns"):
        credit(made.model, TOKENIZER, made.batch, type("Mine", (TurnMethod,), {})())
    with pytest.raises(NeedsMoreError, match="needs the field mine"):
        credit(
            made.model,
            TOKENIZER,
            made.batch,
            type("Named", (Noise,), {"field_names": property(lambda self: ["mine"])})(),
        )


def tensors(batch: SampledBatch) -> dict[str, torch.Tensor]:
    parts = vars(batch) | batch.padded._asdict()
    return {name: value for name, value in parts.items() if isinstance(value, torch.Tensor)}


def test_a_method_that_writes_into_what_it_gets_reaches_no_other(made: Small) -> None:
    batch = replace(made.batch, fields={**made.batch.fields, "own": [[] for _ in made.batch.labels]})
    before = {name: value.clone() for name, value in tensors(batch).items()}
    credit(made.model, TOKENIZER, batch, Vandal())
    for name, value in tensors(batch).items():
        assert torch.equal(value, before[name]), name
    assert batch.fields["own"][0] == [] and "gone" not in batch.examples[0].columns


def test_a_method_may_read_rewards_and_is_of_turns_by_its_base_alone(made: Small) -> None:
    advantages_BL = credit(made.model, TOKENIZER, made.batch, type("TurnMethod", (Rewarded,), {})()).advantages_BL
    expected_B1 = (made.batch.rewards_B * made.batch.advantages_B)[:, None]
    torch.testing.assert_close(advantages_BL, expected_B1 * made.batch.padded.response_BL)
    assert advantages_BL.any()


def test_the_small_model_knows_its_sums(made: Small) -> None:
    """Else the tests above would say little."""
    mixed = (made.batch.advantages_B != 0).view(len(OF_UPDATE), -1).any(dim=1)
    assert mixed.all() and 0.2 < made.batch.rewards_B.mean() < 0.9
    assert sum(exact is not None for exact in made.batch.fields["bench_exact"]) > 0.8 * len(made.batch.labels)
