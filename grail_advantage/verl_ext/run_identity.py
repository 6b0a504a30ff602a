"""What makes a run the run it is: stored beside its checkpoints, so that no other run carries on from them.

verl resumes whatever lies in ``trainer.default_local_dir`` (``trainer.resume_mode=auto``, its default): under other settings it
goes on with a mixture, and past ``trainer.total_training_steps`` it trains nothing and says nothing. (Where only
``trainer.total_epochs`` bounds a run, its last step is known once the data are loaded, and not here.)

A run's definition is its resolved configuration without what may change from one start to the next: number of steps, how often
to save and to validate, logs and names, devices, and what moves speed and memory but not the gradient. A method's section
counts with the values that its preset stands for, and the sections of other methods do not count.
"""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grail_advantage import __version__
from grail_advantage.options import option_fields
from grail_advantage.registry import method, methods
from grail_advantage.verl_ext.settings import MOVED, RUN_DEFINITION, signal_of

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
            *("checkpoint", "token_dump"),
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
    found[mode] = str(found[mode]).removeprefix("grail_")
    if config.algorithm.adv_estimator in methods():
        signal, section = signal_of(config.algorithm), method(config.algorithm.adv_estimator).section
        found |= {
            f"algorithm.{section}.{entry.name}": getattr(signal, entry.name) for entry in option_fields(type(signal))
        }
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
    start = _resumed(config)
    carries_on = start is not None and start.absolute().parent == folder.absolute()
    if not any(folder.glob("global_step_*")) or not (carries_on or trainer.save_freq > 0):
        return
    what = f"carry on from {start}" if carries_on else "save its checkpoints among them"
    way_out = (
        "choose another trainer.experiment_name or trainer.default_local_dir (EXPERIMENT_NAME of the launch scripts), or move "
        "the old folder away"
    )
    content = _stored(folder)
    if content is None:
        if trainer.resume_mode == "resume_path":
            return  # somebody has named the checkpoint
        raise ValueError(
            f"{folder} holds checkpoints, but no {RUN_DEFINITION} that says which run they are of, and this run would {what}; "
            f"{way_out}, or say that they are this run's with trainer.resume_mode=resume_path and trainer.resume_from_path"
        )
    stored, wanted = content["definition"], run_definition(config)
    # An option that only one of two versions knows says nothing about the run.
    names = {*stored, *wanted} if content.get("written_by") == _versions() else stored.keys() & wanted.keys()
    differing = [name for name in sorted(names) if stored.get(name) != wanted.get(name)]
    if differing:
        lines = "\n".join(f"  {name}: {stored.get(name)!r} there, {wanted.get(name)!r} here" for name in differing)
        raise ValueError(
            f"{folder} holds the checkpoints of a run with other settings, and this one would {what}:\n{lines}\n"
            f"{way_out}, or put the settings back"
        )


def begin_run(config: DictConfig) -> None:
    """Store the definition of a run that saves checkpoints; :func:`check_run` comes before.

    Raises:
        SystemExit: with status 0, where the run is finished already.
    """
    finished = finished_at(config)
    if finished is not None:
        print(
            f"already finished: {finished} is the checkpoint of the last step, trainer.total_training_steps="
            f"{config.trainer.total_training_steps}, so nothing is left to train. Evaluate it with scripts/evaluate.sh "
            "--model; to train on, raise trainer.total_training_steps (TOTAL_STEPS of the launch scripts); for a new run, "
            "choose another trainer.experiment_name or trainer.default_local_dir",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(0)
    if config.trainer.save_freq <= 0:
        return
    folder = Path(config.trainer.default_local_dir)
    content = {"written_by": _versions(), "definition": run_definition(config)}
    temporary = folder / f".{RUN_DEFINITION}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        temporary.replace(folder / RUN_DEFINITION)
    except OSError as error:
        raise ValueError(
            f"trainer.default_local_dir={folder} cannot be written to from here ({error}), so that nothing would say which run "
            "its checkpoints are of; choose a folder that every machine of the run sees"
        ) from error


def finished_at(config: DictConfig) -> Path | None:
    """The checkpoint that the run would resume from, where it is that of the last step; ``None`` where there is work left."""
    trainer = config.trainer
    start = _resumed(config)
    if start is None or trainer.total_training_steps is None or trainer.get("val_only", False):
        return None
    return start if int(start.name.removeprefix("global_step_")) >= trainer.total_training_steps else None


def _resumed(config: DictConfig) -> Path | None:
    """The checkpoint that verl would resume from (``PPOTrainer._load_checkpoint``).

    Raises:
        ValueError: ``trainer.resume_from_path`` names none.
    """
    trainer = config.trainer
    if trainer.resume_mode == "auto":
        folder = Path(trainer.default_local_dir)
        tracker = folder / "latest_checkpointed_iteration.txt"
        checkpoint = folder / f"global_step_{int(tracker.read_text())}" if tracker.is_file() else None
        return checkpoint if checkpoint is not None and checkpoint.is_dir() else None
    if trainer.resume_mode == "resume_path":
        named = Path(str(trainer.resume_from_path))
        if not re.fullmatch(r"global_step_\d+", named.name) or not named.is_dir():
            raise ValueError(
                f"trainer.resume_from_path={trainer.resume_from_path} is no checkpoint; with trainer.resume_mode=resume_path "
                "it must be a folder global_step_N"
            )
        return named
    return None


def _stored(folder: Path) -> dict[str, Any] | None:
    path = folder / RUN_DEFINITION
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _versions() -> dict[str, str]:
    return {"grail_advantage": __version__, "verl": version("verl")}


def _flatten(prefix: str, value: Any, found: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            _flatten(f"{prefix}.{name}", inner, found)
    else:
        found[prefix] = value
