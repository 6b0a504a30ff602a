"""Responses on their way between trainer and workers: their order over the ranks, the request of a pass, its reply, and
which of them an update of the actor leaves out.

The gradient of a zero-advantage response is 0 where :func:`grail_advantage.verl_ext.rules.why_not_skip` says
nothing. An update without it is the same to float rounding as long as the rest keeps what it is divided by. verl
divides by the tokens and responses of the whole mini-batch: ``global_batch_size`` is a setting of the batch and stays,
``batch_num_tokens`` is the sum of ``loss_mask`` over all ranks (``FSDPEngine.forward_backward_batch``) and is handed on
as that sum. The number of mini-batches and of optimiser steps stays as well: a rank with fewer responses than the
others, or with none, gets fillers of two tokens that no loss reads. Where no response of a mini-batch is left,
gradients are then 0 and not missing, and the optimiser's momentum and weight decay move the weights as they do in verl.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from grail_advantage.data import Rollouts, Row, RowScores
from grail_advantage.method import BaseMethod
from grail_advantage.verl_ext.settings import ACTOR, ROLLOUT, Settings
from grail_advantage.weigh import deal

PLACES = "receipt_places"
"""Field of a batch of R responses: (R, 2) int64. Column 0 is a response's place in the update's batch, column 1 its
slot among those that the token dump writes, -1 for none."""
WATCHED = "receipt_update"  # setting of a batch whose update is watched: a number that tells updates apart
UPDATE = "actor update"
FORWARD = "old log-probabilities"
PADDED_FORWARD = "old log-probabilities, padded"
"""Layouts: whose micro-batches a pass repeats. That of the update is in training mode; the last is padded although the
run packs."""
# Setting of a batch whose zero-advantage responses are left out
LEAVE_OUT = "leave_out_zero_advantage"
FILLER_TOKENS = 2
OF_LOSS = ("responses", "response_mask", "old_log_probs", "advantages", "rollout_is_weights")
"""The fields of the loss, 0 in a filler. verl's loss reads nothing else of a response."""
CUT = {"prompts": FILLER_TOKENS - 1, "input_ids": FILLER_TOKENS, "position_ids": FILLER_TOKENS}
CUT |= dict.fromkeys(OF_LOSS, 1)
"""How many values a filler keeps of each field that has one a token."""


def build_request(
    rows: Sequence[Row],
    method: BaseMethod,
    *,
    temperature: float,
    step: int = 0,
    pad_token: int | None = None,
) -> TensorDict:
    """The request of a pass for :func:`grail_advantage.verl_ext.worker.token_scores`: responses, the method, and what the
    pass needs to know of the run; ``pad_token`` is the tokenizer's."""
    settings = {"signal": method, "temperature": temperature, "step": step, "pad_token": pad_token}
    return tu.get_tensordict(
        {"rows": [replace(row, example=None) for row in rows]}, non_tensor_dict=settings
    )


def build_reply(rows: Sequence[RowScores]) -> TensorDict:
    """The scores of a request's responses, float32 on the CPU, with the gradient norms of a pass with gradients."""
    return tu.get_tensordict({"rows": [row.on_cpu() for row in rows]})


def rows_of(data: TensorDict) -> list[Any]:
    """The responses of a request, or the scores of a reply."""
    return list(tu.get(data, "rows"))


def nested(values: Sequence[Tensor]) -> Tensor:
    """Tensors of different lengths as one, as verl's TensorDicts hold them."""
    return torch.nested.as_nested_tensor(list(values), layout=torch.jagged)


def trains(advantages: Iterable[Tensor], masks: Iterable[Tensor]) -> list[bool]:
    """Of each response whether a token of its mask has an advantage other than 0."""
    return [
        bool((row_T[mask_T.bool()] != 0).any())
        for row_T, mask_T in zip(advantages, masks, strict=True)
    ]


def update_order(
    rollouts: Rollouts, trained: Sequence[bool], batch: KVBatchMeta, settings: Settings, ranks: int
) -> tuple[KVBatchMeta, dict[str, int]]:
    """A batch of responses, some of which train, in the order for the workers' update on so many data-parallel ranks,
    and the figures of what is left out. In the trainer."""
    places = {key: place for place, key in enumerate(rollouts.keys)}
    costs = []
    left_out = []
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        place = places[key]
        length = len(rollouts.prompts[place]) + len(rollouts.responses[place])
        # What is left out costs nothing, so that ranks share the tokens of the others.
        costs.append(length * trained[place])
        if not trained[place] and not tag.get("is_padding", False):
            left_out.append(length)
    # With shuffle verl draws mini-batches by places, which then have to stay.
    if not settings[f"{ACTOR}.shuffle"]:
        order = deal_mini_batches(costs, ranks, mini_batch_rows(settings))
        batch = batch.select_keys([batch.keys[row] for row in order])
    return batch, {
        "token_weights/skipped_responses": len(left_out),
        "token_weights/skipped_tokens": sum(left_out),
    }


def mini_batch_rows(settings: Settings) -> int:
    """Responses of a mini-batch of the update, on all ranks together."""
    return settings[f"{ACTOR}.ppo_mini_batch_size"] * settings[f"{ROLLOUT}.n"]


def update_places(count: int, written: Sequence[int] = ()) -> Tensor:
    """The field ``PLACES`` of an update's batch, of which the token dump writes the responses at some places, in this
    order."""
    places_R2 = torch.stack([torch.arange(count), torch.full((count,), -1)], dim=1)
    places_R2[list(written), 1] = torch.arange(len(written))
    return places_R2


def deal_mini_batches(costs: Sequence[int], ranks: int, size: int) -> list[int]:
    """Order of a batch in which the ranks share each mini-batch's costs evenly.

    verl gives every rank an equal, contiguous part of the batch. A mini-batch, of ``size`` responses on all ranks
    together, takes the next ones of each part; in this order it has the same responses.
    """
    # Of 8 responses on 2 ranks, in mini-batches of 4, the first mini-batch is 0, 1, 4 and 5.
    rows_of_ranks = torch.arange(len(costs)).view(ranks, -1)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for part in rows_of_ranks.split(size // ranks, dim=1):
        rows = part.flatten().tolist()
        for share, dealt in zip(shares, deal([costs[row] for row in rows], ranks), strict=True):
            share += [rows[place] for place in dealt]
    return [row for share in shares for row in share]


def without_zero_advantage(engine: FSDPEngineWithLMHead, data: TensorDict) -> TensorDict:
    """The responses of this rank's part of a mini-batch that train, for ``TrainingWorker.train_batch``: as many on
    every rank, at least one, with fillers on a rank that has fewer. In the workers; a collective of the engine's
    data-parallel group."""
    trained = trains(data["advantages"], data["response_mask"])
    rows = [row for row, is_trained in enumerate(trained) if is_trained]
    row_lengths = data["prompts"].offsets().diff() + data["responses"].offsets().diff()
    group = engine.get_data_parallel_group()
    lengths: list[list[int]] = [[] for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather_object(lengths, row_lengths[rows].tolist(), group)
    # At least one on each rank: a rank without a forward would keep the others waiting.
    count, micro_batch_rows = _count(engine, data, max(1, *map(len, lengths)))

    # verl estimates its operations a second by the lengths of all ranks' rows: those that are left.
    everywhere = []
    for rank_lengths in lengths:
        everywhere += rank_lengths + [FILLER_TOKENS] * (count - len(rank_lengths))
    settings = {"global_token_num": NonTensorData(everywhere)}
    if micro_batch_rows is not None:
        settings["micro_batch_size_per_gpu"] = micro_batch_rows
    fillers = [0] * (count - len(rows))
    batch = tu.index_select_tensor_dict(data, rows + fillers)
    for name in CUT.keys() & data.keys():
        values = data[name].unbind()
        # A filler is row 0, cut to a prompt token and a response token. Its fields of the loss, the mask included, are 0.
        filler = values[0][..., : CUT[name]]
        if name in OF_LOSS:
            filler = torch.zeros_like(filler)
        batch[name] = nested([values[row] for row in rows] + [filler for _ in fillers])
    if PLACES in batch:
        batch[PLACES][len(rows) :] = -1
    # verl reads only the sum of this mask.
    tokens = data["loss_mask"].sum()
    batch["loss_mask"] = torch.cat([tokens.reshape(1), tokens.new_zeros(count - 1)])
    tu.assign_non_tensor(batch, **settings)
    return batch


def _count(engine: FSDPEngineWithLMHead, data: TensorDict, rows: int) -> tuple[int, int | None]:
    """Responses of each rank, and of a micro-batch: as many in all of them, at most the configured number; ``None`` where
    their size is dynamic."""
    config = engine.engine_config
    if tu.get(data, "use_dynamic_bsz", config.use_dynamic_bsz):
        return rows, None
    largest = tu.get(data, "micro_batch_size_per_gpu", config.micro_batch_size_per_gpu)
    # 10 rows, at most 4 at a time, are 3 micro-batches of 4: 12 rows with fillers.
    micro_batches = -(-rows // largest)
    size = -(-rows // micro_batches)
    return micro_batches * size, size
