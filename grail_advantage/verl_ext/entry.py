"""Start-up of a run by verl's own command: its estimator and its checks, before Ray starts, and its trainer. Messages
name the option and the remedy.

    python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grail ...

:func:`start_run` and :func:`register_trainers` run inside verl's start-up
(:func:`grail_advantage.verl_ext.patches.wrap_entry`). Runs with verl's own estimators stay as they are.
"""

import contextlib
import difflib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.json as pa_json
import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est

from grail_advantage.answers.missing import LOOKED_AT, AnswerCheck
from grail_advantage.locks import hold
from grail_advantage.method import FAILURES, RESERVED, NameTakenError, failure_message, methods
from grail_advantage.verl_ext import patches
from grail_advantage.verl_ext.rules import check_settings, check_tokenizer
from grail_advantage.verl_ext.settings import (
    DUMP_FOLDER,
    METHOD,
    MISSING,
    MODEL,
    SECTION,
    TRAINER_MODES,
    Settings,
    algorithm_sections,
)

logger = logging.getLogger(__name__)

VERL_VERSION = "0.9.1"
# Environment variable: 1 lets another version of verl through
ANY_VERL = "GRAIL_ADVANTAGE_ANY_VERL"
EXTERNAL = "VERL_USE_EXTERNAL_MODULES"  # verl's, with modules that it imports in every process
JUDGED = "reward_model"
REWARD = "reward.custom_reward_function.path"
# As REWARD, this project's reward function.
OURS = ("pkg://grail_advantage.reward", "pkg://recipe.reward")


def register_estimators() -> None:
    """Register every method with verl. A trainer with token weights takes the advantages of verl's own estimator, under
    whose name alone verl treats several outputs of a session correctly; any other trainer gets the remedy."""
    for name in methods().keys() - ADV_ESTIMATOR_REGISTRY.keys():
        register_adv_est(name)(partial(_needs_token_weights, name))


def _needs_token_weights(name: str, *_: Any, **__: Any) -> NoReturn:
    raise ValueError(
        f"algorithm.adv_estimator={name} needs token weights, which this trainer does not compute; start the run with "
        "`python3 -m verl.trainer.main_ppo`, or see docs/own_trainer.md for a trainer of your own"
    )


def start_run(config: DictConfig, validate: Callable[[], None]) -> None:
    """Check a run and begin it, around ``validate``, verl's own check of its configuration; ValueError: a setting that
    does not work. With ``DRY_RUN=1`` in the environment a run of this project (:func:`prepare_run`) is checked, its
    resolved configuration is printed as YAML on stdout, and the process exits."""
    dry_run = os.environ.get("DRY_RUN", "0")
    ours = bool(patches.STARTS) or config.algorithm.adv_estimator in methods()
    if patches.in_actor() or not ours:  # the task runner of trainer.use_v1=false asks again
        register_estimators()
        check_spelling(config.algorithm.adv_estimator)
        return validate()
    if dry_run not in ("", "0", "1"):
        raise ValueError(
            f"DRY_RUN={dry_run} is unknown; use 1 to check the run and start nothing, or 0"
        )
    # verl hands ray_kwargs on as they are.
    OmegaConf.resolve(config)
    if dry_run == "1":
        _print_checked(config, validate)
        sys.exit()
    settings = prepare_run(config)
    validate()
    for module in patches.STARTS:
        import_module(module).begin_run(settings, config)
    if settings.dump is not None:
        hold(settings.dump.folder, "choose another", DUMP_FOLDER)


def _print_checked(config: DictConfig, validate: Callable[[], None]) -> None:
    """stdout is for the YAML alone, which another program may read."""
    # As the user has it: what prepare_run() writes is for Ray's processes.
    resolved = config.copy()
    for handler in logging.root.handlers:
        # Hydra's.
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)
    with contextlib.redirect_stdout(sys.stderr):
        settings = prepare_run(config)
        validate()
    sections = algorithm_sections()
    names = () if settings.method is None else (*RESERVED, settings.method.section)
    defaults = {name: sections.get(name, {}) for name in names}
    print(OmegaConf.to_yaml(OmegaConf.merge({"algorithm": defaults}, resolved)))


def prepare_run(config: DictConfig) -> Settings:
    """Check and parse a run of this project, and write its trainer, the whole path of its dump and :data:`EXTERNAL` for
    Ray's processes into the configuration; ValueError: a setting that does not work. Of this project are runs with a
    method, and all in a process with :data:`patches.STARTS`."""
    settings = check_config(config)
    for module in patches.STARTS:
        import_module(module).check_run(settings)
    if modules := os.environ.get(EXTERNAL):
        OmegaConf.update(
            config, f"ray_kwargs.ray_init.runtime_env.env_vars.{EXTERNAL}", modules, force_add=True
        )
    # The trainer runs in another process, with another working folder.
    if settings.dump is not None:
        OmegaConf.update(config, DUMP_FOLDER, str(settings.dump.folder))
    if settings.method is None:
        return settings
    mode = config.trainer.v1.trainer_mode
    if not settings["trainer.use_v1"]:
        # It imports what the other trainers do not.
        patches.use_ray_trainer(
            import_module("grail_advantage.verl_ext.ray_trainer").TokenWeightRayTrainer
        )
    elif settings.kind == mode in TRAINER_MODES:
        patches.set_trainer_mode(config, f"grail_{mode}")
    return settings


def register_trainers() -> None:
    """Register estimators, the trainers with token weights and those of :data:`patches.STARTS`, in the task runner's
    process. Importing them in every process that imports verl would take seconds each."""
    register_estimators()
    # The module registers its own.
    import_module("grail_advantage.verl_ext.trainer")
    for module in patches.STARTS:
        getattr(import_module(module), "register_trainers", lambda: None)()


def check_config(config: DictConfig) -> Settings:
    """Check the configuration of a run, and parse it: the driver's only time. ValueError: naming option and remedy."""
    check_verl_version(version("verl"))
    register_estimators()
    check_plugins()
    check_spelling(config.algorithm.adv_estimator)
    check_names(config)
    settings = Settings.parse(config, trainer_kind(config))
    check_settings(settings)
    check_data(settings)
    check_answers_of_data(settings)
    if (tokenizer := _local_tokenizer(settings[MODEL])) is not None:
        check_tokenizer(tokenizer, settings[MODEL], settings.method)
    return settings


def check_verl_version(installed: str) -> None:
    """The extension follows verl's internals, so another version is refused unless somebody wants to try it."""
    # 0.9.1+cpu is a build of 0.9.1.
    if installed.split("+")[0] == VERL_VERSION:
        return
    message = f"verl {installed} is installed, but this extension follows verl {VERL_VERSION}"
    if os.environ.get(ANY_VERL) != "1":
        raise ValueError(
            f"{message}; run `pip install verl=={VERL_VERSION}`, or set {ANY_VERL}=1 to try it at your own risk "
            "(tested versions: docs/works_with.md)"
        )
    warnings.warn(
        f"{message}; {ANY_VERL}=1 lets it through, and nothing is known about it", stacklevel=2
    )


def check_plugins() -> None:
    """Refuse plug-ins that take a name in use, and methods with the name of an estimator of verl's, which would run in
    their place; ValueError."""
    for plugin, error in FAILURES.items():
        if isinstance(error, NameTakenError):
            raise ValueError(f"the plug-in {plugin} takes a name that is taken: {error}")
        logger.warning(
            "the plug-in %s failed to import: %s: %s", plugin, type(error).__name__, error
        )
    for name in methods():
        # register_estimators() leaves names that verl has; those of ours are partials.
        if getattr(ADV_ESTIMATOR_REGISTRY[name], "func", None) is not _needs_token_weights:
            raise ValueError(
                f"{name} is an estimator of verl's; register the method under another name"
            )


def check_spelling(name: str) -> None:
    """Refuse a name near a method's, such as ``GRAIL``, ``oar-g`` or ``graill``, that verl does not have, and what is no
    name; ValueError. Any other is somebody's own: a module that the task runner's process alone imports may register
    it."""
    if not isinstance(name, str):
        raise ValueError(f"{METHOD}={name!r} is no name; give one, such as grail or grpo")
    if name in ADV_ESTIMATOR_REGISTRY:
        return
    letters = _letters(name.lower())
    meant = [estimator for estimator in methods() if _letters(estimator) == letters]
    near = difflib.get_close_matches(name.lower(), list(ADV_ESTIMATOR_REGISTRY), cutoff=0.8)
    # Short names are near many others, and grail2 is a version of somebody's own.
    if len(letters) > 4 and name[-1].isalpha() and methods().keys() >= set(near):
        # turn_ppo is not turn_grpo
        meant += difflib.get_close_matches(name.lower(), near, cutoff=0.85)
    if meant:
        raise ValueError(
            f"algorithm.adv_estimator={name!r} is unknown; is {meant[0]} meant?{failure_message()}"
        )
    if FAILURES:
        logger.warning(
            "the estimator %s is unknown in the process of the command%s", name, failure_message()
        )


def _letters(name: str) -> list[str]:
    return sorted(filter(str.isalnum, name))


def check_names(config: DictConfig) -> None:
    """Refuse names close to an option of this project that nothing reads: a ``+`` accepts any name. ValueError: naming
    the one that exists."""
    verls = OmegaConf.load(str(files("verl") / "trainer/config/ppo_trainer.yaml")).algorithm
    sections = algorithm_sections()
    for name in config.algorithm:
        similar = difflib.get_close_matches(str(name), sections, n=1, cutoff=0.75)
        if name not in sections and similar and name not in verls:
            raise ValueError(f"nothing reads algorithm.{name}; is algorithm.{similar[0]} meant?")
    for section in RESERVED:
        for name in config.algorithm.get(section) or {}:
            if name not in sections[section]:
                options = ", ".join(sections[section])
                raise ValueError(
                    f"algorithm.{section}.{name} is not an option; the options are {options}"
                )


def trainer_kind(config: DictConfig) -> str | None:
    """verl's name for the kind of trainer: its own mode, or that of the class which a user's module registered in this
    process; ``None`` where a method runs in a trainer without token weights."""
    mode = config.trainer.v1.trainer_mode
    if mode in TRAINER_MODES:
        return mode
    # It takes seconds, which runs in verl's own modes are spared.
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    trainer = TRAINER_REGISTRY.get(mode)
    if config.algorithm.adv_estimator in methods() and not hasattr(trainer, "actor_worker_class"):
        return None
    return mode if trainer is None else patches.base_mode(trainer)


def check_data(settings: Settings) -> None:
    """Warn of rows whose ground truth this project's reward function cannot use, and refuse a file without another
    (ValueError). verl itself looks for files that are not on this machine, or that hold something else."""
    # Another reward function may take any ground truth.
    if settings[REWARD] not in OURS:
        return
    from grail_advantage.reward import check_ground_truths

    for option in ("data.train_files", "data.val_files"):
        for name in _files(settings, option):
            file = Path(name).expanduser()
            try:
                if file.suffix == ".parquet":
                    table = pq.read_table(file, columns=[JUDGED])
                else:
                    table = pa_json.read_json(file)
                judged = table[JUDGED].to_pylist()
            except (OSError, KeyError, pa.ArrowException):
                continue
            truths = [
                entry.get("ground_truth") if isinstance(entry, dict) else None for entry in judged
            ]
            check_ground_truths(truths, f"{option}={name}")


def _files(settings: Settings, option: str) -> Sequence[str]:
    names = settings[option] or ()
    return [names] if isinstance(names, str) else names


def check_answers_of_data(settings: Settings) -> None:
    """Warn of training data whose answers are in another format than the run's; of other files verl itself tells."""
    files = _files(settings, "data.train_files")
    if settings.method is None or not files:
        return
    answers = AnswerCheck(settings.method, settings.answer, settings[MISSING], f"++{SECTION}")
    with contextlib.suppress(OSError, StopIteration, pa.ArrowException):
        parquet = pq.ParquetFile(Path(files[0]).expanduser())
        rows = next(parquet.iter_batches(LOOKED_AT)).to_pylist()
        answers.look_at_data(rows, f"data.train_files={files[0]}")


def _local_tokenizer(model: Mapping[str, Any]) -> PreTrainedTokenizerBase | None:
    path = model.get("tokenizer_path") or model["path"]
    trusted = model.get("trust_remote_code", False)
    # Not in the cache, a broken download, or a file system that verl copies from.
    with contextlib.suppress(OSError, ValueError):
        # A check downloads nothing: verl fetches a model in the processes that use it.
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trusted)
    return None
