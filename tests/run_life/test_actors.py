"""How an actor's death is noticed and read; without Ray, by the errors that Ray 2.60 gave."""

from __future__ import annotations

from ray.exceptions import ActorDiedError

from recipe.run_life.actors import death_of

KILLED = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: WorkerDict\n\tactor_id: ad5601000000\n"
    "\tpid: 12403\n\tname: abcWorkerDict_0:0\n\tnamespace: bc85\n\tip: 192.0.2.2\nThe actor is dead because its worker "
    "process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error "
    "code 2. End of file. Some common causes include: (1) the process was killed by the OOM killer due to high memory usage"
)
FAILED = (
    "The actor died because of an error raised in its creation task, \x1b[36mray::Server.__init__()\x1b[39m (pid=12502, "
    'ip=192.0.2.2, actor_id=a1e9, repr=<Server object at 0x7f70>)\n  File "server.py", line 7\nValueError: no port is free'
)


def _error(text: str) -> ActorDiedError:
    error = ActorDiedError()
    error.error_msg = text
    return error


class TestDeathOf:
    def test_a_killed_process(self) -> None:
        death = death_of(_error(KILLED))
        assert death.name == "WorkerDict abcWorkerDict_0:0, process 12403 on 192.0.2.2"
        assert (death.pid, death.address) == (12403, "192.0.2.2")
        assert death.cause.startswith("its worker process has died. Worker exit type: SYSTEM_ERROR")
        assert death.cause.endswith("End of file.")

    def test_a_constructor_that_raised(self) -> None:
        death = death_of(_error(FAILED))
        assert death.name == "Server, process 12502 on 192.0.2.2" and death.pid == 12502
        assert death.cause.endswith("ValueError: no port is free")
