"""The SFT-initialised model of the agent task, which comes with the repository in bfloat16.

``python -m recipe.tiny.agent_warm_up`` of commit 9e6d737 made it: the tiny model that was warmed up on worked arithmetic, with
a few tokens more, trained on conversations with mistakes. ``warmed_up_agent/record.json`` has its settings. It *can* do the
task and seldom does it without a mistake, so that reinforcement learning has something to gain.

Qwen's template names its tools in a system message; here it does not, because the model knows the one there is. The fixed text
of a call is one token at each end, so that nearly all tokens that the model writes are decisions.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from recipe.tiny.agent import call_text
from recipe.tiny.model import build_tokenizer

FOLDER = Path(__file__).parent / "warmed_up_agent"
CALL_START, CALL_END = call_text("|").split("|")
REPLY_START, REPLY_END = "<tool_response>", "</tool_response>"
# As Qwen's, which shows a tool's reply as a user's message.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + ('user' if message['role'] == 'tool' else message['role']) + '\n' }}"
    "{{ '<tool_response>' + message['content'] + '</tool_response>' if message['role'] == 'tool' else message['content'] }}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_agent_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer with the fixed text of calls and replies, and a template for replies."""
    tokenizer = build_tokenizer()
    fixed = (CALL_START, CALL_END, REPLY_START, REPLY_END)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in fixed])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def load_agent() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model in float32, whose weights are bfloat16 numbers, and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32), build_agent_tokenizer()
