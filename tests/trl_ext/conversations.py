"""A trainer of a tiny model whose turns are written down instead of sampled; all else of TRL is real, tools too."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import qwen3_chat_template

from grail_advantage.trl_ext import TokenWeightGRPOTrainer
from tests.core.tiny_models import CHARACTERS, tiny_model
from tests.trl_ext import scripted

PAD, START, END = "<pad>", "<|im_start|>", "<|im_end|>"
PIECES = [*({" ": "Ġ", "\n": "Ċ"}.get(letter, letter) for letter in ["\n", *CHARACTERS]), PAD, START, END]


@cache
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character but for three special ones, with the chat template of Qwen3."""
    backend = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(PIECES)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    known = {"pad_token": PAD, "eos_token": END, "additional_special_tokens": [START]}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=qwen3_chat_template, **known)


def calls(*arguments: Any, name: str = "press", argument: str = "key") -> str:
    """A turn that calls a tool, in parallel for several arguments."""
    blocks = [json.dumps({"name": name, "arguments": {argument: each}}) for each in arguments]
    return "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)


class Script(NamedTuple):
    """A response: its turns, what TRL's reward functions give, and the reward of each turn's calls."""

    turns: list[str]
    outcome: float
    rewards: list[float]

    @property
    def tokens(self) -> list[list[int]]:
        """Of each turn, with its end token."""
        return [chat_tokenizer().encode(turn + END) for turn in self.turns]


KEYS = {"a": 0.5, "b": -1.0, "c": 0.25, "d": 2.0}
"""What the call of each key is worth."""
SAFE = "Open the safe."
SCRIPTS = {
    SAFE: [
        Script([calls("a"), calls("b"), "It is open."], 1.0, [0.5, -1.0, 0.0]),
        Script([calls("a", "d"), calls("c"), "Open, I think."], 0.0, [2.5, 0.25, 0.0]),  # in parallel
        Script(["No idea."], 0.0, [0.0]),
        Script([calls("d"), "Done."], 1.0, [2.0, 0.0]),
    ],
    "Shut the door.": [
        Script([calls("x", name="kick"), calls("c"), "Shut."], 1.0, [0.0, 0.25, 0.0]),  # no such tool
        Script([calls("b", "c", "a"), "It is shut."], 0.0, [-0.25, 0.0]),
        Script([calls("c", "?"), calls("?"), calls("d"), "Yes."], 0.5, [0.25, 0.0, 2.0, 0.0]),  # "?" raises
        Script(["So be it"], 0.0, [0.0]),
    ],
}
"""By prompt."""
RESPONSES = [script for scripts in SCRIPTS.values() for script in scripts]


def speaking_model(scripts: Mapping[str, Sequence[Script]] = SCRIPTS) -> Any:
    """A model that says what is written down for the conversation so far."""
    tokenizer = chat_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = tiny_model(vocab_size=len(PIECES), max_position_embeddings=4096, layers=1, **ends)

    def generate(input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
        seen: Counter = Counter()
        said = []
        for ids_P, mask_P in zip(input_ids, attention_mask.bool(), strict=True):
            text = tokenizer.decode(ids_P[mask_P])
            prompt = next(prompt for prompt in scripts if prompt in text)
            before = re.findall(r"<\|im_start\|>assistant\n(.*?)<\|im_end\|>", text, re.DOTALL)
            fitting = [each for each in scripts[prompt] if each.turns[: len(before)] == before]
            said.append(torch.tensor(fitting[seen[prompt] % len(fitting)].tokens[len(before)]))
            seen[prompt] += not before
        padded = torch.nn.utils.rnn.pad_sequence(said, batch_first=True, padding_value=tokenizer.pad_token_id)
        return torch.cat([input_ids, padded], dim=1)

    model.generate = generate
    return model


class Keypad:
    """An environment whose calls are worth something."""

    def reset(self, **_: Any) -> None:
        self.tool_rewards: list[float] = []

    def press(self, key: str) -> str:
        """
        Press a key.

        Args:
            key: the key's letter.

        Returns:
            What happens.
        """
        self.tool_rewards.append(KEYS[key])
        return f"{key} is worth {self.tool_rewards[-1]}"


def keypad() -> Keypad:
    made = Keypad()
    made.reset()
    return made


def script_of(completion_T: list[int], scripts: Sequence[Script] = RESPONSES) -> Script:
    """By the first turn, which is no other script's."""
    return next(script for script in scripts if completion_T[: len(script.tokens[0])] == script.tokens[0])


def outcomes(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Those of the scripts."""
    return [script_of(completion_T).outcome for completion_T in completion_ids]


def judged(completions: list[Any], completion_ids: list[list[int]], log_extra: Any, **_: Any) -> list[float]:
    """A reward function that judges each turn by the tool's messages after it."""
    of_responses: list[list[float]] = [[] for _ in completions]
    for rewards, completion in zip(of_responses, completions, strict=True):
        for message in completion:
            if message["role"] == "assistant":
                rewards.append(0.0)
            elif "is worth" in message["content"]:
                rewards[-1] += float(message["content"].split()[-1])
    log_extra("judged", of_responses)
    return outcomes(completion_ids)


def prompts(*texts: str) -> Dataset:
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in texts or SCRIPTS]})


def build(folder: Path, trainer_class: Any = TokenWeightGRPOTrainer, /, **given: Any) -> Any:
    """A trainer of the speaking model, with ``weights`` for its own arguments; others are TRL's settings."""
    parts = {"model": speaking_model, "reward": lambda: outcomes, "data": prompts, "weights": dict}
    model, reward, data, weights = (given.pop(name) if name in given else make() for name, make in parts.items())
    settings = {"max_completion_length": 600, "max_steps": 1, "loss_type": "dr_grpo", "max_grad_norm": 0.0, **given}
    options = {"train_dataset": data, "processing_class": chat_tokenizer(), **weights}
    return trainer_class(model, reward, scripted.config(folder, **settings), **options)
