"""SHEAR's distances against exact transport, by hand, and a plain loop over pairs of windows; SHEAR as a method."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from grail_advantage import compute_token_weights
from grail_advantage.methods import shear
from grail_advantage.methods.shear import Shear, shear_scores, sinkhorn_distance
from tests.core.tiny_models import Rollout, char_tokenizer, make_batch, tiny_model

SMALL = {"window": 5, "stride": 2}
LENGTHS = (11, 4, 7, 1, 13)
POSITIVE = (True, False, True, False, False)


def column(*values: float) -> torch.Tensor:
    """Hidden states (T, 1)."""
    return torch.tensor(values)[:, None]


def group(seed: int = 0, lengths: tuple[int, ...] = LENGTHS, hidden_size: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, hidden_size, generator=generator) for length in lengths]


def plain_sinkhorn(cost: torch.Tensor, epsilon: float, iterations: int) -> tuple[float, float]:
    """The textbook's matrix scaling of one pair, in float64: transport cost, and share of the mass off the rows."""
    cost = cost.double()
    rows, columns = cost.shape
    kernel = torch.exp(-cost / (epsilon * cost.mean()))
    v = torch.ones(columns, dtype=torch.float64)
    for _ in range(iterations):
        u = 1 / rows / (kernel @ v)
        v = 1 / columns / (kernel.T @ u)
    plan = u[:, None] * kernel * v
    return (plan * cost).sum().item(), (plan.sum(dim=1) - 1 / rows).abs().sum().item() / 2


def exact(cost: torch.Tensor) -> float:
    """Of optimal transport, by the linear programme."""
    n, m = cost.shape
    sums = np.concatenate([np.kron(np.eye(n), np.ones(m)), np.kron(np.ones(n), np.eye(m))])
    return linprog(cost.flatten().numpy(), A_eq=sums, b_eq=[1 / n] * n + [1 / m] * m).fun


def plain_scores(
    hidden: list[torch.Tensor], positive: tuple[bool, ...], window: int, stride: int, epsilon: float, iterations: int
) -> list[torch.Tensor]:
    """Every definition spelled out, one pair of windows at a time."""
    norm = torch.cat([h.norm(dim=1) for h in hidden]).mean().item()
    scores = []
    for own, outcome in zip(hidden, positive, strict=True):
        score = torch.zeros(len(own))
        for start in range(0, len(own), stride):
            x = own[start : start + window].double()
            nearest = min(
                plain_sinkhorn(torch.cdist(x, other[begin : begin + window].double()), epsilon, iterations)[0]
                for other, other_outcome in zip(hidden, positive, strict=True)
                if other_outcome != outcome
                for begin in range(0, len(other), stride)
            )
            for t in range(start, min(start + window, len(own))):
                score[t] = max(score[t].item(), nearest / norm)
        scores.append(score)
    return scores


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor], rtol: float = 1e-5) -> None:
    for found, wanted in zip(got, want, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=0, equal_nan=True)


def test_towards_exact_transport() -> None:
    generator = torch.Generator().manual_seed(4)
    shapes = [(5, 5), (5, 4), (2, 5), (1, 3)]
    cost = torch.full((len(shapes), 5, 5), torch.nan, dtype=torch.float64)
    for p, (n, m) in enumerate(shapes):
        clouds = torch.randn(n, 3, generator=generator), 0.5 + torch.randn(m, 3, generator=generator)
        cost[p, :n, :m] = torch.cdist(*clouds)
    costs = [cost[p, :n, :m] for p, (n, m) in enumerate(shapes)]
    best = torch.tensor([exact(of) for of in costs], dtype=torch.float64)
    most = torch.stack([of.mean() * math.log(min(of.shape)) for of in costs])
    gaps = []
    for epsilon in (1.0, 0.1, 0.01):
        options = {"epsilon": epsilon, "iterations": 20_000, "tolerance": 1e-5}
        distance, off = sinkhorn_distance(cost, *torch.tensor(shapes).T, **options)
        assert distance.dtype == torch.float64 and (off <= 1e-5).all()
        gap = distance - best
        assert (gap >= -1e-4).all() and (gap <= epsilon * most + 1e-4).all()
        gaps.append(gap.sum().item())
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 1  # so that the closeness below is epsilon's doing
    torch.testing.assert_close(distance, best, rtol=1e-3, atol=0)


def test_by_hand() -> None:
    """Two by two the plan is ``[[p, q], [q, p]]`` with ``q / p = exp(-c / (epsilon * c / 2))``; its cost is ``2 * q * c``."""
    for epsilon, cost in [(0.5, 1.0), (2.0, 1.0), (0.5, 300.0)]:
        ratio = math.exp(-2 / epsilon)
        distance, error = sinkhorn_distance(torch.tensor([[[0.0, cost], [cost, 0.0]]]), epsilon=epsilon)
        assert distance.tolist() == pytest.approx([cost * ratio / (1 + ratio)], rel=1e-5)
        assert error.item() == pytest.approx(0, abs=1e-6)
    # On a line, with all of one window after all of the other, every plan costs the difference of the means.
    x, y = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([10.0, 11.0])
    for epsilon in (0.01, 0.05, 1.0):
        distance, _ = sinkhorn_distance((y[None, :] - x[:, None])[None], epsilon=epsilon, tolerance=1e-6)
        assert distance.tolist() == pytest.approx([9.5], rel=1e-5)
    assert sinkhorn_distance(torch.tensor([[[3.0]], [[0.25]]]))[0].tolist() == pytest.approx([3.0, 0.25])
    assert sinkhorn_distance(torch.empty(0, 3, 3))[0].shape == (0,)


@pytest.mark.parametrize("iterations", [1, 23])
def test_each_iteration_is_the_textbooks(iterations: int) -> None:
    generator = torch.Generator().manual_seed(3)
    cost = torch.rand(3, 6, 5, generator=generator, dtype=torch.float64)
    sizes = [(6, 5), (4, 5), (2, 3)]
    distance, error = sinkhorn_distance(cost, *torch.tensor(sizes).T, epsilon=0.1, iterations=iterations, tolerance=0.0)
    want = [plain_sinkhorn(cost[p, :n, :m], 0.1, iterations) for p, (n, m) in enumerate(sizes)]
    assert distance.tolist() == pytest.approx([distance for distance, _ in want], rel=1e-10)
    assert error.tolist() == pytest.approx([error for _, error in want], rel=1e-6, abs=1e-12)


def test_costs_that_are_zero_or_not_finite() -> None:
    cost = torch.rand(4, 3, 3, generator=torch.Generator().manual_seed(6))
    want, _ = sinkhorn_distance(cost)
    cost[1] = 0
    cost[2, 0, 1] = torch.nan
    cost[3, 2, 2] = torch.inf
    distance, error = sinkhorn_distance(cost)
    assert distance[0] == want[0] and distance[1] == 0
    assert distance[2:].isnan().all() and error[2:].isnan().all()


def test_greatest_window_counts() -> None:
    """Against the one token 0 a window's distance is its mean: 3, 3.5 and 2. The mean norm is 2."""
    got = shear_scores([column(1, 5, 2), column(0)], [True, False], window=2, stride=1)
    assert_same(got, [torch.tensor([1.5, 1.75, 1.75]), torch.tensor([1.0])])


@pytest.mark.parametrize(("window", "stride"), [(5, 2), (4, 4), (100, 25)])
def test_against_the_plain_loop(window: int, stride: int) -> None:
    hidden = group(2)
    got = shear_scores(hidden, POSITIVE, window=window, stride=stride, epsilon=0.2, iterations=25, tolerance=0.0)
    # The loop, too, must have correct responses first.
    order = sorted(range(len(hidden)), key=lambda i: not POSITIVE[i])
    want = plain_scores([hidden[i] for i in order], tuple(POSITIVE[i] for i in order), window, stride, 0.2, 25)
    assert_same([got[i] for i in order], want, rtol=1e-3)


def test_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    want = shear_scores(group(), POSITIVE, **SMALL)
    sizes = []

    def counted(cost: torch.Tensor, *args: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(len(cost))
        return sinkhorn_distance(cost, *args, **options)

    monkeypatch.setattr(shear, "sinkhorn_distance", counted)
    monkeypatch.setattr(shear, "CHUNK_ELEMENTS", {"cpu": 7 * 25, "cuda": 7 * 25})
    assert_same(shear_scores(group(), POSITIVE, **SMALL), want)
    # Responses of 6 and 4 windows against those of 2, 1 and 7; windows of 5 tokens and less.
    assert len(sizes) > 6 and sum(sizes) == 10 * 10


@pytest.mark.parametrize("row", [0, 3])
def test_states_that_are_not_finite(row: int) -> None:
    """As if their response were not there, also where it is the only opponent."""
    rest = [i for i in range(5) if i != row]
    want = shear_scores([group()[i] for i in rest], [POSITIVE[i] for i in rest], **SMALL)
    for bad in (torch.nan, torch.inf, -torch.inf):
        hidden = group()
        hidden[row][-1, 1] = bad
        got = shear_scores(hidden, POSITIVE, **SMALL)
        assert got[row].isnan().all() and got[row].shape == (LENGTHS[row],)
        assert_same([got[i] for i in rest], want)
    got = shear_scores([torch.ones(3, 2), torch.full((2, 2), torch.nan)], [True, False], **SMALL)
    assert_same(got, [torch.ones(3), torch.full((2,), torch.nan)])


CONFIG = Shear(window=8, stride=4)
ROLLOUTS = [
    Rollout("2+2?", r"two and two is \boxed{4}", 0.5),
    Rollout("2+2?", r"two and two is five, \boxed{5}", -0.5),
    Rollout("2+2?", "I do not know.", -0.5),
    Rollout("Another one?", r"yes: \boxed{1}", 1.0),
    Rollout("2+2?", r"truncated, \boxed{4} it is", 0.0),
    Rollout("Alone?", r"\boxed{1}", -1.0),
]
GROUPS = torch.tensor([7, 7, 7, 3, 7, 3])


def _plain_hidden_states(model: torch.nn.Module, rollout_index: int, batch) -> torch.Tensor:
    """The input of the output embeddings, by transformers' own hidden states: the last one comes after the final norm."""
    valid = batch.attention_mask[rollout_index].bool()
    tokens = batch.input_ids[rollout_index, valid]
    with torch.no_grad():
        states = model(input_ids=tokens[None], output_hidden_states=True).hidden_states[-1][0]
    return states[batch.response_mask[rollout_index, valid].bool()]


def test_scores_are_those_of_the_groups_hidden_states() -> None:
    model, batch = tiny_model(), make_batch(ROLLOUTS, padding="both")
    got = compute_token_weights(model, char_tokenizer(), *batch.tensors(), CONFIG, groups=GROUPS)
    hidden = [_plain_hidden_states(model, row, batch) for row in range(len(ROLLOUTS))]
    options = {"window": 8, "stride": 4, "epsilon": 0.05, "iterations": 200, "tolerance": 1e-3}
    for members in ([0, 1, 2], [3, 5]):
        positive = [ROLLOUTS[row].advantage > 0 for row in members]
        expected = shear_scores([hidden[row] for row in members], positive, **options)
        for row, scores in zip(members, expected, strict=True):
            inside = batch.response_mask[row].bool()
            torch.testing.assert_close(got.scores[row, inside], scores, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(got.weights[row, inside], scores, rtol=1e-4, atol=1e-6)
            assert (got.weights[row, inside] != 1).any()
    # The response without an advantage is on neither side: it has weight 1, and nobody is compared with it.
    assert (got.weights[4, batch.response_mask[4].bool()] == 1).all()
