"""Start-up checks of the recipe: what the machine has, and where the data lies. Settings are in :mod:`recipe.rules`.

:mod:`recipe.launch` calls :func:`check_host` before anything is prepared, so nothing that takes seconds is imported here.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import socket
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

FILES = ("data.train_files", "data.val_files")
LONGEST_SOCKET = 107
"""Bytes of a Unix socket's path."""
CONNECTION_SECONDS, SHARED_MEMORY = 10.0, 1 << 30
"""For the address of a cluster; bytes of shared memory below which a warning says so."""


def check_host(*, own_ray: bool) -> None:
    """Check what a run that starts needs of the machine: a home, temporary files, and Ray's cluster.

    Args:
        own_ray: whether the run starts a Ray of its own in any case.

    Raises:
        ValueError: naming the variable and the remedy.
    """
    check_interpreter()
    check_home()
    check_temporary(ray=own_ray or os.environ.get("RAY_ADDRESS", "") in ("", "local"))
    if not own_ray:
        check_cluster()
    shared = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").total
    if shared < SHARED_MEMORY:
        text = f"WARNING: /dev/shm has {shared >> 20} MiB, and Ray, vLLM and NCCL use it; give a container more"
        print(f"{text} (docker run --shm-size=16g)", file=sys.stderr, flush=True)


def check_home() -> None:
    """Refuse a home in which Ray cannot keep its token, or ``datasets`` what it has read.

    Raises:
        ValueError: naming the remedy.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    written = [os.environ.get("HF_DATASETS_CACHE") or os.environ.get("HF_HOME") or f"{cache}/huggingface"]
    token = os.path.expanduser("~/.ray/auth_token")
    has_token = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")) or os.access(
        token, os.R_OK
    )
    if os.environ.get("RAY_AUTH_MODE", "token").lower() == "token" and not has_token:
        written.append("~/.ray")
    for name in written:
        if problem := unwritable(Path(os.path.expanduser(name))):
            raise ValueError(
                f"HOME={os.environ.get('HOME', 'unset')}: {problem}; set HOME to a folder that you can write to, such as "
                f"HOME={tempfile.gettempdir()}/home"
            )


def check_temporary(*, ray: bool = True) -> None:
    """Refuse a folder of temporary files that cannot be written, or is too long for the sockets in it.

    Args:
        ray: also for a Ray that starts.

    Raises:
        ValueError: naming the variable and the remedy.
    """
    # vLLM's, of the length of an UUID, is longer than those of verl_cpu.workers and multiprocessing.
    sockets = {"TMPDIR": Path(os.environ.get("TMPDIR") or "/tmp", "0" * 36)}
    if ray:
        name = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
        session = f"session_{'0' * 26}_{os.getpid()}"
        sockets[name] = Path(os.environ.get(name, "/tmp"), "ray", session, "sockets", "plasma_store")
    for name, path in sockets.items():
        problem = None if path.is_absolute() else "it is no absolute path"
        if len(os.fsencode(path)) > LONGEST_SOCKET:
            problem = f"it is too long for a socket in it ({len(os.fsencode(path))} bytes, of {LONGEST_SOCKET})"
        if problem := problem or unwritable(path):
            value = os.environ.get(name, "unset")
            raise ValueError(f"{name}={value}: {problem}; set it to a short folder that you can write to, such as /tmp")


def unwritable(folder: Path) -> str | None:
    """Why a folder cannot be made and written to."""
    if not folder.is_absolute():
        return f"there is no folder for {folder}"
    try:
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    except OSError as error:  # of a name that is too long
        return str(error)
    return None if there.is_dir() and os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written to"


def check_cluster() -> None:
    """Refuse an address of a Ray cluster where nothing answers.

    Raises:
        ValueError: naming the remedy.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local", "auto"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECTION_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({error}); start it (docs/multi_node.md), or unset the "
            "variable, and the run starts a Ray of its own"
        ) from None


def check_machine(config: DictConfig) -> None:
    """Check what a run finds here: TRL, the interpreter's place, and its files of data.

    Raises:
        ValueError: naming the option and the remedy.
    """
    check_trl()
    check_interpreter()
    check_model(config)
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
                f"Ray does not start from {path}, because of the quote or backslash in it; make the environment below a "
                "folder without them"
            )


def check_model(config: DictConfig) -> None:
    """Refuse a model's folder in which vLLM, which looks by a pattern, finds no weights. The CPU's vLLM gets a link.

    Raises:
        ValueError: naming the remedy.
    """
    path = str(config.actor_rollout_ref.model.path)
    reads = config.actor_rollout_ref.rollout.load_format != "dummy" and os.environ.get("VERL_PLATFORM") != "cpu"
    if reads and glob.escape(path) != path and os.path.isdir(path):
        raise ValueError(
            f"actor_rollout_ref.model.path={path}: vLLM takes it for a pattern and finds no weights; use a folder "
            "without * ? [, or a symbolic link to this one"
        )


def files_of(config: DictConfig, option: str) -> list[str]:
    """The files of data that an option names."""
    files = OmegaConf.select(config, option)
    return [files] if isinstance(files, str) else list(files or ())


def read_by_datasets(config: DictConfig) -> bool:
    """Whether verl's own data set reads the files where they lie: ``datasets.load_dataset(data_files=FILE)``."""
    return not config.data.get("use_shm") and OmegaConf.select(config, "data.custom_cls.path") is None


def check_file(option: str, file: str, *, made: bool = False) -> None:
    """Refuse a file of data in whose path ``datasets`` puts a variable's value, or which it takes for a chain of URLs.

    Args:
        made: it will be there, or is.

    Raises:
        ValueError: naming the option and the remedy.
    """
    whole = Path(file).expanduser().absolute()
    for path in (whole, *whole.parents) if "://" not in file else ():
        if ("::" in path.name or os.path.expandvars(path.name) != path.name) and (made or path.exists()):
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
            f"verl {version('verl')} imports {name} from any TRL that it finds, and the one in {folder} has no such class, "
            "so that verl's workers would fail; take TRL out of this environment (docs/trl.md)"
        )
