"""scripts/setup_gpu.sh on a small project, with the real uv and package indexes of local folders.

Machines with GPUs are stand-ins for nvidia-smi and nvcc. scripts/setup_cpu.sh makes the environment of these tests.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
UV = str(shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"))
PYTHON = str(Path(sys.executable).resolve())
BUILD = '[build-system]\nrequires = ["setuptools>=77"]\nbuild-backend = "setuptools.build_meta"\n'
OURS = BUILD + '[project]\nname = "ours"\nversion = "1"\n[tool.setuptools]\npackages = ["grail_advantage"]\n'
CUDA = "class cuda:\n    is_available = staticmethod(lambda: True)\n"
FLASH_ATTN = """
import os, setuptools, torch
os.makedirs("flash_attn", exist_ok=True)
built = [os.environ.get(name) for name in ("FLASH_ATTENTION_FORCE_BUILD", "FLASH_ATTN_CUDA_ARCHS")]
open("flash_attn/__init__.py", "w").write(f"built = {built!r}")
setuptools.setup(name="flash-attn", version="2.8.3", packages=["flash_attn"])
"""


def publish(index: Path, name: str, version: str, files: dict[str, str]) -> str:
    """Put a wheel for any machine into a simple index (PEP 503); its pin with its hash."""
    dist, tag = f"{name}-{version}.dist-info", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {**files, f"{dist}/METADATA": metadata, f"{dist}/WHEEL": tag}
    folder = index / canonicalize_name(name)
    folder.mkdir(parents=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in (files | {f"{dist}/RECORD": "".join(f"{path},,\n" for path in files)}).items():
            information = zipfile.ZipInfo(path)
            information.external_attr = 0o100755 << 16
            archive.writestr(information, text)
    return listed(wheel, f"{name}=={version}")


def listed(file: Path, pin: str) -> str:
    (file.parent / "index.html").write_text(f'<html><body><a href="{file.name}">{file.name}</a></body></html>')
    return f"{pin} --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}\n"


class Project:
    """A small project with the real script and its environment, beside the two indexes that it installs from."""

    def __init__(self, folder: Path) -> None:
        self.here, self.folder = folder, folder / "project"
        self.tools, self.venv = folder / "tools", self.folder / ".venv"
        registry = {"verl/trainer/ppo/core_algos.py": "ADV_ESTIMATOR_REGISTRY = {'grail': None}\n"}
        pins = [publish(folder / "pypi", "verl", "0.9.1", registry)]
        pins += [publish(folder / "pypi", "torch", "2.11.0", {"torch/__init__.py": CUDA})]
        source = folder / "pypi/flash-attn/flash_attn-2.8.3"
        source.mkdir(parents=True)
        (source / "setup.py").write_text(FLASH_ATTN)
        (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
        with tarfile.open(f"{source}.tar.gz", "w:gz") as archive:
            archive.add(source, source.name)
        digest = listed(Path(f"{source}.tar.gz"), "").rpartition("=")[2].strip()
        shutil.copytree(ROOT / "scripts", self.folder / "scripts")
        script = self.folder / "scripts/setup_gpu.sh"
        script.write_text(re.sub("sha256:[0-9a-f]{64}", digest, script.read_text()))
        (self.folder / "pyproject.toml").write_text(OURS)
        (self.folder / "grail_advantage").mkdir()
        (self.folder / "grail_advantage/__init__.py").touch()
        installed = distribution("setuptools")
        paths = [path for path in installed.files or () if path.suffix in (".py", ".txt") and path.parts[0] != ".."]
        pins += [publish(folder / "pypi", "setuptools", installed.version, {str(p): p.read_text() for p in paths})]
        (self.folder / "requirements.txt").write_text("".join(pins))
        subprocess.run([UV, "venv", "--quiet", "--python", PYTHON, self.venv], check=True)
        self.tool("uv", f'exec {UV} "$@"')
        self.tool("nvidia-smi", "echo '580.95.05, 9.0'; echo '580.95.05, 8.6'")
        self.tool("nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")

    def tool(self, name: str, text: str) -> None:
        self.tools.mkdir(exist_ok=True)
        (self.tools / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (self.tools / name).chmod(0o755)

    def run(self, *arguments: str, **variables: str) -> tuple[int, str]:
        clean = {k: v for k, v in os.environ.items() if not re.match("PIP_|UV_|PYTHON|CUDA_|VIRTUAL", k)}
        path = [entry for entry in clean["PATH"].split(os.pathsep) if not Path(entry, "uv").exists()]
        environment = clean | {
            "PATH": os.pathsep.join([str(self.tools), *path]),
            "PYTHON": f"{self.venv}/bin/python",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": (self.here / "pypi").as_uri(),
            "UV_NO_CONFIG": "1",
            "UV_CACHE_DIR": str(self.here / "cache"),
            "FLASH_ATTN_INDEX": f"{(self.here / 'none').as_uri()} {(self.here / 'other').as_uri()}",
        }
        command = ["bash", str(self.folder / "scripts/setup_gpu.sh"), *arguments]
        done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stderr

    def prints(self, expression: str, module: str) -> str:
        code = f"import {module} as m; from importlib.metadata import version; print({expression})"
        return subprocess.check_output([self.venv / "bin/python", "-c", code], text=True, cwd="/").strip()


@pytest.fixture
def gpu(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.slow
def test_wheel_of_flash_attn(gpu: Project) -> None:
    """From the first index that has one, without a compiler; called again, it stays."""
    (gpu.tools / "nvcc").unlink()
    publish(gpu.here / "other", "flash_attn", "2.8.3+cu130", {"flash_attn/__init__.py": "built = None"})
    for source in ("wheel, for 80;90", "there, for 80;90"):
        status, said = gpu.run(CUDA_HOME="/nowhere")
        assert status == 0 and f"from: {source}" in said and gpu.prints("m.built", "flash_attn") == "None", said


@pytest.mark.slow
def test_flash_attn_is_compiled_on_request(gpu: Project) -> None:
    publish(gpu.here / "other", "flash_attn", "2.8.3", {"flash_attn/__init__.py": "built = None"})
    status, said = gpu.run("--requirements-only", FLASH_ATTN="build", FLASH_ATTN_CUDA_ARCHS="120")
    assert status == 0 and gpu.prints("m.built", "flash_attn") == "['TRUE', '120']", said


REFUSED = {
    "no GPU": ({"nvidia-smi": "exit 9"}, {}, "nvidia-smi shows no GPU"),
    "old driver": ({"nvidia-smi": "echo 570.172.08, 9.0"}, {}, "driver is 570.172.08, and CUDA 13.0 needs 580.65.06"),
    "full disk": ({"df": "echo Avail; echo 12000000000"}, {}, "less than the 13 GB free"),
    "old nvcc": ({"nvcc": "echo Cuda compilation tools, release 12.8, V12.8.9"}, {}, "is 12.8; install the CUDA 13.0"),
    "Python": ({}, {"PYTHON": "/nowhere"}, "PYTHON=/nowhere is no interpreter that runs"),
}


@pytest.mark.slow
def test_refused_before_anything_is_installed(gpu: Project) -> None:
    usual = {name: (gpu.tools / name).read_text() for name in ("nvidia-smi", "nvcc")}
    for tools, knobs, message in REFUSED.values():
        for name, text in tools.items():
            gpu.tool(name, text)
        status, said = gpu.run(**knobs)
        assert status == 1 and message in said.splitlines()[-1]
        assert not list(gpu.venv.glob("lib/python3*/site-packages/*.dist-info"))
        for name in tools:
            (gpu.tools / name).write_text(usual[name]) if name in usual else (gpu.tools / name).unlink()
    gpu.tool("nvidia-smi", "exit 9")  # as while an image is built
    status, said = gpu.run("--requirements-only", ANY_MACHINE="1")
    assert status == 0 and "continuing with ANY_MACHINE=1 although nvidia-smi shows no GPU" in said
    assert gpu.prints("m.built", "flash_attn") == "['TRUE', None]"


@pytest.mark.parametrize("name", ["requirements", "requirements-cpu"])
def test_lock_has_what_is_asked_for_and_hashes(name: str) -> None:
    def pins(ending: str) -> dict[str, str]:
        found = re.findall(r"^(\w[^ \[=]+).*==([^ \n]+)", (ROOT / f"{name}.{ending}").read_text(), flags=re.M)
        return {canonicalize_name(package): version for package, version in found}

    asked, locked = pins("in"), pins("txt")
    if name == "requirements-cpu":  # every index has a CPU build of its own
        assert asked.pop("torch") and "torch" not in locked
    assert asked and asked.items() <= locked.items()
    blocks = re.split(r"(?<!\\)\n", (ROOT / f"{name}.txt").read_text().strip())[1:]
    assert len(blocks) == len(locked) and all(re.search(r"--hash=sha256:[0-9a-f]{64}$", block) for block in blocks)
