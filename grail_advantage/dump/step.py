"""The responses of each update's batch that the token dump has (:mod:`grail_advantage.dump.store`), beside the training.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from grail_advantage import __version__
from grail_advantage.answers.format import BOXED, AnswerFormat
from grail_advantage.answers.span import AnswerSpan
from grail_advantage.answers.text import TokenTexts, answer_text
from grail_advantage.dump.schema import SCHEMA, DumpHeader, ReceivedHeader, as_utf8
from grail_advantage.dump.store import DumpRow, MethodColumns, remove_steps, write_received, write_step
from grail_advantage.receipt import Receipt
from grail_advantage.signals.base import RowSelection, Signal

logger = logging.getLogger(__name__)

BYTES_PER_TOKEN = 20
"""Of a dump on the disk, measured with every column there and as good as random; see docs/token_dump.md."""
WAITING = 8
"""Files that may wait to be written."""


@dataclass(frozen=True)
class StepRows:
    """A batch as far as a dump reads it. Tensors and lists have one entry a response of the batch."""

    method: str
    signal: Signal
    keys: Sequence[str]
    groups: Sequence[int]
    prompts: Sequence[torch.Tensor]
    responses: Sequence[torch.Tensor]
    spans: Sequence[AnswerSpan | None]
    truncated_B: torch.Tensor
    no_scores: Sequence[str | None]
    mask_BT: torch.Tensor
    scores_BT: torch.Tensor
    weights_BT: torch.Tensor
    base_advantages_BT: torch.Tensor
    advantages_BT: torch.Tensor
    rows_in_step: int
    """Without those that only fill it up."""
    generated: Sequence[torch.Tensor] | None = None
    """The responses with -1 in place of the tokens that the model did not write; ``None`` where it wrote all."""

    def subset(self, chosen: Sequence[int]) -> StepRows:
        """The chosen responses alone, their tensors copied."""
        changes: dict[str, Any] = {}
        for entry in fields(self):
            values = getattr(self, entry.name)
            if isinstance(values, torch.Tensor):
                changes[entry.name] = values[chosen]
            elif entry.name not in ("method", "signal", "rows_in_step") and values is not None:
                changes[entry.name] = [values[row] for row in chosen]
        return replace(self, **changes)


def reasons_without_scores(
    signal: Signal,
    selection: RowSelection,
    *,
    valid_B: torch.Tensor,
    advantages_B: torch.Tensor,
    truncated_B: torch.Tensor,
    non_finite_B: torch.Tensor,
) -> list[str | None]:
    """Why each response has no scores of its own; ``None`` where it has. The first reason that holds, in the order below."""

    def reason(row: int) -> str | None:
        if selection.selected_B[row]:
            return "non-finite scores" if non_finite_B[row] else None
        if not valid_B[row]:
            return "no token trains"
        if truncated_B[row] and signal.mask_truncated:
            return "truncated"
        if advantages_B[row] == 0:
            return "advantage 0"
        if signal.skips_unanswered and not selection.answered_B[row]:
            return "no answer"
        return "not scored" if selection.inside_gate_B[row] else "outside the gate"

    return [reason(row) for row in range(len(valid_B))]


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


def size_estimate(rows: int, tokens: int, files: int) -> str:
    """A line on how large a dump becomes, at most.

    Args:
        rows: of a step.
        tokens: longest response.
        files: steps that are written.
    """
    step = rows * tokens * BYTES_PER_TOKEN
    return (
        f"token dump: {rows} responses a step with up to {tokens} tokens, at most about {step / 1e6:.3g} MB a step and "
        f"{files * step / 1e9:.3g} GB for {files} steps"
    )


class DumpWriter:
    """Writes a folder in a thread of its own, beside the training, which it never stops.

    A file that cannot be written, or comes while ``WAITING`` others wait for the disk, is left out: counted in ``failed``, and
    logged once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failed = 0
        """Files that were to be written and were not."""
        self._futures: list[Future] = []
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, make: Callable[[], tuple[Any, pa.Table]], write: Callable[..., Any] | None = None) -> None:
        """Have one file written.

        Args:
            make: gives the header and the table; called in the writer's thread, so that it must own what it reads.
            write: gets the folder, the header and the table; :func:`write_step` by default.
        """
        self._futures = [future for future in self._futures if not future.done()]
        if len(self._futures) >= WAITING:
            self._fail(f"{WAITING} files wait to be written already")
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="token_dump")
        self._futures.append(self._executor.submit(self._write, make, write))

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

    def _write(self, make: Callable[[], tuple[Any, pa.Table]], write: Callable[..., Any] | None) -> None:
        with self.attempt():
            (write or write_step)(self.folder, *make())

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
    """Chooses responses, makes rows of a dump of them, and hands them to the writer.

    Args:
        folder: destination, which exists.
        tokenizer: the run's.
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
        answer: AnswerFormat = BOXED,
    ) -> None:
        self.writer = DumpWriter(folder)
        self._every = every
        self._limit = None if rows is None else max(1, rows // updates)
        self._model, self._temperature, self._answer = model, temperature, answer
        self._tokenizer, self._texts = tokenizer, TokenTexts(tokenizer)
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

    def write(
        self,
        step: int,
        update: int,
        chosen: Sequence[int],
        batch: StepRows,
        more_fields: Callable[[], list[dict[str, Any]]],
    ) -> None:
        """Have responses written.

        Args:
            step: training step.
            update: which of its updates.
            chosen: responses of the batch.
            batch: the chosen responses alone; their tensors are read in the writer's thread, so the run must not change them.
            more_fields: gives further fields of :class:`grail_advantage.dump.store.DumpRow` for each chosen response;
                called in the writer's thread.
        """

        def make() -> tuple[DumpHeader, pa.Table]:
            rows = [
                self._row(batch, place, step=step, update=update, row=chosen[place], **more)
                for place, more in enumerate(more_fields())
            ]
            return self._header(batch, step, update, rows), table_of(rows)

        self.writer.submit(make)

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
            step: training step.
            update: which of its updates.
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
            findings=[finding.to_dict() for finding in receipt.findings],
            updates=len(receipt.received_UBT),
            tokens=int(trained_BT.sum()),
            clipped=float(clipped.mean()) if len(clipped) and clipped.isfinite().all() else None,
        )
        self.writer.submit(lambda: (header, receipt.table(keys, lengths)), write_received)
        return header

    def _row(self, batch: StepRows, place: int, *, labels: Mapping[str, Any] | None = None, **more: Any) -> DumpRow:
        response_T, span = batch.responses[place].numpy(), batch.spans[place]
        tokens = self._texts(response_T)

        def column(values_BT: torch.Tensor) -> np.ndarray:
            return values_BT[place, : len(response_T)].numpy()

        return DumpRow(
            key=batch.keys[place],
            group=batch.groups[place],
            prompt=self._tokenizer.decode(batch.prompts[place].tolist()),
            response="".join(tokens),
            answer=answer_text(tokens, span, self._answer),
            truncated=bool(batch.truncated_B[place]),
            no_scores=batch.no_scores[place],
            span=span,
            prompt_ids=batch.prompts[place].numpy(),
            token_ids_T=response_T,
            tokens=tokens,
            mask_T=column(batch.mask_BT),
            score_T=column(batch.scores_BT.float()),
            weight_T=column(batch.weights_BT.float()),
            base_advantage_T=column(batch.base_advantages_BT.float()),
            advantage_T=column(batch.advantages_BT.float()),
            labels={**({} if batch.generated is None else _tool_label(batch.generated[place])), **(labels or {})},
            **more,
        )

    def _header(self, batch: StepRows, step: int, update: int, rows: Sequence[DumpRow]) -> DumpHeader:
        signal = batch.signal
        written = {int(token) for row in rows for token in np.unique(row.token_ids_T)}
        return DumpHeader(
            step=step,
            update=update,
            method=batch.method,
            options=signal.as_dict(),
            reshaper=getattr(signal, "reshaper", None),
            model=self._model,
            temperature=self._temperature,
            rows_in_step=batch.rows_in_step,
            special_tokens={token: name for token, name in self._texts.special_tokens.items() if token in written},
            written_by=f"grail_advantage {__version__}",
            answer=self._answer.name if signal.reads_answer else None,
        )


def table_of(rows: Sequence[DumpRow]) -> pa.Table:
    """The rows as :func:`grail_advantage.dump.store.write_step` takes them."""

    def columns(values: DumpRow | MethodColumns) -> dict[str, Any]:
        return {name.removesuffix("_T"): as_utf8(v) if isinstance(v, str) else v for name, v in vars(values).items()}

    schema = pa.schema(list(SCHEMA)[2:])
    entries = [
        columns(row)
        | {
            "tokens": [as_utf8(text) for text in row.tokens],
            "span": list(vars(row.span).values()) if row.span else None,
            "methods": [{"name": as_utf8(name), **columns(method)} for name, method in row.methods.items()],
            "labels": json.dumps(row.labels) if row.labels else None,
        }
        for row in rows
    ]
    return pa.table({name: [entry[name] for entry in entries] for name in schema.names}, schema=schema)


def _tool_label(generated_T: torch.Tensor) -> dict[str, list[list[int]]]:
    """The half-open ranges of the tokens that a tool or a user wrote between the model's turns, as a label."""
    edges = torch.diff((generated_T < 0).int(), prepend=torch.zeros(1), append=torch.zeros(1))
    ranges = zip((edges > 0).nonzero().flatten().tolist(), (edges < 0).nonzero().flatten().tolist(), strict=True)
    tool = [list(edge) for edge in ranges]
    return {"tool": tool} if tool else {}
