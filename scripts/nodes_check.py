"""A run on several nodes against the same run on one, and a run that loses a node; on this machine.

    python scripts/nodes_check.py --write docs/multi_node.md      # about 25 minutes on two cores; needs 12 GB of memory

The nodes are those of scripts/local_nodes.sh. Each request has a seed of its own
(recipe/run_life/seeds.py), so that two runs are comparable token by token. The figures go to
docs/recorded/nodes.json, and as tables into the page; ``--page docs/multi_node.md`` writes the tables again from the record.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from recipe.marked_text import write_marked  # noqa: E402
from tests.verl_ext import whole_run  # noqa: E402

RECORD = ROOT / "docs" / "recorded" / "nodes.json"
STEPS, PROMPTS, ROLLOUTS = 3, 4, 4
LOST_AT = 2
"""Last step that is saved before a node is lost."""
COLUMNS = ("scores", "weights", "advantages", "base_advantages")
OF_THE_ROLLOUT = ("rollout_corr", "rollout_probs", "timing", "perf/", "num_preempted", "training/rollout_actor")
"""Parts of the names of metrics that compare with vLLM's own log-probabilities, or that measure time and memory."""
LIMIT = 900
"""Seconds after which a run that has lost a node is given up."""


def options(steps: int = STEPS) -> list[str]:
    """Options of every run: GRAIL on FSDP2, a checkpoint at the end of each step."""
    return [
        "algorithm.adv_estimator=grail",
        "algorithm.grail.preset=robust",
        "algorithm.grail.gate=all",
        f"data.train_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=1",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=3",
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=recipe.run_life.seeds.SeededAgentLoopManager",
    ]


def environment() -> dict[str, str]:
    """Variables of every run: one thread a process, so that sums have one order."""
    return {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "WAIT_SECONDS": "600"}


def trained(folder: Path, *, ranks: int, nodes: int) -> whole_run.WholeRun:
    """A finished run of so many ranks, on one node or on as many; one that is there already is taken as it is."""
    if (folder / f"checkpoints/global_step_{STEPS}/run_state.json").exists():
        return whole_run.WholeRun(folder, "")
    folder.mkdir(parents=True)
    overrides = [*options(), *([] if nodes else [f"trainer.n_gpus_per_node={ranks}"])]
    logs = {"RAY_LOGS": str(folder / "ray")} if nodes else {}
    return whole_run.run(folder, overrides, rows=PROMPTS * STEPS, nodes=nodes, **environment(), **logs)


def places(folder: Path) -> dict[str, dict[str, int]]:
    """How many actors of each class ran on each node, by Ray's own logs."""
    actors: dict[str, dict[str, int]] = {}
    for log in sorted((folder / "ray").glob("node*/session_2*/logs/worker-*.out")):
        node = log.relative_to(folder / "ray").parts[0]
        for name in re.findall(r"^:actor_name:(\w+)", log.read_text(errors="replace"), flags=re.M)[:1]:
            actors.setdefault(node, {})[name] = actors.get(node, {}).get(name, 0) + 1
    return actors


def differences(one: whole_run.WholeRun, many: whole_run.WholeRun, ranks: int) -> dict[str, Any]:
    """Largest differences between two runs, with the numbers of compared rows, tokens and metrics."""
    rows = tokens = other_tokens = 0
    largest = dict.fromkeys(COLUMNS, 0.0)
    for step in range(1, STEPS + 1):
        for ours, theirs in zip(one.records(step), many.records(step), strict=True):
            rows += 1
            tokens += len(ours["response_ids"])
            if ours["response_ids"] != theirs["response_ids"] or ours["prompt_ids"] != theirs["prompt_ids"]:
                other_tokens += 1
                continue
            for name in COLUMNS:
                for a, b in zip(ours[name], theirs[name], strict=True):
                    gap = 0.0 if a == b else (math.inf if a is None or b is None else abs(a - b))
                    largest[name] = max(largest[name], gap)
    metrics, of_rollout = {}, 0.0
    for step in range(1, STEPS + 1):
        ours, theirs = one.metrics(step), many.metrics(step)
        for name in ours.keys() | theirs.keys():
            gap = abs(ours[name] - theirs[name])
            if "timing" in name or "perf/" in name:
                continue
            if any(part in name for part in OF_THE_ROLLOUT):
                of_rollout = max(of_rollout, gap)
            else:
                metrics[name] = max(metrics.get(name, 0.0), gap)
    parameters = 0.0
    for rank in range(ranks):
        name = f"checkpoints/global_step_{STEPS}/actor/model_world_size_{ranks}_rank_{rank}.pt"
        ours, theirs = (torch.load(run.folder / name, weights_only=True) for run in (one, many))
        for key in ours:
            parameters = max(parameters, float((ours[key]._local_tensor - theirs[key]._local_tensor).abs().max()))
    return {
        "ranks": ranks,
        "steps": STEPS,
        "rows": rows,
        "tokens": tokens,
        "rows_with_other_tokens": other_tokens,
        "largest_difference": largest,
        "metrics_compared": len(metrics),
        "metrics_that_differ": {name: gap for name, gap in sorted(metrics.items()) if gap},
        "largest_difference_of_rollout_metrics": of_rollout,
        "largest_difference_of_parameters": parameters,
        "places": places(many.folder),
    }


@dataclass(frozen=True)
class Loss:
    """The way in which a node is lost, and the number of ranks that continue."""

    how: str
    ranks: int
    left: int


def lost(folder: Path, loss: Loss) -> dict[str, Any]:
    """A run of ``loss.ranks`` nodes that loses its last one after a checkpoint, and resumes with those that are left."""
    folder.mkdir(parents=True)
    steps = STEPS + 1
    watch = [sys.executable, str(Path(__file__)), "--lose", loss.how, str(loss.ranks), str(folder / "metrics.jsonl")]
    report = folder / "loss.json"
    began = time.monotonic()
    done = whole_run.start(
        folder,
        options(steps),
        rows=PROMPTS * steps,
        nodes=loss.ranks,
        wrapper=[*watch, str(report), "--"],
        **environment(),
        RAY_LOGS=str(folder / "ray"),
    )
    total = time.monotonic() - began
    if not report.exists():
        raise SystemExit(f"the run did not come as far as step {LOST_AT}:\n{(done.stdout + done.stderr)[-3000:]}")
    timed = json.loads(report.read_text())
    (folder / "lost.log").write_text(done.stdout + done.stderr)
    saved = int((folder / "checkpoints/latest_checkpointed_iteration.txt").read_text())
    again = [*options(steps), *([] if loss.left > 1 else ["trainer.n_gpus_per_node=1"])]
    resumed = whole_run.run(
        folder, again, rows=PROMPTS * steps, nodes=loss.left if loss.left > 1 else 0, **environment()
    )
    return {
        "how": loss.how,
        "ranks": loss.ranks,
        "left": loss.left,
        "status": done.returncode,
        **timed,
        "whole_seconds": round(total),
        "saved_step": saved,
        "message": [line.replace(f"{folder.parent}/", "") for line in watchdog_message(done.stdout + done.stderr)],
        "resumed_steps": sorted(
            json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
        ),
        "resume_note": re.findall(r"is of \d+ ranks and is shared out to \d+", resumed.output)[:1],
    }


def watchdog_message(output: str) -> list[str]:
    """The watchdog's message on a failed run."""
    match = re.search(r"^grail_advantage watchdog: .*\n(?:  .*\n)+", output, flags=re.M)
    return match[0].splitlines() if match else []


def lose(how: str, node: str, metrics: Path, report: Path, command: list[str]) -> int:
    """Inside the nodes: run the command, lose a node once the step is logged, and say how long the command still took."""
    process = subprocess.Popen(command)
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= LOST_AT):
        if process.poll() is not None:
            return process.returncode
        time.sleep(0.1)
    subprocess.run(["bash", str(ROOT / "scripts/local_nodes.sh"), how, node], check=True)
    began = time.monotonic()
    try:
        status = process.wait(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        status = None
    report.write_text(
        json.dumps({"seconds_until_the_end": round(time.monotonic() - began, 1), "ended_by_itself": status is not None})
    )
    return 1 if status is None else status


def page(record: dict[str, Any]) -> str:
    """The generated part of the page."""
    lines = [
        f"`python scripts/nodes_check.py`, {record['date']}, GRAIL with {PROMPTS} prompts x {ROLLOUTS} responses a step.",
        "",
    ]
    if record["equal"]:
        lines += [
            "| ranks, one on each node, against as many on one node | steps, rows, tokens | rows with other tokens | largest "
            "difference of scores, weights, advantages | of parameters after the last step | metrics that differ |",
            "|---|---|---|---|---|---|",
        ]
        for pair in record["equal"]:
            worst = "; ".join(f"`{name}` by {gap:.1g}" for name, gap in pair["metrics_that_differ"].items()) or "none"
            gaps = ", ".join(f"{pair['largest_difference'][name]:.3g}" for name in COLUMNS[:3])
            lines.append(
                f"| {pair['ranks']} | {pair['steps']}, {pair['rows']}, {pair['tokens']} | "
                f"{pair['rows_with_other_tokens']} | {gaps} | {pair['largest_difference_of_parameters']:.3g} | {worst}, of "
                f"{pair['metrics_compared']} |"
            )
        lines.append("")
    if record["lost"]:
        lines += [
            "| the last node after step 2 | nodes | the run ends after | status | saved | resumes with | "
            "steps in the log at the end |",
            "|---|---|---|---|---|---|---|",
        ]
        words = {"cut": "its network is cut off", "kill": "all its processes are killed"}
        for run in record["lost"]:
            lines.append(
                f"| {words[run['how']]} | {run['ranks']} | {run['seconds_until_the_end']:.0f} s | {run['status']} | "
                f"step {run['saved_step']} | {run['left']} rank{'s' if run['left'] > 1 else ''} | "
                f"{', '.join(map(str, run['resumed_steps']))} |"
            )
        for run in record["lost"]:
            lines += ["", f"The run's message where {words[run['how']]}:", "", "```", *run["message"], "```"]
    return "\n".join(lines)


def main() -> int:
    if sys.argv[1:2] == ["--lose"]:
        how, node, metrics, report, separator, *command = sys.argv[2:]
        assert separator == "--"
        return lose(how, node, Path(metrics), Path(report), command)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="run everything, and put the tables into this page")
    parser.add_argument("--page", type=Path, help="put the tables of the record into this page")
    parser.add_argument(
        "--only", nargs="+", help="parts to run anew, the others as recorded: equal2 equal4 cut2 kill4 ..."
    )
    parser.add_argument("--folder", type=Path, help="where the runs go, and stay; otherwise a temporary folder")
    args = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"equal": [], "lost": []}
    if args.page is None:
        parts = args.only or ["equal2", "equal4", "cut2", "kill2", "kill4"]
        with tempfile.TemporaryDirectory() as temporary:
            folder = (args.folder or Path(temporary)).absolute()
            for part in parts:
                kind, ranks = part.rstrip("0123456789"), int(part.lstrip("abcdefghijklmnopqrstuvwxyz"))
                if kind == "equal":
                    one = trained(folder / f"one{ranks}", ranks=ranks, nodes=0)
                    many = trained(folder / f"many{ranks}", ranks=ranks, nodes=ranks)
                    measured = differences(one, many, ranks)
                    record["equal"] = [other for other in record["equal"] if other["ranks"] != ranks] + [measured]
                else:
                    measured = lost(folder / part, Loss(kind, ranks, ranks // 2))
                    record["lost"] = [
                        other for other in record["lost"] if (other["how"], other["ranks"]) != (kind, ranks)
                    ] + [measured]
                print(json.dumps(measured, indent=1), flush=True)
        record["equal"].sort(key=lambda pair: pair["ranks"])
        record["lost"].sort(key=lambda run: (run["how"], run["ranks"]))
        record |= {"date": f"{datetime.now(UTC):%Y-%m-%d}", "steps": STEPS, "cores": os.cpu_count()}
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    target = args.page or args.write
    if target is not None:
        write_marked(target, "nodes", page(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
