"""TRL's GRPO trainer with token weights: ``A_t = w_t A`` with A the advantage that TRL computed for the response.

TRL calls ``_generate_and_score_completions`` once a generation batch; then it shuffles the batch, splits it over
``steps_per_generation`` and uses it ``num_iterations`` times. So the weights are those of the policy that wrote the
responses. TRL's loss takes advantages (B, T) from subclasses (grpo_trainer.py:3055), and its maintainers want them made
there (huggingface/trl#4525). Nothing of TRL is replaced; lines are those of TRL 1.16.0.
"""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl
from accelerate.utils import gather_object
from transformers.trainer_utils import SaveStrategy
from trl import GRPOTrainer

from grail_advantage.answers.format import BOXED, AnswerFormat, answer_format
from grail_advantage.answers.missing import CHOICES, AnswerCheck
from grail_advantage.api import PlainHost
from grail_advantage.data import DUMPED, OLD_LOG_PROBS, Example, Rollouts, joined, runs, token_mean, within_range
from grail_advantage.method import Method, build
from grail_advantage.methods.turns import TurnMethod
from grail_advantage.metrics import GRADIENT_METRICS, METRICS
from grail_advantage.rules import hold, let_go
from grail_advantage.trl_ext.dump import WHERE, GenerationDump, dump_options, loss_mask
from grail_advantage.trl_ext.rules import check_arguments, check_neighbours, check_trainer
from grail_advantage.weigh import weigh

logger = logging.getLogger(__name__)

FIGURES = (*METRICS, *GRADIENT_METRICS, "truncated_rate", "unjudged_rate", "seconds")
"""Figures of the name ``<method>/<figure>`` in the logs of training."""


class TokenWeightGRPOTrainer(GRPOTrainer):
    """``GRPOTrainer`` whose advantages are a method's token weights times the response's advantage.

    Only training is weighted; in evaluation the advantages are TRL's.

    Args:
        token_weights: a registered method by its name, or a method with its options such as ``Grail("robust")``.
        token_weight_options: options of a method that is given by its name.
        answer: the format of answers, as for :func:`grail_advantage.compute_token_weights`.
        missing_answers: ``stop``, ``warn`` or ``ignore`` where responses have no answer, see
            :mod:`grail_advantage.answers.missing`.
        token_dump: a folder for every token's score, weight and advantage, or a mapping of ``folder``, ``every`` (steps
            from one dump to the next, 1), ``responses`` (of a step at most, 64; None: all) and ``received`` (True: also
            what each token received in the updates, docs/receipt.md). See docs/token_dump.md.
        skip_zero_advantage: leave responses whose token advantages are all 0 out of the loss's forward and backward.
            The update is the same but for rounding where the first micro-batch finds the model's responses independent
            of each other; training ends there otherwise. TRL's figures of entropy and clipping are then those of the
            others.
        *arguments: as for ``GRPOTrainer``.
        **named: likewise.

    Raises:
        ValueError: an unknown method or option, or an argument that token weights do not work with; the message has the
            fix.
    """

    def __init__(
        self,
        *arguments: Any,
        token_weights: str | Method = "grail",
        token_weight_options: Mapping[str, Any] | None = None,
        answer: str | AnswerFormat = BOXED,
        missing_answers: str = CHOICES[0],
        token_dump: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        skip_zero_advantage: bool = False,
        **named: Any,
    ) -> None:
        if not isinstance(token_weights, str) and token_weight_options:
            raise ValueError("token_weight_options are for a method given by its name; put them into token_weights")
        self.signal = build(token_weights, token_weight_options) if isinstance(token_weights, str) else token_weights
        self.answer = answer_format(answer)
        self._skips_zero_advantage, self._neighbours_checked = skip_zero_advantage, False
        self._answers = AnswerCheck(self.signal, self.answer, missing_answers, total=self._total)
        dumping = None if token_dump is None else dump_options(token_dump)
        self._dump: GenerationDump | None = None
        self._tool_mask: list[list[int]] | None = None
        self._call_rewards = self.signal.rewards if isinstance(self.signal, TurnMethod) else ""
        self._calls: list[list[int]] = []
        given = inspect.signature(GRPOTrainer.__init__).bind(self, *arguments, **named).arguments
        check_arguments(given, self.signal, trl.__version__)
        super().__init__(*arguments, **named)
        check_trainer(self, self.signal, skip_zero_advantage)
        if dumping is not None:
            self._dump = GenerationDump(self, dumping, self._host)
            self.add_callback(self._dump)

    def train(self, *arguments: Any, **named: Any) -> Any:
        """TRL's, for which the folders that it writes to are locked.

        Raises:
            ValueError: a training that lives writes to one of them.
        """
        folders: dict[Path, str] = {}
        if self.is_world_process_zero():
            if self._dump is not None or self.args.save_strategy != SaveStrategy.NO:
                folders[Path(self.args.output_dir).resolve()] = "output_dir"
            if self._dump is not None:
                folders.setdefault(self._dump.folder.resolve(), f"{WHERE}folder")
        failed = True
        try:
            for folder, name in folders.items():
                hold(folder, "choose another", name)
            result = super().train(*arguments, **named)
            failed = False
            return result
        finally:
            if self._dump is not None:
                self._dump.finish(failed=failed)
            for folder in folders:
                let_go(folder)

    # -------------------------------------------------------------------------------------------------- a generation
    # batch

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """TRL's (line 2193), which tells which tokens the model wrote; ``tool_mask`` of its batch does not for a
        response that ``mask_truncated_completions`` masks."""
        self._calls = []
        generated = super()._generate(prompts)
        self._tool_mask = generated[2]
        return generated

    def _generate_single_turn(self, *arguments: Any, **named: Any) -> Any:
        """TRL's next turn of some responses (line 1763). An environment is told of calls and not of turns, and of no
        call that fails before it: so the lengths of all rewards are looked at here. Between two turns of a batch TRL
        makes the calls of the first, of all responses (line 1957)."""
        values = [getattr(each, self._call_rewards, None) for each in self.environments or () if self._call_rewards]
        self._calls.append([len(value) if isinstance(value, list) else 0 for value in values])
        return super()._generate_single_turn(*arguments, **named)

    def _calculate_rewards(self, inputs: list[dict[str, Any]], *arguments: Any, **named: Any) -> torch.Tensor:
        """TRL's rewards of all processes (line 1579); fields of the responses go into ``inputs``.

        In training a reward that is not finite or too large becomes NaN with every reward function: so TRL compares no
        other response with it and gives its own the advantage 0, where it would make numbers near float32's end of the
        infinities.
        """
        self._scored = self._rewards = rewards = super()._calculate_rewards(inputs, *arguments, **named)
        if not self.model.training:
            return rewards
        self._fill_in(inputs)
        usable = (within_range(rewards) | rewards.isnan()).all(dim=1)
        unjudged = ~(usable & within_range(reward_sums(rewards, self.reward_weights)))
        if unjudged.any():
            logger.warning(
                "step %d: %d of %d responses, such as response %d, have no finite reward, or one that is too large. "
                "They train nothing, and the other responses to their prompts are compared without them. Fix the "
                "reward functions",
                *(self.state.global_step, int(unjudged.sum()), len(rewards), int(unjudged.int().argmax())),
            )
        self._rewards = torch.where(unjudged[:, None], torch.nan, rewards)
        return self._rewards

    def _fill_in(self, rows: list[dict[str, Any]]) -> None:
        """Put the fields that the method reads into the rows of the data, one a response, where TRL puts what
        ``rollout_func`` returns itself (line 2741): what a reward function logs with ``log_extra(NAME, values)``, which
        is in ``_pending_extra_logs`` until it comes into the table of completions (line 1563), else the environment's
        attribute.

        Raises:
            ValueError: a field that is nowhere, or not one value a response.
        """
        logged, environments = self._pending_extra_logs, self.environments or ()
        for name in self.signal.field_names:
            values: Sequence[Any] = [row.get(name) for row in rows]
            if name in logged:
                values = logged[name]
            elif any(hasattr(environment, name) for environment in environments):
                values = [getattr(environment, name, None) for environment in environments]
                values = self._by_turn(values) if name == self._call_rewards else values
            elif not any(name in row for row in rows):
                raise ValueError(
                    f"token_weights={self.signal.name!r} reads the field {name!r}, which is nowhere; have a reward "
                    f"function call log_extra({name!r}, values), or give the environment the attribute, or the data "
                    f"the column {name}"
                )
            if len(values) != len(rows):
                raise ValueError(
                    f"log_extra({name!r}, ...) got {len(values)} values; log one a response, {len(rows)}, once"
                )
            for row, value in zip(rows, values, strict=True):
                row[name] = value

    def _by_turn(self, lists: Sequence[Any]) -> list[Any]:
        """Each response's rewards, of its calls, as a list of these for each turn; with the last turn also what came
        after it, as from ``get_reward``. Anything but a list stays, for the method to refuse."""
        split = []
        for place, given in enumerate(lists):
            if isinstance(given, list | None):
                mask = None if self._tool_mask is None else np.array(self._tool_mask[place])
                before = [counts[place] for counts in self._calls[: 1 if mask is None else max(1, len(runs(mask)))]]
                rewards = given or []
                given = [rewards[start:end] for start, end in pairwise([*before, len(rewards)])]
            split.append(given)
        return split

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's generation batch (line 2324); in training with ``advantages`` (B, T)."""
        if self._dump is not None and self.model.training:
            self._dump.finish_receipt()
        inputs = [dict(row) for row in inputs]  # which get fields of the responses
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            output["advantages"] = self._weighted_advantages(inputs, output)
        return output

    def _weighted_advantages(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> torch.Tensor:
        """Token advantages (B, T), 0 outside the response. A collective where there are several processes."""
        started, signal = time.perf_counter(), self.signal
        rollouts = self._rollouts(inputs, output)
        first, count = rollouts.places[0], len(inputs)
        if not signal.uses:
            # Without a pass it costs nothing to look at the batch of all processes, which some methods compare.
            read = self._host(rollouts).columns([name for name in DUMPED if name in signal.reads])
            rollouts = self._of_all_processes(replace(rollouts, columns={**rollouts.columns, **read}))
        w = weigh(self._host(rollouts), signal, self._answers)
        if not signal.uses:
            w = w.part(range(first, first + count))
        self._log({**w.metrics, "seconds": time.perf_counter() - started})
        advantages = torch.zeros(output["completion_mask"].shape, dtype=output["advantages"].dtype)
        advantages[:, : w.advantages.shape[1]] = w.advantages
        advantages = advantages.to(output["advantages"].device)
        if self._dump is not None:
            self._dump.write(w, output, advantages)
        return advantages

    def _rollouts(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> Rollouts:
        """The responses of this process."""
        output = {name: values.cpu() if isinstance(values, torch.Tensor) else values for name, values in output.items()}
        ids, mask = output["completion_ids"], output["completion_mask"].bool()
        padding = self.processing_class.pad_token_id
        # A response that TRL's mask_truncated_completions masks ends in no padding token, or TRL would not call it
        # truncated.
        there = torch.where(mask.any(dim=1, keepdim=True), mask, ids != padding)
        lengths = torch.where(there, torch.arange(1, mask.shape[1] + 1), 0).amax(dim=1)
        width, count = int(lengths.max()), len(inputs)
        written = torch.arange(width) < lengths[:, None]
        for row, tool_mask in zip(written, self._tool_mask or (), strict=False):
            row[: len(tool_mask)] &= torch.tensor(tool_mask, dtype=torch.bool)
        ended = torch.isin(
            ids.gather(1, (lengths - 1).clamp(min=0)[:, None]), torch.tensor([*self.eos_token_ids, padding])
        )
        places = self.accelerator.process_index * count + torch.arange(count)
        sums, scored = (reward_sums(of.cpu(), self.reward_weights.cpu()) for of in (self._rewards, self._scored))
        apart = self.multi_objective_aggregation == "normalize_then_sum"
        equal = in_equal_group(self._rewards.cpu() if apart else sums, self.num_generations)[places]
        old = output.get("old_per_token_logps")
        return Rollouts(
            prompts=[of[use] for of, use in zip(output["prompt_ids"], output["prompt_mask"].bool(), strict=True)],
            responses=[of[:length] for of, length in zip(ids, lengths, strict=True)],
            mask=mask[:, :width] & written,
            advantages=output["advantages"].masked_fill(equal, 0.0).masked_fill(sums[places].isnan(), torch.nan),
            tokenizer=self.processing_class,
            answer=self.answer,
            written=written,
            truncated=~ended[:, 0],  # by TRL's test
            groups=places // self.num_generations,
            rewards=sums[places].double(),
            examples=self._examples(inputs) if "examples" in self.signal.reads else None,
            fields={name: [row.get(name) for row in inputs] for name in self.signal.field_names},
            columns={} if old is None else {OLD_LOG_PROBS: old[:, :width].float()},
            places=places.tolist(),
            facts=self._dump.facts(inputs, scored[places]) if self._dump is not None else {},
            mean=partial(loss_mean, self.loss_type, self.max_completion_length),
            step=self.state.global_step,
        )

    def _examples(self, inputs: list[dict[str, Any]]) -> list[Example]:
        """Each response's prompt and the other columns of its data set."""
        if any(isinstance(row["prompt"], str) for row in inputs):
            raise ValueError(
                f"token_weights={self.signal.name!r} asks again in other words, for which train_dataset's prompt must "
                "be a list of messages"
            )
        return [
            Example(row["prompt"], {name: row[name] for name in row if name != "prompt"}, self.chat_template_kwargs)
            for row in inputs
        ]

    def _host(self, rollouts: Rollouts) -> PlainHost:
        """Responses with the model, and not DDP's module, which would wait for gradients of parameters in a
        backward."""
        return PlainHost(
            self.accelerator.unwrap_model(self.model),
            rollouts,
            temperature=self.temperature,
            # Those of an update's micro-batch, which also holds gradients of parameters and all logits.
            tokens=self.args.per_device_train_batch_size * rollouts.padded_length,
            device=self.accelerator.device,
        )

    def _of_all_processes(self, rollouts: Rollouts) -> Rollouts:
        """The responses of all processes, process by process."""
        if self.accelerator.num_processes == 1:
            return rollouts
        return replace(joined(gather_object([rollouts.part(range(len(rollouts)))])), tokenizer=self.processing_class)

    def _total(self, counts: Sequence[int]) -> Sequence[int]:
        """Counts of all processes; without a pass each counts the responses of all already."""
        own = torch.tensor(counts, device=self.accelerator.device)
        total: list[int] = (self.accelerator.reduce(own, "sum") if self.signal.uses else own).tolist()
        return total

    def _log(self, figures: Mapping[str, float]) -> None:
        """Put figures into TRL's logs, as means over the processes that have them. They go into ``_metrics`` (line
        1080), as ``Trainer.log`` would make an entry of its own, and ``log_metric`` keeps a value until the next
        generation."""
        own = torch.tensor([figures.get(name, torch.nan) for name in FIGURES], device=self.accelerator.device)
        means = self.accelerator.gather(own).view(-1, len(FIGURES)).nanmean(dim=0)
        for name, value in zip(FIGURES, means.tolist(), strict=True):
            if value == value:  # NaN: no process has it
                self._metrics["train"][f"{self.signal.name}/{name}"].append(value)

    # -------------------------------------------------------------------------------------------------------- an update

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """TRL's loss (line 3020); in training without the zero-advantage responses, where that is asked for."""
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        if inputs["advantages"].ndim == 1:
            raise RuntimeError(f"trl {trl.__version__} gave its loss other advantages than the weighted ones")
        kept, share = inputs, 1.0
        if self._skips_zero_advantage:
            if not self._neighbours_checked:
                check_neighbours(self, model, inputs)
                self._neighbours_checked = True
            kept, share = rows_that_train(inputs, self.loss_type)
        with self._dump.micro_batch(inputs, kept) if self._dump is not None else nullcontext():
            return super()._compute_loss(model, kept) * share

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        """TRL's (line 1419); within the loss the receipt sees the log-probabilities."""
        result = super()._get_per_token_logps_and_entropies(*arguments, **named)
        if self._dump is not None:
            self._dump.see(result[0])
        return result


def rows_that_train(inputs: Mapping[str, Any], loss_type: str) -> tuple[dict[str, Any], float]:
    """A micro-batch without the responses whose token advantages are all 0, and what its loss is to be multiplied by.

    Such a response adds 0 to the sum of ``_compute_loss`` and counts in what this is divided by (lines 3151 to 3171):
    the number of responses, or with ``bnpo`` their tokens. ``cispo`` and ``dapo`` divide by ``num_items_in_batch``,
    that of the whole generation batch. One response always stays, as the processes' backwards wait for each other.

    Can go when TRL leaves them out itself (huggingface/trl#3130): when
    ``test_the_update_is_the_same_without_zero_advantage_responses`` passes without it.
    """
    mask = loss_mask(inputs)
    trains = (inputs["advantages"] * mask != 0).any(dim=1)
    if not trains.any():
        trains[0] = True
    kept = {name: values[trains] if getattr(values, "ndim", 0) else values for name, values in inputs.items()}
    if loss_type in ("cispo", "dapo"):
        return kept, 1.0
    if loss_type == "bnpo":
        return kept, int(loss_mask(kept).sum().clamp(min=1)) / int(mask.sum().clamp(min=1))
    return kept, int(trains.sum()) / len(trains)


def reward_sums(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The responses' rewards (B,) as TRL sums its functions' (B, F) by ``reward_weights`` (line 2763); NaN for a
    response that none of them scored."""
    sums = (rewards * weights.to(rewards.device)).nansum(dim=1)
    return torch.where(rewards.isnan().all(dim=1), torch.nan, sums)


def in_equal_group(rewards: torch.Tensor, generations: int) -> torch.Tensor:
    """bool (B,): the rewards of the response's group are equal, to rounding of a sum in float32 and NaN left out. TRL
    takes their mean off (lines 2785 and 2794), and what rounding leaves of three rewards of 0.7 is an advantage of
    6e-4.

    Args:
        rewards: (B,) sums of the reward functions, or (B, F) where TRL takes off the mean of each function.
        generations: responses of a group.
    """
    groups = rewards.reshape(len(rewards) // generations, generations, -1)
    most, least = groups.nan_to_num(-torch.inf).amax(dim=1), groups.nan_to_num(torch.inf).amin(dim=1)
    equal = most - least <= 2**-22 * torch.maximum(most.abs(), least.abs())
    return equal.all(dim=1).repeat_interleave(generations)


def loss_mean(loss_type: str, most_tokens: int, values: torch.Tensor, mask: torch.Tensor) -> float:
    """A mean of (B, T) over the batch as TRL's ``loss_type`` takes it, ``most_tokens`` being
    ``max_completion_length``."""
    kept = torch.where(mask, values, 0.0).double()
    if loss_type in ("grpo", "sapo"):
        return float((kept.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean())
    if loss_type == "dr_grpo":
        return float(kept.sum() / (len(kept) * most_tokens))
    return token_mean(values, mask)
