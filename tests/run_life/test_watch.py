"""When the watchdog ends a run, when it does not, and what it says; without verl, and with Ray only where a test says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from ray.core.generated.common_pb2 import ActorDeathCause, ActorDiedErrorContext

from grail_advantage.verl_ext.settings import WatchdogOptions, watchdog_options
from recipe.run_life import ray_life
from recipe.run_life import watch as watchdog
from recipe.run_life.checkpoints import write_state
from recipe.run_life.ray_life import Death, Engine, Process
from recipe.run_life.watch import END, INTERVAL, REST, STEP, Watch, WatchedTrainer, message

LIMITS = WatchdogOptions(phase_timeout=100, long_phase_timeout=1000)
SERVER = Process("a1", "vLLMHttpServer vllm_server_0_0", "10.0.0.1", "n1", 11)
WORKER = Process("b2", "WorkerDict", "10.0.0.2", "n2", 22)
ENGINE = Engine("a1", "10.0.0.1:8000")


class Scene:
    """A run as the watchdog sees it, with time that passes as told."""

    def __init__(self) -> None:
        self.now = 5000.0
        self.alive: list[Process] = [SERVER, WORKER]
        self.dead: list[Death] = []
        self.engine: bool | None = True
        self.watch = Watch(
            LIMITS, lambda: (self.alive, self.dead), lambda: [ENGINE], lambda _: self.engine, lambda: self.now
        )

    def look_for(self, seconds: float) -> watchdog.Verdict | None:
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


def _text(verdict: watchdog.Verdict | None) -> str:
    assert verdict is not None
    return "\n".join(f"{heading} {text}" for heading, text in [*verdict.reason, ("", verdict.remedy)])


class TestTime:
    def test_a_run_that_goes_on_may_take_as_long_as_it_likes(self) -> None:
        scene = Scene()
        for step in range(1, 50):
            scene.into(step, "gen")
            assert scene.look_for(60) is None
            scene.watch.enter("update_actor", step)
            assert scene.look_for(90) is None

    def test_a_phase_without_an_end_ends_the_run_and_names_the_option(self) -> None:
        scene = Scene()
        scene.into(1, "gen")
        scene.into(2, "update_actor")
        assert scene.look_for(LIMITS.phase_timeout) is None
        verdict = scene.look_for(2 * INTERVAL)
        assert "waited step 2, phase update_actor, 105 s" in _text(verdict)
        assert "algorithm.watchdog.phase_timeout=100 seconds; all actors are alive" in _text(verdict)
        assert "raise algorithm.watchdog.phase_timeout" in _text(verdict)

    @pytest.mark.parametrize("first", [1, 41], ids=["new", "resumed"])
    def test_start_first_step_validation_and_checkpoints_may_take_longer(self, first: int) -> None:
        scene = Scene()
        assert scene.look_for(LIMITS.long_phase_timeout) is None
        scene.watch.enter("testing", first - 1)
        assert scene.look_for(LIMITS.long_phase_timeout) is None
        scene.watch.enter(REST, first - 1)
        scene.into(first, "gen")
        assert scene.look_for(LIMITS.long_phase_timeout) is None
        scene.into(first + 1, "save_checkpoint")
        assert scene.look_for(LIMITS.long_phase_timeout) is None
        assert "algorithm.watchdog.long_phase_timeout=1000" in _text(scene.look_for(2 * INTERVAL))
        scene.watch.enter(REST, first + 1)
        assert "algorithm.watchdog.phase_timeout=100 " in _text(scene.look_for(120))

    def test_a_machine_that_was_suspended_is_not_blamed(self) -> None:
        scene = Scene()
        scene.into(1, "gen")
        scene.into(2, "gen")
        scene.now += 36_000
        assert scene.watch.look() is None
        assert scene.look_for(LIMITS.phase_timeout - 50) is None
        assert scene.look_for(60) is not None

    def test_the_end_has_a_limit_too(self) -> None:
        scene = Scene()
        scene.into(1, "gen")
        scene.into(2, "gen")
        scene.watch.enter(END, 3)
        assert "phase end" in _text(scene.look_for(LIMITS.phase_timeout + 2 * INTERVAL))


class TestDeaths:
    def test_the_first_death_is_named_with_its_cause_and_the_others_follow(self) -> None:
        scene = Scene()
        scene.into(7, "gen")
        scene.dead = [
            Death(WORKER, str(WORKER), "connection error code 2", 1.0),
            Death(SERVER, str(SERVER), "gone", 2.0),
        ]
        text = _text(scene.look_for(60))
        assert "died WorkerDict, process 22 on 10.0.0.2" in text
        assert "cause connection error code 2" in text
        assert "when step 7, phase gen, 5 s" in text
        assert "also died vLLMHttpServer vllm_server_0_0, process 11 on 10.0.0.1: gone" in text

    def test_what_goes_after_the_training_is_meant_to(self) -> None:
        scene = Scene()
        scene.watch.enter(END, 9)
        scene.dead = [Death(WORKER, str(WORKER), "connection error code 2", 1.0)]
        assert scene.look_for(60) is None

    def test_an_engine_is_dead_when_its_server_says_so_twice(self) -> None:
        scene = Scene()
        scene.into(2, "gen")
        scene.engine = False
        assert scene.watch.look() is None
        scene.engine = True
        assert scene.watch.look() is None
        scene.engine = False
        assert scene.watch.look() is None
        text = _text(scene.watch.look())
        assert "died vLLM's engine of vLLMHttpServer vllm_server_0_0, process 11 on 10.0.0.1" in text
        assert "10.0.0.1:8000" in text

    def test_a_server_that_is_too_busy_to_answer_is_alive(self) -> None:
        scene = Scene()
        scene.into(2, "gen")
        scene.engine = None
        assert scene.look_for(90) is None

    def test_the_engine_of_a_server_that_was_ended_is_nobodys_business(self) -> None:
        scene = Scene()
        scene.into(2, "gen")
        scene.alive, scene.engine = [WORKER], False
        assert scene.look_for(90) is None


def _died(reason: str, text: str) -> ActorDeathCause:
    context = ActorDiedErrorContext(reason=ActorDiedErrorContext.Reason.Value(reason), error_message=text)
    return ActorDeathCause(actor_died_error_context=context)


class TestCauses:
    @pytest.mark.parametrize("reason", ["RAY_KILL", "OUT_OF_SCOPE", "REF_DELETED", "OWNER_DIED"])
    def test_meant(self, reason: str) -> None:
        assert ray_life.cause_of(_died(reason, "The actor is dead because ...")) is None

    def test_an_actor_that_ended_itself(self) -> None:
        assert ray_life.cause_of(_died("WORKER_DIED", "Worker exit type: INTENDED_USER_EXIT ...")) is None

    def test_not_meant(self) -> None:
        text = "The actor is dead because its worker process has died. Worker exit\ntype: SYSTEM_ERROR"
        text += " Some common causes include: (1) the process was killed"
        assert (
            ray_life.cause_of(_died("WORKER_DIED", text))
            == "its worker process has died. Worker exit type: SYSTEM_ERROR"
        )
        assert ray_life.cause_of(_died("NODE_DIED", "lost")) == "its node is gone: lost"

    def test_without_memory_start_or_place(self) -> None:
        cause = ActorDeathCause()
        cause.oom_context.error_message = "usage 0.96"
        assert ray_life.cause_of(cause) == "killed by Ray because its node ran out of memory: usage 0.96"
        cause = ActorDeathCause()
        cause.actor_unschedulable_context.error_message = "no node has 8 GPUs"
        assert ray_life.cause_of(cause) == "no node has 8 GPUs"
        assert ray_life.cause_of(ActorDeathCause()) is None


def _config(folder: Path, **trainer: Any) -> Any:
    settings = {"default_local_dir": str(folder), "resume_mode": "auto", "save_freq": 10, **trainer}
    return OmegaConf.create({"trainer": settings, "algorithm": {"watchdog": {"phase_timeout": 3}}})


class TestMessage:
    def test_what_to_do_follows_the_checkpoints(self, tmp_path: Path) -> None:
        assert "no checkpoint of a finished step" in watchdog.checkpoint_remedy(_config(tmp_path))
        assert "save_freq=-1 saves none" in watchdog.checkpoint_remedy(_config(tmp_path, save_freq=-1))
        for step in (10, 20):
            (tmp_path / f"global_step_{step}").mkdir()
        write_state(tmp_path / "global_step_10", {"step": 10})
        said = watchdog.checkpoint_remedy(_config(tmp_path))
        assert said == f"the same command carries on after step 10, from {tmp_path / 'global_step_10'}"
        assert "resume_mode=disable" in watchdog.checkpoint_remedy(_config(tmp_path, resume_mode="disable"))

    def test_log_and_place_stand_in_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ray_life, "last_lines", lambda who, count: ("/logs/worker-22.err", ["one", "x" * 500]))
        verdict = watchdog.of_deaths([Death(WORKER, str(WORKER), "SIGKILL", 1.0)], "step 3")
        said = message(verdict, _config(tmp_path), ["sample, replay_buffer.py:503"])
        assert "    | one\n" in said and "x" * 300 + "\n" in said and "x" * 301 not in said
        assert "/logs/worker-22.err on 10.0.0.2" in said and "    | sample, replay_buffer.py:503" in said
        assert said.startswith("\ngrail_advantage watchdog: this run cannot go on and ends now.\n")


class TestOptions:
    def test_defaults(self) -> None:
        assert watchdog_options(OmegaConf.create({"algorithm": {}})) == WatchdogOptions(7200, 14400)

    def test_off(self) -> None:
        assert watchdog_options(OmegaConf.create({"algorithm": {"watchdog": {"enabled": False}}})) is None

    @pytest.mark.parametrize(
        ("name", "value"),
        [("enabled", "perhaps"), ("phase_timeout", 0), ("phase_timeout", None), ("long_phase_timeout", float("nan"))],
    )
    def test_refused_with_the_option(self, name: str, value: Any) -> None:
        with pytest.raises(ValueError, match=rf"algorithm\.watchdog\.{name}="):
            watchdog_options(OmegaConf.create({"algorithm": {"watchdog": {name: value}}}))


class _Base:
    """Calls what ``PPOTrainer.fit`` calls, in its order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def fit(self) -> None:
        self._validate()
        self.on_step_begin()
        self.on_sample_begin()
        self.on_sample_end()
        for stage in (
            self._compute_old_log_prob,
            self._compute_ref_log_prob,
            self._compute_advantage,
            self._update_actor,
        ):
            stage()
        self._save_checkpoint()
        self.on_step_end()

    def _stage(self) -> None:
        self.seen.append(self.phases[-1])

    on_step_begin = on_sample_begin = on_sample_end = on_step_end = _validate = _save_checkpoint = _stage
    _compute_old_log_prob = _compute_ref_log_prob = _compute_advantage = _update_actor = _stage


class _Trainer(WatchedTrainer, _Base):
    def __init__(self) -> None:
        self.phases: list[str] = []
        super().__init__()

    def _enter(self, phase: str) -> None:
        self.phases.append(phase)


def test_each_stage_of_verls_runs_in_the_phase_that_verl_times_it_as() -> None:
    trainer = _Trainer()
    trainer.fit()
    steps = [STEP, "gen", REST, "old_log_prob", "ref", "adv", "update_actor", "save_checkpoint", "update_weights"]
    assert trainer.seen == ["testing", *steps]
    assert trainer.phases[-2:] == [REST, END]
