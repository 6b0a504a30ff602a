"""Prepare the training set and the benchmarks: ``python -m recipe.data.prepare --help``.

Each dataset becomes ``NAME.parquet`` (verl's RLHF schema) and ``NAME.json`` (its source and the dropped rows) in the output
folder. A file that is there is complete; one that would not change is kept as it is.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars
from tqdm import tqdm

from recipe.data.convert import FEATURES, SUBSET_SEED, BadRow, convert, subset_rank
from recipe.data.sources import MissingSourceError, Source, find_local_file, load_hub, read_jsonl
from recipe.data.specs import BENCHMARKS, GOLD_READERS, SPECS, TRAINING_SETS, Columns, DatasetSpec, benchmark_names
from recipe.files import write_bytes

MAX_DROPPED = 0.05
_SHOWN_BAD_ROWS = 10


def prepare_dataset(
    spec: DatasetSpec,
    source: Source,
    output_dir: Path,
    columns: Columns | None = None,
    max_dropped: float = MAX_DROPPED,
) -> str:
    """Write ``output_dir/NAME.parquet`` and ``NAME.json``, or keep them where nothing has changed; return a summary.

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
    if source.columns:
        columns = _choose_columns(spec, source, columns)
    rows, bad, other_task = _convert_rows(spec, source, columns or spec.layouts[0])
    for row in bad[:_SHOWN_BAD_ROWS]:
        tqdm.write(f"dropped: {row[0]}", file=sys.stderr)
    if len(bad) > _SHOWN_BAD_ROWS:
        tqdm.write(f"dropped: {len(bad) - _SHOWN_BAD_ROWS} more, see {note_path}", file=sys.stderr)
    usable = len(rows)
    _refuse(spec, source, bad, usable, other_task, max_dropped)
    if spec.subset is not None:
        rows = sorted(rows, key=subset_rank)[: spec.subset]
    for index, row in enumerate(rows):
        row["extra_info"]["index"] = index

    buffer = io.BytesIO()
    disable_progress_bars()
    Dataset.from_list(rows, features=FEATURES).to_parquet(buffer)
    parquet = buffer.getvalue()
    note = {
        "source": source.name,
        "columns": columns._asdict(),
        "source_rows": usable + len(bad) + other_task,
        "rows": len(rows),
        "dropped": dict(Counter(reason for _, reason in bad).most_common()),
        "dropped_rows": [message for message, _ in bad],
        "other_task": other_task,
        "notes": _notes(spec, usable, usable + len(bad)),
    }
    text = json.dumps(note, indent=2, ensure_ascii=False) + "\n"
    wanted = {path: parquet, note_path: text.encode()}
    kept = all(file.is_file() and file.read_bytes() == content for file, content in wanted.items())
    if not kept:
        for file, content in wanted.items():
            write_bytes(file, content)
    return _summary(note, kept)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the datasets that the command line names and print a summary; returns 0 if every one is there."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        names = [name for name in (options.train,) if name != "none"] + benchmark_names(options.benchmarks)
        columns = {name: _columns(name, value) for name, value in options.columns}
        hub = dict(options.hub_id)
        if not names:
            raise ValueError("--train none and --benchmarks none leave nothing to do")
        if not 0 <= options.max_dropped < 1:
            raise ValueError(f"--max-dropped is a share from 0 up to 1, got {options.max_dropped}")
        if options.local_dir is not None and not options.local_dir.is_dir():
            raise ValueError(f"--local-dir {options.local_dir} is not a folder")
        if unused := (set(columns) | set(hub)) - set(names):
            raise ValueError(f"--columns or --hub-id name {', '.join(sorted(unused))}, which is not asked for")
    except ValueError as error:
        parser.error(str(error))

    done, missing, failed = [], [], []
    for name in names:
        spec = SPECS[name]
        try:
            if options.local_dir is not None and name not in hub:
                source = read_jsonl(find_local_file(spec, options.local_dir))
            else:
                source = load_hub(spec, hub.get(name, spec.hub))
            summary = prepare_dataset(spec, source, options.output_dir, columns.get(name), options.max_dropped)
            done.append(f"  {name}.parquet: {summary}")
        except MissingSourceError as error:
            missing.append(f"  MISSING {error}")
        except (ValueError, OSError) as error:
            failed.append(f"  FAILED {error}")

    print(f"{len(done)} of {len(names)} datasets are in {options.output_dir}:", *done, sep="\n")
    if missing and not options.skip_missing:
        failed.append("  leave the missing ones out with --skip-missing, --benchmarks and --train")
    for message in missing + failed:
        print(message, file=sys.stderr)
    return 1 if failed else 0


def _choose_columns(spec: DatasetSpec, source: Source, given: Columns | None) -> Columns:
    """The columns of the command line, or the first of the dataset's layouts that the source has."""
    layouts = [given] if given else spec.layouts
    for columns in layouts:
        if columns.problem in source.columns and columns.gold in source.columns:
            return columns
    known = "; ".join(f"{columns.problem!r} and {columns.gold!r}" for columns in layouts)
    raise ValueError(
        f"{spec.name}: {source.name} lacks the problem or the answer column: looked for {known}; it has "
        f"{', '.join(map(repr, source.columns))}; name the right ones with --columns {spec.name}=PROBLEM,ANSWER"
    )


def _convert_rows(
    spec: DatasetSpec, source: Source, columns: Columns
) -> tuple[list[dict[str, Any]], list[tuple[str, str]], int]:
    """The converted rows, the unusable ones as message and reason, and the number of rows that belong to another task."""
    rows, bad, other_task = [], [], 0
    for number, row in tqdm(source.rows, desc=spec.name, unit=" rows"):
        try:
            if isinstance(row, BadRow):
                raise row
            converted = convert(spec, columns, row)
        except BadRow as error:
            bad.append((f"{source.name}, {source.unit} {number}: {error}", error.reason))
            continue
        if converted is None:
            other_task += 1
        else:
            rows.append(converted)
    return rows, bad, other_task


def _refuse(
    spec: DatasetSpec, source: Source, bad: Sequence[tuple[str, str]], usable: int, other_task: int, max_dropped: float
) -> None:
    """Raise ValueError where no row is usable or too many are not."""
    first = f"; the first bad one: {bad[0][0]}" if bad else ""
    if not usable:
        wants = " and ".join(f"{name}={value}" for name, value in spec.required_values.items())
        others = f"; {other_task} rows do not have {wants}" if other_task else ""
        raise ValueError(f"{spec.name}: {source.name} has no usable row{others}{first}")
    share = len(bad) / (usable + len(bad))
    if share > max_dropped:
        raise ValueError(
            f"{spec.name}: {len(bad)} of {usable + len(bad)} rows of {source.name} cannot be used ({share:.1%}), more than "
            f"--max-dropped {max_dropped}{first}; repair the source or allow more with --max-dropped"
        )


def _notes(spec: DatasetSpec, usable: int, of_task: int) -> list[str]:
    notes = [f"the published set has {spec.published_rows} rows"] if of_task != spec.published_rows else []
    if spec.subset is not None and usable > spec.subset:
        chosen = f"{spec.subset} of {usable} chosen by hash, seed {SUBSET_SEED}"
        notes.append(f"{chosen} (the published choice is not known)")
    elif spec.subset is not None:
        notes.append(f"all kept: no more than {spec.subset}")
    return notes


def _summary(note: dict[str, Any], kept: bool) -> str:
    parts = [f"{note['rows']} rows from {note['source']}"]
    if note["dropped"]:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in note["dropped"].items())
        parts.append(f"{len(note['dropped_rows'])} of {note['source_rows']} dropped: {reasons}")
    if note["other_task"]:
        parts.append(f"{note['other_task']} of another task left out")
    return "; ".join([*parts, *note["notes"], *["unchanged, kept"] * kept])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipe.data.prepare",
        description="Write the training set and the benchmarks as parquet files for verl.",
    )
    add = parser.add_argument
    add("--output-dir", type=Path, default=Path("data"), help="folder for the files (default: data)")
    names = f"all (the published six), none, or names joined by commas: {', '.join(BENCHMARKS)} (default: all)"
    add("--benchmarks", default="all", help=names)
    add("--train", choices=(*TRAINING_SETS, "none"), default="deepmath", help="the training set (default: deepmath)")
    local = "folder with NAME.jsonl or NAME_*.jsonl for every dataset that --hub-id does not name"
    add("--local-dir", type=Path, help=f"{local}; without it the Hugging Face hub is read")
    hub = "read NAME from another place on the hub; may be repeated"
    place = "NAME=ORG/DATASET[:CONFIG[:SPLIT]]"
    add("--hub-id", type=_assignment(place), action="append", default=[], metavar=place, help=hub)
    columns = f"the columns of NAME; READER is one of {', '.join(GOLD_READERS)} (default plain); may be repeated"
    place = "NAME=PROBLEM,ANSWER[,READER]"
    add("--columns", type=_assignment(place), action="append", default=[], metavar=place, help=columns)
    share = f"largest share of unusable rows that still gives a file (default: {MAX_DROPPED})"
    add("--max-dropped", type=float, default=MAX_DROPPED, help=share)
    add("--skip-missing", action="store_true", help="a file that --local-dir lacks is no error")
    return parser


def _assignment(form: str) -> Callable[[str], tuple[str, str]]:
    def parse(text: str) -> tuple[str, str]:
        name, _, value = text.partition("=")
        if name not in SPECS or not value:
            raise argparse.ArgumentTypeError(f"{text!r} is not {form} with NAME one of {', '.join(SPECS)}")
        return name, value

    return parse


def _columns(name: str, value: str) -> Columns:
    columns = Columns(*value.split(",")) if value.count(",") in (1, 2) else Columns("", "")
    if not columns.problem or not columns.gold or columns.reader not in GOLD_READERS:
        form = f"NAME=PROBLEM,ANSWER[,READER] with READER one of {', '.join(GOLD_READERS)}"
        raise ValueError(f"--columns {name}={value} is not {form}")
    return columns


if __name__ == "__main__":
    sys.exit(main())
