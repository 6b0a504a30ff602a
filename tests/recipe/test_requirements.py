"""The pins: every lock has what is asked for, with hashes, and verl's own extras and the package's ranges contain them."""

from __future__ import annotations

import re
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from grail_advantage.verl_ext.checks import VERL_VERSION

ROOT = Path(__file__).parents[2]


def pins(file: Path) -> dict[str, str]:
    found = re.findall(r"^(\w[^ \[=]+).*==([^ \n]+)", file.read_text(), flags=re.M)
    return {canonicalize_name(package): version for package, version in found}


@pytest.mark.parametrize("name", ["requirements", "requirements-cpu"])
def test_lock_has_what_is_asked_for_and_hashes(name: str) -> None:
    asked, locked = pins(ROOT / f"{name}.in"), pins(ROOT / f"{name}.txt")
    if name == "requirements-cpu":  # every index has a CPU build of its own
        assert asked.pop("torch") and "torch" not in locked
    assert asked and asked.items() <= locked.items()
    blocks = re.split(r"(?<!\\)\n", (ROOT / f"{name}.txt").read_text().strip())[1:]
    assert len(blocks) == len(locked) and all(re.search(r"--hash=sha256:[0-9a-f]{64}$", block) for block in blocks)


def test_requirements_are_those_of_verl_and_of_the_package() -> None:
    """Where verl's own extras for vLLM and FSDP name one version, it is this one; its ranges and the package's contain ours."""
    flash_attn = re.findall(r"^flash_attn=(\S+)", (ROOT / "scripts/setup_gpu.sh").read_text(), flags=re.M)
    lines = (ROOT / "requirements.in").read_text().splitlines() + flash_attn
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    ours = {requirement.name.lower(): str(requirement.specifier).removeprefix("==") for requirement in wanted}
    assert len(ours) == len(wanted) and all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in ours.values())
    assert ours["verl"] == VERL_VERSION
    named = set()
    for requirement in map(Requirement, [*requires("verl"), *requires("grail-advantage")]):
        extras = ("", "verl-core", "vllm", "fsdp", "flash-attn-cu130torch211", "cupy-cu130", "verl")
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        if (version := ours.get(requirement.name.lower())) is not None:
            assert requirement.specifier.contains(version), f"{requirement} against {version}"
            named.add(requirement.name)
    expected = "torch vllm transformers flash-attn tensordict ray cupy-cuda13x TransferQueue"
    assert set(expected.split()) <= named
