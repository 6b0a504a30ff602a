"""When the watch ends a run, when it does not, and the message; without verl and Ray."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.run_life import watch
from recipe.run_life.actors import Death
from recipe.run_life.watch import END, INTERVAL, STEP, Options, RunEnded, Watchdog

LIMITS = Options(phase_timeout=100, long_phase_timeout=1000)
WORKER = Death("WorkerDict, process 22 on 10.0.0.2", "connection error code 2", 22, "10.0.0.2")
SERVER = Death("vLLMHttpServer vllm_server_0_0, process 11 on 10.0.0.1", "gone", 11, "10.0.0.1")


def _config(folder: str | Path = "/nowhere", **trainer: Any) -> Any:
    settings = {"default_local_dir": str(folder), "resume_mode": "auto", "save_freq": 10, **trainer}
    return OmegaConf.create({"trainer": settings, "run_life": vars(LIMITS)})


@pytest.fixture(autouse=True)
def _logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "last_lines", lambda death, count: (f"/logs/worker-{death.pid}.err", ["one", "x" * 500]))


class Scene:
    """A run as the watch sees it, with time that passes as told."""

    def __init__(self) -> None:
        self.now = 5000.0
        self.dead: list[Death] = []
        self.watch = Watchdog(_config(), lambda: self.dead, lambda: self.now)

    def look_for(self, seconds: float) -> str | None:
        """Look every few seconds; the first verdict."""
        end = self.now + seconds
        while self.now < end:
            self.now += INTERVAL
            verdict = self.watch.look()
            if verdict is not None:
                return verdict
        return None

    def into(self, step: int, phase: str) -> None:
        """Up to a phase of a step."""
        self.watch.enter(STEP, step)
        self.watch.enter(phase, step)


class TestTime:
    def test_a_phase_without_an_end_ends_the_run_and_names_the_option(self) -> None:
        scene = Scene()
        scene.into(1, "gen")
        scene.into(2, "update_actor")
        assert scene.look_for(LIMITS.phase_timeout) is None
        verdict = scene.look_for(2 * INTERVAL)
        assert "waited     step 2, phase update_actor, 105 s" in verdict
        assert "run_life.phase_timeout=100 seconds; all actors are alive" in verdict

    def test_start_first_step_validation_and_checkpoints_may_take_longer(self) -> None:
        scene, first = Scene(), 41
        assert scene.look_for(LIMITS.long_phase_timeout) is None
        scene.watch.enter("testing", first - 1)
        assert scene.look_for(LIMITS.long_phase_timeout) is None
        scene.into(first, "gen")
        assert scene.look_for(LIMITS.long_phase_timeout) is None
        scene.into(first + 1, "save_checkpoint")
        assert scene.look_for(LIMITS.long_phase_timeout) is None
        assert "run_life.long_phase_timeout=1000" in scene.look_for(2 * INTERVAL)

    def test_a_machine_that_was_suspended_is_not_blamed(self) -> None:
        scene = Scene()
        scene.into(1, "gen")
        scene.into(2, "gen")
        scene.now += 36_000
        assert scene.watch.look() is None
        assert scene.look_for(LIMITS.phase_timeout - 50) is None
        assert scene.look_for(60) is not None


class TestDeaths:
    def test_the_first_one_is_named_with_its_cause_and_the_others_follow(self) -> None:
        scene = Scene()
        scene.into(7, "gen")
        scene.dead = [WORKER, SERVER]
        text = scene.look_for(60)
        for line in (
            "died       WorkerDict, process 22 on 10.0.0.2",
            "cause      connection error code 2",
            "when       step 7, phase gen, 5 s after it began",
            "also died  vLLMHttpServer vllm_server_0_0, process 11 on 10.0.0.1: gone",
            "its log    /logs/worker-22.err on 10.0.0.2",
        ):
            assert f"\n  {line}\n" in text

    def test_what_goes_after_the_training_is_meant_to(self) -> None:
        """And that has a limit, too."""
        scene = Scene()
        scene.into(8, "gen")
        scene.into(9, "gen")
        scene.watch.enter(END, 9)
        scene.dead = [WORKER]
        assert scene.look_for(60) is None
        assert "phase end" in scene.look_for(LIMITS.phase_timeout)


class TestGuard:
    """The trainer's error is the cause that the watch or a death gives."""

    def test_a_trainer_that_waits_is_interrupted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In a lock, as verl's, and though Ctrl-C is ignored."""
        monkeypatch.setattr(watch, "INTERVAL", 0.05)
        monkeypatch.setattr(watch.os, "_exit", lambda status: None)
        scene = Scene()
        scene.dead = [WORKER]
        with pytest.raises(RunEnded, match="died       WorkerDict, process 22") as ended, scene.watch.guard():
            scene.watch.begin()
            threading.Event().wait(30)
        assert isinstance(ended.value.__cause__, KeyboardInterrupt)

    def test_an_error_after_a_death_names_it(self) -> None:
        scene = Scene()
        scene.into(3, "old_log_prob")
        scene.dead = [WORKER]
        with (
            pytest.raises(RunEnded, match=r"died       WorkerDict(.*\n)+.*step 3, phase old_log_prob"),
            scene.watch.guard(),
        ):
            raise OSError("a rank does not answer")

    def test_any_other_error_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(watch, "NOTICE_SECONDS", 0.0)
        with pytest.raises(OSError, match="full"), Scene().watch.guard():
            raise OSError("the disk is full")
