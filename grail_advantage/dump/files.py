"""The token dump: every token's score, weight and advantage of chosen rollouts, as Parquet files.

A folder with one file a written update, ``step_000123.parquet``: a row a response, list columns for values a token, the header
as JSON in the file's metadata. docs/token_dump.md has every column. The trainer writes such a folder while it trains,
``grail_advantage.analyze`` one of existing responses, and ``grail_advantage.report`` reads either.

- :func:`write_step` writes one file, whole or not at all.
- :func:`read_dump` reads a folder. A file that cannot be read is named, with the reason; the others are read.

Shape suffixes: T response tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grail_advantage.answers.span import AnswerSpan
from grail_advantage.dump.parquet import (
    BROKEN,
    array_of,
    as_utf8,
    groups,
    list_of,
    numbered_files,
    numbered_path,
    read_record,
    write_table,
)
from grail_advantage.dump.received import Receipts, ReceivedHeader, read_headers, received_files
from grail_advantage.dump.rows import COLUMNS, DumpHeader, DumpRow, MethodColumns
from grail_advantage.dump.whole_file import UNFINISHED

SCHEMA_VERSION = 4
_KIND = "step"
_KEY = b"grail_advantage"
"""Of the header in the file's metadata."""
_FLOATS = list_of(pa.float32())
_METHOD = pa.struct(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("score", _FLOATS),
        pa.field("advantage", _FLOATS),
        pa.field("weight", _FLOATS, nullable=False),
        pa.field("no_scores", pa.string()),
    ]
)
SCHEMA = pa.schema(
    [
        *(pa.field(name, pa.int64(), nullable=False) for name in ("step", "update", "row", "group")),
        *(pa.field(name, pa.string(), nullable=False) for name in ("key", "prompt", "response")),
        *(pa.field(name, pa.string()) for name in ("id", "ground_truth", "outcome", "answer", "no_scores")),
        pa.field("reward", pa.float64()),
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("span", list_of(pa.int64())),
        pa.field("prompt_ids", list_of(pa.int64()), nullable=False),
        pa.field("token_ids", list_of(pa.int64()), nullable=False),
        pa.field("tokens", list_of(pa.string()), nullable=False),
        pa.field("mask", list_of(pa.bool_()), nullable=False),
        *(pa.field(name, _FLOATS, nullable=name != "weight") for name in COLUMNS),
        pa.field("methods", list_of(_METHOD), nullable=False),
        pa.field("labels", pa.string()),
    ]
)
"""The columns of a file."""
_TEXTS = [
    *(column.name for column in SCHEMA if column.type == pa.string()),
    "tokens.list.element",
    "methods.list.element.name",
    "methods.list.element.no_scores",
]
"""The leaves that hold texts, which are written and read as a dictionary of the different ones."""
_IDS = ["prompt_ids.list.element", "token_ids.list.element"]
_PER_TOKEN = ("token_ids", "mask", *COLUMNS)
"""Columns with a number a token, whose fields end in ``_T``."""


# ------------------------------------------------------------------------------------------------------------------ writing


def write_step(folder: Path, header: DumpHeader, rows: Iterable[DumpRow]) -> Path:
    """Write one file, in place of one of the same step and update.

    It appears under its name whole and on the disk, or not at all.

    Args:
        folder: is made where it is missing.
        header: of the file.
        rows: responses of this step. Half a surrogate pair in a text becomes U+FFFD; everything else reads back bit for bit.

    Returns:
        The file.

    Raises:
        OSError: the disk's.
    """
    path = numbered_path(folder, _KIND, header.step, header.update)
    write_table(path, _table(header, list(rows)), [*_TEXTS, *_IDS])
    return path


def dumped_steps(folder: Path) -> list[int]:
    """The steps of which a folder has files, in order; none where there is no folder."""
    return sorted({step for (step, _), _ in numbered_files(folder, _KIND)})


def remove_steps(folder: Path, first: int) -> list[Path]:
    """Remove the files of step ``first`` and later ones, which a run that resumes there writes anew, and unfinished ones;
    returns the former."""
    removed = [path for (step, _), path in [*numbered_files(folder, _KIND), *received_files(folder)] if step >= first]
    for path in [*removed, *Path(folder).glob(f".*{UNFINISHED}")]:
        path.unlink()
    return removed


def _table(header: DumpHeader, rows: Sequence[DumpRow]) -> pa.Table:
    record = json.dumps({"schema_version": SCHEMA_VERSION, **asdict(header)}).encode("ascii")
    records = [_record(header, row) for row in rows]
    arrays = [pa.array([entry[column.name] for entry in records], column.type) for column in SCHEMA]
    return pa.Table.from_arrays(arrays, schema=SCHEMA.with_metadata({_KEY: record}))


def _record(header: DumpHeader, row: DumpRow) -> dict[str, Any]:
    """The response's value in each column."""
    record = _columns(row) | {
        "step": header.step,
        "update": header.update,
        "tokens": list(row.tokens),
        "span": list(vars(row.span).values()) if row.span else None,
        "methods": [{"name": name, **_columns(method)} for name, method in row.methods.items()],
        "labels": json.dumps(row.labels) if row.labels else None,
    }
    return as_utf8(record)


def _columns(values: DumpRow | MethodColumns) -> dict[str, Any]:
    return {name.removesuffix("_T"): value for name, value in vars(values).items()}


# ------------------------------------------------------------------------------------------------------------------ reading


@dataclass
class DumpFile:
    """One file of a folder."""

    path: Path
    step: int
    update: int
    problems: list[str]
    """Of the folder: unreadable files, each named once."""

    @property
    def header(self) -> DumpHeader | None:
        """``None`` where it cannot be read, which :meth:`rows` puts into ``problems``."""
        try:
            return _read_header(pq.read_metadata(self.path))
        except BROKEN:
            return None

    def rows(self) -> Iterator[DumpRow]:
        """The responses, one at a time; of a damaged file those before the damage."""
        count, receipts = 0, Receipts(self.path.parent, self.step, self.update, self.problems)
        try:
            for group in groups(self.path, SCHEMA, _read_header, _TEXTS):
                for index in range(group.num_rows):
                    row = _read_row(group, index, self.step, self.update)
                    yield receipts.join(row)
                count += group.num_rows
            message = "" if count else "holds no responses"
        except BROKEN as error:
            message = f"is damaged or no token dump ({str(error)[:200]})"
        problem = f"{self.path}: {message}"
        if message and problem not in self.problems:
            self.problems.append(problem)


@dataclass
class TokenDump:
    """A folder of token dumps, as it is on the disk."""

    folder: Path
    files: list[DumpFile]
    """By step and update."""
    problems: list[str]
    """What could not be read so far, each with its file; grows while responses are read."""

    @property
    def steps(self) -> list[int]:
        """The steps that there are files of."""
        return sorted({file.step for file in self.files})

    def rows(self, steps: Iterable[int] | None = None) -> Iterator[DumpRow]:
        """The responses of some steps, of all by default, one at a time."""
        wanted = None if steps is None else set(steps)
        for file in self.files:
            if wanted is None or file.step in wanted:
                yield from file.rows()

    def __iter__(self) -> Iterator[DumpRow]:
        return self.rows()

    def receipts(self) -> list[ReceivedHeader]:
        """What the files of what arrived say of their updates, in order."""
        return read_headers(self.folder, self.problems)


def read_dump(folder: Path | str) -> TokenDump:
    """Look into a folder. Nothing is raised: what is wrong with it is in ``problems``."""
    folder = Path(folder)
    try:
        unfinished = [path for path in folder.iterdir() if path.name.endswith(UNFINISHED)]
    except OSError as error:
        return TokenDump(folder, [], [f"{folder}: cannot be read: {error.strerror or error}"])
    problems = [f"{path}: was being written when its run ended; nothing of it is read" for path in unfinished]
    files = [DumpFile(path, *place, problems) for place, path in numbered_files(folder, _KIND) if path.is_file()]
    if not files:
        problems.append(f"{folder}: holds no token dump (step_NUMBER.parquet)")
    return TokenDump(folder, files, problems)


def _read_header(metadata: pq.FileMetaData) -> DumpHeader:
    """Raises one of ``BROKEN`` where there is none of this version."""
    record = read_record(metadata, _KEY, SCHEMA_VERSION)
    record["special_tokens"] = {int(token): str(name) for token, name in record["special_tokens"].items()}
    header = DumpHeader(**record)
    texts = (header.method, header.model, header.written_by, header.answer or "")
    if not (
        all(isinstance(text, str) for text in texts)
        and isinstance(header.options, dict)
        and isinstance(header.temperature, int | float | None)
    ):
        raise TypeError("a value in its header has a wrong type")
    return header


def _read_row(group: pa.Table, index: int, step: int, update: int) -> DumpRow:
    methods = {}
    for method in group.column("methods")[index].values:
        columns = _fields(method)
        name = columns.pop("name")
        methods[name] = MethodColumns(**columns)
    values = _fields({name: group.column(name)[index] for name in SCHEMA.names if name != "methods"})
    labels = json.loads(values["labels"] or "{}")
    values |= {
        "step": step,
        "update": update,
        "span": None if values["span"] is None else AnswerSpan(*values["span"].tolist()),
        "methods": methods,
        "labels": labels if isinstance(labels, dict) else {},
    }
    return DumpRow(**values)


def _fields(columns: Mapping[str, pa.Scalar]) -> dict[str, Any]:
    """Values by the names of their fields; lists as arrays, except those of texts."""
    return {f"{name}_T" if name in _PER_TOKEN else name: _value(value) for name, value in columns.items()}


def _value(value: pa.Scalar) -> Any:
    if not isinstance(value, pa.ListScalar) or not value.is_valid:
        return value.as_py()
    if pa.types.is_dictionary(value.values.type):
        return _texts(value)
    return array_of(value)


def _texts(values: pa.ListScalar) -> list[str]:
    # Equal tokens share a text; only those of this response are made.
    numbers, place = np.unique(values.values.indices.to_numpy(), return_inverse=True)
    texts = values.values.dictionary.take(pa.array(numbers)).to_pylist()
    return [texts[i] for i in place.tolist()]
