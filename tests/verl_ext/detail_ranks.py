"""One rank of the tests of what a pass costs, holds and leaves; started by ``test_pass_details.py``."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grail_advantage import Grail
from grail_advantage.data import Row
from tests.core.tiny_models import PAD_ID, Rollout, char_tokenizer
from tests.verl_ext import pass_ranks
from tests.verl_ext.engines import (
    Setup,
    Sizes,
    build_engine,
    counted_forwards,
    exploding,
    hooks,
    leftovers,
    log_probs,
    own_pass,
    sharding,
    shards,
    training_worker,
)
from tests.verl_ext.held_memory import counted_whole_blocks
from tests.verl_ext.one_step import Store
from tests.verl_ext.pass_plan import (
    COUNTED,
    HALVED,
    MEMORY,
    NAN_TO,
    OWN,
    PLAIN,
    TARGETS,
    WITH_NAN,
    pass_rows,
    shared_row,
    uneven_rows,
)
from tests.verl_ext.rank_group import run_rank
from tests.verl_ext.test_layouts import TWO_GROUPS, Scenario, put_rollouts, trainer_of


class Experiments(pass_ranks.Experiments):
    """One method a kind of experiment; each returns plain data."""

    def memory(self, setup: Setup) -> dict[str, Any]:
        """Whole blocks during the backward of a training step, of passes, and of a shared forward."""
        engine = build_engine(setup, self.folder)
        worker, rows = training_worker(engine), self._rows(setup, "all")
        runs = {
            "embeddings": lambda: own_pass(engine, self._prepared(), Grail(), Sizes(rows=6)),
            "middle": lambda: own_pass(engine, self._prepared(), Grail(leaf="middle"), Sizes(rows=6)),
            "shared": lambda: log_probs(worker, rows, Sizes(rows=1), leaf="embeddings"),
        }
        found = {}
        for name, run in {**runs, "training": lambda: self._step(engine, setup)}.items():
            with counted_whole_blocks(engine) as counts:
                run()
            found[name] = {"during": counts, "behind": sharding(engine)["held"]}
        return found

    def _prepared(self) -> list[Row]:
        return pass_rows("saliency", self.rank, self.world_size)[1]

    def counting(self, setup: Setup) -> dict[str, Any]:
        """Forwards of the blocks in one micro-batch by activation, in shared forwards, and where ranks differ."""
        engine = build_engine(setup, self.folder)
        worker, found = training_worker(engine), {}

        def count(name: Any, run: Any) -> None:
            with counted_forwards(engine.module) as counts:
                run()
            found[name] = [counts[block] for block in range(4)]

        for leaf in ("embeddings", "first", "middle", "last"):
            count(leaf, lambda leaf=leaf: own_pass(engine, self._prepared(), Grail(leaf=leaf), Sizes(rows=6)))
        for share in TARGETS:
            rows = self._rows(setup, share)
            count(("verl", share), lambda rows=rows: log_probs(worker, rows, Sizes(rows=1)))
            count(("shared", share), lambda rows=rows: log_probs(worker, rows, Sizes(rows=1), leaf="embeddings"))
        for name in ("saliency", "oar_p"):
            rows = [OWN[name][0].prepare(row, char_tokenizer()) for row in uneven_rows(self.rank)]
            count(
                ("uneven", name),
                lambda name=name, rows=rows: own_pass(engine, rows, OWN[name][0], Sizes(budget=190), pad_token=PAD_ID),
            )
        return found

    def raising(self, setup: Setup) -> dict[str, Any]:
        """What passes that raise leave, and an optimiser step after each of them, with FSDP2.

        FSDP1 itself cannot continue after an exception in a forward, whoever runs it.
        """
        results: dict[str, Any] = {"errors": [], "steps": []}
        rows, targets = self._prepared(), self._rows(setup, "all")
        broken = [replace(row, tokens=torch.cat([row.tokens[:-1], torch.tensor([10_000])])) for row in rows]
        runs = {
            "nothing": lambda engine: None,
            "leaf": lambda engine: log_probs(training_worker(engine), targets, Sizes(rows=1), leaf="nowhere"),
            "token": lambda engine: own_pass(engine, broken, Grail(), Sizes(rows=2)),
            "block": lambda engine: own_pass(engine, rows, Grail(), Sizes(rows=2)),
            "shared block": lambda engine: log_probs(
                training_worker(engine), targets, Sizes(rows=1), leaf="embeddings"
            ),
            "logits": lambda engine: log_probs(training_worker(engine), targets, Sizes(rows=1), leaf="embeddings"),
        }
        for name, run in runs.items():
            engine = build_engine(setup, self.folder)
            before = hooks(engine.module)
            where = name.split()[-1]
            with exploding(engine, where) if where in ("block", "logits") else contextlib.nullcontext():
                try:
                    run(engine)
                except Exception as error:
                    results["errors"].append((name, type(error).__name__, str(error)))
            results.setdefault("left", {})[name] = leftovers(engine, before)
            results["steps"].append((self._step(engine, setup), shards(engine)))
        return results

    def nan(self, setup: Setup) -> dict[str, Any]:
        """Responses of which some have a token whose embedding is NaN; in two responses a micro-batch."""
        worker = training_worker(build_engine(setup, self.folder))
        rows = [shared_row(Rollout("Is", text, -1.0)) for text in WITH_NAN[self.rank]]
        clean = [(tokens.clone().apply_(lambda t: NAN_TO.get(t, t)), *rest) for tokens, *rest in rows]
        sizes = Sizes(rows=2)
        return {name: log_probs(worker, of, sizes, leaf="embeddings") for name, of in (("nan", rows), ("clean", clean))}

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


EXPERIMENTS = {
    "memory": MEMORY,
    "counting": COUNTED,
    "raising": {"fsdp2": PLAIN["fsdp2"]},
    "halved": HALVED,
    "nan": {"fsdp2": Setup("qwen3-nan")},
    "later_update": PLAIN,
}

if __name__ == "__main__":
    run_rank(Experiments, EXPERIMENTS, sys.argv[1:])
