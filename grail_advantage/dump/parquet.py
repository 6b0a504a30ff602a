"""Parquet files as a dump has them: written whole or not at all, and read one row group at a time, within limits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grail_advantage.dump.whole_file import whole_file

MOST_BYTES = 1 << 30
"""Most bytes of a row group that is read, unpacked, by the file's metadata."""
_ROWS = 32
"""Rows of a row group; the reader holds one group at a time."""
BROKEN = (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors that a damaged or foreign file may cause."""


def numbered_path(folder: Path, kind: str, step: int, update: int = 0) -> Path:
    """The file of a step, or of one of its later updates."""
    suffix = f"_update_{update}" if update else ""
    return Path(folder) / f"{kind}_{step:06d}{suffix}.parquet"


def numbered_files(folder: Path, kind: str) -> list[tuple[tuple[int, int], Path]]:
    """Step and update of each file that is named as one of this kind, in order."""
    name = re.compile(rf"{kind}_(\d{{1,15}})(?:_update_(\d{{1,9}}))?\.parquet")
    names = ((path, name.fullmatch(path.name)) for path in Path(folder).glob(f"{kind}_*"))
    return sorted(((int(match[1]), int(match[2] or 0)), path) for path, match in names if match)


def list_of(kind: pa.DataType) -> pa.DataType:
    """Lists without null entries."""
    return pa.list_(pa.field("element", kind, nullable=False))


def write_table(path: Path, table: pa.Table, dictionaries: Sequence[str]) -> None:
    """Write a file, which appears under its name whole and on the disk, or not at all.

    Args:
        path: in a folder that is made where it is missing.
        table: with the header in its metadata.
        dictionaries: leaves of few different values.

    Raises:
        OSError: the disk's.
    """
    with whole_file(path) as file:
        pq.write_table(
            table,
            file,
            row_group_size=_ROWS,
            compression="zstd",
            use_dictionary=list(dictionaries),
            write_statistics=False,
            write_page_checksum=True,
        )


def as_utf8(value: Any) -> Any:
    """The value with every text in it as UTF-8 can hold it."""
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {name: as_utf8(entry) for name, entry in value.items()}
    return [as_utf8(entry) for entry in value] if isinstance(value, list) else value


def read_record(metadata: pq.FileMetaData, key: bytes, version: int) -> dict[str, Any]:
    """The header in a file's metadata, without its version; raises one of ``BROKEN`` where there is none of this version."""
    if key not in (metadata.metadata or {}):
        raise ValueError("its metadata has no header")
    record = json.loads(metadata.metadata[key])
    written = record.pop("schema_version")
    if written != version:
        raise ValueError(f"schema_version is {written!r:.20}; this version reads {version}")
    return record


def groups(
    path: Path, schema: pa.Schema, check_header: Callable[[pq.FileMetaData], Any], texts: Sequence[str]
) -> Iterator[pa.Table]:
    """The row groups of a file.

    Args:
        path: the file.
        schema: that it must have.
        check_header: raises one of ``BROKEN`` for another file's.
        texts: leaves that are read as dictionaries, which keep a text once however often it occurs.

    Raises:
        ValueError: another file, or one whose metadata names more than a dump can have; others of ``BROKEN``.
    """
    metadata = pq.read_metadata(path)
    check_header(metadata)
    if not metadata.schema.to_arrow_schema().equals(schema):
        raise ValueError("its columns are others")
    with pq.ParquetFile(path, metadata=metadata, read_dictionary=list(texts), page_checksum_verification=True) as file:
        for number in range(metadata.num_row_groups):
            if metadata.row_group(number).total_byte_size > MOST_BYTES:
                raise ValueError("a row group is larger than one of a dump can be")
            table = file.read_row_group(number).combine_chunks()
            table.validate(full=True)
            yield table


def array_of(value: pa.ListScalar) -> np.ndarray:
    """The numbers of a list, copied."""
    return value.values.to_numpy(zero_copy_only=False).copy()
