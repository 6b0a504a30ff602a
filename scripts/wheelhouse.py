"""What a machine without a package index needs for ``scripts/gpu_check.sh``, beside torch and transformers.

    python scripts/wheelhouse.py pack FOLDER            where an index is: wheels, in pieces of at most 50 MB
    python scripts/wheelhouse.py install FOLDER VENV    there: an environment VENV on top of this interpreter's

Names are those of ``wheelhouse.txt``, versions and hashes those of the locks; this project's own wheel comes with them.
``pack --python 3.11`` is for another Python than 3.12; ``--have FILE`` leaves out what the other machine has, by
``pip list --format=freeze``. ``install`` takes pieces from anywhere below FOLDER, needs pip alone and changes nothing outside
VENV.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIECE = 50_000_000
"""Bytes of a piece at most."""
NAMES = (ROOT / "scripts" / "wheelhouse.txt").read_text(encoding="utf-8").split()
SOURCES = ("antlr4-python3-runtime",)
"""Published without a wheel; pure Python."""
TRL = "trl"
"""In a folder of its own, because verl cannot start where it can import this TRL (docs/trl.md)."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]


def locked() -> dict[str, str]:
    """By name, the lines of the locks that ask for a package, hashes included."""
    lines = {}
    for lock in ("requirements-trl.txt", "requirements-cpu.txt", "requirements.txt"):
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


def pack(folder: Path, python: str, have: set[str]) -> None:
    """Download the wheels and lay them out in pieces."""
    lines = locked()
    names = [name for name in [*NAMES, TRL] if name not in have]
    with tempfile.TemporaryDirectory() as temporary:
        wheels, wanted = Path(temporary, "wheels"), Path(temporary, "wanted.txt")
        platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
        target = ["--only-binary", ":all:", "--python-version", python, "--implementation", "cp", *platforms]
        for hashed in (True, False):
            group = [lines[name] for name in names if name not in SOURCES and ("--hash" in lines[name]) is hashed]
            wanted.write_text("\n".join(group) + "\n", encoding="utf-8")
            if group:
                pip("download", "--no-deps", *target, "--dest", str(wheels), "--requirement", str(wanted))
        for name in SOURCES:
            if name in names:
                wanted.write_text(lines[name] + "\n", encoding="utf-8")
                pip("wheel", "--no-deps", "--wheel-dir", str(wheels), "--requirement", str(wanted))
        pip(
            "wheel", "--no-deps", "--wheel-dir", str(wheels), str(ROOT)
        )  # verl finds its plug-in by the installed package
        rooms: list[int] = []
        for name, content in parts(wheels):
            number = next((at for at, room in enumerate(rooms) if room >= len(content)), len(rooms))
            if number == len(rooms):
                rooms.append(PIECE)
            rooms[number] -= len(content)
            piece = folder / f"piece-{number + 1:02}"
            piece.mkdir(parents=True, exist_ok=True)
            (piece / name).write_bytes(content)
    print(f"{len(names)} packages for Python {python} in {len(rooms)} pieces: {folder}/piece-*")


def parts(wheels: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of files: wheels, the large ones cut."""
    for wheel in sorted(wheels.glob("*.whl"), key=lambda path: -path.stat().st_size):
        content = wheel.read_bytes()
        if len(content) <= PIECE:
            yield wheel.name, content
            continue
        for number, start in enumerate(range(0, len(content), PIECE)):
            yield f"{wheel.name}.part{number:02}", content[start : start + PIECE]


def join(folder: Path, to: Path) -> None:
    """Put all wheels below a folder into one, cut ones together again."""
    to.mkdir(parents=True)
    for path in sorted(folder.rglob("*.whl*"), key=lambda path: path.name):
        if path.suffix == ".whl" or ".whl.part" in path.name:
            with (to / path.name.partition(".part")[0]).open("ab") as file:
                file.write(path.read_bytes())


def install(folder: Path, environment: Path) -> None:
    """Make an environment that also sees the packages of this interpreter, and install the wheels into it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = str(environment / "bin" / "python")
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", show], capture_output=True, text=True, check=True).stdout.strip()
    seen = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    Path(own, "packages_below.pth").write_text("\n".join(seen) + "\n", encoding="utf-8")
    offline = ["install", "--no-index", "--no-deps", "--ignore-installed"]
    with tempfile.TemporaryDirectory() as temporary:
        wheels = Path(temporary, "wheels")
        join(folder, wheels)
        own_folder = [str(wheel) for wheel in wheels.glob(f"{TRL}-*.whl")]
        others = [str(wheel) for wheel in wheels.glob("*.whl") if str(wheel) not in own_folder]
        if others:
            pip(*offline, "--find-links", str(wheels), *others, python=python)
        if own_folder:
            pip(*offline, "--target", str(environment / TRL), *own_folder, python=python)
    print(f"PYTHON={python} bash scripts/gpu_check.sh")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--python", default="3.12")
    packing.add_argument("--have", type=Path)
    installing = commands.add_parser("install")
    installing.add_argument("folder", type=Path)
    installing.add_argument("environment", type=Path)
    options = parser.parse_args()
    if options.command == "install":
        install(options.folder.resolve(), options.environment.absolute())
        return
    lines = options.have.read_text(encoding="utf-8").splitlines() if options.have else []
    pack(options.folder, options.python, {canonical(re.split(r"[=\s]", line)[0]) for line in lines})


if __name__ == "__main__":
    main()
