"""The CPU platform: nothing of it without VERL_PLATFORM=cpu, verl's own values, weights through the host's memory, forks."""

import asyncio
import inspect
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from verl.utils import torch_functional

from verl_cpu import checkpoint_engine, patches
from verl_cpu.checkpoint_engine import HostCheckpointEngine

ROOT = Path(__file__).parents[2]
PROBE = """
import json, sys
import verl
vllm_imported = "vllm" in sys.modules
from verl.plugin.platform import PlatformRegistry
from verl.utils import distributed
from verl.workers.rollout.replica import RolloutReplicaRegistry
import recipe.run_life.trainer
functions = RolloutReplicaRegistry._registry["vllm"], distributed.initialize_global_process_group_ray
own = sorted(name for name in sys.modules if name.split(".")[0] == "verl_cpu")
files = [function.__code__.co_filename.rsplit("/", 1)[-1] for function in functions]
print("PROBE" + json.dumps([sorted(PlatformRegistry.registered_names()), *files, vllm_imported, own]))
"""


@pytest.mark.slow
def test_nothing_of_it_is_used_on_other_platforms():
    """By verl, and by the recipe. What it registers on the CPU, every whole run of the tests needs."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VERL_", "VLLM_"))
    }
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-c", PROBE]
    output = subprocess.check_output(command, env=environment, cwd=ROOT, text=True)
    variables = ["verl_cpu", "verl_cpu.plugin"]
    assert json.loads(output.split("PROBE")[1]) == [
        ["amd", "huawei", "nvidia"], "replica.py", "distributed.py", False, variables
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(300,), (5, 60)])
def test_log_probabilities_are_exact(shape, dtype, monkeypatch):
    """Of chunks that do not divide the rows and of labels at both ends of the vocabulary: values and gradients are verl's bit
    for bit, and in bfloat16 those of float64 to float32's rounding, where verl's are rounded to 8 bits."""
    name = "logprobs_from_logits_v2"
    in_a_loop = inspect.unwrap(getattr(torch_functional, name))
    # It is taken back afterwards.
    monkeypatch.setattr(torch_functional, name, in_a_loop)
    # 7 rows of 37 logits at a time, which divide neither 300 rows nor 5 x 60.
    monkeypatch.setattr(patches, "CHUNK", {"cpu": 7 * 37 + 1})
    patches.log_probabilities_in_few_calls()
    generator = torch.Generator().manual_seed(0)
    logits = (40 * torch.randn(*shape, 37, generator=generator)).to(dtype)
    labels = torch.randint(37, shape, generator=generator)
    # Both ends of the vocabulary.
    labels[0] = 0
    labels[-1] = 36
    upstream = torch.randn(shape, generator=generator)

    def results(function, dtype):
        """The values and their gradient."""
        leaf = logits.clone().to(dtype).requires_grad_()
        values = function(leaf, labels)
        values.backward(upstream.to(values.dtype))
        return [values.detach(), leaf.grad]

    verls = results(in_a_loop, dtype)
    ours = results(torch_functional.logprobs_from_logits_v2, dtype)
    exact = results(in_a_loop, torch.float64)
    assert (
        ours[0].dtype == torch.promote_types(dtype, torch.float32) and exact[0].min() < -50
    )
    torch.testing.assert_close(ours[0].double(), exact[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(
        ours[1].double(), exact[1], rtol=torch.finfo(dtype).eps, atol=1e-5
    )
    if dtype == torch.bfloat16:
        assert (verls[0] - exact[0]).abs().max() > 0.01
    else:
        assert all(map(torch.equal, verls, ours))


def test_weights_arrive_twice_and_leave_nothing(tmp_path, monkeypatch):
    """From two trainer ranks to two rollout workers. The second synchronisation brings the second weights; a rollout
    worker may ask before the trainer has written."""
    monkeypatch.setattr(checkpoint_engine, "FOLDER", tmp_path)
    trainers = [
        HostCheckpointEngine(bucket_size=1, is_master=rank == 0) for rank in range(2)
    ]
    rollouts = [HostCheckpointEngine(bucket_size=1) for _ in range(2)]

    async def received(engine: HostCheckpointEngine) -> dict[str, torch.Tensor]:
        return {name: tensor async for name, tensor in engine.receive_weights()}

    async def synchronise(
        weights: dict[str, torch.Tensor],
    ) -> list[dict[str, torch.Tensor]]:
        paths = [engine.prepare() for engine in (*trainers, *rollouts)]
        topologies = HostCheckpointEngine.build_topology(2, 2, paths)
        for engines, topology in zip((trainers, rollouts), topologies, strict=True):
            for engine, path in zip(engines, topology["path"], strict=True):
                engine.init_process_group(path=path)
        waiting = [asyncio.create_task(received(engine)) for engine in rollouts]
        # Nobody has written yet.
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in waiting)
        # The first rank, which writes, is the last to come.
        for engine in reversed(trainers):
            await engine.send_weights(iter(weights.items()))
        results = await asyncio.gather(*waiting)
        for engine in (*trainers, *rollouts):
            engine.finalize()
        return results

    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        weights = {
            name: torch.randn(3, 5, generator=generator) for name in ("embed", "head")
        }
        for result in asyncio.run(synchronise(weights)):
            assert result.keys() == weights.keys()
            assert all(map(torch.equal, result.values(), weights.values()))
        assert list(tmp_path.iterdir()) == []


SERVER = """
import sys
from verl_cpu.workers import server
server.WITHOUT_RAY, server.WITH_RAY = ("json.tool",), ("colorsys",)
server.main()
"""
SCRIPT = """
import json, os, sys
own = {"pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "nice": os.nice(0), "folder": os.getcwd()}
own |= {"arguments": sys.argv, "name": __name__, "environment": dict(os.environ)}
print(json.dumps(own | {"preloaded": [name in sys.modules for name in ("json.tool", "colorsys")]}))
sys.stderr.write(sys.stdin.read())
"""
CLIENT = ROOT / "packages/verl-cpu/verl_cpu/workers/client.py"


@pytest.fixture
def server(tmp_path):
    """A server of forks that imports next to nothing."""
    path = tmp_path / "socket's folder/socket"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        command = [sys.executable, "-c", SERVER, str(path)]
        number = listener.fileno()
        process = subprocess.Popen(
            [*command, str(number)], stdin=subprocess.PIPE, cwd=ROOT, pass_fds=[number]
        )
    yield process
    process.kill()
    process.wait()


def test_a_worker_is_a_fork_with_the_environment_that_ray_gave_it(server, tmp_path):
    """Ray reads the job's number while it is imported: a fork for another job would take itself for the first one's. The
    server ends with the run's own process, and removes its folder; without a server Python runs."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    address = server.args[-2]
    client = ["nice", "-n3", sys.executable, "-IS", CLIENT, address, script, "-x"]

    def worker(answer, job="01000000"):
        """What it sees of itself; it must say on stderr what it was given on stdin."""
        environment = {"RAY_JOB_ID": job, "RAY_RAYLET_PID": "7", "NUMBER": answer}
        streams = {"input": answer, "capture_output": True, "text": True}
        done = subprocess.run(client, env=environment, cwd=tmp_path, check=True, **streams)
        request = json.loads(done.stdout)
        expected = {
            "name": "__main__",
            "arguments": [str(script), "-x"],
            "folder": str(tmp_path),
            "nice": min(os.nice(0) + 3, 19),
        }
        assert done.stderr == answer and request.items() >= expected.items()
        assert request["environment"].items() >= environment.items()
        assert "HOME" not in request["environment"]
        return request

    workers = [worker("line 0\n"), worker("line 1\n")]
    for fork in workers:
        assert fork["parent"] == server.pid and fork["group"] == fork["pid"]
        assert fork["preloaded"] == [True, True]
    assert workers[0]["pid"] != workers[1]["pid"]
    # Of another job; Python runs without what the server has imported.
    second = worker("", "02000000")
    assert second["parent"] != server.pid and second["preloaded"] == [False, False]
    # The run's own process has ended.
    server.stdin.close()
    assert server.wait(60) == 0 and not Path(address).parent.exists()
    assert worker("said\n")["preloaded"] == [False, False]
