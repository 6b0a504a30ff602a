"""Write requirements.lock: the whole GPU environment that requirements.txt resolves to, with versions and hashes.

    uv pip install uv; python scripts/lock_gpu.py

Resolves for Linux x86_64 with Python 3.11 and 3.12, one version of each package for both; stops where the requirements of
any two packages contradict each other. A package without a wheel that needs torch for its metadata (flash-attn) has
its requirements in ``METADATA``. Asks the package index through uv, which has variables of its own (``UV_DEFAULT_INDEX``) and
does not read pip's configuration; downloads metadata only.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
REQUIREMENTS, LOCK = ROOT / "requirements.txt", ROOT / "requirements.lock"
PYTHONS = ("3.11", "3.12")
PLATFORM = "x86_64-manylinux_2_35"
METADATA = """\
[[dependency-metadata]]
name = "flash-attn"
version = "2.8.3"
requires-dist = ["torch", "einops"]
"""
HEADER = """\
# The complete environment of requirements.txt with hashes, written by scripts/lock_gpu.py; scripts/setup_gpu.sh installs it.
# Wheels for Linux x86_64 and Python 3.11 and 3.12, and the source where there is no wheel.
"""


def resolve(python: str, constraints: list[str]) -> list[dict]:
    """The packages that ``python`` needs, as pylock.toml (PEP 751) lists them."""
    with tempfile.TemporaryDirectory() as folder:
        settings, others, output = (Path(folder, name) for name in ("uv.toml", "constraints.txt", "pylock.toml"))
        settings.write_text(METADATA)
        others.write_text("".join(f"{line}\n" for line in constraints))
        command = ["uv", "pip", "compile", "--quiet", "--config-file", str(settings), "--format", "pylock.toml"]
        command += ["--generate-hashes", "--index-strategy", "unsafe-best-match", "--constraint", str(others)]
        command += ["--python-version", python, "--python-platform", PLATFORM, "--output-file", str(output)]
        subprocess.run([*command, str(REQUIREMENTS)], check=True, stdout=subprocess.DEVNULL)
        return tomllib.loads(output.read_text())["packages"]


def files(package: dict) -> list[dict]:
    """Files of a package that an installation may take: its wheels, or its source where it has none."""
    return package.get("wheels") or [package["sdist"]]


def file_name(file: dict) -> str:
    return file.get("name") or file["url"].rsplit("/", 1)[1]


def glibc(packages: list[dict]) -> str:
    """The oldest glibc for which every package has a wheel, as in ``2.31``."""
    needed = [(2, 17)]
    for package in packages:
        tags = [re.findall(r"manylinux_(\d+)_(\d+)_x86_64", file_name(file)) for file in files(package)]
        if tags and all(tags):
            needed.append(min((int(a), int(b)) for versions in tags for a, b in versions))
    return "{}.{}".format(*max(needed))


def main() -> None:
    """Write the lock."""
    resolved: list[list[dict]] = []
    for python in PYTHONS:
        resolved.append(resolve(python, [f"{p['name']}=={p['version']}" for part in resolved for p in part]))
    names = [{canonicalize_name(package["name"]) for package in part} for part in resolved]
    packages = {canonicalize_name(package["name"]): package for part in resolved for package in part}
    wanted = [Requirement(line) for line in REQUIREMENTS.read_text().splitlines() if line and line[0] != "#"]
    extras = {canonicalize_name(pin.name): f"[{','.join(sorted(pin.extras))}]" for pin in wanted if pin.extras}

    needed = max((glibc(part) for part in resolved), key=lambda version: int(version.split(".")[1]))
    lines = [HEADER, f"# needs glibc {needed}\n"]
    for name in sorted(packages):
        pythons = [python for python, part in zip(PYTHONS, names, strict=True) if name in part]
        marker = "" if len(pythons) == len(PYTHONS) else f' ; python_version == "{pythons[0]}"'
        every = [p for part in resolved for p in part if canonicalize_name(p["name"]) == name]
        digests = sorted({file["hashes"]["sha256"] for package in every for file in files(package)})
        pin = f"{name}{extras.get(name, '')}=={packages[name]['version']}{marker}"
        lines.append(" \\\n    ".join([pin, *(f"--hash=sha256:{digest}" for digest in digests)]) + "\n")
    LOCK.write_text("".join(lines))


if __name__ == "__main__":
    main()
