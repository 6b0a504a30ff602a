"""The token dump of a TRL run (:mod:`grail_advantage.dump`), and what each of its tokens received in the updates
(:mod:`grail_advantage.receipt`), beside the training.

TRL's figures go into ``metrics.jsonl`` of the run's ``output_dir``. Step S is TRL's ``global_step`` after the update
that the responses were made for, as in its logs. An error in here stops no training.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch.nn.functional import pad
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grail_advantage.api import PlainHost
from grail_advantage.data import DUMPED, ROLLOUT_LOG_PROBS, Rollouts, Weighed, outcome_of
from grail_advantage.dump import METRICS_FILE, DumpOptions, MetricsFile, StepDump, tolerant
from grail_advantage.methods.turns import TurnMethod, rewards_label
from grail_advantage.receipt import Batch, Loss, Piece, check, trl_loss
from grail_advantage.receipt.measure import Gradient

WHERE = "token_dump's "
"""In front of an option's name in messages."""
GROUND_TRUTH_COLUMNS = ("solution", "ground_truth", "answer", "gold")
"""Columns of a data set that usually hold the correct answer; the first that a row has is shown."""
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


def dump_options(given: str | os.PathLike[str] | Mapping[str, Any]) -> DumpOptions:
    """The options of a dump, from a folder alone or from a mapping.

    Raises:
        ValueError: an option that does not exist, or a value that is not allowed.
    """
    section = dict(given) if isinstance(given, Mapping) else {"folder": given}
    if not section.get("folder"):
        raise ValueError(
            f"token_dump={given!r} must be a folder, or a mapping of folder, every, responses and received"
        )
    return DumpOptions(**section | {"folder": Path(section["folder"]).expanduser().absolute()})


def loss_mask(inputs: Mapping[str, Any]) -> torch.Tensor:
    """The tokens that count in the loss, int64 (B, T), by ``_compute_loss`` (grpo_trainer.py:3027): a tool's do not."""
    mask: torch.Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def loss_of(args: GRPOConfig) -> Loss:
    """TRL's loss as its configuration says."""
    options = dict(vars(args))
    return trl_loss(options.pop("loss_type"), options.pop("importance_sampling_level"), **options)


@dataclass
class Generation:
    """A generation batch whose updates are read, on this process."""

    step: int
    update: int
    chosen: list[int]
    """Places of the responses that the dump has, over all processes."""
    lengths: list[int]
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    """(B, T) each; empty where reading failed on this process, and then nothing is written: the others' responses alone
    would look like a fault of the trainer."""
    read: list[tuple[Gradient, torch.Tensor, torch.Tensor, int, float]] = field(default_factory=list)
    """Of each micro-batch its gradient, its rows, those of them that went through the model, its update, and the
    scale."""

    def pieces(self, rank: int) -> list[Piece]:
        """Those with a backward, on the CPU; responses that were left out have gradient 0 and ratio 1."""
        found = []
        for gradient, rows, kept, update, scale in self.read:
            if gradient.values is None:
                continue
            there, log_probs = torch.isin(rows, kept).cpu(), gradient.log_probs.cpu()
            full = torch.zeros(len(rows), log_probs.shape[1], dtype=log_probs.dtype)
            received = torch.zeros_like(full)
            if "old_log_probs_BT" in self.columns:
                full.copy_(self.columns["old_log_probs_BT"][rows.cpu()])
            full[there] = log_probs
            received[there] = gradient.values.cpu() / scale
            found.append(Piece(rows.cpu(), full, received, update, rank))
        return found


class GenerationDump(TrainerCallback):
    """Writes responses of generation batches, and their receipts, from the main process.

    Args:
        trainer: whose batches are written; ready.
        options: of the dump.
        host: gives the model with some of its responses.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, trainer: GRPOTrainer, options: DumpOptions, host: Callable[[Rollouts], PlainHost]) -> None:
        options.folder.mkdir(parents=True, exist_ok=True)
        self._trainer, self._options, self._host = trainer, options, host
        args, self.folder = trainer.args, options.folder
        self._metrics = MetricsFile(os.devnull, -1)
        self._metrics_path = Path(args.output_dir, METRICS_FILE).absolute()
        self._reads = options.received and args.steps_per_generation % args.gradient_accumulation_steps == 0
        if options.received and not self._reads:
            print(
                "token dump: what tokens receive is not read, as an optimiser step does not have responses of one "
                "generation alone; make steps_per_generation a multiple of gradient_accumulation_steps",
                flush=True,
            )
        self._begin()

    def _begin(self) -> None:
        trainer, args = self._trainer, self._trainer.args
        self._step, self._update = -1, 0
        self._generation: Generation | None = None
        self._micro_batch: tuple[torch.Tensor, torch.Tensor] | None = None
        self._dump = StepDump(
            self._options,
            trainer.processing_class,
            updates=math.ceil(args.gradient_accumulation_steps / (args.steps_per_generation * args.num_iterations)),
            model=trainer.accelerator.unwrap_model(trainer.model).config.name_or_path,
            temperature=trainer.temperature,
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start anew; keep of the figures those that a resumed run does not take again."""
        self._begin()
        if state.is_world_process_zero:
            self._metrics = MetricsFile(self._metrics_path, state.global_step or -1)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **_: Any) -> None:
        """Add a line of figures, under TRL's names."""
        if state.is_world_process_zero:
            self._metrics.add(state.global_step, logs)

    def finish(self, *, failed: bool) -> None:
        """Write what remains. After an exception on one of several processes the others may not come to a
        collective."""
        if not failed or self._trainer.accelerator.num_processes == 1:
            self.finish_receipt()

    # ------------------------------------------------------------------------------------------------------------------
    # rows

    def facts(self, inputs: list[dict[str, Any]], sums: torch.Tensor) -> dict[str, list[Any]]:
        """The dump's facts of this process's responses.

        Args:
            inputs: rows of the data set.
            sums: (B,) the rewards, NaN for a response that no reward function scored.
        """
        rewards = [value if math.isfinite(value) else None for value in sums.float().tolist()]
        return {
            "ground_truth": [_ground_truth(row) for row in inputs],
            "reward": rewards,
            "outcome": [outcome_of(reward) for reward in rewards],
            "labels": [tolerant(self._turn_rewards_label, row) or {} for row in inputs],
        }

    def _turn_rewards_label(self, row: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The rewards by turn that the method reads."""
        signal = self._trainer.signal
        label = rewards_label(row.get(signal.rewards)) if isinstance(signal, TurnMethod) else []
        return {"turn_rewards": label} if label else {}

    def write(self, w: Weighed, output: dict[str, Any], advantages: torch.Tensor) -> None:
        """Hand responses of a generation batch to the writer, and begin to read its updates. A collective.

        Args:
            w: of the responses of this process.
            output: TRL's batch of these; gets the responses' numbers.
            advantages: (B, T) after weighting.
        """
        trainer, accelerator, count = self._trainer, self._trainer.accelerator, len(w.rollouts)
        step = trainer.state.global_step + 1
        self._update = self._update + 1 if step == self._step else 0
        self._step = step
        groups = [place // trainer.num_generations for place in range(count * accelerator.num_processes)]
        box: list[Any] = [[]]
        if accelerator.is_main_process:
            with self._dump.attempt():
                box = [self._dump.choose(step, self._update, groups, [True] * len(groups))]
        (chosen,) = broadcast_object_list(box)
        if not chosen:
            return
        if self._reads:
            self._generation = Generation(step, self._update, chosen, [len(ids) for ids in w.rollouts.responses])
            with self._dump.attempt():
                given = {**output, "advantages": advantages, "loss_mask": loss_mask(output)}
                self._generation.columns = {
                    name: given[key].detach().expand(advantages.shape).to("cpu", copy=True)
                    for name, key in COLUMNS.items()
                    if given.get(key) is not None
                }
                output[ROWS] = torch.arange(count, device=advantages.device)
        own: list[Weighed] = []
        with self._dump.attempt():
            rows = [row for row, place in enumerate(w.rollouts.places) if place in set(chosen)]
            own = [self._complete(w.part(rows), step, rows, output)] if rows else []
        parts = gather_object(own)
        if accelerator.is_main_process:
            with self._dump.attempt():
                self._dump.write(step, self._update, parts, rows_in_step=len(groups))
            trainer._metrics["train"]["token_dump/failed_files"].append(float(self._dump.failed))

    def _complete(self, w: Weighed, step: int, rows: Sequence[int], output: Mapping[str, Any]) -> Weighed:
        """With all columns that there are, and with the keys of the dump; ``rows``: those of TRL's batch."""
        host = self._host(replace(w.rollouts, tokenizer=self._trainer.processing_class))
        columns = dict(host.columns(list(DUMPED)))
        if (sampled := output.get("sampling_per_token_logps")) is not None:  # of vLLM
            columns[ROLLOUT_LOG_PROBS] = sampled[rows, : w.rollouts.mask.shape[1]].float()
        keys = [f"{step}_{place}" for place in w.rollouts.places]
        return replace(w, rollouts=replace(w.rollouts, columns=columns, keys=keys))

    # ---------------------------------------------------------------------------------------------------------------
    # receipt

    @contextmanager
    def micro_batch(self, inputs: Mapping[str, Any], kept: Mapping[str, Any]) -> Iterator[None]:
        """Within, :meth:`see` reads a micro-batch, of which ``kept`` goes through the model."""
        if self._generation and self._generation.columns and ROWS in inputs:
            self._micro_batch = inputs[ROWS], kept[ROWS]
        try:
            yield
        finally:
            self._micro_batch = None

    def see(self, log_probs: torch.Tensor) -> None:
        """The log-probabilities (b, T) that go into the loss."""
        generation, scaler = self._generation, self._trainer.accelerator.scaler
        if generation is None or self._micro_batch is None or not log_probs.requires_grad:
            return
        with self._dump.attempt():
            scale = 1.0 if scaler is None else scaler.get_scale()
            update = self._trainer.state.global_step + 1 - generation.step
            generation.read.append((Gradient(log_probs), *self._micro_batch, update, scale))
            return
        generation.columns = {}

    def finish_receipt(self) -> None:
        """Check what was read of the latest generation batch, and have it written from the main process. A
        collective."""
        generation, self._generation, accelerator = self._generation, None, self._trainer.accelerator
        if generation is None:
            return
        own: list[Any] = [None]
        if generation.columns:
            with self._dump.attempt():
                own = [(generation.columns, generation.lengths, generation.pieces(accelerator.process_index))]
        parts = gather_object(own)
        if accelerator.is_main_process and own[0] is not None:
            with self._dump.attempt():
                if len(parts) != accelerator.num_processes or None in parts:
                    raise RuntimeError("another process has not read what its tokens received")
                self._write_receipt(generation, parts)

    def _write_receipt(
        self, of: Generation, parts: Sequence[tuple[dict[str, torch.Tensor], list[int], list[Piece]]]
    ) -> None:
        args, width = self._trainer.args, max(columns["mask_BT"].shape[1] for columns, _, _ in parts)
        columns = {
            name: torch.cat([pad(own[name], (0, width - own[name].shape[1])) for own, _, _ in parts])
            for name in parts[0][0]
        }
        lengths: list[int] = []
        pieces: list[Piece] = []
        for _, own_lengths, own_pieces in parts:
            pieces += [replace(piece, rows_b=piece.rows_b + len(lengths)).padded(width) for piece in own_pieces]
            lengths += own_lengths
        updates = args.steps_per_generation // args.gradient_accumulation_steps
        whole = sum(len(piece.rows_b) for piece in pieces) // len(lengths) * updates
        pieces = [piece for piece in pieces if piece.update < whole]  # training may end within an iteration
        if not pieces:
            return
        mask, keys = columns.pop("mask_BT").bool(), [f"{of.step}_{place}" for place in range(len(lengths))]
        counts = {"updates": updates, "epochs": args.num_iterations, "ranks": self._trainer.accelerator.num_processes}
        loss = loss_of(args)
        receipt = check(Batch(columns.pop("advantages_BT"), mask, **columns, **counts, keys=keys), loss, pieces)
        rows = of.chosen
        by_response = {name: getattr(receipt, name)[rows] for name in ("received_BT", "clipped_BT")}
        by_response |= {
            name: getattr(receipt, name)[:, rows] for name in ("received_UBT", "expected_UBT", "clipped_UBT")
        }
        written = [keys[row] for row in rows], [lengths[row] for row in rows]
        self._dump.write_received(of.step, of.update, replace(receipt, **by_response), loss.name, *written)


def _ground_truth(row: Mapping[str, Any]) -> str | None:
    """The correct answer, where the data set has it under a usual name."""
    values = [row.get(name) for name in GROUND_TRUTH_COLUMNS]
    if isinstance(row.get("reward_model"), Mapping):
        values.append(row["reward_model"].get("ground_truth"))
    truth = next((value for value in values if value is not None), None)
    return None if truth is None else tolerant(str, truth)
