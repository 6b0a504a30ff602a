"""A run on the disk, of this project or of plain verl: its metrics and its token dump (docs/report.md says where)."""

import logging
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from grail_advantage.dump import METRICS_FILE, TOKENS, TokenDump, read_dump
from grail_advantage.text_io import numbered_lines, read_json, visible, why

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A run's folder, read."""

    folder: Path  # where its report goes
    metrics: Mapping[str, Mapping[int, float]]  # by name, then by step, in the order of the log
    dump: TokenDump  # without files where the run wrote none; its problems are those of the metrics, too


def open_run(path: Path | str) -> Run:
    """Look into a run: its folder, that of its token dump, its file of metrics, or ``PROJECT/EXPERIMENT`` where there is a
    file ``PROJECT/EXPERIMENT.jsonl``. ValueError: there are neither metrics nor a token dump; the message says what was
    looked for."""
    path = Path(path)
    folder = path
    if path.is_file():
        if path.suffix != ".jsonl":
            raise ValueError(
                f"{path} is no run: give its folder, or its file of metrics, which ends in .jsonl"
            )
        # verl writes the figures of PROJECT/EXPERIMENT beside that folder.
        folder = path.with_suffix("")
        if path.name == METRICS_FILE:
            folder = path.parent
    files = [path, folder / METRICS_FILE, Path(f"{folder.resolve()}.jsonl")]
    dump = dump_of(folder)
    if not dump.files:
        # A run without a dump is shown by its metrics.
        dump.problems.clear()
    file = next(filter(Path.is_file, files), None)
    metrics = read_metrics(file, dump.problems) if file else {}
    if not metrics and not dump.files:
        looked = f"neither metrics ({files[1]}, {files[2]}) nor a token dump ({TOKENS}/step_NUMBER.parquet)"
        remedy = (
            "In verl trainer.logger=[console,file] writes metrics, algorithm.token_dump.folder=FOLDER a dump; in TRL "
            "TokenWeightGRPOTrainer(..., token_dump=FOLDER) writes both"
        )
        raise ValueError(f"{'; '.join([f'{path} holds {looked}', *dump.problems])}. {remedy}")
    return Run(folder, metrics, dump)


def dump_of(folder: Path) -> TokenDump:
    """The token dump in the folder of a run, or in its own."""
    in_run = folder / TOKENS
    return read_dump(in_run if in_run.is_dir() else folder)


def read_metrics(file: Path, problems: list[str]) -> dict[str, dict[int, float]]:
    """A run's figures by name and step, in the order of the log, as far as they are written; NaN for one that is null. The
    file has JSON lines ``{"step": S, "data": {...}}``. ``problems`` gets what could not be read, which is logged."""
    metrics: dict[str, dict[int, float]] = defaultdict(dict)
    unread = []
    try:
        for place, line in numbered_lines(file):
            try:
                record = read_json(line)
                for name, value in record["data"].items():
                    if isinstance(value, int | float | None):
                        figure = math.nan if value is None else float(value)
                        metrics[name][int(record["step"])] = figure
            except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
                unread.append(place)
    except (OSError, ValueError) as error:
        problems.append(f"{file}: cannot be read: {why(error)}")
    if unread:
        problems.append(f"{file}:{unread[0]}: is no line of a log; {len(unread)} such are left out")
    if problems:
        logger.warning(visible("; ".join(problems)))
    return metrics
