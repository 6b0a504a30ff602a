"""How an actor's death is noticed and read; without Ray, by the errors that Ray 2.60 gave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from recipe.run_life import actors
from recipe.run_life.actors import Actors, death_of

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

    def test_an_error_that_says_nothing(self) -> None:
        death = death_of(_error("The node is gone."))
        assert death.name.startswith("an actor, process not known") and death.cause == "The node is gone."


class _Actor:
    """An actor with the answer that Ray gives for it: ``None`` while it is busy, an error, or True."""

    def __init__(self, answer: Any = True) -> None:
        self.answer, self.asked = answer, 0
        self.__ray_ready__ = SimpleNamespace(remote=self._ask)
        self.__ray_call__ = SimpleNamespace(remote=lambda _: _Actor(("HttpServer", 11, "10.0.0.1")))

    def _ask(self) -> _Actor:
        self.asked += 1
        return self


@pytest.fixture(autouse=True)
def _ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(answer: _Actor, timeout: float | None = None) -> Any:
        if isinstance(answer.answer, Exception):
            raise answer.answer
        return answer.answer

    def wait(answers: list[_Actor], num_returns: int, timeout: float) -> tuple[list[_Actor], list[_Actor]]:
        assert num_returns == len(answers) == len(set(answers))
        return [each for each in answers if each.answer is not None], []

    monkeypatch.setattr(actors, "ray", SimpleNamespace(get=get, wait=wait))


class TestActors:
    def test_a_busy_one_is_asked_once_and_lives(self) -> None:
        busy, idle = _Actor(None), _Actor()
        asking = Actors(lambda: [busy, idle], dict)
        assert [asking.deaths() for _ in range(3)] == [[], [], []]
        assert (busy.asked, idle.asked) == (1, 3)
        busy.answer = _error(KILLED)
        assert [death.pid for death in asking.deaths()] == [12403]
        assert [death.pid for death in asking.deaths()] == [12403]

    def test_one_out_of_reach_is_asked_again(self) -> None:
        actor = _Actor(ActorUnavailableError("for now", None))
        asking = Actors(lambda: [actor], dict)
        assert asking.deaths() == []
        actor.answer = True
        assert asking.deaths() == [] and actor.asked == 2

    def test_one_that_the_trainer_holds_no_more_is_not_judged(self) -> None:
        held = [_Actor(_error(KILLED))]
        asking = Actors(lambda: held, dict)
        assert asking.deaths()
        held.clear()
        assert asking.deaths() == []


class TestEngines:
    @pytest.fixture
    def health(self, monkeypatch: pytest.MonkeyPatch) -> list[bool | None]:
        """The answers of the server, the last one for ever."""
        answers: list[bool | None] = []
        monkeypatch.setattr(actors, "answers", lambda address: answers.pop(0) if len(answers) > 1 else answers[0])
        return answers

    def _asking(self, server: _Actor) -> Actors:
        return Actors(lambda: [server], lambda: {"10.0.0.1:8000": server})

    def test_is_dead_when_its_server_says_so_twice(self, health: list[bool | None]) -> None:
        asking = self._asking(_Actor())
        health += [False, True, False, None, False]
        assert [asking.deaths() for _ in range(4)] == [[], [], [], []]
        (death,) = asking.deaths()
        assert death.name == "vLLM's engine of HttpServer, process 11 on 10.0.0.1" and "10.0.0.1:8000" in death.cause

    def test_lives_when_its_server_is_too_busy(self, health: list[bool | None]) -> None:
        health += [None]
        asking = self._asking(_Actor())
        assert not any(asking.deaths() for _ in range(5))

    def test_of_a_dead_server_is_not_named_too(self, health: list[bool | None]) -> None:
        health += [False]
        asking = self._asking(_Actor(_error(KILLED)))
        assert [len(asking.deaths()) for _ in range(3)] == [1, 1, 1]
