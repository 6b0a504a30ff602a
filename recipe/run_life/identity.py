"""No run resumes from the checkpoints of another one, or writes among its files.

verl resumes whatever lies in ``trainer.default_local_dir`` (``trainer.resume_mode=auto``, its default): under other settings it
trains a mixture, and past the last step it trains nothing and says nothing. So the options that define a run are stored beside
its checkpoints and its token dump. All options define it but those that :data:`MAY_CHANGE` names.
"""

from __future__ import annotations

import fnmatch
import json
import re
import sys
import uuid
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grail_advantage import __version__
from grail_advantage.dump.folder_lock import hold
from grail_advantage.dump.store import dumped_steps
from grail_advantage.method import methods
from grail_advantage.verl_ext.settings import ACTOR, DUMP_FOLDER, ENGINES, TRAINER_MODE, RunConfig, Settings
from recipe.run_life import checkpoints
from recipe.run_life.checkpoints import PARTS, Checkpoint, read_json, write_json

RUN_DEFINITION = "run_definition.json"
"""A file in each folder of a run."""
FOLDER, STRATEGY, MODE = "trainer.default_local_dir", f"{ACTOR}.strategy", "trainer.resume_mode"
MAY_CHANGE = {
    "how long a run is, what it logs and saves, and where": "trainer.total_* trainer.*_freq trainer.*_name trainer.logger "
    "trainer.log_* trainer.*_dir trainer.resume_* trainer.val_* trainer.max_*_ckpt_to_keep trainer.del_local_* "
    "trainer.esi_redundant_time *.checkpoint.save_contents *.checkpoint.async_save algorithm.token_dump.* run_life.*",
    "validation and observation": "data.val* *.val_kwargs.* *.calculate_entropy *profiler.* *.trace.* *.prometheus.* "
    "*.disable_log_stats",
    "machines": "*nnodes *n_gpus_per_node *_parallel_size *fsdp_size trainer.device trainer.ray_wait_* ray_kwargs.* "
    "transfer_queue.* *.sandbox_fusion.* *.nccl_timeout *.use_shm",
    "speed and memory": "*micro_batch_size* *max_token_len_per_gpu *use_dynamic_bsz *offload *offload_policy "
    "*gradient_checkpointing *entropy_checkpointing *.reshard_after_forward *.forward_prefetch *.use_torch_compile "
    "*.use_remove_padding *.gpu_memory_utilization *.enforce_eager *.cudagraph_capture_sizes *.free_cache_engine "
    "*.enable_sleep_mode *.multi_stage_wake_up *.max_num_batched_tokens *.max_num_seqs *.enable_chunked_prefill "
    "*.enable_prefix_caching *.load_format *.layered_summon *.checkpoint_engine.* reward.num_workers *.agent.num_workers "
    "data.filter_overlong_prompts_workers *.poll_interval *.share_forward *.skip_zero_advantage *.missing_answers",
}
"""Options that do not define a run, as shell patterns, by what they are about. None moves the gradient or the order of data."""
_may_change = re.compile("|".join(map(fnmatch.translate, " ".join(MAY_CHANGE.values()).split()))).match
_BY = {"grail_advantage": __version__, "verl": version("verl")}
"""Versions, each of which has options of its own."""
_MODULE = "algorithm.token_weights.trainer_module"
_ANOTHER = (
    f"choose another trainer.experiment_name or {FOLDER} and {DUMP_FOLDER} (EXPERIMENT_NAME of the launch scripts, "
    "OUTPUT_DIR of those without a GPU)"
)
_REMEDY = (
    "choose another trainer.experiment_name or trainer.default_local_dir (EXPERIMENT_NAME of the launch scripts, OUTPUT_DIR of "
    "those without a GPU), put the settings back, or start a new run with FRESH=1 of the launch scripts, which moves the old "
    "folder away; run_life.strict=false mixes them"
)


def run_definition(run: RunConfig) -> dict[str, Any]:
    """The options that define the run, with dots in their names, as JSON holds them; of sections that the run reads."""
    read = {
        "algorithm.token_weights.": isinstance(run, Settings),
        "actor_rollout_ref.ref.": run[f"{ACTOR}.use_kl_loss"] or run["algorithm.use_kl_in_reward"],
        "critic.": _has_critic(run),
        "distillation.": run["distillation.enabled"],
        "reward.reward_model.": run["reward.reward_model.enable"],
        **{f"algorithm.{each.section}.": False for each in methods().values()},
    }
    unread = tuple(section for section, is_read in read.items() if not is_read)
    values = {n: value for n, value in _flat(run.config).items() if not n.startswith(unread) and not _may_change(n)}
    values[TRAINER_MODE] = str(values[TRAINER_MODE]).removeprefix("grail_").removeprefix("kept_")
    if isinstance(run, Settings):  # with the values that a preset sets
        values |= {f"algorithm.{run.signal.section}.{name}": value for name, value in run.signal.model_dump().items()}
        if run[_MODULE] == "recipe.run_life.trainer":  # where run_life.enabled has it
            values[_MODULE] = None
    return json.loads(json.dumps(values, default=str))


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {name: value}
    return {n: v for key, inner in value.items() for n, v in _flat(inner, f"{name}.{key}".lstrip(".")).items()}


def check_run(run: RunConfig, *, strict: bool = True) -> None:
    """Refuses to resume from, or to save among, the checkpoints or the token dump of another run. A folder belongs to the run
    whose files are in it.

    Args:
        run: the parsed configuration.
        strict: refuse to mix two runs in one folder; otherwise a warning says so.

    Raises:
        ValueError: naming the options that differ, with both values, and the remedy.
    """
    start = choose(run)[0]
    if start is not None:
        check_ranks(run, start.path)
    folder, dump = Path(run[FOLDER]), _dump_folder(run)
    mixed = []
    if checkpoints.checkpoints(folder) and (run["trainer.save_freq"] > 0 or _is_in(start, folder)):
        mixed += _differing(run, FOLDER, folder, unknown=run[MODE] == "resume_path")
    if dump is not None and dumped_steps(dump):
        mixed += _differing(run, DUMP_FOLDER, dump, unknown=start is not None)
    if mixed and strict:
        raise ValueError("\n".join([*mixed, _REMEDY]))
    if mixed:
        _say("\n".join(["WARNING: two runs are mixed", *mixed]))


def _differing(run: RunConfig, option: str, folder: Path, *, unknown: bool) -> list[str]:
    """The options that differ from those stored in a folder, after a heading; ``unknown``: there need be none.

    Another version may not know an option, and earlier ones stored fewer: of theirs, only what both have is compared.
    """
    stored = read_json(folder / RUN_DEFINITION)
    there, here = stored.get("definition"), run_definition(run)
    if isinstance(there, dict):
        names = there.keys() | here.keys() if stored.get("by") == _BY else there.keys() & here.keys()
        differing = [name for name in sorted(names) if there.get(name) != here.get(name)]
        lines = [f"  {name}: {there.get(name)!r} there, {here.get(name)!r} here" for name in differing]
    else:
        lines = [] if unknown else [f"  no {RUN_DEFINITION} that can be read says which"]
    return [f"{option}={folder} holds the files of another run:", *lines] if lines else []


def check_ranks(run: RunConfig, checkpoint: Path) -> None:
    """Refuses a checkpoint of another number of ranks where these cannot load it (:mod:`recipe.run_life.ranks`)."""
    saved, ranks = checkpoints.world_size(checkpoint), run["trainer.nnodes"] * run["trainer.n_gpus_per_node"]
    if saved in (None, ranks):
        return
    fsdp2 = read_json(checkpoint / "actor/fsdp_config.json").get("FSDP_version") == 2 and run[STRATEGY] == "fsdp2"
    if not fsdp2 or not isinstance(run, Settings) or _has_critic(run) or (checkpoint / "critic").is_dir():
        raise ValueError(
            f"{checkpoint} was written by {saved} ranks, and {run.named('trainer.nnodes')} x "
            f"{run.named('trainer.n_gpus_per_node')} are {ranks}; only a run with token weights, {STRATEGY}=fsdp2 and no "
            f"critic can change their number. Start {saved} ranks, on fewer nodes if these have the GPUs; or begin a new run "
            f"from its model: python3 -m verl.model_merger merge --backend fsdp --local_dir {checkpoint}/actor "
            "--target_dir MERGED, then actor_rollout_ref.model.path=MERGED with another trainer.default_local_dir"
        )
    _say(f"{checkpoint} is of {saved} ranks and is loaded by {ranks}")


def begin_run(run: RunConfig) -> bool:
    """Stores the definition of a run that saves checkpoints, and has it resume from the last good one, after
    :func:`check_run`. Returns whether anything is left to train."""
    start, notes = choose(run)
    last, state = run["trainer.total_training_steps"], (start and start.state) or {}
    if last is None and state.get("total_epochs") == run["trainer.total_epochs"]:
        last = state.get("last_step")  # where the number of epochs alone bounds the run
    if start is not None and last is not None and start.step >= last and not run["trainer.val_only"]:
        _say(
            f"already finished: {start.path} is the checkpoint of the last step, so nothing is left to train. Evaluate it with "
            "scripts/evaluate.sh --model; to train longer, raise trainer.total_training_steps (TOTAL_STEPS of the launch "
            f"scripts); for a new run, {_REMEDY}"
        )
        return False
    for note in notes:
        _say(f"{note}; the run resumes from {start.path}")
    folder, dump = Path(run[FOLDER]), _dump_folder(run)
    saves, resumes = run["trainer.save_freq"] > 0, _is_in(start, folder)
    name = read_json(folder / RUN_DEFINITION).get("run") if resumes else None
    content = {"run": name or uuid.uuid4().hex, "definition": run_definition(run), "by": _BY}
    if dump is not None:
        with suppress(OSError):  # the trainer's machine is another one, and says what cannot be written there
            write_json(dump / RUN_DEFINITION, content)
    if saves:
        write_json(folder / RUN_DEFINITION, content)
    if {"auto": saves or resumes, "resume_path": saves and resumes}.get(run[MODE], False):
        checkpoints.settle_start(folder, start, trains=not run["trainer.val_only"])
    return True


def choose(run: RunConfig) -> tuple[Checkpoint | None, list[str]]:
    """Where the run resumes, as verl does it (``PPOTrainer._load_checkpoint``) but for checkpoints that are not whole, and why
    not later.

    Raises:
        ValueError: ``trainer.resume_from_path`` names none, or no checkpoint is whole.
    """
    if run[MODE] == "auto":
        return checkpoints.choose_start(Path(run[FOLDER]), lambda path: _damage(run, path))
    if run[MODE] == "disable":
        return None, []
    named = Path(str(run["trainer.resume_from_path"]))
    broken = _damage(run, named) if checkpoints.is_checkpoint(named) else ["it"]
    if broken:
        raise ValueError(
            f"trainer.resume_from_path={named} is no whole checkpoint global_step_N: {', '.join(broken)} missing, cut off or "
            "changed on the disk; "
            "name another one"
        )
    return Checkpoint(named), []


def hold_folders(run: RunConfig) -> None:
    """Locks the run's folders, of its checkpoints and of its token dump, until this process ends
    (:func:`grail_advantage.dump.folder_lock.hold`).

    Raises:
        ValueError: a run that lives has one of them, naming the option and the remedy.
    """
    for option, folder in {FOLDER: Path(run[FOLDER]), DUMP_FOLDER: _dump_folder(run)}.items():
        if folder is not None:
            hold(folder, _ANOTHER, option)


def _damage(run: RunConfig, path: Path) -> list[str]:
    if run[STRATEGY] not in ENGINES:
        return []
    loaded = run[f"{ACTOR}.checkpoint.load_contents"] or PARTS
    return checkpoints.damage(path, [part for part in loaded if part in PARTS], critic=_has_critic(run))


def _is_in(start: Checkpoint | None, folder: Path) -> bool:
    return start is not None and start.path.absolute().parent == folder.absolute()


def _has_critic(run: RunConfig) -> bool:
    return bool(run["critic.enable"] or run["algorithm.adv_estimator"] == "gae")


def _dump_folder(run: RunConfig) -> Path | None:
    return run.dump.folder if isinstance(run, Settings) and run.dump is not None else None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
