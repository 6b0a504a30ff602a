"""Requirements of a method on the run's model and tokenizer.

Checked before Ray starts where these are on this machine; else by the trainer, after their download, before the first rollouts.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig, PreTrainedTokenizerBase

from grail_advantage.answers.span import find_answer_spans
from grail_advantage.answers.tokenizers import check_round_trip
from grail_advantage.methods import method
from grail_advantage.model.activations import leaf_module
from grail_advantage.model.architecture import Architecture, architecture_of
from grail_advantage.signals.base import Signal
from grail_advantage.signals.saliency import SaliencySignal
from grail_advantage.verl_ext.settings import SHARE_FORWARD, shares_forward

logger = logging.getLogger(__name__)


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
    model = config.actor_rollout_ref.model
    if not model.get("use_remove_padding", False):
        return
    option, name = "actor_rollout_ref.model.use_remove_padding", type(architecture.copy).__name__
    attention = str(OmegaConf.select(model, "override_config.attn_implementation", default=None) or "flash_attention_2")
    if architecture.states:
        reason = f"layers of the type {', '.join(architecture.states)}, whose state runs on into the next packed row"
    elif "flash" not in attention and not architecture.masks_packed_rows:
        reason = f"a mask for the attention {attention} that lets a row see the packed rows before it"
    else:
        return
    raise ValueError(
        f"{option}=True does not work with {path}: {name} has {reason}; set {option}=false, or use a method without a pass"
    )


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
