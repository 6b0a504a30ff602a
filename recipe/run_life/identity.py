"""The options that make a run what it is: stored beside its checkpoints, so that no other run resumes from them.

verl resumes whatever lies in ``trainer.default_local_dir`` (``trainer.resume_mode=auto``, its default): under other settings it
trains a mixture, and past the last step it trains nothing and says nothing. The same holds for the folder of a token dump.
"""

from __future__ import annotations

import json
import sys
import uuid
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grail_advantage import __version__
from grail_advantage.options import option_fields
from grail_advantage.registry import method, methods
from grail_advantage.token_dump import dumped_steps
from grail_advantage.verl_ext.settings import DUMP_FOLDER, dump_options, signal_of
from recipe.run_life.checkpoints import (
    PARTS,
    Checkpoint,
    checkpoints,
    choose_start,
    damage,
    is_checkpoint,
    read_json,
    settle_start,
    world_size,
    write_json,
)
from recipe.run_life.options import options_of

RUN_DEFINITION = "run_definition.json"
DEFINES = {
    "": "algorithm distillation trainer.critic_warmup trainer.v1.trainer_mode trainer.v1.separate_async.parameter_sync_step",
    "data": "train_files train_max_samples train_batch_size gen_batch_size prompt_key reward_fn_key "
    "max_prompt_length max_response_length filter_overlong_prompts truncation shuffle seed custom_cls tool_config_path "
    "apply_chat_template_kwargs",
    "reward": "custom_reward_function reward_manager reward_model.enable reward_model.model_path",
    "actor_rollout_ref.model": "path tokenizer_path custom_chat_template override_config lora_rank lora_alpha target_modules "
    "exclude_modules lora_adapter_path",
    "actor_rollout_ref.actor": "optim policy_loss ppo_mini_batch_size ppo_epochs clip_ratio clip_ratio_low clip_ratio_high "
    "clip_ratio_c loss_agg_mode loss_scale_factor entropy_coeff use_kl_loss kl_loss_coef kl_loss_type tau_pos tau_neg shuffle "
    "data_loader_seed grad_clip fsdp_config.dtype fsdp_config.model_dtype fsdp_config.mixed_precision fsdp_config.seed",
    "actor_rollout_ref.rollout": "name n temperature top_k top_p do_sample ignore_eos seed dtype quantization multi_turn agent",
    "critic": "model.path optim ppo_mini_batch_size ppo_epochs cliprange_value loss_agg_mode",
}
"""Options and sections that move the gradient, by the section that they are in."""
LEFT_OUT = ("algorithm.token_weights", "algorithm.token_dump", "actor_rollout_ref.rollout.agent.num_workers")
_REMEDY = (
    "choose another trainer.experiment_name or trainer.default_local_dir (EXPERIMENT_NAME of the launch scripts, OUTPUT_DIR of "
    "those without a GPU), put the settings back, or start a new run with FRESH=1 of the launch scripts, which moves the old "
    "folder away; run_life.strict=false mixes them"
)


def run_definition(config: DictConfig) -> dict[str, Any]:
    """The options that make the run what it is, with dots in their names, as JSON holds them."""
    values: dict[str, Any] = {}
    for section, names in DEFINES.items():
        for name in names.split() if section != "critic" or _has_critic(config) else ():
            name = f"{section}.{name}".lstrip(".")
            value = OmegaConf.select(config, name)
            _flatten(name, OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value, values)
    others = (*LEFT_OUT, *(f"algorithm.{each.section}" for each in methods().values()))
    values = {
        name: value for name, value in values.items() if not f"{name}.".startswith(tuple(f"{o}." for o in others))
    }
    mode = "trainer.v1.trainer_mode"
    values[mode] = str(values[mode]).removeprefix("grail_").removeprefix("kept_")
    if config.algorithm.adv_estimator in methods():
        # With the values that a preset stands for.
        signal, section = signal_of(config.algorithm), method(config.algorithm.adv_estimator).section
        values |= {
            f"algorithm.{section}.{each.name}": getattr(signal, each.name) for each in option_fields(type(signal))
        }
    return json.loads(json.dumps(values, default=str))


def _flatten(prefix: str, value: Any, values: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            _flatten(f"{prefix}.{name}", inner, values)
    else:
        values[prefix] = value


def check_run(config: DictConfig) -> None:
    """Refuses to resume from, or to save among, the checkpoints or the token dump of another run.

    A folder belongs to the run whose files are in it. A run that never saved one binds nobody.

    Raises:
        ValueError: naming the options that differ, with both values, and the remedy.
    """
    trainer, start = config.trainer, choose(config)[0]
    if start is not None:
        check_ranks(config, start.path)
    folder = Path(trainer.default_local_dir)
    resumes = start is not None and start.path.absolute().parent == folder.absolute()
    mixed = []
    if checkpoints(folder) and (resumes or trainer.save_freq > 0):
        # A checkpoint that somebody has named may be of a run that stored no definition.
        why = _differing(config, folder, unknown=trainer.resume_mode == "resume_path")
        mixed += [f"trainer.default_local_dir={folder} holds the checkpoints of another run:\n{why}"] if why else []
    dump = _dump_folder(config)
    if dump is not None and dumped_steps(dump):
        why = _differing(config, dump, unknown=start is not None)
        mixed += [f"{DUMP_FOLDER}={dump} holds the steps of another run:\n{why}"] if why else []
    if mixed and options_of(config).strict:
        raise ValueError("\n".join([*mixed, _REMEDY]))
    for text in mixed:
        print(f"WARNING: {text}", file=sys.stderr, flush=True)


def _differing(config: DictConfig, folder: Path, *, unknown: bool) -> str:
    """The options that differ from those stored in a folder, one a line; empty where none does."""
    content = read_json(folder / RUN_DEFINITION) or {}
    stored, wanted = content.get("definition"), run_definition(config)
    if not isinstance(stored, dict):
        return "" if unknown else f"  no {RUN_DEFINITION} that can be read says which"
    # An option that only one of two versions knows says nothing about the run.
    names = {*stored, *wanted} if content.get("written_by") == _versions() else stored.keys() & wanted.keys()
    differing = [name for name in sorted(names) if stored.get(name) != wanted.get(name)]
    return "\n".join(f"  {name}: {stored.get(name)!r} there, {wanted.get(name)!r} here" for name in differing)


def check_ranks(config: DictConfig, checkpoint: Path) -> None:
    """Refuses a checkpoint of another number of ranks where these cannot load it.

    Raises:
        ValueError: with both numbers and the remedies.
    """
    trainer, saved = config.trainer, world_size(checkpoint)
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    if saved in (None, ranks):
        return
    fsdp2 = (read_json(checkpoint / "actor/fsdp_config.json") or {}).get("FSDP_version") == 2
    if config.algorithm.adv_estimator not in methods():
        why = f"algorithm.adv_estimator={config.algorithm.adv_estimator} trains with verl's own worker, which needs as many"
    elif _has_critic(config) or (checkpoint / "critic").is_dir():
        why = "verl's critic needs as many"
    elif not fsdp2 or config.actor_rollout_ref.actor.strategy != "fsdp2":
        why = "only FSDP2's checkpoints (actor_rollout_ref.actor.strategy=fsdp2) can be loaded by another number"
    else:
        print(f"{checkpoint} is of {saved} ranks and is loaded by {ranks}", file=sys.stderr, flush=True)
        return
    raise ValueError(
        f"{checkpoint} was written by {saved} ranks, and trainer.nnodes={trainer.nnodes} x trainer.n_gpus_per_node="
        f"{trainer.n_gpus_per_node} are {ranks}; {why}. Start {saved} ranks, on fewer nodes if these have the GPUs; or "
        f"begin a new run from its model: python3 -m verl.model_merger merge --backend fsdp --local_dir {checkpoint}/actor "
        "--target_dir MERGED, then actor_rollout_ref.model.path=MERGED with another trainer.default_local_dir"
    )


def begin_run(config: DictConfig) -> bool:
    """Stores the definition of a run that saves checkpoints, and has it resume from the last good one, after
    :func:`check_run`. Returns whether anything is left to train."""
    trainer, (start, notes) = config.trainer, choose(config)
    if is_finished(config, start):
        print(
            f"already finished: {start.path} is the checkpoint of the last step, so nothing is left to train. Evaluate it with "
            "scripts/evaluate.sh --model; to train longer, raise trainer.total_training_steps (TOTAL_STEPS of the launch "
            f"scripts); for a new run, {_REMEDY}",
            file=sys.stderr,
            flush=True,
        )
        return False
    folder, dump = Path(trainer.default_local_dir), _dump_folder(config)
    for note in notes:
        print(f"{note}; the run carries on from {start.path}", file=sys.stderr, flush=True)
    saves, resumes = trainer.save_freq > 0, start is not None and start.path.absolute().parent == folder.absolute()
    run = (read_json(folder / RUN_DEFINITION) or {}).get("run") if resumes else None
    content = {"run": run or uuid.uuid4().hex, "written_by": _versions(), "definition": run_definition(config)}
    with suppress(OSError):  # the trainer's machine is another one, and says what cannot be written there
        if dump is not None:
            write_json(dump / RUN_DEFINITION, content)
    if saves:
        write_json(folder / RUN_DEFINITION, content)
    if {"auto": saves or resumes, "resume_path": saves and resumes}.get(trainer.resume_mode, False):
        settle_start(folder, start, trains=not trainer.get("val_only", False))
    return True


def is_finished(config: DictConfig, start: Checkpoint | None) -> bool:
    """Whether a checkpoint is that of the last step.

    Where only ``trainer.total_epochs`` bounds a run, its last step is known once the data are loaded; the checkpoint says it.
    """
    trainer = config.trainer
    if start is None or trainer.get("val_only", False):
        return False
    last, state = trainer.total_training_steps, start.state or {}
    if last is None and state.get("total_epochs") == trainer.total_epochs:
        last = state.get("last_step")
    return last is not None and start.step >= last


def choose(config: DictConfig) -> tuple[Checkpoint | None, list[str]]:
    """Where the run resumes, as verl does it (``PPOTrainer._load_checkpoint``) but for checkpoints that are not whole, and why
    it is not the last one.

    Raises:
        ValueError: ``trainer.resume_from_path`` names none, or no checkpoint is whole.
    """
    trainer = config.trainer
    if trainer.resume_mode == "auto":
        return choose_start(Path(trainer.default_local_dir), lambda path: _damage(config, path))
    if trainer.resume_mode == "disable":
        return None, []
    if trainer.resume_mode != "resume_path":
        raise ValueError(
            f"trainer.resume_mode={trainer.resume_mode} is unknown; choose one of auto, disable, resume_path"
        )
    named = Path(str(trainer.resume_from_path))
    broken = _damage(config, named) if is_checkpoint(named) else ["it"]
    if broken:
        raise ValueError(
            f"trainer.resume_from_path={named} is no whole checkpoint global_step_N: {', '.join(broken)} missing or cut off; "
            "name another one"
        )
    return Checkpoint(named), []


def _damage(config: DictConfig, path: Path) -> list[str]:
    actor = config.actor_rollout_ref.actor
    if actor.strategy not in ("fsdp", "fsdp2"):
        return []
    loaded = OmegaConf.select(actor, "checkpoint.load_contents") or PARTS
    return damage(path, [part for part in loaded if part in PARTS], critic=_has_critic(config))


def _has_critic(config: DictConfig) -> bool:
    return bool(config.critic.enable or config.algorithm.adv_estimator == "gae")


def _dump_folder(config: DictConfig) -> Path | None:
    options = dump_options(config) if config.algorithm.adv_estimator in methods() else None
    return None if options is None else options.folder


def _versions() -> dict[str, str]:
    return {"grail_advantage": __version__, "verl": version("verl")}
