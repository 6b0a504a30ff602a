"""The responses of each update's batch that the token dump has (:mod:`grail_advantage.dump.store`), beside the training.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from grail_advantage import __version__
from grail_advantage.answers.text import TokenTexts
from grail_advantage.data import Weighed
from grail_advantage.dump.schema import RECEIVED_SCHEMA, DumpHeader, FindingRecord, ReceivedHeader, as_utf8
from grail_advantage.dump.store import remove_steps, write_received, write_step
from grail_advantage.receipt import Receipt

logger = logging.getLogger(__name__)

BYTES_PER_TOKEN = 20
"""Of a dump on the disk, measured with every column there and as good as random; see docs/token_dump.md."""
WAITING = 8
"""Files that may wait to be written."""
_unread: set[str] = set()
"""Columns whose values could not be read at times."""
_Read = TypeVar("_Read")


def choose_rows(groups: Sequence[int], valid: Sequence[bool], limit: int | None, seed: Sequence[int]) -> list[int]:
    """Which responses of a batch are written: whole groups in an order that the seed gives, as many as fit.

    Args:
        groups: of each response.
        valid: whether a response is one of the run's, and no filling.
        limit: most responses; ``None`` for all. Of a first group that is larger, the first responses.
        seed: step and update; the same choice for the same numbers and groups.

    Returns:
        Responses of the batch, ordered by group and place.
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        if valid[row]:
            members.setdefault(group, []).append(row)
    if limit is None:
        return [row for group in sorted(members) for row in members[group]]
    chosen: dict[int, list[int]] = {}
    room = limit
    for group in np.random.default_rng(list(seed)).permutation(sorted(members)).tolist():
        if len(members[group]) <= room or not chosen:
            chosen[group] = members[group][:room]
            room -= len(chosen[group])
    return [row for group in sorted(chosen) for row in chosen[group]]


def say_size(rows: int, tokens: int, files: int, folder: Path) -> None:
    """Print a line on how large a dump becomes, at most.

    Args:
        rows: of a step.
        tokens: longest response.
        files: steps that are written.
        folder: destination.
    """
    step = rows * tokens * BYTES_PER_TOKEN
    with suppress(OSError, ValueError):  # of the output
        print(
            f"token dump: {rows} responses a step with up to {tokens} tokens, at most about {step / 1e6:.3g} MB a step and "
            f"{files * step / 1e9:.3g} GB for {files} steps, in {folder}",
            flush=True,
        )


def tolerant(column: str, read: Callable[[Any], _Read], value: Any) -> _Read | None:
    """``read(value)`` of what a user's data or reward function gave for a response; ``None``, logged once a column, where that
    is of a type that cannot be read."""
    try:
        return read(value)
    except Exception as error:
        if column not in _unread:
            _unread.add(column)
            why = f"{type(value).__name__}: {type(error).__name__}: {error}"
            logger.warning("token dump: %s of a response is left out (%.200s), as of others like it", column, why)
        return None


class DumpWriter:
    """Writes a folder in a thread of its own, beside the training, which it never stops.

    A file that cannot be written, or comes while ``WAITING`` others wait for the disk, is left out: counted in ``failed``, and
    logged once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.failed = 0
        """Files that were to be written and were not."""
        self._futures: list[Future] = []
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, write: Callable[[Path], Any]) -> None:
        """Have one file written by ``write(folder)``, which is called in the writer's thread and so must own what it reads."""
        self._futures = [future for future in self._futures if not future.done()]
        if len(self._futures) >= WAITING:
            self._fail(f"{WAITING} files wait to be written already")
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="token_dump")
        self._futures.append(self._executor.submit(self._write, write))

    def start_at(self, step: int) -> None:
        """Remove the files of an earlier run, of this step and later ones."""
        with self.attempt():
            if removed := remove_steps(self.folder, step):
                files = f"{len(removed)} files of step {step} and later, of an earlier run"
                logger.warning("token dump: %s, removed from %s", files, self.folder)

    def wait(self, seconds: float) -> None:
        """Wait until everything is written, but no longer than this: a disk that hangs stops nothing."""
        wait_for(self._futures, timeout=seconds)

    def close(self) -> None:
        """Wait until everything is written."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)
        self._executor, self._futures = None, []

    def _write(self, write: Callable[[Path], Any]) -> None:
        with self.attempt():
            write(self.folder)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Within, whatever goes wrong loses an update's file and stops nothing."""
        try:
            yield
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        if not self.failed:
            logger.warning("token dump: a file was not written to %s (%s); training continues", self.folder, why)
        self.failed += 1


class StepDump:
    """Chooses responses of updates, and has the writer make their files.

    Args:
        folder: destination, which exists.
        every: steps from one dump to the next.
        rows: most responses of a step, shared by its updates; ``None`` for all.
        updates: updates of the actor in a step.
        model: path of the model.
        temperature: of the rollouts.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        every: int,
        rows: int | None,
        updates: int,
        model: str,
        temperature: float,
    ) -> None:
        self.writer = DumpWriter(folder)
        self._every = every
        self._limit = None if rows is None else max(1, rows // updates)
        self._model, self._temperature = as_utf8(model), temperature
        self._texts = TokenTexts(tokenizer)
        self._begun = False

    def writes(self, step: int) -> bool:
        """Whether responses of this training step are written."""
        return step % self._every == 0

    def choose(self, step: int, update: int, groups: Sequence[int], valid: Sequence[bool]) -> list[int]:
        """The responses to write of this update; none in most steps. The first call of a run clears the way for its steps."""
        if not self._begun:
            self._begun = True
            self.writer.start_at(step)
        if not self.writes(step):
            return []
        return choose_rows(groups, valid, self._limit, (step, update))

    def write(self, step: int, update: int, records: Callable[[], Sequence[Weighed]], rows_in_step: int) -> None:
        """Have responses written.

        Args:
            records: gives the records of the chosen responses alone; called in the writer's thread, so that the run must not
                change what they hold.
            rows_in_step: responses of the update's batch, without those that only fill it up.
        """

        def write(folder: Path) -> None:
            parts = list(records())
            table = pa.concat_tables([part.table(self._texts) for part in parts])
            header = step_header(
                parts[0],
                self._texts,
                step=step,
                update=update,
                model=self._model,
                temperature=self._temperature,
                rows_in_step=rows_in_step,
                token_ids={token for part in parts for ids_T in part.rollouts.responses for token in ids_T.tolist()},
            )
            write_step(folder, header, table)

        self.writer.submit(write)

    def write_received(
        self,
        step: int,
        update: int,
        keys: Sequence[str],
        lengths: Sequence[int],
        mask_BT: torch.Tensor,
        receipt: Receipt,
        loss: str,
    ) -> ReceivedHeader:
        """Have a receipt written.

        Args:
            keys: of the responses that were written of it, in their order.
            lengths: tokens of each response.
            mask_BT: bool; the tokens that train.
            receipt: of these responses.
            loss: name of the loss.

        Returns:
            The file's header.
        """
        trained_BT = mask_BT & receipt.received_BT.isfinite()
        clipped = receipt.clipped_BT[trained_BT]
        header = ReceivedHeader(
            step=step,
            update=update,
            loss=loss,
            findings=[cast(FindingRecord, finding.to_dict()) for finding in receipt.findings],
            updates=len(receipt.received_UBT),
            tokens=int(trained_BT.sum()),
            clipped=float(clipped.mean()) if len(clipped) and clipped.isfinite().all() else None,
            seen_from=receipt.seen_from,
            responses=receipt.responses,
        )
        self.writer.submit(lambda folder: write_received(folder, header, received_table(receipt, keys, lengths)))
        return header


def received_table(receipt: Receipt, keys: Sequence[str], lengths: Sequence[int]) -> pa.Table:
    """A receipt as :func:`grail_advantage.dump.store.write_received` writes it, a row a response.

    Args:
        receipt: of these responses.
        keys: of its B responses.
        lengths: tokens of each.
    """
    columns: dict[str, list[Any]] = {name: [] for name in RECEIVED_SCHEMA.names}
    for place, (key, length) in enumerate(zip(keys, lengths, strict=True)):
        by_update_UT = receipt.received_UBT[:, place, :length].float()
        held_K = by_update_UT.isfinite().any(dim=1).nonzero().flatten()
        columns["key"].append(as_utf8(key))
        columns["updates"].append(held_K.numpy())
        columns["received"].append(receipt.received_BT[place, :length].float().numpy())
        columns["clipped"].append(receipt.clipped_BT[place, :length].float().numpy())
        columns["by_update"].append(list(by_update_UT[held_K].numpy()))
        columns["clipped_by_update"].append(list(receipt.clipped_UBT[held_K, place, :length].float().numpy()))
    return pa.table(columns, schema=RECEIVED_SCHEMA)


def step_header(
    record: Weighed, texts: TokenTexts, *, token_ids: Collection[int] | None = None, **values: Any
) -> DumpHeader:
    """The header of a file.

    Args:
        record: of a method, whose options it names.
        texts: of the tokenizer's tokens.
        token_ids: those of the file; special tokens get a name where they are among them, or all do.
        **values: the header's other values.
    """
    method = record.method
    known = texts.special_tokens if token_ids is None else token_ids
    return DumpHeader(
        method=method.name,
        options=method.model_dump(),
        reshaper=getattr(method, "reshaper", None),
        special_tokens={token: name for token, name in texts.special_tokens.items() if token in known},
        written_by=f"grail_advantage {__version__}",
        answer=record.rollouts.answer.name if method.reads_answer else None,
        **values,
    )
