"""Why the memory of vLLM's CPU engine grows: the engine alone, generating and reloading, with and without a bound for oneDNN.

    python benchmarks/bench_engine_memory.py        # five minutes; needs 3 GB of memory

Each step generates 64 tokens for a few prompts of random lengths, with a seed a request, and reloads the weights as a run's
worker does after its update. oneDNN keeps what it prepared for each shape, as many as ``ONEDNN_PRIMITIVE_CACHE_CAPACITY``
allows; the variants differ in that number alone. Recorded are the process's anonymous memory (``/proc/self/smaps_rollup``) and
processor seconds. Writes ``results/engine_memory-cpu.json``, from which ``python benchmarks/soak.py page`` takes a table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

CAPACITIES = (1024, 256)
"""oneDNN's own, and that of ``grail_advantage.verl_cpu.environment``."""
STEPS, EVERY = 300, 50
PROMPTS, PROMPT_TOKENS, RESPONSES, RESPONSE_TOKENS = (2, 6), (8, 30), 4, 64


def anonymous() -> float:
    """This process's anonymous memory in MiB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


def one(steps: int, folder: str) -> dict[str, Any]:
    """The engine in this process."""
    from recipe.tiny.model import build_model, build_tokenizer

    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    engine = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=128, distributed_executor_backend="uni")

    def reload(worker: Any) -> None:
        # As grail_advantage.verl_cpu.vllm_worker does.
        weights = [(name, weight.clone()) for name, weight in model.state_dict().items() if name != "lm_head.weight"]
        worker.model_runner.reload_weights(weights_iterator=iter(weights))
        for layer in worker.model_runner.get_model().modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)

    rng, points, start = random.Random(0), [], time.process_time()
    for step in range(1, steps + 1):
        lengths = [rng.randint(*PROMPT_TOKENS) for _ in range(rng.randint(*PROMPTS))]
        prompts = [{"prompt_token_ids": [rng.randrange(len(tokenizer)) for _ in range(length)]} for length in lengths]
        sampling = SamplingParams(n=RESPONSES, max_tokens=RESPONSE_TOKENS, ignore_eos=True, seed=step, detokenize=False)
        engine.generate(prompts, sampling, use_tqdm=False)
        engine.collective_rpc(reload)
        if step % EVERY == 0 or step == 1:
            points.append({"step": step, "anonymous": anonymous()})
    return {"points": points, "seconds": time.process_time() - start}


def main() -> None:
    from grail_advantage.verl_cpu.environment import apply_defaults

    os.environ["VERL_PLATFORM"] = "cpu"
    os.environ["OMP_NUM_THREADS"] = "1"
    apply_defaults()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--results", type=Path, help="folder to write to; otherwise benchmarks/results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.steps, args.one)))
        return
    from measuring import RESULTS, Clock, record, show, write

    result = {**record("engine_memory", "cpu", Clock("cpu"), 1), "steps": args.steps, "capacities": []}
    result["versions"]["vllm"] = version("vllm")
    for capacity in CAPACITIES:
        with tempfile.TemporaryDirectory() as folder:
            process = subprocess.run(
                [sys.executable, __file__, "--one", folder, "--steps", str(args.steps)],
                env={**os.environ, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(capacity)},
                capture_output=True,
                text=True,
            )
        if process.returncode:
            raise SystemExit(process.stderr[-3000:])
        measured = {"capacity": capacity, **json.loads(process.stdout.splitlines()[-1])}
        show(str(measured))
        result["capacities"].append(measured)
    write(result, args.results or RESULTS)


if __name__ == "__main__":
    main()
