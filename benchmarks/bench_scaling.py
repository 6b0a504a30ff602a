"""What the simulation of many GPUs (scripts/scaling.py) is held against: the trainer's own work, TransferQueue, gloo.

    python benchmarks/bench_scaling.py                       # every part; needs 5 GB of memory
    python benchmarks/bench_scaling.py --parts traffic driver --sizes 2048x32768      # 16 GB

- ``traffic``: bytes that GRAIL's part of the trainer, and verl's stages beside it, fetch and put; counted, not timed;
- ``driver``: processor seconds and memory of that part on batches of full-length responses, with the store in memory;
- ``queue``: seconds that TransferQueue takes to put and to fetch a column, the least of five (starts Ray);
- ``gloo``: seconds of all-gather and reduce-scatter on two and four ranks over the loopback.

Writes ``results/scaling-cpu.json``; a part that is left out stays as it was there.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from measuring import RESULTS, Clock, record, show, write  # noqa: E402

UNITS = ("rows", "prompt tokens", "response tokens", "selected rows", "selected tokens")
"""What traffic is counted in; selected are the rows that need scores, with prompt and response."""
SIZES = ("256x2048", "512x8192", "1024x16384")
QUEUE_BYTES = (2**20, 2**22, 2**24, 2**26, 2**28)
QUEUE_ROWS = 256
GLOO_BYTES = (2**16, 2**18, 2**20, 2**22, 2**24, 2**26)
REPEATS = 9
PROMPT = 150
GROUP = 16


# ---- the trainer, with a store in memory ----


class Store:
    """TransferQueue's functions for one batch, in memory; counts bytes by who asks, and the seconds that it takes itself."""

    def __init__(self, clock: Clock) -> None:
        self.columns: dict[str, dict[str, torch.Tensor]] = {}
        self.moved: Counter[tuple[str, str]] = Counter()
        self.who = "verl"
        self.clock, self.seconds = clock, 0.0

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> Any:
        from tensordict import NonTensorStack, TensorDict

        start = self.clock.now()
        found: dict[str, Any] = {}
        for name in select_fields:
            if name == "uid":
                found[name] = NonTensorStack(*[key.split("_")[0] for key in keys])
            elif name in self.columns and all(key in self.columns[name] for key in keys):
                values = [self.columns[name][key] for key in keys]
                found[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
                self.moved[self.who, "get"] += sum(value.nbytes for value in values)
        self.seconds += self.clock.now() - start
        return TensorDict(found, batch_size=len(keys))

    def kv_batch_put(self, keys: Sequence[str], partition_id: str, fields: Any) -> Any:
        from transfer_queue import KVBatchMeta

        start = self.clock.now()
        for name, column in fields.items():
            values = column.unbind()
            self.columns.setdefault(name, {}).update(zip(keys, (value.clone() for value in values), strict=True))
            self.moved[self.who, "put"] += sum(value.nbytes for value in values)
        self.seconds += self.clock.now() - start
        return KVBatchMeta(partition_id=partition_id, keys=list(keys), tags=[{} for _ in keys])


class Workers:
    """The actor's workers, which make saliencies up."""

    def __init__(self, store: Store, ranks: int) -> None:
        self._dispatch_info = {"actor": list(range(ranks))}
        self.store = store

    def compute_log_prob(self, batch: Any) -> Any:
        from grail_advantage.verl_ext.shared_forward import SALIENCY_FIELDS, SECONDS, TARGET

        columns = self.store.columns
        generator = torch.Generator().manual_seed(0)
        for key in batch.keys:
            length = len(columns["prompts"][key]) + len(columns["responses"][key])
            for name in ("log_probs", "entropy", *SALIENCY_FIELDS):
                columns.setdefault(name, {})[key] = torch.rand(length, generator=generator)
            columns.setdefault(SECONDS, {})[key] = torch.tensor([0.1])
            assert TARGET in columns
        return batch


def trainer_with(responses: Sequence[int], prompts: Sequence[int], share: float, clock: Clock, ranks: int) -> Any:
    """The trainer of GRAIL's preset robust with a batch of responses of these lengths, a share of them wrong."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base

    import recipe.main_grail  # noqa: F401  stores the methods' sections
    from grail_advantage import GrailConfig
    from grail_advantage.verl_ext import trainer as trainer_module
    from tests.real_tokenizers import qwen_tokenizer

    class Timed(get_trainer_cls("grail_sync")):
        """Knows which of the store's work and which seconds are not verl's."""

        own_seconds = 0.0

        @contextmanager
        def _timed(self, part: str) -> Iterator[None]:
            outer, store.who = store.who, "ours"
            start, before = clock.now(), store.seconds
            with super()._timed(part):
                yield
            if outer != "ours":
                self.own_seconds += clock.now() - start - (store.seconds - before)
            store.who = outer

    longest = max(responses)
    with initialize_config_dir(str(ROOT / "recipe" / "config"), version_base=None):
        config = compose(
            "cpu_trainer",
            overrides=[f"data.max_response_length={longest + 1}", f"actor_rollout_ref.rollout.n={GROUP}"],
        )
    OmegaConf.resolve(config)  # as the task runner does
    store = Store(clock)
    trainer_module.tq = trainer_base.tq = store
    trainer_base.calculate_debug_metrics = lambda data: {}
    trainer = Timed.__new__(Timed)
    trainer.config, trainer.trainer_mode, trainer.store = config, "sync", store
    trainer.signal, trainer.tokenizer = GrailConfig("robust"), qwen_tokenizer()
    trainer._end_tokens, trainer._context_length = {trainer.tokenizer.eos_token_id}, 10**6
    trainer._model_shares_forward, trainer.timing_raw = True, {}
    trainer.global_steps, trainer.local_trigger_step = 1, 0
    trainer.actor_rollout_wg = Workers(store, ranks)

    rng = np.random.default_rng(0)
    box = torch.tensor(trainer.tokenizer.encode(r"The answer is $\boxed{\frac{3}{4}}$."))
    end = torch.tensor([trainer.tokenizer.eos_token_id])
    names = ("prompts", "responses", "response_mask", "loss_mask", "rollout_log_probs", "rm_scores")
    store.columns = {name: {} for name in names}
    for row, (length, prompt) in enumerate(zip(responses, prompts, strict=True)):
        key = f"{row // GROUP}_{row % GROUP}_0"
        text = torch.tensor(rng.integers(0, 50_000, length))
        text[-len(box) - 1 :] = torch.cat([box, end])
        mask = torch.ones(length, dtype=torch.int64)
        scores = torch.zeros(length)
        scores[-1] = float(rng.random() >= share)
        of_row = (torch.tensor(rng.integers(0, 50_000, prompt)), text, mask, mask, torch.zeros(length), scores)
        for name, value in zip(names, of_row, strict=True):
            store.columns[name][key] = value
    return trainer


def run_step(trainer: Any) -> dict[str, float]:
    """The two stages of a step that GRAIL takes part in."""
    from transfer_queue import KVBatchMeta

    keys = list(trainer.store.columns["prompts"])
    batch = KVBatchMeta(partition_id="train", keys=keys, tags=[{} for _ in keys])
    metrics: dict[str, float] = {}
    trainer._compute_advantage(trainer._compute_old_log_prob(batch, metrics), metrics)
    return metrics


def traffic() -> dict[str, Any]:
    """Bytes for each unit: the solution of as many small steps as it takes, which must be exact."""
    rng = np.random.default_rng(1)
    counted, moved = [], {(who, way): [] for who in ("ours", "verl") for way in ("get", "put")}
    for _ in range(2 * len(UNITS)):
        rows = GROUP * int(rng.integers(1, 4))
        responses, prompts = rng.integers(40, 200, rows).tolist(), rng.integers(5, 60, rows).tolist()
        trainer = trainer_with(responses, prompts, 0.5, Clock("cpu"), 4)
        metrics = run_step(trainer)
        wrong = [
            row
            for row, (key, scores) in enumerate(trainer.store.columns["rm_scores"].items())
            if float(scores.sum()) == 0 and bool(trainer.store.columns["advantages"][key].any())
        ]
        assert round(metrics["grail/selected_rate"] * rows) == len(wrong)
        tokens = sum(responses[row] + prompts[row] for row in wrong)
        counted.append([rows, sum(prompts), sum(responses), len(wrong), tokens])
        for who, way in moved:
            moved[who, way].append(trainer.store.moved[who, way])
    result: dict[str, Any] = {}
    for (who, way), sizes in moved.items():
        solution, *_ = np.linalg.lstsq(np.array(counted, dtype=float), np.array(sizes, dtype=float), rcond=None)
        if not np.allclose(np.array(counted) @ solution, sizes, rtol=1e-9) or not np.allclose(
            solution, solution.round()
        ):
            raise SystemExit(f"the bytes that {who} {way} are no sum over {', '.join(UNITS)}")
        result.setdefault(who, {})[way] = {
            unit: round(float(value)) for unit, value in zip(UNITS, solution, strict=True)
        }
    return result


def one_size(rows: int, tokens: int) -> dict[str, Any]:
    """Seconds and peak memory of a step with responses of full length, in this process."""
    torch.set_num_threads(1)
    clock = Clock("cpu")
    small = trainer_with([200] * GROUP, [PROMPT] * GROUP, 0.35, clock, 1)
    run_step(small)  # tables of the tokenizer, first calls
    trainer = trainer_with([tokens] * rows, [PROMPT] * rows, 0.35, clock, 8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = clock.now()
    metrics = run_step(trainer)
    whole = clock.now() - start
    parts = {name: value for name, value in trainer.timing_raw.items() if name.startswith("token_weights_")}
    return {
        "rows": rows,
        "tokens": tokens,
        "seconds": trainer.own_seconds,
        "verl": whole - trainer.own_seconds - trainer.store.seconds,
        "wall_by_part": parts,
        "peak_bytes_more": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
        "selected_rate": metrics["grail/selected_rate"],
    }


# ---- TransferQueue ----


def queue() -> list[dict[str, float]]:
    """A column of 256 rows through TransferQueue with one storage unit, in bytes of its values."""
    import ray
    import transfer_queue as tq
    from hydra import compose, initialize_config_dir
    from tensordict import TensorDict

    import recipe.main_grail  # noqa: F401  stores the methods' sections

    with initialize_config_dir(str(ROOT / "recipe" / "config"), version_base=None):
        config = compose("cpu_trainer").transfer_queue
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    found = []
    try:
        tq.init(config)
        keys = [f"row{row}" for row in range(QUEUE_ROWS)]
        for size in QUEUE_BYTES:
            values = [torch.rand(size // 4 // QUEUE_ROWS) for _ in keys]
            fields = TensorDict(
                {"column": torch.nested.as_nested_tensor(values, layout=torch.jagged)}, batch_size=QUEUE_ROWS
            )
            times: dict[str, list[float]] = {"put": [], "get": []}
            for _ in range(5):
                start = time.perf_counter()
                tq.kv_batch_put(keys=keys, partition_id="bench", fields=fields)
                times["put"].append(time.perf_counter() - start)
                start = time.perf_counter()
                back = tq.kv_batch_get(keys=keys, partition_id="bench", select_fields=["column"])
                times["get"].append(time.perf_counter() - start)
                assert torch.equal(back["column"].unbind()[-1], values[-1])
            found.append({"bytes": size, **{way: min(taken) for way, taken in times.items()}})
            show(f"queue: {found[-1]}")
    finally:
        tq.close()
        ray.shutdown()
    return found


# ---- gloo ----


def gloo_rank(rank: int, ranks: int, folder: Path) -> None:
    """One rank: median seconds of each collective."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = []
    for size in GLOO_BYTES:
        whole, part = torch.zeros(size // 4), torch.ones(size // 4 // ranks)
        for name, run in {
            "gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),
            "scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole),
        }.items():
            times = []
            for _ in range(REPEATS):
                dist.barrier()
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
            found.append({"ranks": ranks, "bytes": size, "kind": name, "seconds": statistics.median(times)})
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def gloo() -> list[dict[str, Any]]:
    found = []
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "--gloo-rank"]
            running = [
                subprocess.Popen([*command, str(rank), str(ranks), folder], env=environment) for rank in range(ranks)
            ]
            if any([process.wait(timeout=300) for process in running]):
                raise SystemExit("a rank failed")
            found += json.loads((Path(folder) / "found.json").read_text())
    return found


def main() -> None:
    os.environ.update(VERL_PLATFORM="cpu", TOKENIZERS_PARALLELISM="false")  # before anything imports verl
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("traffic", "driver", "queue", "gloo"))
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="ROWSxTOKENS", help="of the driver's batches")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    parser.add_argument("--one-size", help=argparse.SUPPRESS)
    parser.add_argument("--gloo-rank", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_size:
        print(json.dumps(one_size(*map(int, args.one_size.split("x")))))
        return
    if args.gloo_rank:
        rank, ranks, folder = args.gloo_rank
        gloo_rank(int(rank), int(ranks), Path(folder))
        return
    parts = args.parts or ("traffic", "driver", "queue", "gloo")
    path = args.results / "scaling-cpu.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    result = {**before, **record("scaling", "cpu", Clock("cpu"), 1)}
    if "traffic" in parts:
        result["traffic"] = traffic()
        show(f"traffic: {result['traffic']}")
    if "driver" in parts:
        found = {(size["rows"], size["tokens"]): size for size in before.get("driver", [])}
        for size in args.sizes:
            # In a process of its own, whose peak of memory is its own.
            said = subprocess.run([sys.executable, __file__, "--one-size", size], capture_output=True, text=True)
            if said.returncode:
                raise SystemExit(said.stderr[-3000:])
            measured = json.loads(said.stdout.splitlines()[-1])
            show(f"driver: {measured}")
            found[measured["rows"], measured["tokens"]] = measured
        result["driver"] = [found[size] for size in sorted(found, key=lambda size: size[0] * size[1])]
    if "queue" in parts:
        result["queue"] = queue()
    if "gloo" in parts:
        result["gloo"] = gloo()
        show(f"gloo: {result['gloo']}")
    write(result, args.results)


if __name__ == "__main__":
    main()
