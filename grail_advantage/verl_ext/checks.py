"""Start-up checks: rules on the settings, and what the machine, the tokenizer and the model say.

Whatever can be known on this machine is checked before Ray starts; the trainer checks the rest after its download, before the
first rollouts. Messages name the option and the remedy.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import cached_file

from grail_advantage.answers.span import find_answer_spans
from grail_advantage.answers.tokenizers import check_round_trip
from grail_advantage.methods import method, methods
from grail_advantage.model.activations import leaf_module
from grail_advantage.model.architecture import Architecture, architecture_of
from grail_advantage.model.neighbours import NOT_CAUSAL, frequencies_by_longest, mixing_rows, random_draws
from grail_advantage.model.patches import attention_is_told_of_rows
from grail_advantage.registry import RESERVED, NameTakenError, failure_message, failures
from grail_advantage.signals.base import Signal
from grail_advantage.signals.saliency import SaliencySignal
from grail_advantage.verl_cpu import checks as cpu_checks
from grail_advantage.verl_ext.rules import FUSED, ROUTER_LOSS, Obstacle, check_rules, shares_forward
from grail_advantage.verl_ext.settings import (
    METHOD,
    MODEL,
    PACKED,
    SHARE,
    TRAINER_MODES,
    TRAINER_MODULE,
    TRAINER_PREFIX,
    Settings,
    algorithm_sections,
    import_trainer_module,
)

logger = logging.getLogger(__name__)

VERL_VERSION = "0.9.1"
ANY_VERL = "GRAIL_ADVANTAGE_ANY_VERL"
"""Environment variable: 1 lets another version of verl through."""
PATH, ADAPTER = f"{MODEL}.path", f"{MODEL}.lora_adapter_path"
DRAWING = ("dropout", "pdrop", "layerdrop", "jitter")
"""Parts of the names of options by which models draw at random in training."""


def check_config(config: DictConfig) -> Settings:
    """Check the resolved configuration of a run with a method of this project.

    Raises:
        ValueError: naming the option and the remedy.
    """
    tokenizer = check_start(config)
    settings = Settings.parse(config)
    check_rules(settings)
    if tokenizer is not None:
        check_tokenizer(tokenizer, settings.signal)
    check_model(settings)
    return settings


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
            "(tested versions: docs/works_with.md)"
        )
    warnings.warn(f"{message}; {ANY_VERL}=1 lets it through, and nothing is known about it", stacklevel=2)


def check_estimator(name: str) -> None:
    """Refuse an unknown estimator, plug-ins that take a name in use, and methods with the name of an estimator of verl's.

    Raises:
        ValueError: naming the fault, and the plug-ins that failed to import.
    """
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    from grail_advantage.verl_ext.patches import MADE_HERE, entry_is_wrapped

    for plugin, error in failures().items():
        if isinstance(error, NameTakenError):
            raise ValueError(f"the plug-in {plugin} takes a name that is taken: {error}")
        logger.warning("the plug-in %s failed to import: %s: %s", plugin, type(error).__name__, error)
    if not entry_is_wrapped():
        raise ValueError(
            "the plug-in of this package did not load with verl, so that no worker would know its methods; unset "
            "VERL_USE_EXTERNAL_PLUGINS or add grail_advantage to it, and install this project with `pip install -e .`"
        )
    for known in methods():
        if not getattr(ADV_ESTIMATOR_REGISTRY[known], MADE_HERE, False):
            raise ValueError(
                f"the method {known} has the name of one of verl's own estimators, which would run in its place; register it "
                "under another name"
            )
    if name not in ADV_ESTIMATOR_REGISTRY:
        known = ", ".join(sorted(ADV_ESTIMATOR_REGISTRY))
        raise ValueError(f"{METHOD}={name!r} is unknown; choose one of {known}{failure_message()}")


def check_names(config: DictConfig) -> None:
    """Refuse names close to an option of this project that nothing reads: a ``+`` accepts any name.

    Raises:
        ValueError: naming the one that exists.
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


def trainer_kind(config: DictConfig) -> str:
    """verl's name for the kind of trainer: its own mode, or that of the class which a user registered."""
    mode, option = config.trainer.v1.trainer_mode, "trainer.v1.trainer_mode"
    if mode in TRAINER_MODES:
        return mode
    import_trainer_module(OmegaConf.select(config, TRAINER_MODULE))
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    from grail_advantage.verl_ext.patches import base_mode

    weighted = config.algorithm.adv_estimator in methods()
    name = f"{TRAINER_PREFIX}{mode}" if weighted else mode
    if name in TRAINER_REGISTRY:
        return base_mode(TRAINER_REGISTRY[name])
    if not weighted:
        return mode
    remedy = (
        f"use {mode.removeprefix(TRAINER_PREFIX)}: the start-up adds the prefix"
        if mode.startswith(TRAINER_PREFIX)
        else f"use {' or '.join(TRAINER_MODES)}; or, for a trainer of your own, register a class with the bases "
        f"(TokenWeightTrainer, YourTrainer) as {name}, in a module that {TRAINER_MODULE} names (docs/own_trainer.md)"
    )
    raise ValueError(f"{option}={mode} does not work with {METHOD}={config.algorithm.adv_estimator}; {remedy}")


def _local_tokenizer(model: DictConfig) -> PreTrainedTokenizerBase | None:
    path = model.get("tokenizer_path", None) or model.path
    try:
        if cached_file(path, "tokenizer_config.json", local_files_only=True) is None:
            return None
        trusted = model.get("trust_remote_code", False)
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trusted)
    except (OSError, ValueError):  # not in the cache, a broken download, or a file system that verl copies from
        return None


def check_text(tokenizer: PreTrainedTokenizerBase, model: DictConfig) -> None:
    """Refuse a tokenizer that text does not survive (:mod:`grail_advantage.answers.tokenizers`).

    Args:
        tokenizer: as verl loads it.
        model: ``actor_rollout_ref.model``.

    Raises:
        ValueError: naming the remedy.
    """
    option = "tokenizer_path" if model.get("tokenizer_path", None) else "path"
    path = model[option]
    check_round_trip(
        tokenizer,
        f"actor_rollout_ref.model.{option}={path}",
        f"transformers loads it so; write a repaired one with `python3 -m grail_advantage.answers.tokenizers {path} FOLDER`, "
        "then set actor_rollout_ref.model.tokenizer_path=FOLDER",
    )


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, signal: Signal) -> None:
    """Refuse a tokenizer that the method cannot work with, or whose tokens hide the answer.

    Raises:
        ValueError: naming the remedy.
    """
    signal.check_tokenizer(tokenizer)
    find_answer_spans([], tokenizer, signal.span)


def check_model(settings: Settings, folder: str | None = None) -> bool:
    """Refuse a model that the method cannot work with.

    Args:
        settings: the run's.
        folder: where the model is; without, only a model on this machine is looked at.

    Returns:
        Whether a forward of this model may be shared (:func:`grail_advantage.verl_ext.rules.shares_forward`).

    Raises:
        ValueError: naming the option and the remedy.
    """
    if not settings.signal.uses:
        return True
    architecture, path = _architecture(settings, folder), f"{PATH}={settings[PATH]}"
    mixing = _mixes_packed_responses(settings, architecture) if architecture is not None else None
    if mixing is not None:
        raise ValueError(
            f"{PACKED}=True does not work with {path}: {type(architecture.copy).__name__} has {mixing}; set {PACKED}=false, or "
            "use a method without a pass"
        )
    if not isinstance(settings.signal, SaliencySignal):
        return True
    shares = shares_forward(settings)
    if architecture is None:
        if folder is not None and shares and settings.share_forward is True:
            raise ValueError(
                f"{SHARE}=True needs a model whose code can be looked at, and that of {path} cannot (see the log); use auto"
            )
        return folder is None
    _check_activation(settings, architecture, path)
    against = _against_sharing(settings, architecture)
    if against is not None and shares:
        message = f"{path} {against}"
        if settings.share_forward is True:
            raise ValueError(f"{SHARE}=True does not work with this model: {message}; use auto")
        if folder is not None:
            logger.warning("%s: each step runs a pass of its own (%s=auto)", message, SHARE)
    return against is None


def _against_sharing(settings: Settings, architecture: Architecture) -> str | None:
    mixing = mixing_rows(architecture.copy, settings.longest)
    if mixing is not None:
        return f"gives a response other log-probabilities beside the responses of a shared forward: {mixing}"
    # Fused kernels put out log-probabilities by verl's own code, whatever the model does with its logits.
    if architecture.plain_logits or settings[FUSED]:
        return None
    return "scales or caps its logits after the output embeddings, where a shared forward cannot follow"


def _architecture(settings: Settings, folder: str | None) -> Architecture | None:
    """``None`` for a model that is not on this machine, or whose code needs more than the meta device."""
    trusted = bool(settings[f"{MODEL}.trust_remote_code"])
    try:
        config = AutoConfig.from_pretrained(
            folder or settings[PATH], trust_remote_code=trusted, local_files_only=folder is None
        )
        return architecture_of(config, trust_remote_code=trusted)
    except Exception as error:  # whatever the model's code raises
        if folder is not None:
            logger.warning(
                "the code of %s=%s cannot be looked at before the run (%s: %s): no forward is shared",
                *(PATH, settings[PATH], type(error).__name__, error),
            )
        return None


def _mixes_packed_responses(settings: Settings, architecture: Architecture) -> str | None:
    """What lets a packed response see the one before it; ``None`` where they are not packed, or are kept apart."""
    if not settings[PACKED]:
        return None
    if architecture.states:
        return f"layers of the type {', '.join(architecture.states)}, whose state runs on into the next packed row"
    if "flash" in settings.attention:
        if not attention_is_told_of_rows(architecture.copy):
            return f"code that does not tell {settings.attention} where a packed row begins, so that it sees those before it"
    elif not architecture.masks_packed_rows:
        return f"a mask for the attention {settings.attention} that lets a row see the packed rows before it"
    return None


def _check_activation(settings: Settings, architecture: Architecture, path: str) -> None:
    if architecture.copy.get_output_embeddings() is None:
        raise ValueError(
            f"{METHOD}={settings.method} differentiates logits, and {path} ({type(architecture.copy).__name__}) has no output "
            "embeddings; use a method without a pass (docs/reference_methods.md)"
        )
    try:
        leaf_module(architecture.copy, settings.signal.leaf)
    except ValueError as error:
        option = f"algorithm.{method(settings.method).section}.leaf"
        raise ValueError(f"{option}={settings.signal.leaf} does not work with {path}: {error}") from error


def neighbour_obstacles(settings: Settings, model: PretrainedConfig) -> Iterator[Obstacle]:
    """What makes the gradient of a response depend on the other responses of its micro-batch.

    Args:
        settings: the run's.
        model: the configuration that verl loads the model with.
    """
    known = model.to_dict()
    if known.get("output_router_logits", False):
        yield "output_router_logits=True of the model", ROUTER_LOSS
    named = list(_draws_by_name(known))
    yield from named
    adapter = read_json(settings[ADAPTER], "adapter_config.json")
    yield from _draws_by_name(adapter)
    if settings[ADAPTER] and not adapter:
        yield (
            f"lora_adapter_path={settings[ADAPTER]}",
            "its configuration cannot be read here, so that it may have dropout",
        )
    if model.model_type in NOT_CAUSAL:
        yield f"model_type={model.model_type}", "its tokens see those after them where a micro-batch needs no mask"
    path = f"{PATH}={settings[PATH]}"
    if not type(model).__module__.startswith("transformers."):
        yield path, "nothing is known of a model with code of its own"
        return
    try:
        architecture = architecture_of(model)
        mixing = _mixes_packed_responses(settings, architecture)
        if mixing is not None:
            yield f"{PACKED}=True", f"the model has {mixing}"
        for kind in frequencies_by_longest(architecture.copy, settings.longest):
            yield (
                f"rope_type={kind} of the model",
                "the longest response of a micro-batch chooses the frequencies of all",
            )
        draws = [] if named else random_draws(architecture.copy)
    except Exception as error:  # whatever the model's code raises
        yield path, f"its code cannot be followed without weights ({type(error).__name__}: {error})"
        return
    if draws:
        yield path, f"the model draws at random in training, with torch's {', '.join(draws)}"


def _draws_by_name(options: Mapping[str, Any]) -> Iterator[Obstacle]:
    """Options by which a model, or its adapter, draws at random."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _draws_by_name(value)
        elif any(part in str(name) for part in DRAWING) and isinstance(value, int | float) and value > 0:
            yield f"{name}={value} of the model", "other responses in a micro-batch draw other random numbers"


def read_json(folder: str | None, name: str) -> dict[str, Any]:
    """A file of a local folder; empty where there is none, as with a model that is still to be downloaded."""
    path = Path(folder or "") / name
    return json.loads(path.read_text(encoding="utf-8")) if folder and path.is_file() else {}
