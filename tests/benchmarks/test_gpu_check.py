"""The GPU check without a GPU: its parts at toy size on the CPU, what it makes of failures, and its figures by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import benchmarks.gpu_check.__main__ as command
from benchmarks.gpu_check import outcome as outcomes
from benchmarks.gpu_check import plain, trl_runs
from benchmarks.gpu_check.__main__ import PARTS, ROOT
from benchmarks.gpu_check.outcome import FAILED, PASSED, Outcome
from benchmarks.made_up import SHAPES, random_model
from grail_advantage import Grail
from verl_cpu.tiny.task import Problem, random_problems

RECORD = {"name": "a: part", "versions": {}, "command": "", "date": "", "hardware": ""}


def outcome(folder: Path) -> Outcome:
    return Outcome(folder, RECORD)


def statuses(found: Outcome) -> list[str]:
    return [check["status"] for check in found.result["checks"]]


def run_part(letter: str, results: Path) -> dict[str, Any]:
    """The result of a part at toy size, by its command."""
    line = ["bash", str(ROOT / "scripts/gpu_check.sh"), "--dry", letter, "--results", str(results)]
    done = subprocess.run(line, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True)
    result = json.loads((results / f"{letter}.json").read_text())
    if "lacks" in done.stdout:
        pytest.skip(done.stdout[done.stdout.index("lacks") :])
    assert done.returncode == 0 and result["status"] == PASSED, done.stdout + done.stderr
    assert f"`bash scripts/gpu_check.sh --dry {letter}`" in (results / f"{letter}.md").read_text()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("letter", PARTS)
def test_a_part_at_toy_size(tmp_path: Path, letter: str) -> None:
    result = run_part(letter, tmp_path)
    tables = {name: of["rows"] for name, of in result["figures"].items()}
    if letter == "a":
        assert set(tables["Precision, toy, random"]) == set(plain.METHODS)
        assert all(row["above the parameters"] > 0 for row in tables["Passes, toy"].values())
    elif letter == "c":
        peaks = tables["Peak memory, toy, checkpointing on"]
        parameters = 2 * 512 * 32 + 2 * (32 * (64 + 32 + 32 + 64) + 3 * 32 * 64 + 2 * 32 + 2 * 32) + 32
        state = 3 * 4 * parameters / 2**30  # float32 parameters and Adam's two moments
        assert all(row["GiB"] > state for row in peaks.values())
        assert {len(row["4 epochs, x GRPO"]) for row in tables["Seconds, toy, checkpointing on"].values()} == {1}
    else:
        assert [set(tables[f"Run of {method}, by step"]) for method in trl_runs.METHODS] == [{"0", "1", "2"}] * 2
        assert tables["Price"]["grail"]["of them for the weights"] > 0
        assert letter == "b" or set(tables["Precision, SmolLM2-135M on worked solutions"]) == set(plain.JUDGED)
    if letter == "b":
        before, after = (load_file(trl_runs.RUNS / "b" / run / "model.safetensors") for run in ("model", "grail"))
        assert after.keys() == before.keys() and {value.dtype for value in after.values()} == {torch.float32}
        assert not any(value.equal(before[name].float()) for name, value in after.items()), "all parameters are trained"


def test_problems_are_those_of_the_task_and_held_out_ones_are_others() -> None:
    made = random_problems(768)
    assert made == random_problems(768) and len({chain.text for chain in made}) == 768
    for chain in made:
        assert 3 <= len(chain.steps) <= 6 and all(0 <= value <= 19 for value in chain.values)
        assert eval(chain.text) == chain.answer and Problem.parse(chain.text) == chain


def test_differences_by_hand() -> None:
    nan = float("nan")
    exact = SimpleNamespace(
        scores_BT=torch.tensor([[nan, 1.0, 2.0, 3.0], [nan, 3.0, 1.0, nan]]),
        weights_BT=torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 1.0, 9.0]]),
    )
    found = SimpleNamespace(
        scores_BT=torch.tensor([[nan, 1.0, 3.0, 2.0], [nan, 9.0, 1.0, nan]]),
        weights_BT=torch.tensor([[7.0, 1.5, 2.0, 3.0], [0.0, 1.0, 0.0, 0.0]]),
    )
    got = plain.compared(found, exact)  # type: ignore[arg-type]
    # Off by 0.5, 0, 0 and 0, 1; rank correlation 1 - 6 * 2 / (3 * 8) = 0.5 in the first row and 1 in the second.
    assert (got["mean"], got["largest"]) == (pytest.approx(0.3), 1.0)
    assert got["rank correlation of the scores"] == pytest.approx(0.75)


def test_weights_that_differ_and_that_bfloat16_does_not_keep_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another method at every other call, or once the parameters are bfloat16, as a faulty kernel might give them."""
    size, right, calls = plain.TOY, plain.weights, iter(range(100))
    rollouts = plain.incorrect(*size.weighed, size.prompt, "toy")
    for faulty in (False, True):
        found, model = outcome(tmp_path), random_model(SHAPES["toy"], "cpu", torch.float32)

        def weights(model: Any, signal: Any, rollouts: Any, faulty: bool = faulty) -> Any:
            wrong = faulty and next(model.parameters()).dtype == torch.bfloat16
            return right(model, plain.METHODS["oar_g, official"] if wrong else signal, rollouts)

        monkeypatch.setattr(plain, "weights", weights)
        plain.precision(found, "toy", model, rollouts, plain.JUDGED, (0.05, 0.98))
        assert set(statuses(found)) == {FAILED if faulty else PASSED}
    plain.precision(found, "toy", model, rollouts, plain.JUDGED, None)
    assert len(statuses(found)) == len(plain.JUDGED), "without limits nothing is judged"

    other = Grail("robust", statistics="response", gate="wrong", normalize_mass=False)
    monkeypatch.setattr(
        plain, "weights", lambda model, signal, of: right(model, signal if next(calls) % 2 else other, of)
    )
    found = outcome(tmp_path)
    plain.against_cpu(found, "cpu", size)
    assert set(statuses(found)) == {FAILED}


def test_failures_stop_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A group that raises, a part that raises, one that passes, one that lacks a package; one that dies keeps what it had."""
    body = """
def run(outcome, device):
    with outcome.attempt("first"):
        raise ValueError("it broke")
    outcome.check("then", True, "yes")
    {end}
"""
    ends = {"raises": "raise KeyError(3)", "lacks": "import no_such_module", "dies": "raise SystemExit(3)"}
    for name, end in ends.items():
        (tmp_path / f"{name}.py").write_text(body.format(end=end))
    (tmp_path / "passes.py").write_text("def run(outcome, device):\n    outcome.check('holds', True, 'yes')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(command, "PARTS", {name[0]: ("", name, "run") for name in (*ends, "passes")})
    for letter, status, said in (
        (
            "r",
            1,
            "   failed: first (ValueError: it broke)\n   passed: then (yes)\n   failed: the part as a whole (KeyError: 3)",
        ),
        ("p", 0, "p: passed"),
        ("l", 1, "not run: the part as a whole"),
    ):
        assert command.main([letter, "--dry", "--results", str(tmp_path)]) == status
        assert said in capsys.readouterr().out
    assert "lacks no_such_module" in (tmp_path / "l.md").read_text()
    with pytest.raises(SystemExit):
        command.main(["d", "--dry", "--results", str(tmp_path)])
    kept = json.loads((tmp_path / "d.json").read_text())
    assert kept["status"] == outcomes.UNFINISHED and [check["name"] for check in kept["checks"]] == ["first", "then"]


def test_without_a_gpu_nothing_runs(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["a"]) == 1
    assert "sees no GPU on this machine: nothing was checked" in capsys.readouterr().out


def test_part_a_needs_torch_transformers_and_pydantic_alone() -> None:
    others = (
        "verl",
        "tensordict",
        "omegaconf",
        "hydra",
        "pyarrow",
        "ray",
        "vllm",
        "math_verify",
        "pytest",
        "pandas",
        "datasets",
    )
    program = f"import sys, benchmarks.gpu_check.__main__, benchmarks.gpu_check.plain; print({{*{others}}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_several_figures_are_a_median_with_its_interval() -> None:
    """The true median is between the lowest and the highest of four unless all four are on one side of it."""
    assert outcomes.cell([1.0, 2.0, 4.0, 9.0]) == "3 (1 to 9, 88%)"
