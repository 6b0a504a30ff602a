"""The checkpoints in a run's folder: which of them are whole, and from which one a run carries on.

verl writes ``global_step_N`` file by file, then ``latest_checkpointed_iteration.txt``, and only then logs the step's metrics
(``PPOTrainer.fit``). A run that is killed in between leaves half a checkpoint, or a whole one of a step that no log knows. So a
checkpoint counts once its step is logged, which ``run_state.json`` in it says (:mod:`recipe.run_life.trainer`).
Needs no verl.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATE = "run_state.json"
"""In a checkpoint whose step is logged: the step, when the run ends, and the state of the trainer's own process."""
TRACKER = "latest_checkpointed_iteration.txt"
"""verl's: the step of the last checkpoint."""
PARTS = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
"""What a worker saves (``FSDPCheckpointManager.save_checkpoint``), and how its files begin."""
MOST_RANKS = 1 << 16
"""A file that says more was not written by a run."""
_NAME = re.compile(r"global_step_(\d{1,15})")


@dataclass(frozen=True)
class Checkpoint:
    """A folder ``global_step_N``."""

    path: Path

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        named = _NAME.fullmatch(self.path.name)
        if named is None:
            raise ValueError(f"{self.path} is not named global_step_N")
        return int(named[1])

    @property
    def state(self) -> dict[str, Any] | None:
        """What :func:`write_state` wrote; ``None`` where the step is not logged, or the file cannot be read."""
        try:
            found = json.loads((self.path / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) and found.get("step") == self.step else None


@dataclass(frozen=True)
class Start:
    """Where a run carries on, and what is to be said about it."""

    checkpoint: Checkpoint | None
    """``None``: at the beginning."""
    notes: tuple[str, ...] = ()
    """Why it is not the last one."""


def is_checkpoint(path: Path) -> bool:
    """Whether it is a folder with a checkpoint's name."""
    return _NAME.fullmatch(path.name) is not None and path.is_dir()


def checkpoints(folder: Path) -> list[Checkpoint]:
    """All of a folder, whole or not, in the order of their steps."""
    found = [Checkpoint(path) for path in Path(folder).glob("global_step_*") if is_checkpoint(path)]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def tracked_step(folder: Path) -> int | None:
    """The step that verl's tracker names; ``None`` where it is missing, or was cut off by a kill."""
    try:
        return int((Path(folder) / TRACKER).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def damage(path: Path, parts: Sequence[str], *, critic: bool = False) -> list[str]:
    """What of a checkpoint of FSDP is missing or cut off; empty where it is whole.

    The files of all ranks are looked for, and each must end as a file of ``torch.save`` does. What stands in them is not read.

    Args:
        path: ``global_step_N``.
        parts: of ``PARTS``, those that will be loaded.
        critic: whether the run has one.
    """
    found = [] if _ends(path / "data.pt") else ["data.pt"]
    for role in ("actor", *(["critic"] if critic else [])):
        ranks = world_size(path, role)
        if ranks is None:
            found.append(f"{role}/fsdp_config.json")
            continue
        names = (f"{PARTS[part]}_world_size_{ranks}_rank_{rank}.pt" for part in parts for rank in range(ranks))
        found += [f"{role}/{name}" for name in names if not _ends(path / role / name)]
    return found


def world_size(path: Path, role: str = "actor") -> int | None:
    """How many ranks saved a checkpoint of FSDP; ``None`` where it does not say."""
    try:
        ranks = json.loads((path / role / "fsdp_config.json").read_text(encoding="utf-8"))["world_size"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    return ranks if isinstance(ranks, int) and 0 < ranks <= MOST_RANKS else None


def _ends(path: Path) -> bool:
    """Whether a file of ``torch.save`` is there up to its end: it is a zip archive, whose directory comes last."""
    try:
        return zipfile.is_zipfile(path)
    except OSError:
        return False


def choose_start(folder: Path, damage_of: Callable[[Path], list[str]]) -> Start:
    """From which checkpoint a run carries on: the one that verl's tracker names, or the last good one before it.

    Args:
        folder: with the checkpoints.
        damage_of: as :func:`damage`.

    Raises:
        ValueError: there was a checkpoint, and none is whole any more.
    """
    found, tracked = checkpoints(folder), tracked_step(folder)
    if not found or (tracked is None and not any(checkpoint.state for checkpoint in found)):
        return Start(None)  # not one was finished
    notes: list[str] = []
    unlogged: Checkpoint | None = None
    for checkpoint in reversed(found):
        if tracked is not None and checkpoint.step > tracked:
            continue
        broken = damage_of(checkpoint.path)
        if broken:
            # verl thins old checkpoints out by removing their largest folder.
            if tracked is None or checkpoint.step == tracked:
                notes.append(f"{checkpoint.path} is not whole: {', '.join(broken)} missing or cut off")
        elif checkpoint.state is not None:
            if unlogged is not None:
                notes.append(
                    f"{unlogged.path} was saved, but the run ended before it logged the metrics of step {unlogged.step}"
                )
            return Start(checkpoint, tuple(notes))
        elif unlogged is None:
            unlogged = checkpoint
    if unlogged is not None:
        return Start(unlogged, tuple(notes))
    later = [checkpoint for checkpoint in found if tracked is not None and checkpoint.step > tracked]
    for checkpoint in reversed(later):
        if not damage_of(checkpoint.path):
            return Start(checkpoint, (*notes, f"{folder / TRACKER} names step {tracked}, which is not there"))
    raise ValueError(
        f"{folder} holds no whole checkpoint: {'; '.join(notes) or f'that of step {tracked} is missing'}. Put the files "
        "back, or start over with trainer.resume_mode=disable (FRESH=1 of the launch scripts)"
    )


def settle_start(folder: Path, start: Checkpoint | None, *, trains: bool = True) -> None:
    """Have verl carry on from a checkpoint of this folder; those of later steps count no more, since these are taken again.

    Args:
        folder: with the checkpoints.
        start: where the run goes on; ``None`` at the beginning.
        trains: whether steps are taken at all.
    """
    step = start.step if start is not None else 0
    for checkpoint in checkpoints(folder) if trains else []:
        if checkpoint.step > step:
            (checkpoint.path / STATE).unlink(missing_ok=True)
    if start is not None and tracked_step(folder) != step:
        write_whole(Path(folder) / TRACKER, str(step))


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Say of a checkpoint that its step is logged."""
    write_whole(path / STATE, json.dumps(state) + "\n")


def keep_last(folder: Path, step: int, count: int) -> list[Path]:
    """Remove all checkpoints up to this step but the last ``count``; returns what was removed.

    verl counts those of one life of a run only (``BaseCheckpointManager.previous_saved_paths``).
    """
    old = [checkpoint.path for checkpoint in checkpoints(folder) if checkpoint.step <= step][:-count]
    for path in old:
        (path / STATE).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    return old


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, text as UTF-8, such that it appears whole and on the disk, or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
