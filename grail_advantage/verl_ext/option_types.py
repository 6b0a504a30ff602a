"""Values that verl takes as they are and fails over in a worker: numbers and switches given as text, unknown loggers.

verl makes its dataclasses of the configuration without looking at types.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from importlib.resources import files
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.tracking import Tracking

PLAIN = {"data": {}, "trainer": dict.fromkeys(("total_training_steps", "max_actor_ckpt_to_keep"), int)}
"""Sections without a dataclass, where the values in verl's own file tell, with options that are ``null`` there."""


def check_types(config: DictConfig) -> None:
    """Refuse a text where verl's dataclass, or its file of :data:`PLAIN`, has a number or a switch; unknown loggers.

    Raises:
        ValueError: naming the option.
    """
    verls = OmegaConf.load(str(files("verl") / "trainer/config/_generated_ppo_trainer.yaml"))
    plain: Any = OmegaConf.to_container(config, resolve=True)
    for option, value, kinds in _texts(plain, OmegaConf.to_container(verls), ""):
        wanted = "True or False" if kinds == {bool} else "a number"
        raise ValueError(f"{option}={value!r} is a text; it must be {wanted}")
    loggers = plain["trainer"]["logger"]
    for logger in [loggers] if isinstance(loggers, str) else loggers or []:
        if logger not in (known := [*Tracking.supported_backend, "tracking"]):
            raise ValueError(f"trainer.logger={loggers}: {logger} is unknown; choose from {', '.join(known)}")


def _texts(section: Mapping[str, Any], verls: Any, path: str) -> Iterator[tuple[str, str, set[type]]]:
    """Options of a section that are texts, and the types that they should have."""
    known = dict(verls) if isinstance(verls, Mapping) else {}
    hints: dict[str, Any] = {name: type(value) for name, value in known.items()} if path in PLAIN else {}
    hints |= PLAIN.get(path, {})
    with suppress(Exception):  # a class of somebody else's, or one whose annotations cannot be evaluated
        target = load_class_from_fqn(section.get("_target_") or known["_target_"])
        hints |= typing.get_type_hints(target) if is_dataclass(target) else {}
    for name, value in section.items():
        option = f"{path}.{name}".lstrip(".")
        if isinstance(value, Mapping):
            yield from _texts(value, known.get(name), option)
        elif isinstance(value, str) and value != known.get(name):
            kinds = set(typing.get_args(hints.get(name)) or [hints.get(name)]) - {type(None), None}
            if kinds and kinds <= {int, float, bool}:
                yield option, value, kinds
