"""Tiny models of many kinds, and what the probe says of them against the truth: gradients alone and beside others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations import flash_attention
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from grail_advantage.model.probe import Finding, probe, probe_rows
from tests.verl_ext.engines import attend

VOCABULARY, PAD, LONGEST = 100, 99, 40
SAME = 1e-3
"""Gradients that differ by less are the same: by rounding alone they differ by up to 3e-4 (a router), else by at least 4e-3."""
SIZES = {
    **{"vocab_size": VOCABULARY, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 98},
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "moe_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "num_experts", "num_local_experts"), 4),
    **{"num_key_value_heads": 2, "num_experts_per_tok": 2, "head_dim": 8, "bos_token_id": 97, "dtype": "float32"},
    **{"initializer_range": 0.3, "tie_word_embeddings": False, "is_decoder": True, "intermediate_size": 64},
}
"""Of every configuration that has such an option."""
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
DELTA = {f"linear_{name}_head_dim": 8 for name in ("key", "value")} | {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "layer_types": ["linear_attention", "full_attention"],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3, longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "llama, dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}),
    "mixtral, jitter": ("mixtral", {"router_jitter_noise": 0.1}),
    "qwen3_next": ("qwen3_next", DELTA),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "gemma2": ("gemma2", {"sliding_window": 20}),
    "gpt_oss": ("gpt_oss", {"sliding_window": 20}),
}
"""In place of a type of :data:`MODEL_FOR_CAUSAL_LM_MAPPING`: the type and further options."""

Logits = Callable[[PreTrainedModel, Sequence[torch.Tensor]], list[torch.Tensor]]


def by_right_padding(model: PreTrainedModel, rows: Sequence[torch.Tensor], *, masked: bool) -> list[torch.Tensor]:
    """As passes lay rows out, or with a mask and positions as verl's engine does."""
    ids_BS = pad_sequence(list(rows), batch_first=True)
    valid_BS = torch.arange(ids_BS.shape[1]) < torch.tensor([[len(row)] for row in rows])
    named = {"attention_mask": valid_BS.long() if masked else torch.ones_like(ids_BS)}
    if masked:
        named["position_ids"] = torch.arange(ids_BS.shape[1]) * valid_BS
    logits = model(input_ids=ids_BS, use_cache=False, **named).logits
    return [of_row[: len(row)] for of_row, row in zip(logits, rows, strict=True)]


def in_trl(model: PreTrainedModel, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Half of a row is its prompt, padded on the left, the rest its completion."""
    width = LONGEST // 2
    ids_BL = torch.full((len(rows), 2 * width), PAD)
    mask_BL = torch.zeros_like(ids_BL)
    places = [slice(width - len(row) // 2, width - len(row) // 2 + len(row)) for row in rows]
    for row, (tokens_S, at) in enumerate(zip(rows, places, strict=True)):
        ids_BL[row, at], mask_BL[row, at] = tokens_S, 1
    logits = model(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False).logits
    return [of_row[at] for of_row, at in zip(logits, places, strict=True)]


def packed(model: PreTrainedModel, rows: Sequence[torch.Tensor], attention: str | None = None) -> list[torch.Tensor]:
    """As verl's engine does without padding; for flash attention a function stands in."""
    places_1N = torch.cat([torch.arange(len(row)) for row in rows])[None]
    model.config._attn_implementation = attention or model.config._attn_implementation
    with patch.object(flash_attention, "_flash_attention_forward", attend):
        logits = model(input_ids=torch.cat(list(rows))[None], position_ids=places_1N, use_cache=False).logits[0]
    return list(logits.split([len(row) for row in rows]))


LAYOUTS: dict[str, tuple[Logits, bool]] = {
    "a pass": (partial(by_right_padding, masked=False), False),
    "TRL": (in_trl, True),
    "padded": (partial(by_right_padding, masked=True), True),
    "packed": (packed, True),
    "packed, flash": (partial(packed, attention="flash_attention_2"), True),
}
"""How rows are laid out, and whether in training mode."""


def config_of(name: str) -> PretrainedConfig:
    """The tiny configuration."""
    model_type, options = MODELS.get(name, (name, {}))
    config_class = transformers.CONFIG_MAPPING[model_type]
    known = inspect.signature(config_class.__init__).parameters
    return config_class(**{name: size for name, size in SIZES.items() if name in known or name == "dtype"} | options)


def build(name: str) -> PreTrainedModel:
    """The model, float32."""
    config = config_of(name)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    sdpa = model_class._supports_sdpa and name not in ("gpt_oss", "bloom")
    config._attn_implementation = "sdpa" if sdpa else "eager"
    torch.manual_seed(0)
    model = model_class(config)
    if any(expert in vars(config) for expert in ("num_experts", "num_local_experts")):
        model.set_experts_implementation("eager")
    return model


def log_probs(logits_SV: torch.Tensor, tokens_S: torch.Tensor) -> torch.Tensor:
    return logits_SV[:-1].float().log_softmax(-1).gather(1, tokens_S[1:, None])[:, 0]


def finding(model: PreTrainedModel, layout: str) -> Finding:
    """The probe's."""
    lay, training = LAYOUTS[layout]
    model.train(training)

    def run(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [log_probs(*pair) for pair in zip(lay(model, rows), rows, strict=True)]

    return probe(model, run, probe_rows(torch.arange(PAD - 1), longest=LONGEST, rows=4))


def truth(model: PreTrainedModel, layout: str) -> float:
    """Largest difference of a response's gradient, as a part of its largest value: beside another and alone, of a short one
    and of a long one."""
    lay, training = LAYOUTS[layout]
    model.train(training)
    short_S, long_S = torch.arange(3, 13), torch.arange(5, 5 + LONGEST) % 60

    def gradient(rows: list[torch.Tensor], row: int) -> torch.Tensor:
        torch.manual_seed(17 * len(rows))  # as many micro-batches more or fewer came before
        model.zero_grad()
        log_probs(lay(model, rows)[row], rows[row]).sum().backward()
        return torch.cat([values.grad.flatten() for values in model.parameters() if values.grad is not None])

    differences = []
    for place, row in ((1, short_S), (0, long_S)):
        expected, found = gradient([row], 0), gradient([long_S, short_S], place)
        differences.append(float((found - expected).abs().max() / expected.abs().max()))
    return max(differences)
