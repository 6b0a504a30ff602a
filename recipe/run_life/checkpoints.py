"""The checkpoints in a run's folder: which of them are whole, and from which one a run resumes. Needs no verl.

verl writes ``global_step_N`` file by file, then ``latest_checkpointed_iteration.txt``, and only then logs the step's metrics
(``PPOTrainer.fit``). A run that is killed in between leaves half a checkpoint, or a whole one of a step that no log knows. So a
checkpoint counts once its step is logged. ``run_state.json`` in it says that, and from the beginning which run saves it.

A bit that a disk or a copy flips changes the training without a word, as ``torch.load`` compares no checksum. ``torch.save``
computes them while it writes, one for each record of its zip archive; they are compared here before a run resumes.
"""

from __future__ import annotations

import json
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from grail_advantage.dump.whole_file import write_whole

STATE = "run_state.json"
TRACKER = "latest_checkpointed_iteration.txt"
"""verl's: the step of the last checkpoint."""
PARTS = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
"""Parts of an FSDP checkpoint (``FSDPCheckpointManager.save_checkpoint``), and how their files begin."""
CONTENT = ("actor", "critic", "data.pt", "transfer_queue")
"""Names that verl writes in ``global_step_N``."""
_NAME = re.compile(r"global_step_(\d{1,15})")


@dataclass(frozen=True)
class Checkpoint:
    """A folder ``global_step_N``."""

    path: Path

    @property
    def step(self) -> int:
        return int(_NAME.fullmatch(self.path.name)[1])

    @property
    def run(self) -> str | None:
        """The id of the run that saves it; ``None`` where it does not say."""
        return read_json(self.path / STATE).get("run")

    @property
    def state(self) -> dict[str, Any] | None:
        """The state that the run resumes with; ``None`` where the step is not logged."""
        state = read_json(self.path / STATE)
        checksum = state.pop("crc32", None)  # earlier versions wrote none
        return state if state.get("step") == self.step and checksum in (None, _checksum(state)) else None


def is_checkpoint(path: Path) -> bool:
    """Whether it is a folder with a checkpoint's name."""
    return _NAME.fullmatch(path.name) is not None and path.is_dir()


def checkpoints(folder: Path) -> list[Checkpoint]:
    """All of a folder, whole or not, in the order of their steps."""
    each = [Checkpoint(path) for path in folder.glob("global_step_*") if is_checkpoint(path)]
    return sorted(each, key=lambda checkpoint: checkpoint.step)


def tracked_step(folder: Path) -> int | None:
    """The step that verl's tracker names; ``None`` where it is missing, or was cut off by a kill."""
    try:
        return int((folder / TRACKER).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def damage(path: Path, parts: Sequence[str], *, critic: bool = False) -> list[str]:
    """Files of an FSDP checkpoint that are missing, cut off or changed, for these of ``PARTS``; reads them, once in a process.

    Every rank's file must be as ``torch.save`` wrote it, a zip archive with a checksum of each record.
    """
    files, broken = ["data.pt"], []
    for role in ("actor", "critic") if critic else ("actor",):
        ranks = world_size(path, role)
        broken += [f"{role}/fsdp_config.json"] if ranks is None else []
        files += [f"{role}/{PARTS[p]}_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks or 0) for p in parts]
    with ThreadPoolExecutor(max_workers=4) as pool:  # each holds one tensor
        whole = pool.map(lambda name: _is_whole(path / name), files)
        return [name for name, is_whole in zip(files, whole, strict=True) if not is_whole] + broken


def _is_whole(path: Path) -> bool:
    try:
        known = path.stat()
    except OSError:
        return False
    return _has_its_checksums(path.absolute(), known.st_size, known.st_mtime_ns)


@cache
def _has_its_checksums(path: Path, size: int, modified: int) -> bool:
    """Whether what ``torch.load`` reads of a file of this size and time has the checksums in its directory."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            known = {each.filename.partition("/")[2]: each.CRC for each in archive.infolist()}
            for each in archive.infolist():
                archive.open(each).close()  # compares its name with that of its record
            reader = torch._C.PyTorchFileReader(str(path))
            found = {name: zlib.crc32(reader.get_record(name)) for name in reader.get_all_records()}
    except (OSError, ValueError, RuntimeError, LookupError, NotImplementedError, zipfile.BadZipFile):
        return False
    return found == known


def world_size(path: Path, role: str = "actor") -> int | None:
    """How many ranks saved a checkpoint of FSDP; ``None`` where it does not say."""
    ranks = read_json(path / role / "fsdp_config.json").get("world_size")
    return ranks if isinstance(ranks, int) and 0 < ranks <= 1 << 16 else None


def choose_start(folder: Path, damage_of: Callable[[Path], list[str]]) -> tuple[Checkpoint | None, list[str]]:
    """Where a run resumes, and why not later: at the checkpoint that verl's tracker names, or the last good one before it;
    ``None`` is the beginning.

    Raises:
        ValueError: there was a checkpoint, and none is whole any more.
    """
    every, tracked = checkpoints(folder), tracked_step(folder)
    if not every or (tracked is None and not any(each.state for each in every)):
        return None, []  # not one was finished
    reachable = [each for each in reversed(every) if tracked is None or each.step <= tracked]
    start, broken = None, dict[Checkpoint, list[str]]()
    for each in sorted(
        reachable, key=lambda checkpoint: checkpoint.state is None
    ):  # the last first, of those that count
        broken[each] = damage_of(each.path)
        if not broken[each]:
            start = each
            break
    notes = [
        f"{each.path} is not whole: {', '.join(broken[each])} missing, cut off or changed on the disk"
        if each in broken
        else f"{each.path} does not count: the run ended before it logged the metrics of step {each.step}"
        for each in reachable
        if start is None or each.step > start.step
    ]
    if start is None:
        raise ValueError(
            f"{folder} holds no whole checkpoint: {'; '.join(notes) or f'that of step {tracked} is missing'}. Put the files "
            "back, or start over with trainer.resume_mode=disable (FRESH=1 of the launch scripts)"
        )
    return start, notes


def settle_start(folder: Path, start: Checkpoint | None, *, trains: bool) -> None:
    """Has verl resume from a checkpoint of this folder. Those of later steps count no more if these are taken again."""
    step = start.step if start is not None else 0
    for each in checkpoints(folder) if trains else []:
        if each.step > step and each.state is not None:
            write_json(each.path / STATE, {"run": each.run})
    if start is not None and tracked_step(folder) != step:
        write_whole(folder / TRACKER, str(step))


def keep_last(folder: Path, step: int, count: int, run: str) -> None:
    """Removes this run's checkpoints up to a step but the last ``count``, as far as verl and this package wrote them.

    verl counts those of one start of a run only (``BaseCheckpointManager.previous_saved_paths``).
    """
    for checkpoint in [each for each in checkpoints(folder) if each.step <= step and each.run == run][:-count]:
        for path in (checkpoint.path / name for name in (*CONTENT, STATE)):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        with suppress(OSError):  # it holds something else
            checkpoint.path.rmdir()


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file; empty where there is none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Writes the ``run_state.json`` of a checkpoint that counts, with its checksum."""
    write_json(path, state | {"crc32": _checksum(state)})


def _checksum(state: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file with :func:`grail_advantage.dump.whole_file.write_whole`."""
    write_whole(path, json.dumps(content, indent=1, sort_keys=True) + "\n")
