"""A run on several nodes against the same run on one, and a run that loses a node; on this machine.

The nodes are those of scripts/local_nodes.sh. Each request has a seed of its own (recipe/run_life/seeds.py), so that two runs
are comparable token by token.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from recipe.marked_text import write_marked
from tests.verl_ext import whole_run

ROOT = Path(__file__).parents[2]
RECORD, PAGE = ROOT / "docs" / "recorded" / "nodes.json", ROOT / "docs" / "dev" / "local_nodes.md"
STEPS, PROMPTS, ROLLOUTS = 3, 4, 4
LOST_AT = 2
"""Last step that is saved before a node is lost."""
PARTS = {"equal2": 2, "equal4": 4, "cut2": 2, "kill2": 2, "kill4": 4}
"""Number of ranks, one on each node, of every part."""
COLUMNS = ("scores", "weights", "advantages", "base_advantages")
OF_THE_ROLLOUT = ("rollout_corr", "rollout_probs", "num_preempted", "training/rollout_actor")
"""Parts of the names of metrics that compare with vLLM's own log-probabilities."""
HOW = {"cut": "its network is cut off", "kill": "all its processes are killed"}
OPTIONS = """
algorithm.adv_estimator=grail algorithm.grail.preset=robust algorithm.grail.gate=all data.train_batch_size={prompts}
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128 actor_rollout_ref.actor.ppo_mini_batch_size={prompts}
actor_rollout_ref.actor.optim.lr=1e-3 actor_rollout_ref.rollout.n={rollouts} trainer.total_training_steps={steps}
trainer.total_epochs=1 trainer.save_freq=1 trainer.max_actor_ckpt_to_keep=3
+actor_rollout_ref.rollout.agent.agent_loop_manager_class=recipe.run_life.seeds.SeededAgentLoopManager
"""
HEADING = "`python -m benchmarks.endurance nodes`, {date}, GRAIL with 4 prompts x 4 responses a step."
EQUAL_HEAD = """\
| ranks, one on each node, against as many on one node | steps, rows, tokens | rows with other tokens \
| largest difference of scores, weights, advantages | of parameters after the last step | metrics that differ |
|---|---|---|---|---|---|"""
EQUAL_ROW = (
    "| {ranks} | {steps}, {rows}, {tokens} | {rows_with_other_tokens} | {largest_difference[scores]:.3g}, "
    "{largest_difference[weights]:.3g}, {largest_difference[advantages]:.3g} | {largest_difference_of_parameters:.3g} "
    "| {differ}, of {metrics_compared} |"
)
LOST_HEAD = """\
| the last node after step 2 | nodes | the run ends after | status | saved | resumes with | steps in the log at the end |
|---|---|---|---|---|---|---|"""
LOST_ROW = (
    "| {words} | {ranks} | {seconds_until_the_end:.0f} s | {status} | step {saved_step} | {ranks_left} | {last} |"
)
LOSE = """
how=$1 node=$2 folder=$3; shift 3
"$@" & command=$!
until [[ $(cat "$folder/metrics.jsonl" 2>/dev/null | wc -l) -ge $AT ]]; do kill -0 $command || exit 1; sleep 0.1; done
bash scripts/local_nodes.sh "$how" "$node"
began=$EPOCHREALTIME
timeout 900 tail --pid=$command -f /dev/null && itself=true || { itself=false; kill -KILL $command; }
wait $command && status=0 || status=$?
echo "[$began, $EPOCHREALTIME, $itself]" >"$folder/loss.json"
exit $status
"""
"""Runs a command on the first node, and loses another node once a step is logged."""


def trained(folder: Path, steps: int, ranks: int, *, nodes: int, wrapper: list[str] | None = None) -> Any:
    """How a run of so many ranks ended, on as many nodes, or with ``nodes=0`` on one."""
    folder.mkdir(parents=True, exist_ok=True)
    options = OPTIONS.format(prompts=PROMPTS, rollouts=ROLLOUTS, steps=steps).split()
    options += [] if nodes else [f"trainer.n_gpus_per_node={ranks}"]
    # One thread a process, so that sums have one order.
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"WAIT_SECONDS": "600", "AT": str(LOST_AT)} | ({"RAY_LOGS": str(folder / "ray")} if nodes else {})
    rows = PROMPTS * steps
    done = whole_run.start(folder, options, rows=rows, nodes=nodes, wrapper=wrapper or [], **environment)
    if done.returncode and not wrapper:
        raise SystemExit(done.stdout[-4000:] + done.stderr[-4000:])
    return done


def equal(folder: Path, ranks: int) -> dict[str, Any]:
    """Largest differences between a run on as many nodes as ranks and one on a single node."""
    one, many = (whole_run.WholeRun(folder / name, "") for name in ("one", "many"))
    trained(one.folder, STEPS, ranks, nodes=0)
    trained(many.folder, STEPS, ranks, nodes=ranks)
    pairs = [pair for n in range(1, STEPS + 1) for pair in zip(one.records(n), many.records(n), strict=True)]
    same = [(a, b) for a, b in pairs if all(a[name] == b[name] for name in ("prompt_ids", "response_ids"))]
    metrics: dict[str, float] = {}
    for step in range(1, STEPS + 1):
        ours, theirs = one.metrics(step), many.metrics(step)
        for name in ours.keys() | theirs.keys():
            if "timing" not in name and "perf/" not in name:
                metrics[name] = max(metrics.get(name, 0.0), abs(ours[name] - theirs[name]))
    of_rollout = {name: gap for name, gap in metrics.items() if any(part in name for part in OF_THE_ROLLOUT)}
    parameters = 0.0
    for rank in range(ranks):
        name = f"checkpoints/global_step_{STEPS}/actor/model_world_size_{ranks}_rank_{rank}.pt"
        ours, theirs = (torch.load(run.folder / name, weights_only=True) for run in (one, many))
        gaps = (float((ours[key]._local_tensor - theirs[key]._local_tensor).abs().max()) for key in ours)
        parameters = max(parameters, *gaps)
    places: dict[str, Counter[str]] = {}  # actors on each node, by Ray's own logs
    for log in sorted((many.folder / "ray").glob("node*/session_2*/logs/worker-*.out")):
        names = re.findall(r"^:actor_name:(\w+)", log.read_text(errors="replace"), flags=re.M)[:1]
        places.setdefault(log.relative_to(many.folder / "ray").parts[0], Counter()).update(names)
    return {
        "ranks": ranks,
        "steps": STEPS,
        "rows": len(pairs),
        "tokens": sum(len(row["response_ids"]) for row, _ in pairs),
        "rows_with_other_tokens": len(pairs) - len(same),
        "largest_difference": {
            name: max((_gap(*ends) for a, b in same for ends in zip(a[name], b[name], strict=True)), default=0.0)
            for name in COLUMNS
        },
        "metrics_compared": len(metrics) - len(of_rollout),
        "metrics_that_differ": {n: gap for n, gap in sorted(metrics.items()) if gap and n not in of_rollout},
        "largest_difference_of_rollout_metrics": max(of_rollout.values(), default=0.0),
        "largest_difference_of_parameters": parameters,
        "places": places,
    }


def _gap(one: float | None, other: float | None) -> float:
    return 0.0 if one == other else math.inf if one is None or other is None else abs(one - other)


def lost(folder: Path, how: str, ranks: int) -> dict[str, Any]:
    """A run that loses its last node after a checkpoint, and resumes with half of its nodes."""
    left = ranks // 2
    done = trained(
        folder, STEPS + 1, ranks, nodes=ranks, wrapper=["bash", "-c", LOSE, "lose", how, str(ranks), str(folder)]
    )
    said = done.stdout + done.stderr
    if not (folder / "loss.json").exists():
        raise SystemExit(f"the run did not come as far as step {LOST_AT}:\n{said[-3000:]}")
    began, ended, itself = json.loads((folder / "loss.json").read_text())
    message = re.search(r"^grail_advantage watchdog: .*\n(?:  .*\n)+", said, flags=re.M)
    saved = int((folder / "checkpoints/latest_checkpointed_iteration.txt").read_text())
    again = trained(folder, STEPS + 1, left, nodes=left if left > 1 else 0)
    return {
        "how": how,
        "ranks": ranks,
        "left": left,
        "status": done.returncode,
        "seconds_until_the_end": round(ended - began, 1),
        "ended_by_itself": itself,
        "saved_step": saved,
        "message": message[0].replace(f"{folder.parent}/", "").splitlines() if message else [],
        "resumed_steps": sorted(json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()),
        "resume_note": re.findall(r"is of \d+ ranks and is shared out to \d+", again.stdout + again.stderr)[:1],
    }


def page() -> str:
    """The generated part of the page, from the record."""
    record = json.loads(RECORD.read_text())
    lines = [HEADING.format(date=record["date"]), "", *EQUAL_HEAD.splitlines()]
    for pair in record["equal"]:
        differ = "; ".join(f"`{name}` by {gap:.1g}" for name, gap in pair["metrics_that_differ"].items()) or "none"
        lines.append(EQUAL_ROW.format(differ=differ, **pair))
    lines += ["", *LOST_HEAD.splitlines()]
    for run in record["lost"]:
        texts = {"words": HOW[run["how"]], "last": ", ".join(map(str, run["resumed_steps"]))}
        lines.append(LOST_ROW.format(ranks_left=f"{run['left']} rank{'s' * (run['left'] > 1)}", **texts, **run))
    for run in record["lost"]:
        lines += ["", f"The run's message where {HOW[run['how']]}:", "", "```", *run["message"], "```"]
    return "\n".join(lines)


def write_page() -> None:
    """The page from what is recorded."""
    write_marked(PAGE, "nodes", page())


def run(parts: list[str]) -> None:
    """Run these parts; the others stay as they are recorded."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"equal": [], "lost": []}
    for part in parts:
        how, ranks = part.rstrip("0123456789"), PARTS[part]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / part
            found = equal(folder, ranks) if how == "equal" else lost(folder, how, ranks)
        print(json.dumps(found, indent=1), flush=True)
        kind = "equal" if how == "equal" else "lost"
        key = lambda one: (one.get("how", ""), one["ranks"])  # noqa: E731
        record[kind] = sorted([*(one for one in record[kind] if key(one) != key(found)), found], key=key)
        record |= {"date": f"{datetime.now(UTC):%Y-%m-%d}", "steps": STEPS, "cores": os.cpu_count()}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    write_page()
