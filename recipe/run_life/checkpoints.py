"""The checkpoints in a run's folder: which of them are whole, and from which one a run resumes.

verl writes ``global_step_N`` file by file, then ``latest_checkpointed_iteration.txt``, and only then logs the step's metrics
(``PPOTrainer.fit``). A run that is killed in between leaves half a checkpoint, or a whole one of a step that no log knows. So a
checkpoint counts once its step is logged. ``run_state.json`` in it says that, and from the beginning which run saves it.
Needs no verl.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATE = "run_state.json"
TRACKER = "latest_checkpointed_iteration.txt"
"""verl's: the step of the last checkpoint."""
PARTS = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
"""Parts of an FSDP checkpoint (``FSDPCheckpointManager.save_checkpoint``), and how their files begin."""
CONTENT = ("actor", "critic", "data.pt", "transfer_queue")
"""Names that verl writes in ``global_step_N``."""
MOST_RANKS = 1 << 16
_NAME = re.compile(r"global_step_(\d{1,15})")


@dataclass(frozen=True)
class Checkpoint:
    """A folder ``global_step_N``."""

    path: Path

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return int(_NAME.fullmatch(self.path.name)[1])

    @property
    def record(self) -> dict[str, Any]:
        """``run_state.json``; empty where it cannot be read."""
        return read_json(self.path / STATE) or {}

    @property
    def state(self) -> dict[str, Any] | None:
        """The state that the run resumes with; ``None`` where the step is not logged."""
        record = self.record
        return record if record.get("step") == self.step else None


def is_checkpoint(path: Path) -> bool:
    """Whether it is a folder with a checkpoint's name."""
    return _NAME.fullmatch(path.name) is not None and path.is_dir()


def checkpoints(folder: Path) -> list[Checkpoint]:
    """All of a folder, whole or not, in the order of their steps."""
    each = [Checkpoint(path) for path in Path(folder).glob("global_step_*") if is_checkpoint(path)]
    return sorted(each, key=lambda checkpoint: checkpoint.step)


def tracked_step(folder: Path) -> int | None:
    """The step that verl's tracker names; ``None`` where it is missing, or was cut off by a kill."""
    try:
        return int((Path(folder) / TRACKER).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def damage(path: Path, parts: Sequence[str], *, critic: bool = False) -> list[str]:
    """Files of an FSDP checkpoint that are missing or cut off; empty where it is whole.

    Every rank's file must end as one of ``torch.save`` does, a zip archive whose directory comes last. Its content is not read.

    Args:
        path: ``global_step_N``.
        parts: of ``PARTS``, those that will be loaded.
        critic: whether the run has one.
    """
    files = ["data.pt"]
    for role in ("actor", *(["critic"] if critic else [])):
        ranks = world_size(path, role)
        if ranks is None:
            files.append(f"{role}/fsdp_config.json")
        for rank in range(ranks or 0):
            files += [f"{role}/{PARTS[part]}_world_size_{ranks}_rank_{rank}.pt" for part in parts]
    return [name for name in files if not _is_archive(path / name)]


def world_size(path: Path, role: str = "actor") -> int | None:
    """How many ranks saved a checkpoint of FSDP; ``None`` where it does not say."""
    ranks = (read_json(path / role / "fsdp_config.json") or {}).get("world_size")
    return ranks if isinstance(ranks, int) and 0 < ranks <= MOST_RANKS else None


def _is_archive(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except OSError:
        return False


def choose_start(folder: Path, damage_of: Callable[[Path], list[str]]) -> tuple[Checkpoint | None, list[str]]:
    """Where a run resumes, and why it is not the last checkpoint: at the one that verl's tracker names, or the last good one
    before it; ``None`` is the beginning.

    Args:
        folder: with the checkpoints.
        damage_of: as :func:`damage`.

    Raises:
        ValueError: there was a checkpoint, and none is whole any more.
    """
    every, tracked = checkpoints(folder), tracked_step(folder)
    if not every or (tracked is None and not any(checkpoint.state for checkpoint in every)):
        return None, []  # not one was finished
    notes: list[str] = []
    unlogged: Checkpoint | None = None
    for checkpoint in reversed(every):
        if tracked is not None and checkpoint.step > tracked:
            continue
        broken = damage_of(checkpoint.path)
        if broken and (tracked is None or checkpoint.step == tracked):
            notes.append(f"{checkpoint.path} is not whole: {', '.join(broken)} missing or cut off")
        elif not broken and checkpoint.state is None:
            unlogged = unlogged or checkpoint
        elif not broken:
            if unlogged is not None:
                step = unlogged.step
                notes.append(
                    f"{unlogged.path} was saved, but the run ended before it logged the metrics of step {step}"
                )
            return checkpoint, notes
    if unlogged is not None:
        return unlogged, notes
    raise ValueError(
        f"{folder} holds no whole checkpoint: {'; '.join(notes) or f'that of step {tracked} is missing'}. Put the files "
        "back, or start over with trainer.resume_mode=disable (FRESH=1 of the launch scripts)"
    )


def settle_start(folder: Path, start: Checkpoint | None, *, trains: bool = True) -> None:
    """Has verl resume from a checkpoint of this folder. Those of later steps count no more, since these are taken again.

    Args:
        folder: with the checkpoints.
        start: where the run resumes; ``None`` at the beginning.
        trains: whether steps are taken at all.
    """
    step = start.step if start is not None else 0
    for checkpoint in checkpoints(folder) if trains else []:
        if checkpoint.step > step and checkpoint.state is not None:
            write_json(checkpoint.path / STATE, {"run": checkpoint.state.get("run")})
    if start is not None and tracked_step(folder) != step:
        write_whole(Path(folder) / TRACKER, str(step).encode())


def keep_last(folder: Path, step: int, count: int, run: str) -> None:
    """Removes this run's checkpoints up to a step but the last ``count``, as far as verl and this package wrote them.

    verl counts those of one start of a run only (``BaseCheckpointManager.previous_saved_paths``).
    """
    own = [each for each in checkpoints(folder) if each.step <= step and each.record.get("run") == run]
    for checkpoint in own[:-count]:
        for name in CONTENT:
            path = checkpoint.path / name
            with suppress(FileNotFoundError):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        (checkpoint.path / STATE).unlink(missing_ok=True)
        with suppress(OSError):  # it holds something else
            checkpoint.path.rmdir()


def read_json(path: Path) -> dict[str, Any] | None:
    """The mapping in a JSON file; ``None`` where there is none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file with :func:`write_whole`; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file such that it appears whole and on the disk, or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
