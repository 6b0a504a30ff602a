"""Ranks on nodes with addresses of their own (network namespaces) compute what ranks on one node compute, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.verl_ext import nodes_ranks as ranks
from tests.verl_ext.rank_group import Results, of_all_ranks, start_ranks
from tests.verl_ext.test_saliency_pass import write_models
from tests.verl_ext.test_shared_forward import BATCH, _row

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "local_nodes.sh"
ON_EACH = f"""
for node in 1 2; do
    bash {SCRIPT} on $node {sys.executable} -m tests.verl_ext.nodes_ranks $((node - 1)) 2 "$0" >"$0/log$node.txt" 2>&1 &
done
wait
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Results], list[Results]]]:
    """Two ranks on one node, and two on two."""
    folder = tmp_path_factory.mktemp("nodes")
    environment = {**os.environ, "RAY": "0", "PYTHON": sys.executable}
    probe = subprocess.run(["bash", SCRIPT, "2", "true"], env=environment, capture_output=True, text=True)
    if "does not let" in probe.stderr:
        pytest.skip(probe.stderr.strip())
    assert probe.returncode == 0, probe.stderr
    write_models(folder)
    rows = [_row(rollout) for rollout in BATCH]
    plan = {"targets": {tuple(tokens.tolist()): target for tokens, _, target in rows}, "all": [rows[:6], rows[6:12]]}
    for name in ("one", "two"):
        (folder / name).mkdir()
        for entry in folder.iterdir():
            if entry.is_dir() and entry.name not in ("one", "two"):
                (folder / name / entry.name).symlink_to(entry)
        torch.save(plan, folder / name / "plan.pt")
    environment |= {ranks.NODES: "1", "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
    with ThreadPoolExecutor() as pool:
        one = pool.submit(start_ranks, "tests.verl_ext.nodes_ranks", folder / "one", 2)
        command = ["bash", SCRIPT, "2", "bash", "-c", ON_EACH, folder / "two"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        logs = "\n".join(path.read_text()[-3000:] for path in sorted((folder / "two").glob("log*.txt")))
        assert done.returncode == 0, done.stderr + logs
        two = [torch.load(folder / "two" / f"result{rank}.pt", map_location="cpu") for rank in range(2)]
        yield one.result(), two


def _equal(ours: dict, theirs: dict) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        for name in ours
        for a, b in zip(ours[name], theirs[name], strict=True)
    )


@pytest.mark.parametrize("setup", ranks.STEPS)
def test_two_nodes_give_what_one_gives(started: tuple[list[Results], list[Results]], setup: str) -> None:
    one, two = (of_all_ranks(results, "step", setup) for results in started)
    assert [found["host"] for found in two] == ["node1", "node2"]
    for ours, theirs in zip(one, two, strict=True):
        assert any(row.isfinite().any() for row in ours["fused"]["saliency"])
        assert _equal(ours["plain"], theirs["plain"]) and _equal(ours["fused"], theirs["fused"])
        assert ours["norm"] == theirs["norm"] and ours["norm"] > 0
        assert all(map(torch.equal, ours["final"], theirs["final"]))


def test_a_collective_ends_with_an_error_when_a_node_is_cut_off(started: tuple[list[Results], list[Results]]) -> None:
    for found in of_all_ranks(started[1], "cut", "cut"):
        assert found["error"] is not None
        assert ranks.SECONDS - 1 <= found["seconds"] < 10 * ranks.SECONDS
