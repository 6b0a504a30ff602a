"""With what TRL's trainer is refused or warned of: settings with which a number would silently be another than somebody
thinks. A setting that ends a run by itself is in no table."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers import ProcessorMixin
from trl import GRPOTrainer

from grail_advantage.answers.tokenizers import check_round_trip
from grail_advantage.method import BaseMethod
from grail_advantage.methods.turns import BIAS_OF_DISCOUNT, BIAS_OF_MASKING, TurnMethod
from grail_advantage.model.probe import probe, probe_rows
from grail_advantage.rules import Obstacle, Rule, broken, refuse, refuse_forced

logger = logging.getLogger(__name__)

TESTED = "1.16.0"
OVERRIDDEN = (
    *("_generate_and_score_completions", "_generate", "_generate_single_turn", "_calculate_rewards"),
    *("_compute_loss", "_get_per_token_logps_and_entropies"),
)
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")  # that multiply each token's own ratio by its advantage
BIAS_OF_LOSS = "loss_type divides by tokens whose number the policy chooses, which biases the gradient; use 'dr_grpo'"
SKIP_NOTHING = "or set skip_zero_advantage=False"


@dataclass(frozen=True)
class Settings:
    """A trainer that TRL has made, with its method."""

    trainer: GRPOTrainer
    method: BaseMethod

    def __getitem__(self, option: str) -> Any:
        """An option of ``args`` or an argument of the trainer; ``None`` where there is none."""
        return getattr(self.trainer.args, option, getattr(self.trainer, option, None))

    def named(self, option: str) -> str:
        """``option=value``, for messages; long values are left out."""
        value = self.method.name if option == "token_weights" else self[option]
        return f"{option}={value!r}" if isinstance(value, str | int | float) else f"{option}=..."

    @property
    def prompt_maker(self) -> str:
        """The argument by which others than the data write into prompts."""
        makers = {"rollout_func": self["rollout_func"], "environment_factory": self["environment_factories"]}
        return next((name for name, value in {**makers, "tools": self["tools"]}.items() if value), "")

    @property
    def images(self) -> str:
        """The argument that brings images."""
        if isinstance(self.trainer.processing_class, ProcessorMixin):
            return "processing_class"
        columns = getattr(self.trainer.train_dataset, "column_names", None) or []
        return "train_dataset" if {"image", "images"} & {*columns} else ""

    @property
    def sharding(self) -> str:
        """The option that spreads the model, or a response, over processes."""
        accelerator = self.trainer.accelerator
        zero = getattr(getattr(accelerator.state, "deepspeed_plugin", None), "zero_stage", 0)
        found = {"fsdp": self.trainer.is_fsdp_enabled, "deepspeed": zero == 3}
        found["parallelism_config"] = accelerator.parallelism_config is not None
        return next((name for name, there in found.items() if there), "")

    @property
    def splits(self) -> bool:
        """Whether responses to a prompt are on several processes."""
        rows = self["per_device_train_batch_size"] * self["steps_per_generation"]
        return bool(self.trainer.accelerator.num_processes > 1 and rows % self["num_generations"])


# fmt: off
REFUSALS = (
    Rule("asks-again", lambda s: s.prompt_maker, lambda s: s.prompt_maker and "examples" in s.method.reads,
         "it asks again in other words, without the tools and what an environment or a rollout_func adds to the prompt",
         "leave it out", {"tools": [print], "token_weights": "rlsd"}),
    Rule("two-loops", "rollout_func", lambda s: s["rollout_func"] and s["tools"],
         "TRL then leaves its env_mask out, so that what others wrote would train (grpo_trainer.py:2272)",
         "leave tools and environment_factory out", {"rollout_func": print, "tools": [print]}),
    Rule("images", lambda s: s.images, lambda s: s.images, "it works with text alone, and this brings images",
         "give a tokenizer, and data without images", {"train_dataset": {"prompt": ["a"], "image": ["b"]}}),
    Rule("one-ratio",
         lambda s: "loss_type" if s["importance_sampling_level"] == "token" else "importance_sampling_level",
         lambda s: s["importance_sampling_level"] != "token" or s["loss_type"] not in LOSSES,
         "one ratio a response leaves of its token weights their sum alone",
         f"use importance_sampling_level='token', and one of {', '.join(LOSSES)}", {"loss_type": "luspo"}),
    Rule("fp16", "fp16", lambda s: s["fp16"] and s.method.uses in ("saliency", "logits"),
         "the answer's gradients underflow", "use bf16, or neither", {"fp16": True}),
    Rule("sharded", lambda s: s.sharding, lambda s: s.sharding,
         "FSDP, ZeRO-3 and tensor, context or sequence parallelism are not tested with it",
         "use DDP or DeepSpeed ZeRO-2", {"fsdp": "full_shard"}),
    Rule("split-groups", "per_device_train_batch_size", lambda s: s.method.whole_groups and s.splits,
         "it compares the responses of a prompt, which must be on one process",
         lambda s: f"make it x {s.named('steps_per_generation')} a multiple of {s.named('num_generations')}",
         {"per_device_train_batch_size": 2, "token_weights": "shear", "steps_per_generation": 3}),
)
# fmt: on
"""Settings of TRL's with which a method does not work."""

AGAINST_SKIPPING = tuple(
    Rule(f"skip-{option}", option, when, because, SKIP_NOTHING, {option: value})
    for option, because, value, when in (
        ("beta", "its KL term trains every response", 0.1, lambda s: s["beta"]),
        ("entropy_coef", "the entropy bonus trains every response", 0.01, lambda s: s["entropy_coef"]),
        ("use_adaptive_entropy", "the entropy bonus trains every response", True, lambda s: s["use_adaptive_entropy"]),
        ("top_entropy_quantile", "all responses' tokens count in it", 0.5, lambda s: s["top_entropy_quantile"] < 1),
    )
)
"""Settings with which a response without an advantage trains, or changes what the others train."""


def check_version(version: str) -> None:
    """ValueError: this TRL lacks a method that is overridden. A newer one than the tested is warned of."""
    if missing := [name for name in OVERRIDDEN if not hasattr(GRPOTrainer, name)]:
        raise ValueError(f"trl {version} has no GRPOTrainer.{missing[0]}: run `pip install 'trl=={TESTED}'`")
    if Version(version) > Version(TESTED):
        logger.warning("trl %s is newer than %s, with which token weights are tested", version, TESTED)


def check_trainer(trainer: GRPOTrainer, method: BaseMethod, skips: bool) -> None:
    """Refuse, and warn of, settings of a trainer; ``skips``: whether zero-advantage responses are left out. ValueError,
    naming the argument, the reason and the remedy."""
    settings = Settings(trainer, method)
    refuse(REFUSALS, settings, f"token_weights={method.name!r}")
    remedy = "give one that grail_advantage.answers.tokenizers.load_tokenizer loads"
    check_round_trip(trainer.processing_class, "processing_class", remedy)
    if isinstance(method, TurnMethod):
        biases = {
            BIAS_OF_MASKING: trainer.args.mask_truncated_completions or method.mask_truncated,
            BIAS_OF_DISCOUNT: getattr(method, "gamma", 1.0) < 1,
            BIAS_OF_LOSS: trainer.args.loss_type != "dr_grpo",
        }
        for bias in [bias for bias, there in biases.items() if there]:
            logger.warning("token_weights=%r: %s", method.name, bias)
    if skips:
        obstacles = [*broken(AGAINST_SKIPPING, settings)]
        if trainer.aux_loss_enabled:
            obstacles.append(Obstacle("the router's loss", "it trains every response; set router_aux_loss_coef=0"))
        refuse_forced("skip_zero_advantage=True", obstacles, SKIP_NOTHING)


def check_neighbours(trainer: GRPOTrainer, model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Refuse a model in whose micro-batches a response depends on those beside it (:mod:`grail_advantage.model.probe`):
    the model as it trains, by TRL's forward in TRL's layout. ``inputs``: TRL's first micro-batch. A collective of the
    processes. ValueError, with what was found and the remedy.
    """
    (count, width), device = inputs["prompt_ids"].shape, trainer.accelerator.device
    limit, padding = trainer.max_completion_length, trainer.processing_class.pad_token_id
    if count < 2:
        return  # one response always stays

    def run(rows: Sequence[Tensor]) -> list[Tensor]:
        lengths, place = torch.tensor([[len(row)] for row in rows]), torch.arange(width + limit)
        ends = (lengths - limit).clamp(min=1)  # of their prompts
        mask = (width - ends <= place) & (place < width - ends + lengths)
        ids = torch.full(mask.shape, padding).masked_scatter(mask, torch.cat(list(rows))).to(device)
        log_probs = trainer._get_per_token_logps_and_entropies(model, ids, mask.long().to(device), limit)[0]
        return list(log_probs.float().cpu()[mask[:, width:]].split((lengths - ends).flatten().tolist()))

    known = [inputs[f"{part}_ids"][inputs[f"{part}_mask"].bool()] for part in ("prompt", "completion")]
    finding = probe(model, run, probe_rows(torch.cat(known), longest=width + limit, rows=count))
    most = trainer.accelerator.gather(torch.tensor([finding.difference], device=device)).max()
    finding = replace(finding, difference=float(most))
    if not finding.holds:
        refuse_forced("skip_zero_advantage=True", [Obstacle(type(trainer.model).__name__, str(finding))], SKIP_NOTHING)
