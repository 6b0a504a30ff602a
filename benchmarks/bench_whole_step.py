"""A whole step of a real verl run: verl's own GRPO, ``uniform`` and GRAIL; generation, driver and transport included.

    python -m benchmarks.bench_whole_step                  # without a GPU, as examples/run_tiny_cpu_grail.sh

One run takes them in turn (:mod:`benchmarks.whole_step_trainer`), with a learning rate of 0, so that all see the same policy.
``uniform`` and GRAIL leave out the rows that train nothing (``skip_neutral_rows=auto``), verl's GRPO runs every row. The
seconds are processor time of all processes: Ray, TransferQueue, vLLM, the worker, the driver. ``tiny`` is the warmed-up model
that comes with the repository; ``large`` is the same function with more to compute for every token: blocks that add nothing,
and feed-forward layers widened by zeros. Writes ``results/whole_step-cpu.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from benchmarks.measuring import RESULTS, Clock, processor, record, show, write
from recipe.tiny.prepare import PrepareSettings, prepare
from recipe.tiny.shipped import load_shipped

ROOT = Path(__file__).parents[1]
MAX_PROMPT, MAX_RESPONSE = 32, 64
SKIPPED = 6
"""First steps that nobody counts: the processes warm up."""


@dataclass(frozen=True)
class Size:
    """A model and a batch."""

    layers: int
    intermediate: int
    prompts: int
    checkpointing: bool
    """verl's default is to checkpoint; the example does not."""
    rollouts: int = 8


SIZES = {
    "tiny": Size(3, 384, 32, False),
    "large": Size(8, 2048, 16, True),
    "large, without checkpointing": Size(8, 2048, 16, False),
}


def enlarge(model: Qwen3ForCausalLM, layers: int, intermediate: int) -> Qwen3ForCausalLM:
    """The same function with more blocks, whose outputs are 0, and wider feed-forward layers, whose new columns are 0."""
    config = type(model.config).from_dict(
        {
            **model.config.to_dict(),
            "num_hidden_layers": layers,
            "intermediate_size": intermediate,
            "layer_types": None,
            "max_window_layers": layers,
        }
    )
    torch.manual_seed(0)
    larger = Qwen3ForCausalLM(config)
    with torch.no_grad():
        own = larger.state_dict()
        for name, tensor in model.state_dict().items():
            own[name].zero_()
            own[name][tuple(slice(size) for size in tensor.shape)] = tensor
        for block in larger.model.layers[model.config.num_hidden_layers :]:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        tokens = torch.arange(3, 43).reshape(2, 20)
        torch.testing.assert_close(larger(tokens).logits, model(tokens).logits, rtol=1e-3, atol=1e-3)
    larger.generation_config = model.generation_config
    return larger


def measure(size: Size, folder: Path, steps: int, data: Path) -> list[dict[str, Any]]:
    """One run: for each step its method, processor seconds by process, and what verl logged."""
    folder.mkdir(parents=True)
    model, tokenizer = load_shipped()
    enlarge(model, size.layers, size.intermediate).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    responses = size.prompts * size.rollouts
    overrides = [
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'validation.parquet'}",
        f"data.train_batch_size={size.prompts}",
        f"data.max_prompt_length={MAX_PROMPT}",
        f"data.max_response_length={MAX_RESPONSE}",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"actor_rollout_ref.model.enable_gradient_checkpointing={size.checkpointing}",
        "actor_rollout_ref.actor.optim.lr=0.0",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={size.prompts}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={min(responses, 128)}",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
        f"actor_rollout_ref.actor.loss_scale_factor={MAX_RESPONSE}",
        f"actor_rollout_ref.rollout.n={size.rollouts}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={min(responses, 128)}",
        "algorithm.adv_estimator=grail",
        "algorithm.norm_adv_by_std_in_grpo=False",
        "algorithm.token_weights.trainer_module=benchmarks.whole_step_trainer",
        "algorithm.token_weights.skip_neutral_rows=auto",
        "reward.custom_reward_function.path=pkg://grail_advantage.reward",
        "reward.custom_reward_function.name=compute_score",
        "trainer.v1.trainer_mode=alternating",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=1000",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        f"hydra.run.dir={folder / 'hydra'}",
    ]
    environment = {
        **os.environ,
        "VERL_PLATFORM": "cpu",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": str(ROOT),
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "WHOLE_STEP_LAUNCHER": str(os.getpid()),
        "WHOLE_STEP_NOTES": str(folder / "notes.jsonl"),
    }
    command = [sys.executable, "-m", "recipe.main_grail", "--config-name", "cpu_trainer", *overrides]
    log = folder / "train.log"
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"the run failed; the end of its output:\n{log.read_text(encoding='utf-8')[-4000:]}")
    return _steps(
        _lines(folder / "notes.jsonl"), {line["step"]: line["data"] for line in _lines(folder / "metrics.jsonl")}
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _steps(notes: list[dict[str, Any]], logged: dict[int, dict[str, float]]) -> list[dict[str, Any]]:
    """The steps between two notes, without the first ones."""
    steps = []
    for before, after in zip(notes[SKIPPED:-1], notes[SKIPPED + 1 :], strict=True):
        data = logged[before["step"]]
        seconds = {name: after["seconds"][name] - before["seconds"].get(name, 0.0) for name in after["seconds"]}
        steps.append(
            {
                "method": before["method"],
                "seconds": {name: round(value, 3) for name, value in seconds.items() if value > 0},
                "selected_rate": data.get(f"{before['method']}/selected_rate", 0.0),
                "skipped_rows": data.get("token_weights/skipped_rows", 0),
                "tokens": data["response_length/mean"],
                "wall": {name: round(value, 3) for name, value in data.items() if name.startswith("timing_s/")},
            }
        )
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), metavar="SIZE")
    parser.add_argument("--rounds", type=int, default=10, help="measured steps of each method; even")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    args = parser.parse_args()
    if args.rounds < 2 or args.rounds % 2:
        parser.error(
            f"--rounds {args.rounds} must be even and at least 2: the order of the methods turns round each time"
        )
    result = record("whole_step", Clock("cpu"), "python -m benchmarks.bench_whole_step")
    result |= {"clock": "processor time of all processes", "hardware": processor(), "runs": []}
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary, "data")
        prepare(data, PrepareSettings(warm_up=None), show)
        for name in args.sizes:
            count = SKIPPED + 3 * args.rounds + 1
            show(f"{name}: {count} steps")
            steps = measure(SIZES[name], Path(temporary, name), count, data)
            result["runs"].append({"name": name, **asdict(SIZES[name]), "steps": steps})
            write(result, args.results)


if __name__ == "__main__":
    main()
