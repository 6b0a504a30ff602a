"""The token dump of a TRL run and the receipt of its updates (:mod:`grail_advantage.receipt`), beside the training, that
nothing in here stops once it has begun. Step S is TRL's ``global_step`` after the update that the responses were made
for, as in its logs, which go into ``metrics.jsonl`` of ``output_dir``."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from torch.nn.functional import pad
from transformers import TrainerCallback
from trl import GRPOTrainer

from grail_advantage.api import PlainHost
from grail_advantage.data import DUMPED, OLD_LOG_PROBS, ROLLOUT_LOG_PROBS, Rollouts, Weighed, outcome_of
from grail_advantage.dump import METRICS_FILE, DumpOptions, MetricsFile, StepDump, received_table, tolerant
from grail_advantage.effect import effect_figures
from grail_advantage.locks import hold, let_go
from grail_advantage.methods.turns import rewards_label
from grail_advantage.receipt import Batch, Piece, check, trl_loss
from grail_advantage.receipt.measure import Gradient
from grail_advantage.receipt.report import record_of
from grail_advantage.weigh import with_columns

logger = logging.getLogger(__name__)

GROUND_TRUTHS = ("solution", "ground_truth", "answer", "gold")  # columns with the correct answer; the first is shown
ROWS = "receipt_rows"  # numbers of a generation batch's responses, which TRL shuffles and splits along with it
COLUMNS = {"advantages_BT": "advantages", "mask_BT": "loss_mask", "old_log_probs_BT": "old_per_token_logps"}
COLUMNS |= {"weights_BT": "importance_sampling_ratio", "ref_log_probs_BT": "ref_per_token_logps"}  # by TRL's names


def dump_options(given: str | os.PathLike[str] | Mapping[str, Any]) -> DumpOptions:
    """The options of a dump, from a folder alone or from a mapping. ValueError: an unknown one, or a wrong value."""
    section = dict(given) if isinstance(given, Mapping) else {"folder": given}
    if not section.get("folder"):
        raise ValueError(f"token_dump={given!r} must be a folder, or have folder, every, responses and received")
    folder = Path(section["folder"]).expanduser().absolute()
    return DumpOptions.of_section("token_dump", {**section, "folder": folder})


def set_aside(folder: Path, metrics: Path) -> None:
    """Move the files of an earlier training, which one from step 0 would replace, into a folder beside them."""
    if files := [*folder.glob("step_*"), *folder.glob("received_*"), *metrics.parent.glob(metrics.name)]:
        place = next(of for number in count(1) if not (of := folder / f"earlier_{number}").exists())
        place.mkdir()
        for file in files:
            file.rename(place / file.name)
        logger.warning("token dump: %d files of an earlier training are now in %s", len(files), place)


def loss_mask(inputs: Mapping[str, Any]) -> Tensor:
    """The tokens that count in the loss, int64 (B, T), by ``_compute_loss`` (grpo_trainer.py:3027): a tool's do not."""
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


@dataclass
class Generation:
    """A generation batch whose updates are read, on this process."""

    step: int
    update: int
    chosen: list[int]  # places of the responses that the dump has, over all processes
    lengths: list[int]
    columns: dict[str, Tensor] = field(default_factory=dict)  # (B, T) each
    # Of each micro-batch its gradient, its rows, those of them that went through the model, its update, and the scale
    read: list[tuple[Gradient, Tensor, Tensor, int, float]] = field(default_factory=list)
    measured: tuple[list[int], Rollouts] | None = None  # rows, with log-probabilities before the update, for its effect

    def pieces(self, rank: int) -> Iterator[Piece]:
        """Micro-batches with a backward, on the CPU; a response that was left out has gradient 0 and ratio 1."""
        for gradient, rows, kept, update, scale in self.read:
            if gradient.values is not None:
                rows, log_probs = rows.cpu(), gradient.log_probs.cpu()
                full = torch.zeros(len(rows), log_probs.shape[1], dtype=log_probs.dtype)
                received, there = torch.zeros_like(full), torch.isin(rows, kept.cpu())
                if "old_log_probs_BT" in self.columns:
                    full.copy_(self.columns["old_log_probs_BT"][rows])
                full[there], received[there] = log_probs, gradient.values.cpu() / scale
                yield Piece(rows, full, received, update, rank)


class GenerationDump(TrainerCallback):
    """Writes responses of a trainer's generation batches, and their receipts, from the main process; ``host`` gives the
    model with some of its responses. OSError: the folder cannot be made."""

    def __init__(self, trainer: GRPOTrainer, options: DumpOptions, host: Callable[[Rollouts], PlainHost]) -> None:
        options.folder.mkdir(parents=True, exist_ok=True)
        args = trainer.args
        self._trainer, self._options, self._host, self.folder = trainer, options, host, options.folder
        self._reads = options.received and args.steps_per_generation % args.gradient_accumulation_steps == 0
        if options.received and not self._reads:
            remedy = "make steps_per_generation a multiple of gradient_accumulation_steps"
            logger.warning("token dump: what tokens receive is not read, as updates mix generations; %s", remedy)
        self._metrics_path = Path(args.output_dir, METRICS_FILE).absolute()
        self._metrics = MetricsFile(os.devnull, -1)
        self._generation: Generation | None = None
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start anew; keep of the figures those that a resumed run does not take again."""
        trainer, self._generation, self._step, self._update = self._trainer, None, -1, 0
        self._dump = StepDump(
            self._options,
            trainer.processing_class,
            updates=math.ceil(args.gradient_accumulation_steps / (args.steps_per_generation * args.num_iterations)),
            model=trainer.accelerator.unwrap_model(trainer.model).config.name_or_path,
            temperature=trainer.temperature,
        )
        if state.is_world_process_zero:
            hold(self.folder, "choose another", "token_dump's folder")
            if not state.global_step:
                set_aside(self.folder, self._metrics_path)
            self._metrics = MetricsFile(self._metrics_path, state.global_step or -1)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **_: Any) -> None:
        """Add a line of figures, under TRL's names."""
        if state.is_world_process_zero:
            self._metrics.add(state.global_step, logs)

    def finish(self, error: type[BaseException] | None, *_: object) -> None:
        """Write what remains. After an exception on one of several processes the others may come to no collective."""
        if error is None or self._trainer.accelerator.num_processes == 1:
            self.finish_receipt()
        let_go(self.folder)

    def write(self, w: Weighed, inputs: list[dict[str, Any]], output: dict[str, Any], advantages: Tensor) -> None:
        """Write this process's responses of a generation batch, and begin to read its updates. ``inputs``: their rows of
        the data set; ``output``: TRL's batch, which gets their numbers; ``advantages``: (B, T) after weighting. A
        collective."""
        trainer, r, step = self._trainer, w.rollouts, self._trainer.state.global_step + 1
        self._step, self._update = step, self._update + 1 if step == self._step else 0
        groups = [place // trainer.num_generations for place in range(len(r) * trainer.accelerator.num_processes)]
        main = trainer.accelerator.is_main_process
        mine = self._dump.choose(step, self._update, groups, [True] * len(groups)) if main else None
        (chosen,) = broadcast_object_list([mine])
        if not chosen:
            return
        if self._reads:
            self._generation = Generation(step, self._update, chosen, list(map(len, r.responses)))
        own: list[Weighed] = []
        with self._dump.attempt():
            if self._generation is not None:
                given = {**output, "advantages": advantages, "loss_mask": loss_mask(output)}
                for name in [name for name, key in COLUMNS.items() if given.get(key) is not None]:
                    values = given[COLUMNS[name]].detach().expand(advantages.shape)
                    self._generation.columns[name] = values.to("cpu", copy=True)
                output[ROWS] = torch.arange(len(r), device=advantages.device)
            if rows := [row for row, place in enumerate(r.places) if place in set(chosen)]:
                part = w.part(rows)
                places = part.rollouts.places
                host = self._host(part.rollouts)
                columns = dict(with_columns(part.rollouts, list(DUMPED), host).columns)
                if (sampled := output.get("sampling_per_token_logps")) is not None:  # of vLLM, or of rollout_func
                    columns[ROLLOUT_LOG_PROBS] = sampled[rows, : part.advantages.shape[1]].float()
                facts = self._facts([inputs[row] for row in rows], places)
                keys = [f"{step}_{place}" for place in places]
                own = [replace(part, rollouts=replace(part.rollouts, columns=columns, keys=keys, facts=facts))]
                if self._generation is not None and self._dump.measures(step):
                    self._generation.measured = rows, own[0].rollouts
        parts = gather_object(own)
        if main:
            self._dump.write(step, self._update, parts, rows_in_step=len(groups))
            trainer._metrics["train"]["token_dump/failed_files"].append(float(self._dump.failed))

    def _facts(self, inputs: list[dict[str, Any]], places: Sequence[int]) -> dict[str, list[Any]]:
        """Of some responses, by their rows of the data set."""
        sums, column = self._trainer.reward_sums[places].tolist(), self._trainer.call_rewards
        rewards = [value if math.isfinite(value) else None for value in sums]
        of_turns = [tolerant(rewards_label, row.get(column)) if column else None for row in inputs]
        there = [[row[name] for name in GROUND_TRUTHS if row.get(name) is not None] for row in inputs]
        facts = {"reward": rewards, "outcome": list(map(outcome_of, rewards))}
        facts["labels"] = [{"turn_rewards": of} if of else {} for of in of_turns]
        return facts | {"ground_truth": [tolerant(str, of[0]) if of else None for of in there]}

    def see(self, log_probs: Tensor, inputs: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        """Read the gradient of the log-probabilities (b, T) that go into the loss of a micro-batch, of which ``kept``
        went through the model."""
        if self._generation is not None and ROWS in inputs and log_probs.requires_grad:
            with self._dump.attempt():
                update = self._trainer.state.global_step + 1 - self._generation.step
                scaler = self._trainer.accelerator.scaler
                scale = 1.0 if scaler is None else scaler.get_scale()
                self._generation.read.append((Gradient(log_probs), inputs[ROWS], kept[ROWS], update, scale))

    def finish_receipt(self) -> None:
        """Check what was read of the latest generation batch, and have it written. A collective."""
        generation, self._generation, accelerator = self._generation, None, self._trainer.accelerator
        if generation is None:
            return
        own = None
        with self._dump.attempt():
            pieces, columns = list(generation.pieces(accelerator.process_index)), generation.columns
            if self._dump.measures(generation.step):
                columns["effect"] = torch.full(columns["mask_BT"].shape, torch.nan)
                columns["log_probs"] = torch.zeros(columns["mask_BT"].shape)
                if generation.measured is not None:  # the change of log-probabilities since the responses were scored
                    rows, before = generation.measured
                    now = self._host(replace(before, columns={})).columns([OLD_LOG_PROBS])[OLD_LOG_PROBS]
                    columns["log_probs"][rows, : now.shape[1]] = before.columns[OLD_LOG_PROBS]
                    columns["effect"][rows, : now.shape[1]] = now - before.columns[OLD_LOG_PROBS]
            own = columns, generation.lengths, pieces
        parts = gather_object([own])
        if accelerator.is_main_process and None not in parts:
            with self._dump.attempt():
                self._write_receipt(generation, parts)

    def _write_receipt(self, of: Generation, parts: Sequence[tuple[dict[str, Tensor], list[int], list[Piece]]]) -> None:
        """``parts``: of each process the columns and lengths of its responses, and its micro-batches."""
        args, width = self._trainer.args, max(columns["mask_BT"].shape[1] for columns, _, _ in parts)
        padded = [{name: pad(own[name], (0, width - own[name].shape[1])) for name in own} for own, _, _ in parts]
        columns: dict[str, Any] = {name: torch.cat([own[name] for own in padded]) for name in padded[0]}
        lengths, pieces = list[int](), list[Piece]()
        for _, own_lengths, own_pieces in parts:
            pieces += [replace(piece, rows_b=piece.rows_b + len(lengths)).padded(width) for piece in own_pieces]
            lengths += own_lengths
        updates = args.steps_per_generation // args.gradient_accumulation_steps
        whole = sum(len(piece.rows_b) for piece in pieces) // len(lengths) * updates
        pieces = [piece for piece in pieces if piece.update < whole]  # training may end within an iteration
        if not pieces:
            return
        mask, keys = columns.pop("mask_BT").bool(), [f"{of.step}_{place}" for place in range(len(lengths))]
        advantages = columns.pop("advantages_BT")
        effect = columns.pop("effect", None)
        log_probs = columns.pop("log_probs", None)
        counts = {"updates": updates, "epochs": args.num_iterations, "ranks": self._trainer.accelerator.num_processes}
        loss = trl_loss(**vars(args))
        batch = Batch(advantages, mask, keys=keys, **counts, **columns)
        receipt, rows = check(batch, loss, pieces), of.chosen
        names = ("received_BT", "clipped_BT", "received_UBT", "expected_UBT", "clipped_UBT")
        chosen = replace(receipt, **{name: getattr(receipt, name)[..., rows, :] for name in names})
        written = [keys[row] for row in rows], [lengths[row] for row in rows], None if effect is None else effect[rows]
        self._dump.write_received(record_of(chosen, loss.name, of.step, of.update), received_table(chosen, *written))
        if effect is not None:
            for name, value in effect_figures(advantages, effect, mask, log_probs).items():
                self._trainer._metrics["train"][f"{self._trainer.method.name}/{name}"].append(value)
