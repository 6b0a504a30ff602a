"""The SFT-initialised models that come with this package, in bfloat16, so that no example need make them first.

``warmed_up`` is the tiny model that knows the worked arithmetic and slips at it; ``warmed_up_agent`` the same with a
tool, which can do the task and seldom does it without a mistake. ``python -m verl_cpu.tiny.make_models`` makes them
anew.
"""

import hashlib
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from verl_cpu.tiny.agent import call_text
from verl_cpu.tiny.model import TURN_END, TURN_START, build_tokenizer

FOLDER = Path(__file__).parent / "warmed_up"
AGENT_FOLDER = Path(__file__).parent / "warmed_up_agent"
RECORD = "record.json"
TRAIN = 4096
HELD_OUT = 256
CALL_START, CALL_END = call_text("|").split("|")
REPLY_START = "<tool_response>"
REPLY_END = "</tool_response>"
# As Qwen's, which shows a tool's reply as a user's message, but without a system message that names the tool.
AGENT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + ('user' if message['role'] == 'tool' else message['role']) + '\n' }}"
    "{{ '<tool_response>' + message['content'] + '</tool_response>' if message['role'] == 'tool' else message['content'] }}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def load_shipped() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Returns the tiny model in float32, whose weights are bfloat16 numbers, and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32), build_tokenizer()


def load_agent() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Returns the model with a tool, and its tokenizer, in the same way."""
    return AutoModelForCausalLM.from_pretrained(
        AGENT_FOLDER, dtype=torch.float32
    ), build_agent_tokenizer()


def build_agent_tokenizer() -> PreTrainedTokenizerFast:
    """Returns the tiny tokenizer with a template for replies, and the fixed text of calls and replies as one token at
    each end, so that nearly all tokens that the model writes are decisions."""
    tokenizer = build_tokenizer()
    fixed = (CALL_START, CALL_END, REPLY_START, REPLY_END)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in fixed])
    tokenizer.chat_template = AGENT_TEMPLATE
    return tokenizer


def reply_ids(tokenizer: PreTrainedTokenizerFast, reply: str) -> list[int]:
    """Returns the tokens between two turns of the model, as verl writes them after a turn's end token."""
    text = f"\n{TURN_START}user\n{REPLY_START}{reply}{REPLY_END}{TURN_END}\n{TURN_START}assistant\n"
    return tokenizer.encode(text, add_special_tokens=False)


def weights_digest(folder: Path = FOLDER) -> str:
    """SHA-256 of a folder's file of weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
