"""A Qwen3-architecture model of 0.65 M parameters and its tokenizer: a byte-level BPE like Qwen's, with no merges but
those that make ``user``, ``assistant`` and ``boxed`` one token each. Every other character is a token of its own, and
all that knows Qwen's tokenizer (vLLM, verl's agent loop, the answer span finder) knows this one."""

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
WHOLE_WORDS = ("user", "assistant", "boxed")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MAX_POSITIONS = 256


def build_tokenizer(words: Sequence[str] = WHOLE_WORDS) -> PreTrainedTokenizerFast:
    """Tokenizer with 256 byte tokens, a few words (and the prefixes that BPE needs on the way) and Qwen's special
    tokens.

    No word may begin with another's prefix of two letters or more.
    """
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = []
    for word in words:
        # BPE comes to user by the merges u+s, us+e and use+r.
        for end in range(1, len(word)):
            merges.append((word[:end], word[end]))
            tokens.append(word[: end + 1])
    tokens += [END_OF_TEXT, TURN_START, TURN_END]
    backend = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        padding_side="left",
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Freshly initialised float32 model whose vocabulary is exactly the tokenizer's: with a larger one, as models
    usually have, the sampler would mask tokens that the trainer does not."""
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        **special,
        bos_token_id=None,
        dtype="float32",
    )
    # The caller's random numbers go on as if none had been drawn here.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**special, do_sample=True)
    return model
