"""The saliency backward inside verl's FSDP engine.

Source: GRAIL (arXiv 2606.04889). Inputs, micro-batches, packing, sequence parallelism, autocast and offload are those of
verl's ``FSDPEngineWithLMHead.forward_step``, so that the pass sees the model exactly as the training step does.

The backward goes from the answer's log-likelihood to a leaf activation and stops there: no parameter gets a gradient, and
the next optimiser step is what it would have been without the pass.

Under Ulysses sequence parallelism each rank of the group holds a slice of the packed rows. It differentiates the targets in
its own slice; the attention's all-to-all carries every rank's share to every slice, and the saliencies are gathered.

Shape suffixes: R rows, K target tokens, S positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.ulysses import get_ulysses_sequence_parallel_rank
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import prepare_micro_batches

from grail_advantage.signals.grad_activation import (
    capture_leaf,
    evaluation_mode,
    keep_logits,
    leaf_module,
    negative_log_likelihood,
    saliency,
)

TARGET = "saliency_target"
"""Field of a batch: (R, 2) int64, each row's half-open range of target tokens in prompt + response; empty for none."""
LEAF = "saliency_leaf"
"""Setting of a batch: see :class:`grail_advantage.GrailConfig`."""


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
        TensorDict of batch size R with the nested ``input_ids`` and ``position_ids``, the targets and the settings.
    """
    bounds = [(start, len(row)) for row, start in zip(tokens, target_starts, strict=True)]
    return tu.get_tensordict(
        {
            "input_ids": torch.nested.as_nested_tensor(list(tokens), layout=torch.jagged),
            "position_ids": torch.nested.as_nested_tensor(
                [torch.arange(len(row)) for row in tokens], layout=torch.jagged
            ),
            "response_start": torch.tensor(response_starts, dtype=torch.int64),
            TARGET: torch.tensor(bounds, dtype=torch.int64),
        },
        non_tensor_dict={LEAF: leaf, "temperature": temperature},
    )


def saliency_pass(engine: FSDPEngineWithLMHead, request: TensorDict) -> TensorDict:
    """Saliency of every position from the first response token's predictor on.

    A collective: every rank of the data-parallel group calls it with the same number of rows, and every rank of a
    sequence-parallel group with the same rows.

    Args:
        engine: verl's FSDP engine, initialised.
        request: this rank's rows, from :func:`build_request`.

    Returns:
        TensorDict of batch size R on the CPU with the nested float32 ``saliency`` and ``gradient_norm``; entry 0 of a row is
        the position before its first response token, the last entry the last target token's own position.
    """
    rows: dict[str, list[torch.Tensor | None]] = {name: [None] * len(request) for name in ("saliency", "gradient_norm")}
    starts = request["response_start"].tolist()
    with engine.eval_mode(), evaluation_mode(engine.module):
        for micro_batch, row_indices in training_micro_batches(engine, request):
            output = saliency_step(engine, micro_batch)
            for name, found in rows.items():
                for row, values in zip(row_indices, output[name], strict=True):
                    found[row] = values[starts[row] - 1 :].cpu()
    return tu.get_tensordict(
        {name: torch.nested.as_nested_tensor(found, layout=torch.jagged) for name, found in rows.items()}
    )


def training_micro_batches(engine: FSDPEngineWithLMHead, rows: TensorDict) -> list[tuple[TensorDict, list[int]]]:
    """Split as the actor update does: by its token budget, or by its fixed number of rows; as many on every rank.

    Returns:
        the micro-batches, each with the indices of its rows.
    """
    settings = engine.engine_config
    rows = rows.copy()
    tu.assign_non_tensor(
        rows,
        use_remove_padding=settings.use_remove_padding,
        use_fused_kernels=settings.use_fused_kernels,
        use_dynamic_bsz=settings.use_dynamic_bsz,
        max_token_len_per_gpu=settings.max_token_len_per_gpu,
        sp_size=engine.ulysses_sequence_parallel_size,
    )
    if settings.use_dynamic_bsz:
        micro_batches, indices = prepare_micro_batches(rows, dp_group=engine.get_data_parallel_group())
        return list(zip(micro_batches, indices, strict=True))
    indices = torch.arange(len(rows)).split(settings.micro_batch_size_per_gpu)
    return [(tu.index_select_tensor_dict(rows, index), index.tolist()) for index in indices]


def saliency_step(
    engine: FSDPEngineWithLMHead, micro_batch: TensorDict, *, with_log_probs: bool = False
) -> dict[str, Sequence[torch.Tensor]]:
    """One forward and one backward to the leaf activation.

    A collective of the engine's ranks. Also a micro-batch without any target goes through forward and backward, since the
    other ranks need its part in gathering parameters and in the all-to-all.

    Args:
        engine: in evaluation mode, gradients on; see :func:`grail_advantage.signals.grad_activation.evaluation_mode`.
        micro_batch: rows with ``input_ids``, ``position_ids``, their targets and the settings.
        with_log_probs: also compute what verl's own forward gives, from the logits of all positions.

    Returns:
        lists with a tensor a row, on the engine's device: ``saliency`` and ``gradient_norm`` of every position, float32; with
        ``with_log_probs`` also verl's model outputs (``log_probs``, ``entropy``, ...).
    """
    micro_batch = micro_batch.to(get_device_id())
    leaf = tu.get_non_tensor_data(micro_batch, LEAF, default=None)
    temperature = tu.get_non_tensor_data(micro_batch, "temperature", default=None)
    model_inputs, output_args = engine.prepare_model_inputs(micro_batch)
    packed = engine.engine_config.use_remove_padding
    targets = _find_targets(micro_batch, packed, model_inputs["input_ids"].shape[1], engine.use_ulysses_sp)

    autocast = (
        nullcontext()
        if engine._autocast_dtype == torch.float32
        else torch.autocast(device_type=get_device_name(), dtype=engine._autocast_dtype)
    )
    results: dict[str, Sequence[torch.Tensor]] = {}
    head = engine.module.get_output_embeddings()
    with capture_leaf(leaf_module(engine.module, leaf)) as leaves, autocast:
        if engine.engine_config.use_fused_kernels:
            # verl's fused forward gives every next token's log-probability instead of logits.
            for_verl = engine.module(**model_inputs, use_cache=False)
            loss = -for_verl.log_probs[targets.batch_row_K, targets.columns[targets.kept_K]].float().sum()
        else:
            with keep_logits(head, targets.columns, with_all=with_log_probs) as heads:
                kept_logits = engine.module(**model_inputs, use_cache=False).logits
            logits_KV = kept_logits[targets.batch_row_K, targets.kept_K]
            loss = negative_log_likelihood(logits_KV, targets.tokens_K, temperature)
            if with_log_probs:
                _check_untouched(kept_logits, heads[0].kept)
                # verl scales logits in place where it may, so nothing else may read these.
                for_verl = SimpleNamespace(logits=heads.pop().everywhere)
        if with_log_probs:
            with torch.no_grad():
                outputs = engine.prepare_model_outputs(for_verl, output_args, micro_batch, logits_processor_func=None)
            results = {name: values.unbind() for name, values in outputs.items()}
            del for_verl
    saliency_BS, norm_BS = saliency(loss, leaves[0])

    lengths_R = micro_batch["input_ids"].offsets().diff().tolist()
    for name, values_BS in (("saliency", saliency_BS), ("gradient_norm", norm_BS)):
        if packed:
            results[name] = engine._gather_and_unpad_packed(values_BS[0], output_args["pad_size"]).split(lengths_R)
        else:
            results[name] = [row[:length] for row, length in zip(values_BS, lengths_R, strict=True)]
    return results


@dataclass(frozen=True)
class _Targets:
    """The target tokens of a micro-batch whose predictors are in this rank's slice of it; int64."""

    tokens_K: torch.Tensor
    batch_row_K: torch.Tensor
    """Row of the model's input that holds the predictor; packed rows are one long row."""
    kept_K: torch.Tensor
    """Index into ``columns`` of the predictor's column in that row."""
    columns: torch.Tensor
    """Distinct columns whose logits are needed, at least one, so that there always is a graph for the backward."""


def _find_targets(micro_batch: TensorDict, packed: bool, width: int, sliced: bool) -> _Targets:
    """Locate the targets; ``width`` is the number of columns of the model's input, a slice of them if ``sliced``."""
    offsets = micro_batch["input_ids"].offsets()
    start_R, end_R = micro_batch[TARGET].unbind(dim=1)
    counts_R = end_R - start_R
    row_K = torch.repeat_interleave(torch.arange(len(counts_R), device=offsets.device), counts_R)
    rank_K = torch.arange(len(row_K), device=offsets.device) - (counts_R.cumsum(0) - counts_R)[row_K]
    position_K = start_R[row_K] + rank_K
    tokens_K = micro_batch["input_ids"].values()[offsets[row_K] + position_K]
    # A packed micro-batch is one long row; a padded one keeps its rows apart, each starting at column 0.
    batch_row_K = torch.zeros_like(row_K) if packed else row_K
    column_K = position_K - 1 + (offsets[row_K] if packed else 0)
    if sliced:
        column_K = column_K - get_ulysses_sequence_parallel_rank() * width
        here_K = (column_K >= 0) & (column_K < width)
        tokens_K, batch_row_K, column_K = tokens_K[here_K], batch_row_K[here_K], column_K[here_K]
    columns, kept_K = column_K.unique(return_inverse=True)
    return _Targets(tokens_K, batch_row_K, kept_K, columns if len(columns) else column_K.new_zeros(1))


def _check_untouched(logits: torch.Tensor, head_output: torch.Tensor) -> None:
    """The log-probabilities come from the output embeddings' own output, which must be the model's logits."""
    if not torch.equal(logits, head_output):
        raise ValueError(
            "algorithm.fuse_saliency_pass does not work with this model, which changes its logits behind the output "
            "embeddings; set algorithm.fuse_saliency_pass=false"
        )
