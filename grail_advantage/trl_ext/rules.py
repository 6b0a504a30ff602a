"""TRL's tables of rules (:mod:`grail_advantage.rules`) on the arguments of ``GRPOTrainer``.

What needs the loaded model is in :mod:`grail_advantage.trl_ext.checks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from datasets import Dataset
from transformers import ProcessorMixin

from grail_advantage.method import Method
from grail_advantage.methods.turns import BIAS_OF_DISCOUNT, BIAS_OF_MASKING, TurnMethod
from grail_advantage.rules import Rule

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")
"""Losses of TRL that multiply every token's own ratio by its advantage."""
IMAGE_COLUMNS = ("image", "images")


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
    def columns(self) -> list[str]:
        """The columns of the data set that the method reads."""
        signal = self.signal
        return [*(signal.data_columns if "examples" in signal.reads else ()), *signal.field_names]

    @property
    def known_columns(self) -> list[str]:
        """The columns of the data set; none of a stream, of which the signal checks the first batch."""
        return getattr(self["train_dataset"], "column_names", None) or []

    @property
    def missing_columns(self) -> list[str]:
        """Those that the data alone can have: a field may also come with the responses."""
        read = self.signal.data_columns if "examples" in self.signal.reads else ()
        return [name for name in read if self.known_columns and name not in self.known_columns]

    @property
    def rows(self) -> int:
        """Responses of a generation batch on a process."""
        return (self["per_device_train_batch_size"] or 0) * (self["steps_per_generation"] or 0)


def _plain_prompts(a: Arguments) -> bool:
    data = a["train_dataset"]
    return (
        "examples" in a.signal.reads
        and isinstance(data, Dataset)
        and len(data) > 0
        and isinstance(data[0]["prompt"], str)
    )


def _asks_again(name: str) -> Rule:
    return Rule(
        f"asks-again-{name.replace('_', '-')}",
        name,
        lambda a: a[name] and "examples" in a.signal.reads,
        "it asks again in other words, without the tools and what an environment or a rollout_func adds to the prompt",
        "leave it out",
        {name: [print], "token_weights": "rlsd"},
    )


def _parallelism(kind: str) -> Rule:
    return Rule(
        f"{kind}-parallel",
        f"parallelism_config.{kind}_size",
        lambda a: (a[f"parallelism_config.{kind}_size"] or 1) > 1,
        "it is not tested yet",
        "use 1",
        {"parallelism_config": SimpleNamespace(**{f"{kind}_size": 2})},
    )


REFUSALS = (
    _asks_again("tools"),
    _asks_again("environment_factory"),
    _asks_again("rollout_func"),
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
        "processor",
        "processing_class",
        lambda a: isinstance(a["processing_class"], ProcessorMixin),
        "it works with text alone",
        "give a tokenizer",
        {"processing_class": ProcessorMixin()},
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
        "greedy",
        "temperature",
        lambda a: a["temperature"] is not None and not a["temperature"] > 0,
        "the policy is the softmax at this temperature",
        "use a temperature above 0",
        {"temperature": 0.0},
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
        "fsdp",
        "fsdp",
        lambda a: a["fsdp"] or a.sharded,
        "it is not tested yet",
        "use DDP or DeepSpeed ZeRO-2",
        {"fsdp": "full_shard"},
    ),
    Rule(
        "zero-3",
        "deepspeed_plugin.zero_stage",
        lambda a: a["deepspeed_plugin.zero_stage"] == 3,
        "it is not tested yet",
        "use ZeRO-1 or ZeRO-2",
        {"deepspeed_plugin": SimpleNamespace(zero_stage=3)},
    ),
    _parallelism("tp"),
    _parallelism("cp"),
    _parallelism("sp"),
    Rule(
        "unused-columns",
        "remove_unused_columns",
        lambda a: ("examples" in a.signal.reads or a.signal.field_names) and a["remove_unused_columns"],
        "it takes away the columns that the method reads",
        lambda a: f"use False, which leaves {' and '.join(a.columns) or 'them'}",
        {"remove_unused_columns": True, "token_weights": "rlsd"},
    ),
    Rule(
        "images",
        "train_dataset",
        lambda a: any(name in a.known_columns for name in IMAGE_COLUMNS),
        "it works with text alone, and the data has images",
        "take their column out",
        {"train_dataset": {"prompt": ["a"], "image": ["b"]}},
    ),
    Rule(
        "missing-column",
        "train_dataset",
        lambda a: a.missing_columns,
        "it reads a column that the data lacks",
        lambda a: f"give it the column {a.missing_columns[0]}; its columns are {', '.join(a.known_columns)}",
        {"train_dataset": {"prompt": ["a"]}, "token_weights": "rlsd", "remove_unused_columns": False},
    ),
    Rule(
        "plain-prompts",
        "train_dataset",
        _plain_prompts,
        "it asks again in other words, and the data's prompts are plain texts",
        "make each prompt a list of messages",
        {
            "train_dataset": {"prompt": ["a"], "reward_model": ["b"]},
            "token_weights": "rlsd",
            "remove_unused_columns": False,
        },
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
        lambda a: isinstance(a.signal, TurnMethod) and a["loss_type"] != "dr_grpo",
        "it divides by numbers of tokens that the policy chooses with its turns, which biases the gradient: by 0.04 of its "
        "length (the whole batch's) and 0.19 (each response's), in an environment that was enumerated (docs/turns.md)",
        "'dr_grpo' does not",
        {"loss_type": "dapo", "token_weights": "turn_rloo"},
    ),
    Rule(
        "masked-turns",
        "mask_truncated_completions",
        lambda a: isinstance(a.signal, TurnMethod) and a["mask_truncated_completions"],
        BIAS_OF_MASKING,
        "False does not",
        {"mask_truncated_completions": True, "token_weights": "turn_rloo"},
    ),
    Rule(
        "masked-by-method",
        "token_weights",
        lambda a: isinstance(a.signal, TurnMethod) and a.signal.mask_truncated,
        BIAS_OF_MASKING,
        "mask_truncated=False does not",
        {"token_weights": "turn_rloo:mask_truncated=true"},
    ),
    Rule(
        "discounted-turns",
        "token_weights",
        lambda a: isinstance(a.signal, TurnMethod) and getattr(a.signal, "gamma", 1.0) < 1,
        BIAS_OF_DISCOUNT,
        "gamma=1 does not",
        {"token_weights": "gtpo"},
    ),
)
"""Arguments of TRL's with which a method works, and not as somebody may think."""


def _against(id: str, option: str, because: str, value: Any) -> Rule:
    """An argument that must not be set where responses are left out."""
    return Rule(id, option, lambda a: a[option], because, SKIP_NOTHING, {option: value})


SKIP_NOTHING = "or set skip_zero_advantage=False"
AGAINST_SKIPPING = (
    _against("skip-kl", "beta", "its KL term trains every response", 0.1),
    _against("skip-entropy", "entropy_coef", "the entropy bonus trains every response", 0.01),
    _against("skip-adaptive-entropy", "use_adaptive_entropy", "the entropy bonus trains every response", True),
    _against("skip-noise", "neftune_noise_alpha", "other responses draw other noise", 5),
    Rule(
        "skip-quantile",
        "top_entropy_quantile",
        lambda a: a["top_entropy_quantile"] < 1,
        "the tokens of every response count in the quantile",
        SKIP_NOTHING,
        {"top_entropy_quantile": 0.5},
    ),
)
"""Arguments with which a response without an advantage trains, or changes what the others train."""
