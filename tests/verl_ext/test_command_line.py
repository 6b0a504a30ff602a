"""The commands as a user gives them: what they print, and what stops them before Ray starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grail_advantage.verl_ext.entry import start_run
from tests import forked
from tests.composed import VERL, compose

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ACTOR = "actor_rollout_ref.actor"


def _main(*overrides: str, **environment: str) -> subprocess.CompletedProcess:
    return forked.run("verl.trainer.main_ppo", *overrides, HYDRA_FULL_ERROR="1", **environment)


class TestCommandLine:
    CPU = (
        f"--config-path={ROOT}/recipe/config",
        "--config-name=cpu_trainer",
        f"{ACTOR}.use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.n=4",
    )

    def test_dry_run_prints_the_configuration_and_nothing_else(self, tmp_path: Path) -> None:
        overrides = (*self.CPU, f"run.folder={tmp_path}/run", "algorithm.grail.leaf=last", "trainer.total_epochs=7")
        done = _main(*overrides, DRY_RUN="1")
        assert not (tmp_path / "run").exists()
        assert done.returncode == 0, done.stderr
        printed = yaml.safe_load(done.stdout)
        assert set(printed) == set(compose("cpu_trainer"))
        assert printed["algorithm"]["adv_estimator"] == "grail"
        assert printed["algorithm"]["grail"]["leaf"] == "last"
        assert printed["trainer"]["total_epochs"] == 7
        # The mode as it is written in an override, not as the entry point rewrites it.
        assert printed["trainer"]["v1"]["trainer_mode"] == "sync"
        # Interpolations are resolved, so that the printed configuration is complete.
        assert "${" not in done.stdout
        assert "local Ray instance" not in done.stdout + done.stderr

    def test_refused_before_ray_starts(self, tmp_path: Path) -> None:
        """In a dry run too."""
        for override, message, dry_run in (
            ("algorithm.grail.weight_std=0", "grail.weight_std=0 should be greater than 0", "1"),
            (
                f"{ACTOR}.policy_loss.loss_mode=geo_mean",
                "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean does",
                "0",
            ),
        ):
            done = _main(*self.CPU, f"run.folder={tmp_path}", override, DRY_RUN=dry_run)
            assert done.returncode != 0 and f"ValueError: {message}" in done.stderr
            assert "ray init kwargs" not in done.stdout + done.stderr


IMPORT_VERL = """
import importlib
import sys
import verl
from verl.utils import config
print("grail_advantage.verl_ext.plugin" in sys.modules, "grail_advantage.signals" in sys.modules)
from grail_advantage.verl_ext import plugin
patched = config.validate_config
importlib.reload(plugin)
print(config.validate_config is patched, hasattr(patched.__wrapped__, "__wrapped__"))
"""


def test_import_of_verl_wraps_its_entry_once_and_imports_no_method() -> None:
    """Though the plug-in is named in verl's other hook too."""
    hook = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "grail_advantage.verl_ext.plugin"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_VERL], env={**os.environ, **hook}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["True", "False", "True", "False"], done.stderr


STOCK = (
    *("data.train_files=nowhere.parquet", "data.val_files=nowhere.parquet", "actor_rollout_ref.model.path=nowhere"),
    *(f"{ACTOR}.use_dynamic_bsz=True", "trainer.device=cpu", "trainer.n_gpus_per_node=1"),
    *("algorithm.adv_estimator=grail", "trainer.v1.trainer_mode=sync", "actor_rollout_ref.rollout.n=4"),
)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.v1.trainer_mode=mine", r"trainer\.v1\.trainer_mode=mine does not work .*TokenWeightTrainer"),
        ("+algorithm.token_weights.trainer_module=mine", r"trainer_module=mine does not work .*EXTERNAL_MODULES"),
        ("algorithm.adv_estimator=grial", r"adv_estimator='grial' is unknown; is grail meant"),
    ],
)
def test_verls_own_command_refuses_before_ray_starts(tmp_path: Path, override: str, message: str) -> None:
    done = _main(*STOCK, f"hydra.run.dir={tmp_path}", override)
    assert done.returncode != 0
    assert re.search(f"ValueError: .*{message}", done.stderr), done.stderr[-2000:]
    output = done.stdout + done.stderr
    assert "ray init kwargs" not in output and "Started a local Ray instance" not in output


def test_a_dry_run_of_verls_own_command_is_for_methods(tmp_path: Path) -> None:
    done = _main(*STOCK, f"hydra.run.dir={tmp_path}", DRY_RUN="1")
    assert done.returncode == 0 and yaml.safe_load(done.stdout)["algorithm"]["adv_estimator"] == "grail", done.stderr
    config = compose("ppo_trainer", [*STOCK, "algorithm.adv_estimator=grpo"], VERL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRY_RUN", "1")
        validated = []
        start_run(config, lambda: validated.append(config.trainer.v1.trainer_mode))  # and verl goes on
    assert validated == ["sync"]
