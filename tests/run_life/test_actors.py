"""How an actor's death is noticed and read; without Ray, by the error that Ray 2.60 gave."""

from __future__ import annotations

from ray.exceptions import ActorDiedError

from recipe.run_life.actors import death_of

KILLED = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: WorkerDict\n\tactor_id: ad5601000000\n"
    "\tpid: 12403\n\tname: abcWorkerDict_0:0\n\tnamespace: bc85\n\tip: 192.0.2.2\nThe actor is dead because its worker "
    "process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error "
    "code 2. End of file. Some common causes include: (1) the process was killed by the OOM killer due to high memory usage"
)


def test_a_killed_process_is_named_with_its_cause() -> None:
    error = ActorDiedError()
    error.error_msg = KILLED
    death = death_of(error)
    assert death.name == "WorkerDict abcWorkerDict_0:0, process 12403 on 192.0.2.2"
    assert (death.pid, death.address) == (12403, "192.0.2.2")
    assert death.cause.startswith("its worker process has died. Worker exit type: SYSTEM_ERROR")
    assert death.cause.endswith("End of file.")
