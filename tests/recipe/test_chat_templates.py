"""The text that base models are prompted with, from verl's own prompt builder."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from recipe.data.specs import user_messages
from tests.core.real_tokenizers import llama3_tokenizer, qwen_tokenizer
from tests.recipe.test_launch_scripts import BASE_MATH

BOXED = chr(92) + "boxed{}"
ASKED = f"What is $1+1$? Please reason step by step, and put your final answer within {BOXED}."
PREAMBLE = (
    "The User asks the Assistant a question. The Assistant first reasons about it and then tells the User the answer."
)


def prompt_ids(tokenizer: PreTrainedTokenizerFast, model_type: str) -> tuple[list[int], str]:
    """What verl's agent loop makes of one problem: token ids and their text. The shared tokenizer keeps no template."""
    before, tokenizer.chat_template = tokenizer.chat_template, BASE_MATH
    try:
        builder = create_continuous_token_builder(tokenizer, hf_model_type=model_type, chat_template_kwargs={})
        ids = builder.build_initial_tokens(user_messages("What is $1+1$?"))
    finally:
        tokenizer.chat_template = before
    return ids, tokenizer.decode(ids)


def test_base_model() -> None:
    tokenizer = llama3_tokenizer()
    ids, text = prompt_ids(tokenizer, "llama")
    assert text == f"<|begin_of_text|>{PREAMBLE}\nUser: {ASKED}\nAssistant:"
    assert ids.count(tokenizer.bos_token_id) == 1
    # No space after the colon: the answer's first token brings its own, as in the model's training text.
    assert tokenizer.convert_ids_to_tokens(ids)[-2:] == ["Assistant", ":"]
    # A tokenizer without a beginning-of-text token, such as Qwen's, gets the same text without one.
    _, text = prompt_ids(qwen_tokenizer(), "qwen3")
    assert text == f"{PREAMBLE}\nUser: {ASKED}\nAssistant:"
