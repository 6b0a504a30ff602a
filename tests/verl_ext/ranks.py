"""Programs of ranks, each a process joined to the others by gloo on the CPU; how a test starts them, and what they measure.

Nothing is checked here. Every experiment's result is saved, or its traceback.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from grail_advantage import Grail
from grail_advantage.data import Row
from tests import forked
from tests.core.tiny_models import PAD_ID
from tests.verl_ext import pass_plan as plan
from tests.verl_ext.engines import (
    REFERENCE,
    Setup,
    Sizes,
    build_engine,
    hooks,
    leftovers,
    own_pass,
    sharding,
    shards,
    training_worker,
    whole_blocks,
)
from tests.verl_ext.one_step import Step, plain_rows

TIMEOUT = timedelta(seconds=300)
LONGEST = 1800.0
"""Seconds after which ranks are taken to hang."""
Results = dict[str, dict[str, Any]]


def start_ranks(part: str, folder: Path, world_size: int) -> list[Results]:
    """Run a part of :data:`PARTS` once a rank, wait, and return each rank's results by kind and name of experiment."""
    processes = []
    for rank in range(world_size):
        arguments, log = list(map(str, (part, rank, world_size, folder))), folder / f"log{rank}.txt"
        processes.append(forked.start("tests.verl_ext.ranks", *arguments, stdout=log))
    deadline = time.monotonic() + LONGEST
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    hang = any(process.is_alive() for process in processes)
    for process in processes:
        process.kill()
    files = [folder / f"result{rank}.pt" for rank in range(world_size)]
    if hang or not all(file.exists() for file in files):
        logs = "\n".join(f"{path.name}: ...{path.read_text()[-3000:]}" for path in sorted(folder.glob("log*.txt")))
        raise AssertionError(f"the ranks {'hang' if hang else 'did not start'}\n{logs}")
    return [torch.load(file, map_location="cpu", weights_only=False) for file in files]


def of_all_ranks(results: list[Results], kind: str, name: str) -> list[Any]:
    """One experiment's results of all ranks; fails with the traceback of a rank that raised."""
    found = [result.get(kind, {}).get(name, "the rank did not come this far") for result in results]
    for result in found:
        if isinstance(result, str):
            raise AssertionError(result)
    return found


def update(worker: Any, rows: list[dict[str, Any]], mini_batch: int, mode: str = "", **loss: Any) -> dict[str, Any]:
    """verl's update over this rank's responses, in mini-batches of so many on all ranks, and what it did; its mode names what
    else is asked for. A response has ``prompt``, ``response``, ``mask``, and a value a token for the loss."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    from grail_advantage.verl_ext.exchange import PLACES, WATCHED, nested
    from grail_advantage.verl_ext.zero_advantage import LEAVE_OUT

    tokens = [torch.cat([row["prompt"], row["response"]]) for row in rows]
    names = {"prompts": "prompt", "responses": "response", "rollout_is_weights": "weights", "loss_mask": "mask"}
    names |= {name: name for name in ("advantages", "old_log_probs")}
    columns = {name: [row[of] for row in rows] for name, of in names.items() if of in rows[0]}
    columns |= {"input_ids": tokens, "position_ids": [torch.arange(len(row)) for row in tokens]}
    # A rollout correction takes a token out of response_mask.
    columns["response_mask"] = [
        of.clone().index_fill(0, torch.arange("rejected" in mode), 0) for of in columns["loss_mask"]
    ]
    written = torch.tensor([[row.get("place", 0), row.get("written", -1)] for row in rows])
    settings = {"temperature": TEMPERATURE, "calculate_entropy": False, "compute_loss": False, "seed": 0}
    settings |= {"global_batch_size": mini_batch, "mini_batch_size": mini_batch, "epochs": loss.pop("epochs", 1)}
    settings |= {LEAVE_OUT: True} if "skipped" in mode else {}
    settings |= {WATCHED: "1.0"} if "watched" in mode else {}
    settings["dataloader_kwargs"] = {"shuffle": False}
    fields = {name: nested(values) for name, values in columns.items()} | {PLACES: written}
    options = {"loss_scale_factor": SCALE, "rollout_n": 2, "use_dynamic_bsz": True, **loss}
    actor = FSDPActorConfig(
        strategy="fsdp2", **options | {"policy_loss": PolicyLossConfig(loss_mode=loss["policy_loss"])}
    )
    worker.loss_fn = loss_fn = partial(ppo_loss, actor)
    positions, gradients, engine = [], [], worker.engine
    embeddings = engine.module.get_input_embeddings()
    handle = embeddings.register_forward_hook(lambda _module, args, _output: positions.append(args[0].numel()))

    def step() -> Any:
        of_step = [p.grad for p in engine.module.parameters() if p.requires_grad]
        # None: of a parameter that is on another rank as a whole
        known = [torch.zeros(0) if g is None else g.to_local() if hasattr(g, "to_local") else g for g in of_step]
        gradients.append([g.clone() for g in known])
        return type(engine).optimizer_step(engine)

    with patch.object(engine, "optimizer_step", step):
        output = worker.train_mini_batch(tu.get_tensordict(fields, non_tensor_dict=settings))
    handle.remove()
    assert worker.loss_fn is loss_fn
    steps = worker.update_reader.take("1.0") if "watched" in mode else None
    metrics = {} if output is None else tu.get(output, "metrics")
    return {
        "gradients": gradients,
        "positions": sum(positions),
        "steps": steps if engine.is_mp_src_rank_with_outputs() else None,
        "metrics": {name: list(map(float, values)) for name, values in metrics.items()},
    }


class Passes:
    """Passes of methods inside verl's engine."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.rank, self.world_size, self.folder = rank, world_size, folder

    def _own(self, engine: Any, name: str, setup: Setup) -> dict[str, list[torch.Tensor]]:
        signal, temperature, sizes = plan.OWN[name]
        _, rows = plan.pass_rows(name, self.rank // setup.sequence_parallel, setup.data_parallel)
        return own_pass(engine, rows, signal, sizes, temperature=temperature, pad_token=PAD_ID)

    def _step(self, engine: Any, setup: Setup) -> float | None:
        """An optimiser step in two micro-batches. Its gradient norm, where verl gives it out."""
        rows = [
            {
                "prompt": row.tokens[: row.start],
                "response": row.tokens[row.start :],
                "mask": torch.ones(row.length).long(),
            }
            | dict.fromkeys(("advantages", "old_log_probs"), torch.ones(row.length))
            for row in map(plan.row_of, plan.BATCH[self.rank // setup.sequence_parallel :: setup.data_parallel])
        ]
        Sizes(rows=len(rows) // 2).set(engine)
        done = update(training_worker(engine), rows, len(plan.BATCH), policy_loss="gpg")
        return done["metrics"].get("grad_norm", [None])[0]

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

    def held(self, setup: Setup) -> dict[str, Any]:
        """Whole blocks during each backward of passes by activation, and of training, and what is left of them."""
        engine, found = build_engine(setup, self.folder), {}
        passes = {leaf: Grail(leaf=leaf) for leaf in ("embeddings", "middle")}
        for name, method in {**passes, "training": None}.items():
            with whole_blocks(engine) as held:
                if method is None:
                    self._step(engine, setup)
                else:
                    own_pass(engine, self._prepared(), method, Sizes(rows=6))
            found[name] = held, sharding(engine)["held"]
        return found

    def _prepared(self) -> list[Row]:
        return plan.pass_rows("saliency", self.rank, self.world_size)[1]

    def raising(self, setup: Setup) -> dict[str, Any]:
        """What a pass leaves in which a block fails on all ranks, and an optimiser step with and without it, with FSDP2. FSDP1
        itself cannot continue after an exception in a forward, whoever runs it."""
        results: dict[str, Any] = {"steps": []}
        for fails in (False, True):
            engine = build_engine(setup, self.folder)
            before = hooks(engine.module)
            if fails:
                broken = engine.module.get_submodule("model.layers.2.mlp")
                handle = broken.register_forward_pre_hook(lambda *_: 1 / 0)
                with contextlib.suppress(ZeroDivisionError):
                    results["passed"] = own_pass(engine, self._prepared(), Grail(), Sizes(rows=2))
                handle.remove()
                results["left"] = leftovers(engine, before)
            results["steps"].append((self._step(engine, setup), shards(engine)))
        return results

    def later_update(self, setup: Setup) -> dict[str, Any]:
        """The separate trainer at a later update of a step, whose policy has moved on from the step's first."""
        engine = build_engine(setup, self.folder)
        workers = AllRows(engine, setup.strategy)
        results: dict[str, Any] = {"back": []}
        rows = {key: {**row, "old_log_probs": row["rollout_log_probs"]} for key, row in plain_rows().items()}

        def advantages(*overrides: str, update: int) -> torch.Tensor:
            Sizes(rows=3).set(engine)
            step = Step(*overrides, rows=rows, mode="separate_async", workers=lambda *_: workers)
            step.trainer.local_trigger_step = update
            workers.calls.clear()
            found = step.run()
            results["back"].append(update == 0 or all(map(torch.equal, results["moved"], shards(engine))))
            return torch.cat(list(found.values()))

        results["first"] = advantages(update=0)
        workers.save_model_to_cpu(0)  # as verl's trainer at the first update
        for _ in range(2):
            self._step(engine, setup)
        results["moved"] = shards(engine)
        results["decoupled"] = advantages(update=1)
        results["bypass"] = advantages("algorithm.rollout_correction.bypass_mode=True", update=1)
        results["calls with bypass"] = list(workers.calls)
        workers.compute_token_scores = lambda *_: 1 / 0
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


_DETAILS = {"held": plan.PLAIN, "raising": {"fsdp2": plan.PLAIN["fsdp2"]}, "later_update": plan.PLAIN}
LOSSES = ("vanilla", "gspo", "cispo", "gpg", "sapo", "dppo_tv", "dppo_kl")
TOKEN_MEAN = "token-mean"
AGGREGATIONS = (TOKEN_MEAN, "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
EPOCHS, SCALE, TEMPERATURE = 2, 24, 0.8
PLAIN_UPDATE = ("vanilla", TOKEN_MEAN)
OF_LOSS = [("vanilla", mode) for mode in AGGREGATIONS]
_PACKED = Setup("qwen3", "fsdp2", packed=True)
UPDATES: dict[str, tuple[Setup, Sizes, list[tuple[str, str]]]] = {
    "packed, a token budget": (_PACKED, Sizes(budget=60), [*OF_LOSS, *((loss, TOKEN_MEAN) for loss in LOSSES[1:])]),
    "padded, fixed micro-batches": (Setup("qwen3", "fsdp"), Sizes(rows=2), OF_LOSS),
    "lora": (Setup("qwen3", "fsdp2", adapter="adapter"), Sizes(rows=4), [PLAIN_UPDATE]),
    "parameters offloaded": (
        Setup("qwen3", "fsdp2", options={"param_offload": True, "optimizer_offload": True}),
        *(Sizes(budget=60), [PLAIN_UPDATE]),
    ),
    "two ranks a sequence": (
        replace(_PACKED, attention=REFERENCE, sequence_parallel=2),
        *(Sizes(budget=60), [PLAIN_UPDATE]),
    ),
}
"""Each with its losses and aggregations."""


def modes_of(setup: str, update: tuple[str, str]) -> list[str]:
    """How an update runs: as verl's, with its tokens' gradients watched, and without zero-advantage responses."""
    more = ["skipped, watched"] if update == PLAIN_UPDATE else []
    return ["verl", "watched", "skipped", *more] + ["rejected, watched"] * bool(more and setup in list(UPDATES)[:1])


class Updates:
    """The same update of ``plan.pt`` in several modes, from the same weights."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.rank, self.world_size, self.folder = rank, world_size, folder
        self.plan = torch.load(folder / "plan.pt", weights_only=False)

    def updates(self, name: str) -> dict[Any, Any]:
        """By loss, aggregation and mode."""
        setup, sizes, updates = UPDATES[name]
        together, size = setup.sequence_parallel, len(self.plan[0])
        share, place = size * together // self.world_size, self.rank // together
        rows = [row for mini_batch in self.plan for row in mini_batch[place * share : (place + 1) * share]]
        engine = build_engine(setup, self.folder)
        sizes.set(engine)
        for group in engine.optimizer.param_groups:
            group |= {"eps": 1e-3, "weight_decay": 0.1}  # with a smaller one Adam makes a step of any rounding
        parameters = [p for p in engine.module.parameters() if p.requires_grad]
        parameters = [p.to_local() if hasattr(p, "to_local") else p.data for p in parameters]
        first, results = [parameter.detach().clone() for parameter in parameters], {}
        for of_loss in updates:
            options = dict(zip(("policy_loss", "loss_agg_mode"), of_loss, strict=True), epochs=EPOCHS)
            for mode in modes_of(name, of_loss):
                with torch.no_grad():
                    for parameter, value in zip(parameters, first, strict=True):
                        parameter.copy_(value)
                engine.optimizer.state.clear()
                result = results[(*of_loss, mode)] = update(training_worker(engine), rows, size, mode, **options)
                result["parameters"] = [parameter.detach().clone() for parameter in parameters]
        return results


def part_of(name: str, world_size: int) -> tuple[Callable[[int, int, Path], Any], dict[str, dict[str, Any]]]:
    """What makes a part, called with rank, world size and folder, and its experiments by kind, one of its methods, and
    name, each with the method's argument."""
    if name == "updates":
        return Updates, {"updates": {name: name for name in UPDATES}}
    if name == "models":
        from tests.verl_ext import test_models

        return test_models.Engine, {"passes": test_models.CASES}
    of_size = {name: name for name, setup in plan.SETUPS.items() if setup.ranks == world_size}
    return Passes, {"passes": of_size} | (_DETAILS if world_size == 2 else {})


def main(name: str, rank: int, world_size: int, folder: Path) -> None:
    """Run a rank's experiments and save their results as ``result<rank>.pt`` in the folder."""
    import verl  # noqa: F401  loads the plugin that makes the CPU verl's device

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "cpu:gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=TIMEOUT
    )
    make, experiments = part_of(name, world_size)
    made, results = make(rank, world_size, folder), {}
    for kind, setups in experiments.items():
        results[kind] = {}
        for case, setup in setups.items():
            print(f"{kind}: {case}, after {time.process_time():.1f} CPU seconds", flush=True)
            try:
                results[kind][case] = getattr(made, kind)(setup)
            except Exception:
                results[kind][case] = traceback.format_exc()
                print(results[kind][case], flush=True)
                if world_size > 1:  # the others wait for a counterpart, and fail when this one is gone
                    torch.save(results, folder / f"result{rank}.pt")
                    os._exit(1)
            gc.collect()
    torch.save(results, folder / f"result{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
