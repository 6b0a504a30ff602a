"""TRL's GRPO trainer with token weights: ``A_t = w_t A`` with A the advantage that TRL computed for the response.
TRL calls ``_generate_and_score_completions`` once a generation batch, which it then shuffles, splits and uses
``num_iterations`` times: the weights are those of the policy that wrote the responses. Its loss takes advantages (B, T)
from subclasses (grpo_trainer.py:3055, huggingface/trl#4525). Nothing is replaced; lines are those of TRL 1.16.0."""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
import trl
from accelerate.utils import send_to_device
from datasets import Dataset
from torch import Tensor, nn
from torch.nn.functional import pad
from trl import GRPOTrainer

from grail_advantage.answers.format import BOXED, AnswerFormat, answer_format
from grail_advantage.answers.missing import CHOICES, LOOKED_AT, AnswerCheck
from grail_advantage.data import (
    OLD_LOG_PROBS,
    REF_LOG_PROBS,
    Example,
    Rollouts,
    runs,
    token_mean,
    within_range,
)
from grail_advantage.dump import DumpOptions
from grail_advantage.method import BaseMethod, build
from grail_advantage.methods.sessions import TurnMethod
from grail_advantage.processes import WeighingProcess
from grail_advantage.trl_ext.dump import GenerationDump, loss_mask
from grail_advantage.trl_ext.rules import check_neighbours, check_trainer, check_version

logger = logging.getLogger(__name__)

GIVEN = {
    OLD_LOG_PROBS: "old_per_token_logps",
    REF_LOG_PROBS: "ref_per_token_logps",
}  # columns, by TRL's names


class TokenWeightGRPOTrainer(WeighingProcess, GRPOTrainer):
    """``GRPOTrainer`` whose advantages are a method's token weights times the response's advantage.

    Only training is weighted; in evaluation the advantages are TRL's.

    Args:
        token_weights: a registered method by its name, or a method with its options such as ``Grail("robust")``.
        token_weight_options: options of a method that is given by its name.
        answer: the format of answers, as for :func:`grail_advantage.compute_token_weights`.
        missing_answers: ``stop``, ``warn`` or ``ignore`` where responses lack one (:mod:`grail_advantage.answers.missing`).
        token_dump: a folder for every token's score, weight and advantage, or a mapping of ``folder``, ``every`` (steps
            from one dump to the next, 1), ``responses`` (of a step at most, 64; None: all) and ``received`` (True: also
            what each token received in the updates, docs/receipt.md). See docs/token_dump.md.
        skip_zero_advantage: leave responses whose token advantages are all 0 out of the loss's forward and backward.
            The update is the same but for rounding: a model in which a response depends on others, or that draws at
            random, is refused before the first. TRL's figures of entropy and clipping are then those of the others.
        *arguments, **named: as for ``GRPOTrainer``.

    Raises:
        ValueError: an unknown method or option, or one that token weights do not work with; with the remedy.
    """

    def __init__(
        self,
        *arguments: Any,
        token_weights: str | BaseMethod = "grail",
        token_weight_options: Mapping[str, Any] | None = None,
        answer: str | AnswerFormat = BOXED,
        missing_answers: str = CHOICES[0],
        token_dump: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        skip_zero_advantage: bool = False,
        **named: Any,
    ) -> None:
        # A method by its name has its options beside it.
        if isinstance(token_weights, str):
            token_weights = build(token_weights, token_weight_options)
        elif token_weight_options:
            raise ValueError(
                "token_weight_options are for a method given by its name; put them into token_weights"
            )
        self.method = token_weights
        self.answer = answer_format(answer)
        self._skips = skip_zero_advantage
        self._asked = False
        self._answers = AnswerCheck(self.method, self.answer, missing_answers, total=self._total)
        # A wrong option ends here, before TRL loads the model.
        dumping = None
        if token_dump is not None:
            section = token_dump if isinstance(token_dump, Mapping) else {"folder": token_dump}
            dumping = DumpOptions.of_section("token_dump", section)
        # Of the latest generation; None without tools.
        self._tool_mask: list[list[int]] | None = None
        self.call_rewards = self.method.rewards if isinstance(self.method, TurnMethod) else ""
        self._calls: list[list[int]] = []  # before each turn, how many rewards each environment has
        self._micro_batch: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
        check_version(trl.__version__)
        super().__init__(*arguments, **named)
        check_trainer(self, self.method, skip_zero_advantage)
        if isinstance(self.train_dataset, Dataset):
            self._answers.look_at_data(list(islice(self.train_dataset, LOOKED_AT)), "train_dataset")
        self._dump = None if dumping is None else GenerationDump(self, dumping, self._host)

    def train(self, *arguments: Any, **named: Any) -> Any:
        """TRL's; whatever happens in it, the dump and the receipt of what was made are written."""
        with ExitStack() as ending:
            if self._dump is not None:
                ending.push(self._dump.finish)
            return super().train(*arguments, **named)

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
        if self.call_rewards:
            rewards = [
                getattr(environment, self.call_rewards, None)
                for environment in self.environments or ()
            ]
            self._calls.append([len(value) if isinstance(value, list) else 0 for value in rewards])
        return super()._generate_single_turn(*arguments, **named)

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], *arguments: Any, **named: Any
    ) -> Tensor:
        """TRL's rewards of all processes (line 1579); fields of the responses go into ``inputs``. In training a reward
        that is not finite or too large becomes NaN with every reward function: TRL compares no other response with it
        then, and gives its own the advantage 0."""
        rewards = super()._calculate_rewards(inputs, *arguments, **named)
        if not self.model.training:
            return rewards
        for name in self.method.field_names:
            for row, value in zip(inputs, self._field(name, inputs), strict=True):
                row[name] = value
        # As TRL's (line 2763)
        sums = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        # nansum() of no reward is 0, which would pass for one.
        sums = torch.where(rewards.isnan().all(dim=1), torch.nan, sums)
        unjudged = ~((within_range(rewards) | rewards.isnan()).all(dim=1) & within_range(sums))
        if unjudged.any():
            logger.warning(
                "%d responses train nothing: a reward is not finite or too large",
                int(unjudged.sum()),
            )
        self.reward_sums = sums.cpu()
        self._unjudged = unjudged.cpu()
        return torch.where(unjudged[:, None], torch.nan, rewards)

    def _field(self, name: str, rows: list[dict[str, Any]]) -> Sequence[Any]:
        """A field that the method reads, one value a response: what a reward function logs with ``log_extra``, which is
        in ``_pending_extra_logs`` until it comes into the table of completions (line 1563), else the environment's
        attribute, else the column of the data or of what ``rollout_func`` returns (line 2741). ValueError: it is
        nowhere, or not one value a response."""
        environments = self.environments or ()
        if name in self._pending_extra_logs:
            values: Sequence[Any] = self._pending_extra_logs[name]
            if len(values) != len(rows):
                raise ValueError(
                    f"log_extra({name!r}, ...) got {len(values)} values; log one a response, {len(rows)}"
                )
            return values
        # An environment that lacks it gives None.
        if any(hasattr(environment, name) for environment in environments):
            values = [getattr(environment, name, None) for environment in environments]
            if name == self.call_rewards:
                values = list(map(self._by_turn, range(len(rows)), values))
            return values
        if not any(name in row for row in rows):
            raise ValueError(
                f"token_weights={self.method.name!r} reads the field {name!r}, which is nowhere: call log_extra({name!r}, "
                f"values) in a reward function, or give the environment the attribute, or the data the column {name}"
            )
        return [row.get(name) for row in rows]

    def _by_turn(self, place: int, rewards: Any) -> Any:
        """A response's rewards, of its calls, as a list of these for each turn; with the last turn also what came after
        it, as from ``get_reward``. Anything but a list stays, for the method to refuse."""
        if not isinstance(rewards, list | None):
            return rewards
        turns = 1
        if self._tool_mask is not None:  # without tools TRL has no mask, and a response is one turn
            turns = max(1, len(runs(np.array(self._tool_mask[place]))))
        # 0 and 2 rewards before its two turns, and 3 in the end: [r0, r1] and [r2].
        starts = [counts[place] for counts in self._calls[:turns]]
        rewards = rewards or []
        return [rewards[start:end] for start, end in pairwise([*starts, len(rewards)])]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's generation batch (line 2324); in training with ``advantages`` (B, T)."""
        if self._dump is not None and self.model.training:
            self._dump.finish_receipt()
        inputs = [dict(row) for row in inputs]  # which get fields of the responses
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            output["advantages"] = self._weighted_advantages(inputs, output)
        return output

    def _weighted_advantages(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> Tensor:
        """Token advantages (B, T), 0 outside the response. A collective where there are several processes."""
        started = time.perf_counter()
        w = self._weigh(self._rollouts(inputs, output))
        self._log({**w.metrics, "seconds": time.perf_counter() - started})
        # Weights are as wide as the longest response, TRL's batch may be wider.
        right = output["completion_mask"].shape[1] - w.advantages.shape[1]
        advantages = pad(w.advantages, (0, right)).to(output["advantages"])
        if self._dump is not None:
            self._dump.write(w, inputs, output, advantages)
        return advantages

    def _rollouts(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> Rollouts:
        """The responses of this process."""
        output = send_to_device(output, "cpu")
        ids = output["completion_ids"]
        mask = output["completion_mask"].bool()
        padding = self.processing_class.pad_token_id
        lengths = written_lengths(ids, mask, padding)
        is_response = torch.arange(ids.shape[1]) < lengths[:, None]
        written = is_response.clone()
        # Without tools there is no mask, and the model wrote all of it.
        for row, tool_mask in zip(written, self._tool_mask or (), strict=False):
            row[: len(tool_mask)] &= torch.tensor(tool_mask, dtype=torch.bool)
        last = ids.gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0]
        count = len(inputs)
        # TRL's rewards are of all processes, of which this one has a part.
        places = self.accelerator.process_index * count + torch.arange(count)
        unjudged = self._unjudged[places]
        rewards = self.reward_sums[places].masked_fill(unjudged, torch.nan).double()
        if "examples" in self.method.reads and any(
            isinstance(row.get("prompt"), str) for row in inputs
        ):
            raise ValueError(
                f"token_weights={self.method.name!r} needs train_dataset's prompts as lists of messages"
            )
        examples = []
        for row in inputs:
            columns = {name: value for name, value in row.items() if name != "prompt"}
            examples.append(Example(row.get("prompt", []), columns, self.chat_template_kwargs))
        prompt_mask = output["prompt_mask"].bool()

        def beside_prompts(values: Tensor) -> Tensor:
            """(B, T) as (B, L), 0 in the prompts."""
            return pad(values, (prompt_mask.shape[1], 0))

        return Rollouts.from_padded(
            torch.cat([output["prompt_ids"], ids], dim=1),
            torch.cat([prompt_mask, is_response], dim=1),
            beside_prompts(is_response),
            written=beside_prompts(written),
            mask=beside_prompts(mask & written),
            columns={
                name: beside_prompts(output[key].float())
                for name, key in GIVEN.items()
                if output.get(key) is not None
            },
            advantages=output["advantages"].masked_fill(unjudged, torch.nan),
            tokenizer=self.processing_class,
            answer=self.answer,
            # By TRL's test
            truncated=~torch.isin(last, torch.tensor([*self.eos_token_ids, padding])),
            groups=places // self.num_generations,
            rewards=rewards,
            examples=examples,
            fields={name: [row.get(name) for row in inputs] for name in self.method.field_names},
            places=places.tolist(),
            mean=partial(loss_mean, self.loss_type, self.max_completion_length),
            step=self.state.global_step,
        )

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss (line 3020); in training without the zero-advantage responses, where that is asked for."""
        # Evaluation has TRL's own advantages.
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        # Of a later TRL: better no training than one without weights that looks like one with them.
        if inputs["advantages"].ndim == 1:
            raise RuntimeError(
                f"trl {trl.__version__} gave its loss other advantages than the weighted ones"
            )
        if self._skips and not self._asked:
            check_neighbours(self, model, inputs)
            self._asked = True
        trained: Mapping[str, Any] = inputs
        share = 1.0
        if self._skips:
            trained, share = rows_that_train(inputs, self.loss_type, self._largest)
        # Within the loss alone: TRL's forward gives old and reference log-probabilities, too.
        self._micro_batch = inputs, trained
        loss = super()._compute_loss(model, trained) * share
        self._micro_batch = None
        return loss

    def _largest(self, count: Tensor) -> int:
        """The largest of the processes' counts. A collective."""
        return int(self.accelerator.gather(count.to(self.accelerator.device)).max())

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        """TRL's (line 1419); within the loss the receipt sees the log-probabilities."""
        result = super()._get_per_token_logps_and_entropies(*arguments, **named)
        if self._dump is not None and self._micro_batch is not None:
            self._dump.see(result[0], *self._micro_batch)
        return result


def written_lengths(ids: Tensor, mask: Tensor, padding: int) -> Tensor:
    """Tokens of each response (B,), by ids and mask (B, T). One that ``mask_truncated_completions`` masks whole ends in
    no padding token, or TRL would not call it truncated."""
    written = torch.where(mask.any(dim=1, keepdim=True), mask, ids != padding)
    return torch.where(written, torch.arange(1, mask.shape[1] + 1), 0).amax(dim=1)


def rows_that_train(
    inputs: Mapping[str, Any], loss_type: str, largest: Callable[[Tensor], int]
) -> tuple[dict[str, Any], float]:
    """A micro-batch without the responses whose token advantages are all 0, and what its loss is to be multiplied by.

    Such a response adds 0 to the sum of ``_compute_loss`` and counts in what this is divided by (lines 3151 to 3171):
    the number of responses, or with ``bnpo`` their tokens. ``cispo`` and ``dapo`` divide by ``num_items_in_batch``,
    that of the whole generation batch. One response always stays, as processes wait for each other's backward; and as
    many as on the others, whose clipping figures TRL gathers one a response (line 3280): ``largest`` of the counts.

    Can go when TRL leaves them out itself (huggingface/trl#3130): when
    ``test_the_update_is_the_same_without_zero_advantage_responses`` passes without it.
    """
    mask = loss_mask(inputs)
    trains = (inputs["advantages"] * mask != 0).any(dim=1)
    # Those that train come first; behind them, others fill up to the other processes' number.
    order = trains.int().argsort(descending=True, stable=True)
    trains[order[: max(1, largest(trains.sum()))]] = True
    trained = {}
    for name, values in inputs.items():
        # A single number, such as num_items_in_batch, is of the whole batch.
        trained[name] = values[trains] if getattr(values, "ndim", 0) else values
    # Its divisor does not depend on the micro-batch.
    if loss_type in ("cispo", "dapo"):
        return trained, 1.0
    if loss_type == "bnpo":
        return trained, int(loss_mask(trained).sum().clamp(min=1)) / int(mask.sum().clamp(min=1))
    return trained, int(trains.sum()) / len(trains)


def loss_mean(loss_type: str, most_tokens: int, values: Tensor, mask: Tensor) -> float:
    """A mean of (B, T) over the batch as TRL's ``loss_type`` takes it, ``most_tokens`` being
    ``max_completion_length``."""
    masked = torch.where(mask, values, 0.0).double()
    # The mean over each response, and then over these.
    if loss_type in ("grpo", "sapo"):
        return float((masked.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean())
    if loss_type == "dr_grpo":
        return float(masked.sum() / (len(masked) * most_tokens))
    return token_mean(values, mask)
