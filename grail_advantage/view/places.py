"""Where a run has its curves and its token dump, in the files of this project, of verl and of TRL.

Curves are ``metrics.jsonl`` in the run's folder; TRL's ``trainer_state.json`` there or in ``checkpoint-N``; or verl's
``PROJECT/EXPERIMENT.jsonl``. verl's file logger writes that where the training was started, or below ``VERL_FILE_LOGGER_ROOT``,
and its checkpoints are by default in ``checkpoints/PROJECT/EXPERIMENT`` (0.9.1, ``FileLogger``, ``trainer.default_local_dir``).
The token dump is ``tokens/`` in the run's folder, or the folder itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from grail_advantage.dump import METRICS_FILE, TOKENS, read_dump
from grail_advantage.receipt.foreign import open_plain, read_json
from grail_advantage.rules import LOCK
from grail_advantage.view.texts import TextFile, text_files

STATE = "trainer_state.json"
"""TRL's, with the figures of all steps in ``log_history``."""
CHECKPOINTS = "checkpoints"
_CHECKPOINT = re.compile(r"(?:checkpoint-|global_step_)(\d{1,15})", re.ASCII)
_DEPTH, _FOLDERS, _LISTED = 3, 2000, 20
"""How far below a folder runs are looked for, in how many folders, and how many are named."""
_LINE = 2**20
"""Bytes of a log's first line at most."""


@dataclass(frozen=True)
class Places:
    """A run's parts; ``None`` for what it does not have."""

    folder: Path
    """Of the run, where its report goes."""
    curves: Path | None = None
    tokens: Path | None = None
    texts: Path | None = None
    """A folder with responses as texts, of a run without a token dump."""
    taken: tuple[str, ...] = ()
    """Which of several candidates were taken, a sentence each."""

    @property
    def known(self) -> bool:
        """Whether there is anything."""
        return bool(self.curves or self.tokens or self.texts)

    @property
    def remedy(self) -> str:
        """How the run gets a token dump."""
        tokens = (self.folder / TOKENS).resolve()
        verl = f"+algorithm.token_dump.folder={tokens} and a method of this package, such as algorithm.adv_estimator=uniform"
        trl = f"TokenWeightGRPOTrainer(..., token_dump={str(tokens)!r})"
        if self.curves is not None and self.curves.name != METRICS_FILE:
            return f"train with {trl if self.curves.name == STATE else verl}"
        return f"train with {verl}, or in TRL with {trl}"


def find(run: Path) -> Places:
    """The parts of a run.

    Args:
        run: its folder, a token dump's, one of its files, or a folder with one run in it.

    Raises:
        ValueError: there is nothing of that name, or it holds several runs; the message lists them.
    """
    if not run.is_dir():
        if run.is_file():
            return _of_file(run)
        if is_log(log := run.with_name(f"{run.name}.jsonl")):
            return _of_file(log)
        raise ValueError(f"{run} is neither a folder nor a file; give a run's folder, or its file of metrics")
    places = _of_folder(run)
    if places.known:
        return places
    below = {places.folder.resolve(): places for places in _below(run)}
    if len(below) > 1:
        names = ", ".join(str(places.folder) for places in islice(below.values(), _LISTED))
        more = f" and {len(below) - _LISTED} more" if len(below) > _LISTED else ""
        raise ValueError(f"{run} holds several runs; give one of them: {names}{more}")
    return next(iter(below.values()), places)


def _of_file(file: Path) -> Places:
    if file.suffix == ".parquet":
        return _of_folder(file.parent)
    if file.name == STATE:
        folder = file.parent.parent if _CHECKPOINT.fullmatch(file.parent.name) else file.parent
    else:
        folder = file.parent if file.name == METRICS_FILE else file.with_suffix("")
    own = _of_folder(folder)
    if own.tokens is None and folder.parent.parent != folder.parent:
        # verl's log, and its checkpoints' folder below the one where the training was started.
        elsewhere = _of_folder(folder.parent.parent / CHECKPOINTS / folder.parent.name / folder.name)
        own = elsewhere if elsewhere.tokens else own
    return Places(folder, file, own.tokens, own.texts)


def _of_folder(folder: Path) -> Places:
    """What a folder has as one run; nothing where it is none."""
    whole = folder.resolve()
    states = [folder / STATE, *(path / STATE for path in _checkpoints(folder))]
    logs = [whole.parent / f"{whole.name}.jsonl"]
    if whole.parent.parent.name == CHECKPOINTS:
        logs.append(whole.parents[2] / whole.parent.name / logs[0].name)
    # Whatever the first is, a pipe too, reading it says so.
    known = [path for path in (folder / METRICS_FILE, *states[:1]) if path.exists() or path.is_symlink()]
    known += [path for path in states[1:] if path.is_file()][:1]
    known += [path for path in logs if is_log(path)]
    dumps = [folder / TOKENS]
    if whole.parent.parent.name == CHECKPOINTS:  # beside the log, where the front page's command has it
        dumps.append(logs[-1].with_suffix("") / TOKENS)
    filled = (path for path in dumps if path.is_dir() and [entry.name for entry in _entries(path)] != [LOCK])
    tokens = next(filled, folder if _is_dump(folder) else None)
    texts = [] if tokens else [path for path in (folder, *_entries(folder)) if _is_texts(path)]
    # Of the figures that this project writes beside TRL's, TRL's state has no others.
    curves = known[:1] + [path for path in known[1:] if path.name != STATE]
    taken = [
        f"the {what} are those of {of_kind[0]}; not taken: {', '.join(map(str, of_kind[1:]))}"
        for what, of_kind in (("curves", curves), ("responses", texts))
        if len(of_kind) > 1
    ]
    return Places(folder, next(iter(known), None), tokens, next(iter(texts), None), tuple(taken))


def _is_dump(folder: Path) -> bool:
    dump = read_dump(folder)
    return bool(dump.files or dump.receipts())


def _is_texts(folder: Path) -> bool:
    """Whether one of the first files of a folder has responses as texts."""
    files = text_files(folder)[:8] if folder.is_dir() else []
    return any(next(TextFile(path, step, 0, []).rows(), None) is not None for step, path in files)


def _checkpoints(folder: Path) -> list[Path]:
    """Its checkpoints, the latest first."""
    found = [(_CHECKPOINT.fullmatch(path.name), path) for path in _entries(folder)]
    return [path for _, path in sorted(((int(match[1]), path) for match, path in found if match), reverse=True)]


def _below(folder: Path) -> Iterator[Places]:
    """The runs in a folder, at most :data:`_DEPTH` levels down."""
    folders, seen = [(folder, 0)], 0
    while folders and seen < _FOLDERS:
        (place, depth), seen = folders.pop(0), seen + 1
        for path in _entries(place):
            if path.suffix == ".jsonl" and is_log(path):
                yield _of_file(path)
            elif (
                path.is_dir()
                and depth < _DEPTH
                and not path.name.startswith(".")
                and not _CHECKPOINT.fullmatch(path.name)
            ):
                places = _of_folder(path)
                if places.known:
                    yield places
                else:
                    folders.append((path, depth + 1))


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(islice(folder.iterdir(), 10 * _FOLDERS))
    except OSError:
        return []


def is_log(path: Path) -> bool:
    """Whether a file begins as verl's file logger writes it."""
    try:
        with open_plain(path) as file:
            record = read_json(file.readline(_LINE))
        return isinstance(record, dict) and type(record.get("step")) is int and isinstance(record.get("data"), dict)
    except (OSError, ValueError):
        return False
