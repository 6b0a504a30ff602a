"""The commands as a user gives them: what they print, and what stops them before Ray starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import forked
from tests.composed import compose

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ACTOR = "actor_rollout_ref.actor"


def _main(*overrides: str, **environment: str) -> subprocess.CompletedProcess:
    return forked.run("recipe.main_grail", *overrides, HYDRA_FULL_ERROR="1", **environment)


class TestCommandLine:
    CPU = ("--config-name", "cpu_trainer", f"{ACTOR}.use_dynamic_bsz=True", "actor_rollout_ref.rollout.n=4")

    def test_dry_run_prints_the_configuration_and_nothing_else(self, tmp_path: Path) -> None:
        overrides = (*self.CPU, f"hydra.run.dir={tmp_path}", "algorithm.grail.leaf=last", "trainer.total_epochs=7")
        done = _main(*overrides, DRY_RUN="1")
        assert done.returncode == 0, done.stderr
        printed = yaml.safe_load(done.stdout)
        assert set(printed) == set(compose("cpu_trainer"))
        assert printed["algorithm"]["adv_estimator"] == "grail"
        assert printed["algorithm"]["grail"]["leaf"] == "last"
        assert printed["trainer"]["total_epochs"] == 7
        # The mode as it is written in an override, not as the entry point rewrites it.
        assert printed["trainer"]["v1"]["trainer_mode"] == "sync"
        # Interpolations are resolved, so that the printed configuration stands for itself.
        assert "${" not in done.stdout
        assert "local Ray instance" not in done.stdout + done.stderr

    def test_dry_run_refuses_what_a_run_refuses(self, tmp_path: Path) -> None:
        done = _main(*self.CPU, f"hydra.run.dir={tmp_path}", "algorithm.grail.weight_std=0", DRY_RUN="1")
        assert done.returncode != 0
        assert done.stdout == ""
        assert "ValueError: grail.weight_std=0.0 must be greater than 0" in done.stderr

    def test_a_run_refuses_before_ray_starts(self, tmp_path: Path) -> None:
        done = _main(*self.CPU, f"hydra.run.dir={tmp_path}", "actor_rollout_ref.rollout.n=1")
        assert done.returncode != 0
        assert "ValueError: actor_rollout_ref.rollout.n=1 does not work" in done.stderr
        assert "ray init kwargs" not in done.stdout + done.stderr

    def test_a_plugin_that_is_switched_off_is_noticed(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "recipe.main_grail", *self.CPU, f"hydra.run.dir={tmp_path}"]
        variables = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_PLATFORM": "nvidia"}
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode != 0
        assert "the plug-in of this package did not load with verl" in done.stderr
        assert "VERL_USE_EXTERNAL_PLUGINS" in done.stderr


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


IMPORT_VERL = """
import verl
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.utils import config
from grail_advantage.verl_ext import entry as stock_entry
patched = config.validate_config
stock_entry.install()
print("grail" in ADV_ESTIMATOR_REGISTRY, config.validate_config is patched, hasattr(patched.__wrapped__, "__wrapped__"))
"""


@pytest.mark.parametrize("modules", ["", "grail_advantage.verl_ext.plugin"], ids=["once", "twice"])
def test_import_of_verl_registers_it(modules: str) -> None:
    """Once by the entry point alone; twice when the plugin is named in verl's other hook too."""
    done = _run("-c", IMPORT_VERL, VERL_USE_EXTERNAL_MODULES=modules)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True", "False"]


class TestStockEntryPoint:
    OVERRIDES = (
        "data.train_files=nowhere.parquet",
        "data.val_files=nowhere.parquet",
        "actor_rollout_ref.model.path=nowhere",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
    )

    def _start(self, tmp_path: Any, *overrides: str) -> subprocess.CompletedProcess:
        return forked.run("verl.trainer.main_ppo", *self.OVERRIDES, f"hydra.run.dir={tmp_path}", *overrides)

    @pytest.mark.parametrize(
        ("overrides", "said"),
        [
            (["+algorithm.grail.preset=best"], r"grail\.preset='best' is unknown; choose one of official, robust"),
            (["algorithm.adv_estimator=grial"], r"algorithm\.adv_estimator='grial' is unknown; choose one of .*grail"),
            (["trainer.use_v1=False"], r"trainer\.use_v1=False: .*use true"),
            (["trainer.v1.trainer_mode=mine"], r"trainer\.v1\.trainer_mode=mine does not work .*grail_mine"),
            (
                ["+algorithm.token_weights.trainer_module=nowhere"],
                r"algorithm\.token_weights\.trainer_module=nowhere failed to import: ModuleN",
            ),
        ],
    )
    def test_refuses_before_ray_starts(self, tmp_path: Any, overrides: list[str], said: str) -> None:
        done = self._start(
            tmp_path,
            "algorithm.adv_estimator=grail",
            "trainer.v1.trainer_mode=sync",
            "actor_rollout_ref.rollout.n=4",
            *overrides,
        )
        assert done.returncode != 0
        assert re.search(f"ValueError: {said}", done.stderr), done.stderr[-2000:]
        output = done.stdout + done.stderr
        assert "ray init kwargs" not in output
        assert "Started a local Ray instance" not in output
