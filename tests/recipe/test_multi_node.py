"""examples/slurm_grail.sh, with stand-ins for Slurm and Ray: addresses, cores, and waits that end."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

# srun runs its command here, as the node that it was asked for; the interpreter answers for the address by a table.
SRUN = r"""#!/usr/bin/env bash
while [[ $1 == --* ]]; do
    [[ $1 != --nodelist=* ]] || export NODE=${1#*=}
    shift
done
echo "$NODE ${SRUN_CPUS_PER_TASK:-none} ${*//$'\n'/ }" >>"$HERE/steps"
exec "$@"
"""
PYTHON = r"""#!/usr/bin/env bash
if [[ $* == *getsockname* ]]; then
    echo "$NODE asks for ${!#}" >>"$HERE/steps"
    variable=ADDRESS_$NODE
    echo "${!variable}"
else
    exec "$REAL" "$@"
fi
"""
RAY = r"""#!/usr/bin/env bash
echo "$NODE $*" >>"$HERE/started"
echo "$RAY_AUTH_MODE $RAY_AUTH_TOKEN" >>"$HERE/tokens"
count=$(grep -c "^$NODE " "$HERE/started")
((count > ${FAILURES:-0})) || [[ $* == *--head* ]] || exit 1
touch "$HERE/joined.$NODE"
echo $$ >"$HERE/pid.$NODE"
exec /bin/sleep 30 >/dev/null 2>&1
"""
SCONTROL = '#!/usr/bin/env bash\nprintf "%s\\n" $3\n'
# A ray whose cluster has the GPUs of the nodes that have joined.
RAY_MODULE = """
import glob, os
initialized = False
def is_initialized():
    return initialized
def init(**_):
    global initialized
    if not glob.glob(os.environ["HERE"] + "/joined.node1"):
        raise ConnectionError("no cluster at " + os.environ["RAY_ADDRESS"])
    initialized = True
def nodes():
    joined = glob.glob(os.environ["HERE"] + "/joined.*")
    return [{"NodeManagerAddress": path.rsplit(".", 1)[1], "Alive": True} for path in joined]
def cluster_resources():
    return {"GPU": 4.0 * len(nodes())}
"""
LAUNCH = r"""#!/usr/bin/env bash
echo "$NNODES $NGPUS_PER_NODE $RAY_ADDRESS $*" >"$HERE/launched"
echo "$RAY_AUTH_MODE $RAY_AUTH_TOKEN" >>"$HERE/tokens"
exit "${LAUNCH_STATUS:-0}"
"""


class Result(NamedTuple):
    status: int
    steps: list[str]
    started: list[str]
    launched: str | None
    said: str


@pytest.fixture
def job(tmp_path: Path) -> Path:
    for name, text in {
        "bin/srun": SRUN,
        "bin/python3": PYTHON,
        "bin/ray": RAY,
        "bin/scontrol": SCONTROL,
        "bin/sleep": '#!/usr/bin/env bash\nexec /bin/sleep "$([[ $1 == 5 ]] && echo 0.1 || echo "$1")"\n',
        "modules/ray.py": RAY_MODULE,
        "project/examples/run_test.sh": LAUNCH,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def submit(job: Path, *arguments: str, nodes: str = "node1 node2", **variables: str) -> Result:
    """Run the script as Slurm would, from a copy of it elsewhere."""
    copy = job / "slurm_script"
    copy.write_text((ROOT / "examples/slurm_grail.sh").read_text())
    environment = {
        "PATH": f"{job}/bin:/usr/bin:/bin",
        "PYTHONPATH": str(job / "modules"),
        "HERE": str(job),
        "REAL": sys.executable,
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_NNODES": str(len(nodes.split())),
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "48",
        "SLURM_SUBMIT_DIR": str(job / "project"),
        "ADDRESS_node1": "10.0.0.1",
        "ADDRESS_node2": "10.0.0.2",
        "WAIT_SECONDS": "60",
        **variables,
    }
    command = ["bash", str(copy), *(arguments or ("run_test.sh",))]
    result = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=100)

    def lines(name: str) -> list[str]:
        return (job / name).read_text().splitlines() if (job / name).exists() else []

    launched = lines("launched")
    return Result(result.returncode, lines("steps"), lines("started"), launched[0] if launched else None, result.stderr)


def test_two_nodes(job: Path) -> None:
    result = submit(job, "run_test.sh", "trainer.x=1", FAILURES="2", LAUNCH_STATUS="7")
    assert result.status == 7, result.said
    assert result.launched == "2 4 10.0.0.1:6379 trainer.x=1"
    # The first node's address is the one towards the second, and the second's the one towards the first's address.
    assert "node1 asks for node2" in result.steps and "node2 asks for 10.0.0.1" in result.steps
    assert (
        result.started[0]
        == "node1 start --head --node-ip-address=10.0.0.1 --port=6379 --num-cpus=48 --num-gpus=4 --block"
    )
    joining = "node2 start --address=10.0.0.1:6379 --node-ip-address=10.0.0.2 --num-cpus=48 --num-gpus=4 --block"
    assert result.started[1:] == [joining] * 3
    # Each step has the cores.
    assert all(line.split()[1] == "48" for line in result.steps if "asks for" not in line)
    # One token for the head, the nodes and the run: a head whose user has a token of Ray's refuses all others but for it.
    (token,) = set((job / "tokens").read_text().splitlines())
    assert re.fullmatch("token [0-9a-f]{64}", token)
    # The cluster ends with the run.
    deadline = time.monotonic() + 20
    while Path(f"/proc/{(job / 'pid.node1').read_text().strip()}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # An address that the others cannot reach.
    refused = submit(job, ADDRESS_node2="127.0.1.1")
    assert refused.status != 0 and "node2 reaches 10.0.0.1 by the address 127.0.1.1" in refused.said


@pytest.mark.slow
def test_node_that_does_not_join(job: Path) -> None:
    """Neither the script nor the node goes on for ever, nor an attempt to connect that does not come back."""
    result = submit(job, FAILURES="1000000", WAIT_SECONDS="3")
    assert result.status != 0 and result.launched is None
    assert "4 of 8 GPUs came together within WAIT_SECONDS=3, on ['node1']" in result.said
    assert len(result.started) <= 1 + 1
