"""However a run ends, it ends whole: what its driver does for that, the process that starts Ray.

- Before Ray starts, processes that earlier runs left behind are named; they are not touched.
- A small process beside this one sees to it that nothing of the run is left (:mod:`recipe.run_life.reaper`).
- The watchdog's last words, from the trainer's process, are printed here, where the user reads them, and end the run.
- When the trainer's process itself was killed, or one of Ray's servers, that is said.

Ray does the rest: ``ray.init`` ties the servers that it starts to this process (``PR_SET_PDEATHSIG``), SIGTERM and Ctrl-C end
it in an orderly way, workers end when their raylet is gone or when their job is over, on every node.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import ray
from omegaconf import DictConfig, OmegaConf

from recipe.run_life import ray_life, reaper
from recipe.run_life.ray_life import Words
from recipe.run_life.watch import message, of_deaths

LISTEN = 1.0
"""Seconds between two looks for last words."""
LEFTOVER_SECONDS = 20.0
"""For what is just ending to be gone."""
ASK_SECONDS = 15.0
"""For Ray to answer at the end; a thread that still asks while Ray shuts down can crash the process."""

SEEN = "seen by the driver; no process of the run goes on without it"
"""When one of Ray's servers died, of which no phase is known."""
TASK_RUNNER = "TaskRunner"
"""What the classes are called in whose process verl's trainers run (``verl.trainer.main_ppo``)."""

_begun = threading.Event()
_printed = threading.Event()
_over = threading.Event()


def begin(config: DictConfig) -> None:
    """Prepare this process, the driver, for the run's end. Does nothing the second time, and where there is no ``/proc``."""
    if _begun.is_set() or not (reaper.PROC / "self" / "stat").exists():
        return
    _begun.set()
    name_leftovers()
    tag = reaper.tag_of(os.getpid())
    os.environ[reaper.VARIABLE] = tag
    # setproctitle, by which Ray and vLLM name their processes, may write over the environment that others can read. This is its
    # own switch against that.
    os.environ.setdefault("SPT_NOENV", "1")
    # In a cluster that is there already, workers inherit nothing from here.
    for variable in (reaper.VARIABLE, "SPT_NOENV"):
        option = f"ray_kwargs.ray_init.runtime_env.env_vars.{variable}"
        OmegaConf.update(config, option, os.environ[variable], force_add=True)
    beside = _start_reaper(tag)
    listening = threading.Thread(target=_listen, args=(beside, config), name="grail_advantage last words", daemon=True)
    atexit.register(_at_exit, beside, config, listening)
    listening.start()


def name_leftovers() -> None:
    """Print what earlier runs have left behind on this machine, and how to end it."""
    deadline = time.monotonic() + LEFTOVER_SECONDS
    while (left := reaper.leftovers()) and time.monotonic() < deadline:
        time.sleep(reaper.TICK)
    for driver, found in left.items():
        said = [f"grail_advantage: of a run that has ended (driver {driver}) these processes are still there:"]
        said += [f"  {process.pid:>8}  {_age(process.seconds):>9}  {process.title}" for process in found]
        said.append(f"  to end them: kill -9 {' '.join(str(process.pid) for process in found)}")
        reaper.say("\n".join(said))


def _age(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def _start_reaper(tag: str) -> subprocess.Popen[bytes]:
    me = os.getpid()
    owner = os.environ.pop(reaper.OWNER_VARIABLE, "")
    command = [sys.executable, "-I", "-S", reaper.__file__, str(me), str(reaper.start_time(me)), tag, owner]
    without_tag = {name: value for name, value in os.environ.items() if name != reaper.VARIABLE}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, env=without_tag
    )


def _say_ending(beside: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.write(beside.stdin.fileno(), reaper.ENDING)


def _listen(beside: subprocess.Popen[bytes], config: DictConfig) -> None:
    """Wait for the watchdog's last words, or for the death of a server without which it has none."""
    while not _over.wait(LISTEN):
        text = _of_servers(config)
        if text is None:
            words = _ask()
            text = words.text if words is not None and words.now else None
        if text is not None:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            _print(text)
            _say_ending(beside)
            # The main thread waits for the trainer without a limit.
            os._exit(1)


def _of_servers(config: DictConfig) -> str | None:
    """What to say where one of Ray's servers has died."""
    try:
        dead = ray_life.dead_servers()
    except Exception:  # this process is just joining Ray, or leaving it
        return None
    return message(of_deaths(dead, SEEN), config, stack=[]) if dead else None


def _ask() -> Words | None:
    try:
        return ray_life.told() if ray.is_initialized() else None
    except Exception:  # Ray's control service is away, or this process has just left it
        return None


def _print(text: str) -> None:
    if not _printed.is_set():
        _printed.set()
        reaper.say(text)


def _at_exit(beside: subprocess.Popen[bytes], config: DictConfig, listening: threading.Thread) -> None:
    """Runs before Ray's own, which was registered earlier."""
    # Behind a SIGTERM, Ray's failure handler (abseil's) leaves an alarm that aborts the process after 3 seconds, in the middle
    # of its orderly end.
    signal.alarm(0)
    _say_ending(beside)
    _over.set()
    listening.join(ASK_SECONDS)
    asking = threading.Thread(target=_print_cause, args=(config,), daemon=True)
    asking.start()
    asking.join(ASK_SECONDS)


def _print_cause(config: DictConfig) -> None:
    """Last words that were kept for the end, or the trainer's own death."""
    words = _ask()
    if words is not None:
        _print(words.text)
        return
    try:
        _, dead = ray_life.actors()
        gone = ray_life.own_node_is_gone()
    except Exception:
        return
    trainers = [death for death in dead if death.who.name.startswith(TASK_RUNNER)]
    if trainers:
        _print(message(of_deaths(trainers, "it is the trainer's own process"), config, stack=[]))
    elif gone:
        _print(message(of_deaths(gone, SEEN), config, stack=[]))
