"""A driver, a trainer's process and a worker as verl's, without verl: for what becomes of them when one is killed.

    python -m tests.run_life.ending_run FOLDER

Writes the process ids to ``FOLDER/processes.json`` and then waits for the worker, as verl would, for ever. The worker has a
child, and a user's upload that was detached from it. An actor of the user's dies at the start, which the user's code handles.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf

from grail_advantage.dump import write_whole
from recipe.run_life import watch
from recipe.run_life.trainer import KeptRun
from tests.verl_ext.whole_run import NOT_STARTED, STARTS


class Worker:
    """Has children."""

    def start(self) -> dict[str, int]:
        child = subprocess.Popen(["sleep", "300"])
        # Ray's worker ends its own children when it exits, with a session of their own or not.
        detach = ["sh", "-c", "sleep 300 >/dev/null & echo $!"]
        upload = subprocess.check_output(detach, start_new_session=True)
        return {"worker": os.getpid(), "child": child.pid, "upload": int(upload)}

    def work(self):
        time.sleep(1000)


class _Waits:
    """Does the work of verl's trainer."""

    global_steps = 0

    def __init__(self, config: DictConfig):
        self.config = config

    def init(self):
        pass

    def _rollout_server_managers(self) -> list[Any]:
        return []

    def fit(self):
        # A worker of the user's, which ends with a status of its own and is not started again.
        ray.wait([ray.remote(lambda: os._exit(7)).options(max_retries=0).remote()])
        worker = ray.remote(Worker).options(name="the_worker").remote()
        self.actor_rollout_wg = SimpleNamespace(workers=[worker])
        processes = ray.get(worker.start.remote()) | {"trainer": os.getpid()}
        # The death of the user's process would be noticed by then, if anybody asked.
        time.sleep(5 * watch.INTERVAL)
        folder = Path(self.config.trainer.default_local_dir)
        write_whole(folder / "processes.json", json.dumps(processes))
        ray.get(worker.work.remote())


class _Trainer(KeptRun, _Waits): ...


@ray.remote
class TaskRunner:
    """verl's, by its name."""

    def run(self, config: DictConfig):
        watch.INTERVAL = 0.2
        trainer = _Trainer(config)
        trainer.init()
        trainer.fit()


if __name__ == "__main__":
    # As recipe.run_life sets it.
    os.environ.update(RAY_process_group_cleanup_enabled="1")
    for tries in reversed(range(STARTS)):
        try:
            ray.init(num_cpus=4, include_dashboard=False)
            break
        except Exception as error:
            if NOT_STARTED not in str(error) or not tries:
                raise
    options = [
        f"trainer.default_local_dir={sys.argv[1]}",
        "trainer.val_only=false",
        "trainer.val_before_train=false",
        "actor_rollout_ref.rollout.name=vllm",
    ]
    ray.get(TaskRunner.remote().run.remote(OmegaConf.from_dotlist(options)))
