"""The soak: its plan, what it makes of its records, and that its page is the one written from them."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import soak


@pytest.mark.parametrize("steps", [300, 1000])
def test_the_plan_strikes_every_place_once_between_two_checkpoints(steps: int) -> None:
    plan = soak.kill_plan(steps)
    every = int(soak.KNOBS["SAVE_FREQ"])
    assert [place for _, place in plan] == list(soak.KILLED)
    numbers = [step for step, _ in plan]
    assert all(step % every == every // 2 for step in numbers)
    assert all(later - earlier >= 2 * every for earlier, later in itertools.pairwise(numbers))
    assert numbers[-1] < steps - every


@pytest.mark.parametrize(
    ("name", "role"),
    [
        (".venv/bin/python -m recipe.main_grail --config-name cpu_trainer", "driver"),
        ("ray::TaskRunnerV1.run", "trainer"),
        ("ray::WorkerDict.actor_rollout_update_actor", "actor worker"),
        ("ray::CpuVLLMHttpServer", "rollout server"),
        ("VLLM::EngineCore", "rollout engine"),
        ("ray::SeededAgentLoopWorker", "agent loop worker"),
        ("ray::RewardLoopWorker.compute_score", "reward worker"),
        ("ray::SimpleStorageUnit", "TransferQueue"),
        ("ray::IDLE", "Ray"),
        ("/x/site-packages/ray/core/src/ray/raylet/raylet --raylet_socket_name=/tmp", "Ray"),
        ("bash scripts/train_cpu.sh", "rest"),
    ],
)
def test_processes_are_known_by_what_they_call_themselves(name: str, role: str) -> None:
    assert soak.role_of(SimpleNamespace(cmdline=lambda: name.split())) == role


def test_memory_of_this_process() -> None:
    share = soak.proportional_share(os.getpid())
    held = np.ones(64 << 20, dtype=np.uint8)
    assert 50 < soak.proportional_share(os.getpid()) - share < 80
    del held
    assert soak.proportional_share(2**22 + 1) == 0.0


def test_slope_is_that_of_all_lives_together() -> None:
    """Two lives with another level each and the same slope, 0.5 MiB a step; what grows in the first steps does not count."""
    memory = [
        {
            "seconds": 100 * life + step,
            "life": life,
            "step": first + step,
            "role": role,
            "mebibytes": level + 0.5 * step - (50 if step <= soak.WARM_UP else 0),
        }
        for life, first, level in ((1, 0, 100.0), (2, 30, 300.0))
        for step in range(40)
        for role in ("driver", "rest")
    ]
    memory += [{"seconds": 10_000, "life": 1, "step": 39, "role": "driver", "mebibytes": 0.0}]  # killed by then
    memory += [{"seconds": 199.5, "life": 2, "step": 69, "role": "driver", "mebibytes": 0.0}]  # not yet begun
    known = {"killed_at": None, "ended": 5000.0}
    lives = [
        {"number": 1, "resumed_from": 0, "first_step_at": 100.0, **known},
        {"number": 2, "resumed_from": 30, "first_step_at": 200.0, **known},
    ]
    found = {slope.role: slope for slope in soak.slopes(memory, lives)}
    assert set(found) == {"driver", "rest", "all"}
    assert found["driver"].a_hundred_steps == pytest.approx(50)
    assert found["all"].a_hundred_steps == pytest.approx(100)
    assert found["driver"].error == pytest.approx(0, abs=1e-9)


def test_slope_and_its_error_are_those_of_a_straight_line() -> None:
    """For one life, as numpy fits it."""
    generator = np.random.default_rng(0)
    steps = np.arange(11, 100)
    values = 100 + 0.2 * steps + generator.normal(size=len(steps))
    memory = [
        {"seconds": i, "life": 1, "step": step, "role": "driver", "mebibytes": value}
        for i, (step, value) in enumerate(zip(steps.tolist(), values.tolist(), strict=True))
    ]
    life = {"number": 1, "resumed_from": 0, "first_step_at": -1.0, "killed_at": 200.0, "ended": 200.0}
    found = soak.slopes(memory, [life])[0]
    counted = len(steps) - 1 - int(soak.ENDING)
    (slope, _), covariance = np.polyfit(steps[:counted], values[:counted], 1, cov=True)
    assert found.a_hundred_steps == pytest.approx(100 * slope)
    assert found.error == pytest.approx(100 * np.sqrt(covariance[0, 0]))


@pytest.mark.parametrize(
    ("numbers", "wrong"),
    [
        ([0, 1, 2, 3], []),
        ([0, 1, 1, 2, 3], ["steps twice: [1]", "steps missing: []", "in order: True"]),
        ([0, 1, 3], ["steps twice: []", "steps missing: [2]", "in order: True"]),
        ([0, 2, 1, 3], ["steps twice: []", "steps missing: []", "in order: False"]),
    ],
)
def test_history(numbers: list[int], wrong: list[str]) -> None:
    assert soak.problems([{"step": number} for number in numbers], 3) == wrong


def test_lost_seconds() -> None:
    """Ended 7 s after the kill behind step 15; the next life logs step 11 after 70 s and takes 2 s a step: 15 in 8 s more."""
    killed = {"killed_at": 100.0, "ended": 107.0, "last_step": 15}
    following = {"resumed_from": 10, "started": 300.0, "first_step_at": 370.0}
    assert soak.lost_seconds(killed, following, 2.0) == 85.0


def test_steps_of_a_file_that_is_being_written(tmp_path: Path) -> None:
    assert soak.logged_steps(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert soak.logged_steps(tmp_path) == [0, 1]


def test_a_soak_that_was_stopped_goes_on(tmp_path: Path) -> None:
    description, records = soak._begun(tmp_path, 300, 10.0, 5)
    assert records == soak.Records() and len(description["kills"]) == 5
    records.lives.append(soak.Life(1, 2.5, killed="driver", killed_at=7.25, last_step=35, status=1, message="a, b"))
    records.memory.append(soak.Memory(5.0, 1, 3, "driver", 1, 12.5))
    soak._save(tmp_path, records)
    assert soak._begun(tmp_path, 300, 10.0, 5) == (json.loads((tmp_path / "plan.json").read_text()), records)


def test_messages_are_plain() -> None:
    assert soak._plain("\x1b[36m(TaskRunner pid=12, ip=1.2.3.4)\x1b[0m an `actor` died") == "an 'actor' died"
    assert soak._plain("the run (pid=3) ended") == "the run (pid=3) ended"


def test_steps_of_two_lives_are_compared(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for first, value in ((1, 1.0), (3, 1.0), (4, 2.0)):
        writer = SummaryWriter(str(tmp_path), filename_suffix=f".{first}")
        for step in range(first, 6):
            writer.add_scalar("loss", value * step, step)
            writer.add_scalar("timing_s/step", first, step)
            writer.add_scalar("reward", step, step)
        writer.close()
    assert soak.twice(tmp_path) == [
        {"first": 3, "last": 5, "values": 6, "differing": 0, "names": ""},
        {"first": 4, "last": 5, "values": 4, "differing": 2, "names": "loss"},
    ]


class TestRecorded:
    """What ``docs/soak/`` holds."""

    def test_the_page_is_current(self) -> None:
        assert soak.page_of_records() == (soak.PAGE / "README.md").read_text()
        assert (soak.PAGE / "soak.png").read_bytes().startswith(b"\x89PNG")

    def test_steps_that_were_taken_again_are_the_same_bit_for_bit(self) -> None:
        again = soak._read("twice.csv")
        assert len(again) >= 5 and sum(row["values"] for row in again) > 1000
        assert [row for row in again if row["differing"]] == []

    def test_the_history_is_one_runs(self) -> None:
        steps = soak._read("steps.csv")
        assert soak.problems(steps, len(steps) - 1) == [] and len(steps) > 300

    def test_every_place_was_struck(self) -> None:
        lives = soak._read("lives.csv")
        kills = json.loads((soak.PAGE / "plan.json").read_text())["kills"]
        assert len(kills) >= 5 and {life["killed"] for life in lives} - {None} == {place for _, place in kills}
        assert lives[-1]["status"] == 0
