"""Start-up checks of the recipe: what the machine has, and where the data lies. Settings are in :mod:`recipe.rules`."""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from grail_advantage.verl_ext.checks import VERL_VERSION

FILES = ("data.train_files", "data.val_files")


def check_machine(config: DictConfig) -> None:
    """Check what a run finds here: TRL, the interpreter's place, and its files of data.

    Raises:
        ValueError: naming the option and the remedy.
    """
    check_trl()
    check_interpreter()
    for option in FILES if read_by_datasets(config) else ():
        for file in files_of(config, option):
            check_file(option, file)


def check_interpreter() -> None:
    """Refuse an environment below a folder from which Ray's server does not start, as it splits its workers' commands there.

    Raises:
        ValueError: naming the remedy.
    """
    for path in (sys.executable, getattr(find_spec("ray"), "origin", None) or ""):
        if re.search(r"['\\]", path):
            raise ValueError(
                f"Ray does not start from {path}, because of the quote or backslash in it; make the environment (for the "
                "scripts without a GPU: have the project) below a folder without them"
            )


def files_of(config: DictConfig, option: str) -> list[str]:
    """The files of data that an option names."""
    files = OmegaConf.select(config, option)
    return [files] if isinstance(files, str) else list(files or ())


def read_by_datasets(config: DictConfig) -> bool:
    """Whether verl's own data set reads the files where they lie: ``datasets.load_dataset(data_files=FILE)``."""
    return not config.data.get("use_shm") and OmegaConf.select(config, "data.custom_cls.path") is None


def check_file(option: str, file: str) -> None:
    """Refuse a file of data in whose path ``datasets`` puts a variable's value, or which it takes for a chain of URLs.

    Raises:
        ValueError: naming the option and the remedy.
    """
    whole = Path(file).expanduser().absolute()
    for path in (whole, *whole.parents) if "://" not in file else ():
        if ("::" in path.name or os.path.expandvars(path.name) != path.name) and path.exists():
            raise ValueError(
                f"{option}={file} cannot be read: datasets takes {path.name} for a variable or a URL; use a folder without :: "
                "and $ (DATA_DIR of the launch scripts, OUTPUT_DIR of those without a GPU, or the project's)"
            )


def check_trl() -> None:
    """Refuse a TRL beside verl that verl's workers fail over (``verl/models/transformers/monkey_patch.py``, line 354).

    Raises:
        ValueError: naming the remedy.
    """
    trl = find_spec("trl")
    if trl is None or trl.origin is None:
        return
    folder, name = Path(trl.origin).parent, "AutoModelForCausalLMWithValueHead"
    places = (folder / "__init__.py", folder / "experimental" / "ppo" / "__init__.py")
    if not any(place.is_file() and name in place.read_text(encoding="utf-8") for place in places):
        raise ValueError(
            f"verl {VERL_VERSION} imports {name} from any TRL that it finds, and the one in {folder} has no such class, "
            "so that verl's workers would fail; take TRL out of this environment (docs/trl.md)"
        )
