"""The receipt raises no false alarm over verl's own losses: each one's gradient is what its account says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import ActorConfig

from grail_advantage.receipt import Batch, Loss, Receipt
from grail_advantage.verl_ext.dump import LOSS_COLUMNS, loss_of
from grail_advantage.verl_ext.exchange import PLACES, WATCHED, nested
from grail_advantage.verl_ext.settings import ACTOR, Settings
from grail_advantage.verl_ext.worker import UpdateReader
from tests.composed import VERL, compose
from tests.core.receipt_loop import TOKENS, Rollout, names, rollout
from tests.verl_ext.one_step import loss_worker, receipt_by, run_loss
from tests.verl_ext.ranks import AGGREGATIONS

KNOWN = sorted(POLICY_LOSS_REGISTRY.keys() - {"bypass_mode", "clip_cov", "geo_mean"})
"""verl's losses that have a formula and keep the mean over an update."""
SEEDS = 20
pytestmark = pytest.mark.slow
CHOICES: dict[str, tuple[Any, ...]] = {
    "ranks": (1, 2),
    "updates": (1, 2),
    "epochs": (1, 4),
    "skips": (True, False),
    "weights": (True, False),
    "token_advantages": (True, False),
    "loss_agg_mode": AGGREGATIONS,
    "loss_scale_factor": ("null", 12),
    "policy_loss.dro_beta": (0.02, 0.5),
    "policy_loss.kl_cov_ratio": (0.2, 0.3),
    "policy_loss.ppo_kl_coef": (0.4, 0.7),
    "kl_loss_type": (
        None,
        "k1",
        "kl",
        "abs",
        "k2",
        "mse",
        "k3",
        "low_var_kl",
        "k1+",
        "k3+",
    ),
}
"""What the receipt depends on: of all combinations each seed draws one."""
OPTIONS = {
    "clip_ratio_low": 0.15,
    "clip_ratio_high": 0.3,
    "clip_ratio_c": 1.6,
    "tau_neg": 1.4,
    "kl_loss_coef": 0.3,
    "use_dynamic_bsz": True,
}


def settings_of(mode: str, choice: dict[str, Any]) -> tuple[Loss, ActorConfig]:
    """The loss as the trainer takes it from a run's configuration, and verl's own of the same configuration."""
    options = {name: value for name, value in choice.items() if "loss" in name}
    kl = options.pop("kl_loss_type", None)
    options["policy_loss.loss_mode"] = mode
    options["use_kl_loss"] = kl is not None
    if kl is not None:
        options["kl_loss_type"] = kl
    overrides = [f"{ACTOR}.{name}={value}" for name, value in (OPTIONS | options).items()]
    config = compose("ppo_trainer", [*overrides, "algorithm.adv_estimator=uniform"], VERL)
    loss = loss_of(Settings.parse(config))
    # verl sets it where it starts the workers.
    config.actor_rollout_ref.actor.rollout_n = 4
    return loss, omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def data_of(batch: Batch, rows: torch.Tensor) -> TensorDict:
    """A micro-batch as verl's worker has it, after prompts of one to three tokens."""
    lengths = (
        torch.where(batch.mask_BT, torch.arange(TOKENS) + 1, 0).amax(dim=1).clamp(min=1)
    )
    columns = {
        "response_mask": batch.mask_BT,
        "old_log_probs": batch.old_log_probs_BT,
        "advantages": batch.advantages_BT,
        "rollout_is_weights": batch.weights_BT,
        "ref_log_prob": batch.ref_log_probs_BT,
        "responses": torch.zeros(batch.mask_BT.shape, dtype=torch.long),
    }
    fields = {
        name: nested([values[row, : lengths[row]] for row in rows])
        for name, values in columns.items()
        if values is not None
    }
    fields["prompts"] = nested(
        [torch.zeros(int(1 + row % 3), dtype=torch.long) for row in rows]
    )
    fields[PLACES] = torch.stack([rows, rows], dim=1)
    return TensorDict(fields, batch_size=[len(rows)])


def receipt_of(
    source: Rollout,
    mode: str,
    choice: dict[str, Any],
    skipped_B: torch.Tensor,
    generated_BT: torch.Tensor,
) -> Receipt:
    """By what each rank's reader reads of verl's loss, whose engine counts the generated tokens."""
    batch = source.batch
    loss, config = settings_of(mode, choice)
    assert loss.account is not None
    readers = [UpdateReader() for _ in range(batch.ranks)]
    watched = tu.get_tensordict({}, non_tensor_dict={WATCHED: "1.0"})
    for update, step in enumerate(source.plan):
        everything = torch.cat([rows for _, rows in step])
        sizes = {"dp_size": batch.ranks, "global_batch_size": len(everything)}
        sizes["batch_num_tokens"] = int(generated_BT[everything].sum())
        for rank, reader in enumerate(readers):
            worker = loss_worker(config)
            micro_batches = [rows for owner, rows in step if owner == rank]
            places = [place for rows in micro_batches for place in rows.tolist()]
            with reader.optimiser_step(worker, watched, places):
                for rows in [rows[~skipped_B[rows]] for rows in micro_batches]:
                    if len(rows):
                        data = data_of(batch, rows)
                        tu.assign_non_tensor(data, **sizes)
                        run_loss(worker, data, source.policy_UBT[update, rows])
    values = (batch.old_log_probs_BT, batch.weights_BT, batch.ref_log_probs_BT)
    columns = zip(LOSS_COLUMNS, values, strict=True)
    return receipt_by(
        [reader.take("1.0") for reader in readers],
        batch.mask_BT,
        batch.advantages_BT,
        {name: column for name, column in columns if column is not None},
        range(len(skipped_B)),
        sent=(~skipped_B).tolist(),
        loss=loss,
        epochs=batch.epochs,
        on_policy=True,
    )


def case(mode: str, seed: int) -> tuple[Receipt, dict[str, Any]]:
    """One of all combinations."""
    draw = torch.Generator().manual_seed(1000 * seed + len(mode))
    choice = {
        name: values[int(torch.randint(len(values), (), generator=draw))]
        for name, values in CHOICES.items()
    }
    if mode == "sapo" and choice["loss_agg_mode"] != "seq-mean-token-mean":
        choice["kl_loss_type"] = None
    options = {
        name: choice[name] for name in ("ranks", "updates", "epochs", "token_advantages")
    }
    source = rollout(seed, **options, weights=choice["weights"] and mode != "dro")
    batch = source.batch
    # These losses have a gradient without an advantage.
    skips = (
        choice["skips"] and choice["kl_loss_type"] is None and mode not in ("dro", "kl_cov")
    )
    trains = ((batch.advantages_BT != 0) & batch.mask_BT).any(dim=1)
    if choice["kl_loss_type"] is None:
        source = replace(source, batch=replace(batch, ref_log_probs_BT=None))
    return receipt_of(source, mode, choice, ~trains & skips, batch.mask_BT), choice


@pytest.mark.parametrize("mode", KNOWN)
def test_no_false_alarm(mode: str) -> None:
    choices = set()
    clipped = 0.0
    for seed in range(SEEDS):
        receipt, choice = case(mode, seed)
        assert receipt.ok and names(receipt) == [], (
            seed,
            choice,
            *receipt.findings,
        )
        held_UBT = ~receipt.received_UBT.isnan()
        received = receipt.received_UBT[held_UBT]
        expected = receipt.expected_UBT[held_UBT]
        torch.testing.assert_close(received, expected, rtol=1e-3, atol=1e-4)
        assert received.abs().max() > 0.1
        clipped += float(receipt.clipped_BT.nansum())
        choices.update(choice.items())
    # Every value of the first choices, and a few kinds of KL.
    assert len(choices) >= 2 * 10 + 5 + 2, choices
    # The other losses have no bound.
    assert bool(clipped) == (mode in ("vanilla", "gspo", "cispo", "dppo_tv", "dppo_kl")), (
        clipped
    )


@pytest.mark.parametrize(
    ("mode", "aggregation"),
    [("geo_mean", "seq-mean-token-mean"), ("vanilla", "token-mean")],
)
def test_two_faults_of_verls_own_are_named(mode: str, aggregation: str) -> None:
    """The means of micro-batches are summed; after rejection (of each third response) all generated tokens divide."""
    source = rollout(5, token_advantages=False, ties=True, even=True)
    generated_BT = source.batch.mask_BT
    # The mask loses responses 0, 3 and 6; their tokens still count in the divisor.
    kept_B = (torch.arange(len(generated_BT)) % 3 > 0) | (mode == "geo_mean")
    mask_BT = generated_BT & kept_B[:, None]
    changes = {"mask_BT": mask_BT, "advantages_BT": source.batch.advantages_BT * mask_BT}
    source = replace(source, batch=replace(source.batch, ref_log_probs_BT=None, **changes))
    choice = {"loss_agg_mode": aggregation}
    nobody_B = torch.zeros(len(mask_BT), dtype=torch.bool)
    receipt = receipt_of(source, mode, choice, nobody_B, generated_BT)
    assert names(receipt) == ["scaled"]
    factor = float(mask_BT.sum() / generated_BT.sum())
    # Each micro-batch of two adds a mean of its own.
    if mode == "geo_mean":
        factor = len(source.plan[0])
    (finding, *_) = receipt.findings
    assert (finding.low, finding.high) == pytest.approx((factor, factor), rel=1e-4)
    assert factor != pytest.approx(1, rel=0.1)
