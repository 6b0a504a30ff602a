"""The saliency backward inside verl's FSDP engine.

Source: GRAIL (arXiv 2606.04889). Inputs, micro-batches, packing, autocast and offload are those of verl's
``FSDPEngineWithLMHead.forward_step``, so that the pass sees the model exactly as the training step does.

The backward goes from the answer's log-likelihood to a leaf activation and stops there: no parameter gets a gradient, and
the next optimiser step is what it would have been without the pass.

Shape suffixes: R rows, K target tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import prepare_micro_batches

from grail_advantage.signals.grad_activation import (
    accepts_logits_to_keep,
    capture_leaf,
    evaluation_mode,
    leaf_module,
    negative_log_likelihood,
    saliency,
)


def build_request(
    tokens: Sequence[torch.Tensor],
    response_starts: Sequence[int],
    target_starts: Sequence[int],
    *,
    leaf: str,
    temperature: float,
) -> TensorDict:
    """The rows of a pass, as :func:`saliency_pass` takes them.

    Args:
        tokens: for each row prompt + response up to and including its last target token, int64. What comes behind cannot
            influence the answer and is left out.
        response_starts: index of each row's first response token, at least 1.
        target_starts: index of each row's first target token; the target reaches to the row's end.
        leaf: see :class:`grail_advantage.GrailConfig`.
        temperature: sampling temperature.

    Returns:
        TensorDict of batch size R with the nested ``input_ids`` and ``position_ids``, two int64 vectors and the settings.
    """
    return tu.get_tensordict(
        {
            "input_ids": torch.nested.as_nested_tensor(list(tokens), layout=torch.jagged),
            "position_ids": torch.nested.as_nested_tensor(
                [torch.arange(len(row)) for row in tokens], layout=torch.jagged
            ),
            "response_start": torch.tensor(response_starts, dtype=torch.int64),
            "target_start": torch.tensor(target_starts, dtype=torch.int64),
        },
        non_tensor_dict={"leaf": leaf, "temperature": temperature},
    )


def saliency_pass(engine: FSDPEngineWithLMHead, request: TensorDict) -> TensorDict:
    """Saliency of every position from the first response token's predictor on.

    A collective: every rank of the data-parallel group calls it with the same number of rows.

    Args:
        engine: verl's FSDP engine, initialised.
        request: this rank's rows, from :func:`build_request`.

    Returns:
        TensorDict of batch size R on the CPU with the nested float32 ``saliency`` and ``gradient_norm``; entry 0 of a row is
        the position before its first response token, the last entry the last target token's own position.
    """
    settings = engine.engine_config
    request = request.copy()
    tu.assign_non_tensor(
        request,
        use_remove_padding=settings.use_remove_padding,
        use_fused_kernels=settings.use_fused_kernels,
        use_dynamic_bsz=settings.use_dynamic_bsz,
        max_token_len_per_gpu=settings.max_token_len_per_gpu,
        sp_size=engine.ulysses_sequence_parallel_size,
    )
    saliency_rows: list[torch.Tensor | None] = [None] * len(request)
    norm_rows: list[torch.Tensor | None] = [None] * len(request)
    with engine.eval_mode(), evaluation_mode(engine.module):
        for micro_batch, row_indices in _micro_batches(engine, request):
            outputs = _micro_batch_saliency(engine, micro_batch)
            for row, row_saliency, row_norm in zip(row_indices, *outputs, strict=True):
                saliency_rows[row] = row_saliency
                norm_rows[row] = row_norm
    return tu.get_tensordict(
        {
            "saliency": torch.nested.as_nested_tensor(saliency_rows, layout=torch.jagged),
            "gradient_norm": torch.nested.as_nested_tensor(norm_rows, layout=torch.jagged),
        }
    )


def _micro_batches(engine: FSDPEngineWithLMHead, request: TensorDict) -> list[tuple[TensorDict, list[int]]]:
    """Split as the actor update does: by its token budget, or by its fixed number of rows; as many on every rank."""
    if engine.engine_config.use_dynamic_bsz:
        micro_batches, indices = prepare_micro_batches(request, dp_group=engine.get_data_parallel_group())
        return list(zip(micro_batches, indices, strict=True))
    indices = torch.arange(len(request)).split(engine.engine_config.micro_batch_size_per_gpu)
    return [(tu.index_select_tensor_dict(request, rows), rows.tolist()) for rows in indices]


def _micro_batch_saliency(
    engine: FSDPEngineWithLMHead, micro_batch: TensorDict
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    micro_batch = micro_batch.to(get_device_id())
    leaf = tu.get_non_tensor_data(micro_batch, "leaf", default=None)
    temperature = tu.get_non_tensor_data(micro_batch, "temperature", default=None)
    offsets = micro_batch["input_ids"].offsets()
    lengths_R = offsets.diff()
    tokens_K, row_K, position_K = _targets(micro_batch)

    model_inputs, _ = engine.prepare_model_inputs(micro_batch)
    packed = model_inputs["input_ids"].shape[0] == 1 and engine.engine_config.use_remove_padding
    # A packed micro-batch is one long row; a padded one keeps its rows apart, each starting at column 0.
    batch_row_K = torch.zeros_like(row_K) if packed else row_K
    column_K = offsets[row_K] + position_K if packed else position_K
    kept_columns, kept_K = column_K.unique(return_inverse=True)
    keeps = accepts_logits_to_keep(engine.module)
    if keeps:
        model_inputs["logits_to_keep"] = kept_columns

    autocast = (
        nullcontext()
        if engine._autocast_dtype == torch.float32
        else torch.autocast(device_type=get_device_name(), dtype=engine._autocast_dtype)
    )
    with capture_leaf(leaf_module(engine.module, leaf)) as leaves, autocast:
        logits = engine.module(**model_inputs, use_cache=False).logits
    logits_KV = logits[batch_row_K, kept_K if keeps else column_K]
    loss = negative_log_likelihood(logits_KV, tokens_K, temperature)
    saliency_BS, norm_BS = saliency(loss, leaves[0])

    def by_row(values_BS: torch.Tensor) -> list[torch.Tensor]:
        values_BS = values_BS.cpu()
        rows = values_BS[0].split([*lengths_R.tolist(), values_BS.shape[1] - int(offsets[-1])]) if packed else values_BS
        bounds = zip(micro_batch["response_start"].tolist(), lengths_R.tolist(), strict=True)
        return [row[start - 1 : length].clone() for row, (start, length) in zip(rows, bounds, strict=False)]

    return by_row(saliency_BS), by_row(norm_BS)


def _targets(micro_batch: TensorDict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of all target tokens of a micro-batch: the token, its row, and its predictor position in the row; each (K,) int64."""
    offsets = micro_batch["input_ids"].offsets()
    lengths_R = offsets.diff()
    counts_R = lengths_R - micro_batch["target_start"]
    row_K = torch.repeat_interleave(torch.arange(len(lengths_R), device=offsets.device), counts_R)
    rank_K = torch.arange(len(row_K), device=offsets.device) - (counts_R.cumsum(0) - counts_R)[row_K]
    position_K = micro_batch["target_start"][row_K] + rank_K
    tokens_K = micro_batch["input_ids"].values()[offsets[row_K] + position_K]
    return tokens_K, row_K, position_K - 1
