"""Start a run: verl's PPO entry point from the recipe's own defaults.

``python3 -m recipe.main_grail`` starts from the published hyper-parameters (``config/grail_trainer.yaml``), with
``--config-name verl_grail`` from verl's own defaults; both know the sections of all methods and take every override that
verl's entry point takes. Where a project has its configuration already, ``python3 -m verl.trainer.main_ppo`` has the same
token weights with ``algorithm.adv_estimator=grail``, and options after a ``+``.

``algorithm.adv_estimator`` is any registered method; ``uniform`` is GRPO in the same trainer, the baseline of the others. With
one of verl's estimators (``grpo``, ...) it starts verl's stock trainer, which does not mask truncated responses; killed runs
resume there too (:mod:`recipe.run_life.trainer`). ``estimator=grpo`` is all of verl's own, ``estimator=dr_grpo`` its estimator
with this loss; ``model=qwen3_4b`` what one model needs (``config/``). Environment names are :mod:`recipe.launch`'s.

A run that is finished already says so and exits with status 0; checkpoints of a run with other settings are refused, and so
are the folders of a run that lives (:mod:`recipe.run_life.identity`). ``DRY_RUN=1`` runs all start-up checks, prints the
resolved configuration as YAML on stdout and starts nothing.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

from grail_advantage.verl_ext.checks import check_verl_version

# Before anything of verl is imported: another version may not have what follows.
check_verl_version(version("verl"))

import hydra  # noqa: E402
from hydra.core.config_store import ConfigStore  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo  # noqa: E402
from verl.trainer.ppo.utils import need_critic, need_reference_policy  # noqa: E402
from verl.utils.config import validate_config  # noqa: E402
from verl.utils.device import auto_set_device  # noqa: E402

from grail_advantage.verl_ext.entry import prepare_run  # noqa: E402
from grail_advantage.verl_ext.settings import TRAINER_MODES, TRAINER_MODULE, RunConfig, algorithm_sections  # noqa: E402
from recipe import resolvers  # noqa: E402
from recipe.checks import FILES, check_host, check_machine, files_of, read_by_datasets  # noqa: E402
from recipe.rules import check_rules  # noqa: E402
from recipe.run_life import watch  # noqa: E402
from recipe.run_life.identity import begin_run, check_run, hold_folders  # noqa: E402
from recipe.run_life.watch import Options, options_of  # noqa: E402
from recipe.run_life.why import last_line  # noqa: E402

PY_EXECUTABLE = "ray_kwargs.ray_init.runtime_env.py_executable"
SAMPLER = "ray_kwargs.ray_init.runtime_env.env_vars.VLLM_USE_FLASHINFER_SAMPLER"
"""FlashInfer's sampler is compiled at run time, for which many machines have no nvcc; so the engines go without."""

# The sections of all registered methods, as the configurations' defaults list names them.
ConfigStore.instance().store(name="token_weights", node={"algorithm": algorithm_sections()}, package="_global_")
ConfigStore.instance().store(name="run_life", node=Options, package="run_life")
resolvers.register()


def prepare(config: DictConfig, *, starts: bool = False) -> RunConfig:
    """Check the configuration and choose the trainer.

    Args:
        starts: the run begins here, and its folders are locked.

    Returns:
        The parsed configuration.

    Raises:
        ValueError: what cannot work, naming the option and the remedy.
    """
    auto_set_device(config)
    life, mode = options_of(config), config.trainer.v1.trainer_mode
    if life.enabled and mode in TRAINER_MODES and OmegaConf.select(config, TRAINER_MODULE) is None:
        config.trainer.v1.trainer_mode = f"kept_{mode}"
        OmegaConf.update(config, TRAINER_MODULE, "recipe.run_life.trainer", force_add=True)
    if OmegaConf.select(config, SAMPLER) is None:
        OmegaConf.update(config, SAMPLER, os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0"), force_add=True)
    if starts:
        check_host(own_ray=OmegaConf.select(config, "ray_kwargs.ray_init.address") == "local")
    check_machine(config)
    run = prepare_run(config, of_verl=True)
    check_rules(run)
    if starts:
        hold_folders(run)
    if life.enabled:
        check_run(run, strict=life.strict)
    # verl's own: the function in its place would prepare the run again.
    getattr(validate_config, "__wrapped__", validate_config)(
        config=config,
        use_reference_policy=need_reference_policy(config),
        use_critic=need_critic(config),
    )
    return run


def spell_paths(config: DictConfig) -> None:
    """Spell paths as those that read them need it: Ray hands the interpreter's to a shell, so that below ``Grail (1)`` no
    worker would start; ``datasets`` reads a file's as a pattern, so that it would not find ``run[1]/train.parquet``, and for
    ``run?/train.parquet`` take ``run1/train.parquet``, too. A pattern that is no file stays one."""
    executable = shlex.quote(sys.executable)
    if executable != sys.executable and OmegaConf.select(config, PY_EXECUTABLE) is None:
        OmegaConf.update(config, PY_EXECUTABLE, executable, force_add=True)
    for option in FILES if read_by_datasets(config) else ():
        files = files_of(config, option)
        paths = [Path(file).expanduser().absolute() for file in files]
        escaped = [glob.escape(str(path)) for path in paths]
        if escaped != [str(path) for path in paths]:
            spelt = [name if path.exists() else file for file, path, name in zip(files, paths, escaped, strict=True)]
            OmegaConf.update(config, option, spelt)


@hydra.main(config_path=str(Path(__file__).parent / "config"), config_name="grail_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """Hydra entry point."""
    dry_run = os.environ.get("DRY_RUN") == "1"
    resolved = OmegaConf.to_yaml(config, resolve=True)
    with contextlib.redirect_stdout(sys.stderr):
        run = prepare(config, starts=not dry_run)
    if dry_run:
        print(resolved)
        return
    OmegaConf.resolve(config)  # Ray's workers do not know this recipe's resolvers
    if not options_of(config).enabled:
        spell_paths(config)
        run_ppo(config, task_runner_class=TaskRunnerV1)
    elif begin_run(run):
        if os.environ.get("VERL_PLATFORM") == "cpu":
            from verl_cpu import workers

            workers.start(config, ["recipe.run_life.seeds", "recipe.run_life.trainer"])
        spell_paths(config)
        watch.run(config)


if __name__ == "__main__":
    with last_line("the run"):
        main()
