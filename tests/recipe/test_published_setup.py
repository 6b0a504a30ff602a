"""The published set-up: what the launch scripts configure verl to do, its loss and its learning rate."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import get_scheduler
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from grail_advantage.verl_ext.settings import Settings
from recipe.published import compared, trl_arguments
from tests.composed import prepare
from tests.recipe.test_launch_scripts import MODELS, configuration, container, overrides

CORRECTED = {f"vllm_importance_sampling_{part}" for part in ("correction", "mode", "clip_max")}
PUBLISHED_BATCH, PUBLISHED_EPOCHS, PUBLISHED_STEPS, PUBLISHED_WARM_UP = 256, 4, 200, 20


@pytest.mark.parametrize(
    ("script", "estimator", "nnodes"),
    [
        (script, estimator, 1 + number % 2)
        for number, (script, estimator) in enumerate(
            zip(MODELS, ("grail", "oar_g", "oar_p", "uniform", "dr_grpo"), strict=True)
        )
    ],
)
def test_published_setup(script: str, estimator: str, nnodes: int) -> None:
    model = MODELS[script]
    config = configuration(overrides(script, ADV_ESTIMATOR=estimator, NNODES=str(nnodes)))
    prepare(config)  # all start-up checks, verl's among them
    # uniform is the published baseline: the same trainer, truncated responses masked alike, weights 1
    assert config.algorithm.adv_estimator == ("grpo" if estimator == "dr_grpo" else estimator)
    assert config.trainer.v1.trainer_mode == ("sync" if estimator == "dr_grpo" else "grail_sync")
    if estimator != "dr_grpo":
        assert Settings.parse(config).method.mask_truncated

    model_, actor, rollout = (config.actor_rollout_ref[name] for name in ("model", "actor", "rollout"))
    assert config.algorithm.oar.variant == ("grail_port" if estimator == "oar_g" else "official")
    verdicts = {setting.name: verdict for setting, _, verdict in compared(config)}
    expected = {"the prompt's end", *CORRECTED} | (
        {"max_completion_length"} if model.response_length != 4096 else set()
    )
    assert {name for name, verdict in verdicts.items() if verdict == "corrected"} == expected
    # verl's own estimators mask no truncated response
    assert [name for name, verdict in verdicts.items() if verdict == "differs"] == (
        ["mask_truncated_completions"] if estimator == "dr_grpo" else []
    )
    assert actor.entropy_coeff == 0 and actor.policy_loss.loss_mode == "vanilla"
    gpus, mini_batch = config.trainer.nnodes * config.trainer.n_gpus_per_node, actor.ppo_mini_batch_size * rollout.n
    assert gpus == 8 * nnodes and mini_batch % gpus == 0
    assert mini_batch == config.data.train_batch_size * rollout.n == PUBLISHED_BATCH
    assert rollout.val_kwargs.do_sample

    assert (rollout.prompt_length, rollout.response_length) == (1024, model.response_length)
    assert rollout.max_model_len == 1024 + model.response_length
    budgets = (actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu)
    assert actor.use_dynamic_bsz and rollout.log_prob_use_dynamic_bsz
    assert all(budget >= rollout.max_model_len for budget in budgets)
    assert container(config.data.apply_chat_template_kwargs) == model.chat_template_kwargs
    assert (model_.path, model_.custom_chat_template) == (model.path, model.chat_template)
    assert actor.strategy == config.actor_rollout_ref.ref.strategy == "fsdp2"
    assert model_.enable_gradient_checkpointing and model_.use_remove_padding
    assert not actor.fsdp_config.use_torch_compile
    assert [config.data.seed, actor.data_loader_seed, actor.fsdp_config.seed, rollout.seed] == [42] * 4


def test_loss_is_the_published_one() -> None:
    """Clipped surrogate summed over tokens / (responses x longest response), over 16 ranks of 2 micro-batches each.

    FSDP averages gradients over the ranks, so the mean over them of verl's loss must be the loss of the whole batch.
    """
    script, ranks, micro_batches, rows, tokens = "run_r1_distill_llama_8b_grail.sh", 16, 2, PUBLISHED_BATCH, 6
    config = configuration(overrides(script, NNODES="2"))
    rng = np.random.default_rng(0)
    advantages = rng.normal(size=(rows, 1)).repeat(tokens, axis=1) * rng.uniform(0.5, 5, size=(rows, tokens))
    advantages[rng.random(rows) < 0.1] = 0  # truncated
    log_ratios = rng.normal(scale=1.0, size=(rows, tokens))
    log_ratios[::5] += 4  # ratios near 55, where verl's dual clip would act on negative advantages
    mask = np.arange(tokens) < rng.integers(0, tokens + 1, size=(rows, 1))
    assert (~mask.any(axis=1)).any() and ((log_ratios > 4) & (advantages < 0) & mask).any()

    ratios = np.exp(log_ratios)
    surrogate = np.minimum(ratios * advantages, np.clip(ratios, 0.8, 1.28) * advantages)
    expected = -(surrogate * mask).sum() / (rows * MODELS[script].response_length)

    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    actor.global_batch_info.update(
        dp_size=ranks,
        batch_num_tokens=int(mask.sum()),
        global_batch_size=config.data.train_batch_size * config.actor_rollout_ref.rollout.n,
        loss_scale_factor=actor.loss_scale_factor,
    )
    losses = [
        compute_policy_loss_vanilla(
            old_log_prob=torch.zeros(len(part), tokens, dtype=torch.float64),
            log_prob=torch.from_numpy(log_ratios[part]),
            advantages=torch.from_numpy(advantages[part]),
            response_mask=torch.from_numpy(mask[part]),
            loss_agg_mode=actor.loss_agg_mode,
            config=actor,
        )[0].item()
        for part in np.array_split(np.arange(rows), ranks * micro_batches)
    ]
    assert sum(losses) / ranks == pytest.approx(expected, rel=1e-9)


def test_learning_rate() -> None:
    """verl's schedule, moved once a rollout batch, against what transformers makes of the published values: the full rate from
    the first optimiser step, as its `constant` ignores a warm-up."""
    actor = configuration(overrides("run_qwen3_grail.sh")).actor_rollout_ref.actor
    settings = omega_conf_to_dataclass(actor.optim)
    settings.total_training_steps = PUBLISHED_STEPS // PUBLISHED_EPOCHS
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=settings.lr)
    engine = SimpleNamespace(optimizer_config=settings, rank=1)
    engine.lr_scheduler = FSDPEngine._build_lr_scheduler(engine, optimizer)
    rates = []
    for _ in range(PUBLISHED_STEPS // PUBLISHED_EPOCHS):
        rates += engine.lr_scheduler.get_last_lr() * PUBLISHED_EPOCHS
        optimizer.step()
        FSDPEngine.lr_scheduler_step(engine)

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-6)
    schedule = get_scheduler("constant", optimizer, PUBLISHED_WARM_UP, PUBLISHED_STEPS)
    published = []
    for _ in range(PUBLISHED_STEPS):
        published += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    assert rates == published


def test_the_published_ratio_is_trls() -> None:
    """``sequence_mask`` with the cap 3.0, in a plain loop: the product of a response's ratios, 0 above the cap."""
    rng = np.random.default_rng(0)
    trainer, rollout = rng.normal(-1, 0.5, size=(64, 5)), rng.normal(-1, 0.5, size=(64, 5))
    mask = np.arange(5) < rng.integers(1, 6, size=(64, 1))
    correction = configuration(overrides("run_qwen3_grail.sh", LIKE="published")).algorithm.rollout_correction
    found, _ = compute_rollout_correction_weights(
        torch.from_numpy(trainer - rollout),
        torch.from_numpy(mask).double(),
        correction.rollout_is,
        correction.rollout_is_threshold,
        correction.rollout_is_batch_normalize,
    )
    above = 0
    for row in range(64):
        ratio = np.exp(sum(trainer[row, t] - rollout[row, t] for t in range(5) if mask[row, t]))
        above += ratio > 3
        expected = [0.0 if ratio > 3 else ratio] * int(mask[row].sum()) + [0.0] * int((~mask[row]).sum())
        np.testing.assert_allclose(found[row], expected, rtol=1e-6)
    assert above > 3


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_any_number_of_processes_makes_the_published_batch(processes: int) -> None:
    arguments = trl_arguments(processes)
    rows = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] * processes
    assert rows == PUBLISHED_BATCH
    with pytest.raises(ValueError, match="5 processes"):
        trl_arguments(5)
