"""Start-up checks of a run: versions, names, the tables of rules, and what the machine, the tokenizer and the model say.

Whatever can be known on this machine is checked before Ray starts; the trainer checks the rest after its download, before the
first rollouts. Messages name the option and the remedy.
"""

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
from typing import Any, Literal

import pyarrow as pa
import pyarrow.json as pa_json
import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import cached_file

from grail_advantage.answers.span import find_answer_spans
from grail_advantage.answers.tokenizers import check_round_trip
from grail_advantage.method import FAILURES, RESERVED, Method, NameTakenError, failure_message, methods
from grail_advantage.methods.saliency import Saliency
from grail_advantage.model.activations import leaf_module
from grail_advantage.model.architecture import Architecture, architecture_of
from grail_advantage.rules import Obstacle, refuse
from grail_advantage.verl_ext.rules import EVERY_RUN, FUSED, ROUTER_LOSS, check_rules, shares_forward
from grail_advantage.verl_ext.settings import (
    METHOD,
    MODEL,
    SHARE,
    TRAINER_MODES,
    TRAINER_PREFIX,
    RunConfig,
    Settings,
    algorithm_sections,
)

logger = logging.getLogger(__name__)

VERL_VERSION = "0.9.1"
ANY_VERL = "GRAIL_ADVANTAGE_ANY_VERL"
"""Environment variable: 1 lets another version of verl through."""
PATH = f"{MODEL}.path"
REWARD = "reward.custom_reward_function.path"
OURS = ("pkg://grail_advantage.reward", "pkg://recipe.reward")
"""Its value for this project's reward function."""
DATA = ("data.train_files", "data.val_files")


def check_config(config: DictConfig) -> RunConfig:
    """Check the resolved configuration of a run, and parse it: the driver's only time.

    Returns:
        The configuration; :class:`Settings` of a run with a method of this project.

    Raises:
        ValueError: naming the option and the remedy.
    """
    check_verl_version(version("verl"))
    check_names(config)
    check_estimator(config.algorithm.adv_estimator)
    parse = Settings.parse if config.algorithm.adv_estimator in methods() else RunConfig.parse
    run = parse(config, trainer_kind(config))
    refuse(EVERY_RUN, run)
    if isinstance(run, Settings):
        check_rules(run)
    check_data(run)
    tokenizer = _local_tokenizer(run[MODEL])
    if tokenizer is not None:
        check_text(tokenizer, run[MODEL])
    if isinstance(run, Settings):
        if tokenizer is not None:
            check_tokenizer(tokenizer, run.signal)
        check_model(run)
    return run


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


def check_data(run: RunConfig) -> None:
    """Warn of rows whose ground truth this project's reward function cannot use, and refuse a file without another.

    verl itself looks for files that are not on this machine, or that hold something else.

    Raises:
        ValueError: naming the option, the file and the remedy.
    """
    if run[REWARD] not in OURS:
        return
    from grail_advantage.reward import check_ground_truths

    for option in DATA:
        for file in [run[option]] if isinstance(run[option], str) else run[option] or ():
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
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    from grail_advantage.verl_ext.patches import MADE_HERE, entry_is_wrapped

    for plugin, error in FAILURES.items():
        if isinstance(error, NameTakenError):
            raise ValueError(f"the plug-in {plugin} takes a name that is taken: {error}")
        logger.warning("the plug-in %s failed to import: %s: %s", plugin, type(error).__name__, error)
    if not entry_is_wrapped():
        raise ValueError(
            "the plug-in of this package did not load with verl, so that no worker would know its methods; unset "
            "VERL_USE_EXTERNAL_PLUGINS or add grail_advantage to it, and install this project with `pip install -e .`"
        )
    for known in methods().keys() & ADV_ESTIMATOR_REGISTRY.keys():
        if not hasattr(ADV_ESTIMATOR_REGISTRY[known], MADE_HERE):
            raise ValueError(
                f"the method {known} has the name of one of verl's own estimators, which would run in its place; register it "
                "under another name"
            )
    check_spelling(name)


def check_spelling(name: str) -> None:
    """Refuse a name that nobody has registered in this process and that is one slip away from a method's: ``GRAIL``, ``oar-g``,
    ``grial``. Any other is somebody's own: a module that only the task runner's process imports may register it there.

    Raises:
        ValueError: naming the method and the remedies.
    """
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

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
            f"{METHOD}={name!r} is unknown; is {meant[0]} meant? An estimator of your own with such a name has to be known "
            f"before the run starts: set VERL_USE_EXTERNAL_MODULES to its module. Known are {known}{failure_message()}"
        )
    if FAILURES:
        logger.warning("%s=%s is unknown in the process of the command%s", METHOD, name, failure_message())


def _folded(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def _slip(name: str, known: str) -> Literal["swap", "letter"] | None:
    """Which slip makes one name of the other: two neighbouring letters that are swapped, or one that is wrong, missing or too
    many."""
    left = [_folded(name), _folded(known)]
    for _ in range(2):  # without the beginning that they share, and then without the end
        shared = sum(1 for _ in takewhile(lambda letters: letters[0] == letters[1], zip(*left, strict=False)))
        left = [each[shared:][::-1] for each in left]
    one, other = left
    if len(one) == 2 and one == other[::-1]:
        return "swap"
    return "letter" if max(len(one), len(other)) == 1 and (one + other).isalpha() else None


def check_names(config: DictConfig) -> None:
    """Refuse names close to an option of this project that nothing reads: a ``+`` accepts any name.

    Raises:
        ValueError: naming the one that exists.
    """
    sections = algorithm_sections()
    verls = OmegaConf.load(str(files("verl") / "trainer/config/ppo_trainer.yaml")).algorithm
    for name, cls in methods().items():
        if cls.section in verls:
            raise ValueError(
                f"the method {name} wants the section algorithm.{cls.section}, which is an option of verl's; register it "
                "under another name"
            )
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
    """verl's name for the kind of trainer: its own mode, or that of the class which a user registered; ``None`` where a method
    runs in a trainer that nobody registered. After the user's module is imported."""
    mode = config.trainer.v1.trainer_mode
    if mode in TRAINER_MODES:
        return mode
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    from grail_advantage.verl_ext.patches import base_mode

    weighted = config.algorithm.adv_estimator in methods()
    trainer = TRAINER_REGISTRY.get(f"{TRAINER_PREFIX}{mode}" if weighted else mode)
    if trainer is None:
        return None if weighted else mode
    return base_mode(trainer)


def _local_tokenizer(model: Mapping[str, Any]) -> PreTrainedTokenizerBase | None:
    path = model.get("tokenizer_path") or model["path"]
    try:
        if cached_file(path, "tokenizer_config.json", local_files_only=True) is None:
            return None
        trusted = model.get("trust_remote_code", False)
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trusted)
    except (OSError, ValueError):  # not in the cache, a broken download, or a file system that verl copies from
        return None


def check_text(tokenizer: PreTrainedTokenizerBase, model: Mapping[str, Any]) -> None:
    """Refuse a tokenizer that text does not survive (:mod:`grail_advantage.answers.tokenizers`).

    Args:
        tokenizer: as verl loads it.
        model: ``actor_rollout_ref.model``.

    Raises:
        ValueError: naming the remedy.
    """
    option = "tokenizer_path" if model.get("tokenizer_path", None) else "path"
    path = model[option]
    check_round_trip(
        tokenizer,
        f"actor_rollout_ref.model.{option}={path}",
        f"transformers loads it so; write a repaired one with `python3 -m grail_advantage.answers.tokenizers {path} FOLDER`, "
        "then set actor_rollout_ref.model.tokenizer_path=FOLDER",
    )


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, method: Method) -> None:
    """Refuse a tokenizer that the method cannot work with, or whose tokens hide the answer.

    Raises:
        ValueError: naming the remedy.
    """
    method.check_tokenizer(tokenizer)
    find_answer_spans([], tokenizer, method.span)


def check_model(settings: Settings, folder: str | None = None) -> bool:
    """Refuse a model that the method cannot work with.

    Args:
        folder: where the model is; without, only a model on this machine is looked at.

    Returns:
        Whether a forward of this model may be shared (:func:`grail_advantage.verl_ext.rules.shares_forward`).

    Raises:
        ValueError: naming the option and the remedy.
    """
    if not settings.signal.uses:
        return True
    architecture, path = _architecture(settings, folder), f"{PATH}={settings[PATH]}"
    if not isinstance(settings.signal, Saliency):
        return True
    shares = shares_forward(settings)
    if architecture is None:
        if folder is not None and shares and settings.share_forward is True:
            raise ValueError(
                f"{SHARE}=True needs a model whose code can be looked at, and that of {path} cannot (see the log); use auto"
            )
        return folder is None
    _check_activation(settings, architecture, path)
    # Fused kernels put out log-probabilities by verl's own code, whatever the model does with its logits.
    if architecture.plain_logits or settings[FUSED]:
        return True
    if shares:
        message = f"{path} scales or caps its logits after the output embeddings, where a shared forward cannot follow"
        if settings.share_forward is True:
            raise ValueError(f"{SHARE}=True does not work with this model: {message}; use auto")
        if folder is not None:
            logger.warning("%s: each step runs a pass of its own (%s=auto)", message, SHARE)
    return False


def _architecture(settings: Settings, folder: str | None) -> Architecture | None:
    """``None`` for a model that is not on this machine, or whose code needs more than the meta device."""
    trusted = bool(settings[f"{MODEL}.trust_remote_code"])
    try:
        config = AutoConfig.from_pretrained(
            folder or settings[PATH], trust_remote_code=trusted, local_files_only=folder is None
        )
        return architecture_of(config, trust_remote_code=trusted)
    except Exception as error:  # whatever the model's code raises
        if folder is not None:
            logger.warning(
                "the code of %s=%s cannot be looked at before the run (%s: %s): no forward is shared",
                *(PATH, settings[PATH], type(error).__name__, error),
            )
        return None


def _check_activation(settings: Settings, architecture: Architecture, path: str) -> None:
    if architecture.copy.get_output_embeddings() is None:
        raise ValueError(
            f"{METHOD}={settings.method} differentiates logits, and {path} ({type(architecture.copy).__name__}) has no output "
            "embeddings; use a method without a pass (docs/reference_methods.md)"
        )
    try:
        leaf_module(architecture.copy, settings.signal.leaf)
    except ValueError as error:
        option = f"algorithm.{settings.signal.section}.leaf"
        raise ValueError(f"{option}={settings.signal.leaf} does not work with {path}: {error}") from error


def router_obstacles(model: PretrainedConfig) -> list[Obstacle]:
    """The loss of a model's routers, where the configuration that it is loaded with asks for it."""
    if getattr(model.get_text_config(), "output_router_logits", False):
        return [Obstacle("output_router_logits=True of the model", ROUTER_LOSS)]
    return []
