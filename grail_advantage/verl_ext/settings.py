"""A run's settings, parsed once from its configuration. Needs no verl, so that they can be read before verl is imported.

Each process parses once: the driver in :func:`grail_advantage.verl_ext.checks.check_config`, which hands the result on, the
trainer's when the trainer is made. Nothing else reads the configuration: what it says of token weights is a field of
:class:`Settings`, which also gives every other option by its name.

- ``algorithm.adv_estimator``: the method, by its registered name; its options are in a section of its own.
- ``algorithm.token_weights.share_forward``: ``auto`` takes a saliency on the forward that recomputes the old
  log-probabilities wherever that cannot change a result, ``true`` does the same and refuses a run in which it cannot, ``false``
  always runs a pass of its own.
- ``algorithm.token_weights.skip_zero_advantage``: ``auto`` leaves out responses whose token advantages are all 0 wherever the
  update stays the same to float rounding, ``true`` does the same and refuses a run in which it would not, ``false``, the
  default, runs every response.
- ``algorithm.token_weights.answer``: the format of answers, see :mod:`grail_advantage.answers.format`; ``missing_answers``:
  what happens where responses have none, see :mod:`grail_advantage.answers.missing`.
- ``algorithm.token_weights.base``: the estimator of verl's registry that gives the advantage of a response, which token weights
  multiply. ``grpo``, the default, is the one that counts several outputs of a session as one response.
- ``algorithm.token_weights.trainer_module``: a module that registers trainers of one's own, see docs/own_trainer.md.
- ``algorithm.token_dump``: ``folder`` for every token's score, weight and advantage, of so many ``responses`` a step,
  ``every`` so many steps, and with ``received`` what each token received in the update; see docs/token_dump.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf

from grail_advantage.answers.format import BOXED, AnswerFormat, answer_format
from grail_advantage.answers.missing import CHOICES, check_choice
from grail_advantage.dump import DumpOptions
from grail_advantage.method import RESERVED, Method, build, methods
from grail_advantage.methods.turns import TurnMethod

SECTION = "algorithm.token_weights"
METHOD = "algorithm.adv_estimator"
SHARE = f"{SECTION}.share_forward"
SKIP = f"{SECTION}.skip_zero_advantage"
BASE = f"{SECTION}.base"
BASES = ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline")
"""Estimators of verl's that are tested as the base."""
TRAINER_MODULE = f"{SECTION}.trainer_module"
TRAINER_MODE = "trainer.v1.trainer_mode"
TRAINER_MODES = ("sync", "colocate_async", "separate_async")
"""verl's own values of it."""
TRAINER_PREFIX = "grail_"
"""Trainer ``grail_<mode>`` is trainer ``<mode>`` with token weights."""
DUMP = "algorithm.token_dump."
DUMP_FOLDER, DUMP_EVERY = f"{DUMP}folder", f"{DUMP}every"
TOOL_REWARDS, CALL_REWARDS = "tool_rewards", "call_rewards"
"""Fields of an agent loop with the rewards of calls: one flat list, by verl; one list for each turn that called, by
:mod:`grail_advantage.verl_ext.tool_agent`, with ``None`` where a tool gave none."""
PARALLEL_CALLS = "actor_rollout_ref.rollout.multi_turn.max_parallel_calls"
AGENT_LOOPS = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
"""A file with agent loops beside verl's own."""
ENGINES = ("fsdp", "fsdp2")
"""Values of ``actor_rollout_ref.actor.strategy``: the engines of verl's in which this project runs code of its own."""

ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))
CORRECTION = "algorithm.rollout_correction"
BYPASS = f"{CORRECTION}.bypass_mode"
KL_IN_REWARD = "algorithm.use_kl_in_reward"
PACKED, ATTENTION = f"{MODEL}.use_remove_padding", f"{MODEL}.override_config.attn_implementation"
SLICES = tuple(f"{ACTOR}.{section}ulysses_sequence_parallel_size" for section in ("", "fsdp_config."))
"""The two places where verl has this option."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run's configuration, whatever its estimator."""

    config: Mapping[str, Any]
    """Resolved, as plain mappings; with this package's defaults in :class:`Settings`."""
    kind: str | None = None
    """verl's name for the kind of trainer; ``None`` where no trainer has the name that is asked for, and in the trainer's own
    process."""

    @classmethod
    def parse(cls, config: DictConfig, kind: str | None = None) -> Self:
        """Take over a run's configuration; a method's has more to say (:meth:`Settings.parse`)."""
        return cls(config=OmegaConf.to_container(config, resolve=True), kind=kind)

    def __getitem__(self, option: str) -> Any:
        """The value of an option by its full name; ``None`` where the configuration does not have it."""
        value: Any = self.config
        for name in option.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that share a sequence."""
        return max(self[name] or 1 for name in SLICES)

    def named(self, option: str) -> str:
        """``option=value``, for messages."""
        return f"{option}={self[option]}"

    @property
    def longest(self) -> int:
        """Tokens of prompt and response, the most that there can be."""
        longest = self[f"{ROLLOUT}.prompt_length"] + self[f"{ROLLOUT}.response_length"]
        return min(longest, self[f"{ROLLOUT}.max_model_len"] or longest)


@dataclass(frozen=True, kw_only=True)
class Settings(RunConfig):
    """The configuration of a run with a method, as far as this package reads it."""

    method: str
    signal: Method
    answer: AnswerFormat
    missing_answers: str
    base: str
    """The estimator of the base advantage."""
    share_forward: str | bool
    skip_zero_advantage: str | bool
    dump: DumpOptions | None
    """``None`` without a folder."""

    @classmethod
    def parse(cls, config: DictConfig, kind: str | None = None) -> Self:
        """Parse the configuration of a run with a method.

        Raises:
            ValueError: an unknown method, option or value; naming the option and the remedy.
        """
        plain: Any = OmegaConf.to_container(config, resolve=True)
        algorithm = plain["algorithm"]
        for name in RESERVED:
            algorithm[name] = {**algorithm_sections()[name], **(algorithm.get(name) or {})}
        ours = algorithm["token_weights"]
        ours["base"] = ours["base"] or BASES[0]
        check_choice(ours["missing_answers"], f"{SECTION}.missing_answers")
        for name in ("share_forward", "skip_zero_advantage"):
            if ours[name] != "auto" and not isinstance(ours[name], bool):
                raise ValueError(f"{SECTION}.{name}={ours[name]!r} is unknown; choose one of auto, true, false")
        try:
            answer = answer_format(ours["answer"])
        except ValueError as error:
            raise ValueError(f"{SECTION}.{error}") from error
        return cls(
            method=algorithm["adv_estimator"],
            signal=_signal(algorithm),
            answer=answer,
            missing_answers=ours["missing_answers"],
            base=ours["base"],
            share_forward=ours["share_forward"],
            skip_zero_advantage=ours["skip_zero_advantage"],
            dump=_dump_options(algorithm["token_dump"]),
            config=plain,
            kind=kind,
        )

    @property
    def lora_rank(self) -> int:
        """The adapter's rank; 0 without an adapter."""
        return max(self[f"{MODEL}.{name}"] or 0 for name in ("lora_rank", "lora.rank"))

    @property
    def attention(self) -> str:
        """The implementation of the attention, which verl sets where nobody does."""
        return str(self[ATTENTION] or "flash_attention_2")

    @property
    def one_reward_a_turn(self) -> str:
        """The field in which as many rewards as turns are one each: verl's own agent loops make one call a turn at most. Empty
        where that is not certain."""
        if self[PARALLEL_CALLS] != 1 or self[AGENT_LOOPS] or not isinstance(self.signal, TurnMethod):
            return ""
        return self.signal.rewards if self.signal.align == "calls" else ""


def algorithm_sections() -> dict[str, Any]:
    """Returns the sections below ``algorithm`` that verl does not have: those of all registered methods, every option at its
    default (``None`` where that depends on others), and those of the trainer."""
    sections: dict[str, Any] = {
        "token_weights": {
            "share_forward": "auto",
            "skip_zero_advantage": False,
            "trainer_module": None,
            "answer": BOXED.name,
            "missing_answers": CHOICES[0],
            "base": BASES[0],
        },
        "token_dump": {"folder": None, "every": 1, "responses": 64, "received": True},
    }
    for method, cls in methods().items():
        sections[cls.section] = {
            # A mapping stays open: Hydra takes new keys in place of nothing only.
            name: None if isinstance(field.default, dict) else field.default
            for name, field in cls.model_fields.items()
            if name not in cls.names[method]
        }
    return sections


def _signal(algorithm: Mapping[str, Any]) -> Method:
    """The method with the options of its section."""
    name = algorithm["adv_estimator"]
    known = methods().get(name)
    return build(name, algorithm.get(known.section) if known else None)


def _dump_options(section: Mapping[str, Any]) -> DumpOptions | None:
    folder = section["folder"]
    options = DumpOptions(**{**section, "folder": Path(str(folder))})
    return None if folder is None else options


def import_trainer_module(name: str | None) -> ModuleType | None:
    """The module of ``algorithm.token_weights.trainer_module``, if there is one.

    Raises:
        ValueError: the module cannot be imported.
    """
    if not name:
        return None
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ValueError(f"{TRAINER_MODULE}={name} failed to import: {type(error).__name__}: {error}") from error
