"""A machine with torch and transformers alone and no network: the GPU check's pieces are packed, carried, installed, run dry.

Takes some ten minutes and a package index, so it runs where ``GPU_REHEARSAL=1`` asks for it. ``GSM8K=FILE`` names problems;
without it, made-up ones take their place.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("GPU_REHEARSAL") != "1", reason="by hand: GPU_REHEARSAL=1"),
]
THERE, HIDDEN = ("torch", "transformers"), {"pydantic", "pydantic-core", "annotated-types", "typing-inspection"}
OFFLINE = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
LIMIT = 60 << 20


def closure(names: tuple[str, ...]) -> set[str]:
    """Names of installed packages, and of all that they need."""
    found, left = set(), list(names)
    while left:
        name = left.pop()
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:  # for another platform
            continue
        if name not in found:
            found.add(name)
            left += [re.split(r"[^\w.-]", need)[0] for need in needs if "extra ==" not in need]
    return found


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of this repository on a machine whose Python, ``machine/bin/python``, has torch and transformers alone."""
    folder = tmp_path_factory.mktemp("there")
    packages = folder / "packages"
    packages.mkdir()
    for name in closure(THERE) - HIDDEN:
        for file in distribution(name).files or []:
            top = Path(distribution(name).locate_file(file.parts[0]))
            link = packages / file.parts[0]
            if file.parts[0] not in ("..", "__pycache__") and not link.exists():
                link.symlink_to(top)
    subprocess.run([sys.executable, "-m", "venv", folder / "machine"], check=True)
    (own,) = (folder / "machine/lib").glob("python*/site-packages")
    (own / "there.pth").write_text(f"{packages}\n")
    tree = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tree.split("\0")):
        if (ROOT / name).is_file():
            (folder / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "clone" / name)
    return folder


def there(machine: Path, *command: str | Path) -> str:
    """Run a command in the clone, without a network; its output."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(machine), "PYTHON": str(machine / "machine/bin/python")}
    environment |= {"OMP_WAIT_POLICY": "PASSIVE", "PIP_CONFIG_FILE": os.devnull}
    if (machine / "clone/outputs/check").is_dir():
        environment["PYTHON"] = str(machine / "clone/outputs/check/bin/python")
    line = [*OFFLINE, *map(str, command)]
    done = subprocess.run(
        line, cwd=machine / "clone", env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def test_packed_carried_installed_and_run(machine: Path) -> None:
    results, pieces = machine / "results", machine / "pieces"
    check = ("bash", "scripts/gpu_check.sh", "--dry", "--results", results)
    there(machine, *check, "a")

    problems = Path(os.environ.get("GSM8K", machine / "problems.jsonl"))
    if "GSM8K" not in os.environ:
        rows = ({"question": f"What is {i} + 1?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(40))
        problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    version = "{}.{}".format(*sys.version_info)
    pack = [sys.executable, "scripts/wheelhouse.py", "pack", pieces, "--python", version, "--gsm8k", problems]
    subprocess.run(pack, cwd=ROOT, check=True)
    sizes = {piece.name: sum(file.stat().st_size for file in piece.iterdir()) for piece in pieces.iterdir()}
    # The tree travels with each piece.
    tree = sum(path.stat().st_size for path in (machine / "clone").rglob("*") if path.is_file())
    assert max(sizes.values()) + tree < LIMIT, (sizes, tree)
    assert len([name for name in sizes if name.startswith("smollm2")]) == 2

    for group, parts in (("trl", "b"), ("smollm2", "d"), ("verl", "c")):
        for piece in pieces.glob(f"{group}-*"):
            shutil.copytree(piece, machine / "clone/outputs/wheels" / piece.name)
        python = machine / "machine/bin/python"
        there(machine, python, "scripts/wheelhouse.py", "install", "outputs/wheels", "outputs/check")
        there(machine, *check, *parts)
        shutil.rmtree(machine / "clone/outputs/wheels")
    found = {part: json.loads((results / f"{part}.json").read_text())["status"] for part in "abcd"}
    assert found == dict.fromkeys("abcd", "passed")
    assert sum(path.stat().st_size for path in results.iterdir()) < 16 << 20
