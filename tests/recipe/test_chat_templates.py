r"""The text that each model family is prompted with, from verl's own prompt builder.

Qwen3 and DeepSeek-R1-Distill bring their chat templates along; here those are restated as far as one user turn needs them.
For a single user turn the restatements render what the published templates render (compared with the copies in TRL 1.16.0).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from recipe.chat_templates import read_chat_template
from recipe.data.prompts import user_messages
from tests.real_tokenizers import llama3_tokenizer, qwen_tokenizer

BOXED = chr(92) + "boxed{}"
ASKED = f"What is $1+1$? Please reason step by step, and put your final answer within {BOXED}."
PREAMBLE = (
    "The User asks the Assistant a question. The Assistant first reasons about it and then tells the User the answer."
)

QWEN3 = """\
{%- for message in messages %}
{{- "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<|im_start|>assistant\n" }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- "<think>\n\n</think>\n\n" }}{% endif %}
{%- endif %}"""
R1_DISTILL = """\
{{- bos_token }}
{%- for message in messages %}{{- "<\uff5cUser\uff5c>" + message.content }}{% endfor %}
{%- if add_generation_prompt %}{{- "<\uff5cAssistant\uff5c><think>\n" }}{% endif %}"""


def prompt_ids(
    tokenizer: PreTrainedTokenizerFast, template: str, model_type: str, kwargs: dict[str, Any]
) -> tuple[list[int], str]:
    """What verl's agent loop makes of one problem: token ids and their text. The shared tokenizer keeps no template."""
    before = tokenizer.chat_template
    tokenizer.chat_template = template
    try:
        builder = create_continuous_token_builder(tokenizer, hf_model_type=model_type, chat_template_kwargs=kwargs)
        ids = builder.build_initial_tokens(user_messages("What is $1+1$?"))
    finally:
        tokenizer.chat_template = before
    return ids, tokenizer.decode(ids)


def test_base_model() -> None:
    tokenizer = llama3_tokenizer()
    ids, text = prompt_ids(tokenizer, read_chat_template("base_math"), "llama", {})
    assert text == f"<|begin_of_text|>{PREAMBLE}\nUser: {ASKED}\nAssistant:"
    assert ids.count(tokenizer.bos_token_id) == 1
    # No space behind the colon: the answer's first token brings its own, as in the model's training text.
    assert tokenizer.convert_ids_to_tokens(ids)[-2:] == ["Assistant", ":"]
    # A tokenizer without a beginning-of-text token, such as Qwen's, gets the same text without one.
    _, text = prompt_ids(qwen_tokenizer(), read_chat_template("base_math"), "qwen3", {})
    assert text == f"{PREAMBLE}\nUser: {ASKED}\nAssistant:"


def test_models_that_think() -> None:
    asked = f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n"
    ids, text = prompt_ids(qwen_tokenizer(), QWEN3, "qwen3", {"enable_thinking": False})
    assert text == asked + "<think>\n\n</think>\n\n"
    # <think> and </think> are one token each, with one token for the empty lines behind each of them.
    assert ids[-4:] == [151667, 271, 151668, 271]
    assert prompt_ids(qwen_tokenizer(), QWEN3, "qwen3", {})[1] == asked
    for kwargs in ({}, {"enable_thinking": False}):
        _, text = prompt_ids(llama3_tokenizer(), R1_DISTILL, "llama", kwargs)
        assert text == f"<|begin_of_text|><\uff5cUser\uff5c>{ASKED}<\uff5cAssistant\uff5c><think>\n"


def test_read_chat_template(tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages }}", encoding="utf-8")
    assert read_chat_template(str(own)) == "{{ messages }}"
    with pytest.raises(ValueError, match=r"no chat template 'chatml': give one of base_math, or the path of a \.jinja"):
        read_chat_template("chatml")
    with pytest.raises(ValueError, match="no chat template"):
        read_chat_template(str(tmp_path / "missing.jinja"))
