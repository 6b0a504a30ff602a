"""One rank of three: neither what the engine shards nor the rows divide evenly. Started by ``test_three_ranks.py``."""

from __future__ import annotations

import sys

from tests.verl_ext.rank_group import run_rank
from tests.verl_ext.saliency_pass_ranks import Setup
from tests.verl_ext.shared_forward_ranks import Experiments

LAYOUTS = {
    "fsdp": Setup("qwen3", "fsdp"),
    "fsdp, packed": Setup("llama-tied", "fsdp", packed=True),
    "fsdp, lora": Setup("qwen3-tied", "fsdp", adapter="adapter"),
    "fsdp2": Setup("qwen3", "fsdp2"),
    "fsdp2, packed": Setup("qwen3", "fsdp2", packed=True),
    "fsdp2, parameters offloaded by FSDP2": Setup("qwen3", "fsdp2", options={"offload_policy": True}),
}
TRAINED = {
    "fsdp": Setup("qwen3-dropout", "fsdp"),
    "fsdp2": Setup("qwen3-dropout", "fsdp2"),
    "fsdp2, parameters offloaded by FSDP2": Setup("qwen3-dropout", "fsdp2", options={"offload_policy": True}),
}


if __name__ == "__main__":
    run_rank(Experiments, {"layouts": LAYOUTS, "training": TRAINED}, sys.argv[1:])
