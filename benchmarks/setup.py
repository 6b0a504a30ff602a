"""What the benchmarks of the training side run: model, batch, precision; and what verl needs in a process before its import."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.made_up import SHAPES


@dataclass(frozen=True)
class Setup:
    """One process on one device."""

    device: str = "cpu"
    shape: Mapping[str, int] = field(default_factory=lambda: SHAPES["small"])
    rows: int = 20
    """Responses in the batch."""
    tokens: int = 256
    """Of a prompt and its response together."""
    prompt: int = 32
    micro_batch_rows: int = 5
    """Full responses that a micro-batch's token budget holds."""
    parameter_dtype: str = "fp32"
    """Of parameters and optimiser state."""
    compute_dtype: str = "fp32"
    packed: bool = field(default_factory=lambda: find_spec("flash_attn") is not None)
    """Whether micro-batches are packed, with flash-attn, or padded, with torch's attention. All responses have the same number
    of tokens, so that neither computes padding."""

    @property
    def attention(self) -> str:
        return "flash_attention_2" if self.packed else "sdpa"

    def described(self) -> dict[str, Any]:
        """For the record."""
        shape = {name.removesuffix("_size").removeprefix("num_"): value for name, value in self.shape.items()}
        shape |= {
            "layers": shape.pop("hidden_layers"),
            "vocabulary": shape.pop("vocab"),
            "heads": shape.pop("attention_heads"),
        }
        own = {name: value for name, value in asdict(self).items() if name not in ("shape", "packed")}
        return {**shape, **own, "layout": "packed" if self.packed else "padded", "attention": self.attention}


SETUPS = {
    "cpu": Setup(packed=False),
    "toy": Setup("cpu", SHAPES["toy"], 4, 120, 4, 2, packed=False),
    "cuda": Setup("cuda", SHAPES["Qwen3-4B"], 8, 4096, 256, 1, "bf16", "bf16"),
}
"""By the name of ``--setup``."""


def prepare_process(device: str) -> None:
    """Threads, and what verl's worker reads from the environment.

    Raises:
        SystemExit: a GPU is asked for and there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this set-up needs a GPU that torch can use, and here is none; use --setup cpu")
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(one, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TOKENIZERS_PARALLELISM="false")
    # One process: whatever the machine's network is, it talks to itself.
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    if device == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"
