"""The published run's settings, one by one, beside this recipe's; docs/published.md and docs/trl.md are made of them.

    DRY_RUN=1 LIKE=published bash examples/run_qwen3_grail.sh | python -m recipe.published

compares a resolved configuration with it, and ends with status 1 where a value differs and the table has no reason.
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from grail_advantage.text_io import table, visible
from recipe.data.specs import PUBLISHED_SUFFIX, SPECS

# Those of the published run (src/train/grpo.sh).
GPUS = 4


@dataclass(frozen=True)
class Setting:
    """One published value, by its key or what the thing is called there, and where this recipe has its own.

    ``place``: Q and a line, ``qwen3_grail.yaml``; E, ``run_eval.py``, or another of its files; TRL, its default then.
    ``says``: options of verl's that say the same; ``ours``: their values in those terms.
    ``why``: why the value is ``value`` (``None``: any) with ``like=published`` too, or has no option. ``corrected``:
    what ``like=corrected`` has instead, a colon, and why; ``instead``: the same in the published terms.
    """

    name: str
    theirs: Any
    place: str
    says: str = ""
    ours: Callable[..., Any] = lambda value: value
    why: str = ""
    value: Any = None
    corrected: str = ""
    instead: Any = None


def _loss(mode: str, scale: float, longest: int) -> str | None:
    # Dr. GRPO divides by the length that a response may have at most, whatever the batch.
    return "dr_grpo" if (mode, scale) == ("seq-mean-token-sum-norm", longest) else None


def _cap(level: str | None, bounds: Any) -> float | None:
    """Returns the upper bound, where the lower one cuts nothing: verl's ratios are 2e-9 at least."""
    low, _, high = str(bounds).partition("_")
    return float(high) if level and high and float(low) <= 2e-9 else None


def _stem(files: Any) -> str:
    """Returns the stem of the training file, ``deepmath`` or ``deepmath_published``."""
    return Path(files if isinstance(files, str) else files[0]).stem


def _hub(files: Any) -> dict[Any, float]:
    return {getattr(SPECS.get(_stem(files).removesuffix("_published")), "hub", None): 1.0}


def _thinking(arguments: Any, model: str) -> Any:
    """The other models' templates have no such switch."""
    if arguments or "Qwen3" in model:
        return OmegaConf.to_container(arguments)
    return {"enable_thinking": False}


# fmt: off
TRAINER = (
    Setting("max_steps", 200, "Q:33",
            "trainer.total_training_steps actor_rollout_ref.actor.ppo_epochs data.train_batch_size "
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            lambda steps, epochs, prompts, together: steps * epochs * prompts / together),
    Setting("per_device_train_batch_size", 8, "Q:34", why="x the next row x 4 GPUs = 256 responses an update"),
    Setting("gradient_accumulation_steps", 8, "Q:35", "actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.rollout.n",
            lambda prompts, responses: prompts * responses / (8 * GPUS)),
    Setting("learning_rate", 1e-6, "Q:36", "actor_rollout_ref.actor.optim.lr"),
    Setting("optim", "adamw_torch_fused", "Q:37", "actor_rollout_ref.actor.optim.optimizer", value="AdamW",
            why="the same formula, computed in one kernel"),
    Setting("weight_decay", 0.0, "TRL", "actor_rollout_ref.actor.optim.weight_decay"),
    Setting("lr_scheduler_type", "constant", "Q:38", "actor_rollout_ref.actor.optim.lr_scheduler_type"),
    Setting("warmup_steps", 20, "Q:39", "actor_rollout_ref.actor.optim.lr_warmup_steps", value=0,
            why="transformers ignores it under `constant`: the full rate from the first update"),
    Setting("max_grad_norm", 1.0, "Q:40", "actor_rollout_ref.actor.optim.clip_grad"),
    Setting("seed", 42, "Q:41", "data.seed"),
    Setting("shuffle_dataset", True, "Q:42", "data.shuffle"),
    Setting("bf16", True, "Q:43", "actor_rollout_ref.actor.fsdp_config.dtype", lambda dtype: dtype == "bfloat16"),
    Setting("gradient_checkpointing", True, "Q:44", "actor_rollout_ref.model.enable_gradient_checkpointing"),
    Setting("beta", 0.0, "Q:47", "actor_rollout_ref.actor.use_kl_loss algorithm.use_kl_in_reward",
            lambda loss, reward: None if loss or reward else 0.0),
    Setting("num_iterations", 4, "Q:48", "actor_rollout_ref.actor.ppo_epochs"),
    Setting("epsilon", 0.2, "Q:49", "actor_rollout_ref.actor.clip_ratio_low"),
    Setting("epsilon_high", 0.28, "Q:50", "actor_rollout_ref.actor.clip_ratio_high"),
    Setting("scale_rewards", False, "Q:51", "algorithm.norm_adv_by_std_in_grpo"),
    Setting("loss_type", "dr_grpo", "Q:52",
            "actor_rollout_ref.actor.loss_agg_mode actor_rollout_ref.actor.loss_scale_factor data.max_response_length", _loss),
    Setting("mask_truncated_completions", True, "Q:53", "algorithm.METHOD.mask_truncated"),
    Setting("use_liger_kernel", False, "Q:54", "actor_rollout_ref.model.use_liger"),
    Setting("disable_dropout", True, "Q:78", why="these models have none"),
    Setting("max_completion_length", 4096, "Q:79", "data.max_response_length", instead=8192,
            corrected="R1-Distill 8,192: it thinks before it answers, and truncated responses teach nothing"),
    Setting("num_generations", 8, "Q:80", "actor_rollout_ref.rollout.n"),
    Setting("temperature", 1.0, "Q:81", "actor_rollout_ref.rollout.temperature"),
    Setting("top_p", 1.0, "Q:82", "actor_rollout_ref.rollout.top_p"),
    Setting("top_k", 50, "Q:83", "actor_rollout_ref.rollout.top_k"),
    Setting("repetition_penalty", 1.0, "Q:84", "actor_rollout_ref.rollout.repetition_penalty",
            lambda penalty: 1.0 if penalty is None else penalty),
    Setting("use_vllm", True, "Q:85", "actor_rollout_ref.rollout.name", lambda name: name == "vllm"),
    Setting("vllm_gpu_memory_utilization", 0.2, "Q:86", "actor_rollout_ref.rollout.gpu_memory_utilization", value=0.6,
            why="memory alone: verl's engine sleeps while the trainer works"),
    Setting("chat_template_kwargs", {"enable_thinking": False}, "Q:88",
            "data.apply_chat_template_kwargs actor_rollout_ref.model.path", _thinking),
    Setting("vllm_importance_sampling_correction", True, "TRL", "algorithm.rollout_correction.rollout_is",
            lambda level: level is not None, instead=False,
            corrected="none: with `top_k` vLLM's probabilities are over 50 tokens: the ratio is the product of the "
            "trainer's masses in them, below 1, and long, uncertain responses count less in GRPO and GRAIL alike"),
    Setting("vllm_importance_sampling_mode", "sequence_mask", "TRL", "algorithm.rollout_correction.rollout_is",
            lambda level: {"sequence": "sequence_mask"}.get(level), corrected="none"),
    Setting("vllm_importance_sampling_clip_max", 3.0, "TRL, as vllm_importance_sampling_cap",
            "algorithm.rollout_correction.rollout_is algorithm.rollout_correction.rollout_is_threshold",
            _cap, corrected="none"),
)
"""Arguments of TRL's trainer, by its names."""
MODEL = (
    Setting("model_name_or_path", "Qwen/Qwen3-4B", "Q:3", "actor_rollout_ref.model.path",
            why="of the five models, the one whose file is public"),
    Setting("dtype", "bfloat16", "Q:5", "actor_rollout_ref.actor.fsdp_config.dtype"),
    Setting("attn_implementation", "flash_attention_2", "Q:7",
            why="verl's default too; rows are packed here, padded there"),
    Setting("dataset_mixer", {"trl-lib/DeepMath-103K": 1.0}, "Q:10", "data.train_files", _hub),
    Setting("the prompt's end", PUBLISHED_SUFFIX, "grpo.py, E:108", "data.train_files",
            lambda files: PUBLISHED_SUFFIX if _stem(files).endswith("_published") else None,
            corrected=r"`\boxed{}`: there a plain string, in which `\b` is U+0008, so that the model reads `oxed{}`"),
    Setting("save_steps", 50, "Q:28", "trainer.save_freq actor_rollout_ref.actor.ppo_epochs",
            lambda batches, epochs: batches * epochs,
            why="every 40 updates; the last checkpoint is of update 200 in both", value=40),
    Setting("save_total_limit", 2, "Q:30", "trainer.max_actor_ckpt_to_keep"),
)
"""The model, its data and its checkpoints."""
WEIGHTS = (
    Setting("use_grail", True, "Q:57", "algorithm.adv_estimator", lambda method: method == "grail", value=False,
            why="the other methods have files or switches of their own there"),
    Setting("grail_std", 0.5, "Q:58", "algorithm.grail.weight_std"),
    Setting("grail_mean", 1.0, "Q:59", "algorithm.grail.weight_mean"),
    Setting("grail_w_min", 0.5, "Q:60", "algorithm.grail.weight_min"),
    Setting("grail_w_max", 5.0, "Q:61", "algorithm.grail.weight_max"),
    Setting("grail_leaf_source", "embeddings", "Q:62", "algorithm.grail.leaf"),
    Setting("grail_rollout_symmetry", "wrong", "Q:63", "algorithm.grail.gate"),
)
"""GRAIL's own."""
EVALUATION = (
    Setting("samples", 3, "E:123", "actor_rollout_ref.rollout.val_kwargs.n"),
    Setting("sampling", True, "run_eval.sh", "actor_rollout_ref.rollout.val_kwargs.do_sample"),
    Setting("temperature", 0.6, "run_eval.sh", "actor_rollout_ref.rollout.val_kwargs.temperature"),
    Setting("top_p", 0.95, "run_eval.sh", "actor_rollout_ref.rollout.val_kwargs.top_p"),
    Setting("top_k", 20, "run_eval.sh", "actor_rollout_ref.rollout.val_kwargs.top_k"),
)
"""Of the validation, and of ``scripts/evaluate.sh`` by default."""
GROUPS = {"training": TRAINER, "model, data": MODEL, "token weights": WEIGHTS, "evaluation": EVALUATION}
# fmt: on


def trl_arguments(processes: int = GPUS) -> dict[str, Any]:
    """Returns arguments of ``trl.GRPOConfig`` for the published run on some processes, 256 responses an update in all.

    Raises:
        ValueError: a number of processes that does not divide its 32 micro-batches of 8.
    """
    values = {setting.name: setting.theirs for setting in TRAINER}
    # 8 steps on 4 GPUs are 32 micro-batches, of which 2 processes take 16 each.
    steps, rest = divmod(values["gradient_accumulation_steps"] * GPUS, processes)
    if rest:
        raise ValueError(
            f"{processes} processes do not divide the published {8 * GPUS} micro-batches of an update"
        )
    return values | {"gradient_accumulation_steps": steps}


def compared(config: DictConfig) -> list[tuple[Setting, Any, str]]:
    """Returns each setting, a configuration's value in its terms, and ``=``, ``~`` (there is a reason for it),
    ``corrected`` or ``differs``."""
    rows = []
    method = config.algorithm.adv_estimator
    section = "oar" if method in ("oar_g", "oar_p") else method
    for setting in itertools.chain(*GROUPS.values()):
        options = setting.says.replace("METHOD", section).split()
        values = [OmegaConf.select(config, option) for option in options]
        ours = setting.ours(*values) if values else None
        rows.append((setting, ours, _verdict(setting, ours, config)))
    return rows


def _verdict(setting: Setting, ours: Any, config: DictConfig) -> str:
    if setting.theirs == ours:
        return "="
    if setting.why and setting.value in (None, ours):
        return "~"
    if setting.corrected and ours == setting.instead and not config.get("published_ratio"):
        return "corrected"
    return "differs"


def shown(value: Any) -> str:
    """Returns a value on one line."""
    return str(value) if str(value).isprintable() else repr(value)


def main() -> None:
    """Read a resolved configuration from stdin and print it beside the published values."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    try:
        settings = compared(OmegaConf.create(sys.stdin.read()))
    except (ValueError, TypeError, AttributeError, YAMLError) as error:
        source = "DRY_RUN=1 bash examples/run_qwen3_grail.sh"
        message = f"stdin must be a resolved configuration, as of {source}: {error}"
        sys.exit(visible(message))
    rows = []
    differing = []
    for setting, ours, verdict in settings:
        reasons = {"differs": "no reason is known", "corrected": setting.corrected, "=": ""}
        theirs = shown(setting.theirs)
        value = "" if ours is None else shown(ours)
        why = reasons.get(verdict, setting.why)
        rows.append([setting.name, theirs, setting.place, verdict, value, why])
        if verdict == "differs":
            differing.append(f"{setting.name}: {theirs} there, {shown(ours)} here")
    print("\n".join(table(["setting", "theirs", "place", "", "ours, in their terms", "why"], rows)))
    if differing:
        sys.exit("\n".join(differing))


if __name__ == "__main__":
    main()
