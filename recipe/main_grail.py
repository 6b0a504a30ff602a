"""Start a run: verl's PPO entry point with token-weight estimators.

``python3 -m recipe.main_grail`` starts from the published hyper-parameters (``config/grail_trainer.yaml``), with
``--config-name verl_grail`` from verl's own defaults; both take every override that verl's entry point takes.

``algorithm.adv_estimator`` is any registered method; ``uniform`` is GRPO in the same trainer, the baseline of the others. With
one of verl's estimators (``grpo``, ...) it starts verl's stock trainer, which does not mask truncated responses.

``DRY_RUN=1`` runs all start-up checks, prints the resolved configuration as YAML on stdout and starts nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib.metadata import version

from grail_advantage.verl_ext.checks import check_config, check_verl_version

# Before anything of verl is imported: another version may not have what follows.
check_verl_version(version("verl"))

import hydra  # noqa: E402
import ray  # noqa: E402
from hydra.core.config_store import ConfigStore  # noqa: E402
from omegaconf import DictConfig, OmegaConf, open_dict  # noqa: E402
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo  # noqa: E402
from verl.trainer.ppo.utils import need_critic, need_reference_policy  # noqa: E402
from verl.utils.config import validate_config  # noqa: E402
from verl.utils.device import auto_set_device  # noqa: E402

from grail_advantage.registry import methods  # noqa: E402
from grail_advantage.verl_ext import stock_entry_guard  # noqa: E402
from grail_advantage.verl_ext.settings import TRAINER_MODULE, algorithm_sections, import_trainer_module  # noqa: E402

# The sections of all registered methods, as the configurations' defaults list names them.
ConfigStore.instance().store(name="token_weights", node={"algorithm": algorithm_sections()}, package="_global_")


class TokenWeightTaskRunner(TaskRunnerV1.__ray_metadata__.modified_class):
    """verl's task runner in a process that knows the token-weight trainers."""

    def run(self, config: DictConfig) -> None:
        """Run the training, see ``TaskRunnerV1.run``."""
        import grail_advantage.verl_ext.async_trainers  # noqa: F401  registers these two trainers and the synchronous one

        import_trainer_module(config)
        super().run(config)


def prepare(config: DictConfig) -> type:
    """Check the configuration, choose the trainer, and return the task runner class for ``run_ppo``.

    Raises:
        ValueError: what cannot work, naming the option and the remedy.
    """
    check_config(config)
    auto_set_device(config)
    weighted = config.algorithm.adv_estimator in methods()
    if weighted:
        with open_dict(config):
            config.trainer.v1.trainer_mode = f"grail_{config.trainer.v1.trainer_mode}"
    with stock_entry_guard.lifted():
        validate_config(
            config=config,
            use_reference_policy=need_reference_policy(config),
            use_critic=need_critic(config),
        )
    own_module = OmegaConf.select(config, TRAINER_MODULE)
    return ray.remote(TokenWeightTaskRunner) if weighted or own_module else TaskRunnerV1


@hydra.main(config_path="config", config_name="grail_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """Hydra entry point."""
    dry_run = os.environ.get("DRY_RUN") == "1"
    resolved = OmegaConf.to_yaml(config, resolve=True)
    with contextlib.redirect_stdout(sys.stderr):
        task_runner_class = prepare(config)
    if dry_run:
        print(resolved)
        return
    run_ppo(config, task_runner_class=task_runner_class)


if __name__ == "__main__":
    main()
