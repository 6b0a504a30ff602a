"""Models of published shapes with random weights, a tokenizer of as many words, and responses of random words.

Nothing is downloaded. Random weights take the time and memory of trained ones. Needs torch, transformers and pydantic alone.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from functools import cache

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from grail_advantage import Example
from grail_advantage.data import Rollouts
from verl_cpu.tiny.model import CHAT_TEMPLATE, END_OF_TEXT, TURN_END, TURN_START

LETTERS = 256
"""The first tokens of :func:`wordy_tokenizer`, one a byte."""
ANSWER, AFTER_ANSWER = r"\boxed{42}", 16
"""The end of a response, and the words after it."""
GROUP_ROWS = 8
"""Responses that answer one prompt, as near as the batch allows."""
NAMES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
SHAPES = {
    name: dict(zip(NAMES, sizes, strict=True))
    for name, sizes in {
        "Qwen3-0.6B": (151936, 1024, 3072, 28, 16, 8, 128),
        "Qwen3-4B": (151936, 2560, 9728, 36, 32, 8, 128),
        # One forward over the batch of the CPU benchmarks takes about a second on one thread, almost all of it matrix products.
        "small": (8192, 256, 768, 6, 4, 2, 64),
        "toy": (512, 32, 64, 2, 2, 1, 32),
    }.items()
}
"""Options of ``Qwen3Config`` by the shape's name."""


def random_model(shape: Mapping[str, int], device: str, dtype: torch.dtype, tied: bool = True) -> PreTrainedModel:
    """A Qwen3 model with freshly drawn weights, in evaluation mode."""
    config = Qwen3Config(**shape, tie_word_embeddings=tied, max_position_embeddings=32768, attn_implementation="sdpa")
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


@cache
def wordy_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Single bytes, then words without a meaning, as many as the vocabulary needs, and Qwen's special tokens."""
    letters, special = sorted(pre_tokenizers.ByteLevel.alphabet()), [END_OF_TEXT, TURN_START, TURN_END]
    words = [*letters, *(f"w{index}" for index in range(vocabulary - LETTERS - len(special))), *special]
    backend = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = {"pad_token": END_OF_TEXT, "eos_token": TURN_END, "additional_special_tokens": [TURN_START]}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHAT_TEMPLATE, **names)


def made_up_rollouts(
    rows: int, tokens: int, prompt: int, vocabulary: int, selected: int, zero_advantage: int = 0
) -> Rollouts:
    """Responses of random words that end in an answer and a few words after it.

    Args:
        rows: number of responses.
        tokens: of a prompt and its response together.
        prompt: tokens of a prompt.
        vocabulary: of :func:`wordy_tokenizer`.
        selected: responses that are incorrect and so need scores. They come first.
        zero_advantage: responses whose group is all of a kind, so that they have no advantage. They come last.
    """
    tokenizer = wordy_tokenizer(vocabulary)
    answer = torch.tensor(tokenizer.encode(ANSWER, add_special_tokens=False))
    generator = torch.Generator().manual_seed(0)
    ids_BL = torch.randint(LETTERS, vocabulary - 3, (rows, tokens), generator=generator)
    ids_BL[:, -AFTER_ANSWER - len(answer) : -AFTER_ANSWER] = answer
    right = rows - selected - zero_advantage
    advantages_B = torch.tensor([-0.5] * selected + [0.5] * right + [0.0] * zero_advantage)
    # The question has as many letters as the prompt has tokens.
    example = Example([{"role": "user", "content": "x" * prompt}], {"reward_model": {"ground_truth": "42"}}, {})
    rollouts = Rollouts(
        prompts=list(ids_BL[:, :prompt]),
        responses=list(ids_BL[:, prompt:]),
        mask=torch.ones(rows, tokens - prompt, dtype=torch.bool),
        advantages=advantages_B,
        tokenizer=tokenizer,
        # Incorrect and correct responses are dealt out to all prompts alike.
        groups=torch.arange(rows) % max(1, round(rows / GROUP_ROWS)),
        rewards=(advantages_B > 0).double(),
        examples=[example] * rows,
        fields={"tool_rewards": [[]] * rows},
    )
    for which in ("first", "last"):  # finding answers is no part of what is timed
        rollouts.spans(which)
    return rollouts


def release() -> None:
    """Give back what dropped tensors held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
