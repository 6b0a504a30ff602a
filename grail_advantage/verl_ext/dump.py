"""What the trainer writes into the token dump (:mod:`grail_advantage.token_dump`) of each update's batch.

verl's own rollout dump (``trainer.rollout_data_dir``, ``PPOTrainer._log_rollout_data``) names the same rows by the same keys,
in its column ``uid``.

Shape suffixes: B rows, T response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase
from verl.utils import tensordict_utils as tu

from grail_advantage import __version__
from grail_advantage.answer_span import AnswerSpan
from grail_advantage.batch import ENTROPY, OLD_LOG_PROBS
from grail_advantage.signals.base import RowSelection, Signal
from grail_advantage.token_dump import DumpHeader, DumpRow, TokenDumpWriter, TokenTexts, answer_text
from grail_advantage.verl_ext.settings import DUMP_FOLDER, DumpOptions

BYTES_PER_TOKEN = 27
"""Of a dump on the disk, measured with every column there and as good as random; see docs/token_dump.md."""
FIELDS = ("rm_scores", "reward_model", "extra_fields", "data_source", "extra_info", OLD_LOG_PROBS, ENTROPY)
"""What is fetched from TransferQueue for the written rows; what a run does not have is left out there."""


@dataclass(frozen=True)
class StepRows:
    """A batch as far as a dump reads it. Tensors and lists have one entry a row of the batch."""

    method: str
    signal: Signal
    keys: Sequence[str]
    groups: Sequence[int]
    prompts: Sequence[torch.Tensor]
    responses: Sequence[torch.Tensor]
    spans: Sequence[AnswerSpan | None]
    truncated_B: torch.Tensor
    neutral: Sequence[str | None]
    mask_BT: torch.Tensor
    scores_BT: torch.Tensor
    weights_BT: torch.Tensor
    base_advantages_BT: torch.Tensor
    advantages_BT: torch.Tensor
    rows_in_step: int
    """Without those that only fill it up."""


def neutral_reasons(
    signal: Signal,
    selection: RowSelection,
    *,
    valid_B: torch.Tensor,
    advantages_B: torch.Tensor,
    truncated_B: torch.Tensor,
    non_finite_B: torch.Tensor,
    spans: Sequence[AnswerSpan | None],
) -> list[str | None]:
    """Why each row has no scores of its own; ``None`` where it has. The first reason that holds, in the order below."""
    needs_span = signal.needs_answer or (signal.statistics == "reasoning" and signal.answer_weights is None)

    def reason(row: int) -> str | None:
        if selection.selected_B[row]:
            return "non-finite scores" if non_finite_B[row] else None
        if not valid_B[row]:
            return "no token trains"
        if truncated_B[row] and signal.mask_truncated:
            return "truncated"
        if advantages_B[row] == 0:
            return "advantage 0"
        if needs_span and spans[row] is None:
            return "no answer"
        return "not scored" if selection.inside_gate_B[row] else "outside the gate"

    return [reason(row) for row in range(len(spans))]


def choose_rows(groups: Sequence[int], valid: Sequence[bool], limit: int | None, seed: Sequence[int]) -> list[int]:
    """Which rows of a batch are written: whole groups in an order that the seed gives, as many as fit.

    Args:
        groups: of each row.
        valid: whether a row is one of the run's, and no filling.
        limit: most rows; ``None`` for all. Of a first group that is larger, the first rows.
        seed: step and update; the same choice for the same numbers and groups.

    Returns:
        Rows of the batch, ordered by group and place.
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        if valid[row]:
            members.setdefault(group, []).append(row)
    if limit is None:
        return [row for group in sorted(members) for row in members[group]]
    chosen: dict[int, list[int]] = {}
    room = limit
    for group in np.random.default_rng(list(seed)).permutation(sorted(members)).tolist():
        if len(members[group]) <= room or not chosen:
            chosen[group] = members[group][:room]
            room -= len(chosen[group])
    return [row for group in sorted(chosen) for row in chosen[group]]


def size_estimate(rows: int, tokens: int, files: int) -> str:
    """A line on how large a dump becomes, at most.

    Args:
        rows: of a step.
        tokens: longest response.
        files: steps that are written.
    """
    step = rows * tokens * BYTES_PER_TOKEN
    return (
        f"token dump: {rows} rows a step with up to {tokens} tokens, at most about {step / 1e6:.3g} MB a step and "
        f"{files * step / 1e9:.3g} GB for {files} steps"
    )


class StepDump:
    """Chooses rows, fetches what belongs to them, and hands them to the writer.

    Args:
        options: of ``algorithm.token_dump``.
        tokenizer: the run's.
        model: its path.
        temperature: of the rollouts.
        updates: updates of the actor in a step, which share the rows of a step.

    Raises:
        ValueError: the folder cannot be made.
    """

    def __init__(
        self,
        options: DumpOptions,
        tokenizer: PreTrainedTokenizerBase,
        model: str,
        temperature: float,
        updates: int,
    ) -> None:
        try:
            options.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{DUMP_FOLDER}={options.folder} cannot be made on the driver's machine: {error}; choose another folder"
            ) from error
        self.options = options
        self.writer = TokenDumpWriter(options.folder)
        self._model, self._temperature = model, temperature
        self._tokenizer, self._texts = tokenizer, TokenTexts(tokenizer)
        self._limit = None if options.rows is None else max(1, options.rows // updates)
        self._begun = False

    def choose(self, step: int, update: int, groups: Sequence[int], valid: Sequence[bool]) -> list[int]:
        """The rows to write of this update; none in most steps. The first call of a run clears the way for its steps."""
        if not self._begun:
            self._begun = True
            self.writer.start_at(step)
        if step % self.options.every:
            return []
        return choose_rows(groups, valid, self._limit, (step, update))

    def write(self, step: int, update: int, chosen: Sequence[int], batch: StepRows, fetched: TensorDict) -> None:
        """Have rows written. Everything that the batch's tensors share with the run is copied here.

        Args:
            step: training step.
            update: which of its updates.
            chosen: rows of the batch.
            batch: the whole batch.
            fetched: ``FIELDS`` of the chosen rows, in their order.
        """
        columns = {
            "score": batch.scores_BT,
            "weight": batch.weights_BT,
            "base_advantage": batch.base_advantages_BT,
            "advantage": batch.advantages_BT,
        }
        taken = {name: values[chosen].float().numpy() for name, values in columns.items()}
        mask = batch.mask_BT[chosen].numpy()
        signal = batch.signal

        def make() -> tuple[DumpHeader, list[DumpRow]]:
            known = _known(fetched, len(chosen))
            prompts: dict[int, str] = {}
            rows = []
            for i, row in enumerate(chosen):
                group, response = batch.groups[row], batch.responses[row].numpy()
                length = len(response)
                if group not in prompts:
                    prompts[group] = self._tokenizer.decode(batch.prompts[row].tolist())
                tokens = self._texts(response)
                rows.append(
                    DumpRow(
                        step=step,
                        update=update,
                        row=row,
                        key=batch.keys[row],
                        group=group,
                        prompt=prompts[group],
                        response="".join(tokens),
                        answer=answer_text(tokens, batch.spans[row]),
                        truncated=bool(batch.truncated_B[row]),
                        neutral=batch.neutral[row],
                        span=batch.spans[row],
                        prompt_ids=batch.prompts[row].numpy(),
                        token_ids_T=response,
                        tokens=tokens,
                        mask_T=mask[i, :length],
                        **{f"{name}_T": values[i, :length] for name, values in taken.items()},
                        **known[i],
                    )
                )
            special = self._texts.special_tokens
            seen = {int(token) for row in rows for token in np.unique(row.token_ids_T)}
            return (
                DumpHeader(
                    step=step,
                    update=update,
                    method=batch.method,
                    options=signal.as_dict(),
                    reshaper=getattr(signal, "reshaper", None),
                    model=self._model,
                    temperature=self._temperature,
                    rows_in_step=batch.rows_in_step,
                    special_tokens={token: special[token] for token in sorted(seen) if token in special},
                    written_by=f"grail_advantage {__version__}",
                ),
                rows,
            )

        self.writer.submit(make)


def _known(fetched: TensorDict, count: int) -> list[dict[str, Any]]:
    """What TransferQueue knows of each row, as far as it does, by the names of a dump's row."""
    plain = {
        name: _objects(fetched, name, count) for name in ("reward_model", "extra_fields", "data_source", "extra_info")
    }
    columns = {
        target: [values.detach().float().cpu().numpy().copy() for values in fetched[name].unbind()]
        for target, name in (("old_log_prob_T", OLD_LOG_PROBS), ("entropy_T", ENTROPY))
        if name in fetched.keys()  # noqa: SIM118  # a TensorDict has no `in`
    }
    rewards = (
        [float(values.sum()) for values in fetched["rm_scores"].unbind()]
        if "rm_scores" in fetched.keys()  # noqa: SIM118
        else [None] * count
    )
    known = []
    for row in range(count):
        reward = rewards[row]
        gold = _entry(plain["reward_model"][row], "ground_truth")
        index = _entry(plain["extra_info"][row], "index")
        source = plain["data_source"][row]
        known.append(
            {
                "gold": None if gold is None else str(gold),
                "reward": reward if reward is None or math.isfinite(reward) else None,
                "outcome": _outcome(_entry(plain["extra_fields"][row], "reward_extra_info"), reward),
                "id": f"{source}/{index}" if source is not None and index is not None else None,
                **{target: values[row] for target, values in columns.items()},
            }
        )
    return known


def _objects(fetched: TensorDict, name: str, count: int) -> list[Any]:
    found = tu.get(fetched, name) if name in fetched.keys() else None  # noqa: SIM118
    return [None] * count if found is None else list(found)


def _entry(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


def _outcome(of_judge: Any, reward: float | None) -> str | None:
    """The judge's own ``acc`` where it gives one; else whether the reward is positive."""
    accuracy = _entry(of_judge, "acc")
    if accuracy is None:
        accuracy = reward
    if accuracy is None or not math.isfinite(float(accuracy)):
        return None
    return "right" if float(accuracy) > 0 else "wrong"
