"""One rank of the tests of the passes inside verl's engine; started by ``test_passes.py``, which checks what it measures."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grail_advantage import Grail
from grail_advantage.data import Row
from tests.core.tiny_models import PAD_ID, Rollout, char_tokenizer
from tests.verl_ext import pass_plan as plan
from tests.verl_ext.engines import (
    Setup,
    Sizes,
    build_engine,
    counted,
    exploding,
    hooks,
    leftovers,
    own_pass,
    sharding,
    shards,
    train_step,
)
from tests.verl_ext.one_step import Store
from tests.verl_ext.rank_group import run_rank
from tests.verl_ext.test_layouts import TWO_GROUPS, Scenario, put_rollouts, trainer_of


class Experiments:
    """One method a kind of experiment; each returns plain data."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.rank, self.world_size, self.folder = rank, world_size, folder

    def _own(self, engine: Any, name: str, setup: Setup) -> dict[str, list[torch.Tensor]]:
        signal, temperature, sizes = plan.OWN[name]
        _, rows = plan.pass_rows(name, self.rank // setup.sequence_parallel, setup.data_parallel)
        return own_pass(engine, rows, signal, sizes, temperature=temperature, pad_token=PAD_ID)

    def _step(self, engine: Any, setup: Setup) -> float | None:
        engine.engine_config.use_dynamic_bsz = False
        rows = plan.BATCH[self.rank // setup.sequence_parallel :: setup.data_parallel]
        return train_step(engine, [(row.tokens, row.start) for row in map(plan.row_of, rows)])

    def passes(self, name: str) -> dict[str, Any]:
        """All passes on one engine, with an optimiser step after them and one between two; the same steps of a fresh one."""
        setup = plan.SETUPS[name]
        results: dict[str, Any] = {"own": {}, "merged": []}
        steps = []
        for after_passes in (False, True):
            engine = build_engine(setup, self.folder)
            before = hooks(engine.module)
            for own in plan.passes_of(name) if after_passes else ():
                results["own"][own] = self._own(engine, own, setup) | {"leftovers": leftovers(engine, before)}
            if after_passes:
                self._own(engine, "saliency, robust", setup)  # the last one before a step is one with gradients
            if setup.adapter:
                weights, _ = engine.get_per_tensor_param()
                results["merged"].append({weight: value.clone() for weight, value in weights})
            norms = [self._step(engine, setup)]
            if after_passes:
                self._own(engine, plan.passes_of(name)[0], setup)
            norms.append(self._step(engine, setup))
            steps.append({"norms": norms, "final": shards(engine)})
        results["alone"], results["after passes"] = steps
        return results

    def cost(self, setup: Setup) -> dict[str, Any]:
        """Forwards of the blocks in a pass by activation, and where ranks differ; whole blocks during the backward."""
        engine, found = build_engine(setup, self.folder), {}

        def run(name: Any, work: Callable[[], Any]) -> None:
            with counted(engine) as (forwards, held):
                work()
            found[name] = [forwards[block] for block in range(4)], held, sharding(engine)["held"]

        for leaf in ("embeddings", "first", "middle", "last"):
            run(leaf, lambda leaf=leaf: own_pass(engine, self._prepared(), Grail(leaf=leaf), Sizes(rows=6)))
        for name in ("saliency", "oar_p"):
            method = plan.OWN[name][0]
            rows = [method.prepare(row, char_tokenizer()) for row in plan.uneven_rows(self.rank)]
            uneven = partial(own_pass, engine, rows, method, Sizes(budget=190), pad_token=PAD_ID)
            run(("uneven", name), uneven)
        run("training", lambda: self._step(engine, setup))
        return found

    def _prepared(self) -> list[Row]:
        return plan.pass_rows("saliency", self.rank, self.world_size)[1]

    def raising(self, setup: Setup) -> dict[str, Any]:
        """What passes that raise leave, and an optimiser step after each of them, with FSDP2. FSDP1 itself cannot continue
        after an exception in a forward, whoever runs it."""
        results: dict[str, Any] = {"errors": [], "steps": [], "left": []}
        rows = self._prepared()
        broken = [replace(row, tokens=torch.cat([row.tokens[:-1], torch.tensor([10_000])])) for row in rows]
        for some, around in ((None, None), (broken, contextlib.nullcontext), (rows, exploding)):
            engine = build_engine(setup, self.folder)
            before = hooks(engine.module)
            if some is not None:
                try:
                    with around(engine):
                        own_pass(engine, some, Grail(), Sizes(rows=2))
                except Exception as error:
                    results["errors"].append(type(error).__name__)
                results["left"].append(leftovers(engine, before))
            results["steps"].append((self._step(engine, setup), shards(engine)))
        return results

    def halved(self, setup: Setup) -> dict[str, Any]:
        """Passes under the autocast that verl trains with by default."""
        engine = build_engine(setup, self.folder)
        names = ("saliency", "oar_g", "oar_p", "rlsd", "shear")
        return {"autocast": str(engine._autocast_dtype)} | {name: self._own(engine, name, setup) for name in names}

    def nan(self, setup: Setup) -> dict[str, list[torch.Tensor]]:
        """Responses of which some have a token whose embedding is NaN; in two responses a micro-batch."""
        engine, found = build_engine(setup, self.folder), {}
        for name, token in (("nan", plan.NAN_TOKEN), ("clean", "!")):
            texts = [text.replace(plan.NAN_TOKEN, token) for text in plan.WITH_NAN[self.rank]]
            rows = [Grail().prepare(plan.row_of(Rollout("Is", text, -1.0)), char_tokenizer()) for text in texts]
            found[name] = own_pass(engine, rows, Grail(), Sizes(rows=2))["scores"]
        return found

    def later_update(self, setup: Setup) -> dict[str, Any]:
        """The separate trainer at a later update of a step, whose policy has moved on from the step's first."""
        engine = build_engine(setup, self.folder)
        workers = AllRows(engine, setup.strategy)
        results: dict[str, Any] = {"back": []}
        with pytest.MonkeyPatch.context() as monkeypatch:
            store = Store()
            store.install(monkeypatch)

            def advantages(*overrides: str, update: int) -> torch.Tensor:
                Sizes(rows=3).set(engine)
                trainer = trainer_of(Scenario(list(overrides), mode="separate_async"), store, workers=workers)
                trainer.local_trigger_step = update
                workers.calls.clear()
                trainer._compute_advantage(put_rollouts(store, TWO_GROUPS), {})
                results["back"].append(update == 0 or all(map(torch.equal, results["moved"], shards(engine))))
                return torch.cat([store.rows[output.key]["advantages"] for output in TWO_GROUPS])

            results["first"] = advantages(update=0)
            workers.save_model_to_cpu(0)  # as verl's trainer at the first update
            for _ in range(2):
                self._step(engine, setup)
            results["moved"] = shards(engine)
            results["decoupled"] = advantages(update=1)
            results["bypass"] = advantages("algorithm.rollout_correction.bypass_mode=True", update=1)
            results["calls with bypass"] = list(workers.calls)
            monkeypatch.setattr(workers, "compute_token_scores", lambda *_: 1 / 0, raising=False)
            with contextlib.suppress(ZeroDivisionError):
                advantages(update=1)
            results["back"].append(all(map(torch.equal, results["moved"], shards(engine))))
        results["kept policies"] = sorted(workers._worker.cpu_saved_models)
        return results


class AllRows:
    """A worker group whose every rank has all responses."""

    def __init__(self, engine: Any, strategy: str) -> None:
        from grail_advantage.verl_ext.trainers import TokenWeightDetachActorWorker

        self._dispatch_info = {"actor": [0]}
        self._worker = TokenWeightDetachActorWorker.__new__(TokenWeightDetachActorWorker)
        self._worker._strategy_handlers = None
        self._worker.config = SimpleNamespace(actor=SimpleNamespace(strategy=strategy))
        self._worker.actor = SimpleNamespace(engine=engine)
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            return getattr(self._worker, name)(*arguments)

        return call


DETAILS = {
    "cost": {"fsdp": plan.PLAIN["fsdp"], "fsdp2": plan.PLAIN["fsdp2"]},
    "raising": {"fsdp2": plan.PLAIN["fsdp2"]},
    "halved": {"fsdp": plan.HALVED},
    "nan": {"fsdp2": Setup("qwen3-nan")},
    "later_update": plan.PLAIN,
}

if __name__ == "__main__":
    size = int(sys.argv[2])
    of_size = {name: name for name, setup in plan.SETUPS.items() if setup.ranks == size}
    run_rank(Experiments, {"passes": of_size} | (DETAILS if size == 2 else {}), sys.argv[1:])
