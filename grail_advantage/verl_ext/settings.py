"""What a run's configuration says about token weights. Needs no verl, so that it can be asked before verl is imported.

- ``algorithm.adv_estimator``: the method, by its registered name; its options stand in the section of its own.
- ``algorithm.token_weights.share_forward``: ``auto`` takes a saliency on the forward that recomputes the old
  log-probabilities wherever that cannot change a result, ``true`` does the same and refuses a run in which it cannot, ``false``
  always runs a pass of its own.
- ``algorithm.token_weights.trainer_module``: a module that registers trainers of one's own, see docs/own_trainer.md.
- ``algorithm.token_dump``: ``folder`` for every token's score, weight and advantage, of ``rows`` rows a step, ``every`` so many
  steps; see docs/token_dump.md.
- ``algorithm.watchdog``: ``enabled``, and how many seconds a phase of a step (``phase_timeout``), and one that takes long
  (``long_phase_timeout``), may last; see docs/endings.md.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grail_advantage.methods import method, methods
from grail_advantage.options import option_fields
from grail_advantage.registry import RESERVED
from grail_advantage.signals.base import Signal
from grail_advantage.signals.saliency import SaliencySignal

SHARE_FORWARD = "algorithm.token_weights.share_forward"
TRAINER_MODULE = "algorithm.token_weights.trainer_module"
DUMP_FOLDER = "algorithm.token_dump.folder"
DUMP_EVERY = "algorithm.token_dump.every"
DUMP_ROWS = "algorithm.token_dump.rows"
WATCHDOG = "algorithm.watchdog"
RUN_DEFINITION = "run_definition.json"
"""What defines a run, beside its checkpoints (:mod:`recipe.run_life.identity`)."""
MOVED = {"algorithm.fuse_saliency_pass": SHARE_FORWARD, "algorithm.token_weights_dir": DUMP_FOLDER}
"""Options of 0.1 and what they are called now."""


def algorithm_sections() -> dict[str, Any]:
    """What belongs below ``algorithm`` beside verl's own options: the sections of all registered methods, every option at its
    default (``None`` where that depends on others), and those of the trainer."""
    sections: dict[str, Any] = {
        "token_weights": {"share_forward": "auto", "trainer_module": None},
        "token_dump": {"folder": None, "every": 1, "rows": 64},
        "watchdog": {"enabled": True, "phase_timeout": 7200, "long_phase_timeout": 14400},
        # So that an old name gets to check_names.
        **{old.removeprefix("algorithm."): None for old in MOVED},
    }
    for found in methods().values():
        sections[found.section] = {
            # A mapping stays open: Hydra takes new keys in place of nothing only.
            name: None if isinstance(field.default, dict) else field.default
            for name, field in option_fields(found.signal_class).items()
            if name not in found.fixed
        }
    return sections


def signal_of(algorithm: DictConfig) -> Signal:
    """The method of ``algorithm.adv_estimator`` with the options of its section.

    Raises:
        ValueError: an unknown method, option or value.
    """
    found = method(algorithm.adv_estimator)
    section = algorithm.get(found.section) or {}
    return found.build(OmegaConf.to_container(OmegaConf.create(section), resolve=True))


def check_names(config: DictConfig) -> None:
    """Refuse options of 0.1, and names that nobody reads but that look like ours: a ``+`` takes any.

    Raises:
        ValueError: naming the right one.
    """
    for old, new in MOVED.items():
        if OmegaConf.select(config, old) is not None:
            raise ValueError(f"{old} is called {new} now")
    sections = algorithm_sections()
    verls = OmegaConf.load(Path(find_spec("verl").origin).parent / "trainer" / "config" / "ppo_trainer.yaml").algorithm
    for found in methods().values():
        if found.section in verls:
            raise ValueError(
                f"the method {found.name} wants the section algorithm.{found.section}, which is an option of verl's"
            )
    for name in config.algorithm:
        meant = difflib.get_close_matches(str(name), sections, n=1, cutoff=0.75)
        if name not in sections and meant and name not in verls:
            raise ValueError(f"algorithm.{name} is no section that anything reads; is algorithm.{meant[0]} meant?")
    for section in RESERVED:
        for name in config.algorithm.get(section) or {}:
            if name not in sections[section]:
                known = ", ".join(sections[section])
                raise ValueError(f"algorithm.{section}.{name} is not an option; the options are {known}")


def import_trainer_module(config: DictConfig) -> None:
    """Import the module that registers trainers of one's own, if one is named.

    Raises:
        ValueError: it cannot be imported.
    """
    import_module(OmegaConf.select(config, TRAINER_MODULE))


def import_trainers(module: str | None) -> None:
    """Register this project's trainers with verl, and those of a module."""
    importlib.import_module("grail_advantage.verl_ext.trainers")
    import_module(module)


def import_module(name: str | None) -> None:
    """See :func:`import_trainer_module`."""
    if not name:
        return
    try:
        importlib.import_module(name)
    except Exception as error:
        raise ValueError(f"{TRAINER_MODULE}={name} failed to import: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class DumpOptions:
    """The options of ``algorithm.token_dump``."""

    folder: Path
    every: int
    rows: int | None
    """Rows a step; ``None`` for all."""


def dump_options(config: DictConfig) -> DumpOptions | None:
    """What is to be dumped, if anything.

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
        # The trainer runs in a process of its own, wherever that starts.
        absolute = Path(str(folder)).expanduser().absolute()
        raise ValueError(
            f"{DUMP_FOLDER}={folder} must be an absolute path, on the machine of the trainer; use {absolute}"
        )
    return DumpOptions(Path(str(folder)), every, rows)


@dataclass(frozen=True)
class WatchdogOptions:
    """The options of ``algorithm.watchdog``; seconds."""

    phase_timeout: float
    long_phase_timeout: float


def watchdog_options(config: DictConfig) -> WatchdogOptions | None:
    """The time limits of a run; ``None`` where nothing watches it.

    Raises:
        ValueError: a value that is not allowed.
    """
    section = {**algorithm_sections()["watchdog"], **(OmegaConf.select(config, WATCHDOG) or {})}
    enabled = section.pop("enabled")
    if not isinstance(enabled, bool):
        raise ValueError(f"{WATCHDOG}.enabled={enabled!r} must be true or false")
    for name, seconds in section.items():
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise ValueError(f"{WATCHDOG}.{name}={seconds!r} must be a number of seconds above 0")
    return WatchdogOptions(**section) if enabled else None


def shares_forward(config: DictConfig, signal: Signal) -> bool:
    """Whether this run takes the signal on the forward of the old log-probabilities."""
    return _share_choice(config) is not False and _obstacle(config, signal) is None


def check_share_forward(config: DictConfig, signal: Signal) -> None:
    """Refuse an unknown value, and ``true`` where the forward cannot be shared.

    Raises:
        ValueError: naming the option and the remedy.
    """
    found = _obstacle(config, signal)
    if _share_choice(config) is True and found is not None:
        setting, reason = found
        raise ValueError(f"{SHARE_FORWARD}=True does not work with {setting}: {reason}; use auto")


def _share_choice(config: DictConfig) -> str | bool:
    choice = OmegaConf.select(config, SHARE_FORWARD, default="auto")
    if choice != "auto" and not isinstance(choice, bool):
        raise ValueError(f"{SHARE_FORWARD}={choice!r} is unknown; choose one of auto, true, false")
    return choice


def _obstacle(config: DictConfig, signal: Signal) -> tuple[str, str] | None:
    """The setting that rules a shared forward out, as ``option=value``, and why; ``None`` where nothing does."""
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
