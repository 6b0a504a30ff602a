"""Start-up: what is refused and what is accepted, with configurations composed as the entry point composes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import verl  # noqa: F401  its plugin registers the estimators
from omegaconf import DictConfig, OmegaConf

import recipe.checks
from grail_advantage import GrailConfig, OarConfig
from grail_advantage.methods import methods
from grail_advantage.options import option_fields
from grail_advantage.tokenizers import save_repaired
from grail_advantage.verl_ext import checks
from grail_advantage.verl_ext.checks import check_verl_version
from grail_advantage.verl_ext.settings import signal_of
from recipe.checks import check_trl
from recipe.main_grail import prepare
from recipe.tiny.model import build_tokenizer
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
    "crossed bounds": (
        "algorithm.grail.weight_min=6",
        r"grail\.weight_min=6\.0 is greater than grail\.weight_max=5\.0; swap them",
    ),
    "estimator without its input": (
        "algorithm.adv_estimator=optimal_token_baseline",
        r"algorithm\.adv_estimator=optimal_token_baseline needs sum_pi_squared, .* use grpo",
    ),
    "unknown estimator": (
        "algorithm.adv_estimator=grial",
        r"algorithm\.adv_estimator='grial' is unknown; choose one of .*\bgrail\b.*\bgrpo\b",
    ),
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
    "an expression without a group": (
        'algorithm.token_weights.answer="Answer: (.+)"',
        r"algorithm\.token_weights\.answer='Answer: \(\.\+\)' is no format and has no group .* use boxed, hashes, tag, or",
    ),
    "an expression that does not compile": (
        'algorithm.token_weights.answer="Answer: (?P<content>"',
        r"algorithm\.token_weights\.answer=.* does not compile .*; use boxed, hashes, tag, or a regular expression",
    ),
    "an unknown way with missing answers": (
        "algorithm.token_weights.missing_answers=raise",
        r"algorithm\.token_weights\.missing_answers='raise' is unknown; choose one of stop, warn, ignore",
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


NOT_THE_SAME = {
    "nothing to read": ("rollout_is=token", ("calculate_log_probs=False",), r"calculate_log_probs=False .*; use true"),
    "top_k": ("rollout_rs=token_k1", (), r"top_k=50 .*not those of the trainer's full softmax; use -1"),
    "top_p": ("bypass_mode=True", ("top_k=-1", "top_p=0.9"), r"top_p=0\.9 .*full softmax; use 1\.0"),
    "raw at another temperature": (
        "rollout_is=sequence",
        ("logprobs_mode=raw_logprobs", "temperature=0.7"),
        r"temperature=0\.7 .*raw log-probabilities are those of temperature 1",
    ),
    "another engine": ("bypass_mode=True", ("name=sglang", "logprobs_mode=raw_logprobs"), r"top_k=50 .*use -1"),
}


@pytest.mark.parametrize(("use", "rollout", "message"), NOT_THE_SAME.values(), ids=NOT_THE_SAME)
@pytest.mark.parametrize("estimator", ["grail", "grpo"])
def test_correction_with_log_probs_of_another_distribution_is_refused(
    estimator: str, use: str, rollout: tuple[str, ...], message: str
) -> None:
    """The published top_k=50 is harmless as long as nobody reads the rollout's log-probabilities."""
    overrides = (f"algorithm.adv_estimator={estimator}", *(f"actor_rollout_ref.rollout.{option}" for option in rollout))
    with pytest.raises(ValueError, match=rf"rollout\..*rollout_correction\.{use.partition('=')[0]}=") as refused:
        check_config(_compose(*overrides, f"{CORRECTION}.{use}"))
    assert re.search(message, str(refused.value))
    check_config(_compose(*overrides))  # nobody reads them


@pytest.mark.parametrize(
    "rollout", [("top_k=-1",), ("top_k=-1", "temperature=0.7"), ("logprobs_mode=raw_logprobs",)], ids=str
)
def test_correction_with_the_trainers_log_probs_is_accepted(rollout: tuple[str, ...]) -> None:
    for use in ("bypass_mode=True", "rollout_is=token", "rollout_rs=token_k1"):
        check_config(_compose(f"{CORRECTION}.{use}", *(f"actor_rollout_ref.rollout.{option}" for option in rollout)))


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


def test_a_shared_forward_is_refused_where_it_is_asked_for_and_not_exact() -> None:
    obstacle = "algorithm.use_kl_in_reward=True"
    check_config(_compose(obstacle))
    with pytest.raises(
        ValueError, match=r"algorithm\.token_weights\.share_forward=True does not work with algorithm\..*; use auto"
    ):
        check_config(_compose(obstacle, "algorithm.token_weights.share_forward=true"))


FUSED = ("actor_rollout_ref.model.use_fused_kernels=True", f"{ACTOR}.strategy=fsdp")
BACKEND = "actor_rollout_ref.model.fused_kernel_options.impl_backend"


ACCEPTED = {
    "defaults": (),
    "colocated asynchronous trainer": (f"{MODE}=colocate_async",),
    "separate asynchronous trainer": SEPARATE,
    "fused kernels": FUSED,
    "fused kernels in triton": (*FUSED, f"{BACKEND}=triton"),
    "fused kernels and LoRA": (*FUSED, "actor_rollout_ref.model.lora_rank=8"),
    "sequence parallelism": (f"{ACTOR}.ulysses_sequence_parallel_size=4",),
    "sequence parallelism of the engine": (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=4",),
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
    "answers of GSM8K": ("algorithm.token_weights.answer=hashes", "algorithm.token_weights.missing_answers=warn"),
    "answers by an expression": (r'algorithm.token_weights.answer="Answer: (?P<content>\d+)"',),
}


@pytest.mark.parametrize("overrides", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_accepted(overrides: tuple[str, ...]) -> None:
    config = _compose(*overrides)
    mode = config.trainer.v1.trainer_mode
    prepare(config)
    assert config.trainer.v1.trainer_mode == f"grail_{mode}"


BUDGET = f"{ACTOR}.ppo_max_token_len_per_gpu"
OAR_REFUSED = {
    "unknown option": (
        "oar_g",
        "+algorithm.oar.gate=all",
        r"oar\.gate is not an option; it is one of .*\bgrail\b.* The options of oar are .*\bvariant\b",
    ),
    "method": (
        "oar_g",
        "+algorithm.oar.method=perturbation",
        r"oar\.method='perturbation' cannot be set in a run; .*oar_g means",
    ),
    "response longer than the budget": (
        "oar_p",
        f"{BUDGET}=5119",
        r"ppo_max_token_len_per_gpu=5119 does not work with .*oar_p; .*data\.max_response_length = 5120 tokens must fit",
    ),
}


@pytest.mark.parametrize(("estimator", "override", "message"), OAR_REFUSED.values(), ids=OAR_REFUSED.keys())
def test_oar_is_refused_with_option_and_remedy(estimator: str, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(_compose(f"{BUDGET}=16384", f"algorithm.adv_estimator={estimator}", override))


OAR_ACCEPTED = {
    "exactly the longest row": ("oar_p", f"{BUDGET}=5120"),
    "a fixed number of rows": (
        "oar_p",
        f"{ACTOR}.use_dynamic_bsz=False",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        f"{BUDGET}=100",
    ),
    "no counterfactuals": ("oar_g", f"{BUDGET}=100"),
    "GRAIL's reshaper": ("oar_g", "algorithm.oar.reshaper=log_zscore", "algorithm.oar.weight_max=3"),
    "OAR's reshaper": ("grail", "algorithm.grail.reshaper=bilevel", "algorithm.grail.quantile=0.25"),
    "what belongs to GRAIL is not looked at": ("oar_p", "algorithm.grail.leaf=nowhere"),
    "a cap": ("oar_p", "algorithm.oar.max_perturbations=64"),
}


@pytest.mark.parametrize("overrides", OAR_ACCEPTED.values(), ids=OAR_ACCEPTED.keys())
def test_oar_is_accepted(overrides: tuple[str, ...]) -> None:
    config = _compose(f"{BUDGET}=16384", f"algorithm.adv_estimator={overrides[0]}", *overrides[1:])
    prepare(config)
    assert config.trainer.v1.trainer_mode == "grail_sync"


@pytest.mark.parametrize(
    ("name", "estimator", "method"),
    [
        ("grail_trainer", "oar_g", "gradient"),
        ("verl_grail", "oar_p", "perturbation"),
        ("cpu_trainer", "oar_p", "perturbation"),
    ],
)
def test_yaml_names_every_option_of_oar_with_its_default(name: str, estimator: str, method: str) -> None:
    config = compose(name, overrides=[f"algorithm.adv_estimator={estimator}"])
    assert {*config.algorithm.oar} == option_fields(OarConfig).keys() - {"method"}
    assert signal_of(config.algorithm) == OarConfig(method)


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


def test_another_verl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAIL_ADVANTAGE_ANY_VERL", raising=False)
    for taken in ("0.9.1", "0.9.1+cpu"):
        check_verl_version(taken)
    for found in ("0.9.0", "0.9.2", "0.9.10", "0.9.1.dev0", "0.10.0", "1.0"):
        message = rf"verl {found} is installed.*pip install verl==0\.9\.1.*, or set GRAIL_ADVANTAGE_ANY_VERL=1"
        with pytest.raises(ValueError, match=message):
            check_verl_version(found)
    monkeypatch.setenv("GRAIL_ADVANTAGE_ANY_VERL", "1")
    with pytest.warns(UserWarning, match=r"verl 0\.10\.0 is installed, but this extension follows verl 0\.9\.1"):
        check_verl_version("0.10.0")
