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
from verl.workers.utils.losses import ppo_loss

from grail_advantage.receipt import Loss, Piece, Receipt, check
from grail_advantage.receipt.measure import Gradient
from grail_advantage.verl_ext.dump import loss_of
from grail_advantage.verl_ext.exchange import nested as nested_of
from grail_advantage.verl_ext.settings import ACTOR, Settings
from tests.composed import VERL, compose
from tests.core.receipt_loop import TOKENS, Rollout, names, rollout

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KNOWN = sorted(POLICY_LOSS_REGISTRY.keys() - {"bypass_mode", "clip_cov", "geo_mean"})
"""verl's losses that have a formula and keep the mean over an update."""
SEEDS = 20
pytestmark = pytest.mark.slow
KL = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1+", "k3+")
OPTIONS = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.3, "clip_ratio_c": 1.6, "tau_neg": 1.4, "kl_loss_coef": 0.3}


def settings_of(mode: str, choice: dict[str, Any]) -> tuple[Loss, ActorConfig]:
    """The loss as the trainer takes it from a run's configuration, and verl's own of the same configuration."""
    options = {**OPTIONS, "use_dynamic_bsz": True, "policy_loss.loss_mode": mode}
    options |= {"loss_agg_mode": choice["aggregation"], "loss_scale_factor": choice["factor"] or "null"}
    options |= {"use_kl_loss": choice["kl"] is not None, "kl_loss_type": choice["kl"] or "k3"}
    options |= {f"policy_loss.{name}": choice[name] for name in ("dro_beta", "kl_cov_ratio", "ppo_kl_coef")}
    overrides = [f"{ACTOR}.{name}={value}" for name, value in options.items()]
    config = compose("ppo_trainer", [*overrides, "algorithm.adv_estimator=uniform"], VERL)
    loss = loss_of(Settings.parse(config))
    config.actor_rollout_ref.actor.rollout_n = 4
    return loss, omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def data_of(given: Rollout, rows: torch.Tensor, nested: bool) -> tuple[TensorDict, torch.Tensor, torch.Tensor]:
    """A micro-batch as verl's worker has it, the lengths of its prompts and of its responses."""
    batch, prompts = given.batch, 1 + rows % 3
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
        fields |= {
            name: nested_of([row[:length] for row, length in zip(values, lengths, strict=True)])
            for name, values in fields.items()
        }
        fields["prompts"] = nested_of([torch.zeros(int(length), dtype=torch.long) for length in prompts])
    else:
        width = int(prompts.max())
        left = torch.arange(width) >= (width - prompts).unsqueeze(1)
        right = torch.arange(TOKENS) < lengths.unsqueeze(1)
        fields |= {"prompts": torch.zeros_like(left, dtype=torch.long), "attention_mask": torch.cat([left, right], 1)}
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

    choice = {"ranks": one_of(1, 2), "updates": one_of(1, 2), "epochs": one_of(1, 4), "nested": one_of(True, False)}
    choice |= {"skipping": one_of(True, False), "aggregation": one_of(*AGGREGATIONS), "factor": one_of(None, 12)}
    choice |= {"dro_beta": one_of(0.02, 0.5), "kl_cov_ratio": one_of(0.2, 0.3), "ppo_kl_coef": one_of(0.4, 0.7)}
    choice["kl"] = kl = one_of(None, *KL)
    if mode == "sapo" and choice["aggregation"] != "seq-mean-token-mean":
        choice["kl"] = kl = None
    given = rollout(
        seed,
        ranks=choice["ranks"],
        updates=choice["updates"],
        epochs=choice["epochs"],
        token_advantages=bool(one_of(True, False)),
        weights=bool(one_of(True, False)) and mode != "dro",
    )
    batch = given.batch
    trains = ((batch.advantages_BT != 0) & batch.mask_BT).any(dim=1)
    skipped = ~trains & bool(choice["skipping"] and kl is None and mode not in ("dro", "kl_cov"))
    steps = [torch.cat([rows for _, rows in step]) for step in given.plan]
    totals = torch.tensor([[int(batch.mask_BT[rows].sum()), len(rows)] for rows in steps])
    reference = {} if kl else {"ref_log_probs_BT": None}
    batch = replace(batch, left_out_B=skipped, totals_U2=totals, **reference)
    given = replace(given, batch=batch)
    loss, config = settings_of(mode, choice)
    pieces = measured(given, config, bool(choice["nested"]), skipped)
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
    assert len(seen) >= 2 * 9 + 5 + 2, seen
    assert bool(clipped) == (mode in ("vanilla", "gspo", "cispo", "dppo_tv", "dppo_kl")), clipped
