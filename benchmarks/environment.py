"""Options that the benchmarks of the training side share, and the process set-up that verl needs before its import."""

from __future__ import annotations

import argparse
import os
import socket
from importlib.util import find_spec
from typing import Any

import torch

PRESETS: dict[str, dict[str, Any]] = {
    # One forward over the batch takes about a second on one thread; almost all of it is matrix products.
    "cpu": {
        "layers": 6,
        "hidden": 256,
        "intermediate": 768,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "vocabulary": 8192,
        "rows": 20,
        "tokens": 256,
        "prompt": 32,
        "micro_batch_rows": 5,
        "parameter_dtype": "fp32",
        "compute_dtype": "fp32",
        "layout": "padded",
        "attention": "sdpa",
    },
    # Qwen3-4B
    "cuda": {
        "layers": 36,
        "hidden": 2560,
        "intermediate": 9728,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "vocabulary": 151936,
        "rows": 8,
        "tokens": 4096,
        "prompt": 256,
        "micro_batch_rows": 1,
        "parameter_dtype": "bf16",
        "compute_dtype": "bf16",
        "layout": "packed",
        "attention": "flash_attention_2",
    },
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options; a preset's value is used where one is left out."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="of the model")
    parser.add_argument("--rows", type=int, help="responses in the batch")
    parser.add_argument("--tokens", type=int, help="tokens of a row, prompt and response")
    parser.add_argument("--prompt", type=int, help="of them in the prompt")
    parser.add_argument("--micro-batch-rows", type=int, help="full rows that a micro-batch's token budget holds")
    parser.add_argument("--parameter-dtype", choices=("fp32", "bf16"), help="of parameters and optimiser state")
    parser.add_argument("--compute-dtype", choices=("fp32", "bf16"), help="that the model computes in")
    parser.add_argument("--layout", choices=("packed", "padded"), help="of micro-batches")
    parser.add_argument("--attention", choices=("sdpa", "flash_attention_2", "packed_rows"))
    parser.add_argument("--selected", type=float, default=0.35, help="share of the rows that needs scores")


def set_up(args: argparse.Namespace) -> None:
    """Fill in the preset and prepare this process: device, threads, and what verl's worker reads from the environment.

    Raises:
        SystemExit: a GPU is asked for and there is none.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda needs a GPU that torch can use, and here is none; use --device cpu")
    for name, value in PRESETS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.attention == "flash_attention_2" and find_spec("flash_attn") is None:
        args.attention = "packed_rows"  # of without_flash_attn.py
    torch.set_num_threads(args.threads)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TOKENIZERS_PARALLELISM="false",
    )
    if args.device == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def described(args: argparse.Namespace) -> dict[str, Any]:
    """The set-up for the record."""
    return {name: getattr(args, name) for name in PRESETS[args.device]}
