"""The receipt raises no false alarm over verl's own losses: each one's gradient is what its account says."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from grail_advantage.receipt import Batch, Piece, Receipt, check, verl_loss
from grail_advantage.receipt.measure import Gradient
from grail_advantage.verl_ext.received import loss_of
from grail_advantage.verl_ext.settings import ACTOR, Settings
from tests.composed import VERL, compose
from tests.core.receipt_loop import TOKENS, Rollout, names, rollout

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KNOWN = sorted(POLICY_LOSS_REGISTRY.keys() - {"bypass_mode", "clip_cov", "geo_mean"})
"""verl's losses that have a formula and keep the mean over an update."""
SEEDS = 20
pytestmark = pytest.mark.slow
KL = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1+", "k3+")
CLIP = {"clip_ratio": 0.2, "clip_ratio_low": 0.15, "clip_ratio_high": 0.3, "clip_ratio_c": 1.6}
OPTIONS = {"tau_pos": 1.0, "tau_neg": 1.4, "dro_beta": 0.5, "kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}


def actor_config(mode: str, aggregation: str, kl: str | None, factor: int | None) -> ActorConfig:
    """verl's own, with the settings above."""
    policy = PolicyLossConfig(loss_mode=mode, dro_beta=0.5, kl_cov_ratio=0.2, ppo_kl_coef=0.7)
    return ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=2,
        policy_loss=policy,
        loss_agg_mode=aggregation,
        loss_scale_factor=factor,
        tau_pos=1.0,
        tau_neg=1.4,
        use_kl_loss=kl is not None,
        kl_loss_type=kl or "k3",
        kl_loss_coef=0.3,
        **CLIP,
    )


def data_of(given: Rollout, rows: torch.Tensor, nested: bool) -> tuple[TensorDict, torch.Tensor, torch.Tensor]:
    """A micro-batch as verl's worker has it, the lengths of its prompts and of its responses."""
    batch = given.batch
    prompts = 1 + rows % 3
    lengths = torch.where(batch.mask_BT, torch.arange(TOKENS) + 1, 0).amax(dim=1)[rows].clamp(min=1)
    columns = {
        "response_mask": batch.mask_BT,
        "old_log_probs": batch.old_log_probs_BT,
        "advantages": batch.advantages_BT,
    }
    columns |= {"rollout_is_weights": batch.weights_BT, "ref_log_prob": batch.ref_log_probs_BT}
    columns["responses"] = torch.zeros(batch.mask_BT.shape, dtype=torch.long)
    kept = {name: values[rows] for name, values in columns.items() if values is not None}
    if nested:
        fields = {
            name: torch.nested.as_nested_tensor(
                [row[:length] for row, length in zip(values, lengths, strict=True)], layout=torch.jagged
            )
            for name, values in kept.items()
        }
        ones = [torch.zeros(int(length), dtype=torch.long) for length in prompts]
        fields["prompts"] = torch.nested.as_nested_tensor(ones, layout=torch.jagged)
    else:
        width = int(prompts.max())
        left = torch.arange(width) >= (width - prompts).unsqueeze(1)
        right = torch.arange(TOKENS) < lengths.unsqueeze(1)
        fields = kept | {
            "prompts": torch.zeros_like(left, dtype=torch.long),
            "attention_mask": torch.cat([left, right], 1),
        }
    return TensorDict(fields, batch_size=[len(rows)]), prompts, lengths


def measured(given: Rollout, config: ActorConfig, nested: bool, skipped: torch.Tensor) -> list[Piece]:
    """The pieces by the hook on the packed log-probabilities, as verl's engine has them."""
    pieces: list[Piece] = []
    for update, step in enumerate(given.plan):
        everything = torch.cat([rows for _, rows in step])
        for rank, rows in step:
            rows = rows[~skipped[rows]]
            if not len(rows):
                continue
            data, prompts, lengths = data_of(given, rows, nested)
            tu.assign_non_tensor(
                data,
                dp_size=given.batch.ranks,
                batch_num_tokens=int(given.batch.mask_BT[everything].sum()),
                global_batch_size=len(everything),
            )
            flat = []
            for place, (prompt, length) in enumerate(zip(prompts.tolist(), lengths.tolist(), strict=True)):
                own = given.policy_UBT[update, rows[place], :length]
                flat.append(torch.cat([torch.full((prompt - 1,), -1.0), own, torch.full((1,), -1.0)]))
            packed = torch.cat(flat).requires_grad_()
            offsets = torch.cat([torch.zeros(1, dtype=torch.long), (prompts + lengths).cumsum(0)])
            log_probs = packed * 1.0
            gradient = Gradient(log_probs)
            nested_output = torch.nested.nested_tensor_from_jagged(log_probs, offsets)
            value, _ = ppo_loss(config, {"log_probs": nested_output}, data)
            value.backward()
            assert gradient.values is not None
            cut = [(int(end - length - 1), int(length)) for end, length in zip(offsets[1:], lengths, strict=True)]
            outside = gradient.values.clone()
            for start, length in cut:
                outside[start : start + length] = 0
            pieces.append(
                Piece(
                    rows,
                    torch.nn.utils.rnn.pad_sequence([gradient.log_probs[s : s + n] for s, n in cut], True),
                    torch.nn.utils.rnn.pad_sequence([gradient.values[s : s + n] for s, n in cut], True),
                    update,
                    rank,
                    torch.stack([each.abs().max() for each in outside.split((prompts + lengths).tolist())]),
                    int(lengths.max()) if nested else TOKENS,
                ).padded(TOKENS)
            )
    return pieces


def case(mode: str, seed: int) -> tuple[Receipt, dict[str, object]]:
    """One of all combinations."""
    draw = torch.Generator().manual_seed(1000 * seed + len(mode))

    def one_of(*values: object) -> object:
        return values[int(torch.randint(len(values), (), generator=draw))]

    aggregation = str(one_of(*AGGREGATIONS))
    kl = one_of(None, *KL)
    if mode == "sapo" and aggregation != "seq-mean-token-mean":
        kl = None
    factor = one_of(None, 12)
    choice = {"ranks": one_of(1, 2), "updates": one_of(1, 2), "epochs": one_of(1, 4), "nested": one_of(True, False)}
    choice |= {"skipping": one_of(True, False), "aggregation": aggregation, "kl": kl, "factor": factor}
    given = rollout(
        seed,
        ranks=choice["ranks"],
        updates=choice["updates"],
        epochs=choice["epochs"],
        token_advantages=bool(one_of(True, False)),
        weights=bool(one_of(True, False)) and mode != "dro",
    )
    batch = given.batch
    if kl is None:
        batch = Batch(**{**vars(batch), "ref_log_probs_BT": None})
    trains = ((batch.advantages_BT != 0) & batch.mask_BT).any(dim=1)
    skipped = (
        ~trains if choice["skipping"] and kl is None and mode not in ("dro", "kl_cov") else torch.zeros_like(trains)
    )
    steps = [torch.cat([rows for _, rows in step]) for step in given.plan]
    totals = torch.tensor([[int(batch.mask_BT[rows].sum()), len(rows)] for rows in steps])
    batch = Batch(**{**vars(batch), "left_out_B": skipped, "totals_U2": totals})
    given = Rollout(batch, given.policy_UBT, given.plan)
    config = actor_config(mode, aggregation, kl, factor)
    pieces = measured(given, config, bool(choice["nested"]), skipped)
    loss = verl_loss(mode, aggregation, loss_scale_factor=factor, kl=kl, kl_coef=0.3, **CLIP, **OPTIONS)
    assert loss.account is not None
    return check(batch, loss, pieces), choice


@pytest.mark.parametrize("mode", KNOWN)
def test_no_false_alarm(mode: str) -> None:
    seen, clipped = Counter(), 0.0
    for seed in range(SEEDS):
        receipt, choice = case(mode, seed)
        assert receipt.ok, (seed, choice, *map(str, receipt.findings))
        assert names(receipt.findings) == []
        both = ~receipt.received_UBT.isnan()
        torch.testing.assert_close(receipt.received_UBT[both], receipt.expected_UBT[both], rtol=1e-3, atol=1e-4)
        assert receipt.received_UBT[both].abs().max() > 0.1
        clipped += float(receipt.clipped_BT.nansum())
        seen.update((name, value) for name, value in choice.items())
    assert len(seen) >= 2 * 5 + 5 + 2, seen
    assert bool(clipped) == (mode in ("vanilla", "gspo", "cispo", "dppo_tv", "dppo_kl")), clipped


@pytest.mark.parametrize(
    "changed", [{"dro_beta": 0.02}, {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.4, "dro_beta": 0.5}], ids=["defaults", "set"]
)
@pytest.mark.parametrize("mode", KNOWN)
def test_no_false_alarm_with_the_settings_of_a_run(mode: str, changed: dict[str, float]) -> None:
    """The loss as the trainer takes it from the configuration, and verl's own with the same configuration."""
    options = {"policy_loss.loss_mode": mode, "use_dynamic_bsz": True, "loss_scale_factor": 12}
    options |= {f"policy_loss.{name}": value for name, value in changed.items()}
    overrides = [f"{ACTOR}.{name}={value}" for name, value in options.items()]
    config = compose("ppo_trainer", [*overrides, "algorithm.adv_estimator=uniform"], VERL)
    loss = loss_of(Settings.parse(config))
    config.actor_rollout_ref.actor.rollout_n = 4
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    for seed in range(3):
        given = rollout(seed, epochs=4, token_advantages=True)
        given = Rollout(Batch(**{**vars(given.batch), "ref_log_probs_BT": None}), given.policy_UBT, given.plan)
        none = torch.zeros(len(given.batch.mask_BT), dtype=torch.bool)
        receipt = check(given.batch, loss, measured(given, actor, True, none))
        assert receipt.ok and loss.account is not None, (seed, *map(str, receipt.findings))
