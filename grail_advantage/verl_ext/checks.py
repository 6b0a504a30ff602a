"""Start-up checks: settings that cannot work are refused before Ray starts, with the option's name and the remedy."""

from __future__ import annotations

import difflib
import logging
import os
import warnings
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import cached_file

from grail_advantage.methods import methods
from grail_advantage.registry import RESERVED, NameTakenError, failure_message, failures
from grail_advantage.signals.base import LOGITS, SALIENCY, SEQUENCES, Signal
from grail_advantage.signals.oar import OarConfig
from grail_advantage.verl_cpu import checks as cpu_checks
from grail_advantage.verl_ext.estimators import WEIGHS_TOKENS, register_estimators
from grail_advantage.verl_ext.model_checks import adapter_config, check_model, check_text, check_tokenizer, read_json
from grail_advantage.verl_ext.settings import (
    BASE,
    BASES,
    ENGINES,
    NEEDED_WHOLE,
    SHARE_FORWARD,
    algorithm_sections,
    answer_of,
    base_of,
    dump_options,
    parse_missing_answers,
    share_choice,
    share_obstacle,
    signal_of,
    works_with_bypass,
    works_with_fused_kernels,
    works_with_sequence_parallel,
)
from grail_advantage.verl_ext.trainer_modes import (
    TRAINER_MODES,
    TRAINER_MODULE,
    TRAINER_PREFIX,
    base_mode,
    import_trainer_module,
)
from grail_advantage.verl_ext.zero_advantage_rules import choose_skipping

logger = logging.getLogger(__name__)

VERL_VERSION = "0.9.1"
ANY_VERL = "GRAIL_ADVANTAGE_ANY_VERL"
"""Environment variable: 1 lets another version of verl through."""
KERNEL_BACKENDS = ("torch", "triton")
UNIFORM = "uniform"
"""The method whose weights are all 1."""
OTHER_BASES = {
    "gdpo": "it compares parts of the reward, which verl's v1 trainer does not hand to it",
    "gae": "its advantages differ from token to token, and need a critic",
    "reinforce_plus_plus": "its advantages may differ from token to token; use reinforce_plus_plus_baseline",
    "remax": "it needs a further response to each prompt, which verl's v1 trainer does not sample",
    "optimal_token_baseline": "its advantages differ from token to token",
    "tir_optimal_token_baseline": "its advantages differ from token to token",
}
"""Estimators of verl's that cannot be the base, with the reason."""

_ACTOR, _MODEL, _ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))
_BYPASS = "algorithm.rollout_correction.bypass_mode"


def check_config(config: DictConfig) -> None:
    """Check the resolved configuration of a run with a method of this project.

    Raises:
        ValueError: naming the option and the remedy.
    """
    tokenizer = check_start(config)
    signal = signal_of(config.algorithm)
    answer_of(config)
    parse_missing_answers(config)
    check_base(config)
    check_share_forward(config, signal)
    choose_skipping(config)
    dump_options(config)
    _check_reads(config, signal)
    _check_uses(config, signal)
    _check_loss(config)
    _check_layout(config, signal)
    if tokenizer is not None:
        check_tokenizer(tokenizer, signal)
    check_model(config, signal)


def check_start(config: DictConfig) -> PreTrainedTokenizerBase | None:
    """Checks that hold for every estimator: versions, platform, trainer, names, tokenizer.

    Returns:
        The tokenizer as verl loads it; ``None`` where it is not on this machine yet. The trainer checks such a one.

    Raises:
        ValueError: naming the option and the remedy.
    """
    check_verl_version(version("verl"))
    if not config.trainer.use_v1:
        raise ValueError(
            f"trainer.use_v1={config.trainer.use_v1}: token weights, and the entry point of this project, need verl's v1 "
            "trainer; use true, or see docs/own_trainer.md on the legacy trainer"
        )
    kind = trainer_kind(config)
    if os.environ.get("VERL_PLATFORM") == "cpu":
        cpu_checks.check_config(config, kind)
    check_names(config)
    check_estimator(config.algorithm.adv_estimator)
    tokenizer = _local_tokenizer(config.actor_rollout_ref.model)
    if tokenizer is not None:
        check_text(tokenizer, config.actor_rollout_ref.model)
    return tokenizer


def check_verl_version(installed: str) -> None:
    """The extension follows verl's internals, so another version is refused unless somebody wants to try it."""
    if installed.split("+")[0] == VERL_VERSION:
        return
    message = f"verl {installed} is installed, but this extension follows verl {VERL_VERSION}"
    if os.environ.get(ANY_VERL) != "1":
        raise ValueError(
            f"{message}; run `pip install verl=={VERL_VERSION}`, or set {ANY_VERL}=1 to try it at your own risk "
            "(tested versions: docs/compatibility.md)"
        )
    warnings.warn(f"{message}; {ANY_VERL}=1 lets it through, and nothing is known about it", stacklevel=2)


def check_estimator(name: str) -> None:
    """Refuse an unknown estimator, plug-ins that take a name in use, and methods with the name of an estimator of verl's.

    Raises:
        ValueError: naming what is wrong, and the plug-ins that failed to import.
    """
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    from grail_advantage.verl_ext.patches import entry_is_wrapped

    for plugin, error in failures().items():
        if isinstance(error, NameTakenError):
            raise ValueError(f"the plug-in {plugin} takes a name that is taken: {error}")
        logger.warning("the plug-in %s failed to import: %s: %s", plugin, type(error).__name__, error)
    if not entry_is_wrapped():
        raise ValueError(
            "the plug-in of this package did not load with verl, so that no worker would know its methods; unset "
            "VERL_USE_EXTERNAL_PLUGINS or add grail_advantage to it, and install this project with `pip install -e .`"
        )
    register_estimators()
    for method in methods():
        if not getattr(ADV_ESTIMATOR_REGISTRY[method], WEIGHS_TOKENS, False):
            raise ValueError(
                f"the method {method} has the name of one of verl's own estimators, which would run in its place; register it "
                "under another name"
            )
    if name not in ADV_ESTIMATOR_REGISTRY:
        known = ", ".join(sorted(ADV_ESTIMATOR_REGISTRY))
        raise ValueError(f"algorithm.adv_estimator={name!r} is unknown; choose one of {known}{failure_message()}")


def check_names(config: DictConfig) -> None:
    """Refuse names close to an option of this project that nothing reads: a ``+`` accepts any name.

    Raises:
        ValueError: naming the right one.
    """
    sections = algorithm_sections()
    verls = OmegaConf.load(Path(find_spec("verl").origin).parent / "trainer" / "config" / "ppo_trainer.yaml").algorithm
    for each in methods().values():
        if each.section in verls:
            raise ValueError(
                f"the method {each.name} wants the section algorithm.{each.section}, which is an option of verl's; register it "
                "under another name"
            )
    for name in config.algorithm:
        similar = difflib.get_close_matches(str(name), sections, n=1, cutoff=0.75)
        if name not in sections and similar and name not in verls:
            raise ValueError(f"nothing reads algorithm.{name}; is algorithm.{similar[0]} meant?")
    for section in RESERVED:
        for name in config.algorithm.get(section) or {}:
            if name not in sections[section]:
                known = ", ".join(sections[section])
                raise ValueError(f"algorithm.{section}.{name} is not an option; the options are {known}")


def check_base(config: DictConfig) -> None:
    """Refuse an estimator that gives no advantage a response, or that needs something that is not there.

    Raises:
        ValueError: naming the option and the choices.
    """
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    base, tested = base_of(config), ", ".join(BASES)
    if base in OTHER_BASES:
        raise ValueError(f"{BASE}={base} does not work: {OTHER_BASES[base]}; choose one of {tested}")
    if base in methods():
        raise ValueError(f"{BASE}={base} is a method of token weights itself; choose one of {tested}")
    if base not in ADV_ESTIMATOR_REGISTRY:
        raise ValueError(
            f"{BASE}={base!r} is no estimator of verl's; choose one of {tested}, or register yours with "
            "verl.trainer.ppo.core_algos.register_adv_est in the module of algorithm.token_weights.trainer_module"
        )


def check_share_forward(config: DictConfig, signal: Signal) -> None:
    """Refuse unknown values, and ``true`` where the forward cannot be shared.

    Raises:
        ValueError: naming the option and the remedy.
    """
    obstacle = share_obstacle(config, signal)
    if share_choice(config) is True and obstacle is not None:
        setting, reason = obstacle
        raise ValueError(f"{SHARE_FORWARD}=True does not work with {setting}: {reason}; use auto")


def _local_tokenizer(model: DictConfig) -> PreTrainedTokenizerBase | None:
    path = model.get("tokenizer_path", None) or model.path
    try:
        if cached_file(path, "tokenizer_config.json", local_files_only=True) is None:
            return None
        trusted = model.get("trust_remote_code", False)
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trusted)
    except (OSError, ValueError):  # not in the cache, a broken download, or a file system that verl copies from
        return None


def _refuse(config: DictConfig, option: str, remedy: str, value: Any = None) -> None:
    value = OmegaConf.select(config, option, default=None) if value is None else value
    estimator = config.algorithm.adv_estimator
    raise ValueError(f"{option}={value} does not work with algorithm.adv_estimator={estimator}; {remedy}")


def _check_layout(config: DictConfig, signal: Signal) -> None:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if rollout.n < 2:
        _refuse(config, f"{_ROLLOUT}.n", "a group of one has no relative advantage; use 2 or more")
    if actor.strategy in ENGINES:
        _check_sequence_parallel(config, signal)
        _check_adapter(config)
        _check_fused_kernels(config)
    else:
        _check_engine(config, signal)
    for name in ("mixed_precision.param_dtype", "model_dtype"):
        precision = f"{_ACTOR}.fsdp_config.{name}"
        if signal.uses in (SALIENCY, LOGITS) and str(OmegaConf.select(config, precision)) in ("fp16", "float16", "16"):
            _refuse(config, precision, "use bf16 or fp32: the answer's gradients underflow in fp16")
    if not rollout.temperature > 0:
        _refuse(config, f"{_ROLLOUT}.temperature", "use a temperature above 0", rollout.temperature)


def _check_engine(config: DictConfig, signal: Signal) -> None:
    """Another engine of verl's than FSDP, in which nothing of this project's runs."""
    option, strategy = f"{_ACTOR}.strategy", config.actor_rollout_ref.actor.strategy
    if signal.uses:
        free = [name for name, known in sorted(methods().items()) if not known.build({}).uses]
        _refuse(
            config,
            option,
            f"its pass runs in {' and '.join(ENGINES)}; use one of these, or a method without a pass, which starts with every "
            f"engine: {', '.join(free)}",
        )
    logger.warning(
        "%s=%s: %s reads no more than what verl's trainer has with any engine, but has not been run with this one",
        option,
        strategy,
        config.algorithm.adv_estimator,
    )


def _sequence_parallel_size(config: DictConfig) -> int:
    return max(
        OmegaConf.select(config.actor_rollout_ref.actor, name, default=None) or 1
        for name in ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size")
    )


def trainer_kind(config: DictConfig) -> str:
    """verl's name for the kind of trainer: its own mode, or that of the class which a user registered."""
    mode, option = config.trainer.v1.trainer_mode, "trainer.v1.trainer_mode"
    if mode in TRAINER_MODES:
        return mode
    import_trainer_module(OmegaConf.select(config, TRAINER_MODULE))
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    weighted = config.algorithm.adv_estimator in methods()
    name = f"{TRAINER_PREFIX}{mode}" if weighted else mode
    if name in TRAINER_REGISTRY:
        return base_mode(TRAINER_REGISTRY[name])
    if weighted and mode.startswith(TRAINER_PREFIX):
        _refuse(config, option, f"use {mode.removeprefix(TRAINER_PREFIX)}: the start-up adds the prefix")
    if weighted:
        _refuse(
            config,
            option,
            f"use {' or '.join(TRAINER_MODES)}; or, for a trainer of your own, register a class with the bases "
            f"(TokenWeightTrainer, YourTrainer) as {name}, in a module that {TRAINER_MODULE} names (docs/own_trainer.md)",
        )
    return mode


def _check_reads(config: DictConfig, signal: Signal) -> None:
    """Columns that a method reads must be there, and fine enough."""
    if OmegaConf.select(config, _BYPASS, default=False) and not works_with_bypass(signal):
        _refuse(
            config,
            _BYPASS,
            "use false: the method reads the entropy, which verl computes with the old log-probabilities",
        )
    precision = f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype"
    half = str(OmegaConf.select(config, precision, default="bf16")) in ("bf16", "bfloat16")
    if isinstance(signal, OarConfig) and signal.uses == LOGITS and half:
        logger.warning(
            "algorithm.adv_estimator=%s compares two forwards that differ by noise of noise_std=%g, most of which bf16 rounds "
            "away: its scores are then about as far from float32's as with another seed (docs/reference_methods.md). "
            "%s=fp32 keeps them, "
            "at the price of a float32 run",
            config.algorithm.adv_estimator,
            signal.noise_std,
            precision,
        )
    actor, name = config.actor_rollout_ref.actor, "entropy_from_logits_with_chunking"
    chunking = f"{_ACTOR}.{name}" if name in actor else f"{_ACTOR}.{actor.strategy}.{name}"
    if signal.ranks_entropy and half and not OmegaConf.select(config, chunking, default=False):
        # Without chunks verl takes the entropy in the logits' own precision: a few dozen distinct values.
        _refuse(
            config, chunking, "use true: the method ranks tokens by entropy, which is coarse in bf16 without", False
        )


def _check_uses(config: DictConfig, signal: Signal) -> None:
    """Fused kernels, whose output is log-probabilities alone, and the room that made-up sequences need."""
    actor = config.actor_rollout_ref.actor
    fused = f"{_MODEL}.use_fused_kernels"
    if OmegaConf.select(config, fused, default=False) and not works_with_fused_kernels(signal):
        _refuse(config, fused, f"use false: the method reads {NEEDED_WHOLE[signal.uses]}, which they do not put out")
    longest = config.data.max_prompt_length + config.data.max_response_length
    if signal.uses == SEQUENCES and actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu < longest:
        _refuse(
            config,
            f"{_ACTOR}.ppo_max_token_len_per_gpu",
            f"a sequence of data.max_prompt_length + data.max_response_length = {longest} tokens must fit; raise it to "
            "at least that, or shorten the responses",
        )


def _check_loss(config: DictConfig) -> None:
    """Policy losses that use the advantages for more than a factor of each token's own term."""
    option = f"{_ACTOR}.policy_loss.loss_mode"
    mode, estimator = OmegaConf.select(config, option, default="vanilla"), config.algorithm.adv_estimator
    if estimator == UNIFORM:
        return
    if mode == "geo_mean":
        _refuse(
            config,
            option,
            f"it averages the advantages over each response, weights and all; use another loss or {UNIFORM}",
        )
    if mode in ("clip_cov", "kl_cov"):
        logger.warning(
            "%s=%s picks tokens by the covariance of advantage and log-probability: the weights of %s change which tokens it "
            "picks, too",
            option,
            mode,
            estimator,
        )


def _check_sequence_parallel(config: DictConfig, signal: Signal) -> None:
    """verl's Ulysses exchange is inside its flash attention: any other attention would silently see one slice alone."""
    size, model = _sequence_parallel_size(config), config.actor_rollout_ref.model
    if size == 1:
        return

    def refuse(remedy: str) -> None:
        _refuse(config, f"{_ACTOR}.ulysses_sequence_parallel_size", remedy, size)

    if not works_with_sequence_parallel(signal):
        refuse(f"use 1: the method reads {NEEDED_WHOLE[signal.uses]}, of which each rank has a slice")
    if not signal.uses:
        return
    if not model.get("use_remove_padding", False):
        refuse(f"set {_MODEL}.use_remove_padding=true, or use 1")
    attention = OmegaConf.select(model, "override_config.attn_implementation", default=None) or "flash_attention_2"
    if not str(attention).startswith("flash_attention"):
        refuse(f"set {_MODEL}.override_config.attn_implementation={attention} to flash_attention_2, or use 1")


def _check_adapter(config: DictConfig) -> None:
    """verl shards embeddings and head of an untied model by name with FSDP2, and fails over PEFT's wrappers around them
    (``verl.utils.fsdp_utils._select_fsdp2_wrap_targets``)."""
    model = config.actor_rollout_ref.model
    tied = read_json(model.path, "config.json").get("tie_word_embeddings", False)
    if _lora_rank(model) == 0 or config.actor_rollout_ref.actor.strategy != "fsdp2" or tied:
        return
    named = [model.get("target_modules", None)]
    adapter = adapter_config(model)
    named += [adapter.get(name) for name in ("target_modules", "modules_to_save")]
    adapted = {name for names in named for name in ([names] if isinstance(names, str) else names or ())}
    unsupported = sorted(name for name in ("embed_tokens", "lm_head") if any(name in other for other in adapted))
    if unsupported:
        _refuse(
            config,
            f"{_ACTOR}.strategy",
            f"with a LoRA on {' and '.join(unsupported)} verl {VERL_VERSION} shards models with tied embeddings only; use "
            f"fsdp, or leave them out of {_MODEL}.target_modules",
        )


def _check_fused_kernels(config: DictConfig) -> None:
    """verl's fused forward reads the weight of the output embeddings, not the output of the module."""
    model = config.actor_rollout_ref.model
    if not model.get("use_fused_kernels", False):
        return
    option, strategy = f"{_MODEL}.use_fused_kernels", config.actor_rollout_ref.actor.strategy
    if strategy != "fsdp":
        # verl shards lm_head by itself there unless it is tied (verl/utils/fsdp_utils.py, _select_fsdp2_wrap_targets), and its
        # own fused forward then fails over the sharded weight.
        _refuse(config, option, f"set {_ACTOR}.strategy={strategy} to fsdp, or use false")
    if _sequence_parallel_size(config) > 1:
        _refuse(config, option, f"set {_ACTOR}.ulysses_sequence_parallel_size to 1, or use false")
    backend = f"{_MODEL}.fused_kernel_options.impl_backend"
    if OmegaConf.select(config, backend, default=None) not in KERNEL_BACKENDS:
        _refuse(config, backend, f"use {' or '.join(KERNEL_BACKENDS)}")
    adapted = model.get("target_modules", None) or ()
    adapted = [adapted] if isinstance(adapted, str) else adapted
    if _lora_rank(model) > 0 and any("lm_head" in name for name in adapted):
        _refuse(config, option, f"leave lm_head out of {_MODEL}.target_modules, or use false")


def _lora_rank(model: DictConfig) -> int:
    return max(model.get("lora_rank", 0), OmegaConf.select(model, "lora.rank", default=0))
