"""The token dump of a TRL run (:mod:`grail_advantage.dump.store`): each generation batch's responses, beside the training.

TRL's figures go into ``metrics.jsonl`` of the run's ``output_dir`` meanwhile, so that ``python -m grail_advantage.report``
shows both. Step S is TRL's ``global_step`` after the update that the responses were made for, as in its logs.

Shape suffixes: B responses of this process, T response tokens.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback
from trl import GRPOTrainer

from grail_advantage.answers.format import AnswerFormat
from grail_advantage.batch import outcome_of
from grail_advantage.dump.options import METRICS_FILE, DumpOptions
from grail_advantage.dump.step import StepDump, StepRows, reasons_without_scores, size_estimate
from grail_advantage.signals.base import Signal
from grail_advantage.token_weights import TokenWeights
from grail_advantage.trl_ext.patches import log_in_training, reward_sums, written_lengths
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


@dataclass(frozen=True)
class GenerationBatch:
    """The responses of this process in a generation batch, with their token weights."""

    inputs: list[dict[str, Any]]
    """Rows of the data set."""
    output: dict[str, Any]
    """TRL's batch, with the advantage that it computed for each response."""
    result: TokenWeights
    """Of these responses, or of those of all processes."""
    own: slice
    """Which of the result's responses are these."""
    columns_BT: Mapping[str, torch.Tensor]
    """Old log-probabilities and entropies as far as the run has them, by the names of a dump's row."""
    truncated_B: torch.Tensor
    advantages_BT: torch.Tensor
    """After weighting."""


class GenerationDump(TrainerCallback):
    """Writes responses of generation batches from the main process. An error in it does not stop the training.

    Args:
        trainer: whose batches are written; ready.
        options: of the dump.
        signal: the method.
        answer: the format of answers.

    Raises:
        ValueError: the folder cannot be made.
    """

    def __init__(self, trainer: GRPOTrainer, options: DumpOptions, signal: Signal, answer: AnswerFormat) -> None:
        options.make_folder(WHERE)
        self.rewards = torch.zeros(0, 0)
        """Of all responses of all processes and all reward functions, as TRL scored the latest generation batch."""
        self._trainer, self._options, self._signal, self._answer = trainer, options, signal, answer
        self._metrics_file = Path(trainer.args.output_dir) / METRICS_FILE
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
            answer=self._answer,
        )

    # -------------------------------------------------------------------------------------------- what the trainer calls back

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start anew; keep of the figures those that a resumed run does not take again."""
        self._step, self._update = -1, 0
        self._dump = self._new_dump()
        self.receipt = GenerationReceipt(self._trainer, self._dump)
        if not state.is_world_process_zero:
            return
        kept = []
        if state.global_step and self._metrics_file.exists():
            lines = self._metrics_file.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if json.loads(line)["step"] <= state.global_step]
        self._metrics_file.parent.mkdir(parents=True, exist_ok=True)
        self._metrics_file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        responses = min(args.generation_batch_size, self._options.responses or args.generation_batch_size)
        estimate = size_estimate(responses, self._trainer.max_completion_length, state.max_steps // self._options.every)
        print(f"{estimate}, in {self._options.folder}", flush=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **_: Any) -> None:
        """Add a line of figures, under TRL's names."""
        if state.is_world_process_zero:
            figures = {name: value for name, value in logs.items() if isinstance(value, int | float)}
            with self._metrics_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, "data": figures}) + "\n")

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

    def write(self, batch: GenerationBatch) -> None:
        """Hand responses of a generation batch to the writer. A collective where there are several processes."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        step, count = trainer.state.global_step + 1, len(batch.inputs)
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
            self.receipt.begin(batch.output, batch.advantages_BT, chosen, step, self._update)
        first = accelerator.process_index * count
        mine = [place - first for place in chosen if first <= place < first + count]
        pieces: list[dict[str, Any]] = []
        with self._dump.writer.attempt():
            if mine:
                pieces = self._pieces(mine, first, batch)
        pieces = gather_object(pieces)
        if accelerator.is_main_process:
            with self._dump.writer.attempt():
                self._submit(pieces, groups)
            log_in_training(trainer, "token_dump/failed_files", float(self._dump.writer.failed))

    def _pieces(self, mine: list[int], first: int, batch: GenerationBatch) -> list[dict[str, Any]]:
        """Everything of the chosen responses of this process, on the CPU."""
        output, result, own = batch.output, batch.result, batch.own
        mask_BT, prompt_mask_BP = output["completion_mask"].bool(), output["prompt_mask"].bool()
        begin, width = prompt_mask_BP.shape[1], mask_BT.shape[1]
        lengths_B = written_lengths(output["completion_ids"], mask_BT, self._trainer.processing_class.pad_token_id)
        written_BT = torch.arange(width, device=mask_BT.device) < lengths_B.unsqueeze(1)
        lengths = lengths_B.tolist()
        no_scores = reasons_without_scores(
            self._signal,
            result.rows.part(own),
            valid_B=mask_BT.any(dim=1),
            advantages_B=output["advantages"],
            truncated_B=batch.truncated_B,
            non_finite_B=result.non_finite[own],
        )
        known_BT = {name: values_BT[mine] for name, values_BT in batch.columns_BT.items()}
        if len(known_BT) < 2:
            ids_BL = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)[mine]
            valid_BL = torch.cat([prompt_mask_BP, written_BT], dim=1)[mine]
            response_BL = torch.cat([torch.zeros_like(prompt_mask_BP), written_BT], dim=1)[mine]
            computed = self._trainer.statistics(ids_BL, valid_BL, response_BL).values()
            computed_BT = [values_BL[:, begin:] for values_BL in computed]
            known_BT = dict(zip(("old_log_prob_T", "entropy_T"), computed_BT, strict=True)) | known_BT
        values_BT = {
            "scores": result.scores[own, begin : begin + width][mine],
            "weights": result.weights[own, begin : begin + width][mine],
            "base_advantages": output["advantages"].unsqueeze(1).expand_as(mask_BT)[mine],
            "advantages": batch.advantages_BT[mine],
            **known_BT,
        }
        values_BT = {name: of_rows.float().cpu() for name, of_rows in values_BT.items()}
        return [
            {
                "place": first + row,
                "prompt": output["prompt_ids"][row][prompt_mask_BP[row]].cpu(),
                "response": output["completion_ids"][row, : lengths[row]].cpu(),
                "mask": mask_BT[row, : lengths[row]].cpu(),
                "span": result.spans[own][row],
                "truncated": bool(batch.truncated_B[row]),
                "no_scores": no_scores[row],
                "ground_truth": _ground_truth(batch.inputs[row]),
                **{name: of_rows[place, : lengths[row]] for name, of_rows in values_BT.items()},
            }
            for place, row in enumerate(mine)
        ]

    def _submit(self, pieces: list[dict[str, Any]], groups: list[int]) -> None:
        step, update = self._step, self._update

        def padded(name: str) -> torch.Tensor:
            return pad_sequence([piece[name] for piece in pieces], batch_first=True)

        def named(name: str) -> list[Any]:
            return [piece[name] for piece in pieces]

        rows = StepRows(
            method=self._signal.name,
            signal=self._signal,
            keys=[f"{step}_{place}" for place in named("place")],
            groups=[groups[place] for place in named("place")],
            prompts=named("prompt"),
            responses=named("response"),
            spans=named("span"),
            truncated_B=torch.tensor(named("truncated")),
            no_scores=named("no_scores"),
            mask_BT=padded("mask"),
            scores_BT=padded("scores"),
            weights_BT=padded("weights"),
            base_advantages_BT=padded("base_advantages"),
            advantages_BT=padded("advantages"),
            rows_in_step=len(groups),
        )
        rewards = self._rewards_of(named("place"))
        known = [
            {
                "ground_truth": piece["ground_truth"],
                "reward": reward,
                "outcome": outcome_of(reward),
                **{name: piece[name].numpy() for name in ("old_log_prob_T", "entropy_T")},
            }
            for piece, reward in zip(pieces, rewards, strict=True)
        ]
        self._dump.write(step, update, named("place"), rows, lambda: known)

    def _rewards_of(self, places: list[int]) -> list[float | None]:
        """The weighted sum of the reward functions, as TRL takes it; ``None`` for responses that none of them scored."""
        sums = reward_sums(self.rewards[places].float(), self._trainer.reward_weights).tolist()
        return [None if math.isnan(value) else value for value in sums]


def _ground_truth(row: Mapping[str, Any]) -> str | None:
    """The correct answer, where the data set has it under a usual name."""
    values = [row.get(name) for name in GROUND_TRUTH_COLUMNS]
    if isinstance(row.get("reward_model"), Mapping):
        values.append(row["reward_model"].get("ground_truth"))
    return next((str(value) for value in values if isinstance(value, str | int | float)), None)
