"""The columns of a batch between TransferQueue and the trainer.

TransferQueue holds one value a row and column, under the row's key; the trainer works on tensors of the whole batch.

Shape suffixes: B rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from transformers import PreTrainedTokenizerBase
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_to_nested

from grail_advantage.answers.format import BOXED, AnswerFormat
from grail_advantage.answers.span import AnswerSpan, find_answer_spans
from grail_advantage.batch import ENTROPY, EXAMPLES, FIELD, OLD_LOG_PROBS, Example, field_names
from grail_advantage.signals.base import Signal
from grail_advantage.verl_ext.shared_forward import LEAF, SALIENCY_FIELDS, SECONDS, TARGET
from grail_advantage.verl_ext.wire import nested


@dataclass(frozen=True)
class Rollouts:
    """Prompts and responses of a batch."""

    keys: list[str]
    prompts: list[torch.Tensor]
    responses: list[torch.Tensor]
    mask_BT: torch.Tensor
    """bool; the tokens that the model generated. verl's ``response_mask`` until a rollout correction drops some."""
    spans: Sequence[AnswerSpan | None]
    """The answers among the generated tokens."""
    groups: list[int]
    """Rows with the same number answer the same prompt."""
    examples: Sequence[Example | None]
    """Only where the method reads them."""
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """By name, those that the method reads."""

    @property
    def generated(self) -> list[torch.Tensor]:
        """The responses with -1, a token without text, in place of the tokens that the model did not generate."""
        return [
            torch.where(mask_T[: len(row)], row, -1) for mask_T, row in zip(self.mask_BT, self.responses, strict=True)
        ]

    @property
    def tokens_BT(self) -> torch.Tensor:
        """The same as int64 (B, T), also -1 after a response."""
        tokens_BT = torch.full(self.mask_BT.shape, -1)
        for row_T, of_row in zip(tokens_BT, self.generated, strict=True):
            row_T[: len(of_row)] = of_row
        return tokens_BT

    @property
    def lengths(self) -> list[int]:
        """Tokens of prompt and response."""
        return [len(prompt) + len(response) for prompt, response in zip(self.prompts, self.responses, strict=True)]


def fetch_rollouts(
    batch: KVBatchMeta,
    signal: Signal,
    tokenizer: PreTrainedTokenizerBase,
    template_options: dict[str, Any],
    answer: AnswerFormat = BOXED,
) -> Rollouts:
    """Fetch prompts and responses, and find the answers.

    Args:
        batch: keys of the rows.
        signal: the method, which says what it reads.
        tokenizer: the model's.
        template_options: ``data.apply_chat_template_kwargs``, for a method that reads the examples.
        answer: the format of answers.
    """
    reads_examples = EXAMPLES in signal.reads
    # Rejection sampling rewrites response_mask; loss_mask still holds the generated tokens.
    fields = ["prompts", "responses", "loss_mask"]
    fields += ["raw_prompt", *signal.columns] if reads_examples else []
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    responses, loss_mask = list(data["responses"].unbind()), data["loss_mask"]
    # -1 is a token without text, so that no answer is found in the output of a tool.
    generated = [torch.where(mask.bool(), row, -1) for row, mask in zip(responses, loss_mask.unbind(), strict=True)]
    spans = find_answer_spans(generated, tokenizer, signal.span, answer)
    return Rollouts(
        keys=list(batch.keys),
        prompts=list(data["prompts"].unbind()),
        responses=responses,
        mask_BT=loss_mask.to_padded_tensor(0).bool(),
        # Nor is one that a tool interrupts: it is no answer of the model's.
        spans=[
            None if span is None or (row[span.start : span.end] < 0).any() else span
            for span, row in zip(spans, generated, strict=True)
        ],
        groups=group_numbers(batch.keys),
        examples=_examples(data, signal, template_options) if reads_examples else [None] * len(batch),
        fields=_fields(batch, signal),
    )


def _fields(batch: KVBatchMeta, signal: Signal) -> dict[str, list[Any]]:
    """The fields that a method reads: what the reward function returned, what the agent loop added, or a column of the batch,
    whichever has the name first."""
    names = field_names(signal.reads)
    if not names:
        return {}
    extra = [dict(of_row) if isinstance(of_row, Mapping) else {} for of_row in fetch_objects(batch, "extra_fields")]
    added = [{**of_row, **(of_row.get("reward_extra_info") or {})} for of_row in extra]
    fields = {}
    for name in names:
        fields[name] = [of_row.get(name) for of_row in added]
        if all(value is None for value in fields[name]):
            fields[name] = fetch_objects(batch, name)
        if all(value is None for value in fields[name]):
            known = ", ".join(sorted(set().union(*added) - {"reward_extra_info"})) or "nothing"
            raise ValueError(
                f"{signal.name} reads {FIELD}{name}, which no row has: compute_score must return it, the agent loop add it, or "
                f"data.train_files have a column of that name; the first two give {known}"
            )
    return fields


def _examples(data: TensorDict, signal: Signal, template_options: dict[str, Any]) -> list[Example]:
    columns = [tu.get(data, name) for name in signal.columns]
    return [
        Example(messages, dict(zip(signal.columns, values, strict=True)), template_options)
        for messages, *values in zip(tu.get(data, "raw_prompt"), *columns, strict=True)
    ]


def group_numbers(keys: Sequence[str]) -> list[int]:
    """Number the prompts that rows answer; verl's keys are ``{prompt}_{session}_{output}``."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(key.rsplit("_", 2)[0], len(numbers)) for key in keys]


def fetch_padded(batch: KVBatchMeta, *fields: str) -> list[torch.Tensor]:
    """Fetch columns of one value a response token, each as (B, T) with 0 after the response."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))
    return [data[name].to_padded_tensor(0) for name in fields]


def fetch_objects(batch: KVBatchMeta, field: str) -> list[Any]:
    """Fetch a column of any objects, one a row."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[field])
    values = tu.get(data, field) if field in data.keys() else None  # noqa: SIM118  # a TensorDict has no `in`
    return [None] * len(batch) if values is None else list(values)


def fetch_columns(batch: KVBatchMeta, signal: Signal) -> dict[str, torch.Tensor]:
    """Fetch the columns that the method reads, each (B, T) float32."""
    names = [name for name in (OLD_LOG_PROBS, ENTROPY) if name in signal.reads]
    if not names:
        return {}
    return {name: values.float() for name, values in zip(names, fetch_padded(batch, *names), strict=True)}


def request_saliency(batch: KVBatchMeta, targets_B2: torch.Tensor, order: Sequence[int], leaf: str) -> KVBatchMeta:
    """Store the target of each row's saliency, and return the batch for a forward that keeps the graph of rows with a target.

    Args:
        batch: all rows.
        targets_B2: int64, each row's half-open range of target tokens in prompt + response; -1 for none.
        order: the rows that are returned, by their places in the batch; results are stored by key.
        leaf: see :func:`grail_advantage.model.activations.leaf_module`.
    """
    tq.kv_batch_put(
        keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict({TARGET: targets_B2}, batch_size=len(batch))
    )
    request = batch.select_keys([batch.keys[row] for row in order])
    if request.fields is not None:
        request.fields = [*request.fields, TARGET]
    request.extra_info |= {LEAF: leaf}
    return request


def fetch_saliency(keys: Sequence[str], partition_id: str) -> tuple[list[tuple[torch.Tensor, ...]], float]:
    """Fetch saliency and gradient norms of prompt + response for each of these rows, and the seconds of the slowest rank."""
    data = tq.kv_batch_get(keys=list(keys), partition_id=partition_id, select_fields=[*SALIENCY_FIELDS, SECONDS])
    seconds = max(float(of_row) for of_row in data[SECONDS].unbind())
    return list(zip(*(data[name].unbind() for name in SALIENCY_FIELDS), strict=True)), seconds


def put_advantages(batch: KVBatchMeta, responses: list[torch.Tensor], advantages_BT: torch.Tensor) -> KVBatchMeta:
    """Store token advantages in place of verl's."""
    values = response_to_nested(advantages_BT, nested(responses))
    fields = TensorDict({"advantages": values, "returns": values.clone()}, batch_size=len(batch))
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def put_no_log_probs(rows: dict[str, tuple[int, int]], like: KVBatchMeta) -> None:
    """Store NaN for rows without a forward of the old log-probabilities, so that every row has the same fields.

    Args:
        rows: tokens of prompt + response and of the response alone, by key.
        like: rows that had the forward.
    """
    wholes, parts = zip(*rows.values(), strict=True)
    lengths = {"log_probs": wholes, OLD_LOG_PROBS: parts, ENTROPY: parts}
    known = tq.kv_batch_get(keys=like.keys[:1], partition_id=like.partition_id, select_fields=list(lengths))
    nothing = {
        name: nested([known[name].unbind()[0].new_full((length,), float("nan")) for length in of_rows])
        for name, of_rows in lengths.items()
    }
    fields = TensorDict(nothing, batch_size=len(rows))
    tq.kv_batch_put(keys=list(rows), partition_id=like.partition_id, fields=fields)


def without_saliency_fields(batch: KVBatchMeta) -> KVBatchMeta:
    """Drop the saliency's fields from a batch; verl's next stages fetch every field that it lists."""
    if batch.fields is not None:
        batch.fields = [name for name in batch.fields if name not in (TARGET, *SALIENCY_FIELDS, SECONDS)]
    return batch
