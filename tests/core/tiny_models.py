"""Tiny models of every family, a tokenizer whose tokens are single characters, and rollouts written as plain strings.

Weights are drawn with a standard deviation of 0.3 instead of 0.02, so that attention is far from uniform and every
position's gradient is well above the epsilon of the log scores.
"""

import copy
import inspect
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from grail_advantage import Method, TokenWeights, check, compute_token_weights
from grail_advantage.check import CHARACTERS, END

PAD = check.PAD
char_tokenizer = cache(check.char_tokenizer)
PAD_ID = len(CHARACTERS)
END_ID = len(CHARACTERS) + 1


def encode(text: str) -> list[int]:
    """Token ids, one a character; a trailing ``<end>`` is the end token."""
    body = text.removesuffix(END)
    return [CHARACTERS.index(character) for character in body] + [END_ID] * text.endswith(
        END
    )


BRACKETS = """\
{%- for message in messages %}{{ "[" + message.role + "]" + message.content }}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""


def with_template(
    tokenizer: PreTrainedTokenizerFast, template: str
) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return with_template(char_tokenizer(), BRACKETS)


def decode(ids: Iterable[int]) -> str:
    """A character a token, of the two special tokens one that is in no text."""
    return "".join([*CHARACTERS, "\0", "\0"][token] for token in ids)


def read_lines(name: str) -> list[Any]:
    """The cases of a file of this folder, one JSON value a line."""
    text = Path(__file__).with_name(name).read_text()
    return list(map(json.loads, text.splitlines()))


SIZES = {
    "vocab_size": len(CHARACTERS) + 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": PAD_ID,
    "bos_token_id": None,
    "eos_token_id": END_ID,
    "dtype": "float32",
}


def tiny_model(
    family: str = "qwen3", *, tied: bool = False, layers: int = 4, seed: int = 0, **options
):
    """A freshly drawn float32 model in evaluation mode; ``options`` go into its configuration."""
    sizes = {**SIZES, "num_hidden_layers": layers, "tie_word_embeddings": tied, **options}
    return drawn(transformers.CONFIG_MAPPING[family](**sizes), seed).eval()


def drawn(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with random values, the same ones every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config)


_DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
FAMILY_SIZES = {
    # One size by the names that it has.
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "moe_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "num_heads", "n_head", "num_experts", "num_local_experts"),
        4,
    ),
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 97,
    "eos_token_id": 98,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "dtype": "float32",
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "is_decoder": True,
    "intermediate_size": 64,
}
"""Of every configuration that has such an option."""


@dataclass(frozen=True)
class Family:
    """A kind of model: transformers' type, options beside the common sizes, and its attention on a CPU."""

    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"

    def build(self, **sizes) -> PreTrainedModel:
        """The model, float32, always with the same values; with other sizes where they are given."""
        config_class = transformers.CONFIG_MAPPING[self.model_type]
        names = {*inspect.signature(config_class.__init__).parameters, "dtype"}
        sizes = {
            name: size for name, size in (FAMILY_SIZES | sizes).items() if name in names
        }
        config = config_class(**sizes | self.options, attn_implementation=self.attention)
        model = drawn(config)
        # The grouped kernels of experts need a GPU.
        if any(expert in vars(config) for expert in ("num_experts", "num_local_experts")):
            model.set_experts_implementation("eager")
        return model


_LONG = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [8.0] * 4,
    },
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "qwen3": Family("qwen3"),
    "bloom": Family("bloom", attention="eager"),
    "gemma2": Family("gemma2", {"sliding_window": 20}),
    "lfm2": Family("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "llama, dynamic": Family(
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
            "max_position_embeddings": 32,
        },
    ),
    # Positions of its own; sinks; frequencies by the longest response; not causal; draws in training; every kind at once.
    "ministral3": Family("ministral3"),
    "gpt_oss": Family("gpt_oss", {"sliding_window": 20}, "eager"),
    "phi3, longrope": Family("phi3", _LONG),
    "cpmant": Family("cpmant", attention="eager"),
    "mixtral, jitter": Family("mixtral", {"router_jitter_noise": 0.1}),
    "doge": Family("doge"),
    "qwen3_next": Family("qwen3_next", _DELTA),
}
"""Each kind of attention, state, position and dependence of a response on those beside it once."""


@dataclass(frozen=True)
class Rollout:
    """One response: prompt, response (may be empty, may end in ``<end>``) and advantage."""

    prompt: str
    response: str
    advantage: float


@dataclass(frozen=True)
class Batch:
    """Padded tensors as ``compute_token_weights`` takes them; (B, L) and (B,)."""

    input_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    advantages: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.input_ids, self.attention_mask, self.response_mask, self.advantages

    def of_responses(self, values_BL: Tensor) -> list[list[float]]:
        """Each response's values."""
        # Padding and prompts are left out.
        rows = zip(values_BL, self.response_mask == 1, strict=True)
        return [row[mask].tolist() for row, mask in rows]


def make_batch(rollouts: list[Rollout], padding: str = "left", extra: int = 0) -> Batch:
    """Pad rows on the ``left``, on the ``right``, or on ``both`` sides, prompts left and responses right; ``extra`` wider."""
    texts = [(encode(rollout.prompt), encode(rollout.response)) for rollout in rollouts]
    widest_prompt = max(len(prompt) for prompt, _ in texts)
    widest = max(len(prompt) + len(response) for prompt, response in texts)
    # The prompts end, and the responses begin, in one column.
    if padding == "both":
        widest = widest_prompt + max(len(response) for _, response in texts)
    ids_BL = torch.full((len(texts), widest + extra), PAD_ID)
    # 1 on prompts, 2 on responses.
    kinds_BL = torch.zeros_like(ids_BL)
    for row, (prompt, response) in enumerate(texts):
        tokens = prompt + response
        spare = {
            "left": widest + extra - len(tokens),
            "right": 0,
            "both": widest_prompt - len(prompt),
        }
        place = slice(spare[padding], spare[padding] + len(tokens))
        ids_BL[row, place] = torch.tensor(tokens)
        kinds_BL[row, place] = torch.tensor([1] * len(prompt) + [2] * len(response))
    advantages = torch.tensor([rollout.advantage for rollout in rollouts])
    return Batch(ids_BL, (kinds_BL > 0).long(), (kinds_BL == 2).long(), advantages)


ROLLOUTS = {line.pop("name"): Rollout(**line) for line in read_lines("rollouts.jsonl")}
"""By what is special about their answer."""


def rollouts_named(*names: str) -> list[Rollout]:
    return [ROLLOUTS[name] for name in names]


def compute(model, batch: Batch, method: Method, tokenizer=None, **parts) -> TokenWeights:
    """By the plain function, with the tokenizer of single characters."""
    return compute_token_weights(
        model, tokenizer or tiny_tokenizer(), *batch.tensors(), method, **parts
    )


def plain_columns(
    model, prompt: list[int], response: list[int], temperature: float
) -> tuple[list, list]:
    """Log-probabilities and entropies of a response: alone, by all logits and in loops."""
    with torch.no_grad():
        logits_SV = (
            model(input_ids=torch.tensor([prompt + response])).logits[0] / temperature
        )
    log_probs = []
    entropies = []
    for logits_V, token in zip(
        logits_SV[len(prompt) - 1 :].tolist(), response, strict=False
    ):
        total = math.fsum(map(math.exp, logits_V))
        log_probs.append(logits_V[token] - math.log(total))
        # H = log Z - sum p x
        entropies.append(
            math.log(total) - math.fsum(x * math.exp(x) / total for x in logits_V)
        )
    return log_probs, entropies
