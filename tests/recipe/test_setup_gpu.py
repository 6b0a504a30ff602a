"""The set-up for GPUs with this environment in place of what it installs: with and without a wheel of flash-attn."""

import os
import subprocess
import sys

import pytest

from tests.clone import ROOT

UV = """#!/bin/bash
echo "$@" >>{folder}/calls
[[ $* != *--default-index*flash-attn* || $WHEEL != none ]]
"""
PYTHON = """#!/bin/bash
[[ $* == *purelib* ]] && echo {folder} && exit
[[ $* == *"import flash_attn"* ]] && [[ $WHEEL == fits ]] && exit
exec {python} "$@"
"""


@pytest.mark.slow
@pytest.mark.parametrize("wheel", ["fits", "of another torch", "none"])
def test_it_ends_well_and_says_what_attention_there_is(tmp_path, wheel):
    """A wheel that cannot be imported is taken out again. verl's plug-in loads, and packages/verl-cpu can be imported; this
    takes ten seconds, so that the other two install the requirements alone."""
    for name, text in {"uv": UV, "python": PYTHON}.items():
        (tmp_path / name).write_text(text.format(folder=tmp_path, python=sys.executable))
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "WHEEL": wheel,
        "ANY_MACHINE": "1",
        "PYTHON": str(tmp_path / "python"),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    options = [] if wheel == "none" else ["--requirements-only"]
    command = ["bash", str(ROOT / "scripts/setup_gpu.sh"), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "ready after" in done.stderr, done.stderr
    calls = (tmp_path / "calls").read_text()
    # A wheel that was built for another torch is there, and cannot be imported.
    assert ("pip uninstall" in calls) == (wheel == "of another torch")
    assert ("kernels that torch itself has" in done.stderr) == (wheel != "fits")
    importable = [file.read_text().strip() for file in tmp_path.glob("*.pth")]
    assert importable == ([] if options else [str(ROOT / "packages/verl-cpu")])
