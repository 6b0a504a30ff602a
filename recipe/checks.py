"""Start-up checks of the recipe for settings of verl's own, which have nothing to do with token weights.

verl would start with them and train something else than the settings say, or say of its workers' failure no word that names
the cause. Runs through verl's own command are left to verl.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from grail_advantage.methods import methods
from grail_advantage.verl_ext import checks

FILES = ("data.train_files", "data.val_files")
_BYPASS = "algorithm.rollout_correction.bypass_mode"


def check_config(config: DictConfig, kind: str) -> None:
    """Check a run's resolved configuration; :func:`grail_advantage.verl_ext.entry.prepare_run` checks the settings of methods.

    Args:
        config: the configuration.
        kind: verl's name for the kind of trainer.

    Raises:
        ValueError: naming the option and the remedy.
    """
    check_trl()
    check_interpreter()
    for option in FILES if read_by_datasets(config) else ():
        for file in files_of(config, option):
            check_file(option, file)
    if config.algorithm.adv_estimator not in methods():
        checks.check_start(config)
    if kind == "separate_async":
        _check_offload(config)
    _check_rollout_log_probs(config)


def check_interpreter() -> None:
    """Refuse an environment below a folder from which Ray's server does not start, as it splits its workers' commands there.

    Raises:
        ValueError: naming the remedy.
    """
    for path in (sys.executable, getattr(find_spec("ray"), "origin", None) or ""):
        if re.search(r"['\\]", path):
            raise ValueError(
                f"Ray does not start from {path}, because of the quote or backslash in it; make the environment (for the "
                "scripts without a GPU: have the project) below a folder without them"
            )


def files_of(config: DictConfig, option: str) -> list[str]:
    """The files of data that an option names."""
    files = OmegaConf.select(config, option)
    return [files] if isinstance(files, str) else list(files or ())


def read_by_datasets(config: DictConfig) -> bool:
    """Whether verl's own data set reads the files where they lie: ``datasets.load_dataset(data_files=FILE)``."""
    return not config.data.get("use_shm") and OmegaConf.select(config, "data.custom_cls.path") is None


def check_file(option: str, file: str) -> None:
    """Refuse a file of data in whose path ``datasets`` puts a variable's value, or which it takes for a chain of URLs.

    Raises:
        ValueError: naming the option and the remedy.
    """
    whole = Path(file).expanduser().absolute()
    for path in (whole, *whole.parents) if "://" not in file else ():
        if ("::" in path.name or os.path.expandvars(path.name) != path.name) and path.exists():
            raise ValueError(
                f"{option}={file} cannot be read: datasets takes {path.name} for a variable or a URL; use a folder without :: "
                "and $ (DATA_DIR of the launch scripts, OUTPUT_DIR of those without a GPU, or the project's)"
            )


def check_trl() -> None:
    """Refuse a TRL beside verl that verl's workers fail over (``verl/models/transformers/monkey_patch.py``, line 354).

    Raises:
        ValueError: naming the remedy.
    """
    trl = find_spec("trl")
    if trl is None or trl.origin is None:
        return
    folder, name = Path(trl.origin).parent, "AutoModelForCausalLMWithValueHead"
    places = (folder / "__init__.py", folder / "experimental" / "ppo" / "__init__.py")
    if not any(place.is_file() and name in place.read_text(encoding="utf-8") for place in places):
        raise ValueError(
            f"verl {checks.VERL_VERSION} imports {name} from any TRL that it finds, and the one in {folder} has no such class, "
            "so that verl's workers would fail; take TRL out of this environment (docs/trl.md)"
        )


def _check_rollout_log_probs(config: DictConfig) -> None:
    """A comparison of the rollout's log-probabilities with the trainer's needs both over the same tokens.

    vLLM gives them after all sampling options (``processed_logprobs``), and so over the tokens that ``top_k`` and ``top_p``
    leave; the trainer's softmax is over the whole vocabulary. With equal weights, the ratio of the two is then not 1.
    """
    correction = config.algorithm.get("rollout_correction", None) or {}
    used = next((name for name in ("bypass_mode", "rollout_is", "rollout_rs") if correction.get(name)), None)
    if used is None:
        return
    rollout = config.actor_rollout_ref.rollout

    def refuse(option: str, remedy: str) -> None:
        raise ValueError(
            f"actor_rollout_ref.rollout.{option}={rollout.get(option)} does not work with "
            f"algorithm.rollout_correction.{used}={correction[used]}; {remedy}"
        )

    if not rollout.calculate_log_probs:
        refuse("calculate_log_probs", "use true: verl has nothing to correct with otherwise")
    if rollout.name == "vllm" and str(rollout.get("logprobs_mode", None)).startswith("raw"):
        if rollout.temperature != 1:
            refuse(
                "temperature", "vLLM's raw log-probabilities are those of temperature 1; use it, or processed_logprobs"
            )
        return
    remedy = "the rollout's log-probabilities are then not those of the trainer's full softmax; use "
    if rollout.top_k > 0:
        refuse("top_k", f"{remedy}-1")
    if rollout.top_p < 1:
        refuse("top_p", f"{remedy}1.0")


def _check_offload(config: DictConfig) -> None:
    """verl's ``DetachActorWorker`` keeps and puts back the parameters where they are, which with offload may not be where the
    next forward takes them from."""
    option, step = "actor_rollout_ref.actor.fsdp_config.param_offload", "trainer.v1.separate_async.parameter_sync_step"
    bypass = OmegaConf.select(config, _BYPASS, default=False)
    if OmegaConf.select(config, option, default=False) and OmegaConf.select(config, step) > 1 and not bypass:
        raise ValueError(
            f"{option}=True does not work with trainer.v1.trainer_mode=separate_async; set it false, or {step}=1, or "
            f"{_BYPASS}=true"
        )
