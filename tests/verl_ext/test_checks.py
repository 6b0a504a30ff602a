"""Start-up: what is refused and what is accepted, with configurations composed as the entry point composes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import verl
from omegaconf import DictConfig, OmegaConf

from grail_advantage import Grail, Oar
from grail_advantage.answers.tokenizers import save_repaired
from grail_advantage.verl_ext import checks
from grail_advantage.verl_ext.checks import check_verl_version
from grail_advantage.verl_ext.settings import Settings
from recipe.rules import check_trl
from tests.broken_tokenizer import save_under_class
from tests.composed import compose, prepare
from verl_cpu.tiny.model import build_tokenizer

ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))
MODE, METHOD, CORRECTION = "trainer.v1.trainer_mode", "algorithm.adv_estimator", "algorithm.rollout_correction"
BUDGET, BACKEND = f"{ACTOR}.ppo_max_token_len_per_gpu", f"{MODEL}.fused_kernel_options.impl_backend"
SYNC_STEP, STRATEGY = "trainer.v1.separate_async.parameter_sync_step", f"{ACTOR}.strategy"
SEPARATE = (
    *(f"{MODE}=separate_async", f"{ACTOR}.ppo_mini_batch_size=8", f"{ROLLOUT}.nnodes=1"),
    *(f"{ROLLOUT}.n_gpus_per_node=1", f"{ROLLOUT}.checkpoint_engine.backend=nccl"),
)
"""With the defaults of 32 prompts a batch and 4 updates a step."""
FUSED = (f"{MODEL}.use_fused_kernels=True", f"{STRATEGY}=fsdp")
SLICES = f"{ACTOR}.ulysses_sequence_parallel_size=2"
CUT = f"{CORRECTION}.bypass_mode=True"
NOTHING_BEGINS = "algorithm.token_weights.trainer_module=null"


def _compose(*overrides: str) -> DictConfig:
    required = [f"{ACTOR}.use_dynamic_bsz=True", f"{ROLLOUT}.n=4", f"{BUDGET}=16384"]
    return compose("grail_trainer", [*required, *overrides])


def _refused(overrides: tuple[str, ...], *named: str) -> DictConfig:
    """With a message that names these; the configuration as it is then."""
    config = _compose(*overrides)
    with pytest.raises(ValueError) as refused:
        prepare(config)
    assert all(word in str(refused.value) for word in named), str(refused.value)
    return config


OF_METHODS = {
    "+algorithm.grail.foo=1": "grail.foo leaf",
    f"{METHOD}=grial": "adv_estimator='grial' grail grpo",
    "+algorithm.grail.noise_std=1": "noise_std oar",
    "+algorithm.grial.preset=robust": "algorithm.grial algorithm.grail",
    'algorithm.token_weights.answer="Answer: (.+)"': "group boxed hashes tag",
    'algorithm.token_weights.answer="Answer: (?P<content>"': "compile boxed hashes tag",
    "algorithm.token_weights.missing_answers=raise": "'raise' stop warn ignore",
    "+algorithm.token_weights.share_forwrd=false": "share_forwrd share_forward",
    "+algorithm.token_dump.rows=4": "token_dump.rows folder every responses received",
    "algorithm.token_weights.share_forward=maybe": "share_forward='maybe' auto true false",
    f"{MODE}=grail_sync": "trainer_mode=grail_sync sync",
}


@pytest.mark.parametrize("override", OF_METHODS)
def test_names_and_values_that_mean_nothing_are_refused(override: str) -> None:
    """Before the trainer is chosen. Other refusals are in ``tests/test_rules.py``."""
    refused = _refused((override,), *OF_METHODS[override].split())
    assert refused.trainer.v1.trainer_mode == _compose(override).trainer.v1.trainer_mode


def _start(name: str) -> str:
    """The trainer's mode of a run by verl's own command with this estimator, of which this process knows nothing more."""
    config = _compose(f"{METHOD}={name}", f"{MODE}=sync", f"{ROLLOUT}.log_prob_use_dynamic_bsz=True", NOTHING_BEGINS)
    config.algorithm.token_dump.folder = None
    config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz = True
    verl.utils.config.validate_config(config, use_reference_policy=False, use_critic=False)
    return config.trainer.v1.trainer_mode


MISSPELT = {
    "grail": "GRAIL grial gral graill grsil",
    "oar_g": "oar-g oarg OAR_G",
    "turn_rloo": "turn_rlo turnrloo turn-rloo trun_rloo",
    "gtpo": "GTPO gtop",
    "surprisal": "suprisal surprsial",
    "mt_grpo": "mt-grpo mtgrpo mt_grop",
}
FOREIGN = (
    "mine my_estimator grpo_custom my_grail grail_v2 grail2 gpo gspo gmpo gipo ggpo m_grpo t_grpo GRPO turn_grpo turn_ppo rlpd "
    "low_entropy entropy_of_mine vtrace"
)


def test_an_estimator_that_the_task_runner_alone_knows_starts_as_in_stock_verl() -> None:
    """Its module may be imported there only; a name that is nearer to one of verl's, or as near, is no slip either."""
    for name in FOREIGN.split():
        assert _start(name) == "sync", name
        checks.check_estimator(name)


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_method_is_refused_before_the_run_starts(name: str) -> None:
    for given in MISSPELT[name].split():
        for check in (_start, checks.check_estimator):
            with pytest.raises(ValueError) as refused:
                check(given)
            assert re.search(rf"{METHOD}='{given}'.*\b{name}\b.*VERL_USE_EXTERNAL_MODULES", str(refused.value))


def test_verls_own_estimators_meet_none_of_the_refusals_of_methods() -> None:
    layout = (SLICES, f"+{MODEL}.override_config.attn_implementation=sdpa", f"{ACTOR}.policy_loss.loss_mode=geo_mean")
    config = _compose(f"{METHOD}=grpo", "+algorithm.grail.foo=1", *layout)
    prepare(config)
    assert config.trainer.v1.trainer_mode == "sync"


def test_correction_with_log_probs_of_one_distribution_is_accepted() -> None:
    """The published top_k=50 is harmless as long as nobody reads the rollout's log-probabilities."""
    for estimator in ("grail", "grpo"):
        engine = (f"{METHOD}={estimator}", f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.logprobs_mode=raw_logprobs")
        prepare(_compose(*engine))
        _refused((*engine, f"{CORRECTION}.rollout_rs=token_k1"), "top_k=50", "use -1", "rollout_rs=token_k1")
    for rollout in ("top_k=-1", "top_k=-1 temperature=0.7", "logprobs_mode=raw_logprobs"):
        for use in ("bypass_mode=True", "rollout_is=token", "rollout_rs=token_k1"):
            prepare(_compose(f"{CORRECTION}.{use}", *(f"{ROLLOUT}.{option}" for option in rollout.split())))


def test_accepted_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    lora = (f"{MODEL}.lora_rank=8", f"{MODEL}.lora.merge=True", f"{ACTOR}.use_kl_loss=True")
    sampler = (f"trainer.v1.sampler.custom_sampler.{name}=null" for name in ("path", "name"))
    for overrides in ((*lora, "algorithm.use_kl_in_reward=True"), ("algorithm.filter_groups.enable=True", *sampler)):
        checks.check_config(compose("cpu_trainer", [f"{ROLLOUT}.n=4", *overrides]))


ACCEPTED: dict[str, tuple[str, ...]] = {
    "separate asynchronous trainer": SEPARATE,
    "its policy is not put back": (*SEPARATE, f"{ACTOR}.fsdp_config.param_offload=True", CUT, f"{ROLLOUT}.top_k=-1"),
    "one update a step": (
        *SEPARATE,
        *(f"{ACTOR}.fsdp_config.param_offload=True", f"{SYNC_STEP}=1", f"{ACTOR}.ppo_mini_batch_size=32"),
    ),
    "fused kernels in triton and LoRA": (*FUSED, f"{BACKEND}=triton", f"{MODEL}.lora_rank=8"),
    "sequence parallelism, smallest group": (SLICES, f"{ROLLOUT}.n=2", f"{MODE}=colocate_async"),
    "padded, LoRA, KL, robust": (
        *(f"{MODEL}.use_remove_padding=False", f"{MODEL}.lora_rank=8", f"{MODEL}.lora.merge=True"),
        *(f"algorithm.{each}" for each in ("use_kl_in_reward=True", "grail.preset=robust", "grail.leaf=middle")),
    ),
    "exactly the longest response": (f"{METHOD}=oar_p", f"{BUDGET}=5120", "algorithm.oar.max_perturbations=64"),
    "a fixed number of responses": (
        *(f"{METHOD}=oar_p", f"{ACTOR}.use_dynamic_bsz=False", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"),
        *(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1", f"{BUDGET}=100"),
    ),
    "GRAIL's reshaper": (f"{METHOD}=oar_g", "algorithm.oar.reshaper=log_zscore", "algorithm.oar.weight_max=3"),
    "what belongs to GRAIL is not looked at": (f"{METHOD}=oar_p", "algorithm.grail.leaf=nowhere"),
    "losses": (f"{ACTOR}.policy_loss.loss_mode=geo_mean", f"{METHOD}=uniform"),
    "answers by an expression": (r'algorithm.token_weights.answer="Answer: (?P<content>\d+)"',),
}


@pytest.mark.parametrize("overrides", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_accepted(overrides: tuple[str, ...]) -> None:
    config = _compose(*overrides)
    mode = config.trainer.v1.trainer_mode
    prepare(config)
    assert config.trainer.v1.trainer_mode == f"grail_{mode}"


def test_yaml_names_every_option_with_its_default() -> None:
    for name, method in (
        ("grail_trainer", "gradient"),
        ("cpu_trainer", "perturbation"),
    ):
        config = compose(name, [f"{METHOD}=oar_{method[0]}"])
        assert {*config.algorithm.oar} == Oar.model_fields.keys() - {"method"}
        variant = "grail_port" if method == "gradient" else "official"  # as GRAIL's authors ran OAR-G
        assert Settings.parse(config).signal == Oar(method, variant=variant)
    options = OmegaConf.to_container(_compose("algorithm.grail.preset=robust").algorithm.grail)
    assert Grail(**options) == Grail("robust")
    assert set(options) == set(Grail.model_fields)


@pytest.mark.parametrize("estimator", ["grail", "grpo"])
def test_a_tokenizer_that_loses_text_is_refused_for_every_estimator(estimator: str, tmp_path: Path) -> None:
    broken = save_under_class(build_tokenizer(), tmp_path / "model", "LlamaTokenizerFast", "llama")
    repaired = tmp_path / "repaired"
    save_repaired(str(broken), str(repaired))
    given = (f"{MODEL}.path={broken}", f"{METHOD}={estimator}")
    for option in ("path", "tokenizer_path"):
        _refused((*given, f"++{MODEL}.{option}={broken}"), f"{MODEL}.{option}=", "answers.tokenizers")
    prepare(_compose(*given, f"++{MODEL}.tokenizer_path={repaired}"))


def test_a_trl_that_verls_workers_fail_over_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "trl"
    (package / "experimental" / "ppo").mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    _refused((), "AutoModelForCausalLMWithValueHead", "take TRL out")
    for place in ("__init__.py", "experimental/ppo/__init__.py"):
        (package / place).write_text("from .modeling import AutoModelForCausalLMWithValueHead\n")
        check_trl()
        (package / place).write_text("")


def test_another_verl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAIL_ADVANTAGE_ANY_VERL", raising=False)
    for taken in ("0.9.1", "0.9.1+cpu"):
        check_verl_version(taken)
    for found in ("0.9.0", "0.9.2", "0.9.10", "0.9.1.dev0", "0.10.0", "1.0"):
        with pytest.raises(ValueError, match=rf"verl {found} .*verl==0\.9\.1.*GRAIL_ADVANTAGE_ANY_VERL=1"):
            check_verl_version(found)
    monkeypatch.setenv("GRAIL_ADVANTAGE_ANY_VERL", "1")
    with pytest.warns(UserWarning, match=r"verl 0\.10\.0 "):
        check_verl_version("0.10.0")
