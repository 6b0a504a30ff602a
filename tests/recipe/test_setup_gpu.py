"""scripts/setup_gpu.sh on machines that stand-in commands describe, the lock that it installs, and the Dockerfile.

The script sees no command but those of one folder: the real ones for text, stand-ins for nvidia-smi, nvcc, df and the like, and
one for the interpreter, which answers what it is asked, writes down what pip is asked for and installs nothing.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.recipe.test_setup_cpu import Index, make_wheel, repack

ROOT = Path(__file__).parents[2]
COMMANDS = [
    "bash",
    "cut",
    "dirname",
    "flock",
    "grep",
    "head",
    "mktemp",
    "paste",
    "rm",
    "sed",
    "sort",
    "tail",
    "touch",
    "tr",
]
COMMANDS += ["uname", "wc"]
PYTHON = r"""#!/usr/bin/env bash
case $* in
    "-m pip --version") exit ${NO_PIP:-0} ;;
    "-m pip cache dir") echo "$HERE/cache" ;;
    "-m pip check") echo "$COMPLAINT"; [[ -z $COMPLAINT ]] ;;
    "-m pip"*)
        list=
        for ((i = 1; i < $#; i++)); do
            next=$((i + 1))
            if [[ ${!i} == -r ]]; then list=$(sed -n 's/^\([a-z][^ ]*\)==.*/\1/p' "${!next}" | tr '\n' ' '); fi
            if [[ ${!i} == --dest ]]; then into=${!next}; fi
            if [[ ${!i} == --index-url ]]; then index=${!next}; fi
        done
        echo "$* | $list| $FLASH_ATTENTION_FORCE_BUILD $MAX_JOBS $FLASH_ATTN_CUDA_ARCHS" >>"$HERE/calls"
        if [[ $* == *" download "* ]]; then
            [[ $index == "$INDEX_WITH_WHEEL" ]] || { echo "ERROR: No matching distribution found"; exit 1; }
            touch "$into/flash_attn-2.8.3-cp312-cp312-linux_x86_64.whl"
        elif [[ $* == *flash_attn-* || $list == "flash-attn " ]]; then
            touch "$HERE/flash_attn"
        fi ;;
    *flash_attn*) [[ -z $BROKEN && -f $HERE/flash_attn ]] || { echo "ImportError: undefined symbol" >&2; exit 1; } ;;
    *ADV_ESTIMATOR_REGISTRY*) ;;
    *is_available*) echo True ;;
    *"%d.%d"*) echo "$VERSION" ;;
    *EXTERNALLY-MANAGED*) echo "$MANAGED" ;;
    *Python.h*) echo "$HERE/include/Python.h" ;;
    *purelib*) echo "$HERE/venv/lib" ;;
    *) echo "unexpected: $*" >&2; exit 1 ;;
esac
"""
TOOLS = {
    "python": PYTHON,
    "nvidia-smi": '#!/usr/bin/env bash\necho -n "$GPUS"\nexit "$SMI_STATUS"\n',
    "getconf": '#!/usr/bin/env bash\ncase $1 in\n    GNU_LIBC_VERSION) echo "glibc $GLIBC" ;;\n'
    "    PAGE_SIZE) echo 4096 ;;\n    _PHYS_PAGES) echo $((MEMORY * 1000000000 / 4096)) ;;\nesac\n",
    "nproc": '#!/usr/bin/env bash\necho "$CORES"\n',
    "df": "#!/usr/bin/env bash\nif [[ $1 == --output=target ]]; then\n    echo Mounted; echo /disk\nelse\n"
    '    echo Avail; echo "${FREE}000000000"\nfi\n',
    # The one file that the script reads is the limit of the control group.
    "cat": '#!/usr/bin/env bash\n[[ $1 == /sys/fs/cgroup/memory.max ]] && echo "$LIMIT"\n',
    "gcc": "#!/usr/bin/env bash\n",
    "nvcc": '#!/usr/bin/env bash\necho "Cuda compilation tools, release $NVCC, V$NVCC.48"\n',
}
MACHINE = {
    "GPUS": "580.95.05, 9.0\n580.95.05, 9.0\n",
    "SMI_STATUS": "0",
    "GLIBC": "2.39",
    "MEMORY": "2000",
    "LIMIT": "max",
    "CORES": "96",
    "FREE": "500",
    "NVCC": "13.0",
    "VERSION": "3.12",
    "MANAGED": "False",
    "COMPLAINT": "",
    "BROKEN": "",
    "INDEX_WITH_WHEEL": "https://wheels.example/simple/",
    "FLASH_ATTN_INDEX": "https://older.example/simple/ https://wheels.example/simple/",
}


class Result(NamedTuple):
    status: int
    calls: list[str]
    """What pip was asked for: arguments | packages of its list | FORCE_BUILD MAX_JOBS ARCHS"""
    said: str


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    tools = tmp_path / "tools"
    (tools / "cuda/bin").mkdir(parents=True)
    (tmp_path / "include").mkdir()
    (tmp_path / "include/Python.h").touch()
    for name in COMMANDS:
        (tools / name).symlink_to(str(shutil.which(name)))
    for name, text in TOOLS.items():
        path = tools / ("cuda/bin/nvcc" if name == "nvcc" else name)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def setup(machine: Path, *arguments: str, without: tuple[str, ...] = (), **facts: str) -> Result:
    """Run the script on a machine that is as ``MACHINE`` says but for ``facts`` and for the files ``without``."""
    for name in without:
        (machine / name).unlink()
    (machine / "calls").unlink(missing_ok=True)
    environment = {"PATH": str(machine / "tools"), "HERE": str(machine), "PYTHON": str(machine / "tools/python")}
    environment |= {"CUDA_HOME": str(machine / "tools/cuda"), "TMPDIR": str(machine), **MACHINE, **facts}
    result = subprocess.run(
        ["bash", str(ROOT / "scripts/setup_gpu.sh"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    calls = machine / "calls"
    return Result(result.returncode, calls.read_text().splitlines() if calls.exists() else [], result.stderr)


def locked() -> dict[str, tuple[Requirement, list[str]]]:
    """Name to requirement and hashes in requirements.lock."""
    found = {}
    for block in re.split(r"(?<!\\)\n", (ROOT / "requirements.lock").read_text()):
        if block and not block.startswith("#"):
            pin, *digests = block.split(" \\\n    ")
            requirement = Requirement(pin)
            found[canonicalize_name(requirement.name)] = requirement, digests
    return found


def build_call(result: Result) -> str:
    (call,) = (call for call in result.calls if "| flash-attn |" in call)
    return call


@pytest.mark.parametrize("arguments", [(), ("--requirements-only",)])
def test_with_verls_wheel(machine: Path, arguments: tuple[str, ...]) -> None:
    """Fetched before the other downloads, from the first index that has it, and installed after torch; no compiler needed."""
    result = setup(machine, *arguments, without=("tools/cuda/bin/nvcc",))
    assert result.status == 0, result.said
    assert "wheel from https://wheels.example/simple/" in result.said
    older, newer, setuptools, everything, wheel, *project = result.calls
    for call, index in ((older, "older"), (newer, "wheels")):
        assert "--only-binary=:all:" in call and "--no-deps" in call
        assert f"--index-url https://{index}.example/simple/ flash-attn==2.8.3 " in call
    assert "--require-hashes" in setuptools and "| setuptools |" in setuptools
    assert "--require-hashes" in everything and "--no-deps" in everything
    names = everything.split("|")[1].split()
    assert {canonicalize_name(Requirement(name).name) for name in names} == set(locked()) - {"flash-attn"}
    assert re.search(r"install --no-deps .*--no-index \S+/flash_attn-2.8.3-cp312-cp312-linux_x86_64.whl", wheel)
    assert [call.split(" | ")[0] for call in project] == (
        [] if arguments else ["-m pip -q install --no-deps --no-build-isolation -e ."]
    )


@pytest.mark.parametrize(
    ("gpus", "architectures"),
    [
        ("580.95.05, 9.0\n580.95.05, 9.0\n", "90"),
        ("580.65.06, 8.9\n", "80"),
        ("581.0, 12.0\n581.0, 8.6\n581.0, 8.0\n", "80;120"),
        ("590.1, 10.3\n", "100"),
    ],
)
def test_without_a_wheel_it_is_compiled_for_these_gpus(machine: Path, gpus: str, architectures: str) -> None:
    result = setup(machine, INDEX_WITH_WHEEL="none", GPUS=gpus)
    assert result.status == 0, result.said
    call = build_call(result)
    assert call.endswith(f"| TRUE 48 {architectures}")
    assert {"--no-cache-dir", "--no-build-isolation", "--no-binary", "--require-hashes"} <= set(call.split())
    assert result.calls.index(call) > next(i for i, other in enumerate(result.calls) if "torch" in other)


@pytest.mark.parametrize(
    ("facts", "jobs"),
    [
        ({"MEMORY": "32"}, "3"),
        ({"MEMORY": "4"}, "1"),
        ({"LIMIT": "48000000000"}, "5"),
        ({"MEMORY": "32", "LIMIT": "48000000000"}, "3"),
        ({"CORES": "6"}, "3"),
        ({"CORES": "1"}, "1"),
        ({"MEMORY": "32", "MAX_JOBS": "7"}, "7"),
    ],
)
def test_compilers_at_once(machine: Path, facts: dict[str, str], jobs: str) -> None:
    call = build_call(setup(machine, FLASH_ATTN="build", **facts))
    assert call.split(" | ")[-1].split()[1] == jobs


def test_compiling_on_request_asks_for_no_wheel(machine: Path) -> None:
    result = setup(machine, FLASH_ATTN="build", FLASH_ATTN_CUDA_ARCHS="80;90")
    assert build_call(result).endswith(" 80;90") and not any(" download " in call for call in result.calls)


def test_what_is_there_stays(machine: Path) -> None:
    (machine / "flash_attn").touch()
    result = setup(machine)
    assert result.status == 0 and not any("flash" in call.split(" | ")[0] for call in result.calls)


def test_wheel_that_does_not_load(machine: Path) -> None:
    result = setup(machine, BROKEN="1")
    assert result.status == 1
    assert "does not load: ImportError: undefined symbol; compile it here with FLASH_ATTN=build" in result.said


def test_other_packages_that_contradict(machine: Path) -> None:
    result = setup(machine, COMPLAINT="foo 1 requires torch<2, but you have torch 2.11.0.")
    assert result.status == 1 and "use a new one:\nfoo 1 requires torch<2" in result.said


REFUSED = {
    "no driver": ({}, ("tools/nvidia-smi",), "no nvidia-smi here, so no NVIDIA driver; run this on a machine with GPUs"),
    "no GPU": ({"GPUS": "No devices were found\n"}, (), "nvidia-smi lists no GPU; ask the scheduler for some"),
    "no output": ({"GPUS": ""}, (), "nvidia-smi lists no GPU"),
    "dead driver": (
        {"GPUS": "NVIDIA-SMI has failed because it couldn't communicate", "SMI_STATUS": "9"},
        (),
        "nvidia-smi fails: NVIDIA-SMI has failed because it couldn't communicate",
    ),
    "old driver": (
        {"GPUS": "570.172.08, 9.0\n"},
        (),
        "driver is 570.172.08, and CUDA 13.0 needs 580.65.06 or newer; install a newer driver",
    ),
    "old GPU": ({"GPUS": "580.95.05, 9.0\n580.95.05, 7.5\n"}, (), "compute capability 7.5"),
    "old glibc": ({"GLIBC": "2.28"}, (), "is 2.28 here, and the wheels of requirements.lock need 2.31; use the Dockerfile"),
    "full disk": ({"FREE": "12"}, (), "/disk has 12 GB free, and this takes about "),
    "no headers": ({}, ("include/Python.h",), "python3.12-dev"),
    "no compiler": ({}, ("tools/gcc",), "build-essential"),
}  # fmt: skip
REFUSED_ALWAYS = {
    "Python 3.13": ({"VERSION": "3.13"}, (), "is Python 3.13; requirements.lock is for Python 3.11 and 3.12"),
    "no Python": ({"PYTHON": "/nowhere"}, (), "PYTHON=/nowhere is no interpreter that runs"),
    "system's Python": ({"MANAGED": "True"}, (), "make an environment with"),
    "no pip": ({"NO_PIP": "1"}, (), "has no pip; run"),
    "knob": ({"FLASH_ATTN": "maybe"}, (), "FLASH_ATTN=maybe is unknown; choose auto or build"),
    "number": ({"MAX_JOBS": "0"}, (), "MAX_JOBS=0 must be a whole number from 1 on"),
    "other number": ({"ANY_MACHINE": "yes"}, (), "ANY_MACHINE=yes must be 0 or 1"),
    "no nvcc": ({"FLASH_ATTN": "build"}, ("tools/cuda/bin/nvcc",), "there is no nvcc (looked for"),
    "old nvcc": ({"FLASH_ATTN": "build", "NVCC": "12.8"}, (), "is of CUDA 12.8 where torch is built with CUDA 13.0"),
}


@pytest.mark.parametrize("case", [*REFUSED, *REFUSED_ALWAYS])
def test_refused_before_anything_is_downloaded(machine: Path, case: str) -> None:
    facts, without, message = (REFUSED | REFUSED_ALWAYS)[case]
    result = setup(machine, without=without, **facts)
    assert result.status == 1 and message in result.said.splitlines()[-1]
    assert result.calls == []


@pytest.mark.parametrize("case", REFUSED)
def test_any_machine(machine: Path, case: str) -> None:
    """As for an image: the fault is named, and the installation continues."""
    facts, without, message = REFUSED[case]
    result = setup(machine, without=without, ANY_MACHINE="1", **facts)
    assert result.status == 0, result.said
    assert f"continuing with ANY_MACHINE=1 although {'' if case != 'old driver' else 'the NVIDIA '}" in result.said
    assert message in result.said


def test_image_without_a_gpu_compiles_for_all(machine: Path) -> None:
    result = setup(machine, without=("tools/nvidia-smi",), ANY_MACHINE="1", FLASH_ATTN="build")
    assert build_call(result).endswith("| TRUE 48 ") and "compiled for all that it supports" in result.said


def test_room_where_the_wheel_is_missing(machine: Path) -> None:
    """Compiling takes more, and that is checked once it is known."""
    enough = next(free for free in range(1, 100) if setup(machine, FREE=str(free)).status == 0)
    (machine / "flash_attn").unlink()
    result = setup(machine, FREE=str(enough), INDEX_WITH_WHEEL="none")
    assert result.status == 1 and f"/disk has {enough} GB free" in result.said
    assert not any(" install " in call for call in result.calls)


def test_usage(machine: Path) -> None:
    result = setup(machine, "--requirement")
    assert (result.status, result.calls) == (1, []) and "got --requirement" in result.said


def test_waits_for_another_call(machine: Path) -> None:
    with subprocess.Popen(
        ["flock", str(ROOT / "scripts/setup_gpu.sh"), "sleep", "1"], stdout=subprocess.DEVNULL
    ) as other:
        while subprocess.run(["flock", "--nonblock", str(ROOT / "scripts/setup_gpu.sh"), "true"]).returncode == 0:
            assert other.poll() is None
        result = setup(machine)
        assert other.poll() == 0
    assert result.status == 0 and "waiting for another call to finish" in result.said


def test_lock_is_complete() -> None:
    """Every pin of requirements.txt at its version, and far more than these; each with the hashes of its files."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    lock = locked()
    for pin in wanted:
        requirement, _ = lock[canonicalize_name(pin.name)]
        assert (requirement.specifier, requirement.extras) == (pin.specifier, pin.extras)
    assert len(lock) > 5 * len(wanted)
    for requirement, digests in lock.values():
        assert re.fullmatch(r"==[^*]+", str(requirement.specifier)) and requirement.marker is None
        assert digests and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", digest) for digest in digests)


def test_packages_that_are_imported_without_being_asked_for() -> None:
    """flash-attn's own requirements, and what verl asks for in extras only."""
    assert {"einops", "transferqueue", "cupy-cuda13x", "nvidia-nccl-cu13"} <= set(locked())


def test_lock_of_this_interpreters_packages_is_consistent() -> None:
    """Of the packages that are installed here in the locked version, the lock has all requirements within their ranges."""
    lock, checked = locked(), 0
    environment = {"python_version": "{}.{}".format(*sys.version_info), "extra": ""}
    for name, (requirement, _) in lock.items():
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        if not requirement.specifier.contains(found.version, prereleases=True):
            continue
        checked += 1
        for need in map(Requirement, found.requires or ()):
            if need.marker is None or need.marker.evaluate(environment):
                pinned, _ = lock[canonicalize_name(need.name)]
                version = str(pinned.specifier).removeprefix("==")
                assert need.specifier.contains(version, prereleases=True), (
                    f"{name} requires {need}, locked is {version}"
                )
    assert checked > 50


def test_image() -> None:
    lines = (ROOT / "Dockerfile").read_text()
    steps = [step for step in re.split(r"(?<!\\)\n", lines) if step and not step.startswith("#")]
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1", "libnuma1", "python3.12-dev", "build-essential"} <= set(
        next(step for step in steps if "apt-get" in step).split()
    )
    # What changes seldom first: system packages, Python packages, the project.
    order = [
        next(i for i, step in enumerate(steps) if part in step)
        for part in ("apt-get install", "COPY requirements.txt requirements.lock", "--requirements-only", "COPY . .")
    ]
    assert order == sorted(order) and "setup_gpu.sh" in steps[-1]
    assert "COPY" not in "".join(steps[: order[1]])
    # Nothing of the builder's gets into a layer: neither files nor arguments.
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".env*", ".netrc", ".venv", "data", "outputs", "results", "wandb"} <= set(ignored)
    assert not re.search(r"^(ARG|ENV).*(TOKEN|KEY|SECRET|PASSWORD)", lines, flags=re.M)


FLASH_ATTN_SETUP = """
import os
from setuptools import setup
import torch  # as the real one
names = ("FLASH_ATTENTION_FORCE_BUILD", "MAX_JOBS", "FLASH_ATTN_CUDA_ARCHS")
os.makedirs("flash_attn", exist_ok=True)
open("flash_attn/__init__.py", "w").write(f"built = {[os.environ.get(name) for name in names]!r}")
setup(name="flash-attn", version="2.8.3", packages=["flash_attn"], install_requires=["torch", "einops"])
"""


PKG_INFO = "Metadata-Version: 2.1\nName: flash_attn\nVersion: 2.8.3\n"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["wheel", "source"])
def test_with_the_real_pip(machine: Path, tmp_path: Path, way: str) -> None:
    """Into a real environment, from an index of small packages; called again, nothing is downloaded."""
    index, project = tmp_path / "index", tmp_path / "project"
    cuda = "class cuda:\n    is_available = staticmethod(lambda: True)\n"
    made = {
        "torch": make_wheel(index / "torch", "torch", "2.11.0", {"torch/__init__.py": cuda}),
        "einops": make_wheel(index / "einops", "einops", "1", {"einops.py": ""}),
        "setuptools": repack(index / "setuptools", "setuptools"),
    }
    wheel = make_wheel(tmp_path / "verl/flash-attn", "flash_attn", "2.8.3", {"flash_attn/__init__.py": "built = None"})
    source = index / "flash-attn/flash_attn-2.8.3.tar.gz"
    source.parent.mkdir()
    with tarfile.open(source, "w:gz") as archive:
        for name, text in {"setup.py": FLASH_ATTN_SETUP, "PKG-INFO": PKG_INFO}.items():
            information = tarfile.TarInfo(f"flash_attn-2.8.3/{name}")
            information.size = len(text)
            archive.addfile(information, io.BytesIO(text.encode()))
    made["flash-attn"] = source
    (project / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/setup_gpu.sh", project / "scripts")
    versions = {name: re.search(r"-(\d[\d.]*\d|\d)(-|\.tar)", path.name)[1] for name, path in made.items()}
    (project / "requirements.txt").write_text("flash-attn==2.8.3\n")
    (project / "requirements.lock").write_text(
        "# needs glibc 2.31\n"
        + "".join(
            f"{name}=={versions[name]} \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"
            for name, path in made.items()
        )
    )
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    tools = machine / "tools"
    (tools / "python").unlink()
    pypi, verls = Index(index), Index(wheel.parent.parent if way == "wheel" else tmp_path / "nothing")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "PYTHON"))}
    clean = {name: value for name, value in clean.items() if not name.lower().endswith("_proxy")}
    environment = clean | MACHINE | {
        "PATH": f"{tools}:{clean['PATH']}",
        "HERE": str(machine),
        "PYTHON": str(python),
        "CUDA_HOME": str(tools / "cuda"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": pypi.url,
        "PIP_NO_CACHE_DIR": "1",
        "FLASH_ATTN_INDEX": verls.url,
        "ANY_MACHINE": "0" if Path(sysconfig.get_path("include"), "Python.h").exists() else "1",
    }  # fmt: skip
    command = ["bash", str(project / "scripts/setup_gpu.sh"), "--requirements-only"]
    try:
        first = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert first.returncode == 0, first.stderr + first.stdout
        built = subprocess.check_output(
            [python, "-c", "import flash_attn; print(flash_attn.built)"], text=True, cwd="/"
        ).strip()
        assert built == ("None" if way == "wheel" else "['TRUE', '48', '90']")
        asked = len(pypi.asked) + len(verls.asked)
        again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert again.returncode == 0 and "is there" in again.stderr, again.stderr
        assert len(pypi.asked) + len(verls.asked) == asked
    finally:
        pypi.server.shutdown()
        verls.server.shutdown()
