"""The groups of ``pyproject.toml`` and their locks: the same versions, with hashes, within verl's and the package's ranges."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from grail_advantage.verl_ext.checks import VERL_VERSION

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = {
    "cpu": "requirements-cpu.txt",
    "gpu": "requirements.txt",
    "trl": "requirements-trl.txt",
    "smollm2": "requirements-smollm2.txt",
}


def pins(lines: list[str]) -> dict[str, str]:
    found = [re.match(r"(\w[^ \[=]+).*?==([^ ]+)", line) for line in lines]
    return {canonicalize_name(pin[1]): pin[2] for pin in found if pin}


def group(name: str) -> list[str]:
    """Requirements of a dependency group, those of included groups among them."""
    asked = PROJECT["dependency-groups"][name]
    return [line for entry in asked for line in ([entry] if isinstance(entry, str) else group(entry["include-group"]))]


@pytest.mark.parametrize("name", LOCKS)
def test_a_group_is_locked_with_hashes_and_without_addresses(name: str) -> None:
    text = re.sub(r"^#.*\n", "", (ROOT / LOCKS[name]).read_text(), flags=re.M)
    asked, locked = pins(group(name)), pins(text.splitlines())
    if name == "cpu":  # every index has a CPU build of its own
        assert asked.pop("torch").endswith("+cpu") and "torch" not in locked
    assert asked and asked.items() <= locked.items()
    blocks = re.split(r"(?<!\\)\n", text.strip())
    assert len(blocks) == len(locked)
    assert all(re.fullmatch(r"\S+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+", block) for block in blocks)


def test_versions_are_those_of_verl_and_of_the_package() -> None:
    """Where verl's own extras for vLLM and FSDP name one version, it is this one; its ranges and the package's contain ours."""
    flash_attn = re.findall(r"^flash_attn=(\S+)", (ROOT / "scripts/setup_gpu.sh").read_text(), flags=re.M)
    ours = pins(group("gpu") + flash_attn)
    assert ours["verl"] == VERL_VERSION
    extras = PROJECT["project"]["optional-dependencies"]
    ranges = [line for name in ("verl", "reward", "eval") for line in extras[name]]
    named = set()
    for requirement in map(Requirement, [*requires("verl"), *PROJECT["project"]["dependencies"], *ranges]):
        wanted = ("", "verl-core", "vllm", "fsdp", "flash-attn-cu130torch211", "cupy-cu130")
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in wanted):
            continue
        if (version := ours.get(canonicalize_name(requirement.name))) is not None:
            assert requirement.specifier.contains(version), f"{requirement} against {version}"
            named.add(canonicalize_name(requirement.name))
    expected = "torch vllm transformers flash-attn tensordict ray cupy-cuda13x transferqueue math-verify"
    assert set(expected.split()) <= named
