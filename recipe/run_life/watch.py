"""Ends a run that cannot go on, and says why.

verl waits without a limit: for responses of an engine that is gone, for ranks of which one was killed, for a server that is to
take new weights. In the process of the trainer a thread therefore looks every few seconds

- whether every actor of the job is alive, unless it was meant to end (:mod:`recipe.run_life.ray_life`);
- whether every engine of vLLM is, a process that Ray does not know, by its server's ``/health``;
- how long the phase lasts in which the trainer is: what verl times as ``timing_s/<phase>``.

Where one of these says that the run cannot go on, the driver is told (:mod:`recipe.run_life.endings`), prints the
message and ends with status 1. If the driver does not, the trainer's process prints it and ends itself.

``algorithm.watchdog.enabled`` switches it off; ``phase_timeout`` is for a phase of a step, ``long_phase_timeout`` for those
that a user expects to take long: the start, the phases of the first step, validation, checkpoints.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from omegaconf import DictConfig

from grail_advantage.verl_ext.settings import WATCHDOG, WatchdogOptions, watchdog_options
from recipe.run_life import ray_life, reaper
from recipe.run_life.checkpoints import checkpoints
from recipe.run_life.ray_life import Death, Engine, Process, Words

INTERVAL = 5.0
"""Seconds between two looks."""
STOPPED = 4
"""A look that comes so many intervals late says that everything stood still, as in a suspended machine."""
REFUSALS = 2
"""Looks in a row at which an engine's server must not answer."""
LINES = 15
"""Lines of a log."""
CLOSING_SECONDS = 20.0
"""For what is to be written before the run ends."""
DRIVER_SECONDS = 30.0
"""For the driver to end the run."""
NOTICE_SECONDS = 5.0
"""For Ray to notice a death that an error tells of."""

START, STEP, REST, END = "start", "step", "rest of the step", "end"
LONG = (START, "testing", "save_checkpoint")
"""Phases with a limit of their own."""


class Verdict(NamedTuple):
    """Why a run cannot go on."""

    reason: list[tuple[str, str]]
    """Headings and what stands behind them."""
    whose_log: Process | None
    remedy: str


@dataclass
class _Phase:
    """What the trainer is at; a new one replaces it, so that the trainer never waits for a look."""

    name: str
    step: int
    lasted: float = 0.0


class Watch:
    """Decides whether a run can go on; knows neither threads nor Ray.

    Args:
        options: the time limits.
        actors: who is alive, and who died (:func:`recipe.run_life.ray_life.actors`).
        engines: the engines that are there by now.
        answers: whether an engine lives.
        clock: seconds, from any start.
    """

    def __init__(
        self,
        options: WatchdogOptions,
        actors: Callable[[], tuple[list[Process], list[Death]]],
        engines: Callable[[], list[Engine]],
        answers: Callable[[Engine], bool | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options, self._actors, self._engines, self._answers, self._clock = options, actors, engines, answers, clock
        self._looked = clock()
        self._refused: dict[str, int] = {}
        self._now = _Phase(START, 0)
        self._first: int | None = None

    def enter(self, phase: str, step: int) -> None:
        """A phase begins. ``END`` is the last one, in which actors may go."""
        if phase == STEP and self._first is None:
            self._first = step
        self._now = _Phase(phase, step)

    def look(self) -> Verdict | None:
        """To be called every :data:`INTERVAL` seconds; ``None`` while the run can go on."""
        now = self._clock()
        phase = self._now
        phase.lasted += min(now - self._looked, STOPPED * INTERVAL)
        self._looked = now
        if phase.name != END:
            found = self.deaths()
            if found:
                return of_deaths(found, self.when())
        return self._of_time(phase)

    def deaths(self) -> list[Death]:
        """Whoever died so far, the first death first."""
        alive, dead = self._actors()
        servers = {process.actor: process for process in alive}
        for engine in self._engines():
            answer = self._answers(engine) if engine.actor in servers else True
            if answer is not None:
                self._refused[engine.address] = 0 if answer else self._refused.get(engine.address, 0) + 1
            if self._refused.get(engine.address, 0) >= REFUSALS:
                server = servers[engine.actor]
                said = f"its server on {engine.address} says that it is dead, or takes no connection any more"
                dead = [*dead, Death(server, f"vLLM's engine of {server}", said, 0.0)]
        return dead

    def _of_time(self, phase: _Phase) -> Verdict | None:
        long = phase.name in LONG or self._first in (None, phase.step)
        name = "long_phase_timeout" if long else "phase_timeout"
        limit = self.options.long_phase_timeout if long else self.options.phase_timeout
        if phase.lasted <= limit:
            return None
        reason = [("waited", self.when()), ("limit", f"{WATCHDOG}.{name}={limit:g} seconds; all actors are alive")]
        return Verdict(reason, None, f"if it is only slow, raise {WATCHDOG}.{name}; docs/troubleshooting.md, The run")

    def when(self) -> str:
        """Step and phase, and for how long."""
        phase = self._now
        step = f"step {phase.step}, " if phase.step else ""
        return f"{step}phase {phase.name}, {phase.lasted:.0f} s after its begin"


def of_deaths(found: list[Death], when: str) -> Verdict:
    """The verdict on deaths, of which there is one at least."""
    first, *others = found
    reason = [("died", first.what), ("cause", first.cause), ("when", when)]
    reason += [("also died", f"{death.what}: {death.cause}") for death in others[:3]]
    if others[3:]:
        reason.append(("also died", f"{len(others) - 3} more"))
    return Verdict(reason, first.who, "if it ran out of memory, give it more before: docs/troubleshooting.md, The run")


def checkpoint_remedy(config: DictConfig) -> str:
    """What the same command would do now."""
    trainer = config.trainer
    beginning = "the same command starts from the beginning"
    if trainer.resume_mode == "disable":
        return f"{beginning}: trainer.resume_mode=disable"
    folder = Path(trainer.default_local_dir).absolute()
    found = [checkpoint for checkpoint in checkpoints(folder) if checkpoint.state is not None]
    if not found:
        saves = "" if trainer.save_freq > 0 else f"; trainer.save_freq={trainer.save_freq} saves none"
        return f"{beginning}: no checkpoint of a finished step is in {folder}{saves}"
    return f"the same command carries on after step {found[-1].step}, from {found[-1].path}"


def message(verdict: Verdict, config: DictConfig, stack: list[str]) -> str:
    """What the user reads."""
    said = ["", "grail_advantage watchdog: this run cannot go on and ends now."]
    said += [f"  {heading:<10} {text}" for heading, text in verdict.reason]
    killed = kernel_kills() - _KILLED_BEFORE
    if killed:
        said.append(
            f"  {'memory':<10} the kernel killed {killed} process(es) of this machine for memory since the start"
        )
    if verdict.whose_log is not None:
        path, lines = ray_life.last_lines(verdict.whose_log, LINES)
        where = f"{path} on {verdict.whose_log.node}" if path else "out of reach"
        said += [f"  {'its log':<10} {where}", *(f"    | {line[:300]}" for line in lines)]
    if stack:
        said += [f"  {'trainer':<10} waits in", *(f"    | {line}" for line in stack)]
    said.append(f"  {'what now':<10} {checkpoint_remedy(config)}")
    said.append(f"  {'':<10} {verdict.remedy}")
    return "\n".join(said)


def stack_of(thread: int) -> list[str]:
    """Where a thread is, in a few lines, the innermost last."""
    frame: FrameType | None = sys._current_frames().get(thread)
    if frame is None:
        return []
    calls = traceback.extract_stack(frame)
    ours = [call for call in calls if "/ray/" not in call.filename and not call.filename.startswith("<")]
    return [f"{call.name}, {call.filename}:{call.lineno}" for call in ours[-8:]]


def kernel_kills() -> int:
    """How many processes the kernel has killed for memory on this machine since it was started."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


_KILLED_BEFORE = kernel_kills()


class Watchdog:
    """The thread that looks. One for a run, in the trainer's process."""

    def __init__(self, options: WatchdogOptions, trainer: WatchedTrainer) -> None:
        self._trainer = trainer
        self.watch = Watch(options, ray_life.actors, trainer._engines, ray_life.engine_answers)
        self._thread_of_trainer = threading.get_ident()
        threading.Thread(target=self._run, name="grail_advantage watchdog", daemon=True).start()

    def enter(self, phase: str) -> None:
        """See :meth:`Watch.enter`."""
        self._thread_of_trainer = threading.get_ident()
        self.watch.enter(phase, getattr(self._trainer, "global_steps", 0))

    def failed(self) -> None:
        """The trainer ends by an error. Where that is due to a death, the driver says so when it ends."""
        when = self.watch.when()
        self.enter(END)
        deadline = time.monotonic() + NOTICE_SECONDS
        # Whatever fails here, the trainer's own error is what counts.
        with suppress(Exception):
            while not (found := self.watch.deaths()) and time.monotonic() < deadline:
                time.sleep(0.5)
            if found:
                ray_life.tell(Words(self._message(of_deaths(found, when), stack=[]), now=False))

    def _run(self) -> None:
        while True:
            time.sleep(INTERVAL)
            try:
                verdict = self.watch.look()
            except Exception:
                # Ray's control service is away. If it stays away, Ray ends this process.
                continue
            if verdict is not None:
                self._end(verdict)

    def _message(self, verdict: Verdict, stack: list[str]) -> str:
        return message(verdict, self._trainer.config, stack)

    def _end(self, verdict: Verdict) -> None:
        said = self._message(verdict, stack_of(self._thread_of_trainer))
        closing = threading.Thread(target=self._trainer._close, daemon=True)
        closing.start()
        closing.join(CLOSING_SECONDS)
        try:
            ray_life.tell(Words(said, now=True))
            time.sleep(DRIVER_SECONDS)
        finally:
            reaper.say(said)
            os._exit(1)


class WatchedTrainer:
    """Mixin for verl's v1 trainers: their phases, as the watchdog sees them.

    ``PPOTrainer.fit``, ``step`` and ``_step_once`` call each of these methods.
    """

    config: DictConfig
    _watchdog: Watchdog | None = None

    def _enter(self, phase: str) -> None:
        if self._watchdog is not None:
            self._watchdog.enter(phase)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self._watchdog is not None:
                self._watchdog.failed()
            raise

    def _engines(self) -> list[Engine]:
        """The rollout's engines that run, where they are vLLM's."""
        if self.config.actor_rollout_ref.rollout.name != "vllm":
            return []
        replicas = [replica for manager in self._rollout_server_managers() for replica in manager.get_replicas()]
        return [Engine(replica.server_handle._actor_id.hex(), replica.server_address) for replica in replicas]

    def _close(self) -> None:
        """What is to be written before a run ends that hangs."""
        tracking = getattr(self, "logger", None)
        if tracking is not None:
            tracking.finish(exit_code=1)

    # ------------------------------------------------------------------------------------------------------- verl's stages

    def init(self) -> None:
        options = watchdog_options(self.config)
        if options is not None:
            self._watchdog = Watchdog(options, self)
        with self._watched():
            super().init()

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        with self._watched():
            result = super().fit(*args, **kwargs)
        self._enter(END)
        return result

    def _validate(self) -> dict[str, float]:
        self._enter("testing")
        metrics = super()._validate()
        self._enter(REST)
        return metrics

    def _save_checkpoint(self) -> None:
        self._enter("save_checkpoint")
        super()._save_checkpoint()
        self._enter(REST)

    def on_step_begin(self) -> None:
        self._enter(STEP)
        super().on_step_begin()

    def on_sample_begin(self) -> None:
        self._enter("gen")
        super().on_sample_begin()

    def on_sample_end(self) -> None:
        self._enter(REST)
        super().on_sample_end()

    def _compute_old_log_prob(self, *args: Any, **kwargs: Any) -> Any:
        self._enter("old_log_prob")
        return super()._compute_old_log_prob(*args, **kwargs)

    def _compute_ref_log_prob(self, *args: Any, **kwargs: Any) -> Any:
        self._enter("ref")
        return super()._compute_ref_log_prob(*args, **kwargs)

    def _compute_advantage(self, *args: Any, **kwargs: Any) -> Any:
        self._enter("adv")
        return super()._compute_advantage(*args, **kwargs)

    def _update_actor(self, *args: Any, **kwargs: Any) -> Any:
        self._enter("update_actor")
        return super()._update_actor(*args, **kwargs)

    def on_step_end(self) -> None:
        self._enter("update_weights")
        super().on_step_end()
        self._enter(REST)
