"""Who of a run is alive, what the others died of, and what they wrote last: what is asked of Ray, in one place.

Answers Ray 2.60. Its public ``ray.util.state.list_actors`` asks the dashboard's server, which a run need not have
(``ray_kwargs.ray_init.include_dashboard=False`` in recipe/config/cpu.yaml); what is used instead is
``ray._private.state.actors``, the same table from Ray's control service, with ``ActorDeathCause`` of its protocol
(``common.proto``). The log folder, and Ray's own servers where this process started them, are those of
``ray._private.worker.global_worker.node``. Word from one process of a run to
another goes through ``ray.experimental.internal_kv``, which works without an actor between them. Can go when the state API
works without the dashboard.
"""

from __future__ import annotations

import http.client
import json
import signal
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray._private import state, worker
from ray.core.generated.common_pb2 import ActorDeathCause, ActorDiedErrorContext
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ON_PURPOSE = ("RAY_KILL", "OUT_OF_SCOPE", "REF_DELETED", "OWNER_DIED")
"""Reasons by which somebody meant an actor to end, or by which it followed another that is in the table itself."""
USER_EXIT = "INTENDED_USER_EXIT"
"""How ``ray.actor.exit_actor`` shows in a death's message."""
SERVERS = ("raylet", "gcs_server")
"""Ray's own servers without which no run goes on, as Ray calls them and their logs."""
NAMESPACE = b"grail_advantage"
TAIL_BYTES = 16_000
READ_SECONDS = 20
ANSWER_SECONDS = 2.0


class Process(NamedTuple):
    """An actor's process."""

    actor: str
    """Ray's id of the actor, in hexadecimal."""
    name: str
    """Class, and the name that the actor was given where it was."""
    node: str
    """Address of its node."""
    node_id: str
    pid: int

    def __str__(self) -> str:
        return f"{self.name}, process {self.pid} on {self.node}"


class Death(NamedTuple):
    """Something of the run died that nobody meant to end."""

    who: Process
    what: str
    """Who died, in words."""
    cause: str
    at: float
    """Seconds since the epoch; 0 where it is not known."""


def cause_of(cause: ActorDeathCause) -> str | None:
    """What an actor died of, in a line; ``None`` where it was meant to."""
    kind = cause.WhichOneof("context")
    if kind is None:
        return None
    context = getattr(cause, kind)
    if kind == "oom_context":
        return f"killed by Ray because its node ran out of memory: {_line(context.error_message)}"
    if kind == "creation_task_failure_context":
        return f"its start failed: {_line(context.formatted_exception_string)}"
    if kind != "actor_died_error_context":
        return _line(context.error_message)
    reason = ActorDiedErrorContext.Reason.Name(context.reason)
    if reason in ON_PURPOSE or USER_EXIT in context.error_message:
        return None
    if reason == "NODE_DIED":
        return f"its node is gone: {_line(context.error_message)}"
    return _line(context.error_message)


def _line(text: str) -> str:
    """The message without line breaks, and without what Ray says to every death."""
    line = " ".join(text.split()).removeprefix("The actor is dead because ").partition(" Some common causes include")[0]
    return f"{line[:600]}..." if len(line) > 600 else line


def actors() -> tuple[list[Process], list[Death]]:
    """This job's actors that are alive, and those that died though nobody meant them to, the first death first."""
    alive, dead = [], []
    for entry in state.actors(job_id=ray.JobID.from_hex(ray.get_runtime_context().get_job_id())).values():
        who = _process(entry)
        cause = cause_of(entry["DeathCause"]) if entry["State"] == "DEAD" else None
        if entry["State"] == "ALIVE":
            alive.append(who)
        elif cause is not None:
            dead.append(Death(who, str(who), cause, entry["EndTime"] / 1000))
    return alive, sorted(dead, key=lambda death: death.at)


def _process(entry: dict[str, Any]) -> Process:
    name = f"{entry['ActorClassName']} {entry['Name']}".strip()
    address = entry["Address"]
    return Process(entry["ActorID"], name, address["IPAddress"], address["NodeID"], entry["Pid"])


def dead_servers() -> list[Death]:
    """Those of Ray's own servers that this process started and that have died; none while Ray shuts down."""
    if not ray.is_initialized():
        return []
    node = worker.global_worker.node
    found = []
    for name, process in node.dead_processes():
        if name in SERVERS:
            who = Process("", name, node.node_ip_address, ray.get_runtime_context().get_node_id(), process.pid)
            found.append(Death(who, f"Ray's {who}", _ended(process.returncode), 0.0))
    return found if ray.is_initialized() else []


def _ended(status: int) -> str:
    """How a process ended, by its status as ``subprocess`` gives it."""
    if status >= 0:
        return f"it ended with status {status}"
    return f"it was killed by {signal.Signals(-status).name}"


def own_node_is_gone() -> list[Death]:
    """The raylet of this process's node, where Ray's control service has given the node up."""
    here = ray.get_runtime_context().get_node_id()
    gone = [node for node in state.nodes() if node["NodeID"] == here and not node["Alive"]]
    raylets = [Process("", "raylet", node["NodeManagerAddress"], here, 0) for node in gone]
    return [Death(who, f"Ray's raylet on {who.node}", "Ray gave the node up", 0.0) for who in raylets]


class Engine(NamedTuple):
    """An inference server of vLLM, whose engine is a process that Ray does not know."""

    actor: str
    """Ray's id of the server's actor, in hexadecimal."""
    address: str
    """``host:port`` of its HTTP server."""


def engine_answers(engine: Engine) -> bool | None:
    """Whether an engine lives, by its server's ``/health``; ``None`` where the server did not say."""
    host, _, port = engine.address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status != http.client.SERVICE_UNAVAILABLE
    except ConnectionRefusedError:
        return False
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def last_lines(who: Process, count: int) -> tuple[str, list[str]]:
    """The file that a process wrote to last, and its last lines; an empty name where it is out of reach."""
    if who.pid <= 0 and who.name not in SERVERS:
        return "", []
    if who.node_id == ray.get_runtime_context().get_node_id():
        return _read_log(who.pid if who.name not in SERVERS else who.name, count)
    try:
        there = NodeAffinitySchedulingStrategy(node_id=who.node_id, soft=False)
        read = ray.remote(num_cpus=0, max_retries=0)(_read_log).options(scheduling_strategy=there)
        return ray.get(read.remote(who.pid, count), timeout=READ_SECONDS)
    except Exception:
        return "", []


def _read_log(whose: int | str, count: int) -> tuple[str, list[str]]:
    """The same, on the node of the process: a worker's by its id, that of one of Ray's servers by its name."""
    found: tuple[float, str, list[str]] = (0.0, "", [])
    pattern = f"{whose}.[eo]*" if whose in SERVERS else f"worker-*-{whose}.[eo]*"
    for path in Path(worker.global_worker.node.get_logs_dir_path()).glob(pattern):
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        # Ray's own marks, which tell a log's reader the actor's name, and the counters of its servers.
        lines = [line.rstrip() for line in lines if line.strip() and not line.startswith((":", "[state-dump]"))]
        if lines and path.stat().st_mtime > found[0]:
            found = (path.stat().st_mtime, str(path), lines[-count:])
    return found[1:]


class Words(NamedTuple):
    """What the trainer's process leaves for the driver."""

    text: str
    now: bool
    """Whether the driver is to end at once; else it is about to, and these are the last words."""


def tell(words: Words) -> None:
    """Leave word for the driver of this job."""
    internal_kv._internal_kv_put(_key(), json.dumps(words).encode(), namespace=NAMESPACE)


def told() -> Words | None:
    """What was left for this driver, if anything."""
    found = internal_kv._internal_kv_get(_key(), namespace=NAMESPACE)
    return Words(*json.loads(found)) if found else None


def _key() -> bytes:
    return f"last words of {ray.get_runtime_context().get_job_id()}".encode()
