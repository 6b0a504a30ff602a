"""Leaving out zero-advantage responses: the forward of their old log-probabilities, and their part of the actor's update.

The gradient of such a response is 0 with the losses that :mod:`grail_advantage.verl_ext.rules` lets through. An update without
it is the same to float rounding as long as the rest keeps what it is divided by. verl divides by the tokens and responses of
the whole mini-batch: ``global_batch_size`` is a setting of the batch and stays, ``batch_num_tokens`` is the sum of
``loss_mask`` over all ranks (``FSDPEngine.forward_backward_batch``) and is handed on as that sum. The number of mini-batches
and of optimiser steps stays as well: a rank with fewer responses than the others, or with none, gets fillers of two tokens that
no loss reads. Where no response of a mini-batch is left, gradients are then 0 and not missing, and the optimiser's momentum and
weight decay move the weights as they do in verl.

The functions of the first half run in the trainer, :func:`without_zero_advantage` in the workers.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from omegaconf import DictConfig
from tensordict import NonTensorData, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_corr_metrics_from_logprobs
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from grail_advantage.data import OLD_LOG_PROBS
from grail_advantage.verl_ext.exchange import PLACES, nested, spread, spread_in_mini_batches
from grail_advantage.verl_ext.patches import without_rollout_correction
from grail_advantage.verl_ext.settings import ACTOR, ROLLOUT
from grail_advantage.verl_ext.step import UpdateBatch, fetch_padded, request_saliency, trained_lengths

CUT_TAILS = "cut_tails"
"""Setting of a batch whose zero-advantage responses are left out: whether the tails of the others go, too."""
OF_ALL = ("input_ids", "position_ids")
"""Fields with a value for each token of prompt + response."""
OF_RESPONSE = ("responses", "response_mask", "old_log_probs", "advantages", "rollout_is_weights")
"""Fields of the loss with a value for each token of the response. verl's loss reads nothing else of a response."""
FILLER_TOKENS = 2


def forward_request(
    step: UpdateBatch, batch: KVBatchMeta, ranks: int, *, shares: bool, skips: bool
) -> tuple[UpdateBatch, KVBatchMeta]:
    """The batch for a forward of the old log-probabilities, and the step with what that forward will give.

    Args:
        step: with the advantages that the rewards alone give.
        shares: whether the forward keeps the graph of the selected responses.
        skips: whether responses that nobody reads get no forward.
    """
    rows = _with_forward(step, ranks) if skips else list(range(len(batch)))
    scored = step.selected if shares else []
    no_forward = frozenset(step.keys) - {step.keys[row] for row in rows}
    step = replace(step, shared=frozenset(step.keys[row] for row in scored), no_forward=no_forward)
    if not scored and len(rows) == len(batch):
        return step, batch
    order = spread(step.lengths, scored, ranks, rows)
    return step, request_saliency(step, batch, order) if scored else batch.select_keys(
        [batch.keys[row] for row in order]
    )


def _with_forward(step: UpdateBatch, ranks: int) -> list[int]:
    """Responses with an advantage, those that the method selects, and the shortest others, so that ranks and micro-batches come
    out even."""
    of_method = step.of_method()
    needed_B = (of_method.advantages != 0) & of_method.valid
    needed_B[list(step.selected)] = True
    unit = ranks
    if not step.settings[f"{ROLLOUT}.log_prob_use_dynamic_bsz"]:
        unit *= step.settings[f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"]
    count = max(1, -(-int(needed_B.sum()) // unit)) * unit
    lengths = step.lengths
    by_need = sorted(range(len(lengths)), key=lambda row: (not needed_B[row], lengths[row]))
    return sorted(by_need[:count])


@contextmanager
def correction_of_known(
    step: UpdateBatch | None, algorithm: DictConfig, batch: KVBatchMeta, metrics: dict
) -> Iterator[None]:
    """If some responses have no old log-probabilities, keep verl from computing the rollout correction's metrics over them.
    Afterwards ``metrics`` has them for the other responses.
    """
    if step is None or not step.no_forward or algorithm.get("rollout_correction", None) is None:
        yield
        return
    with without_rollout_correction(algorithm):
        yield
    if step.settings[f"{ROLLOUT}.calculate_log_probs"]:
        compared = batch.select_keys([key for key in batch.keys if key not in step.no_forward])
        columns = fetch_padded(compared, OLD_LOG_PROBS, "rollout_log_probs", "response_mask")
        metrics.update(compute_rollout_corr_metrics_from_logprobs(*columns))


def update_request(
    step: UpdateBatch, batch: KVBatchMeta, ranks: int, *, cut_tails: bool
) -> tuple[KVBatchMeta, dict[str, int]]:
    """The batch for the workers' update, and the figures of what is left out.

    Args:
        batch: their keys, in verl's order.
        cut_tails: see :class:`grail_advantage.verl_ext.rules.Skipping`.
    """
    rollouts, places = step.rollouts, {key: row for row, key in enumerate(step.keys)}
    order = [places[key] for key in batch.keys]
    kept = lengths_in_update(step.trained, [len(response) for response in rollouts.responses], cut_tails=cut_tails)
    of_rows = step.lengths
    wholes = [of_rows[row] for row in order]
    lengths = [len(rollouts.prompts[row]) + kept[row] if kept[row] else 0 for row in order]
    request = batch
    if not step.settings[f"{ACTOR}.shuffle"]:  # else verl draws mini-batches by places, which then have to stay
        mini_batch = step.settings[f"{ACTOR}.ppo_mini_batch_size"] * step.settings[f"{ROLLOUT}.n"]
        trained = [row for row, length in enumerate(lengths) if length]
        rows = spread_in_mini_batches(lengths, trained, ranks, mini_batch)
        request = batch.select_keys([batch.keys[row] for row in rows])
    request.extra_info[CUT_TAILS] = cut_tails
    of_run = [row for row, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
    return request, {
        "token_weights/skipped_responses": sum(not lengths[row] for row in of_run),
        "token_weights/skipped_tokens": sum(wholes[row] - lengths[row] for row in of_run),
    }


def lengths_in_update(trained: Sequence[int], responses: Sequence[int], *, cut_tails: bool) -> list[int]:
    """Tokens of each response that go through the model: 0 for a response without an advantage; else, with ``cut_tails``, up to
    the last token that trains, and without it all.

    Args:
        trained: from :func:`trained_lengths`.
        responses: tokens of each response.
        cut_tails: see :class:`grail_advantage.verl_ext.rules.Skipping`.
    """
    if cut_tails:
        return list(trained)
    return [whole if length else 0 for length, whole in zip(trained, responses, strict=True)]


def without_zero_advantage(engine: FSDPEngineWithLMHead, data: TensorDict) -> TensorDict:
    """The responses of a mini-batch that train, for ``TrainingWorker.train_batch``.

    A collective of the engine's data-parallel group.

    Args:
        engine: verl's FSDP engine.
        data: this rank's responses of a mini-batch, with the setting ``CUT_TAILS``.

    Returns:
        As many responses on every rank, at least one.
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

    # A filler is a copy of row 0, cut to a prompt token and a response token. Its fields of the loss, the mask included, are 0.
    kept = tu.index_select_tensor_dict(data, rows + [0] * fillers)
    of_prompt = [prompts[row] for row in rows] + [1] * fillers
    of_response = [kept_lengths[row] for row in rows] + [FILLER_TOKENS - 1] * fillers
    for name, ends in _ends(kept, of_prompt, of_response):
        values = [of_row[..., :end] for of_row, end in zip(kept[name].unbind(), ends, strict=True)]
        if name in OF_RESPONSE:
            values[len(rows) :] = map(torch.zeros_like, values[len(rows) :])
        kept[name] = nested(values)
    if PLACES in kept.keys():  # noqa: SIM118  # a TensorDict has no `in`
        kept[PLACES][len(rows) :] = -1
    # verl reads only the sum of this mask.
    tokens = data["loss_mask"].sum()
    kept["loss_mask"] = torch.cat([tokens.reshape(1), tokens.new_zeros(count - 1)])
    tu.assign_non_tensor(kept, **settings)
    return kept


def _count(engine: FSDPEngineWithLMHead, data: TensorDict, rows: int) -> tuple[int, int | None]:
    """Responses that every rank gets so that micro-batches come out even, and those of a micro-batch of fixed size, at most as
    many as before."""
    settings = engine.engine_config
    if tu.get_non_tensor_data(data, "use_dynamic_bsz", default=settings.use_dynamic_bsz):
        return rows, None
    most = tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", default=settings.micro_batch_size_per_gpu)
    micro_batches = -(-rows // most)
    size = -(-rows // micro_batches)
    return micro_batches * size, size


def _ends(kept: TensorDict, of_prompt: list[int], of_response: list[int]) -> Iterator[tuple[str, list[int]]]:
    """The fields that follow a response's tokens, each with where its values end in each response."""
    whole = [sum(parts) for parts in zip(of_prompt, of_response, strict=True)]
    for names, ends in ((("prompts",), of_prompt), (OF_RESPONSE, of_response), (OF_ALL, whole)):
        for name in names:
            if name in kept.keys():  # noqa: SIM118  # a TensorDict has no `in`
                yield name, ends
