"""A run on the disk, of this project, of plain verl or of TRL: its metrics and its token dump (docs/report.md says where)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grail_advantage.dump import METRICS_FILE, TOKENS, DumpHeader, DumpRow, TokenDump, read_dump
from grail_advantage.receipt.foreign import numbered_lines, read_bytes, read_json, visible, why

logger = logging.getLogger(__name__)
STATE = "trainer_state.json"  # TRL's, with the figures of all steps in ``log_history``


@dataclass(frozen=True)
class Run:
    """A run's folder, read."""

    folder: Path  # where its report goes
    metrics: Mapping[str, Mapping[int, float]]  # by name, then by step
    dump: TokenDump  # without files where the run wrote none
    problems: list[str]  # of its metrics, which are logged


def open_run(path: Path | str) -> Run:
    """Look into a run: its folder, that of its token dump, or its file of metrics. ValueError: there are neither metrics nor
    a token dump; the message says what was looked for."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent if path.name in (METRICS_FILE, STATE) else path.with_suffix("")
    checkpoints = sorted(folder.glob(f"checkpoint-*/{STATE}"), key=lambda file: int(file.parent.name[11:] or 0))
    log = folder.resolve().with_name(f"{folder.resolve().name}.jsonl")
    files = [path, folder / METRICS_FILE, folder / STATE, *checkpoints[-1:], log]
    problems: list[str] = []
    file = next((each for each in files if each.is_file()), None)
    metrics = read_metrics(file, problems) if file else {}
    dump = next((one for one in map(read_dump, (folder / TOKENS, folder)) if one.files), read_dump(folder / TOKENS))
    if not metrics and not dump.files:
        looked = ", ".join(str(each) for each in files[1:])
        lacks = f"{path} holds neither metrics ({looked}) nor a token dump ({TOKENS}/step_NUMBER.parquet)"
        remedy = (
            "In verl trainer.logger=[console,file] writes metrics, algorithm.token_dump.folder=FOLDER a dump; in TRL "
            "TokenWeightGRPOTrainer(..., token_dump=FOLDER) writes both"
        )
        raise ValueError(f"{'; '.join([lacks, *problems])}. {remedy}")
    if not dump.files:
        dump.problems.clear()
    return Run(folder, metrics, dump, problems)


def read_metrics(file: Path, problems: list[str]) -> dict[str, dict[int, float]]:
    """A run's figures by name and step, as far as they are written; NaN for one that is null. The file has JSON lines
    ``{"step": S, "data": {...}}``, or is TRL's :data:`STATE`. ``problems`` gets what could not be read, which is logged."""
    metrics: dict[str, dict[int, float]] = {}
    unread = []
    try:
        if file.name == STATE:
            history = read_json(read_bytes(file))["log_history"]
            lines: list[tuple[int, Any]] = [
                (place, {"step": of["step"], "data": of}) for place, of in enumerate(history)
            ]
        else:
            lines = list(numbered_lines(file))
    except (OSError, ValueError, LookupError, TypeError) as error:
        lines = []
        problems.append(f"{file}: cannot be read: {why(error)}")
    for place, line in lines:
        try:
            record = read_json(line) if isinstance(line, bytes) else line
            for name, value in record["data"].items():
                if isinstance(value, int | float | None) and name != "step":
                    metrics.setdefault(name, {})[int(record["step"])] = math.nan if value is None else float(value)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
            unread.append(place)
    if unread:
        problems.append(f"{file}:{unread[0]}: is no line of a log; {len(unread)} such are left out")
    if problems:
        logger.warning(visible("; ".join(problems), breaks=False))
    return {name: dict(sorted(points.items())) for name, points in metrics.items()}


def find_response(run: Run, step: int | None, row: int | None) -> tuple[DumpHeader, DumpRow]:
    """A response of the dump, and the header of its file: of the last step by default, and of the first response with
    scores, else the first. ``row``: its place in the step's batch. ValueError: there is none; the message says which are."""
    files = [file for file in run.dump.files if step in (None, file.step)][-1:]
    rows = [one for file in files for one in file.rows()]
    chosen = [one for one in rows if row in (None, one.row)]
    header = files[0].header if files else None
    if not chosen or header is None:
        there = f", and of that step responses {[one.row for one in rows]}" if rows else ""
        raise ValueError(
            f"{run.folder} has no response of --step {step} --row {row}; it has steps {run.dump.steps}{there}"
        )
    return header, min(chosen, key=lambda one: one.no_scores is not None)


def shown_values(row: DumpRow, method: str | None = None) -> tuple[str, np.ndarray]:
    """A response's values under a method, by default its first: ``weight``, or ``advantage`` where the method gives these;
    the name, and the values, float64 (T,), NaN where a token does not train."""
    own = row.methods[method or next(iter(row.methods))] if row.methods else row
    base_T = np.zeros(len(row)) if row.base_advantage_T is None else row.base_advantage_T
    name, value_T = "weight", own.weight_T
    alike = own.advantage_T is None or not own.advantage_T.any() or (own.weight_T[row.mask_T] != 1).any()
    if not alike and not np.allclose(own.advantage_T[row.mask_T], base_T[row.mask_T], rtol=1e-5, atol=1e-7):
        name, value_T = "advantage", own.advantage_T
    return name, np.where(row.mask_T & np.isfinite(value_T), value_T, np.nan).astype(np.float64)
