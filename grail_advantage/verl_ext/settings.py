"""A run's settings, parsed once from its configuration: by the driver for its checks, and by the trainer's process.
Nothing else reads the configuration. Needs no verl. ``algorithm`` has what verl does not know:

- ``adv_estimator``: the method, by its registered name; its options are in a section of its own.
- ``token_weights``: ``skip_zero_advantage``, where ``auto`` leaves responses whose token advantages are all 0 out of
  the update wherever it stays the same to float rounding, ``true`` refuses a run in which it would not, and ``false``,
  the default, runs every response; ``answer`` and ``missing_answers``, see :mod:`grail_advantage.answers.format` and
  ``.missing``; ``base``, the estimator of verl's registry that gives the advantage of a response, which token weights
  multiply.
- ``token_dump``: see :class:`grail_advantage.dump.DumpOptions` and docs/token_dump.md.

What does not work is in :mod:`grail_advantage.verl_ext.rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from grail_advantage.answers.format import BOXED, AnswerFormat, answer_format
from grail_advantage.answers.missing import CHOICES, check_choice
from grail_advantage.dump import DumpOptions
from grail_advantage.method import RESERVED, BaseMethod, build, methods

SECTION = "algorithm.token_weights."
DUMP = "algorithm.token_dump."
METHOD = "algorithm.adv_estimator"
SKIP = f"{SECTION}skip_zero_advantage"
BASE = f"{SECTION}base"
REUSE = f"{SECTION}reuse_log_probs"
MISSING = f"{SECTION}missing_answers"
DUMP_FOLDER = f"{DUMP}folder"
BASES = (
    "grpo",
    "rloo",
    "opo",
    "reinforce_plus_plus_baseline",
)  # estimators of verl's, tested as the base
TRAINER_MODE = "trainer.v1.trainer_mode"
TRAINER_MODES = ("sync", "colocate_async", "separate_async")
"""verl's own values of it; with a method, ``grail_<mode>`` is that trainer with token weights."""
ENGINES = ("fsdp", "fsdp2")
"""Values of :data:`STRATEGY`: the engines of verl's in which this project runs code of its own."""
TOOL_REWARDS = "tool_rewards"
CALL_REWARDS = "call_rewards"
"""Fields of an agent loop with the rewards of calls: one flat list, by verl; one list for each turn that called, by
:mod:`grail_advantage.verl_ext.tool_agent`, with ``None`` where a tool gave none."""
ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))
STRATEGY = f"{ACTOR}.strategy"
FUSED = f"{MODEL}.use_fused_kernels"
PACKED = f"{MODEL}.use_remove_padding"
PARALLEL_CALLS = f"{ROLLOUT}.multi_turn.max_parallel_calls"
AGENT_LOOPS = f"{ROLLOUT}.agent.agent_loop_config_path"  # a file with agent loops beside verl's own
GROUP_SIZE = f"{ROLLOUT}.n"
TEMPERATURE = f"{ROLLOUT}.temperature"
CORRECTION = "algorithm.rollout_correction"
KL_IN_REWARD = "algorithm.use_kl_in_reward"
BY_DEVIATION = "algorithm.norm_adv_by_std_in_grpo"
BYPASS = f"{CORRECTION}.bypass_mode"
SLICES = tuple(
    f"{ACTOR}.{section}ulysses_sequence_parallel_size" for section in ("", "fsdp_config.")
)
"""The two places where verl has this option."""
ATTENTION = f"{MODEL}.override_config.attn_implementation"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
AGGREGATION = f"{ACTOR}.loss_agg_mode"
SCALE = f"{ACTOR}.loss_scale_factor"
BATCH = "data.train_batch_size"
MINI_BATCH = f"{ACTOR}.ppo_mini_batch_size"
PARAM_DTYPE, MODEL_DTYPE = (
    f"{ACTOR}.fsdp_config.{name}" for name in ("mixed_precision.param_dtype", "model_dtype")
)
CHUNKING = f"{ACTOR}.entropy_from_logits_with_chunking"
OPTIONS_FILE = Path(__file__).with_name("config") / "token_weights.yaml"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A run's configuration; ``method`` is ``None`` in a run with an estimator of verl's own."""

    config: Mapping[str, Any]
    """Resolved, as plain mappings; with a method, with this package's defaults."""
    kind: str | None = None
    """verl's name for the kind of trainer; ``None`` where no trainer has the name that is asked for, and in the
    trainer's own process."""
    method: BaseMethod | None = None
    answer: AnswerFormat = BOXED
    dump: DumpOptions | None = None  # without a folder

    @staticmethod
    def parse(config: DictConfig, kind: str | None = None) -> Settings:
        """Take over a run's configuration. ValueError, naming the option and the remedy, for an option or value of a
        method's run that is not allowed."""
        plain: Any = OmegaConf.to_container(config, resolve=True)
        algorithm = plain["algorithm"]
        name = algorithm["adv_estimator"]
        if name not in methods():
            return Settings(config=plain, kind=kind)
        for section in RESERVED:
            algorithm[section] = {**algorithm_sections()[section], **(algorithm.get(section) or {})}
        ours = algorithm["token_weights"]
        ours["base"] = ours["base"] or BASES[0]
        check_choice(ours["missing_answers"], MISSING)
        for option in ("skip_zero_advantage", "reuse_log_probs"):
            if ours[option] not in ("auto", True, False):
                raise ValueError(
                    f"{SECTION}{option}={ours[option]!r} is unknown; choose one of auto, true, false"
                )
        try:
            answer = answer_format(ours["answer"])
        except ValueError as error:
            raise ValueError(f"{SECTION}{error}") from error
        dump = None
        section = algorithm["token_dump"]
        if section["folder"] is not None:
            dump = DumpOptions.of_section(DUMP.rstrip("."), section)
        method = build(name, algorithm.get(methods()[name].section))
        return MethodSettings(config=plain, kind=kind, method=method, answer=answer, dump=dump)

    def __getitem__(self, option: str) -> Any:
        """The value of an option by its full name; ``None`` where the configuration does not have it."""
        value: Any = self.config
        for name in option.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def named(self, option: str) -> str:
        """``option=value``, for messages; of the method the value that it has, though the configuration may have none."""
        section, _, name = option.removeprefix("algorithm.").partition(".")
        of_method = self.method is not None and section == self.method.section
        value = getattr(self.method, name) if of_method else self[option]
        return f"{option}={value}"

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that share a sequence."""
        return max(self[name] or 1 for name in SLICES)

    @property
    def longest(self) -> int:
        """Tokens of prompt and response, the most that there can be."""
        longest = self[f"{ROLLOUT}.prompt_length"] + self[f"{ROLLOUT}.response_length"]
        return min(longest, self[f"{ROLLOUT}.max_model_len"] or longest)


@dataclass(frozen=True, kw_only=True)
class MethodSettings(Settings):
    """The settings of a run with a method."""

    method: BaseMethod


def algorithm_sections() -> dict[str, Any]:
    """Returns the sections below ``algorithm`` that verl does not have: those of all registered methods, every option
    at its default (``None`` where that depends on others), and those of the trainer."""
    sections: dict[str, dict[str, Any]] = {
        "token_weights": {
            "skip_zero_advantage": False,
            "reuse_log_probs": False,
            "answer": BOXED.name,
            "missing_answers": CHOICES[0],
            "base": BASES[0],
        },
        "token_dump": {name: field.default for name, field in DumpOptions.model_fields.items()},
    }
    # Without a folder nothing is written.
    sections["token_dump"]["folder"] = None
    for method, cls in methods().items():
        sections[cls.section] = {
            # A mapping stays open: Hydra takes new keys in place of nothing only.
            name: None if isinstance(field.default, dict) else field.default
            for name, field in cls.model_fields.items()
            if name not in cls.names[method]
        }
    return sections


def options_yaml() -> str:
    """The content of ``config/token_weights.yaml``, for a configuration's list of defaults."""
    text = yaml.safe_dump({"algorithm": algorithm_sections()}, default_flow_style=None, width=96)
    return OPTIONS_FILE.read_text(encoding="utf-8").partition("\nalgorithm:")[0] + f"\n{text}"


if __name__ == "__main__":
    OPTIONS_FILE.write_text(options_yaml(), encoding="utf-8")
