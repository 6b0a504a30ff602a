"""Ends a run of which a process died, and says which.

verl waits without a limit: for responses of an engine that is gone, for ranks of which one was killed. So a thread in the
trainer's process looks every few seconds whether the actors that the trainer holds are alive. Each is asked ``__ray_ready__``,
one question at a time, which waits while the actor is busy and fails as soon as it is dead, with Ray's own account of the death
(Ray 2.60). vLLM's engines are processes that Ray does not know, so their servers' ``/health`` is asked too.
"""

from __future__ import annotations

import http.client
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError

INTERVAL, SECONDS = 5.0, 2.0
"""Between two looks, and for an answer."""
REFUSALS = 2
"""In a row, after which an engine counts as dead."""
INTERRUPT_SECONDS, NOTICE_SECONDS = 15.0, 5.0
"""For the trainer to end once it is interrupted, and for Ray to notice a death that an error tells of."""
HEADLINE = "a process of the run died, so that it cannot continue; the same command resumes from its last checkpoint."


class RunEnded(RuntimeError):
    """The run cannot continue; the message says why."""


class Watch:
    """Looks after the actors that ``held`` returns, and vLLM's servers at the addresses ``host:port`` that ``engines`` does."""

    def __init__(self, held: Callable[[], list[ActorHandle]], engines: Callable[[], list[str]]) -> None:
        self._held, self._engines = held, engines
        self._asked: dict[ActorHandle, ray.ObjectRef] = {}
        self._refused: dict[str, int] = {}
        self._found = ""

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Within, the thread looks; an error that a death explains is raised as :class:`RunEnded`. For the main thread."""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
        over = threading.Event()
        threading.Thread(target=self._run, args=(over,), name="watch", daemon=True).start()
        try:
            yield
        except BaseException as error:
            over.set()
            deadline = time.monotonic() + NOTICE_SECONDS
            while not (self._found or self.look()) and time.monotonic() < deadline:
                time.sleep(0.5)
            if self._found:
                raise RunEnded(self._found) from error
            raise
        finally:
            over.set()

    def _run(self, over: threading.Event) -> None:
        while not over.wait(INTERVAL):
            if self.look():
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                if not over.wait(
                    INTERRUPT_SECONDS
                ):  # the trainer does not hear; Ray shows the driver this process's output
                    print(self._found, file=sys.stderr, flush=True)
                    os._exit(1)

    def look(self) -> str:
        """Returns why the run cannot continue; empty while it can."""
        with suppress(Exception):  # Ray's control service is away; if it stays away, Ray ends this process
            if deaths := [*self._dead_actors(), *filter(None, map(self._of_engine, self._engines()))]:
                self._found = "\n\n".join([HEADLINE, *deaths])
        return self._found

    def _dead_actors(self) -> Iterator[str]:
        """Ray's text on each of the actors held now that died."""
        self._asked = {actor: self._asked.get(actor) or actor.__ray_ready__.remote() for actor in self._held()}
        answers = list(self._asked.values())
        answered = set(ray.wait(answers, num_returns=len(answers), timeout=SECONDS)[0]) if answers else set()
        for actor, answer in list(self._asked.items()):
            if answer in answered:
                try:
                    ray.get(answer)
                except ActorDiedError as error:
                    yield re.sub(r"\x1b\[\d+m", "", str(error))
                    continue
                except RayError:  # it is out of reach for now
                    pass
                self._asked.pop(actor, None)

    def _of_engine(self, address: str) -> str:
        lives = engine_lives(address)
        if lives is not None:
            self._refused[address] = 0 if lives else self._refused.get(address, 0) + 1
        dead = self._refused.get(address, 0) >= REFUSALS
        return f"vLLM's engine is dead, by its server on {address}, or the server takes no connection" if dead else ""


def engine_lives(address: str) -> bool | None:
    """Whether the engine lives whose server listens at ``host:port``; ``None`` where the server did not say."""
    host, _, port = address.rpartition(":")
    with closing(http.client.HTTPConnection(host.strip("[]"), int(port), timeout=SECONDS)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status != http.client.SERVICE_UNAVAILABLE
        except ConnectionRefusedError:
            return False
        except (OSError, http.client.HTTPException):
            return None
