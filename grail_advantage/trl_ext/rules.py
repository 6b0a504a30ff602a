"""With what TRL's trainer is refused or warned of: settings with which a number would silently be another than somebody
thinks. A setting that ends a run by itself is in no table."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from packaging.version import Version
from torch import nn
from transformers import ProcessorMixin
from trl import GRPOTrainer

from grail_advantage.answers.tokenizers import check_round_trip
from grail_advantage.method import Method
from grail_advantage.methods.turns import BIAS_OF_DISCOUNT, BIAS_OF_MASKING, TurnMethod
from grail_advantage.model.hugging_face import check_no_virtual_tokens
from grail_advantage.model.probe import probe, probe_rows
from grail_advantage.rules import Obstacle, Rule, broken, refuse, refuse_forced

logger = logging.getLogger(__name__)

TESTED = "1.16.0"
OVERRIDDEN = (
    *("_generate_and_score_completions", "_generate", "_generate_single_turn", "_calculate_rewards"),
    *("_compute_loss", "_get_per_token_logps_and_entropies"),
)
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")
"""Losses of TRL that multiply every token's own ratio by its advantage."""
PROMPT_MAKERS = ("tools", "environment_factory", "rollout_func")
SKIP_NOTHING = "or set skip_zero_advantage=False"


@dataclass(frozen=True)
class Arguments:
    """The arguments of a trainer, before or after TRL has made it."""

    signal: Method
    given: Mapping[str, Any]
    """By name; those that were left out are not in it."""
    processes: int = 1
    sharded: bool = False
    """Whether accelerate shards the model with FSDP, which its command may ask for without an argument."""

    def __getitem__(self, option: str) -> Any:
        """The value of an argument of the trainer or of a field of ``args``, ``None`` where there is none."""
        if option in self.given:
            return self.given[option]
        value = self.given.get("args")
        for name in option.split("."):
            value = getattr(value, name, None)
        return value

    def named(self, option: str) -> str:
        """``option=value``, for messages; long values are left out."""
        value = self.signal.name if option == "token_weights" else self[option]
        return f"{option}={value!r}" if isinstance(value, str | int | float | list | None) else f"{option}=..."

    @property
    def turns(self) -> bool:
        """Whether the method credits turns."""
        return isinstance(self.signal, TurnMethod)

    @property
    def rows(self) -> int:
        """Responses of a generation batch on a process."""
        return (self["per_device_train_batch_size"] or 0) * (self["steps_per_generation"] or 0)

    @property
    def prompt_maker(self) -> str:
        """The argument by which others than the data write into prompts."""
        return next((name for name in PROMPT_MAKERS if self[name]), "")

    @property
    def images(self) -> str:
        """The argument that brings images."""
        if isinstance(self["processing_class"], ProcessorMixin):
            return "processing_class"
        columns = getattr(self["train_dataset"], "column_names", None) or []
        return "train_dataset" if {"image", "images"} & {*columns} else ""

    @property
    def sharding(self) -> str:
        """The option that puts parts of the model, or of a response, on several processes."""
        found = ["fsdp"] if self["fsdp"] or self.sharded else []
        found += ["deepspeed_plugin.zero_stage"] if self["deepspeed_plugin.zero_stage"] == 3 else []
        sizes = [f"parallelism_config.{kind}_size" for kind in ("tp", "cp", "sp")]
        return next(iter([*found, *(name for name in sizes if (self[name] or 1) > 1)]), "")


REFUSALS = (
    Rule(
        "asks-again",
        lambda a: a.prompt_maker,
        lambda a: a.prompt_maker and "examples" in a.signal.reads,
        "it asks again in other words, without the tools and what an environment or a rollout_func adds to the prompt",
        "leave it out",
        {"tools": [print], "token_weights": "rlsd"},
    ),
    Rule(
        "two-loops",
        "rollout_func",
        lambda a: a["rollout_func"] and (a["tools"] or a["environment_factory"]),
        "TRL then leaves its env_mask out, so that what others wrote would train (grpo_trainer.py:2272)",
        "leave tools and environment_factory out",
        {"rollout_func": print, "tools": [print]},
    ),
    Rule(
        "normalised-rewards",
        "multi_objective_aggregation",
        lambda a: "rewards" in a.signal.reads and a["multi_objective_aggregation"] == "normalize_then_sum",
        "it normalises the rewards that the method reads as they are",
        "use 'sum_then_normalize'",
        {"multi_objective_aggregation": "normalize_then_sum", "token_weights": "turn_rloo"},
    ),
    Rule(
        "images",
        lambda a: a.images,
        lambda a: a.images,
        "it works with text alone, and this brings images",
        "give a tokenizer, and data without images",
        {"train_dataset": {"prompt": ["a"], "image": ["b"]}},
    ),
    Rule(
        "sequence-ratio",
        "importance_sampling_level",
        lambda a: a["importance_sampling_level"] not in (None, "token"),
        "one ratio a response leaves of its token weights their sum alone",
        "use 'token'",
        {"importance_sampling_level": "sequence"},
    ),
    Rule(
        "loss",
        "loss_type",
        lambda a: a["loss_type"] not in (None, *LOSSES),
        "it weights whole sequences by one ratio",
        f"use one of {', '.join(LOSSES)}",
        {"loss_type": "luspo"},
    ),
    Rule(
        "fp16",
        "fp16",
        lambda a: a["fp16"] and a.signal.uses in ("saliency", "logits"),
        "the answer's gradients underflow",
        "use bf16, or neither",
        {"fp16": True},
    ),
    Rule(
        "sharded",
        lambda a: a.sharding,
        lambda a: a.sharding,
        "FSDP, ZeRO-3 and tensor, context or sequence parallelism are not tested with it",
        "use DDP or DeepSpeed ZeRO-2",
        {"fsdp": "full_shard"},
    ),
    Rule(
        "split-groups",
        "per_device_train_batch_size",
        lambda a: a.signal.whole_groups and a.processes > 1 and a.rows % a["num_generations"],
        "it compares the responses of a prompt, which must be on one process",
        lambda a: f"make it x steps_per_generation={a.rows} a multiple of {a.named('num_generations')}",
        {"per_device_train_batch_size": 2, "token_weights": "shear", "steps_per_generation": 3, "processes": 2},
    ),
)
"""Arguments of TRL's with which a method does not work."""

WARNINGS = (
    Rule(
        "chosen-denominator",
        "loss_type",
        lambda a: a.turns and a["loss_type"] != "dr_grpo",
        "it divides by numbers of tokens that the policy chooses with its turns, which biases the gradient: by 0.04 of "
        "its length (the whole batch's) and 0.19 (each response's), in an environment that was enumerated "
        "(docs/turns.md)",
        "'dr_grpo' does not",
        {"loss_type": "dapo", "token_weights": "turn_rloo"},
    ),
    Rule(
        "masked-turns",
        lambda a: "mask_truncated_completions" if a["mask_truncated_completions"] else "token_weights",
        lambda a: a.turns and (a["mask_truncated_completions"] or a.signal.mask_truncated),
        BIAS_OF_MASKING,
        "mask_truncated_completions=False does not, without the method's mask_truncated",
        {"mask_truncated_completions": True, "token_weights": "turn_rloo"},
    ),
    Rule(
        "discounted-turns",
        "token_weights",
        lambda a: a.turns and getattr(a.signal, "gamma", 1.0) < 1,
        BIAS_OF_DISCOUNT,
        "gamma=1 does not",
        {"token_weights": "gtpo"},
    ),
)
"""Arguments of TRL's with which a method works, and not as somebody may think."""

AGAINST_SKIPPING = tuple(
    Rule(f"skip-{option}", option, when, because, SKIP_NOTHING, {option: value})
    for option, because, value, when in (
        ("beta", "its KL term trains every response", 0.1, lambda a: a["beta"]),
        ("entropy_coef", "the entropy bonus trains every response", 0.01, lambda a: a["entropy_coef"]),
        ("use_adaptive_entropy", "the entropy bonus trains every response", True, lambda a: a["use_adaptive_entropy"]),
        ("neftune_noise_alpha", "other responses draw other noise", 5, lambda a: a["neftune_noise_alpha"]),
        (
            "top_entropy_quantile",
            "the tokens of every response count in the quantile",
            0.5,
            lambda a: a["top_entropy_quantile"] < 1,
        ),
    )
)
"""Arguments with which a response without an advantage trains, or changes what the others train."""


def check_arguments(given: Mapping[str, Any], signal: Method, version: str) -> None:
    """Before TRL does anything with the arguments of ``GRPOTrainer``, by name, and of the TRL that is installed.

    Raises:
        ValueError: naming the argument, the reason and the remedy.
    """
    if missing := [name for name in OVERRIDDEN if not hasattr(GRPOTrainer, name)]:
        raise ValueError(
            f"trl {version} has no GRPOTrainer.{missing[0]}, which token weights use: run `pip install 'trl=={TESTED}'`"
        )
    if Version(version) > Version(TESTED):
        logger.warning("trl %s is newer than %s, with which token weights are tested", version, TESTED)
    refuse(REFUSALS, Arguments(signal, given), f"token_weights={signal.name!r}")


def check_trainer(trainer: GRPOTrainer, signal: Method, skips: bool) -> None:
    """Once TRL has loaded the model and knows the processes.

    Args:
        skips: whether zero-advantage responses are left out.

    Raises:
        ValueError: naming the argument, the reason and the remedy.
    """
    given = {"args": trainer.args, "processing_class": trainer.processing_class}
    arguments = Arguments(signal, given, trainer.accelerator.num_processes, trainer.is_fsdp_enabled)
    refuse(REFUSALS, arguments, f"token_weights={signal.name!r}")
    for rule in WARNINGS:
        if rule.when(arguments):
            logger.warning("%s", rule.warning(arguments))
    check_no_virtual_tokens(trainer.model)
    check_round_trip(trainer.processing_class, "processing_class")
    if skips:
        obstacles = [*broken(AGAINST_SKIPPING, arguments)]
        if trainer.aux_loss_enabled:
            obstacles.append(Obstacle("the router's loss", "it trains every response; set router_aux_loss_coef=0"))
        refuse_forced("skip_zero_advantage=True", obstacles, SKIP_NOTHING)


def check_neighbours(trainer: GRPOTrainer, model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Refuse a model in whose micro-batches a response depends on those beside it (:mod:`grail_advantage.model.probe`):
    the model as it trains, by TRL's own forward. A collective of the processes.

    Args:
        trainer: that leaves responses out.
        model: as TRL's loss is given it.
        inputs: the first micro-batch.

    Raises:
        ValueError: with what was found, and the remedy.
    """
    prompts, count = inputs["prompt_ids"], len(inputs["prompt_ids"])
    if count < 2:
        return  # one response always stays
    width, completion = prompts.shape[1], max(trainer.max_completion_length, inputs["completion_ids"].shape[1])

    def run(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rows as TRL pads them, one token of each in its prompt at least, to the widths of the generation batch."""
        ends = [max(1, len(tokens) - completion) for tokens in rows]
        pad = trainer.processing_class.pad_token_id
        ids = torch.full((len(rows), width + completion), pad, device=prompts.device)
        mask = torch.zeros_like(ids)
        for row, (tokens, end) in enumerate(zip(rows, ends, strict=True)):
            places = slice(width - end, width - end + len(tokens))
            ids[row, places], mask[row, places] = tokens.to(ids.device), 1
        with trainer.compute_loss_context_manager():
            log_probs = trainer._get_per_token_logps_and_entropies(model, ids, mask, completion)[0]
        return [of[: len(tokens) - end].float() for of, tokens, end in zip(log_probs, rows, ends, strict=True)]

    known = [inputs[f"{part}_ids"][inputs[f"{part}_mask"].bool()] for part in ("prompt", "completion")]
    finding = probe(model, run, probe_rows(torch.cat(known), longest=width + completion, rows=count), cuts=False)
    differences = trainer.accelerator.gather(torch.tensor([finding.difference], device=prompts.device))
    finding = replace(finding, difference=float(differences.max()))
    logger.info("skip_zero_advantage=True: %s", finding)
    refuse_forced("skip_zero_advantage=True", finding.obstacles(), SKIP_NOTHING)
