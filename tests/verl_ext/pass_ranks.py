"""One rank of the tests of the passes inside verl's engine; started by ``test_passes.py``, which checks what it measures."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.core.tiny_models import PAD_ID
from tests.verl_ext.engines import (
    Setup,
    SharedRow,
    build_engine,
    hooks,
    leftovers,
    log_probs,
    own_pass,
    shards,
    train_step,
    training_worker,
)
from tests.verl_ext.held_memory import chunks_of
from tests.verl_ext.pass_plan import CHUNK, OWN, SETUPS, SHARED, pass_rows, passes_of, shared_of, shared_rows
from tests.verl_ext.rank_group import run_rank


class Experiments:
    """One method a kind of experiment; each returns plain data."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.rank, self.world_size, self.folder = rank, world_size, folder

    def _own(self, engine: Any, name: str, setup: Setup, **request: Any) -> dict[str, list[torch.Tensor]]:
        signal, temperature, sizes = OWN[name]
        _, rows = pass_rows(name, self.rank // setup.sequence_parallel, setup.data_parallel)
        settings = {"temperature": temperature, "pad_token": PAD_ID, **request}
        return own_pass(engine, rows, signal, sizes, **settings)

    def _rows(self, setup: Setup, share: str = "uneven") -> list[SharedRow]:
        return shared_rows(share, self.rank // setup.sequence_parallel, setup.data_parallel)

    def _step(self, engine: Any, setup: Setup) -> float | None:
        engine.engine_config.use_dynamic_bsz = False
        return train_step(engine, [(tokens, start, start) for tokens, start, _ in self._rows(setup)])

    def passes(self, name: str) -> dict[str, Any]:
        """All passes on one engine, with an optimiser step after them and one between two; the same steps of a fresh one."""
        setup = SETUPS[name]
        results: dict[str, Any] = {"own": {}, "shared": {}, "merged": []}
        steps = []
        for after_passes in (False, True):
            engine = build_engine(setup, self.folder)
            worker, before = training_worker(engine), hooks(engine.module)
            if after_passes:
                for own in passes_of(name):
                    found = self._own(engine, own, setup)
                    results["own"][own] = found | {"leftovers": leftovers(engine, before)}
                for how, share in shared_of(name):
                    results["shared"][how, share] = self._shared(worker, setup, how, share)
                    results["shared"][how, share]["leftovers"] = leftovers(engine, before)
                with chunks_of(CHUNK) as sizes:
                    results["chunked"] = {
                        "own": self._own(engine, "saliency, robust", setup),
                        "shared": self._shared(worker, setup, "rows", "uneven"),
                        "sizes": sizes,
                    }
            if setup.adapter:
                weights, _ = engine.get_per_tensor_param()
                results["merged"].append({weight: value.clone() for weight, value in weights})
            norms = [self._step(engine, setup)]
            if after_passes:
                self._own(engine, passes_of(name)[0], setup)
            norms.append(self._step(engine, setup))
            steps.append({"norms": norms, "final": shards(engine)})
        results["alone"], results["after passes"] = steps
        return results

    def _shared(self, worker: Any, setup: Setup, how: str, share: str) -> dict[str, Any]:
        leaf, temperature, sizes = SHARED[how]
        rows = self._rows(setup, share)
        if len(rows) % (sizes.inference_rows or 1):  # verl's fixed micro-batches have to come out even
            sizes = replace(sizes, inference_rows=1)
        return {
            "verl": log_probs(worker, rows, sizes, temperature=temperature),
            "fused": log_probs(worker, rows, sizes, temperature=temperature, leaf=leaf),
        }

    def halved(self, setup: Setup) -> dict[str, Any]:
        """Passes under the autocast that verl trains with by default."""
        engine = build_engine(setup, self.folder)
        worker = training_worker(engine)
        names = ("saliency", "oar_g", "oar_p", "rlsd", "shear")
        return {
            "dtypes": sorted({str(parameter.dtype) for parameter in engine.module.parameters()}),
            "autocast": str(engine._autocast_dtype),
            "own": {name: self._own(engine, name, setup) for name in names},
            "shared": self._shared(worker, setup, "one response each", "all"),
        }


if __name__ == "__main__":
    world_size = int(sys.argv[2])
    of_size = {name: name for name, setup in SETUPS.items() if setup.ranks == world_size}
    run_rank(Experiments, {"passes": of_size}, sys.argv[1:])
