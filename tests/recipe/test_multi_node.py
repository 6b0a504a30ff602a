"""examples/slurm_grail.sh on two nodes, with stand-ins for Slurm and Ray: addresses, cores, one token, and waits that end."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# srun runs its command here, as the node that it was asked for; the interpreter answers for the address by a table.
SRUN = r"""#!/usr/bin/env bash
while [[ $1 == --* ]]; do
    [[ $1 != --nodelist=* ]] || export NODE=${1#*=}
    shift
done
exec "$@"
"""
PYTHON = r"""#!/usr/bin/env bash
[[ $* == *getsockname* ]] || exec "$REAL" "$@"
host=${!#}
variable=${NODE}_towards_${host//./_}
echo "${!variable}"
"""
RAY = r"""#!/usr/bin/env bash
echo "$NODE $SRUN_CPUS_PER_TASK $RAY_AUTH_MODE $RAY_AUTH_TOKEN $*" >>"$HERE/started"
count=$(grep -c "^$NODE " "$HERE/started")
((count > ${FAILURES:-0})) || [[ $* == *--head* ]] || exit 1
touch "$HERE/joined.$NODE"
exec /bin/sleep 30 >/dev/null 2>&1
"""
# A ray whose cluster has the GPUs of the nodes that have joined.
RAY_MODULE = """
import glob, os
is_initialized = lambda: bool(nodes())
def init(**_):
    if not is_initialized():
        raise ConnectionError("no cluster at " + os.environ["RAY_ADDRESS"])
def nodes():
    joined = glob.glob(os.environ["HERE"] + "/joined.*")
    return [{"NodeManagerAddress": path.rsplit(".", 1)[1], "Alive": True} for path in joined]
def cluster_resources():
    return {"GPU": 4.0 * len(nodes())}
"""
LAUNCH = (
    '#!/usr/bin/env bash\necho "$NNODES $NGPUS_PER_NODE $RAY_ADDRESS $RAY_AUTH_TOKEN $*" >"$HERE/launched"\nexit 7\n'
)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    for name, text in {
        "bin/srun": SRUN,
        "bin/python3": PYTHON,
        "bin/ray": RAY,
        "bin/scontrol": '#!/usr/bin/env bash\nprintf "%s\\n" $3\n',
        "bin/sleep": '#!/usr/bin/env bash\nexec /bin/sleep "$([[ $1 == 5 ]] && echo 0.1 || echo "$1")"\n',
        "modules/ray.py": RAY_MODULE,
        "project/examples/run_test.sh": LAUNCH,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def submit(job: Path, **variables: str) -> tuple[int, str]:
    """Run a copy of the script, as Slurm does; its exit status and its errors."""
    (job / "slurm_script").write_text((ROOT / "examples/slurm_grail.sh").read_text())
    environment = {
        "PATH": f"{job}/bin:/usr/bin:/bin",
        "PYTHONPATH": str(job / "modules"),
        "HERE": str(job),
        "REAL": sys.executable,
        "SLURM_JOB_NODELIST": "node1 node2",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "48",
        "SLURM_SUBMIT_DIR": str(job / "project"),
        "node1_towards_node2": "10.0.0.1",
        "node2_towards_10_0_0_1": "10.0.0.2",
        "WAIT_SECONDS": "60",
        **variables,
    }
    command = ["bash", str(job / "slurm_script"), "run_test.sh", "trainer.x=1"]
    result = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=100)
    return result.returncode, result.stderr


def test_two_nodes_come_together_and_the_run_starts_once(job: Path) -> None:
    status, said = submit(job, FAILURES="2")
    assert status == 7, said
    nodes, gpus, address, token, argument = (job / "launched").read_text().split()
    assert (nodes, gpus, address, argument) == ("2", "4", "10.0.0.1:6379", "trainer.x=1")
    assert re.fullmatch("[0-9a-f]{64}", token)
    # The nodes start side by side: on a busy machine a node may ask for the head before it is there, and asks again.
    head, *joins = sorted((job / "started").read_text().splitlines())
    # Every step has the cores, and the head, the nodes and the run one token.
    shared = f"48 token {token} start"
    cores = "--num-cpus=48 --num-gpus=4 --block"
    assert head == f"node1 {shared} --head --node-ip-address=10.0.0.1 --port=6379 {cores}"
    assert joins == [f"node2 {shared} --address=10.0.0.1:6379 --node-ip-address=10.0.0.2 {cores}"] * 3
