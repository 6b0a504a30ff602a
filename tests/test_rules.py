"""Every rule of verl's host and of the recipe, by an example that breaks it and no other: without the rule its example fails
here. The first override of an example is of the option that the message names. TRL's are in ``trl_ext/core_checks.py``."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import verl  # noqa: F401  its plugin registers the estimators
from omegaconf import DictConfig

from grail_advantage.model.probe import Finding
from grail_advantage.rules import Rule
from grail_advantage.verl_ext import rules
from grail_advantage.verl_ext.entry import check_config
from grail_advantage.verl_ext.rules import why_not_reuse, why_not_skip
from grail_advantage.verl_ext.settings import (
    ACTOR,
    BASE,
    BY_DEVIATION,
    BYPASS,
    CHUNKING,
    FUSED,
    GROUP_SIZE,
    LOSS,
    METHOD,
    MINI_BATCH,
    MODEL,
    MODEL_DTYPE,
    REUSE,
    ROLLOUT,
    SKIP,
    SLICES,
    STRATEGY,
    TEMPERATURE,
    TRAINER_MODE,
    Settings,
)
from recipe import rules as recipe_rules
from tests.composed import FOLDER, compose, parsed, prepare

# configurations
RECIPE = "grail_trainer"
ON_CPU = "cpu_trainer"
STOCK = "verl_cpu"
EPOCHS = f"{ACTOR}.ppo_epochs"
CORRECTS = "algorithm.rollout_correction.rollout_is=token"
TURNS = f"{METHOD}=turn_rloo {EPOCHS}=1"
SEPARATE = f"{TRAINER_MODE}=separate_async {ROLLOUT}.nnodes=1 {ROLLOUT}.n_gpus_per_node=1"
FUSED_KERNELS = f"{FUSED}=True {STRATEGY}=fsdp"
ADAPTER = f"{MODEL}.lora_rank=8 {MODEL}.target_modules"
BACKEND = f"{ROLLOUT}.checkpoint_engine.backend"
NO_SAMPLER = "trainer.v1.sampler.custom_sampler={path:null,name:null}"
ATTENTION, ROUTERS = (
    f"+{MODEL}.override_config.{name}"
    for name in ("attn_implementation", "output_router_logits")
)
QAT = [f"++{ACTOR}.{section}qat" for section in ("", "fsdp_config.")]

REFUSED = {
    RECIPE: {
        "a number is a word": "trainer.test_freq=ten",
        "a number that may be null is a word": "trainer.total_training_steps=all",
        "a flag is a word": "trainer.val_before_train=flase",
        "a number is a word, with verl's GRPO": f"data.seed=any {METHOD}=grpo",
        "a logger is misspelt": "trainer.logger=[console,wanbd]",
        "the only logger is misspelt": "trainer.logger=tensorbord",
        "no trainer has the name": f"{TRAINER_MODE}=mine",
        "the base gives advantages by token": f"{BASE}=gae",
        "the base is no estimator": f"{BASE}=rlo",
        "the base is a method": f"{BASE}=grail",
        "the base reads parts of the reward": f"{BASE}=gdpo",
        "groups of one": f"{GROUP_SIZE}=1",
        "groups of one, with turns": f"{GROUP_SIZE}=1 {TURNS}",
        "turns read no base": f"{BASE}=rloo {TURNS}",
        "turns are divided by no deviation": f"{BY_DEVIATION}=True {TURNS}",
        "temperature 0": f"{TEMPERATURE}=0",
        "a temperature below 0": f"{TEMPERATURE}=-1",
        "nothing computes the reference": f"{ACTOR}.use_kl_loss=False {METHOD}=progress_advantage",
        "the bypass computes no entropy": f"{BYPASS}=True {METHOD}=entropy {ROLLOUT}.top_k=-1",
        "the bypass keeps no policy to compare": f"{BYPASS}=True algorithm.token_dump.effect_every=1 {ROLLOUT}.top_k=-1",
        "ranks of a coarse entropy": f"{CHUNKING}=False {METHOD}=high_entropy",
        "fused kernels give no logits": f"{FUSED_KERNELS} {METHOD}=oar_g",
        "fused kernels leave out an adapter": f"{FUSED_KERNELS} {ADAPTER}=[q_proj,lm_head]",
        "fused kernels leave out one of an expression": f"{FUSED_KERNELS} {ADAPTER}='.*(proj|head)'",
        "a slice of the logits": f"{SLICES[0]}=2 {METHOD}=oar_g",
        "a slice of the logits, by the engine's option": f"{SLICES[1]}=2 {METHOD}=oar_g",
        "slices of padding": f"{SLICES[0]}=2 {MODEL}.use_remove_padding=False",
        "attention sees one slice": f"{ATTENTION}=sdpa {SLICES[0]}=2",
        "the loss averages weights away": f"{LOSS}=geo_mean",
        "the engine has no pass": f"{STRATEGY}=megatron",
        "fp16": f"{MODEL_DTYPE}=fp16",
        "fp16 in mixed precision": f"+{ACTOR}.fsdp_config.mixed_precision.param_dtype=float16",
        "calls of one turn are not told apart": f"{ROLLOUT}.multi_turn.max_parallel_calls=2 {TURNS}",
        # By the recipe's own rules.
        "nothing to correct the rollout with": f"{ROLLOUT}.calculate_log_probs=False {ROLLOUT}.top_k=-1 {CORRECTS}",
        "raw log-probabilities": f"{TEMPERATURE}=0.7 {ROLLOUT}.logprobs_mode=raw_logprobs {CORRECTS}",
        "log-probabilities among 50 tokens": f"{ROLLOUT}.top_k=50 {CORRECTS}",
        "log-probabilities among likely tokens": f"{ROLLOUT}.top_p=0.9 {ROLLOUT}.top_k=-1 {CORRECTS}",
        "offloaded parameters": f"{ACTOR}.fsdp_config.param_offload=True {SEPARATE} {MINI_BATCH}=8 {BACKEND}=nccl",
        "the older trainer": "trainer.use_v1=False",
        "groups of one, with verl's GRPO": f"{GROUP_SIZE}=1 {METHOD}=grpo",
        "groups of one, with verl's OPO": f"{GROUP_SIZE}=1 {METHOD}=opo",
        "GPUs with unequal shares": "data.train_batch_size=33",
        "engines that do not share the GPUs": f"{ROLLOUT}.tensor_model_parallel_size=3",
        "no room for one response": f"{ACTOR}.ppo_max_token_len_per_gpu=5119",
        "no such way to resume": "trainer.resume_mode=last",
    },
    ON_CPU: {
        "an adapter in the rollout": f"{MODEL}.lora_rank=8",
        "an adapter in the rollout, by the other option": f"{MODEL}.lora.rank=8",
        "kernels for GPUs": f"{MODEL}.fused_kernel_options.impl_backend=triton {FUSED_KERNELS}",
        "the synchronous trainer's buffer": f"{TRAINER_MODE}=colocate_async",
        "checkpoints by an accelerator": f"{BACKEND}=nccl {SEPARATE} {MINI_BATCH}=16 {NO_SAMPLER} "
        "trainer.v1.separate_async.parameter_sync_step=2",
        "groups are not filtered": "algorithm.filter_groups.enable=True",
        "groups are not filled up": "trainer.v1.sampler.sync_refill_failed_groups=True",
    },
    STOCK: {
        "groups of one": f"{GROUP_SIZE}=1",
        "groups of one, with another base": f"{GROUP_SIZE}=1 {BASE}=opo {METHOD}=uniform",
        "turns keep their deviation": f"{BY_DEVIATION}=False {METHOD}=mt_grpo",
        "a number is a word": "trainer.save_freq=never",
    },
}
"""By configuration."""
WARNED = {
    "noise that bf16 rounds away": f"{METHOD}=oar_g",
    "KL by covariance": f"{LOSS}=kl_cov",
    "clipping by covariance": f"{LOSS}=clip_cov",
    "an engine that was not run": f"{STRATEGY}=megatron {METHOD}=uniform",
    "a penalty for responses that are masked": "+reward.reward_kwargs.overlong_buffer_cfg.enable=True",
    "discounted turns": f"algorithm.turn_grpo.gamma=0.9 {METHOD}=turn_grpo {EPOCHS}=1",
    "masked turns": f"algorithm.turn_rloo.mask_truncated=True {TURNS}",
    "turns divided by their tokens": f"{ACTOR}.loss_agg_mode=token-mean {TURNS}",
    "a loss that is always divided so": f"{LOSS}=sapo {TURNS}",
    "turns in several mini-batches": f"{MINI_BATCH}=16 {TURNS}",
    "turns in several epochs": f"{EPOCHS}=4 {METHOD}=turn_rloo",
}
EVERY_RESPONSE_STAYS = {
    "padded responses": "trainer.use_v1=False",
    "an engine without it": f"{STRATEGY}=megatron {METHOD}=uniform",
    "clipping by covariance": f"{LOSS}=clip_cov",
    "KL by covariance": f"{LOSS}=kl_cov",
    "DRO": f"{LOSS}=dro",
    "the loss of the bypass": f"{LOSS}=bypass_mode",
    "a loss of one's own": f"{LOSS}=mine",
    "KL in the loss": f"{ACTOR}.use_kl_loss=True",
    "an entropy bonus": f"{ACTOR}.entropy_coeff=0.001",
    "the entropy in the log": f"{ACTOR}.calculate_entropy=True",
    "distillation": "distillation.enabled=True",
    "heads for further tokens": f"{MODEL}.mtp.enable_train=True",
    "routers": f"{ROUTERS}=True",
    "forwards that verl counts": f"{MODEL}.enable_activation_offload=True",
    "divided by the longest response": f"{ACTOR}.loss_scale_factor=null",
    "scales of activations": f"{QAT[0]}.mode=w4a4 {QAT[0]}.enable=True",
    "scales of activations, by the engine's option": f"{QAT[1]}.mode=w4a4 {QAT[1]}.enable=True",
}
VERLS_FORWARD_STAYS = {
    "the older trainer": "trainer.use_v1=False",
    "an engine of verl's own": f"{STRATEGY}=megatron {METHOD}=uniform",
    "a method that weighs by old log-probabilities": f"{METHOD}=surprisal",
    "a method that weighs by entropies": f"{METHOD}=high_entropy",
    "a loss of one's own": f"{LOSS}=mine",
    "KL in the reward": "algorithm.use_kl_in_reward=True",
    "the rollout's as old": f"{BYPASS}=True {ROLLOUT}.top_k=-1",
    "correction that weighs": f"{CORRECTS} {ROLLOUT}.top_k=-1",
    "correction that rejects": f"algorithm.rollout_correction.rollout_rs=token_k1 {ROLLOUT}.top_k=-1",
    "distillation": "distillation.enabled=True",
    "heads for further tokens": f"{MODEL}.mtp.enable_train=True",
    "several mini-batches": f"{MINI_BATCH}=16",
    "forwards that verl counts": f"{MODEL}.enable_activation_offload=True",
}
SHORTCUTS = [
    (shortcut, why_not, name, overrides)
    for shortcut, why_not, examples in (
        (SKIP, why_not_skip, EVERY_RESPONSE_STAYS),
        (REUSE, why_not_reuse, VERLS_FORWARD_STAYS),
    )
    for name, overrides in examples.items()
]
ALL_REFUSED = [
    (name, configuration, overrides)
    for configuration, examples in REFUSED.items()
    for name, overrides in examples.items()
]


def composed(overrides: str, configuration: str = RECIPE) -> DictConfig:
    required = (
        f"{ACTOR}.use_dynamic_bsz=True",
        f"{GROUP_SIZE}=4",
        f"{ACTOR}.ppo_max_token_len_per_gpu=16384",
    )
    folder = Path(__file__).with_name("config") if configuration == STOCK else FOLDER
    return compose(configuration, [*required, *overrides.split()], folder)


def option_of(overrides: str) -> str:
    return overrides.split("=")[0].lstrip("+")


@pytest.fixture(autouse=True)
def _platform(request, monkeypatch):
    if "cpu_trainer" in request.node.name:
        monkeypatch.setenv("VERL_PLATFORM", "cpu")


@pytest.mark.parametrize(("name", "configuration", "overrides"), ALL_REFUSED)
def test_refused_before_the_trainer_is_chosen(name, configuration, overrides):
    config = composed(overrides, configuration)
    mode = config.trainer.v1.trainer_mode
    with pytest.raises(ValueError, match=f"^{option_of(overrides)}="):
        prepare(config)
    assert config.trainer.v1.trainer_mode == mode


def warnings_of(caplog) -> list[str]:
    return [
        record.message
        for record in caplog.records
        if record.name == "grail_advantage.rules"
    ]


@pytest.mark.parametrize("name", WARNED)
def test_warned_of(name, caplog):
    check_config(composed(WARNED[name]))
    (message,) = warnings_of(caplog)
    assert message.startswith(f"{option_of(WARNED[name])}=")


@pytest.mark.parametrize(("shortcut", "why_not", "name", "overrides"), SHORTCUTS)
def test_a_shortcut_is_not_taken(shortcut, why_not, name, overrides):
    """With ``auto``; ``true`` is refused."""
    option = option_of(overrides)
    why = why_not(
        parsed(composed(overrides)), probe=lambda: pytest.fail("the model is asked")
    )
    assert why.startswith(f"{option}=")
    with pytest.raises(ValueError, match=f"^{option}=.*{shortcut}=True"):
        check_config(composed(f"{shortcut}=true {overrides}"))


def refusing(settings: Settings, configuration: str) -> list[Rule]:
    """Those that a run is checked by, but for those against skipping."""
    table = [*rules.EVERY_RUN]
    if settings.method is not None:
        table += rules.RULES
    if configuration != STOCK:
        table += recipe_rules.RULES
    if configuration == ON_CPU:
        table += recipe_rules.ON_CPU
    return [rule for rule in table if not rule.warned]


def test_an_example_breaks_one_rule_and_every_rule_has_one():
    """So that a rule that goes leaves an example that nothing refuses, or warns of."""
    examples = []
    for name, configuration, overrides in ALL_REFUSED:
        settings = parsed(composed(overrides, configuration))
        examples.append((name, settings, refusing(settings, configuration)))
    for table, overrides_by_name in (
        (rules.RULES, WARNED),
        (rules.AGAINST_SKIPPING, EVERY_RESPONSE_STAYS),
        (rules.AGAINST_REUSE, VERLS_FORWARD_STAYS),
    ):
        for name, overrides in overrides_by_name.items():
            examples.append((name, parsed(composed(overrides)), table))
    broken = set()
    for name, settings, table in examples:
        breaking = [rule for rule in table if rule.when(settings)]
        assert len(breaking) == 1, name
        # By identity, since rules hold functions.
        broken.add(id(breaking[0]))
    ours = rules.EVERY_RUN + rules.RULES + rules.AGAINST_SKIPPING + rules.AGAINST_REUSE
    assert broken == set(map(id, ours + recipe_rules.RULES + recipe_rules.ON_CPU))


def test_the_defaults_break_no_rule(monkeypatch, caplog):
    assert why_not_skip(parsed(composed(f"{SKIP}=true"))) == ""
    prepare(composed(""))
    prepare(composed("", STOCK))
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    prepare(composed("", ON_CPU))
    assert warnings_of(caplog) == []


def test_what_the_loaded_model_has_against_it():
    settings = parsed(composed(""))
    router = SimpleNamespace(
        get_text_config=lambda: SimpleNamespace(output_router_logits=True)
    )
    assert why_not_skip(settings, router)
    # Above and below the limit of rounding.
    assert why_not_skip(settings, probe=lambda: Finding(0.7, 2e-4, "alone"))
    assert why_not_skip(settings, probe=lambda: Finding(1e-6, 2e-4, "alone")) == ""
