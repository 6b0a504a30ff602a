"""Start-up checks: what cannot work is refused before Ray starts, with the option's name and the way out."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from grail_advantage.registry import NameTakenError, failures, failures_said, methods
from grail_advantage.signals.base import LOGITS, SALIENCY, SEQUENCES, Signal
from grail_advantage.signals.oar import OarConfig
from grail_advantage.tokenizers import load_tokenizer
from grail_advantage.verl_cpu import checks as cpu_checks
from grail_advantage.verl_ext.estimators import WEIGHS_TOKENS
from grail_advantage.verl_ext.model_checks import check_model, check_tokenizer
from grail_advantage.verl_ext.settings import (
    TRAINER_MODULE,
    check_names,
    check_share_forward,
    dump_options,
    import_trainer_module,
    signal_of,
    watchdog_options,
)
from grail_advantage.verl_ext.support import (
    NEEDED,
    works_with_bypass,
    works_with_fused_kernels,
    works_with_sequence_parallel,
)

logger = logging.getLogger(__name__)

VERL_VERSION = "0.9.1"
ANY_VERL = "GRAIL_ADVANTAGE_ANY_VERL"
"""Environment variable: 1 lets another version of verl through."""
STRATEGIES = ("fsdp", "fsdp2")
KERNEL_BACKENDS = ("torch", "triton")
WITHOUT_INPUT = ("optimal_token_baseline", "tir_optimal_token_baseline")
"""verl's estimators that its v1 trainer does not give what they need."""
TRAINER_MODES = ("sync", "colocate_async", "separate_async")


def check_config(config: DictConfig) -> None:
    """Check a run's resolved configuration.

    Runs with verl's own estimators are only checked for the verl version, its v1 trainer, the estimator's name, the tokenizer
    and the use of the rollout's log-probabilities.

    Raises:
        ValueError: naming the option and the remedy.
    """
    check_verl_version(version("verl"))
    if not config.trainer.use_v1:
        raise ValueError(
            f"trainer.use_v1={config.trainer.use_v1}: token weights, and the entry point of this project, need verl's v1 "
            "trainer; use true, or see docs/own_trainer.md on the legacy trainer"
        )
    if os.environ.get("VERL_PLATFORM") == "cpu":
        cpu_checks.check_config(config, _base_mode(config))
    check_trl()
    check_names(config)
    watchdog_options(config)
    check_estimator(config.algorithm.adv_estimator)
    tokenizer = _check_tokenizer(config.actor_rollout_ref.model)
    if config.algorithm.adv_estimator not in methods():
        _check_rollout_log_probs(config)
        return
    signal = signal_of(config.algorithm)
    check_share_forward(config, signal)
    dump_options(config)
    _check_reads(config, signal)
    _check_uses(config, signal)
    _check_layout(config, signal)
    _check_rollout_log_probs(config)
    if tokenizer is not None:
        check_tokenizer(tokenizer, signal)
    check_model(config, signal)


def check_verl_version(found: str) -> None:
    """The extension follows verl's internals, so another version is refused unless somebody wants to try it."""
    if found.split("+")[0] == VERL_VERSION:
        return
    said = f"verl {found} is installed, but this extension follows verl {VERL_VERSION}"
    if os.environ.get(ANY_VERL) != "1":
        raise ValueError(
            f"{said}; run `pip install verl=={VERL_VERSION}`, or set {ANY_VERL}=1 to try it at your own risk "
            "(tested versions: docs/compatibility.md)"
        )
    warnings.warn(f"{said}; {ANY_VERL}=1 lets it through, and nothing is known about it", stacklevel=2)


def check_trl() -> None:
    """Refuse a TRL beside verl that verl's workers fail over (``verl/models/transformers/monkey_patch.py``, line 354).

    Raises:
        ValueError: naming the way out.
    """
    found = find_spec("trl")
    if found is None or found.origin is None:
        return
    folder, name = Path(found.origin).parent, "AutoModelForCausalLMWithValueHead"
    places = (folder / "__init__.py", folder / "experimental" / "ppo" / "__init__.py")
    if not any(place.is_file() and name in place.read_text(encoding="utf-8") for place in places):
        raise ValueError(
            f"verl {VERL_VERSION} imports {name} from any TRL that it finds, and the one in {folder} has no such class, so "
            "that verl's workers would fail; take TRL out of this environment (docs/trl.md)"
        )


def check_estimator(name: str) -> None:
    """Refuse an estimator that is not there, and methods that could not be registered as what they are.

    Raises:
        ValueError: naming what is wrong, and the plug-ins that failed to import.
    """
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    for plugin, error in failures().items():
        if isinstance(error, NameTakenError):
            raise ValueError(f"the plug-in {plugin} takes a name that is taken: {error}")
        logger.warning("the plug-in %s failed to import: %s: %s", plugin, type(error).__name__, error)
    if "grail_advantage.verl_ext.plugin" in sys.modules:
        sys.modules["grail_advantage.verl_ext.plugin"].register_estimators()
    for method in methods():
        registered = ADV_ESTIMATOR_REGISTRY.get(method)
        if registered is None:
            raise ValueError(
                f"the estimator {method} is not registered with verl: the plug-in of this package did not load; unset "
                "VERL_USE_EXTERNAL_PLUGINS or add grail_advantage to it, and install this project with `pip install -e .`"
            )
        if not getattr(registered, WEIGHS_TOKENS, False):
            raise ValueError(
                f"the method {method} has the name of one of verl's own estimators, which would run in its place; register it "
                "under another name"
            )
    if name not in ADV_ESTIMATOR_REGISTRY:
        known = ", ".join(sorted({*ADV_ESTIMATOR_REGISTRY} - {*WITHOUT_INPUT}))
        raise ValueError(f"algorithm.adv_estimator={name!r} is unknown; choose one of {known}{failures_said()}")
    # PPOTrainer._compute_advantage fetches fixed fields, and this one is not among them.
    if name in WITHOUT_INPUT:
        raise ValueError(
            f"algorithm.adv_estimator={name} needs sum_pi_squared, which the v1 trainer of verl {VERL_VERSION} does not hand "
            "to it, so that the run would fail after its first rollouts; use grpo"
        )


def _check_tokenizer(model: DictConfig) -> PreTrainedTokenizerBase | None:
    """Text must survive the tokenizer. One that is still to be downloaded is looked at once it is there, by the trainer."""
    path = model.get("tokenizer_path", None) or model.path
    options = {"local_files_only": True, "trust_remote_code": model.get("trust_remote_code", False)}
    try:
        here = cached_file(path, "tokenizer_config.json", local_files_only=True)
    except (OSError, ValueError):  # not in the cache, or on a file system that verl copies from
        return None
    if here is None:
        return None
    try:
        return load_tokenizer(path, **options)
    except OSError:  # a download that broke off
        return None


def _check_rollout_log_probs(config: DictConfig) -> None:
    """What compares the rollout's log-probabilities with the trainer's needs both over the same tokens.

    vLLM gives them after all sampling options (``processed_logprobs``), and so over the tokens that ``top_k`` and ``top_p``
    leave; the trainer's softmax is over the whole vocabulary. With equal weights, the ratio of the two is then not 1.
    """
    correction = config.algorithm.get("rollout_correction", None) or {}
    used = next((name for name in ("bypass_mode", "rollout_is", "rollout_rs") if correction.get(name)), None)
    if used is None:
        return
    rollout = config.actor_rollout_ref.rollout

    def refuse(option: str, remedy: str) -> None:
        raise ValueError(
            f"actor_rollout_ref.rollout.{option}={rollout.get(option)} does not work with "
            f"algorithm.rollout_correction.{used}={correction[used]}; {remedy}"
        )

    if not rollout.calculate_log_probs:
        refuse("calculate_log_probs", "use true: verl has nothing to correct with otherwise")
    if rollout.name == "vllm" and str(rollout.get("logprobs_mode", None)).startswith("raw"):
        if rollout.temperature != 1:
            refuse(
                "temperature", "vLLM's raw log-probabilities are those of temperature 1; use it, or processed_logprobs"
            )
        return
    remedy = "the rollout's log-probabilities are then not those of the trainer's full softmax; use "
    if rollout.top_k > 0:
        refuse("top_k", f"{remedy}-1")
    if rollout.top_p < 1:
        refuse("top_p", f"{remedy}1.0")


def _refuse(config: DictConfig, option: str, value: Any, remedy: str) -> None:
    estimator = config.algorithm.adv_estimator
    raise ValueError(f"{option}={value} does not work with algorithm.adv_estimator={estimator}; {remedy}")


def _check_layout(config: DictConfig, signal: Signal) -> None:
    actor = config.actor_rollout_ref.actor
    refuse = partial(_refuse, config)
    if actor.strategy not in STRATEGIES:
        refuse("actor_rollout_ref.actor.strategy", actor.strategy, f"use {' or '.join(STRATEGIES)}")
    if config.actor_rollout_ref.rollout.n < 2:
        refuse(
            "actor_rollout_ref.rollout.n",
            config.actor_rollout_ref.rollout.n,
            "a group of one has no relative advantage; use 2 or more",
        )
    if _base_mode(config) == "separate_async":
        _check_separate_async(config)
    sp_size = _sequence_parallel_size(config)
    if sp_size > 1:
        _check_sequence_parallel(config, signal, sp_size, refuse)
    _check_adapter(config, refuse)
    _check_fused_kernels(config, refuse)
    precision = OmegaConf.select(actor, "fsdp_config.mixed_precision.param_dtype", default=None)
    if signal.uses in (SALIENCY, LOGITS) and str(precision) in ("fp16", "float16", "16"):
        refuse(
            "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype",
            precision,
            "use bf16 or fp32: the answer's gradients underflow in fp16",
        )
    rollout = config.actor_rollout_ref.rollout
    if not rollout.temperature > 0:
        refuse("actor_rollout_ref.rollout.temperature", rollout.temperature, "use a temperature above 0")


def _sequence_parallel_size(config: DictConfig) -> int:
    return max(
        OmegaConf.select(config.actor_rollout_ref.actor, name, default=None) or 1
        for name in ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size")
    )


def _base_mode(config: DictConfig) -> str:
    """Which of verl's kinds of trainer this is: its own mode, or that of the class which somebody registered."""
    mode = config.trainer.v1.trainer_mode
    if mode in TRAINER_MODES:
        return mode
    import_trainer_module(config)
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    from grail_advantage.verl_ext.trainer_modes import TRAINER_PREFIX, base_mode

    weighted = config.algorithm.adv_estimator in methods()
    name = f"{TRAINER_PREFIX}{mode}" if weighted else mode
    if name in TRAINER_REGISTRY:
        return base_mode(TRAINER_REGISTRY[name])
    if weighted and mode.startswith(TRAINER_PREFIX):
        plain = mode.removeprefix(TRAINER_PREFIX)
        _refuse(config, "trainer.v1.trainer_mode", mode, f"use {plain}: the prefix is put there by the start-up")
    if weighted:
        _refuse(
            config,
            "trainer.v1.trainer_mode",
            mode,
            f"use {' or '.join(TRAINER_MODES)}; or, for a trainer of your own, register a class with the bases "
            f"(TokenWeightTrainer, YourTrainer) as {name}, in a module that {TRAINER_MODULE} names (docs/own_trainer.md)",
        )
    return mode


def _check_reads(config: DictConfig, signal: Signal) -> None:
    """What a method reads must be there, and fine enough."""
    bypass = OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode", default=False)
    if bypass and not works_with_bypass(signal):
        _refuse(
            config,
            "algorithm.rollout_correction.bypass_mode",
            True,
            "use false: the method reads the entropy, which verl computes with the old log-probabilities",
        )
    actor = config.actor_rollout_ref.actor
    half = str(OmegaConf.select(actor, "fsdp_config.mixed_precision.param_dtype", default="bf16")) in (
        "bf16",
        "bfloat16",
    )
    if isinstance(signal, OarConfig) and signal.uses == LOGITS and half:
        logger.warning(
            "algorithm.adv_estimator=%s compares two forwards that differ by noise of %s, most of which bf16 rounds away: its "
            "scores are then about as far from float32's as with another seed (docs/gpu.md). "
            "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32 keeps them, at the price of a float32 run",
            config.algorithm.adv_estimator,
            f"noise_std={signal.noise_std:g}",
        )
    if signal.ranks_entropy and half and not actor.get("entropy_from_logits_with_chunking", False):
        # Without chunks verl takes the entropy in the logits' own precision: a few dozen distinct values.
        _refuse(
            config,
            "actor_rollout_ref.actor.entropy_from_logits_with_chunking",
            False,
            "use true: the method ranks tokens by entropy, which is coarse in bf16 without",
        )


def _check_uses(config: DictConfig, signal: Signal) -> None:
    """Fused kernels, which give out log-probabilities alone, and the room that made-up sequences need."""
    actor = config.actor_rollout_ref.actor
    fused = config.actor_rollout_ref.model.get("use_fused_kernels", False)
    if fused and not works_with_fused_kernels(signal):
        _refuse(
            config,
            "actor_rollout_ref.model.use_fused_kernels",
            True,
            f"use false: the method reads {NEEDED[signal.uses]}, which they do not give out",
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    if signal.uses == SEQUENCES and actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu < longest:
        _refuse(
            config,
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
            actor.ppo_max_token_len_per_gpu,
            f"a sequence of data.max_prompt_length + data.max_response_length = {longest} tokens must fit; raise it to "
            "at least that, or shorten the responses",
        )


def _check_sequence_parallel(
    config: DictConfig, signal: Signal, sp_size: int, refuse: Callable[[str, Any, str], None]
) -> None:
    """verl's Ulysses exchange sits inside its flash attention: any other attention would silently see one slice alone."""
    option = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    model = config.actor_rollout_ref.model
    if not works_with_sequence_parallel(signal):
        refuse(option, sp_size, f"use 1: the method reads {NEEDED[signal.uses]}, of which each rank has a slice")
    if not signal.uses:
        return
    if not model.get("use_remove_padding", False):
        refuse(option, sp_size, "set actor_rollout_ref.model.use_remove_padding=true, or use 1")
    attention = OmegaConf.select(model, "override_config.attn_implementation", default=None) or "flash_attention_2"
    if not str(attention).startswith("flash_attention"):
        refuse(
            option,
            sp_size,
            f"set actor_rollout_ref.model.override_config.attn_implementation={attention} to flash_attention_2, or use 1",
        )


def _check_adapter(config: DictConfig, refuse: Callable[[str, Any, str], None]) -> None:
    """verl shards embeddings and head of an untied model by name with FSDP2, and fails over PEFT's wrappers around them
    (``verl.utils.fsdp_utils._select_fsdp2_wrap_targets``)."""
    model = config.actor_rollout_ref.model
    strategy = config.actor_rollout_ref.actor.strategy
    tied = _read_json(model.path, "config.json").get("tie_word_embeddings", False)
    if _lora_rank(model) == 0 or strategy != "fsdp2" or tied:
        return
    named = [model.get("target_modules", None)]
    adapter = _read_json(model.get("lora_adapter_path", None), "adapter_config.json")
    named += [adapter.get(name) for name in ("target_modules", "modules_to_save")]
    adapted = {name for names in named for name in ([names] if isinstance(names, str) else names or ())}
    found = sorted(name for name in ("embed_tokens", "lm_head") if any(name in other for other in adapted))
    if found:
        refuse(
            "actor_rollout_ref.actor.strategy",
            strategy,
            f"with a LoRA on {' and '.join(found)} verl {VERL_VERSION} shards models with tied embeddings only; use fsdp, or "
            "leave them out of actor_rollout_ref.model.target_modules",
        )


def _read_json(folder: str | None, name: str) -> dict[str, Any]:
    """A file of a local folder; empty where there is none, as with a model that is still to be downloaded."""
    path = Path(folder or "") / name
    return json.loads(path.read_text(encoding="utf-8")) if folder and path.is_file() else {}


def _check_fused_kernels(config: DictConfig, refuse: Callable[[str, Any, str], None]) -> None:
    """verl's fused forward reads the output embeddings' own weight, not what the module computes."""
    model = config.actor_rollout_ref.model
    if not model.get("use_fused_kernels", False):
        return
    option = "actor_rollout_ref.model.use_fused_kernels"
    strategy = config.actor_rollout_ref.actor.strategy
    if strategy != "fsdp":
        # verl shards lm_head by itself there unless it is tied (verl/utils/fsdp_utils.py, _select_fsdp2_wrap_targets), and its
        # own fused forward then fails over the sharded weight.
        refuse(option, True, f"set actor_rollout_ref.actor.strategy={strategy} to fsdp, or use false")
    if _sequence_parallel_size(config) > 1:
        refuse(option, True, "set actor_rollout_ref.actor.ulysses_sequence_parallel_size to 1, or use false")
    backend = OmegaConf.select(model, "fused_kernel_options.impl_backend", default=None)
    if backend not in KERNEL_BACKENDS:
        refuse(
            "actor_rollout_ref.model.fused_kernel_options.impl_backend", backend, f"use {' or '.join(KERNEL_BACKENDS)}"
        )
    adapted = model.get("target_modules", None) or ()
    adapted = [adapted] if isinstance(adapted, str) else adapted
    if _lora_rank(model) > 0 and any("lm_head" in name for name in adapted):
        refuse(option, True, "leave lm_head out of actor_rollout_ref.model.target_modules, or use false")


def _lora_rank(model: DictConfig) -> int:
    return max(model.get("lora_rank", 0), OmegaConf.select(model, "lora.rank", default=0))


def _check_separate_async(config: DictConfig) -> None:
    """What verl would find out after Ray has started, or not at all."""
    rollout = config.actor_rollout_ref.rollout
    actor = config.actor_rollout_ref.actor
    steps = config.trainer.v1.separate_async.parameter_sync_step

    def refuse(option: str, value: Any, remedy: str) -> None:
        raise ValueError(f"{option}={value} does not work with trainer.v1.trainer_mode=separate_async; {remedy}")

    if not config.actor_rollout_ref.get("hybrid_engine", True):
        # verl 0.9.1 fails over a line of its own log (trainer_separate_async.py, PPOTrainerSeparateAsync._setup).
        refuse("actor_rollout_ref.hybrid_engine", False, "use true: verl 0.9.1 does not start without")
    for option in ("nnodes", "n_gpus_per_node"):
        if not rollout.get(option) or rollout[option] < 1:
            refuse(
                f"actor_rollout_ref.rollout.{option}",
                rollout.get(option),
                "say how many devices the rollout gets of its own",
            )
    if rollout.checkpoint_engine.backend == "naive":
        refuse("actor_rollout_ref.rollout.checkpoint_engine.backend", "naive", "use nccl or another engine of verl's")
    if config.data.train_batch_size != steps * actor.ppo_mini_batch_size:
        refuse(
            "data.train_batch_size",
            config.data.train_batch_size,
            f"use trainer.v1.separate_async.parameter_sync_step ({steps}) times "
            f"actor_rollout_ref.actor.ppo_mini_batch_size ({actor.ppo_mini_batch_size})",
        )
    bypass = OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode", default=False)
    if OmegaConf.select(actor, "fsdp_config.param_offload", default=False) and steps > 1 and not bypass:
        # verl's DetachActorWorker keeps and puts back the parameters where they are, which with offload may not be where the
        # next forward takes them from.
        refuse(
            "actor_rollout_ref.actor.fsdp_config.param_offload",
            True,
            "set it false, or trainer.v1.separate_async.parameter_sync_step=1, or "
            "algorithm.rollout_correction.bypass_mode=true",
        )
