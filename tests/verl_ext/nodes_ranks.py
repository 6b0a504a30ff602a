"""One rank of two that may sit on different nodes: a pass, an optimiser step, and a cable that is pulled out.

Started by ``test_nodes.py`` on one node and on two.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests.verl_ext import shared_forward_ranks
from tests.verl_ext.rank_group import run_rank
from tests.verl_ext.saliency_pass_ranks import Setup, build_engine, shards, train_step
from tests.verl_ext.shared_forward_ranks import HOWS, log_probs, training_worker

NODES = "TEST_NODES"
"""Set where each rank is on a node of its own: rank 0 on the first."""
ROOT = Path(__file__).parents[2]
SECONDS = 4
STEPS = {
    "fsdp2": Setup("qwen3", "fsdp2"),
    "fsdp2, tied, no checkpointing": Setup("llama-tied", "fsdp2", checkpointing=False),
}


class Experiments(shared_forward_ranks.Experiments):
    """See :mod:`tests.verl_ext.shared_forward_ranks`."""

    def step(self, setup: Setup) -> dict[str, Any]:
        """Log-probabilities with and without the saliency of all rows, then an optimiser step."""
        engine = build_engine(setup, self.folder)
        worker = training_worker(engine)
        rows, how = self.rows("all"), HOWS["rows"]
        plain = log_probs(worker, rows, how, fused=False)
        fused = log_probs(worker, rows, how, fused=True)
        engine.engine_config.use_dynamic_bsz = False
        norm = train_step(engine, [(tokens, start, start) for tokens, start, _ in rows])
        fused.pop("saliency_seconds")
        return {"plain": plain, "fused": fused, "norm": norm, "final": shards(engine), "host": os.uname().nodename}

    def cut(self, timeout: float) -> dict[str, Any]:
        """What a collective does on both sides once the second node is out of reach."""
        if NODES not in os.environ:
            return {}
        group = torch.distributed.new_group(timeout=timedelta(seconds=timeout))
        torch.distributed.all_reduce(torch.ones(1), group=group)
        torch.distributed.barrier()
        script = ["bash", str(ROOT / "scripts/local_nodes.sh")]
        if self.rank == 0:
            subprocess.run([*script, "cut", "2"], check=True)
        began = time.monotonic()
        try:
            torch.distributed.all_reduce(torch.ones(1), group=group)
            error = None
        except RuntimeError as raised:
            error = str(raised)
        taken = time.monotonic() - began
        if self.rank == 0:
            subprocess.run([*script, "mend", "2"], check=True)
        return {"error": error, "seconds": taken}


if __name__ == "__main__":
    run_rank(Experiments, {"step": STEPS, "cut": {"cut": SECONDS}}, sys.argv[1:])
