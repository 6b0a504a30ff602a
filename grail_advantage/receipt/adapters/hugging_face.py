"""Hugging Face's ``Trainer``: a callback that ``compute_loss`` gives its log-probabilities.

receipt = ReceiptCallback(loss, "receipts.jsonl")
trainer = MyTrainer(..., callbacks=[receipt])   # whose compute_loss calls receipt.read(log_probs, rows)
receipt.begin(Batch(advantages, mask, old_log_probs, updates=..., epochs=...))   # for each rollout batch
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from .. import Batch, Loss, Receipt, Watch, check
from ..report import write


class ReceiptCallback(TrainerCallback):
    """Writes a receipt after the last optimiser step of each rollout batch; on one process or several.

    Args:
        loss: as the settings say.
        path: file of JSON lines, for the command.
    """

    def __init__(self, loss: Loss, path: Path | str) -> None:
        self.loss, self.path = loss, path
        self.receipts: list[Receipt] = []
        self._batch: Batch | None = None
        self._watched, self._left = Watch(), 0

    def begin(self, batch: Batch) -> None:
        """A rollout batch, of all processes, that the next optimiser steps train."""
        self._batch, self._watched, self._left = batch, Watch(), batch.updates * batch.epochs

    def read(self, log_probs_bT: torch.Tensor, rows_b: torch.Tensor, accelerator: Any = None) -> None:
        """Call it in ``compute_loss`` before the loss; with mixed precision in float16 also give ``trainer.accelerator``."""
        if self._batch is not None:
            scaler, rank = getattr(accelerator, "scaler", None), getattr(accelerator, "process_index", 0)
            self._watched.read(log_probs_bT, rows_b, rank=rank, scale=1.0 if scaler is None else scaler.get_scale())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After an optimiser step."""
        if self._batch is None:
            return
        self._watched.step()
        self._left -= 1
        if not self._left:
            batch, self._batch = self._batch, None
            self.receipts.append(check(batch, self.loss, self._watched.gather()))
            if state.is_world_process_zero:
                write(self.path, self.receipts[-1], self.loss.name, state.global_step)
