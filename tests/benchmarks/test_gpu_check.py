"""The GPU check without a GPU: its parts at toy size on the CPU, what it makes of failures, and its figures by hand."""

import itertools
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional

import benchmarks.gpu_check.__main__ as command
from benchmarks.gpu_check import launch, machine, plain, trl_runs
from benchmarks.gpu_check.__main__ import PARTS, ROOT, Outcome
from benchmarks.setup import random_model
from grail_advantage import Grail
from tests.core.common import some


def outcome(folder: Path) -> Outcome:
    return Outcome(folder / "part.md", "")


def checked_dry(folder: Path, part: str, python: Path | str) -> subprocess.CompletedProcess:
    """A part of the check at toy size, by this interpreter."""
    line = ["bash", ROOT / "scripts/gpu_check.sh", "--dry", part, "--results", folder]
    environment = {**os.environ, "PYTHON": str(python)}
    return subprocess.run(line, env=environment, capture_output=True, text=True)


def in_place_of_python(folder: Path, commands: str) -> Path:
    """A script of shell commands that can be started as the interpreter is."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{commands}\n")
    python.chmod(0o755)
    return python


def tables(page: str) -> dict[str, dict[str, list[str]]]:
    """The rows of each table of a part's page, by its name and the row's first column."""
    named = {}
    blocks = page.split("\n\n")
    for title, block in itertools.pairwise(block.strip() for block in blocks):
        if block.startswith("|"):
            rows = [line.strip("| ").split(" | ") for line in block.splitlines()[2:]]
            named[title.partition(". ")[0].rstrip(".")] = {
                label: cells for label, *cells in rows
            }
    return named


TABLES = {
    "l": ["Seconds by stage"],
    "a": ["Precision, toy, random", "Passes, toy"],
    "c": ["Training side, toy, 4 at once", "Peak memory, toy, 1 at once"],
    "d": ["GRAIL's weights", "Run of grail, by step", "Run of uniform, by step"],
}
"""Some tables of each part."""


@pytest.mark.slow
@pytest.mark.parametrize("letter", some(PARTS, ("a",)))
def test_a_part_at_toy_size(tmp_path, letter):
    done = checked_dry(tmp_path, letter, sys.executable)
    page = (tmp_path / f"{letter}.md").read_text()
    # A package that this environment does not have, such as TRL, is no failure of the part.
    if "lacks" in page:
        pytest.skip(page[page.index("lacks") :])
    assert done.returncode == 0 and page.endswith("**passed**\n"), done.stdout + done.stderr
    page_tables = tables(page)
    for name in TABLES[letter]:
        # What could not be measured is empty, or inf; some stages of a run are not there at this size.
        rows = page_tables[name].values()
        assert sum(any(cell[:1].isdigit() for cell in cells) for cells in rows) > 2, rows


def test_differences_by_hand():
    nan = float("nan")
    exact = SimpleNamespace(
        scores=torch.tensor([[nan, 1.0, 2.0, 3.0], [nan, 3.0, 1.0, nan]]),
        weights=torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 1.0, 9.0]]),
    )
    rounded = SimpleNamespace(
        scores=torch.tensor([[nan, 1.0, 3.0, 2.0], [nan, 9.0, 1.0, nan]]),
        weights=torch.tensor([[7.0, 1.5, 2.0, 3.0], [0.0, 1.0, 0.0, 0.0]]),
    )
    got = plain.compared(rounded, exact)
    # Off by 0.5, 0, 0 and 0, 1; rank correlation 1 - 6 * 2 / (3 * 8) = 0.5 in the first row and 1 in the second.
    # The weights 1, 2, 3, 1, 1 have the mean 1.6 and the variance 3.2 / 4.
    assert got[plain.SHARE] == pytest.approx(0.3 / 0.8**0.5)
    assert got[plain.RANK] == pytest.approx(0.75)


def test_weights_that_differ_and_that_bfloat16_does_not_keep_are_found(
    tmp_path, monkeypatch
):
    """Of another method once the parameters are bfloat16, or at every other call, as a faulty kernel might give them."""
    right = plain.weights

    def faulty(model, method, rollouts):
        if model.dtype == torch.bfloat16:
            method = plain.METHODS["oar_g, official"]
        return right(model, method, rollouts)

    for weights, status in ((right, "passed"), (faulty, "failed")):
        checked = outcome(tmp_path)
        model = random_model("toy", "cpu", torch.float32)
        monkeypatch.setattr(plain, "weights", weights)
        plain.precision(checked, "toy", model, plain.incorrect("toy", 2, 80))
        assert checked.statuses == {status}

    # Not GRAIL's own options, so that every other call gives other weights.
    strange = Grail("robust", statistics="response", gate="wrong", normalize_mass=False)
    in_place = itertools.cycle([strange, None])
    monkeypatch.setattr(
        plain,
        "weights",
        lambda model, method, rows: right(model, next(in_place) or method, rows),
    )
    for part in ("precision", "passes"):
        monkeypatch.setattr(plain, part, lambda *_: None)
    checked = outcome(tmp_path)
    plain.run(checked, "cpu")
    assert checked.statuses == {"failed"}


def test_failures_stop_nothing_else(tmp_path, monkeypatch, capsys):
    """A group that raises, a part that raises, one that passes, one that lacks a package; one that dies keeps what it
    had."""
    body = """
def run(outcome, device):
    with outcome.attempt("first"):
        raise ValueError("it broke")
    outcome.check("then", True, "yes")
    {end}
"""
    # Each is a module of the package, and a part with its first letter.
    programs = {
        "raises": body.format(end="raise KeyError(3)"),
        "dies": body.format(end="raise SystemExit(3)"),
        "passes": "def run(outcome, device):\n    outcome.check('holds', True, 'yes')\n",
        "lacks": "import no_such_module",
    }
    for name, program in programs.items():
        (tmp_path / f"{name}.py").write_text(program)
    monkeypatch.setattr(sys.modules["benchmarks.gpu_check"], "__path__", [str(tmp_path)])
    monkeypatch.setattr(command, "PARTS", {name[0]: (name, "") for name in programs})
    raised = "failed: first (ValueError: it broke)\n- passed: then (yes)\n- failed: the part as a whole (KeyError: 3)"
    for letter, status, words in (
        ("r", 1, raised),
        ("p", 0, "**passed**"),
        ("l", 1, "lacks no_such_module"),
    ):
        assert command.main([letter, "--dry", "--results", str(tmp_path)]) == status
        assert words in capsys.readouterr().out
        assert words in (tmp_path / f"{letter}.md").read_text()
    with pytest.raises(SystemExit):
        command.main(["d", "--dry", "--results", str(tmp_path)])
    assert "- passed: then (yes)" in (tmp_path / "d.md").read_text()


def test_without_a_gpu_nothing_runs(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["a"]) == 1
    assert "sees no GPU on this machine: nothing was checked" in capsys.readouterr().out


def test_a_clone_that_is_not_installed_has_its_plug_ins(tmp_path):
    """verl imports the modules of the entry points all the same, from the clone's folders."""
    # It shows what it was started with.
    python = in_place_of_python(tmp_path, 'echo "$VERL_USE_EXTERNAL_MODULES $PYTHONPATH"')
    modules, path = checked_dry(tmp_path, "a", python).stdout.split()
    points = [
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"][
            "entry-points"
        ]["verl.plugins"]
        for folder in (".", "packages/verl-cpu")
    ]
    assert modules.split(",") == [module for point in points for module in point.values()]
    assert path.split(os.pathsep)[:2] == [str(ROOT), str(ROOT / "packages/verl-cpu")]


def test_the_callers_path_reaches_the_example(tmp_path, monkeypatch):
    # It writes its path down, and fails.
    python = in_place_of_python(tmp_path, f'echo "$PYTHONPATH" > {tmp_path}/path; exit 3')
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(trl_runs, "FOLDER", tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/packages/of/the/caller")
    checked = outcome(tmp_path)
    with checked.attempt("grail"):
        trl_runs.train_by(checked, "grail", 2, 1)
    path = (tmp_path / "path").read_text().strip()
    assert path.endswith(f"{os.pathsep}/packages/of/the/caller")
    assert "failed: grail: the run ends well (exit status 3)" in checked.path.read_text()


def test_log_probabilities_rounded_to_bfloat16_are_found(monkeypatch, capsys):
    """As verl's own are without flash-attn. The remedy is named, and the other checks still run."""
    from verl.utils import torch_functional

    monkeypatch.setattr(
        torch_functional,
        "logprobs_from_logits_v2",
        torch_functional.logprobs_from_logits_v2,
    )
    monkeypatch.setattr(
        torch_functional,
        "logprobs_from_logits",
        lambda *values: -functional.cross_entropy(*values, reduction="none").bfloat16(),
    )
    machine.main("cpu")
    lines = capsys.readouterr().out.splitlines()
    results = [json.loads(line) for line in lines if line.startswith("[")]
    assert results[0][:2] == ["attention", True]
    assert results[1][:2] == ["log probabilities", False]
    assert "VERL_DISABLE_FLASH_ATTN_CE=1" in results[1][2]


def test_a_launch_that_ends_at_once_is_a_failure_with_its_log(tmp_path, monkeypatch):
    # The script asks the interpreter for verl first.
    monkeypatch.setattr(sys, "executable", "/bin/false")
    launch.rehearse(checked := outcome(tmp_path), "cpu", tmp_path / "launch")
    assert checked.statuses == {"failed"}
    assert str(tmp_path / "launch/killed.log") in checked.path.read_text()
    assert "/bin/false has no verl" in (tmp_path / "launch/killed.log").read_text()


def test_two_million_bfloat16_rows_go_through_in_few_calls(monkeypatch):
    """By the name under which verl's engine calls it, without flash-attn; verl's own way, a call a row, takes minutes."""
    from verl.utils import torch_functional
    from verl.workers.engine.fsdp import transformer_impl

    from verl_cpu.patches import log_probabilities_in_few_calls

    monkeypatch.setattr(
        torch_functional,
        "logprobs_from_logits_v2",
        torch_functional.logprobs_from_logits_v2,
    )
    monkeypatch.setattr(torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", False)
    log_probabilities_in_few_calls()
    reduced = Mock(wraps=torch.logsumexp)
    monkeypatch.setattr(torch, "logsumexp", reduced)
    logits_NV = torch.randn(2_000_000, 16).bfloat16().requires_grad_()
    labels_N = torch.zeros(2_000_000, dtype=torch.int64)
    transformer_impl.logprobs_from_logits(logits_NV, labels_N).sum().backward()
    assert 1 < reduced.call_count <= 20


@pytest.mark.slow
def test_part_a_needs_torch_transformers_and_pydantic_alone():
    packages = (
        "verl tensordict omegaconf hydra pyarrow ray vllm math_verify pandas datasets"
    )
    imports = "sys, benchmarks.gpu_check.__main__, benchmarks.gpu_check.plain"
    program = f"import {imports}; print({set(packages.split())} & {{*sys.modules}})"
    command = [sys.executable, "-c", program]
    assert subprocess.check_output(command, cwd=ROOT, text=True) == "set()\n"
