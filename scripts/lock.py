"""Write requirements.txt and requirements-cpu.txt: the environments of the ``.in`` files with all that follows, with hashes.

    .venv/bin/python scripts/lock.py                              # versions stay where they still fit
    .venv/bin/python scripts/lock.py --upgrade-package wandb      # arguments go to uv pip compile

``uv pip compile`` resolves for Linux x86_64, one version of each package for Python 3.11 and 3.12. Its own output would list
the files of every platform, six times as many lines; here are those that these two can take: wheels, or the source where there
is no wheel. It asks PyPI or the index that ``UV_DEFAULT_INDEX`` names, and downloads metadata only.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12")
PLATFORM = "x86_64-manylinux_2_35"
LEFT_OUT = {
    "requirements": "",
    # torch comes from another index (scripts/setup_cpu.sh). PyPI's torchvision, torchaudio and torchcodec are CUDA builds, and
    # break `import transformers` next to a CPU torch; triton is 1 GB for kernels on a GPU. dashscope and llama_models are
    # installed for the tokenizer files that they carry, without httpx-sse, tenacity, termcolor and websocket-client. pycosat
    # has no wheel; of the puzzles that use it, none is made here (verl_cpu/tiny/task.py).
    "requirements-cpu": "torch torchvision torchaudio torchcodec triton httpx-sse tenacity termcolor websocket-client pycosat",
}


def compile_(source: Path, output: Path, *arguments: str) -> None:
    """``uv pip compile`` for the platform."""
    command = ["uv", "pip", "compile", "--quiet", "--python-platform", PLATFORM, *arguments]
    subprocess.run([*command, "--output-file", str(output), str(source)], check=True, stdout=subprocess.DEVNULL)


def resolved(name: str, arguments: list[str], folder: Path) -> list[dict[str, dict]]:
    """For each Python, the packages by name, as pylock.toml (PEP 751) lists them."""
    source, known, without = ROOT / f"{name}.in", folder / "known.txt", folder / "without.txt"
    # uv prefers the versions of an output that is there already.
    known.write_text("\n".join(re.findall(r"^\w.*==[^ \\]+", (ROOT / f"{name}.txt").read_text(), flags=re.M)))
    without.write_text(LEFT_OUT[name].replace(" ", "\n"))
    found: list[dict[str, dict]] = []
    for python in PYTHONS:
        options = ["--python-version", python, "--excludes", str(without)]
        compile_(source, known, *options, *arguments)
        hashed = folder / f"pylock.{python.replace('.', '')}.toml"
        compile_(source, hashed, *options, "--constraints", str(known), "--generate-hashes", "--format", "pylock.toml")
        found.append({package["name"]: package for package in tomllib.loads(hashed.read_text())["packages"]})
    return found


def lock(name: str, arguments: list[str]) -> str:
    """Text of the locked requirements."""
    with tempfile.TemporaryDirectory() as folder:
        found = resolved(name, arguments, Path(folder))
    lines = [f"# {name}.in and all that follows, by scripts/lock.py, for Linux x86_64 and Python 3.11 and 3.12.\n"]
    for package in sorted(set().union(*found)):
        of_pythons = {python: part[package] for python, part in zip(PYTHONS, found, strict=True) if package in part}
        versions = {each["version"] for each in of_pythons.values()}
        if len(versions) > 1:
            sys.exit(f"lock: {package} would be {' and '.join(sorted(versions))} by Python; ask for one")
        files = [file for each in of_pythons.values() for file in each.get("wheels") or [each["sdist"]]]
        marker = f' ; python_version == "{min(of_pythons)}"' if len(of_pythons) < len(PYTHONS) else ""
        hashes = sorted({f"--hash=sha256:{file['hashes']['sha256']}" for file in files})
        lines.append(" \\\n    ".join([f"{package}=={versions.pop()}{marker}", *hashes]) + "\n")
    return "".join(lines)


if __name__ == "__main__":
    for name in LEFT_OUT:
        (ROOT / f"{name}.txt").write_text(lock(name, sys.argv[1:]))
