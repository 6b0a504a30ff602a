"""The driver's part in a run's end: it prints the cause, and leaves in an orderly way, so that Ray ends its own servers."""

from __future__ import annotations

import atexit
import os
import signal
import sys

from omegaconf import DictConfig
from ray.exceptions import ActorDiedError
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

from recipe.run_life.actors import death_of, last_lines
from recipe.run_life.watch import HEADLINE, RunEnded, of_deaths


def run(config: DictConfig) -> None:
    """verl's ``run_ppo``; a run that cannot continue exits with status 1 after its cause is printed."""
    # Each raylet ends the children of a worker that died, such as vLLM's engine, unless they called setsid().
    os.environ.setdefault("RAY_process_group_cleanup_enabled", "1")
    # After the control service has died, driver and workers look for it this long (60 s in Ray 2.60) before they end.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
    # After a SIGTERM, Ray's failure handler (abseil's) leaves an alarm that aborts the process after 3 seconds, in the middle
    # of its orderly end. Runs before Ray's own function, which was registered earlier.
    atexit.register(signal.alarm, 0)
    try:
        run_ppo(config, task_runner_class=TaskRunnerV1)
    except RunEnded as error:  # Ray's error with the trainer's stack, which ends with the cause
        text = str(error)
    except ActorDiedError as error:
        death = death_of(error)
        log = "\n".join(last_lines(death, 60)[1])
        ended_itself = log[log.rindex(HEADLINE) :] if HEADLINE in log else None
        text = ended_itself or of_deaths([death], "it is the trainer's own process", config)
    else:
        return
    print(text, file=sys.stderr, flush=True)
    raise SystemExit(1)
