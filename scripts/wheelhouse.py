"""What a machine without a package index needs for ``scripts/gpu_check.sh``, beside torch and transformers.

    python scripts/wheelhouse.py pack FOLDER --gsm8k FILE    where an index is: pieces of at most 50 MB
    python scripts/wheelhouse.py install FOLDER VENV         there: an environment VENV on top of this interpreter's

Pieces are ``trl-01``, ... (part b of the check), ``smollm2-01``, ... (part d, with those) and ``verl-01``, ... (part c, with
those of trl). FILE has problems of GSM8K, a line of JSON each with ``question`` and ``answer``; else part d reads the hub.
Names are those of ``wheelhouse.txt``, versions and hashes those of the locks; this project's own wheel comes with them.
``pack --python 3.11`` is for another Python than 3.12; ``--have FILE`` leaves out what the other machine has, by
``pip list --format=freeze``. ``install`` takes the pieces that are below FOLDER, all of a group or none, may be called again
with more groups, needs pip alone and changes nothing outside VENV.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIECE = 50_000_000
"""Bytes of a piece at most."""
SOURCES = ("antlr4-python3-runtime",)
"""Published without a wheel; pure Python."""
TRL = "trl"
"""In a folder of its own, because verl cannot start where it can import this TRL (docs/trl.md)."""
GSM8K = "gsm8k.jsonl"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]


def locked() -> dict[str, str]:
    """By name, the lines of the locks that ask for a package, hashes included."""
    lines = {}
    for lock in ("requirements-smollm2.txt", "requirements-trl.txt", "requirements-cpu.txt", "requirements.txt"):
        text = (ROOT / lock).read_text(encoding="utf-8")
        for entry in re.finditer(r"^([A-Za-z0-9][\w.-]*)==(?:.*\\\n)*.*$", text, re.MULTILINE):
            lines[canonical(entry[1])] = entry[0]
    return lines


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pip(*arguments: str, python: str | None = None) -> None:
    """Call pip, for another interpreter where one is named."""
    of = ["--python", python] if python else []
    subprocess.run([sys.executable, "-m", "pip", *of, "--quiet", "--disable-pip-version-check", *arguments], check=True)


def pack(folder: Path, python: str, have: set[str], gsm8k: Path | None) -> None:
    """Download the wheels and lay them out in pieces, group by group."""
    lines, groups = locked(), {}
    for line in (ROOT / "scripts" / "wheelhouse.txt").read_text(encoding="utf-8").splitlines():
        group, _, names = line.partition(": ")
        groups.setdefault(group, []).extend(name for name in names.split() if name not in have)
    target = ["--only-binary", ":all:", "--python-version", python, "--implementation", "cp"]
    target += [word for platform in PLATFORMS for word in ("--platform", platform)]
    for group, names in groups.items():
        with tempfile.TemporaryDirectory() as temporary:
            files = Path(temporary, "files")
            files.mkdir()
            fetch([lines[name] for name in names if name not in SOURCES], "download", *target, "--dest", str(files))
            fetch([lines[name] for name in names if name in SOURCES], "wheel", "--wheel-dir", str(files))
            if group == TRL:  # verl finds its plug-in by the installed package
                pip("wheel", "--no-deps", "--wheel-dir", str(files), str(ROOT))
            if group == "smollm2" and gsm8k is not None:
                shutil.copy(gsm8k, files / GSM8K)
            pieces = lay_out(files, folder, group)
        print(f"{group}: {len(names)} packages for Python {python} in {pieces} pieces, {folder}/{group}-*")


def fetch(lines: list[str], *command: str) -> None:
    """Call pip for locked packages; it takes those with hashes and those without in two calls."""
    for hashed in (True, False):
        if chosen := [line for line in lines if ("--hash" in line) is hashed]:
            with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
                file.write("\n".join(chosen) + "\n")
                file.flush()
                pip(*command, "--no-deps", "--requirement", file.name)


def lay_out(files: Path, folder: Path, group: str) -> int:
    """Put files into as few pieces as the first that has room for each makes, the large ones cut; returns how many."""
    rooms: list[int] = []
    for path in sorted(files.iterdir(), key=lambda path: -path.stat().st_size):
        content = path.read_bytes()
        for number, start in enumerate(range(0, len(content), PIECE)):
            part = content[start : start + PIECE]
            place = next((at for at, room in enumerate(rooms) if room >= len(part)), len(rooms))
            if place == len(rooms):
                rooms.append(PIECE)
            rooms[place] -= len(part)
            piece = folder / f"{group}-{place + 1:02}"
            piece.mkdir(parents=True, exist_ok=True)
            (piece / f"{path.name}.part{number:02}").write_bytes(part)
    return len(rooms)


def install(folder: Path, environment: Path) -> None:
    """Make an environment that also sees the packages of this interpreter, and install into it what the pieces have."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = str(environment / "bin" / "python")
    show = "import json, sys, sysconfig; print(json.dumps([sysconfig.get_path('purelib'), sys.path]))"
    own, there = json.loads(subprocess.run([python, "-Ic", show], stdout=subprocess.PIPE, check=True).stdout)
    seen = [folder for folder in sys.path[1:] if folder not in there]
    if seen:  # not where it was made by an earlier call
        Path(own, "packages_below.pth").write_text("\n".join(seen) + "\n", encoding="utf-8")
    with tempfile.TemporaryDirectory() as temporary:
        for part in sorted(folder.rglob("*.part[0-9][0-9]"), key=lambda part: part.name):
            with Path(temporary, part.stem).open("ab") as file:
                file.write(part.read_bytes())
        offline = ["install", "--no-index", "--no-deps", "--ignore-installed"]
        wheels = [str(wheel) for wheel in Path(temporary).glob("*.whl")]
        for target, chosen in (
            ([], [wheel for wheel in wheels if not Path(wheel).name.startswith(f"{TRL}-")]),
            (
                ["--upgrade", "--target", str(environment / TRL)],
                [str(wheel) for wheel in Path(temporary).glob(f"{TRL}-*.whl")],
            ),
        ):
            if chosen:
                pip(*offline, *target, *chosen, python=python)
        if Path(temporary, GSM8K).is_file():
            shutil.copy(Path(temporary, GSM8K), environment)
    print(f"PYTHON={python} bash scripts/gpu_check.sh")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--python", default="3.12")
    packing.add_argument("--have", type=Path)
    packing.add_argument("--gsm8k", type=Path)
    installing = commands.add_parser("install")
    installing.add_argument("folder", type=Path)
    installing.add_argument("environment", type=Path)
    options = parser.parse_args()
    if options.command == "install":
        install(options.folder.resolve(), options.environment.absolute())
        return
    lines = options.have.read_text(encoding="utf-8").splitlines() if options.have else []
    pack(options.folder, options.python, {canonical(re.split(r"[=\s]", line)[0]) for line in lines}, options.gsm8k)


if __name__ == "__main__":
    main()
