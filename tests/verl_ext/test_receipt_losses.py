"""The receipt raises no false alarm over verl's own losses: each one's gradient is what its account says."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import pad
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss

from grail_advantage.receipt import Loss, Receipt, check
from grail_advantage.verl_ext.dump import loss_of
from grail_advantage.verl_ext.settings import ACTOR, Settings
from tests.composed import VERL, compose
from tests.core.receipt_loop import Rollout, names, rollout, train
from tests.verl_ext.ranks import AGGREGATIONS

KNOWN = sorted(POLICY_LOSS_REGISTRY.keys() - {"bypass_mode", "clip_cov", "geo_mean"})
"""verl's losses that have a formula and keep the mean over an update."""
SEEDS = 20
pytestmark = pytest.mark.slow
CHOICES = {
    "ranks": (1, 2),
    "updates": (1, 2),
    "epochs": (1, 4),
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


def receipt_of(
    loop: Rollout,
    mode: str,
    choice: dict[str, Any],
    generated_BT: torch.Tensor | None = None,
) -> Receipt:
    """Of the core's loop with verl's loss, whose engine counts the generated tokens."""
    batch = loop.batch
    if generated_BT is None:
        generated_BT = batch.mask_BT
    loss, config = settings_of(mode, choice)
    assert loss.account is not None

    def verls(m):
        count, width = m.mask.shape
        # Padded, after prompts of one token.
        fields = {
            "prompts": torch.zeros(count, 1),
            "responses": torch.zeros(count, width),
            "attention_mask": torch.ones(count, 1 + width, dtype=torch.long),
            "response_mask": m.mask,
            "old_log_probs": m.old,
            "advantages": m.advantages,
            "ref_log_prob": m.ref,
        }
        if batch.weights_BT is not None:
            fields["rollout_is_weights"] = m.weights
        sizes = {
            "dp_size": batch.ranks,
            "global_batch_size": len(m.step_rows),
            "batch_num_tokens": int(generated_BT[m.step_rows].sum()),
        }
        data = tu.get_tensordict(fields, non_tensor_dict=sizes)
        # Each is at the position before its token, and the last position predicts nothing.
        output = {"log_probs": pad(m.log_probs, (0, 1)).flatten()}
        return ppo_loss(config, output, data)[0]

    return check(batch, loss, train(loop, verls))


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
    loop = rollout(seed, **options, weights=choice["weights"] and mode != "dro")
    return receipt_of(loop, mode, choice), choice


@pytest.mark.parametrize("mode", KNOWN)
def test_no_false_alarm(mode):
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
    assert len(choices) >= 2 * 9 + 5 + 2, choices
    # The other losses have no bound.
    assert bool(clipped) == (mode in ("vanilla", "gspo", "cispo", "dppo_tv", "dppo_kl")), (
        clipped
    )


@pytest.mark.parametrize(
    ("mode", "aggregation"),
    [("geo_mean", "seq-mean-token-mean"), ("vanilla", "token-mean")],
)
def test_two_faults_of_verls_own_are_named(mode, aggregation):
    """The means of micro-batches are summed; after rejection (of each third response) all generated tokens divide."""
    loop = rollout(5, token_advantages=False, ties=True, even=True)
    generated_BT = loop.batch.mask_BT
    # The mask loses responses 0, 3 and 6; their tokens still count in the divisor.
    kept_B = (torch.arange(len(generated_BT)) % 3 > 0) | (mode == "geo_mean")
    mask_BT = generated_BT & kept_B[:, None]
    changes = {"mask_BT": mask_BT, "advantages_BT": loop.batch.advantages_BT * mask_BT}
    loop = replace(loop, batch=replace(loop.batch, **changes))
    receipt = receipt_of(loop, mode, {"loss_agg_mode": aggregation}, generated_BT)
    assert names(receipt) == ["scaled"]
    factor = float(mask_BT.sum() / generated_BT.sum())
    # Each micro-batch of two adds a mean of its own.
    if mode == "geo_mean":
        factor = len(loop.plan[0])
    (finding, *_) = receipt.findings
    assert (finding.low, finding.high) == pytest.approx((factor, factor), rel=1e-4)
    assert factor != pytest.approx(1, rel=0.1)
