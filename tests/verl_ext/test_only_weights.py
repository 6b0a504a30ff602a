"""One word adds token weights to a run of verl's and nothing else; installing this package changes nothing at all.

Whole runs by verl's own command, of real interpreters: one with ``grpo``, and one with ``grail`` that resumes from the
first one's checkpoint.
"""

import json
import os
import subprocess
import sys

import pytest

from grail_advantage import Grail
from tests.verl_ext import whole_run

NAMES = """
import importlib, json, os, sys, types
import datasets, peft, ray, tensordict, torch, transfer_queue, transformers.modeling_utils, vllm  # once for both
def names_and_same():
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
    return names, same
assert not [name for name in sys.modules if name.split(".")[0] == "verl"]
for hook in sys.argv[1:]:
    if os.fork() == 0:
        name, _, value = hook.partition("=")
        os.environ[name] = value
        print("NAMES" + json.dumps(names_and_same()), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
"""Prints verl's functions and classes in a process with a plug-in, and what else is to be the same in all."""


@pytest.mark.slow
def test_installing_changes_two_functions_of_verls():
    """Once, though the plug-in is named in verl's other hook too. Methods register where a run starts."""
    hook = "VERL_USE_EXTERNAL_MODULES=grail_advantage.verl_ext.plugin"
    output = subprocess.check_output(
        [sys.executable, "-c", NAMES, hook, "VERL_USE_EXTERNAL_PLUGINS=none"],
        cwd=whole_run.ROOT,
        env={name: os.environ[name] for name in os.environ if not name.startswith("VERL_")},
        text=True,
        timeout=600,
    )
    (names, same), (stock_names, stock_same) = (
        json.loads(line.removeprefix("NAMES"))
        for line in output.splitlines()
        if line.startswith("NAMES")
    )
    changed = {
        name.rsplit(".", 1)[1]
        for name in names.keys() | stock_names.keys()
        if names.get(name) != stock_names.get(name)
    }
    # main_ppo imports both by name. verl's own loader of plug-ins has a further name where it loads any.
    assert changed - {"_entry_points"} == {"validate_config", "configure_verl_logging"}
    # The environment and the registered estimators are the same; nothing has imported the methods.
    assert same == stock_same and same[2:] == [False, True]


@pytest.mark.nightly
@pytest.mark.parametrize("use_v1", [True, False])
def test_a_stock_runs_checkpoint_resumes_and_its_own_are_those_of_stock_verl(
    use_v1, tmp_path
):
    """With both of verl's trainers; the weights are those of the plain computation, and arrive."""
    for steps, estimator in enumerate(("grpo", "grail"), start=1):
        overrides = [
            f"trainer.use_v1={use_v1}",
            f"algorithm.adv_estimator={estimator}",
            "data.train_batch_size=2",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
            "actor_rollout_ref.rollout.n=16",
            "trainer.total_epochs=100",
            f"trainer.total_training_steps={steps}",
            "trainer.save_freq=1",
        ]
        run = whole_run.run(tmp_path, overrides, rows=4, stock=True)
    assert "Resuming from" in run.output
    rows = run.dump(2)
    for row, weights_T in zip(
        rows, whole_run.plain_weights(run, rows, Grail()), strict=True
    ):
        assert row.weight_T == pytest.approx(weights_T.numpy(), rel=1e-4)
        assert row.received_T == pytest.approx(row.advantage_T, rel=1e-4, abs=1e-6)
    # A response with an answer has weights of many values.
    assert any(len(set(row.weight_T.tolist())) > 2 for row in rows)
    # verl's own logger begins anew: it has no line of the first step.
    (line,) = (run.folder / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)["data"]
    assert metrics["receipt/findings"] == metrics["token_dump/failed_files"] == 0
    assert "grail/answer_found_rate" in metrics
    checkpoints = run.folder / "checkpoints"
    steps = [checkpoints / "global_step_1", checkpoints / "global_step_2"]
    assert {*checkpoints.iterdir()} == {
        *steps,
        checkpoints / "latest_checkpointed_iteration.txt",
    }
    stock, ours = (
        {str(path.relative_to(step)) for path in step.rglob("*")} for step in steps
    )
    assert ours == stock and "data.pt" in stock
