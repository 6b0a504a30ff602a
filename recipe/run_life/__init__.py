"""Fault tolerance: a killed run resumes, mixes with no other run, and ends where one of its processes died.

verl resumes from the last whole checkpoint in ``trainer.default_local_dir``, of whatever run. So the options that
define a run are stored beside its checkpoints and its token dump, and compared at each start.
:mod:`grail_advantage.verl_ext.entry` calls the functions of this package if ``VERL_USE_EXTERNAL_MODULES`` names
``recipe.verl_start``. See docs/fault_tolerance.md.
"""

import atexit
import fnmatch
import glob
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from grail_advantage import __version__
from grail_advantage.dump import read_dump, write_whole
from grail_advantage.locks import hold
from grail_advantage.text_io import open_plain, read_bytes, read_json, visible
from grail_advantage.verl_ext.patches import STARTS, entry_is_wrapped
from grail_advantage.verl_ext.settings import ACTOR, ATTENTION, DUMP_FOLDER, MODEL, PACKED, Settings
from recipe.rules import check_settings, check_trl

RUN_DEFINITION = "run_definition.json"
FOLDER_OPTION = "trainer.default_local_dir"
RESUME_MODE = "trainer.resume_mode"
RUNTIME = "ray_kwargs.ray_init.runtime_env"
LIBRARIES = f"{MODEL}.external_lib"
FLASH_ATTENTION = ("flash_attn", "torch_npu")
"""Packages that bring transformers' ``flash_attention_2``."""
MAY_CHANGE = """
run.* trainer.total_* trainer.*_freq trainer.*_name trainer.logger trainer.log_* trainer.*_dir trainer.resume_*
trainer.val_* trainer.max_*_ckpt_to_keep trainer.checkpoint_callback_class trainer.del_local_*
trainer.esi_redundant_time *.checkpoint.save_contents *.checkpoint.async_save algorithm.token_dump.* data.val*
*.val_kwargs.* *.calculate_entropy *profiler.* *.trace.* *.prometheus.* *.disable_log_stats *nnodes *n_gpus_per_node
*_parallel_size *fsdp_size trainer.device trainer.ray_wait_* ray_kwargs.* transfer_queue.* *.sandbox_fusion.*
*.nccl_timeout *.use_shm *micro_batch_size* *max_token_len_per_gpu *use_dynamic_bsz *offload *offload_policy
*gradient_checkpointing *entropy_checkpointing *.reshard_after_forward *.forward_prefetch *.use_torch_compile
*.use_remove_padding *.attn_implementation *.gpu_memory_utilization *.enforce_eager *.cudagraph_capture_sizes
*.free_cache_engine *.enable_sleep_mode *.multi_stage_wake_up *.max_num_batched_tokens *.max_num_seqs
*.enable_chunked_prefill *.enable_prefix_caching *.load_format *.layered_summon *.checkpoint_engine.*
reward.num_workers *.agent.num_workers data.filter_overlong_prompts_workers *.poll_interval *.skip_zero_advantage
*.reuse_log_probs *.missing_answers
"""
"""Options that do not define a run, as shell patterns: what it logs and saves, validation, machines, speed and memory.
None moves the order of data, nor the gradient, but for ``trainer.total_*`` under a learning rate that is not
constant."""
_may_change = re.compile("|".join(map(fnmatch.translate, MAY_CHANGE.split()))).match
WHOLE = 2**30
PART = 2**20
"""Bytes of the largest file that is read as a whole, and of the beginning and the end of a larger one."""
_BY = {"grail_advantage": __version__, "verl": version("verl")}
_ANOTHER = (
    "choose another trainer.experiment_name (EXPERIMENT_NAME or OUTPUT_DIR of the launch scripts)"
)
_FRESH = "or move the folder away for a new run (FRESH=1 of the scripts without a GPU)"


class KeepLast(CheckpointCallback):
    """Keeps the last ``trainer.max_actor_ckpt_to_keep`` checkpoints of all starts; verl counts those of one."""

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        # verl goes on where a plug-in fails, and the run would not resume.
        if not (entry_is_wrapped() and __name__ in STARTS):
            remedy = (
                "export VERL_USE_EXTERNAL_MODULES=recipe.verl_start, unset VERL_USE_EXTERNAL_PLUGINS, or add grail_advantage "
                "to it, and `pip install -e .` this project"
            )
            raise ValueError(f"fault tolerance did not load with verl: {remedy}")

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **_: Any) -> None:
        """Removes what verl wrote in older ones; files of others stay, and later steps, which are written again."""
        paths = sorted(Path(checkpoint_dir).parent.glob("global_step_*"), key=_step)
        # Without a number all stay: [:-5] of 5 paths is none.
        count = self.config.trainer.max_actor_ckpt_to_keep or len(paths)
        for path in [path for path in paths if _step(path) <= global_step][:-count]:
            for part in ("actor", "critic", "transfer_queue"):
                shutil.rmtree(path / part, ignore_errors=True)
            (path / "data.pt").unlink(missing_ok=True)
            with suppress(OSError):  # it holds something else
                path.rmdir()


def _step(path: Path) -> int:
    """Returns the step in a checkpoint's name; one without a number is newer than all, and is never removed."""
    number = path.name.removeprefix("global_step_")
    return int(number) if number.isdecimal() else sys.maxsize


def definition(run: Settings) -> dict[str, Any]:
    """Returns the options that define a run, with dots in their names, as JSON holds them."""
    defining = {name: _last_part(value) for name, value in _defining(run)}
    # As it is read back from the file, where a tuple is a list.
    return json.loads(json.dumps(defining, default=str))


def contents(run: Settings) -> dict[str, str]:
    """Returns a digest of what lies at each path that a defining option names, such as the data, a reward function in a
    file or the model: a path says nothing of a file that was written anew."""
    digests = {}
    for name, value in _defining(run):
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, str) and "/" in path:
                label = f"{name} ({Path(path).name})"
                with suppress(OSError, ValueError):  # there is none, or no plain file
                    # a/test.parquet and b/test.parquet are told together.
                    digests[label] = digests.get(label, "") + _digest(Path(path).expanduser())
    return digests


def _digest(path: Path) -> str:
    """Returns the digest of a file's content, or of the files directly in a folder; of large ones the ends count."""
    digest = hashlib.blake2b(digest_size=8)
    files = [path]
    if path.is_dir():
        files = [file for file in sorted(path.glob("[!.]*")) if file.is_file()]
        digest.update(repr([file.name for file in files]).encode())
    for file in files:
        with open_plain(file) as content:
            size = file.stat().st_size
            digest.update(f"{size} ".encode())
            if size <= WHOLE:
                digest.update(hashlib.file_digest(content, "blake2b").digest())
                continue
            # Weights of many GB, read whole, would hold up each start.
            digest.update(content.read(PART))
            content.seek(-PART, os.SEEK_END)
            digest.update(content.read(PART))
    return digest.hexdigest()


def _defining(run: Settings) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in options(run.config) if not _may_change(name)]


def options(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the options of a configuration, with dots in their names."""
    if not isinstance(value, dict) or not value:
        yield name, value
        return
    for key, inner in value.items():
        yield from options(inner, f"{name}.{key}".lstrip("."))


def _last_part(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_last_part, value))
    # The same files in another folder are the same run; contents() sees others of the same name.
    return Path(value).name if str(value).startswith("/") else value


def check_run(run: Settings) -> None:
    """Refuse settings of verl's own that do not work (:mod:`recipe.rules`), and a folder with the files of another run.

    Raises:
        ValueError: naming the options, with the values there and here, and the remedy.
    """
    check_trl()
    check_settings(run)
    # With FRESH=1 scripts/train_cpu.sh checks the options by a dry run, and moves the folder away before the run itself.
    moves_away = os.environ.get("FRESH") == "1" and os.environ.get("DRY_RUN") == "1"
    for option, folder in _folders(run).items():
        has_files = any(folder.glob("global_step_*"))
        if option == DUMP_FOLDER:
            has_files = bool(read_dump(folder).files)
        if moves_away or not has_files:
            continue
        lines = _differing(run, _stored(folder))
        if lines:
            heading = f"{option}={folder} holds the files of another run:"
            remedy = f"{_ANOTHER}, put the settings back, {_FRESH}"
            raise ValueError("\n".join([heading, *lines, remedy]))
    if (
        run[RESUME_MODE] == "resume_path"
        and not Path(str(run["trainer.resume_from_path"])).is_dir()
    ):
        raise ValueError(
            f"{run.named('trainer.resume_from_path')} is no folder global_step_N; name one"
        )


def _folders(run: Settings) -> dict[str, Path]:
    """Returns the folders that a run writes to, by the options that name them."""
    folders = {FOLDER_OPTION: Path(run[FOLDER_OPTION])}
    if run.dump is not None:
        folders[DUMP_FOLDER] = run.dump.folder
    return folders


def _differing(run: Settings, stored: dict) -> list[str]:
    """Returns the options that differ from those stored; of a definition by another version, only what both have."""
    then = stored.get("definition")
    now = definition(run)
    if not isinstance(then, dict):
        # resume_from_path names a checkpoint, so another run's is meant.
        if run[RESUME_MODE] == "resume_path":
            return []
        return [f"  no {RUN_DEFINITION} that can be read says which"]
    # Another version may have options that this one lacks, and lack some that this one has.
    names = then.keys() | now.keys() if stored.get("by") == _BY else then.keys() & now.keys()
    lines = [
        f"  {visible(name)}: {then.get(name)!r} there, {now.get(name)!r} here"
        for name in sorted(names)
        if then.get(name) != now.get(name)
    ]
    digests = stored.get("contents")
    if isinstance(digests, dict):
        for name, digest in contents(run).items():
            # A file that had no digest then says nothing.
            if digests.get(name, digest) != digest:
                lines.append(f"  {name}: another content than when the run began")
    return lines


def _stored(folder: Path) -> dict:
    with suppress(OSError, ValueError):
        content = read_json(read_bytes(folder / RUN_DEFINITION))
        if isinstance(content, dict):
            return content
    return {}


def begin_run(run: Settings, config: DictConfig) -> None:
    """Lock the run's folder, store the definition and prepare Ray; a run that is finished exits with status 0.

    Raises:
        ValueError: a run that lives has the folder, the home or temporary folder cannot be written to, a file of data
        is missing, nothing says which checkpoint is last, or the settings need flash-attn, which is not there.
    """
    for name in ("HOME", "TMPDIR"):
        folder = os.environ.get(name, "/tmp")
        if not os.access(folder, os.W_OK):
            raise ValueError(
                f"{name}={folder} cannot be written to; set it to a folder that you can write to"
            )
    for option in ("data.train_files", "data.val_files"):
        for file in [run[option]] if isinstance(run[option], str) else run[option] or ():
            if file.startswith("/") and not (Path(file).exists() or glob.glob(file)):
                raise ValueError(
                    f"{option}={file} is missing; run bash scripts/prepare_data.sh, or set DATA_DIR"
                )
    checkpoints = Path(run[FOLDER_OPTION])
    hold(checkpoints, _ANOTHER, FOLDER_OPTION)
    _end_if_finished(run, checkpoints)
    run_id = _stored(checkpoints).get("run")
    if not (isinstance(run_id, str) and run_id.isalnum()):
        run_id = uuid.uuid4().hex
    store_definition(run, run_id)
    # All starts are one run of wandb's.
    if "WANDB_RUN_ID" not in os.environ:
        _set(config, f"{RUNTIME}.env_vars", {"WANDB_RUN_ID": run_id, "WANDB_RESUME": "allow"})
    executable = shlex.quote(sys.executable)
    # Ray hands it to a shell.
    if executable != sys.executable:
        _set(config, f"{RUNTIME}.py_executable", executable)
    if not any(map(find_spec, FLASH_ATTENTION)):
        _go_without_flash_attn(run, config)
    if os.environ.get("VERL_PLATFORM") == "cpu":
        from verl_cpu import workers

        workers.start(config, ["recipe.run_life.seeds", "recipe.run_life.trainer"])
    # Has each raylet end the children of a worker that died, such as vLLM's engine, unless they called setsid().
    os.environ.setdefault("RAY_process_group_cleanup_enabled", "1")
    # After a SIGTERM, Ray's failure handler leaves an alarm that aborts the process after 3 seconds, in the middle of
    # its orderly end. Runs before Ray's own function, which was registered earlier.
    atexit.register(signal.alarm, 0)


_set = partial(OmegaConf.update, force_add=True)


def _go_without_flash_attn(run: Settings, config: DictConfig) -> None:
    """Have each process that loads the model import :mod:`recipe.without_flash_attn`, and the model take the attention
    of torch, unless it is configured."""
    if find_spec("verl_cpu") is None:
        raise ValueError(
            "without flash-attn verl takes log-probabilities token by token; install it (scripts/setup_gpu.sh), or "
            "what computes them in few calls: pip install --no-deps -e packages/verl-cpu"
        )
    libraries = run[LIBRARIES] or []
    if isinstance(libraries, str):
        libraries = [libraries]
    _set(config, LIBRARIES, [*libraries, "recipe.without_flash_attn"])
    if run[ATTENTION] is not None:
        return
    if run.sequence_parallel_size > 1:
        raise ValueError(
            f"{ACTOR}.ulysses_sequence_parallel_size={run.sequence_parallel_size} needs flash-attn, which is not "
            "installed (scripts/setup_gpu.sh); use 1"
        )
    attention = "torch_varlen" if run[PACKED] else "sdpa"
    print(f"flash-attn is not installed: {ATTENTION}={attention} (docs/gpu.md)", file=sys.stderr)
    # What is in model_config goes into the checkpoints' config.json, which other programs read; our attention stands beside it.
    option = f"{MODEL}.override_config"
    configured = run[option] or {}
    override = {"model_config": configured, **configured, "attn_implementation": attention}
    _set(config, option, override, merge=False)


def store_definition(run: Settings, run_id: str) -> None:
    """Write what defines a run, and its name, into each of its folders."""
    content = {"run": run_id, "by": _BY, "definition": definition(run), "contents": contents(run)}
    for folder in _folders(run).values():
        # The trainer's machine is another one, and says what cannot be written there.
        with suppress(OSError):
            write_whole(folder / RUN_DEFINITION, json.dumps(content, indent=1))


def _end_if_finished(run: Settings, folder: Path) -> None:
    try:
        start = find_latest_ckpt_path(str(folder)) if run[RESUME_MODE] == "auto" else None
    except ValueError as error:  # a full disk leaves the file empty
        tracker = f"{folder}/latest_checkpointed_iteration.txt"
        raise ValueError(
            f"{tracker} names no step; write that of the last whole checkpoint there, {_FRESH}"
        ) from error
    last = run["trainer.total_training_steps"]
    # A run that is finished may still be validated.
    if start is None or last is None or _step(Path(start)) < last or run["trainer.val_only"]:
        return
    longer = (
        "raise trainer.total_training_steps (TOTAL_STEPS of the launch scripts) to train longer"
    )
    message = f"already finished: {start} is of the last step; {longer}, {_FRESH}"
    print(message, file=sys.stderr, flush=True)
    sys.exit()


def register_trainers() -> None:
    """Gives every trainer that is registered in this process the base :class:`recipe.run_life.trainer.KeptRun`."""
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    from recipe.run_life.trainer import KeptRun

    for name, trainer in list(TRAINER_REGISTRY.items()):
        if not issubclass(trainer, KeptRun):
            TRAINER_REGISTRY[name] = type(trainer.__name__, (KeptRun, trainer), {})
