"""Tiny models of the architectures that people train, drawn at random, and what verl's engine computes with them, for
``test_models.py``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from grail_advantage import Grail, Method, compute_token_weights
from grail_advantage.data import Row
from grail_advantage.verl_ext.engine_model import EngineModel
from grail_advantage.verl_ext.exchange import FORWARD, PADDED_FORWARD, UPDATE
from tests.core import reference
from tests.core.tiny_models import PAD_ID, ROLLOUTS, SIZES, char_tokenizer, encode, id_to_character, make_batch
from tests.verl_ext.engines import Setup, Sizes, build_engine, own_pass
from tests.verl_ext.pass_plan import row_of
from tests.verl_ext.ranks import of_all_ranks, start_ranks

WINDOW = 20
"""Tokens that a sliding attention sees: fewer than a sequence has."""
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
_MOE = {"num_experts_per_tok": 2, "output_router_logits": True}


_DELTA = {f"linear_{name}_head_dim": 8 for name in ("key", "value")} | {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "layer_types": ["linear_attention", "full_attention"],
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2.5": ("Qwen2Config", {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3Config", {}),
    "Qwen3-MoE": ("Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 32, **_MOE}),
    "Qwen3.5, text": ("Qwen3_5TextConfig", _DELTA),
    "Llama 3": ("LlamaConfig", {}),
    "Mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "Gemma 2": ("Gemma2Config", {**MIXED, "tie_word_embeddings": True}),
    "Gemma 3, text": ("Gemma3TextConfig", {**MIXED, "tie_word_embeddings": True}),
    "Phi-4": ("Phi3Config", {}),
    "GPT-OSS": ("GptOssConfig", {**MIXED, "num_local_experts": 4, **_MOE}),
    "OLMo 2": ("Olmo2Config", {}),
    "OLMo 3": ("Olmo3Config", MIXED),
}
"""The configuration's class, and what the tiny one has besides the common sizes."""
EAGER = ("GPT-OSS",)
"""Without sdpa; what the model falls back on without flash attention."""
_COMMON = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": False}
BATCH = [ROLLOUTS[name] for name in ("text after the box", "box at the end", "several boxes", "right")]
PRESETS: dict[str, dict[str, Any]] = {
    "grail": {"preset": "official", "gate": "all"},
    "grail, middle": {"preset": "robust", "gate": "all", "leaf": "middle"},
}
SIGNALS: dict[str, Method] = {name: Grail(**options) for name, options in PRESETS.items()}
PROBED, LONGEST = (UPDATE, FORWARD, PADDED_FORWARD), 40


def attention_of(name: str) -> str:
    return "eager" if name in EAGER else "sdpa"


@cache
def model_of(name: str) -> PreTrainedModel:
    """The tiny model, float32 and in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config_class, options = FAMILIES[name]
        config = getattr(transformers, config_class)(**SIZES | _COMMON | options)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_of(name))
    model.set_experts_implementation("eager")  # the other computes in no float64
    return model.eval()


def folder_of(name: str) -> str:
    """Its folder's name."""
    return name.replace(", ", "-").replace(" ", "-").lower()


@cache
def plainly(name: str, signal: str) -> list[tuple[list[float], list[float]]]:
    """Scores and weights of each response by autograd alone in float64, one at a time and without padding."""
    rows = []
    for rollout in BATCH:
        prompt, response = encode(rollout.prompt), encode(rollout.response)
        ids, start = prompt + response, len(prompt)
        mask = [int(place >= start) for place in range(len(ids))]
        row = ([ids], [[1] * len(ids)], [mask], [rollout.advantage], reference.resolve(**PRESETS[signal]))
        found = reference.reference_weights(reference.PlainModel(model_of(name)), id_to_character(), *row)
        rows.append((found.scores[0][start:], found.weights[0][start:]))
    return rows


def by_function(name: str, signal: str, padding: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same by :func:`compute_token_weights` on padded rows."""
    batch = make_batch(BATCH, padding)
    found = compute_token_weights(model_of(name), char_tokenizer(), *batch.tensors(), SIGNALS[signal])
    masks = batch.response_mask.bool()
    return [(found.scores[row, mask], found.weights[row, mask]) for row, mask in enumerate(masks)]


def pass_rows(signal: Method) -> list[Row]:
    """The batch for a pass in the engine."""
    rows = [row_of(rollout, place, signal.span, place) for place, rollout in enumerate(BATCH)]
    return [signal.prepare(row, char_tokenizer()) for row in rows]


class Engine:
    """verl's engine with each model."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.folder = folder

    def passes(self, case: tuple[str, bool]) -> dict[str, Any]:
        """Scores of the passes, or by which words they are refused, and what the probe finds."""
        name, packed = case
        setup = Setup(folder_of(name), ranks=1, packed=packed, attention=attention_of(name))
        engine = build_engine(setup, self.folder)
        sizes = Sizes(rows=len(BATCH))
        results: dict[str, Any] = {}
        try:
            for known, signal in SIGNALS.items():
                results[known] = own_pass(engine, pass_rows(signal), signal, sizes, pad_token=PAD_ID)["scores"]
        except ValueError as error:
            results["refused"] = str(error)
        tokens_S = torch.arange(PAD_ID)
        with engine.eval_mode():
            model = EngineModel(engine, temperature=1.0)
            results["findings"] = {layout: model.probe(layout, tokens_S, LONGEST) for layout in PROBED}
        return results


CASES = {f"{name}, {'packed' if packed else 'padded'}": (name, packed) for name in FAMILIES for packed in (True, False)}


def measure(folder: Path) -> dict[str, dict[str, Any]]:
    """What the engine computes, by the name of a case."""
    for name in FAMILIES:
        model_of(name).save_pretrained(folder / folder_of(name))
        char_tokenizer().save_pretrained(folder / folder_of(name))
    results = start_ranks("models", folder, 1)
    return {case: of_all_ranks(results, "passes", case)[0] for case in CASES}


def error(found: Sequence[torch.Tensor], expected: Sequence[Sequence[float]]) -> float:
    """Largest difference, as a part of the largest expected value of its response. Values after the last of ``found`` must
    be 0, or NaN as there are none."""
    errors = [0.0]
    for of_row, values in zip(found, expected, strict=True):
        expected_T = torch.tensor(values)
        rest_T, expected_T = expected_T[len(of_row) :], expected_T[: len(of_row)]
        assert torch.equal(of_row.isnan(), expected_T.isnan()) and not rest_T.nan_to_num().any()
        known_T = ~expected_T.isnan()
        errors.append(float((of_row - expected_T)[known_T].abs().max() / expected_T[known_T].abs().max()))
    return max(errors)
