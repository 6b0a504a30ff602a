"""With what TRL's trainer is refused or warned of: settings with which a number would silently be another than somebody
thinks. A setting that ends a run by itself is in no table."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers import ProcessorMixin
from trl import GRPOConfig, GRPOTrainer

from grail_advantage.answers.tokenizers import check_round_trip
from grail_advantage.data import REF_LOG_PROBS
from grail_advantage.method import BaseMethod
from grail_advantage.methods.biases import Cause, biases_of_turns
from grail_advantage.model.hooks import has_adapter
from grail_advantage.model.probe import probe, probe_rows
from grail_advantage.rules import Rule, check_rules

logger = logging.getLogger(__name__)

TESTED = "1.16.0"
OVERRIDDEN = (
    "_generate_and_score_completions",
    "_generate",
    "_generate_single_turn",
    "_calculate_rewards",
    "_compute_loss",
    "_get_per_token_logps_and_entropies",
)
LOSSES = (
    "grpo",
    "bnpo",
    "dr_grpo",
    "dapo",
    "cispo",
    "sapo",
)  # that multiply each token's own ratio by its advantage
# Of trl.rewards, DAPO's, for responses near the length limit
PENALTY = "soft_overlong_punishment_reward"
SKIPS = "skip_zero_advantage=True"
SKIP_NOTHING = "set skip_zero_advantage=False"


@dataclass(frozen=True)
class Arguments:
    """A trainer that TRL has made, with its method."""

    trainer: GRPOTrainer
    method: BaseMethod

    def __getitem__(self, option: str) -> Any:
        """An option of ``args`` or an argument of the trainer; ``None`` where there is none."""
        return getattr(self.trainer.args, option, getattr(self.trainer, option, None))

    def named(self, option: str) -> str:
        """``option=value``, for messages; long values are left out."""
        section, _, name = option.partition(".")
        if option == "token_weights":
            value: Any = self.method.name
        elif name and section == self.method.section:
            value = getattr(self.method, name)
        else:
            value = self[option]
        return f"{option}={value!r}" if isinstance(value, str | int | float) else f"{option}=..."

    @property
    def prompt_maker(self) -> str:
        """The argument by which others than the data write into prompts."""
        makers = {
            "rollout_func": self["rollout_func"],
            "environment_factory": self["environment_factories"],
            "tools": self["tools"],
        }
        return next((name for name, value in makers.items() if value), "")

    @property
    def images(self) -> str:
        """The argument that brings images."""
        # A processor reads images, too.
        if isinstance(self.trainer.processing_class, ProcessorMixin):
            return "processing_class"
        columns = getattr(self.trainer.train_dataset, "column_names", None) or []
        return "train_dataset" if {"image", "images"} & {*columns} else ""

    @property
    def sharding(self) -> str:
        """The option that spreads the model, or a response, over processes."""
        accelerator = self.trainer.accelerator
        zero = getattr(getattr(accelerator.state, "deepspeed_plugin", None), "zero_stage", 0)
        spreading = {
            "fsdp": self.trainer.is_fsdp_enabled,
            "deepspeed": zero == 3,
            "parallelism_config": accelerator.parallelism_config is not None,
        }
        return next((name for name, is_used in spreading.items() if is_used), "")

    @property
    def splits(self) -> bool:
        """Whether responses to a prompt are on several processes."""
        # 4 x 3 responses on each process: of groups of 8, the second is on two.
        rows = self["per_device_train_batch_size"] * self["steps_per_generation"]
        return bool(self.trainer.accelerator.num_processes > 1 and rows % self["num_generations"])


def _scales_rewards(option: str) -> Callable[[Arguments], bool]:
    """Whether the option has another value than TRL's default, and the method makes its advantages of the rewards."""
    default = GRPOConfig.__dataclass_fields__[option].default
    return lambda a: "rewards" in a.method.reads and a[option] != default


def _one_ratio(a: Arguments) -> str:
    """The option by which all tokens of a response have one ratio."""
    if a["importance_sampling_level"] != "token":
        return "importance_sampling_level"
    return "" if a["loss_type"] in LOSSES else "loss_type"


def _masking(a: Arguments) -> str:
    """The option that gives truncated responses the advantage 0."""
    if a["mask_truncated_completions"]:
        return "mask_truncated_completions"
    return f"{a.method.section}.mask_truncated" if a.method.mask_truncated else ""


def _several_updates(a: Arguments) -> str:
    """The option by which responses have several updates, whose old log-probabilities are those before the first."""
    if a["num_iterations"] > 1:
        return "num_iterations"
    if a["steps_per_generation"] > a["gradient_accumulation_steps"]:
        return "steps_per_generation"
    return ""


RULES = (
    Rule(
        option=("tools", "environment_factory", "rollout_func"),
        when=lambda a: "examples" in a.method.reads and a.prompt_maker,
        because="it asks again in other words, without what this adds to the prompt",
        remedy="leave it out",
    ),
    Rule(
        option="rollout_func",
        when=lambda a: a["rollout_func"] and a["tools"],
        because="TRL then leaves env_mask out and trains what others wrote (grpo_trainer.py:2272)",
        remedy="leave tools and environment_factory out",
    ),
    Rule(
        option=("processing_class", "train_dataset"),
        when=lambda a: a.images,
        because="it works with text alone, and this brings images",
        remedy="give a tokenizer, and data without images",
    ),
    Rule(
        option=("importance_sampling_level", "loss_type"),
        when=_one_ratio,
        because="one ratio a response leaves of its token weights their sum alone",
        remedy=f"use importance_sampling_level='token', and one of {', '.join(LOSSES)}",
    ),
    Rule(
        option="multi_objective_aggregation",
        when=_scales_rewards("multi_objective_aggregation"),
        because="the method compares the rewards itself",
        remedy="leave it out, and scale the reward functions by reward_weights",
    ),
    Rule(
        option="scale_rewards",
        when=_scales_rewards("scale_rewards"),
        because="the method compares the rewards itself",
        remedy="leave it out; some have an option deviation",
    ),
    Rule(
        option="temperature",
        when=lambda a: not 0 < a["temperature"] < math.inf,
        because="the policy is the softmax at this temperature",
        remedy="use one above 0",
    ),
    Rule(
        option="beta",
        when=lambda a: (
            REF_LOG_PROBS in a.method.reads and a["beta"] == 0 and not has_adapter(a.trainer.model)
        ),
        because="the method reads reference log-probabilities, which TRL computes where it is not 0",
        remedy="use 1e-9 for no KL term to speak of, or train an adapter (peft_config)",
    ),
    Rule(
        option="fp16",
        when=lambda a: a["fp16"] and a.method.uses in ("saliency", "logits"),
        because="the answer's gradients underflow",
        remedy="use bf16, or neither",
    ),
    Rule(
        option=("fsdp", "deepspeed", "parallelism_config"),
        when=lambda a: a.sharding,
        because="a model or a response that processes share is not tested",
        remedy="use DDP or DeepSpeed ZeRO-2",
    ),
    Rule(
        option="per_device_train_batch_size",
        when=lambda a: a.method.whole_groups and a.splits,
        because="it compares the responses of a prompt, which must be on one process",
        remedy=lambda a: (
            f"make it x {a.named('steps_per_generation')} a multiple of {a.named('num_generations')}"
        ),
    ),
    Rule(
        option="reward_funcs",
        when=lambda a: PENALTY in a.trainer.reward_func_names and _masking(a),
        because="most of DAPO's penalty is for truncated responses, which train nothing",
        remedy=lambda a: f"set {_masking(a)} to false, or leave the penalty out",
        warned=True,
    ),
    *biases_of_turns(
        discount=Cause(
            ("gamma",),
            lambda a: f"{a.method.section}.gamma" if getattr(a.method, "gamma", 1.0) < 1 else "",
        ),
        masking=Cause(("mask_truncated_completions", "mask_truncated"), _masking),
        denominator=Cause(
            ("loss_type",), lambda a: "loss_type" if a["loss_type"] != "dr_grpo" else ""
        ),
        constant="'dr_grpo' does not",
        updates=Cause(("num_iterations", "steps_per_generation"), _several_updates),
    ),
)
"""Of every run."""


def _trains_every_response(option: str) -> Rule:
    return Rule(
        option=option,
        when=lambda a: a[option],
        because="it trains every response",
        remedy=SKIP_NOTHING,
    )


AGAINST_SKIPPING = (
    _trains_every_response("beta"),
    _trains_every_response("entropy_coef"),
    _trains_every_response("use_adaptive_entropy"),
    Rule(
        option="router_aux_loss_coef",
        when=lambda a: a["aux_loss_enabled"],
        because="it trains every response",
        remedy=f"set it to 0, or {SKIP_NOTHING}",
    ),
    Rule(
        option="top_entropy_quantile",
        when=lambda a: a["top_entropy_quantile"] < 1,
        because="all responses' tokens count in it",
        remedy=SKIP_NOTHING,
    ),
    Rule(
        # The probe sees no noise that is smaller than the rounding of half precision.
        option="neftune_noise_alpha",
        when=lambda a: a["neftune_noise_alpha"],
        because="other responses draw other noise",
        remedy=SKIP_NOTHING,
    ),
)
"""With which a response without an advantage trains, or changes what the others train."""


def check_version(version: str) -> None:
    """ValueError: this TRL lacks a method that is overridden. A newer one than the tested is warned of."""
    # An override of what is not there would never be called.
    if missing := [name for name in OVERRIDDEN if not hasattr(GRPOTrainer, name)]:
        raise ValueError(
            f"trl {version} has no GRPOTrainer.{missing[0]}: run `pip install 'trl=={TESTED}'`"
        )
    if Version(version) > Version(TESTED):
        logger.warning(
            "trl %s is newer than %s, with which token weights are tested", version, TESTED
        )


def check_trainer(trainer: GRPOTrainer, method: BaseMethod, skips: bool) -> None:
    """Refuse, and warn of, settings of a trainer; ``skips``: whether zero-advantage responses are left out. ValueError,
    naming the argument, the reason and the remedy."""
    arguments = Arguments(trainer, method)
    check_rules(RULES, arguments, arguments.named("token_weights"))
    remedy = "give one that grail_advantage.answers.tokenizers.load_tokenizer loads"
    check_round_trip(trainer.processing_class, "processing_class", remedy)
    if skips:
        check_rules(AGAINST_SKIPPING, arguments, SKIPS)


def check_neighbours(trainer: GRPOTrainer, model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Refuse a model in whose micro-batches a response depends on those beside it (:mod:`grail_advantage.model.probe`):
    the model as it trains, by TRL's forward in TRL's layout. ``inputs``: TRL's first micro-batch. A collective of the
    processes. ValueError, with what was found and the remedy.
    """
    count, width = inputs["prompt_ids"].shape
    device = trainer.accelerator.device
    limit = trainer.max_completion_length
    padding = trainer.processing_class.pad_token_id
    if count < 2:
        return  # one response always stays

    def run(rows: Sequence[Tensor]) -> list[Tensor]:
        lengths = torch.tensor([[len(row)] for row in rows])
        place = torch.arange(width + limit)
        # A row that is longer than a response may be has more prompt; one token at least predicts.
        ends = (lengths - limit).clamp(min=1)  # of their prompts
        # TRL's layout: prompts end in front of column `width`, and responses begin there.
        mask = (width - ends <= place) & (place < width - ends + lengths)
        ids = torch.full(mask.shape, padding).masked_scatter(mask, torch.cat(list(rows))).to(device)
        log_probs = trainer._get_per_token_logps_and_entropies(
            model, ids, mask.long().to(device), limit
        )[0]
        return list(
            log_probs.float().cpu()[mask[:, width:]].split((lengths - ends).flatten().tolist())
        )

    tokens = [
        inputs[f"{part}_ids"][inputs[f"{part}_mask"].bool()] for part in ("prompt", "completion")
    ]
    finding = probe(model, run, probe_rows(torch.cat(tokens), longest=width + limit, rows=count))
    # All processes decide alike, or one that goes on would wait for one that has ended.
    largest = trainer.accelerator.gather(torch.tensor([finding.difference], device=device)).max()
    finding = replace(finding, difference=float(largest))
    if not finding.holds:
        raise ValueError(
            f"{type(trainer.model).__name__} does not work with {SKIPS}: {finding}; {SKIP_NOTHING}"
        )
