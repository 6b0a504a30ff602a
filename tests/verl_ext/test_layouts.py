"""The trainers' advantages under verl's options: token weight times verl's advantage, and nothing else differs."""

import math
from typing import NamedTuple

import pytest
import torch
from verl.trainer.ppo.v1 import get_trainer_cls

from grail_advantage import Grail
from grail_advantage.verl_ext.settings import BASE, BASES
from tests.verl_ext.one_step import ROWS, Rows, Step, row_of

TOKENS = (
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.rollout_rs=token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold='0.7_1.4'",
)
SEQUENCES = (
    "algorithm.rollout_correction.rollout_is=sequence",
    "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
    "algorithm.rollout_correction.rollout_rs_threshold='0.95_1.05'",
)
KL = ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.1")
TOOL = (
    "a_3_0",
    "Two?",
    ("I ask for it;", r"=\boxed{9}!", "so it", "?", r" is \boxed{3}, ok<end>"),
    0.0,
)
"""A tool wrote between the model's turns, an answer too."""
# Earlier outputs of a session carry the reward of its last one, as verl's agent loop writes them.
SEVERAL_OUTPUTS = (
    ("a_0_1", "Two? Sure?", r"Yes, \boxed{2}.<end>", 1.0),
    ("a_1_1", "Two? Sure?", "Let me see.<end>", 0.0),
    ("a_1_2", "Two? Sure? Yes?", r"Then it is \boxed{4}.<end>", 0.0),
)
PADDING = "pad_0_0"


class Scenario(NamedTuple):
    """Options, further responses, and verl's names of the trainer and of the base."""

    overrides: tuple[str, ...] = ()
    more: tuple[tuple, ...] = (TOOL,)
    mode: str = "sync"
    base: str = "grpo"


SCENARIOS = {
    "separate_async": Scenario(mode="separate_async"),
    "decoupled, sequences": Scenario(SEQUENCES),
    "bypass": Scenario(("algorithm.rollout_correction.bypass_mode=True", *TOKENS)),
    "several outputs": Scenario(more=SEVERAL_OUTPUTS),
    "everything": Scenario((*KL, *TOKENS), (*SEVERAL_OUTPUTS, TOOL), "colocate_async"),
    **{base: Scenario(base=base) for base in BASES},
}
LEAST_LOST = {"decoupled, sequences": 1, "everything": 4}
"""Responses of which rejection sampling drops tokens, in the scenarios that have any."""


def responses_of(name: str) -> Rows:
    """The scenario's, with log-probabilities that differ between the policies, and a row that fills up the batch."""
    generator = torch.Generator().manual_seed(3)
    rows = {}
    for key, *contents in (*ROWS, *SCENARIOS[name].more, (PADDING, "?", "<end>", 0.0)):
        row = rows[key] = row_of(*contents)
        count = len(row["responses"])
        row["old_log_probs"] = -2 * torch.rand(count, generator=generator)
        for policy in ("rollout_log_probs", "ref_log_prob"):
            moved_T = 0.3 * torch.randn(count, generator=generator)
            row[policy] = row["old_log_probs"] + moved_T
    for mask in ("response_mask", "loss_mask"):
        rows[PADDING][mask] = torch.zeros(1).long()
    return rows


def steps_of(name: str) -> list[Step]:
    """The stage of verl's trainer, and that of this package's."""
    scenario = SCENARIOS[name]
    steps = []
    for base in (f"algorithm.adv_estimator={scenario.base}", f"{BASE}={scenario.base}"):
        options = (base, *scenario.overrides)
        method = Grail("robust", gate="all")
        step = Step(*options, method=method, rows=responses_of(name), mode=scenario.mode)
        step.run(PADDING)
        steps.append(step)
    return steps


@pytest.mark.parametrize("name", SCENARIOS)
def test_advantages_are_weight_times_verls_and_nothing_else_differs(name):
    """The weights themselves are in ``test_hosts.py``."""
    verl, ours = steps_of(name)
    moved = 0
    lost = 0
    for row, weights_T in zip(
        verl.rows.items(), ours.trainer._weighed.weights, strict=True
    ):
        key, columns = row
        mask_T = columns["response_mask"].bool()
        weights_T = weights_T[: len(mask_T)]
        expected_T = torch.where(mask_T, weights_T * columns["advantages"], 0.0)
        actual = ours.rows[key]
        torch.testing.assert_close(actual["advantages"], expected_T)
        assert torch.equal(actual["returns"], actual["advantages"])
        moved += bool(expected_T.any()) and len(weights_T[mask_T].unique()) > 2
        # Rejection sampling takes tokens out of the mask.
        lost += not torch.equal(columns["response_mask"], columns["loss_mask"])
        assert columns.keys() == actual.keys()
        for column in columns.keys() - {"advantages", "returns", "uid"}:
            assert torch.equal(columns[column], actual[column]), column
    assert moved >= 3
    assert lost >= LEAST_LOST.get(name, 0) and bool(lost) == (name in LEAST_LOST)
    assert {figure: ours.metrics[figure] for figure in verl.metrics} == verl.metrics
    assert all(map(math.isfinite, ours.metrics.values()))


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_a_trainer_has_the_replay_buffer_of_verls_own(mode, monkeypatch):
    """Which verl chooses by its own names of the modes."""
    monkeypatch.setattr(get_trainer_cls(mode), "__init__", lambda self, config: None)
    config = Step().trainer.config
    config.trainer.v1.trainer_mode = f"grail_{mode}"
    get_trainer_cls(f"grail_{mode}")(config)
    assert config.trainer.v1.trainer_mode == mode
