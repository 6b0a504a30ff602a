"""The published set-up: what the launch scripts configure verl to do, its loss and its learning rate."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from transformers import get_scheduler
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from grail_advantage.verl_ext.settings import Settings
from recipe import published
from recipe.published import GROUPS, Setting, compared, trl_arguments
from tests.composed import prepare
from tests.recipe.test_launch_scripts import MODELS, configuration, container, overrides

R1 = (8192, 8192 + 1024, 2 * (8192 + 1024))
"""Values that follow from R1-Distill's limit on tokens."""
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


def flat(config: Any, above: str = "") -> dict[str, Any]:
    """Options by their full names."""
    found: dict[str, Any] = {}
    for name, value in (container(config) if above == "" else config).items():
        found |= flat(value, f"{above}{name}.") if isinstance(value, dict) and value else {f"{above}{name}": value}
    return found


LIKE = {
    "algorithm.rollout_correction.rollout_is": "sequence",
    "algorithm.rollout_correction.rollout_is_threshold": "1e-9_3.0",
    "published_ratio": True,
    "run.suffix": "-published",  # and the name and paths that have it
}


@pytest.mark.slow
@pytest.mark.parametrize("script", MODELS)
def test_like_published_differs_by_what_the_page_names(script: str) -> None:
    """The ratio and the prompts; for R1-Distill the limit on tokens and what follows from it."""
    plain, published = (flat(configuration(overrides(script, LIKE=like))) for like in ("corrected", "published"))
    assert plain == flat(configuration(overrides(script)))
    differing = {name for name in plain | published if plain.get(name) != published.get(name)}
    of_paths = {name for name in differing if "-published-seed42" in str(published[name])}
    of_data = {name for name in differing if "_published.parquet" in str(published[name])}
    expected = {name for name, value in LIKE.items() if published[name] == value}
    if "r1_distill" in script:
        assert (plain["data.max_response_length"], published["data.max_response_length"]) == (8192, 4096)
        expected |= {name for name in differing if plain.get(name) in R1}
    assert of_data == {"data.train_files", "data.val_files"}
    assert differing == expected | of_paths | of_data, differing
    prepare(configuration(overrides(script, LIKE="published")))  # all start-up checks


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


SETTINGS = [setting for settings in GROUPS.values() for setting in settings if setting.options]


OTHER = {"chat_template_kwargs": {"enable_thinking": True}, **dict.fromkeys(CORRECTED)}
DIFFER_HERE = {"optim", "warmup_steps", "vllm_gpu_memory_utilization", "save_steps"}
"""With a reason."""


@pytest.fixture(scope="module")
def like_published() -> DictConfig:
    return configuration(overrides("run_qwen3_grail.sh", LIKE="published"))


def verdict(config: DictConfig, name: str, options: tuple[str, ...] = ()) -> str:
    found = [
        verdict for row, _, verdict in compared(config) if row.name == name and (not options or row.options == options)
    ]
    return found[0]


@pytest.mark.parametrize("setting", SETTINGS, ids=[setting.name for setting in SETTINGS])
def test_every_row_of_the_table_is_the_resolved_value(like_published: DictConfig, setting: Setting) -> None:
    """With another value of its first option the row says so."""
    config, name = OmegaConf.create(like_published), setting.name
    assert verdict(config, name, setting.options) == ("~" if name in DIFFER_HERE else "=")
    option = setting.options[0].replace("METHOD", "grail")
    value = OmegaConf.select(config, option)
    other = {bool: lambda: not value, int: lambda: value + 1, float: lambda: value * 2 + 0.5}.get(type(value))
    changed = OTHER[name] if name in OTHER else other() if other else "another_7.0"
    OmegaConf.update(config, option, changed, force_add=True, merge=False)
    excused = name in ("model_name_or_path", "use_grail")
    assert verdict(config, name, setting.options) == ("~" if excused else "differs")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("vllm_importance_sampling_clip_max", {"algorithm.rollout_correction.rollout_is_threshold": "1e-9_5.0"}),
        ("vllm_importance_sampling_clip_max", {"algorithm.rollout_correction.rollout_is_threshold": 3.0}),
        ("vllm_importance_sampling_clip_max", {"algorithm.rollout_correction.rollout_is_threshold": "0.5_3.0"}),
        ("vllm_importance_sampling_mode", {"algorithm.rollout_correction.rollout_is": "token"}),
        ("max_completion_length", {"data.max_response_length": 8192}),
        ("the prompt's end", {"data.train_files": "data/deepmath.parquet"}),
        ("max_steps", {"actor_rollout_ref.actor.ppo_mini_batch_size": 16}),
        ("save_steps", {"actor_rollout_ref.actor.ppo_epochs": 2}),
        ("loss_type", {"actor_rollout_ref.actor.loss_scale_factor": 1}),
        ("beta", {"algorithm.use_kl_in_reward": True}),
        (
            "mask_truncated_completions",
            {"algorithm.adv_estimator": "uniform", "algorithm.uniform.mask_truncated": False},
        ),
        ("chat_template_kwargs", {"data.apply_chat_template_kwargs": {}}),
    ],
)
def test_what_corrected_has_instead_is_no_excuse(
    like_published: DictConfig, name: str, changes: dict[str, Any]
) -> None:
    config = OmegaConf.create(like_published)
    for option, value in changes.items():
        OmegaConf.update(config, option, value, force_add=True, merge=False)
    assert verdict(config, name) == "differs"


def test_the_command_ends_with_1_where_a_value_differs(
    like_published: DictConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["published"])
    monkeypatch.setattr("sys.stdin", io.StringIO(OmegaConf.to_yaml(like_published)))
    published.main()
    assert "| epsilon | 0.2 | Q:49 | = |" in capsys.readouterr().out
    other = OmegaConf.merge(like_published, {"actor_rollout_ref": {"actor": {"clip_ratio_low": 0.3}}})
    for text, message in (
        (OmegaConf.to_yaml(other), "epsilon: 0.2 there, 0.3 here"),
        ("a: [", "resolved configuration"),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        with pytest.raises(SystemExit, match=message):
            published.main()


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_any_number_of_processes_makes_the_published_batch(processes: int) -> None:
    arguments = trl_arguments(processes)
    rows = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] * processes
    assert rows == PUBLISHED_BATCH
    with pytest.raises(ValueError, match="5 processes"):
        trl_arguments(5)
