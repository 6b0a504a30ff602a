"""``compute_token_weights`` with a model sharded over ranks that have different numbers of rows to compute."""

from __future__ import annotations

import itertools
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from grail_advantage import Grail, Method, Oar, compute_token_weights
from grail_advantage.method import build
from tests.core.tiny_models import ROLLOUTS, char_tokenizer, make_batch, tiny_model

METHODS: dict[str, Method] = {
    "grail": Grail("robust", gate="all"),
    "grail, hidden states": Grail(leaf="middle"),
    "oar_g": Oar(),
    "oar_p": Oar("perturbation"),
    "surprisal": build("surprisal", {"gate": "all"}),
}
SHARES = {
    "three, one, two": (["several boxes", "empty box", "no box"], ["box at the end"], ["text after the box", "right"]),
    "all on one rank": (["several boxes", "text after the box"], ["no box"], ["no box"]),
    "none anywhere": (["no box"], ["no box", "no box"], ["no box"]),
}
"""Each rank's rows."""
WAYS = ("FullyShardedDataParallel", "fully_shard")
RANKS = 3  # do not divide the model's 16 dimensions


def batch_of(share: str, rank: int) -> tuple[torch.Tensor, ...]:
    return make_batch([ROLLOUTS[name] for name in SHARES[share][rank]]).tensors()


def sharded(how: str) -> Any:
    """The tiny model, its blocks sharded over all ranks."""
    model = tiny_model()
    if how == "fully_shard":
        for block in model.model.layers:
            fully_shard(block)
        return fully_shard(model)
    blocks = ModuleWrapPolicy({type(model.model.layers[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=blocks, device_id=torch.device("cpu"))


def run_rank(rank: int, folder: str) -> None:
    """One rank; one without a counterpart for its collectives fails when its time is up."""
    torch.set_num_threads(1)
    store, limit = f"file://{folder}/store", timedelta(seconds=120)
    torch.distributed.init_process_group("gloo", store, limit, rank=rank, world_size=RANKS)
    given = {"process_group": torch.distributed.group.WORLD}
    results = {}
    for how in WAYS:
        model = sharded(how)
        for share, (name, method) in itertools.product(SHARES, METHODS.items()):
            got = compute_token_weights(model, char_tokenizer(), *batch_of(share, rank), method, **given)
            results[how, share, name] = got.scores, got.weights
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_weights_are_those_of_the_whole_model(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run_rank, (str(tmp_path),), RANKS)
    for rank in range(RANKS):
        for (how, share, name), (scores, weights) in torch.load(tmp_path / f"{rank}.pt").items():
            expected = compute_token_weights(tiny_model(), char_tokenizer(), *batch_of(share, rank), METHODS[name])
            # The gradient of a divergence so small keeps one or two digits of float32's seven; of these no weight can be asked.
            rtol = 5e-2 if name == "oar_g" else 1e-3
            atol, case = rtol * float(expected.scores.nan_to_num(0).abs().max()), f"{how}, {share}: {name}"
            torch.testing.assert_close(scores, expected.scores, rtol=rtol, atol=atol, equal_nan=True, msg=case)
            if name != "oar_g":
                torch.testing.assert_close(weights, expected.weights, rtol=1e-2, atol=1e-2, msg=case)
