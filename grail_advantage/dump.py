"""The token dump has every token's score, weight and advantage of chosen responses, and what it received, in Parquet
files.

``step_000123.parquet`` has a row a response of an update, with a list for each value that tokens have;
``received_000123.parquet``, which may be missing, has what is known after the update, by the same keys. Both have a
header as JSON in their metadata. docs/token_dump.md has every column. They are written and read so::

    write_step(folder, header_of(weighed, texts, step=12), table_of(weighed, texts))
    dump = read_dump(folder)                                        # raises nothing: see dump.problems
    table = dump.table(["key", "weight", "received"], steps=[12])   # arrow; all columns and steps by default
    for row in dump.rows([12]):                                     # one response at a time
        print(row.key, row.outcome, row.weight_T.mean(), row.received_T)
    print(dump.files[0].header.method, dump.receipts())             # a file of dump.files has table() and rows(), too
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from torch import Tensor

from grail_advantage import __version__
from grail_advantage.answers.span import AnswerSpan
from grail_advantage.answers.text import TokenTexts, answer_text
from grail_advantage.data import DUMPED, Weighed, runs, within_range
from grail_advantage.receipt import Receipt
from grail_advantage.receipt.report import checked
from grail_advantage.text_io import plain_file, read_json, visible, why

logger = logging.getLogger(__name__)
VERSION = 6  # ``schema_version`` of both kinds of files; older ones are read, with null in the columns they lack
# Where a run has its dump and its figures, by convention.
TOKENS = "tokens"
METRICS_FILE = "metrics.jsonl"
SECONDS = 60.0  # that a training waits for a file at most
_Read = TypeVar("_Read")

INT = pa.int64()
TEXT = pa.string()
INTS = pa.list_(INT)
FLOATS = pa.list_(pa.float32())
# The columns of floats, one a token; null where a run does not have them.
COLUMNS = (
    "score",
    "weight",
    "base_advantage",
    "advantage",
    "old_log_prob",
    "entropy",
    "rollout_log_probs",
    "ref_log_prob",
)
OF_METHOD = {
    "name": TEXT,
    "score": FLOATS,
    "advantage": FLOATS,
    "weight": FLOATS,
    "no_scores": TEXT,
}
SCHEMA = pa.schema(  # the columns of ``step_000123.parquet``
    {
        **dict.fromkeys(("step", "update", "row", "group"), INT),
        **dict.fromkeys(
            ("key", "prompt", "response", "id", "ground_truth", "outcome", "answer", "no_scores"),
            TEXT,
        ),
        "reward": pa.float64(),
        "truncated": pa.bool_(),
        **dict.fromkeys(("span", "prompt_ids", "token_ids"), INTS),
        "tokens": pa.list_(TEXT),
        "mask": pa.list_(pa.bool_()),
        **dict.fromkeys(COLUMNS, FLOATS),
        "methods": pa.list_(pa.struct(OF_METHOD)),
        "labels": TEXT,
    }
)
# A list for each optimiser step, of floats, one a token
BY_UPDATE = "by_update", "clipped_by_update"
RECEIVED_SCHEMA = (
    pa.schema(  # the columns of ``received_000123.parquet``; in a table they follow the others
        {
            "key": TEXT,
            "updates": INTS,
            "received": FLOATS,
            "clipped": FLOATS,
            **dict.fromkeys(BY_UPDATE, pa.list_(FLOATS)),
            "effect": FLOATS,  # the change of each token's log-probability by the update
        }
    )
)
_ALL_COLUMNS = pa.schema([*SCHEMA, *list(RECEIVED_SCHEMA)[1:]])
ALL = tuple(_ALL_COLUMNS.names)
_PER_TOKEN = ("token_ids", "mask", *COLUMNS, "received", "clipped", "effect")
# Columns of which every response has all values.
_WHOLE = ("key", "row", "group", "prompt", "token_ids", "tokens", "mask", "weight", "advantage")
_KEYS = {
    "step": b"grail_advantage",
    "received": b"grail_advantage_received",
}  # of the headers, by kind of file
_SUFFIXES = {**dict.fromkeys(_PER_TOKEN, "_T"), **dict.fromkeys(BY_UPDATE, "_KT")}


@dataclass(frozen=True, kw_only=True)
class DumpHeader:
    """It says what all responses of a file share."""

    step: int
    method: str  # its registered name; of several, that of the columns ``score`` and ``weight``
    update: int = 0  # of the step's updates of the actor
    options: Mapping[str, Any] = field(default_factory=dict)  # all of the method
    reshaper: str | None = None
    model: str = ""
    temperature: float | None = None
    # Responses of the update's batch, without those that only fill it up
    rows_in_step: int | None = None
    # Names of tokens without text, by id
    special_tokens: Mapping[int, str] = field(default_factory=dict)
    written_by: str = ""
    answer: str | None = None  # the format of answers; ``None`` for methods that read none
    gave_advantages: bool = False  # the method gave token advantages, not weights


# The methods of which this is true in files of before version 6, whose headers do not say it.
_GAVE_ADVANTAGES = ("step_values", "turn_rloo", "mt_grpo", "gigpo", "gtpo")
_HEADER = TypeAdapter(DumpHeader)


def as_utf8(text: str | None) -> str | None:
    """Make a text one that the columns can hold: half a surrogate pair becomes U+FFFD. ``None`` stays."""
    # Through UTF-16, in which two halves that meet are their character.
    return (
        text if text is None else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    )


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file, a text as UTF-8, so that it appears whole or not at all, in place of one that was there; makes its
    folder. OSError: the disk's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own that is short: the file's own may be as long as a name can be.
    temporary = path.with_name(f".{zlib.crc32(os.fsencode(path.name)):08x}.{os.getpid()}.writing")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            # Before the rename: after a crash of the machine the name could be that of an empty file.
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_step(folder: Path, header: DumpHeader, table: pa.Table) -> Path:
    """Write the responses of an update, a row each with all columns of :data:`SCHEMA` but ``step`` and ``update``, in
    place of a file of the same step and update; returns the file. KeyError for a column that is missing, ValueError for
    one of another type or with more or fewer values than tokens, OSError of the disk."""
    for name in ("update", "step"):
        table = table.append_column(name, pa.repeat(getattr(header, name), len(table)))
    return _write(folder, "step", asdict(header), table, SCHEMA, "tokens")


def write_received(folder: Path, header: Mapping[str, Any], table: pa.Table) -> Path:
    """Write what is known after an update, as :func:`write_step` does: a header as ``record_of`` and all columns of
    :data:`RECEIVED_SCHEMA` as :func:`received_table` makes them of a receipt."""
    return _write(folder, "received", header, table, RECEIVED_SCHEMA, "received")


def _write(
    folder: Path,
    kind: str,
    header: Mapping[str, Any],
    table: pa.Table,
    schema: pa.Schema,
    tokens: str,
) -> Path:
    """Write a file of a kind; ``tokens`` names a column that has a value for each token."""
    table = table.select(schema.names).cast(schema)
    _check_lengths(table, table[tokens])
    record = json.dumps({"schema_version": VERSION, **header})
    path = _path(folder, kind, header["step"], header.get("update", 0))
    # In memory, as write_whole() writes all at once.
    content = io.BytesIO()
    pq.write_table(
        table.replace_schema_metadata({_KEYS[kind]: record}),
        content,
        compression="zstd",
        use_dictionary=False,
    )
    write_whole(path, content.getvalue())
    return path


def _check_lengths(table: pa.Table, tokens: pa.ListArray | pa.ChunkedArray) -> None:
    """Raise ValueError where a response has more or fewer values of a column than tokens. Null in place of a list is
    allowed."""
    counts = pc.list_value_length(tokens)
    for name in table.column_names:
        values = table[name]
        expected = counts
        if name in BY_UPDATE:
            lists = values.combine_chunks()
            values = lists.flatten()
            # Two optimiser steps of a response of 3 tokens are two lists of 3.
            expected = counts.take(pc.list_parent_indices(lists))
        elif name not in _PER_TOKEN:
            continue
        # A null list compares as null, which counts as equal.
        are_equal = pc.all(pc.equal(pc.list_value_length(values), expected)).as_py()
        if are_equal is False or (name in BY_UPDATE and values.null_count):
            raise ValueError(f"a response has more or fewer values of {name} than tokens")


def _check_foreign(table: pa.Table) -> None:
    """Raise ValueError where a file, which others may have written, breaks what every reader relies on."""
    # Reading a file checks neither the offsets of its lists nor its UTF-8.
    table.validate(full=True)
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    for name, column in columns.items():
        holds_null = column.null_count or (
            pa.types.is_list(column.type) and column.flatten().null_count
        )
        if name in _WHOLE and holds_null:
            raise ValueError(f"a response has no value, or an empty one, of {name}")
    tokens = next(
        (columns[name] for name in ("tokens", "mask", "token_ids") if name in columns), None
    )
    if tokens is not None:
        _check_lengths(table, tokens)
        if "methods" in columns:
            _check_methods(columns["methods"], tokens)
        if "span" in columns:
            lengths = pc.list_value_length(tokens).to_pylist()
            for span, length in zip(columns["span"].to_pylist(), lengths, strict=True):
                if span is not None and (
                    len(span) != 4 or [0, *span, length] != sorted([0, *span, length])
                ):
                    raise ValueError(f"{span} is no span of {length} tokens")
    if "labels" in columns:
        for text in columns["labels"].to_pylist():
            if not isinstance(read_json(text or "{}"), dict):
                raise ValueError("labels are no JSON object")


def _check_methods(methods: pa.ListArray, tokens: pa.ListArray) -> None:
    """Raise ValueError where responses have different methods, or a method more or fewer values than tokens."""
    entries = methods.flatten()
    # The offsets count in all values; flatten() leaves out those that null rows hold.
    names = pa.ListArray.from_arrays(methods.offsets, methods.values.field("name")).to_pylist()
    if any(row != names[0] or None in row or len(row) > len(set(row)) for row in names):
        raise ValueError("responses have different methods")
    columns = {name: entries.field(name) for name in ("score", "weight", "advantage")}
    _check_lengths(pa.table(columns), tokens.take(pc.list_parent_indices(methods)))


def _path(folder: Path, kind: str, step: int, update: int) -> Path:
    return Path(folder) / f"{kind}_{step:06d}{f'_update_{update}' if update else ''}.parquet"


def _files(folder: Path, kind: str) -> list[tuple[int, int, Path]]:
    """Give step, update and path of each file of a kind, in order; none where there is no folder."""
    # So many digits fit into int64, the type of the columns.
    name = rf"{kind}_([0-9]{{1,15}})(?:_update_([0-9]{{1,9}}))?\.parquet"
    files = []
    for path in Path(folder).glob("*.parquet"):
        if match := re.fullmatch(name, path.name):
            files.append((int(match[1]), int(match[2] or 0), path))
    return sorted(files)


def remove_steps(folder: Path, first: int) -> list[Path]:
    """Remove the files of step ``first`` and later ones, and unfinished ones; returns the former."""
    removed = [path for kind in _KEYS for step, _, path in _files(folder, kind) if step >= first]
    for path in [*removed, *Path(folder).glob(".*.writing")]:
        path.unlink()
    if removed:
        logger.warning(
            "%s: %d files of step %d and later, of an earlier run, removed",
            folder,
            len(removed),
            first,
        )
    return removed


class DumpRow(SimpleNamespace):
    """It is one response: its columns by name, those with a number a token as arrays (``weight_T``, ``by_update_KT``, K
    optimiser steps), ``span`` as an ``AnswerSpan``, ``methods`` as such rows by name; ``None``: null, or not read."""

    def __len__(self) -> int:
        return len(self.mask_T)


@dataclass
class DumpFile:
    """The file has the responses of one update."""

    step: int
    update: int
    path: Path
    problems: list[str]  # of the folder: what could not be read, each with its file, named once

    @property
    def header(self) -> DumpHeader | None:
        """Say what all responses share; ``None`` where it cannot be read."""
        with _noting(self.path, "step", self.problems):
            return _HEADER.validate_python(_header_in(self.path, "step"))
        return None

    def table(self, columns: Iterable[str] = ALL, limit: int | None = None) -> pa.Table:
        """Give the responses, or the first ``limit``; none where the file is damaged, which ``problems`` names then."""
        names = list(columns)
        names_received = [name for name in names if name not in SCHEMA.names]
        if not names_received:
            return _read(self.path, "step", names, self.problems, limit)
        # ``key`` joins the two files, and ``mask`` says how many tokens each response has.
        names_written = [name for name in SCHEMA.names if name in {*names, "key", "mask"}]
        table = _read(self.path, "step", names_written, self.problems, limit)
        path = _path(self.path.parent, "received", self.step, self.update)
        received = RECEIVED_SCHEMA.empty_table()
        if path.exists():
            received = _read(path, "received", ["key", *names_received], self.problems)
        # Responses that no update took have no row there, and null in these columns.
        rows = pc.index_in(table["key"], received["key"].combine_chunks())
        joined = table
        for name in names_received:
            joined = joined.append_column(name, received[name].take(rows))
        with _noting(path, "received", self.problems):
            _check_lengths(joined, joined["mask"])
            return joined.select(names)
        # The responses stay, without what a damaged file says of them.
        return _with_nulls(table, names_received).select(names)

    def rows(self, columns: Iterable[str] = ALL) -> Iterator[DumpRow]:
        """Give the responses, one at a time."""
        table = _with_nulls(self.table(columns), ALL)
        for index in range(len(table)):
            yield _row({name: table[name][index] for name in ALL})


@dataclass
class TokenDump:
    """It is a folder of token dumps, as it is on the disk."""

    folder: Path
    files: Sequence[DumpFile]  # by step and update
    problems: list[str]  # what could not be read so far; grows while files are read

    @property
    def steps(self) -> list[int]:
        return sorted({file.step for file in self.files})

    def table(self, columns: Iterable[str] = ALL, steps: Collection[int] | None = None) -> pa.Table:
        """Give the responses of some steps, of all by default."""
        names = list(columns)
        tables = [_schema(names).empty_table()]
        tables += [file.table(names) for file in self.files if steps is None or file.step in steps]
        return pa.concat_tables(tables)

    def rows(self, steps: Collection[int] | None = None) -> Iterator[DumpRow]:
        """Give the responses of some steps, of all by default, one at a time."""
        for file in self.files:
            if steps is None or file.step in steps:
                yield from file.rows()

    __iter__ = rows

    def receipts(self) -> list[Mapping[str, Any]]:
        """Give the headers that hold a receipt, in order; a file of an analysis has measured effects alone."""
        receipts = []
        for _, _, path in _files(self.folder, "received"):
            # A damaged file costs its own receipt alone.
            with _noting(path, "received", self.problems):
                header = _header_in(path, "received")
                if "findings" in header:
                    receipts.append(checked(header))
        return receipts


def read_dump(folder: Path | str) -> TokenDump:
    """Look into a folder. Nothing is raised: what is wrong with it is in ``problems``, and logged."""
    folder = Path(folder)
    problems: list[str] = []
    files = [DumpFile(*entry, problems) for entry in _files(folder, "step")]
    if not files:
        problems.append(f"{folder}: holds no token dump (step_NUMBER.parquet)")
    return TokenDump(folder, files, problems)


def _schema(columns: Iterable[str]) -> pa.Schema:
    return pa.schema([_ALL_COLUMNS.field(name) for name in columns])


def _with_nulls(table: pa.Table, columns: Iterable[str]) -> pa.Table:
    """Put columns of nulls in front for those of these that the table does not have."""
    return pa.concat_tables([_schema(columns).empty_table(), table], promote_options="default")


@contextmanager
def _noting(path: Path, kind: str, problems: list[str]) -> Iterator[None]:
    """Swallow an error of a damaged file, so that what follows the block runs then. The file is logged, and named once in
    ``problems``, without control characters."""
    try:
        yield
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        problem = visible(f"{path}: is damaged or no {kind} file of a token dump ({why(error)})")
        if problem not in problems:
            problems.append(problem)
            logger.warning(problem)


def _header_in(path: Path, kind: str) -> dict[str, Any]:
    """Read the header of a file; ValueError for one that a later version wrote."""
    with pq.ParquetFile(plain_file(path)) as file:
        header = read_json(file.metadata.metadata[_KEYS[kind]])
    version = header.pop("schema_version")
    if version > VERSION:
        raise ValueError(f"schema_version is {version}; this version reads {VERSION}")
    if kind == "step" and version < 6:
        header["gave_advantages"] = header["method"] in _GAVE_ADVANTAGES
    return header


def _read(
    path: Path, kind: str, columns: Sequence[str], problems: list[str], limit: int | None = None
) -> pa.Table:
    """Read columns of a file, null those that it does not have; no rows of a damaged one."""
    nothing = _schema(columns).empty_table()
    with _noting(path, kind, problems):
        _header_in(path, kind)  # a later version's file is not read
        with pq.ParquetFile(plain_file(path)) as file:
            names = [name for name in columns if name in file.schema_arrow.names]
            first = None
            if limit is not None:
                first = next(file.iter_batches(limit, columns=names), None)
            # A file without rows has no batch.
            table = file.read(names) if first is None else pa.Table.from_batches([first])
        table = table.select(names).cast(_schema(names))
        # Before the columns of null: an older file lacks them, and is right.
        _check_foreign(table)
        return _with_nulls(table, columns)
    return nothing


def _row(scalars: Mapping[str, pa.Scalar]) -> DumpRow:
    """Give a response, or a method's entry in it, of the values of its columns."""
    values = {
        f"{name}{_SUFFIXES.get(name, '')}": _value(name, scalar) for name, scalar in scalars.items()
    }
    return DumpRow(**values)


def _value(name: str, scalar: pa.Scalar) -> Any:
    """Give a value of a column; an array is a copy, so that it does not keep the whole table."""
    if name == "labels":
        return json.loads(scalar.as_py() or "{}")
    if not scalar.is_valid:
        return {} if name == "methods" else None
    if name == "methods":
        entries = [dict(entry) for entry in scalar]
        return {entry.pop("name").as_py(): _row(entry) for entry in entries}
    if name == "span":
        return AnswerSpan(*scalar.as_py())
    if name == "tokens" or not pa.types.is_list(scalar.type):
        return scalar.as_py()
    if name in BY_UPDATE:
        updates = [_value("received", update) for update in scalar]
        return np.array(updates or np.zeros((0, 0)), dtype=np.float32)
    return scalar.values.to_numpy(zero_copy_only=False).copy()


class DumpOptions(BaseModel):
    """They are ``algorithm.token_dump`` in verl, ``token_dump`` in TRL; ValueError for other values."""

    model_config = ConfigDict(title="token_dump", frozen=True, strict=True, extra="forbid")
    folder: Path
    every: int = Field(1, ge=1)  # steps from one dump to the next
    responses: int | None = Field(64, ge=1)  # most responses of a step; ``None`` for all
    received: bool = True  # whether what their tokens receive in the updates is written as well
    # Steps between measurements of the update's effect, a forward each; 0: none
    effect_every: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _effect_needs_received(self) -> DumpOptions:
        if self.effect_every and not self.received:
            raise ValueError(
                "effect_every is written with what tokens receive; leave received=true"
            )
        return self

    @classmethod
    def of_section(cls, section: str, values: Mapping[str, Any]) -> DumpOptions:
        """Give the options of a host's section, with the whole path of the folder; ValueError: names the first that is
        wrong as ``section.option=value``."""
        folder = values.get("folder")
        if not folder:
            raise ValueError(f"{section}.folder is missing; name the folder that gets the files")
        try:
            return cls(**{**values, "folder": Path(str(folder)).expanduser().absolute()})
        except ValidationError as error:
            first = error.errors()[0]
            named = [f"{section}.{name}={first['input']!r}" for name in first["loc"]]
            raise ValueError(f"{'.'.join(named) or section}: {first['msg']}") from None


def choose_rows(
    groups: Sequence[int], valid: Sequence[bool], limit: int | None, seed: Sequence[int]
) -> list[int]:
    """Choose the responses of a batch that are written, by group: whole groups, in an order that the seed gives, as
    many as fit (of a first one that is larger, its first responses), without those that are not ``valid`` and only fill
    it up."""
    row_N = np.flatnonzero(valid)
    group_N = np.array(groups)[row_N]
    room = limit or len(row_N)
    chosen: list[int] = []
    # By the seed alone, so that a resumed run chooses the same ones.
    for group in np.random.default_rng(list(seed)).permutation(np.unique(group_N)):
        members = row_N[group_N == group]
        if len(members) <= room or not chosen:
            chosen += members[:room].tolist()
            room -= len(members)
    return sorted(chosen, key=lambda row: (groups[row], row))


def tolerant(read: Callable[[Any], _Read], value: Any) -> _Read | None:
    """Call ``read(value)`` on what a user's data or reward function gave; ``None`` where that cannot be read."""
    with suppress(Exception):
        return read(value)
    return None


class Unstopped:
    """It writes to a path beside the training: an error within ``attempt`` is counted, logged once, and stops
    nothing."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self.failed = 0

    @contextmanager
    def attempt(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self.failed:
                logger.warning(
                    "%s: not everything could be written (%r); training continues", self.path, error
                )
            self.failed += 1


class StepDump(Unstopped):
    """It chooses and writes responses; the updates of a step share its number of them. The training waits: 2 s for a
    million tokens, and ``SECONDS`` once for a disk that hangs, after which files are left out until it answers."""

    def __init__(
        self, options: DumpOptions, tokenizer: Any, *, updates: int, model: str, temperature: float
    ) -> None:
        super().__init__(options.folder)
        self._options = options
        self._texts = TokenTexts(tokenizer)
        self._limit = None if options.responses is None else max(1, options.responses // updates)
        self._facts = {"model": as_utf8(model), "temperature": temperature}
        self._begun = False
        # Never started, and so not alive.
        self._disk = threading.Thread()

    def writes(self, step: int) -> bool:
        """Tell whether responses of this training step are written."""
        return step % self._options.every == 0

    def measures(self, step: int) -> bool:
        """Tell whether the effect of this step's update on the responses that are written is measured."""
        interval = self._options.effect_every
        return interval > 0 and step % interval == 0 and self.writes(step)

    def choose(
        self, step: int, update: int, groups: Sequence[int], valid: Sequence[bool]
    ) -> list[int]:
        """Give the responses to write of an update. The first call removes an earlier run's files of its step and
        later."""
        if not self._begun:
            self._begun = True
            self._in_time(lambda: remove_steps(self.path, step))
        return choose_rows(groups, valid, self._limit, (step, update)) if self.writes(step) else []

    def write(self, step: int, update: int, parts: Sequence[Weighed], rows_in_step: int) -> None:
        """Write the chosen responses, of a batch of ``rows_in_step`` without those that only fill it up."""
        with self.attempt():
            table = pa.concat_tables([table_of(part, self._texts) for part in parts])
            header = header_of(
                parts[0],
                self._texts,
                step=step,
                update=update,
                rows_in_step=rows_in_step,
                **self._facts,
            )
            self._in_time(lambda: write_step(self.path, header, table))

    def write_received(self, header: Mapping[str, Any], table: pa.Table) -> None:
        """Write what is known of such responses after the update, as :func:`write_received` takes it."""
        self._in_time(lambda: write_received(self.path, header, table))

    def _in_time(self, write: Callable[[], Any]) -> None:
        with self.attempt():
            if not self._disk.is_alive():
                # No end of a run waits for it
                self._disk = threading.Thread(target=self.attempt()(write), daemon=True)
                self._disk.start()
                self._disk.join(SECONDS)
            if self._disk.is_alive():
                raise TimeoutError(f"a file takes more than {SECONDS:g} s")


def header_of(weighed: Weighed, texts: TokenTexts, **facts: Any) -> DumpHeader:
    """Give the header of a file with these responses; ``facts`` are those of its values that the record does not
    say."""
    method = weighed.method
    return DumpHeader(
        method=method.name,
        options=method.model_dump(),
        reshaper=getattr(method, "reshaper", None),
        special_tokens=texts.special_tokens,
        answer=weighed.rollouts.answer.name if method.reads_answer else None,
        gave_advantages=weighed.gave_advantages,
        written_by=f"grail_advantage {__version__}",
        **facts,
    )


def table_of(
    weighed: Weighed, texts: TokenTexts, by_method: Mapping[str, Weighed] = {}
) -> pa.Table:
    """Give the responses as :func:`write_step` takes them, by the texts of the run's tokenizer. ``by_method``: what
    several methods made of the same responses, by name. No other function makes such rows."""
    r = weighed.rollouts
    nothing = [None] * len(r)
    ids = [response.numpy() for response in r.responses]
    tokens = list(map(texts, ids))
    spans = r.spans(weighed.method.span)

    def per_response(values: Tensor) -> list[np.ndarray]:
        """Give values (B, T) as a list for each response, without the padding."""
        return [row[: len(token_ids)] for row, token_ids in zip(values.numpy(), ids, strict=True)]

    columns_of_methods = []
    for name, entry in by_method.items():
        # In the order of OF_METHOD. A method that gives weights has no advantages of its own.
        columns = (
            [as_utf8(name)] * len(r),
            per_response(entry.scores),
            per_response(entry.advantages) if entry.gave_advantages else nothing,
            per_response(entry.weights),
            entry.no_scores,
        )
        columns_of_methods.append(zip(*columns, strict=True))

    labels = []
    for written, label in zip(per_response(r.written), r.facts.get("labels", nothing), strict=True):
        # Between the model's turns a tool or a user wrote.
        tool = runs(~written)
        ranges: dict[str, Any] = {"tool": tool} if tool else {}
        ranges.update(label or {})
        labels.append(json.dumps(ranges) if ranges else None)

    # An advantage that is not finite trains nothing: 0, as the method saw it.
    usable = r.mask & within_range(r.advantages)[:, None]
    values: dict[str, Sequence[Any]] = {
        **dict.fromkeys(SCHEMA.names, nothing),
        **r.facts,
        # Some hosts know prompts by their ids alone.
        "prompt": r.facts.get("prompt") or [texts.decode(prompt.tolist()) for prompt in r.prompts],
        "row": r.places,
        "group": r.places if r.groups is None else r.groups.tolist(),
        "key": r.keys,
        "response": list(map("".join, tokens)),
        "answer": [answer_text(*parts, r.answer) for parts in zip(tokens, spans, strict=True)],
        "no_scores": weighed.no_scores,
        "truncated": [False] * len(r) if r.truncated is None else r.truncated.tolist(),
        "span": [list(vars(span).values()) if span else None for span in spans],
        "prompt_ids": [prompt.numpy() for prompt in r.prompts],
        "token_ids": ids,
        "tokens": tokens,
        "mask": per_response(r.mask),
        "score": per_response(weighed.scores),
        "weight": per_response(weighed.weights),
        "base_advantage": per_response(torch.where(usable, r.advantages[:, None], 0.0).float()),
        "advantage": per_response(weighed.advantages),
        "methods": list(zip(*columns_of_methods, strict=True)) or [[]] * len(r),
        "labels": labels,
    }
    for name, column in r.columns.items():  # some hosts have values for a tool's tokens as well
        column = torch.where(r.written, column.float(), torch.nan)
        values[DUMPED.get(name, name)] = per_response(column)
    # Without step and update, which write_step() adds.
    schema = pa.schema(list(SCHEMA)[2:])
    for field_ in schema:
        if field_.type == TEXT:
            values[field_.name] = list(map(as_utf8, values[field_.name]))
    return pa.table(values, schema=schema)


def received_table(
    receipt: Receipt, keys: Sequence[str], lengths: Sequence[int], effect: Tensor | None = None
) -> pa.Table:
    """Make the table that :func:`write_received` takes of a receipt: a row for each key, cut to its length. ``effect``:
    of the update, float (B, T), where it was measured."""
    rows = []
    for index, (key, length) in enumerate(zip(keys, lengths, strict=True)):
        # All NaN: the update did not hold the response.
        updates = receipt.received_UBT[:, index, :length].isfinite().any(dim=1)
        rows.append(
            {
                "key": as_utf8(key),
                "updates": updates.nonzero().flatten().numpy(),
                "received": _floats(receipt.received_BT[index, :length]),
                "clipped": _floats(receipt.clipped_BT[index, :length]),
                "by_update": list(_floats(receipt.received_UBT[updates, index, :length])),
                "clipped_by_update": list(_floats(receipt.clipped_UBT[updates, index, :length])),
                "effect": None if effect is None else _floats(effect[index, :length]),
            }
        )
    return pa.Table.from_pylist(rows, schema=RECEIVED_SCHEMA)


def _floats(values: Tensor) -> np.ndarray:
    return values.float().numpy()


class MetricsFile(Unstopped):
    """It writes a run's figures, a line ``{"step": S, "data": {...}}`` for each log, after those of an earlier start
    that are of step ``last`` at most. It serves as the open file of verl's ``FileLogger``, too."""

    def __init__(self, path: Path | str, last: int) -> None:
        super().__init__(path)

        def is_earlier(line: bytes) -> bool:
            return json.loads(line)["step"] <= last

        with self.attempt():
            if self.path.is_file():
                lines = self.path.read_bytes().splitlines()
                # What is no whole line of a log has no step, and goes.
                earlier = [line + b"\n" for line in lines if tolerant(is_earlier, line)]
                write_whole(self.path, b"".join(earlier))

    def add(self, step: int, figures: Mapping[str, Any]) -> None:
        """Add a line of the figures that are numbers; null for one that is not finite, which JSON does not have."""
        data: dict[str, float | None] = {}
        for name, value in figures.items():
            if isinstance(value, Real):
                data[name] = float(value) if math.isfinite(value) else None
        self.write(json.dumps({"step": step, "data": data}).encode() + b"\n")

    def write(self, line: bytes) -> None:
        """Add a line that ends as one."""
        with self.attempt():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered, so that a process that is killed leaves whole lines.
            with self.path.open("ab", buffering=0) as file:
                file.write(line)

    def close(self) -> None:
        """Nothing is open between two lines."""
