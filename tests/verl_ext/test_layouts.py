"""The trainers' advantages under verl's options: token weight times verl's advantage, and nothing else differs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from verl.trainer.ppo.v1 import get_trainer_cls

from grail_advantage import Grail
from grail_advantage.verl_ext.settings import BASE, BASES, ROLLOUT
from tests.core import reference
from tests.core.tiny_models import id_to_character
from tests.verl_ext.one_step import ROWS, Step, made_up_saliency, row_of

CORRECTION = "algorithm.rollout_correction"
TOKENS = tuple(
    f"{CORRECTION}.rollout_{option}"
    for option in ("is=token", "rs=token_k1", "rs_threshold='0.7_1.4'")
)
SEQUENCES = tuple(
    f"{CORRECTION}.rollout_{option}"
    for option in ("is=sequence", "rs=seq_mean_k1", "rs_threshold='0.95_1.05'")
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
TEMPERATURE = 0.8
STEP = 3


class Scenario(NamedTuple):
    """Options, further responses, and verl's names of the trainer and of the base."""

    overrides: tuple[str, ...] = ()
    more: tuple[tuple, ...] = (TOOL,)
    mode: str = "sync"
    base: str = "grpo"


SCENARIOS = {
    "separate_async": Scenario(mode="separate_async"),
    "decoupled, sequences": Scenario(SEQUENCES),
    "bypass": Scenario((f"{CORRECTION}.bypass_mode=True", *TOKENS)),
    "several outputs": Scenario(more=SEVERAL_OUTPUTS),
    "everything": Scenario((*KL, *TOKENS), (*SEVERAL_OUTPUTS, TOOL), "colocate_async"),
    **{base: Scenario(base=base) for base in BASES},
}
LEAST_LOST = {"decoupled, sequences": 1, "everything": 4}
"""Responses of which rejection sampling drops tokens, in the scenarios that have any."""
Rows = dict[str, dict[str, Any]]


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


def results_of(name: str) -> list[tuple[Rows, dict[str, Any]]]:
    """The responses and metrics after the stage of verl's trainer, and after that of this package's."""
    scenario = SCENARIOS[name]
    results = []
    for base in (f"algorithm.adv_estimator={scenario.base}", f"{BASE}={scenario.base}"):
        options = (base, f"{ROLLOUT}.temperature={TEMPERATURE}", *scenario.overrides)
        method = Grail("robust", gate="all")
        step = Step(*options, method=method, rows=responses_of(name), mode=scenario.mode)
        step.trainer.global_steps = STEP
        step.run(PADDING)
        results.append((step.store.rows, step.metrics))
    return results


def weights_of(row: dict[str, Any], mask_T: torch.Tensor, advantage: float) -> torch.Tensor:
    """Of the tokens that train, by the plain computation, which has not seen a tool's tokens, but for their positions."""
    # The method sees what the model wrote; rejection takes tokens out of the weights alone.
    written_T = row["loss_mask"].bool()
    trains = mask_T[written_T].tolist()
    text = "".join(id_to_character()[token] for token in row["responses"][written_T].tolist())
    spans = [tuple(sum(trains[:at]) for at in span) for span in reference.boxed_spans(text)]
    # The made-up saliency is a figure of each token and its position.
    tokens_S = torch.cat([row["prompts"], row["responses"]])
    scores_T = made_up_saliency(tokens_S, TEMPERATURE, STEP)[len(row["prompts"]) :][mask_T]
    options = reference.resolve("robust", gate="all")
    return torch.tensor(
        reference.row_weights(scores_T.tolist(), spans[-1] if spans else None, advantage, options)
    )


@pytest.mark.parametrize("name", SCENARIOS)
def test_advantages_are_weight_times_verls_and_nothing_else_differs(name: str) -> None:
    (verls, verls_metrics), (ours, metrics) = results_of(name)
    moved = 0
    lost = 0
    # A response of which rejection sampling drops tokens has another mask than it had.
    for key, row in verls.items():
        mask_T = row["response_mask"].bool()
        advantages_T = ours[key]["advantages"]
        expected_T = torch.zeros(len(mask_T))
        if mask_T.any():
            advantage = float(row["advantages"][mask_T][0])
            weights_T = weights_of(row, mask_T, advantage)
            expected_T[mask_T] = weights_T * advantage
            moved += bool(advantage) and len(weights_T.unique()) > 2
        torch.testing.assert_close(advantages_T, expected_T, rtol=2e-4, atol=1e-6)
        assert torch.equal(ours[key]["returns"], advantages_T)
        lost += not torch.equal(row["response_mask"], row["loss_mask"])
        assert row.keys() == ours[key].keys()
        for column in row.keys() - {"advantages", "returns", "uid"}:
            assert torch.equal(row[column], ours[key][column]), column
    # Responses without an answer, or with the advantage 0, have weights of 1.
    assert moved >= 3 and not ours[PADDING]["advantages"].any()
    assert lost >= LEAST_LOST.get(name, 0) and bool(lost) == (name in LEAST_LOST)
    assert {metric: metrics[metric] for metric in verls_metrics} == verls_metrics
    assert all(map(math.isfinite, metrics.values()))


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_a_trainer_has_the_replay_buffer_of_verls_own(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which verl chooses by its own names of the modes."""
    monkeypatch.setattr(get_trainer_cls(mode), "__init__", lambda self, config: None)
    config = Step().trainer.config
    config.trainer.v1.trainer_mode = f"grail_{mode}"
    get_trainer_cls(f"grail_{mode}")(config)
    assert config.trainer.v1.trainer_mode == mode
