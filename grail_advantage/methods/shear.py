"""SHEAR (arXiv 2604.23318, section 3, Algorithm 1): a token matters as much as its surroundings differ from every
response of the other outcome. No code of its authors was found.

Overlapping windows of a response are clouds of hidden states, compared with those of all responses of the group with
the other sign of the advantage; the mean hidden norm is the group's. The regularisation and the iterations are this
project's choice.

Shapes: P pairs of windows, N and M tokens of a pair's two windows, K and L windows of two responses, D hidden."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grail_advantage.data import Rollouts, Row, RowScores
from grail_advantage.maps import Weights
from grail_advantage.method import Method, option, register
from grail_advantage.model.interface import Model

# Costs worked on at once; there are some eight temporaries of this size, which are to fit into a CPU's cache
CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}

# Of a response, whose costs to all tokens of another are in memory at once. By the defaults 32 windows are 31 * 25 + 100
# tokens: 875 x 32,000 float64 are 0.2 GB.
WINDOWS_AT_ONCE = 32
MANY_PAIRS = 200_000  # two minutes of a processor core

logger = logging.getLogger(__name__)


@register("shear")
class Shear(Method):
    """Responses without an opposite have weight 1. The hidden states of a rank's selected responses are held together
    on its device, in the model's precision: 32 responses of 4096 tokens at 2560 dimensions are 0.7 GB in bf16. Time
    grows with the square of the length: 6,400 pairs of windows for two responses of 2,000 tokens, 1.6 million for two of
    32,000."""

    formula = "greatest over windows with t of the least Sinkhorn distance to an opposing one, / mean ||h||"
    source = (
        "arXiv 2604.23318 (restated from three notes that agree on equation 4 and Algorithm 1; of the transport they say "
        "Sinkhorn alone)"
    )
    cost = "1 on the responses with an advantage, and the distances"
    reads = frozenset({"groups"})
    uses = "hidden_states"
    whole_groups = True

    window: int = option(100, "tokens of a window", ge=1)
    stride: int = option(25, "tokens between the starts of two windows; at most window", ge=1)
    epsilon: float = option(
        0.05,
        "entropic regularisation, as a share of a pair's mean cost; the smaller, the nearer to exact transport",
        gt=0,
    )
    iterations: int = option(200, "most iterations for a pair of windows", ge=1)
    tolerance: float = option(
        1e-3, "share of the mass that may still be misplaced when a pair is done", gt=0
    )

    def check(self) -> None:
        if self.stride > self.window:
            raise ValueError(
                f"{self.section}.stride={self.stride} is above window={self.window} and leaves tokens out; lower it"
            )

    def run(self, rows: Sequence[Row], model: Model) -> list[RowScores]:
        hidden = model.micro_batches(rows, lambda micro: micro.hidden_states(), gradients=False)
        # Copies that fill up a rank, which are of the group -1, keep these.
        scores = [torch.ones(row.length, dtype=torch.float32, device="cpu") for row in rows]
        options = self.model_dump(
            include={"window", "stride", "epsilon", "iterations", "tolerance"}
        )
        for group in {row.group for row in rows} - {-1}:
            members = [index for index, row in enumerate(rows) if row.group == group]
            states = [hidden[index] for index in members]
            signs = [rows[index].advantage > 0 for index in members]
            for index, scores_T in zip(
                members, shear_scores(states, signs, **options), strict=True
            ):
                scores[index] = scores_T
        return list(map(RowScores, scores))

    def weights(self, scores: Tensor, among: Tensor, r: Rollouts) -> Weights:
        # A distance may be below 0 by rounding.
        return Weights(scores.clamp(min=0))


@torch.no_grad()
def sinkhorn_distance(
    cost: Tensor,
    rows: Tensor,
    columns: Tensor,
    *,
    epsilon: float = 0.05,
    iterations: int = 200,
    tolerance: float = 1e-3,
) -> Tensor:
    """Transport cost ``<plan, cost>`` between uniform masses, of the plan that entropy regularises; without the entropy
    term.

    The plan minimises ``<plan, cost> - epsilon * mean(cost) * entropy(plan)`` with the mean over the pair's own costs,
    so that a pair's distance scales with its costs. In the log domain. Each pair stops by itself, at every tenth
    iteration or the last; one that has not converged gets the cost of its last plan, whose column sums hold.

    Args:
        cost: (P, N, M), at least 0; float64 is computed in float64, any other floating dtype in float32.
        rows: int (P,), how many rows of each pair are tokens, 1 to N; the others have finite costs, which count nothing.
        columns: int (P,), likewise, 1 to M.

    Returns:
        (P,) distances; NaN where a cost is not finite.
    """
    cost = cost if cost.dtype == torch.float64 else cost.float()
    count, n, m = cost.shape
    in_rows = torch.arange(n, device=cost.device) < rows[:, None]
    in_columns = torch.arange(m, device=cost.device) < columns[:, None]
    a = in_rows / rows[:, None].to(cost.dtype)
    b = in_columns / columns[:, None].to(cost.dtype)
    unit = epsilon * torch.einsum("pnm,pn,pm->p", cost, a, b)
    # Without any cost one plan is as good as another.
    k = -cost / torch.where(unit == 0, 1.0, unit)[:, None, None]
    log_a = a.log()
    log_b = b.log()
    # 0, and -inf for columns of padding, which get no mass so.
    v = in_columns.to(cost.dtype).log()
    distance = torch.full_like(unit, torch.nan)
    unfinished = torch.arange(count, device=cost.device)
    for step in range(1, iterations + 1):
        u = log_a - torch.logsumexp(k + v[:, None, :], 2)
        v = log_b - torch.logsumexp(k + u[:, :, None], 1)
        if step % 10 and step < iterations:
            continue
        plan = (k + u[:, :, None] + v[:, None, :]).exp()
        misplaced = (plan.sum(2) - a).abs().sum(1) / 2
        done = (misplaced <= tolerance) | (step == iterations)
        distance[unfinished[done]] = (plan * cost)[done].sum((1, 2))
        # Pairs that are done leave: the others alone go on.
        unfinished, cost, k, a, log_a, log_b, v = (
            values[~done] for values in (unfinished, cost, k, a, log_a, log_b, v)
        )
        if not len(unfinished):
            break
    return distance


@torch.no_grad()
def shear_scores(
    hidden: Sequence[Tensor],
    positive: Sequence[bool],
    *,
    window: int,
    stride: int,
    **transport: Any,
) -> list[Tensor]:
    """Scores of one group's responses, (T,) float32 each: each token's distance from the other outcome, in units of the
    mean hidden norm. Ones where no response has the other outcome. A response with a state that is not finite gets NaN,
    and is left out of the others' comparisons.

    Costs are Euclidean, divided by the mean norm; transport is in float32. Distances of nearly equal states must not
    cancel: on the CPU they come from matrix products in float64, on other devices, some of which lack float64, from sums
    of squared differences in float32.

    Args:
        hidden: for each response the states at its tokens' own positions, before the head: (T, D), any floating dtype.
            T may be 0.
        positive: for each response its outcome.
        stride: as published, windows also begin after one has reached the end: each lies inside the one before it, yet
            differs.
    """
    usable = [i for i, h in enumerate(hidden) if len(h) and h.isfinite().all()]
    # Those of usable responses are put in their places at the end.
    scores = [h.new_full((len(h),), torch.nan, dtype=torch.float32) for h in hidden]
    if not usable:
        return scores
    bounds = [_windows(h, window, stride) for h in hidden]
    distances = {i: scores[i].new_full((len(bounds[i]),), torch.inf) for i in usable}
    on_cpu = hidden[0].device.type == "cpu"
    dtype, mode = (torch.float64, "use_mm") if on_cpu else (torch.float32, "donot_use_mm")
    norms = torch.cat([torch.linalg.vector_norm(hidden[i].to(dtype), dim=-1) for i in usable])
    # Where all states are 0, so are the distances.
    unit = norms.mean().clamp(min=torch.finfo(dtype).tiny)
    opposites = [(i, j) for i in usable for j in usable if positive[i] and not positive[j]]
    pairs = sum(len(bounds[i]) * len(bounds[j]) for i, j in opposites)
    if pairs > MANY_PAIRS:
        logger.warning(
            "shear compares %d pairs of windows in one group, a number that grows with the square of the length; "
            "raise algorithm.shear.stride or window, or shorten the responses",
            pairs,
        )
    for i, j in opposites:
        opposite = hidden[j].to(dtype)
        blocks = []
        # A part at a time, so that the costs of two long responses fit into memory.
        for windows in bounds[i].split(WINDOWS_AT_ONCE):
            first = int(windows[0, 0])
            states = hidden[i][first : int(windows.max())].to(dtype)
            cost = torch.cdist(states, opposite, compute_mode=f"{mode}_for_euclid_dist") / unit
            blocks.append(_window_distances(cost.float(), windows - first, bounds[j], transport))
        # The distance is symmetric: once computed, it serves both responses.
        between = torch.cat(blocks)
        distances[i] = torch.minimum(distances[i], between.amin(dim=1))
        distances[j] = torch.minimum(distances[j], between.amin(dim=0))
    for i in usable:
        place = torch.arange(len(hidden[i]), device=hidden[i].device)
        holds = (bounds[i][:, :1] <= place) & (place < bounds[i][:, 1:])
        greatest = torch.where(holds, distances[i][:, None], -torch.inf).amax(dim=0)
        # Without an opposite distances are infinite, and scores 1.
        scores[i] = greatest.masked_fill(greatest == torch.inf, 1.0)
    return scores


def _windows(h: Tensor, width: int, stride: int) -> Tensor:
    """Half-open windows ``[a, min(a + width, T))`` for ``a = 0, stride, 2 * stride, ... < T``; int64 (K, 2)."""
    # Of 7 tokens, windows of 4 by 2 are [0, 4), [2, 6), [4, 7), [6, 7).
    start = torch.arange(0, len(h), stride, device=h.device)
    return torch.stack([start, (start + width).clamp(max=len(h))], dim=1)


def _window_distances(
    cost: Tensor, bounds: Tensor, opposite_bounds: Tensor, transport: dict[str, Any]
) -> Tensor:
    """Distances of all pairs of two responses' windows, (K, L) float32, a chunk of pairs at a time."""
    sizes, places = _padded(bounds)
    opposite_sizes, opposite_places = _padded(opposite_bounds)
    chunk = CHUNK_ELEMENTS.get(cost.device.type, CHUNK_ELEMENTS["cuda"])
    # The indices of all pairs, int64 (K L, 2): (0, 0), (0, 1), ..., (1, 0), ...
    pairs = bounds.new_ones(len(bounds), len(opposite_bounds)).nonzero()
    distances = []
    costs_of_pair = places.shape[1] * opposite_places.shape[1]
    for chunk_of_pairs in pairs.split(max(1, chunk // costs_of_pair)):
        first, second = chunk_of_pairs.unbind(dim=1)
        costs = cost[places[first][:, :, None], opposite_places[second][:, None, :]]
        distances.append(
            sinkhorn_distance(costs, sizes[first], opposite_sizes[second], **transport)
        )
    return torch.cat(distances).view(len(sizes), len(opposite_sizes))


def _padded(bounds: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens each window has, (K,), and their places, (K, N)."""
    sizes = bounds.diff()[:, 0]
    # The first window is the longest. Shorter ones are padded with the response's last token, which gets no mass.
    places = bounds[:, :1] + torch.arange(int(sizes[0]), device=bounds.device)
    return sizes, places.clamp(max=int(bounds.max()) - 1)
