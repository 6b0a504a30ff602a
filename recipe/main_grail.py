"""Start a run: verl's PPO entry point from the recipe's own defaults.

``python3 -m recipe.main_grail`` starts from the published hyper-parameters (``config/grail_trainer.yaml``), with
``--config-name verl_grail`` from verl's own defaults; both know the sections of all methods and take every override that verl's
entry point takes. Where a project has its configuration already, ``python3 -m verl.trainer.main_ppo`` does the same with
``algorithm.adv_estimator=grail``, and options behind a ``+``.

``algorithm.adv_estimator`` is any registered method; ``uniform`` is GRPO in the same trainer, the baseline of the others. With
one of verl's estimators (``grpo``, ...) it starts verl's stock trainer, which does not mask truncated responses; killed runs
go on there too (:mod:`recipe.run_life.trainer`).

A run that is finished already says so and exits with status 0; checkpoints of a run with other settings are refused
(:mod:`recipe.run_life.identity`). ``DRY_RUN=1`` runs all start-up checks, prints the resolved configuration as
YAML on stdout and starts nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib.metadata import version

from grail_advantage.verl_ext.checks import TRAINER_MODES, check_config, check_verl_version

# Before anything of verl is imported: another version may not have what follows.
check_verl_version(version("verl"))

import hydra  # noqa: E402
from hydra.core.config_store import ConfigStore  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo  # noqa: E402
from verl.trainer.ppo.utils import need_critic, need_reference_policy  # noqa: E402
from verl.utils.config import validate_config  # noqa: E402
from verl.utils.device import auto_set_device  # noqa: E402

from grail_advantage.methods import methods  # noqa: E402
from grail_advantage.verl_ext.entry import CONTINUED_PREFIX, prepare_run  # noqa: E402
from grail_advantage.verl_ext.settings import algorithm_sections  # noqa: E402
from recipe.run_life import endings  # noqa: E402
from recipe.run_life.identity import begin_run, check_run  # noqa: E402

# The sections of all registered methods, as the configurations' defaults list names them.
ConfigStore.instance().store(name="token_weights", node={"algorithm": algorithm_sections()}, package="_global_")


def prepare(config: DictConfig) -> None:
    """Check the configuration and choose the trainer.

    Raises:
        ValueError: what cannot work, naming the option and the remedy.
    """
    auto_set_device(config)
    if config.algorithm.adv_estimator in methods():
        prepare_run(config)
    else:
        check_config(config)
        check_run(config)
        mode = config.trainer.v1.trainer_mode
        if mode in TRAINER_MODES:
            config.trainer.v1.trainer_mode = f"{CONTINUED_PREFIX}{mode}"
    # verl's own: what stock_entry.py put in its place would begin the run.
    getattr(validate_config, "__wrapped__", validate_config)(
        config=config,
        use_reference_policy=need_reference_policy(config),
        use_critic=need_critic(config),
    )


@hydra.main(config_path="config", config_name="grail_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """Hydra entry point."""
    dry_run = os.environ.get("DRY_RUN") == "1"
    resolved = OmegaConf.to_yaml(config, resolve=True)
    with contextlib.redirect_stdout(sys.stderr):
        prepare(config)
    if dry_run:
        print(resolved)
        return
    begin_run(config)
    endings.begin(config)
    run_ppo(config, task_runner_class=TaskRunnerV1)


if __name__ == "__main__":
    main()
