"""Prepare the training set and the benchmarks: ``python -m recipe.data.prepare --help``.

Each dataset becomes ``NAME.parquet`` (verl's RLHF schema) and ``NAME.json`` (its source and the dropped rows) in
the output folder. Both are written under a temporary name and renamed, so that an existing file is complete; one that
was made from the same content with the same settings is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from recipe.data.convert import SCHEMA, SUBSET_SEED, choose_columns, convert_rows
from recipe.data.prompts import PROMPT_SUFFIX
from recipe.data.sources import BadRow, HubDataset, MissingSourceError, Source, find_local_file
from recipe.data.specs import (
    BENCHMARKS,
    GOLD_READERS,
    PUBLISHED_BENCHMARKS,
    SPECS,
    TRAINING_SETS,
    Columns,
    DatasetSpec,
    HubLocation,
)

MAX_DROPPED = 0.05
# Part of the fingerprint: to be raised with every change of the conversion that changes its output.
_FORMAT = 1
_SHOWN_BAD_ROWS = 10


@dataclass(frozen=True)
class Summary:
    """The outcome of one dataset's preparation."""

    name: str
    path: Path
    source: str
    source_rows: int
    rows: int
    dropped: Mapping[str, int]
    """Unusable rows by reason."""
    other_task: int
    """Rows of the source that belong to another task (another subject, language, ...)."""
    notes: tuple[str, ...]
    reused: bool

    def __str__(self) -> str:
        parts = [f"{self.rows} rows from {self.source}"]
        if self.dropped:
            reasons = ", ".join(f"{count} x {reason}" for reason, count in self.dropped.items())
            parts.append(f"{sum(self.dropped.values())} of {self.source_rows} dropped: {reasons}")
        if self.other_task:
            parts.append(f"{self.other_task} of another task left out")
        parts += self.notes
        if self.reused:
            parts.append("unchanged, kept")
        return "; ".join(parts)


def prepare_dataset(
    spec: DatasetSpec,
    source: Source,
    output_dir: Path,
    *,
    columns: Columns | None = None,
    max_dropped: float = MAX_DROPPED,
) -> Summary:
    """Write ``output_dir/NAME.parquet`` and ``NAME.json``, or keep them where nothing has changed.

    Args:
        spec: the dataset.
        source: its rows.
        output_dir: created if need be.
        columns: instead of the layouts that ``spec`` lists.
        max_dropped: the largest share of unusable rows that still gives a file.

    Raises:
        ValueError: the source lacks a column, has no usable row, or too many unusable ones.
    """
    path = output_dir / f"{spec.name}.parquet"
    note_path = path.with_suffix(".json")
    if not source.columns():
        _refuse(spec, source, source.rows(())[1], 0, 0, max_dropped)
    if columns is None:
        columns = choose_columns(spec, source)
    elif missing := {columns.problem, columns.gold} - set(source.columns()):
        raise ValueError(
            f"{spec.name}: {source} has no column {' and no column '.join(map(repr, sorted(missing)))}, given with "
            f"--columns; it has {', '.join(map(repr, source.columns())) or 'no readable row'}"
        )

    wanted = spec.source_columns(columns)
    fingerprint = _fingerprint(
        {
            "format": _FORMAT,
            "source": source.digest(wanted),
            "columns": asdict(columns),
            "subset": [spec.subset, SUBSET_SEED],
            "id_columns": spec.id_columns,
            "context_column": spec.context_column,
            "required_values": dict(spec.required_values),
            "suffix": PROMPT_SUFFIX,
            "max_dropped": max_dropped,
        }
    )
    finished = _read_finished(path, note_path, fingerprint)
    if finished is not None:
        return _summary(spec, path, finished, reused=True)

    rows, bad = source.rows(wanted)
    source_rows = len(rows) + len(bad)
    progress = tqdm(rows, desc=f"{spec.name}", unit=" rows")
    verl_rows, unusable, other_task = convert_rows(spec, columns, progress, source)
    bad = bad + unusable
    _report_bad_rows(bad, note_path)
    usable = source_rows - len(bad) - other_task
    _refuse(spec, source, bad, usable, other_task, max_dropped)

    table = pa.Table.from_pylist(verl_rows, schema=SCHEMA)
    output_dir.mkdir(parents=True, exist_ok=True)
    _write_atomically(path, lambda target: pq.write_table(table, target))
    finished = {
        "fingerprint": fingerprint,
        "parquet_sha256": _file_sha256(path),
        "source": str(source),
        "columns": asdict(columns),
        "source_rows": source_rows,
        "rows": len(verl_rows),
        "dropped": dict(Counter(row.reason for row in bad).most_common()),
        "dropped_rows": [str(row) for row in bad],
        "other_task": other_task,
        "notes": _notes(spec, usable, usable + len(bad)),
    }
    text = json.dumps(finished, indent=2, ensure_ascii=False) + "\n"
    _write_atomically(note_path, lambda target: target.write_text(text, encoding="utf-8"))
    return _summary(spec, path, finished, reused=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the datasets that the command line names and print a summary; returns 0 if every one is there."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        names = _requested(options.train, options.benchmarks)
        columns = _parse_assignments("--columns", options.columns, _parse_columns)
        hub = _parse_assignments("--hub-id", options.hub_id, _parse_hub)
        if not 0 <= options.max_dropped < 1:
            raise ValueError(f"--max-dropped is a share from 0 up to 1, got {options.max_dropped}")
        if options.local_dir is not None and not options.local_dir.is_dir():
            raise ValueError(f"--local-dir {options.local_dir} is not a folder")
        unused = (set(columns) | set(hub)) - set(names)
        if unused:
            raise ValueError(f"--columns or --hub-id name {', '.join(sorted(unused))}, which is not asked for")
    except ValueError as error:
        parser.error(str(error))

    done: list[Summary] = []
    missing: list[str] = []
    failed: list[str] = []
    for name in names:
        try:
            if options.local_dir is not None and name not in hub:
                source: Source = find_local_file(name, options.local_dir)
            else:
                source = HubDataset(name, hub.get(name, SPECS[name].hub))
            done.append(
                prepare_dataset(
                    SPECS[name],
                    source,
                    options.output_dir,
                    columns=columns.get(name),
                    max_dropped=options.max_dropped,
                )
            )
        except MissingSourceError as error:
            missing.append(str(error))
        except (ValueError, OSError) as error:
            failed.append(str(error))

    print(f"{len(done)} of {len(names)} datasets are in {options.output_dir}:")
    for summary in done:
        print(f"  {summary.path.name}: {summary}")
    for label, messages in (("MISSING", missing), ("FAILED", failed)):
        for message in messages:
            print(f"  {label} {message}", file=sys.stderr)
    if missing and not options.skip_missing:
        print("  leave the missing ones out with --skip-missing, --benchmarks and --train", file=sys.stderr)
    return 1 if failed or (missing and not options.skip_missing) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipe.data.prepare",
        description="Write the training set and the benchmarks as parquet files for verl.",
    )
    parser.add_argument("--output-dir", type=Path, default=Path("data"), help="folder for the files (default: data)")
    parser.add_argument(
        "--benchmarks",
        default="all",
        help=f"all (the published six), none, or names joined by commas: {', '.join(BENCHMARKS)} (default: all)",
    )
    parser.add_argument(
        "--train",
        choices=(*TRAINING_SETS, "none"),
        default=TRAINING_SETS[0],
        help="the training set (default: deepmath)",
    )
    parser.add_argument(
        "--local-dir",
        type=Path,
        help="folder with NAME.jsonl or NAME_*.jsonl for every dataset that --hub-id does not name; "
        "without it the Hugging Face hub is read",
    )
    parser.add_argument(
        "--hub-id",
        action="append",
        default=[],
        metavar="NAME=ORG/DATASET[:CONFIG[:SPLIT]]",
        help="read NAME from another place on the hub; may be repeated",
    )
    parser.add_argument(
        "--columns",
        action="append",
        default=[],
        metavar="NAME=PROBLEM,ANSWER[,READER]",
        help=f"the column names of NAME; READER is one of {', '.join(GOLD_READERS)} (default plain); may be repeated",
    )
    parser.add_argument(
        "--max-dropped",
        type=float,
        default=MAX_DROPPED,
        help=f"largest share of unusable rows that still gives a file (default: {MAX_DROPPED})",
    )
    parser.add_argument("--skip-missing", action="store_true", help="a file that --local-dir lacks is no error")
    return parser


def _requested(train: str, benchmarks: str) -> list[str]:
    if benchmarks == "all":
        chosen = list(PUBLISHED_BENCHMARKS)
    elif benchmarks == "none":
        chosen = []
    else:
        chosen = list(dict.fromkeys(name.strip() for name in benchmarks.split(",") if name.strip()))
    for name in chosen:
        if name not in BENCHMARKS:
            raise ValueError(f"--benchmarks {name!r} is unknown; choose from {', '.join(BENCHMARKS)}, or all, or none")
    names = ([] if train == "none" else [train]) + chosen
    if not names:
        raise ValueError("--train none and --benchmarks none leave nothing to do")
    return names


def _parse_assignments(option: str, texts: Sequence[str], parse: Callable[[str, str], Any]) -> dict[str, Any]:
    """Read ``NAME=VALUE`` options into a dictionary."""
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in SPECS:
            raise ValueError(f"{option} {text!r} does not start with NAME=, NAME one of {', '.join(SPECS)}")
        values[name] = parse(name, value)
    return values


def _parse_columns(name: str, value: str) -> Columns:
    problem, _, rest = value.partition(",")
    gold, _, reader = rest.partition(",")
    reader = reader or "plain"
    if not problem or not gold or reader not in GOLD_READERS:
        raise ValueError(
            f"--columns {name}={value} is not NAME=PROBLEM,ANSWER[,READER] with READER one of {', '.join(GOLD_READERS)}"
        )
    return Columns(problem, gold, reader)  # type: ignore[arg-type]


def _parse_hub(name: str, value: str) -> HubLocation:
    dataset_id, _, rest = value.partition(":")
    config, _, split = rest.partition(":")
    if not dataset_id:
        raise ValueError(f"--hub-id {name}={value} is not NAME=ORG/DATASET[:CONFIG[:SPLIT]]")
    return HubLocation(dataset_id, split or SPECS[name].hub.split, config or None)


def _notes(spec: DatasetSpec, usable: int, of_task: int) -> list[str]:
    notes = []
    if of_task != spec.published_rows:
        notes.append(f"the published set has {spec.published_rows} rows")
    if spec.subset is not None and usable > spec.subset:
        notes.append(
            f"{spec.subset} of {usable} chosen by hash, seed {SUBSET_SEED} (the published choice is not known)"
        )
    elif spec.subset is not None:
        notes.append(f"all kept: no more than {spec.subset}")
    return notes


def _report_bad_rows(bad: Sequence[BadRow], note_path: Path) -> None:
    for row in bad[:_SHOWN_BAD_ROWS]:
        print(f"dropped: {row}", file=sys.stderr)
    if len(bad) > _SHOWN_BAD_ROWS:
        print(f"dropped: {len(bad) - _SHOWN_BAD_ROWS} more, see {note_path}", file=sys.stderr)


def _refuse(
    spec: DatasetSpec, source: Source, bad: Sequence[BadRow], usable: int, other_task: int, max_dropped: float
) -> None:
    """Raise ValueError where no row is usable or too many are not."""
    first = f"; the first bad one: {bad[0]}" if bad else ""
    if not usable:
        wants = " and ".join(f"{name}={value}" for name, value in spec.required_values.items())
        others = f"; {other_task} rows do not have {wants}" if other_task else ""
        raise ValueError(f"{spec.name}: {source} has no usable row{others}{first}")
    share = len(bad) / (usable + len(bad))
    if share > max_dropped:
        raise ValueError(
            f"{spec.name}: {len(bad)} of {usable + len(bad)} rows of {source} cannot be used ({share:.1%}), more than "
            f"--max-dropped {max_dropped}{first}; repair the source or allow more with --max-dropped"
        )


def _fingerprint(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read_finished(path: Path, note_path: Path, fingerprint: str) -> dict[str, Any] | None:
    """Return the note of a finished file with this fingerprint whose parquet file is as it was written, else None."""
    if not path.is_file() or not note_path.is_file():
        return None
    try:
        note = json.loads(note_path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    same = isinstance(note, dict) and note.get("fingerprint") == fingerprint
    return note if same and note.get("parquet_sha256") == _file_sha256(path) else None


def _write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _summary(spec: DatasetSpec, path: Path, finished: Mapping[str, Any], *, reused: bool) -> Summary:
    return Summary(
        name=spec.name,
        path=path,
        source=finished["source"],
        source_rows=finished["source_rows"],
        rows=finished["rows"],
        dropped=finished["dropped"],
        other_task=finished["other_task"],
        notes=tuple(finished["notes"]),
        reused=reused,
    )


if __name__ == "__main__":
    sys.exit(main())
