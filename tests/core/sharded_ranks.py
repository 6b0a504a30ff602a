"""One rank of the tests of ``compute_token_weights`` with a model sharded over ranks; see ``test_sharded_models.py``."""

from __future__ import annotations

import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from grail_advantage import GrailConfig, OarConfig, Signal, compute_token_weights
from grail_advantage.methods import methods
from tests.core.tiny_models import ROLLOUTS, Rollout, char_tokenizer, make_batch, tiny_model

METHODS: dict[str, Signal] = {
    "grail": GrailConfig("robust", gate="all"),
    "grail, hidden states": GrailConfig(leaf="middle"),
    "oar_g": OarConfig(),
    "oar_p": OarConfig("perturbation"),
    "surprisal": methods()["surprisal"].build({"gate": "all"}),
}
SHARES: dict[str, tuple[list[Rollout], list[Rollout], list[Rollout]]] = {
    "three, one and two": (
        [ROLLOUTS[name] for name in ("text after the box", "several boxes", "one token before the box")],
        [ROLLOUTS["box at the end"]],
        [ROLLOUTS["empty box"], ROLLOUTS["right"]],
    ),
    "all on one rank": (
        [ROLLOUTS["several boxes"], ROLLOUTS["text after the box"]],
        [ROLLOUTS["no box"]],
        [ROLLOUTS["no box"]],
    ),
    "none anywhere": ([ROLLOUTS["no box"]], [ROLLOUTS["no box"], ROLLOUTS["no box"]], [ROLLOUTS["no box"]]),
}
"""Each rank's rows; two ranks have the first two."""
SHARDINGS = ("fully_shard", "FullyShardedDataParallel")


def sharded(how: str) -> Any:
    """The tiny model, its blocks sharded over all ranks."""
    model = tiny_model()
    if how == "fully_shard":
        for block in model.model.layers:
            fully_shard(block)
        return fully_shard(model)
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))


def main(rank: int, world_size: int, folder: Path) -> None:
    """Run everything; save results, or tracebacks."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    results: dict[str, Any] = {}
    for how in SHARDINGS:
        model = sharded(how)
        for share, rollouts in SHARES.items():
            for name, signal in METHODS.items():
                try:
                    got = compute_token_weights(
                        model,
                        char_tokenizer(),
                        *make_batch(rollouts[rank]).tensors(),
                        signal,
                        process_group=torch.distributed.group.WORLD,
                    )
                    results[f"{how}: {share}: {name}"] = {"scores": got.scores, "weights": got.weights}
                except Exception:
                    results[f"{how}: {share}: {name}"] = traceback.format_exc()
    torch.save(results, folder / f"result{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
