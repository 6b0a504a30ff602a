"""SHEAR's scores: how far the hidden states around each token lie from those of the responses with the other outcome.

Source: SHEAR (arXiv 2604.23318). A response is cut into overlapping windows, each a cloud of hidden states. A window's
distance is that to the nearest window of any response of the group with the other outcome, and a token's score is the
greatest distance of the windows that hold it, in units of the group's mean hidden norm. Correct and incorrect responses are
treated alike. The source names the Sinkhorn distance but neither its regularisation nor its iterations: see
:func:`sinkhorn_distance`, which leaves the iterations to POT.

Shape suffixes: P pairs of windows, N and M tokens of a pair's two windows, K and L windows of two responses, T and U their
tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

EPSILON = 0.05
"""Regularisation, as a share of a pair's mean cost. For windows of 100 hidden states of SmolLM2-135M, distances come out 7 %
above exact transport (8 % at most) and in nearly its order (correlation 0.999); at 0.1 it is 13 % (17 %, 0.991), and each
halving doubles the iterations."""

ITERATIONS = 200
TOLERANCE = 1e-3
"""A pair is done once at most this share of its mass breaks the row sums. With the same hidden states that takes 28 iterations
on average, never the most, and scores are 0.02 % (0.08 % at most) from what they converge to. A tolerance of 0.01 takes 15, for
0.2 % (0.7 %)."""

_ROUND = 10
"""Iterations between looks at the marginals; POT's solver looks every 10th time by itself."""

_NOTHING = -1e30
"""A logarithm so low that nothing is left of it beside any other."""

_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Costs that are worked on at once. Some eight temporaries have this size; on a CPU they should stay in its cache."""


@torch.no_grad()
def sinkhorn_distance(
    cost_PNM: torch.Tensor,
    rows_P: torch.Tensor | None = None,
    columns_P: torch.Tensor | None = None,
    *,
    epsilon: float = EPSILON,
    iterations: int = ITERATIONS,
    tolerance: float = TOLERANCE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Transport cost ``<plan, cost>`` between uniform masses, of the plan that entropy regularises; without the entropy term.

    The plan minimises ``<plan, cost> - epsilon * mean(cost) * entropy(plan)``, with the mean over the pair's own costs. So a
    pair's distance scales with its costs and the iterations that it takes do not depend on their size. Once converged it is
    at least the exact transport cost, and above it by at most ``epsilon * mean(cost) * log(min(N, M))``.

    Sinkhorn's iterations, in the log domain, come from POT. Each pair stops by itself, so that its distance does not depend
    on the pairs beside it. A pair that has not converged after ``iterations`` gets the cost of its last plan, whose column
    sums hold and whose row sums are off by the second result.

    Args:
        cost_PNM: costs, at least 0; float64 is computed in float64, any other floating dtype in float32.
        rows_P: int; how many rows of each pair are tokens, 1 to N. Rows after them are not read. None: all.
        columns_P: the same for columns, 1 to M.
        epsilon: greater than 0.
        iterations: at least 1.
        tolerance: at least 0; 0 never stops early.

    Returns:
        ``(distance_P, error_P)``, dtype of the computation. The error is the share of the mass that would have to move for
        the row sums to hold, 0 to 1. Both are NaN for a pair with a cost that is not finite.

    Raises:
        ValueError: POT is not installed.
    """
    project = _projection()
    cost_PNM = cost_PNM if cost_PNM.dtype == torch.float64 else cost_PNM.float()
    row_PN = _first(rows_P, cost_PNM[:, :, 0])
    column_PM = _first(columns_P, cost_PNM[:, 0, :])
    mass_PN = row_PN / row_PN.sum(dim=1, keepdim=True).to(cost_PNM.dtype)
    mass_PM = column_PM / column_PM.sum(dim=1, keepdim=True).to(cost_PNM.dtype)

    cost_PNM = torch.where(row_PN[:, :, None] & column_PM[:, None, :], cost_PNM, 0.0)
    unit_P = epsilon * torch.einsum("pnm,pn,pm->p", cost_PNM, mass_PN, mass_PM)
    # Without any cost one plan is as good as another; 1 in place of 0 keeps the kernel finite.
    kernel_PNM = -cost_PNM / torch.where(unit_P == 0, 1.0, unit_P)[:, None, None]
    # POT starts at potentials 0, with which a column of padding would count before it gets its own, -inf. Finite, since
    # -inf less -inf is NaN.
    kernel_PNM = torch.where(column_PM[:, None, :], kernel_PNM, _NOTHING)

    distance_P, error_P = torch.empty_like(unit_P), torch.empty_like(unit_P)
    pair_P = torch.arange(len(cost_PNM), device=cost_PNM.device)
    done = 0
    while len(pair_P):
        steps = min(_ROUND, iterations - done)
        result = project(kernel_PNM, mass_PN, mass_PM, max_iter=steps, tol=0.0, grad="detach")
        done += steps
        off_P = (result["T"].sum(dim=2) - mass_PN).abs().sum(dim=1) / 2
        stop_P = (off_P <= tolerance) & (tolerance > 0) | (done == iterations)
        distance_P[pair_P[stop_P]] = (result["T"] * cost_PNM)[stop_P].sum(dim=(1, 2))
        error_P[pair_P[stop_P]] = off_P[stop_P]

        # The potentials reached go into the kernel, as the next round starts at 0 again; those of padding, -inf, do not.
        stay_P = ~stop_P
        row_PN, column_PM, pair_P = row_PN[stay_P], column_PM[stay_P], pair_P[stay_P]
        cost_PNM, mass_PN, mass_PM = cost_PNM[stay_P], mass_PN[stay_P], mass_PM[stay_P]
        potential_PN, potential_PM = (potential[stay_P] for potential in result["potentials"])
        kernel_PNM = kernel_PNM[stay_P] + torch.where(row_PN, potential_PN, 0.0)[:, :, None]
        kernel_PNM += torch.where(column_PM, potential_PM, 0.0)[:, None, :]
    return distance_P, error_P


@torch.no_grad()
def shear_scores(
    hidden: Sequence[torch.Tensor], positive: Sequence[bool], *, window: int, stride: int, **transport: float
) -> list[torch.Tensor]:
    """Scores of one group's responses: each token's distance from the other outcome, in units of the mean hidden norm.

    Costs are Euclidean, divided by the mean norm; transport is in float32. So that states that are nearly the same do not
    cancel, costs are products in float64 on the CPU, and sums of squared differences on other devices, some of which have
    none. Beside the chunks, the costs of two responses' tokens are held at once.

    Args:
        hidden: for each response the last layer's states at its tokens' own positions, before the head: (T_i, D), any
            floating dtype, on one device. T_i may be 0.
        positive: for each response its outcome.
        window: tokens of a window.
        stride: tokens from one window's beginning to the next, at most ``window``. As published, windows also begin after one
            has reached the end: each lies inside the one before it, yet its distance differs.
        transport: options of :func:`sinkhorn_distance`.

    Returns:
        For each response (T_i,) float32. Ones where no response has the other outcome; a response without a token is none. A
        response with a state that is not finite gets NaN, and for the others it is not there.

    Raises:
        ValueError: POT is not installed.
    """
    _projection()  # its absence shows at the first group, not at the first one with both outcomes
    whole = [bool(h_TD.isfinite().all()) for h_TD in hidden]
    usable = [i for i, h_TD in enumerate(hidden) if whole[i] and len(h_TD)]
    bounds = [_windows(h_TD, window, stride) for h_TD in hidden]
    distances = {i: hidden[i].new_full((len(bounds[i]),), torch.inf, dtype=torch.float32) for i in usable}

    if usable:
        on_cpu = hidden[0].device.type == "cpu"
        dtype, mode = (torch.float64, "use_mm") if on_cpu else (torch.float32, "donot_use_mm")
        norms = torch.cat([torch.linalg.vector_norm(hidden[i].to(dtype), dim=-1) for i in usable])
        unit = norms.mean().clamp(min=torch.finfo(dtype).tiny)  # all states 0: so are the distances
    for i in (i for i in usable if positive[i]):
        for j in (j for j in usable if not positive[j]):
            cost_TU = (
                torch.cdist(hidden[i].to(dtype), hidden[j].to(dtype), compute_mode=f"{mode}_for_euclid_dist") / unit
            )
            # The distance is symmetric: once computed, it serves both responses.
            distance_KL = _window_distances(cost_TU.float(), bounds[i], bounds[j], transport)
            distances[i] = torch.minimum(distances[i], distance_KL.amin(dim=1))
            distances[j] = torch.minimum(distances[j], distance_KL.amin(dim=0))

    scores = [h_TD.new_ones(len(h_TD), dtype=torch.float32) for h_TD in hidden]
    for i, score_T in enumerate(scores):
        if not whole[i]:
            score_T.fill_(torch.nan)
        elif i in distances and any(positive[j] != positive[i] for j in usable):
            scores[i] = _greatest_over_windows(distances[i], bounds[i])
    return scores


def _projection() -> Callable[..., dict]:
    """POT's batched solver; imported here because the package does without POT otherwise."""
    try:
        from ot.batch import bregman_log_projection_batch
    except ImportError as error:
        raise ValueError(
            f"SHEAR's distances need POT, 0.9.6 or newer ({error}): pip install grail-advantage[shear]"
        ) from error
    return bregman_log_projection_batch


def _first(count_P: torch.Tensor | None, like_PN: torch.Tensor) -> torch.Tensor:
    """bool (P, N): the first ``count_P`` places of each row, or all."""
    place_PN = torch.arange(like_PN.shape[1], device=like_PN.device).expand(like_PN.shape)
    return place_PN < (like_PN.shape[1] if count_P is None else count_P[:, None])


def _windows(h_TD: torch.Tensor, width: int, stride: int) -> torch.Tensor:
    """Half-open windows ``[a, min(a + width, T))`` for ``a = 0, stride, 2 * stride, ... < T``; int64 (K, 2)."""
    start_K = torch.arange(0, len(h_TD), stride, device=h_TD.device)
    return torch.stack([start_K, (start_K + width).clamp(max=len(h_TD))], dim=1)


def _window_distances(
    cost_TU: torch.Tensor, bounds_K2: torch.Tensor, bounds_L2: torch.Tensor, transport: dict[str, float]
) -> torch.Tensor:
    """Sinkhorn distances of all pairs of two responses' windows, (K, L) float32, a chunk of pairs at a time."""
    size_K, size_L = bounds_K2.diff()[:, 0], bounds_L2.diff()[:, 0]
    # The first window is the longest. Shorter ones are padded with the response's last token, which gets no mass.
    token_KN = (bounds_K2[:, :1] + torch.arange(int(size_K[0]), device=cost_TU.device)).clamp(max=cost_TU.shape[0] - 1)
    token_LM = (bounds_L2[:, :1] + torch.arange(int(size_L[0]), device=cost_TU.device)).clamp(max=cost_TU.shape[1] - 1)
    elements = _CHUNK_ELEMENTS.get(cost_TU.device.type, _CHUNK_ELEMENTS["cuda"])
    pairs = torch.cartesian_prod(*(torch.arange(len(size), device=cost_TU.device) for size in (size_K, size_L)))
    distances = []
    for pair_P2 in pairs.split(max(1, elements // (token_KN.shape[1] * token_LM.shape[1]))):
        k_P, l_P = pair_P2.unbind(dim=1)
        cost_PNM = cost_TU[token_KN[k_P][:, :, None], token_LM[l_P][:, None, :]]
        distances.append(sinkhorn_distance(cost_PNM, size_K[k_P], size_L[l_P], **transport)[0])
    return torch.cat(distances).view(len(size_K), len(size_L))


def _greatest_over_windows(distance_K: torch.Tensor, bounds_K2: torch.Tensor) -> torch.Tensor:
    """For each token the greatest distance of the windows that hold it, (T,)."""
    place_T = torch.arange(int(bounds_K2[-1, 1]), device=distance_K.device)
    held_KT = (bounds_K2[:, :1] <= place_T) & (place_T < bounds_K2[:, 1:])
    return torch.where(held_KT, distance_K[:, None], -torch.inf).amax(dim=0)
