"""``scripts/find_python.sh``: the interpreter of evaluation and data preparation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parents[2]


def find_python(
    tmp_path: Path, *, gpus: int, has_verl: bool = True, torch_version: str = "2.11.0", **knobs: str
) -> subprocess.CompletedProcess[str]:
    """``scripts/find_python.sh`` on a made-up machine, whose python3 has the given packages; prints what it chose."""
    tools, root, site = tmp_path / "bin", tmp_path / "project", tmp_path / "site"
    for folder in (tools, root / "scripts", site / f"torch-{torch_version}.dist-info"):
        folder.mkdir(parents=True)
    (site / f"torch-{torch_version}.dist-info/METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch\nVersion: {torch_version}\n"
    )
    if has_verl:
        (site / "verl").mkdir()
        (site / "verl/__init__.py").write_text("")
    scripts = {
        tools / "python3": f'#!/bin/bash\nPYTHONPATH={site} exec {sys.executable} -S -c "$2"\n',
        root / "scripts/setup_cpu.sh": "echo set up\n",
    }
    if gpus:
        scripts[tools / "nvidia-smi"] = "#!/bin/bash\n" + "echo 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n" * gpus
    for path, text in scripts.items():
        path.write_text(text)
        path.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    command = (
        f"set -euo pipefail; source {PROJECT_ROOT}/scripts/find_python.sh; find_python {root} evaluate; echo $python"
    )
    return subprocess.run(
        ["bash", "-c", command],
        env={**environment, "PATH": f"{tools}:/usr/bin:/bin", **knobs},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_interpreter_that_is_chosen(tmp_path: Path) -> None:
    """A python3 that has verl, the one that is named, or without GPUs the CPU environment; else what to do is said."""
    for number, machine in enumerate(({"gpus": 2}, {"gpus": 0, "torch_version": "2.11.0+cpu"})):
        found = find_python(tmp_path / str(number), **machine)
        assert (found.returncode, found.stdout) == (0, "python3\n"), found.stderr
    named = find_python(tmp_path / "named", gpus=2, has_verl=False, PYTHON=sys.executable)
    assert (named.returncode, named.stdout) == (0, f"{sys.executable}\n")
    missing = find_python(tmp_path / "missing", gpus=0, PYTHON="/no/python")
    assert missing.returncode == 1 and "PYTHON=/no/python is not a command" in missing.stderr
    cpu = find_python(tmp_path / "cpu", gpus=0, has_verl=False)
    assert (cpu.returncode, cpu.stdout) == (0, f"set up\n{tmp_path}/cpu/project/.venv/bin/python\n")
    for number, packages in enumerate(({"has_verl": False}, {"torch_version": "2.11.0+cpu"})):
        found = find_python(tmp_path / f"gpus{number}", gpus=2, **packages)
        assert (found.returncode, found.stdout) == (1, "") and "this machine has GPUs (2)" in found.stderr
