"""One rank of the test of packed rows and Ulysses sequence parallelism with the real flash attention, on GPUs."""

from __future__ import annotations

import sys

from tests.verl_ext.adapter_ranks import Experiments
from tests.verl_ext.rank_group import run_rank
from tests.verl_ext.saliency_pass_ranks import HALF
from tests.verl_ext.sequence_parallel_ranks import Layout

LAYOUTS = {
    "fsdp, 1 GPU": Layout(1, 1, "fsdp", options=HALF),
    "fsdp2, 1 GPU": Layout(1, 1, "fsdp2", options=HALF),
    "fsdp, 2 GPUs, 2 a sequence": Layout(2, 2, "fsdp", options=HALF),
    "fsdp2, 2 GPUs, 2 a sequence": Layout(2, 2, "fsdp2", options=HALF),
    "fsdp2, 2 GPUs": Layout(2, 1, "fsdp2", options=HALF),
}

if __name__ == "__main__":
    world_size = int(sys.argv[2])
    of_size = {name: layout for name, layout in LAYOUTS.items() if layout.ranks == world_size}
    run_rank(Experiments, {"halved": of_size}, sys.argv[1:])
