"""A real verl run of which the kernel kills the rollout engine, as it does where memory runs short."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run_life.killed_run import KilledRun, send

BOUND = 150.0
"""Seconds until the run is to have ended: two looks of the watch, and Ray's shutdown."""


@pytest.mark.slow
def test_a_killed_engine_ends_the_run_which_names_it_and_leaves_no_process(tmp_path: Path) -> None:
    run = KilledRun(tmp_path)
    try:
        run.await_step(2)
        engine, server = run.find("engine"), run.find("server")
        send(engine, "SIGKILL")
        run.end(BOUND)
    finally:
        run.kill_all()
    assert run.result.returncode == 1
    said = run.result.stderr
    message = said[said.index("grail_advantage watchdog: this run cannot go on and ends now.") :]
    assert f"vLLM's engine of CpuVLLMHttpServer, process {server} on " in message
    assert f"(EngineCore pid={engine})" in message or "engine core exited unexpectedly" in message, message
    assert "the same command resumes after step " in message and str(tmp_path / "checkpoints") in message
