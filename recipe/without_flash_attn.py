"""What a run takes where flash-attn is not installed: the FlashAttention-2 kernels that torch itself has, and
log-probabilities in few calls.

:func:`recipe.run_life.begin_run` names this module as verl's ``external_lib``, which verl imports in each process that
loads the model, and :data:`ATTENTION` as the model's attention. Shape suffixes: N packed tokens, H heads, D a head's
width.
"""

from typing import Any

import torch
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from verl_cpu.patches import log_probabilities_in_few_calls

ATTENTION = "torch_varlen"
"""``attn_implementation``. For a name with "flash" in it transformers would ask for a package."""


def torch_varlen(
    module: torch.nn.Module,
    query_1HND: torch.Tensor,
    key_1HND: torch.Tensor,
    value_1HND: torch.Tensor,
    padding_mask: torch.Tensor | None,
    *,
    position_ids: torch.Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention in a row of packed sequences, (1, N, H, D), as transformers calls it. A sequence begins wherever
    positions do not go up by 1. ValueError: rows are padded, or the model needs what the kernels do not have."""
    rows, heads, tokens, _ = query_1HND.shape
    extras = (padding_mask, softcap, s_aux)
    if (
        rows > 1
        or dropout
        or key_1HND.shape[2] != tokens
        or any(extra is not None for extra in extras)
    ):
        raise ValueError(
            f"{ATTENTION} is for packed responses, and has no dropout, soft cap, sinks or cache; install flash-attn, "
            "or set +actor_rollout_ref.model.override_config.attn_implementation=sdpa"
        )
    # Positions 0 1 2 0 1 jump at 0, at 3 and at the end, 5.
    jumps_N = position_ids[0].diff(prepend=position_ids[0, :1], append=position_ids[0, :1]) != 1
    # 0, the start of each further sequence, and N: 0, 3 and 5.
    limits = jumps_N.nonzero().flatten().int()
    longest = int(limits.diff().max())
    # Heads of queries that share one of keys and values.
    group = heads // key_1HND.shape[1]
    output_NHD = varlen.varlen_attn(
        # A projection's output has the type of the computation; norms may have float32.
        query_1HND[0].transpose(0, 1).to(value_1HND.dtype).contiguous(),
        key_1HND[0].transpose(0, 1).to(value_1HND.dtype).repeat_interleave(group, dim=1),
        value_1HND[0].transpose(0, 1).repeat_interleave(group, dim=1),
        limits,
        limits,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),  # -1: all
    )
    return output_NHD[None], None


AttentionInterface.register(ATTENTION, torch_varlen)
AttentionMaskInterface.register(ATTENTION, flash_attention_mask)
log_probabilities_in_few_calls()
