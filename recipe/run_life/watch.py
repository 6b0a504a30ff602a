"""Ends a run that cannot continue, and says why.

verl waits without a limit: for responses of an engine that is gone, for ranks of which one was killed. So a thread in the
trainer's process looks every few seconds whether the actors and engines that the trainer holds are alive
(:mod:`recipe.run_life.actors`), and how long the phase lasts in which the trainer is: the time that verl logs as
``timing_s/<phase>``. Where the run cannot continue, the thread interrupts the trainer, which then raises :class:`RunEnded` with
the cause. Ray brings that to the driver (:func:`run`), which prints it and leaves in an orderly way, so that Ray ends its own
servers.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from ray.exceptions import ActorDiedError
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

from recipe.run_life.actors import Death, death_of, last_lines
from recipe.run_life.checkpoints import checkpoints

INTERVAL, STOPPED = 5.0, 4
"""Seconds between two looks, and the most intervals that count between them: the time of a suspended machine does not."""
INTERRUPT_SECONDS, NOTICE_SECONDS = 15.0, 5.0
"""For the trainer to end once it is interrupted, and for Ray to notice a death that an error tells of."""

START, STEP, END = "start", "step", "end"
LONG = (START, "testing", "save_checkpoint")
"""Phases with a limit of their own."""
HEADLINE = "grail_advantage watchdog: this run cannot go on and ends now."


@dataclass
class Options:
    """The section ``run_life`` of a configuration."""

    enabled: bool = True
    """False gives verl's own behaviour."""
    phase_timeout: float = 7200.0
    """Seconds for a phase of a step."""
    long_phase_timeout: float = 14400.0
    """Seconds for the start, a phase of the first step, a validation or a checkpoint."""
    strict: bool = True
    """Refuse to mix two runs in one folder; False warns."""


def options_of(config: DictConfig) -> Options:
    """Reads the section, which may be missing. OmegaConf refuses unknown names, and values of another type."""
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Options), config.get("run_life") or {}))


class RunEnded(RuntimeError):
    """The run cannot continue; the message says why."""


@dataclass
class _Phase:
    name: str
    step: int
    lasted: float = 0.0

    def __str__(self) -> str:
        step = f"step {self.step}, " if self.step else ""
        return f"{step}phase {self.name}, {self.lasted:.0f} s after it began"


class Watchdog:
    """Decides whether a run can continue, by :meth:`recipe.run_life.actors.Actors.deaths` and a clock."""

    def __init__(
        self, config: DictConfig, deaths: Callable[[], list[Death]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config, self.options = config, options_of(config)
        self._deaths, self._clock, self._looked = deaths, clock, clock()
        self._now = _Phase(START, 0)
        self._first: int | None = None
        self._words: str | None = None
        self._ended = threading.Event()

    def enter(self, phase: str, step: int) -> None:
        """A phase begins. ``END`` is the last one, in which actors may go."""
        if phase == STEP and self._first is None:
            self._first = step
        self._now = _Phase(phase, step)

    def look(self) -> str | None:
        """Returns why the run cannot continue, ``None`` while it can. To be called every :data:`INTERVAL` seconds."""
        now, phase = self._clock(), self._now
        phase.lasted += min(now - self._looked, STOPPED * INTERVAL)
        self._looked = now
        dead: list[Death] = []
        with suppress(Exception):  # Ray's control service is away; if it stays away, Ray ends this process
            dead = self._deaths() if phase.name != END else []
        if dead:
            return of_deaths(dead, str(phase), self.config)
        long = phase.name in LONG or self._first in (None, phase.step)
        name = "long_phase_timeout" if long else "phase_timeout"
        limit = getattr(self.options, name)
        if phase.lasted <= limit:
            return None
        lines = [("waited", str(phase)), ("limit", f"run_life.{name}={limit:g} seconds; all actors are alive")]
        remedy = f"if it is only slow, raise run_life.{name}; docs/troubleshooting.md, The run"
        return message(lines, self.config, remedy)

    def begin(self) -> None:
        """Starts the thread that looks; to be called in the trainer's thread, the process's main one."""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
        threading.Thread(target=self._run, name="run_life watch", daemon=True).start()

    def _run(self) -> None:
        while self._words is None:
            time.sleep(INTERVAL)
            self._words = self.look()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        if not self._ended.wait(INTERRUPT_SECONDS):  # the trainer does not hear; the driver reads this process's log
            print(self._words, file=sys.stderr, flush=True)
            os._exit(1)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Within, an error that the watch or a death explains is raised as :class:`RunEnded`."""
        try:
            yield
        except BaseException as error:
            words = self._words or self._words_after()
            if words is None:
                raise
            self._ended.set()
            raise RunEnded(words) from error

    def _words_after(self) -> str | None:
        """Why the run cannot continue, after an error of the trainer's; ``None`` where nobody died."""
        when, deadline = str(self._now), time.monotonic() + NOTICE_SECONDS
        self.enter(END, 0)
        with suppress(Exception):  # the trainer's own error is what counts
            while not (dead := self._deaths()) and time.monotonic() < deadline:
                time.sleep(0.5)
            if dead:
                return of_deaths(dead, when, self.config)
        return None


def of_deaths(dead: list[Death], when: str, config: DictConfig) -> str:
    """The message on deaths, of which there is one at least."""
    first, *others = dead
    path, log = last_lines(first, 15)
    lines = [("died", first.name), ("cause", first.cause), ("when", when)]
    lines += [("also died", f"{death.name}: {death.cause}") for death in others[:3]]
    lines += [("its log", f"{path} on {first.address}" if path else "out of reach")]
    lines += [("", f"| {line[:300]}") for line in log]
    return message(lines, config, "if memory ran out, give it more before: docs/troubleshooting.md, The run")


def message(lines: list[tuple[str, str]], config: DictConfig, remedy: str) -> str:
    """The text that a user reads, with where the same command would resume now."""
    folder, mode = Path(config.trainer.default_local_dir).absolute(), config.trainer.resume_mode
    counting = [each for each in checkpoints(folder) if each.state is not None] if mode != "disable" else []
    resumes = f"resumes after step {counting[-1].step}, from {counting[-1].path}" if counting else "starts over"
    lines = [*lines, ("what now", f"the same command {resumes}"), ("", remedy)]
    return "\n".join(["", HEADLINE, *(f"  {heading:<10} {words}" for heading, words in lines)])


def run(config: DictConfig) -> None:
    """verl's ``run_ppo``, in the driver; a run that cannot continue exits with status 1 after its cause is printed."""
    # Each raylet ends the children of a worker that died, such as vLLM's engine, unless they called setsid().
    os.environ.setdefault("RAY_process_group_cleanup_enabled", "1")
    # After the control service has died, driver and workers look for it this long (60 s in Ray 2.60) before they end.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
    # After a SIGTERM, Ray's failure handler (abseil's) leaves an alarm that aborts the process after 3 seconds, in the middle
    # of its orderly end. Runs before Ray's own function, which was registered earlier.
    atexit.register(signal.alarm, 0)
    try:
        run_ppo(config, task_runner_class=TaskRunnerV1)
        return
    except RunEnded as error:  # Ray's error with the trainer's stack, which ends with the cause
        text = str(error)
    except ActorDiedError as error:
        death = death_of(error)
        log = "\n".join(last_lines(death, 60)[1])
        ended_itself = HEADLINE in log
        text = (
            log[log.rindex(HEADLINE) :]
            if ended_itself
            else of_deaths([death], "it is the trainer's own process", config)
        )
    with suppress(OSError):  # of a log on a full disk
        print(text, file=sys.stderr, flush=True)
    raise SystemExit(1) from RunEnded(text)
