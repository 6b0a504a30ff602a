"""The CPU example started again and again, with a stand-in for everything that takes time: what it keeps and what it moves
away."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from recipe.tiny.agent import MAX_TURNS
from tests.recipe.test_launch_scripts import ODD_NAMES, PRINTS
from tests.run_life.killed_run import lives

ROOT = Path(__file__).parents[2]
STAND_IN = """#!/usr/bin/env bash
# Each call is a line of calls.txt; the trainer "trains" up to the step in steps.txt; at 99 it does not end.
echo "$*" >>calls.txt
case "$2" in
recipe.tiny.prepare)
    mkdir -p out/seed0 && cat model.txt >out/seed0/warm_up.json ;;
recipe.main_grail)
    [[ ${DRY_RUN:-0} == 1 ]] && exit 0
    step=$(<steps.txt)
    echo "a life"
    for ((i = 1; i <= step; i++)); do echo "{\\"step\\": $i, \\"data\\": {}}"; done >"$VERL_FILE_LOGGER_PATH"
    mkdir -p out/seed0/grail/checkpoints/global_step_"$step"
    if [[ $step == 99 ]]; then exec flock --no-fork out/seed0/grail/checkpoints/.run.lock sleep 300; fi
    echo "already finished: a checkpoint"
    ;;
recipe.run_report)
    [[ $3 == summary ]] && echo "the summary"
    while [[ $3 == watch ]] && kill -0 "$6" 2>/dev/null; do sleep 0.1; done
    ;;
grail_advantage.report) echo report.html ;;
esac
"""


class Project:
    """The scripts in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "examples").mkdir()
        (folder / "scripts").mkdir()
        (folder / ".venv/bin").mkdir(parents=True)
        examples = ("examples/run_tiny_cpu_grail.sh", "examples/run_tiny_cpu_agent.sh")
        for name in (*examples, *(f"scripts/{n}.sh" for n in self.scripts)):
            (folder / name).write_text((ROOT / name).read_text())
        (folder / "scripts/setup_cpu.sh").write_text("")
        (folder / ".venv/bin/python").write_text(STAND_IN)
        (folder / ".venv/bin/python").chmod(0o755)
        (folder / "model.txt").write_text("a model")
        self.steps = 20

    scripts = ("train_cpu", "launch")
    example = "grail"

    def start(self, *arguments: str, **knobs: str) -> subprocess.CompletedProcess[str]:
        running = self.begin(*arguments, **knobs)
        stdout, stderr = running.communicate(timeout=60)
        return subprocess.CompletedProcess(running.args, running.returncode, stdout, stderr)

    def begin(self, *arguments: str, **knobs: str) -> subprocess.Popen[str]:
        (self.folder / "steps.txt").write_text(str(self.steps))
        return subprocess.Popen(
            ["bash", f"examples/run_tiny_cpu_{self.example}.sh", *arguments],
            cwd=self.folder,
            env={"PATH": "/usr/bin:/bin", "OUTPUT_DIR": str(self.folder / "out"), **knobs},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def children_at(self, running: subprocess.Popen[str], file: str) -> list[psutil.Process]:
        """The processes of a run as soon as it has made a file."""
        deadline = time.monotonic() + 30
        while not (self.run_dir / file).exists():
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        return psutil.Process(running.pid).children(recursive=True)

    @property
    def run_dir(self) -> Path:
        return self.folder / "out/seed0/grail"

    def trained(self) -> list[str]:
        """The trainer's calls."""
        return [line for line in (self.folder / "calls.txt").read_text().splitlines() if "recipe.main_grail" in line]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_a_second_start_keeps_everything_and_says_that_the_run_is_finished(project: Project) -> None:
    assert project.start().returncode == 0
    (call,) = project.trained()
    options = call.split()
    assert "trainer.save_freq=4" in options and "trainer.max_actor_ckpt_to_keep=2" in options
    assert f"trainer.default_local_dir='{project.run_dir}/checkpoints'" in options
    assert not [option for option in options if option.startswith(("trainer.resume_mode", "trainer.del_"))]
    kept = [project.run_dir / name / "of the first" for name in ("tensorboard", "tokens")]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    again = project.start()
    assert again.returncode == 0, again.stderr
    assert "already finished: a checkpoint\n" in again.stdout and "the summary\n" in again.stdout
    assert all(path.exists() for path in kept)
    assert (project.run_dir / "train.log").read_text().count("a life") == 2


def test_any_folder_arrives_as_it_is(tmp_path: Path) -> None:
    """The project's, with and without an output folder of the same name."""
    parser = OverridesParser.create()
    for number, name in enumerate(filter(None, ODD_NAMES)):
        (tmp_path / name).mkdir()
        project = Project(tmp_path / name)
        project.example = ("grail", "agent")[number % 2]
        (project.folder / ".venv/bin/python").write_text(Path(PRINTS).read_text())
        done = project.start(DRY_RUN="1", OUTPUT_DIR=f"out/{name}")
        assert done.returncode == 0, done.stderr
        told = done.stdout.removesuffix("\0").split("\0")[5:]
        given = {each.key_or_group: each.value() for each in parser.parse_overrides(told)}
        data, method = f"out/{name}/seed0", ("grail", "turn_rloo")[number % 2]
        tools = f"{project.folder}/recipe/tiny/agent_tools.yaml" if number % 2 else None
        wanted = {
            "data.train_files": f"{data}/train.parquet",
            "data.val_files": f"{data}/validation.parquet",
            "actor_rollout_ref.model.path": f"{data}/model",
            "actor_rollout_ref.rollout.multi_turn.tool_config_path": tools,
            "algorithm.token_dump.folder": f"{project.folder}/{data}/{method}/tokens",
            "trainer.default_local_dir": f"{data}/{method}/checkpoints",
            "hydra.run.dir": f"{data}/{method}/hydra",
        }
        assert {key: given.get(key) for key in wanted} == wanted, name


def test_fresh_moves_the_earlier_run_away(project: Project) -> None:
    first = project.start(FRESH="1")
    assert first.returncode == 0 and "FRESH=1" not in first.stderr, "there is no earlier run"
    (project.run_dir / "mine").write_text("")
    for number in (1, 2):
        fresh = project.start(FRESH="1")
        assert fresh.returncode == 0, fresh.stderr
        assert f"FRESH=1: the earlier run is in {project.run_dir}.{number} now" in fresh.stderr
    assert (Path(f"{project.run_dir}.1") / "mine").exists()
    assert not (project.run_dir / "mine").exists() and not (Path(f"{project.run_dir}.2") / "mine").exists()
    # A model made anew, by another version of the example, say, would be mixed with the old one's checkpoints.
    (project.folder / "model.txt").write_text("another model")
    refused = project.start()
    assert refused.returncode == 1
    assert "another model and other problems" in refused.stderr and "FRESH=1" in refused.stderr
    assert len(project.trained()) == 3
    assert project.start(FRESH="1").returncode == 0


@pytest.mark.parametrize(("knob", "estimator"), [("", "turn_rloo"), ("grpo", "uniform")])
def test_the_agent_runs_in_verls_tool_loop(project: Project, knob: str, estimator: str) -> None:
    project.example = "agent"
    done = project.start(**({"ADV_ESTIMATOR": knob} if knob else {}))
    assert done.returncode == 0, done.stderr
    options = dict(option.lstrip("+").split("=", 1) for option in project.trained()[-1].split() if "=" in option)
    assert options["algorithm.adv_estimator"] == estimator
    rollout = "actor_rollout_ref.rollout"
    assert options[f"{rollout}.agent.default_agent_loop"] == "tool_agent"
    assert options[f"{rollout}.multi_turn.max_assistant_turns"] == str(MAX_TURNS)
    assert options[f"{rollout}.multi_turn.tool_config_path"] == f"'{project.folder}/recipe/tiny/agent_tools.yaml'"
    assert options["reward.custom_reward_function.path"] == "pkg://recipe.tiny.agent"
    # Both get the same rewards: GRPO their sum, which must not be added to the last turn's again.
    of_turns = {name: value for name, value in options.items() if name.startswith("algorithm.turn_rloo")}
    expected = {"rewards": "turn_rewards", "align": "turns", "outcome": "False"} if estimator == "turn_rloo" else {}
    assert of_turns == {f"algorithm.turn_rloo.{name}": value for name, value in expected.items()}
    assert "recipe.tiny.prepare --base-model agent" in (project.folder / "calls.txt").read_text()


def test_a_run_that_lives_keeps_its_folder(project: Project) -> None:
    project.steps = 99
    running = project.begin()
    others: list[psutil.Process] = []
    try:
        others = project.children_at(running, "checkpoints/.run.lock")
        project.steps = 20
        log = (project.run_dir / "train.log").read_text()
        for fresh in ("0", "1"):
            second = project.start(FRESH=fresh)
            assert (
                second.returncode == 1
                and "belongs to a run that lives" in second.stderr
                and "OUTPUT_DIR" in second.stderr
            )
        assert len(project.trained()) == 1 and (project.run_dir / "train.log").read_text() == log
        assert project.start(DRY_RUN="1").returncode == 0
        running.kill()
        for process in others:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        running.communicate(timeout=30)
        assert project.start().returncode == 0 and project.start(FRESH="1").returncode == 0
        assert Path(f"{project.run_dir}.1").exists() and not Path(f"{project.run_dir}.2").exists()
    finally:
        for process in filter(lives, others):
            process.kill()
        running.kill()
        running.communicate(timeout=30)


def test_the_run_ends_with_the_script(project: Project) -> None:
    """By SIGTERM to the script alone, which the run does not get."""
    project.steps = 99
    running = project.begin()
    others: list[psutil.Process] = []
    deadline = time.monotonic() + 30
    try:
        others = project.children_at(running, "checkpoints/global_step_99")
        running.terminate()
        assert running.wait(timeout=30) == -signal.SIGTERM
        while any(map(lives, others)):
            assert time.monotonic() < deadline, others
            time.sleep(0.05)
    finally:
        for process in filter(lives, others):
            process.kill()
        running.communicate(timeout=30)
