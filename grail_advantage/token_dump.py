r"""The token dump: what a method made of every token of chosen rollouts, on disk.

A folder with one gzip file a written update, ``step_000123.jsonl.gz``: UTF-8 JSON lines, first a header, then a line a row.
docs/token_dump.md has every field. The trainer writes such a folder while it trains, ``grail_advantage.analyze`` one of
existing responses, and ``grail_advantage.report`` reads either.

- :func:`write_step` writes one file, whole or not at all; :class:`TokenDumpWriter` does so beside the training.
- :func:`read_dump` reads a folder, those of 0.1 too. What is broken there becomes a :class:`Problem`; the rest is read.

Floats keep float32's exact value; what is not finite is ``null`` in the file and NaN in memory.

Shape suffixes: T response tokens.
"""

from __future__ import annotations

import codecs
import gzip
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as futures_wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import orjson

from grail_advantage.answer_span import AnswerSpan, iter_boxed, literal_bytes, token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 2
KIND = "token_dump"
COLUMNS = ("score", "weight", "base_advantage", "advantage", "old_log_prob", "entropy")
"""The float columns of a row."""
_NAME = re.compile(r"step_(\d{1,15})(?:_update_(\d{1,9}))?\.jsonl(?:\.gz)?")
_OLD_NAME = re.compile(r"(\d{1,15})\.jsonl")
_GZIP_LEVEL = 5
_TEMPORARY = ".writing"
MOST_LINE = 128 << 20
"""Most bytes of a line that are read; a row of a million tokens with all columns has about 80 MB."""
_MOST_UNPACKED = 256 << 20
_MOST_RATIO = 200
"""A file is read as long as it unpacks to no more bytes than this, or than this many times its own. Dumps of rollouts unpack to
3 to 5 times their size; only those of one response again and again come near."""
_MOST_INT = 2**63
MOST_PROBLEMS = 100
"""A file with more lines that cannot be read is not read on."""
_BYTE_LEVEL = [{"type": "ByteLevel"}]
_SENTENCE_PIECE = [{"type": "ByteFallback"}, {"type": "Metaspace", "replacement": "\u2581"}]


@dataclass(frozen=True, kw_only=True)
class DumpHeader:
    """The first line of a file: what its rows have in common."""

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
    """Rows of the update's batch, without those that only fill it up."""
    rows: int | None = None
    """Rows of this file."""
    special_tokens: Mapping[int, str] = field(default_factory=dict)
    """Names of the special tokens, which put nothing into the text, by id."""
    source: str = "train"
    """``train`` or ``analyze``."""
    written_by: str = ""
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True)
class MethodColumns:
    """What one of several methods made of a row."""

    score_T: np.ndarray | None
    weight_T: np.ndarray
    neutral: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class DumpRow:
    """One response. Arrays have its length T; float ones are float32 with NaN where there is no value."""

    step: int
    row: int
    """Its place in the update's batch."""
    key: str
    """verl's key of the row, ``{prompt}_{session}_{output}``, which verl's own rollout dump calls ``uid``."""
    group: int
    """Rows of one update with the same number answer the same prompt."""
    update: int = 0
    id: str | None = None
    """The problem's name, where it has one."""
    prompt: str = ""
    """The text that the model saw."""
    response: str = ""
    """``"".join(tokens)``."""
    gold: str | None = None
    reward: float | None = None
    outcome: str | None = None
    """``right``, ``wrong`` or unknown."""
    answer: str | None = None
    """What stands in the answer span."""
    truncated: bool = False
    neutral: str | None = None
    """Why the row has no scores, if it has none."""
    span: AnswerSpan | None = None
    prompt_ids: np.ndarray
    token_ids_T: np.ndarray
    tokens: Sequence[str]
    """The text of each token. A character that several tokens share stands at the last of them; special tokens have none."""
    mask_T: np.ndarray
    """bool; the tokens that train."""
    score_T: np.ndarray | None = None
    weight_T: np.ndarray
    base_advantage_T: np.ndarray | None = None
    advantage_T: np.ndarray | None = None
    old_log_prob_T: np.ndarray | None = None
    entropy_T: np.ndarray | None = None
    methods: Mapping[str, MethodColumns] = field(default_factory=dict)
    """By name, where several methods weighed the row."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    """``steps``: token ranges ``[start, end]`` of the solution's steps; ``wrong_step``: that of the first wrong one."""

    def __len__(self) -> int:
        return len(self.token_ids_T)


@dataclass(frozen=True)
class Problem:
    """What could not be read, and where."""

    path: Path
    line: int | None
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}" if self.line else f"{self.path}: {self.message}"


# ------------------------------------------------------------------------------------------------------------------ texts


class TokenTexts:
    """The text of each token of a response, such that joined they are the response.

    Args:
        tokenizer: as for :func:`grail_advantage.find_answer_span`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._bytes = token_bytes(tokenizer)
        self._whole: dict[int, str] = {}
        for token, covered in self._bytes.items():
            with suppress(UnicodeDecodeError):
                self._whole[token] = covered.decode()
        added = tokenizer.added_tokens_decoder
        self.special_tokens = {token: entry.content for token, entry in added.items() if entry.special}
        """Names of the tokens that have no text, by id."""

    def __call__(self, token_ids: Sequence[int] | np.ndarray) -> list[str]:
        """Texts of these tokens; ``""`` for special tokens and unknown ids. Bytes that are no UTF-8 become U+FFFD."""
        ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
        texts = [self._whole.get(token) if token in self._bytes else "" for token in ids]
        if None not in texts:
            return [text or "" for text in texts]
        return decode_pieces([self._bytes.get(token, b"") for token in ids])


def decode_pieces(pieces: Sequence[bytes]) -> list[str]:
    """Texts of consecutive pieces of UTF-8; a character in several pieces stands at the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(piece) for piece in pieces]
    rest = decoder.decode(b"", final=True)
    if rest:
        texts[max(i for i, piece in enumerate(pieces) if piece)] += rest
    return texts


def answer_text(tokens: Sequence[str], span: AnswerSpan | None) -> str | None:
    """What stands in a span, without the box."""
    if span is None:
        return None
    text = "".join(tokens[span.start : span.end]).encode("utf-8", "surrogatepass")
    for _, start, end, _ in iter_boxed(text):
        return text[start:end].decode("utf-8", "surrogatepass")
    return None


# ------------------------------------------------------------------------------------------------------------------ writing


def step_path(folder: Path, step: int, update: int = 0) -> Path:
    """The file of a step, or of one of its later updates."""
    suffix = f"_update_{update}" if update else ""
    return Path(folder) / f"step_{step:06d}{suffix}.jsonl.gz"


def write_step(folder: Path, header: DumpHeader, rows: Iterable[DumpRow]) -> Path:
    """Write one file, in place of one of the same step and update.

    It appears under its name whole and on the disk, or not at all.

    Args:
        folder: is made where it is missing.
        header: ``rows`` is filled in.
        rows: of this step.

    Returns:
        The file.

    Raises:
        OSError: the disk's.
        ValueError: a row whose columns differ in length.
    """
    rows = list(rows)
    path = step_path(folder, header.step, header.update)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}{_TEMPORARY}")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # never through a link that somebody put there
            # Without a name and a time in its head, equal rows make equal files.
            with gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=_GZIP_LEVEL, mtime=0) as packed:
                packed.write(_line(_header_record(header, len(rows))))
                for row in rows:
                    packed.write(_line(_row_record(row)))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    return path


def _sync_folder(folder: Path) -> None:
    """Put the renaming itself on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def dumped_steps(folder: Path) -> list[int]:
    """The steps of which a folder has files, in order; none where there is no folder."""
    found = (_NAME.fullmatch(path.name) for path in Path(folder).glob("step_*"))
    return sorted({int(named[1]) for named in found if named})


def remove_steps(folder: Path, first: int) -> list[Path]:
    """Remove the files of step ``first`` and later ones, which a run that resumes there writes anew; returns them."""
    removed = []
    for path in sorted(Path(folder).glob("*")):
        named = _NAME.fullmatch(path.name)
        if named and int(named[1]) >= first:
            path.unlink()
            removed.append(path)
    return removed


def _header_record(header: DumpHeader, rows: int) -> dict[str, Any]:
    record = {"schema_version": header.schema_version, "kind": KIND}
    record |= {entry.name: getattr(header, entry.name) for entry in fields(header)}
    record["special_tokens"] = {str(token): name for token, name in header.special_tokens.items()}
    record["options"] = dict(header.options)
    record["rows"] = rows
    return record


def _row_record(row: DumpRow) -> dict[str, Any]:
    span = row.span
    record: dict[str, Any] = {
        "step": row.step,
        "update": row.update,
        "row": row.row,
        "key": row.key,
        "group": row.group,
        "id": row.id,
        "prompt": row.prompt,
        "response": row.response,
        "gold": row.gold,
        "reward": row.reward,
        "outcome": row.outcome,
        "answer": row.answer,
        "truncated": row.truncated,
        "neutral": row.neutral,
        "span": [span.start, span.content_start, span.content_end, span.end] if span else None,
        "prompt_ids": _ints(row.prompt_ids),
        "token_ids": _ints(row.token_ids_T),
        "tokens": list(row.tokens),
        "mask": _ints(row.mask_T),
    }
    for name in COLUMNS:
        values = getattr(row, f"{name}_T")
        record[name] = None if values is None else _floats(values)
    lengths = {name: len(record[name]) for name in ("tokens", "mask", *COLUMNS) if record[name] is not None}
    for name, found in row.methods.items():
        lengths[f"methods.{name}.weight"] = len(found.weight_T)
        if found.score_T is not None:
            lengths[f"methods.{name}.score"] = len(found.score_T)
    for name, length in lengths.items():
        if length != len(row):
            raise ValueError(f"row {row.row}: {name} has {length} values for {len(row)} tokens")
    if row.methods:
        record["methods"] = {
            name: {
                "score": None if found.score_T is None else _floats(found.score_T),
                "weight": _floats(found.weight_T),
                "neutral": found.neutral,
            }
            for name, found in row.methods.items()
        }
    if row.labels:
        record["labels"] = dict(row.labels)
    return record


def _ints(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.int64)


def _floats(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.float32)


def _line(record: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        # A text with half a surrogate pair, which is no UTF-8: the standard library writes it as an escape.
        plain = {name: _plain(value) for name, value in record.items()}
        return json.dumps(plain, allow_nan=False).encode("ascii") + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype == np.float32:
        return [number if np.isfinite(number) else None for number in value.tolist()]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(of_name) for name, of_name in value.items()}
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


class TokenDumpWriter:
    """Writes a folder in a thread of its own, beside the training, which it never stops.

    A file that cannot be written, or comes while ``waiting`` others wait for the disk, is left out: counted in ``failed``, and
    said once.

    Args:
        folder: where to.
        waiting: how many updates may wait to be written.
    """

    def __init__(self, folder: Path, waiting: int = 4) -> None:
        self.folder = Path(folder)
        self.failed = 0
        """Updates that were to be written and were not."""
        self._waiting = waiting
        self._futures: list[Future] = []
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, make: Callable[[], tuple[DumpHeader, Iterable[DumpRow]]]) -> None:
        """Have one file written.

        Args:
            make: gives the header and the rows; called in the writer's thread, so that it must own what it reads.
        """
        self._futures = [future for future in self._futures if not future.done()]
        if len(self._futures) >= self._waiting:
            self._fail(f"{len(self._futures)} updates wait to be written already")
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="token_dump")
        self._futures.append(self._executor.submit(self._write, make))

    def start_at(self, step: int) -> None:
        """Remove what an earlier run wrote of this step and later ones."""
        try:
            removed = remove_steps(self.folder, step)
        except OSError as error:
            self._fail(f"{type(error).__name__}: {error}")
            return
        if removed:
            logger.warning(
                "token dump: %d files of step %d and later, of an earlier run, removed from %s",
                len(removed),
                step,
                self.folder,
            )

    def wait(self, seconds: float) -> None:
        """Wait until everything is written, but no longer than this: a disk that hangs stops nothing."""
        futures_wait(self._futures, timeout=seconds)

    def close(self) -> None:
        """Wait until everything is written."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)
        self._executor, self._futures = None, []

    def _write(self, make: Callable[[], tuple[DumpHeader, Iterable[DumpRow]]]) -> None:
        with self.attempt():
            write_step(self.folder, *make())

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Within, whatever goes wrong loses an update's file and stops nothing."""
        try:
            yield
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        if not self.failed:
            logger.warning("token dump: a file was not written to %s (%s); training goes on", self.folder, why)
        self.failed += 1


# ------------------------------------------------------------------------------------------------------------------ reading


@dataclass
class DumpFile:
    """One file of a folder. What cannot be read of it goes to ``problems``."""

    path: Path
    step: int
    update: int
    problems: list[Problem]
    """Shared with the folder's other files."""
    old: bool = False
    """Of version 1, 0.1's: no header."""
    _known: set[Problem] = field(default_factory=set)

    @property
    def header(self) -> DumpHeader | None:
        """The first line; ``None`` where there is none, as in 0.1's files. Says no problems."""
        for _, line in _lines(self.path, lambda line, message: None):
            try:
                return None if self.old else _read_header(_parse(line))
            except ValueError:
                return None
        return None

    def rows(self) -> Iterator[DumpRow]:
        """The rows that can be read, one at a time."""
        seen = 0
        for number, line in _lines(self.path, self._problem):
            if len(self._known) >= MOST_PROBLEMS:
                self._problem(number, f"{len(self._known)} lines could not be read; the file is not read on")
                return
            try:
                record = _parse(line)
                if not isinstance(record, dict):
                    raise ValueError("is not an object")
                if number == 1 and not self.old:
                    if "schema_version" in record:
                        self._check_version(_read_header(record))
                        continue
                    self._problem(number, "the header is missing")
                row = _read_old_row(record, seen) if self.old else _read_row(record, self.step, self.update)
            except ValueError as error:
                self._problem(number, str(error))
                continue
            seen += 1
            yield row
        if not seen and not any(problem.path == self.path for problem in self.problems):
            self._problem(None, "holds no rows")

    def _check_version(self, header: DumpHeader) -> None:
        if header.schema_version > SCHEMA_VERSION:
            self._problem(
                1,
                f"schema_version {header.schema_version} is newer than this reader's {SCHEMA_VERSION}; what it knows is read. "
                "Update grail-advantage to read the rest",
            )

    def _problem(self, line: int | None, message: str) -> None:
        problem = Problem(self.path, line, message)
        if problem not in self._known and len(self._known) <= MOST_PROBLEMS:
            self._known.add(problem)
            self.problems.append(problem)


@dataclass
class TokenDump:
    """A folder of token dumps, as it stands on the disk."""

    folder: Path
    files: list[DumpFile]
    """By step and update."""
    problems: list[Problem]
    """What could not be read so far; grows while rows are read."""

    @property
    def steps(self) -> list[int]:
        """The steps that there are files of."""
        return sorted({file.step for file in self.files})

    def rows(self, steps: Iterable[int] | None = None) -> Iterator[DumpRow]:
        """The rows of some steps, of all by default, one at a time."""
        wanted = None if steps is None else set(steps)
        for file in self.files:
            if wanted is None or file.step in wanted:
                yield from file.rows()

    def __iter__(self) -> Iterator[DumpRow]:
        return self.rows()


def read_dump(folder: Path | str) -> TokenDump:
    """Look into a folder. Nothing is raised: what is wrong with it stands in ``problems``."""
    folder = Path(folder)
    problems: list[Problem] = []
    files: dict[tuple[int, int], DumpFile] = {}
    try:
        names = sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as error:
        problems.append(Problem(folder, None, f"cannot be read: {error.strerror or error}"))
        return TokenDump(folder, [], problems)
    for path in names:
        named, old = _NAME.fullmatch(path.name), _OLD_NAME.fullmatch(path.name)
        if named:
            place = (int(named[1]), int(named[2] or 0))
        elif old:
            place = (int(old[1]), 0)
        else:
            if path.name.endswith(_TEMPORARY):
                problems.append(Problem(path, None, "was being written when its run ended; nothing of it is read"))
            continue
        if place in files:
            other = files[place].path.name
            problems.append(Problem(path, None, f"is of the same step as {other}, which is left out for it"))
        files[place] = DumpFile(path, *place, problems, old=old is not None and named is None)
    if not files:
        problems.append(Problem(folder, None, "holds no token dump (step_NUMBER.jsonl.gz)"))
    return TokenDump(folder, [files[place] for place in sorted(files)], problems)


def _lines(path: Path, say: Callable[[int, str], None]) -> Iterator[tuple[int, bytes]]:
    """Numbered lines of a file, gzip or plain. One that breaks off yields its whole lines and says so, and so does one that
    unpacks to more than a dump can."""
    number, unpacked = 0, 0
    rest: list[bytes] = []
    why = ""
    try:
        most = max(_MOST_UNPACKED, _MOST_RATIO * path.stat().st_size)
        with _open(path) as file:
            while not why and (chunk := file.read1(1 << 20)):  # type: ignore[attr-defined]
                unpacked += len(chunk)
                *whole, last = chunk.split(b"\n")
                for line in whole:
                    number += 1
                    yield number, b"".join([*rest, line])
                    rest = []
                rest.append(last)
                if sum(map(len, rest)) > MOST_LINE:
                    why = f"has a line of more than {MOST_LINE >> 20} MiB, which no row of a dump needs"
                elif unpacked > most:
                    why = f"unpacks to more than {most >> 20} MiB, which no dump of its size does"
    except EOFError:
        why = "is cut off"
    except (OSError, zlib.error) as error:
        why = f"cannot be read on ({error})"
    if why:
        say(number + 1, f"the file {why}; {number} whole lines are read")
    elif last_line := b"".join(rest):
        # A last line without its line break is whole, or cut off and then no JSON.
        yield number + 1, last_line


def _open(path: Path) -> IO[bytes]:
    file = path.open("rb")
    magic = file.read(2)
    file.seek(0)
    return gzip.GzipFile(fileobj=file, mode="rb") if magic == b"\x1f\x8b" else file  # type: ignore[return-value]


def _parse(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        # Half a surrogate pair is valid JSON that orjson refuses.
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is no JSON ({error})") from error


def _read_header(record: Any) -> DumpHeader:
    if not isinstance(record, dict):
        raise ValueError("is no header")
    version = _typed(record, "schema_version", int)
    special = _typed(record, "special_tokens", dict, {})
    return DumpHeader(
        step=_typed(record, "step", int, 0),
        method=_typed(record, "method", str, ""),
        update=_typed(record, "update", int, 0),
        options=_typed(record, "options", dict, {}),
        reshaper=_typed(record, "reshaper", str, None),
        model=_typed(record, "model", str, ""),
        temperature=_typed(record, "temperature", float, None),
        rows_in_step=_typed(record, "rows_in_step", int, None),
        rows=_typed(record, "rows", int, None),
        special_tokens={int(token): str(name) for token, name in special.items() if token.isdecimal()},
        source=_typed(record, "source", str, ""),
        written_by=_typed(record, "written_by", str, ""),
        schema_version=version,
    )


def _read_row(record: dict[str, Any], step: int, update: int) -> DumpRow:
    token_ids_T = _int_column(record, "token_ids")
    length = len(token_ids_T)
    tokens = _tokens(record, length)
    methods, labels = record.get("methods") or {}, record.get("labels") or {}
    if not isinstance(methods, dict) or not all(isinstance(found, dict) for found in methods.values()):
        raise ValueError("methods: must be an object of objects")
    return DumpRow(
        step=_typed(record, "step", int, step),
        update=_typed(record, "update", int, update),
        row=_typed(record, "row", int),
        key=_typed(record, "key", str),
        group=_typed(record, "group", int),
        id=_typed(record, "id", str, None),
        prompt=_typed(record, "prompt", str, ""),
        response=_typed(record, "response", str, "".join(tokens)),
        gold=_typed(record, "gold", str, None),
        reward=_typed(record, "reward", float, None),
        outcome=_typed(record, "outcome", str, None),
        answer=_typed(record, "answer", str, None),
        truncated=_typed(record, "truncated", bool, False),
        neutral=_typed(record, "neutral", str, None),
        span=_read_span(record, length),
        prompt_ids=_int_column(record, "prompt_ids") if record.get("prompt_ids") else np.zeros(0, dtype=np.int64),
        token_ids_T=token_ids_T,
        tokens=tokens,
        mask_T=_int_column(record, "mask", length).astype(bool),
        **_float_columns(record, length, {f"{name}_T": name for name in COLUMNS}),
        methods={
            str(name): MethodColumns(
                **_float_columns(found, length, {"score_T": "score", "weight_T": "weight"}, f"methods.{name}."),
                neutral=_typed(found, "neutral", str, None),
            )
            for name, found in methods.items()
        },
        labels=labels if isinstance(labels, dict) else {},
    )


def _read_old_row(record: dict[str, Any], place: int) -> DumpRow:
    """A row of 0.1: neither texts nor rewards, and the tokens as the vocabulary spells them."""
    token_ids_T = _int_column(record, "response_ids")
    length = len(token_ids_T)
    tokens = _spelt_texts(_tokens(record, length))
    span = _read_span(record, length)
    key = _typed(record, "key", str)
    names = {"score_T": "scores", "weight_T": "weights", "base_advantage_T": "base_advantages"}
    columns = _float_columns(record, length, {**names, "advantage_T": "advantages"})
    scored = columns["score_T"] is not None and bool(np.isfinite(columns["score_T"]).any())
    return DumpRow(
        step=_typed(record, "step", int),
        row=place,
        key=key,
        # 0.1 numbered no groups; the same key up to the session is the same prompt.
        group=zlib.crc32(key.rsplit("_", 2)[0].encode("utf-8", "surrogatepass")),
        response="".join(tokens),
        answer=answer_text(tokens, span),
        truncated=_typed(record, "truncated", bool, False),
        neutral=None if scored else "no scores",
        span=span,
        prompt_ids=_int_column(record, "prompt_ids"),
        token_ids_T=token_ids_T,
        tokens=tokens,
        mask_T=_int_column(record, "mask", length).astype(bool),
        **columns,
    )


def _spelt_texts(spelt: Sequence[str]) -> list[str]:
    """Texts of tokens in their vocabulary's spelling: byte-level where a token shows it, else SentencePiece's or plain."""
    byte_level = any("\u0120" in token or "\u010a" in token for token in spelt)  # a space, a line break
    steps = _BYTE_LEVEL if byte_level else _SENTENCE_PIECE
    return decode_pieces([literal_bytes(token, steps, is_added=False) for token in spelt])


def _typed(record: dict[str, Any], name: str, kind: type, *default: Any) -> Any:
    value = record.get(name)
    if value is None and default:
        return default[0]
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return float("inf")
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        said = "is missing" if value is None else f"is {type(value).__name__}"
        raise ValueError(f"{name} {said}; it must be {kind.__name__}")
    if isinstance(value, int) and kind is int and not -_MOST_INT <= value < _MOST_INT:
        raise ValueError(f"{name}: a number is too large")
    return value


def _tokens(record: dict[str, Any], length: int) -> list[str]:
    tokens = _typed(record, "tokens", list)
    if not all(isinstance(token, str) for token in tokens):
        raise ValueError("tokens: must be texts")
    _check_length("tokens", len(tokens), length)
    return tokens


def _int_column(record: dict[str, Any], name: str, length: int | None = None) -> np.ndarray:
    values = _typed(record, name, list)
    if not all(type(value) is int for value in values):
        raise ValueError(f"{name}: must be whole numbers")
    if length is not None:
        _check_length(name, len(values), length)
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError as error:
        raise ValueError(f"{name}: a number is too large") from error


def _float_columns(record: dict[str, Any], length: int, names: Mapping[str, str], where: str = "") -> dict[str, Any]:
    """Arrays, and ``None`` where the file has none; never of weights."""
    columns: dict[str, Any] = {}
    for target, name in names.items():
        values = record.get(name)
        if values is None and target != "weight_T":
            columns[target] = None
            continue
        if not isinstance(values, list):
            raise ValueError(f"{where}{name} must be a list of numbers")
        _check_length(where + name, len(values), length)
        try:
            with np.errstate(over="ignore"):  # beyond float32 is as good as Inf
                columns[target] = np.array(values, dtype=np.float32)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{where}{name}: must be numbers or null") from error
        if columns[target].ndim != 1:
            raise ValueError(f"{where}{name}: must be numbers or null")
    return columns


def _check_length(name: str, found: int, length: int) -> None:
    if found != length:
        raise ValueError(f"{name} has {found} values for {length} tokens")


def _read_span(record: dict[str, Any], length: int) -> AnswerSpan | None:
    found = record.get("span")
    if found is None:
        return None
    ordered = isinstance(found, list) and len(found) == 4 and all(type(value) is int for value in found)
    if not ordered or not 0 <= found[0] <= found[1] <= found[2] <= found[3] <= length:
        raise ValueError(f"span: must be four token indices in order, at most {length}")
    return AnswerSpan(*found)
