"""Write requirements-cpu.lock: requirements-cpu.txt with the SHA-256 of every file that an installation may take.

    uv pip install uv; python scripts/lock_cpu.py

Asks the package index through uv, which has variables of its own (``UV_DEFAULT_INDEX``) and does not read pip's configuration.
torch stays out: which wheel is right depends on the index, so scripts/setup_cpu.sh installs it by itself.
"""

from __future__ import annotations

import subprocess
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
REQUIREMENTS, LOCK = ROOT / "requirements-cpu.txt", ROOT / "requirements-cpu.lock"
PYTHONS = ("3.11", "3.12")
PLATFORM = "x86_64-manylinux_2_39"
WITHOUT_HASH = ("torch",)
HEADER = """\
# Hashes of requirements-cpu.txt, written by scripts/lock_cpu.py; scripts/setup_cpu.sh installs this with pip or uv.
# Wheels for Linux x86_64 and Python 3.11 and 3.12, and the source where there is no wheel. Without torch, which is per index.
"""


def requirements() -> list[Requirement]:
    """The pins of requirements-cpu.txt."""
    lines = REQUIREMENTS.read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def hashes(pins: list[str], python: str) -> dict[str, set[str]]:
    """Canonical name to the SHA-256 of the files that ``python`` may install."""
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "pins.txt"), Path(folder, "pylock.toml")
        source.write_text("\n".join(pins) + "\n")
        command = ["uv", "pip", "compile", "--quiet", "--no-deps", "--generate-hashes", "--format", "pylock.toml"]
        command += ["--index-strategy", "unsafe-best-match", "--python-version", python, "--python-platform", PLATFORM]
        subprocess.run([*command, "--output-file", str(output), str(source)], check=True, stdout=subprocess.DEVNULL)
        packages = tomllib.loads(output.read_text())["packages"]
    return {
        canonicalize_name(package["name"]): {
            file["hashes"]["sha256"] for file in package.get("wheels") or [package["sdist"]]
        }
        for package in packages
    }


def main() -> None:
    """Write the lock."""
    wanted = [requirement for requirement in requirements() if requirement.name not in WITHOUT_HASH]
    by_python = [hashes([str(requirement) for requirement in wanted], python) for python in PYTHONS]
    lines = [HEADER]
    for requirement in sorted(wanted, key=lambda requirement: canonicalize_name(requirement.name)):
        every = sorted(set().union(*(part[canonicalize_name(requirement.name)] for part in by_python)))
        lines.append(" \\\n    ".join([str(requirement), *(f"--hash=sha256:{digest}" for digest in every)]) + "\n")
    LOCK.write_text("".join(lines))


if __name__ == "__main__":
    main()
