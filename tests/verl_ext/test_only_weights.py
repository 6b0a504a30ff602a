"""One word adds token weights to a run of verl's and nothing else; installing this package changes nothing at all.

Two whole runs by verl's own command, of real interpreters: one with ``grpo``, and one with ``grail`` that resumes from the
first one's checkpoint.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verl_ext import whole_run

ROOT = Path(__file__).parents[2]
NAMES = """
import importlib, json, os, sys, types
before = dict(os.environ)
import verl.trainer.main_ppo, verl.trainer.ppo.v1, verl.workers.engine_workers, verl.utils.tracking
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
names = {}
for module_name, module in sorted(sys.modules.items()):
    if module_name.split(".")[0] == "verl":
        for name, value in vars(module).items():
            if isinstance(value, types.FunctionType):
                names[f"{module_name}.{name}"] = f"{value.__code__.co_filename}:{value.__qualname__}"
            elif isinstance(value, type):
                names[f"{module_name}.{name}"] = f"{value.__module__}:{value.__qualname__}"
environment = {name: value for name, value in os.environ.items() if before.get(name) != value}
same = [environment, sorted(map(str, ADV_ESTIMATOR_REGISTRY)), "grail_advantage.methods" in sys.modules]
plugin, patched = sys.modules.get("grail_advantage.verl_ext.plugin"), verl.utils.config.validate_config
if plugin is not None:
    importlib.reload(plugin)
same.append(verl.utils.config.validate_config is patched)
print("NAMES" + json.dumps([names, same]))
"""


@pytest.mark.slow
def test_installing_changes_two_functions_of_verls() -> None:
    """Once, though the plug-in is named in verl's other hook too. Methods register where a run starts."""
    results = []
    for hook in (
        {"EXTERNAL_MODULES": "grail_advantage.verl_ext.plugin"},
        {"EXTERNAL_PLUGINS": "none"},
    ):
        plugins = {f"VERL_USE_{name}": value for name, value in hook.items()}
        variables = {
            name: value for name, value in os.environ.items() if not name.startswith("VERL_")
        } | plugins
        command = [sys.executable, "-c", NAMES]
        how = {"cwd": ROOT, "env": variables, "timeout": 600, "check": True}
        done = subprocess.run(command, capture_output=True, text=True, **how)
        results.append(
            json.loads(
                next(line for line in done.stdout.splitlines() if line.startswith("NAMES"))[5:]
            )
        )
    (names, same), (stock_names, stock_same) = results
    changed = {
        name
        for name in names.keys() | stock_names.keys()
        if names.get(name) != stock_names.get(name)
    }
    # main_ppo imports both by name. verl's own loader of plug-ins has a further name where it loads any.
    wrapped = {name.rsplit(".", 1)[1] for name in changed} - {"_entry_points"}
    assert wrapped == {"validate_config", "configure_verl_logging"}
    assert same == stock_same and same[2:] == [False, True]


@pytest.mark.nightly
def test_a_stock_runs_checkpoint_resumes_and_its_own_are_those_of_stock_verl(
    tmp_path: Path,
) -> None:
    for steps, estimator in enumerate(("grpo", "grail"), start=1):
        overrides = [
            f"algorithm.adv_estimator={estimator}",
            "data.train_batch_size=2",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.rollout.n=16",
            "trainer.total_epochs=100",
            f"trainer.total_training_steps={steps}",
            "trainer.save_freq=1",
        ]
        runs = whole_run.run(tmp_path, overrides, rows=4, stock=True)
    assert any(row.span is not None for row in runs.dump(2))
    assert "Resuming from" in runs.output
    steps = [json.loads(line) for line in (runs.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [2], "verl's own logger begins anew"
    assert "grail/answer_found_rate" in steps[-1]["data"]
    checkpoints = runs.folder / "checkpoints"
    steps = [checkpoints / "global_step_1", checkpoints / "global_step_2"]
    assert {*checkpoints.iterdir()} == {*steps, checkpoints / "latest_checkpointed_iteration.txt"}
    files = [{str(path.relative_to(step)) for path in step.rglob("*")} for step in steps]
    assert files[0] == files[1] and "data.pt" in files[0]
