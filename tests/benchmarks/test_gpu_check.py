"""The GPU check without a GPU: its parts at toy size on the CPU, what it makes of failures, and its figures by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import benchmarks.gpu_check.__main__ as command
from benchmarks.gpu_check import engine, page, parts, plain, trl_runs
from benchmarks.gpu_check.outcome import FAILED, PASSED, Outcome
from benchmarks.gpu_check.parts import PARTS, ROOT, Part
from grail_advantage import GrailConfig


def outcome(folder: Path) -> Outcome:
    return Outcome(folder / "a.json", {"name": "a"})


def statuses(found: Outcome) -> list[str]:
    return [check["status"] for check in found.result["checks"]]


@pytest.mark.slow
@pytest.mark.parametrize("letter", PARTS)
def test_a_part_at_toy_size(tmp_path: Path, letter: str) -> None:
    result = parts.execute(PARTS[letter], tmp_path, "cpu", 4 * parts.LIMIT_SECONDS)
    assert result["status"] == PASSED and len(result["checks"]) > 4, result
    tables = {name: of["rows"] for name, of in result["figures"].items()}
    if letter == "a":
        assert set(tables["Precision, shape of toy"]) == set(plain.METHODS)
        assert all(row["above the parameters"] > 0 for row in tables["Passes, toy"].values())
    elif letter == "b":
        assert [set(tables[f"Run of {method}, by step"]) for method in trl_runs.METHODS] == [{"0", "1", "2"}] * 2
    else:
        peaks = tables["Peak memory, toy, checkpointing on"]
        parameters = 2 * 512 * 32 + 2 * (32 * (64 + 32 + 32 + 64) + 3 * 32 * 64 + 2 * 32 + 2 * 32) + 32
        state = 3 * 4 * parameters / 2**30  # float32 parameters and Adam's two moments
        assert all(row["GiB"] > state for row in peaks.values())
        assert {len(row["4 epochs, x GRPO"]) for row in tables["Seconds, toy, checkpointing on"].values()} == {1}
    assert f"`bash scripts/gpu_check.sh --dry {letter}`" in page.write_page(tmp_path).read_text()


@pytest.mark.slow
def test_what_the_parts_import() -> None:
    """Part a needs this package's own requirements alone, and part b no reasoning-gym."""
    heavy = (
        "{'verl', 'tensordict', 'omegaconf', 'hydra', 'matplotlib', 'pyarrow', 'ray', 'vllm', 'math_verify', 'pytest'}"
    )
    program = f"""
import sys, benchmarks.gpu_check.__main__, benchmarks.gpu_check.plain
print({heavy} & set(sys.modules))
sys.modules["reasoning_gym"] = None
import benchmarks.gpu_check.trl_runs
benchmarks.gpu_check.trl_runs.load_shipped()
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (found.returncode, found.stdout) == (0, "set()\n"), found.stdout + found.stderr


def test_carried_problems_are_those_of_the_task() -> None:
    for split in trl_runs.PROBLEMS:
        assert trl_runs.problem_file(split).read_text() == trl_runs.problem_lines(split)


def test_differences_by_hand() -> None:
    nan = float("nan")
    exact = SimpleNamespace(
        scores=torch.tensor([[nan, 1.0, 2.0, 3.0], [nan, 3.0, 1.0, nan]]),
        weights=torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 1.0, 9.0]]),
    )
    found = SimpleNamespace(
        scores=torch.tensor([[nan, 1.0, 3.0, 2.0], [nan, 9.0, 1.0, nan]]),
        weights=torch.tensor([[7.0, 1.5, 2.0, 3.0], [0.0, 1.0, 0.0, 0.0]]),
    )
    got = plain.compared(found, exact)  # type: ignore[arg-type]
    # Off by 0.5, 0, 0 and 0, 1; rank correlation 1 - 6 * 2 / (3 * 8) = 0.5 in the first row and 1 in the second.
    assert (got["mean"], got["largest"]) == (pytest.approx(0.3), 1.0)
    assert got["rank correlation of the scores"] == pytest.approx(0.75)


def test_weights_that_differ_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other call gets the weights of another method, as a wrong kernel might give other ones."""
    calls = iter(range(100))
    other = GrailConfig("robust", statistics="response", gate="correct")

    def wrong(model: Any, signal: Any, rows: Any, right: Any = plain.weights) -> Any:
        return right(model, signal if next(calls) % 2 else other, rows)

    monkeypatch.setattr(plain, "weights", wrong)
    found = outcome(tmp_path)
    plain.against_cpu(found, "cpu", plain.TOY)
    assert set(statuses(found)) == {FAILED}


def test_failures_stop_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A group that raises, a part that dies, one that passes, one that lacks a package."""
    bodies = {
        "dies": "def run(outcome, device):\n    with outcome.attempt('first'):\n        raise ValueError('it broke')\n"
        "    outcome.check('then', True, 'yes')\n    raise SystemExit(3)\n",
        "passes": "def run(outcome, device):\n    outcome.check('holds', True, 'yes')\n",
    }
    for name, body in bodies.items():
        (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    made = [Part("a", "", "dies", ()), Part("b", "", "passes", ()), Part("c", "", "passes", ("no_such_module",))]
    for module in (command, page):
        monkeypatch.setattr(module, "PARTS", {part.letter: part for part in made})
    assert command.main(["--dry", "--results", str(tmp_path / "results")]) == 1
    printed = capsys.readouterr().out
    assert "a: failed\n   failed: first (ValueError: it broke)\n   passed: then (yes)\n" in printed
    assert "runs to its end (exit status 3)\nb: passed\nc: not run\n" in printed
    assert "needs no_such_module" in (tmp_path / "results" / "page.md").read_text()
    assert command.main(["--dry", "--results", str(tmp_path / "results"), "b"]) == 0


def test_without_a_gpu_nothing_runs(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 1
    assert "sees no GPU on this machine: nothing was checked" in capsys.readouterr().err


def test_account_by_hand() -> None:
    """100 linear multiplications a token and 100 of attention: a backward to inputs takes 0.5 + 1.25 F, to all 1 + 1.25 F."""
    shape = {"hidden_size": 1, "intermediate_size": 2, "num_hidden_layers": 5, "vocab_size": 50}
    shape |= {"head_dim": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    assert engine.account(shape, 20, False) == pytest.approx(1 + 3 / 8 * 1.75 / (1 + 3.25))
    assert engine.account(shape, 20, True) == pytest.approx(1 + 3 / 8 * 2.75 / (1 + 4.25))
