"""The options that make a run what it is: stored beside its checkpoints, so that no other run resumes from them.

verl resumes whatever lies in ``trainer.default_local_dir`` (``trainer.resume_mode=auto``, its default): under other settings it
trains a mixture, and past the last step it trains nothing and says nothing. The same holds for the folder of a token dump.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from grail_advantage.dump.store import dumped_steps
from grail_advantage.methods import method, methods
from grail_advantage.verl_ext.settings import ACTOR, DUMP_FOLDER, ENGINES, TRAINER_MODE, RunConfig, Settings
from recipe.run_life import checkpoints
from recipe.run_life.checkpoints import PARTS, Checkpoint, read_json, write_json

RUN_DEFINITION = "run_definition.json"
FOLDER, STRATEGY = "trainer.default_local_dir", f"{ACTOR}.strategy"
LOCK = ".run.lock"
"""A file in each folder that belongs to a run, which the run's driver has locked (``flock``) as long as it lives;
:mod:`recipe.launch` looks at it, too."""
DEFINES = {
    "": "algorithm distillation trainer.critic_warmup trainer.v1.trainer_mode trainer.v1.separate_async.parameter_sync_step",
    "data": "train_files train_max_samples train_batch_size gen_batch_size prompt_key reward_fn_key max_prompt_length "
    "max_response_length filter_overlong_prompts truncation shuffle seed custom_cls tool_config_path "
    "apply_chat_template_kwargs",
    "reward": "custom_reward_function reward_manager reward_model.enable reward_model.model_path",
    "actor_rollout_ref.model": "path tokenizer_path custom_chat_template override_config lora_rank lora_alpha target_modules "
    "exclude_modules lora_adapter_path",
    "actor_rollout_ref.actor": "optim policy_loss ppo_mini_batch_size ppo_epochs clip_ratio clip_ratio_low clip_ratio_high "
    "clip_ratio_c loss_agg_mode loss_scale_factor entropy_coeff use_kl_loss kl_loss_coef kl_loss_type tau_pos tau_neg shuffle "
    "data_loader_seed grad_clip fsdp_config.dtype fsdp_config.model_dtype fsdp_config.mixed_precision fsdp_config.seed",
    "actor_rollout_ref.rollout": "name n temperature top_k top_p do_sample ignore_eos seed dtype quantization multi_turn "
    "agent.agent_loop_manager_class agent.default_agent_loop agent.agent_loop_config_path",
    "critic": "model.path optim ppo_mini_batch_size ppo_epochs cliprange_value loss_agg_mode",
}
"""Options and sections that move the gradient, by the section that they are in."""
_held: list[int] = []
"""The descriptors of this process's locks."""
_REMEDY = (
    "choose another trainer.experiment_name or trainer.default_local_dir (EXPERIMENT_NAME of the launch scripts, OUTPUT_DIR of "
    "those without a GPU), put the settings back, or start a new run with FRESH=1 of the launch scripts, which moves the old "
    "folder away; run_life.strict=false mixes them"
)


def run_definition(run: RunConfig) -> dict[str, Any]:
    """The options that make the run what it is, with dots in their names, as JSON holds them."""
    values: dict[str, Any] = {}
    for section, names in DEFINES.items():
        for name in names.split() if section != "critic" or _has_critic(run) else ():
            name = f"{section}.{name}".lstrip(".")
            _flatten(name, run[name], values)
    others = tuple(
        f"algorithm.{name}." for name in ("token_weights", "token_dump", *(m.section for m in methods().values()))
    )
    values = {name: value for name, value in values.items() if not name.startswith(others)}
    values[TRAINER_MODE] = str(values[TRAINER_MODE]).removeprefix("grail_").removeprefix("kept_")
    if isinstance(run, Settings):
        # With the values that a preset sets.
        section = method(run.method).section
        values |= {f"algorithm.{section}.{name}": value for name, value in run.signal.as_dict().items()}
    return json.loads(json.dumps(values, default=str))


def _flatten(prefix: str, value: Any, values: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            _flatten(f"{prefix}.{name}", inner, values)
    else:
        values[prefix] = value


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
    named, mixed = run["trainer.resume_mode"] == "resume_path", []
    if checkpoints.checkpoints(folder) and (run["trainer.save_freq"] > 0 or _is_in(start, folder)):
        mixed += _differing(run, FOLDER, folder, unknown=named)
    if dump is not None and dumped_steps(dump):
        mixed += _differing(run, DUMP_FOLDER, dump, unknown=start is not None)
    if mixed and strict:
        raise ValueError("\n".join([*mixed, _REMEDY]))
    if mixed:
        _say("\n".join(["WARNING: two runs are mixed", *mixed]))


def _let_go() -> None:
    while _held:
        os.close(_held.pop())  # which does not unlock: the parent has it open


os.register_at_fork(after_in_child=_let_go)


def hold(run: RunConfig) -> None:
    """Locks the run's folders, of its checkpoints and of its token dump, until this process ends, in whatever way. No child
    inherits the locks, so that those that a killed driver leaves do not keep the run from resuming. Where a folder cannot be
    locked, a warning says so.

    Raises:
        ValueError: a run that lives has one of them, naming the option and the remedy.
    """
    folders = {FOLDER: Path(run[FOLDER]), DUMP_FOLDER: _dump_folder(run)}
    for folder, option in {path.resolve(): name for name, path in folders.items() if path is not None}.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)  # closed by exec; NFS wants it writable
            _held.append(lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except BlockingIOError:
            holder = (folder / LOCK).read_text(errors="replace").strip()
            raise ValueError(
                f"{option}={folder} belongs to a run that lives ({holder}), and a second one would write into it; wait for it "
                "or end it, and the same command resumes it, or choose another trainer.experiment_name or "
                f"{FOLDER} and {DUMP_FOLDER} (EXPERIMENT_NAME of the launch scripts, OUTPUT_DIR of those "
                "without a GPU)"
            ) from None
        except OSError as error:
            _say(f"WARNING: {option}={folder} cannot be locked ({error}); a second start into it would not be refused")


def _differing(run: RunConfig, option: str, folder: Path, *, unknown: bool) -> list[str]:
    """The options that differ from those stored in a folder, after a heading; ``unknown``: there need be none."""
    stored, wanted = read_json(folder / RUN_DEFINITION).get("definition"), run_definition(run)
    if isinstance(stored, dict):
        differing = [name for name in sorted({*stored, *wanted}) if stored.get(name) != wanted.get(name)]
        lines = [f"  {name}: {stored.get(name)!r} there, {wanted.get(name)!r} here" for name in differing]
    else:
        lines = [] if unknown else [f"  no {RUN_DEFINITION} that can be read says which"]
    return [f"{option}={folder} holds the files of another run:", *lines] if lines else []


def check_ranks(run: RunConfig, checkpoint: Path) -> None:
    """Refuses a checkpoint of another number of ranks where these cannot load it."""
    saved, ranks = checkpoints.world_size(checkpoint), run["trainer.nnodes"] * run["trainer.n_gpus_per_node"]
    if saved in (None, ranks):
        return
    fsdp2 = read_json(checkpoint / "actor/fsdp_config.json").get("FSDP_version") == 2
    fsdp2 = fsdp2 and run[STRATEGY] == "fsdp2"
    critic = _has_critic(run) or (checkpoint / "critic").is_dir()
    if fsdp2 and not critic and isinstance(run, Settings):
        _say(f"{checkpoint} is of {saved} ranks and is loaded by {ranks}")
        return
    raise ValueError(
        f"{checkpoint} was written by {saved} ranks, and {run.named('trainer.nnodes')} x "
        f"{run.named('trainer.n_gpus_per_node')} are {ranks}; only a run with token weights, {STRATEGY}=fsdp2 and no critic "
        f" can change their number. Start {saved} ranks, on fewer nodes if these have the GPUs; or begin a new run from "
        f"its model: python3 -m verl.model_merger merge --backend fsdp --local_dir {checkpoint}/actor --target_dir MERGED, "
        "then actor_rollout_ref.model.path=MERGED with another trainer.default_local_dir"
    )


def begin_run(run: RunConfig) -> bool:
    """Stores the definition of a run that saves checkpoints, and has it resume from the last good one, after
    :func:`check_run`. Returns whether anything is left to train."""
    start, notes = choose(run)
    if is_finished(run, start):
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
    content = {"run": name or uuid.uuid4().hex, "definition": run_definition(run)}
    if dump is not None:
        with suppress(OSError):  # the trainer's machine is another one, and says what cannot be written there
            write_json(dump / RUN_DEFINITION, content)
    if saves:
        write_json(folder / RUN_DEFINITION, content)
    if {"auto": saves or resumes, "resume_path": saves and resumes}.get(run["trainer.resume_mode"], False):
        checkpoints.settle_start(folder, start, trains=not run["trainer.val_only"])
    return True


def is_finished(run: RunConfig, start: Checkpoint | None) -> bool:
    """Whether a checkpoint is that of the last step, which it says itself where ``trainer.total_epochs`` alone bounds a run."""
    if start is None or run["trainer.val_only"]:
        return False
    last, state = run["trainer.total_training_steps"], start.state or {}
    if last is None and state.get("total_epochs") == run["trainer.total_epochs"]:
        last = state.get("last_step")
    return last is not None and start.step >= last


def choose(run: RunConfig) -> tuple[Checkpoint | None, list[str]]:
    """Where the run resumes, as verl does it (``PPOTrainer._load_checkpoint``) but for checkpoints that are not whole, and why
    not later.

    Raises:
        ValueError: ``trainer.resume_from_path`` names none, or no checkpoint is whole.
    """
    mode = run["trainer.resume_mode"]
    if mode == "auto":
        return checkpoints.choose_start(Path(run[FOLDER]), lambda path: _damage(run, path))
    if mode == "disable":
        return None, []
    named = Path(str(run["trainer.resume_from_path"]))
    broken = _damage(run, named) if checkpoints.is_checkpoint(named) else ["it"]
    if broken:
        raise ValueError(
            f"trainer.resume_from_path={named} is no whole checkpoint global_step_N: {', '.join(broken)} missing or cut off; "
            "name another one"
        )
    return Checkpoint(named), []


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
