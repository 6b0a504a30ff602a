"""The text that base models are prompted with, from verl's own prompt builder."""

from __future__ import annotations

import pytest
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from recipe.data.specs import user_messages
from tests.core.real_tokenizers import llama3_tokenizer, qwen_tokenizer
from tests.recipe.test_launch_scripts import BASE_MATH

PROMPT = (
    "The User asks the Assistant a question. The Assistant first reasons about it and then tells the User the answer.\n"
    "User: What is $1+1$? Please reason step by step, and put your final answer within \\boxed{}.\nAssistant:"
)


@pytest.mark.parametrize(("family", "begin"), [("llama", "<|begin_of_text|>"), ("qwen3", "")])
def test_base_model(family: str, begin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the beginning-of-text token, where there is one. No space after the colon: the answer's first token brings
    its own, as in the model's training text."""
    tokenizer = llama3_tokenizer() if family == "llama" else qwen_tokenizer()
    monkeypatch.setattr(tokenizer, "chat_template", BASE_MATH)
    builder = create_continuous_token_builder(tokenizer, hf_model_type=family, chat_template_kwargs={})
    ids = builder.build_initial_tokens(user_messages("What is $1+1$?"))
    assert tokenizer.decode(ids) == begin + PROMPT
    assert tokenizer.convert_ids_to_tokens(ids)[-2:] == ["Assistant", ":"]
    assert ids.count(tokenizer.bos_token_id) == bool(begin)
