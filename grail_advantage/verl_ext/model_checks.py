"""Requirements of a method on the run's model and tokenizer.

Checked before Ray starts where these are on this machine; else by the trainer, after their download, before the first rollouts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from grail_advantage.answers.span import find_answer_spans
from grail_advantage.answers.tokenizers import check_round_trip
from grail_advantage.methods import method
from grail_advantage.model.activations import leaf_module
from grail_advantage.model.architecture import Architecture, architecture_of
from grail_advantage.model.neighbours import frequencies_by_longest, random_draws
from grail_advantage.signals.base import Signal
from grail_advantage.signals.saliency import SaliencySignal
from grail_advantage.verl_ext.settings import SHARE_FORWARD, shares_forward
from grail_advantage.verl_ext.zero_advantage_rules import ROUTER_LOSS, Obstacle

logger = logging.getLogger(__name__)

PACKED = "actor_rollout_ref.model.use_remove_padding"
_PATH = "actor_rollout_ref.model.path"
DRAWING = ("dropout", "pdrop", "layerdrop", "jitter")
"""Parts of the names of options by which models draw at random in training."""
OTHER_NEIGHBOURS = {"doge": "its attention is another one where a micro-batch needs no mask"}
"""Types of models whose forward depends on the micro-batch in a way that is not found from their code."""


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


def check_model(config: DictConfig, signal: Signal, folder: str | None = None) -> bool:
    """Refuse a model that the method cannot work with.

    Args:
        config: the run's.
        signal: its method.
        folder: where the model is; without, only a model on this machine is looked at.

    Returns:
        Whether a forward of this model may be shared (:func:`grail_advantage.verl_ext.settings.shares_forward`).

    Raises:
        ValueError: naming the option and the remedy.
    """
    if not signal.uses:
        return True
    architecture = _architecture(config, folder)
    path = f"actor_rollout_ref.model.path={config.actor_rollout_ref.model.path}"
    if architecture is not None:
        _check_packing(config, architecture, path)
    if not isinstance(signal, SaliencySignal):
        return True
    if architecture is None:
        if folder is not None and OmegaConf.select(config, SHARE_FORWARD) is True and shares_forward(config, signal):
            raise ValueError(
                f"{SHARE_FORWARD}=True needs a model whose code can be looked at, and that of actor_rollout_ref.model.path="
                f"{config.actor_rollout_ref.model.path} cannot (see the log); use auto"
            )
        return folder is None
    _check_leaf(config, signal, architecture, path)
    # Fused kernels put out log-probabilities by verl's own code, whatever the model does with its logits.
    if architecture.plain_logits or config.actor_rollout_ref.model.get("use_fused_kernels", False):
        return True
    if shares_forward(config, signal):
        message = f"{path} scales or caps its logits after the output embeddings, where a shared forward cannot follow"
        if OmegaConf.select(config, SHARE_FORWARD) is True:
            raise ValueError(f"{SHARE_FORWARD}=True does not work with this model: {message}; use auto")
        if folder is not None:
            logger.warning("%s: each step runs a pass of its own (%s=auto)", message, SHARE_FORWARD)
    return False


def _architecture(config: DictConfig, folder: str | None) -> Architecture | None:
    model = config.actor_rollout_ref.model
    trusted = model.get("trust_remote_code", False)
    try:
        config = AutoConfig.from_pretrained(
            folder or model.path, trust_remote_code=trusted, local_files_only=folder is None
        )
        return architecture_of(config, trust_remote_code=trusted)
    except Exception as error:
        # Not on this machine, or code that needs more than the meta device: the run itself will show it.
        if folder is not None:
            logger.warning(
                "the code of actor_rollout_ref.model.path=%s cannot be looked at before the run (%s: %s): no forward is shared",
                model.path,
                type(error).__name__,
                error,
            )
        return None


def _check_packing(config: DictConfig, architecture: Architecture, path: str) -> None:
    """Refuse packed rows that the model would not keep apart, neither here nor in verl's update."""
    reason = _mixes_packed_rows(config, architecture)
    if reason is not None:
        name = type(architecture.copy).__name__
        raise ValueError(
            f"{PACKED}=True does not work with {path}: {name} has {reason}; set {PACKED}=false, or use a method without a pass"
        )


def _mixes_packed_rows(config: DictConfig, architecture: Architecture) -> str | None:
    """What lets a packed row see the one before it; ``None`` where rows are not packed, or are kept apart."""
    model = config.actor_rollout_ref.model
    if not model.get("use_remove_padding", False):
        return None
    attention = str(OmegaConf.select(model, "override_config.attn_implementation", default=None) or "flash_attention_2")
    if architecture.states:
        return f"layers of the type {', '.join(architecture.states)}, whose state runs on into the next packed row"
    if "flash" not in attention and not architecture.masks_packed_rows:
        return f"a mask for the attention {attention} that lets a row see the packed rows before it"
    return None


def neighbour_obstacles(config: DictConfig, model: PretrainedConfig) -> Iterator[Obstacle]:
    """What makes the gradient of a response depend on the other responses of its micro-batch.

    Args:
        config: the run's.
        model: the configuration that verl loads the model with.
    """
    settings = config.actor_rollout_ref.model
    known = model.to_dict()
    if known.get("output_router_logits", False):
        yield "output_router_logits=True of the model", ROUTER_LOSS
    named = list(_draws_by_name(known))
    yield from named
    adapter, path = adapter_config(settings), settings.get("lora_adapter_path", None)
    yield from _draws_by_name(adapter)
    if path and not adapter:
        yield f"lora_adapter_path={path}", "its configuration cannot be read here, so that it may have dropout"
    if model.model_type in OTHER_NEIGHBOURS:
        yield f"model_type={model.model_type}", OTHER_NEIGHBOURS[model.model_type]
    if not type(model).__module__.startswith("transformers."):
        yield f"{_PATH}={settings.path}", "nothing is known of a model with code of its own"
        return
    try:
        architecture = architecture_of(model)
        mixing = _mixes_packed_rows(config, architecture)
        if mixing is not None:
            yield f"{PACKED}=True", f"the model has {mixing}"
        for kind in frequencies_by_longest(architecture.copy, _longest_response(config)):
            yield (
                f"rope_type={kind} of the model",
                "the longest response of a micro-batch chooses the frequencies of all",
            )
        draws = [] if named else random_draws(architecture.copy)
    except Exception as error:  # whatever the model's code raises
        reason = f"its code cannot be followed without weights ({type(error).__name__}: {error})"
        yield f"{_PATH}={settings.path}", reason
        return
    if draws:
        yield f"{_PATH}={settings.path}", f"the model draws at random in training, with torch's {', '.join(draws)}"


def _draws_by_name(options: Mapping[str, Any]) -> Iterator[Obstacle]:
    """Options by which a model, or its adapter, draws at random."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _draws_by_name(value)
        elif any(part in str(name) for part in DRAWING) and isinstance(value, int | float) and value > 0:
            yield f"{name}={value} of the model", "other responses in a micro-batch draw other random numbers"


def _longest_response(config: DictConfig) -> int:
    """Tokens of prompt and response, the most that there can be."""
    rollout = config.actor_rollout_ref.rollout
    longest = rollout.prompt_length + rollout.response_length
    return min(longest, rollout.max_model_len) if rollout.get("max_model_len", None) else longest


def _check_leaf(config: DictConfig, signal: SaliencySignal, architecture: Architecture, path: str) -> None:
    if architecture.copy.get_output_embeddings() is None:
        raise ValueError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} differentiates logits, and {path} "
            f"({type(architecture.copy).__name__}) has no output embeddings; use a method without a pass "
            "(docs/reference_methods.md)"
        )
    try:
        leaf_module(architecture.copy, signal.leaf)
    except ValueError as error:
        section = method(config.algorithm.adv_estimator).section
        raise ValueError(f"algorithm.{section}.leaf={signal.leaf} does not work with {path}: {error}") from error


def adapter_config(model: DictConfig) -> dict[str, Any]:
    """The configuration of ``actor_rollout_ref.model.lora_adapter_path``; empty without one."""
    return read_json(model.get("lora_adapter_path", None), "adapter_config.json")


def read_json(folder: str | None, name: str) -> dict[str, Any]:
    """A file of a local folder; empty where there is none, as with a model that is still to be downloaded."""
    path = Path(folder or "") / name
    return json.loads(path.read_text(encoding="utf-8")) if folder and path.is_file() else {}
