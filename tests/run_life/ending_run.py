"""A driver, a trainer's process and a worker as verl's, without verl: for what becomes of them when one is killed.

    python -m tests.verl_ext.ending_run FOLDER

Writes the process ids to ``FOLDER/processes.json`` and then waits for the worker, as verl would, for ever. The worker has a
child in a session of its own, which Ray knows nothing of, like a resource tracker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf

from recipe.run_life import endings
from recipe.run_life import watch as watchdog


class Worker:
    """Has a child that outlives it."""

    def start(self) -> dict[str, int]:
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print("the worker's last line", flush=True)
        return {"worker": os.getpid(), "child": child.pid}

    def work(self) -> None:
        time.sleep(1000)


class _Waits:
    """What verl's trainer would do."""

    global_steps = 3

    def __init__(self, config: DictConfig) -> None:
        self.config = config

    def init(self) -> None:
        pass

    def _rollout_server_managers(self) -> list[Any]:
        return []

    def fit(self) -> None:
        self._enter(watchdog.STEP)
        self._enter("gen")
        worker = ray.remote(Worker).options(name="the_worker").remote()
        processes = ray.get(worker.start.remote()) | {"trainer": os.getpid()}
        folder = Path(self.config.trainer.default_local_dir)
        (folder / "unfinished.json").write_text(json.dumps(processes))
        (folder / "unfinished.json").rename(folder / "processes.json")
        while True:
            time.sleep(1)


class _Trainer(watchdog.WatchedTrainer, _Waits):
    pass


@ray.remote
class TaskRunner:
    """verl's, by its name."""

    def run(self, config: DictConfig) -> None:
        watchdog.INTERVAL = 0.5
        trainer = _Trainer(config)
        trainer.init()
        trainer.fit()


def main(folder: str) -> None:
    config = OmegaConf.create(
        {
            "trainer": {"default_local_dir": folder, "resume_mode": "auto", "save_freq": 1},
            "algorithm": {"watchdog": {}},
            "actor_rollout_ref": {"rollout": {"name": "vllm"}},
            "ray_kwargs": {
                "ray_init": {} if "RAY_ADDRESS" in os.environ else {"num_cpus": 4, "include_dashboard": False}
            },
        }
    )
    endings.begin(config)
    ray.init(**OmegaConf.to_container(config.ray_kwargs.ray_init))
    ray.get(TaskRunner.remote().run.remote(config))


if __name__ == "__main__":
    main(sys.argv[1])
