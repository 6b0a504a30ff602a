"""What the ranks of ``test_passes.py`` run: responses, passes, and how engines are built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from grail_advantage import Grail, Method, Oar, find_answer_span
from grail_advantage.data import Row
from grail_advantage.method import build
from tests.core.tiny_models import ROLLOUTS, Rollout, char_tokenizer, encode, tiny_model
from tests.verl_ext.engines import REFERENCE, Setup, Sizes

LONG = "One and one is two, and two is three, " * 4
NAMES = (
    *("text after the box", "several boxes", "empty box", "box at the start", "one token before the box"),
    *("box at the end", "truncated second box", "right"),
)
BATCH = [
    *(replace(ROLLOUTS[name], advantage=-0.5) for name in NAMES),
    Rollout("How long can it be?", LONG + r"so \boxed{3}, I would say.<end>", -0.5),
    Rollout("And this one?", LONG[:90] + r"so \boxed{12}.<end>", -0.5),
    Rollout("Recite.", rf"So \boxed{{{'one, two, ' * 4}}} it is.", -0.5),
    Rollout("?", r"\boxed{1}", -0.5),
]
"""Twelve responses, which one to four ranks share; the longest is many times the shortest."""
SHORT = [rollout for rollout in BATCH[:8] if not rollout.response.startswith("\\boxed{7}")]
"""Responses with reasoning, whose tokens are so few that each can have a counterfactual."""
GROUPS = (
    [*(ROLLOUTS[name] for name in ("right", "text after the box", "no box")), Rollout("How long?", LONG, 1.0)],
    [*(ROLLOUTS[name] for name in ("several boxes", "right, several boxes")), *(ROLLOUTS["empty box"],) * 2],
)
"""Whole groups of odd and of even ranks; the last response of the second fills it up, and has no group."""
SALIENCY: dict[str, tuple[Method, float, Sizes]] = {
    "saliency": (Grail("official"), 1.0, Sizes(rows=1)),
    "saliency, robust": (Grail("robust", gate="all"), 0.7, Sizes(rows=3)),
    "saliency, first": (Grail("robust", gate="all", leaf="first"), 1.0, Sizes(budget=260)),
    "saliency, middle": (Grail("official", leaf="middle"), 1.3, Sizes(rows=3)),
    "saliency, last": (Grail("official", leaf="last"), 1.0, Sizes(budget=260)),
}
GRADIENT: dict[str, tuple[Method, float, Sizes]] = {
    "oar_g": (Oar(), 1.0, Sizes(rows=1)),
    "oar_g, joint": (Oar(probe="answer_joint", noise_seed=3), 1.0, Sizes(rows=3)),
    "oar_g, port, last": (Oar(variant="grail_port", probe="last"), 1.0, Sizes(budget=260)),
    "oar_g, port, mean": (Oar(variant="grail_port"), 1.0, Sizes(rows=3)),
}
PERTURBATION: dict[str, tuple[Method, float, Sizes]] = {
    "oar_p": (Oar("perturbation"), 1.0, Sizes(rows=5)),
    "oar_p, port, last": (Oar("perturbation", probe="last", variant="grail_port"), 1.0, Sizes(budget=400)),
    "oar_p, few, joint": (Oar("perturbation", probe="answer_joint", max_perturbations=7), 1.0, Sizes(budget=260)),
}
INFERENCE: dict[str, tuple[Method, float, Sizes]] = {
    "rlsd": (build("rlsd"), 0.7, Sizes(rows=1)),
    "shear": (build("shear", {"window": 12, "stride": 5}), 0.7, Sizes(rows=3)),
    "rlsd, budget": (build("rlsd"), 0.7, Sizes(budget=100)),
    "shear, budget": (build("shear", {"window": 12, "stride": 5}), 0.7, Sizes(budget=100)),
}
"""A budget of fewer tokens than the longest response has."""
KINDS = (SALIENCY, GRADIENT, PERTURBATION, INFERENCE)
OWN = {name: how for kind in KINDS for name, how in kind.items()}
_OFFLOADED = {"param_offload": True, "optimizer_offload": True}
_MULTIPLE = {"pad_to_length": True, "pad_to_length_bucket": 64}
_ORIGINAL = {"use_orig_params": True}
_SLICED = {"packed": True, "attention": REFERENCE}
SETUPS = {
    "fsdp, tied, no checkpointing": Setup("llama-tied", "fsdp", checkpointing=False, turn=1),
    "fsdp2, packed": Setup("qwen3", packed=True),
    "fsdp, parameters offloaded": Setup("qwen3", "fsdp", options=_OFFLOADED, turn=3),
    "fsdp2, activations offloaded": Setup("qwen3", activation_offload=True, turn=5),
    "fsdp, fused kernels": Setup("qwen3", "fsdp", kernels="torch", turn=6),
    "fsdp2, lora": Setup("qwen3-tied", adapter="adapter", turn=7),
    "fsdp, lora on the head": Setup("qwen3", "fsdp", adapter="adapter-head", turn=8),
    "fsdp2, lora on the tied head": Setup("qwen3-tied", adapter="adapter-tied-head", turn=9),
    "fsdp, lora on the embeddings": Setup("qwen3", "fsdp", adapter="adapter-embeddings", options=_ORIGINAL, turn=10),
    "fsdp, lora beside whole embeddings and head": Setup(
        "qwen3", "fsdp", adapter="adapter-saved", options=_ORIGINAL, turn=11
    ),
    "fsdp2, tied, 2 a sequence": Setup("llama-tied", sequence_parallel=2, **_SLICED, turn=12),
    "fsdp2, parameters offloaded by FSDP2": Setup("qwen3", options={"offload_policy": True}, turn=13),
    "fsdp, 4 ranks, 4 a sequence, packed to a multiple of 64": Setup(
        "qwen3", "fsdp", ranks=4, sequence_parallel=4, options=_MULTIPLE, turn=16, **_SLICED
    ),
}
ALL_PASSES = ("fsdp2, packed",)
"""Set-ups that run every pass; the others run one of each kind, in turn."""


def passes_of(setup: str) -> list[str]:
    """The passes of their own that a set-up runs."""
    how = SETUPS[setup]
    turn = how.turn
    kinds = [SALIENCY]
    if how.sequence_parallel == 1:
        kinds += [INFERENCE] if how.kernels else [GRADIENT, PERTURBATION, INFERENCE]
    if setup in ALL_PASSES:
        return [name for kind in kinds for name in kind]
    # Fused kernels give log-probabilities, which of the two only RLSD asks for.
    return [list(kind)[(0 if how.kernels and kind is INFERENCE else turn) % len(kind)] for kind in kinds]


def row_of(rollout: Rollout, place: int = 0, span: str = "first", group: int = 0) -> Row:
    """A response for a pass."""
    prompt, response = encode(rollout.prompt), encode(rollout.response)
    found, tokens = find_answer_span(response, char_tokenizer(), span), torch.tensor(prompt + response)
    return Row(tokens, len(prompt), len(response), found, rollout.advantage, group, place)


def pass_rows(name: str, rank: int, size: int) -> tuple[list[Rollout], list[Row]]:
    """The share of a data-parallel rank for a pass: rollouts, and prepared responses."""
    signal, inference = OWN[name][0], name in INFERENCE
    rollouts = list(GROUPS[rank % 2]) if inference else (BATCH if name in SALIENCY else SHORT)[rank::size]
    if not inference and name not in SALIENCY and len(rollouts) < -(-len(SHORT) // size):
        rollouts.append(SHORT[4])  # fills up, as the trainer does
    rows = []
    for place, rollout in enumerate(rollouts):
        group = -1 if inference and (rank % 2, place) == (1, 3) else rank
        row = row_of(rollout, place, signal.span, group)
        rows.append(row if inference else signal.prepare(row, char_tokenizer()))
    return rollouts, rows


PLAIN = {"fsdp": Setup("qwen3", "fsdp"), "fsdp2": Setup("qwen3")}

_DROPOUT = {"attention_dropout": 0.5}
MODELS = {
    "qwen3": {"family": "qwen3", **_DROPOUT},
    "qwen3-tied": {"family": "qwen3", "tied": True, **_DROPOUT},
    "llama": {"family": "llama", **_DROPOUT},
    "llama-tied": {"family": "llama", "tied": True, **_DROPOUT},
    "wide": {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "initializer_range": 0.1},
}
"""With dropout in training, so that a pass that forgets to switch it off, or draws random numbers, is seen."""
ADAPTERS = {
    "adapter": ("qwen3-tied", {"target_modules": "all-linear"}),
    "adapter-head": ("qwen3", {"target_modules": ["q_proj", "down_proj", "lm_head"]}),
    "adapter-tied-head": ("qwen3-tied", {"target_modules": ["q_proj", "down_proj", "lm_head"]}),
    "adapter-embeddings": ("qwen3", {"target_modules": ["q_proj", "embed_tokens"]}),
    "adapter-saved": ("qwen3", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
}
"""LoRA adapters by name: the model that they belong to and what they adapt."""


def write_models(folder: Path) -> dict[str, PreTrainedModel]:
    """Write the models that the ranks load, and return them."""
    models = {}
    for seed, (name, options) in enumerate(MODELS.items()):
        models[name] = tiny_model(seed=seed, **options)
        models[name].save_pretrained(folder / name)
    for name, (base, options) in ADAPTERS.items():
        seed = list(MODELS).index(base)
        torch.manual_seed(0)
        adapted = get_peft_model(
            tiny_model(seed=seed, **MODELS[base]), LoraConfig(task_type="CAUSAL_LM", r=4, **options)
        )
        for path, parameter in adapted.named_parameters():
            if "lora_B" in path or "lora_embedding_A" in path:  # zeros when new, which would leave the model as it was
                torch.nn.init.normal_(parameter, std=0.3)
        adapted.save_pretrained(folder / name)
        models[name] = PeftModel.from_pretrained(tiny_model(seed=seed, **MODELS[base]), folder / name).eval()
    return models
