"""What each token received in TRL's updates (:mod:`grail_advantage.receipt`), for the steps that the token dump writes.

The gradient is read at the per-token log-probabilities that TRL's loss takes. A generation batch's receipt is made when the
next batch is generated, or at the end of training, and written beside the batch's responses.

Shape suffixes: B responses of this process, or of all in :meth:`GenerationReceipt.finish`, b of a micro-batch, T response
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.nn.functional import pad
from trl import GRPOTrainer

from grail_advantage.dump_writer import StepDump
from grail_advantage.receipt import Batch, Loss, Piece, check, trl_loss
from grail_advantage.receipt.measure import Gradient
from grail_advantage.trl_ext.patches import loss_mask, written_lengths

LENGTHS = "lengths_B"
"""Beside the columns, the tokens of each response."""
ROWS = "receipt_rows"
"""Name of a micro-batch's responses in a generation batch, which TRL shuffles and splits along with it."""
COLUMNS = {
    "advantages_BT": "advantages",
    "mask_BT": "loss_mask",
    "old_log_probs_BT": "old_per_token_logps",
    "weights_BT": "importance_sampling_ratio",
    "ref_log_probs_BT": "ref_per_token_logps",
}
"""A receipt's columns by TRL's names, the mask by that of :func:`loss_mask`."""
SETTINGS = (
    *(
        "epsilon",
        "epsilon_high",
        "delta",
        "max_completion_length",
        "beta",
        "sapo_temperature_pos",
        "sapo_temperature_neg",
    ),
    *("vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg", "use_bias_correction_kl"),
    *("off_policy_mask_threshold", "top_entropy_quantile"),
)
"""Of TRL's configuration, which the loss reads."""


def loss_of(trainer: GRPOTrainer) -> Loss:
    """The trainer's loss as its settings say."""
    settings = {name: getattr(trainer.args, name) for name in SETTINGS if hasattr(trainer.args, name)}
    return trl_loss(trainer.loss_type, trainer.importance_sampling_level, **settings)


class GenerationReceipt:
    """Reads the micro-batches of one generation batch after the other. An error in it does not stop the training.

    Args:
        trainer: whose updates are read.
        dump: which writes the receipts.
    """

    def __init__(self, trainer: GRPOTrainer, dump: StepDump) -> None:
        self._trainer, self._dump = trainer, dump
        self._begun = False
        self._columns: dict[str, torch.Tensor] = {}
        """Empty where reading failed on this process, which then has no part in the receipt."""
        self._read: list[tuple[Gradient, torch.Tensor, torch.Tensor, int, float]] = []
        self._rows: tuple[torch.Tensor, torch.Tensor] | None = None
        self._chosen: list[int] = []
        self._step, self._update = 0, 0

    @property
    def possible(self) -> bool:
        """Whether an optimiser step has responses of one generation batch alone, each once."""
        return self._trainer.args.steps_per_generation % self._trainer.args.gradient_accumulation_steps == 0

    def begin(
        self, output: dict[str, Any], advantages_BT: torch.Tensor, chosen: Sequence[int], step: int, update: int
    ) -> None:
        """A generation batch whose updates are to be read.

        Args:
            output: TRL's batch; gets the responses' numbers.
            advantages_BT: after weighting.
            chosen: places of the responses that the dump writes, over all processes.
            step: of the dump's file.
        """
        self._begun = True
        self._chosen, self._step, self._update = list(chosen), step, update
        with self._dump.writer.attempt():
            mask_BT = loss_mask(output)
            given = {**output, "advantages": advantages_BT, "loss_mask": mask_BT}
            columns = {
                name: given[key].detach().expand(mask_BT.shape).to("cpu", copy=True)
                for name, key in COLUMNS.items()
                if given.get(key) is not None
            }
            pad_token_id = self._trainer.processing_class.pad_token_id
            columns[LENGTHS] = written_lengths(
                output["completion_ids"], output["completion_mask"].bool(), pad_token_id
            ).cpu()
            output[ROWS] = torch.arange(len(mask_BT), device=mask_BT.device)
            self._columns = columns

    @contextmanager
    def micro_batch(self, inputs: Mapping[str, Any], kept: Mapping[str, Any]) -> Iterator[None]:
        """Within, :meth:`see` reads a micro-batch.

        Args:
            inputs: TRL's micro-batch.
            kept: the part of it that goes through the model.
        """
        self._rows = (inputs[ROWS], kept[ROWS]) if self._columns and ROWS in inputs else None
        try:
            yield
        finally:
            self._rows = None

    def see(self, log_probs_bT: torch.Tensor) -> None:
        """The log-probabilities that go into the loss."""
        if self._rows is None or not log_probs_bT.requires_grad:
            return
        with self._dump.writer.attempt():
            scaler = self._trainer.accelerator.scaler
            scale = 1.0 if scaler is None else scaler.get_scale()
            update = self._trainer.state.global_step + 1 - self._step
            self._read.append((Gradient(log_probs_bT), *self._rows, update, scale))
            return
        self._columns = {}

    def _pieces(self) -> list[Piece]:
        """Of this process, on the CPU; responses that were left out have gradient 0 and ratio 1."""
        pieces = []
        for gradient, rows_b, kept_b, update, scale in self._read:
            there_b, log_probs = torch.isin(rows_b, kept_b).cpu(), gradient.log_probs
            log_probs_bT = torch.zeros(len(rows_b), log_probs.shape[1], dtype=log_probs.dtype)
            gradient_bT = torch.zeros_like(log_probs_bT)
            if "old_log_probs_BT" in self._columns:
                log_probs_bT.copy_(self._columns["old_log_probs_BT"][rows_b.cpu()])
            log_probs_bT[there_b] = log_probs.cpu()
            if gradient.values is not None:
                gradient_bT[there_b] = gradient.values.cpu() / scale
            pieces.append(
                Piece(rows_b.cpu(), log_probs_bT, gradient_bT, update, self._trainer.accelerator.process_index)
            )
        return pieces

    def finish(self) -> None:
        """Check what was read, and have it written from the main process. A collective where there are several processes.

        Nothing is written where a process failed: the others' responses alone would look like a fault of the trainer.
        """
        if not self._begun:
            return
        own: list[Any] = [None]
        if self._columns:
            with self._dump.writer.attempt():
                own = [(self._columns, self._pieces())]
        self._begun, self._columns, self._read = False, {}, []
        parts, accelerator = gather_object(own), self._trainer.accelerator
        if accelerator.is_main_process and own[0] is not None:
            with self._dump.writer.attempt():
                if len(parts) != accelerator.num_processes or any(part is None for part in parts):
                    raise RuntimeError("another process has not read what its tokens received")
                self._write(parts)

    def _write(self, parts: Sequence[tuple[dict[str, torch.Tensor], list[Piece]]]) -> None:
        args = self._trainer.args
        width = max(columns["mask_BT"].shape[1] for columns, _ in parts)
        lengths_B = torch.cat([own.pop(LENGTHS) for own, _ in parts])
        columns = {
            name: torch.cat([pad(own[name], (0, width - own[name].shape[1])) for own, _ in parts])
            for name in parts[0][0]
        }
        first, pieces = 0, []
        for own, of_process in parts:
            pieces += [replace(piece, rows_b=piece.rows_b + first).padded(width) for piece in of_process]
            first += len(own["mask_BT"])
        updates = args.steps_per_generation // args.gradient_accumulation_steps
        whole = sum(len(piece.rows_b) for piece in pieces) // first * updates
        pieces = [piece for piece in pieces if piece.update < whole]  # training may end within an iteration
        if not pieces:
            return
        mask_BT = columns.pop("mask_BT").bool()
        batch = Batch(
            columns.pop("advantages_BT"),
            mask_BT,
            **columns,
            updates=updates,
            epochs=args.num_iterations,
            ranks=self._trainer.accelerator.num_processes,
            keys=[f"{self._step}_{place}" for place in range(first)],
        )
        loss = loss_of(self._trainer)
        receipt = check(batch, loss, pieces)
        chosen = self._chosen
        written = replace(
            receipt,
            received_BT=receipt.received_BT[chosen],
            clipped_BT=receipt.clipped_BT[chosen],
            received_UBT=receipt.received_UBT[:, chosen],
            expected_UBT=receipt.expected_UBT[:, chosen],
            clipped_UBT=receipt.clipped_UBT[:, chosen],
        )
        keys, lengths = [f"{self._step}_{place}" for place in chosen], lengths_B[chosen].tolist()
        self._dump.write_received(self._step, self._update, keys, lengths, mask_BT[chosen], written, loss.name)
