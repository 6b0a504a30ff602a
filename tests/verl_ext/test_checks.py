"""Start-up: what is refused and what is accepted, with configurations composed as the entry point composes them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import verl  # noqa: F401  its plugin registers the estimators
import yaml
from omegaconf import DictConfig, OmegaConf

import recipe.checks
from grail_advantage import GrailConfig
from grail_advantage.methods import methods
from grail_advantage.options import option_fields
from grail_advantage.tokenizers import save_repaired
from grail_advantage.verl_ext import checks
from grail_advantage.verl_ext.checks import check_verl_version
from recipe.checks import check_trl
from recipe.main_grail import prepare
from recipe.tiny.model import build_tokenizer
from tests import forked
from tests.broken_tokenizer import save_under_class
from tests.composed import compose

ROOT = Path(__file__).parents[2]
ACTOR = "actor_rollout_ref.actor"
MODE = "trainer.v1.trainer_mode"


def check_config(config: DictConfig) -> None:
    """The checks of ``recipe.main_grail``."""
    if config.algorithm.adv_estimator in methods():
        checks.check_config(config)
    recipe.checks.check_config(config, checks.trainer_kind(config))


def _compose(*overrides: str, name: str = "grail_trainer") -> DictConfig:
    required = ["run_life.enabled=False", f"{ACTOR}.use_dynamic_bsz=True", "actor_rollout_ref.rollout.n=4"]
    return compose(name, overrides=[*required, *overrides])


REFUSED = {
    "unknown option": ("+algorithm.grail.foo=1", r"grail\.foo is not an option; the options are .*\bleaf\b"),
    "unknown preset": (
        "algorithm.grail.preset=best",
        r"grail\.preset='best' is unknown; choose one of official, robust",
    ),
    "unknown leaf": (
        "algorithm.grail.leaf=logits",
        r"grail\.leaf='logits' is unknown; choose one of embeddings, first",
    ),
    "unknown gate": ("algorithm.grail.gate=none", r"grail\.gate='none' is unknown; choose one of wrong, correct, all"),
    "unknown span": ("algorithm.grail.span=1", r"grail\.span=1 is unknown; choose one of first, last"),
    "no flag": ("algorithm.grail.normalize_mass=2", r"grail\.normalize_mass=2 must be true or false"),
    "no number": ("algorithm.grail.weight_mean=high", r"grail\.weight_mean='high' must be a finite number"),
    "not finite": ("algorithm.grail.weight_max=inf", r"grail\.weight_max=inf must be a finite number"),
    "zero spread": (
        "algorithm.grail.weight_std=0",
        r"grail\.weight_std=0\.0 must be greater than 0; .*adv_estimator=uniform",
    ),
    "negative spread": ("algorithm.grail.weight_std=-1", r"grail\.weight_std=-1\.0 must be greater than 0"),
    "negative weights": ("algorithm.grail.weight_min=-1", r"grail\.weight_min=-1\.0 must be at least 0"),
    "crossed bounds": (
        "algorithm.grail.weight_min=6",
        r"grail\.weight_min=6\.0 is greater than grail\.weight_max=5\.0; swap them",
    ),
    "negative content": ("algorithm.grail.content_weight=-2", r"grail\.content_weight=-2\.0 must be at least 0"),
    "estimator without its input": (
        "algorithm.adv_estimator=optimal_token_baseline",
        r"algorithm\.adv_estimator=optimal_token_baseline needs sum_pi_squared, .* use grpo",
    ),
    "unknown estimator": (
        "algorithm.adv_estimator=grial",
        r"algorithm\.adv_estimator='grial' is unknown; choose one of .*\bgrail\b.*\bgrpo\b",
    ),
    "group of one": ("actor_rollout_ref.rollout.n=1", r"actor_rollout_ref\.rollout\.n=1 does not .*; .*use 2 or more"),
    "other engine": (f"{ACTOR}.strategy=megatron", r"actor\.strategy=megatron does not .*; use fsdp or fsdp2"),
    "fp16": (
        f"+{ACTOR}.fsdp_config.mixed_precision={{param_dtype:fp16}}",
        r"mixed_precision\.param_dtype=fp16 does not .*; use bf16 or fp32",
    ),
    "greedy rollouts": ("actor_rollout_ref.rollout.temperature=0", r"rollout\.temperature=0 does not .*above 0"),
    "other trainer": (f"{MODE}=legacy", r"trainer\.v1\.trainer_mode=legacy does not .*; use sync or colocate_async or"),
    "an option of another method": (
        "+algorithm.grail.noise_std=1",
        r"grail\.noise_std is not an option; it is one of oar\. The options of grail are .*\bleaf\b",
    ),
    "a renamed section": (
        "algorithm.watchdog=false",
        r"algorithm\.watchdog is called run_life \(of recipe\.main_grail; .*\) now",
    ),
    "the trainer itself": (
        f"{MODE}=grail_sync",
        r"trainer\.v1\.trainer_mode=grail_sync does not .*; use sync: the start-up adds the prefix",
    ),
    "a misspelt section": (
        "+algorithm.grial.preset=robust",
        r"nothing reads algorithm\.grial; is algorithm\.grail meant",
    ),
    "a misspelt option of the trainer": (
        "+algorithm.token_weights.share_forwrd=false",
        r"algorithm\.token_weights\.share_forwrd is not an option; the options are share_forward, skip_",
    ),
    "an option of the reshaper": (
        "+algorithm.surprisal.share=0.1",
        r"surprisal\.share is not an option of this method but of the reshaper top; set it in surprisal\.reshaper_options",
        "algorithm.adv_estimator=surprisal",
    ),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_option_and_remedy_before_the_trainer_is_chosen(refused: tuple[str, ...]) -> None:
    override, message, *others = refused
    config = _compose(override, *others)
    mode = config.trainer.v1.trainer_mode
    with pytest.raises(ValueError, match=message):
        check_config(config)
    with pytest.raises(ValueError, match=message):
        prepare(config)
    assert config.trainer.v1.trainer_mode == mode


CORRECTION = "algorithm.rollout_correction"
SAME_SOFTMAX = ("actor_rollout_ref.rollout.top_k=-1",)


@pytest.mark.parametrize("estimator", ["grail", "grpo"])
@pytest.mark.parametrize("use", ["bypass_mode=True", "rollout_is=token", "rollout_is=sequence", "rollout_rs=token_k1"])
class TestRolloutCorrection:
    """The published top_k=50 is harmless as long as nobody reads the rollout's log-probabilities."""

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (("actor_rollout_ref.rollout.calculate_log_probs=False",), r"calculate_log_probs=False .*; use true"),
            ((), r"top_k=50 .*not those of the trainer's full softmax; use -1"),
            ((*SAME_SOFTMAX, "actor_rollout_ref.rollout.top_p=0.9"), r"top_p=0\.9 .*full softmax; use 1\.0"),
            (
                ("actor_rollout_ref.rollout.logprobs_mode=raw_logprobs", "actor_rollout_ref.rollout.temperature=0.7"),
                r"temperature=0\.7 .*raw log-probabilities are those of temperature 1",
            ),
            (
                ("actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.logprobs_mode=raw_logprobs"),
                r"top_k=50 .*use -1",
            ),
        ],
        ids=["nothing to read", "top_k", "top_p", "raw at another temperature", "another engine"],
    )
    def test_refused(self, estimator: str, use: str, overrides: tuple[str, ...], message: str) -> None:
        name = use.partition("=")[0]
        options = (f"algorithm.adv_estimator={estimator}", f"{CORRECTION}.{use}", *overrides)
        with pytest.raises(ValueError, match=rf"rollout\..*rollout_correction\.{name}=") as refused:
            check_config(_compose(*options))
        assert re.search(message, str(refused.value))
        check_config(_compose(options[0], *overrides))  # nobody reads them

    @pytest.mark.parametrize(
        "overrides",
        [
            SAME_SOFTMAX,
            (*SAME_SOFTMAX, "actor_rollout_ref.rollout.temperature=0.7"),
            ("actor_rollout_ref.rollout.logprobs_mode=raw_logprobs",),
        ],
        ids=["full", "full, tempered", "raw"],
    )
    def test_accepted(self, estimator: str, use: str, overrides: tuple[str, ...]) -> None:
        check_config(_compose(f"algorithm.adv_estimator={estimator}", f"{CORRECTION}.{use}", *overrides))


SEPARATE = (
    f"{MODE}=separate_async",
    f"{ACTOR}.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
)
"""With the defaults of 32 prompts a batch and 4 updates a step."""
SYNC_STEP = "trainer.v1.separate_async.parameter_sync_step"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_rollout_ref.rollout.nnodes=0", r"rollout\.nnodes=0 does not work .*; set the number"),
        (
            "actor_rollout_ref.rollout.n_gpus_per_node=0",
            r"rollout\.n_gpus_per_node=0 does not work .*; set the number",
        ),
        (
            "actor_rollout_ref.rollout.checkpoint_engine.backend=naive",
            r"checkpoint_engine\.backend=naive does not work .*; use nccl",
        ),
        ("data.train_batch_size=24", r"data\.train_batch_size=24 does not .*parameter_sync_step \(4\).*size \(8\)"),
        (f"{SYNC_STEP}=2", r"data\.train_batch_size=32 does not .*parameter_sync_step \(2\) times"),
        ("actor_rollout_ref.hybrid_engine=False", r"hybrid_engine=False does not work .*; use true"),
        (f"{ACTOR}.fsdp_config.param_offload=True", r"param_offload=True does not work .*; set it false, or"),
    ],
)
def test_separate_trainer_is_refused_with_option_and_remedy(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_config(_compose(*SEPARATE, override))


@pytest.mark.parametrize(
    "remedy",
    [(f"{SYNC_STEP}=1", f"{ACTOR}.ppo_mini_batch_size=32"), (f"{CORRECTION}.bypass_mode=True", *SAME_SOFTMAX)],
)
def test_separate_trainer_takes_offload_where_no_policy_is_put_back(remedy: tuple[str, ...]) -> None:
    check_config(_compose(*SEPARATE, f"{ACTOR}.fsdp_config.param_offload=True", *remedy))


LORA = ("actor_rollout_ref.model.lora_rank=8", f"{ACTOR}.strategy=fsdp2")


@pytest.mark.parametrize("adapted", ["lm_head", "embed_tokens"])
def test_lora_on_untied_embeddings_is_refused_with_fsdp2(adapted: str, tmp_path: Path) -> None:
    on_embeddings = f"actor_rollout_ref.model.target_modules=[q_proj,{adapted}]"
    message = rf"actor\.strategy=fsdp2 does not .*; with a LoRA on {adapted} .*use fsdp, or leave them out"
    with pytest.raises(ValueError, match=message):
        check_config(_compose(*LORA, on_embeddings))
    check_config(_compose(*LORA, on_embeddings, f"{ACTOR}.strategy=fsdp"))
    check_config(_compose(*LORA))

    model = f"actor_rollout_ref.model.path={tmp_path}"
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    check_config(_compose(*LORA, on_embeddings, model))
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    (tmp_path / "adapter_config.json").write_text(f'{{"target_modules": "q_proj", "modules_to_save": ["{adapted}"]}}')
    with pytest.raises(ValueError, match=message):
        check_config(_compose(*LORA, model, f"actor_rollout_ref.model.lora_adapter_path={tmp_path}"))


SLICED = f"{ACTOR}.ulysses_sequence_parallel_size=2"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (SLICED, "actor_rollout_ref.model.use_remove_padding=False"),
            r"actor\.ulysses_sequence_parallel_size=2 does not .*; set .*model\.use_remove_padding=true, or use 1",
        ),
        (
            (
                f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=4",
                "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
            ),
            r"ulysses_sequence_parallel_size=4 does not .*; set .*attn_implementation=sdpa to flash_attention_2, or use 1",
        ),
        ((SLICED, "algorithm.adv_estimator=oar_g"), r"sequence_parallel_size=2 does not .*=oar_g; use 1"),
    ],
    ids=["padded", "another attention", "another signal"],
)
def test_sequence_parallel_is_refused_where_it_would_not_see_the_whole_row(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_config(_compose(*overrides))


@pytest.mark.parametrize("option", ["ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"])
def test_sequence_parallel_is_accepted_for_packed_rows(option: str) -> None:
    check_config(_compose(f"{ACTOR}.{option}=4"))


@pytest.mark.parametrize("obstacle", ["algorithm.use_kl_in_reward=True", "algorithm.adv_estimator=oar_g"])
def test_a_shared_forward_is_refused_where_it_is_asked_for_and_not_exact(obstacle: str) -> None:
    check_config(_compose(obstacle))
    with pytest.raises(
        ValueError, match=r"algorithm\.token_weights\.share_forward=True does not work with algorithm\..*; use auto"
    ):
        check_config(_compose(obstacle, "algorithm.token_weights.share_forward=true"))


FUSED = ("actor_rollout_ref.model.use_fused_kernels=True", f"{ACTOR}.strategy=fsdp")
BACKEND = "actor_rollout_ref.model.fused_kernel_options.impl_backend"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((f"{ACTOR}.strategy=fsdp2",), r"use_fused_kernels=True does not .*; set .*strategy=fsdp2 to fsdp"),
        ((f"{ACTOR}.ulysses_sequence_parallel_size=2",), r"use_fused_kernels=True does not .*; set .*_size to 1"),
        ((f"{BACKEND}=liger",), r"impl_backend=liger does not .*; use torch or triton"),
        (
            ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.target_modules=[q_proj,lm_head]"),
            r"use_fused_kernels=True does not .*; leave lm_head out of .*target_modules",
        ),
    ],
    ids=["fsdp2", "sequence parallel", "liger", "lora on lm_head"],
)
def test_fused_kernels_are_refused_with_option_and_remedy(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_config(_compose(*FUSED, *overrides))


ACCEPTED = {
    "defaults": (),
    "colocated asynchronous trainer": (f"{MODE}=colocate_async",),
    "separate asynchronous trainer": SEPARATE,
    "fused kernels": FUSED,
    "fused kernels in triton": (*FUSED, f"{BACKEND}=triton"),
    "fused kernels and LoRA": (*FUSED, "actor_rollout_ref.model.lora_rank=8"),
    "fsdp": (f"{ACTOR}.strategy=fsdp",),
    "fsdp2": (f"{ACTOR}.strategy=fsdp2",),
    "smallest group": ("actor_rollout_ref.rollout.n=2",),
    "robust, with options": (
        "algorithm.grail.preset=robust",
        "algorithm.grail.leaf=middle",
        "algorithm.grail.alignment=token",
        "algorithm.grail.weight_min=0",
        "algorithm.grail.normalize_mass=false",
    ),
    "lora": ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.merge=True"),
    "offload": (f"{ACTOR}.fsdp_config.param_offload=True",),
    "padded": ("actor_rollout_ref.model.use_remove_padding=False",),
}


@pytest.mark.parametrize("overrides", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_accepted(overrides: tuple[str, ...]) -> None:
    config = _compose(*overrides)
    mode = config.trainer.v1.trainer_mode
    prepare(config)
    assert config.trainer.v1.trainer_mode == f"grail_{mode}"


def test_verls_own_estimators_get_verls_trainer() -> None:
    config = _compose("algorithm.adv_estimator=grpo", "run_life.enabled=True")
    prepare(config)
    assert config.trainer.v1.trainer_mode == "kept_sync"


def test_verls_own_estimators_meet_none_of_these_refusals() -> None:
    of_the_layout = [override for override, *_ in REFUSED.values() if not override.lstrip("+").startswith("algorithm.")]
    check_config(_compose("algorithm.adv_estimator=grpo", "+algorithm.grail.foo=1", *of_the_layout))


@pytest.mark.parametrize("estimator", ["grail", "grpo"])
def test_refuses_the_legacy_trainer_for_every_estimator(estimator: str) -> None:
    with pytest.raises(ValueError, match=r"trainer\.use_v1=False: .*use true, or see docs/own_trainer"):
        check_config(_compose(f"algorithm.adv_estimator={estimator}", "trainer.use_v1=False"))


def test_options_left_open_in_yaml_take_the_presets_value() -> None:
    options = OmegaConf.to_container(_compose("algorithm.grail.preset=robust").algorithm.grail)
    assert GrailConfig.from_dict(options) == GrailConfig("robust")
    assert set(options) == set(option_fields(GrailConfig))


@pytest.mark.parametrize("estimator", ["grail", "grpo"])
def test_a_tokenizer_that_loses_text_is_refused_for_every_estimator(estimator: str, tmp_path: Path) -> None:
    broken = save_under_class(build_tokenizer(), tmp_path / "model", "LlamaTokenizerFast", "llama")
    repaired = tmp_path / "repaired"
    save_repaired(str(broken), str(repaired))
    model = f"actor_rollout_ref.model.path={broken}"
    for option in ("path", "tokenizer_path"):
        override = f"++actor_rollout_ref.model.{option}={broken}"
        message = rf"tokenizer of actor_rollout_ref\.model\.{option}=.* turns 'a b\\nc' into 'abc'.*grail_advantage.tokenizers"
        with pytest.raises(ValueError, match=message):
            check_config(_compose(model, override, f"algorithm.adv_estimator={estimator}"))
    check_config(
        _compose(
            model,
            f"++actor_rollout_ref.model.tokenizer_path={repaired}",
            f"algorithm.adv_estimator={estimator}",
        )
    )


@pytest.mark.parametrize("place", [None, "__init__.py", "experimental/ppo/__init__.py"])
def test_a_trl_that_verls_workers_fail_over_is_refused(
    place: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "trl"
    (package / "experimental" / "ppo").mkdir(parents=True)
    (package / "__init__.py").touch()
    if place is not None:
        (package / place).write_text("from .modeling import AutoModelForCausalLMWithValueHead\n")
    monkeypatch.syspath_prepend(tmp_path)
    if place is not None:
        check_trl()
        return
    with pytest.raises(ValueError, match=r"imports AutoModelForCausalLMWithValueHead from any TRL .*take TRL out"):
        check_config(_compose())


class TestVerlVersion:
    @pytest.mark.parametrize("found", ["0.9.1", "0.9.1+cpu"])
    def test_takes_the_one_that_it_follows(self, found: str) -> None:
        check_verl_version(found)

    @pytest.mark.parametrize("found", ["0.9.0", "0.9.2", "0.9.10", "0.9.1.dev0", "0.10.0", "1.0"])
    def test_refuses_others(self, found: str) -> None:
        with pytest.raises(ValueError, match=rf"verl {found} is installed.*pip install verl==0\.9\.1"):
            check_verl_version(found)

    def test_another_one_at_ones_own_risk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GRAIL_ADVANTAGE_ANY_VERL", "1")
        with pytest.warns(UserWarning, match=r"verl 0\.10\.0 is installed, but this extension follows verl 0\.9\.1"):
            check_verl_version("0.10.0")
        monkeypatch.setenv("GRAIL_ADVANTAGE_ANY_VERL", "0")
        with pytest.raises(ValueError, match="set GRAIL_ADVANTAGE_ANY_VERL=1 to try it at your own risk"):
            check_verl_version("0.10.0")


def _main(*overrides: str, **environment: str) -> subprocess.CompletedProcess:
    return forked.run("recipe.main_grail", *overrides, HYDRA_FULL_ERROR="1", **environment)


@pytest.mark.slow
class TestCommandLine:
    CPU = ("--config-name", "cpu_trainer", f"{ACTOR}.use_dynamic_bsz=True", "actor_rollout_ref.rollout.n=4")

    def test_dry_run_prints_the_configuration_and_nothing_else(self, tmp_path: Path) -> None:
        overrides = (*self.CPU, f"hydra.run.dir={tmp_path}", "algorithm.grail.leaf=last", "trainer.total_epochs=7")
        done = _main(*overrides, DRY_RUN="1")
        assert done.returncode == 0, done.stderr
        printed = yaml.safe_load(done.stdout)
        assert set(printed) == set(_compose(name="cpu_trainer"))
        assert printed["algorithm"]["adv_estimator"] == "grail"
        assert printed["algorithm"]["grail"]["leaf"] == "last"
        assert printed["trainer"]["total_epochs"] == 7
        # The mode as it is written in an override, not as the entry point rewrites it.
        assert printed["trainer"]["v1"]["trainer_mode"] == "sync"
        # Interpolations are resolved, so that the printed configuration stands for itself.
        assert "${" not in done.stdout
        assert "local Ray instance" not in done.stdout + done.stderr

    def test_dry_run_refuses_what_a_run_refuses(self, tmp_path: Path) -> None:
        done = _main(*self.CPU, f"hydra.run.dir={tmp_path}", "algorithm.grail.weight_std=0", DRY_RUN="1")
        assert done.returncode != 0
        assert done.stdout == ""
        assert "ValueError: grail.weight_std=0.0 must be greater than 0" in done.stderr

    def test_a_run_refuses_before_ray_starts(self, tmp_path: Path) -> None:
        done = _main(*self.CPU, f"hydra.run.dir={tmp_path}", "actor_rollout_ref.rollout.n=1")
        assert done.returncode != 0
        assert "ValueError: actor_rollout_ref.rollout.n=1 does not work" in done.stderr
        assert "ray init kwargs" not in done.stdout + done.stderr

    def test_a_plugin_that_is_switched_off_is_noticed(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "recipe.main_grail", *self.CPU, f"hydra.run.dir={tmp_path}"]
        variables = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_PLATFORM": "nvidia"}
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode != 0
        assert "the plug-in of this package did not load with verl" in done.stderr
        assert "VERL_USE_EXTERNAL_PLUGINS" in done.stderr
