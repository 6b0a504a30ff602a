"""The token dump: every token's score, weight and advantage of chosen rollouts, as Parquet files.

A folder with one file a written update, ``step_000123.parquet``: a row a response, list columns for values a token, the header
as JSON in the file's metadata. ``received_000123.parquet`` has the same responses in the same order with what they received in
the update (:mod:`grail_advantage.receipt`); it is a file of its own because it is known after the update only, and may be
missing. docs/token_dump.md has every column.

- :func:`write_step` and :func:`write_received` write one file, whole or not at all.
- :func:`read_dump` reads a folder. A file that cannot be read is named, with the reason; the others are read.

Shape suffixes: N responses, T response tokens, M methods of all responses, K optimiser steps that a response was in.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from grail_advantage.answers.span import AnswerSpan
from grail_advantage.dump.schema import COLUMNS, RECEIVED_SCHEMA, SCHEMA, DumpHeader, ReceivedHeader
from grail_advantage.dump.whole_file import UNFINISHED, whole_file
from grail_advantage.receipt.foreign import open_plain, plain_file, read_json, why

_BROKEN = (pa.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, MemoryError)
"""Errors of a damaged or foreign file."""
_ROWS = 32
"""Rows of a row group; the reader holds one group at a time."""
_MOST_VALUES, _MOST_BYTES = 2**27, 2**29
"""Of a row group at most, unpacked: a response of 100,000 tokens has up to two million values and 20 MB."""
_TOKENS = "tokens.list.element"
"""The leaf that is read as a dictionary, so that equal tokens share a text."""
_DICTIONARIES = [
    *(column.name for column in SCHEMA if column.type == pa.string()),
    *("prompt_ids.list.element", "token_ids.list.element", _TOKENS),
    *("methods.list.element.name", "methods.list.element.no_scores"),
]
"""Leaves of few different values."""
_PER_TOKEN = ("token_ids", "mask", *COLUMNS)
"""Columns with a number a token, whose fields end in ``_T``."""
_Row = TypeVar("_Row")


class _Kind(NamedTuple):
    """One of the two kinds of files."""

    name: str
    """In front of the step in a file's name."""
    called: str
    """In messages."""
    version: int
    """``schema_version`` in the header."""
    key: bytes
    """Of the header in the file's metadata."""
    header: TypeAdapter
    schema: pa.Schema
    per_token: Sequence[str]
    """List columns with one value a token; the first one says how many tokens there are."""

    def path(self, folder: Path, step: int, update: int) -> Path:
        """The file of a step, or of one of its later updates."""
        return Path(folder) / f"{self.name}_{step:06d}{f'_update_{update}' if update else ''}.parquet"

    def files(self, folder: Path, problems: list[str] | None = None) -> list[tuple[int, int, Path]]:
        """Step, update and path of each plain file that is named as one of this kind, in order; what has such a name and is
        something else is added to ``problems``."""
        name = re.compile(rf"{self.name}_(\d{{1,15}})(?:_update_(\d{{1,9}}))?\.parquet", re.ASCII)
        found = []
        for path in Path(folder).glob(f"{self.name}_*"):
            if match := name.fullmatch(path.name):
                if path.is_file():
                    found.append((int(match[1]), int(match[2] or 0), path))
                elif problems is not None:
                    with named(path, self.called, problems):
                        plain_file(path)
        return sorted(found)


_STEP = _Kind("step", "token dump", 4, b"grail_advantage", TypeAdapter(DumpHeader), SCHEMA, ("tokens", *_PER_TOKEN))
_RECEIVED = _Kind(
    "received",
    "receipt",
    2,
    b"grail_advantage_received",
    TypeAdapter(ReceivedHeader),
    RECEIVED_SCHEMA,
    ("received", "clipped"),
)


# ------------------------------------------------------------------------------------------------------------------ writing


def write_step(folder: Path, header: DumpHeader, table: pa.Table) -> Path:
    """Write the responses of an update, in place of a file of the same step and update.

    Args:
        folder: is made where it is missing.
        header: of the file.
        table: a row a response, with all columns of :data:`grail_advantage.dump.schema.SCHEMA` but ``step`` and ``update``.

    Returns:
        The file.

    Raises:
        ValueError: a column is missing or has another type, or a response has more or fewer values than tokens.
        OSError: the disk's.
    """
    for name in ("update", "step"):
        values = pa.repeat(pa.scalar(getattr(header, name), pa.int64()), len(table))
        table = table.add_column(0, SCHEMA.field(name), values)
    return _write(_STEP, folder, header, table)


def write_received(folder: Path, header: ReceivedHeader, table: pa.Table) -> Path:
    """Write what the responses of an update received, as :func:`write_step` does.

    Args:
        folder: of the dump.
        header: of the file.
        table: of :data:`grail_advantage.dump.schema.RECEIVED_SCHEMA`, as :func:`grail_advantage.dump_writer.received_table`
            gives it, with the responses of the file beside it in their order.
    """
    return _write(_RECEIVED, folder, header, table)


def _write(kind: _Kind, folder: Path, header: DumpHeader | ReceivedHeader, table: pa.Table) -> Path:
    record = json.dumps({"schema_version": kind.version, **asdict(header)})
    try:
        table = table.select(kind.schema.names).cast(kind.schema.with_metadata({kind.key: record}))
    except (KeyError, pa.ArrowException) as error:
        raise ValueError(f"the table is not that of a {kind.called}: {error}") from error
    _check_lengths(kind, table)
    path = kind.path(folder, header.step, header.update)
    with whole_file(path) as file:
        pq.write_table(
            table, file, row_group_size=_ROWS, compression="zstd", use_dictionary=_DICTIONARIES, write_statistics=False
        )
    return path


def _check_lengths(kind: _Kind, table: pa.Table) -> None:
    """Raises ``ValueError`` where a list column of a response has more or fewer values than the response has tokens."""
    first, *others = (name for name in kind.per_token if name in table.column_names)
    tokens_N = pc.list_value_length(table[first])
    lists = [(name, table[name], tokens_N) for name in others]
    if "methods" in table.column_names:
        methods = table["methods"].combine_chunks()
        tokens_M = tokens_N.take(pc.list_parent_indices(methods))
        lists += [
            (f"a method's {name}", pc.struct_field(methods.flatten(), name), tokens_M)
            for name in ("score", "weight", "advantage")
        ]
    for name, values, expected in lists:
        counts = pc.list_value_length(values)
        other = pc.index(pc.not_equal(counts, expected), value=True).as_py()
        if other >= 0:
            raise ValueError(f"{name} has {counts[other]} values for {expected[other]} tokens")


def is_dump(folder: Path) -> bool:
    """Whether something in a folder is named as one of a dump's files."""
    others: list[str] = []
    return any([*_STEP.files(folder, others), *_RECEIVED.files(folder, others)]) or bool(others)


def dumped_steps(folder: Path) -> list[int]:
    """The steps of which a folder has files, in order; none where there is no folder."""
    return sorted({step for step, _, _ in _STEP.files(folder)})


def remove_steps(folder: Path, first: int) -> list[Path]:
    """Remove the files of step ``first`` and later ones, which a run that resumes there writes anew, and unfinished ones;
    returns the former."""
    removed = [path for step, _, path in [*_STEP.files(folder), *_RECEIVED.files(folder)] if step >= first]
    for path in [*removed, *Path(folder).glob(f".*{UNFINISHED}")]:
        path.unlink()
    return removed


# ------------------------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True, kw_only=True)
class MethodColumns:
    """Scores and weights of one of several methods."""

    score_T: np.ndarray | None
    weight_T: np.ndarray
    no_scores: str | None = None
    advantage_T: np.ndarray | None = None
    """A method's token advantages; ``None`` if they are the weights times the base advantage."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReceivedRow:
    """What the tokens of one response received, in the K optimiser steps of the update that it was in."""

    key: str
    """As the response's."""
    updates: np.ndarray
    """int64 (K,): the numbers of these optimiser steps, from 0 over all epochs; none of a response that was left out."""
    received_T: np.ndarray
    """float32: the effective advantage that arrived, the mean over the K steps; NaN where a token was in none."""
    clipped_T: np.ndarray
    """float32: the share of the K steps in which the loss clipped the token; NaN where that is not known."""
    by_update_KT: np.ndarray
    """float32: the effective advantage of each step."""
    clipped_by_update_KT: np.ndarray
    """float32: above 0 where the step clipped the token; NaN where that is not known."""

    def __len__(self) -> int:
        return len(self.received_T)


@dataclass(frozen=True, kw_only=True, eq=False)
class DumpRow:
    """One response. Arrays have its length T; float ones are float32 with NaN where there is no value."""

    step: int
    row: int
    """Its place in the update's batch."""
    key: str
    """verl's key of the response, ``{prompt}_{session}_{output}``, which verl's own rollout dump calls ``uid``."""
    group: int
    """Responses of one update with the same number answer the same prompt."""
    update: int = 0
    id: str | None = None
    """The problem's name, where it has one."""
    prompt: str = ""
    """The text that the model saw."""
    response: str = ""
    """``"".join(tokens)``."""
    ground_truth: str | None = None
    reward: float | None = None
    outcome: str | None = None
    """``right`` (correct), ``wrong`` (incorrect), or ``None`` where it is not known."""
    answer: str | None = None
    """The text in the answer span."""
    truncated: bool = False
    no_scores: str | None = None
    """Why the response has no scores, if it has none."""
    span: AnswerSpan | None = None
    prompt_ids: np.ndarray
    token_ids_T: np.ndarray
    tokens: Sequence[str]
    """The text of each token. A character that several tokens share belongs to the last of them; special tokens have none."""
    mask_T: np.ndarray
    """bool; the tokens that train."""
    score_T: np.ndarray | None = None
    weight_T: np.ndarray
    base_advantage_T: np.ndarray | None = None
    advantage_T: np.ndarray | None = None
    old_log_prob_T: np.ndarray | None = None
    entropy_T: np.ndarray | None = None
    methods: Mapping[str, MethodColumns] = field(default_factory=dict)
    """Weights by method, if several methods weighted the response."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    """Token ranges ``[start, end]``, or lists of them, by name; the report marks ``wrong_step``."""
    received: ReceivedRow | None = None
    """What its tokens received, where the run kept that."""

    def __len__(self) -> int:
        return len(self.mask_T)


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
        return _header(_STEP, self.path, [])

    def rows(self, without: Collection[str] = ()) -> Iterator[DumpRow]:
        """The responses, one at a time; of a damaged file those before the damage.

        Args:
            without: columns that are not read, or ``received``; the responses have ``None`` there, and no ``tokens``.
        """
        path = _RECEIVED.path(self.path.parent, self.step, self.update)
        there = os.path.lexists(path) and "received" not in without
        received = _rows(_RECEIVED, path, self.problems, _received_row) if there else iter(())
        for row in _rows(_STEP, self.path, self.problems, _dump_row, without):
            arrived = next(received, None)
            if arrived is not None and (arrived.key, len(arrived)) != (row.key, len(row)):
                _add(self.problems, path, "is of other responses than the file of its step")
                arrived, received = None, iter(())
            yield replace(row, received=arrived)


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
        """The headers of the files of what arrived, in order."""
        return read_headers(self.folder, self.problems)


def read_dump(folder: Path | str) -> TokenDump:
    """Look into a folder. Nothing is raised: what is wrong with it is in ``problems``."""
    folder = Path(folder)
    try:
        unfinished = [path for path in folder.iterdir() if path.name.endswith(UNFINISHED)]
    except OSError as error:
        return TokenDump(folder, [], [f"{folder}: cannot be read: {why(error)}"])
    problems = [f"{path}: was being written when its run ended; nothing of it is read" for path in unfinished]
    files = [DumpFile(path, step, update, problems) for step, update, path in _STEP.files(folder, problems)]
    if not files:
        problems.append(f"{folder}: holds no token dump (step_NUMBER.parquet)")
    return TokenDump(folder, files, problems)


def read_headers(folder: Path, problems: list[str]) -> list[ReceivedHeader]:
    """The headers of the files of what arrived, in order; a file that cannot be read is added to ``problems``, once."""
    headers = (_header(_RECEIVED, path, problems) for _, _, path in _RECEIVED.files(folder, problems))
    return [header for header in headers if header is not None]


@contextmanager
def named(path: Path, called: str, problems: list[str]) -> Iterator[None]:
    """Within, an error of a damaged or foreign file is added to ``problems``."""
    try:
        yield
    except _BROKEN as error:
        _add(problems, path, f"is damaged or no {called} ({why(error)})")


def _header(kind: _Kind, path: Path, problems: list[str]) -> Any:
    """The file's header; ``None`` where it cannot be read."""
    with named(path, kind.called, problems), open_plain(path) as content:
        return _parsed(kind, pq.read_metadata(content))
    return None


def _parsed(kind: _Kind, metadata: pq.FileMetaData) -> Any:
    """Raises one of ``_BROKEN`` where there is no header of this version."""
    text = (metadata.metadata or {}).get(kind.key)
    if text is None:
        raise ValueError("its metadata has no header")
    record = read_json(text)
    if record["schema_version"] != kind.version:
        raise ValueError(f"schema_version is {record['schema_version']!r:.20}; this version reads {kind.version}")
    if any(type(value) is int and abs(value) >= 2**63 for value in record.values()):
        raise ValueError("a number in its header is too large")
    return kind.header.validate_python(record)


def _rows(
    kind: _Kind, path: Path, problems: list[str], make: Callable[..., _Row], without: Collection[str] = ()
) -> Iterator[_Row]:
    """What ``make`` makes of each row's values by column; of a damaged file the rows before the damage, which is added to
    ``problems``."""
    dictionaries = [_TOKENS] if kind is _STEP else []
    names = [name for name in kind.schema.names if name not in without]
    unread = dict.fromkeys(kind.schema.names)
    with (
        named(path, kind.called, problems),
        open_plain(path) as content,  # arrow itself opens no name that is not UTF-8
        pq.ParquetFile(content, read_dictionary=dictionaries) as file,
    ):
        _parsed(kind, file.metadata)
        if not file.metadata.schema.to_arrow_schema().equals(kind.schema):
            raise ValueError("its columns are others")
        if not file.metadata.num_rows:
            raise ValueError("it holds no responses")
        for number in range(file.num_row_groups):
            check_size(file.metadata.row_group(number))
            table = file.read_row_group(number, columns=names)
            _check_lengths(kind, table)
            columns = [
                column.to_numpy() if pa.types.is_list(column.type) else column.to_pylist() for column in table.columns
            ]
            for row in zip(*columns, strict=True):
                values = (value.copy() if isinstance(value, np.ndarray) else value for value in row)  # not of the group
                yield make(**unread | dict(zip(names, values, strict=True)))


def check_size(group: pq.RowGroupMetaData, rows: int = _ROWS) -> None:
    """Raises ``ValueError`` where a small file would unpack to far more than responses take."""
    columns = [group.column(place) for place in range(group.num_columns)]
    values, size = (
        sum(getattr(column, name) for column in columns) for name in ("num_values", "total_uncompressed_size")
    )
    if group.num_rows > rows or values > _MOST_VALUES or size > _MOST_BYTES:
        raise ValueError(f"a row group has {group.num_rows:,} rows, {values:,} values and {size:,} bytes, too many")


def _add(problems: list[str], path: Path, message: str) -> None:
    if (problem := f"{path}: {message}") not in problems:
        problems.append(problem)


def _dump_row(
    span: np.ndarray | None, tokens: np.ndarray | None, methods: Sequence[dict], labels: str, **values: Any
) -> DumpRow:
    row = DumpRow(
        span=None if span is None else AnswerSpan(*span.tolist()),
        tokens=[] if tokens is None else tokens.tolist(),
        methods={
            each["name"]: MethodColumns(
                score_T=each["score"],
                advantage_T=each["advantage"],
                weight_T=each["weight"],
                no_scores=each["no_scores"],
            )
            for each in methods
        },
        labels=dict(read_json(labels or "{}")),
        **{f"{name}_T" if name in _PER_TOKEN else name: value for name, value in values.items()},
    )
    edges = [0, *vars(row.span).values(), len(row)] if row.span else []
    if edges != sorted(edges):
        raise ValueError(f"response {row.row}: the span is not four token indices in order, at most {len(row)}")
    return row


def _received_row(
    key: str, updates: np.ndarray, received: np.ndarray, clipped: np.ndarray, **by_update: np.ndarray
) -> ReceivedRow:
    by_update_KT, clipped_by_update_KT = (
        np.array(by_update[name].tolist(), dtype=np.float32).reshape(len(updates), len(received))
        for name in ("by_update", "clipped_by_update")
    )
    return ReceivedRow(
        key=key,
        updates=updates,
        received_T=received,
        clipped_T=clipped,
        by_update_KT=by_update_KT,
        clipped_by_update_KT=clipped_by_update_KT,
    )
