"""The token dump: every token's score, weight and advantage of chosen responses, and what it received, as Parquet files.

``step_000123.parquet`` has a row a response of an update, with a list for each value that tokens have;
``received_000123.parquet``, which may be missing, has what is known after the update, by the same keys. Both have a
header as JSON in their metadata. docs/token_dump.md has every column. Written and read::

    write_step(folder, DumpHeader(step=12, method="grail"), weighed.table(texts))

    dump = read_dump(folder)                                        # raises nothing: see dump.problems
    table = dump.table(["key", "weight", "received"], steps=[12])   # arrow; all columns and steps by default
    for row in dump.rows([12]):                                     # one response at a time
        print(row.key, row.outcome, row.weight_T.mean(), row.received_T)
    print(dump.files[0].header.method, dump.receipts())             # a file of dump.files has table() and rows(), too

Shapes: T response tokens, K optimiser steps of the update that a response was in.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from grail_advantage import __version__
from grail_advantage.answers.span import AnswerSpan
from grail_advantage.answers.text import TokenTexts
from grail_advantage.receipt.report import record_of

if TYPE_CHECKING:
    from grail_advantage.data import Weighed
    from grail_advantage.receipt import Receipt

logger = logging.getLogger(__name__)
VERSION = 5  # ``schema_version`` of both kinds of files; older ones are read, with null in the columns they lack
TOKENS, METRICS_FILE = "tokens", "metrics.jsonl"  # where a run has its dump and its figures, by convention
SECONDS = 60.0  # that a training waits for a file at most
_BROKEN = (pa.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError)  # of a damaged file
_Read = TypeVar("_Read")

INTS, FLOATS, TEXTS = (pa.list_(kind) for kind in (pa.int64(), pa.float32(), pa.string()))
COLUMNS = ("score", "weight", "base_advantage", "advantage", "old_log_prob", "entropy", "rollout_log_probs")
"""The columns of floats, one a token; null where a run does not have them."""
OF_METHOD = {"name": pa.string(), "score": FLOATS, "advantage": FLOATS, "weight": FLOATS, "no_scores": pa.string()}
SCHEMA = pa.schema(
    {
        **dict.fromkeys(("step", "update", "row", "group"), pa.int64()),
        **dict.fromkeys(("key", "prompt", "response"), pa.string()),
        **dict.fromkeys(("id", "ground_truth", "outcome", "answer", "no_scores"), pa.string()),
        **{"reward": pa.float64(), "truncated": pa.bool_(), "span": INTS, "prompt_ids": INTS, "token_ids": INTS},
        **{"tokens": TEXTS, "mask": pa.list_(pa.bool_()), **dict.fromkeys(COLUMNS, FLOATS)},
        **{"methods": pa.list_(pa.struct(OF_METHOD)), "labels": pa.string()},
    }
)
"""The columns of ``step_000123.parquet``."""
RECEIVED_SCHEMA = pa.schema(
    {
        **{"key": pa.string(), "updates": INTS, "received": FLOATS, "clipped": FLOATS},
        **dict.fromkeys(("by_update", "clipped_by_update"), pa.list_(FLOATS)),
        "effect": FLOATS,  # the change of each token's log-probability by the update
    }
)
"""The columns of ``received_000123.parquet``. In a table that was read they follow those of :data:`SCHEMA`."""
ALL = (*SCHEMA.names, *RECEIVED_SCHEMA.names[1:])
_LATER = ("rollout_log_probs", "clipped_by_update", "effect")  # columns that an older file may lack
_PER_TOKEN = ("token_ids", "mask", *COLUMNS, "received", "clipped", "effect")
_SUFFIXES = dict.fromkeys(_PER_TOKEN, "_T") | dict.fromkeys(("by_update", "clipped_by_update"), "_KT")


@dataclass(frozen=True, kw_only=True)
class DumpHeader:
    """What all responses of a file share."""

    step: int
    method: str  # its registered name; of several, that of the columns ``score`` and ``weight``
    update: int = 0  # of the step's updates of the actor
    options: Mapping[str, Any] = field(default_factory=dict)  # all of the method
    reshaper: str | None = None
    model: str = ""
    temperature: float | None = None
    rows_in_step: int | None = None  # responses of the update's batch, without those that only fill it up
    special_tokens: Mapping[int, str] = field(default_factory=dict)  # names of tokens without text, by id
    written_by: str = ""
    answer: str | None = None  # the format of answers; ``None`` for methods that read none


def as_utf8(text: str | None) -> str | None:
    """A text as the columns can hold it: half a surrogate pair becomes U+FFFD. ``None`` stays."""
    return text if text is None else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file, a text as UTF-8, so that it appears whole or not at all, in place of one that was there; makes its
    folder. OSError: the disk's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.writing")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_step(folder: Path, header: DumpHeader, table: pa.Table) -> Path:
    """Write the responses of an update, in place of a file of the same step and update; returns the file.

    Args:
        folder: is made where it is missing.
        header: of the file.
        table: a row a response, with all columns of :data:`SCHEMA` but ``step`` and ``update``.

    Raises:
        ValueError: a column is missing or has another type, or a response has more or fewer values than tokens.
        OSError: the disk's.
    """
    for name in ("update", "step"):
        table = table.add_column(0, name, pa.repeat(pa.scalar(getattr(header, name), pa.int64()), len(table)))
    return _write(folder, "step", asdict(header), table.select(SCHEMA.names).cast(SCHEMA), "tokens")


def write_received(folder: Path, header: Mapping[str, Any], table: pa.Table) -> Path:
    """Write what is known after an update, as :func:`write_step` does: a header as ``record_of`` and all columns of
    :data:`RECEIVED_SCHEMA` as :func:`received_table` makes them of a receipt."""
    return _write(folder, "received", header, table.select(RECEIVED_SCHEMA.names).cast(RECEIVED_SCHEMA), "received")


def _write(folder: Path, kind: str, header: Mapping[str, Any], table: pa.Table, tokens: str) -> Path:
    expected = pc.list_value_length(table[tokens])
    for name in [name for name in _PER_TOKEN if name in table.column_names]:
        counts = pc.list_value_length(table[name])
        other = pc.index(pc.not_equal(counts, expected), value=True).as_py()
        if other >= 0:
            raise ValueError(f"{name} has {counts[other]} values for {expected[other]} tokens")
    record = {_KEYS[kind]: json.dumps({"schema_version": VERSION, **header})}
    path = _path(folder, kind, header["step"], header.get("update", 0))
    content = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(record), content, compression="zstd")
    write_whole(path, content.getvalue())
    return path


_KEYS = {"step": b"grail_advantage", "received": b"grail_advantage_received"}  # of the headers, by kind of file


def _path(folder: Path, kind: str, step: int, update: int) -> Path:
    return Path(folder) / f"{kind}_{step:06d}{f'_update_{update}' if update else ''}.parquet"


def _files(folder: Path, kind: str) -> list[tuple[int, int, Path]]:
    """Step, update and path of each file of a kind, in order; none where there is no folder."""
    name = re.compile(rf"{kind}_(\d{{1,15}})(?:_update_(\d{{1,9}}))?\.parquet", re.ASCII)
    matches = ((name.fullmatch(path.name), path) for path in Path(folder).glob("*.parquet"))
    return sorted((int(match[1]), int(match[2] or 0), path) for match, path in matches if match)


def remove_steps(folder: Path, first: int) -> list[Path]:
    """Remove the files of step ``first`` and later ones, which a run that resumes there writes anew, and unfinished
    ones; returns the former."""
    removed = [path for kind in _KEYS for step, _, path in _files(folder, kind) if step >= first]
    for path in [*removed, *Path(folder).glob(".*.writing")]:
        path.unlink()
    if removed:
        logger.warning("%s: %d files of step %d and later, of an earlier run, removed", folder, len(removed), first)
    return removed


class DumpRow(SimpleNamespace):
    """One response: its columns by their names, those that are lists of numbers as arrays with their shape as a
    suffix (``weight_T``, ``by_update_KT``), ``span`` as an ``AnswerSpan``, ``labels`` as a mapping, and ``methods`` as
    one of such rows by name. ``None`` for what is null or was not read."""

    def __len__(self) -> int:
        return len(self.mask_T)


@dataclass
class DumpFile:
    """The responses of one update."""

    path: Path
    step: int
    update: int
    problems: list[str]  # of the folder: what could not be read, each with its file, named once

    @property
    def header(self) -> DumpHeader | None:
        """``None`` where it cannot be read."""
        record = _read(self.path, "step", None, self.problems)
        return None if record is None else DumpHeader(**record)

    def table(self, columns: Iterable[str] = ALL) -> pa.Table:
        """The responses; none where the file is damaged, which ``problems`` names then."""
        wanted, beside = list(columns), _path(self.path.parent, "received", self.step, self.update)
        arriving = [name for name in wanted if name not in SCHEMA.names]
        own = [name for name in SCHEMA.names if name in wanted or (name == "key" and arriving)]
        table = _read(self.path, "step", own, self.problems)
        if table is None:
            return pa.schema([_FIELDS[name] for name in wanted]).empty_table()
        if arriving:
            known = _read(beside, "received", ["key", *arriving], self.problems) if beside.exists() else None
            known = RECEIVED_SCHEMA.empty_table() if known is None else known
            places = pc.index_in(table["key"], known["key"].combine_chunks())
            for name in arriving:
                table = table.append_column(_FIELDS[name], known[name].take(places))
        return table.select(wanted)

    def rows(self, columns: Iterable[str] = ALL) -> Iterator[DumpRow]:
        """The responses, one at a time."""
        for batch in self.table(columns).to_batches(max_chunksize=32):
            values = [of.to_numpy(False) if pa.types.is_list(of.type) else of.to_pylist() for of in batch.columns]
            for row in zip(*values, strict=True):
                yield _row(dict.fromkeys(ALL) | dict(zip(batch.schema.names, row, strict=True)))


@dataclass
class TokenDump:
    """A folder of token dumps, as it is on the disk."""

    folder: Path
    files: Sequence[DumpFile]  # by step and update
    problems: list[str]  # what could not be read so far; grows while files are read

    @property
    def steps(self) -> list[int]:
        return sorted({file.step for file in self.files})

    def table(self, columns: Iterable[str] = ALL, steps: Iterable[int] | None = None) -> pa.Table:
        """The responses of some steps, of all by default."""
        wanted, names = set(self.steps if steps is None else steps), list(columns)
        empty = pa.schema([_FIELDS[name] for name in names]).empty_table()
        return pa.concat_tables([empty, *(file.table(names) for file in self.files if file.step in wanted)])

    def rows(self, steps: Iterable[int] | None = None) -> Iterator[DumpRow]:
        """The responses of some steps, of all by default, one at a time."""
        wanted = set(self.steps if steps is None else steps)
        return (row for file in self.files if file.step in wanted for row in file.rows())

    def __iter__(self) -> Iterator[DumpRow]:
        return self.rows()

    def receipts(self) -> list[dict[str, Any]]:
        """The headers of the files of what arrived, in order."""
        paths = [path for _, _, path in _files(self.folder, "received")]
        return [header for path in paths if (header := _read(path, "received", None, self.problems)) is not None]


def read_dump(folder: Path | str) -> TokenDump:
    """Look into a folder. Nothing is raised: what is wrong with it is in ``problems``, and logged."""
    folder, problems = Path(folder), list[str]()
    files = [DumpFile(path, step, update, problems) for step, update, path in _files(folder, "step")]
    if not files:
        problems.append(f"{folder}: holds no token dump (step_NUMBER.parquet)")
    return TokenDump(folder, files, problems)


_FIELDS = {field.name: field for schema in (RECEIVED_SCHEMA, SCHEMA) for field in schema}


def _read(path: Path, kind: str, columns: Sequence[str] | None, problems: list[str]) -> Any:
    """Columns of a file as a table, or its header as a mapping; ``None`` of a damaged one, which is added to the
    problems and logged."""
    try:
        with pq.ParquetFile(path) as file:
            header = json.loads(file.metadata.metadata[_KEYS[kind]])
            if (version := header.pop("schema_version")) > VERSION:
                raise ValueError(f"schema_version is {version}; this version reads {VERSION}")
            if columns is None:
                if "special_tokens" in header:
                    header["special_tokens"] = {int(token): name for token, name in header["special_tokens"].items()}
                return header
            lacks = set(columns) - set(file.schema_arrow.names)
            if not lacks <= set(_LATER):
                raise ValueError(f"it lacks {', '.join(sorted(lacks))}")
            table = file.read([name for name in columns if name not in lacks])
            for name in lacks:
                table = table.append_column(name, pa.nulls(len(table), _FIELDS[name].type))
            return table.select(columns).cast(pa.schema([_FIELDS[name] for name in columns]))
    except _BROKEN as error:
        problem = f"{path}: is damaged or no {kind} file of a token dump ({' '.join(str(error).split())[:200]})"
        if problem not in problems:
            problems.append(problem)
            logger.warning("%s", problem)
    return None


def _row(values: dict[str, Any]) -> DumpRow:
    """A response of the values of its columns; they are copied, so that they do not keep the whole table."""
    for name, value in values.items():
        if name.endswith("by_update") and value is not None:
            values[name] = np.stack(value) if len(value) else np.zeros((0, 0), dtype=np.float32)
        elif isinstance(value, np.ndarray):
            values[name] = value.tolist() if name == "tokens" else value.copy()
    span, labels, of_methods = (values.pop(name) for name in ("span", "labels", "methods"))
    methods = {of.pop("name"): _named(of) for of in ([] if of_methods is None else of_methods)}
    values |= {"span": span if span is None else AnswerSpan(*span.tolist())}
    return _named({**values, "labels": json.loads(labels or "{}"), "methods": methods})


def _named(values: Mapping[str, Any]) -> DumpRow:
    return DumpRow(**{f"{name}{_SUFFIXES.get(name, '')}": value for name, value in values.items()})


class DumpOptions(BaseModel):
    """``algorithm.token_dump`` in verl, ``token_dump`` in TRL; see docs/token_dump.md. ValueError for other values."""

    model_config = ConfigDict(title="token_dump", frozen=True, strict=True, extra="forbid")
    folder: Path
    every: int = Field(1, ge=1)  # steps from one dump to the next
    responses: int | None = Field(64, ge=1)  # most responses of a step; ``None`` for all
    received: bool = True  # whether what their tokens receive in the updates is written as well


def choose_rows(groups: Sequence[int], valid: Sequence[bool], limit: int | None, seed: Sequence[int]) -> list[int]:
    """Which responses of a batch are written, ordered by group: whole groups in an order that the seed gives, as many
    as fit within the limit; of a first group that is larger, the first responses. Those that are not ``valid`` fill up
    the batch and are left out."""
    members: dict[int, list[int]] = {}
    for row in np.flatnonzero(valid).tolist():
        members.setdefault(groups[row], []).append(row)
    chosen: dict[int, list[int]] = {}
    room = len(groups) if limit is None else limit
    for group in np.random.default_rng(list(seed)).permutation(sorted(members)).tolist():
        if len(members[group]) <= room or not chosen:
            chosen[group] = members[group][:room]
            room -= len(chosen[group])
    return [row for group in sorted(chosen) for row in chosen[group]]


def tolerant(column: str, read: Callable[[Any], _Read], value: Any) -> _Read | None:
    """``read(value)`` of what a user's data or reward function gave; ``None``, logged, where that cannot be read."""
    try:
        return read(value)
    except Exception as error:
        why = f"{type(value).__name__}: {type(error).__name__}: {error}"
        logger.warning("token dump: %s of a response is left out (%.200s)", column, why)
        return None


class Unstopped:
    """Writes to a path beside the training, which nothing of it stops: what goes wrong is counted, and logged once."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self.failed = 0

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Within, an error loses what was to be written."""
        try:
            yield
        except Exception as error:
            if not self.failed:
                why = f"{type(error).__name__}: {error}"
                logger.warning("%s: not everything could be written (%s); training continues", self.path, why)
            self.failed += 1


class StepDump(Unstopped):
    """Chooses responses of updates, which share the step's, and writes them.

    The training waits for the file: a million tokens take 2 s (docs/token_dump.md). For a disk that hangs it waits
    ``SECONDS`` once; until that answers, files are left out."""

    def __init__(self, options: DumpOptions, tokenizer: Any, *, updates: int, model: str, temperature: float) -> None:
        super().__init__(options.folder)
        self._every = options.every
        self._limit = None if options.responses is None else max(1, options.responses // updates)
        self._facts = {"model": as_utf8(model), "temperature": temperature}
        self._texts = TokenTexts(tokenizer)
        self._begun, self._disk = False, threading.Thread()

    def writes(self, step: int) -> bool:
        """Whether responses of this training step are written."""
        return step % self._every == 0

    def choose(self, step: int, update: int, groups: Sequence[int], valid: Sequence[bool]) -> list[int]:
        """The responses to write of this update; none in most steps. The first call removes the files of an earlier
        run, of its step and later ones."""
        if not self._begun:
            self._begun = True
            self._in_time(lambda: remove_steps(self.path, step))
        return choose_rows(groups, valid, self._limit, (step, update)) if self.writes(step) else []

    def write(self, step: int, update: int, parts: Sequence[Weighed], rows_in_step: int) -> None:
        """Write responses of an update.

        Args:
            parts: the chosen responses alone.
            rows_in_step: responses of the update's batch, without those that only fill it up.
        """
        with self.attempt():
            table = pa.concat_tables([part.table(self._texts) for part in parts])
            facts = {"step": step, "update": update, "rows_in_step": rows_in_step, **self._facts}
            header = header_of(parts[0], self._texts, **facts)
            self._in_time(lambda: write_step(self.path, header, table))

    def write_received(
        self, step: int, update: int, receipt: Receipt, loss: str, keys: Sequence[str], lengths: Sequence[int]
    ) -> None:
        """Write what responses received that are written: their receipt, keys and numbers of tokens. ``loss``: its
        name."""
        with self.attempt():
            header, table = record_of(receipt, loss, step, update), received_table(receipt, keys, lengths)
            self._in_time(lambda: write_received(self.path, header, table))

    def _in_time(self, write: Callable[[], Any]) -> None:
        with self.attempt():
            if not self._disk.is_alive():
                self._disk = threading.Thread(target=self.attempt()(write), daemon=True)  # no end of a run waits for it
                self._disk.start()
                self._disk.join(SECONDS)
            if self._disk.is_alive():
                raise TimeoutError(f"a file takes more than {SECONDS:g} s")


def header_of(weighed: Weighed, texts: TokenTexts, **facts: Any) -> DumpHeader:
    """The header of a file with these responses; ``facts`` are those of its values that the record does not say."""
    method = weighed.method
    return DumpHeader(
        method=method.name,
        options=method.model_dump(),
        reshaper=getattr(method, "reshaper", None),
        special_tokens=texts.special_tokens,
        written_by=f"grail_advantage {__version__}",
        answer=weighed.rollouts.answer.name if method.reads_answer else None,
        **facts,
    )


def received_table(receipt: Receipt, keys: Sequence[str], lengths: Sequence[int]) -> pa.Table:
    """A receipt's responses, with their keys and numbers of tokens, as :func:`write_received` takes them."""
    columns: dict[str, list[Any]] = {name: [] for name in RECEIVED_SCHEMA.names}
    for place, (key, length) in enumerate(zip(keys, lengths, strict=True)):
        by_update, clipped = (of[:, place, :length].float() for of in (receipt.received_UBT, receipt.clipped_UBT))
        there = by_update.isfinite().any(dim=1)
        columns["key"].append(as_utf8(key))
        columns["updates"].append(there.nonzero().flatten().numpy())
        columns["received"].append(receipt.received_BT[place, :length].float().numpy())
        columns["clipped"].append(receipt.clipped_BT[place, :length].float().numpy())
        columns["by_update"].append(list(by_update[there].numpy()))
        columns["clipped_by_update"].append(list(clipped[there].numpy()))
        columns["effect"].append(None)
    return pa.table(columns, schema=RECEIVED_SCHEMA)


class MetricsFile(Unstopped):
    """A run's figures, a line ``{"step": S, "data": {...}}`` for each log, after those of an earlier start that are of
    step ``last`` at most. It serves as the open file of verl's ``FileLogger``, too."""

    def __init__(self, path: Path | str, last: int) -> None:
        super().__init__(path)
        with self.attempt():
            if self.path.is_file():
                lines = self.path.read_bytes().splitlines()
                write_whole(self.path, b"".join(line + b"\n" for line in lines if _step(line) <= last))

    def add(self, step: int, figures: Mapping[str, Any]) -> None:
        """Add a line of the figures that are numbers."""
        data = {str(name): float(value) for name, value in figures.items() if isinstance(value, Real)}
        self.write(json.dumps({"step": step, "data": data}).encode() + b"\n")

    def write(self, line: bytes) -> None:
        """Add a line that ends as one."""
        with self.attempt():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(line)

    def close(self) -> None:
        """Nothing is open between two lines."""


def _step(line: bytes) -> float:
    """The step of a whole line; infinite where it is none."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        return float(json.loads(line)["step"])
    return math.inf
