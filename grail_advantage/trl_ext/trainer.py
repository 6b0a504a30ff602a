"""TRL's GRPO trainer with token weights: ``A_t = w_t A`` with A the advantage that TRL computed for the response.

TRL calls ``_generate_and_score_completions`` once a generation batch (see :mod:`grail_advantage.trl_ext.patches`); then it
shuffles the batch, splits it over ``steps_per_generation`` and uses it ``num_iterations`` times. So the weights are those of
the policy that wrote the responses.

Shape suffixes: B responses of this process, T response tokens, L prompt + response.
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
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate.utils import gather_object
from transformers.trainer_utils import SaveStrategy
from trl import GRPOTrainer

from grail_advantage.answers.format import BOXED, AnswerFormat, answer_format
from grail_advantage.answers.missing import CHOICES, AnswerCheck
from grail_advantage.api import PlainHost
from grail_advantage.data import DUMPED, OLD_LOG_PROBS, Example, Rollouts, joined, token_mean, within_range
from grail_advantage.dump.folder_lock import hold, let_go
from grail_advantage.method import Method, build
from grail_advantage.metrics import GRADIENT_METRICS, METRICS
from grail_advantage.trl_ext.checks import (
    check_arguments,
    check_neighbours,
    check_prompt,
    check_skipping,
    check_trainer,
    check_trl,
)
from grail_advantage.trl_ext.dump import WHERE, GenerationDump, dump_options
from grail_advantage.trl_ext.fields import CallRewards, fill_in
from grail_advantage.trl_ext.patches import (
    TOOL_MASK,
    in_equal_group,
    log_in_training,
    logged_columns,
    reward_sums,
    rows_that_train,
    written_lengths,
)
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
        token_dump: a folder for every token's score, weight and advantage, or a mapping of ``folder``, ``every`` (steps from
            one dump to the next, 1), ``responses`` (of a step at most, 64; None: all) and ``received`` (True: also what each
            token received in the updates, docs/receipt.md). See docs/token_dump.md.
        skip_zero_advantage: leave responses whose token advantages are all 0 out of the loss's forward and backward. The update
            is the same but for rounding where the first micro-batch finds the model's responses independent of each other;
            training ends there otherwise. TRL's figures of entropy and clipping are then those of the others.
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
        check_trl(GRPOTrainer, trl.__version__)
        if isinstance(token_weights, str):
            token_weights = build(token_weights, token_weight_options)
        elif token_weight_options:
            raise ValueError(
                "token_weight_options are for a method given by its name; put them into token_weights itself"
            )
        self.signal = token_weights
        self.answer = answer_format(answer)
        self._skips_zero_advantage, self._neighbours_checked = skip_zero_advantage, False
        self._answers = AnswerCheck(self.signal, self.answer, missing_answers, total=self._total)
        dumping = None if token_dump is None else dump_options(token_dump)
        self._dump: GenerationDump | None = None
        self._tool_mask: list[list[int]] | None = None
        self._call_rewards = CallRewards(self.signal)
        given = inspect.signature(GRPOTrainer.__init__).bind(self, *arguments, **named).arguments
        check_arguments(given, self.signal)
        super().__init__(*arguments, **named)
        check_trainer(self, self.signal)
        if skip_zero_advantage:
            check_skipping(self)
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
        try:
            for folder, name in folders.items():
                hold(folder, "choose another", name)
            return super().train(*arguments, **named)
        finally:
            for folder in folders:
                let_go(folder)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """TRL's, which tells which tokens the model wrote; ``tool_mask`` of its batch does not for a response that
        ``mask_truncated_completions`` masks."""
        self._call_rewards.begin()
        generated = super()._generate(prompts)
        self._tool_mask = generated[TOOL_MASK]
        return generated

    def _generate_single_turn(self, *arguments: Any, **named: Any) -> Any:
        """TRL's next turn of some responses; the environments' rewards until now are those of turns before."""
        self._call_rewards.look(self.environments)
        return super()._generate_single_turn(*arguments, **named)

    def _calculate_rewards(self, inputs: list[dict[str, Any]], *arguments: Any, **named: Any) -> torch.Tensor:
        """TRL's rewards of all processes, kept for the method and the dump; fields of the responses go into ``inputs``.

        In training a reward that is not finite or too large becomes NaN with every reward function: so TRL compares no other
        response with it and gives its own the advantage 0, where it would make numbers near float32's end of the infinities.
        """
        rewards = super()._calculate_rewards(inputs, *arguments, **named)
        if self._dump is not None:
            self._dump.rewards = rewards
        if not self.model.training:
            return rewards
        fill_in(inputs, self.signal, logged_columns(self), self.environments, self._call_rewards, self._tool_mask)
        usable_B = (within_range(rewards) | rewards.isnan()).all(dim=1)
        unjudged_B = ~(usable_B & within_range(reward_sums(rewards, self.reward_weights)))
        if unjudged_B.any():
            logger.warning(
                "step %d: %d of %d responses, such as response %d, have no finite reward, or one that is too large. They train "
                "nothing, and the other responses to their prompts are compared without them. Fix the reward functions",
                self.state.global_step,
                int(unjudged_B.sum()),
                len(rewards),
                int(unjudged_B.int().argmax()),
            )
        self._rewards = torch.where(unjudged_B.unsqueeze(1), torch.nan, rewards)
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's generation batch; in training with ``advantages`` (B, T)."""
        if self._dump is not None and self.model.training:
            self._dump.finish_receipt()
        inputs = [dict(row) for row in inputs]  # which get fields of the responses
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            output["advantages"] = self._weighted_advantages(inputs, output)
        return output

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """TRL's loss; in training without the zero-advantage responses, where that is asked for."""
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        kept, share = inputs, 1.0
        if self._skips_zero_advantage:
            if not self._neighbours_checked:
                check_neighbours(self, model, inputs)
                self._neighbours_checked = True
            kept, share = rows_that_train(inputs, self.loss_type)
        with self._dump.receipt.micro_batch(inputs, kept) if self._dump is not None else nullcontext():
            return super()._compute_loss(model, kept) * share

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        """TRL's; within the loss the dump's receipt sees the log-probabilities."""
        result = super()._get_per_token_logps_and_entropies(*arguments, **named)
        if self._dump is not None:
            self._dump.receipt.see(result[0])
        return result

    def _weighted_advantages(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> torch.Tensor:
        """Token advantages (B, T), 0 outside the response. A collective where there are several processes."""
        started, signal = time.perf_counter(), self.signal
        rollouts = self._rollouts(inputs, output)
        first, count = rollouts.places[0], len(inputs)
        if not signal.uses:
            # Without a pass it costs nothing to look at the batch of all processes, which some methods compare.
            read = self._host(rollouts).columns([name for name in DUMPED if name in signal.reads])
            rollouts = self._of_all_processes(replace(rollouts, columns={**rollouts.columns, **read}))
        record = weigh(self._host(rollouts), signal, self._answers)
        if not signal.uses:
            record = record.part(range(first, first + count))
        self._log_figures({**record.metrics, "seconds": time.perf_counter() - started})
        advantages_BT = torch.zeros(output["completion_mask"].shape, dtype=output["advantages"].dtype)
        advantages_BT[:, : record.advantages.shape[1]] = record.advantages
        advantages_BT = advantages_BT.to(output["advantages"].device)
        if self._dump is not None:
            self._dump.write(record, output, advantages_BT)
        return advantages_BT

    def _rollouts(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> Rollouts:
        """The responses of this process."""
        output = {name: values.cpu() if isinstance(values, torch.Tensor) else values for name, values in output.items()}
        signal, ids_BT, mask_BT = self.signal, output["completion_ids"], output["completion_mask"].bool()
        lengths = written_lengths(ids_BT, mask_BT, self.processing_class.pad_token_id).tolist()
        width, count = max(lengths, default=0), len(inputs)
        first = self.accelerator.process_index * count
        places_B = torch.arange(first, first + count)
        written_BT = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
        for written_T, tool_mask_T in zip(written_BT, self._tool_mask or (), strict=False):
            written_T[: len(tool_mask_T)] &= torch.tensor(tool_mask_T, dtype=torch.bool)
        known = {OLD_LOG_PROBS: output.get("old_per_token_logps")}
        sums = reward_sums(self._rewards, self.reward_weights).cpu()
        apart = self.multi_objective_aggregation == "normalize_then_sum"
        equal = in_equal_group(self._rewards.cpu() if apart else sums, self.num_generations)
        rewards_B, equal_B = sums[places_B], equal[places_B]
        prompts = zip(output["prompt_ids"], output["prompt_mask"].bool(), strict=True)
        return Rollouts(
            prompts=[ids_P[mask_P] for ids_P, mask_P in prompts],
            responses=[ids_T[:length] for ids_T, length in zip(ids_BT, lengths, strict=True)],
            mask=mask_BT[:, :width] & written_BT,
            advantages=output["advantages"].masked_fill(equal_B, 0.0).masked_fill(rewards_B.isnan(), torch.nan),
            tokenizer=self.processing_class,
            answer=self.answer,
            written=written_BT,
            truncated=self._truncated(ids_BT, lengths),
            groups=places_B // self.num_generations,
            rewards=rewards_B.double(),
            examples=self._examples(inputs) if "examples" in signal.reads else None,
            fields={name: [row.get(name) for row in inputs] for name in signal.field_names},
            columns={name: values_BT[:, :width].float() for name, values_BT in known.items() if values_BT is not None},
            places=places_B.tolist(),
            facts=self._dump.facts(inputs, places_B) if self._dump is not None else {},
            mean=partial(loss_mean, self.loss_type, self.max_completion_length),
            step=self.state.global_step,
        )

    def _host(self, rollouts: Rollouts) -> PlainHost:
        """Responses with the model, and not DDP's module, which would wait for gradients of parameters in a backward."""
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

    def _truncated(self, completions_BT: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Responses that ended without an end token, by TRL's test."""
        ends = torch.tensor([*self.eos_token_ids, self.processing_class.pad_token_id])
        last_B1 = torch.tensor(lengths).sub(1).clamp(min=0).unsqueeze(1)
        return ~torch.isin(completions_BT.gather(1, last_B1).squeeze(1), ends)

    def _examples(self, inputs: list[dict[str, Any]]) -> list[Example]:
        """Each response's prompt and the other columns of its data set."""
        for row in inputs:
            check_prompt(row["prompt"], self.signal)
        return [
            Example(row["prompt"], {name: row[name] for name in row if name != "prompt"}, self.chat_template_kwargs)
            for row in inputs
        ]

    def _log_figures(self, figures: Mapping[str, float]) -> None:
        """Put figures into TRL's logs, as means over the processes that have them."""
        own = torch.tensor([figures.get(name, torch.nan) for name in FIGURES], device=self.accelerator.device)
        means = self.accelerator.gather(own).view(-1, len(FIGURES)).nanmean(dim=0)
        for name, value in zip(FIGURES, means.tolist(), strict=True):
            if value == value:  # NaN: no process has it
                log_in_training(self, f"{self.signal.name}/{name}", value)


def loss_mean(loss_type: str, most_tokens: int, values_BT: torch.Tensor, mask_BT: torch.Tensor) -> float:
    """A mean over the batch as TRL's ``loss_type`` takes it, ``most_tokens`` being ``max_completion_length``."""
    kept_BT = torch.where(mask_BT, values_BT, 0.0).double()
    if loss_type in ("grpo", "sapo"):
        return float((kept_BT.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)).mean())
    if loss_type == "dr_grpo":
        return float(kept_BT.sum() / (len(kept_BT) * most_tokens))
    return token_mean(values_BT, mask_BT)
