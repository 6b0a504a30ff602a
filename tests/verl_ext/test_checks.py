"""Start-up: what is refused and what is accepted, with configurations composed as the entry point composes them.

That every rule of the tables refuses its example is in ``tests/test_rules.py``."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import verl
import yaml
from omegaconf import DictConfig, OmegaConf, open_dict
from tokenizers import Regex, decoders
from verl import DataProto
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn
from verl.trainer.ppo.ray_trainer import compute_advantage

from grail_advantage import Grail, Oar
from grail_advantage.answers.tokenizers import save_repaired
from grail_advantage.locks import let_go
from grail_advantage.method import build, methods
from grail_advantage.verl_ext import entry as checks
from grail_advantage.verl_ext.entry import prepare_run, start_run
from grail_advantage.verl_ext.settings import (
    ACTOR,
    DUMP_FOLDER,
    METHOD,
    MODEL,
    ROLLOUT,
    Settings,
    algorithm_sections,
)
from recipe.rules import check_trl
from tests import forked
from tests.composed import VERL, compose, prepare
from tests.core.common import METHODS
from tests.core.real_tokenizers import save_as_llamas
from verl_cpu.tiny.model import build_tokenizer

ROOT = Path(__file__).parents[2]
MODE = "trainer.v1.trainer_mode"
REQUIRED = (f"{ACTOR}.use_dynamic_bsz=True", f"{ROLLOUT}.n=4")
MEANINGLESS = {
    "+algorithm.grail.foo=1": "grail.foo leaf",
    "algorithm.adv_estimator=grial": "adv_estimator='grial' grail",
    "+algorithm.grial.preset=robust": "algorithm.grial algorithm.grail",
    'algorithm.token_weights.answer="Answer: (.+)"': "group boxed hashes tag",
    "algorithm.token_weights.missing_answers=raise": "'raise' stop warn ignore",
    "algorithm.token_weights.skip_zero_advantage=maybe": "skip_zero_advantage='maybe' auto true false",
    "+algorithm.token_weights.skip=false": "token_weights.skip skip_zero_advantage",
    "+algorithm.token_dump.rows=4": "token_dump rows",
    "+algorithm.token_weights.share_forward=auto": "token_weights.share_forward",
    "+algorithm.token_weights.trainer_module=mine": "token_weights.trainer_module",
    "algorithm.adv_estimator=null": "algorithm.adv_estimator=None",
    "algorithm.adv_estimator=[grail]": "algorithm.adv_estimator=['grail']",
    "algorithm.token_dump.every=10.0": "algorithm.token_dump.every=10.0",
    "algorithm.token_dump.every=0": "algorithm.token_dump.every=0",
    "algorithm.token_dump.responses=many": "algorithm.token_dump.responses='many'",
}
"""Overrides that mean nothing, and words of the refusal."""
FOREIGN = """
mine grpo_custom my_grail grail_v2 gpo gspo gmpo ggpo m_grpo
GRPO turn_grpo turn_ppo rlpd low_entropy vtrace grail2
"""
"""Estimators that a module of the task runner may register."""
MISSPELT = """
GRAIL:grail grial:grail oar-g:oar_g oarg:oar_g OAR_G:oar_g turnrloo:turn_rloo turn-rloo:turn_rloo
trun_rloo:turn_rloo TURN_GRPO:turn_grpo turn_gpro:turn_grpo surprsial:surprisal mt-grpo:mt_grpo mtgrpo:mt_grpo mt_grop:mt_grpo
graill:grail oar-p:oar_p uniforn:uniform
"""
ACCEPTED = {
    "separate asynchronous trainer": (
        "trainer.v1.trainer_mode=separate_async",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
    ),
    "fused kernels in triton and LoRA": (
        "actor_rollout_ref.model.use_fused_kernels=True",
        "actor_rollout_ref.actor.strategy=fsdp",
        "actor_rollout_ref.model.fused_kernel_options.impl_backend=triton",
        "actor_rollout_ref.model.lora_rank=8",
    ),
    "sequence parallelism, smallest group": (
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.rollout.n=2",
        "trainer.v1.trainer_mode=colocate_async",
    ),
    "padded, LoRA, KL, robust": (
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.model.lora.merge=True",
        "algorithm.use_kl_in_reward=True",
        "algorithm.grail.preset=robust",
        "algorithm.grail.leaf=middle",
    ),
    "GRAIL's reshaper": (
        "algorithm.adv_estimator=oar_g",
        "algorithm.oar.reshaper=log_zscore",
        "algorithm.oar.weight_max=3",
    ),
    "what belongs to GRAIL is not looked at": (
        "algorithm.adv_estimator=oar_p",
        "algorithm.grail.leaf=nowhere",
    ),
    "losses": (
        "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean",
        "algorithm.adv_estimator=uniform",
    ),
    "answers by an expression": (
        'algorithm.token_weights.answer="Answer: (?P<content>\\d+)"',
    ),
}
ENGINES = {
    "model_engine=megatron": "",
    "model_engine=veomni": "veomni.",
    "model_engine=torchtitan": "torchtitan.",
    "actor_rollout_ref.actor.strategy=automodel": "",
    "actor_rollout_ref.actor.strategy=fsdp_turbo": "",
}
"""Overrides that choose an engine, and its section of the actor's in which entropies are chunked."""


def _compose(*overrides: str) -> DictConfig:
    budget = f"{ACTOR}.ppo_max_token_len_per_gpu=16384"
    return compose("grail_trainer", [*REQUIRED, budget, *overrides])


def _refused(*overrides: str, words: str):
    """With a message that has these words, before the trainer is chosen."""
    config = _compose(*overrides)
    mode = config.trainer.v1.trainer_mode
    with pytest.raises(ValueError) as refused:
        prepare(config)
    assert all(word in str(refused.value) for word in words.split()), str(refused.value)
    assert config.trainer.v1.trainer_mode == mode


@pytest.mark.parametrize(("override", "words"), MEANINGLESS.items())
def test_names_and_values_that_mean_nothing_are_refused(override, words):
    _refused(override, words=words)


def test_an_estimator_that_the_task_runner_alone_knows_starts_as_in_stock_verl():
    """Its module may be imported there only, and its name be near one of verl's. A method's name that is misspelt is told."""
    config = _compose(f"{METHOD}=mine", f"{ROLLOUT}.log_prob_use_dynamic_bsz=True")
    config.algorithm.token_dump.folder = None
    config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz = True
    verl.utils.config.validate_config(config, use_reference_policy=False, use_critic=False)
    assert config.trainer.v1.trainer_mode == "sync"
    # Near enough to a name to look misspelt, and yet somebody's own.
    for name in FOREIGN.split():
        checks.check_spelling(name)
    for case in MISSPELT.split():
        name, meant = case.split(":")
        with pytest.raises(ValueError, match=rf"'{name}'.*\b{meant}\b"):
            checks.check_spelling(name)


def test_verls_own_estimators_meet_none_of_the_refusals_of_methods():
    config = _compose(
        "algorithm.adv_estimator=grpo",
        "+algorithm.grail.foo=1",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean",
    )
    prepare(config)
    assert config.trainer.v1.trainer_mode == "sync"


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(case):
    config = _compose(*ACCEPTED[case])
    mode = config.trainer.v1.trainer_mode
    prepare(config)
    assert config.trainer.v1.trainer_mode == f"grail_{mode}"


@pytest.mark.parametrize("choice", ENGINES)
def test_other_engines_than_fsdp_run_methods_without_a_pass_alone(choice):
    """With verl's own configurations, of which two engines have none of an actor; the engines are not installed here."""
    chunked = f"{ACTOR}.{ENGINES[choice]}entropy_from_logits_with_chunking=True"
    config = compose(
        "ppo_trainer", [choice, chunked, *REQUIRED, f"{MODEL}.path=nowhere"], VERL
    )
    with open_dict(config):
        config.algorithm.adv_estimator = "grail"
    # GRAIL has a pass through the model, uniform has none.
    engine = choice.partition("=")[2]
    with pytest.raises(ValueError, match=f"strategy={engine} .*fsdp"):
        prepare_run(config)
    config.algorithm.adv_estimator = "uniform"
    prepare_run(config)
    assert config.trainer.v1.trainer_mode == "grail_sync"


def test_yaml_names_every_option_with_its_default():
    # With GPUs OAR-G runs as GRAIL's authors ran it.
    for name, method in (
        ("grail_trainer", Oar("gradient", variant="grail_port")),
        ("cpu_trainer", Oar("perturbation")),
    ):
        config = compose(name, [f"{METHOD}={method.name}"])
        assert {*config.algorithm.oar} == Oar.model_fields.keys() - {"method"}
        assert Settings.parse(config).method == method
    options = OmegaConf.to_container(
        _compose("algorithm.grail.preset=robust").algorithm.grail
    )
    assert Grail(**options) == Grail("robust") and set(options) == set(Grail.model_fields)


def test_options_come_from_the_methods_section():
    def parsed(name, **sections):
        algorithm = {"adv_estimator": name, **sections}
        return Settings.parse(OmegaConf.create({"algorithm": algorithm})).method

    sections = {
        "grail": {"preset": "robust", "gate": None},
        "oar": {"variant": "grail_port"},
    }
    assert parsed("grail", **sections) == Grail("robust")
    assert parsed("oar_p", **sections) == Oar("perturbation", variant="grail_port")
    for name in METHODS:
        for section in ({}, {methods()[name].section: None}, algorithm_sections()):
            assert parsed(name, **section) == build(name)
    # verl's own estimators are no methods.
    assert parsed("grpo") is None


@pytest.mark.parametrize("estimator", ["grail", "grpo"])
@pytest.mark.parametrize("option", ["path", "tokenizer_path"])
def test_a_tokenizer_that_loses_text_is_refused_for_every_estimator(
    estimator, option, tmp_path
):
    broken = save_as_llamas(build_tokenizer(), tmp_path / "model")
    overrides = (f"{MODEL}.path={broken}", f"{METHOD}={estimator}")
    words = f"{MODEL}.{option}= answers.tokenizers"
    _refused(*overrides, f"++{MODEL}.{option}={broken}", words=words)
    save_repaired(str(broken), str(tmp_path / "repaired"))
    # The repaired one goes before the model's own.
    prepare(_compose(*overrides, f"++{MODEL}.tokenizer_path={tmp_path / 'repaired'}"))


def test_a_tokenizer_without_bytes_is_refused(tmp_path):
    tokenizer = build_tokenizer()
    steps = [decoders.Replace(Regex("~~~~"), "~"), tokenizer.backend_tokenizer.decoder]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.save_pretrained(tmp_path)
    _refused(f"{MODEL}.path={tmp_path}", f"{METHOD}=uniform", words="~~~~ byte-level")


def test_a_method_in_a_trainer_without_token_weights_is_refused():
    tensors = dict.fromkeys(("token_level_rewards", "response_mask"), torch.ones(2, 3))
    data = DataProto.from_dict(
        tensors, non_tensors={"uid": np.array(["a", "a"], dtype=object)}
    )
    checks.register_estimators()
    for name in methods():
        assert get_adv_estimator_fn(name) is ADV_ESTIMATOR_REGISTRY[name]
        with pytest.raises(ValueError, match=f"{name} needs token weights"):
            compute_advantage(data, name, config=None)


def test_what_the_start_writes_for_the_trainers_process(tmp_path, monkeypatch):
    """The whole path of the dump, and the modules that verl imports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "recipe.verl_start")
    config = _compose("algorithm.token_dump.folder=tokens")
    prepare(config)
    assert config.algorithm.token_dump.folder == str(tmp_path / "tokens")
    name = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES"
    assert OmegaConf.select(config, name) == "recipe.verl_start"


def test_a_trl_that_verls_workers_fail_over_is_refused(tmp_path, monkeypatch):
    package = tmp_path / "trl"
    (package / "experimental" / "ppo").mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    _refused(words="AutoModelForCausalLMWithValueHead")
    # The class has had two places.
    for place in ("__init__.py", "experimental/ppo/__init__.py"):
        (package / place).write_text(
            "from .modeling import AutoModelForCausalLMWithValueHead\n"
        )
        check_trl()
        (package / place).write_text("")


def test_another_verl_is_refused(monkeypatch):
    monkeypatch.delenv(checks.ANY_VERL, raising=False)
    # A local version is another build of the same source.
    for accepted in ("0.9.1", "0.9.1+cpu"):
        checks.check_verl_version(accepted)
    for refused in ("0.9.0", "0.9.10", "0.9.1.dev0", "1.0"):
        with pytest.raises(ValueError, match=checks.ANY_VERL):
            checks.check_verl_version(refused)
    monkeypatch.setenv(checks.ANY_VERL, "1")
    with pytest.warns(UserWarning):
        checks.check_verl_version("0.10.0")


def test_verls_own_command_locks_the_dumps_folder(tmp_path):
    """A second start there is refused while the first lives, before verl goes on."""
    overrides = [f"{METHOD}=grail", f"++{DUMP_FOLDER}={tmp_path}", *REQUIRED]
    # The lock is this process's; another one asks for it.
    start_run(compose("ppo_trainer", overrides, VERL), lambda: None)
    try:
        hold = "import sys, pathlib; from grail_advantage.locks import hold; hold(pathlib.Path(sys.argv[1]), '', 'option')"
        done = subprocess.run(
            [sys.executable, "-c", hold, tmp_path], capture_output=True, text=True
        )
        assert "belongs to a run that lives" in done.stderr
    finally:
        let_go(tmp_path)


STOCK = (
    "data.train_files=nowhere.parquet",
    "data.val_files=nowhere.parquet",
    f"{MODEL}.path=nowhere",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
    *REQUIRED,
    f"{METHOD}=grail",
    f"{MODE}=sync",
)
RECIPE = (f"--config-path={ROOT}/recipe/config", "--config-name=cpu_trainer", *REQUIRED)


def _main(*overrides: str, **environment: str) -> subprocess.CompletedProcess:
    """verl's command in a process of its own, which starts no Ray."""
    done = forked.run(
        "verl.trainer.main_ppo", *overrides, HYDRA_FULL_ERROR="1", **environment
    )
    output = done.stdout + done.stderr
    assert "ray init kwargs" not in output and "local Ray instance" not in output
    return done


@pytest.mark.slow
def test_a_dry_run_prints_the_configuration_and_nothing_else(tmp_path):
    """Resolved, with the trainer's mode as it is written in an override."""
    folder = tmp_path / "run"
    done = _main(*RECIPE, f"run.folder={folder}", "algorithm.grail.leaf=last", DRY_RUN="1")
    assert done.returncode == 0 and not folder.exists(), done.stderr
    printed = yaml.safe_load(done.stdout)
    assert set(printed) == set(compose("cpu_trainer")) and "${" not in done.stdout
    assert printed["algorithm"]["grail"]["leaf"] == "last"
    assert printed["trainer"]["v1"]["trainer_mode"] == "sync"


@pytest.mark.slow
def test_a_dry_run_of_verls_own_command_prints_the_defaults_of_the_methods_section(
    tmp_path,
):
    """What is logged is not among its YAML, such as that the prompts of the data ask for another format."""
    prompt = [{"role": "user", "content": 'after "####".'}]
    row = {"prompt": prompt, "reward_model": {"ground_truth": "4"}}
    pq.write_table(pa.Table.from_pylist([row] * 3), tmp_path / "gsm8k.parquet")
    data = f"data.train_files={tmp_path}/gsm8k.parquet"
    done = _main(*STOCK, f"hydra.run.dir={tmp_path}", data, DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    printed = yaml.safe_load(done.stdout)["algorithm"]
    assert printed["grail"]["preset"] == "official"
    assert printed["token_weights"]["answer"] == "boxed"
    assert "3 of 3 rows have #### in them, and none the format boxed" in done.stderr
    assert "is ++algorithm.token_weights.answer=hashes meant?" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "override", "dry_run"),
    [
        (RECIPE, "algorithm.grail.weight_std=0", "1"),
        (RECIPE, f"{ACTOR}.policy_loss.loss_mode=geo_mean", "0"),
        (STOCK, f"{MODE}=mine", "0"),
    ],
)
def test_refused_before_ray_starts(command, override, dry_run, tmp_path):
    """In a dry run too, and by verl's own configuration."""
    folder = f"hydra.run.dir={tmp_path}" if command is STOCK else f"run.folder={tmp_path}"
    done = _main(*command, folder, override, DRY_RUN=dry_run)
    message = f"ValueError: {override.removeprefix('algorithm.')}"
    assert done.returncode != 0 and message in done.stderr


def test_a_dry_run_is_for_methods(monkeypatch):
    """With verl's own estimators verl goes on."""
    config = compose("ppo_trainer", [*STOCK, f"{METHOD}=grpo"], VERL)
    validated = Mock()
    monkeypatch.setenv("DRY_RUN", "1")
    start_run(config, validated)
    validated.assert_called_once_with()
    assert config.trainer.v1.trainer_mode == "sync"
    monkeypatch.setenv("DRY_RUN", "true")
    with pytest.raises(ValueError, match="DRY_RUN=true is unknown; use 1"):
        start_run(compose("ppo_trainer", STOCK, VERL), validated)
