"""What the tokens of a dump's responses received (:mod:`grail_advantage.receipt`), as a file beside that of the responses.

``received_000123.parquet`` belongs to ``step_000123.parquet`` and has the same responses in the same order; it is a file of its
own because it is known after the update only. docs/token_dump.md has its columns. A dump without it reads as well.

Shape suffixes: T response tokens, K optimiser steps that a response was in, U optimiser steps, B responses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

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
from grail_advantage.dump.rows import DumpRow, ReceivedRow
from grail_advantage.receipt import Receipt

SCHEMA_VERSION = 1
_KIND = "received"
"""Of files, by their names."""
_KEY = b"grail_advantage_received"
"""Of the header in the file's metadata."""
_FLOATS = list_of(pa.float32())
SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("updates", list_of(pa.int64()), nullable=False),
        pa.field("received", _FLOATS, nullable=False),
        pa.field("clipped", _FLOATS, nullable=False),
        pa.field("by_update", list_of(_FLOATS), nullable=False),
    ]
)
"""The columns of a file."""
_TEXTS = ("name", "where", "what", "causes")
"""Of a finding."""


@dataclass(frozen=True, kw_only=True)
class ReceivedHeader:
    """Properties that all responses of a file share."""

    step: int
    update: int = 0
    loss: str = ""
    """Its name; empty where it is not known."""
    findings: Sequence[Mapping[str, Any]] = ()
    """Each as :meth:`grail_advantage.receipt.Finding.to_dict` gives it."""
    updates: int = 0
    """Optimiser steps of the update, over all epochs."""
    tokens: int = 0
    """Tokens of these responses that trained, each counted once."""
    clipped: float | None = None
    """Mean share of clipping over these tokens and their optimiser steps."""


# ------------------------------------------------------------------------------------------------------------------ writing


def received_rows(keys: Sequence[str], lengths: Sequence[int], receipt: Receipt) -> list[ReceivedRow]:
    """The rows of a receipt.

    Args:
        keys: of its responses.
        lengths: tokens of each response.
        receipt: of an update.
    """
    rows = []
    for place, (key, length) in enumerate(zip(keys, lengths, strict=True)):
        by_update_UT = receipt.received_UBT[:, place, :length]
        held = by_update_UT.isfinite().any(dim=1).nonzero().flatten()
        rows.append(
            ReceivedRow(
                key=key,
                updates=held.numpy(),
                received_T=receipt.received_BT[place, :length].float().numpy(),
                clipped_T=receipt.clipped_BT[place, :length].float().numpy(),
                by_update_KT=by_update_UT[held].float().numpy(),
            )
        )
    return rows


def write_received(folder: Path, header: ReceivedHeader, rows: Sequence[ReceivedRow]) -> Path:
    """Write one file, whole or not at all, in place of one of the same step and update.

    Args:
        folder: of the dump.
        header: of the file.
        rows: of the responses of the file beside it, in their order.

    Raises:
        OSError: the disk's.
    """
    record = json.dumps({"schema_version": SCHEMA_VERSION, **asdict(header)}).encode("ascii")
    columns = {
        "key": [as_utf8(row.key) for row in rows],
        "updates": [row.updates for row in rows],
        "received": [row.received_T for row in rows],
        "clipped": [row.clipped_T for row in rows],
        "by_update": [list(row.by_update_KT) for row in rows],
    }
    arrays = [pa.array(columns[column.name], column.type) for column in SCHEMA]
    path = numbered_path(folder, _KIND, header.step, header.update)
    write_table(path, pa.Table.from_arrays(arrays, schema=SCHEMA.with_metadata({_KEY: record})), ["key"])
    return path


# ------------------------------------------------------------------------------------------------------------------ reading


def received_files(folder: Path) -> list[tuple[tuple[int, int], Path]]:
    """Step and update of each of these files of a dump, in order."""
    return numbered_files(folder, _KIND)


def read_header(path: Path) -> ReceivedHeader:
    """The header of a file.

    Raises:
        ValueError: the file cannot be read, or is another; the message names it.
    """
    try:
        return _read_header(pq.read_metadata(path))
    except BROKEN as error:
        raise ValueError(f"{path}: {_damaged(error)}") from error


def read_headers(folder: Path, problems: list[str]) -> list[ReceivedHeader]:
    """The headers of a dump's files, in order; what cannot be read is added to ``problems``, once."""
    headers = []
    for _, path in received_files(folder):
        try:
            headers.append(read_header(path))
        except ValueError as error:
            if str(error) not in problems:
                problems.append(str(error))
    return headers


def _damaged(error: Exception) -> str:
    return f"is damaged or no receipt ({str(error)[:200]})"


def _read_header(metadata: pq.FileMetaData) -> ReceivedHeader:
    """Raises one of ``BROKEN`` where there is none of this version."""
    header = ReceivedHeader(**read_record(metadata, _KEY, SCHEMA_VERSION))
    if not (
        all(map(_is_finding, header.findings))
        and isinstance(header.loss, str)
        and all(type(value) is int for value in (header.step, header.update, header.updates, header.tokens))
        and isinstance(header.clipped, int | float | None)
    ):
        raise TypeError("a value in its header has a wrong type")
    return header


def _is_finding(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(isinstance(value.get(name), str) for name in _TEXTS)
        and isinstance(value.get("mismatch"), bool)
        and isinstance(value.get("size"), int | float)
        and isinstance(value.get("examples"), list)
        and all(map(_is_example, value["examples"]))
    )


def _is_example(value: Any) -> bool:
    """Response, token, intended and received effective advantage."""
    return isinstance(value, list) and len(value) == 4 and all(isinstance(one, int | float | None) for one in value[1:])


@dataclass(frozen=True)
class RunFinding:
    """A finding, over a run."""

    first: Mapping[str, Any]
    """As in the first update that has it."""
    step: int
    update: int
    """Of that update."""
    count: int
    """Updates that have one of its name."""


@dataclass(frozen=True)
class RunReceipt:
    """The receipts of a run, put together."""

    updates: int
    """Updates that were checked."""
    tokens: int
    """Tokens that trained in them."""
    clipped: float | None
    """Mean share of clipping."""
    losses: Sequence[str]
    findings: Sequence[RunFinding]
    """Mismatches first, then notes."""

    @property
    def mismatches(self) -> int:
        return sum(finding.first["mismatch"] for finding in self.findings)


def run_receipt(headers: Sequence[ReceivedHeader]) -> RunReceipt:
    """The receipts of a run from the headers of its files."""
    known: dict[tuple[bool, str], RunFinding] = {}
    for header in headers:
        for name, finding in {(not each["mismatch"], each["name"]): each for each in reversed(header.findings)}.items():
            first = known.setdefault(name, RunFinding(finding, header.step, header.update, 0))
            known[name] = replace(first, count=first.count + 1)
    clipped = [(header.clipped, header.tokens) for header in headers if header.clipped is not None]
    weight = sum(tokens for _, tokens in clipped)
    return RunReceipt(
        updates=len(headers),
        tokens=sum(header.tokens for header in headers),
        clipped=sum(share * tokens for share, tokens in clipped) / weight if weight else None,
        losses=sorted({header.loss for header in headers if header.loss}),
        findings=[known[name] for name in sorted(known)],
    )


class Receipts:
    """The file beside one of responses, read along with it, a row group at a time.

    Args:
        folder: of the dump.
        step: of the file.
        update: of the file.
        problems: gets what is wrong with the file, once.
    """

    def __init__(self, folder: Path, step: int, update: int, problems: list[str]) -> None:
        self._path, self._problems = numbered_path(folder, _KIND, step, update), problems
        self._rows = self._read() if self._path.is_file() else iter(())

    def join(self, row: DumpRow) -> DumpRow:
        """The next response with what it received; as it is where the file does not have that, or is of other responses."""
        received = next(self._rows, None)
        if received is None:
            return row
        if (received.key, len(received)) != (row.key, len(row)):
            self._name("is of other responses than the file of its step")
            self._rows = iter(())
            return row
        return replace(row, received=received)

    def _read(self) -> Iterator[ReceivedRow]:
        try:
            for group in groups(self._path, SCHEMA, _read_header, ()):
                for index in range(group.num_rows):
                    yield _read_row(group, index)
        except BROKEN as error:
            self._name(_damaged(error))

    def _name(self, message: str) -> None:
        problem = f"{self._path}: {message}"
        if problem not in self._problems:
            self._problems.append(problem)


def _read_row(group: pa.Table, index: int) -> ReceivedRow:
    updates, received_T, clipped_T = (
        array_of(group.column(name)[index]) for name in ("updates", "received", "clipped")
    )
    by_update = group.column("by_update")[index].values
    values = by_update.flatten().to_numpy(zero_copy_only=False)
    lengths = by_update.value_lengths().to_numpy(zero_copy_only=False)
    if not (len(lengths) == len(updates) and (lengths == len(received_T)).all() and len(clipped_T) == len(received_T)):
        raise ValueError("its columns have different lengths")
    return ReceivedRow(
        key=group.column("key")[index].as_py(),
        updates=updates,
        received_T=received_T,
        clipped_T=clipped_T,
        by_update_KT=values.reshape(len(updates), len(received_T)).copy(),
    )
