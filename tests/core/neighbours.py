"""What the probe says of tiny models drawn at random, against the truth: the gradient of a response alone and beside others.

``test_probe.py`` takes those that were once got wrong, and those that people train. A further model by name is a line in
``MODELS``.
"""

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
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "moe_intermediate_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "encoder_attention_heads"), 4),
    **{"num_key_value_heads": 2, "num_experts_per_tok": 2, "head_dim": 8, "bos_token_id": 97},
    **{"initializer_range": 0.3, "tie_word_embeddings": False, "is_decoder": True},
}
"""Of every configuration; one that has no such option keeps it unread."""
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [8.0] * 4,
    },
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 32}
DELTA = {f"linear_{name}_head_dim": 8 for name in ("key", "value")} | {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "layer_types": ["linear_attention", "full_attention"],
}
STATE = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_ssm": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3, longrope": ("phi3", LONGROPE),
    "llama, dynamic": ("llama", DYNAMIC),
    "mixtral, jitter": ("mixtral", {"router_jitter_noise": 0.1}),
    "qwen2, dropout": ("qwen2", {"attention_dropout": 0.1}),
    "opt, layerdrop": ("opt", {"layerdrop": 0.5}),
    "recurrent_gemma": ("recurrent_gemma", {"num_hidden_layers": 3}),  # the third has attention
    "qwen3_5_text": ("qwen3_5_text", DELTA),
    "qwen3_next": ("qwen3_next", DELTA),
    "olmo_hybrid": ("olmo_hybrid", DELTA),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 1, "chunk_size": 16}),
    "bamba": ("bamba", {**STATE, "attn_layer_indices": [1]}),
    "falcon_h1": ("falcon_h1", STATE),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "gpt_neo": ("gpt_neo", {"attention_types": [[["global"], 2]]}),
    "gemma2": ("gemma2", {"sliding_window": 20}),
    "gpt_oss": ("gpt_oss", {"sliding_window": 20}),
}
"""Beside those of :data:`MODEL_FOR_CAUSAL_LM_MAPPING`, or in place of one: its type, and further options."""
EAGER = ("gpt_oss", "recurrent_gemma", "bloom")

Logits = Callable[[PreTrainedModel, Sequence[torch.Tensor]], list[torch.Tensor]]


def by_right_padding(model: PreTrainedModel, rows: Sequence[torch.Tensor], *, masked: bool) -> list[torch.Tensor]:
    """As passes lay rows out, or with a mask and positions as verl's engine does."""
    ids_BS = pad_sequence(list(rows), batch_first=True)
    valid_BS = torch.arange(ids_BS.shape[1]) < torch.tensor([[len(row)] for row in rows])
    named: dict[str, torch.Tensor] = {"attention_mask": torch.ones_like(ids_BS)}
    if masked:
        named = {"attention_mask": valid_BS.long(), "position_ids": torch.arange(ids_BS.shape[1]) * valid_BS}
    logits = model(input_ids=ids_BS, use_cache=False, **named).logits
    return [of_row[: len(row)] for of_row, row in zip(logits, rows, strict=True)]


def in_trl(model: PreTrainedModel, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Half of a row is its prompt, padded on the left, the rest its completion; widths are those of the generation batch."""
    width = LONGEST // 2
    ids_BL = torch.full((len(rows), 2 * width), PAD)
    mask_BL = torch.zeros_like(ids_BL)
    places = [slice(width - len(row) // 2, width - len(row) // 2 + len(row)) for row in rows]
    for row, (tokens_S, at) in enumerate(zip(rows, places, strict=True)):
        ids_BL[row, at], mask_BL[row, at] = tokens_S, 1
    logits = model(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False).logits
    return [of_row[at] for of_row, at in zip(logits, places, strict=True)]


def packed(model: PreTrainedModel, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As verl's engine does without padding."""
    places_1N = torch.cat([torch.arange(len(row)) for row in rows])[None]
    logits = model(input_ids=torch.cat(list(rows))[None], position_ids=places_1N, use_cache=False).logits[0]
    return list(logits.split([len(row) for row in rows]))


def packed_flash(model: PreTrainedModel, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """With flash attention, for which a function stands in."""
    with patch.object(flash_attention, "_flash_attention_forward", attend):
        own, model.config._attn_implementation = model.config._attn_implementation, "flash_attention_2"
        try:
            return packed(model, rows)
        finally:
            model.config._attn_implementation = own


LAYOUTS: dict[str, tuple[Logits, bool]] = {
    "a pass": (partial(by_right_padding, masked=False), False),
    "TRL": (in_trl, True),
    "padded": (partial(by_right_padding, masked=True), True),
    "packed": (packed, True),
    "packed, flash": (packed_flash, True),
}
"""How rows are laid out, and whether in training mode."""


def config_of(name: str) -> PretrainedConfig:
    """The tiny configuration, without dropout unless its name says so."""
    model_type, options = MODELS.get(name, (name, {}))
    config_class = transformers.CONFIG_MAPPING[model_type]
    known = inspect.signature(config_class.__init__).parameters
    sizes = {name: value for name, value in SIZES.items() if name in known}
    config = config_class(**(sizes | {"dtype": "float32"} | options))
    for option, value in vars(config).items():
        if "drop" in option and isinstance(value, float) and option not in options:
            setattr(config, option, 0.0)
    return config


def build(name: str) -> PreTrainedModel:
    """The model, float32.

    Raises:
        ValueError: it is too large all the same.
    """
    config = config_of(name)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config._attn_implementation = "eager"
    with torch.device("meta"):
        if sum(values.numel() for values in model_class(config).parameters()) > 2e7:
            raise ValueError("it is large at the smallest size")
    config._attn_implementation = "sdpa" if model_class._supports_sdpa and config.model_type not in EAGER else "eager"
    torch.manual_seed(0)
    model = model_class(config)
    if any(expert in vars(config) for expert in ("num_experts", "num_local_experts", "n_routed_experts")):
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

    rows = probe_rows(torch.arange(PAD - 1), longest=LONGEST, rows=4)
    return probe(model, run, rows, cuts=layout != "TRL")


def truth(model: PreTrainedModel, layout: str) -> float:
    """Largest difference of a response's gradient, as a part of its largest value: beside another and alone, of a short one
    and of a long one; and where tails are cut, with the rest of the response behind it and without."""
    lay, training = LAYOUTS[layout]
    model.train(training)
    short_S, long_S = torch.arange(3, 13), torch.arange(5, 5 + LONGEST) % 60

    def gradient(rows: list[torch.Tensor], row: int, length: int) -> torch.Tensor:
        torch.manual_seed(17 * len(rows))  # as many micro-batches more or fewer came before
        model.zero_grad()
        log_probs(lay(model, rows)[row][:length], rows[row][:length]).sum().backward()
        return torch.cat([values.grad.flatten() for values in model.parameters() if values.grad is not None])

    half = LONGEST // 2
    cases = [([short_S], [long_S, short_S], 1, len(short_S)), ([long_S], [long_S, short_S], 0, LONGEST)]
    if layout != "TRL":
        cases.append(([long_S[:half]], [long_S], 0, half))
    differences = []
    for alone, whole, row, length in cases:
        expected, found = gradient(alone, 0, length), gradient(whole, row, length)
        differences.append(float((found - expected).abs().max() / expected.abs().max()))
    return max(differences)
