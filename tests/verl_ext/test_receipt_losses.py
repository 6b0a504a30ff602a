"""The receipt raises no false alarm over verl's own losses: each one's gradient is what its account says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import ActorConfig

from grail_advantage.receipt import Loss, Receipt
from grail_advantage.verl_ext.dump import LOSS_COLUMNS, loss_of
from grail_advantage.verl_ext.exchange import PLACES, WATCHED
from grail_advantage.verl_ext.exchange import nested as nested_of
from grail_advantage.verl_ext.settings import ACTOR, Settings
from grail_advantage.verl_ext.worker import OptimiserStep, UpdateReader
from tests.composed import VERL, compose
from tests.core.receipt_loop import TOKENS, Rollout, names, rollout
from tests.verl_ext.one_step import loss_worker, receipt_by, run_loss
from tests.verl_ext.ranks import AGGREGATIONS

KNOWN = sorted(POLICY_LOSS_REGISTRY.keys() - {"bypass_mode", "clip_cov", "geo_mean"})
"""verl's losses that have a formula and keep the mean over an update."""
SEEDS = 20
pytestmark = pytest.mark.slow
KL = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1+", "k3+")
OPTIONS = {
    "clip_ratio_low": 0.15,
    "clip_ratio_high": 0.3,
    "clip_ratio_c": 1.6,
    "tau_neg": 1.4,
    "kl_loss_coef": 0.3,
}


def settings_of(mode: str, choice: dict[str, Any]) -> tuple[Loss, ActorConfig]:
    """The loss as the trainer takes it from a run's configuration, and verl's own of the same configuration."""
    options = {**OPTIONS, "use_dynamic_bsz": True, "policy_loss.loss_mode": mode}
    options["loss_agg_mode"] = choice["aggregation"]
    options["loss_scale_factor"] = choice["factor"] or "null"
    options["use_kl_loss"] = choice["kl"] is not None
    options["kl_loss_type"] = choice["kl"] or "k3"
    options |= {
        f"policy_loss.{name}": choice[name] for name in ("dro_beta", "kl_cov_ratio", "ppo_kl_coef")
    }
    overrides = [f"{ACTOR}.{name}={value}" for name, value in options.items()]
    config = compose("ppo_trainer", [*overrides, "algorithm.adv_estimator=uniform"], VERL)
    loss = loss_of(Settings.parse(config))
    config.actor_rollout_ref.actor.rollout_n = 4
    return loss, omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def data_of(source: Rollout, rows: torch.Tensor, nested: bool) -> TensorDict:
    """A micro-batch as verl's worker has it."""
    batch = source.batch
    prompts = 1 + rows % 3
    lengths = torch.where(batch.mask_BT, torch.arange(TOKENS) + 1, 0).amax(dim=1)[rows].clamp(min=1)
    columns = {
        "response_mask": batch.mask_BT,
        "old_log_probs": batch.old_log_probs_BT,
        "advantages": batch.advantages_BT,
        "rollout_is_weights": batch.weights_BT,
        "ref_log_prob": batch.ref_log_probs_BT,
        "responses": torch.zeros(batch.mask_BT.shape, dtype=torch.long),
    }
    fields = {name: values[rows] for name, values in columns.items() if values is not None}
    if nested:
        of_rows = {name: zip(values, lengths, strict=True) for name, values in fields.items()}
        fields = {
            name: nested_of([row[:length] for row, length in pairs])
            for name, pairs in of_rows.items()
        }
        fields["prompts"] = nested_of(
            [torch.zeros(int(length), dtype=torch.long) for length in prompts]
        )
    else:
        width = int(prompts.max())
        is_prompt = torch.arange(width) >= (width - prompts).unsqueeze(1)
        right = torch.arange(TOKENS) < lengths.unsqueeze(1)
        fields["prompts"] = torch.zeros_like(is_prompt, dtype=torch.long)
        fields["attention_mask"] = torch.cat([is_prompt, right], 1)
    fields[PLACES] = torch.stack([rows, rows], dim=1)
    return TensorDict(fields, batch_size=[len(rows)])


def measured(
    fields: Rollout,
    config: ActorConfig,
    nested: bool,
    skipped: torch.Tensor,
    generated_BT: torch.Tensor | None = None,
) -> list[list[OptimiserStep]]:
    """What each rank's reader reads of verl's loss; its engine counts the generated tokens, by default those of the mask."""
    generated_BT = fields.batch.mask_BT if generated_BT is None else generated_BT
    readers = [UpdateReader() for _ in range(fields.batch.ranks)]
    settings = {WATCHED: "1.0"}
    for update, step in enumerate(fields.plan):
        everything = torch.cat([rows for _, rows in step])
        sizes = {"dp_size": fields.batch.ranks, "global_batch_size": len(everything)}
        sizes["batch_num_tokens"] = int(generated_BT[everything].sum())
        for rank, reader in enumerate(readers):
            worker = loss_worker(config)
            micro = [rows for owner, rows in step if owner == rank]
            places = [place for rows in micro for place in rows.tolist()]
            with reader.optimiser_step(
                worker, tu.get_tensordict({}, non_tensor_dict=settings), places
            ):
                for rows in [rows[~skipped[rows]] for rows in micro]:
                    if len(rows):
                        data = data_of(fields, rows, nested)
                        tu.assign_non_tensor(data, **sizes)
                        run_loss(worker, data, fields.policy_UBT[update, rows])
    return [reader.take("1.0") for reader in readers]


def case(mode: str, seed: int) -> tuple[Receipt, dict[str, object]]:
    """One of all combinations."""
    draw = torch.Generator().manual_seed(1000 * seed + len(mode))

    def one_of(*values: object) -> object:
        return values[int(torch.randint(len(values), (), generator=draw))]

    choice = {
        "ranks": one_of(1, 2),
        "updates": one_of(1, 2),
        "epochs": one_of(1, 4),
        "nested": one_of(True, False),
    }
    choice["skipping"] = one_of(True, False)
    choice["aggregation"] = one_of(*AGGREGATIONS)
    choice["factor"] = one_of(None, 12)
    choice["dro_beta"] = one_of(0.02, 0.5)
    choice["kl_cov_ratio"] = one_of(0.2, 0.3)
    choice["ppo_kl_coef"] = one_of(0.4, 0.7)
    choice["kl"] = kl = one_of(None, *KL)
    if mode == "sapo" and choice["aggregation"] != "seq-mean-token-mean":
        choice["kl"] = kl = None
    sizes = {name: choice[name] for name in ("ranks", "updates", "epochs")}
    weights = bool(one_of(True, False)) and mode != "dro"
    fields = rollout(seed, **sizes, token_advantages=bool(one_of(True, False)), weights=weights)
    batch = fields.batch
    trains = ((batch.advantages_BT != 0) & batch.mask_BT).any(dim=1)
    skipped = ~trains & bool(choice["skipping"] and kl is None and mode not in ("dro", "kl_cov"))
    fields = replace(fields, batch=replace(batch, **({} if kl else {"ref_log_probs_BT": None})))
    loss, config = settings_of(mode, choice)
    of_ranks = measured(fields, config, bool(choice["nested"]), skipped)
    values = (batch.old_log_probs_BT, batch.weights_BT, fields.batch.ref_log_probs_BT)
    columns = {
        name: column
        for name, column in zip(LOSS_COLUMNS, values, strict=True)
        if column is not None
    }
    how = {"sent": (~skipped).tolist(), "loss": loss, "epochs": batch.epochs, "on_policy": True}
    assert loss.account is not None
    return receipt_by(
        of_ranks, batch.mask_BT, batch.advantages_BT, columns, range(len(trains)), **how
    ), choice


@pytest.mark.parametrize("mode", KNOWN)
def test_no_false_alarm(mode: str) -> None:
    seen = Counter()
    clipped = 0.0
    for seed in range(SEEDS):
        receipt, choice = case(mode, seed)
        assert receipt.ok, (seed, choice, *map(str, receipt.findings))
        assert names(receipt.findings) == []
        receipts = ~receipt.received_UBT.isnan()
        torch.testing.assert_close(
            receipt.received_UBT[receipts], receipt.expected_UBT[receipts], rtol=1e-3, atol=1e-4
        )
        assert receipt.received_UBT[receipts].abs().max() > 0.1
        clipped += float(receipt.clipped_BT.nansum())
        seen.update((name, value) for name, value in choice.items())
    assert len(seen) >= 2 * 9 + 5 + 2, seen
    assert bool(clipped) == (mode in ("vanilla", "gspo", "cispo", "dppo_tv", "dppo_kl")), clipped


@pytest.mark.parametrize(
    "mode, aggregation", [("geo_mean", "seq-mean-token-mean"), ("vanilla", "token-mean")]
)
def test_two_faults_of_verls_own_are_named(mode: str, aggregation: str) -> None:
    """The means of micro-batches are summed; after rejection (of each third response) all generated tokens divide."""
    generated = rollout(5, token_advantages=False, ties=True, even=True)
    kept_B1 = (torch.arange(len(generated.batch.mask_BT)) % 3 > 0)[:, None] | (mode == "geo_mean")
    batch = replace(
        generated.batch, mask_BT=generated.batch.mask_BT & kept_B1, ref_log_probs_BT=None
    )
    batch = replace(batch, advantages_BT=batch.advantages_BT * batch.mask_BT)
    choice = {"aggregation": aggregation, "factor": None, "kl": None, "dro_beta": 0.5}
    loss, config = settings_of(mode, choice | {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.4})
    nobody = torch.zeros(len(kept_B1), dtype=torch.bool)
    of_ranks = measured(
        replace(generated, batch=batch), config, False, nobody, generated.batch.mask_BT
    )
    how = {"sent": [True] * len(kept_B1), "loss": loss, "epochs": 1, "on_policy": True}
    columns = {LOSS_COLUMNS[0]: batch.old_log_probs_BT}
    receipt = receipt_by(
        of_ranks, batch.mask_BT, batch.advantages_BT, columns, range(len(kept_B1)), **how
    )
    assert names(receipt.findings) == ["scaled"]
    factor = (
        len(generated.plan[0])
        if mode == "geo_mean"
        else float(batch.mask_BT.sum() / generated.batch.mask_BT.sum())
    )
    assert (receipt.findings[0].low, receipt.findings[0].high) == pytest.approx(
        (factor, factor), rel=1e-4
    )
    assert factor != pytest.approx(1, rel=0.1)
