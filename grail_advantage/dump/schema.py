"""The columns and headers of a token dump's files. docs/token_dump.md says what each holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired

import pyarrow as pa
from typing_extensions import TypedDict

COLUMNS = ("score", "weight", "base_advantage", "advantage", "old_log_prob", "entropy")
"""The float columns of a response."""


def list_of(kind: pa.DataType) -> pa.DataType:
    """Lists without null entries."""
    return pa.list_(pa.field("element", kind, nullable=False))


FLOATS = list_of(pa.float32())
METHOD = pa.struct(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("score", FLOATS),
        pa.field("advantage", FLOATS),
        pa.field("weight", FLOATS, nullable=False),
        pa.field("no_scores", pa.string()),
    ]
)
"""An entry of the column ``methods``."""
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
        *(pa.field(name, FLOATS, nullable=name != "weight") for name in COLUMNS),
        pa.field("methods", list_of(METHOD), nullable=False),
        pa.field("labels", pa.string()),
    ]
)
"""The columns of a file of responses, ``step_000123.parquet``."""
RECEIVED_SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("updates", list_of(pa.int64()), nullable=False),
        pa.field("received", FLOATS, nullable=False),
        pa.field("clipped", FLOATS, nullable=False),
        pa.field("by_update", list_of(FLOATS), nullable=False),
        pa.field("clipped_by_update", list_of(FLOATS), nullable=False),
    ]
)
"""The columns of the file of what they received, ``received_000123.parquet``."""


def as_utf8(text: str | None) -> str | None:
    """A text as the columns can hold it: half a surrogate pair becomes U+FFFD. ``None`` stays."""
    if text is None or text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@dataclass(frozen=True, kw_only=True)
class DumpHeader:
    """Properties that all responses of a file share."""

    step: int
    method: str
    """The method's registered name; of several, that of ``score`` and ``weight``."""
    update: int = 0
    """Which of the step's updates of the actor; more than one with ``trainer.v1.separate_async.parameter_sync_step``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """All options of the method."""
    reshaper: str | None = None
    model: str = ""
    temperature: float | None = None
    rows_in_step: int | None = None
    """Responses of the update's batch, without those that only fill it up."""
    special_tokens: Mapping[int, str] = field(default_factory=dict)
    """Names of the special tokens, which put nothing into the text, by id."""
    written_by: str = ""
    answer: str | None = None
    """The format of answers; ``None`` for methods that read none."""


class FindingRecord(TypedDict):
    """As :meth:`grail_advantage.receipt.Finding.to_dict` gives it."""

    name: str
    where: str
    size: float
    what: str
    examples: Sequence[tuple[str, int, float | None, float | None]]
    causes: str
    mismatch: bool
    tokens: NotRequired[int]
    low: NotRequired[float | None]
    high: NotRequired[float | None]
    explains: NotRequired[float | None]
    also: NotRequired[str]


@dataclass(frozen=True, kw_only=True)
class ReceivedHeader:
    """Properties that all responses of a file share."""

    step: int
    update: int = 0
    loss: str = ""
    """Its name; empty where it is not known."""
    findings: Sequence[FindingRecord] = ()
    updates: int = 0
    """Optimiser steps of the update, over all epochs."""
    tokens: int = 0
    """Tokens of these responses that trained, each counted once."""
    clipped: float | None = None
    """Mean share of clipping over these tokens and their optimiser steps."""
    responses: tuple[int, int] | None = None
    """Responses that were read, and those of the whole update."""
    seen_from: float | None = None
    """The smallest factor above 1 that is found, by the gradients' precision."""
