"""A trainer of a tiny model whose responses are written down (``world.json``) instead of sampled; all else of TRL is real,
tools too. The conversations play the game of ``docs/trl.md``."""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template
from trl.trainer import utils as trl_utils

from grail_advantage.dump import read_dump
from grail_advantage.trl_ext import TokenWeightGRPOTrainer
from tests import documentation
from tests.core.tiny_models import CHARACTERS, END_ID, PAD, tiny_model

START = "<|im_start|>"
CHAT_END = "<|im_end|>"
# The first character is the blank.
PIECES = ["Ġ", *CHARACTERS[1:], PAD, CHAT_END, START, "Ċ"]
"""By id; those of the characters, of the padding and of the end are as in ``tiny_models``."""
WORLD = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Responses by prompt, settings of a small run on the CPU, and texts of ``GRPOTrainer``'s methods that are relied on."""
GENERATIONS = WORLD["settings"]["num_generations"]
TEMPERATURE = WORLD["settings"]["temperature"]
MICRO = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
}
"""A generation batch of 8 responses in four micro-batches, for two updates."""
OF_PAGE = {}
for _name in ("guess.py", "judge.py"):
    exec(documentation.files("trl.md")[_name], OF_PAGE)
Guess = OF_PAGE["Guess"]
judge = OF_PAGE["judge"]
GAME = Guess()
GAME.reset(40)  # its guess is a tool without an environment


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character but for three special ones, with the chat template of Qwen3."""
    backend = Tokenizer(
        models.BPE(vocab={piece: index for index, piece in enumerate(PIECES)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=qwen3_chat_template,
        pad_token=PAD,
        eos_token=CHAT_END,
        additional_special_tokens=[START],
    )


class Script(NamedTuple):
    """A response: its turns, what the reward function gives, and the reward of each turn's calls."""

    turns: list[str]
    outcome: float
    rewards: Sequence[float] = (0.0,)
    ends: bool = True

    @property
    def tokens(self) -> list[list[int]]:
        """Of each turn, with its end token."""
        return [[*tokenizer().encode(turn), *[END_ID] * self.ends] for turn in self.turns]


def _script(turns: list[str | list[Any]], **options) -> Script:
    """A turn that is a list of values guesses these, in parallel."""
    call = '<tool_call>\n{{"name": "guess", "arguments": {{"value": {}}}}}\n</tool_call>'.format
    texts = [
        turn
        if isinstance(turn, str)
        else "\n".join(call(json.dumps(value)) for value in turn)
        for turn in turns
    ]
    return Script(texts, **options)


Scripts = Mapping[str, Sequence[Script]]  # by prompt
TEXTS, TALKS = (
    {
        prompt: [_script(**script) for script in scripts]
        for prompt, scripts in WORLD[part].items()
    }
    for part in ("texts", "talks")
)
"""Without tools, where one does not end, which is the longest; and conversations, whose number is 40."""
RESPONSES = [script for scripts in TALKS.values() for script in scripts]


class PlainLogProbs:
    """The output head of TRL 1.15, which is written in Triton alone and so missing on a machine without a GPU."""

    @staticmethod
    def apply(
        hidden_ND,
        weight_VD,
        bias_V,
        targets_N,
        temperature,
        _chunk,
        softcap,
        scale,
        outputs,
    ):
        assert softcap is None and scale == 1.0
        log_probs_NV = (
            torch.nn.functional.linear(hidden_ND, weight_VD, bias_V).float() / temperature
        ).log_softmax(-1)
        entropy_N = (
            -(log_probs_NV.exp() * log_probs_NV).sum(-1) if "entropy" in outputs else None
        )
        return log_probs_NV.gather(1, targets_N[:, None])[:, 0], entropy_N, None, None, None


if trl_utils._ChunkedLogProbFunction is None:
    trl_utils._ChunkedLogProbFunction = PlainLogProbs


def new_model(**options):
    """Always the same."""
    return tiny_model(
        vocab_size=len(PIECES), **{"max_position_embeddings": 4096, **options}
    )


def speaks(model, scripts: Scripts):
    """The model, which says what is written down for the conversation so far: the k-th response to a prompt is the k-th
    of its scripts."""

    def generate(input_ids, attention_mask, **_):
        seen = Counter()
        responses = []
        for ids_P, mask_P in zip(
            input_ids, attention_mask[:, -input_ids.shape[1] :].bool(), strict=True
        ):
            # The prompt is the one that the conversation so far begins with.
            text = tokenizer().decode(ids_P[mask_P])
            prompt = next(prompt for prompt in scripts if prompt in text)
            turns = re.findall(
                r"<\|im_start\|>assistant\n(.*?)<\|im_end\|>", text, re.DOTALL
            )
            # Scripts that begin with the turns that were said.
            fitting = [
                script for script in scripts[prompt] if script.turns[: len(turns)] == turns
            ]
            responses.append(
                torch.tensor(fitting[seen[prompt] % len(fitting)].tokens[len(turns)])
            )
            # Only a first turn begins another response.
            seen[prompt] += not turns
        padded = torch.nn.utils.rnn.pad_sequence(
            responses, batch_first=True, padding_value=tokenizer().pad_token_id
        )
        return torch.cat([input_ids, padded], dim=1)

    model.generate = generate
    return model


def script_of(completion_T: list[int], scripts: Sequence[Script]) -> Script:
    """By the first turn, which is no other script's."""
    return next(
        script
        for script in scripts
        if completion_T[: len(script.tokens[0])] == script.tokens[0]
    )


def outcomes(scripts: Scripts = TALKS) -> Callable[..., list[float]]:
    """A reward function that gives those of the scripts."""
    flat = [script for of_prompt in scripts.values() for script in of_prompt]
    return lambda completion_ids, **_: [
        script_of(completion_T, flat).outcome for completion_T in completion_ids
    ]


def chats(*texts: str, **columns) -> Dataset:
    """With a value for every row in each column."""
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": text}], **columns} for text in texts]
    )


def build(
    folder: Path,
    kind=TokenWeightGRPOTrainer,
    /,
    scripts: Scripts = TEXTS,
    model=None,
    **options,
):
    """A trainer in training mode, between two steps; ``options`` are TRL's settings and arguments of the trainer. The
    process forgets the precision of the one before."""
    AcceleratorState._reset_state()
    settings = {**WORLD["settings"], "output_dir": str(folder)}
    arguments = {
        "model": speaks(model or new_model(), scripts),
        "reward_funcs": outcomes(scripts),
        "train_dataset": Dataset.from_dict({"prompt": list(scripts)}),
        "processing_class": tokenizer(),
    }
    for name, value in options.items():
        part = settings if name in GRPOConfig.__dataclass_fields__ else arguments
        part[name] = value
    trainer = kind(args=GRPOConfig(**settings), **arguments)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def trained(*arguments, **options):
    """:func:`build`, after its training."""
    trainer = build(*arguments, **options)
    trainer.train()
    return trainer


def talks(*prompts: str) -> dict[str, Any]:
    """Arguments of :func:`build` for conversations."""
    return {
        "scripts": TALKS,
        "train_dataset": chats(*prompts or TALKS, number=40),
        "model": new_model(layers=1),
        # The environment's own.
        "reward_funcs": None,
        "max_completion_length": 900,
        "loss_type": "dr_grpo",
        "scale_rewards": "group",
        "max_grad_norm": 0.0,
    }


def generation_batch(trainer: GRPOTrainer) -> dict[str, Tensor]:
    """The trainer's batch of all responses."""
    return trainer._generate_and_score_completions(
        [row for row in trainer.train_dataset for _ in range(GENERATIONS)]
    )


def parameters(model) -> Tensor:
    """All of a model's, flat."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def mismatches(folder: Path) -> list[list[str]]:
    """Their names, of each receipt of a run."""
    receipts = read_dump(folder).receipts()
    return [
        [finding["name"] for finding in receipt["findings"] if finding["mismatch"]]
        for receipt in receipts
    ]
