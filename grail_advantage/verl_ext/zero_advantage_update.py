"""Leaves rows whose token advantages are all 0 out of the actor's update.

The gradient of such a row is 0 with the losses that :mod:`grail_advantage.verl_ext.zero_advantage_rules` lets through. An
update without it is the same to float rounding as long as the rest keeps what it is divided by. verl divides by the tokens and
rows of the whole mini-batch: ``global_batch_size`` is a setting of the batch and stays, ``batch_num_tokens`` is the sum of
``loss_mask`` over all ranks (``FSDPEngine.forward_backward_batch``) and is handed on as that sum. The number of mini-batches
and of optimiser steps stays as well: a rank with fewer rows than the others, or with none, gets fillers of two tokens that no
loss reads. Where no row of a mini-batch is left, gradients are then 0 and not missing, and the optimiser's momentum and weight
decay move the weights as they do in verl.

Shape suffixes: R rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from tensordict import NonTensorData, TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from grail_advantage.verl_ext.row_balance import spread
from grail_advantage.verl_ext.wire import nested

CUT_TAILS = "cut_tails"
"""Setting of a batch whose rows without an advantage are left out: whether the ends of the others go, too."""
OF_ALL = ("input_ids", "position_ids")
"""Fields with a value for each token of prompt + response."""
OF_RESPONSE = ("responses", "response_mask", "old_log_probs", "advantages", "rollout_is_weights")
"""Fields of the loss with a value for each token of the response. verl's loss reads nothing else of a row."""
FILLER_TOKENS = 2


def trained_lengths(advantages: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> list[int]:
    """Tokens of each response up to the last one that trains with an advantage other than 0; 0 for a row without one."""
    lengths = []
    for advantages_T, mask_T in zip(advantages, masks, strict=True):
        trained = ((advantages_T != 0) & mask_T.bool()).nonzero()
        lengths.append(int(trained[-1]) + 1 if len(trained) else 0)
    return lengths


def lengths_in_update(trained: Sequence[int], responses: Sequence[int], *, cut_tails: bool) -> list[int]:
    """Tokens of each response that go through the model: those up to the last that trains with ``cut_tails``, else all; none of
    a response without an advantage.

    Args:
        trained: from :func:`trained_lengths`.
        responses: tokens of each response.
        cut_tails: see :class:`grail_advantage.verl_ext.zero_advantage_rules.Skipping`.
    """
    if cut_tails:
        return list(trained)
    return [whole if length else 0 for length, whole in zip(trained, responses, strict=True)]


def without_zero_advantage(engine: FSDPEngineWithLMHead, data: TensorDict) -> TensorDict:
    """The rows of a mini-batch that train, for ``TrainingWorker.train_batch``.

    A collective of the engine's data-parallel group.

    Args:
        engine: verl's FSDP engine.
        data: this rank's rows of a mini-batch, with the setting ``CUT_TAILS``.

    Returns:
        As many rows on every rank, at least one.
    """
    prompts = data["prompts"].offsets().diff().tolist()
    responses = data["responses"].offsets().diff().tolist()
    trained = trained_lengths(data["advantages"].unbind(), data["response_mask"].unbind())
    kept_lengths = lengths_in_update(
        trained, responses, cut_tails=tu.get_non_tensor_data(data, CUT_TAILS, default=False)
    )
    rows = [row for row, length in enumerate(kept_lengths) if length]

    group = engine.get_data_parallel_group()
    lengths: list[list[int]] = [[] for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather_object(lengths, [prompts[row] + kept_lengths[row] for row in rows], group)
    count, micro_batch_rows = _count(engine, data, max(1, *map(len, lengths)))

    fillers = count - len(rows)
    everywhere = [length for of_rank in lengths for length in (*of_rank, *[FILLER_TOKENS] * (count - len(of_rank)))]
    settings = {"global_token_num": NonTensorData(everywhere)}
    if micro_batch_rows is not None:
        settings["micro_batch_size_per_gpu"] = micro_batch_rows
    if kept_lengths == responses and not fillers:
        tu.assign_non_tensor(data, **settings)
        return data

    # Row 0 gives a filler its tokens; zeros take them out of the loss, in the mask too.
    kept = tu.index_select_tensor_dict(data, rows + [0] * fillers)
    of_prompt = [prompts[row] for row in rows] + [1] * fillers
    of_response = [kept_lengths[row] for row in rows] + [FILLER_TOKENS - 1] * fillers
    for name, ends in _ends(kept, of_prompt, of_response):
        values = [of_row[..., :end] for of_row, end in zip(kept[name].unbind(), ends, strict=True)]
        if name in OF_RESPONSE:
            values[len(rows) :] = map(torch.zeros_like, values[len(rows) :])
        kept[name] = nested(values)
    # verl reads its sum alone.
    tokens = data["loss_mask"].sum()
    kept["loss_mask"] = torch.cat([tokens.reshape(1), tokens.new_zeros(count - 1)])
    tu.assign_non_tensor(kept, **settings)
    return kept


def _count(engine: FSDPEngineWithLMHead, data: TensorDict, rows: int) -> tuple[int, int | None]:
    """Rows that every rank gets so that micro-batches come out even, and the rows of a micro-batch of fixed size, which are at
    most as many as before."""
    settings = engine.engine_config
    if tu.get_non_tensor_data(data, "use_dynamic_bsz", default=settings.use_dynamic_bsz):
        return rows, None
    most = tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", default=settings.micro_batch_size_per_gpu)
    micro_batches = -(-rows // most)
    size = -(-rows // micro_batches)
    return micro_batches * size, size


def _ends(kept: TensorDict, of_prompt: list[int], of_response: list[int]) -> Iterator[tuple[str, list[int]]]:
    """The fields that follow a row's tokens, each with where its values end in each row."""
    whole = [sum(parts) for parts in zip(of_prompt, of_response, strict=True)]
    for names, ends in ((("prompts",), of_prompt), (OF_RESPONSE, of_response), (OF_ALL, whole)):
        for name in names:
            if name in kept.keys():  # noqa: SIM118  # a TensorDict has no `in`
                yield name, ends


def spread_in_mini_batches(
    lengths: Sequence[int], trained: Sequence[int], ranks: int, mini_batch_rows: int
) -> list[int]:
    """Order of a batch in which every rank gets its share of each mini-batch's rows that train.

    verl gives every rank an equal part of the batch, of which each mini-batch takes the next rows. A mini-batch keeps its rows.

    Args:
        lengths: tokens of each row; their number divides evenly.
        trained: the rows that train.
        ranks: number of data-parallel ranks.
        mini_batch_rows: rows of a mini-batch on all ranks together.
    """
    of_rank, share, chosen = len(lengths) // ranks, mini_batch_rows // ranks, set(trained)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for start in range(0, of_rank, share):
        rows = [rank * of_rank + start + place for rank in range(ranks) for place in range(share)]
        order = spread(lengths, [row for row in rows if row in chosen], ranks, rows)
        for rank in range(ranks):
            shares[rank] += order[rank * share : (rank + 1) * share]
    return [row for of_one in shares for row in of_one]
