"""The options of a run's configuration for token weights. Needs no verl, so that they can be read before verl is imported.

- ``algorithm.adv_estimator``: the method, by its registered name; its options are in a section of its own.
- ``algorithm.token_weights.share_forward``: ``auto`` takes a saliency on the forward that recomputes the old
  log-probabilities wherever that cannot change a result, ``true`` does the same and refuses a run in which it cannot, ``false``
  always runs a pass of its own.
- ``algorithm.token_weights.skip_zero_advantage``: see :mod:`grail_advantage.verl_ext.zero_advantage_rules`.
- ``algorithm.token_weights.answer``: the format of answers, see :mod:`grail_advantage.answers.format`; ``missing_answers``:
  what happens where responses have none, see :mod:`grail_advantage.answers.missing`.
- ``algorithm.token_weights.base``: the estimator of verl's registry that gives the advantage of a response, which token weights
  multiply. ``grpo``, the default, is the one that counts several outputs of a session as one response.
- ``algorithm.token_weights.trainer_module``: a module that registers trainers of one's own, see docs/own_trainer.md.
- ``algorithm.token_dump``: ``folder`` for every token's score, weight and advantage, of ``rows`` rows a step, ``every`` so many
  steps; see docs/token_dump.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grail_advantage.answers.format import BOXED, AnswerFormat, answer_format
from grail_advantage.answers.missing import CHOICES, check_choice
from grail_advantage.batch import ENTROPY
from grail_advantage.methods import method, methods
from grail_advantage.options import option_fields
from grail_advantage.signals.base import HIDDEN_STATES, LOGITS, SEQUENCES, Signal
from grail_advantage.signals.saliency import SaliencySignal

SECTION = "algorithm.token_weights"
SHARE_FORWARD = f"{SECTION}.share_forward"
BASE = f"{SECTION}.base"
BASES = ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline")
"""Estimators of verl's that are tested as the base."""
ENGINES = ("fsdp", "fsdp2")
"""Values of ``actor_rollout_ref.actor.strategy``: the engines of verl's in which this project runs code of its own."""
DUMP_FOLDER = "algorithm.token_dump.folder"
DUMP_EVERY = "algorithm.token_dump.every"
DUMP_ROWS = "algorithm.token_dump.rows"
NEEDED_WHOLE = {LOGITS: "logits", SEQUENCES: "logits of made-up sequences", HIDDEN_STATES: "hidden states"}
"""Outputs of a model that neither fused kernels nor a rank of a sequence-parallel group has whole, for messages."""


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
        "token_dump": {"folder": None, "every": 1, "rows": 64},
    }
    for each in methods().values():
        sections[each.section] = {
            # A mapping stays open: Hydra takes new keys in place of nothing only.
            name: None if isinstance(field.default, dict) else field.default
            for name, field in option_fields(each.signal_class).items()
            if name not in each.fixed
        }
    return sections


def signal_of(algorithm: DictConfig) -> Signal:
    """The method of ``algorithm.adv_estimator`` with the options of its section.

    Raises:
        ValueError: an unknown method, option or value.
    """
    chosen = method(algorithm.adv_estimator)
    section = algorithm.get(chosen.section) or {}
    return chosen.build(OmegaConf.to_container(OmegaConf.create(section), resolve=True))


def answer_of(config: DictConfig) -> AnswerFormat:
    """The format of answers.

    Raises:
        ValueError: no format; naming the option and the remedy.
    """
    try:
        return answer_format(OmegaConf.select(config, f"{SECTION}.answer", default=BOXED.name))
    except ValueError as error:
        raise ValueError(f"{SECTION}.{error}") from error


def parse_missing_answers(config: DictConfig) -> str:
    """Returns what happens where responses have no answer: ``stop``, ``warn`` or ``ignore``.

    Raises:
        ValueError: another value.
    """
    choice = OmegaConf.select(config, f"{SECTION}.missing_answers", default=CHOICES[0])
    check_choice(choice, f"{SECTION}.missing_answers")
    return choice


def base_of(config: DictConfig) -> str:
    """The name of the estimator of the base advantage."""
    return OmegaConf.select(config, BASE, default=None) or BASES[0]


@dataclass(frozen=True)
class DumpOptions:
    """The options of ``algorithm.token_dump``."""

    folder: Path
    every: int
    rows: int | None
    """Rows a step; ``None`` for all."""


def dump_options(config: DictConfig) -> DumpOptions | None:
    """Returns the options of the token dump; ``None`` where no folder is set.

    Raises:
        ValueError: a value that is not allowed.
    """
    section = {**algorithm_sections()["token_dump"], **(OmegaConf.select(config, "algorithm.token_dump") or {})}
    folder, every, rows = section["folder"], section["every"], section["rows"]
    if every is None or isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"{DUMP_EVERY}={every!r} must be a whole number of steps, at least 1")
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise ValueError(f"{DUMP_ROWS}={rows!r} must be a whole number, at least 1, or null for all rows")
    if folder is None:
        return None
    if not Path(str(folder)).is_absolute():
        # The trainer runs in another process, whose working folder may be another one.
        absolute = Path(str(folder)).expanduser().absolute()
        raise ValueError(
            f"{DUMP_FOLDER}={folder} must be an absolute path, on the machine of the trainer; use {absolute}"
        )
    return DumpOptions(Path(str(folder)), every, rows)


def shares_forward(config: DictConfig, signal: Signal) -> bool:
    """Whether this run takes the signal on the forward of the old log-probabilities."""
    return share_choice(config) is not False and share_obstacle(config, signal) is None


def share_choice(config: DictConfig) -> str | bool:
    """The value of ``share_forward``."""
    return auto_or_bool(config, SHARE_FORWARD, default="auto")


def auto_or_bool(config: DictConfig, option: str, *, default: str | bool) -> str | bool:
    """The value of an option that is ``auto``, ``true`` or ``false``.

    Raises:
        ValueError: another value.
    """
    choice = OmegaConf.select(config, option, default=default)
    if choice != "auto" and not isinstance(choice, bool):
        raise ValueError(f"{option}={choice!r} is unknown; choose one of auto, true, false")
    return choice


def share_obstacle(config: DictConfig, signal: Signal) -> tuple[str, str] | None:
    """Returns the setting that rules a shared forward out, as ``option=value``, and the reason; ``None`` where none does."""
    algorithm = config.algorithm
    if not (isinstance(signal, SaliencySignal) and signal.on_any_forward):
        return (
            f"algorithm.adv_estimator={algorithm.adv_estimator}",
            "its signal is no saliency, or runs in a way of its own",
        )
    if OmegaConf.select(algorithm, "rollout_correction.bypass_mode", default=False):
        return "algorithm.rollout_correction.bypass_mode=True", "no old log-probabilities are computed"
    if algorithm.get("use_kl_in_reward", False):
        return "algorithm.use_kl_in_reward=True", "the advantages, and so the rows, depend on the old log-probabilities"
    return None


def works_with_sequence_parallel(signal: Signal) -> bool:
    """Whether each rank may hold a slice of the rows."""
    return signal.uses not in NEEDED_WHOLE


def works_with_fused_kernels(signal: Signal) -> bool:
    """Whether verl's fused forward is enough, whose output is log-probabilities alone."""
    return signal.uses not in NEEDED_WHOLE


def works_with_bypass(signal: Signal) -> bool:
    """Whether the rollout's log-probabilities may replace the old ones, so that no forward gives an entropy."""
    return ENTROPY not in signal.reads
