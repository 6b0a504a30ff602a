"""Refusals, at construction, of arguments that token weights in TRL do not work with, with the name and the fix."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

from accelerate.utils import ParallelismConfig
from datasets import Dataset
from transformers import ProcessorMixin
from trl import GRPOConfig, GRPOTrainer

from grail_advantage.answers.tokenizers import check_round_trip
from grail_advantage.batch import ENTROPY, EXAMPLES, FIELD, GROUPS, OLD_LOG_PROBS, TOKENS
from grail_advantage.model.hugging_face import check_no_virtual_tokens
from grail_advantage.model.neighbours import drawing_rows
from grail_advantage.signals.base import LOGITS, SALIENCY, Signal
from grail_advantage.trl_ext.patches import missing_methods

TESTED_TRL = "1.16.0"
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")
"""Losses of TRL that multiply every token's own ratio by its advantage."""
PROVIDED = frozenset({OLD_LOG_PROBS, ENTROPY, GROUPS, EXAMPLES, TOKENS})
"""Names of :mod:`grail_advantage.batch` that this host can give a signal."""
IMAGE_COLUMNS = ("image", "images")


def check_trl(trainer_class: type, version: str) -> None:
    """Refuse a TRL whose trainer lacks private parts that token weights use (:mod:`grail_advantage.trl_ext.patches`).

    Raises:
        ValueError: naming the version and each part that is missing.
    """
    missing = missing_methods(trainer_class)
    if missing:
        raise ValueError(
            f"trl {version} is installed, whose GRPOTrainer lacks {', '.join(missing)}; token weights use "
            f"{'it' if len(missing) == 1 else 'them'}: run `pip install 'trl=={TESTED_TRL}'`"
        )


def check_arguments(given: Mapping[str, Any], signal: Signal) -> None:
    """Check the arguments of ``GRPOTrainer`` before it does anything with them.

    Args:
        given: by name; those that were left out are not in it.
        signal: the method.

    Raises:
        ValueError: naming the argument and the fix.
    """
    refuse = partial(_refuse, signal)
    unknown = sorted(word for word in signal.reads - PROVIDED if not word.startswith(FIELD))
    if unknown:
        raise ValueError(
            f"token_weights={signal.name!r} reads {', '.join(unknown)}, which are not to be had in TRL; use verl, "
            "or compute_token_weights in a loop of your own"
        )
    for name in ("tools", "rollout_func", "environment_factory"):
        if given.get(name):
            refuse(name, "...", "a response must be one stretch of the model's own tokens; leave it out")
    if isinstance(given.get("processing_class"), ProcessorMixin):
        _refuse_images(signal)
    config = given.get("args")
    if config is not None:
        _check_config(config, signal)
    _check_data(given.get("train_dataset"), signal)


def check_trainer(trainer: GRPOTrainer, signal: Signal) -> None:
    """Check the trainer once TRL has loaded the model and knows the processes.

    Raises:
        ValueError: naming the argument and the fix.
    """
    if isinstance(trainer.processing_class, ProcessorMixin):
        _refuse_images(signal)
    _check_config(trainer.args, signal)
    if trainer.is_fsdp_enabled:
        _refuse(signal, "fsdp", trainer.args.fsdp, "it is not tested yet; use DDP or DeepSpeed ZeRO-2")
    check_no_virtual_tokens(trainer.model)
    check_round_trip(trainer.processing_class, "processing_class")
    signal.check_tokenizer(trainer.processing_class)
    local_rows = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    if signal.whole_groups and trainer.accelerator.num_processes > 1 and local_rows % trainer.num_generations:
        raise ValueError(
            f"token_weights={signal.name!r} compares the responses of a prompt, which must be on one process: make "
            f"per_device_train_batch_size x steps_per_generation={local_rows} a multiple of "
            f"num_generations={trainer.num_generations}"
        )


def check_skipping(trainer: GRPOTrainer) -> None:
    """Refuse settings with which a response without an advantage trains, or changes what the others train.

    Raises:
        ValueError: naming the argument and the fix.
    """
    args = trainer.args
    drawn = drawing_rows(trainer.accelerator.unwrap_model(trainer.model))
    for applies, what in (
        (args.beta != 0, f"beta={args.beta}: its KL term trains them"),
        (trainer._entropy_bonus_enabled, "entropy_coef or use_adaptive_entropy: the entropy bonus trains them"),
        (args.top_entropy_quantile < 1, "top_entropy_quantile: their tokens count in the quantile"),
        (args.neftune_noise_alpha, f"neftune_noise_alpha={args.neftune_noise_alpha}: other responses draw other noise"),
        (trainer.aux_loss_enabled, "the router's loss, which trains them: set router_aux_loss_coef=0"),
        (drawn is not None, f"this model, in which responses depend on those beside them: {drawn}"),
    ):
        if applies:
            raise ValueError(f"skip_zero_advantage=True does not work with {what}; or set skip_zero_advantage=False")


def _check_config(config: GRPOConfig, signal: Signal) -> None:
    refuse = partial(_refuse, signal)
    if config.importance_sampling_level != "token":
        refuse(
            "importance_sampling_level",
            config.importance_sampling_level,
            "one ratio a response leaves of its token weights their sum alone; use 'token'",
        )
    if config.loss_type not in LOSSES:
        refuse("loss_type", config.loss_type, f"use one of {', '.join(LOSSES)}")
    if not config.temperature > 0:
        refuse("temperature", config.temperature, "use a temperature above 0")
    if config.fp16 and signal.uses in (SALIENCY, LOGITS):
        refuse("fp16", True, "the answer's gradients underflow; use bf16, or neither")
    if config.fsdp:
        refuse("fsdp", config.fsdp, "it is not tested yet; use DDP or DeepSpeed ZeRO-2")
    plugin = config.deepspeed_plugin
    if plugin is not None and plugin.zero_stage == 3:
        refuse("deepspeed", "ZeRO-3", "it is not tested yet; use ZeRO-1 or ZeRO-2")
    _check_parallelism(config.parallelism_config, refuse)
    if (EXAMPLES in signal.reads or signal.field_names) and config.remove_unused_columns:
        refuse("remove_unused_columns", True, f"it takes away {' and '.join(_columns(signal)) or 'columns'}; use False")


def _check_parallelism(parallelism: ParallelismConfig | None, refuse: partial[NoReturn]) -> None:
    for kind in ("tp", "cp", "sp"):
        if parallelism is not None and getattr(parallelism, f"{kind}_size", 1) > 1:
            refuse(f"parallelism_config.{kind}_size", getattr(parallelism, f"{kind}_size"), "use 1")


def _check_data(dataset: Any, signal: Signal) -> None:
    """Check a data set whose columns are known; the first batch of a stream is checked by the signal itself."""
    columns = getattr(dataset, "column_names", None)
    if not columns:
        return
    if any(name in columns for name in IMAGE_COLUMNS):
        _refuse_images(signal)
    for name in _columns(signal):
        if name not in columns:
            raise ValueError(
                f"token_weights={signal.name!r} reads the column {name}, which train_dataset lacks; its columns are "
                f"{', '.join(columns)}"
            )
    if EXAMPLES in signal.reads and isinstance(dataset, Dataset) and len(dataset):
        check_prompt(dataset[0]["prompt"], signal)


def _columns(signal: Signal) -> list[str]:
    """The columns of the data set that a method reads."""
    return [*(signal.columns if EXAMPLES in signal.reads else ()), *signal.field_names]


def check_prompt(prompt: Any, signal: Signal) -> None:
    """Refuse a prompt that a method which asks differently cannot change.

    Raises:
        ValueError: with the fix.
    """
    if isinstance(prompt, str):
        raise ValueError(
            f"token_weights={signal.name!r} asks again in other words, for which train_dataset's prompt must be a list of "
            "messages"
        )


def _refuse(signal: Signal, name: str, value: Any, remedy: str) -> NoReturn:
    raise ValueError(f"{name}={value!r} does not work with token_weights={signal.name!r}; {remedy}")


def _refuse_images(signal: Signal) -> NoReturn:
    raise ValueError(
        f"token_weights={signal.name!r} works with text alone; give a tokenizer as processing_class and a train_dataset "
        "without images"
    )
