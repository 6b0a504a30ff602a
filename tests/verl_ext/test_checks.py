"""Start-up: what is refused and what is accepted, with configurations composed as the entry point composes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import verl
from omegaconf import DictConfig, OmegaConf
from tokenizers import Regex, decoders
from verl import DataProto
from verl.trainer.ppo.ray_trainer import compute_advantage

from grail_advantage import Grail, Method, Oar
from grail_advantage.answers.tokenizers import save_repaired
from grail_advantage.method import build, methods
from grail_advantage.verl_ext import checks
from grail_advantage.verl_ext.checks import check_verl_version
from grail_advantage.verl_ext.settings import Settings, algorithm_sections
from recipe.rules import check_trl
from tests.broken_tokenizer import save_under_class
from tests.composed import compose, prepare, with_model
from tests.core.common import METHODS
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
    "algorithm.token_weights.missing_answers=raise": "'raise' stop warn ignore",
    "algorithm.token_weights.skip_zero_advantage=maybe": "skip_zero_advantage='maybe' auto true false",
    "+algorithm.token_weights.skip=false": "token_weights.skip skip_zero_advantage",
    "+algorithm.token_dump.rows=4": "token_dump rows",
    f"{MODE}=grail_sync": "trainer_mode=grail_sync sync",
}


@pytest.mark.parametrize("override", OF_METHODS)
def test_names_and_values_that_mean_nothing_are_refused(override: str) -> None:
    """Before the trainer is chosen. Other refusals are in ``tests/test_rules.py``."""
    refused = _refused((override,), *OF_METHODS[override].split())
    assert refused.trainer.v1.trainer_mode == _compose(override).trainer.v1.trainer_mode


def _start(name: str) -> str:
    """The trainer's mode of a run by verl's own command with this estimator, of which this process knows nothing more."""
    config = _compose(f"{METHOD}={name}", f"{MODE}=sync", f"{ROLLOUT}.log_prob_use_dynamic_bsz=True")
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


ACCEPTED: dict[str, tuple[str, ...]] = {
    "separate asynchronous trainer": SEPARATE,
    "fused kernels in triton and LoRA": (*FUSED, f"{BACKEND}=triton", f"{MODEL}.lora_rank=8"),
    "sequence parallelism, smallest group": (SLICES, f"{ROLLOUT}.n=2", f"{MODE}=colocate_async"),
    "padded, LoRA, KL, robust": (
        *(f"{MODEL}.use_remove_padding=False", f"{MODEL}.lora_rank=8", f"{MODEL}.lora.merge=True"),
        *(f"algorithm.{each}" for each in ("use_kl_in_reward=True", "grail.preset=robust", "grail.leaf=middle")),
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
        assert Settings.parse(config).method == Oar(method, variant=variant)
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


def test_options_come_from_the_methods_section() -> None:
    def parsed(**algorithm: Any) -> Method | None:
        return Settings.parse(OmegaConf.create({"algorithm": {"adv_estimator": "grail", **algorithm}})).method

    sections = {"grail": {"preset": "robust", "gate": None}, "oar": {"variant": "grail_port"}}
    assert parsed(**sections) == Grail("robust")
    assert parsed(**sections, adv_estimator="oar_p") == Oar("perturbation", variant="grail_port")
    known = algorithm_sections()
    for name in METHODS:
        for given in ({}, {methods()[name].section: None}, known):
            assert parsed(**{**given, "adv_estimator": name}) == build(name)
    assert parsed(adv_estimator="grpo") is None


@pytest.mark.parametrize("name", methods())
def test_a_trainer_without_token_weights_says_what_to_start(name: str) -> None:
    data = DataProto.from_dict(
        tensors={"token_level_rewards": torch.ones(2, 3), "response_mask": torch.ones(2, 3)},
        non_tensors={"uid": np.array(["a", "a"], dtype=object)},
    )
    with pytest.raises(ValueError, match=rf"adv_estimator={name} needs token weights, .*docs/own_trainer\.md"):
        compute_advantage(data, name, config=None)


def test_what_the_start_writes_for_the_trainers_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole path of the dump, and the modules that verl imports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "recipe.verl_start")
    config = _compose("algorithm.token_dump.folder=tokens")
    prepare(config)
    assert config.algorithm.token_dump.folder == str(tmp_path / "tokens")
    name = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES"
    assert OmegaConf.select(config, name) == "recipe.verl_start"


@pytest.mark.parametrize("estimator", ["grail", "uniform"])
def test_a_tokenizer_without_bytes_is_refused(estimator: str, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    steps = [decoders.Replace(Regex("~~~~"), "~"), tokenizer.backend_tokenizer.decoder]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"~~~~.*; use a byte-level"):
        checks.check_config(with_model(tmp_path, f"algorithm.adv_estimator={estimator}"))


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
