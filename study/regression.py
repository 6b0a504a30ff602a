"""An arm of the study's own: a regression of the reward on features whose mean is zero for every token, given what precedes it.

Source: this project, exploratory. True token advantages are differences of a martingale. So is ``(s_t - H_t) f(x_t)``, with the
surprisal ``s`` of the drawn token, the entropy ``H`` of the policy there, and any ``f`` of what comes before; here f is 1 and
the hidden state that predicts the token, divided by the square root of its width. A row's features are summed over its tokens,
rewards and features centred within their group, and ridge regression gives ``u``; the token advantage is

    A_t = rho phi_t . u + (1 - rho) A,

rho being the cross-validated R2 of the fit, at least 0 and at most 1: where nothing is explained this is Dr. GRPO.

A group's advantages come from groups of other folds alone, ``rho`` and the penalty included, so that no reward comes back
to its own tokens.

Shape suffixes: B rows, T response tokens, D hidden, F = D + 1 features.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FOLDS = 4
BATCHES = 6
"""How many rollout batches, the current one included, the regression sees."""
PENALTIES = tuple(10.0**exponent for exponent in range(-4, 5))
"""Relative to the features' mean square."""


def token_features(surprisal_T: np.ndarray, entropy_T: np.ndarray, hidden_TD: np.ndarray) -> np.ndarray:
    """Features of one row's tokens, (T, F) float64; the hidden states are those that predict the tokens."""
    scaled_TD = hidden_TD / np.sqrt(hidden_TD.shape[1])
    states_TF = np.concatenate([np.ones((len(hidden_TD), 1)), scaled_TD], axis=1)
    return (surprisal_T - entropy_T)[:, None] * states_TF


def ridge(features_BF: np.ndarray, targets_B: np.ndarray, penalty: float) -> np.ndarray:
    """The u that minimises ``|y - X u|^2 + penalty |u|^2``, (F,)."""
    gram_FF = features_BF.T @ features_BF + penalty * np.eye(features_BF.shape[1])
    return np.linalg.solve(gram_FF, features_BF.T @ targets_B)


def cross_validated_penalty(features_BF: np.ndarray, targets_B: np.ndarray) -> float:
    """Of :data:`PENALTIES`, that of the least generalised cross-validation ``B |y - X u|^2 / (B - trace(hat))^2``."""
    left_BK, singular_K, _ = np.linalg.svd(features_BF, full_matrices=False)
    count = len(targets_B)
    along_K = left_BK.T @ targets_B
    beside = float(targets_B @ targets_B - along_K @ along_K)
    scale = float((singular_K**2).sum()) / features_BF.shape[1]
    candidates = []
    for relative in PENALTIES:
        kept_K = singular_K**2 / (singular_K**2 + relative * scale)
        error = beside + float((((1 - kept_K) * along_K) ** 2).sum())
        candidates.append((count * error / (count - kept_K.sum()) ** 2, relative * scale))
    return min(candidates)[1]


def fit(features_BF: np.ndarray, targets_B: np.ndarray) -> np.ndarray:
    """Ridge regression with the penalty by generalised cross-validation; zeros where nothing varies."""
    if not features_BF.any() or not targets_B.any():
        return np.zeros(features_BF.shape[1])
    return ridge(features_BF, targets_B, cross_validated_penalty(features_BF, targets_B))


@dataclass(frozen=True)
class _Rows:
    """One batch: rows' summed features and rewards, centred within their groups, and the rows' folds."""

    features_BF: np.ndarray
    rewards_B: np.ndarray
    folds_B: np.ndarray


class Regression:
    """Token advantages of one run, batch after batch."""

    def __init__(self) -> None:
        self._batches: deque[_Rows] = deque(maxlen=BATCHES)

    def advantages(
        self, features: Sequence[np.ndarray], rewards_B: np.ndarray, groups_B: np.ndarray
    ) -> tuple[list[np.ndarray], float]:
        """Token advantages of the rows of one batch, (T,) each, and the mean rho.

        Args:
            features: :func:`token_features` of every row.
            rewards_B: rewards.
            groups_B: rows with the same number answer the same prompt.
        """
        sums_BF = np.stack([row_TF.sum(axis=0) for row_TF in features])
        folds_B = np.unique(groups_B, return_inverse=True)[1] % FOLDS
        centred_B = centred(rewards_B, groups_B)
        self._batches.append(_Rows(centred(sums_BF, groups_B), centred_B, folds_B))
        advantages: list[np.ndarray] = [np.zeros(0)] * len(features)
        rhos = []
        for fold in range(FOLDS):
            u_F, rho = self.without(fold)
            rhos.append(rho)
            for row in np.flatnonzero(folds_B == fold):
                advantages[row] = rho * (features[row] @ u_F) + (1 - rho) * centred_B[row]
        return advantages, float(np.mean(rhos))

    def without(self, fold: int) -> tuple[np.ndarray, float]:
        """The regression from all rows but the current batch's of this fold, and the R2 of such a regression on rows that it
        has not seen, cross-validated among these, cut to [0, 1]."""
        current = self._batches[-1]
        # Groups of earlier batches have no rewards in common with the current ones; their folds only share out the validation.
        kept = [np.ones(len(batch.folds_B), dtype=bool) for batch in self._batches]
        kept[-1] = current.folds_B != fold
        features_BF = np.concatenate([b.features_BF[k] for b, k in zip(self._batches, kept, strict=True)])
        rewards_B = np.concatenate([b.rewards_B[k] for b, k in zip(self._batches, kept, strict=True)])
        folds_B = np.concatenate([b.folds_B[k] for b, k in zip(self._batches, kept, strict=True)])
        return fit(features_BF, rewards_B), cross_validated_r2(features_BF, rewards_B, folds_B)


def cross_validated_r2(features_BF: np.ndarray, rewards_B: np.ndarray, folds_B: np.ndarray) -> float:
    """``1 - |y - y'|^2 / |y|^2``, y' each fold's prediction from the others; cut to [0, 1], 0 where nothing varies or with one
    fold."""
    predicted_B = np.zeros(len(rewards_B))
    folds = np.unique(folds_B)
    if len(folds) < 2 or not rewards_B.any():
        return 0.0
    for fold in folds:
        held_out = folds_B == fold
        predicted_B[held_out] = features_BF[held_out] @ fit(features_BF[~held_out], rewards_B[~held_out])
    return float(np.clip(1 - ((rewards_B - predicted_B) ** 2).sum() / (rewards_B**2).sum(), 0, 1))


def centred(values_B: np.ndarray, groups_B: np.ndarray) -> np.ndarray:
    """Values minus their group's mean, along the first axis."""
    result = np.array(values_B, dtype=np.float64)
    for group in np.unique(groups_B):
        rows = groups_B == group
        result[rows] -= result[rows].mean(axis=0)
    return result
