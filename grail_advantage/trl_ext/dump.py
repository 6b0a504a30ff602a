"""The token dump of a TRL run and the receipt of its updates (:mod:`grail_advantage.receipt`), written beside the training:
once it has begun, no failure in here stops it. Step S is TRL's ``global_step`` after the update that the responses were made
for, as in its logs, which go into ``metrics.jsonl`` of ``output_dir``."""

import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOTrainer

from grail_advantage.api import PlainHost
from grail_advantage.data import (
    OF_POLICY,
    OLD_LOG_PROBS,
    ROLLOUT_LOG_PROBS,
    Rollouts,
    Weighed,
    outcome_of,
    stacked,
)
from grail_advantage.dump import (
    METRICS_FILE,
    DumpOptions,
    MetricsFile,
    StepDump,
    received_table,
    tolerant,
)
from grail_advantage.effect import effect_figures
from grail_advantage.locks import hold, let_go
from grail_advantage.methods.turn_rewards import rewards_label
from grail_advantage.receipt import Batch, Piece, check, trl_loss
from grail_advantage.receipt.measure import Gradient
from grail_advantage.receipt.report import record_of
from grail_advantage.weigh import with_columns

logger = logging.getLogger(__name__)

GROUND_TRUTHS = (
    "solution",
    "ground_truth",
    "answer",
    "gold",
)  # columns with the correct answer; the first is shown
ROWS = "receipt_rows"  # numbers of a generation batch's responses, which TRL shuffles and splits along with it
COLUMNS = {  # fields of the receipt's batch, and TRL's names of them
    "advantages_BT": "advantages",
    "mask_BT": "loss_mask",
    "old_log_probs_BT": "old_per_token_logps",
    "weights_BT": "importance_sampling_ratio",
    "ref_log_probs_BT": "ref_per_token_logps",
}


def set_aside(folder: Path, metrics: Path) -> None:
    """Move the files of an earlier training, which one from step 0 would overwrite, into a folder beside them."""
    files = [*folder.glob("step_*"), *folder.glob("received_*"), *metrics.parent.glob(metrics.name)]
    if not files:
        return
    number = 1
    while (folder / f"earlier_{number}").exists():
        number += 1
    place = folder / f"earlier_{number}"
    place.mkdir()
    for file in files:
        # The metrics may be on another disk.
        shutil.move(file, place / file.name)
    logger.warning("token dump: %d files of an earlier training are now in %s", len(files), place)


def loss_mask(inputs: Mapping[str, Any]) -> Tensor:
    """The tokens that count in the loss, int64 (B, T), by ``_compute_loss`` (grpo_trainer.py:3027): a tool's do not."""
    return inputs["completion_mask"] * inputs.get("tool_mask", 1)


@dataclass
class Generation:
    """A generation batch whose updates are read, on this process."""

    step: int
    update: int  # its number among the generations of a step
    chosen: list[int]  # places of the responses that the dump has, over all processes
    lengths: list[int]
    columns: dict[str, Tensor] = field(default_factory=dict)  # (B, T) each
    # Of each micro-batch its gradient, its rows, those that went through the model in their order, the number of its update
    # since the generation, and the scale of its loss
    read: list[tuple[Gradient, Tensor, Tensor, int, float]] = field(default_factory=list)
    # Rows, with log-probabilities before the update, for its effect
    measured: tuple[list[int], Rollouts] | None = None

    def pieces(self, rank: int) -> Iterator[Piece]:
        """Micro-batches with a backward, on the CPU; a response that was left out has gradient 0 and ratio 1."""
        for gradient, rows, trained_rows, update, scale in self.read:
            if gradient.values is None:
                continue
            rows = rows.cpu()
            is_trained = torch.isin(rows, trained_rows.cpu())
            trained_log_probs = gradient.log_probs.cpu()
            log_probs = trained_log_probs.new_zeros(len(rows), trained_log_probs.shape[1])
            received = torch.zeros_like(log_probs)
            if "old_log_probs_BT" in self.columns:
                log_probs.copy_(self.columns["old_log_probs_BT"][rows])
            # A response that was left out has its old log-probability, so that its ratio is 1.
            log_probs[is_trained] = trained_log_probs
            received[is_trained] = gradient.values.cpu() / scale
            yield Piece(rows, log_probs, received, update, rank)


class GenerationDump(TrainerCallback):
    """Writes responses of a trainer's generation batches, and their receipts, from the main process; ``host(rollouts)``
    gives access to the model for these. OSError: the folder cannot be made."""

    def __init__(
        self, trainer: GRPOTrainer, options: DumpOptions, host: Callable[[Rollouts], PlainHost]
    ) -> None:
        options.folder.mkdir(parents=True, exist_ok=True)
        args = trainer.args
        self._trainer = trainer
        self._options = options
        self._host = host
        self.folder = options.folder
        self._reads = (
            options.received and args.steps_per_generation % args.gradient_accumulation_steps == 0
        )
        # Said once, as a trainer is made, and not in each step.
        if options.received and not self._reads:
            remedy = "make steps_per_generation a multiple of gradient_accumulation_steps"
            logger.warning(
                "token dump: what tokens receive is not read, as updates mix generations; %s",
                remedy,
            )
        self._metrics_path = Path(args.output_dir, METRICS_FILE).absolute()
        # Until a training begins, and on all processes but the main one, figures go nowhere.
        self._metrics = MetricsFile(os.devnull, -1)
        self._generation: Generation | None = None
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start anew; keep of the figures those that a resumed run does not take again."""
        trainer = self._trainer
        self._generation = None
        self._step = -1
        self._update = 0
        self._dump = StepDump(
            self._options,
            trainer.processing_class,
            # 16 micro-batches an update, of generations of 8 in one epoch: 2 of these in an update.
            updates=math.ceil(
                args.gradient_accumulation_steps / (args.steps_per_generation * args.num_iterations)
            ),
            model=trainer.accelerator.unwrap_model(trainer.model).config.name_or_path,
            temperature=trainer.temperature,
        )
        if state.is_world_process_zero:
            hold(self.folder, "choose another", "token_dump's folder")
            # A run that resumes goes on with the files.
            if not state.global_step:
                set_aside(self.folder, self._metrics_path)
            self._metrics = MetricsFile(self._metrics_path, state.global_step or -1)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **_: Any
    ) -> None:
        """Add a line of figures, under TRL's names."""
        self._metrics.add(state.global_step, logs)

    def finish(self, error: type[BaseException] | None, *_: object) -> None:
        """Write what remains. After an exception on one of several processes the others may come to no collective."""
        if error is None or self._trainer.accelerator.num_processes == 1:
            self.finish_receipt()
        let_go(self.folder)

    def write(
        self, w: Weighed, inputs: list[dict[str, Any]], output: dict[str, Any], advantages: Tensor
    ) -> None:
        """Write this process's responses of a generation batch, and begin to read its updates. ``inputs``: their rows of
        the data set; ``output``: TRL's batch, which gets their numbers; ``advantages``: (B, T) after weighting. A
        collective."""
        trainer = self._trainer
        r = w.rollouts
        step = trainer.state.global_step + 1
        # An update may take several generations, which have numbers of their own in its step.
        self._update = self._update + 1 if step == self._step else 0
        self._step = step
        is_main = trainer.accelerator.is_main_process
        groups = [
            place // trainer.num_generations
            for place in range(len(r) * trainer.accelerator.num_processes)
        ]
        chosen = None
        if is_main:  # one chooses for all, so that they gather the same responses
            chosen = self._dump.choose(step, self._update, groups, [True] * len(groups))
        (chosen,) = broadcast_object_list([chosen])
        if not chosen:
            return
        # Each process reads its own micro-batches; the main one puts them together.
        if self._reads:
            self._generation = Generation(step, self._update, chosen, list(map(len, r.responses)))
        parts: list[Weighed] = []
        with self._dump.attempt():
            if self._generation is not None:
                tensors = {**output, "advantages": advantages, "loss_mask": loss_mask(output)}
                for name, key in COLUMNS.items():
                    if tensors.get(key) is not None:
                        values = tensors[key].detach().expand(advantages.shape)
                        self._generation.columns[name] = values.to("cpu", copy=True)
                output[ROWS] = torch.arange(len(r), device=advantages.device)
            rows = [row for row, place in enumerate(r.places) if place in set(chosen)]
            if rows:
                part = w.part(rows)
                places = part.rollouts.places
                columns = dict(
                    with_columns(part.rollouts, OF_POLICY, self._host(part.rollouts)).columns
                )
                sampled = output.get("sampling_per_token_logps")  # of vLLM, or of rollout_func
                if sampled is not None:
                    columns[ROLLOUT_LOG_PROBS] = sampled[rows, : part.advantages.shape[1]].float()
                rollouts = replace(
                    part.rollouts,
                    columns=columns,
                    keys=[f"{step}_{place}" for place in places],
                    facts=self._facts([inputs[row] for row in rows], places),
                )
                parts = [replace(part, rollouts=rollouts)]
                if self._generation is not None and self._dump.measures(step):
                    self._generation.measured = rows, rollouts
        # Outside of the attempt: where one process failed, the others still gather.
        parts = gather_object(parts)
        if is_main:
            self._dump.write(step, self._update, parts, rows_in_step=len(groups))
            trainer._metrics["train"]["token_dump/failed_files"].append(float(self._dump.failed))

    def _facts(self, inputs: list[dict[str, Any]], places: Sequence[int]) -> dict[str, list[Any]]:
        """What the dump says of some responses, by their rows of the data set."""
        column = self._trainer.call_rewards
        rewards = [
            value if math.isfinite(value) else None
            for value in self._trainer.reward_sums[places].tolist()
        ]
        facts: dict[str, list[Any]] = {"reward": rewards, "outcome": list(map(outcome_of, rewards))}
        facts["labels"] = []
        facts["ground_truth"] = []
        for row in inputs:
            turn_rewards = tolerant(rewards_label, row.get(column)) if column else None
            facts["labels"].append({"turn_rewards": turn_rewards} if turn_rewards else {})
            truths = [row[name] for name in GROUND_TRUTHS if row.get(name) is not None]
            truth = tolerant(str, truths[0]) if truths else None
            facts["ground_truth"].append(
                truth and truth.rsplit("####", 1)[-1].strip()
            )  # not GSM8K's whole solution
        return facts

    def see(self, log_probs: Tensor, inputs: Mapping[str, Any], trained: Mapping[str, Any]) -> None:
        """Read the gradient of the log-probabilities (b, T) that go into the loss of a micro-batch, of which the
        ``trained`` part went through the model."""
        if self._generation is not None and ROWS in inputs and log_probs.requires_grad:
            with self._dump.attempt():
                # Steps since the generation: 0 of its first update.
                update = self._trainer.state.global_step + 1 - self._generation.step
                scaler = self._trainer.accelerator.scaler
                scale = 1.0 if scaler is None else scaler.get_scale()
                self._generation.read.append(
                    (Gradient(log_probs), inputs[ROWS], trained[ROWS], update, scale)
                )

    def finish_receipt(self) -> None:
        """Check what was read of the latest generation batch, and have it written. A collective."""
        generation = self._generation
        self._generation = None
        accelerator = self._trainer.accelerator
        if generation is None:
            return
        part = None
        with self._dump.attempt():
            pieces = list(generation.pieces(accelerator.process_index))
            columns = generation.columns
            if self._dump.measures(generation.step):
                effect = torch.full(columns["mask_BT"].shape, torch.nan)
                log_probs = torch.zeros(effect.shape)
                # The change of log-probabilities since the responses were scored
                if generation.measured is not None:
                    rows, rollouts = generation.measured
                    old = rollouts.columns[OLD_LOG_PROBS]
                    now = self._host(replace(rollouts, columns={})).columns([OLD_LOG_PROBS])[
                        OLD_LOG_PROBS
                    ]
                    effect[rows, : now.shape[1]] = now - old
                    log_probs[rows, : now.shape[1]] = old
                columns["effect"] = effect
                columns["log_probs"] = log_probs
            part = columns, generation.lengths, pieces
        parts = gather_object([part])
        # In a receipt of some processes, the responses of the others would be missing.
        if accelerator.is_main_process and None not in parts:
            with self._dump.attempt():
                self._write_receipt(generation, parts)

    def _write_receipt(
        self,
        generation: Generation,
        parts: Sequence[tuple[dict[str, Tensor], list[int], list[Piece]]],
    ) -> None:
        """``parts``: of each process the columns and lengths of its responses, and its micro-batches."""
        args = self._trainer.args
        # Each process pads to the longest response of its own.
        values = stacked([list(part.values()) for part, _, _ in parts])
        columns: dict[str, Any] = dict(zip(parts[0][0], values, strict=True))
        width = columns["mask_BT"].shape[1]
        lengths = list[int]()
        pieces = list[Piece]()
        for _, part_lengths, part_pieces in parts:
            # Rows of 2 processes with 8 responses each: row 3 of the second is row 11 of the batch.
            pieces += [
                replace(piece, rows_b=piece.rows_b + len(lengths)).padded(width)
                for piece in part_pieces
            ]
            lengths += part_lengths
        updates = args.steps_per_generation // args.gradient_accumulation_steps
        # Training may end within an epoch over the generation batch (TRL's iteration), whose updates are left out.
        complete = sum(len(piece.rows_b) for piece in pieces) // len(lengths) * updates
        pieces = [piece for piece in pieces if piece.update < complete]
        if not pieces:
            return
        effect = columns.pop("effect", None)
        log_probs = columns.pop("log_probs", None)
        columns["mask_BT"] = columns["mask_BT"].bool()
        keys = [f"{generation.step}_{place}" for place in range(len(lengths))]
        loss = trl_loss(**vars(args))
        batch = Batch(
            keys=keys,
            updates=updates,
            epochs=args.num_iterations,
            ranks=self._trainer.accelerator.num_processes,
            **columns,
        )
        receipt = check(batch, loss, pieces)
        rows = generation.chosen
        names = ("received_BT", "clipped_BT", "received_UBT", "expected_UBT", "clipped_UBT")
        # All responses were compared; the table has those of the dump.
        receipt = replace(receipt, **{name: getattr(receipt, name)[..., rows, :] for name in names})
        table = received_table(
            receipt,
            [keys[row] for row in rows],
            [lengths[row] for row in rows],
            None if effect is None else effect[rows],
        )
        record = record_of(receipt, loss.name, generation.step, generation.update)
        self._dump.write_received(record, table)
        if effect is not None:
            for name, value in effect_figures(
                batch.advantages_BT, effect, batch.mask_BT, log_probs
            ).items():
                self._trainer._metrics["train"][f"{self._trainer.method.name}/{name}"].append(value)
