"""The regression arm: features without a conditional mean, ridge against a plain solve, and what its folds keep apart."""

from __future__ import annotations

import numpy as np
import torch

from recipe.tiny.model import build_model
from recipe.tiny.sampling import prompt_ids
from study import regression
from study.regression import (
    Regression,
    token_features,
)
from study.task import study_problems, study_tokenizer


def test_features_have_mean_zero_over_the_tokens_that_the_policy_could_have_drawn() -> None:
    """By enumeration of the vocabulary behind a few prefixes of a real model."""
    tokenizer = study_tokenizer()
    model = build_model(tokenizer, 0).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
    ids = [*prompt_ids(tokenizer, study_problems("slips", "train", 1, 0)[0]), *tokenizer.encode("so 7+5=12;")]
    with torch.no_grad():
        output = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    log_probs = output.logits[0].double().log_softmax(-1).numpy()
    hidden = output.hidden_states[-1][0].double().numpy()
    for place in range(len(ids) - 6, len(ids)):
        probability = np.exp(log_probs[place])
        count = len(probability)
        entropy = float(-(probability * log_probs[place]).sum())
        features = token_features(-log_probs[place], np.full(count, entropy), np.tile(hidden[place], (count, 1)))
        assert features.shape == (count, 129)
        assert np.abs(features).max() > 1e-2
        np.testing.assert_allclose(probability @ features, 0, atol=1e-12)


def a_batch(seed: int, signal: float) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Eight groups of four rows of seven tokens; the rewards follow the first feature by so much."""
    generator = np.random.default_rng(seed)
    features = [generator.normal(size=(7, 3)) for _ in range(32)]
    sums = np.array([row.sum(axis=0)[0] for row in features])
    rewards = (signal * sums + generator.normal(size=32) > 0).astype(float)
    return features, rewards, np.arange(32) // 4


def test_a_groups_own_rewards_change_nothing_of_its_regression() -> None:
    features, rewards, groups = a_batch(0, 1.0)
    folds = np.unique(groups, return_inverse=True)[1] % regression.FOLDS
    changed = np.where(folds == 1, 1 - rewards, rewards)
    fitted = []
    for own in (rewards, changed):
        one = Regression()
        one.advantages(*a_batch(7, 1.0))
        one.advantages(features, own, groups)
        fitted.append([one.without(fold) for fold in range(regression.FOLDS)])
    np.testing.assert_array_equal(fitted[0][1][0], fitted[1][1][0])
    assert fitted[0][1][1] == fitted[1][1][1], "the share that falls back does not see them either"
    for fold in (0, 2, 3):
        assert not np.array_equal(fitted[0][fold][0], fitted[1][fold][0]), "the other folds do"
