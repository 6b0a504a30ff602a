"""What the benchmarks run: models of published shapes with random weights, which take the time and memory of trained ones,
and responses of random words; and what verl needs in a process before its import. Needs torch, transformers, pydantic."""

import gc
import os
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch.distributed.elastic.utils.distributed import get_free_port
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from grail_advantage import Example
from grail_advantage.data import Rollouts
from verl_cpu.tiny.model import build_tokenizer

FLASH_ATTN = find_spec("flash_attn") is not None
# The end of a response
ANSWER = r"\boxed{42}"
# The words after it
AFTER_ANSWER = 16
SIZES = {
    "Qwen3-0.6B": (151936, 1024, 3072, 28, 16, 8, 128),
    "Qwen3-4B": (151936, 2560, 9728, 36, 32, 8, 128),
    "small": (8192, 256, 768, 6, 4, 2, 64),
    "toy": (512, 32, 64, 2, 2, 1, 32),
}
NAMES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
SHAPES = {name: dict(zip(NAMES, sizes, strict=True)) for name, sizes in SIZES.items()}
"""Options of ``Qwen3Config`` by the shape's name."""


@dataclass(frozen=True)
class Setup:
    """One process on one device. All responses have the same number of tokens, so that neither packed nor padded
    micro-batches compute padding."""

    device: str
    # Of SHAPES
    shape: str
    # Responses in the batch
    rows: int
    # Of a prompt and its response together
    tokens: int
    prompt: int
    # Full responses that a micro-batch's token budget holds
    micro_batch_rows: int
    dtype: torch.dtype = torch.float32
    # Else padded
    packed: bool = FLASH_ATTN

    @property
    def attention(self) -> str:
        return "flash_attention_2" if self.packed else "sdpa"

    def rollouts(self, selected: int, zero_advantage: int = 0) -> Rollouts:
        """Responses of random words that end in an answer and a few words after it: the first ``selected`` are incorrect
        and so need scores, the last ``zero_advantage`` are of groups all of a kind, and have no advantage."""
        rows = self.rows
        vocabulary = SHAPES[self.shape]["vocab_size"]
        tokenizer = build_tokenizer([])
        # After the bytes and the special tokens come words without a meaning
        first = len(tokenizer)
        tokenizer.add_tokens([f"w{index}" for index in range(first, vocabulary)])
        answer = torch.tensor(tokenizer.encode(ANSWER, add_special_tokens=False))
        generator = torch.Generator().manual_seed(0)
        ids_BL = torch.randint(first, vocabulary, (rows, self.tokens), generator=generator)
        ids_BL[:, -AFTER_ANSWER - len(answer) : -AFTER_ANSWER] = answer
        right = rows - selected - zero_advantage
        advantages_B = torch.tensor([-0.5] * selected + [0.5] * right + [0.0] * zero_advantage)
        # The question has as many letters as the prompt has tokens.
        question = [{"role": "user", "content": "x" * self.prompt}]
        rollouts = Rollouts(
            prompts=list(ids_BL[:, : self.prompt]),
            responses=list(ids_BL[:, self.prompt :]),
            mask=torch.ones(rows, self.tokens - self.prompt, dtype=torch.bool),
            advantages=advantages_B,
            tokenizer=tokenizer,
            # About 8 to a prompt; incorrect and correct ones are dealt out to all prompts alike.
            groups=torch.arange(rows) % max(1, round(rows / 8)),
            rewards=(advantages_B > 0).double(),
            examples=[Example(question, {"reward_model": {"ground_truth": "42"}}, {})] * rows,
            fields={"tool_rewards": [[]] * rows},
        )
        # Finding answers is no part of what is timed
        for which in ("first", "last"):
            rollouts.spans(which)
        return rollouts


SETUPS = {
    "cpu": Setup("cpu", "small", 8, 160, 32, 4, packed=False),
    "toy": Setup("cpu", "toy", 4, 120, 4, 2, packed=False),
}
"""By the name of ``--setup``."""


def prepare_process(device: str) -> None:
    """Threads, and what verl's worker reads from the environment."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        # As several processes of this kind may run
        MASTER_PORT=str(get_free_port()),
        TOKENIZERS_PARALLELISM="false",
    )
    # It talks to itself
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    if device == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"


def random_model(shape: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A Qwen3 model with freshly drawn weights, in evaluation mode."""
    config = Qwen3Config(**SHAPES[shape], tie_word_embeddings=True, max_position_embeddings=32768)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        ).eval()


def release() -> None:
    """Give back what dropped tensors held."""
    gc.collect()
    torch.cuda.empty_cache()
