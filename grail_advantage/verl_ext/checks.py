"""Start-up checks of a run: versions, names, the rules, and what the data and the tokenizer say, as far as this machine
knows them before Ray starts. Messages name the option and the remedy."""

from __future__ import annotations

import difflib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json as pa_json
import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import cached_file
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

from grail_advantage.answers.span import find_answer_spans
from grail_advantage.answers.tokenizers import check_round_trip
from grail_advantage.method import FAILURES, RESERVED, Method, NameTakenError, failure_message, methods
from grail_advantage.verl_ext import patches
from grail_advantage.verl_ext.rules import check_rules
from grail_advantage.verl_ext.settings import METHOD, MODEL, TRAINER_MODES, Settings, algorithm_sections

logger = logging.getLogger(__name__)

VERL_VERSION = "0.9.1"
ANY_VERL = "GRAIL_ADVANTAGE_ANY_VERL"
"""Environment variable: 1 lets another version of verl through."""
OURS = ("pkg://grail_advantage.reward", "pkg://recipe.reward")
"""``reward.custom_reward_function.path`` for this project's reward function."""


def check_config(config: DictConfig) -> Settings:
    """Check the resolved configuration of a run, and parse it: the driver's only time.

    Raises:
        ValueError: naming the option and the remedy.
    """
    check_verl_version(version("verl"))
    check_estimator(config.algorithm.adv_estimator)
    settings = Settings.parse(config, trainer_kind(config))
    check_rules(settings)
    check_names(config)
    check_data(settings)
    if (tokenizer := _local_tokenizer(settings[MODEL])) is not None:
        check_tokenizer(tokenizer, settings[MODEL], settings.method)
    return settings


def check_verl_version(installed: str) -> None:
    """The extension follows verl's internals, so another version is refused unless somebody wants to try it."""
    if installed.split("+")[0] == VERL_VERSION:
        return
    message = f"verl {installed} is installed, but this extension follows verl {VERL_VERSION}"
    if os.environ.get(ANY_VERL) != "1":
        raise ValueError(
            f"{message}; run `pip install verl=={VERL_VERSION}`, or set {ANY_VERL}=1 to try it at your own risk "
            "(tested versions: docs/works_with.md)"
        )
    warnings.warn(f"{message}; {ANY_VERL}=1 lets it through, and nothing is known about it", stacklevel=2)


def check_data(settings: Settings) -> None:
    """Warn of rows whose ground truth this project's reward function cannot use, and refuse a file without another.
    verl itself looks for files that are not on this machine, or that hold something else.

    Raises:
        ValueError: naming the option, the file and the remedy.
    """
    if settings["reward.custom_reward_function.path"] not in OURS:
        return
    from grail_advantage.reward import check_ground_truths

    for option in ("data.train_files", "data.val_files"):
        for file in [settings[option]] if isinstance(settings[option], str) else settings[option] or ():
            with suppress(OSError, KeyError, pa.ArrowException):
                check_ground_truths(_ground_truths(Path(file).expanduser()), f"{option}={file}")


def _ground_truths(file: Path) -> Iterator[Any]:
    """Of each row, as verl's data set has it."""
    if file.suffix == ".parquet":
        batches = pq.ParquetFile(file).iter_batches(columns=["reward_model"])
    else:
        batches = pa_json.read_json(file).to_batches()
    for batch in batches:
        for judged in batch.column("reward_model").to_pylist():
            yield judged.get("ground_truth") if isinstance(judged, dict) else None


def check_estimator(name: str) -> None:
    """Refuse a misspelt method, plug-ins that take a name in use, and methods with the name of an estimator of verl's.

    Raises:
        ValueError: naming the fault, and the plug-ins that failed to import.
    """
    for plugin, error in FAILURES.items():
        if isinstance(error, NameTakenError):
            raise ValueError(f"the plug-in {plugin} takes a name that is taken: {error}")
        logger.warning("the plug-in %s failed to import: %s: %s", plugin, type(error).__name__, error)
    if not patches.entry_is_wrapped():
        raise ValueError(
            "the plug-in of this package did not load with verl, so that no worker would know its methods; unset "
            "VERL_USE_EXTERNAL_PLUGINS or add grail_advantage to it, and install this project with `pip install -e .`"
        )
    for known in methods().keys() & ADV_ESTIMATOR_REGISTRY.keys():
        if not hasattr(ADV_ESTIMATOR_REGISTRY[known], patches.MADE_HERE):
            raise ValueError(
                f"the method {known} has the name of one of verl's own estimators, which would run in its place; register "
                "it under another name"
            )
    check_spelling(name)


def check_spelling(name: str) -> None:
    """Refuse a name that nobody has registered in this process and that is one slip away from a method's: ``GRAIL``,
    ``oar-g``, ``grial``. Any other is somebody's own: a module that only the task runner's process imports may register
    it there.

    Raises:
        ValueError: naming the method and the remedies.
    """
    if name in ADV_ESTIMATOR_REGISTRY or name in methods():
        return
    meant = [each for each in methods() if _folded(each) == _folded(name)]
    # gspo is as near to grpo as to gtpo, and rlpd is another method than rlsd.
    if not meant and not any(_slip(name, each) for each in ADV_ESTIMATOR_REGISTRY if each not in methods()):
        slips = {each: _slip(name, each) for each in methods()}
        meant = [each for each, slip in slips.items() if slip == "swap" or (slip and len(_folded(each)) > 4)]
    if meant:
        known = ", ".join(sorted({*methods(), *ADV_ESTIMATOR_REGISTRY}))
        raise ValueError(
            f"{METHOD}={name!r} is unknown; is {meant[0]} meant? An estimator of your own with such a name has to be "
            f"known before the run starts: set VERL_USE_EXTERNAL_MODULES to its module. Known are {known}{failure_message()}"
        )
    if FAILURES:
        logger.warning("%s=%s is unknown in the process of the command%s", METHOD, name, failure_message())


def _folded(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def _slip(name: str, known: str) -> str:
    """Which slip makes one name of the other: a ``swap`` of two neighbouring letters, or a ``letter`` that is wrong,
    missing or too many; empty for another."""
    left = [_folded(name), _folded(known)]
    for _ in range(2):  # without the beginning that they share, and then without the end
        shared = sum(1 for _ in takewhile(lambda letters: letters[0] == letters[1], zip(*left, strict=False)))
        left = [each[shared:][::-1] for each in left]
    one, other = left
    if len(one) == 2 and one == other[::-1]:
        return "swap"
    return "letter" if max(len(one), len(other)) == 1 and (one + other).isalpha() else ""


def check_names(config: DictConfig) -> None:
    """Refuse names close to an option of this project that nothing reads: a ``+`` accepts any name.

    Raises:
        ValueError: naming the one that exists.
    """
    verls = OmegaConf.load(str(files("verl") / "trainer/config/ppo_trainer.yaml")).algorithm
    sections = algorithm_sections()
    for name in config.algorithm:
        similar = difflib.get_close_matches(str(name), sections, n=1, cutoff=0.75)
        if name not in sections and similar and name not in verls:
            raise ValueError(f"nothing reads algorithm.{name}; is algorithm.{similar[0]} meant?")
    for section in RESERVED:
        for name in config.algorithm.get(section) or {}:
            if name not in sections[section]:
                known = ", ".join(sections[section])
                raise ValueError(f"algorithm.{section}.{name} is not an option; the options are {known}")


def trainer_kind(config: DictConfig) -> str | None:
    """verl's name for the kind of trainer: its own mode, or that of the class which a user's module registered in this
    process; ``None`` where a method runs in a trainer without token weights."""
    mode = config.trainer.v1.trainer_mode
    if mode in TRAINER_MODES:
        return mode
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    trainer = TRAINER_REGISTRY.get(mode)
    if config.algorithm.adv_estimator in methods() and not hasattr(trainer, "actor_worker_class"):
        return None
    return mode if trainer is None else patches.base_mode(trainer)


def _local_tokenizer(model: Mapping[str, Any]) -> PreTrainedTokenizerBase | None:
    path = model.get("tokenizer_path") or model["path"]
    try:
        if cached_file(path, "tokenizer_config.json", local_files_only=True) is None:
            return None
        trusted = model.get("trust_remote_code", False)
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trusted)
    except (OSError, ValueError):  # not in the cache, a broken download, or a file system that verl copies from
        return None


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: Mapping[str, Any], method: Method | None) -> None:
    """Refuse a tokenizer that text does not survive (:mod:`grail_advantage.answers.tokenizers`), that the method cannot
    work with, or whose tokens hide the answer.

    Args:
        tokenizer: as verl loads it.
        model: ``actor_rollout_ref.model``.

    Raises:
        ValueError: naming the remedy.
    """
    option = "tokenizer_path" if model.get("tokenizer_path", None) else "path"
    check_round_trip(
        tokenizer,
        f"{MODEL}.{option}={model[option]}",
        f"transformers loads it so; write a repaired one with `python3 -m grail_advantage.answers.tokenizers "
        f"{model[option]} FOLDER`, then set {MODEL}.tokenizer_path=FOLDER",
    )
    if method is not None:
        method.check_tokenizer(tokenizer)
        find_answer_spans([], tokenizer, method.span)
