"""SHEAR's distances against exact transport and a plain loop over pairs of windows; SHEAR as a method."""

from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from grail_advantage.methods import shear
from grail_advantage.methods.shear import Shear, shear_scores, sinkhorn_distance
from tests.core.tiny_models import Rollout, compute, encode, make_batch, tiny_model

LENGTHS = (11, 4, 7, 1, 13)
POSITIVE = (True, False, True, False, False)


def group() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, 3, generator=generator) for length in LENGTHS]


def plain_sinkhorn(cost: Tensor, epsilon: float, iterations: int) -> float:
    """The textbook's matrix scaling of one pair, in float64: transport cost."""
    kernel = torch.exp(-cost / (epsilon * cost.mean()))
    v = torch.ones(cost.shape[1]).double()
    for _ in range(iterations):
        u = 1 / len(cost) / (kernel @ v)
        v = 1 / len(v) / (kernel.T @ u)
    return float((u[:, None] * kernel * v * cost).sum())


def plain_scores(
    hidden: list[Tensor],
    positive: Sequence[bool],
    window: int,
    stride: int,
    epsilon: float,
    iterations: int,
) -> list[Tensor]:
    """Every definition spelled out, one pair of windows at a time."""
    norm = torch.cat([h.norm(dim=1) for h in hidden]).mean().item()
    scores = []
    for hidden_states, outcome in zip(hidden, positive, strict=True):
        score = torch.zeros(len(hidden_states))
        for start in range(0, len(hidden_states), stride):
            x = hidden_states[start : start + window].double()
            nearest = min(
                plain_sinkhorn(
                    torch.cdist(x, compared[begin : begin + window].double()),
                    epsilon,
                    iterations,
                )
                for compared, other_outcome in zip(hidden, positive, strict=True)
                if other_outcome != outcome
                for begin in range(0, len(compared), stride)
            )
            for t in range(start, min(start + window, len(hidden_states))):
                score[t] = max(score[t].item(), nearest / norm)
        scores.append(score)
    return scores


@pytest.mark.parametrize("epsilon", [1.0, 0.1, 0.01])
def test_distances_of_pairs_of_any_size(epsilon):
    """Four pairs of clouds of up to five points, padded with costs that count nothing, to convergence."""
    generator = torch.Generator().manual_seed(4)
    cost = torch.full((4, 5, 5), 9.0, dtype=torch.float64)
    sizes = [(5, 5), (5, 4), (2, 5), (1, 3)]
    expected = []
    for p, (n, m) in enumerate(sizes):
        x = torch.randn(n, 3, generator=generator)
        y = 0.5 + torch.randn(m, 3, generator=generator)
        cost[p, :n, :m] = torch.cdist(x, y)
        expected.append(plain_sinkhorn(cost[p, :n, :m], epsilon, 20_000))
    options = {"epsilon": epsilon, "iterations": 20_000, "tolerance": 1e-5}
    distance = sinkhorn_distance(cost, *torch.tensor(sizes).T, **options)
    assert distance.dtype == torch.float64
    assert distance.tolist() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("window", "stride"), [(5, 2), (4, 4), (100, 25)])
def test_against_the_plain_loop(window, stride, monkeypatch):
    """Also where pairs are worked on a few at a time."""
    monkeypatch.setattr(shear, "CHUNK_ELEMENTS", {"cpu": 7 * 25, "cuda": 7 * 25})
    options = {"window": window, "stride": stride, "epsilon": 0.2, "iterations": 25}
    with patch.object(shear, "sinkhorn_distance", wraps=sinkhorn_distance) as calls:
        got = shear_scores(group(), POSITIVE, tolerance=0.0, **options)
    assert calls.call_count > 6 or window == 100  # pairs of responses
    for actual, expected in zip(
        got, plain_scores(group(), POSITIVE, **options), strict=True
    ):
        assert_close(actual, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("windows", [1, 2, 3])
def test_a_few_windows_at_once_have_the_distances_of_all(windows, monkeypatch):
    """To float rounding, and the costs of whole responses are never there."""
    at_once = shear_scores(group(), POSITIVE, window=5, stride=2)
    monkeypatch.setattr(shear, "WINDOWS_AT_ONCE", windows)
    with patch.object(torch, "cdist", wraps=torch.cdist) as costs:
        blocks = shear_scores(group(), POSITIVE, window=5, stride=2)
    assert_close(blocks, at_once, rtol=1e-5, atol=0)
    # Windows of 5 by 2: one has 5 states, two have 7, three have 9.
    assert max(len(call.args[0]) for call in costs.call_args_list) == 5 + 2 * (windows - 1)


def test_a_group_with_many_pairs_of_windows_is_warned_of(monkeypatch, caplog):
    """Responses of 11 and 7 tokens have 6 and 4 windows, their opposites of 4, 1 and 13 tokens 2, 1 and 7: 100 pairs."""
    for limit in (100, 99):
        monkeypatch.setattr(shear, "MANY_PAIRS", limit)
        assert not caplog.records
        shear_scores(group(), POSITIVE, window=5, stride=2)
    assert "100 pairs" in caplog.text and "algorithm.shear.stride" in caplog.text


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_states_that_are_not_finite(bad):
    """As if their response were not there, also where it is the only opponent."""
    for row in (0, 3):
        rest = [i for i in range(5) if i != row]
        hidden = group()
        want = shear_scores(
            [hidden[i] for i in rest], [POSITIVE[i] for i in rest], window=5, stride=2
        )
        # One bad number of one state.
        hidden[row][-1, 1] = bad
        got = shear_scores(hidden, POSITIVE, window=5, stride=2)
        assert got[row].isnan().all() and got[row].shape == (LENGTHS[row],)
        for i, expected in zip(rest, want, strict=True):
            assert_close(got[i], expected, rtol=1e-5, atol=0)
    got = shear_scores(
        [torch.ones(3, 2), torch.full((2, 2), bad)], [True, False], window=5, stride=2
    )
    assert got[0].tolist() == [1.0] * 3 and got[1].isnan().all()


ROLLOUTS = [
    Rollout("2+2?", r"two and two is \boxed{4}", 0.5),
    Rollout("2+2?", r"two and two is five, \boxed{5}", -0.5),
    Rollout("2+2?", "I do not know.", -0.5),
    Rollout("Another one?", r"yes: \boxed{1}", 1.0),
    Rollout("2+2?", r"truncated, \boxed{4} it is", 0.0),
    Rollout("Alone?", r"\boxed{1}", -1.0),
]
GROUPS = torch.tensor([7, 7, 7, 3, 7, 3])


def test_scores_are_those_of_the_groups_hidden_states():
    """By transformers' own hidden states, the last of which comes after the final norm."""
    model = tiny_model()
    batch = make_batch(ROLLOUTS, padding="both")
    options = {"window": 8, "stride": 4}
    inside = batch.response_mask.bool()
    got = compute(model, batch, Shear(**options), groups=GROUPS)
    hidden = []
    for rollout in ROLLOUTS:
        ids = torch.tensor([encode(rollout.prompt + rollout.response)])
        with torch.no_grad():
            output = model(input_ids=ids, output_hidden_states=True)
        hidden.append(output.hidden_states[-1][0, len(rollout.prompt) :])
    for members in ([0, 1, 2], [3, 5]):
        positive = [ROLLOUTS[row].advantage > 0 for row in members]
        scores = torch.cat(
            shear_scores([hidden[row] for row in members], positive, **options)
        )
        for values in (got.scores, got.weights):
            actual = torch.cat([values[row, inside[row]] for row in members])
            assert_close(actual, scores, rtol=1e-4, atol=1e-6)
        assert scores.unique().numel() > 3
    # The response without an advantage is on neither side: it has weight 1, and nobody is compared with it.
    assert (got.weights[4, inside[4]] == 1).all()
