"""The actors of a run that its trainer holds: which of them died, of what, and their last lines. Written for Ray 2.60.

Each actor is asked ``__ray_ready__``, one question at a time. It waits while the actor is busy and fails as soon as it is dead,
with an error that says how it died. Actors that a user starts are never asked. vLLM's engines are processes that Ray does
not know, so their servers' ``/health`` is asked too.

The error's text is read because ``ray.util.state.list_actors`` does not answer here: without a dashboard
(``include_dashboard=False``, as on a CPU) it raises ``ServerUnavailable`` at once, before and after a death, and once Ray's
control service has died it fails after 40 s.
"""

from __future__ import annotations

import http.client
import os
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

SECONDS, READ_SECONDS, REFUSALS = 2.0, 20.0, 2
"""For an answer, and for a log; and refusals in a row after which an engine counts as dead."""


class Death(NamedTuple):
    """A process of the run that died."""

    name: str
    cause: str
    pid: int | None
    address: str
    """Of its node, in Ray's words."""


def death_of(error: ActorDiedError) -> Death:
    """Reads the error of an actor that died."""
    text = re.sub(r"\x1b\[\d+m", "", str(error))
    named = dict(re.findall(r"^\t(\w+): (.*)$", text, flags=re.M))
    of_start = re.search(r"ray::(?P<class_name>\S+)\.__init__\(\) \(pid=(?P<pid>\d+), ip=(?P<ip>[^,]+)", text)
    named |= of_start.groupdict() if of_start else {}
    cause = text.partition("The actor is dead because ")[2] or text
    cause = " ".join(cause.partition(" Some common causes include")[0].split())
    cause = cause if len(cause) <= 600 else f"{cause[:300]} ... {cause[-300:]}"
    name = f"{named.get('class_name', 'an actor')} {named.get('name', '')}".strip()
    pid, address = named.get("pid"), named.get("ip", "a node that is not known")
    return Death(f"{name}, process {pid or 'not known'} on {address}", cause, int(pid) if pid else None, address)


class Actors:
    """Asks the actors that ``held`` returns whether they are alive, and vLLM's servers, by their HTTP addresses."""

    def __init__(self, held: Callable[[], list[ActorHandle]], engines: Callable[[], dict[str, ActorHandle]]) -> None:
        self._held, self._engines = held, engines
        self._asked: dict[ActorHandle, ray.ObjectRef] = {}
        self._refused: dict[str, int] = {}

    def deaths(self) -> list[Death]:
        """Those of the actors held now that died, and the engines that did though their server lives."""
        self._asked = {actor: self._asked.get(actor) or actor.__ray_ready__.remote() for actor in self._held()}
        answers = list(self._asked.values())
        answered = set(ray.wait(answers, num_returns=len(answers), timeout=SECONDS)[0]) if answers else set()
        dead: dict[ActorHandle, Death] = {}
        for actor, answer in list(self._asked.items()):
            if answer in answered:
                try:
                    ray.get(answer)
                except ActorDiedError as error:
                    dead[actor] = death_of(error)
                    continue
                except RayError:  # it is out of reach for now
                    pass
                self._asked.pop(actor, None)  # two threads may ask
        refusing = [each for each in self._engines().items() if each[1] not in dead and self._refuses(each[0])]
        return [*dead.values(), *(_of_engine(*each) for each in refusing)]

    def _refuses(self, address: str) -> bool:
        lives = engine_lives(address)
        if lives is not None:
            self._refused[address] = 0 if lives else self._refused.get(address, 0) + 1
        return self._refused.get(address, 0) >= REFUSALS


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


def _of_engine(address: str, server: ActorHandle) -> Death:
    try:
        name, pid, node = ray.get(server.__ray_call__.remote(_place), timeout=SECONDS)
    except (RayError, GetTimeoutError):
        name, pid, node = "a server", None, address
    cause = f"its server on {address} says that it is dead, or takes no connection any more"
    return Death(f"vLLM's engine of {name}, process {pid} on {node}", cause, pid, node)


def _place(actor: Any) -> tuple[str, int, str]:
    return type(actor).__name__, os.getpid(), ray.util.get_node_ip_address()


def last_lines(death: Death, count: int) -> tuple[str, list[str]]:
    """The log that a worker of Ray's wrote to last, and its last lines; an empty name where it is out of reach."""
    try:
        nodes = [node for node in ray.nodes() if node["NodeManagerAddress"] == death.address and node["Alive"]]
        there = NodeAffinitySchedulingStrategy(node_id=nodes[0]["NodeID"], soft=False)
        read = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(read_log)
        return ray.get(read.remote(death.pid, count), timeout=READ_SECONDS)
    except Exception:  # the cause is said without its log
        return "", []


def read_log(pid: int | None, count: int) -> tuple[str, list[str]]:
    """The same, on the worker's machine."""
    context = ray.get_runtime_context()
    folder = Path(context.get_temp_dir()) / context.get_session_name() / "logs"
    for path in sorted(folder.glob(f"worker-*-{pid}.[eo]*"), key=lambda path: path.stat().st_mtime, reverse=True):
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 16_000))
            lines = log.read().decode(errors="replace").splitlines()
        # Lines with a colon first are Ray's own marks.
        if lines := [line.rstrip() for line in lines if line.strip() and not line.startswith(":")]:
            return str(path), lines[-count:]
    return "", []
