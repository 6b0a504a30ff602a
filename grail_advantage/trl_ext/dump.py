"""The token dump of a TRL run (:mod:`grail_advantage.dump.store`): each generation batch's responses, beside the training.

TRL's figures go into ``metrics.jsonl`` of the run's ``output_dir`` meanwhile, so that ``python -m grail_advantage.report``
shows both. Step S is TRL's ``global_step`` after the update that the responses were made for, as in its logs.

Shape suffixes: B responses of this process, T response tokens.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainerCallback
from trl import GRPOTrainer

from grail_advantage.api import PlainHost
from grail_advantage.data import DUMPED, Rollouts, Weighed, outcome_of
from grail_advantage.dump.metrics_file import MetricsFile
from grail_advantage.dump.options import METRICS_FILE, DumpOptions
from grail_advantage.dump_writer import StepDump, say_size, tolerant
from grail_advantage.methods.turns import TurnMethod, rewards_label
from grail_advantage.trl_ext.patches import log_in_training, reward_sums
from grail_advantage.trl_ext.received import GenerationReceipt

WHERE = "token_dump's "
"""In front of an option's name in messages."""
GROUND_TRUTH_COLUMNS = ("solution", "ground_truth", "answer", "gold")
"""Columns of a data set that usually hold the correct answer; the first that a row has is shown."""
SAVE_SECONDS = 60.0
"""Seconds that a checkpoint waits for the dump of its steps."""


def dump_options(given: str | os.PathLike[str] | Mapping[str, Any]) -> DumpOptions:
    """The options of a dump, from a folder alone or from a mapping.

    Raises:
        ValueError: an option that does not exist, or a value that is not allowed.
    """
    section = dict(given) if isinstance(given, Mapping) else {"folder": given}
    unknown = sorted(section.keys() - DumpOptions.__dataclass_fields__.keys())
    if unknown or not section.get("folder"):
        raise ValueError(
            f"token_dump={given!r} must be a folder, or a mapping of folder, every, responses and received"
        )
    options = DumpOptions(**section | {"folder": Path(section["folder"]).expanduser().absolute()})
    options.check(WHERE)
    return options


class GenerationDump(TrainerCallback):
    """Writes responses of generation batches from the main process. An error in it does not stop the training.

    Args:
        trainer: whose batches are written; ready.
        options: of the dump.
        host: gives the model with some of its responses.

    Raises:
        ValueError: the folder cannot be made.
    """

    def __init__(self, trainer: GRPOTrainer, options: DumpOptions, host: Callable[[Rollouts], PlainHost]) -> None:
        options.make_folder(WHERE)
        self.rewards = torch.zeros(0, 0)
        """Of all responses of all processes and all reward functions, as TRL scored the latest generation batch."""
        self.folder = options.folder
        self._trainer, self._options, self._host = trainer, options, host
        self._metrics_path = Path(trainer.args.output_dir, METRICS_FILE).absolute()
        self._step, self._update = -1, 0
        self._dump = self._new_dump()
        self.receipt = GenerationReceipt(trainer, self._dump)
        """Of the latest generation batch that is written."""
        self._reads = options.received and self.receipt.possible
        if options.received and not self._reads:
            print(
                "token dump: what tokens receive is not read, as an optimiser step does not have responses of one generation "
                "alone; make steps_per_generation a multiple of gradient_accumulation_steps",
                flush=True,
            )

    def _new_dump(self) -> StepDump:
        trainer, args = self._trainer, self._trainer.args
        return StepDump(
            self._options.folder,
            trainer.processing_class,
            every=self._options.every,
            rows=self._options.responses,
            updates=math.ceil(args.gradient_accumulation_steps / (args.steps_per_generation * args.num_iterations)),
            model=trainer.accelerator.unwrap_model(trainer.model).config.name_or_path,
            temperature=trainer.temperature,
        )

    # -------------------------------------------------------------------------------------------- what the trainer calls back

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start anew; keep of the figures those that a resumed run does not take again."""
        self._step, self._update = -1, 0
        self._dump = self._new_dump()
        self.receipt = GenerationReceipt(self._trainer, self._dump)
        if not state.is_world_process_zero:
            return
        self._metrics = MetricsFile(self._metrics_path, state.global_step or -1)
        responses = min(args.generation_batch_size, self._options.responses or args.generation_batch_size)
        files = state.max_steps // self._options.every
        say_size(responses, self._trainer.max_completion_length, files, self._options.folder)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **_: Any) -> None:
        """Add a line of figures, under TRL's names."""
        if state.is_world_process_zero:
            self._metrics.add(state.global_step, logs)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let a checkpoint wait for the responses of its steps."""
        self._dump.writer.wait(SAVE_SECONDS)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the remaining responses."""
        self.finish_receipt()
        self._dump.writer.close()

    def finish_receipt(self) -> None:
        """Have the receipt of the latest generation batch written. A collective where there are several processes."""
        self.receipt.finish()

    # ------------------------------------------------------------------------------------------------------------------- rows

    def facts(self, inputs: list[dict[str, Any]], places_B: torch.Tensor) -> dict[str, list[Any]]:
        """The dump's facts of this process's responses.

        Args:
            inputs: rows of the data set.
            places_B: of the responses among those of all processes.
        """
        sums = reward_sums(self.rewards[places_B.to(self.rewards.device)].float(), self._trainer.reward_weights)
        # None for responses that no reward function scored, or whose reward is not finite.
        rewards = [value if math.isfinite(value) else None for value in sums.tolist()]
        return {
            "ground_truth": [_ground_truth(row) for row in inputs],
            "reward": rewards,
            "outcome": [outcome_of(reward) for reward in rewards],
            "labels": [tolerant("turn_rewards", self._turn_rewards_label, row) or {} for row in inputs],
        }

    def _turn_rewards_label(self, row: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The rewards by turn that the method reads."""
        signal = self._trainer.signal
        label = rewards_label(row.get(signal.rewards)) if isinstance(signal, TurnMethod) else []
        return {"turn_rewards": label} if label else {}

    def write(self, record: Weighed, output: dict[str, Any], advantages_BT: torch.Tensor) -> None:
        """Hand responses of a generation batch to the writer. A collective where there are several processes.

        Args:
            record: of the responses of this process.
            output: TRL's batch of these.
            advantages_BT: after weighting.
        """
        trainer, accelerator = self._trainer, self._trainer.accelerator
        step, count = trainer.state.global_step + 1, len(record.rollouts)
        self._update = self._update + 1 if step == self._step else 0
        self._step = step
        groups = [place // trainer.num_generations for place in range(count * accelerator.num_processes)]
        box: list[Any] = [[]]
        if accelerator.is_main_process:
            with self._dump.writer.attempt():
                box = [self._dump.choose(step, self._update, groups, [True] * len(groups))]
        (chosen,) = broadcast_object_list(box)
        if not chosen:
            return
        if self._reads:
            self.receipt.begin(output, advantages_BT, chosen, step, self._update)
        own: list[Weighed] = []
        with self._dump.writer.attempt():
            written = set(chosen)
            rows = [row for row, place in enumerate(record.rollouts.places) if place in written]
            own = [self._complete(record.part(rows), step)] if rows else []
        parts = gather_object(own)
        if accelerator.is_main_process:
            with self._dump.writer.attempt():
                self._dump.write(step, self._update, lambda: parts, rows_in_step=len(groups))
            log_in_training(trainer, "token_dump/failed_files", float(self._dump.writer.failed))

    def _complete(self, record: Weighed, step: int) -> Weighed:
        """The record with old log-probabilities and entropies, and with the keys of the dump."""
        rollouts = record.rollouts
        host = self._host(replace(rollouts, tokenizer=self._trainer.processing_class))
        keys = [f"{step}_{place}" for place in rollouts.places]
        return replace(record, rollouts=replace(rollouts, columns=host.columns(list(DUMPED)), keys=keys))


def _ground_truth(row: Mapping[str, Any]) -> str | None:
    """The correct answer, where the data set has it under a usual name."""
    values = [row.get(name) for name in GROUND_TRUTH_COLUMNS]
    if isinstance(row.get("reward_model"), Mapping):
        values.append(row["reward_model"].get("ground_truth"))
    truth = next((value for value in values if value is not None), None)
    return None if truth is None else tolerant("ground_truth", str, truth)
