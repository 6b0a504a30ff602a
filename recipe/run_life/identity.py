"""What makes a run the run it is: stored beside its checkpoints, so that no other run carries on from them.

verl resumes whatever lies in ``trainer.default_local_dir`` (``trainer.resume_mode=auto``, its default): under other settings it
goes on with a mixture, and past the last step it trains nothing and says nothing. A token dump belongs to one run in the same
way.

A run's definition is its resolved configuration without what may change from one start to the next: number of steps, how often
to save and to validate, logs and names, devices, and what moves speed and memory but not the gradient. A method's section
counts with the values that its preset stands for, and the sections of other methods do not count.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grail_advantage import __version__
from grail_advantage.methods import method, methods
from grail_advantage.token_dump import dumped_steps
from grail_advantage.verl_ext.settings import DUMP_FOLDER, MOVED, RUN_DEFINITION, dump_options, signal_of
from recipe.run_life.checkpoints import (
    PARTS,
    Checkpoint,
    Start,
    choose_start,
    damage,
    is_checkpoint,
    settle_start,
    write_whole,
)

SECTIONS = ("actor_rollout_ref", "algorithm", "data", "reward", "distillation", "trainer.v1", "trainer.critic_warmup")
MAY_CHANGE = re.compile(
    "|".join(
        (
            # schedule, validation, logs and records
            *(
                "total_training_steps",
                "val_.*",
                "validation_shuffle",
                "profiler",
                "trace",
                "prometheus",
                "disable_log_stats",
            ),
            *("checkpoint", "token_dump", "watchdog"),
            # devices, and how work is dealt out
            *("nnodes", "n_gpus_per_node", ".*workers", "nccl_timeout", ".*parallel_size", "strategy", "fsdp_size"),
            *("wrap_policy", "turbo_config", "checkpoint_engine", "disaggregation", "engine_kwargs", "use_shm"),
            *("custom_sampler", "sampler_kwargs", "scheduling_policy"),
            # speed and memory
            *(".*micro_batch_size.*", ".*max_token_len.*", ".*dynamic_bsz", ".*offload.*", "gpu_memory_utilization"),
            *(
                "reshard_after_forward",
                "forward_prefetch",
                "use_no_sync_for_gradient_accumulation",
                "use_torch_compile",
            ),
            *("enable_gradient_checkpointing", "entropy_checkpointing", "entropy_from_logits_chunk_size", "tiled_mlp"),
            *("use_remove_padding", "pad_to_length.*", "use_fused_kernels", "fused_kernel_options", "share_forward"),
            *(
                "enforce_eager",
                "cudagraph_capture_sizes",
                "free_cache_engine",
                "enable_sleep_mode",
                "multi_stage_wake_up",
            ),
            *("max_num_.*", "enable_chunked_prefill", "enable_prefix_caching", "load_format", "layered_summon"),
            *("skip_tokenizer_init",),
            # verl's name for a configuration's class, and the reference policy, which has no settings of its own but these
            *("_target_", "ref"),
        )
    )
)
"""Parts of an option's name."""
_MODES = ("auto", "disable", "resume_path")
FSDP_CONFIG = "fsdp_config.json"
"""verl's own record, beside a checkpoint's files, of how many ranks wrote it, and with which FSDP."""
_WAY_OUT = (
    "choose another trainer.experiment_name or trainer.default_local_dir (EXPERIMENT_NAME of the launch scripts, OUTPUT_DIR of "
    "those without a GPU), or start a new run with FRESH=1 of the launch scripts, which moves the old folder away"
)


def run_definition(config: DictConfig) -> dict[str, Any]:
    """The options that make the run what it is, with dots in their names, as JSON holds them."""
    found: dict[str, Any] = {}
    critic = config.critic.enable or config.algorithm.adv_estimator == "gae"
    for section in (*SECTIONS, *(["critic"] if critic else [])):
        values = OmegaConf.select(config, section)
        _flatten(
            section, OmegaConf.to_container(values, resolve=True) if OmegaConf.is_config(values) else values, found
        )
    others = {f"algorithm.{each.section}" for each in methods().values()} | set(MOVED)
    found = {
        name: value
        for name, value in found.items()
        if not any(name == other or name.startswith(f"{other}.") for other in others)
        and not any(MAY_CHANGE.fullmatch(part) for part in name.split("."))
    }
    mode = "trainer.v1.trainer_mode"
    found[mode] = str(found[mode]).removeprefix("grail_").removeprefix("continued_")
    if config.algorithm.adv_estimator in methods():
        signal, section = signal_of(config.algorithm), method(config.algorithm.adv_estimator).section
        found |= {f"algorithm.{section}.{name}": value for name, value in signal.as_dict().items()}
    return json.loads(json.dumps(found, default=str))


def check_run(config: DictConfig) -> None:
    """Refuse to carry on from, or to save among, the checkpoints of another run.

    A folder belongs to the run whose checkpoints are in it: what never saved one binds nobody.

    Raises:
        ValueError: naming the options that differ, with both values, and the way out.
    """
    trainer = config.trainer
    folder = Path(trainer.default_local_dir)
    if trainer.resume_mode not in _MODES:
        raise ValueError(f"trainer.resume_mode={trainer.resume_mode!r} is unknown; choose one of {', '.join(_MODES)}")
    found = _start(config).checkpoint
    start = found.path if found is not None else None
    if start is not None:
        check_ranks(config, start)
    _check_dump(config, resumes=start is not None)
    carries_on = start is not None and start.absolute().parent == folder.absolute()
    if not any(folder.glob("global_step_*")) or not (carries_on or trainer.save_freq > 0):
        return
    what = f"carry on from {start}" if carries_on else "save its checkpoints among them"
    content = _stored(folder)
    if content is None:
        if trainer.resume_mode == "resume_path":
            return  # somebody has named the checkpoint
        raise ValueError(
            f"{folder} holds checkpoints, but no {RUN_DEFINITION} that says which run they are of, and this run would {what}; "
            f"{_WAY_OUT}, or say that they are this run's with trainer.resume_mode=resume_path and trainer.resume_from_path"
        )
    differing = _differing(config, content)
    if differing:
        raise ValueError(
            f"{folder} holds the checkpoints of a run with other settings, and this one would {what}:\n{differing}\n"
            f"{_WAY_OUT}, or put the settings back"
        )


def _differing(config: DictConfig, content: dict[str, Any]) -> str:
    """What differs from a stored definition, an option a line; empty where nothing does."""
    stored, wanted = content["definition"], run_definition(config)
    # An option that only one of two versions knows says nothing about the run.
    names = {*stored, *wanted} if content.get("written_by") == _versions() else stored.keys() & wanted.keys()
    differing = [name for name in sorted(names) if stored.get(name) != wanted.get(name)]
    return "\n".join(f"  {name}: {stored.get(name)!r} there, {wanted.get(name)!r} here" for name in differing)


def _check_dump(config: DictConfig, *, resumes: bool) -> None:
    """Refuse to write among the token dump of another run, whose steps would be taken for this one's, or removed."""
    options = dump_options(config) if config.algorithm.adv_estimator in methods() else None
    if options is None or not dumped_steps(options.folder):
        return
    content = _stored(options.folder)
    if content is None and resumes:
        return  # of a version that did not say
    why = f"no {RUN_DEFINITION} that says which run they are of" if content is None else _differing(config, content)
    if why:
        raise ValueError(
            f"{DUMP_FOLDER}={options.folder} holds the steps of another run:\n{why}\nchoose another folder, move this one "
            "away, or start with FRESH=1 of the launch scripts, which moves the old run's folder away"
        )


def check_ranks(config: DictConfig, checkpoint: Path) -> None:
    """Refuse a checkpoint of another number of ranks where it cannot be shared out anew.

    Args:
        config: the run's configuration.
        checkpoint: the folder ``global_step_N`` that it would resume from.

    Raises:
        ValueError: with both numbers and the ways out.
    """
    record = checkpoint / "actor" / FSDP_CONFIG
    if not record.is_file():
        return
    stored = json.loads(record.read_text(encoding="utf-8"))
    saved, trainer = stored["world_size"], config.trainer
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    if saved == ranks:
        return
    if config.algorithm.adv_estimator not in methods():
        why = f"algorithm.adv_estimator={config.algorithm.adv_estimator} trains with verl's own worker, which needs as many"
    elif config.critic.enable or (checkpoint / "critic").is_dir():
        why = "verl's critic needs as many"
    elif stored["FSDP_version"] != 2 or config.actor_rollout_ref.actor.strategy != "fsdp2":
        why = "only FSDP2's checkpoints (actor_rollout_ref.actor.strategy=fsdp2) can be shared out to another number"
    else:
        print(f"{checkpoint} is of {saved} ranks and is shared out to {ranks}", flush=True)
        return
    raise ValueError(
        f"{checkpoint} was written by {saved} ranks, and trainer.nnodes={trainer.nnodes} x trainer.n_gpus_per_node="
        f"{trainer.n_gpus_per_node} are {ranks}; {why}. Start {saved} ranks, on fewer nodes if these have the GPUs; or "
        f"begin a new run from its model: python3 -m verl.model_merger merge --backend fsdp --local_dir {checkpoint}/actor "
        "--target_dir MERGED, then actor_rollout_ref.model.path=MERGED with another trainer.default_local_dir"
    )


def begin_run(config: DictConfig) -> None:
    """Store the definition of a run that saves checkpoints, and have it carry on from the last good one; :func:`check_run`
    comes before.

    Raises:
        SystemExit: with status 0, where the run is finished already.
    """
    finished = finished_at(config)
    if finished is not None:
        print(
            f"already finished: {finished} is the checkpoint of the last step, so nothing is left to train. Evaluate it with "
            "scripts/evaluate.sh --model; to train on, raise trainer.total_training_steps (TOTAL_STEPS of the launch scripts); "
            f"for a new run, {_WAY_OUT}",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(0)
    trainer, start = config.trainer, _start(config)
    folder = Path(trainer.default_local_dir)
    for note in start.notes:
        at = start.checkpoint.path if start.checkpoint is not None else "the beginning"
        print(f"{note}; the run carries on from {at}", file=sys.stderr, flush=True)
    content = json.dumps({"written_by": _versions(), "definition": run_definition(config)}, indent=2, sort_keys=True)
    options = dump_options(config) if config.algorithm.adv_estimator in methods() else None
    if options is not None:
        with contextlib.suppress(OSError):  # on another machine; what cannot be written there is said there
            options.folder.mkdir(parents=True, exist_ok=True)
            write_whole(options.folder / RUN_DEFINITION, content + "\n")
    saves = trainer.save_freq > 0
    goes_on = start.checkpoint is not None and start.checkpoint.path.absolute().parent == folder.absolute()
    try:
        if saves:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / RUN_DEFINITION, content + "\n")
        if {"auto": saves or goes_on, "resume_path": saves and goes_on}.get(trainer.resume_mode, False):
            settle_start(folder, start.checkpoint, trains=not trainer.get("val_only", False))
    except OSError as error:
        raise ValueError(
            f"trainer.default_local_dir={folder} cannot be written to from here ({error}), so that nothing would say which run "
            "its checkpoints are of; choose a folder that every machine of the run sees"
        ) from error


def finished_at(config: DictConfig) -> Path | None:
    """The checkpoint that the run would resume from, where it is that of the last step; ``None`` where there is work left.

    Where only ``trainer.total_epochs`` bounds a run, its last step is known once the data are loaded; the checkpoint says it.
    """
    trainer, start = config.trainer, _start(config).checkpoint
    if start is None or trainer.get("val_only", False):
        return None
    last = trainer.total_training_steps
    if last is None:
        state = start.state or {}
        last = state.get("last_step") if state.get("total_epochs") == trainer.total_epochs else None
    return start.path if last is not None and start.step >= last else None


def _start(config: DictConfig) -> Start:
    """Where the run would carry on, as verl does it (``PPOTrainer._load_checkpoint``) but for checkpoints that are not whole.

    Raises:
        ValueError: ``trainer.resume_from_path`` names none, or no checkpoint is whole.
    """
    trainer = config.trainer
    if trainer.resume_mode == "auto":
        return choose_start(Path(trainer.default_local_dir), lambda path: _damage(config, path))
    if trainer.resume_mode == "resume_path":
        named = Path(str(trainer.resume_from_path))
        if not is_checkpoint(named):
            raise ValueError(
                f"trainer.resume_from_path={trainer.resume_from_path} is no checkpoint; with trainer.resume_mode=resume_path "
                "it must be a folder global_step_N"
            )
        broken = _damage(config, named)
        if broken:
            raise ValueError(
                f"trainer.resume_from_path={named} is not whole: {', '.join(broken)} missing or cut off; name another one"
            )
        return Start(Checkpoint(named))
    return Start(None)


def _damage(config: DictConfig, path: Path) -> list[str]:
    actor = config.actor_rollout_ref.actor
    if actor.strategy not in ("fsdp", "fsdp2"):
        return []
    wanted = OmegaConf.select(actor, "checkpoint.load_contents") or PARTS
    critic = bool(config.critic.enable or config.algorithm.adv_estimator == "gae")
    return damage(path, [part for part in wanted if part in PARTS], critic=critic)


def _stored(folder: Path) -> dict[str, Any] | None:
    path = folder / RUN_DEFINITION
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and isinstance(found.get("definition"), dict):
            return found
        why = "it holds no definition"
    except (OSError, ValueError, RecursionError) as error:
        why = str(error)
    raise ValueError(
        f"{path} does not say which run the files beside it are of ({why}); put it back from a copy, or remove it and name the "
        "checkpoint with trainer.resume_mode=resume_path and trainer.resume_from_path"
    )


def _versions() -> dict[str, str]:
    return {"grail_advantage": __version__, "verl": version("verl")}


def _flatten(prefix: str, value: Any, found: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            _flatten(f"{prefix}.{name}", inner, found)
    else:
        found[prefix] = value
