"""Ends a run of which a process died, and says which.

verl waits without a limit: for responses of an engine that is gone, for ranks of which one was killed. So a thread in
the trainer's process asks the actors that the trainer holds ``__ray_ready__``, one question at a time, which waits
while an actor is busy and fails as soon as it is dead, with Ray's own account of the death (Ray 2.60). vLLM's engines
are processes that Ray does not know, so their servers' ``/health`` is asked too.
"""

import http.client
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError

INTERVAL = 5.0
SECONDS = 2.0
REFUSALS = 2
"""Seconds between two looks, and for an answer; refusals in a row after which an engine counts as dead."""
INTERRUPT_SECONDS = 30.0
NOTICE_SECONDS = 5.0
"""For the trainer to end once it is interrupted, and for Ray to notice a death that an error tells of."""
HEADLINE = "a process of the run died, so that it cannot continue; the same command resumes from its last checkpoint."


class RunEnded(RuntimeError):
    """The run cannot continue; the message says why."""


class Watch:
    """Looks after the actors that ``held`` returns, and the engines of the servers at ``engines``, as ``host:port``."""

    def __init__(
        self, held: Callable[[], list[ActorHandle]], engines: Callable[[], list[str]]
    ) -> None:
        self._held = held
        self._engines = engines
        self._asked: dict[ActorHandle, ray.ObjectRef] = {}
        self._refused: dict[str, int] = {}

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Within, an error that a death explains is raised as :class:`RunEnded`. For the process's main thread."""
        # A shell has its background jobs ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        over = threading.Event()
        deaths: list[str] = []
        threading.Thread(target=self._run, args=(over, deaths), name="watch", daemon=True).start()
        try:
            yield
        except BaseException as error:
            over.set()
            # The error may be the death's consequence, and come before Ray has noticed it.
            deadline = time.monotonic() + NOTICE_SECONDS
            while not deaths and time.monotonic() < deadline:
                deaths += self.deaths()
                time.sleep(0.5)
            if not deaths:
                raise
            raise RunEnded("\n\n".join([HEADLINE, *deaths])) from error
        finally:
            over.set()

    def _run(self, over: threading.Event, deaths: list[str]) -> None:
        while not deaths and not over.wait(INTERVAL):
            deaths += self.deaths()
        if over.is_set():
            return
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        # The trainer may not hear; Ray shows the driver what is printed here, as it looks now and then.
        if not over.wait(INTERRUPT_SECONDS):
            print(HEADLINE, *deaths, sep="\n\n", file=sys.stderr, flush=True)
            time.sleep(NOTICE_SECONDS)
            os._exit(1)

    def deaths(self) -> list[str]:
        """Returns texts on the actors held now that died, Ray's own, and on the engines that did."""
        dead = []
        # Ray's control service may be away; if it stays away, Ray ends this process.
        with suppress(Exception):
            # One question waits at each actor; those that the trainer has let go are asked no more.
            self._asked = {
                actor: self._asked.get(actor) or actor.__ray_ready__.remote()
                for actor in self._held()
            }
            answers = list(self._asked.values())
            if answers:
                answers, _ = ray.wait(answers, num_returns=len(answers), timeout=SECONDS)
            for actor in [actor for actor, answer in self._asked.items() if answer in answers]:
                try:
                    ray.get(self._asked.pop(actor))
                except ActorDiedError as error:
                    dead.append(str(error))
                except RayError:  # it is out of reach for now
                    pass
            for address in self._engines():
                refusals = self._refused.get(address, 0) + 1
                self._refused[address] = refusals if refuses(address) else 0
                if self._refused[address] >= REFUSALS:
                    dead.append(
                        f"vLLM's server on {address} says that its engine is dead, or takes no connection"
                    )
        return dead


def refuses(address: str) -> bool:
    """Returns whether the server at ``host:port`` says that its engine is dead, or is gone itself."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=SECONDS)
    with closing(connection):
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.SERVICE_UNAVAILABLE
        except ConnectionRefusedError:
            return True
        except (OSError, http.client.HTTPException):  # it is slow
            return False
